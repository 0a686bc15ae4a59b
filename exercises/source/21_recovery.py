# %% [markdown]
# # Exercises 21: recovery
#
# Five tasks, 10 points, about three hours. Read chapter 21 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 21
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks: all tasks are pure functions of numbers, text and lists.
#
# Sources: Gandhi et al. 2024 (ReCycle, arXiv:2405.14009, task 4), Jang et al. 2023 (Oobleck, arXiv:2309.08125) and Duan et al. 2024 (Parcae, arXiv:2403.14097,
# both for task 5). The rules here differ from theirs where a task says so.

# %% given="setup"
import math
from fractions import Fraction

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values

# %% [markdown]
# ## 1. Who updates now (2 points)
#
# Step number s on a rank, behind s finished ones: forward, backward, sum of the gradients with all other ranks. When its gradients are complete it *enters the
# vote*, an all-reduce of one word. Nobody comes out before all have entered. Who comes out has *passed*: it updates its state at once, and then counts the
# step as finished. Each rank goes at its own pace as far as this allows.
#
# Some ranks die. For each rank, `words[r]` is `None` if it is dead, `"new"` if another process has its number by now, which has no state at all, and else
# `[finished, entered, passed]`: how many steps it has counted, and how far it is in the next one. All survivors are to go on from the same step. As long as
# no state is lost, no step for which a rank is known to have updated, a dead one too, is left out or made again.
#
# State is cut into pieces, and `holders[p]` are the ranks that held piece p before. Survivors hold theirs still; a piece that none of them holds is
# *lost*. After an update, a rank may copy pieces to the memory of others: `kept[r]` is a list of `[steps, pieces]`, what r has got from ranks that had made so
# many steps by then. If pieces are lost, all go on from the largest number of steps for which every piece is there. For the number at which survivors
# stand, or will after their update, what they hold counts together with copies of that number; for a smaller one there are only copies, as updates
# are made in place. If there is none, only a disk helps.
#
# > **API** `decide(words, holders, kept)` returns `[steps, update, lost]`: the number of finished steps from which all go on, or `None` if only a
# > disk helps; the sorted ranks that must update now, with the gradients they have, before they go on (none if what they hold is thrown
# > away, or only a disk helps); the sorted lost pieces. `words` and `kept` are lists by rank, of `kept` only survivors' entries count.
# > There is at least one survivor.


# %% answer="decide"
def decide(words, holders, kept):
    """-> [steps, ranks that update now, lost pieces]."""
    ### BEGIN SOLUTION
    alive = {r: word for r, word in enumerate(words) if isinstance(word, (list, tuple))}
    made = {r: finished + passed for r, (finished, _, passed) in alive.items()}
    newest = max([*made.values(), *(steps for r in alive for steps, _ in kept[r])])
    update = [r for r in alive if made[r] < newest]
    pieces = set(range(len(holders)))
    there = {newest: {p for p in pieces if set(holders[p]) & alive.keys()}}
    lost = sorted(pieces - there[newest])
    for r in alive:
        for steps, some in kept[r]:
            there.setdefault(steps, set()).update(some)
    whole = [steps for steps, some in there.items() if some >= pieces]
    steps = max(whole, default=None)
    return [steps, update if steps == newest else [], lost]
    ### END SOLUTION


# %% judge="expect_decisions"
PHASES = ["works", "summed", "entered", "passed"]


def drawn_history(ranks, moves, dead):
    """Ranks make random moves that the protocol allows; some die, and of the others some still hear all they need."""
    at = [[0, 0] for _ in range(ranks)]  # finished steps, phase
    updates, gone, deaf = [0] * ranks, set(), set()
    for move in range(moves + 3 * ranks):
        if move == moves:
            gone = set(draw.several(range(ranks), dead))
            deaf = set(draw.several(range(ranks), draw.integer(1, ranks - 1)))
        r = draw.integer(0, ranks - 1)
        finished, phase = at[r]
        needs = {0: [0, 0], 1: [finished, 1], 2: [finished, 2], 3: [0, 0]}[phase]
        if r in gone or (r in deaf and phase in (1, 2)) or any(other < needs for other in at):
            continue
        updates[r] += phase == 2
        at[r] = [finished, phase + 1] if phase < 3 else [finished + 1, 0]
    words = [None if r in gone else [n, phase >= 2, phase == 3] for r, (n, phase) in enumerate(at)]
    return words, updates


def mixed_history(ranks, dead):
    """One in which not all survivors have made the same updates, or (every third) any."""
    any_one = draw.integer(0, 2) == 0
    while True:
        words, updates = drawn_history(ranks, draw.integer(5, 25) * ranks, dead)
        if any_one or len({updates[r] for r in range(ranks) if words[r]}) > 1:
            return words, updates


def expect_decisions(cases, wanted):
    for said, case, right in zip(ask_each(decide, cases), cases, wanted, strict=True):
        where = f"(seen with words {case[0]}, holders {case[1]})"
        formed = (
            isinstance(said, list) and len(said) == 3 and all(type(x) is list for x in said[1:])
        )
        expect(formed, "three facts", f"steps, who updates, what is lost {where}")
        hint = "a piece is lost if nobody who survived holds it; what has a newcomer?"
        expect(said[2] == right[2], "what is lost", f"{hint} {where}")
        hint = "who has passed has updated; who else? For which step is every piece somewhere?"
        expect(said[0] == right[0], "where all go on", f"{hint} {where}")
        hint = "if one has passed the vote, what do all others have? Who says that one has?"
        expect(said[1] == right[1], "who updates now", f"{hint} {where}")


# %% check="decide-words" points=1
# Every rank holds everything: who updates now, from where do all go on, and what does a copy of a dead rank say?
everyone = [[0, 1, 2]]
expect_decisions(
    [
        ([[4, True, False], None, [4, False, False]], everyone, [[]] * 3),
        ([[4, True, False], None, [4, True, True]], everyone, [[]] * 3),
        ([[4, True, False], None, [5, False, False]], everyone, [[]] * 3),
        ([[4, True, False], "new", [4, True, False]], everyone, [[]] * 3),
        ([[4, True, False], None, [4, False, False]], everyone, [[[4, [0]]], [], []]),
        ([[4, True, False], None, [4, True, False]], everyone, [[], [], [[5, [0]]]]),
    ],
    [[4, [], []], [5, [0], []], [5, [0], []], [4, [], []], [4, [], []], [5, [0, 2], []]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for _ in range(40):
    ranks = draw.integer(3, 7)
    words, updates = mixed_history(ranks, draw.integer(1, min(2, ranks - 2)))
    here = [r for r in range(ranks) if words[r]]
    newest = max(updates[r] for r in here)
    wanted.append([newest, [r for r in here if updates[r] < newest], []])
    said = [word or draw.choice([None, "new"]) for word in words]
    cases.append((said, [list(range(ranks))] * draw.integer(1, 3), [[]] * ranks))
    # all that are left have entered; a dead one may have passed, and copied what it had then
    here, finished, passed = (
        draw.several(range(ranks), ranks - 1),
        draw.integer(0, 9),
        draw.integer(0, 1),
    )
    kept = [[] for _ in range(ranks)]
    kept[draw.choice(here)].append([finished + passed, [0]])
    words = [[finished, True, False] if r in here else None for r in range(ranks)]
    cases.append((words, [list(range(ranks))], kept))
    wanted.append([finished + passed, sorted(here) if passed else [], []])
expect_decisions(cases, wanted)
### END HIDDEN TESTS

# %% check="decide-pieces" points=1
# Pieces with one holder or two, newcomers without anything, and copies.
one_each = [[0], [1], [2]]
old = [[3, [0, 2]], [4, [0, 2]]], [[4, [1, 0]]], [[3, [2, 1]], [4, [2, 1]]]
expect_decisions(
    [
        ([[5, False, False], "new", [5, False, False]], [[0, 1], [1, 2]], [[]] * 3),
        ([[5, False, False], "new", [5, False, False]], one_each, [[]] * 3),
        ([[5, False, False], None, [4, True, False]], one_each, list(old)),
        ([[4, True, False], None, [4, True, True]], one_each, [[], [], [[5, [1]]]]),
    ],
    [[5, [], []], [None, [], [1]], [4, [], [1]], [5, [0], [1]]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases, wanted = [], []
for number in range(60):
    ranks = draw.integer(3, 7)
    words, updates = mixed_history(ranks, draw.integer(1, min(2, ranks - 2)))
    here = [r for r in range(ranks) if words[r]]
    newest = max(updates[r] for r in here)
    late = [r for r in here if updates[r] < newest]
    copies = draw.integer(0, 1) + (number % 2)
    holders = [[p, (p + 1) % ranks][: 1 + (number % 3 == 0)] for p in range(ranks)]
    every = draw.integer(1, 3)
    kept = []
    for r in range(ranks):
        steps = [s for s in range(updates[r] + 1) if s % every == 0][-draw.integer(1, 4) :]
        steps = [s for s in steps if draw.random() < 0.7]
        kept.append([[s, [r, (r - 1) % ranks][: copies + 1]] for s in steps] if copies else [])
    lost = [p for p in range(ranks) if not any(r in here for r in holders[p])]

    def is_there(p, steps):
        live = steps == newest and p not in lost
        return live or any(steps == s and p in some for r in here for s, some in kept[r])

    good = [s for s in range(newest + 1) if all(is_there(p, s) for p in range(ranks))]
    steps = good[-1] if good else None
    wanted.append([steps, late if steps == newest else [], lost])
    said = [word or draw.choice([None, "new"]) for word in words]
    cases.append((said, holders, kept))
expect_decisions(cases, wanted)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. No message of an old group (2 points)
#
# When ranks die or come, the members meet anew. A group has a generation, which grows when members change, and an attempt, which starts at 0 in each
# generation and grows when meeting failed. It is *later* than another one if its generation is larger, or its generation is the same and its attempt
# larger. Members learn of a new group at different times, and messages can be late, early, twice, and out of order. You are one member; these events come:
#
#     ["join", generation, attempt, members]                             you are in this group now, if it is later than yours
#     ["message", source, generation, attempt, number, text]             sent in that group; each source numbers its messages to you
#                                                                        0, 1, 2, .. in each group
#     ["gone", rank]                                                     this process has died
#
# Deliver each message exactly once, while you are in its group; those of a source in the order of their numbers, so one that has overtaken another
# waits. One of a later group than yours waits until you join it. Never deliver one of an earlier group, or one from a rank that is no member of the group. When a rank is
# gone, nothing more of it is delivered in the generation that you are in now, in this attempt or a later one, whether it waits or is still to come; a
# later generation can have a new process with the same number. A join of a group that is not later than yours is stale itself and changes nothing.
#
# > **API** `delivered(events)` gets a list of such lists, of which the first is a join, and returns a list as long: for each event the list
# > of texts that are delivered by it, now that it has come; by source, and of a source by number. Numbers and ranks are `int`s.


# %% answer="delivered"
def delivered(events):
    """-> for each event the texts that it lets out."""
    ### BEGIN SOLUTION
    group, members, barred = (-1, 0), [], set()  # barred: (rank, generation)
    waiting, following, said = {}, {}, []  # (group, source, number) -> text; source -> number
    for kind, *what in events:
        if kind == "join" and (what[0], what[1]) > group:
            group, members, following = (what[0], what[1]), what[2], {}
            waiting = {key: text for key, text in waiting.items() if key[0] >= group}
        elif kind == "message":
            source, generation, attempt, number, text = what
            waiting[(generation, attempt), source, number] = text
        elif kind == "gone":
            barred.add((what[0], group[0]))
        out = []
        for source in sorted(set(members)):
            while (key := (group, source, following.get(source, 0))) in waiting:
                if (source, group[0]) in barred:
                    break
                out.append(waiting[key])
                following[source] = key[2] + 1
        said.append(out)
    return said
    ### END SOLUTION


# %% judge="expect_delivered"
def drawn_events(length, ranks=4, groups=6):
    """Later and later groups, and messages of any of them, early, late and twice."""
    made, generation, attempt = [], draw.integer(0, 3), 0
    for _ in range(groups):
        made.append((generation, attempt))
        if draw.random() < 0.5:
            attempt += draw.integer(1, 2)
        else:
            generation, attempt = generation + draw.integer(1, 2), draw.integer(0, 1)
    members = {}
    for of, _ in made:
        members.setdefault(of, sorted(draw.several(range(ranks), draw.integer(2, ranks))))
    plan = []  # (when, event)
    for at, group in enumerate(made):
        for source in range(ranks):
            for number in range(draw.integer(0, 5)):
                event = ["message", source, *group, number, f"{group}{source}/{number}"]
                when = at + draw.uniform(-0.7, 1.2)
                plan += [(when, event)] + [(when + draw.uniform(-0.3, 1), event)] * (
                    draw.random() < 0.2
                )
        if draw.random() < 0.8:
            plan.append((at + draw.uniform(0, 0.5), ["join", *group, members[group[0]]]))
        if draw.random() < 0.5:
            plan.append((at + draw.uniform(0.2, 1), ["gone", draw.integer(0, ranks - 1)]))
        if draw.random() < 0.5:
            plan.append((at + 1 + draw.random(), ["join", *group, list(range(ranks))]))
    plan = [event for _, event in sorted(plan, key=lambda one: one[0])][:length]
    return [["join", *made[0], members[made[0][0]]], *plan]


def expect_delivered(cases, wanted, property, hint):
    for said, events, right in zip(ask_each(delivered, [(e,) for e in cases]), cases, wanted):
        where = f"(seen with {len(events)} events)"
        formed = isinstance(said, list) and len(said) == len(events)
        expect(formed, "a list for each event", f"empty where nothing is delivered {where}")
        for at, (got, want) in enumerate(zip(said, right)):
            near = f"(seen at event {at}: {events[at][:5]})"
            listed = isinstance(got, list) and all(isinstance(text, str) for text in got)
            expect(listed, "a list for each event", f"of texts {near}")
            expect(set(got) <= set(want), f"{property}: too much", f"{hint} {near}")
            expect(set(got) == set(want), f"{property}: too little", f"{hint} {near}")
            expect(got == want, f"{property}: order", f"by source, then by number {near}")


def message(source, generation, attempt, number):
    text = f"{generation}.{attempt} {source}/{number}"
    return ["message", source, generation, attempt, number, text]


# %% check="delivered-groups" points=1
# Early, late, twice and out of order, over generations and attempts.
GROUPS = "which group is later, what waits, and what is stale?"
expect_delivered(
    [
        [
            ["join", 2, 3, [0, 1, 2]],
            message(1, 2, 3, 1),
            message(1, 4, 0, 0),
            message(1, 2, 3, 0),
            ["join", 4, 0, [0, 1]],
            message(1, 2, 3, 2),
            message(1, 4, 0, 0),
            ["join", 2, 4, [0, 1]],
            message(2, 4, 0, 0),
            message(0, 4, 1, 0),
        ]
    ],
    [[[], [], [], ["2.3 1/0", "2.3 1/1"], ["4.0 1/0"], [], [], [], [], []]],
    "groups",
    GROUPS,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def oracle(events):
    """For each event, what has been let out of the group by then, looked up in all that came, less what had been before."""
    out, before, since, of, who = [], [], 0, (-1, -1), []
    bars = []
    for at, (kind, *what) in enumerate(events):
        if kind == "join" and tuple(what[:2]) > of:
            of, who, since, before = tuple(what[:2]), what[2], at, []
        if kind == "gone":
            bars.append((at, what[0], of[0]))
        now = []
        for source in sorted(who):
            barred = [
                when for when, rank, generation in bars if (rank, generation) == (source, of[0])
            ]
            until = min(barred, default=at + 1)
            if until < since:
                continue
            came = {
                e[4]: e[5]
                for e in events[:until][: at + 1]
                if e[0] == "message" and e[1] == source and (e[2], e[3]) == of
            }
            number = 0
            while number in came:
                now.append(came[number])
                number += 1
        out.append([text for text in now if text not in before])
        before = now
    return out


cases = [
    [event for event in drawn_events(draw.integer(20, 90)) if event[0] != "gone"] for _ in range(20)
]
expect_delivered(cases, [oracle(events) for events in cases], "groups", GROUPS)
### END HIDDEN TESTS

# %% check="delivered-gone" points=1
# And members that die while the others meet.
GONE = "in which groups is nothing of this rank delivered any more, and in which may there be a new one?"
expect_delivered(
    [
        [
            ["join", 2, 0, [0, 1]],
            message(1, 2, 1, 0),
            message(1, 4, 0, 0),
            message(1, 2, 0, 0),
            ["gone", 1],
            message(1, 2, 0, 1),
            ["join", 2, 1, [0, 1]],
            message(1, 2, 1, 1),
            ["join", 4, 0, [0, 1]],
            message(1, 4, 0, 1),
        ]
    ],
    [[[], [], [], ["2.0 1/0"], [], [], [], [], ["4.0 1/0"], ["4.0 1/1"]]],
    "gone",
    GONE,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def oracle(events):
    """For each event, what has been let out of the group by then, looked up in all that came, less what had been before."""
    out, before, since, of, who = [], [], 0, (-1, -1), []
    bars = []
    for at, (kind, *what) in enumerate(events):
        if kind == "join" and tuple(what[:2]) > of:
            of, who, since, before = tuple(what[:2]), what[2], at, []
        if kind == "gone":
            bars.append((at, what[0], of[0]))
        now = []
        for source in sorted(who):
            barred = [
                when for when, rank, generation in bars if (rank, generation) == (source, of[0])
            ]
            until = min(barred, default=at + 1)
            if until < since:
                continue
            came = {
                e[4]: e[5]
                for e in events[:until][: at + 1]
                if e[0] == "message" and e[1] == source and (e[2], e[3]) == of
            }
            number = 0
            while number in came:
                now.append(came[number])
                number += 1
        out.append([text for text in now if text not in before])
        before = now
    return out


cases = [drawn_events(draw.integer(30, 120)) for _ in range(24)]
expect_delivered(cases, [oracle(events) for events in cases], "gone", GONE)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. What has to move (2 points)
#
# A matrix lies in pieces on ranks, a rectangle each; a number of ranks hold the same one. Now every rank wants another rectangle. Plan what moves:
#
# - nothing moves to a rank that it holds itself, and nothing moves twice;
# - holders of the same rectangle share the work: of D elements that leave this rectangle in all, none of its k holders sends more than ⌈D / k⌉.
#
# A rectangle is `[top, bottom, left, right]`: rows top .. bottom - 1, columns left .. right - 1. A move `[giver, receiver, row, first, last]` brings
# columns first .. last - 1 of a row. What is contiguous in a row and goes from the same giver to the same receiver is one move.
#
# > **API** `transfers(held, wanted)` gets two lists by rank, of rectangles or `None` (dead or new: holds nothing; dead: wants nothing). It
# > returns a list of lists of five `int`s, in any order, or `None` if something is wanted that nobody holds. Two held rectangles are
# > equal or have no element in common; wanted ones are any.


# %% answer="transfers"
def transfers(held, wanted):
    """-> [[giver, receiver, row, first, last], ..], or None."""
    ### BEGIN SOLUTION
    holders = {}
    for rank, piece in enumerate(held):
        if piece is not None:
            holders.setdefault(tuple(piece), []).append(rank)
    asked = {piece: [] for piece in holders}
    for rank, want in enumerate(wanted):
        if want is None:
            continue
        missing = (want[1] - want[0]) * (want[3] - want[2])
        for piece, owners in holders.items():
            top, left = max(want[0], piece[0]), max(want[2], piece[2])
            bottom, right = min(want[1], piece[1]), min(want[3], piece[3])
            if top < bottom and left < right:
                missing -= (bottom - top) * (right - left)
                if rank not in owners:
                    asked[piece] += [(rank, row, left, right) for row in range(top, bottom)]
        if missing:
            return None
    moves = []
    for piece, owners in holders.items():
        share = -(-sum(last - first for _, _, first, last in asked[piece]) // len(owners))
        givers, left = iter(owners), 0
        for rank, row, first, last in asked[piece]:
            while first < last:
                if left == 0:
                    giver, left = next(givers), share
                much = min(left, last - first)
                moves.append([giver, rank, row, first, first + much])
                first, left = first + much, left - much
    return moves
    ### END SOLUTION


# %% judge="expect_transfers"
def cells_of(piece):
    top, bottom, left, right = piece or (0, 0, 0, 0)
    return {(row, column) for row in range(top, bottom) for column in range(left, right)}


def grid(rows, columns, down, right):
    """The rectangles of a matrix, cut evenly or nearly so."""
    tops = [rows * i // down for i in range(down + 1)]
    lefts = [columns * i // right for i in range(right + 1)]
    pairs = [(i, j) for i in range(down) for j in range(right)]
    return [[tops[i], tops[i + 1], lefts[j], lefts[j + 1]] for i, j in pairs]


def drawn_layouts():
    rows, columns = draw.integer(5, 16), draw.integer(5, 16)
    down, right, copies = draw.integer(1, 3), draw.integer(1, 3), draw.integer(1, 4)
    held = grid(rows, columns, down, right) * copies
    draw.shuffle(held)
    new = grid(rows, columns, draw.integer(1, 4), draw.integer(1, 4))
    wanted = [draw.choice(new) for _ in range(len(held) + draw.integer(0, 3))]
    held += [None] * (len(wanted) - len(held))
    for r in draw.several(range(len(held)), min(2, len(held) - 1)):
        if held.count(held[r]) > 1:
            held[r] = None
    for r in draw.several(range(len(held)), draw.integer(0, min(2, len(held) - 1))):
        wanted[r] = None
    return held, wanted


def expect_transfers(*cases, balanced=True):
    for said, (held, wanted) in zip(ask_each(transfers, list(cases)), cases):
        where = f"(seen with {held} -> {wanted})"
        own, want = [cells_of(piece) for piece in held], [cells_of(piece) for piece in wanted]
        if not set().union(*want) <= set().union(*own):
            expect(said is None, "nobody holds it", f"what is wanted is gone {where}")
            continue
        formed = isinstance(said, list) and all(
            isinstance(move, list) and len(move) == 5 and all(type(x) is int for x in move)
            for move in said
        )
        expect(formed, "a list of moves", f"giver, receiver, row, first, last {where}")
        got, gave = [[] for _ in held], [0] * len(held)
        for giver, receiver, row, first, last in said:
            known = 0 <= giver < len(held) and 0 <= receiver < len(held) and first < last
            expect(known, "a list of moves", f"ranks that are there, none empty {where}")
            cells = [(row, column) for column in range(first, last)]
            hint = "does the giver hold what it gives?"
            expect(own[giver].issuperset(cells), "from who has it", f"{hint} {where}")
            got[receiver] += cells
            gave[giver] += len(cells)
        for rank, cells in enumerate(got):
            hint = "what a rank wants and does not hold, all of it"
            expect(want[rank] <= own[rank] | set(cells), "all that is wanted", f"{hint} {where}")
            hint = "what does a rank hold already, and what comes to it twice, or unasked?"
            expect(len(cells) == len(want[rank] - own[rank]), "fewest bytes", f"{hint} {where}")
        ends = {(g, r, row, last) for g, r, row, _, last in said}
        begins = {(g, r, row, first) for g, r, row, first, _ in said}
        expect(not ends & begins, "one move", f"what is contiguous in a row is one move {where}")
        for piece in held if balanced else ():
            same = [rank for rank in range(len(held)) if piece and held[rank] == piece]
            share = -(-sum(gave[rank] for rank in same) // max(1, len(same)))
            hint = "who holds the same rectangle, and how much does each of them send?"
            expect(all(gave[r] <= share for r in same), "shared among holders", f"{hint} {where}")


halves, rows = grid(4, 6, 1, 2), grid(4, 6, 2, 1)

# %% check="transfers-bytes" points=1
# One holder each: all that is wanted, the fewest bytes, and None where nobody has it.
expect_transfers((halves, rows), (halves, halves), ([*halves, None], [[0, 4, 0, 6], None, rows[1]]))
expect_transfers(([halves[0], None], rows), ([halves[0], None], [None, halves[0]]))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for _ in range(16):
    held, wanted = drawn_layouts()
    once = [piece if held.index(piece) == r else None for r, piece in enumerate(held)]
    cases.append((once, wanted))
    gone = [None if piece == held[0] else piece for piece in held]
    cases.append((gone, wanted))
expect_transfers(*cases)
### END HIDDEN TESTS

# %% check="transfers-shared" points=1
# Several holders share what leaves their rectangle.
expect_transfers(([[0, 3, 0, 5]] * 3 + [None] * 2, [None] * 3 + [[0, 3, 0, 5], [1, 2, 1, 4]]))
expect_transfers((halves * 2 + [None], rows * 2 + [[0, 4, 1, 5]]), (halves * 2, halves[::-1] * 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_transfers(*(drawn_layouts() for _ in range(32)))
whole = [0, draw.integer(3, 9), 0, draw.integer(5, 12)]
expect_transfers(*(([whole] * k + [None], [None] * k + [whole]) for k in (2, 3, 4, 5)))
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The microbatches of a dead worker (2 points)
#
# A pipeline has stages, and each stage several workers. A microbatch passes all stages; at each of them *any* living worker may take it. For each (stage, microbatch)
# there are three actions, all on the same worker:
#
#     F    forward: after F of the stage before
#     B    gradient of the input: after F of the same stage and B of the stage behind it (the last stage: after its F alone)
#     W    gradients of the weights: after B of the same stage, whenever there is time
#
# Each takes `seconds[stage][worker]`; 0 means that this worker is dead. A worker holds a microbatch from its F to the end of its W, and has room for `limit`
# of them. Return a list for each worker: its actions in their order. Workers begin an action as soon as they can: when their last one is over and what it needs is done;
# messages take no time.
#
# The step has to be as short as that of this simple rule, or at most a twentieth longer: *again and again, of all actions whose needs are planned already, on all workers
# that may do them (for F: alive, with room), plan the one that can begin first. Of equal ones prefer B, then F, then W; then the one that is over first; then
# the smaller microbatch.*
#
# > **API** `rerouted(seconds, microbatches, limit)` returns a list of lists of lists: `[stage][worker]` is a list of `["F", microbatch]`, `["B", ..]` and
# > `["W", ..]`, empty for the dead. Every stage has a living worker; `seconds` are `int`s; microbatches are 0 .. microbatches - 1.


# %% answer="rerouted"
def rerouted(seconds, microbatches, limit):
    """-> plan[stage][worker]: [[kind, microbatch], ..]."""
    ### BEGIN SOLUTION
    stages = range(len(seconds))
    plan = [[[] for _ in of] for of in seconds]
    free, held = ([[0] * len(of) for of in seconds] for _ in range(2))
    done, home = {}, {}
    left = {(kind, s, m) for kind in "FBW" for s in stages for m in range(microbatches)}
    while left:
        found = []
        for kind, s, m in left:
            needs = {"F": [("F", s - 1, m)] if s else [], "W": [("B", s, m)]}.get(kind)
            if kind == "B":
                needs = [("F", s, m)] + ([("B", s + 1, m)] if s + 1 in stages else [])
            if not all(need in done for need in needs):
                continue
            for w, takes in enumerate(seconds[s]):
                room = held[s][w] < limit if kind == "F" else home[s, m] == w
                if takes and room:
                    begin = max([free[s][w], *(done[need] for need in needs)])
                    found.append((begin, "BFW".index(kind), begin + takes, m, s, w))
        begin, kind, over, m, s, w = min(found)
        kind = "BFW"[kind]
        left.remove((kind, s, m))
        plan[s][w].append([kind, m])
        done[kind, s, m] = free[s][w] = over
        home[s, m] = w
        held[s][w] += {"F": 1, "B": 0, "W": -1}[kind]
    return plan
    ### END SOLUTION


# %% judge="expect_rerouted"
def step_of(plan, seconds, microbatches, limit, where):
    """Plays the plan; seconds until the last action is over."""
    shape = isinstance(plan, list) and [len(of) for of in plan] == [len(of) for of in seconds]
    expect(shape, "a list for each worker", f"[stage][worker] {where}")
    wanted = sorted([k, m] for k in "BFW" for m in range(microbatches))
    for s, workers in enumerate(plan):
        for w, actions in enumerate(workers):
            hint = "this worker is dead"
            expect(seconds[s][w] > 0 or not actions, "alive", f"{hint} {where}")
            held = 0
            for kind, m in actions:
                held += {"F": 1, "B": 0, "W": -1}[kind]
                hint = (
                    "from F to the end of W a worker holds a microbatch; how many has it at once?"
                )
                expect(held <= limit, "room", f"{hint} {where}")
            for kinds in ("FB", "FW"):
                of = [sorted(m for k, m in actions if k == kind) for kind in kinds]
                hint = "the worker that made F makes B and W"
                expect(of[0] == of[1], "the same worker", f"{hint} {where}")
        every = sorted([k, m] for actions in workers for k, m in actions)
        hint = "each microbatch has F, B and W once at every stage"
        expect(every == wanted, "all microbatches", f"{hint} {where}")
    done, next_of = {}, {(s, w): 0 for s, of in enumerate(plan) for w in range(len(of))}
    free, moved = dict.fromkeys(next_of, 0), True
    while moved:
        moved = False
        for (s, w), at in next_of.items():
            if at == len(plan[s][w]):
                continue
            kind, m = plan[s][w][at]
            needs = {"F": [("F", s - 1, m)] * (s > 0), "W": [("B", s, m)]}.get(kind)
            if kind == "B":
                needs = [("F", s, m)] + [("B", s + 1, m)] * (s + 1 < len(seconds))
            if all(need in done for need in needs):
                begin = max([free[s, w], *(done[need] for need in needs)])
                done[kind, s, m] = free[s, w] = begin + seconds[s][w]
                next_of[s, w], moved = at + 1, True
    hint = "all workers wait for one another; what does each need next?"
    expect(len(done) == 3 * len(seconds) * microbatches, "no deadlock", f"{hint} {where}")
    return max(done.values())


def expect_rerouted(cases, longest):
    for plan, case, most in zip(ask_each(rerouted, cases), cases, longest, strict=True):
        where = f"(seen with {case})"
        hint = "who waits, and what could it do meanwhile? Who is the slowest, and has as much to do as others?"
        step = step_of(plan, *case, where)
        expect(step <= most * 1.05, "short enough", f"{hint} {where}")


# %% check="rerouted-alive" points=1
# Everybody is alive and equally fast.
expect_rerouted([([[1], [1]], 4, 2), ([[1, 1], [1, 1]], 6, 2)], [14, 12])
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_rule(seconds, microbatches, limit):
    """Seconds of the step that the rule makes: actions that can begin are kept in a list."""
    last, over = len(seconds) - 1, {}
    free, room = (
        {(s, w): x for s, of in enumerate(seconds) for w in range(len(of))} for x in (0, limit)
    )
    open_ones = {
        ("F", 0, m): [w for w, t in enumerate(seconds[0]) if t] for m in range(microbatches)
    }
    ready = dict.fromkeys(open_ones, 0)
    while open_ones:
        options = []
        for (kind, s, m), workers in open_ones.items():
            for w in workers:
                if kind != "F" or room[s, w]:
                    begin = max(free[s, w], ready[kind, s, m])
                    options.append((begin, "BFW".index(kind), begin + seconds[s][w], m, s, w))
        _, order, end, m, s, w = min(options)
        kind = "BFW"[order]
        del open_ones[kind, s, m]
        over[kind, s, m], free[s, w] = (end, w), end
        follow = []
        if kind == "F":
            room[s, w] -= 1
            follow = [("F", s + 1, m)] if s < last else [("B", s, m)]
        elif kind == "B":
            follow = [("W", s, m)] + ([("B", s - 1, m)] if s else [])
        else:
            room[s, w] += 1
        for one in follow:
            ready[one] = end
            everyone = [v for v, t in enumerate(seconds[one[1]]) if t]
            open_ones[one] = everyone if one[0] == "F" else [over["F", one[1], m][1]]
    return max(end for end, _ in over.values())


cases = []
for _ in range(6):
    stages, workers = draw.integer(2, 4), draw.integer(1, 3)
    cases.append(
        ([[1] * workers] * stages, workers * draw.integer(2, 6), draw.integer(2, stages + 1))
    )
expect_rerouted(cases, [by_rule(*case) for case in cases])
### END HIDDEN TESTS

# %% check="rerouted-dead" points=1
# Some are dead, and some are slow.
expect_rerouted([([[1, 1], [1, 0]], 6, 3), ([[1, 1], [1, 3], [1, 1]], 8, 3)], [20, 28])
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_rule(seconds, microbatches, limit):
    """Seconds of the step that the rule makes: actions that can begin are kept in a list."""
    last, over = len(seconds) - 1, {}
    free, room = (
        {(s, w): x for s, of in enumerate(seconds) for w in range(len(of))} for x in (0, limit)
    )
    open_ones = {
        ("F", 0, m): [w for w, t in enumerate(seconds[0]) if t] for m in range(microbatches)
    }
    ready = dict.fromkeys(open_ones, 0)
    while open_ones:
        options = []
        for (kind, s, m), workers in open_ones.items():
            for w in workers:
                if kind != "F" or room[s, w]:
                    begin = max(free[s, w], ready[kind, s, m])
                    options.append((begin, "BFW".index(kind), begin + seconds[s][w], m, s, w))
        _, order, end, m, s, w = min(options)
        kind = "BFW"[order]
        del open_ones[kind, s, m]
        over[kind, s, m], free[s, w] = (end, w), end
        follow = []
        if kind == "F":
            room[s, w] -= 1
            follow = [("F", s + 1, m)] if s < last else [("B", s, m)]
        elif kind == "B":
            follow = [("W", s, m)] + ([("B", s - 1, m)] if s else [])
        else:
            room[s, w] += 1
        for one in follow:
            ready[one] = end
            everyone = [v for v, t in enumerate(seconds[one[1]]) if t]
            open_ones[one] = everyone if one[0] == "F" else [over["F", one[1], m][1]]
    return max(end for end, _ in over.values())


cases = []
for _ in range(10):
    stages, workers = draw.integer(2, 4), draw.integer(2, 4)
    seconds = [[draw.choice([1, 1, 1, 2, 3]) for _ in range(workers)] for _ in range(stages)]
    for s in draw.several(range(stages), draw.integer(1, 2)):
        seconds[s][draw.integer(0, workers - 1)] = 0
    cases.append((seconds, workers * draw.integer(2, 5), draw.integer(2, 2 * stages)))
expect_rerouted(cases, [by_rule(*case) for case in cases])
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Which pipelines to make of the nodes that are left (2 points)
#
# Oobleck makes pipelines of templates: `[size, pace]`, a pipeline of `size` nodes makes `pace` samples per second. All N nodes that are left are to be in
# pipelines, each in one, and there must be at least f + 1 pipelines, so that f further deaths leave one. Any template can be used any number of times.
#
# Parcae looks ahead: if `lost` of the N nodes go, each set of so many as likely as any other, a pipeline that has lost a node makes nothing. The expected
# pace of what is left is the *liveput* of a mix. Return the mix with the largest liveput.
#
# > **API** `best_mix(N, templates, f, lost)` gets `int`s and a list of lists of two `int`s, all sizes different, and returns
# > `[sizes, numerator, denominator]`: the sorted sizes of the pipelines, and their liveput as an exact fraction of two `int`s; `None` if no mix uses
# > exactly N nodes in f + 1 pipelines or more. If several mixes are best, any of them. 1 ≤ N ≤ 60, 0 ≤ lost ≤ N.


# %% answer="best_mix"
def best_mix(N, templates, f, lost):
    """-> [sizes, numerator, denominator], or None."""
    ### BEGIN SOLUTION
    worth = {s: pace * math.comb(N - s, lost) for s, pace in templates if s <= N}
    best = {(0, 0): (0, [])}  # (nodes, pipelines, f + 1 standing for more) -> worth, sizes
    for nodes in range(1, N + 1):
        for size, more in worth.items():
            for count in range(f + 2):
                if (nodes - size, count) in best:
                    before, sizes = best[nodes - size, count]
                    key, one = (nodes, min(count + 1, f + 1)), (before + more, [*sizes, size])
                    best[key] = max(best.get(key, one), one)
    if (N, f + 1) not in best:
        return None
    total, sizes = best[N, f + 1]
    liveput = Fraction(total, math.comb(N, lost))
    return [sorted(sizes), liveput.numerator, liveput.denominator]
    ### END SOLUTION


# %% judge="expect_mix"
def expect_mix(cases, wanted):
    """wanted: for each case the largest liveput as a Fraction, or None."""
    for said, case, right in zip(ask_each(best_mix, cases), cases, wanted, strict=True):
        (N, templates, f, lost), where = case, f"(seen with {case})"
        if right is None:
            expect(said is None, "no mix", f"exactly N nodes, in f + 1 pipelines or more {where}")
            continue
        formed = isinstance(said, list) and len(said) == 3 and isinstance(said[0], list)
        formed = formed and all(type(x) is int for x in [*said[0], *said[1:]]) and said[2] > 0
        expect(formed, "a mix and its liveput", f"sizes, numerator, denominator {where}")
        sizes, paces = said[0], dict(templates)
        known = sizes == sorted(sizes) and all(size in paces for size in sizes)
        expect(known, "templates", f"sorted sizes of templates {where}")
        expect(sum(sizes) == N, "every node once", f"how many nodes are in pipelines? {where}")
        expect(len(sizes) >= f + 1, "enough pipelines", f"how many may die? {where}")
        lives = [Fraction(math.comb(N - size, lost), math.comb(N, lost)) for size in sizes]
        liveput = sum(paces[size] * share for size, share in zip(sizes, lives))
        hint = "with which probability has a pipeline lost none of its nodes? As a fraction"
        expect(Fraction(said[1], said[2]) == liveput, "the liveput of the mix", f"{hint} {where}")
        expect(liveput == right, "the best mix", f"is another mix not better? {where}")


# %% check="best_mix-cover" points=1
# Nobody else goes: all nodes are used, in f + 1 pipelines or more, at the best pace.
expect_mix(
    [
        (7, [[3, 10], [4, 14]], 1, 0),
        (7, [[3, 10], [4, 14], [7, 30]], 1, 0),
        (5, [[3, 10], [4, 14]], 0, 0),
        (12, [[3, 10], [4, 14], [6, 22]], 2, 0),
    ],
    [Fraction(24), Fraction(24), None, Fraction(42)],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_counts(N, templates, f, lost):
    """Every number of pipelines of each template."""
    ways = [(N, 0, 0)]  # nodes left, pipelines, liveput times all sets
    for size, pace in templates:
        more = pace * math.comb(max(0, N - size), lost)
        ways = [
            (left - size * k, count + k, total + more * k)
            for left, count, total in ways
            for k in range(left // size + 1)
        ]
    good = [total for left, count, total in ways if left == 0 and count > f]
    return Fraction(max(good), math.comb(N, lost)) if good else None


cases = [(8, [[3, 10], [4, 14], [5, 15]], 1, 0)]
for _ in range(30):
    sizes = draw.several(range(2, 9), draw.integer(2, 4))
    templates = [[size, size * 4 + draw.integer(-5, 9)] for size in sizes]
    cases.append((draw.integer(5, 40), templates, draw.integer(0, 4), 0))
cases.append((59, [[7, 60], [8, 75], [6, 50]], 3, 0))
expect_mix(cases, [by_counts(*case) for case in cases])
### END HIDDEN TESTS

# %% check="best_mix-liveput" points=1
# Some will go: the largest expected pace.
expect_mix(
    [
        (4, [[2, 10], [4, 24]], 0, 1),
        (6, [[1, 2], [2, 7], [3, 12]], 1, 2),
        (3, [[1, 2], [3, 9]], 0, 3),
    ],
    [Fraction(10), Fraction(42, 5), Fraction(0)],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_counts(N, templates, f, lost):
    """Every number of pipelines of each template."""
    ways = [(N, 0, 0)]  # nodes left, pipelines, liveput times all sets
    for size, pace in templates:
        more = pace * math.comb(max(0, N - size), lost)
        ways = [
            (left - size * k, count + k, total + more * k)
            for left, count, total in ways
            for k in range(left // size + 1)
        ]
    good = [total for left, count, total in ways if left == 0 and count > f]
    return Fraction(max(good), math.comb(N, lost)) if good else None


cases = []
for _ in range(30):
    sizes = draw.several(range(1, 9), draw.integer(2, 4))
    templates = [[size, round(size ** draw.uniform(1, 1.4) * 20)] for size in sizes]
    N = draw.integer(5, 36)
    cases.append((N, templates, draw.integer(0, 3), draw.integer(1, min(N, 5))))
cases.append((60, [[5, 52], [6, 66], [8, 93]], 3, 2))
expect_mix(cases, [by_counts(*case) for case in cases])
### END HIDDEN TESTS
