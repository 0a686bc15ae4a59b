# %% [markdown]
# # Exercises 12: cutting the model
#
# Four tasks, 10 points, about two hours. Read chapter 12 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 12
#
# The grader runs the same checks and hidden ones with other numbers: about 100 layers on 16 stages, 32 tokens, 40 units. An answer has 5
# seconds for them. 100 layers have some 10^17 cuts into 16 stages, so trying all of them earns nothing on any machine. An answer cell stands
# alone: it may use what read-only cells define, but not your other cells. Everything here is exact: whole numbers in tasks 1, 2 and 4,
# float64 in task 3.
#
# Sources: Narayanan et al. 2019 (PipeDream, arXiv:1806.03377, sections 3.1 and 3.3), Li et al. 2021 (TeraPipe, arXiv:2102.07988, section 3.3),
# Narayanan et al. 2021 (PipeDream-2BW, arXiv:2006.09503, section 3.1), Sun et al. 2024 (AdaPipe, ASPLOS 2024).

# %% given="setup"
import math
from itertools import combinations, product

import torch

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect, expect_equal

SECONDS = 5  # for an answer to many cases; one that tries everything would need days
draw = Draw()  # hidden checks draw sizes and numbers


def whole(count, low=1, high=20):
    return [draw.integer(low, high) for _ in range(count)]


# %% [markdown]
# ## 1. The slowest stage (3 points)
#
# Layer i costs `costs[i]` and weighs `sizes[i]` bytes. Cut the layers into `stages` runs, each of one layer or more, so that
#
# - no run weighs more than `cap` bytes (`cap=None`: any weight is fine),
# - and among these cuts the most expensive run is as cheap as it can be.
#
# Return the runs as pairs (start, stop), stop not included; of equally good cuts any one. If no cut keeps to the cap, return `None`.
# Chapter 12 draws the table to fill for a model without a cap. What does a cap change in it?
#
# > **API** `cut(costs, sizes, stages, cap)` gets two lists of whole numbers (0 or more) of the same length, a whole number, and a whole number or None;
# > it returns a list of `stages` pairs of whole numbers, or None. `combinations` and `product` of itertools, `math` and all of Python are there.
#
# `cut([4, 1, 1, 4], [1, 1, 1, 1], 2)` is `[(0, 2), (2, 4)]`: 5 and 5. With sizes `[1, 5, 5, 1]` and `cap=6` it is the same; with `cap=5`
# there is none, as both middle layers would have to be alone.


# %% answer="cut"
def cut(costs, sizes, stages, cap=None):
    """A list of `stages` pairs (start, stop), or None."""
    ### BEGIN SOLUTION
    best = {0: (0, [])}  # layers that are cut so far -> (largest cost, runs)
    for _ in range(stages):
        longer = {}
        for start, (largest, runs) in best.items():
            cost = size = 0
            for stop in range(start + 1, len(costs) + 1):
                cost, size = cost + costs[stop - 1], size + sizes[stop - 1]
                if cap is not None and size > cap:
                    break
                if stop not in longer or max(largest, cost) < longer[stop][0]:
                    longer[stop] = (max(largest, cost), [*runs, (start, stop)])
        best = longer
    return best[len(costs)][1] if len(costs) in best else None
    ### END SOLUTION


# %% judge="expect_cuts"
def expect_cuts(*cases):
    """Cases (costs, sizes, stages, cap, cost of the most expensive run of the best cut; None if there is no cut)."""
    given = [case[:-1] for case in cases]
    for said, case in zip(ask_each(cut, given, time_limit_s=SECONDS), cases):
        expect_cut(said, *case)


def expect_cut(said, costs, sizes, stages, cap, wanted):
    where = f"(seen with {len(costs)} layers, {stages} stages, cap {cap})"
    if wanted is None:
        expect(
            said is None,
            "no cut keeps to the cap",
            f"return None where every cut has a run that is too heavy {where}",
        )
        return
    expect(
        said is not None,
        "a cut that keeps to the cap",
        f"there is one; do you try all places for each cut, lighter runs too? {where}",
    )
    expect(
        isinstance(said, (list, tuple))
        and len(said) == stages
        and all(len(run) == 2 and all(type(end) is int for end in run) for run in said),
        "a run for each stage",
        f"{stages} pairs of whole numbers (start, stop) {where}",
    )
    expect(
        [a for a, _ in said] == [0] + [b for _, b in said[:-1]] and said[-1][1] == len(costs),
        "every layer once, in order",
        f"each run starts where the one before stops, from layer 0 to the last {where}",
    )
    expect(all(a < b for a, b in said), "no empty stage", f"each run has one layer or more {where}")
    if cap is not None:
        expect(
            all(sum(sizes[a:b]) <= cap for a, b in said),
            "memory limit",
            f"add up the bytes of each run {where}",
        )
    expect(
        max(sum(costs[a:b]) for a, b in said) == wanted,
        "smallest largest stage",
        f"another cut has a cheaper most expensive run; what is the best cut of the first i layers into k runs? {where}",
    )


# %% check="cut-time" points=2
# The most expensive run is as cheap as it can be.
expect_cuts(([4, 1, 1, 4], [1] * 4, 2, None, 5), ([5, 1, 1, 1, 1, 1], [1] * 6, 3, None, 5))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_cuts(
    ([3], [1], 1, None, 3),
    ([0, 0, 7, 0], [1] * 4, 4, None, 7),
    ([2, 2, 2, 5, 5], [1] * 5, 2, None, 10),
)


def drawn(layers, stages):
    """A case, and by trying every bound: in how few runs can it be kept?"""
    costs, sizes = whole(layers), whole(layers)
    for bound in range(max(costs), sum(costs) + 1):
        runs, last = 1, 0
        for cost in costs:
            runs, last = (runs, last + cost) if last + cost <= bound else (runs + 1, cost)
        if runs <= stages:
            return costs, sizes, stages, None, bound


expect_cuts(*(drawn(draw.integer(6, 12), draw.integer(2, 5)) for _ in range(8)))
expect_cuts(drawn(100, 16), drawn(draw.integer(90, 110), draw.integer(14, 17)))
### END HIDDEN TESTS

# %% check="cut-memory" points=1
# No run is heavier than the cap; None where there is no such cut.
expect_cuts(([4, 1, 1, 4], [1, 5, 5, 1], 2, 6, 5), ([4, 1, 1, 4], [1, 5, 5, 1], 2, 5, None))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_cuts(
    ([1, 1, 1, 9], [9, 1, 1, 1], 2, 9, 11),
    ([2, 2], [3, 3], 1, 5, None),
    ([1, 1, 1, 1, 1, 1, 30, 30], [8, 8, 1, 1, 1, 1, 1, 1], 3, 8, 64),
)


def drawn(layers, stages, more):
    """The same under a cap that is tight: `more` than an equal share of the bytes."""
    costs, sizes = whole(layers), whole(layers)
    cap = sum(sizes) // stages + more
    for bound in range(max(costs), sum(costs) + 1):
        runs, last, held = 1, 0, 0
        for cost, size in zip(costs, sizes):
            last, held = last + cost, held + size
            if last > bound or held > cap:
                runs, last, held = runs + 1, cost, size
        if runs <= stages and max(sizes) <= cap:
            return costs, sizes, stages, cap, bound
    return costs, sizes, stages, cap, None


expect_cuts(
    *(drawn(draw.integer(5, 10), draw.integer(2, 4), draw.integer(0, 25)) for _ in range(12))
)
expect_cuts(
    drawn(100, 16, 25), drawn(draw.integer(90, 110), draw.integer(14, 17), draw.integer(2, 29))
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Slices of a sequence (2 points)
#
# A sequence of `length` tokens goes through p ranks in slices, as in TeraPipe. A slice of n tokens behind c others costs
#
#     launch + per_token·n + per_key·(n·c + n(n+1)/2)
#
# (every token meets all keys up to its own), and the forwards of all slices through p ranks take
#
#     the sum of the slices' costs  +  (p-1) · the largest of them
#
# Find slices, **how many there are and how long each is**, for which this is least. Many short slices fill the ranks well, and pay `launch`
# each time.
#
# > **API** `slice_lengths(length, p, launch, per_token, per_key)` gets whole numbers and returns a list of whole numbers, the lengths in order. The setup has
# > `cost(context, n, launch, per_token, per_key)` and `pipeline_time(lengths, p, launch, per_token, per_key)`, the two formulas above.
#
# 4 tokens, p = 3, launch 1, per_token 1, per_key 0: slices `[4]` take 5 + 2·5 = 15, `[1, 1, 1, 1]` take 8 + 2·2 = 12, and so do
# `[2, 2]`: 6 + 2·3. Any of the best will do.


# %% given="cost"
def cost(context, n, launch, per_token, per_key):
    """Of a slice of n tokens behind `context` others."""
    return launch + per_token * n + per_key * (n * context + n * (n + 1) // 2)


def pipeline_time(lengths, p, *prices):
    costs = [cost(sum(lengths[:i]), n, *prices) for i, n in enumerate(lengths)]
    return sum(costs) + (p - 1) * max(costs)


# %% answer="slice_lengths"
def slice_lengths(length, p, launch, per_token, per_key):
    """A list of whole numbers, each 1 or more, that add up to `length`."""
    ### BEGIN SOLUTION
    prices = launch, per_token, per_key
    costs = {
        (start, stop): cost(start, stop - start, *prices)
        for start in range(length)
        for stop in range(start + 1, length + 1)
    }
    best = None
    for bound in sorted(set(costs.values())):
        cheapest = {0: (0, [])}  # tokens that are cut so far -> (sum of costs, lengths)
        for stop in range(1, length + 1):
            ways = [
                (cheapest[start][0] + costs[start, stop], [*cheapest[start][1], stop - start])
                for start in range(stop)
                if start in cheapest and costs[start, stop] <= bound
            ]
            if ways:
                cheapest[stop] = min(ways, key=lambda way: way[0])
        if length in cheapest:
            total, lengths = cheapest[length]
            if best is None or total + (p - 1) * bound < best[0]:
                best = total + (p - 1) * bound, lengths
    return best[1]
    ### END SOLUTION


# %% judge="expect_slices"
def expect_slices(*cases):
    """Cases (length, p, launch, per_token, per_key, least time)."""
    given = [case[:-1] for case in cases]
    for said, case in zip(ask_each(slice_lengths, given, time_limit_s=SECONDS), cases):
        expect_lengths(said, *case)


def expect_lengths(said, length, p, launch, per_token, per_key, best):
    where = f"(seen with {length} tokens, p={p}, launch {launch}, per_token {per_token}, per_key {per_key})"
    expect(
        isinstance(said, (list, tuple))
        and all(type(n) is int and n > 0 for n in said)
        and sum(said) == length,
        "every token in one slice",
        f"whole numbers above 0 that add up to the length {where}",
    )
    expect(
        pipeline_time(said, p, launch, per_token, per_key) == best,
        "least time",
        f"other slices take less: for each bound on the most expensive slice, which cut has the smallest sum? {where}",
    )


# %% check="slices-equal" points=1
# Without attention: how many slices?
expect_slices((4, 3, 1, 1, 0, 12), (6, 2, 3, 1, 0, 18))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def drawn(length, *numbers):
    """A case and its least time: for each bound on the most expensive slice the smallest sum."""
    costs = {
        ends: cost(ends[0], ends[1] - ends[0], *numbers[1:])
        for ends in combinations(range(length + 1), 2)
    }
    times = []
    for bound in set(costs.values()):
        sums = [0]
        for stop in range(1, length + 1):
            fit = [start for start in range(stop) if costs[start, stop] <= bound]
            sums.append(min((sums[start] + costs[start, stop] for start in fit), default=math.inf))
        times.append(sums[-1] + (numbers[0] - 1) * bound)
    return length, *numbers, min(times)


expect_slices(drawn(1, 4, 2, 1, 0), drawn(9, 1, 1, 1, 0), drawn(10, 4, 0, 1, 0))
for low, high, count in ((5, 11, 6), (28, 32, 2)):
    expect_slices(
        *(
            drawn(
                draw.integer(low, high),
                draw.integer(2, 8),
                draw.integer(0, 6),
                draw.integer(1, 5),
                0,
            )
            for _ in range(count)
        )
    )
### END HIDDEN TESTS

# %% check="slices-causal" points=1
# With attention later slices cost more.
expect_slices((6, 4, 2, 1, 1, 64))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def drawn(length, *numbers):
    """A case and its least time: for each bound on the most expensive slice the smallest sum."""
    costs = {
        ends: cost(ends[0], ends[1] - ends[0], *numbers[1:])
        for ends in combinations(range(length + 1), 2)
    }
    times = []
    for bound in set(costs.values()):
        sums = [0]
        for stop in range(1, length + 1):
            fit = [start for start in range(stop) if costs[start, stop] <= bound]
            sums.append(min((sums[start] + costs[start, stop] for start in fit), default=math.inf))
        times.append(sums[-1] + (numbers[0] - 1) * bound)
    return length, *numbers, min(times)


expect_slices(drawn(12, 8, 1, 0, 1), drawn(11, 4, 5, 1, 1))
for low, high, count in ((6, 12, 6), (28, 32, 2)):
    expect_slices(
        *(
            drawn(
                draw.integer(low, high),
                draw.integer(2, 8),
                draw.integer(0, 30),
                draw.integer(0, 6),
                draw.integer(1, 3),
            )
            for _ in range(count)
        )
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Old weights (3 points)
#
# A pipeline of p stages, each one number: stage s multiplies by w_s, so microbatch t gives w_{p-1}·…·w_1·w_0·x_t, with the loss
# ½(output - y_t)². Write an emulator in one process, without ranks: what are the weights after all microbatches?
#
# **PipeDream** updates every stage after each microbatch. 1F1B has p-1-s more forwards ahead on stage s, so the forward of microbatch t (from 0)
# takes the weights after max(0, t-(p-1-s)) updates there, and its backward takes the same. With grad_s taken at these weights of *all* stages
#
#     w_s after t+1 updates  =  w_s after t updates  -  lr · grad_s of microbatch t
#
# **2BW** sums the gradients of k microbatches for one update. All microbatches of update u (from 0) take, on every stage, the weights after
# max(0, u-1) updates.
#
# Write both, and `versions_held(p)`: a list of how many versions of its weights each stage of PipeDream keeps in a long
# training, the newest included.
#
# > **API** `pipedream(weights, x, y, lr)` and `double_buffered(weights, x, y, lr, k)` get float64 tensors `[p]`, `[m]`, `[m]` and numbers, and return a new
# > tensor `[p]`. `versions_held(p)` returns a list of p whole numbers. All of torch is there, autograd too; nothing that comes in may be changed in place.
#
# p = 2, w = [1, 1], lr = 0.1, x = [1, 1], y = [0, 0]. Microbatch 0 has output 1 and gradients [1, 1]: w is [0.9, 0.9]. Microbatch 1 takes
# w_0 after 0 updates and w_1 after 1: 1 and 0.9. Its output is 0.9, its gradients are [0.9·0.9, 0.9·1]: w is [0.819, 0.81].


# %% answer="old_weights"
def pipedream(weights, x, y, lr):
    """weights [p], x [m], y [m] float64 -> [p], the weights after m updates."""
    ### BEGIN SOLUTION
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]
    ### END SOLUTION


def double_buffered(weights, x, y, lr, k):
    """The same for 2BW; m is a multiple of k -> [p], the weights after m/k updates."""
    ### BEGIN SOLUTION
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]
    ### END SOLUTION


def versions_held(p):
    """A list of p whole numbers."""
    ### BEGIN SOLUTION
    return [p - s for s in range(p)]
    ### END SOLUTION


# %% judge="expect_weights"
def numbers(p, m):
    """Weights near 1, inputs and targets below 1: with lr = 0.05 nothing grows."""
    return 1 + draw.exact(p) / 64, draw.exact(m) / 8, draw.exact(m) / 8


def expect_weights(asked, case, wanted, property, hint):
    """1e-10: numbers near 1, some 30 updates of some 30 roundings of 1e-16."""
    [said] = ask_each(asked, [case])
    expect_equal(said, torch.as_tensor(wanted, dtype=torch.float64), property, hint, atol=1e-10)


SMALL = (
    torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
    torch.tensor([1.0, -0.5, 0.25, 1.0, 0.5, -1.0], dtype=torch.float64),
    torch.zeros(6, dtype=torch.float64),
)

# %% check="weights-pipedream" points=1
# Each stage has a delay of its own.
weights, x, y = SMALL
case, hint = (weights, x[:1], y[:1], 0.1), "the first microbatch meets no old weights: plain SGD"
expect_weights(pipedream, case, [0.9, 0.3, 1.95], "the first update", hint)
hint = "one stage has nothing in flight: plain SGD"
expect_weights(pipedream, (weights[:1], x, y, 0.1), [0.688674339844], "one stage", hint)
ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
hint = "which version does each stage take for the second microbatch?"
expect_weights(pipedream, (ones, ones, zeros, 0.1), [0.819, 0.81], "old weights", hint)
OLD = (
    "old weights",
    "forward and backward take the same old weights, of all stages; the step is taken from the newest",
)
expect_weights(
    pipedream, (weights, x, y, 0.1), [0.838490095301, 0.103486645557, 1.920309507069], *OLD
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(3):
    p, m = draw.integer(2, 6), draw.integer(8, 24)
    weights, x, y = numbers(p, m)
    history = [weights]
    for t in range(m):  # by hand: the gradient of a stage is error · x · the product of the others
        taken = [float(history[max(0, t - (p - 1 - s))][s]) for s in range(p)]
        slope = (math.prod(taken) * x[t] - y[t]) * x[t]
        others = [math.prod(taken[:s] + taken[s + 1 :]) for s in range(p)]
        history.append(history[-1] - 0.05 * slope * torch.tensor(others, dtype=x.dtype))
    expect_weights(pipedream, (weights, x, y, 0.05), history[-1], *OLD)
### END HIDDEN TESTS

# %% check="weights-2bw" points=1
# One update late, the same on every stage, gradients summed over k microbatches.
weights, x, y = SMALL
hint = "the sum of the gradients of k microbatches, at the first weights"
expect_weights(
    double_buffered,
    (weights, x[:2], y[:2], 0.1, 2),
    [0.875, 0.25, 1.9375],
    "the first update",
    hint,
)
hint = "it takes the weights before the first update, and steps from those behind it"
expect_weights(
    double_buffered,
    (weights, x[:4], y[:4], 0.1, 2),
    [0.76875, 0.0375, 1.884375],
    "the second update",
    hint,
)
LATE = "one update late", "update u takes the weights after u-1 updates"
expect_weights(
    double_buffered,
    (weights, x, y, 0.1, 2),
    [0.743088531494, -0.052315139771, 1.872785949707],
    *LATE,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for k in (1, draw.integer(2, 5), draw.integer(2, 5)):
    p, updates = draw.integer(1, 6), draw.integer(3, 7)
    weights, x, y = numbers(p, k * updates)
    history = [weights]
    for u in range(updates):
        taken = [float(w) for w in history[max(0, u - 1)]]
        slopes = [(math.prod(taken) * x[t] - y[t]) * x[t] for t in range(u * k, (u + 1) * k)]
        others = [math.prod(taken[:s] + taken[s + 1 :]) for s in range(p)]
        history.append(history[-1] - 0.05 * sum(slopes) * torch.tensor(others, dtype=x.dtype))
    expect_weights(double_buffered, (weights, x, y, 0.05, k), history[-1], *LATE)
### END HIDDEN TESTS

# %% check="weights-held" points=1
# How many versions each stage of PipeDream keeps.
hint = "as many as the stage has microbatches in flight"
expect_equal(ask_each(versions_held, [(2,)]), [[2, 1]], "versions held", hint)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
stages = [1, draw.integer(3, 8), draw.integer(9, 20)]
wanted = [list(range(p, 0, -1)) for p in stages]
expect_equal(ask_each(versions_held, [(p,) for p in stages]), wanted, "versions held", hint)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. What a stage recomputes (2 points)
#
# Stage s of p runs 1F1B with m microbatches, so it has n = min(p-s, m) in flight. Its layers are made of units. Unit u is either **kept**, `sizes[u]`
# bytes for each microbatch in flight, or **recomputed**, which takes `times[u]` once more in each backward. Which units to keep, so that
#
#     n · (bytes of kept units)  <=  cap        and the time of the recomputed ones is least?
#
# Return a list of booleans, True for kept; of equally good choices any one. If everything must be recomputed, all are False.
#
# > **API** `kept_units(times, sizes, p, s, m, cap)` gets two lists of whole numbers above 0 and whole numbers; it returns a list of `True` and `False`, as long
# > as `times`. There are up to 40 units, so 2^40 choices.
#
# times `[3, 2, 2]`, sizes `[3, 2, 2]`, p = 2, m = 4, cap 8. Stage 1 has one in flight and keeps all. Stage 0 has two, 4 bytes for each: units 1 and 2 fit, which
# leaves 3 to recompute; unit 0 alone would leave 4.


# %% answer="kept_units"
def kept_units(times, sizes, p, s, m, cap):
    """A list of booleans, one per unit."""
    ### BEGIN SOLUTION
    n = min(p - s, m)
    best = {0: (0, [])}  # bytes -> (most time that is saved, flags)
    for time, size in zip(times, sizes):
        longer = {held: (saved, [*flags, False]) for held, (saved, flags) in best.items()}
        for held, (saved, flags) in best.items():
            more = held + n * size
            if more <= cap and (more not in longer or longer[more][0] < saved + time):
                longer[more] = (saved + time, [*flags, True])
        best = longer
    return max(best.values(), key=lambda found: found[0])[1]
    ### END SOLUTION


# %% judge="expect_kept"
def expect_kept(*cases):
    """Cases (times, sizes, p, s, m, cap, least time of what is recomputed)."""
    given = [case[:-1] for case in cases]
    for said, case in zip(ask_each(kept_units, given, time_limit_s=SECONDS), cases):
        expect_flags(said, *case)


def expect_flags(said, times, sizes, p, s, m, cap, least):
    n = min(p - s, m)
    where = f"(seen with {len(times)} units, p={p}, s={s}, m={m}, cap {cap})"
    expect(
        isinstance(said, (list, tuple))
        and len(said) == len(times)
        and all(type(flag) is bool for flag in said),
        "a flag for each unit",
        f"True or False for every unit {where}",
    )
    expect(
        n * sum(size for size, flag in zip(sizes, said) if flag) <= cap,
        "memory limit",
        f"kept bytes count once for each microbatch in flight; how many does this stage have? {where}",
    )
    expect(
        sum(time for time, flag in zip(times, said) if not flag) == least,
        "least recomputation",
        f"another choice fits too and recomputes less {where}",
    )


# %% check="kept-stage" points=1
# Kept bytes count for each microbatch in flight, which differ from stage to stage.
expect_kept(
    ([3, 2, 2], [3, 2, 2], 2, 1, 4, 8, 0),
    ([5, 5], [4, 4], 4, 3, 8, 8, 0),
    ([5, 5], [4, 4], 4, 0, 8, 8, 10),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def alike(p, s, m, units):
    """Units that are all alike: only how many fit is the question."""
    n, size, time, fit = (
        min(p - s, m),
        draw.integer(2, 9),
        draw.integer(1, 9),
        draw.integer(1, units),
    )
    cap = size * n * fit + draw.integer(0, 1)
    return [time] * units, [size] * units, p, s, m, cap, time * (units - fit)


for p in (4, draw.integer(5, 8)):
    stages = ((0, 2 * p), (p - 1, p), (draw.integer(1, p - 2), 2 * p), (0, 1), (0, p - 2))
    expect_kept(*(alike(p, *stage, draw.integer(3, 6)) for stage in stages))
expect_kept(alike(4, 1, 8, 40))
### END HIDDEN TESTS

# %% check="kept-best" points=1
# The choice that recomputes least, not a good one.
expect_kept(([3, 2, 2], [3, 2, 2], 2, 0, 4, 8, 3), ([10, 6, 6], [6, 5, 5], 1, 0, 1, 10, 10))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_kept(
    ([10, 9, 9], [6, 5, 5], 3, 1, 9, 20, 10),
    ([1, 8], [1, 9], 1, 0, 3, 9, 1),
    ([4, 4], [5, 6], 1, 0, 1, 4, 8),
)


def drawn(units):
    """A case, and what is least: for each sum of bytes the most time that is saved."""
    p, times, sizes = draw.integer(1, 5), whole(units), whole(units, 1, 12)
    s, saved = draw.integer(0, p - 1), {0: 0}
    cap = (p - s) * sum(sizes) * draw.integer(2, 8) // 10
    for time, size in zip(times, sizes):
        for held, before in list(saved.items()):
            more = held + (p - s) * size
            if more <= cap:
                saved[more] = max(saved.get(more, 0), before + time)
    return times, sizes, p, s, 8, cap, sum(times) - max(saved.values())


expect_kept(*(drawn(draw.integer(4, 9)) for _ in range(10)))
expect_kept(drawn(40), drawn(draw.integer(30, 40)))
### END HIDDEN TESTS
