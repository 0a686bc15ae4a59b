# %% [markdown]
# # Exercises 23: planning
#
# Five tasks, 10 points, about two hours. Read chapter 23 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 23
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 2 is the inner problem of PipeDream (Narayanan et al. 2019), task 4 the walk of FlexFlow (Jia et al. 2019, arXiv:1807.05358).

# %% given="setup"
import math
from fractions import Fraction
from itertools import combinations, product

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, right, property, hint):
    """`right` of each case: floats to 1e-12, all else exactly."""
    for said, case in zip(ask_each(answer, list(cases)), cases):
        wanted = right(*case)
        expect(type(said) is type(wanted), "kind of result", f"see the API (seen with {case})")
        near = (
            math.isclose(said, wanted, rel_tol=1e-12) if type(wanted) is float else said == wanted
        )
        expect(near, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Which layouts fit (2 points)
#
# A layout is (dp, tp, pp, zero). Of a model with P parameters a rank has P / (tp · pp), each with 2 bytes of weight, 2 of gradient and 12 of optimizer
# state. ZeRO 1 cuts the optimizer state over dp, 2 the gradients as well, 3 the weights as well. Besides, it keeps activations: of one microbatch
# A / tp bytes for the whole model, so A / (tp · pp) on a stage, of as many microbatches as the first stage of 1F1B has in flight: the smaller of pp
# and m.
#
# Return those of the layouts that need at most M bytes, in the order in which they came.
#
# > **API** `fitting(layouts, P, A, m, M)` gets a list of tuples of four whole numbers, and whole numbers. It returns some of them, each as a list.
# > Divide as `Fraction` does: a layout that needs exactly M bytes fits.


# %% answer="fitting"
def fitting(layouts, P, A, m, M):
    """The layouts that need at most M bytes on a rank."""

    ### BEGIN SOLUTION
    def needs(dp, tp, pp, zero):
        of_one = sum(
            Fraction(size, dp if zero >= stage else 1) for size, stage in ((12, 1), (2, 2), (2, 3))
        )
        return of_one * P / (tp * pp) + Fraction(A, tp * pp) * min(pp, m)

    return [list(layout) for layout in layouts if needs(*layout) <= M]
    ### END SOLUTION


# %% judge="bytes_of"
def bytes_of(layout, P, A, m):
    dp, tp, pp, zero = layout
    sixteen = {0: 16, 1: 4 + Fraction(12, dp), 2: 2 + Fraction(14, dp), 3: Fraction(16, dp)}[zero]
    return (sixteen * P + A * min(pp, m)) / Fraction(tp * pp)


def right_fitting(layouts, P, A, m, M):
    return [list(layout) for layout in layouts if bytes_of(layout, P, A, m) <= M]


def expect_fitting(P, A, m, layouts, property, hint):
    """M is what each layout needs, and one byte less."""
    cases = []
    for layout in layouts:
        M = math.ceil(bytes_of(layout, P, A, m))
        cases += [(layouts, P, A, m, M), (layouts, P, A, m, M - 1)]
    expect_each(fitting, cases, right_fitting, property, hint)


STATES = "which of the 16 bytes does a stage of ZeRO cut, and over how many ranks?"
FLIGHT = "how many microbatches has the first stage in flight?"

# %% check="fitting-states" points=1
# States alone: no activations.
expect_fitting(960, 0, 1, [(2, 1, 1, z) for z in range(4)], "states", STATES)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(6):
    some = [(draw.integer(1, 9), *draw.several((1, 2, 3, 4, 6), 2), z) for z in range(4)]
    expect_fitting(draw.integer(900, 9000), 0, draw.integer(1, 9), some, "states", STATES)
### END HIDDEN TESTS

# %% check="fitting-activations" points=1
# And activations of the microbatches in flight.
expect_fitting(96, 4800, 8, [(2, 1, p, 1) for p in (1, 2, 4)], "activations", FLIGHT)
expect_fitting(96, 4800, 2, [(1, 2, p, 0) for p in (1, 2, 4, 8)], "activations", FLIGHT)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(6):
    some = [(draw.integer(1, 5), draw.integer(1, 8), draw.integer(1, 12), z) for z in range(4)]
    sizes = draw.integer(90, 900), draw.integer(900, 9000), draw.integer(1, 9)
    expect_fitting(*sizes, some, "activations", FLIGHT)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The smallest slowest stage (2 points)
#
# A chain of layers is cut into exactly p stages of neighbours, none empty. A step goes at the pace of the slowest stage, and each stage but the
# last also sends what its last layer makes: stage time = sum of its layers' seconds + the seconds of its last layer's message. Return the
# seconds of the slowest stage for the best cut.
#
# > **API** `slowest(seconds, sends, p)` gets two lists of whole numbers, of equal length (`sends[i]` is paid if a cut comes after layer i), and p
# > from 1 to the number of layers. It returns a whole number. There are up to 200 layers and 20 stages.


# %% answer="slowest"
def slowest(seconds, sends, p):
    """Seconds of the slowest of p stages, for the cut where that is least."""
    ### BEGIN SOLUTION
    n, before = len(seconds), [0]
    for second in seconds:
        before.append(before[-1] + second)
    best = [before[i] + sends[i - 1] if i else math.inf for i in range(n)] + [before[n]]
    for _ in range(p - 1):
        cost = lambda j, i: before[i] - before[j] + (sends[i - 1] if i < n else 0)
        best = [
            min((max(best[j] if j else math.inf, cost(j, i)) for j in range(i)), default=math.inf)
            for i in range(n + 1)
        ]
    return best[n]
    ### END SOLUTION


# %% judge="right_slowest"
def right_slowest(seconds, sends, p):
    n, costs = len(seconds), []
    for cuts in combinations(range(1, n), p - 1):
        ends = (0, *cuts, n)
        times = [sum(seconds[a:b]) + (sends[b - 1] if b < n else 0) for a, b in zip(ends, ends[1:])]
        costs.append(max(times))
    return min(costs)


def drawn_chain(n, most):
    p = draw.integer(1, n)
    return [draw.integer(1, 30) for _ in range(n)], [draw.integer(0, most) for _ in range(n)], p


PACE = "is there a cut whose slowest stage is faster, with p stages of which none is empty?"
MESSAGE = "who pays for the message at a cut, and who sends none?"

# %% check="slowest-free" points=1
# Messages cost nothing.
free = [([5, 1, 1, 5], [0] * 4, 2), ([9, 1, 1, 1], [0] * 4, 3), ([4, 4], [0, 0], 1)]
expect_each(slowest, free, right_slowest, "pace", PACE)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
drawn = [drawn_chain(draw.integer(4, 9), 0) for _ in range(12)]
expect_each(slowest, drawn, right_slowest, "pace", PACE)
expect_each(slowest, [([7, 3, 3, 3, 3, 7], [0] * 6, 3)], right_slowest, "pace", PACE)
expect_each(slowest, [([1] * 200, [0] * 200, 20)], lambda *_: 10, "pace", PACE)
### END HIDDEN TESTS

# %% check="slowest-messages" points=1
# Messages cost something.
paid = [([5, 5, 5, 5], [1, 9, 1, 9], 2), ([3, 3, 3], [8, 1, 99], 2), ([3, 3], [1, 50], 1)]
expect_each(slowest, paid, right_slowest, "messages", MESSAGE)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
drawn = [drawn_chain(draw.integer(4, 9), 25) for _ in range(12)]
expect_each(slowest, drawn, right_slowest, "messages", MESSAGE)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A ring over two levels (2 points)
#
# An all-reduce of n bytes over a ring of r ranks has 2(r - 1) steps; in each every rank sends n / r bytes to the next one, and a step ends when the
# slowest link is done. Ranks are numbered through nodes of `node` ranks: 0 .. node - 1 are in the first. Inside a node a byte takes `fast`
# seconds, between nodes `slow`. The ring's members are the ranks `first`, `first + stride`, .. : r of them, and the last one sends to the first.
#
# > **API** `ring(n, r, first, stride, node, fast, slow)` gets whole numbers and returns a float. `fast` <= `slow`. Each link carries this
# > ring alone.


# %% answer="ring"
def ring(n, r, first, stride, node, fast, slow):
    """Seconds of the all-reduce."""
    ### BEGIN SOLUTION
    nodes = {(first + i * stride) // node for i in range(r)}
    return 2 * (r - 1) * n / r * (slow if len(nodes) > 1 else fast)
    ### END SOLUTION


# %% judge="right_ring"
def right_ring(n, r, first, stride, node, fast, slow):
    members = [first + i * stride for i in range(r)]
    links = [(a // node, b // node) for a, b in zip(members, members[1:] + members[:1])]
    worst = max(fast if a == b else slow for a, b in links)
    return float(2 * (r - 1) * Fraction(n, r) * worst)


STEPS = "how many steps are there, and how many bytes go in each?"
LEVEL = "which is the slowest link that this ring passes?"

# %% check="ring-inside" points=1
# All members in one node.
inside = [(1200, 4, 0, 1, 8, 3, 50), (1000, 3, 8, 2, 8, 2, 70), (10, 1, 3, 1, 4, 1, 9)]
expect_each(ring, inside, right_ring, "steps and bytes", STEPS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
more = [(draw.integer(50, 5000), draw.integer(2, 8), 8, 1, 8, 2, 30) for _ in range(8)]
expect_each(ring, more, right_ring, "steps and bytes", STEPS)
### END HIDDEN TESTS

# %% check="ring-across" points=1
# Some of them elsewhere.
across = [(1200, 4, 0, 8, 8, 3, 50), (1200, 4, 6, 1, 8, 3, 50), (1200, 4, 0, 2, 8, 3, 50)]
expect_each(ring, across, right_ring, "slowest link", LEVEL)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
more = []
for _ in range(20):
    where = draw.integer(0, 20), draw.integer(1, 9), draw.choice([2, 3, 4, 8])
    more.append((draw.integer(50, 5000), draw.integer(2, 8), *where, 2, 30))
expect_each(ring, more, right_ring, "slowest link", LEVEL)
expect_each(
    ring, [(90, 3, 5, 1, 6, 2, 30), (90, 2, 6, 5, 6, 2, 30)], right_ring, "slowest link", LEVEL
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. A walk over plans (2 points)
#
# A random walk proposes one of the *other* k - 1 plans, each as likely, and goes there with probability min(1, 2^(now - new)), costs being whole
# numbers; else it stays. Return its transition matrix: row i has the probabilities to be at each plan one step after plan i. Written so, the
# share of time at a plan of cost c tends to 2^(-c) over the sum of all: cheap plans are visited often, and none is out of reach.
#
# > **API** `walk(costs)` gets a list of 2 to 8 whole numbers and returns a list of lists of floats.


# %% answer="walk"
def walk(costs):
    """The transition matrix, [from][to]."""
    ### BEGIN SOLUTION
    k, rows = len(costs), []
    for i, now in enumerate(costs):
        row = [Fraction(1, k - 1) * Fraction(1, 2 ** max(0, new - now)) for new in costs]
        row[i] = Fraction(0)
        row[i] = 1 - sum(row)
        rows.append([float(x) for x in row])
    return rows
    ### END SOLUTION


# %% judge="expect_walk"
def expect_walk(*cases):
    for said, costs in zip(ask_each(walk, [(costs,) for costs in cases]), cases):
        k, where = len(costs), f"(seen with costs {costs})"
        square = isinstance(said, list) and len(said) == k and all(len(row) == k for row in said)
        expect(square, "a square matrix", f"a row for each plan {where}")
        kinds = {type(x) for row in said for x in row}
        expect(kinds == {float}, "floats", f"each entry is a float {where}")
        expect(
            all(abs(sum(row) - 1) < 1e-12 for row in said),
            "rows add up to 1",
            f"who stays? {where}",
        )
        share = [2.0**-c for c in costs]
        after = [sum(share[i] * said[i][j] for i in range(k)) for j in range(k)]
        hint = "what is at 2^-c must be there after a step as well"
        same = all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(after, share))
        expect(same, "stationary", f"{hint} {where}")
        others = [(i, j) for i, j in product(range(k), repeat=2) if i != j]
        down = [said[i][j] for i, j in others if costs[j] <= costs[i]]
        hint = "a cheaper plan is always taken, once proposed; how likely is it proposed?"
        likely = all(abs(x - 1 / (k - 1)) < 1e-12 for x in down)
        expect(likely, "downhill", f"{hint} {where}")


# %% check="walk-two" points=1
# Two plans.
expect_walk([3, 4], [5, 5], [9, 2])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_walk(*([draw.integer(0, 9), draw.integer(0, 9)] for _ in range(8)), [1, 9], [4, 1])
### END HIDDEN TESTS

# %% check="walk-many" points=1
# Several.
expect_walk([3, 4, 7], [1, 1, 2, 2])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_walk(*([draw.integer(0, 9) for _ in range(draw.integer(3, 8))] for _ in range(6)))
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Which term (2 points)
#
# A cost model says of each run how many seconds each of its terms takes; their sum is its prediction. The measured times are longer. Somebody
# claims: one term alone is wrong, and by the same factor in all runs. Find the term and the factor for which sum of terms, with this one multiplied,
# is the measured time of every run exactly.
#
# > **API** `culprit(runs)` gets a list of (terms, measured): a dict {name: whole seconds} with the same names in all runs, and whole seconds.
# > It returns [name, factor], text and a float, or None if no single term explains all runs. Terms may be 0 in a run; in
# > the first run none is, and it is never predicted right. There is never more than one answer.


# %% answer="culprit"
def culprit(runs):
    """(term, factor), or None."""
    ### BEGIN SOLUTION
    terms, measured = runs[0]
    for name in terms:
        factor = 1 + Fraction(measured - sum(terms.values()), terms[name])
        if all(sum(t.values()) + (factor - 1) * t[name] == time for t, time in runs):
            return [name, float(factor)]
    return None
    ### END SOLUTION


# %% judge="expect_culprit"
def drawn_runs(number, wrong=1):
    """Runs in which so many of the terms are wrong, and the answer."""
    names = draw.several(("products", "passes", "tp", "dp", "p2p", "bubble"), draw.integer(3, 5))
    bad = {name: Fraction(draw.integer(12, 40), 10) for name in draw.several(names, wrong)}
    runs = []
    for at in range(number):
        terms = {name: 10 * (draw.integer(1, 90) + 40 * (i == at)) for i, name in enumerate(names)}
        runs.append((terms, int(sum(bad.get(name, 1) * s for name, s in terms.items()))))
    return runs


def drawn_twins(number, alone, spoiled, reverse):
    """Two terms explain all runs but run `alone`, which one of them explains, or (spoiled) neither."""
    names = draw.several(("products", "passes", "tp", "dp", "p2p", "bubble"), draw.integer(3, 5))
    bad, twin = names[:2][:: -1 if reverse else 1]
    factor, often, runs = Fraction(draw.integer(12, 40), 10), draw.integer(2, 3), []
    for at in range(number):
        terms = {name: 10 * draw.integer(1, 90) for name in names}
        terms[twin] = often * terms[bad] + 10 * (at == alone)
        late = (factor - 1) * terms[bad] - (spoiled and at == alone)
        runs.append((terms, int(sum(terms.values()) + late)))
    return runs


def every_twins(spoiled):
    """Each run but the first is once the only one that decides, with either of the two terms first."""
    places = [(number, alone) for number in (3, 4, 5) for alone in range(1, number)]
    return [drawn_twins(*place, spoiled, reverse) for place in places for reverse in (False, True)]


def explanations(runs):
    found = []
    for name in runs[0][0]:
        off = [(time - sum(terms.values()), terms[name]) for terms, time in runs]
        first = Fraction(off[0][0], off[0][1])
        found += [(name, 1 + first)] * all(gap == first * term for gap, term in off)
    return found


def expect_culprit(*cases):
    cases = [runs for runs in cases if len(explanations(runs)) <= 1]
    for said, runs in zip(ask_each(culprit, [(runs,) for runs in cases]), cases):
        where = f"(seen with {len(runs)} runs, terms {[*runs[0][0]]})"
        wanted = (explanations(runs) or [None])[0]
        if wanted is None:
            hint = "does what explains the first run explain the others?"
            expect(said is None, "nothing explains it", f"{hint} {where}")
            continue
        pair = isinstance(said, list) and len(said) == 2
        expect(pair, "a term and a factor", f"one term explains these runs {where}")
        expect(said[0] == wanted[0], "the term", f"does it explain every run? {where}")
        expect(
            abs(said[1] - wanted[1]) < 1e-9, "the factor", f"of the term, not of the step {where}"
        )


# %% check="culprit-found" points=1
# One term explains all runs.
two = [({"tp": 10, "dp": 20}, 35), ({"tp": 30, "dp": 20}, 65)]
expect_culprit(two, [({"tp": 10, "dp": 20}, 36), ({"tp": 30, "dp": 10}, 43)])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_culprit(*(drawn_runs(draw.integer(3, 5)) for _ in range(12)), *every_twins(spoiled=False))
### END HIDDEN TESTS

# %% check="culprit-none" points=1
# And sometimes none does.
expect_culprit(
    [({"tp": 10, "dp": 20}, 36), ({"tp": 30, "dp": 10}, 90)],
    [({"tp": 10, "dp": 20}, 35), ({"tp": 30, "dp": 20}, 65)],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_culprit(*(drawn_runs(draw.integer(4, 5), wrong=2) for _ in range(8)), drawn_runs(4))
expect_culprit(*every_twins(spoiled=True))
expect_culprit(
    [({"a": 9, "b": 5}, 18), ({"a": 0, "b": 5}, 7)], [({"a": 9, "b": 5}, 18), ({"a": 0, "b": 5}, 5)]
)
### END HIDDEN TESTS
