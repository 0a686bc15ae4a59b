# %% [markdown]
# # Exercises 26: networks
#
# Five tasks, 10 points, about two hours. Read chapter 26 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 26
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 1 is Bertsekas and Gallager 1992, *Data Networks*, section 6.5.2; task 3 Ethereal (Addanki et al. 2024, arXiv:2407.00550); task 4
# HPCC's algorithm 1 (Li et al. 2019); task 5 CASSINI's circle of time (Rajasekaran et al. 2024, arXiv:2308.00852).

# %% given="setup"
import math
from fractions import Fraction
from itertools import product

# %% judge="tools"
from collections import Counter

from minitrain.course.grading.answer_checks import Draw, ask, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values
PAIR = "numerator and denominator, as `Fraction.as_integer_ratio` gives them"


def fraction(pair, where):
    """The Fraction of an answer's pair."""
    kind = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(x) is int for x in pair)
    expect(kind and pair[1] > 0, "kind of result", f"{PAIR} {where}")
    return Fraction(*pair)


def expect_each(answer, cases, right, property, hint, **rules):
    """`right` of each case, exactly."""
    for said, case in zip(ask_each(answer, list(cases), **rules), cases):
        wanted = right(*case)
        expect(type(said) is type(wanted), "kind of result", f"see the API (seen with {case})")
        expect(said == wanted, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Fair rates (2 points)
#
# Flows pass cables; a cable has a capacity. *Max-min fair* rates are found by filling: all flows grow at the same pace until some cable is full. The
# flows on it stop there; the others go on, until each has stopped.
#
# Return the rate of every flow, in the order of the flows. A flow has no limit of its own, only its cables', and passes one at least.
#
# > **API** `fair(flows, capacity)` gets a list of lists of names of cables (none twice in one flow), and a dict {cable: whole number above 0}.
# > It returns the exact rates, each as (numerator, denominator), which `Fraction.as_integer_ratio` gives. Up to 30 flows and 20 cables; some cables
# > have no flow.


# %% answer="fair"
def fair(flows, capacity):
    """[flow] -> its max-min fair rate, as (numerator, denominator)."""
    ### BEGIN SOLUTION
    rates, growing, level = [Fraction(0)] * len(flows), set(range(len(flows))), Fraction(0)
    while growing:
        on = {cable: [f for f in growing if cable in flows[f]] for cable in capacity}
        fixed = {
            c: sum(rates[f] for f, path in enumerate(flows) if f not in growing and c in path)
            for c in on
        }
        level = min((capacity[c] - fixed[c]) / Fraction(len(on[c])) for c in on if on[c])
        full = [c for c in on if on[c] and fixed[c] + level * len(on[c]) == capacity[c]]
        for flow in {f for c in full for f in on[c]}:
            rates[flow] = level
            growing.remove(flow)
    return [rate.as_integer_ratio() for rate in rates]
    ### END SOLUTION


# %% judge="fair_right"
def is_fair(flows, capacity, rates):
    """Bertsekas and Gallager's test: no cable is over-full, and each flow has a full cable on which no flow is faster."""
    load = {c: sum(rates[f] for f, path in enumerate(flows) if c in path) for c in capacity}
    if any(load[c] > capacity[c] for c in capacity):
        return False
    fastest = {
        c: max([rates[f] for f, path in enumerate(flows) if c in path], default=0) for c in capacity
    }
    return all(
        any(load[c] == capacity[c] and rates[f] == fastest[c] for c in path)
        for f, path in enumerate(flows)
    )


def expect_fair(cases, property, hint):
    for said, (flows, capacity) in zip(ask_each(fair, list(cases)), cases):
        kind = isinstance(said, list) and len(said) == len(flows)
        expect(kind, "kind of result", f"a list with a rate for each flow (seen with {flows})")
        said = [fraction(rate, f"(seen with {flows})") for rate in said]
        expect(is_fair(flows, capacity, said), property, f"{hint} (seen with {flows}, {capacity})")


def drawn_flows(cables, flows, most):
    names = [f"c{i}" for i in range(cables)]
    paths = [draw.several(names, draw.integer(1, min(cables, most))) for _ in range(flows)]
    return paths, {name: draw.integer(1, 40) for name in names}


# %% check="fair-one" points=1
# One cable, or several that no flow connects: equal shares.
CASES = [([["a"], ["a"], ["a"]], {"a": 10}), ([["a"], ["b"], ["b"]], {"a": 3, "b": 5, "c": 1})]
expect_fair(CASES, "equal shares", "how many flows share the cable?")
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_fair(
    [drawn_flows(draw.integer(1, 6), draw.integer(1, 12), 1) for _ in range(8)],
    "equal shares",
    "how many flows share the cable?",
)
### END HIDDEN TESTS

# %% check="fair-many" points=1
# Flows over several cables: what one leaves, others get.
LEFT = "when a flow has stopped, what is left on its other cables, and for how many?"
expect_fair(
    [
        ([["a", "b"], ["a"], ["b"]], {"a": 4, "b": 10}),
        ([["a", "b"], ["a"], ["b"], ["b", "c"]], {"a": 9, "b": 12, "c": 1}),
    ],
    "what is left",
    LEFT,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_fair([([["a", "b"], ["a"], ["a"], ["b"]], {"a": 6, "b": 30})], "what is left", LEFT)
expect_fair(
    [drawn_flows(draw.integer(3, 20), draw.integer(4, 30), 4) for _ in range(12)],
    "what is left",
    LEFT,
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The busiest uplink (2 points)
#
# n flows choose among uplinks at random, independently of each other. Uplinks are not equally likely: uplink i is chosen with probability w[i] / sum(w), as when a
# switch weighs paths by their speed. Return the mean number of flows on the uplink with the most flows, exactly.
#
# For eight flows on eight equal uplinks that is 2.597, the number of the chapter.
#
# > **API** `busiest(n, w)` gets a whole number from 1 to 40 and a list of one to eight whole numbers above 0. It returns the exact mean as
# > (numerator, denominator), as `Fraction.as_integer_ratio` gives it. 8^40 outcomes are too many to go through.


# %% answer="busiest"
def busiest(n, w):
    """The mean of the largest number of flows on an uplink, as (numerator, denominator)."""
    ### BEGIN SOLUTION
    total = Fraction(0)
    for m in range(n):  # the probability that some uplink has more than m
        ways = [1] + [0] * n
        for weight in w:
            ways = [
                sum(math.comb(i, j) * weight**j * ways[i - j] for j in range(min(i, m) + 1))
                for i in range(n + 1)
            ]
        total += 1 - Fraction(ways[n], sum(w) ** n)
    return total.as_integer_ratio()
    ### END SOLUTION


# %% judge="busiest_right"
def right_busiest(n, w):
    """By states: how many flows each uplink has so far, sorted with its weight, merged, one flow after the other."""
    states = {((0,) * len(w)): 1}
    for _ in range(n):
        after = Counter()
        for state, ways in states.items():
            for i, weight in enumerate(w):
                after[(*state[:i], state[i] + 1, *state[i + 1 :])] += ways * weight
        states = after
    return Fraction(sum(max(state) * ways for state, ways in states.items()), sum(w) ** n)


def expect_busiest(cases, property, hint):
    for said, one in zip(ask_each(busiest, list(cases)), cases):
        said = fraction(said, f"(seen with {one})")
        expect(said == right_busiest(*one), property, f"{hint} (seen with {one})")


ALL_OF_THEM = "how likely is it that no uplink has more than m?"

# %% check="busiest-equal" points=1
# Equal uplinks.
expect_busiest([(1, [1, 1]), (2, [1, 1]), (3, [1, 1, 1]), (4, [2, 2])], "the mean", ALL_OF_THEM)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
equal = [(draw.integer(1, 7), [1] * draw.integer(1, 4)) for _ in range(6)]
expect_busiest([*equal, (8, [1] * 8)], "the mean", ALL_OF_THEM)
### END HIDDEN TESTS

# %% check="busiest-weighted" points=1
# Uplinks that are chosen more often than others, and many flows.
WEIGHTS = "with what probability does a flow choose an uplink?"
expect_busiest([(2, [1, 3]), (3, [2, 1, 1])], "weights", WEIGHTS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
unequal = [
    (draw.integer(2, 7), [draw.integer(1, 5) for _ in range(draw.integer(2, 4))]) for _ in range(6)
]
large = draw.integer(30, 40), [draw.integer(1, 9), draw.integer(1, 9), 1]
expect_busiest([*unequal, (2, [5, 1]), large], "weights", WEIGHTS)
largest = fraction(ask(busiest, 40, [1] * 8), "(seen with 40 flows, eight uplinks)")
expect(8 < largest < 10, "weights", "an uplink has five on average; how far above is the busiest?")
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Split as few as possible (2 points)
#
# n equal flows go from one leaf to another, and each may use all p paths. Path j already carries base[j] whole flows of others, which stay where they
# are. Give each new flow its shares of the paths so that in the end every path carries exactly the same, (n + sum(base)) / p, and split as few flows as
# you must: (n + sum(base)) mod p of them, n mod p if nothing was there. Where others are there, every path has room for one whole flow at least.
#
# > **API** `split(n, base)` gets a whole number and a list of p whole numbers, 0 or more. It returns n lists, one for each flow, of tuples (path,
# > numerator, denominator): its share of that path, above 0. Those of a flow sum to 1, and name no path twice. At
# > most (n + sum(base)) mod p lists have more than one path.


# %% answer="split"
def split(n, base):
    """[flow] -> [(path, numerator, denominator), ...]: even on all paths, few flows split."""
    ### BEGIN SOLUTION
    p = len(base)
    even = Fraction(n + sum(base), p)
    room = [even - have for have in base]
    shares = []
    for path in range(p):  # whole flows first
        while room[path] >= 1:
            shares.append({path: Fraction(1)})
            room[path] -= 1
    path = 0
    while len(shares) < n:  # then the rest, end to end
        left, parts = Fraction(1), {}
        while left:
            if not room[path]:
                path += 1
                continue
            part = min(left, room[path])
            parts[path] = part
            left, room[path] = left - part, room[path] - part
        shares.append(parts)
    return [[(path, *part.as_integer_ratio()) for path, part in one.items()] for one in shares]
    ### END SOLUTION


# %% judge="split_right"
def expect_split(cases, property, hint):
    for said, (n, base) in zip(ask_each(split, list(cases)), cases):
        where = f"(seen with {n} flows, base {base})"
        kind = isinstance(said, list) and len(said) == n
        kind = kind and all(isinstance(one, list) and len(one) for one in said)
        kind = kind and all(len(part) == 3 for one in said for part in one)
        expect(kind, "kind of result", f"for each flow a list of tuples of three {where}")
        listed, said = said, [{one[0]: fraction(one[1:], where) for one in each} for each in said]
        expect([*map(len, listed)] == [*map(len, said)], "kind of result", f"a path twice {where}")
        above = all(part > 0 for one in said for part in one.values())
        expect(above, "kind of result", f"no share is 0 or less {where}")
        known = all(type(path) is int and 0 <= path < len(base) for one in said for path in one)
        expect(
            known and all(sum(one.values()) == 1 for one in said),
            "all of a flow",
            f"do its shares sum to 1? {where}",
        )
        load = Counter(dict(enumerate(base)))
        for one in said:
            load.update(one)
        even = Fraction(n + sum(base), len(base))
        expect(all(load[path] == even for path in range(len(base))), property, f"{hint} {where}")
        many = sum(len(one) > 1 for one in said)
        most = (n + sum(base)) % len(base)
        expect(many <= most, "flows split", f"which flows need no second path? {where}")


EVEN = "what does each path carry in the end?"

# %% check="split-empty" points=1
# Nothing is there yet.
expect_split([(4, [0, 0]), (5, [0, 0, 0]), (20, [0] * 8), (3, [0] * 4)], "even paths", EVEN)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_split(
    [(draw.integer(1, 60), [0] * draw.integer(1, 12)) for _ in range(12)], "even paths", EVEN
)
### END HIDDEN TESTS

# %% check="split-base" points=1
# Others are there.
expect_split([(5, [1, 0, 0]), (9, [0, 2, 1, 0])], "what is there", EVEN)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def drawn_base():
    paths = draw.integer(2, 9)
    base = [draw.integer(0, 3) for _ in range(paths)]
    return paths * draw.integer(4, 6) + draw.integer(0, paths - 1) - sum(base), base


expect_split([drawn_base() for _ in range(12)], "what is there", EVEN)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. A window from stamps (2 points)
#
# Each link stamps a packet as it leaves: bytes still queued, bytes sent in all, the time, the link's rate in bytes per second. An acknowledgement brings
# back the stamps of all links of the path; the sender has those of the acknowledgement before. For each link, with T the round-trip time of an
# empty network,
#
#     u = (the smaller of both queues) / (rate · T)  +  (bytes sent in between / seconds in between) / rate
#
# The busiest link counts: U is the largest u. The new window is reference / (U / eta) + more, if U ≥ eta or stage ≥ 5, and reference + more
# otherwise; but never above most.
#
# > **API** `window(before, now, T, reference, stage, eta, more, most)` gets two lists of tuples (queued, sent, time, rate), one for each link, and
# > numbers, whole but for eta, which is (numerator, denominator). It returns (U, window), exactly, each as `Fraction.as_integer_ratio` gives it.


# %% answer="window"
def window(before, now, T, reference, stage, eta, more, most):
    """(U of the busiest link, the new window)."""
    ### BEGIN SOLUTION
    used, eta = Fraction(0), Fraction(*eta)
    for (q0, s0, t0, _), (q1, s1, t1, rate) in zip(before, now):
        used = max(used, Fraction(min(q0, q1)) / (rate * T) + Fraction(s1 - s0) / (t1 - t0) / rate)
    target = reference + more
    if used >= eta or stage >= 5:
        target = Fraction(reference) / (used / eta) + more
    return used.as_integer_ratio(), Fraction(min(target, most)).as_integer_ratio()
    ### END SOLUTION


# %% judge="window_right"
def right_window(before, now, T, reference, stage, eta, more, most):
    eta = Fraction(*eta)
    of_link = [
        (Fraction(min(b[0], n[0]), 1) / T + Fraction(n[1] - b[1]) / (n[2] - b[2])) / n[3]
        for b, n in zip(before, now)
    ]
    proportional = max(of_link) >= eta or stage >= 5
    grown = reference * eta / max(of_link) if proportional else Fraction(reference)
    return max(of_link), min(Fraction(grown + more), Fraction(most))


def drawn_stamps(links):
    before, now = [], []
    for _ in range(links):
        rate, at, sent = draw.integer(10, 100), draw.integer(0, 50), draw.integer(0, 10**4)
        lasted = draw.integer(1, 20)
        before.append((draw.integer(0, 900), sent, at, rate))
        now.append((draw.integer(0, 900), sent + draw.integer(1, rate * lasted), at + lasted, rate))
    return before, now


def case(links, stage, eta=(95, 100), most=10**9):
    return (
        *drawn_stamps(links),
        draw.integer(5, 30),
        draw.integer(1000, 9000),
        stage,
        eta,
        draw.integer(1, 50),
        most,
    )


def expect_window(cases, which, property, hint):
    for pair, one in zip(ask_each(window, list(cases)), cases):
        two = isinstance(pair, (list, tuple)) and len(pair) == 2
        expect(two, "kind of result", f"two numbers (seen with {one})")
        said = [fraction(number, f"(seen with {one})") for number in pair]
        expect(said[which] == right_window(*one)[which], property, f"{hint} (seen with {one})")


LINK = "of which link, with which queue, over which time?"
STEP = "when does the window grow by a little, and when in proportion?"
ONE = ([(100, 0, 0, 10)], [(40, 90, 10, 10)], 8, 1000, 0, (19, 20), 5, 10**6)
PATH = [(0, 0, 0, 10), (300, 50, 0, 5)], [(10, 100, 10, 10), (200, 75, 10, 5)]
TWO = (*PATH, 8, 900, 0, (19, 20), 5, 10**6)

# %% check="window-use" points=1
# U: the busiest link of the path.
expect_window([ONE, TWO], 0, "the busiest link", LINK)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
some = [case(draw.integer(1, 5), draw.integer(0, 6)) for _ in range(12)]
expect_window(some, 0, "the busiest link", LINK)
### END HIDDEN TESTS

# %% check="window-step" points=1
# The window: in proportion, a little at a time, and never above the most.
expect_window([ONE, TWO], 0, "the busiest link", LINK)
expect_window([ONE, TWO, (*ONE[:4], 5, *ONE[5:])], 1, "the step", STEP)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
few = [case(draw.integer(1, 4), stage, (draw.integer(50, 99), 100)) for stage in range(8)]
idle = [
    ([(0, 0, 0, 10)], [(0, 10, 10, 10)], 8, 1000, stage, (9, 10), 7, 10**6)
    for stage in (0, 4, 5, 6)
]
exactly = [([(0, 0, 0, 10)], [(0, 90, 10, 10)], 8, 1000, 0, (9, 10), 70, 10**6)]
capped = [case(2, stage, (95, 100), draw.integer(10, 900)) for stage in (0, 5)]
expect_window(few + idle + exactly, 1, "the step", STEP)
expect_window(capped, 1, "the most", "may a window be larger than what fits into the path?")
### END HIDDEN TESTS

# %% [markdown]
# ## 5. When should each job start (2 points)
#
# Jobs share a cable. Job i sends in the first on[i] seconds of each period[i] seconds, all of them whole. A second in which two send is lost to one of them. The
# *excess* of a second is the number of jobs that send in it, minus 1, if that is above 0; what counts is the sum over one round of all jobs together,
# after which everything repeats.
#
# Choose when each job starts. The first starts at 0, job i at a second from 0 to period[i] - 1.
#
# > **API** `starts(period, on)` gets two lists of equal length. It returns a tuple (excess, starts): the least sum over one round (the least common
# > multiple of the periods), and the list of starts that reaches it; of several the first in the order of lists. Up to four jobs, periods up to 12.


# %% answer="starts"
def starts(period, on):
    """(least excess over one round, the starts that reach it)."""
    ### BEGIN SOLUTION
    round_s, best = math.lcm(*period), None
    for chosen in product([0], *(range(length) for length in period[1:])):
        sending = (
            sum((t - s) % p < d for p, d, s in zip(period, on, chosen)) for t in range(round_s)
        )
        excess = sum(max(0, many - 1) for many in sending)
        if best is None or excess < best[0]:
            best = excess, list(chosen)
    return best
    ### END SOLUTION


# %% judge="starts_right"
def excess_of(period, on, chosen):
    many = Counter()
    round_s = math.lcm(*period)
    for p, d, s in zip(period, on, chosen):
        many.update((s + k * p + i) % round_s for k in range(round_s // p) for i in range(d))
    return sum(count - 1 for count in many.values() if count > 1)


def right_starts(period, on):
    every = product([0], *map(range, period[1:]))
    return min((excess_of(period, on, chosen), list(chosen)) for chosen in every)


def expect_starts(cases, property, hint):
    for said, one in zip(ask_each(starts, list(cases)), cases):
        kind = isinstance(said, (list, tuple)) and len(said) == 2 and isinstance(said[1], list)
        expect(kind, "kind of result", f"a number and a list (seen with {one})")
        expect(tuple(said) == right_starts(*one), property, f"{hint} (seen with {one})")


ROUND = "over how many seconds does everything repeat, and how many jobs send in each?"

# %% check="starts-alike" points=1
# Jobs with the same period.
expect_starts(
    [([12, 12], [6, 6]), ([4, 4], [3, 2]), ([6, 6, 6], [2, 2, 2])], "equal periods", ROUND
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(6):
    p, count = draw.integer(3, 9), draw.integer(2, 3)
    expect_starts(
        [([p] * count, [draw.integer(1, p - 1) for _ in range(count)])], "equal periods", ROUND
    )
### END HIDDEN TESTS

# %% check="starts-apart" points=1
# Jobs with different periods.
expect_starts([([6, 4], [2, 1]), ([4, 6, 3], [1, 2, 1])], "one round", ROUND)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(6):
    periods = [draw.integer(2, 9) for _ in range(draw.integer(2, 3))]
    expect_starts([(periods, [draw.integer(1, p) for p in periods])], "one round", ROUND)
expect_starts([([6, 4], [3, 1]), ([3, 4], [1, 1]), ([8, 12], [4, 6])], "one round", ROUND)
### END HIDDEN TESTS
