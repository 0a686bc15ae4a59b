# %% [markdown]
# # Exercises 08: attention in tiles
#
# Four tasks, 10 points, about two hours. Read chapter 08 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 08
#
# The grader runs the same checks and hidden ones with other sizes and other values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - All functions here run on one process: there is no group and nothing is sent.
# - Fast memory is small. Where a task says what may be in it, the rest must not be.
#
# Attention of one head: queries Q, keys K and values V are [T, width], the scores are S = Q·Kᵀ / sqrt(width), and
#
#     out = softmax(S)·V        lse = log Σ_j exp S_j        for each query, j being the keys that it sees
#
# Task 1 is the backward of what Rabe and Staats 2021 (arXiv:2112.05682, section 2) do with summaries, tasks 2 to 4 are Dao et al. 2022
# (FlashAttention, arXiv:2205.14135) with the loops of Dao 2023 (FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2); the capped scores of
# task 3 are Gemma 2's (arXiv:2408.00118, section 2).

# %% given="setup"
import math

import torch

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

draw = Draw()  # hidden checks draw sizes and values


def pair_of(scores, v):
    """What one process knows of these keys: scores [.., T, n], v [.., n, K] -> out [.., T, K] and lse [.., T]. Nothing seen: 0 and -inf."""
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp() @ v, lse


def how_near(products, *values):
    """How far rounding may take (out, lse) from one process; products[.., T, n] are the scores as if nothing in them cancelled.

    In units of 2**-53, with n keys and A the largest of these: a score costs (width + 2)·A; what is subtracted from it and added again 6A; a sum
    and its logarithm n + 64. So a weight is wrong by a factor of (width + 8)·A + 16·(n + 64), and out by that times the largest value. Both
    sides round. A width of less than 8 counts as 8.
    """
    scores = max([8, *(x.size(-1) for x in values)]) + 8
    largest = max([1.0, *(x.abs().max().item() for x in values)])
    weight = scores * products.abs().max().item() + 16 * (products.size(-1) + 64)
    return 2 * weight * largest * 2.0**-53


# %% [markdown]
# ## 1. Two sets of keys become one, and backward (2 points)
#
# A set of keys is known to a query by two things: `out`, the output as if there were no other keys, and `lse`, the logarithm of the sum of
# exponentials that it was divided by. Chapter 08 merges the pairs of two sets that have no key in common:
#
#     lse' = log(exp lse_1 + exp lse_2)        out' = w_1·out_1 + w_2·out_2        w_i = exp(lse_i - lse')
#
# Whoever merges blocks by hand, with `flex_attention` for instance, needs its backward as well: given the gradients `dout` of out' and `dlse`
# of lse', return those of out_1, lse_1, out_2 and lse_2. An lse has two ways to count: it is part of lse', and it shifts weight between the two
# outputs. If lse_1 rises, out' moves towards out_1. Derive what that gives, and write it without autograd.
#
# Scores may be 10000, and exp(10000) is inf; they may be -10000, and exp(-10000) is 0. And a query may see nothing of a set: then its
# out is 0 and its lse is -inf. All gradients of that set are 0, also beside another set of which it sees nothing. (-inf - (-inf) is nan.)
#
# One query, width 1: `[[2]]` with lse 0 and `[[6]]` with lse log 3 become `[[5]]`: the second set counts three times as much. With dout = 1 and
# dlse = 1 the gradients are 1/4 for out_1, -1/2 for lse_1, 3/4 for out_2 and 3/2 for lse_2.
#
# > **API** A pure function of six tensors in float64: dout, out and other_out are [.., T, K], dlse, lse and other_lse are [.., T]. It returns
# > four new tensors: the gradients of out, lse, other_out and other_lse, in this order and of these shapes. Autograd is not there, and
# > the arguments stay as they were.


# %% answer="merge_backward"
def merge_backward(dout, dlse, out, lse, other_out, other_lse):
    """-> the gradients of out [.., T, K], lse [.., T], other_out [.., T, K] and other_lse [.., T]."""
    ### BEGIN SOLUTION
    finite = torch.logaddexp(lse, other_lse).clamp_min(torch.finfo(lse.dtype).min)
    weight, other_weight = (lse - finite).exp(), (other_lse - finite).exp()
    apart = weight * other_weight * (dout * (out - other_out)).sum(-1)
    d_out, d_other = weight.unsqueeze(-1) * dout, other_weight.unsqueeze(-1) * dout
    return d_out, weight * dlse + apart, d_other, other_weight * dlse - apart
    ### END SOLUTION


# %% driver="merged_back"
def merged_back(*given):
    """What comes out, and the arguments as they are afterwards."""
    said = merge_backward(*given)
    return {"said": list(said), "given": list(given)}


# %% judge="expect_merge"
def gradients_of_merge(dout, dlse, out, lse, other_out, other_lse):
    """By autograd, through the union as a softmax over the two sets; 0 where a query sees nothing of either."""
    nothing = (lse == -math.inf) & (other_lse == -math.inf)
    outs, lses = torch.stack((out, other_out)), torch.stack((lse, other_lse))
    outs, lses = outs.requires_grad_(), lses.masked_fill(nothing, 0.0).requires_grad_()
    union = (lses.softmax(0).unsqueeze(-1) * outs).sum(0), lses.logsumexp(0)
    seen = dout.masked_fill(nothing.unsqueeze(-1), 0.0), dlse.masked_fill(nothing, 0.0)
    d_outs, d_lses = torch.autograd.grad(union, (outs, lses), seen)
    return d_outs[0], d_lses[0], d_outs[1], d_lses[1]


def expect_merge(scores, other_scores, v, other_v, property="", hint="", ones=False):
    """Gradients of merging two sets with these scores [.., T, n] and values [.., n, K], against autograd."""
    pairs = [*pair_of(scores, v), *pair_of(other_scores, other_v)]
    upstream = [draw.real(*x.shape) for x in pairs[:2]]
    given = [torch.ones_like(x) if ones else x for x in upstream] + pairs
    said, true = ask(merged_back, *given, autograd=False), gradients_of_merge(*given)
    both = torch.cat((scores, other_scores), -1)
    near = how_near(both.masked_fill(both == -math.inf, 0.0), v, other_v)
    near *= 4 * v.size(-1) * (1 + sum(x.abs().max().item() for x in given[:2]))
    four = said["said"]
    expect(
        len(four) == 4 and all(isinstance(x, torch.Tensor) for x in four),
        "four gradients",
        "return four tensors, the gradients of out, lse, other_out and other_lse",
    )
    for name, places, question in (
        ("gradient of an output", (0, 2), "how much does a set count in the union?"),
        (
            "gradient of an lse",
            (1, 3),
            "the outputs' gradients are right; an lse is part of lse', and it shifts weight between the two outputs",
        ),
    ):
        expect_equal(
            [four[place] for place in places],
            [true[place] for place in places],
            property or name,
            f"{hint or question} (seen at {name})",
            atol=near,
        )
    expect_equal(
        said["given"],
        given,
        "arguments stay as they were",
        "somebody else may need these tensors; make new ones",
    )


def scores_and_values(*shape, n, width, around=0.0):
    return draw.real(*shape, n) * 2 + around, draw.real(*shape[:-1], n, width)


NEUTRAL = (
    "nothing is neutral",
    "where all keys are seen it is right; an lse of -inf says that exp lse is 0: how much does that set count?",
)
NOTHING = (
    "nothing and nothing",
    "a query that sees no key in either set has no gradient; which difference is no number?",
)
LARGE = (
    "large scores",
    "small scores are right; what may be subtracted from both lse, so that no exp overflows and not both are 0?",
)


def expect_empty(property, hint, shape, n, width, first, second):
    """Some queries see nothing of the first set, some nothing of the second one, by the masks [T]."""
    (scores, v), (other_scores, other_v) = (
        scores_and_values(*shape, n=n, width=width) for _ in range(2)
    )
    expect_merge(
        scores.masked_fill(first.unsqueeze(-1), -math.inf),
        other_scores.masked_fill(second.unsqueeze(-1), -math.inf),
        v,
        other_v,
        property,
        hint,
    )


def expect_large(shape, width, far):
    """Scores around far for both, around -far for both, and far apart."""
    for around, other in ((far, far), (-far, -far), (far, -far), (-far, far)):
        (scores, v), (other_scores, other_v) = (
            scores_and_values(*shape, n=3, width=width, around=its) for its in (around, other)
        )
        expect_merge(scores, other_scores, v, other_v, *LARGE)


# %% check="merge_backward-union" points=1
# The four gradients, for sets of any size.
expect_merge(
    torch.zeros(1, 1).double(),
    torch.zeros(1, 3).double(),
    torch.full((1, 1), 2.0).double(),
    torch.full((3, 1), 6.0).double(),
    ones=True,
)
expect_merge(draw.real(4, 3) + 2, draw.real(4, 5), draw.real(3, 2), draw.real(5, 2))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for shape in ([draw.integer(1, 6)], [2, draw.integer(2, 5)], [2, 3, draw.integer(1, 4)]):
    n, m, width = draw.integer(1, 9), draw.integer(1, 9), draw.integer(1, 7)
    (scores, v), (other_scores, other_v) = (
        scores_and_values(*shape, n=count, width=width) for count in (n, m)
    )
    expect_merge(scores, other_scores, v, other_v)
### END HIDDEN TESTS

# %% check="merge_backward-edges" points=1
# Sets of which nothing is seen, and large scores.
yes, no = torch.tensor([True, False, False]), torch.tensor([False, False, False])
expect_empty(*NEUTRAL, [3], 2, 2, no, yes)
expect_empty(*NEUTRAL, [3], 2, 2, yes, no)
expect_empty(*NOTHING, [3], 2, 2, yes, yes)
expect_large([2], 3, 10000.0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(2):
    tokens, seen = draw.integer(4, 6), draw.mask(6)
    first, second = seen[:tokens], ~seen[:tokens]
    expect_empty(*NEUTRAL, [2, tokens], draw.integer(1, 4), draw.integer(1, 4), first, second)
    expect_empty(
        *NOTHING, [2, tokens], draw.integer(1, 4), draw.integer(1, 4), first, first | second
    )
expect_large(
    [draw.integer(1, 3), draw.integer(2, 4)], draw.integer(1, 4), float(draw.integer(1000, 90000))
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Attention in tiles, forward (3 points)
#
# Q, K and V are in slow memory, in tiles of `tile` tokens, the last one perhaps shorter. `load("q", i)` brings tile i of the queries, `load("k", j)` and
# `load("v", j)` tile j of the keys and of the values. Fast memory has room for one tile of each, and for one tile of scores:
#
#     for each tile of queries:                      loaded once
#         for each tile of keys that it sees:        K_j and V_j are loaded again for each tile of queries: there is no room to keep them
#             scores [tile, tile] -> what was summed is rescaled, if a larger score has come
#         its rows of out and lse are done
#
# The mask is causal. There may be fewer queries than keys, and then they are the last ones of the text: the last query sees the last key. So query i
# sees keys 0 to i + (keys - queries). A tile of which no query sees any key is not loaded, and a tile that the diagonal crosses needs a mask.
#
# Graded: the result, also with large scores (subtract the largest one that came so far); what is loaded, tile by tile; and the memory, which must not
# grow with the keys: 256 queries with 32,768 keys have 67 MB of scores and 34 MB of keys and values, and tiles of 1 MB and 0.5 MB.
#
# Two queries, three keys, tile 2. There is one tile of queries, and the keys 0, 1 and 2 are in two tiles: `q 0`, `k 0`, `v 0`, `k 1` and `v 1` are loaded.
# In tile 0 everything is seen; in tile 1 key 2 is seen by the second query only.
#
# > **API** `load("q", i)`, `load("k", j)`, `load("v", j)` return a tensor [<= tile, width] in float64 and count as a load each time. `queries`,
# > `keys` and `tile` are ints; the width is that of what is loaded. Return two tensors, out [queries, width] and lse [queries].


# %% answer="tiled_forward"
def tiled_forward(load, queries, keys, tile):
    """Numbers of queries and of keys; load(name, number) -> a tile [<= tile, width]. Returns out [queries, width] and lse [queries]."""
    ### BEGIN SOLUTION
    outs, lses = [], []
    for i, top in enumerate(range(0, queries, tile)):
        q = load("q", i)
        largest = q.new_full((len(q), 1), -math.inf)
        total, summed = torch.zeros_like(largest), torch.zeros_like(q)
        for j, left in enumerate(range(0, top + len(q) + keys - queries, tile)):
            k, v = load("k", j), load("v", j)
            scores = q @ k.T / math.sqrt(q.size(-1))
            scores += torch.full_like(scores, -math.inf).triu(top + keys - queries - left + 1)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            p, kept = (scores - new).exp(), (largest - new).exp()
            total, summed, largest = (
                kept * total + p.sum(-1, keepdim=True),
                kept * summed + p @ v,
                new,
            )
        outs.append(summed / total)
        lses.append((largest + total.log()).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)
    ### END SOLUTION


# %% driver="tiles"
def from_outside(queries, keys, tile, width, group):
    """Tiles come from outside, and each load is written down."""

    def load(name, number):
        length = (queries if name == "q" else keys) - number * tile
        return group.fetch(
            f"{name} {number}", torch.empty(min(tile, length), width, dtype=torch.float64)
        )

    return list(tiled_forward(load, queries, keys, tile))


# %% judge="expect_tiled"
def one_process(q, k, v):
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return pair_of((q @ k.T / math.sqrt(q.size(-1))).masked_fill(hidden, -math.inf), v)


def expect_attention(said, q, k, v, scores):
    out, lse = one_process(q, k, v)
    near = how_near(q.abs() @ k.abs().T / math.sqrt(q.size(-1)), v)
    expect(len(said) == 2, "a pair", "return out and lse")
    expect_equal(said[0], out, *PROPERTIES[scores], atol=near)
    hint = "the output is right; what was subtracted from the scores?"
    expect_equal(said[1], lse, "log-sum-exp", hint, atol=near)


def drawn_attention(queries, keys, width, scores="drawn"):
    """Scores: "equal" are 0, "falling" and "rising" from key to key, "drawn", and "large": they rise by 700 and more from key to key, or
    fall, for every other query; the last query's rise."""
    q, k, v = draw.real(queries, width), draw.real(keys, width), draw.real(keys, width)
    if scores == "equal":
        q.zero_()
    elif scores in ("falling", "rising"):
        q[:, 0], q[:, 1:] = 1 + q[:, 0].abs(), 0.0
        k[:, 0] = torch.arange(keys) * (0.3 if scores == "rising" else -0.3)
    elif scores == "large":
        q[:, 0] = (
            2000.0 * torch.arange(1, queries + 1) * (-1.0) ** torch.arange(queries - 1, -1, -1)
        )
        k[:, 0] = torch.arange(1, keys + 1)
    return q, k, v


PROPERTIES = {
    "equal": (
        "the keys that are seen",
        "all scores are 0 here, so out is the mean of the values that a query sees: is each of them there once, and none that is hidden?",
    ),
    "falling": (
        "the weights",
        "the right keys are there, and the largest score of a row comes first; what divides a score, and what the sum?",
    ),
    "rising": (
        "rescaling",
        "it is right as long as the largest score comes first; what becomes of both sums when a larger one comes?",
    ),
    "drawn": ("the output", "it is right for scores that only fall or rise"),
    "large": (
        "large scores",
        "small scores are right; what is subtracted before exp, and what happens to the sums when it changes?",
    ),
}


def expect_tiled(queries, keys, width, tile, scores="drawn", exactly=False, **rules):
    """The result, and no tile of keys that was kept; `exactly`: each tile is loaded as often as the loops need it."""
    q, k, v = drawn_attention(queries, keys, width, scores)
    secrets = {
        f"{name} {number}": part.contiguous()
        for name, x in (("q", q), ("k", k), ("v", v))
        for number, part in enumerate(x.split(tile))
    }
    sizes = (queries, keys, tile, width)
    outcome = run_on_ranks(from_outside, [sizes], secrets=[secrets], **rules)
    expect_attention(outcome.results[0], q, k, v, scores)
    loaded = Counter(event.name for event in outcome.events if event.kind == "fetch")
    last = [
        min(start + tile, queries) - 1 + keys - queries for start in range(0, queries, tile)
    ]  # the last key that each tile of queries sees
    for name in secrets:
        kind, number = name.split()
        if kind == "q":
            expect(
                loaded[name] == 1 or not exactly,
                "queries once",
                "a tile of queries was loaded again, or never; which loop is the outer one?",
            )
            continue
        times = sum(int(number) * tile <= key for key in last)
        expect(
            loaded[name] <= times or not exactly,
            "hidden tiles",
            "keys or values were loaded for a tile of queries that sees none of them, or twice for the same one",
        )
        expect(
            loaded[name] >= times,
            "one tile of each",
            "a tile of keys or values was kept from one tile of queries to the next; where was there room?",
        )


def expect_little_memory(queries, budget=40_000_000):
    """Scores are 67 MB, keys and values 34 MB, tiles of them 1 and 0.5 MB."""
    expect_tiled(queries, 32_768, 64, 512, budget_bytes=budget)


# %% check="tiled_forward-result" points=1
# out and lse of one process, tile by tile, for sizes that the tile does not divide.
for scores in PROPERTIES:
    expect_tiled(11, 11, 3, 3, scores)
    expect_tiled(5, 8, 2, 3, scores)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
queries = draw.integer(5, 12)
for keys, tile, scores in (
    (queries + draw.integer(0, 9), draw.integer(2, 5), "equal"),
    (queries + draw.integer(1, 9), draw.integer(2, 5), "rising"),
    (queries, draw.integer(2, 4), "drawn"),
    (queries + draw.integer(1, 9), draw.integer(3, 5), "drawn"),
    (queries + draw.integer(1, 9), draw.integer(3, 5), "large"),
    (queries + 3, queries + 5, "drawn"),
):
    expect_tiled(queries, keys, draw.integer(2, 8), tile, scores)
expect_tiled(4, 6, draw.integer(1, 8), 1)
expect_tiled(1, draw.integer(5, 20), 3, 4)
expect_little_memory(draw.integer(230, 250))
### END HIDDEN TESTS

# %% check="tiled_forward-loads" points=1
# Queries are loaded once, keys and values for each tile of queries that sees them.
expect_tiled(2, 3, 2, 2, exactly=True)
expect_tiled(5, 5, 2, 2, exactly=True)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
queries, tile = draw.integer(7, 11), draw.integer(2, 4)
expect_tiled(queries, queries, draw.integer(1, 4), tile, exactly=True)
for scores in ("drawn", "large"):
    keys = queries + draw.integer(1, 7)
    expect_tiled(keys - draw.integer(1, 3), keys, draw.integer(1, 4), tile, scores, exactly=True)
expect_little_memory(256)
### END HIDDEN TESTS

# %% check="tiled_forward-live" points=1
# Memory does not grow with the keys, and there is a tile of scores at a time.
expect_tiled(5, 8, 2, 3, "large")
expect_little_memory(256, budget=28_000_000)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
queries = draw.integer(5, 9)
expect_tiled(queries, queries + 2, draw.integer(1, 4), draw.integer(2, 4), "large")
### END HIDDEN TESTS


# %% [markdown]
# ## 3. Backward of one block, with capped scores (2 points)
#
# Some models cap their scores, so that none is larger than `cap`: softly, by a tanh.
#
#     R = Q·Kᵀ / sqrt(width)        S = cap·tanh(R / cap)        out = softmax(S)·V        lse = log Σ exp S
#
# Forward keeps out and lse, and no probability. Backward makes those of any block of keys anew, as lse says what to divide by:
#
#     P = exp(S - lse)        D = the sum over the width of dout·out, one number for each query
#     dV = Pᵀ·dout            dS = P·(dout·Vᵀ - D), elementwise
#
# and goes on from S to R, to Q and to K: that is yours. (The derivative of tanh can be had from S, without a second tanh.)
#
# `out` and `lse` are those of **all** keys, and the block has some of them. So dk and dv are those of the block's keys, and dq is the block's share: the
# shares of all blocks add up to the gradient of the queries. With `causal` the block is a triangle: as many queries as keys, query i sees its keys
# 0 to i. Otherwise everything is seen. Return dR as well, 0 where nothing is seen: a bias that is added before the cap has it as its gradient.
#
# One query, width 1, two keys in two blocks: q = 0, so both probabilities are 1/2 and lse = log 2. v = 1 and 3, so out = 2. With dout = 1, dv is 1/2 in both
# blocks, dR is 1/2·(1 - 2) = -1/2 in the first and +1/2 in the second. With keys 5 and 7 the shares of dq are -2.5 and 3.5, dk is 0.
#
# > **API** A pure function of tensors in float64, a bool and a float: dout, q, out [H, T, K], lse [H, T], k and v [H, n, K] of this block.
# > It returns four tensors: dq [H, T, K], dk and dv [H, n, K], dR [H, T, n]. Autograd is not there.


# %% answer="block_backward"
def block_backward(dout, q, k, v, out, lse, causal, cap):
    """dout, q, out [H, T, K], lse [H, T] of the queries with all keys; k, v [H, n, K] of this block -> its share dq [H, T, K], dk, dv [H, n, K], dR [H, T, n]."""
    ### BEGIN SOLUTION
    bent = torch.tanh(q @ k.mT / (math.sqrt(q.size(-1)) * cap))
    p = (cap * bent - lse.unsqueeze(-1)).exp()
    p = p.tril() if causal else p
    dr = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * (1 - bent**2)
    scale = 1 / math.sqrt(q.size(-1))
    return scale * dr @ k, scale * dr.mT @ q, p.mT @ dout, dr
    ### END SOLUTION


# %% judge="expect_gradients"
def how_near_gradients(dout, q, k, v):
    """A gradient is a sum over all tokens of a weight, of (dout·v - dout·out), at most 2·width·|dout|·|v| and as exact, and of a query or key."""
    largest = {
        name: x.abs().max().item() for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v))
    }
    factors = (
        2
        * q.size(-1)
        * largest["dout"]
        * max(1.0, largest["v"])
        * max(1.0, largest["q"], largest["k"])
    )
    return (
        how_near(q.abs() @ k.abs().mT / math.sqrt(q.size(-1))) * factors * (q.size(-2) + k.size(-2))
    )


def expect_gradients(heads, tokens, width, sizes, large=1.0):
    """Blocks of these sizes that all queries see; a size of None is the queries' own keys, a triangle. All gradients against autograd.

    Large scores: the cap is large as well, and every query sees a score whose exp is inf, that of the first key."""
    q, dout = draw.real(heads, tokens, width) * large, draw.real(heads, tokens, width)
    ks, vs = (
        [draw.real(heads, size or tokens, width).requires_grad_() for size in sizes]
        for _ in range(2)
    )
    cap = 2.0
    if large > 1:
        q[..., 0], cap = large, 4 * large
        ks[0].data[:, 0] = 2 * math.sqrt(width) * torch.eye(width)[0]
    q.requires_grad_()
    scores = [q @ k.mT / math.sqrt(width) for k in ks]
    for s in scores:
        s.retain_grad()
    seen = [
        cap * torch.tanh(s / cap)
        + (0.0 if size else torch.full_like(s.detach(), -math.inf).triu(1))
        for s, size in zip(scores, sizes)
    ]
    seen = torch.cat(seen, -1)
    out, lse = seen.softmax(-1) @ torch.cat(vs, -2), seen.logsumexp(-1)
    out.backward(dout)
    q, out, lse, dq = q.detach(), out.detach(), lse.detach(), q.grad
    blocks = [
        (dout, q, k.detach(), v.detach(), out, lse, size is None, cap)
        for k, v, size in zip(ks, vs, sizes)
    ]
    said = ask_each(block_backward, blocks, autograd=False)
    near = how_near_gradients(
        dout,
        q,
        torch.cat([block[2] for block in blocks], -2),
        torch.cat([block[3] for block in blocks], -2),
    )
    for number, (block, k, v, s) in enumerate(zip(said, ks, vs, scores)):
        four = isinstance(block, (list, tuple)) and len(block) == 4
        expect(four, "four gradients", "return dq, dk, dv and dR")
        which = f"(seen at block {number} of {len(sizes)})"
        expect_equal(
            block[2],
            v.grad,
            "dv",
            f"each value gets dout by its probability among all keys; which scores make P, and is the mask there? {which}",
            atol=near,
        )
        expect_equal(
            block[1],
            k.grad,
            "dk",
            f"dv is right; of which keys is D, what does the cap do to a gradient, and is the scale there? {which}",
            atol=near,
        )
        expect(block[0].shape == q.shape, "dq", "a share for every query")
        expect_equal(
            block[3],
            s.grad,
            "dR",
            f"dv and dk are right; dR is the gradient of the scores before the cap, also of hidden ones {which}",
            atol=near,
        )
    expect_equal(
        sum(block[0] for block in said),
        dq,
        "dq",
        "dk and dv are right; the shares of all blocks add up to the gradient of q",
        atol=near,
    )


# %% check="block_backward-whole" points=1
# The gradients of a block that has all keys, and of one that has not.
expect_gradients(1, 2, 1, [3])
expect_gradients(2, 3, 4, [None])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_gradients(draw.integer(1, 3), draw.integer(2, 6), draw.integer(2, 6), [draw.integer(1, 7)])
expect_gradients(draw.integer(1, 3), draw.integer(2, 6), draw.integer(2, 6), [None])
expect_gradients(2, draw.integer(2, 6), draw.integer(2, 6), [draw.integer(1, 7), None])
### END HIDDEN TESTS

# %% check="block_backward-shares" points=1
# Of several blocks each has its share, also with large scores.
expect_gradients(2, 3, 4, [2, None])
expect_gradients(1, 2, 3, [2, 1, 4], large=500.0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for large in (1.0, float(draw.integer(400, 800))):
    sizes = [draw.integer(1, 5) for _ in range(draw.integer(1, 3))]
    expect_gradients(
        draw.integer(1, 3), draw.integer(2, 6), draw.integer(2, 5), [*sizes, None], large
    )
### END HIDDEN TESTS

# %% [markdown]
# ## 4. What the loops move (3 points)
#
# Attention in tiles does more arithmetic than attention in whole matrices, and is faster, as it moves less between slow and fast memory. Count it,
# in elements, for one head with T queries and T keys of this width. Tiles have `rows` queries and `columns` keys, the last ones perhaps fewer.
#
# Forward is the loop of task 2: Q_i is loaded once, K_j and V_j for each tile of queries that sees them; out_i and lse_i are stored once. lse has one
# number a query. Backward has the other order, so that dK_j and dV_j can stay until they are complete:
#
#     D of every query        loads out and dout, stores D, one number a query
#     for each tile of keys   loads K_j, V_j
#         for each tile of queries that sees it
#                             loads Q_i, dout_i, dQ_i, lse_i and D_i; adds its share to dQ_i and stores it
#         stores dK_j, dV_j
#
# Without a mask every tile sees every other. With a causal one, pairs of tiles in which no query sees any key are skipped. All else is moved whole.
#
# And how large can tiles be? `largest_tile` takes rows = columns = c. Forward at its fullest has Q_i, what is summed for out_i, K_j, V_j, c·c scores
# and two more numbers for each row in a fast memory of so many elements. Return the largest c that fits; if not even one token fits, raise a
# `ValueError` of one line.
#
# T = 4, width 1, tiles of 2, causal: forward loads 4 of Q and 4 + 8 of K and V (the first tile of queries sees one tile of keys, the second sees
# two), 16 in all, and stores 4 + 4 = 8. Backward loads 46 and stores 18. An A100's multiprocessor has room for 98304 elements of two bytes: with
# width 64, c = 210.
#
# > **API** Two pure functions of ints (`causal` is a bool). `tiled_traffic` returns a dict of two pairs of ints, `largest_tile` an int, exact for
# > numbers of any size (`math.isqrt`), or raises a `ValueError`.


# %% answer="traffic"
def tiled_traffic(tokens, width, rows, columns, causal):
    """{"forward": (loads, stores), "backward": (loads, stores)} in elements, as ints."""
    ### BEGIN SOLUTION
    keys = queries = 0  # keys that all tiles of queries load, queries that all tiles of keys load
    for top in range(0, tokens, rows):
        stop = min(top + rows, tokens)
        seen = -(-stop // columns) if causal else -(-tokens // columns)  # tiles of keys
        keys += min(seen * columns, tokens)
        queries += seen * (stop - top)
    return {
        "forward": (tokens * width + 2 * keys * width, tokens * width + tokens),
        "backward": (
            4 * tokens * width + queries * (3 * width + 2),
            2 * tokens * width + tokens + queries * width,
        ),
    }
    ### END SOLUTION


def largest_tile(fast, width):
    """Elements of fast memory, width of a head -> tokens of a tile, an int."""
    ### BEGIN SOLUTION
    half = 2 * width + 1  # c² + 2·half·c <= fast
    tile = math.isqrt(fast + half**2) - half
    if tile < 1:
        raise ValueError(f"{fast} elements have no room for a tile of one token of width {width}")
    return tile
    ### END SOLUTION


# %% driver="tile_or_refusal"
def tile_or_refusal(fast, width):
    try:
        return largest_tile(fast, width)
    except ValueError as error:
        return str(error)


# %% judge="expect_traffic"
def expect_traffic(way, wanted, *sizes):
    """way is "forward" or "backward"; sizes are (tokens, width, rows, columns, causal)."""
    said = ask(tiled_traffic, *sizes)
    expect(
        isinstance(said, dict) and set(said) == {"forward", "backward"},
        "forward and backward",
        "a dict with these two is wanted",
    )
    expect(
        all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(n) is int for n in pair)
            for pair in said.values()
        ),
        "whole numbers",
        "(loads, stores), two ints, for each",
    )
    hint = (
        "which pairs of tiles does the mask leave?"
        if sizes[-1]
        else "all pairs of tiles are there; what is moved once, and what for each pair?"
    )
    for number, kind in enumerate(("loads", "stores")):
        shorter = (
            " The last tiles may be shorter." if sizes[0] % sizes[2] or sizes[0] % sizes[3] else ""
        )
        expect(said[way][number] == wanted[number], f"{kind} of {way}", hint + shorter)


def expect_tile(fast, width, fits):
    """fits: the c that fits, of which c + 1 does not; 0 for a refusal."""
    said = ask(tile_or_refusal, fast, width, time_limit_s=5)
    if not fits:
        expect(isinstance(said, str), "a refusal", "not even one token fits: raise a ValueError")
        expect(said.strip() and "\n" not in said, "a refusal", "say in one line what does not fit")
        return
    expect(
        not isinstance(said, str),
        "no refusal without need",
        "a ValueError, but a tile of one token fits",
    )
    expect(type(said) is int, "whole numbers", "a tile has a whole number of tokens")
    expect(
        said <= fits,
        "what fits",
        "this tile does not fit: four tiles of tokens, one of scores, and two numbers per row",
    )
    expect(
        said >= fits,
        "the largest tile",
        "a larger tile fits as well; how do you solve c·c + .. = M, and what does rounding do to large numbers?",
    )


# %% check="traffic-forward" points=1
# Loads and stores of the forward, with a mask and without, for tiles of any size.
expect_traffic("forward", (20, 8), 4, 1, 2, 2, False)
expect_traffic("forward", (16, 8), 4, 1, 2, 2, True)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def true_forward(tokens, width, rows, columns, causal):
    pairs = [
        min(columns, tokens - left)
        for top in range(0, tokens, rows)
        for left in range(0, tokens, columns)
        if not causal or left < min(top + rows, tokens)
    ]
    return tokens * width + 2 * width * sum(pairs), tokens * (width + 1)


for rows, columns in (
    (8, 8),
    (draw.integer(3, 9), draw.integer(20, 40)),
    (draw.integer(20, 40), draw.integer(3, 9)),
    (draw.integer(100, 200), 7),
):
    for causal in (False, True):
        sizes = draw.integer(90, 130), draw.integer(2, 80), rows, columns, causal
        expect_traffic("forward", true_forward(*sizes), *sizes)
### END HIDDEN TESTS

# %% check="traffic-backward" points=1
# Loads and stores of the backward, with a mask and without, for tiles of any size.
expect_traffic("backward", (56, 20), 4, 1, 2, 2, False)
expect_traffic("backward", (46, 18), 4, 1, 2, 2, True)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def true_backward(tokens, width, rows, columns, causal):
    met = sum(
        min(rows, tokens - top)
        for left in range(0, tokens, columns)
        for top in range(0, tokens, rows)
        if not causal or left < min(top + rows, tokens)
    )
    return 4 * tokens * width + met * (3 * width + 2), 2 * tokens * width + tokens + met * width


for rows, columns in (
    (8, 8),
    (draw.integer(3, 9), draw.integer(20, 40)),
    (draw.integer(20, 40), draw.integer(3, 9)),
    (7, draw.integer(100, 200)),
):
    for causal in (False, True):
        sizes = draw.integer(90, 130), draw.integer(2, 80), rows, columns, causal
        expect_traffic("backward", true_backward(*sizes), *sizes)
### END HIDDEN TESTS

# %% check="traffic-tile" points=1
# The largest tile that fits, and a refusal if none does.
expect_tile(98304, 64, 210)
expect_tile(6, 1, 0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for tile, width in (
    (1, draw.integer(1, 200)),
    (draw.integer(2, 9), draw.integer(1, 99)),
    (draw.integer(100, 900), 128),
    (10**9 + draw.integer(0, 99), 3),
):
    least = tile * tile + (4 * width + 2) * tile
    expect_tile(least, width, tile)
    expect_tile(least - 1, width, tile - 1)
### END HIDDEN TESTS
