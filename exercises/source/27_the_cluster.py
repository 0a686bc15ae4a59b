# %% [markdown]
# # Exercises 27: the cluster around the job
#
# Five tasks, 10 points, about two hours. Read chapter 27 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 27
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 1 is EASY (Lifka 1995, *The ANL/IBM SP Scheduling System*), Slurm's `sched/backfill` in small; task 2 Gavel's rounds (Narayanan et al. 2020,
# arXiv:2008.09213); task 3 FGD (Weng et al. 2023); task 4 one step of Perseus (Chung et al. 2024, arXiv:2312.06902); task 5 what Pollux searches for
# (Qiao et al. 2021, arXiv:2008.12260).

# %% given="setup"
import math
from itertools import combinations, product

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, wanted, property, hint):
    """wanted[i] of cases[i], exactly."""
    for said, case, right in zip(ask_each(answer, list(cases)), cases, wanted):
        expect(type(said) is type(right), "kind of result", f"see the API (seen with {case})")
        expect(said == right, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Overtaking without harm (2 points)
#
# Jobs wait in a line, in order of arrival, and have all their devices or none. In each second, once the devices of jobs that have ended are free
# and who arrives stands in line, the first in line starts if it fits, then the next, until one does not fit. For that one compute `begin`: the first
# second in which it would fit if nobody else started. Then go through the others in line, in order: one that fits now *and will have ended
# by* `begin` starts now, and overtakes.
#
# > **API** `backfill(jobs, devices)` gets up to 12 tuples (arrives, wants, lasts) of whole numbers, in order of arrival, and the number of devices.
# > A job has `wants` devices for `lasts` seconds; it wants at most all of them. Returns the list of the seconds in which jobs start.


# %% answer="backfill"
def backfill(jobs, devices):
    """[(arrives, wants, lasts)] -> [second in which the job starts]."""
    ### BEGIN SOLUTION
    starts, clock = {}, 0

    def free(at):
        return devices - sum(jobs[j][1] for j, s in starts.items() if s + jobs[j][2] > at)

    while len(starts) < len(jobs):
        line = [j for j, job in enumerate(jobs) if j not in starts and job[0] <= clock]
        while line and jobs[line[0]][1] <= free(clock):
            starts[line.pop(0)] = clock
        if line:
            ends = sorted(s + jobs[j][2] for j, s in starts.items())
            begin = next(end for end in ends if free(end) >= jobs[line[0]][1])
            for j in line[1:]:
                if jobs[j][1] <= free(clock) and clock + jobs[j][2] <= begin:
                    starts[j] = clock
        clock += 1
    return [starts[j] for j in range(len(jobs))]
    ### END SOLUTION


# %% judge="backfill_right"
def drawn_jobs(count, devices, longest):
    at = sorted(draw.integer(0, 6) for _ in range(count))
    return [(a, draw.integer(1, devices), draw.integer(1, longest)) for a in at]


### BEGIN HIDDEN TESTS
def backfilled(jobs, devices, overtakes=lambda end, begin: end <= begin):
    """On a table of used devices by second."""
    used = [0] * (max(job[0] for job in jobs) + sum(job[2] for job in jobs) + 1)
    starts, now = [None] * len(jobs), 0

    def take(j):
        starts[j] = now
        for second in range(now, now + jobs[j][2]):
            used[second] += jobs[j][1]

    for now in range(len(used)):
        first = None
        for j, (arrives, wants, lasts) in enumerate(jobs):
            if starts[j] is not None or arrives > now:
                continue
            fits = used[now] + wants <= devices
            if first is None and not fits:
                first = min(t for t in range(now, len(used)) if used[t] + wants <= devices)
            elif fits and (first is None or overtakes(now + lasts, first)):
                take(j)
    return starts


def told_apart(count, other, *others):
    """Drawn jobs whose starts are different under another rule, and the same under further ones."""
    found = []
    while len(found) < count:
        one = drawn_jobs(draw.integer(4, 12), 8, 9), 8
        starts = backfilled(*one)
        same = all(starts == backfilled(*one, rule) for rule in others)
        if same and starts != backfilled(*one, other):
            found.append(one)
    return found


### END HIDDEN TESTS

# %% check="backfill-overtake" points=1
# A job that ends in time overtakes one that does not fit.
OVERTAKE = "who may start while the first in line waits?"
expect_each(
    backfill, [([(0, 6, 10), (1, 6, 5), (1, 2, 4)], 8)], [[0, 10, 1]], "overtaking", OVERTAKE
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
NEVER, ALWAYS = lambda end, begin: False, lambda end, begin: True
cases = told_apart(8, NEVER, ALWAYS, lambda end, begin: end < begin)
cases.append(([(0, 2, 3), (0, 4, 9), (1, 6, draw.integer(1, 9)), (1, 2, draw.integer(4, 7))], 8))
expect_each(backfill, cases, [backfilled(*case) for case in cases], "overtaking", OVERTAKE)
### END HIDDEN TESTS

# %% check="backfill-harm" points=1
# And nobody who overtakes makes the first in line wait longer.
HARM = "would the first in line start later than without the one that overtakes?"
JOBS = [(0, 6, 10), (1, 8, 5), (1, 2, 4), (1, 2, 12), (2, 2, 5)]
expect_each(backfill, [(JOBS, 8)], [[0, 10, 1, 15, 5]], "no harm", HARM)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [*told_apart(6, lambda end, begin: True), *told_apart(6, lambda end, begin: end < begin)]
cases.append(([(0, 4, 4), (0, 3, 12), (1, 5, draw.integer(1, 9)), (1, 1, draw.integer(4, 11))], 8))
expect_each(backfill, cases, [backfilled(*case) for case in cases], "no harm", HARM)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Rounds from shares (2 points)
#
# A program has found which share of the time each job should have on each kind of device: `shares[j][k] / whole`. There is one device of each kind,
# and a job may use one device at a time. Time goes in rounds. Before round t (from 0) job j *lags* on kind k by
#
#     (t + 1) · shares[j][k] / whole  -  rounds that j has had on k so far
#
# Go through the pairs (j, k) with a share above 0, the largest lag first (of equals the lower job, then the lower kind): a pair is served if the
# job has no device in this round yet and the device is free, also if its lag is not above 0.
#
# > **API** `rounds(shares, whole, n)` gets a list with a list of whole numbers for each job, and whole numbers. It returns a list of n lists: the job on
# > each kind of device, or None. Compare lags exactly: multiplied by `whole` they are whole numbers.


# %% answer="rounds"
def rounds(shares, whole, n):
    """-> [round][kind]: the job on the device, or None."""
    ### BEGIN SOLUTION
    pairs = [(j, k) for j, row in enumerate(shares) for k, share in enumerate(row) if share]
    had, plan = dict.fromkeys(pairs, 0), []
    for t in range(n):
        served = [None] * len(shares[0])
        lag = {(j, k): (t + 1) * shares[j][k] - whole * had[j, k] for j, k in pairs}
        for j, k in sorted(pairs, key=lambda pair: (-lag[pair], pair)):
            if j not in served and served[k] is None:
                served[k] = j
                had[j, k] += 1
        plan.append(served)
    return plan
    ### END SOLUTION


# %% judge="rounds_right"
def drawn_shares(jobs, kinds):
    """Whole 24: on no kind and for no job more than all of the time."""
    left = [24] * kinds
    shares = []
    for _ in range(jobs):
        row, own = [], 24
        for kind in range(kinds):
            row.append(draw.integer(0, min(left[kind], own, 12)))
            left[kind] -= row[-1]
            own -= row[-1]
        shares.append(row)
    shares[0][0] = shares[0][0] or 1
    return shares, 24, draw.integer(10, 40)


### BEGIN HIDDEN TESTS
def served_by_credit(shares, whole, n):
    """A pair earns its share before each round, and pays `whole` for a device."""
    credit, plan = {}, []
    for _ in range(n):
        for j, row in enumerate(shares):
            for k, share in enumerate(row):
                if share:
                    credit[j, k] = credit.get((j, k), 0) + share
        open_, row = dict(credit), [None] * len(shares[0])
        while open_:
            most = max(open_.values())
            j, k = min(pair for pair in open_ if open_[pair] == most)
            row[k] = j
            credit[j, k] -= whole
            open_ = {pair: has for pair, has in open_.items() if pair[0] != j and pair[1] != k}
        plan.append(row)
    return plan


### END HIDDEN TESTS

# %% check="rounds-one" points=1
# One device, by turns.
LAG = "who lags most, counting the round that comes?"
expect_each(rounds, [([[2], [1]], 3, 4)], [[[0], [1], [0], [0]]], "by turns", LAG)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_shares(draw.integer(2, 5), 1) for _ in range(8)]
cases.append(([[draw.integer(1, 9)], [0]], 24, 9))
expect_each(rounds, cases, [served_by_credit(*case) for case in cases], "by turns", LAG)
### END HIDDEN TESTS

# %% check="rounds-kinds" points=1
# Several kinds: a job on one device at a time, none where its share is 0.
KINDS = "has the job a device in this round, has it a share there, and is the device free?"
expect_each(
    rounds,
    [([[3, 1], [1, 3]], 4, 2), ([[3, 0], [1, 1]], 4, 3)],
    [[[0, 1], [0, 1]], [[0, 1], [0, 1], [1, None]]],
    "several kinds",
    KINDS,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_shares(draw.integer(2, 6), draw.integer(2, 4)) for _ in range(10)]
expect_each(rounds, cases, [served_by_credit(*case) for case in cases], "several kinds", KINDS)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Where a task strands least (2 points)
#
# GPUs are counted in tenths. A node is (free, cpus): the free tenths of each of its GPUs, 0 to 10, and its free CPUs. A task wants (tenths, cpus): up to
# 10 tenths, all from one GPU, or 20, 30, ..: whole GPUs, of which all tenths are free. `mix` lists usual tasks as (weight, tenths, cpus). A usual
# task that *fits* on a node can use each of its GPUs with min(tenths, 10) free or more, and no other; one that does not fit can use none. What a node
# strands is the sum over the mix of weight · (free tenths of the GPUs that this task cannot use).
#
# Put the task where the sum that its node strands grows least (or falls most); of equals the first node, then the first GPU. Whole GPUs: the first.
#
# > **API** `put(task, nodes, mix)` gets (tenths, cpus), a list of (list, whole number), and a list of tuples of three whole numbers. It
# > returns (growth, node, free): the growth, the number of the node and its GPUs' free tenths afterwards, a list; None if the task fits nowhere.


# %% answer="put"
def put(task, nodes, mix):
    """-> (growth of what is stranded, node, its free tenths afterwards) or None."""

    ### BEGIN SOLUTION
    def stranded(free, cpus):
        total = 0
        for weight, tenths, needs in mix:
            usable = [gpu for gpu in free if gpu >= min(tenths, 10)]
            fits = needs <= cpus and len(usable) >= math.ceil(tenths / 10)
            total += weight * (sum(free) - fits * sum(usable))
        return total

    options, (wants, needs) = [], task
    for node, (free, cpus) in enumerate(nodes):
        piece, count = min(wants, 10), math.ceil(wants / 10)
        able = [i for i, gpu in enumerate(free) if gpu >= piece]
        if cpus < needs or len(able) < count:
            continue
        for taken in [able[:count]] if count > 1 else [[i] for i in able]:
            after = [gpu - piece * (i in taken) for i, gpu in enumerate(free)]
            options.append((stranded(after, cpus - needs) - stranded(free, cpus), node, after))
    return min(options, key=lambda option: option[0], default=None)
    ### END SOLUTION


# %% judge="put_right"
def drawn_nodes(cpus):
    return [
        (
            [draw.choice((0, 2, 3, 5, 7, 10, 10)) for _ in range(draw.integer(1, 4))],
            draw.integer(*cpus),
        )
        for _ in range(draw.integer(2, 5))
    ]


def drawn_mix(sizes, cpus):
    return [(draw.integer(1, 9), draw.choice(sizes), draw.integer(*cpus)) for _ in range(3)]


### BEGIN HIDDEN TESTS
def best_place(task, nodes, mix):
    """By numbers of GPUs: `room` are those that a task could use."""

    def room(free, cpus, tenths, needs):
        able = [i for i, gpu in enumerate(free) if gpu >= tenths or gpu == 10]
        return able if cpus >= needs and 10 * len(able) >= tenths else []

    def lost(free, cpus):
        every = [(w, set(room(free, cpus, t, c))) for w, t, c in mix]
        return sum(w * gpu for w, ok in every for i, gpu in enumerate(free) if i not in ok)

    best = None
    for node, (free, cpus) in enumerate(nodes):
        able = room(free, cpus, *task)
        for i in able[:1] if task[0] > 10 else able:
            after, left = list(free), task[0]
            for gpu in [i, *(other for other in able if other > i)]:
                part = min(left, 10)
                after[gpu], left = after[gpu] - part, left - part
            growth = lost(after, cpus - task[1]) - lost(free, cpus)
            if best is None or growth < best[0]:
                best = growth, node, after
    return best


### END HIDDEN TESTS

# %% check="put-part" points=1
# A part of a GPU, with CPUs for all.
PIECES = "which usual task can use the piece that is left, and could it before?"
expect_each(
    put,
    [((5, 1), [([10], 50), ([7, 5], 50)], [(1, 6, 1)]), ((3, 1), [([10, 5], 50)], [(2, 7, 1)])],
    [(-5, 1, [7, 0]), (-6, 0, [10, 2])],
    "pieces",
    PIECES,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [
    ((draw.integer(1, 10), 1), drawn_nodes((50, 60)), drawn_mix(range(1, 11), (1, 4)))
    for _ in range(20)
]
expect_each(put, cases, [best_place(*case) for case in cases], "pieces", PIECES)
### END HIDDEN TESTS

# %% check="put-cpus" points=1
# Whole GPUs, and nodes whose CPUs run out.
CPUS = "who can still use the node's GPUs with the CPUs that are left?"
expect_each(
    put,
    [
        ((20, 4), [([10, 10, 10], 5), ([10, 10], 9)], [(1, 10, 2)]),
        ((20, 1), [([10, 9], 9)], [(1, 1, 1)]),
    ],
    [(0, 1, [0, 0]), None],
    "CPUs",
    CPUS,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
SIZES = (2, 3, 5, 7, 10, 20, 30)
cases = [
    ((draw.choice(SIZES), draw.integer(1, 5)), drawn_nodes((1, 10)), drawn_mix(SIZES, (1, 6)))
    for _ in range(30)
]
expect_each(put, cases, [best_place(*case) for case in cases], "CPUs", CPUS)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. One second shorter, as cheaply as can be (2 points)
#
# Tasks of a step wait for each other: task i begins when those of `needs[i]`, all with lower numbers, have ended, and lasts seconds[i]. Any task can be made
# one second shorter, at a higher clock, for cost[i] more energy. Which tasks have to be, so that the whole step is at least one second shorter, for the
# least sum of costs?
#
# > **API** `shorter(needs, seconds, cost)` gets a list of lists of task numbers, and lists of whole numbers above 0 (seconds above 1). It returns
# > a list of tasks, each at most once; of several cheapest ones any. There are up to 11 tasks.


# %% answer="shorter"
def shorter(needs, seconds, cost):
    """-> the cheapest tasks to be made one second shorter."""

    ### BEGIN SOLUTION
    def length(less):
        ends = []
        for i, before in enumerate(needs):
            ends.append(max((ends[j] for j in before), default=0) + seconds[i] - (i in less))
        return max(ends)

    tasks, whole = range(len(needs)), length(())
    sets = (some for count in tasks for some in combinations(tasks, count + 1))
    return list(min((s for s in sets if length(s) < whole), key=lambda s: sum(cost[i] for i in s)))
    ### END SOLUTION


# %% judge="shorter_right"
DIAMOND = [[], [0], [0], [1, 2]]


def paths(needs):
    """Every way from a task that waits for nobody to one for which nobody waits."""
    last = set(range(len(needs))) - {j for before in needs for j in before}
    open_, found = [[i] for i in last], []
    while open_:
        way = open_.pop()
        found += [way] if not needs[way[0]] else []
        open_ += [[j, *way] for j in needs[way[0]]]
    return found


def drawn_step(widths, several):
    """Layers of tasks; where `several` is True many paths are the longest."""
    needs, seconds, last = [], [], []
    for width in widths:
        lasts = draw.integer(2, 6)
        layer = list(range(len(needs), len(needs) + width))
        for _ in layer:
            needs.append(sorted(draw.several(last, draw.integer(1, len(last)))) if last else [])
            seconds.append(lasts if several else draw.integer(2, 90))
        last = layer
    return needs, seconds, [draw.integer(1, 9) for _ in needs]


### BEGIN HIDDEN TESTS
def least_cost(needs, seconds, cost):
    """The cheapest set with a task on each of the longest paths: one path after the other."""
    length = {tuple(way): sum(seconds[i] for i in way) for way in paths(needs)}
    longest = [way for way in length if length[way] == max(length.values())]
    sets = {frozenset(): 0}
    for way in longest:
        after = {}
        for some in sets:
            for more in [some] if some & set(way) else [some | {i} for i in way]:
                after[more] = sum(cost[i] for i in more)
        sets = after
    return min(sets.values())


### END HIDDEN TESTS


def expect_shorter(cases, least, property, hint):
    for said, (needs, seconds, cost), most in zip(ask_each(shorter, list(cases)), cases, least):
        where = f"(seen with {needs}, {seconds}, {cost})"
        known = range(len(needs))
        kind = type(said) is list and all(type(i) is int and i in known for i in said)
        expect(kind and len(set(said)) == len(said), "kind of result", f"a list of tasks {where}")
        long, now = (
            max(sum(seconds[i] - (i in less) for i in way) for way in paths(needs))
            for less in ((), said)
        )
        expect(now < long, property, f"{hint} {where}")
        cheap = sum(cost[i] for i in said) <= most
        expect(cheap, "the cheapest", f"which tasks are on several of the longest paths? {where}")


# %% check="shorter-path" points=1
# One longest path.
PATH = "which tasks make the step as long as it is?"
expect_shorter([([[], [0], [1]], [3, 4, 2], [5, 2, 3])], [2], "a longest path", PATH)
expect_shorter([(DIAMOND, [2, 5, 9, 2], [4, 1, 3, 5])], [3], "a longest path", PATH)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_step([draw.integer(1, 3) for _ in range(3)], False) for _ in range(8)]
expect_shorter(cases, [least_cost(*case) for case in cases], "a longest path", PATH)
### END HIDDEN TESTS

# %% check="shorter-cut" points=1
# Several: each needs a task that gets shorter.
CUT = "is every longest path shorter?"
expect_shorter([(DIAMOND, [2, 5, 5, 2], [4, 1, 2, 5])], [3], "every longest path", CUT)
expect_shorter([(DIAMOND, [2, 5, 5, 2], [4, 3, 2, 5])], [4], "every longest path", CUT)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_step([draw.integer(1, 3) for _ in range(3)], True) for _ in range(10)]
ladder = [[], [], [], [0, 1], [1, 2]], [3] * 5, [4, 5, 4, 9, 9]
cases += [ladder, ([[], [], [0], [0, 1], [1]], [2] * 5, [5, 5, 1, 4, 1])]
expect_shorter(cases, [least_cost(*case) for case in cases], "every longest path", CUT)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Devices by goodput (2 points)
#
# `goodput[j][c]` is what job j makes of c devices, c from 0 to n. Curves have any shape: a job may gain nothing before it has a whole node, and
# lose on too many devices. Share out n devices for the largest sum. Devices may be left over.
#
# > **API** `devices(goodput, n)` gets a list with a list of n + 1 whole numbers for each job, 0 or more, and n. It returns (sum, counts): the largest
# > sum and the list of how many devices each job has then; of several splits any. Up to 12 jobs and 80 devices.


# %% answer="devices"
def devices(goodput, n):
    """-> (largest sum, [job] -> devices)."""
    ### BEGIN SOLUTION
    best = [(0, ())] * (n + 1)
    for curve in goodput:
        best = [
            max((best[c - own][0] + curve[own], (*best[c - own][1], own)) for own in range(c + 1))
            for c in range(n + 1)
        ]
    return best[n][0], list(best[n][1])
    ### END SOLUTION


# %% judge="devices_right"
def less_and_less(n):
    gains = sorted((draw.integer(0, 99) for _ in range(n)), reverse=True)
    return [sum(gains[:c]) for c in range(n + 1)]


def whole_nodes(n):
    """It gains by nodes of some devices, and each device costs a little."""
    node, gain = draw.integer(2, 6), draw.integer(40, 90)
    return [max(0, c // node * gain - 3 * c) for c in range(n + 1)]


### BEGIN HIDDEN TESTS
def largest(goodput, n):
    """Curves joined in pairs: what two jobs make of c devices is the curve of one."""
    curves = [list(curve) for curve in goodput]
    while len(curves) > 1:
        a, b = curves.pop(0), curves.pop(0)
        curves.append([max(map(sum, zip(a[: c + 1], b[c::-1]))) for c in range(n + 1)])
    return max(curves[0])


### END HIDDEN TESTS


def expect_devices(cases, largest_sums, property, hint):
    for said, (goodput, n), most in zip(ask_each(devices, list(cases)), cases, largest_sums):
        where = f"(seen with {n} devices)"
        kind = isinstance(said, (list, tuple)) and len(said) == 2 and type(said[1]) is list
        kind = kind and type(said[0]) is int and len(said[1]) == len(goodput)
        kind = kind and all(type(c) is int and 0 <= c <= n for c in said[1])
        expect(kind, "kind of result", f"a number, and a count for each job {where}")
        expect(
            sum(said[1]) <= n, "devices there are", f"more are given away than there are {where}"
        )
        made = sum(curve[c] for curve, c in zip(goodput, said[1]))
        expect(said[0] == made, "the sum", f"do the counts make the sum that is told? {where}")
        expect(made == most, property, f"{hint} {where}")


# %% check="devices-gain" points=1
# Each further device gains less.
GAIN = "who gains most from one more device?"
expect_devices([([[0, 5, 8, 9], [0, 4, 7, 9]], 3)], [12], "less and less", GAIN)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
sizes = [(10, 60), *((draw.integer(2, 8), draw.integer(3, 30)) for _ in range(5))]
cases = [([less_and_less(n) for _ in range(jobs)], n) for jobs, n in sizes]
expect_devices(cases, [largest(*case) for case in cases], "less and less", GAIN)
### END HIDDEN TESTS

# %% check="devices-nodes" points=1
# Curves of any shape, and many devices.
SHAPE = "is it enough to look one device ahead?"
expect_devices([([[0, 3, 4, 4, 4], [0, 0, 0, 0, 9]], 4)], [9], "any shape", SHAPE)
expect_devices([([[0, 3, 1], [0, 2, 0]], 2)], [5], "any shape", SHAPE)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = []
for jobs, n in [(3, 12), (4, 19), (12, 80), (2, 30)]:
    curves = [draw.choice((whole_nodes, less_and_less))(n) for _ in range(jobs - 1)]
    cases.append(([*curves, whole_nodes(n)], n))
cases.append(([[0, 9] + [0] * 8, [0, 7] + [1] * 8], 9))
expect_devices(cases, [largest(*case) for case in cases], "any shape", SHAPE)
### END HIDDEN TESTS
