# %% [markdown]
# # Exercises 10: pipelines
#
# Five tasks, 10 points, about three hours. Read chapter 10 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 10
#
# The grader runs the same checks and hidden ones with other sizes and other schedules. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, except those that say they are for checks, and not your other cells.
# - A schedule is a list per rank; an action is `("F", stage, microbatch)` or `("B", stage, microbatch)`. All counting starts at 0.
# - Tasks 1 to 4 run on one process and only say what ranks would do. Task 5 runs on ranks.
#
# There are p ranks and m microbatches. F of a stage needs F of the stage before for the same microbatch; B of a stage needs its own F, and B of the
# stage behind, if there is one. An action and what it needs on the same rank are in that order in the rank's list.
#
# GPipe is Huang et al. 2019 (arXiv:1811.06965), 1F1B and interleaving are Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).

# %% given="setup"
from collections import Counter, deque
from fractions import Fraction

import torch

from minitrain import collectives


def F(stage, microbatch):
    return ("F", stage, microbatch)


def B(stage, microbatch):
    return ("B", stage, microbatch)


def told(action):
    return f"{action[0]}{action[1]}.{action[2]}"


# %% judge="tools"
from itertools import accumulate

from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)
from minitrain.pipeline import schedule

draw = Draw()  # hidden checks draw sizes, schedules and costs


def written(*texts):
    """Lists of actions from texts such as "F0.0 B0.0"."""
    return [[(word[0], *map(int, word[1:].split("."))) for word in text.split()] for text in texts]


def random_schedule(stages, ranks, microbatches):
    """Stages on ranks as drawn, and an order in which all can be done: (lists, place), place[stage] the rank."""
    place = [draw.integer(0, ranks - 1) for _ in range(stages)]
    ready, lists = [F(0, i) for i in range(microbatches)], [[] for _ in range(ranks)]
    while ready:
        action = kind, stage, i = ready.pop(draw.integer(0, len(ready) - 1))
        lists[place[stage]].append(action)
        if kind == "F":
            ready.append(F(stage + 1, i) if stage + 1 < stages else B(stage, i))
        elif stage:
            ready.append(B(stage - 1, i))
    return lists, place


def expect_all_actions(said, wanted):
    """For each rank the same actions, in any order, and all of it can be done."""
    expect(
        isinstance(said, list) and len(said) == len(wanted),
        "a list for each rank",
        f"{len(wanted)} lists are wanted, one per rank",
    )
    for rank, (own, true) in enumerate(zip(said, wanted)):
        expect(
            Counter(own) == Counter(true),
            "every action once",
            f"each microbatch passes each stage forward and backward, on the rank that has it (seen at rank {rank} of {len(wanted)})",
        )
        first = {action: i for i, action in enumerate(own)}
        for kind, stage, i in own:
            expect(
                first[F(stage, i)] <= first[B(stage, i)],
                "a forward before its backward",
                f"{told(B(stage, i))} stands in front of {told(F(stage, i))} (seen at rank {rank})",
            )


def before_backward(own):
    """How many forwards stand before the first backward."""
    return next((i for i, action in enumerate(own) if action[0] == "B"), len(own))


def expect_turns(said, wanted):
    """Right actions, now in the right order; wanted runs some forwards ahead and then alternates."""
    stages = 1 + max(stage for own in wanted for _, stage, _ in own)
    units = 1 + max(i for own in wanted for _, _, i in own)
    stuck = ""
    try:
        schedule.check(schedule.Schedule("this", said, stages, units))
    except ValueError as error:
        stuck = str(error)
    expect(not stuck, "no rank waits for ever", stuck)
    for rank, (own, true) in enumerate(zip(said, wanted)):
        where = f"(seen at rank {rank} of {len(wanted)}, {sum(kind == 'F' for kind, _, _ in true)} forwards)"
        expect(
            before_backward(own) == before_backward(true),
            "forwards ahead",
            f"how many forwards come before this rank's first backward? {where}",
        )
        expect(
            [kind for kind, _, _ in own] == [kind for kind, _, _ in true],
            "one forward, one backward",
            f"they take turns until the forwards are used up {where}",
        )
        expect(
            own == true,
            "the order of stages and microbatches",
            f"forwards and backwards take turns as they should; which stage and microbatch is it each time? {where}",
        )


# %% [markdown]
# ## 1. What a rank holds, and 1F1B where memory is short (2 points)
#
# An F keeps the activations of one microbatch for one stage until its B. `held` says how many such activations each rank holds at most, for any schedule.
# A rank may have several stages; each counts the same.
#
# In 1F1B stage r is on rank r. Rank r runs p - r - 1 forwards *ahead*; then one forward and one backward take turns, the forward first; then come
# the backwards that are left. It runs ahead only as many as there are. So rank r holds one microbatch more than it runs ahead: p - r.
#
# Now memory is short: rank r has room for `most[r]` microbatches, at least 1, and there are p = len(most) ranks. `within` is 1F1B with as many forwards ahead
# as 1F1B has, or as many as the room allows, if these are fewer. A rank must not run ahead of the ranks before it, though, or it waits for ever. With
# `most = [1, 2, 2]` rank 1 has room for one forward ahead: it would wait for F0.1 of rank 0, which first wants B0.0, and that needs B1.0 of rank 1.
#
# `within(3, [1, 1])` is `F0 B0 F1 B1 F2 B2` on both ranks, and `within(3, [5, 5])` is 1F1B: rank 0 has F0 F1 B0 F2 B1 B2, rank 1 F0 B0 F1 B1 F2 B2.
#
# > **API** In: `lists`, a list per rank of tuples `("F" or "B", stage, microbatch)`; `m`, an int; `most`, a list of p ints.
# > Out: `held` a list of p ints; `within` a list of p lists of actions. `F(stage, i)` and `B(stage, i)` make actions.


# %% answer="within"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    ### BEGIN SOLUTION
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks
    ### END SOLUTION


def within(m, most):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists
    ### END SOLUTION


# %% judge="expect_within"
def expect_held(lists, wanted):
    hint = "an F takes one, a B gives one back; when is it most?"
    expect_equal(ask(held, lists), wanted, "the most at any time", hint)


def one_f_one_b(m, rooms):
    """1F1B of ranks that hold so many: a queue of forwards and what is under way."""
    lists = []
    for rank, room in enumerate(rooms):
        waiting, coming, own = deque(), deque(range(m)), []
        while coming or waiting:
            if coming and len(waiting) < room:
                waiting.append(coming[0])
                own.append(F(rank, coming.popleft()))
            else:
                own.append(B(rank, waiting.popleft()))
        lists.append(own)
    return lists


def expect_within(m, most):
    p = len(most)
    wanted = one_f_one_b(m, accumulate((min(room, p - r) for r, room in enumerate(most)), min))
    said = ask(within, m, most)
    expect_all_actions(said, wanted)
    for rank, own in enumerate(said):
        now = [0, *accumulate(1 if kind == "F" else -1 for kind, _, _ in own)]
        expect(
            max(now) <= most[rank],
            "no more than there is room for",
            f"rank {rank} has room for {most[rank]}; most = {most}",
        )
    expect_turns(said, wanted)


# %% check="within-held" points=1
# What a rank holds at most, whatever its list.
expect_held(written("F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"), [2, 2])
expect_held(written("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"), [2, 1])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
m = draw.integer(3, 9)  # the most comes after the first backward
expect_held(
    [[F(0, 0), B(0, 0)] + [F(0, i) for i in range(1, m)] + [B(0, i) for i in range(1, m)]], [m - 1]
)
for _ in range(4):
    lists, _ = random_schedule(draw.integer(1, 6), draw.integer(1, 4), draw.integer(1, 6))
    after = [[1 if kind == "F" else -1 for kind, _, _ in own] for own in lists]
    expect_held(lists, [max(sum(own[:i]) for i in range(len(own) + 1)) for own in after])
### END HIDDEN TESTS

# %% check="within-lists" points=1
# The whole lists, with room enough, with little room, and with fewer microbatches than ranks.
expect_within(3, [5, 5])
expect_within(3, [1, 1])
expect_within(5, [2, 3, 1])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p = draw.integer(4, 6)
expect_within(draw.integer(7, 12), [p] * p)
expect_within(draw.integer(8, 12), [p, p - 2, *[p] * (p - 2)])  # only rank 1 is short of room
expect_within(draw.integer(6, 9), [1, *[p] * (p - 1)])
expect_within(draw.integer(1, 3), [9] * p)
expect_within(3, [1])
for _ in range(3):
    expect_within(draw.integer(2, 9), [draw.integer(1, 5) for _ in range(draw.integer(2, 6))])
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Interleaved stages, in groups (2 points)
#
# Each rank has v stages of 1/v of the size: rank r has r, r + p, r + 2p and so on, its *chunks* 0, 1, 2, so that every microbatch goes round the ranks v times.
# In the chapter's interleaving microbatches take turns in groups of p. Here a group has g microbatches, g at least p, and m is a multiple of g. A rank does the
# forwards of a group chunk by chunk: its first chunk for these g microbatches, then its second one for the same g, up to the last; then comes the next group.
# Backwards are the same, but begin with the last chunk. g = p is the chapter's `interleaved`, and g = m runs all microbatches through a chunk before the next, as
# breadth-first does. In between, large groups gather sharded weights less often, and hold more.
#
# `order` has chunk and microbatch of each forward of a rank, in turn. In `interleaved` rank r runs 2(p - r - 1) + (v - 1)g forwards ahead, or all it has if these
# are fewer. Then a forward and a backward take turns, the *forward* first; then come the backwards that are left.
#
# p = 2, m = 6, v = 2, g = 3: the order begins (0, 0), (0, 1), (0, 2), (1, 0). Rank 0 has the stages 0 and 2 and does F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 F0.3 and so
# on; its backwards are B2.0 B2.1 B2.2 B0.0 and so on.
#
# > **API** In: ints; m is a multiple of g, and g is p or more. Out: `order` a list of m·v tuples `(chunk, microbatch)`;
# > `interleaved` a list of p lists of actions, which `F(stage, i)` and `B(stage, i)` make.


# %% answer="interleaved"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    ### BEGIN SOLUTION
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]
    ### END SOLUTION


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists
    ### END SOLUTION


# %% judge="expect_interleaved"
def true_order(m, v, g):
    """Where each belongs: its group first, then its chunk, then itself."""
    pairs = [(chunk, i) for i in range(m) for chunk in range(v)]
    return sorted(pairs, key=lambda pair: (pair[1] // g, pair))


def expect_order(m, v, g):
    said, wanted = ask(order, m, v, g), true_order(m, v, g)
    where = f"(seen with m = {m}, v = {v}, g = {g})"
    pairs = isinstance(said, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in said
    )
    expect(pairs, "a list of pairs", "(chunk, microbatch) for each forward")
    expect(
        Counter(said) == Counter(wanted),
        "every forward once",
        f"each microbatch passes each chunk {where}",
    )
    expect(
        [chunk for chunk, _ in said] == [chunk for chunk, _ in wanted],
        "the chunk of a forward",
        f"g microbatches for each chunk in turn; when does a chunk come again? {where}",
    )
    expect(
        said == wanted,
        "the microbatch of a forward",
        f"the same g microbatches for all chunks of a group, then the next g {where}",
    )


def expect_interleaved(p, m, v, g):
    wanted, forwards = [], true_order(m, v, g)
    for rank in range(p):
        ahead = min(len(forwards), 2 * (p - rank - 1) + (v - 1) * g)
        own = [F(chunk * p + rank, i) for chunk, i in forwards]
        back = [B((v - 1 - chunk) * p + rank, i) for chunk, i in forwards]
        turns = [action for pair in zip(own[ahead:], back) for action in pair]
        wanted.append(own[:ahead] + turns + back[len(own) - ahead :])
    said = ask(interleaved, p, m, v, g)
    expect_all_actions(said, wanted)
    expect_turns(said, wanted)


# %% check="interleaved-order" points=1
# Chunk and microbatch of each forward.
expect_order(6, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for v, g, groups in (
    (draw.integer(3, 5), draw.integer(2, 3), 3),
    (2, draw.integer(4, 7), draw.integer(2, 3)),
    (draw.integer(2, 4), 1, 3),
    (1, draw.integer(2, 5), 2),
    (3, 4, 1),
):
    expect_order(g * groups, v, g)
### END HIDDEN TESTS

# %% check="interleaved-lists" points=1
# The whole lists.
expect_interleaved(2, 6, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, g, groups, v in (
    (3, draw.integer(4, 5), 2, 2),
    (draw.integer(4, 5), 5, 1, draw.integer(1, 3)),
    (draw.integer(2, 3), 3, draw.integer(3, 4), 3),
    (4, 4, 2, 2),
    (1, 3, 2, 2),
):
    expect_interleaved(p, g * groups, v, g)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Put the messages in (1 point)
#
# From lists to programs. The activations that an F gives go to the rank of the next stage, the gradient that a B gives goes to the rank of the stage before, if
# these are on another rank. Neighbouring stages on one rank exchange nothing. A program is the rank's list with these steps put in:
#
#     ("send", kind, stage, microbatch, to)            the result of that action, to that rank
#     ("receive", kind, stage, microbatch, source)     the result of that action, from that rank
#
# The network: a send waits for nobody. A receive waits until a message from that rank is there, and takes **the first one that it has not taken**: messages
# have no names on the way, so what you call it must be what was sent first. A rank does its program step by step.
#
# Which stage is on which rank you can see in the lists: a stage is on one rank. Lists may be in any order in which everything can be done. So a message
# that this rank needs late may have been sent before one that it needs early. Actions keep their order.
#
# `[[F(0,0), B(0,0)], [F(1,0), B(1,0)]]` becomes `[[F(0,0), ("send","F",0,0,1), ("receive","B",1,0,1), B(0,0)], [("receive","F",0,0,0), F(1,0), B(1,0), ("send","B",1,0,0)]]`.
#
# > **API** In: a list of actions per rank. Out: a list per rank of actions and tuples `("send", kind, stage, microbatch, to)` and
# > `("receive", kind, stage, microbatch, source)`. It is a pure function: nothing is sent here.


# %% answer="with_messages"
def with_messages(lists):
    """For each rank its program, a list of actions, sends and receives."""
    ### BEGIN SOLUTION
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs
    ### END SOLUTION


# %% judge="play"
def play(programs, lists):
    """Does what the programs say, over links that keep the order; raises a Failure where that goes wrong."""
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}
    expect(
        isinstance(programs, list) and len(programs) == len(lists),
        "a program for each rank",
        f"{len(lists)} programs are wanted",
    )
    for rank, (program, own) in enumerate(zip(programs, lists)):
        expect(
            [step for step in program if step[0] in ("F", "B")] == own,
            "actions keep their order",
            f"a program is the list with messages put in (seen at rank {rank})",
        )
    wanted = Counter()
    for rank, own in enumerate(lists):
        for kind, stage, i in own:
            user = stage + 1 if kind == "F" else stage - 1
            if user in place and place[user] != rank:
                wanted[kind, stage, i, rank, place[user]] += 1
    sent = Counter(
        (*step[1:4], rank, step[4])
        for rank, program in enumerate(programs)
        for step in program
        if step[0] == "send"
    )
    received = Counter(
        (*step[1:4], step[4], rank)
        for rank, program in enumerate(programs)
        for step in program
        if step[0] == "receive"
    )
    for name, found in (("sent", sent), ("received", received)):
        for message in found:
            kind, stage, i, source, to = message
            expect(
                message in wanted,
                f"only what is needed is {name}",
                f"{told(message)} from rank {source} to rank {to}; who uses it, and where is that one?",
            )
        for message in wanted:
            expect(
                found[message] == 1,
                f"each message is {name} once",
                f"{told(message)}, {found[message]} times",
            )

    position, links, there = [0] * len(programs), {}, [set() for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                step = program[position[rank]]
                if step[0] == "send":
                    expect(
                        step[1:4] in there[rank],
                        "sent when it is there",
                        f"{told(step[1:4])} is sent before it is computed (seen at rank {rank})",
                    )
                    links.setdefault((rank, step[4]), deque()).append(step[1:4])
                elif step[0] == "receive":
                    waiting = links.get((step[4], rank))
                    if not waiting:
                        break
                    expect(
                        waiting[0] == step[1:4],
                        "first sent, first received",
                        f"rank {rank} takes {told(waiting[0])} from rank {step[4]} and calls it {told(step[1:4])}",
                    )
                    there[rank].add(waiting.popleft())
                else:
                    kind, stage, i = step
                    for before in (
                        [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                    ):
                        expect(
                            before[1] not in place or before in there[rank],
                            "received before it is used",
                            f"{told(step)} needs {told(before)} (seen at rank {rank})",
                        )
                    there[rank].add(step)
                position[rank] += 1
                moved = True
    stuck = [rank for rank, program in enumerate(programs) if position[rank] < len(program)]
    expect(
        not stuck,
        "no rank waits for ever",
        f"ranks {stuck} wait for messages that nobody will send before they go on",
    )


def expect_played(*cases):
    for lists, programs in zip(cases, ask_each(with_messages, [(lists,) for lists in cases])):
        play(programs, lists)


# %% check="with_messages-programs" points=1
# One message forward and one back at each boundary between ranks, none inside a rank, received in the order in which they are sent.
expect_played(written("F0.0 B0.0", "F1.0 B1.0"))
expect_played(written("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0"))
expect_played(written("F0.0 F0.1 B0.0 B0.1", "F1.1 F1.0 B1.1 B1.0"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p = draw.integer(3, 5)
turns = one_f_one_b(draw.integer(3, 7), range(p, 0, -1))
sizes = [(draw.integer(3, 7), draw.integer(2, 4), 1) for _ in range(4)]
expect_played(turns, *(random_schedule(*size)[0] for size in sizes), written("F0.0 F1.0 B1.0 B0.0"))
sizes = [(draw.integer(2, 6), draw.integer(2, 3), draw.integer(3, 6)) for _ in range(6)]
expect_played(*(random_schedule(*size)[0] for size in sizes))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. When does everything happen? (2 points)
#
# The simulator. An action starts as soon as its rank has done what stands in front of it in its list, and all that it needs is done, plus `send` if that was
# done on another rank. `costs` is `{"F": .., "B": .., "send": ..}`, whole numbers. Return
#
# - `starts`: for each rank the start of each action of its list,
# - `makespan`: the end of the last action of all,
# - `share`: the bubble share, that is the share of all ranks' time, from 0 to the makespan, in which they do nothing. An exact `Fraction`.
#
# If ranks wait for each other in a circle, raise a `ValueError` of one line.
#
# `[[F(0,0), B(0,0)], [F(1,0), B(1,0)]]` with F = 1, B = 2, send = 1: starts are `[[0, 6], [2, 3]]`, the makespan is 8, the bubble share 5/8.
#
# > **API** In: a list of actions per rank; `costs`, a dict of three ints. Out: a tuple `(starts, makespan, share)`: a list of p lists of ints,
# > an int, a `Fraction`. Raises `ValueError` where ranks wait in a circle, and only there. `told(action)` is its name in text.


# %% answer="simulate"
def simulate(lists, costs):
    """starts (a list of lists), makespan, bubble share"""
    ### BEGIN SOLUTION
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(
            f"ranks {stuck} wait for each other; {told(lists[stuck[0]][len(starts[stuck[0]])])} never starts"
        )
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)
    ### END SOLUTION


# %% driver="simulated"
def simulated(lists, costs):
    """What the answer finds as data; the message of a ValueError."""
    try:
        starts, makespan, share = simulate(lists, costs)
    except ValueError as error:
        return str(error)
    exact = isinstance(share, (int, Fraction))
    fraction = [share.numerator, share.denominator] if exact else None
    return {"starts": starts, "makespan": makespan, "share": fraction}


# %% judge="expect_simulated"
def found_in(lists, costs):
    said = ask(simulated, lists, costs)
    hint = "a ValueError, but all of it can be done"
    expect(not isinstance(said, str), "no refusal without need", hint)
    return said


def expect_times(lists, costs, starts):
    said = found_in(lists, costs)
    expect(
        [len(own) for own in said["starts"]] == [len(own) for own in lists],
        "a start for each action",
        "a list for each rank, in the order of its actions",
    )
    for rank, (own, true) in enumerate(zip(said["starts"], starts)):
        for action, found, time in zip(lists[rank], own, true):
            where = f"(seen at {told(action)} on rank {rank}, costs {costs})"
            expect(
                found >= time,
                "not before it can start",
                f"its rank must be free, and what it needs must be done and, from another rank, have arrived {where}",
            )
            expect(found <= time, "as soon as it can start", f"what does it wait for? {where}")
    ends = [
        start + costs[action[0]]
        for own, true in zip(lists, starts)
        for action, start in zip(own, true)
    ]
    hint = "the end of the last action of all ranks"
    expect_equal(said["makespan"], max(ends), "the makespan", hint)


def expect_share(lists, costs, wanted):
    said = found_in(lists, costs)
    expect(said["share"] is not None, "an exact fraction", "a Fraction, not a float")
    expect(
        Fraction(*said["share"]) == wanted,
        "the bubble share",
        "idle time of all ranks over all time of all ranks, from 0 to the makespan for each of them",
    )


def expect_stuck(lists, property="a refusal"):
    said = ask(simulated, lists, {"F": 1, "B": 2, "send": 0})
    own = "a backward stands in front of its own forward, so it never starts"
    circle = "ranks wait in a circle, so some actions never start"
    expect(
        isinstance(said, str),
        property,
        f"{circle if property == 'a refusal' else own}: raise a ValueError",
    )
    expect(said.strip() and "\n" not in said, "a refusal", "say in one line who waits")


# %% check="simulate-times" points=1
# The start of every action, and the end of the last.
expect_times(written("F0.0 B0.0", "F1.0 B1.0"), {"F": 1, "B": 2, "send": 1}, [[0, 6], [2, 3]])
expect_times(
    written("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"),
    {"F": 1, "B": 2, "send": 0},
    [[0, 1, 4, 7], [1, 2, 4, 5]],
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def true_starts(lists, costs):
    """Later and later, until nothing is too early."""
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    start = {action: 0 for action in place}
    while True:
        before = dict(start)
        for own in lists:
            for i, (kind, stage, j) in enumerate(own):
                needs = [own[i - 1]] if i else []
                needs += [
                    need
                    for need in (
                        [F(stage - 1, j)] if kind == "F" else [F(stage, j), B(stage + 1, j)]
                    )
                    if need in place
                ]
                start[own[i]] = max(
                    [
                        0,
                        *(
                            start[need]
                            + costs[need[0]]
                            + costs["send"] * (place[need] != place[own[i]])
                            for need in needs
                        ),
                    ]
                )
        if start == before:
            return [[start[action] for action in own] for own in lists]


for number in range(6):
    lists, _ = random_schedule(draw.integer(2, 6), draw.integer(2, 4), draw.integer(2, 5))
    costs = {
        "F": draw.integer(1, 9),
        "B": draw.integer(1, 9),
        "send": draw.integer(1, 9) if number % 2 else 0,
    }
    expect_times(lists, costs, true_starts(lists, costs))
### END HIDDEN TESTS

# %% check="simulate-share" points=1
# The bubble share, exactly, and a refusal if ranks wait in a circle.
expect_share(written("F0.0 B0.0", "F1.0 B1.0"), {"F": 1, "B": 2, "send": 1}, Fraction(5, 8))
expect_stuck(written("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(3):
    p, m, idle = draw.integer(2, 6), draw.integer(1, 9), draw.integer(0, 2)
    lists = [[(kind, rank, i) for kind in "FB" for i in range(m)] for rank in range(p)]
    costs = {"F": draw.integer(1, 9), "B": draw.integer(1, 9), "send": 0}
    expect_share(lists + [[]] * idle, costs, 1 - Fraction(m * p, (m + p - 1) * (p + idle)))
for ranks in (draw.integer(3, 6), draw.integer(2, 4)):
    lists, place = random_schedule(draw.integer(3, 8), ranks, 1)  # one action after the other
    costs = {kind: draw.integer(1, 5) for kind in ("F", "B", "send")}
    work = len(place) * (costs["F"] + costs["B"])
    hops = sum(one != other for one, other in zip(place, place[1:]))
    time = work + 2 * hops * costs["send"]
    expect_share(lists, costs, 1 - Fraction(work, ranks * time))
own = "a backward waits for its own forward"
expect_stuck(written("F0.0 F0.1 B0.0 B0.1", "B1.0 F1.0 F1.1 B1.1"), own)
expect_stuck(written("B0.0 F0.0"), own)
m = draw.integer(3, 6)
lists = [
    [F(0, i) for i in range(m - 1)] + [B(0, 0), F(0, m - 1)] + [B(0, i) for i in range(1, m)],
    [F(1, i) for i in range(m)] + [B(1, i) for i in range(m)],
]
expect_stuck(lists)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. A stage on real ranks (3 points)
#
# Now tensors. Rank r of p has stage r, and `train_step` is one step of training of its stage, up to the gradients, under any schedule. It does the actions of its list one
# by one:
#
# - **F** of microbatch i: `stage(x, i)`. On rank 0 x is the tokens of the microbatch; on every other rank it is what arrived from the rank before, as the start of
#   a graph of this rank's own. What comes out is sent on as soon as it is there. On the last rank it is the logits, and `loss_sum(logits, targets)` is the sum of the losses
#   of those targets that count, that is, are not -1.
# - **B** of microbatch i: backward through this stage's graph for that microbatch, from the gradient that arrived from the rank behind; on the last rank from the
#   loss. The gradient of the stage's *input* goes back as soon as it is there.
#
# The loss of the step is the sum over **all** targets of the batch that count, divided by their number. Microbatches have different numbers of them.
#
# With `tied` the embedding and the output matrix are one table, which stands on the first rank and on the last: each has `params["table"]`, sees one use of it, and needs
# the gradient of both uses. They exchange what they have found once, after the last backward. With p = 1 there is nothing to exchange.
#
# When `train_step` returns, each parameter's `.grad` is that of the whole batch, and nothing is under way. A microbatch's tensors are let go after its B: with 1F1B a rank
# never holds more than p - r of them.
#
# > **API** In: `stage`, a function; `params`, `{name: Parameter}`, the ones `stage` uses; `actions`, `[("F", r, i), ...]`; `batch`, `[(tokens, targets), ...]`, int64 `[b, T]`,
# > targets -1 where none; `like`, a tensor with the shape and dtype of what crosses a boundary; `tied`, a bool. Out: the loss, a number, on the last rank; `None` elsewhere.
# > `collectives.send(x, to, group, async_op=True)` returns a handle; its `.wait()` returns when the receiver has asked for x. Without `async_op` it waits at once.
# > `collectives.receive(like, source, group)` returns the tensor that was sent first among those from `source` not yet received; it has no graph.
# > `group.rank()`, `group.size()`; no other communication is there.


# %% given="loss_sum"
def loss_sum(logits, targets):
    """The sum of the losses of all targets that count; logits [b, T, V], targets [b, T], -1 where none."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )


# %% answer="train_step"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    ### BEGIN SOLUTION
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None
    ### END SOLUTION


# %% [markdown]
# How is the order of actions checked, without a clock? The `stage` that your function is handed adds numbers to its input, and to that input's gradient, which a rank cannot know before
# the action's turn: they are fetched from outside, and the moment is written down among your messages. One process adds the same numbers.


# %% driver="on_a_rank"
class Fetched(torch.autograd.Function):
    """x plus what is fetched for F, and its gradient plus what is fetched for B."""

    @staticmethod
    def forward(ctx, x, i, group):
        ctx.asked = i, group
        return x + group.fetch(f"F {i}", x)

    @staticmethod
    def backward(ctx, dy):
        i, group = ctx.asked
        return dy + group.fetch(f"B {i}", dy), None, None


def on_a_rank(weights, actions, batch, like, tied, watched, group):
    """The answer with a stage of this rank -> the loss, {name: gradient}."""
    rank, last = group.rank(), group.size() - 1
    params = {name: torch.nn.Parameter(x) for name, x in weights.items()}
    del weights

    def stage(x, i):
        x = params["table"][x] if rank == 0 else x
        x = Fetched.apply(x, i, group) if watched else x
        x = x + torch.tanh(x * params["weight"])
        return x @ params["table" if tied else "head"].T if rank == last else x

    loss = train_step(stage, params, actions, batch, like, tied, group)
    grads = {name: param.grad for name, param in params.items()}
    return float(loss) if rank == last else 0.0, grads


# %% judge="expect_step"
class Given(torch.autograd.Function):
    """x plus one tensor, its gradient plus another."""

    @staticmethod
    def forward(ctx, x, more, back):
        ctx.back = back
        return x + more

    @staticmethod
    def backward(ctx, dy):
        return dy + ctx.back, None, None


def batch_of(m, rows, length, vocab):
    """Microbatches with very different numbers of targets that count."""
    tokens = torch.tensor(
        [[draw.integer(0, vocab - 1) for _ in range(length + 1)] for _ in range(m * rows)]
    )
    targets = tokens[:, 1:].clone()
    for row in range(m * rows):
        targets[row, 1 + row * length // (m * rows) :] = -1
    return list(zip(tokens[:, :-1].split(rows), targets.split(rows)))


def weights_of(p, width, vocab, tied):
    """For each rank its parameters; a tied table is on both ends."""
    weights = [{"weight": draw.real(width)} for _ in range(p)]
    weights[0]["table"] = draw.real(vocab, width)
    weights[-1] |= {"table": weights[0]["table"]} if tied else {"head": draw.real(vocab, width)}
    return weights


def one_process(weights, batch, tied, numbers):
    """The whole model, with the loss of the whole batch: the loss, and for each rank {name: gradient}."""
    params = [{name: x.clone().requires_grad_() for name, x in own.items()} for own in weights]
    if tied:
        params[-1]["table"] = params[0]["table"]
    total, valid = 0.0, sum(int((targets >= 0).sum()) for _, targets in batch)
    for i, (tokens, targets) in enumerate(batch):
        x = params[0]["table"][tokens]
        for own, given in zip(params, numbers):
            x = Given.apply(x, given[f"F {i}"], given[f"B {i}"])
            x = x + torch.tanh(x * own["weight"])
        loss = loss_sum(x @ params[-1]["table" if tied else "head"].T, targets) / valid
        loss.backward()
        total += loss.item()
    return total, [{name: x.grad for name, x in own.items()} for own in params]


def expect_trace(outcome, lists, tied, table_bytes, like):
    """What each rank fetched and sent, in order, is what its list says."""
    last = len(lists) - 1
    for rank, actions in enumerate(lists):
        mine = [event for event in outcome.events if event.rank == rank]
        fetched = [event.name for event in mine if event.kind == "fetch"]
        expect(
            fetched == [f"{kind} {i}" for kind, _, i in actions],
            "the order of the list",
            f"the actions are done one by one, in the order of `actions` (seen at rank {rank})",
        )
        wanted = []
        for kind, _, i in actions:
            to = rank + 1 if kind == "F" else rank - 1
            wanted += [f"{kind} {i}", *([(to, like.nbytes)] if 0 <= to <= last else [])]
        if tied and last and rank in (0, last):
            wanted.append((last - rank, table_bytes))
        said = [
            event.name if event.kind == "fetch" else (event.peer, event.bytes)
            for event in mine
            if event.kind in ("fetch", "send")
        ]
        expect(
            Counter(said) == Counter(wanted),
            "what is sent",
            f"one tensor like `like` per boundary and microbatch, each way; tied ends exchange one table (seen at rank {rank})",
        )
        expect(
            said == wanted,
            "sent at once",
            f"a result is sent before the next action begins, and the table when all is done (seen at rank {rank})",
        )


def expect_step(lists, m, tied=False):
    p, rows, length, width, vocab = len(lists), 2, draw.integer(5, 7), draw.integer(3, 5), 9
    batch, weights = batch_of(m, rows, length, vocab), weights_of(p, width, vocab, tied)
    like = torch.zeros(rows, length, width, dtype=torch.float64)
    numbers = [
        {f"{kind} {i}": draw.real(*like.shape) for kind in "FB" for i in range(m)} for _ in lists
    ]
    inputs = [(own, list(actions), batch, like, tied, True) for own, actions in zip(weights, lists)]
    outcome = run_on_ranks(on_a_rank, inputs, secrets=numbers)
    expect_trace(outcome, lists, tied, vocab * width * 8, like)
    loss, grads = one_process(weights, batch, tied, numbers)
    expect_equal(
        outcome.results[-1][0],
        loss,
        "the loss",
        "all targets of the batch that count, and their number in the whole batch",
        atol=1e-9,
    )
    for rank, ((_, said), wanted) in enumerate(zip(outcome.results, grads, strict=True)):
        for name, grad in wanted.items():
            ends = tied and name == "table"
            expect_equal(
                said.get(name),
                grad,
                "the tied table" if ends else "gradients of the whole batch",
                f"both uses of the table count, on both ends (seen at rank {rank})"
                if ends
                else f"one divisor, all microbatches, and each stage gives the gradient of its input back (seen at {name} of rank {rank})",
                atol=1e-9,
            )
    if tied:
        ends = [outcome.results[end][1]["table"] for end in (0, -1)]
        hint = "both ends add the same two tensors"
        expect_equal(ends[0], ends[1], "copies of the table agree to the bit", hint)


def all_then_all(p, m, backwards=1):
    """All forwards, then all backwards; with -1 the last microbatch comes back first."""
    return [
        [F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)[::backwards]]
        for rank in range(p)
    ]


def expect_light(m):
    """1F1B of two ranks, with 8 MB for each tensor of a microbatch: some 200 MB are used, and 350 if outputs stay."""
    rows, length, width = 1, 1 << 11, 1 << 9
    batch, weights = batch_of(m, rows, length, 4), weights_of(2, width, 4, False)
    like = torch.zeros(rows, length, width, dtype=torch.float64)
    lists = one_f_one_b(m, [2, 1])
    inputs = [
        (own, list(actions), batch, like, False, False) for own, actions in zip(weights, lists)
    ]
    outcome = run_on_ranks(on_a_rank, inputs, budget_bytes=264 << 20)
    numbers = [{f"{kind} {i}": 0.0 for kind in "FB" for i in range(m)} for _ in lists]
    loss, grads = one_process(weights, batch, False, numbers)
    hint = "first let it be right"
    expect_equal(outcome.results[-1][0], loss, "the loss", hint, atol=1e-9)
    for (_, said), wanted in zip(outcome.results, grads, strict=True):
        expect_equal(
            said.get("weight"), wanted["weight"], "gradients of the whole batch", hint, 1e-9
        )


# %% check="train_step-equal" points=1
# Loss, gradients, messages and order, with an output matrix of its own on the last rank.
expect_step(one_f_one_b(3, [2, 1]), 3)
expect_step(all_then_all(2, 2), 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p, m = draw.integer(3, 4), draw.integer(4, 5)
expect_step(one_f_one_b(m, range(p, 0, -1)), m)
expect_step(all_then_all(3, m, -1), m)
expect_step(one_f_one_b(2, [1]), 2)
### END HIDDEN TESTS

# %% check="train_step-tied" points=1
# One table on both ends.
expect_step(one_f_one_b(3, [2, 1]), 3, tied=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p, m = draw.integer(3, 4), draw.integer(3, 5)
expect_step(one_f_one_b(m, range(p, 0, -1)), m, tied=True)
expect_step(all_then_all(2, m), m, tied=True)
expect_step(one_f_one_b(3, [1]), 3, tied=True)
### END HIDDEN TESTS

# %% check="train_step-memory" points=1
# A microbatch's tensors are let go after its backward, on every rank.
expect_light(20)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p, m = draw.integer(2, 4), draw.integer(5, 6)
expect_step(one_f_one_b(m, range(p, 0, -1)), m, tied=draw.choice([True, False]))
### END HIDDEN TESTS
