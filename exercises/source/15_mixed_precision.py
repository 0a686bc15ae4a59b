# %% [markdown]
# # Exercises 15: mixed precision and FP8
#
# Seven tasks, 10 points, about three hours. Read chapter 15 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 15
#
# The grader runs the same checks and hidden ones with other formats, sizes, numbers of ranks and values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A function that runs on ranks gets its `group` last: `group.rank()` says who you are, `group.size()` how many you are.
# - Between ranks there is a network and nothing else. In this chapter `collectives` has `send`, `receive`, `barrier`, `all_reduce`
#   and `all_gather`; `collectives.all_reduce(x, group, op="max")` is the maximum.
#
# Sources: OCP 8-bit Floating Point (OFP8) 1.0, section 4; Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2), Micikevicius et al.
# 2022 (FP8, arXiv:2209.05433, section 3), Gupta et al. 2015 (arXiv:1502.02551, section 3), Wang et al. 2018 (arXiv:1812.08011, section 2.2),
# Rouhani et al. 2023 (MX, arXiv:2310.10537, section 3), DeepSeek-V3 2024 (arXiv:2412.19437, section 3.3), Rajbhandari et al. 2020 (ZeRO,
# arXiv:1910.02054, section 5).

# %% given="setup"
import math

import torch

from minitrain import collectives

# %% judge="tools"
import bisect
from fractions import Fraction

from minitrain import collectives as world
from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.model.training.optim import AdamW

LISTED = "all_reduce all_gather"
draw = Draw()  # hidden checks draw formats, sizes, numbers of ranks and values


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# %% [markdown]
# ## 1. Into few bits (2 points)
#
# A format has a sign bit, then e exponent bits, then m mantissa bits. With exponent field E and mantissa field M a code below the sign bit
# is E·2^m + M, and it stands for
#
#     E > 0    2^(E - bias) · (1 + M/2^m)          E = 0    2^(1 - bias) · M/2^m
#
# Only if all bits below the sign are ones it is NaN. There is no infinity: what rounds to more than the largest number, infinities too,
# becomes the largest. Rounding is to the nearest number, and of two equally near ones to the one with the even code. Zero has a sign, what
# rounds to it keeps its own. A NaN may have either sign.
#
# `to_codes` casts a whole float32 tensor to the codes of any such format, up to 25 bits. A table of all codes does not fit: the cast has
# 24 MB beside its input. Every number that is exact in float32 is exact in float64, and so is its product with a power of two.
#
#     2.0 ** k                  exact for a whole number k
#     torch.frexp(x)            mantissa in [0.5, 1) and exponent with x = mantissa · 2^exponent; of 0 both are 0
#     x.round()                 to the nearest whole number, a tie to the even one
#     x.signbit()
#
# e = 2, m = 1, bias = 1 has the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and NaN, codes 0 to 7. There 1.75 gets code 4, which is 2: the code of 1.5 is
# odd. -9 gets code 8 + 6, which is -4.
#
# > **API** `to_codes(x, e, m, bias)`: one float32 tensor [n] in (contiguous, any values, infinities and NaN too), int64 codes [n] out. e, m
# > and bias are ints. The four calls above, torch's comparisons, `torch.where`, `.to(dtype)` and whole-tensor arithmetic are all it takes; no
# > loop over numbers, no table. float32 holds 24 significant bits, float64 53, int64 whole numbers to 2^63.


# %% answer="to_codes"
def to_codes(x, e, m, bias):
    """x [n] float32 -> [n] int64, codes of 1 + e + m bits."""
    ### BEGIN SOLUTION
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)
    ### END SOLUTION


# %% judge="expect_codes"
def meaning(code, e, m, bias):
    """The number that a code below the sign bit stands for: the definition."""
    field, mantissa = divmod(code, 2**m)
    steps = mantissa + (2**m if field else 0)
    return Fraction(2) ** (max(field, 1) - bias - m) * steps


def expect_codes(e, m, bias, *parts):
    """Parts (property, hint, numbers, wanted codes), all cast at once; -1 is a NaN of either sign."""
    x = torch.tensor([number for part in parts for number in part[2]])
    said = ask(to_codes, x, e, m, bias, budget_bytes=24 << 20)
    where = f"(seen with e={e}, m={m}, bias={bias})"
    expect_equal(
        said * 0, torch.zeros(len(x)).long(), "a code for each number", f"whole numbers {where}"
    )
    for (property, hint, numbers, wanted), codes in zip(
        parts, said.split([len(part[2]) for part in parts])
    ):
        nan, given = 2 ** (e + m) - 1, codes.tolist()
        found = [-1 if code % 2 ** (e + m) == nan else code for code in given]
        expect(found == wanted, property, f"{hint} {where}")


# %% check="codes-normal" points=1
# Numbers between the smallest normal and the largest, ties among them.
ordinary = "normal numbers", "the spacing of neighbours doubles where the exponent changes"
ties = "ties", "halfway between two numbers the even code is taken"
expect_codes(
    *(2, 1, 1),
    (*ordinary, [1.0, 1.1, 1.4, 2.4, 2.6, -3.1, -1.6], [2, 2, 3, 4, 5, 13, 11]),
    (*ties, [1.25, 1.75, -2.5, 3.5], [2, 4, 12, 6]),
)
expect_codes(*(3, 2, 3), (*ordinary, [0.25, 1.0, 1.3, 5.9, 7.9], [4, 12, 13, 22, 24]))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def nearest(number, e, m, bias):
    """By the definition: neighbours among all codes, in exact fractions."""
    last, value = 2 ** (e + m) - 2, lambda code: meaning(code, e, m, bias)
    size = min(Fraction(abs(number)), value(last))
    below = bisect.bisect_right(range(last + 1), size, key=value) - 1
    above = min(below + 1, last)
    far = (size - value(below)) - (value(above) - size)
    code = above if far > 0 or (far == 0 and below % 2) else below
    return code + (2 ** (e + m) if math.copysign(1, number) < 0 else 0)


formats = [(draw.integer(2, 6), draw.choice([1, 2, 4, 5, 6, 7, 8, 9])) for _ in range(4)]
for e, m in [*formats, (3, 5), (6, 17)]:
    bias = 2 ** (e - 1) - 1 + draw.integer(-3, 3)
    last = 2 ** (e + m) - 2
    codes = [draw.integer(2**m, last - 1) for _ in range(200)] + [2 ** (m + 1) - 1]
    low, high = ([float(meaning(c + up, e, m, bias)) for c in codes] for up in (0, 1))
    halves = [draw.choice([-0.5, 0.5]) * (a + b) for a, b in zip(low, high)]
    aside = [h * (1 + draw.choice([-1, 1]) * 2**-21) for h in halves] if m < 12 else []
    numbers = [draw.choice([-1, 1]) * draw.uniform(a, b) for a, b in zip(low, high)] + aside
    numbers = torch.tensor(numbers + low).tolist()  # as float32 has them
    expect_codes(
        *(e, m, bias),
        (*ordinary, numbers, [nearest(number, e, m, bias) for number in numbers]),
        (*ties, halves, [nearest(number, e, m, bias) for number in halves]),
    )
### END HIDDEN TESTS

# %% check="codes-edges" points=1
# The same below the smallest normal number and above the largest; zeros, infinities and NaN.
small = "subnormal numbers", "below the smallest normal number neighbours stay equally far apart"
signs = "zeros", "zero has a sign, and what rounds to it keeps its own"
large = "saturation", "what is the largest number, and what is too large for it?"
nans = "NaN", "NaN is the code of all ones, and no other number becomes it"
expect_codes(
    *(2, 1, 1),
    (*small, [0.3, 0.7, 0.75, -0.8], [1, 1, 2, 10]),
    (*signs, [0.0, -0.0, 0.1, -0.2, 0.25, -0.25], [0, 8, 0, 8, 0, 8]),
    (*large, [4.5, 5.5, -9.0, math.inf, -math.inf], [6, 6, 14, 6, 14]),
    (*nans, [math.nan], [-1]),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def nearest(number, e, m, bias):
    """By the definition: neighbours among all codes, in exact fractions."""
    last, value = 2 ** (e + m) - 2, lambda code: meaning(code, e, m, bias)
    size = value(last) if math.isinf(number) else min(Fraction(abs(number)), value(last))
    below = bisect.bisect_right(range(last + 1), size, key=value) - 1
    above = min(below + 1, last)
    far = (size - value(below)) - (value(above) - size)
    code = above if far > 0 or (far == 0 and below % 2) else below
    return code + (2 ** (e + m) if math.copysign(1, number) < 0 else 0)


formats = [(draw.integer(2, 6), draw.choice([1, 2, 4, 5, 6, 7, 8, 9])) for _ in range(4)]
for e, m in [*formats, (3, 5), (6, 17)]:
    bias = 2 ** (e - 1) - 1 + draw.integer(-3, 3)
    step, last = float(meaning(1, e, m, bias)), float(meaning(2 ** (e + m) - 2, e, m, bias))
    codes = [draw.integer(0, 2**m - 1) for _ in range(100)] + [0, 1, 2**m - 1]
    few = [draw.choice([-1, 1]) * step * (code + draw.choice([0.5, 0.25, 0.875])) for code in codes]
    none = [zero * step * part for zero in (1, -1) for part in (0.0, 0.49, 0.5, 2.0**-40)]
    none += [2.0**-149, -(2.0**-149)]
    many = [size * (1 + part) for size in (last, -last) for part in (2.0**-m / 4, 2.0**-m, 0.3, 7)]
    many += [last, -last, math.inf, -math.inf, 2.0**127]
    expect_codes(
        *(e, m, bias),
        (*small, few, [nearest(number, e, m, bias) for number in few]),
        (*signs, none, [nearest(number, e, m, bias) for number in none]),
        (*large, many, [nearest(number, e, m, bias) for number in many]),
        (*nans, [math.nan, -math.nan], [-1, -1]),
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A loss scale for all ranks (2 points)
#
# Every rank holds a shard of the weights, as float64 masters, and the same shard of the gradient: summed over the batch, in float16, of
# `scale` · loss. Together the shards are the whole gradient. A step is
#
# - If any number of any shard is infinite or NaN, no rank updates anything. The scale halves, and good steps are counted anew. But if the
#   scale is 1 already, every rank raises ValueError and leaves all as it was.
# - Else the gradient is divided by the scale, and clipped: if its norm, that of the whole, is above `limit`, it is made as long as `limit`.
#   Then weights ← weights - lr · gradient, in float64. After `window` good steps in a row the scale doubles, and they are counted anew.
#
# A rank may send each other rank two numbers in a step, not its shard. Change `master` and `state` in place; `state` is
# `{"scale": .., "good": ..}`, the scale a power of two, good the number of good steps since it last changed.
#
# Two ranks, scale 1024, window 2, lr 0.5, limit 10, weights `[1, 2]` and `[3]`, gradient of the loss `[3, 0]` and `[4]`. Their norm is 5: the
# weights become `[-0.5, 2]` and `[1]`. Then rank 1 has `[100]`: 102,400 is infinite in float16. Nobody moves, the scale is 512.
#
# > **API** `collectives.all_reduce(x, group)` returns the sum as a new tensor on every rank, `op="max"` the elementwise maximum. `master` is
# > float64 and `grad` float16 (largest number 65,504, then inf); `state` is a dict of a float and an int. Change both in place (`master.copy_`,
# > `master -= ..`); what the function returns is ignored. `raise ValueError("...")` where the text says so, on every rank.


# %% answer="scaled_step"
def scaled_step(master, grad, state, window, limit, lr, group):
    """master [d] float64; grad [d] float16, of scale · loss; d may differ from rank to rank."""
    ### BEGIN SOLUTION
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0
    ### END SOLUTION


# %% driver="train_scaled"
def train_scaled(master, slopes, scale, window, limit, lr, group):
    """Slopes: this shard of the gradient of the unscaled loss, for each step. After each: weights and scale, or "refused"."""
    master, state, told = master.clone(), {"scale": scale, "good": 0}, []
    for slope in slopes:
        grad = (slope * state["scale"]).half()
        try:
            scaled_step(master, grad, state, window, limit, lr, group)
            told.append([master.clone(), float(state["scale"])])
        except ValueError:
            told.append([master.clone(), "refused"])
    return told


# %% judge="expect_scaled"
def expect_scaled(masters, slopes, rules, wanted):
    """slopes[rank][step]; rules (scale, window, limit, lr); wanted: after each step the weights of all ranks and the scale."""
    ranks = len(masters)
    given = [(*own, *rules) for own in zip(masters, slopes)]
    outcome = run_on_ranks(train_scaled, given, collectives=LISTED)
    before, scale = masters, rules[0]
    for step, (weights, after) in enumerate(wanted):
        where = f"(seen with {ranks} ranks, in step {step + 1}, at scale {scale:g})"
        moved, said = zip(*(told[step] for told in outcome.results))
        if after == "refused":
            hint = f"who finds an overflow at scale 1, and who else must hear of it? {where}"
            expect(said == ("refused",) * ranks, "refuses below 1", hint)
        expect("refused" not in said or after == "refused", "refuses", f"too early {where}")
        skipped = all(torch.equal(a, b) for a, b in zip(before, weights)) and after != scale
        if skipped or after == "refused":
            hint = f"a number of one shard has overflowed: which ranks must know? {where}"
            expect_equal(list(moved), weights, "all ranks skip together", hint)
        hint = f"by how much does it fall, when does it double, what is counted anew? {where}"
        expect(after == "refused" or said == (float(after),) * ranks, "the scale", hint)
        hint = f"divided by what, clipped by which norm, in which dtype? {where}"
        expect_equal(list(moved), weights, "the update", hint, atol=1e-12)
        before, scale = weights, scale if after == "refused" else after
    most = 16 * ranks * (ranks - 1) * len(wanted)
    expect(
        sum(outcome.sent_bytes) <= most,
        "bytes on the wire",
        f"two numbers for each other rank in a step (seen with {ranks} ranks)",
    )


# %% check="scale-skips" points=1
# One rank overflows: no rank moves, all have the same scale, and it comes back.
one, two = f64([1.0, 2.0]), f64([3.0])
moves = [[3.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [[4.0], [100.0], [2.0], [0.0]]
later = [f64([-0.5, 2.0]), f64([1.0])]
third = [f64([-0.5, 2.0]), f64([0.0])]
fourth = [f64([-1.0, 2.0]), f64([0.0])]
expect_scaled(
    [one, two],
    [[f64(slope) for slope in own] for own in moves],
    (1024.0, 2, 10.0, 0.5),
    [(later, 1024), (later, 512), (third, 512), (fourth, 1024)],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def in_one_process(masters, slopes, scale, window, limit, lr):
    sizes, weights, good, told = [len(own) for own in masters], torch.cat(masters), 0, []
    for step in range(len(slopes[0])):
        grad = (torch.cat([own[step] for own in slopes]) * scale).half().double() / scale
        norm = grad.norm().item()
        refused = scale == 1 and not math.isfinite(norm)
        if math.isfinite(norm):
            weights = weights - lr * grad * (limit / norm if norm > limit else 1)
            good += 1
            scale, good = (2 * scale, 0) if good == window else (scale, good)
        elif not refused:
            scale, good = scale / 2, 0
        told.append((list(weights.split(sizes)), "refused" if refused else scale))
    return told


for ranks, window in ((2, 3), (3, 2), (draw.integer(2, 4), 1)):
    sizes = [draw.integer(60, 90) for _ in range(ranks)]
    masters, scale = [draw.real(size) for size in sizes], 2.0 ** draw.integer(10, 14)
    slopes = [[draw.real(size) / 40 for size in sizes] for _ in range(9)]
    bad = draw.several([-3e9, 3e9, math.nan], 3)
    for step in (1, 2, 6):  # then growth, which must wait for a whole window
        hit = draw.integer(0, ranks - 1)
        slopes[step][hit][draw.integer(0, sizes[hit] - 1)] = bad.pop()
    slopes, rules = [list(own) for own in zip(*slopes)], (scale, window, 1e9, 0.125)
    expect_scaled(masters, slopes, rules, in_one_process(masters, slopes, *rules))
### END HIDDEN TESTS

# %% check="scale-clips" points=1
# Clipping sees the norm of the whole unscaled gradient; at scale 1 the step is refused, by all.
one, two = f64([1.0, 2.0]), f64([3.0])
half = [f64([0.25, 2.0]), f64([2.0])]
expect_scaled(
    [one, two],
    [[f64(own) for own in moves] for moves in ([[3.0, 0.0]] * 2, [[4.0], [9e9]])],
    (1.0, 9, 2.5, 0.5),
    [(half, 1), (half, "refused")],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def in_one_process(masters, slopes, scale, window, limit, lr):
    sizes, weights, good, told = [len(own) for own in masters], torch.cat(masters), 0, []
    for step in range(len(slopes[0])):
        grad = (torch.cat([own[step] for own in slopes]) * scale).half().double() / scale
        norm = grad.norm().item()
        refused = scale == 1 and not math.isfinite(norm)
        if math.isfinite(norm):
            weights = weights - lr * grad * (limit / norm if norm > limit else 1)
            good += 1
            scale, good = (2 * scale, 0) if good == window else (scale, good)
        elif not refused:
            scale, good = scale / 2, 0
        told.append((list(weights.split(sizes)), "refused" if refused else scale))
    return told


cases = [
    (3e-6, 2.0**12, 2, 1e-5),  # divided in float16 it would underflow; norms are small
    (0.5, 2.0**14, 4, 1.0),  # numbers fit in float16, their squares do not
    (2.0, 4.0, 3, 1e4),  # not clipped: nothing may be stretched
]
for size, scale, window, limit in cases:
    ranks = draw.integer(2, 4)
    sizes = [draw.integer(60, 90) for _ in range(ranks)]
    masters = [draw.real(n) for n in sizes]
    slopes = [
        [draw.real(n).clamp(-3, 3) * size * (0.1 + r) for _ in range(4)]
        for r, n in enumerate(sizes)
    ]
    for r in range(ranks):
        slopes[r][1] *= 0  # nothing to clip, nothing to divide by
    rules = (scale, window, limit, 0.5 * min(1.0, 1 / limit))
    expect_scaled(masters, slopes, rules, in_one_process(masters, slopes, *rules))
ranks, hit = 3, draw.integer(0, 2)
masters = [draw.real(draw.integer(60, 90)) for _ in range(ranks)]
slopes = [[draw.real(len(own)) for _ in range(4)] for own in masters]
for step in (0, 2, 3):  # down to 1, up once, down to 1, refused
    slopes[hit][step][draw.integer(0, 50)] = draw.choice([math.inf, -math.inf, math.nan])
rules = (2.0, 1, 1.0, 0.5)
expect_scaled(masters, slopes, rules, in_one_process(masters, slopes, *rules))
rules = (1.0, 1, 1.0, 0.5)
expect_scaled(masters, slopes, rules, in_one_process(masters, slopes, *rules))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. By chance (1 point)
#
# Weights in bfloat16, and no float32 master: an update below half a step would be lost for ever. So the sum of weight and update, exact in
# float32 here, is rounded by chance: to the neighbour in bfloat16 that lies further from zero with a probability of how far the sum is on the
# way to it, else to the one nearer to zero. A quarter of the way: one time in four. A sum that bfloat16 has stays as it is.
#
# All ranks hold the same weights, get the same update, and must end with the same bits, and nothing is sent for it. Each step, each seed
# and each element has chances of its own. (`torch.Generator().manual_seed(number)` starts anew, and looks at the last 32 bits of the number only;
# `torch.rand(shape, generator=g)` and `torch.randint(low, high, shape, generator=g)` draw from it.)
#
# bfloat16 is the upper half of float32: `x.view(torch.int32)` are the bits of float32 x, and its neighbour in bfloat16 nearer to zero has the
# same bits with the lower 16 at zero. Weight 1 and update 2^-9: a quarter of the way from 1 to 1.0078125.
#
# > **API** weight [n] bfloat16 and update [n] float32 in, a new bfloat16 tensor [n] out. bfloat16 keeps 8 significant bits, float32 24, so
# > `weight.float() + update` is exact here. `bits.view(torch.float32)` turns int32 bits back. `group` is there, but nothing may be sent.


# %% answer="add_by_chance"
def add_by_chance(weight, update, seed, step, group):
    """weight [n] bfloat16, update [n] float32; seed and step are whole numbers below 2^16 -> [n] bfloat16."""
    ### BEGIN SOLUTION
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()
    ### END SOLUTION


# %% driver="many_steps"
def many_steps(weight, update, seed, steps, group):
    """Each step from the same weights."""
    return [add_by_chance(weight.clone(), update.clone(), seed, s, group) for s in range(steps)]


def at_pairs(weight, update, pairs, group):
    """Of each (seed, step)."""
    return [add_by_chance(weight.clone(), update.clone(), *pair, group) for pair in pairs]


# %% judge="expect_by_chance"
STEPS = 8
# what a seed may be multiplied with before a step is added: then two pairs of seed and step draw alike
STRIDES = (1, 2, 3, 7, 10, 16, 31, 32, 64, 97, 100, 101, 128, 256, 257, 512, 997, 1000, 1001, 1009)
STRIDES += (1024, 4096, 8192, 9973, 10_000, 16_384, 32_768, 65_521, 65_535)


def expect_by_chance(ranks, each, negative):
    """`each` numbers at each of some shares of the way; weights are a few steps of bfloat16 away from where they end."""
    shares = f64([0, 4, 64, 128, 200, 255]).repeat_interleave(each) / 256
    count = len(shares)
    step = 2.0 ** f64([draw.integer(-20, 8) for _ in range(count)])
    whole = torch.tensor([draw.integer(131, 251) for _ in range(count)])
    sign = -1.0 if negative else 1.0
    near, far = sign * whole * step, sign * (whole + 1) * step
    weight = near + step * torch.tensor([draw.integer(-3, 3) for _ in range(count)])
    update = (near + shares * (far - near) - weight).float()
    seed, where = draw.integer(0, 2**16 - 2), f"(seen with {ranks} ranks)"
    seeds = seed, seed + 1, seed ^ 1 << draw.integer(12, 15)
    given = [(weight.bfloat16(), update, number, STEPS) for number in seeds]
    outcome = run_on_ranks(many_steps, [given[0]] * ranks)
    like = [torch.zeros(count).bfloat16()] * STEPS
    for said in outcome.results:
        hint = f"as many as there were {where}"
        expect_equal([one * 0 for one in said], like, "bfloat16 weights", hint)
    expect(sum(outcome.sent_bytes) == 0, "nothing is sent", f"what do ranks share anyway? {where}")
    for said in outcome.results[1:]:
        hint = f"who draws, and from what? {where}"
        expect_equal(said, outcome.results[0], "the same on all ranks", hint)
    ended = torch.stack(outcome.results[0]).double()
    up, down = ended == far, ended == near
    exact = shares == 0
    expect(
        bool(down[:, exact].all()),
        "exact sums stay",
        f"there is nothing to decide for them {where}",
    )
    hint = f"a sum ends at one of the two numbers that it lies between {where}"
    expect(bool((up | down).all()), "one of two neighbours", hint)
    for share in shares.unique()[1:].tolist():
        ups = up[:, shares == share].double()
        wrong, sigma = ups.sum() - ups.numel() * share, math.sqrt(ups.numel() * share * (1 - share))
        kind = "negative" if negative else "positive"
        often = f"how often does a {kind} sum go up that is {share:g} of the way? {where}"
        few = 5 * math.sqrt(STEPS) * sigma  # if all steps were alike
        expect(abs(wrong) < few, "right on average", often)
        found = STEPS * ups.mean() * (1 - ups.mean())
        hint = f"does an element meet the same chance in every step? {where}"
        expect(ups.sum(0).var() <= 2 * found, "new draws in each step", hint)
        expect(abs(wrong) < 5 * sigma, "right on average", often)
    for other in given[1:]:
        (said,) = run_on_ranks(many_steps, [other]).results
        same = [torch.equal(a, b) for a in outcome.results[0] for b in said]
        expect(not any(same), "new draws for each seed", "another seed, and the same draws")
    one, at = draw.integer(2, 40), draw.integer(0, 14)
    pairs = {(one, at + stride) for stride in STRIDES if at + stride < 2**16} | {(one + 1, at)}
    pairs |= {(one ^ 1, (at + 5) ^ 1), (one, at + 5), (at + 50, one), (one, at + 50)}
    (said,) = run_on_ranks(at_pairs, [(weight.bfloat16(), update, sorted(pairs))]).results
    different = {bytes(each.view(torch.uint8).tolist()) for each in said}
    hint = "two pairs of seed and step draw alike; do they become one number, and is it another one for each pair?"
    expect(len(said) == len(different) == len(pairs), "new draws for each seed", hint)


# %% check="chance-sums" points=1
# Right on average, the same on all ranks, exact sums untouched; positive and negative.
expect_by_chance(2, 500, negative=False)
expect_by_chance(2, 500, negative=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks, negative in ((3, False), (draw.integer(2, 4), True)):
    expect_by_chance(ranks, draw.integer(3000, 4000), negative)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. A scale for each tile (2 points)
#
# A linear layer has x [T, C], w [F, C] and, in backward, dy [T, F]. Its three products are
#
#     y = x · wᵀ        dx = dy · w        dw = dyᵀ · x
#
# Both factors of each are rounded to a narrow grid, in tiles of `tile` numbers **along the dimension that this product sums over**: so the
# two scales of a tile are factors of a partial sum, and hardware need not multiply by them more than once in `tile` products. The
# last tile of a row or column is shorter if need be.
#
# The grid of a tile is the whole multiples of its scale s from -7s to 7s, s the smallest power of two such that no number of the tile lies
# beyond. A number becomes the nearest of them, of two equally near ones the even multiple. (As microscaling formats have it, but rounded up.)
# The scale of a tile of zeros is 1.
#
# `tile_scales` returns the scales of x in tiles along `axis`: its shape, but for that dim, which is ceil(n/tile). Nothing is rounded twice.
#
# x = `[[7, 1, 0.3], [0, 0, 8]]`, tile 2. Along axis 1 the scales are `[[1, 0.0625], [1, 2]]`, along axis 0 `[[1, 0.25, 2]]`.
#
# > **API** Pure functions on float64 tensors: `tile_scales` returns one tensor, `three_products` a tuple of three. `torch.frexp`, `.round()` (ties
# > to even), `.amax(dim)`, `torch.nn.functional.pad`, `repeat_interleave` are of use. Powers of two are exact in float64, and so are
# > products with them. `axis` is 0 or 1, `tile` an int.


# %% answer="tiles"
def tile_scales(x, axis, tile):
    """x [A, B] float64, axis 0 or 1 -> scales, [ceil(A/tile), B] or [A, ceil(B/tile)] float64."""
    ### BEGIN SOLUTION
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)
    ### END SOLUTION


def three_products(x, w, dy, tile):
    """x [T, C], w [F, C], dy [T, F] float64 -> y [T, F], dx [T, C], dw [F, C], of rounded factors."""

    ### BEGIN SOLUTION
    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)
    ### END SOLUTION


# %% judge="expect_tiles"
def expect_scales(*cases):
    """Cases (x, axis, tile, wanted); 0 stands for the scale of a tile of zeros."""
    asked = ask_each(tile_scales, [case[:3] for case in cases])
    for said, (x, axis, tile, wanted) in zip(asked, cases):
        where = f"(seen with shape {list(x.shape)}, axis {axis}, tile {tile})"
        expect_equal(said * 0, wanted * 0, "a scale for each tile", f"which dim is cut? {where}")
        zero = wanted == 0
        hint = f"7 of them reach every number of the tile, half as large they would not {where}"
        expect_equal(said[~zero], wanted[~zero], "the scale", hint)
        expect_equal(said, wanted + zero, "a tile of zeros", f"its scale is 1 {where}")


def expect_products(x, w, dy, tile, wanted):
    said = ask(three_products, x, w, dy, tile)
    (rows, inputs), outputs = x.shape, len(w)
    where = f"(seen with T={rows}, C={inputs}, F={outputs}, tile {tile})"
    expect(len(said) == 3, "three products", f"y, dx and dw {where}")
    for name, found, goal in zip(("y", "dx", "dw"), said, wanted):
        hint = f"over which dim does this product sum, and along which are its factors cut? {where}"
        atol = 1e-12 * max(1.0, float(goal.abs().max()))
        expect_equal(found, goal, f"the product {name}", hint, atol=atol)


# %% check="tiles-scales" points=1
# The smallest power of two that covers a tile, along either axis.
seven = f64([[7.0, 1.0, 0.3], [0.0, 0.0, 8.0]])
expect_scales(
    (seven, 1, 2, f64([[1.0, 0.0625], [0.0, 2.0]])),
    (seven, 0, 2, f64([[1.0, 0.25, 2.0]])),
    (-seven, 1, 3, f64([[1.0], [2.0]])),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_search(numbers):
    amax, scale = max(map(abs, numbers)), 1.0
    while amax > 7 * scale:
        scale *= 2
    while amax and amax <= 3.5 * scale:
        scale /= 2
    return scale if amax else 0.0


cases = []
for axis in (0, 1, 0, 1):
    tile = draw.integer(2, 5)
    x = draw.real(draw.integer(4, 9), draw.integer(4, 9)) * 2.0 ** draw.integer(-30, 30)
    x[draw.integer(0, 3)] = 0  # a row and a column, and numbers at the very end of a grid
    x[:, draw.integer(0, 3)] = 0
    x[0, 0], x[-1, -1] = 7 * 2.0 ** draw.integer(-9, 9), -3.5 * 2.0 ** draw.integer(-9, 9)
    rows = (x if axis else x.T).tolist()
    scales = [[by_search(row[i : i + tile]) for i in range(0, len(row), tile)] for row in rows]
    wanted = f64(scales)
    cases.append((x, axis, tile, wanted if axis else wanted.T.contiguous()))
expect_scales(*cases)
### END HIDDEN TESTS

# %% check="tiles-products" points=1
# Forward and both gradients, each factor in tiles along what its product sums over.
some, other = [[7.0, 1.5], [0.5, 2.0]], [[1.0, 0.0], [0.0, 2.0]]
expect_products(
    f64(some),
    f64(other),
    f64([[1.0, 0.0], [0.0, 1.0]]),
    2,
    [f64([[7.0, 4.0], [0.5, 4.0]]), f64(other), f64([[7.0, 1.5], [0.0, 2.0]])],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_hand(rows, tile):
    """Each row on its own: number by number, after a search for the scale."""
    done = []
    for row in rows.tolist():
        new = []
        for i in range(0, len(row), tile):
            scale, amax = 1.0, max(map(abs, row[i : i + tile]))
            while amax > 7 * scale:
                scale *= 2
            while amax and amax <= 3.5 * scale:
                scale /= 2
            new += [round(number / scale) * scale for number in row[i : i + tile]]
        done.append(new)
    return f64(done)


for tile in (2, 3, draw.integer(2, 5)):
    rows, inputs, outputs = (
        tile * draw.integer(1, 3) + draw.integer(1, tile - 1) for _ in range(3)
    )
    x, w, dy = draw.real(rows, inputs), draw.real(outputs, inputs), draw.real(rows, outputs)
    for a in (
        x,
        w,
        dy,
    ):  # outliers of a row and of a column: it matters with whom they share a scale
        a[:, draw.integer(0, a.shape[1] - 1)] *= 40
        a[draw.integer(0, a.shape[0] - 1)] *= 9
    x[0] = 0
    wanted = (
        by_hand(x, tile) @ by_hand(w, tile).T,
        by_hand(dy, tile) @ by_hand(w.T, tile).T,
        by_hand(dy.T, tile) @ by_hand(x.T, tile).T,
    )
    expect_products(x, w, dy, tile, wanted)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. A narrow accumulator (1 point)
#
# An accumulator keeps `bits` significant binary digits of its sum, with an exponent as large or small as need be. After each addition what
# is left over is **cut off, toward zero**, as in tensor cores. K numbers are added in chunks of c: each chunk from zero, one number after the
# other, then the sums of the chunks, from zero, one after the other, in an accumulator of the same kind. The last chunk is shorter if c
# does not divide K.
#
# `narrow_sum` returns the sum to the bit. (Sum and number together need at most 53 digits, so float64 adds them exactly.)
#
# Each cut loses less than 2^(1-bits) of the sum. A number of a full chunk goes through c cuts there, then through at most as many as there
# are chunks. `best_chunk` is the c for which both together are fewest, of equally good ones the smallest. K is 1,000,000 at most.
#
# 4,096 ones at 8 bits: 256 in one chunk, where a further 1 is cut off; 4,096 in chunks of 64. Of 12 numbers the best chunk is 3: 3 + 4 cuts.
#
# > **API** Pure functions. `narrow_sum` gets a float64 tensor [K] and two ints, and returns a Python float; `best_chunk` gets an int and returns
# > an int. `math.frexp(x)` gives mantissa in [0.5, 1) and exponent, `math.ldexp(m, e)` is m · 2^e, `math.trunc` cuts toward zero. K is at
# > most a few thousand in `narrow_sum`, so a loop over Python floats will do.


# %% answer="narrow"
def narrow_sum(x, bits, chunk):
    """x [K] float64 -> a float."""

    ### BEGIN SOLUTION
    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])
    ### END SOLUTION


def best_chunk(numbers):
    """K -> c."""
    ### BEGIN SOLUTION
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)
    ### END SOLUTION


# %% judge="expect_narrow"
def expect_sums(*cases):
    """Cases (property, x, bits, chunk, wanted)."""
    asked = ask_each(narrow_sum, [case[1:-1] for case in cases])
    for said, (property, x, bits, chunk, wanted) in zip(asked, cases):
        where = f"(seen with {len(x)} numbers, {bits} bits, chunks of {chunk})"
        hint = f"what is added to what, and what is cut off after each addition? {where}"
        expect_equal(said, float(wanted), property, hint)


def expect_chunks(*cases):
    """Cases (K, c)."""
    for said, (numbers, wanted) in zip(ask_each(best_chunk, [case[:1] for case in cases]), cases):
        hint = f"through how many cuts does a number go at most? (seen with {numbers} numbers)"
        expect_equal(said, wanted, "the best chunk", hint)


# %% check="narrow-sums" points=1
# Sums to the bit, in chunks of any size, and the chunk with the fewest cuts.
ones = torch.ones(4096).double()
expect_sums(
    ("one chunk", ones, 8, 4096, 256),
    ("chunks", ones, 8, 64, 4096),
    ("toward zero", f64([4.0, 3.0, 1.0]), 2, 3, 6),
    ("toward zero", f64([-4.0, -3.0, -1.0]), 2, 3, -6),
    ("chunks", f64([4.0, 3.0, 1.0, 0.0]), 2, 2, 6),
    ("a short last chunk", f64([4.0, 3.0, 1.0]), 2, 2, 6),
)
expect_chunks((12, 3), (1, 1), (16, 4))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def cut(value, bits):
    """In whole numbers: shift the rest out."""
    size, halves = abs(value), 2**60
    whole = int(size * halves)
    over = max(0, whole.bit_length() - bits)
    return (1 if value >= 0 else -1) * Fraction(whole >> over << over, halves)


def total(numbers, bits):
    held = Fraction(0)
    for number in numbers:
        held = cut(held + number, bits)
    return held


def drawn(kind):
    """A case whose sum is another one if its numbers are grouped otherwise, or cut before they are added."""
    chunk, bits = draw.integer(4, 7), draw.integer(7, 9)
    count = chunk * draw.integer(8, 20)
    chunk = count if kind == "one chunk" else chunk
    count += draw.integer(2, chunk - 1) if kind == "a short last chunk" else 0
    while True:
        x = draw.few(count) if kind in ("one chunk", "toward zero") else draw.few(count).abs()
        exact = [Fraction(number) for number in (x * draw.choice([-1, 1])).tolist()]
        groups = [exact[i : i + chunk] for i in range(0, count, chunk)]
        others = {
            "one chunk": [[[cut(number, bits) for number in exact]], [exact[:-1]]],
            "chunks": [[exact], [exact[i :: len(groups)] for i in range(len(groups))]],
            "a short last chunk": [groups[:-1], [*groups[:-1], *([v] for v in groups[-1])]],
            "toward zero": [],
        }[kind]
        if kind == "chunks":
            others.append([exact[i : i + len(groups)] for i in range(0, count, len(groups))])
        sums = [total([total(own, bits) for own in each], bits) for each in [groups, *others]]
        if sums[0] not in sums[1:]:
            return kind, f64([float(v) for v in exact]), bits, chunk, sums[0]


cases = [drawn(kind) for kind in ("one chunk", "chunks", "toward zero", "a short last chunk") * 3]
expect_sums(*cases)


def fewest(numbers):
    best = min(c + math.ceil(numbers / c) for c in range(1, numbers + 1))
    return next(c for c in range(1, numbers + 1) if c + math.ceil(numbers / c) == best)


expect_chunks(
    *(
        (n, fewest(n))
        for n in (draw.integer(2, 99), draw.integer(100, 999), draw.integer(9000, 90_000))
    ),
    *((n, fewest(n)) for n in (2, 3, 7, 12, 13, 99, 110, 4096)),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. A scale from the past (1 point)
#
# To know the largest number of a tensor one must have seen all of it. *Delayed scaling* takes what it was in the last steps. Every rank has
# some of the tensor's numbers, maybe none; its amax is the largest magnitude on all ranks. `history` holds those of earlier steps, the
# newest last, at most `length` of them. A step
#
# - takes the largest of `history` as reference. If it holds nothing above zero, this step's own amax is the reference;
# - rounds each number to the nearest multiple of reference/8, of two equally near ones to the even multiple, and not beyond ±reference: what
#   is larger *saturates*. (If the reference is zero, so are all numbers.);
# - adds this step's amax to the history, which all ranks keep alike, and forgets the oldest if it has become too long.
#
# A rank may send each other rank two numbers in a step, not what it holds. Return the rounded numbers, how many numbers of this rank had a
# magnitude above the reference, and the new history.
#
# length = 2, history `[4.0]`, rank 0 has `[1.2, 40]`, rank 1 `[0.7]`: the reference is 4, they become `[1, 4]` and `[0.5]`, saturated are 1 and
# 0, the history is `[4.0, 40.0]`. In the next two steps the reference is 40, and all three numbers of this one would be lost but 40.
#
# > **API** `collectives.all_reduce(x, group, op="max")` returns a new tensor on every rank; `amax` of an empty tensor raises. `history` is a list of Python
# > floats; do not change it, return a new one. Return a tuple: float64 tensor [n] (n may be 0), an int, a list of floats.


# %% answer="delayed"
def delayed(x, history, length, group):
    """x [n] float64, history a list of floats -> ([n] float64, a whole number, a list of floats)."""
    ### BEGIN SOLUTION
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]
    ### END SOLUTION


# %% driver="steps_of_delayed"
def steps_of_delayed(parts, length, group):
    """Parts: this rank's numbers in each step."""
    history, told = [], []
    for x in parts:
        values, saturated, history = delayed(x.clone(), list(history), length, group)
        told.append([values, saturated, history])
    return told


# %% judge="expect_delayed"
def expect_delayed(parts, length, wanted):
    """parts[rank][step]; wanted[rank][step]: values, saturated, history."""
    ranks, steps = len(parts), len(parts[0])
    outcome = run_on_ranks(steps_of_delayed, [(own, length) for own in parts], collectives=LISTED)
    where = f"(seen with {ranks} ranks and a history of {length} steps)"
    for step in range(steps):
        now = [told[step] for told in outcome.results], [goals[step] for goals in wanted]
        (found, counts, kept), (goals, most, histories) = (list(zip(*some)) for some in now)
        hint = f"whose magnitudes, and of how many steps? {where}"
        expect_equal(list(kept), list(histories), "the history", hint)
        hint = f"the reference is known before this step's numbers are, but for the first {where}"
        atol = 1e-12 * max(1.0, *(float(goal.abs().sum()) for goal in goals))
        expect_equal(list(found), list(goals), "the rounded numbers", hint, atol=atol)
        hint = f"what is larger than the reference? {where}"
        expect_equal(list(counts), list(most), "how many saturate", hint)
    expect(
        sum(outcome.sent_bytes) <= 16 * ranks * (ranks - 1) * steps,
        "bytes on the wire",
        f"two numbers for each other rank in a step {where}",
    )


# %% check="delayed-steps" points=1
# The reference is that of the steps before, an outlier saturates once and is felt as long as it is remembered.
here = [f64(x) for x in ([4.0, -1.2], [1.2, 40.0], [1.2, 40.0])]
there = [f64(x) for x in ([0.7], [0.7], [7.6])]
expect_delayed(
    [here, there],
    2,
    [
        [
            [f64([4.0, -1.0]), 0, [4.0]],
            [f64([1.0, 4.0]), 1, [4.0, 40.0]],
            [f64([0.0, 40.0]), 0, [40.0, 40.0]],
        ],
        [[f64([0.5]), 0, [4.0]], [f64([0.5]), 0, [4.0, 40.0]], [f64([10.0]), 0, [40.0, 40.0]]],
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def with_all(parts, length):
    """One process that holds what all ranks have, number by number."""
    told, seen = [[] for _ in parts], []
    for step in range(len(parts[0])):
        amax = max((abs(v) for own in parts for v in own[step].tolist()), default=0.0)
        past = seen[-length:]
        bound = max(past) if any(past) else amax
        seen.append(amax)
        for own, goals in zip(parts, told):
            numbers = own[step].tolist()
            values = [
                math.copysign(min(round(8 * abs(v) / bound), 8) * bound / 8, v) if bound else 0.0
                for v in numbers
            ]
            over = sum(abs(v) > bound for v in numbers)
            goals.append([f64(values), over, seen[-length:]])
    return told


for ranks, length in ((2, 3), (3, 1), (draw.integer(3, 4), draw.integer(2, 4))):
    sizes, steps, spike = (
        [draw.integer(60, 90) for _ in range(ranks)],
        length + 5,
        draw.integer(2, 3),
    )
    parts = [[draw.real(size) * draw.uniform(0.5, 2) for _ in range(steps)] for size in sizes]
    parts[draw.integer(0, ranks - 1)][spike][draw.integer(0, 50)] = draw.choice([-500.0, 500.0])
    hit = draw.integer(0, ranks - 1)
    parts[hit] = [x[: 0 if s == draw.integer(4, 5) else None] for s, x in enumerate(parts[hit])]
    expect_delayed(parts, length, with_all(parts, length))
parts = [[draw.real(70) * size for size in (0, 0, 1, 1)], [torch.empty(0).double()] * 4]
parts[0] = [
    x.abs() * 0 if s < 2 else x for s, x in enumerate(parts[0])
]  # nothing above zero at first
expect_delayed(parts, 3, with_all(parts, 3))
### END HIDDEN TESTS

# %% [markdown]
# ## 7. Bytes by kind (1 point)
#
# A policy says which dtype a run keeps its numbers in: `weights`, `gradients`, the two `moments` of Adam, and `master`, a copy of the weights
# that is updated in their place, or None. ZeRO-1 shards the optimizer's state (moments and master), ZeRO-2 the gradients too, ZeRO-3 the
# weights too.
#
# Here every parameter has a flat buffer of its own. From stage 1 on it is padded at its end to the next multiple of N, in *all* kinds,
# sharded or not; a rank's shard is 1/N of it. Stage 0 has no padding.
#
# How many bytes of each kind does one rank hold between two steps? The checks count the tensors of a real run with the chapter's Ledger.
# One parameter of 5 numbers, 2 ranks, weights and gradients in bfloat16, moments and master in float32: at stage 0 10, 10 and 60 bytes, at
# stage 1 12, 12 and 36.
#
# > **API** A pure function. `numels` is a list of ints, `policy` a dict `{"weights": name, "gradients": name, "moments": [name, name],
# > "master": name or None}` with names of `BYTES` (bytes of one number of that dtype), `stage` 0 to 3. Return a dict of three ints, one per kind.

# %% given="dtypes"
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# %% answer="bytes_by_kind"
def bytes_by_kind(numels, policy, stage, ranks):
    """numels a list; policy a dict of names, moments a list of two -> {"parameters": .., "gradients": .., "optimizer state": ..}."""
    ### BEGIN SOLUTION
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }
    ### END SOLUTION


# %% judge="expect_bytes"
KINDS = ["parameters", "gradients", "optimizer state"]


def counted(numels, policy, stage, ranks):
    """What the Ledger sees after a step on one of the ranks, which has shapes and no numbers."""

    def of(name):
        return name and getattr(torch, name)

    def rank():
        with Ledger() as ledger:
            layers = [
                torch.nn.Linear(1, n, bias=False, dtype=of(policy["weights"])) for n in numels
            ]
            model, group = torch.nn.ModuleList(layers), world.world()
            for param in model.parameters():
                param.grad_dtype = of(policy["gradients"])

            def make(params):
                moments = tuple(of(name) for name in policy["moments"])
                return AdamW(params, master_dtype=of(policy["master"]), moment_dtypes=moments)

            kinds = Replicated, Zero1, Zero2, Zero3
            cut = {"units": layers} if stage == 3 else {"bucket_bytes": 1}
            sync = kinds[stage](model, group, make, **cut)
            x = torch.ones(1, 1, dtype=of(policy["weights"]))
            sum(layer(x).float().sum() for layer in layers).backward()
            sync.finish()
            sync.optimizer.step()
            return [ledger.live_by_kind[kind] for kind in KINDS]

    return dryrun.run(rank, rank=draw.integer(0, ranks - 1), ranks=ranks)


def expect_bytes(*cases):
    for said, case in zip(ask_each(bytes_by_kind, list(cases)), cases):
        numels, policy, stage, ranks = case
        where = f"(seen at stage {stage} on {ranks} ranks)"
        named = isinstance(said, dict) and sorted(said) == sorted(KINDS)
        expect(named, "bytes of each kind", f"a dict with the three kinds is wanted {where}")
        expect(
            all(type(said[kind]) is int for kind in KINDS),
            "whole numbers",
            f"bytes are ints {where}",
        )
        for kind, wanted in zip(KINDS, counted(*case)):
            hint = f"which tensors are there of this kind, in which dtype, padded, sharded? {where}"
            expect(said[kind] == wanted, f"bytes of {kind}", hint)


# %% check="bytes-counted" points=1
# To the byte what the Ledger counts, for any policy and any stage.
usual = {"weights": "bfloat16", "gradients": "bfloat16", "master": "float32"}
usual["moments"] = ["float32", "float32"]
expect_bytes(([5], usual, 0, 2), ([5], usual, 1, 2), ([1000, 7], usual, 3, 4))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
policies = [
    ("float32", "float32", None, ["float32", "float32"]),
    ("bfloat16", "float32", "float32", ["bfloat16", "bfloat16"]),
    ("float16", "float32", "float32", ["float32", "float32"]),
    ("bfloat16", "bfloat16", None, ["bfloat16", "bfloat16"]),
    ("float64", "float64", None, ["float64", "float64"]),
    ("bfloat16", "bfloat16", "float32", ["bfloat16", "float32"]),
]
cases = []
for stage, values in zip(
    [0, 1, 2, 3, 1, 2, 3], [*draw.several(policies, 6), draw.choice(policies)]
):
    numels = [draw.integer(1, 9) for _ in range(3)] + [draw.integer(10**5, 10**9) for _ in range(2)]
    policy = dict(zip(("weights", "gradients", "master", "moments"), values))
    cases.append((draw.several(numels, 5), policy, stage, draw.integer(3, 64)))
expect_bytes(*cases)
### END HIDDEN TESTS
