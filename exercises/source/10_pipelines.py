# %% [markdown]
# # Exercises 10: pipelines
#
# Five tasks, 10 points, about two hours. Read chapter 10 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 10
#
# The grader runs the same checks and hidden ones with other sizes and other schedules. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A schedule is a list for each rank; an action is `("F", stage, microbatch)` or `("B", stage, microbatch)`. All counting starts at 0.
# - All functions here run on one process and only say what ranks would do.
#
# There are p ranks and m microbatches. F of a stage needs F of the stage before for the same microbatch; B of a stage needs its own F, and B of the
# stage behind, if there is one. An action and what it needs on the same rank are in that order in the rank's list.
#
# GPipe is Huang et al. 2019 (arXiv:1811.06965), 1F1B and interleaving are Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).

# %% given="setup"
from collections import Counter, deque
from fractions import Fraction


def F(stage, microbatch):
    return ("F", stage, microbatch)


def B(stage, microbatch):
    return ("B", stage, microbatch)


def told(action):
    return f"{action[0]}{action[1]}.{action[2]}"


# %% judge="tools"
from minitrain.course.grading.checks import Draw, ask, ask_each, expect, expect_equal

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
    """For each rank the same actions, in any order."""
    expect(
        isinstance(said, list) and len(said) == len(wanted),
        "a list for each rank",
        f"{len(wanted)} lists are wanted, one a rank",
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


def ahead(own):
    """How many forwards stand before the first backward."""
    return next((i for i, action in enumerate(own) if action[0] == "B"), len(own))


def expect_turns(said, wanted):
    """Right actions, now in the right order; wanted runs some forwards ahead and then alternates."""
    for rank, (own, true) in enumerate(zip(said, wanted)):
        where = f"(seen at rank {rank} of {len(wanted)}, {sum(kind == 'F' for kind, _, _ in true)} forwards)"
        expect(
            ahead(own) == ahead(true),
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
# ## 1. All forwards, then all backwards (2 points)
#
# GPipe with one stage a rank: stage r is on rank r. Each rank does its forwards in the order of the microbatches, then its backwards in the same order.
#
# And `held` says what a schedule, any schedule, needs: an F keeps activations of one microbatch for one stage, until its B. Return for each rank the most
# that it holds at any time. A rank may have several stages, each counts the same.
#
# Two ranks, two microbatches: `[[F(0,0), F(0,1), B(0,0), B(0,1)], [F(1,0), F(1,1), B(1,0), B(1,1)]]`, which hold `[2, 2]`.


# %% answer="gpipe"
def gpipe(p, m):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]
    ### END SOLUTION


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


# %% judge="expect_gpipe"
def expect_gpipe(p, m, wanted):
    said = ask(gpipe, p, m)
    expect_all_actions(said, wanted)
    for rank, own in enumerate(said):
        expect(
            ahead(own) == m,
            "forwards first",
            f"all forwards come before the first backward (seen at rank {rank})",
        )
    hint = "backwards too begin with microbatch 0"
    expect_equal(said, wanted, "in the order of the microbatches", hint)


def expect_held(lists, wanted):
    hint = "an F takes one, a B gives one back; when is it most?"
    expect_equal(ask(held, lists), wanted, "the most at any time", hint)


# %% check="gpipe-lists" points=1
# All forwards, then all backwards, for any p and m.
expect_gpipe(2, 2, written("F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"))
expect_gpipe(3, 1, written("F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p in (1, draw.integer(2, 5), draw.integer(6, 9)):
    m = draw.integer(1, 9)
    expect_gpipe(p, m, [[(kind, r, i) for kind in "FB" for i in range(m)] for r in range(p)])
### END HIDDEN TESTS

# %% check="gpipe-held" points=1
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

# %% [markdown]
# ## 2. One forward, one backward (2 points)
#
# 1F1B has the same stages and the same bubble, and holds less: rank r holds p - r microbatches at most, and never more than there are. It runs just as many
# forwards as that before its first backward. Then, as long as there are forwards left, one forward and one backward take turns; then come the
# backwards that are left.
#
# `before_backward` is the number of forwards before the first backward. For p = 2 and m = 3, rank 0 is F0 F1 B0 F2 B1 B2 and rank 1 is F0 B0 F1 B1 F2 B2:
# before_backward is 2 and 1.


# %% answer="one_f_one_b"
def before_backward(rank, p, m):
    """An int."""
    ### BEGIN SOLUTION
    return min(p - rank, m)
    ### END SOLUTION


def one_f_one_b(p, m):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        first = before_backward(rank, p, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists
    ### END SOLUTION


# %% judge="expect_one_f_one_b"
def expect_before(p, m, wanted):
    said = ask_each(before_backward, [(rank, p, m) for rank in range(p)])
    where = f"(seen with {p} ranks, {m} microbatches)"
    expect(all(type(n) is int for n in said), "whole numbers", "an int for each rank")
    expect(max(said) <= m, "no more than there are", f"there are only {m} microbatches")
    expect_equal(
        said,
        wanted,
        "forwards before the first backward",
        f"the first microbatch goes to the last rank and comes back meanwhile {where}",
    )


def expect_one_f_one_b(p, m, wanted):
    said = ask(one_f_one_b, p, m)
    expect_all_actions(said, wanted)
    expect_turns(said, wanted)


# %% check="one_f_one_b-before" points=1
# How many forwards come before the first backward.
expect_before(2, 3, [2, 1])
expect_before(1, 4, [1])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, m in (
    (draw.integer(3, 8), draw.integer(8, 20)),
    (draw.integer(4, 8), draw.integer(1, 3)),
    (5, 5),
):
    expect_before(p, m, [m if p - rank > m else p - rank for rank in range(p)])
### END HIDDEN TESTS

# %% check="one_f_one_b-lists" points=1
# The whole lists, also with fewer microbatches than ranks.
expect_one_f_one_b(2, 3, written("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, m in (
    (draw.integer(3, 6), draw.integer(7, 12)),
    (draw.integer(5, 8), draw.integer(1, 4)),
    (1, 3),
    (4, 4),
):
    wanted = []
    for rank in range(p):
        waiting, coming, own = deque(), deque(range(m)), []
        while coming or waiting:
            if coming and len(waiting) < p - rank:
                waiting.append(coming[0])
                own.append(F(rank, coming.popleft()))
            else:
                own.append(B(rank, waiting.popleft()))
        wanted.append(own)
    expect_one_f_one_b(p, m, wanted)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Interleaved stages (2 points)
#
# Each rank has v stages of 1/v of the size: rank r has r, r + p, r + 2p and so on, its *chunks* 0, 1, 2, so that every microbatch goes round the ranks v times.
# Microbatches come in rounds of p, and m is a multiple of p. A rank does the forwards of a round chunk by chunk: its first chunk for these p microbatches, then
# its second one for the same p, up to the last; then comes the next round. Backwards are the same, but begin with the last chunk.
#
# `forward_of(k, ...)` is the stage and the microbatch of the k-th forward of a rank, and `backward_of` those of its k-th backward, k from 0.
#
# In `interleaved` rank r runs 2(p - r - 1) + (v - 1)p forwards ahead, or all it has if these are fewer. Then a forward and a backward take turns, the *forward*
# first; then come the backwards that are left.
#
# p = 2, m = 4, v = 2: rank 0 has the stages 0 and 2 and does the forwards F0.0 F0.1 F2.0 F2.1 F0.2 F0.3 F2.2 F2.3, and the backwards B2.0 B2.1 B0.0 and so on.


# %% answer="interleaved"
def forward_of(k, rank, p, v):
    """(stage, microbatch)"""
    ### BEGIN SOLUTION
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p
    ### END SOLUTION


def backward_of(k, rank, p, v):
    """(stage, microbatch)"""
    ### BEGIN SOLUTION
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p
    ### END SOLUTION


def interleaved(p, m, v):
    """A list of p lists of actions."""
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists
    ### END SOLUTION


# %% judge="expect_interleaved"
def expect_kth(rank, p, v, forwards, backwards):
    for way, said, wanted in (
        (
            "forward",
            ask_each(forward_of, [(k, rank, p, v) for k in range(len(forwards))]),
            forwards,
        ),
        (
            "backward",
            ask_each(backward_of, [(k, rank, p, v) for k in range(len(forwards))]),
            backwards,
        ),
    ):
        where = f"(seen at {way}s of rank {rank}, p = {p}, v = {v})"
        expect(
            all(stage % p == rank for stage, _ in said),
            "stages of this rank",
            f"rank r has every p-th stage, beginning with r {where}",
        )
        expect_equal(
            [stage for stage, _ in said],
            [stage for stage, _ in wanted],
            f"the stage of a {way}",
            f"p microbatches for each chunk in turn; in which order come the chunks? {where}",
        )
        expect_equal(
            [i for _, i in said],
            [i for _, i in wanted],
            f"the microbatch of a {way}",
            f"the same p microbatches for all chunks of a round, then the next p {where}",
        )


def expect_interleaved(p, m, v, wanted):
    said = ask(interleaved, p, m, v)
    expect_all_actions(said, wanted)
    expect_turns(said, wanted)


# %% check="interleaved-kth" points=1
# Stage and microbatch of the k-th forward and of the k-th backward.
forwards = [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
expect_kth(0, 2, 2, forwards, [(2 - stage, i) for stage, i in forwards])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, v in (
    (draw.integer(2, 3), draw.integer(3, 5)),
    (draw.integer(4, 7), 2),
    (1, 3),
    (draw.integer(2, 5), 1),
):
    rank, rounds = draw.integer(0, p - 1), [range(i * p, (i + 1) * p) for i in range(3)]
    chunks = range(rank, v * p, p)
    forwards = [(stage, i) for some in rounds for stage in chunks for i in some]
    backwards = [(stage, i) for some in rounds for stage in reversed(chunks) for i in some]
    expect_kth(rank, p, v, forwards, backwards)
### END HIDDEN TESTS

# %% check="interleaved-lists" points=1
# The whole lists.
expect_interleaved(
    2,
    4,
    2,
    written(
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p, rounds, v in (
    (3, draw.integer(2, 3), 2),
    (draw.integer(4, 5), 1, draw.integer(1, 3)),
    (draw.integer(2, 4), draw.integer(3, 4), 3),
    (1, 3, 2),
):
    parts, wanted = [range(i * p, (i + 1) * p) for i in range(rounds)], []
    for rank in range(p):
        chunks = range(rank, v * p, p)
        forwards = deque(F(stage, i) for some in parts for stage in chunks for i in some)
        backwards = [B(stage, i) for some in parts for stage in reversed(chunks) for i in some]
        first = min(len(forwards), 2 * (p - rank - 1) + (v - 1) * p)
        own = [forwards.popleft() for _ in range(first)]
        for action in backwards:
            own += [*([forwards.popleft()] if forwards else []), action]
        wanted.append(own)
    expect_interleaved(p, p * rounds, v, wanted)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Put the messages in (2 points)
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


# %% check="with_messages-boundaries" points=1
# One message forward and one back at each boundary between ranks, and none inside a rank.
expect_played(written("F0.0 B0.0", "F1.0 B1.0"))
expect_played(written("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
p, m, turns = draw.integer(3, 5), draw.integer(3, 7), []
for rank in range(p):
    first = min(p - rank, m)
    own = [F(rank, i) for i in range(first)]
    own += [action for i in range(m - first) for action in (B(rank, i), F(rank, first + i))]
    turns.append(own + [B(rank, i) for i in range(m - first, m)])
sizes = [(draw.integer(3, 7), draw.integer(2, 4), 1) for _ in range(4)]
expect_played(turns, *(random_schedule(*size)[0] for size in sizes), written("F0.0 F1.0 B1.0 B0.0"))
### END HIDDEN TESTS

# %% check="with_messages-order" points=1
# Messages are received in the order in which they are sent, whatever the lists.
expect_played(written("F0.0 F0.1 B0.0 B0.1", "F1.1 F1.0 B1.1 B1.0"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [(draw.integer(2, 6), draw.integer(2, 3), draw.integer(3, 6)) for _ in range(6)]
expect_played(*(random_schedule(*size)[0] for size in sizes))
### END HIDDEN TESTS

# %% [markdown]
# ## 5. When does everything happen? (2 points)
#
# The simulator. An action starts as soon as its rank has done what stands in front of it in its list, and all that it needs is done, plus `send` if that was
# done on another rank. `costs` is `{"F": .., "B": .., "send": ..}`, whole numbers. Return
#
# - `starts`: for each rank the start of each action of its list,
# - `makespan`: the end of the last action of all,
# - `bubble`: the share of all ranks' time, from 0 to the makespan, in which they do nothing. An exact `Fraction`.
#
# If ranks wait for each other in a circle, raise a `ValueError` of one line.
#
# `[[F(0,0), B(0,0)], [F(1,0), B(1,0)]]` with F = 1, B = 2, send = 1: starts are `[[0, 6], [2, 3]]`, the makespan is 8, the bubble 5/8.


# %% answer="simulate"
def simulate(lists, costs):
    """starts (a list of lists), makespan, bubble"""
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
        starts, makespan, bubble = simulate(lists, costs)
    except ValueError as error:
        return str(error)
    exact = isinstance(bubble, (int, Fraction))
    fraction = [bubble.numerator, bubble.denominator] if exact else None
    return {"starts": starts, "makespan": makespan, "bubble": fraction}


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


def expect_bubble(lists, costs, wanted):
    said = found_in(lists, costs)
    expect(said["bubble"] is not None, "an exact fraction", "a Fraction, not a float")
    expect(
        Fraction(*said["bubble"]) == wanted,
        "the bubble",
        "idle time of all ranks over all time of all ranks, from 0 to the makespan for each of them",
    )


def expect_stuck(lists):
    said = ask(simulated, lists, {"F": 1, "B": 2, "send": 0})
    expect(
        isinstance(said, str),
        "a refusal",
        "ranks wait in a circle, so some actions never start: raise a ValueError",
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

# %% check="simulate-bubble" points=1
# The bubble, exactly, and a refusal if ranks wait in a circle.
expect_bubble(written("F0.0 B0.0", "F1.0 B1.0"), {"F": 1, "B": 2, "send": 1}, Fraction(5, 8))
expect_stuck(written("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(3):
    p, m, idle = draw.integer(2, 6), draw.integer(1, 9), draw.integer(0, 2)
    lists = [[(kind, rank, i) for kind in "FB" for i in range(m)] for rank in range(p)]
    costs = {"F": draw.integer(1, 9), "B": draw.integer(1, 9), "send": 0}
    expect_bubble(lists + [[]] * idle, costs, 1 - Fraction(m * p, (m + p - 1) * (p + idle)))
for ranks in (draw.integer(3, 6), draw.integer(2, 4)):
    lists, place = random_schedule(draw.integer(3, 8), ranks, 1)  # one action after the other
    costs = {kind: draw.integer(1, 5) for kind in ("F", "B", "send")}
    work = len(place) * (costs["F"] + costs["B"])
    hops = sum(one != other for one, other in zip(place, place[1:]))
    time = work + 2 * hops * costs["send"]
    expect_bubble(lists, costs, 1 - Fraction(work, ranks * time))
expect_stuck(written("F0.0 F0.1 B0.0 B0.1", "B1.0 F1.0 F1.1 B1.1"))
m = draw.integer(3, 6)
lists = [
    [F(0, i) for i in range(m - 1)] + [B(0, 0), F(0, m - 1)] + [B(0, i) for i in range(1, m)],
    [F(1, i) for i in range(m)] + [B(1, i) for i in range(m)],
]
expect_stuck(lists)
### END HIDDEN TESTS
