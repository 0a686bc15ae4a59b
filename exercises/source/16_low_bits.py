# %% [markdown]
# # Exercises 16: low bits
#
# Five tasks, 10 points, about two and a half hours. Read chapter 16 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 16
#
# The grader runs the same checks and hidden ones with other sizes, other numbers of ranks and other values: outliers, blocks that are cut
# short, matrices of zeros. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - Only the functions of task 5 run on several ranks. They get their `group` last: `group.rank()` says who you are, `group.size()` how many.
# - Between ranks there is a network and nothing else. In task 5 `collectives` has `send`, `receive`, `barrier` and `all_reduce`.
#
# Sources: Xi et al. 2024 (Jetfire, arXiv:2403.12422, section 4), Xi et al. 2023 (INT4 training, arXiv:2306.11987, sections 3 and 4), Wang et al. 2023
# (BitNet, arXiv:2310.11453, section 2), Ma et al. 2024 (BitNet b1.58, arXiv:2402.17764, section 2). The formats here differ from theirs on purpose.

# %% given="setup"
import math

import torch

from minitrain import collectives

# %% judge="tools"
from collections import Counter

from minitrain.course.grading.answer_checks import (
    Draw,
    ask,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

LISTED = "all_reduce"
draw = Draw()  # hidden checks draw sizes, numbers of ranks and values


def blank(said):
    """Tensors of zeros in place of tensors: what is left are shapes, dtypes and lengths of lists."""
    if isinstance(said, (list, tuple)):
        return [blank(part) for part in said]
    return torch.zeros_like(said) if isinstance(said, torch.Tensor) else said


def expect_kind(said, wanted, property, hint):
    expect_equal(blank(said), blank(wanted), property, hint)


# %% [markdown]
# ## 1. A product of INT8 blocks (2 points)
#
# y = x·wᵀ with x [M, K] and w [N, K]. Both matrices are cut into blocks of h·h numbers, and where h does not divide a size the last blocks are
# shorter. Each block has one scale, so an outlier costs the digits of its own block and of no other.
#
#     scale    the smallest power of two with |number| <= 127·scale for all numbers of the block; 1 for a block of zeros
#     code     number / scale, rounded to the nearest whole number, and from the middle between two to the even one
#
# `quantised` returns the codes and the scales of a matrix. `product` gets codes and scales of both, and never makes a matrix of numbers from them:
# for each h·h block of y, and each block of K, the codes are multiplied and summed as integers, and that sum is scaled once. In float32, to the bit:
#
#     y = 0;    for the blocks of K in rising order:    y += sums · (scale of a's block · scale of b's block)        product of scales first
#
# The scales that `product` gets may come from another recipe: any float32 numbers. What is the largest sum of 64 products of codes, and in
# which integer does it fit?
#
# h = 2: x = `[[1, -4, 300]]` has the blocks `[1, -4]` and `[300]`. Their scales are 1/16 (127/32 is less than 4) and 4, their codes 16, -64 and 75.
#
# > **API** Pure functions. `quantised` returns a tuple (codes int8, scales float32), `product` one float32 tensor. int8 holds -128 to 127, int32
# > to 2^31; `a @ b` of int8 tensors is summed in int8, so convert first. Exponents: `torch.frexp`, or `2.0 ** k`; `.round()` takes ties to
# > the even number. `x[i:j]` past the end is simply shorter.


# %% answer="blocks"
def quantised(x, h):
    """x [R, C] float32 -> codes [R, C] int8 and scales [ceil(R/h), ceil(C/h)] float32."""
    ### BEGIN SOLUTION
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales
    ### END SOLUTION


def product(a, a_scales, b, b_scales, h):
    """Codes a [M, K], b [N, K] int8, their scales float32 -> y [M, N] float32."""

    ### BEGIN SOLUTION
    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y
    ### END SOLUTION


# %% judge="expect_blocks"
def spread_over(scales, shape, h):
    """[blocks, blocks] -> the scale of each number."""
    rows = scales.repeat_interleave(h, 0)[: shape[0]]
    return rows.repeat_interleave(h, 1)[:, : shape[1]]


def expect_codes(x, h, codes, scales):
    """The codes and scales that are wanted; what is wrong with others has a name."""
    said = ask(quantised, x, h)
    where = f"(seen at {list(x.shape)} in blocks of {h})"
    expect(
        isinstance(said, (list, tuple)) and len(said) == 2, "codes and scales", "return two tensors"
    )
    hint = f"codes are int8, one for each number; scales float32, one for each block {where}"
    expect_kind(said, [codes, scales], "codes and scales", hint)
    error = (said[0] * spread_over(said[1], x.shape, h).double() - x.double()).abs()
    half = spread_over(scales, x.shape, h).double() / 2
    hint = (
        f"no number may be wrong by more than half a scale of its own block; who shares it? {where}"
    )
    expect(bool((error <= half).all()), "the error of a block", hint)
    hint = f"the error is small enough, the scale is not what was asked for {where}"
    expect_equal(said[1], scales, "the smallest power of two", hint)
    hint = f"the scales are right; what happens in the middle between two codes? {where}"
    expect_equal(said[0], codes, "codes", hint)


def expect_product(a, a_scales, b, b_scales, h, wanted):
    """wanted [M, N] float32, to the bit. Before that: within what rounding in float32 may do."""
    y = ask(product, a, a_scales, b, b_scales, h)
    where = f"(seen at {list(a.shape)} and {list(b.shape)} in blocks of {h})"
    expect_kind(y, wanted, "a float32 product", f"y is [M, N] {where}")
    left, right = (
        codes.double() * spread_over(scales, codes.shape, h).double()
        for codes, scales in ((a, a_scales), (b, b_scales))
    )
    near = (a_scales.shape[1] + 4) * 2.0**-24 * (left.abs() @ right.abs().T) + 2.0**-126
    hint = f"which scales belong to a sum, is every block there, and do the sums fit? {where}"
    expect(bool(((y.double() - left @ right.T).abs() <= near).all()), "the product", hint)
    hint = f"near, but rounded elsewhere: integers until the one scaling, blocks in rising order? {where}"
    expect_equal(y, wanted, "to the bit", hint)


# %% check="blocks-codes" points=1
# Each block has a scale of its own, the smallest that will do.
expect_codes(
    torch.tensor([[1.0, -4.0, 300.0]]),
    2,
    torch.tensor([[16, -64, 75]], dtype=torch.int8),
    torch.tensor([[1 / 16, 4.0]]),
)
expect_codes(
    torch.tensor([[127.0, 2.5], [0.5, -1.5], [0.0, -0.0]]),
    2,
    torch.tensor([[127, 2], [0, -2], [0, 0]], dtype=torch.int8),
    torch.tensor([[1.0], [1.0]]),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def one_by_one(x, h):
    """Codes and scales of a matrix, found by trying powers of two."""
    codes, scales = [], {}
    for r, row in enumerate(x.tolist()):
        for c, number in enumerate(row):
            key = r // h, c // h
            if key not in scales:
                top = max(
                    abs(n) for line in x[r : r + h, c : c + h].tolist() for n in line
                )  # r, c begin a block
                power = -140 if top else 0
                while top > 127 * 2.0**power:
                    power += 1
                scales[key] = 2.0**power
            codes.append(round(number / scales[key]))
    shape = max(r for r, _ in scales) + 1, max(c for _, c in scales) + 1
    return (
        torch.tensor(codes, dtype=torch.int8).view(x.shape),
        torch.tensor([scales[r, c] for r in range(shape[0]) for c in range(shape[1])]).view(shape),
    )


for h in (2, 3, draw.integer(4, 7)):
    x = draw.real(
        draw.integer(h + 1, 3 * h - 1), draw.integer(2 * h + 1, 4 * h), dtype=torch.float32
    )
    x *= 2.0 ** draw.integer(-20, 20)
    x[draw.integer(0, len(x) - 1), draw.integer(0, h)] *= -draw.integer(100, 1000)  # an outlier
    x[:h, -h:] = 0
    expect_codes(x, h, *one_by_one(x, h))
for top in (127.0, -127.25, 128.0, -126.5):  # where the power of two changes, with ties
    x = torch.tensor([draw.choice([0.5, 1.0, 2.5, -3.5, -4.5]) for _ in range(20)]).view(4, 5)
    x[3, 0] = top
    x *= 2.0 ** draw.integer(-5, 5)
    expect_codes(x, 4, *one_by_one(x, 4))
### END HIDDEN TESTS

# %% check="blocks-product" points=1
# Integers within a block, one scaling for a block, the blocks of K in rising order.
few = torch.tensor([[16, -64, 75]], dtype=torch.int8), torch.tensor([[1 / 16, 4.0]])
more = torch.tensor([[64, 64, 0], [0, 1, 2]], dtype=torch.int8), torch.tensor([[1 / 64, 1.0]])
expect_product(*few, *more, 2, torch.tensor([[-3.0, 599.9375]]))
full = torch.full((1, 4), 127, dtype=torch.int8), torch.ones(1, 1)
expect_product(*full, *full, 4, torch.tensor([[64516.0]]))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def in_order(a, a_scales, b, b_scales, h):
    """y, one number after the other, each step rounded to float32 as IEEE says."""

    def single(number):
        return torch.tensor(number, dtype=torch.float64).float().item()

    y = torch.zeros(len(a), len(b))
    for m, left in enumerate(a.tolist()):
        for n, right in enumerate(b.tolist()):
            total = 0.0
            for k, start in enumerate(range(0, len(left), h)):
                sums = sum(p * q for p, q in zip(left[start : start + h], right[start : start + h]))
                scale = single(a_scales[m // h, k].item() * b_scales[n // h, k].item())
                total = single(total + single(sums * scale))
            y[m, n] = total
    return y


def drawn_codes(rows, columns, h, low=-127):
    count = -(-rows // h), -(-columns // h)
    codes = [draw.integer(low, 127) for _ in range(rows * columns)]
    scales = draw.real(*count, dtype=torch.float32).abs() + 0.01
    scales[draw.integer(0, count[0] - 1), draw.integer(0, count[1] - 1)] *= 1000  # an outlier's
    return torch.tensor(codes, dtype=torch.int8).view(rows, columns), scales


for h, low in ((2, -127), (draw.integer(3, 5), -127), (8, 100), (draw.integer(20, 40), 90)):
    m, n, k = draw.integer(h + 1, 2 * h), draw.integer(h + 1, 3 * h), draw.integer(3 * h + 1, 5 * h)
    m, n = min(m, 24), min(n, 24)
    both = *drawn_codes(m, k, h, low), *drawn_codes(n, k, h, low)
    expect_product(*both, h, in_order(*both, h))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Four bits at a time, and a rotation (2 points)
#
# **Parts.** Hardware that multiplies integers of 4 bits can take one of 8 bits in two steps: code = 16·hi + lo. The high part is signed, -8 to 7, and the
# low part is not, 0 to 15. (Why can it not be signed, too? What would 127 be?) `split` cuts integers of 4·parts bits, two's complement, into `parts`
# parts, the highest first. Only the highest is signed. Part i of n counts 16^(n-1-i), and every code comes back exactly.
#
# **A rotation.** Four bits have no room for outliers. H_1 = [1] and
#
#     H_2n = [[H_n, H_n], [-H_n, H_n]] / sqrt(2)
#
# has H·Hᵀ = 1 (and is not symmetric): if u becomes H·u and v becomes H·v, their product stays, and a number that was large is now a little everywhere.
# `rotated` does so with every vector along `dim`: u becomes diag(H_b, H_b, ..)·u. The block b is the largest power of two that is at most `most` and divides
# the size of `dim`, which need not be a power of two itself. There may be 8192 numbers in a block: H would be half a gigabyte, which is not there.
#
# **Three products.** y = x·wᵀ, dx = dy·w and dw = dyᵀ·x sum over three different things, and the rotation must go along what is summed. `operands`
# returns three pairs (a, b), so that a·bᵀ, a·b and aᵀ·b are the three products, unchanged, and the six matrices are the rotated ones.
#
# split of 127 in two parts: 7 and 15; of -1: -1 and 15. The row `[8, 0, 0, 0, 0, 0]` with most = 4 has blocks of two: `[5.66, -5.66, 0, 0, 0, 0]`.
#
# > **API** Pure functions. `split` returns a list of int8 tensors (-128 to 127); codes are int32, where `>>` keeps the sign and `& 15` takes the
# > last four bits. `rotated` returns one float64 tensor, `operands` a list or tuple of three pairs. `x.unflatten(dim, sizes)`, `.flatten(..)`,
# > `torch.stack` and `.movedim` do the rest.


# %% answer="parts"
def split(codes, parts):
    """codes [..] int32 of 4·parts bits -> a list of parts, int8 tensors of the same shape, the highest first."""
    ### BEGIN SOLUTION
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]
    ### END SOLUTION


def rotated(x, dim, most):
    """x [R, C] float64, dim 0 or 1 -> [R, C], rotated along dim."""
    ### BEGIN SOLUTION
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)
    ### END SOLUTION


def operands(x, w, dy, most):
    """x [M, K], w [N, K], dy [M, N] float64 -> three pairs for y = a·bᵀ, dx = a·b, dw = aᵀ·b."""
    ### BEGIN SOLUTION
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]
    ### END SOLUTION


# %% judge="expect_parts"
def expect_split(codes, parts):
    said = ask(split, codes, parts)
    where = f"(seen at {4 * parts} bits)"
    nothing = torch.zeros_like(codes, dtype=torch.int8)
    hint = f"a list of int8 tensors, one for each 4 bits {where}"
    expect(isinstance(said, list) and len(said) == parts, "parts", hint)
    expect_kind(said, [nothing] * parts, "parts", hint)
    exact = sum(16 ** (parts - 1 - i) * part.long() for i, part in enumerate(said))
    expect_equal(
        exact, codes.long(), "every code comes back", f"which part counts how much? {where}"
    )
    for i, part in enumerate(said):
        low, high = (-8, 7) if i == 0 else (0, 15)
        fits = bool(((part >= low) & (part <= high)).all())
        expect(fits, "four bits", f"a part does not fit; which of them has the sign? {where}")


def expect_rotated(said, x, dim, wanted, block):
    """wanted [R, C]: x rotated along dim in blocks of `block`."""
    where = f"(seen at {list(x.shape)} along dim {dim})"
    hint = f"of the shape of x {where}"
    expect_kind(said, x, "a rotated matrix", hint)
    top = x.abs().max().item()
    near = 4 * (block + 8) * math.sqrt(block) * top * 2.0**-53  # a sum of b terms of top/sqrt(b)
    lengths = [part.square().sum(dim).sqrt() for part in (said, x)]
    hint = f"a rotation leaves the length of every vector along dim as it was {where}"
    expect_equal(*lengths, "lengths stay", hint, atol=near * math.sqrt(x.shape[dim]))
    hint = f"the lengths are right; which numbers are in a block, and where are the minus signs? {where}"
    expect_equal(said, wanted, "the rotation", hint, atol=near)


def expect_operands(x, w, dy, most, wanted):
    """wanted: six matrices."""
    said = ask(operands, x, w, dy, most)
    where = f"(seen at x {list(x.shape)}, w {list(w.shape)})"
    pairs = isinstance(said, list) and [len(pair) for pair in said] == [2, 2, 2]
    expect(pairs, "three pairs", f"one for each product {where}")
    (a, b), (c, d), (e, f) = said
    six = [a, b, c, d, e, f]
    expect_kind(six, [x, w, dy, w, dy, x], "three pairs", f"of the shapes of x, w and dy {where}")
    top = [part.abs().max().item() for part in (x, w, dy)]
    near = 16 * (max(*x.shape, *w.shape) + 16) ** 2 * max(top) ** 2 * 2.0**-53
    hint = (
        f"both sides of a product are rotated along what it sums over, in the same blocks {where}"
    )
    expect_equal(
        [a @ b.T, c @ d, e.T @ f],
        [x @ w.T, dy @ w, dy.T @ x],
        "products unchanged",
        hint,
        atol=near,
    )
    hint = f"the products are right; along which dim are the outliers of each of the six? {where}"
    expect_equal(six, wanted, "outliers are spread", hint, atol=near)


# %% check="parts-split" points=1
# All codes of 8 bits come back from parts of four, and those of more bits, too.
expect_split(torch.arange(-128, 128, dtype=torch.int32), 2)
expect_split(torch.tensor([[-2048, -1, 2047]], dtype=torch.int32), 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_split(torch.arange(-8, 8, dtype=torch.int32), 1)
expect_split(torch.arange(-(2**15), 2**15, dtype=torch.int32).view(256, 256), 4)
some = [draw.integer(-(2**23), 2**23 - 1) for _ in range(60)]
expect_split(torch.tensor([*some, -(2**23), 2**23 - 1], dtype=torch.int32).view(2, 31), 6)
### END HIDDEN TESTS

# %% check="parts-rotated" points=1
# Products stay, outliers are spread, and there is no matrix H.
root = math.sqrt(0.5)
one = torch.tensor([[8.0, 0, 0, 0, 0, 0]], dtype=torch.float64)
wanted = torch.tensor([[8.0, -8, 0, 0, 0, 0]], dtype=torch.float64) * root
expect_rotated(ask(rotated, one, 1, 4), one, 1, wanted, 2)
expect_rotated(ask(rotated, one, 0, 4), one, 0, one, 1)
four = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float64).T
wanted = torch.tensor([[5.0, 1, 2, 0]], dtype=torch.float64).T
expect_rotated(ask(rotated, four, 0, 7), four, 0, wanted, 4)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def signs(rows, columns):
    """(-1)^(bits that are 1 in the row's number and 0 in the column's)."""
    both, count = rows[:, None] & ~columns[None, :], torch.zeros(len(rows), len(columns))
    while both.any():
        count += both & 1
        both = both >> 1
    return (1 - 2 * (count % 2)).double()


def by_matrix(x, dim, most):
    size = x.shape[dim]
    block = max(2**i for i in range(15) if 2**i <= most and size % 2**i == 0)
    numbers = torch.arange(block)
    h = torch.block_diag(*[signs(numbers, numbers) / math.sqrt(block)] * (size // block))
    return (h @ x if dim == 0 else x @ h.T), block


def with_outlier(rows, columns):
    x = draw.real(rows, columns)
    x[:, draw.integer(0, columns - 1)] *= draw.integer(100, 1000)
    return x


for size, most in (
    (32, 8),
    (48, draw.integer(16, 31)),
    (20, 64),
    (draw.integer(3, 9) * 2 + 1, 16),
    (64, 64),
):
    for dim in (0, 1):
        shape = (size, draw.integer(1, 6)) if dim == 0 else (draw.integer(1, 6), size)
        x = with_outlier(*shape)
        expect_rotated(ask(rotated, x, dim, most), x, dim, *by_matrix(x, dim, most))
for most in (8, draw.integer(4, 40)):
    m, n, k = (draw.choice([8, 12, 24, 48]) for _ in range(3))
    x, w, dy = with_outlier(m, k), with_outlier(n, k), with_outlier(m, n)
    places = ((x, 1), (w, 1), (dy, 1), (w, 0), (dy, 0), (x, 0))
    expect_operands(x, w, dy, most, [by_matrix(part, dim, most)[0] for part, dim in places])
x = draw.real(200, 8192)
said = ask(rotated, x, 1, 9000, budget_bytes=100_000_000)  # H of 8 bits has 67 MB, x 13 MB
some = torch.tensor(draw.several(range(8192), 40))
hint = "H is not there as a matrix; some of its columns are looked at (seen at a block of 8192)"
expect_kind(said, x, "a rotated matrix", hint)
wanted = x @ signs(some, torch.arange(8192)).T / math.sqrt(8192)
expect_equal(said[:, some], wanted, "the rotation", hint, atol=1e-9)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Some of the rows (2 points)
#
# The gradient of a weight is dw = Aᵀ·B, a sum over tokens, and most of them add little to it. The tokens come in n pieces: piece i has c_i rows of A and
# of B, and adds A_iᵀ·B_i. Only some pieces are taken: piece i is kept with the chance p_i, independently of the others, and what is kept is divided by its
# chance. Then the mean over all draws is Aᵀ·B.
#
# **Chances.** The squared error of such an estimate is Σ (1/p_i - 1)·s_i² on average, where the score s_i is the size of A_iᵀ·B_i. `chances` returns the
# p_i from 0 to 1 for which that is least among those that keep `budget` rows on average, Σ c_i·p_i = budget. If all pieces have one row, they are
# proportional to the scores. For others: by how much does the error fall for one more row, here or there? Where it falls more, p_i is still too small. And
# no chance is more than 1: what such a piece does not need is for the others. A piece with score 0 is never kept. If all pieces with a
# score have no more rows than the budget, all of them are kept.
#
# **An estimate.** `estimate` gets chances (any, not only yours) and for each piece a number 0 <= u_i < 1; piece i is kept if u_i < p_i. The rows stay
# where they are: `piece(i)` brings A_i and B_i, and is called for pieces that are kept, once. That is all that is saved, and it is counted.
#
# Scores `[6, 1, 1, 2]`, pieces of one row, budget 2: proportional would be `[1.2, .2, .2, .4]`. So the first is kept always, and one of the others on average:
# `[1, .25, .25, .5]`. Scores `[6, 2]`, pieces of 4 rows and of 1, budget 2: `[3/7, 2/7]`, which keeps 12/7 + 2/7 rows.
#
# > **API** `chances` is a pure function of two float64 tensors [n] and an int; it returns p [n], compared to 1e-12. `estimate` returns a float64
# > tensor of `shape` (a list of two ints); `piece(i)`, i an int, returns two float64 tensors and is counted. Nothing kept: zeros.


# %% answer="rows"
def chances(scores, rows, budget):
    """scores [n] float64, at least 0, rows [n] float64, whole numbers c_i, and a whole budget -> p [n] float64."""
    ### BEGIN SOLUTION
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p
    ### END SOLUTION


def estimate(p, u, piece, shape):
    """p [n], u [n] float64; piece(i) -> A_i [c_i, shape[0]] and B_i [c_i, shape[1]] -> an estimate of Aᵀ·B, float64 of this shape."""
    ### BEGIN SOLUTION
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total
    ### END SOLUTION


# %% driver="estimates"
def estimates(p, draws, rows, shape, group):
    """An estimate for each row of `draws`. Pieces come from outside, and each is written down."""

    def piece(i):
        like = torch.empty(rows[int(i)], sum(shape), dtype=torch.float64)
        return group.fetch(f"piece {int(i)}", like).split(list(shape), 1)

    return torch.stack([estimate(p, u, piece, tuple(shape)) for u in draws])


# %% judge="expect_rows"
def squared_error(scores, p):
    """Of an estimate with these chances, on average; what has no score adds none."""
    some = scores > 0
    return ((1 / p[some] - 1) * scores[some].square()).sum().item()


def expect_chances(cases):
    """Cases (scores, rows, budget, wanted)."""
    for p, case in zip(ask_each(chances, [case[:3] for case in cases]), cases):
        scores, rows, budget, wanted = case
        where = f"(seen at {len(scores)} pieces of {rows.min():.0f} to {rows.max():.0f} rows, budget {budget})"
        expect_kind(p, wanted, "a chance for each piece", f"a number for each {where}")
        fits = bool(((p >= 0) & (p <= 1)).all())
        expect(fits, "from 0 to 1", f"a piece cannot be kept more often than always {where}")
        hint = f"every draw of it costs something and adds nothing {where}"
        expect(not p[scores == 0].any(), "no piece without a score", hint)
        near = 1e-12 * rows.sum().item()
        hint = f"what a piece that is always kept does not need is for the others {where}"
        expect_equal((p * rows).sum(), (wanted * rows).sum(), "the budget", hint, atol=near)
        some = p[scores > 0]
        expect(bool((some > 0).all()), "unbiased", f"a piece that is never kept is missing {where}")
        even = min(1.0, budget / rows.sum().item())
        hint = f"the squared error is no smaller than with the same chance for all {where}"
        uniform = squared_error(scores, torch.full_like(scores, even))
        expect(squared_error(scores, p) <= uniform * (1 + 1e-9) + 1e-9, "better than even", hint)
        hint = (
            f"other chances with this budget have a smaller error; what does a row bring? {where}"
        )
        expect_equal(p, wanted, "the least error", hint, atol=1e-12)


def expect_estimates(a, b, p):
    """a, b: lists of pieces. Every set of them is drawn once; estimates weighted by their chances are Aᵀ·B."""
    n, shape = len(a), [a[0].shape[1], b[0].shape[1]]
    terms = torch.stack([left.T @ right for left, right in zip(a, b)])
    sets, weights, draws, taken = [], [], [], Counter()
    for number in range(2**n):
        kept = torch.tensor([number >> i & 1 for i in range(n)], dtype=torch.bool)
        weight = torch.where(kept, p, 1 - p).prod().item()
        if weight > 0:
            inside = torch.tensor([draw.uniform(0.0, 0.999) for _ in range(n)], dtype=torch.float64)
            inside[draw.integer(0, n - 1)] = 0.0
            draws.append(torch.where(kept, inside * p, p + inside * (1 - p)))
            sets.append(kept)
            weights.append(weight)
            taken.update(i for i in range(n) if kept[i])
    order = draw.several(range(len(sets)), len(sets))
    draws, sets = torch.stack([draws[i] for i in order]), [sets[i] for i in order]
    weights = torch.tensor([weights[i] for i in order], dtype=torch.float64)
    secrets = {f"piece {i}": torch.cat((a[i], b[i]), 1) for i in range(n)}
    inputs = [(p, draws, [len(part) for part in a], shape)]
    outcome = run_on_ranks(estimates, inputs, secrets=[secrets])
    said, where = outcome.results[0], f"(seen at {n} pieces)"
    nothing = torch.zeros(len(sets), *shape, dtype=torch.float64)
    expect_kind(said, nothing, "an estimate", f"float64 of the shape of Aᵀ·B {where}")
    largest = sum(left.abs().T @ right.abs() for left, right in zip(a, b)).max().item()
    near = 1e-12 * largest / p[p > 0].min().item()
    hint = f"the mean over all draws, each counted with its chance, is not Aᵀ·B {where}"
    mean = (weights[:, None, None] * said).sum(0)
    expect_equal(mean, terms.sum(0), "unbiased", hint, atol=near)
    hint = f"the mean is right; what is kept in a draw, and what is it divided by? {where}"
    for got, kept in zip(said, sets):
        factors = kept / p.clamp_min(1e-300)
        wanted = (factors[:, None, None] * terms).sum(0)
        expect_equal(got, wanted, "the pieces of a draw", hint, atol=near)
    loaded = Counter(int(e.name.split()[1]) for e in outcome.events if e.kind == "fetch")
    hint = f"a piece was brought that is not kept, or one twice; what is saved then? {where}"
    expect(loaded == +taken, "pieces brought", hint)


# %% check="rows-estimate" points=1
# On average it is the product, and only pieces that are kept are brought.
expect_estimates(
    [torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double(), torch.tensor([[3.0, 4.0]]).double()],
    [torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[-1.0]]).double()],
    torch.tensor([0.5, 0.25], dtype=torch.float64),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def drawn_pieces(rows, width, other):
    a, b = ([draw.real(count, size) for count in rows] for size in (width, other))
    return a, b


for n in (5, draw.integer(6, 7)):
    p = torch.tensor([draw.uniform(0.1, 0.9) for _ in range(n)], dtype=torch.float64)
    p[draw.integer(0, n - 1)] = 1.0
    rows = [draw.integer(1, 4) for _ in range(n)]
    expect_estimates(*drawn_pieces(rows, draw.integer(1, 4), draw.integer(1, 4)), p)
a, b = drawn_pieces([2, 1, 3, 1], 3, 2)  # pieces that are never kept, as there is nothing in them
a[1] *= 0
b[3] *= 0
expect_estimates(a, b, torch.tensor([0.3, 0.0, 1.0, 0.0], dtype=torch.float64))
### END HIDDEN TESTS

# %% check="rows-chances" points=1
# The chances with the least error for a budget of rows.
expect_chances(
    [
        (
            torch.tensor(scores, dtype=torch.float64),
            torch.tensor(rows, dtype=torch.float64),
            budget,
            torch.tensor(p, dtype=torch.float64),
        )
        for scores, rows, budget, p in (
            ([1.0, 3.0], [1, 1], 1, [0.25, 0.75]),
            ([6.0, 1.0, 1.0, 2.0], [1, 1, 1, 1], 2, [1.0, 0.25, 0.25, 0.5]),
            ([2.0, 0.0, 5.0], [2, 1, 3], 6, [1.0, 0.0, 1.0]),
            ([6.0, 2.0], [4, 1], 2, [3 / 7, 2 / 7]),
        )
    ]
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def filled(scores, rows, budget):
    """The m pieces that bring most for a row are kept always: the fewest for which no other share is above 1."""
    gain = [score / math.sqrt(count) for score, count in zip(scores, rows)]
    order = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -gain[i])
    for m in range(len(order) + 1):
        left = budget - sum(rows[i] for i in order[:m])
        rest = math.fsum(gain[i] * rows[i] for i in order[m:])
        if m == len(order) or left * gain[order[m]] <= rest:
            p = [left * its / rest if m < len(order) else 0.0 for its in gain]
            for i in order[:m]:
                p[i] = 1.0
            return torch.tensor(p, dtype=torch.float64)


def case(scores, rows, budget):
    wanted = filled(scores.tolist(), rows.tolist(), budget)
    return scores, rows.double(), budget, wanted


def drawn_case(n, budget, power, most):
    """The larger the power, the more scores are far larger than the others; pieces of up to `most` rows."""
    scores = draw.real(n).abs() ** power * draw.choice([1e-6, 1.0, 1e6])
    scores[draw.integer(0, n - 1)] = 0.0
    return case(scores, torch.tensor([draw.integer(1, most) for _ in range(n)]), budget)


falling = torch.tensor([2.0**-i for i in range(12)], dtype=torch.float64)  # one by one they reach 1
same = torch.full((draw.integer(5, 9),), 3.0, dtype=torch.float64)
nothing, one = torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64)
expect_chances(
    [
        drawn_case(9, 3, 1, 1),
        drawn_case(40, 11, 4, 1),
        drawn_case(300, 200, 6, 5),
        drawn_case(draw.integer(20, 60), 40, 8, 9),
        drawn_case(500, 2, 1, 30),
        case(falling, torch.ones(12, dtype=torch.int64), 6),
        case(falling, torch.arange(12, 0, -1), 30),
        case(same, torch.arange(len(same)) % 3 + 1, 4),
        case(nothing, torch.tensor([1, 2, 3]), draw.integer(2, 9)),
        case(one, torch.tensor([4, 3]), draw.integer(3, 9)),
    ]
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Three values (2 points)
#
# A ternary weight is -1, 0 or 1 times one scale for the whole matrix:
#
#     scale = mean |w|        trit = clip(round(w / scale), -1, 1)        round: to the nearest, from the middle to the even one
#
# **Five in a byte.** 3^5 = 243 fits into a byte, and with signs it is balanced: -121 to 121. `packed` returns int8 [N, ceil(K/5)], each row for itself:
# byte = Σ trit_i·3^i for the five trits i = 0 to 4 of its group; behind the end of a row there are trits of 0. Five zeros are 0, and the opposite trits are
# the opposite number. It returns the scale, too, a tensor without dims. A matrix of zeros has the scale 0.
#
# **Straight through.** `ternary_linear` returns y = x·(scale·trits)ᵀ, and autograd goes through it. Rounding has the gradient 0 almost everywhere, and with that
# nothing would be learnt. So backward acts as if the weights had not been rounded, clipped or scaled: dw is dyᵀ·x, for every weight, large ones too.
# dx is that of the weights that were used.
#
# **Without a multiplier.** `ternary_sums` is given `columns`, the K columns of x, and bytes, and returns the N columns of x·tritsᵀ. A column is a `Column`, which holds
# no values. All it can do is `a + b` and `a - b`, and each is written down. The check carries out what is written, with values that you never see, and counts:
#
# - a trit of 0 is skipped. It costs nothing;
# - rows with the same byte in the same place share its sum, and so do rows with the opposite one: who adds, who subtracts? A sum of up to five columns is made
#   once, with one operation for each trit that is not 0, and a row has one operation for each of its bytes that is not 0. (Kernels look sums up in a table.)
#
# w = `[[3, -3, 1, 0, 0, 0.5]]` has the mean 1.25, the trits `[1, -1, 1, 0, 0, 0]`, and the bytes 1 - 3 + 9 = 7 and 0.
#
# > **API** `packed` returns (int8 tensor, float64 tensor without dims). `ternary_linear` returns a tensor that autograd can differentiate
# > (a `torch.autograd.Function` is one way). `ternary_sums` gets a list of `Column`, an int8 tensor and a `Column` of zeros, for a row without trits, and
# > returns a list of N `Column`; `a + b`, `a - b` are all a column can do. `byte.item()` is an int.


# %% given="column"
class Column:
    """A column of numbers that are elsewhere: `a + b` and `a - b` are written down as (place of a, place of b, 1 or -1)."""

    def __init__(self, written, place):
        self.written, self.place = written, place

    def _with(self, other, sign):
        if not isinstance(other, Column):
            return NotImplemented
        self.written.append((self.place, other.place, sign))
        return Column(self.written, ("made", len(self.written) - 1))

    def __add__(self, other):
        return self._with(other, 1)

    def __sub__(self, other):
        return self._with(other, -1)


# %% answer="ternary"
def packed(w):
    """w [N, K] float64 -> bytes [N, ceil(K/5)] int8, and the scale, a float64 tensor without dims."""
    ### BEGIN SOLUTION
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale
    ### END SOLUTION


def ternary_linear(x, w):
    """x [M, K], w [N, K] float64 -> y [M, N], with the gradients described."""
    ### BEGIN SOLUTION
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T
    ### END SOLUTION


def ternary_sums(columns, data, zero):
    """A list of K columns, bytes [N, ceil(K/5)] int8, a column of zeros -> a list of N columns."""
    ### BEGIN SOLUTION
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results
    ### END SOLUTION


# %% driver="with_columns"
def with_columns(data, count):
    """What is written down, [operations, 3] with places as numbers (zero, the columns, what was made), and the places of results."""
    written = []
    columns = [Column(written, ("given", 1 + k)) for k in range(count)]
    results = ternary_sums(columns, data, Column(written, ("given", 0)))

    def number(place):
        return place[1] + (1 + count if place[0] == "made" else 0)

    rows = [[number(a), number(b), sign] for a, b, sign in written]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3), [number(c.place) for c in results]


# %% driver="with_gradients"
def with_gradients(x, w, dy):
    """y, dx and dw; None is a gradient of zeros."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = ternary_linear(x, w)
    grads = [torch.zeros_like(x), torch.zeros_like(w)]
    if y.requires_grad:
        grads = torch.autograd.grad(y, (x, w), dy, allow_unused=True, materialize_grads=True)
    return [y.detach(), *grads]


# %% judge="expect_ternary"
def expect_packed(w, data, scale):
    said = ask(packed, w)
    where = f"(seen at {list(w.shape)})"
    expect(isinstance(said, (list, tuple)) and len(said) == 2, "bytes and a scale", "return both")
    hint = f"int8, five trits in a byte, each row for itself; the scale is a float64 tensor {where}"
    expect_kind(said, [data, scale], "bytes and a scale", hint)
    near = 1e-14 * w.abs().max().item() * w.numel()
    expect_equal(
        said[1], scale, "the mean", f"of the absolute values of all weights {where}", atol=near
    )
    hint = f"the scale is right; what becomes 0, what is clipped, which digit comes first? {where}"
    expect_equal(said[0], data, "trits", hint)


def expect_gradients(x, w, dy, weights):
    """weights [N, K]: scale·trits."""
    y, dx, dw = ask(with_gradients, x, w, dy)
    where = f"(seen at x {list(x.shape)}, w {list(w.shape)})"
    top = max(part.abs().max().item() for part in (x, w, dy))
    near = 1e-13 * top**2 * max(*x.shape, *w.shape)
    expect_equal(y, x @ weights.T, "ternary weights", f"y = x·(scale·trits)ᵀ {where}", atol=near)
    hint = f"forward used the ternary weights; which ones does dx see? {where}"
    expect_equal(dx, dy @ weights, "the input's gradient", hint, atol=near)
    hint = f"as if nothing had been rounded, clipped or scaled: what is dw then? {where}"
    expect_equal(dw, dy.T @ x, "straight through", hint, atol=near)


def expect_sums(data, trits, most):
    """trits [N, K] of these bytes. What is written down is carried out, on 3 tokens; `most` is how much there may be."""
    count = trits.shape[1]
    written, places = ask(with_columns, data, count)
    where = f"(seen at {len(data)} rows of {count} trits)"
    expect(len(places) == len(data), "a column for each row", f"N of them {where}")
    values = [torch.zeros(3, dtype=torch.int64)]
    values += [torch.tensor([draw.integer(-999, 999) for _ in range(3)]) for _ in range(count)]
    x = torch.stack(values[1:], 1)
    for a, b, sign in written.tolist():
        before = range(len(values))
        fine = a in before and b in before and sign in (1, -1)
        expect(fine, "a column for each row", f"what is written down is no addition {where}")
        values.append(values[a] + sign * values[b])
    fine = all(place in range(len(values)) for place in places)
    expect(fine, "a column for each row", f"a result is no column {where}")
    said = torch.stack([values[place] for place in places], 1)
    hint = f"which digit of a byte belongs to which column, and what is a negative byte? {where}"
    expect_equal(said, x @ trits.T, "the sums", hint)
    hint = f"a trit of 0 is skipped, a column is added once for each other trit {where}"
    dense = int((trits != 0).sum()) + int((data != 0).sum())
    expect(len(written) <= dense, "zeros are skipped", hint)
    hint = (
        f"rows with the same byte in the same place, or the opposite: is its sum made once? {where}"
    )
    expect(len(written) <= most, "sums are shared", hint)


# %% check="ternary-weights" points=1
# Five trits in a byte, the mean as scale, and a gradient that goes straight through.
w = torch.tensor([[3.0, -3, 1, 0, 0, 0.5]], dtype=torch.float64)
expect_packed(w, torch.tensor([[7, 0]], dtype=torch.int8), torch.tensor(1.25, dtype=torch.float64))
x, dy = torch.arange(12.0, dtype=torch.float64).view(2, 6), torch.ones(2, 1, dtype=torch.float64)
expect_gradients(x, w, dy, 1.25 * torch.tensor([[1.0, -1, 1, 0, 0, 0]], dtype=torch.float64))
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_rule(w):
    """Bytes, scale and trits, one number after the other."""
    rows = w.tolist()
    scale = math.fsum(abs(number) for row in rows for number in row) / w.numel()
    trits = [
        [max(-1, min(1, round(number / scale))) if scale else 0 for number in row] for row in rows
    ]
    full = [row + [0] * (-len(row) % 5) for row in trits]
    data = [
        [sum(row[i + j] * 3**j for j in range(5)) for i in range(0, len(row), 5)] for row in full
    ]
    trits = torch.tensor(trits, dtype=torch.float64)
    return torch.tensor(data, dtype=torch.int8), torch.tensor(scale, dtype=torch.float64), trits


tied = torch.tensor([0.5, -0.5, 1.5, -1.5, 0.0, 2.0, -2.0, 0.0], dtype=torch.float64)  # mean 1
drawn = [draw.real(draw.integer(2, 5), draw.integer(6, 14)) for _ in range(3)]
drawn[1][0] *= 50  # outliers: the others become 0
drawn[2] += 2
for w in (
    *drawn,
    draw.real(3, 10),
    2 * tied.view(1, 8),
    tied.view(4, 2),
    torch.zeros(2, 7).double(),
):
    data, scale, trits = by_rule(w)
    expect_packed(w, data, scale)
    x, dy = draw.real(draw.integer(2, 5), w.shape[1]), draw.real(1, w.shape[0])
    expect_gradients(x, w, dy.expand(len(x), -1) * draw.real(len(x), 1), scale * trits)
### END HIDDEN TESTS

# %% check="ternary-sums" points=1
# Added, subtracted, skipped, and made once.
expect_sums(torch.tensor([[7, 0]], dtype=torch.int8), torch.tensor([[1, -1, 1, 0, 0, 0]]), 3 + 1)
expect_sums(
    torch.tensor([[7, 1], [-7, -1], [7, 0]], dtype=torch.int8),
    torch.tensor([[1, -1, 1, 0, 0, 1], [-1, 1, -1, 0, 0, -1], [1, -1, 1, 0, 0, 0]]),
    3 + 1 + 5,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def drawn_trits(rows, count, different):
    """Rows whose groups of five are few different ones in each place, or opposite to them, or zeros."""
    made, common = [], [[draw.choice([-1, 1]) for _ in range(5)] for _ in range(2)]
    for start in range(0, count, 5):
        size = min(5, count - start)
        options = [[0] * size, *(trits[:size] for trits in common)]
        options += [[draw.integer(-1, 1) for _ in range(size)] for _ in range(different)]
        signs = [draw.choice([-1, 1]) for _ in range(rows)]
        made.append([[sign * trit for trit in draw.choice(options)] for sign in signs])
    return torch.tensor([[trit for group in row for trit in group] for row in zip(*made)])


def expect_trits(trits):
    """At most: a sum for each group of a place that is neither another one's nor its opposite, and a row's own."""
    data, most = [], 0
    for groups in trits.split(5, 1):
        value = sum(3**j * trit for j, trit in enumerate(groups.unbind(1)))
        firsts = {abs(key): i for i, key in reversed(list(enumerate(value.tolist())))}
        most += int((groups[list(firsts.values())] != 0).sum()) + int((value != 0).sum())
        data.append(value)
    expect_sums(torch.stack(data, 1).to(torch.int8), trits, most)


for rows, count, different in (
    (40, 12, 5),
    (60, draw.integer(16, 24), 6),
    (1, 9, 3),
    (300, 10, 12),
):
    expect_trits(drawn_trits(rows, count, different))
expect_trits(torch.zeros(3, 7, dtype=torch.int64))
expect_trits(torch.cartesian_prod(*[torch.arange(-1, 2)] * 5))
### END HIDDEN TESTS

# %% [markdown]
# ## 5. One bit on many ranks (2 points)
#
# A linear layer of one bit: weights are -1 or +1 around the centre of the matrix, with one scale, and activations have 8 bits and one scale for each token.
#
#     bit_nk = 1 if w_nk > centre, else -1        centre = mean of all w        beta = mean of all |w|  (not centred)
#     code_mk = round(x_mk·127 / amax_m)          amax_m = max over all k of |x_mk|;  a token of zeros has codes of 0
#     y_mn = beta·amax_m/127 · Σ_k code_mk·bit_nk
#
# On ranks the matrix is cut, and "all" still means the whole matrix. Shares need not be equal, and nobody knows the others' sizes.
#
# **Outputs cut.** A rank has x [M, K] whole and rows w [N_r, K]; it returns its own columns y [M, N_r]. What must ranks agree on? It is a few numbers.
#
# **Inputs cut.** A rank has columns x [M, K_r] and w [N, K_r]; every rank returns y [M, N] whole. The sum over k is one over ranks now, and as it is a sum of whole
# numbers it can travel as int32: half the bytes of float64, and the result is that of one process in whatever order it was summed. That only works if the codes of all
# ranks have one scale.
#
# Results are compared to 1e-12, and bytes are counted. One `all_reduce` of n ranks sends 2·(n-1) times its tensor, all ranks together. Nothing that can be left out
# may travel: at most three float64 numbers for the matrix, and if inputs are cut one float64 number for each token and an int32 one for each result.
# `collectives.all_reduce(x, group, op="max")` is the elementwise maximum.
#
# x = `[[127, 1, -127, 2]]`, w = `[[1, 2, 1, 3], [3, 2, -6, 2]]`: the centre is 1, beta is 2.5, the bits are `[-1, 1, -1, 1]` and `[1, 1, -1, 1]`, the codes
# are x itself, and y = 2.5·`[[3, 257]]`. If rank 1 has the last column alone, its own largest activation is 2. Its code must be 2 all the same.
#
# > **API** `collectives.all_reduce(x, group)` returns the sum as a new tensor on every rank, `op="max"` the elementwise maximum; the dtype stays
# > (int32 travels as 4 bytes, float64 as 8). Return one float64 tensor. A share may have any size, one row or column at least.


# %% answer="one_bit"
def outputs_cut(x, w, group):
    """x [M, K], w [N_r, K] float64 -> y [M, N_r] float64."""
    ### BEGIN SOLUTION
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)
    ### END SOLUTION


def inputs_cut(x, w, group):
    """x [M, K_r], w [N, K_r] float64 -> y [M, N] float64."""
    ### BEGIN SOLUTION
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)
    ### END SOLUTION


# %% judge="expect_one_bit"
def cut_at(x, sizes, dim):
    return [part.contiguous() for part in x.split(sizes, dim)]


def drawn_weights(rows, columns, centre):
    """Multiples of 1/16 with exactly this mean, which some of them have."""
    w = draw.few(rows, columns)
    w.view(-1)[draw.several(range(1, w.numel()), 3)] = centre
    w.view(-1)[0] += centre * w.numel() - w.sum()
    return w


def near_of(x, w):
    return 1e-12 * x.abs().max().item() * w.abs().mean().item() * x.shape[1]


def expect_outputs_cut(x, w, sizes, wanted):
    """sizes: the rows of w of each rank."""
    n = len(sizes)
    inputs = [(x, part) for part in cut_at(w, sizes, 0)]
    outcome = run_on_ranks(outputs_cut, inputs, collectives=LISTED)
    where = f"(seen with {n} ranks)"
    parts = cut_at(wanted, sizes, 1)
    expect_kind(outcome.results, parts, "own columns", f"float64 {where}")
    hint = f"whose mean are beta and the centre? who counts how much, and what is a weight at the centre? {where}"
    expect_equal(outcome.results, parts, "the whole matrix", hint, atol=near_of(x, w))
    hint = f"everyone has x; what else than a few numbers must be known of the others? {where}"
    expect(sum(outcome.sent_bytes) <= 2 * (n - 1) * 24, "bytes on the wire", hint)


def expect_inputs_cut(x, w, sizes, wanted, property="", hint=""):
    """sizes: the columns of x and w of each rank."""
    n = len(sizes)
    inputs = list(zip(cut_at(x, sizes, 1), cut_at(w, sizes, 1)))
    outcome = run_on_ranks(inputs_cut, inputs, collectives=LISTED)
    where = f"(seen with {n} ranks)"
    expect_kind(outcome.results, [wanted] * n, "y on every rank", f"float64 {where}")
    hint = f"{hint or 'the sum over k goes over all ranks; whose are beta and the centre?'} {where}"
    expect_equal(
        outcome.results, [wanted] * n, property or "the whole matrix", hint, atol=near_of(x, w)
    )
    needed = 24 + 8 * len(x) + 4 * wanted.numel()
    hint = f"a few numbers, one for each token, and the sums as whole numbers of 32 bits {where}"
    expect(sum(outcome.sent_bytes) <= 2 * (n - 1) * needed, "bytes on the wire", hint)


AGREED = (
    "one scale for a token",
    "it is right where all ranks have the same largest activation; whose is it otherwise?",
)

# %% check="one_bit-outputs" points=1
# Outputs are cut: ranks agree on the matrix, and on nothing else.
x = torch.tensor([[127.0, -127.0], [0.0, 0.0]], dtype=torch.float64)
w = torch.tensor([[1.0, 2.0], [3.0, -2.0], [1.0, 1.0]], dtype=torch.float64)  # centre 1, beta 10/6
wanted = torch.tensor([[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64) * (127 * 10 / 6)
expect_outputs_cut(x, w, [1, 2], wanted)
expect_outputs_cut(x, w, [3], wanted)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def one_process(x, w):
    amax, centre = x.abs().max(1, keepdim=True).values, w.sum() / w.numel()
    codes = torch.round(127 * x / torch.where(amax > 0, amax, torch.ones_like(amax)))
    bits = 2.0 * (w > centre).double() - 1.0
    return (codes @ bits.T) * amax * (w.abs().sum() / w.numel()) / 127


for n in (2, 3, draw.integer(4, 5)):
    sizes = [draw.integer(1, 5) for _ in range(n)]
    sizes[0] = sizes[-1] + 2
    x = draw.real(draw.integer(2, 6), draw.integer(4, 9))
    x[0] *= 100
    x[-1] = 0
    w = drawn_weights(sum(sizes), x.shape[1], draw.integer(-40, 40) / 16)
    w[: sizes[0]] += 8  # a rank's own mean is another one
    w[sizes[0], 0] -= 8 * sizes[0] * x.shape[1]
    expect_outputs_cut(x, w, sizes, one_process(x, w))
### END HIDDEN TESTS

# %% check="one_bit-inputs" points=1
# Inputs are cut: one scale for a token, and whole numbers travel.
x = torch.tensor([[127.0, 1, -127, 2], [0, 0, 0, 0]], dtype=torch.float64)
w = torch.tensor([[1.0, 2, 1, 3], [3, 2, -6, 2]], dtype=torch.float64)  # centre 1, beta 2.5
wanted = torch.tensor([[3.0, 257], [0, 0]], dtype=torch.float64) * 2.5
expect_inputs_cut(x, w, [1, 3], wanted)
expect_inputs_cut(x, w, [2, 2], wanted)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def one_process(x, w):
    amax, centre = x.abs().max(1, keepdim=True).values, w.sum() / w.numel()
    codes = torch.round(127 * x / torch.where(amax > 0, amax, torch.ones_like(amax)))
    bits = 2.0 * (w > centre).double() - 1.0
    return (codes @ bits.T) * amax * (w.abs().sum() / w.numel()) / 127


for n in (2, 3, draw.integer(4, 5)):
    sizes = [draw.integer(1, 5) for _ in range(n)]
    sizes[0] = sizes[-1] + 2
    starts = [sum(sizes[:r]) for r in range(n)]
    w = drawn_weights(draw.integer(3, 6), sum(sizes), draw.integer(-40, 40) / 16)
    w[:, : sizes[0]] += 8  # a rank's own mean is another one
    w[0, sizes[0]] -= 8 * sizes[0] * len(w)
    x = draw.real(draw.integer(3, 6), sum(sizes)).clamp(-3, 3)
    x[-1] = 0
    x[:-1, starts] = -3.0  # the same largest one everywhere
    expect_inputs_cut(x, w, sizes, one_process(x, w))
    x[0, draw.choice(starts)] *= 100
    x[:, starts] *= 1 + draw.real(1, n).abs()
    expect_inputs_cut(x, w, sizes, one_process(x, w), *AGREED)
sizes = [150, draw.integer(150, 200)]  # sums that 16 bits do not hold
w = torch.full((2, sum(sizes)), 1.0, dtype=torch.float64)
w[:, 7] = -64.0
x = torch.full((2, sum(sizes)), 5.0, dtype=torch.float64)
expect_inputs_cut(x, w, sizes, one_process(x, w))
### END HIDDEN TESTS
