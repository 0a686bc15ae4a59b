# %% [markdown]
# # Exercises 22: putting it together
#
# Four tasks, 10 points, about two hours. Read chapter 22 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 22
#
# The grader runs the same checks and hidden ones with other meshes, sizes and values. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - A mesh is a dict of sizes, the outermost axis first: `{"pp": 2, "dp": 3, "tp": 4}` has 24 ranks, and rank = (pp · 3 + dp) · 4 + tp.
# - Only task 4 runs on ranks. Between them there is a network and nothing else.
#
# Tasks 1 to 3 are the placement of Narayanan et al. 2021 (Megatron-LM, arXiv:2104.04473, section 3), with the optimizer of Rajbhandari et al. 2020
# (ZeRO, arXiv:1910.02054, section 7); task 4 is the norm that all of them clip by.

# %% given="setup"
import math
from itertools import permutations, product

import torch

from minitrain import collectives

# %% judge="tools"
from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

draw = Draw()  # hidden checks draw meshes, sizes and values
AXES = ("pp", "dp", "cp", "tp", "ep")


def drawn_mesh(axes, low=1, high=4):
    """Some of the axes in any order, with sizes."""
    return {axis: draw.integer(low, high) for axis in draw.several(AXES, axes)}


# %% [markdown]
# ## 1. Groups from a mesh (2 points)
#
# A group over some axes holds the ranks that differ along these axes only. Return all groups over the given axes: every rank stands in
# exactly one. A group lists its ranks in ascending order, and the groups are ordered by their first rank.
#
# The axes of a group are named in any order, which changes nothing. An axis of size 1 is an axis. With no axes, each rank is alone; with
# all of them, all ranks are one group.
#
# > **API** `groups(sizes, axes)` gets a dict {axis: size}, the outermost axis first, and a tuple of names of some of its axes. It returns a
# > list of lists of whole numbers (no tensors). The names are never looked at: they may be any text. The largest mesh has 512 ranks.
#
# `groups({"pp": 2, "dp": 2}, ("dp",))` is `[[0, 1], [2, 3]]`, over `("pp",)` it is `[[0, 2], [1, 3]]`.


# %% answer="groups"
def groups(sizes, axes):
    """All groups over `axes`, as a list of lists of ranks."""
    ### BEGIN SOLUTION
    steps, stride = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        steps[axis] = [place * stride for place in range(size)]
    inside = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis in axes))]
    starts = [sum(way) for way in product(*(steps[axis] for axis in sizes if axis not in axes))]
    return [[start + step for step in inside] for start in starts]
    ### END SOLUTION


# %% judge="expect_groups"
def expect_groups(*cases):
    for said, (sizes, axes) in zip(ask_each(groups, list(cases)), cases):
        where = f"(seen with {sizes}, groups over {axes})"
        expect(
            isinstance(said, list) and all(isinstance(group, list) for group in said),
            "a list of lists",
            f"of whole numbers {where}",
        )
        ranks, ours = math.prod(sizes.values()), [rank for group in said for rank in group]
        expect(
            all(type(rank) is int for rank in ours), "a list of lists", f"of whole numbers {where}"
        )
        expect(
            len(ours) == ranks and set(ours) == set(range(ranks)),
            "every rank once",
            f"{ranks} ranks stand in one group each {where}",
        )
        wide = math.prod(size for axis, size in sizes.items() if axis in axes)
        expect(
            all(len(group) == wide for group in said),
            "size of a group",
            f"over several axes it is the product of their sizes {where}",
        )
        place = torch.arange(ranks).view(*sizes.values())
        names = [*sizes]
        fixed = [index for index, axis in enumerate(names) if axis not in axes]
        free = [index for index, axis in enumerate(names) if axis in axes]
        wanted = place.permute(*fixed, *free).reshape(-1, wide).tolist()
        expect(
            {frozenset(group) for group in said} == {frozenset(group) for group in wanted},
            "who is together",
            f"ranks of a group differ along its axes only; how far apart are neighbours along an axis? {where}",
        )
        expect(said == wanted, "order", f"ranks ascend, groups by their first rank {where}")


# %% check="groups-one" points=1
# One axis: the first, the last, one in the middle.
expect_groups(
    ({"pp": 2, "dp": 2}, ("dp",)),
    ({"pp": 2, "dp": 2}, ("pp",)),
    ({"pp": 2, "dp": 3, "tp": 2}, ("dp",)),
    ({"tp": 1, "dp": 3}, ("tp",)),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(6):
    sizes = drawn_mesh(draw.integer(2, 5))
    expect_groups((sizes, (draw.choice([*sizes]),)))
expect_groups(({"a": 3, "b": 4, "c": 2}, ("b",)), ({"x y": 5}, ("x y",)))
expect_groups(({"dp": 16, "pp": 4, "tp": 8}, ("pp",)), ({"pp": 4, "dp": 8, "tp": 8}, ("dp",)))
### END HIDDEN TESTS

# %% check="groups-several" points=1
# Several axes, named in any order; none; all.
expect_groups(
    ({"dp": 2, "cp": 2, "tp": 2}, ("tp", "dp")),
    ({"dp": 2, "cp": 2, "tp": 2}, ("cp", "dp")),
    ({"pp": 2, "tp": 3}, ()),
    ({"pp": 2, "tp": 3}, ("tp", "pp")),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(8):
    sizes = drawn_mesh(draw.integer(3, 5))
    expect_groups((sizes, tuple(draw.several([*sizes], draw.integer(0, len(sizes))))))
expect_groups(
    ({"ep": 2, "pp": 3, "tp": 2, "dp": 4}, ("dp", "ep")),
    ({"pp": 4, "dp": 4, "cp": 2, "tp": 8}, ("cp", "dp")),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The traffic of one rank (3 points)
#
# A mesh has the axes pp, dp and tp in some order. Every stage has as many layers and parameters as every other. In each step a rank sends
#
# - **over tp**, for each microbatch and each layer of its stage: four all-reduces of the activations;
# - **over pp**, for each microbatch: the activations to the next stage, and the gradient of its input, as large, to the one before;
# - **over dp**, once: a reduce-scatter of the gradients of its parameters in 4 bytes each, and an all-gather of the new parameters in 2;
# - **"ends"**, once: the first and the last stage all-reduce the gradient of the tied table, of which tp has cut each a part, in 4 bytes.
#
# Activations are `tokens · width` numbers of 2 bytes, on every rank of tp alike. Parameters and table are cut over tp. Collectives are rings: of
# S bytes, the whole tensor, each of n ranks sends (n-1)/n of it in a reduce-scatter or an all-gather and twice that in an all-reduce.
#
# > **API** `sent(rank, sizes, m, tokens, width, layers, parameters, vocab)` gets a rank, a mesh and six whole numbers: microbatches, tokens of one, width,
# > layers and parameters of one stage (the table is not among them), entries of the table [vocab, width]. It returns a dict with the keys "tp", "pp", "dp"
# > and "ends" of whole bytes; all cases divide. With one stage there is nothing to send over "pp", nor between ends.


# %% answer="sent"
def sent(rank, sizes, m, tokens, width, layers, parameters, vocab):
    """{"tp": bytes, "pp": bytes, "dp": bytes, "ends": bytes} that this rank sends in a step."""
    ### BEGIN SOLUTION
    place, rest = {}, rank
    for axis in reversed([*sizes]):
        rest, place[axis] = divmod(rest, sizes[axis])
    t, d, stages, stage = sizes["tp"], sizes["dp"], sizes["pp"], place["pp"]
    activations = 2 * tokens * width
    neighbours = (stage > 0) + (stage < stages - 1)
    at_an_end = stages > 1 and stage in (0, stages - 1)
    return {
        "tp": 4 * m * layers * 2 * activations * (t - 1) // t,
        "pp": m * activations * neighbours,
        "dp": (4 + 2) * (parameters // t) * (d - 1) // d,
        "ends": 4 * vocab * width // t if at_an_end else 0,
    }
    ### END SOLUTION


# %% judge="expect_sent"
def expect_sent(property, axes, *cases):
    """Of each case these axes; `property` is what is wrong if they differ."""
    for said, case in zip(ask_each(sent, list(cases)), cases):
        rank, sizes, m, tokens, width, layers, parameters, vocab = case
        where = f"(seen with rank {rank} of {sizes}, m = {m})"
        expect(
            isinstance(said, dict) and set(said) == {"tp", "pp", "dp", "ends"},
            "four axes",
            f"a dict of tp, pp, dp and ends {where}",
        )
        expect(
            all(type(bytes) is int for bytes in said.values()),
            "whole bytes",
            f"use // where it divides {where}",
        )
        t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
        stage = rank // math.prod([*sizes.values()][[*sizes].index("pp") + 1 :]) % p
        block = 2 * tokens * width
        ends = block and p > 1 and (stage == 0 or stage == p - 1)
        wanted = {
            "tp": m * layers * 8 * (block - block // t),
            "pp": m * block * (2 - (stage == 0) - (stage == p - 1)),
            "dp": 6 * (parameters // t - parameters // t // d),
            "ends": 4 * vocab * width // t if ends else 0,
        }
        for axis in axes:
            expect(said[axis] == wanted[axis], property, f"{HINTS[property]} {where}")


HINTS = {
    "bytes over tp": "four all-reduces for each layer and microbatch; of how many bytes, and what does a ring send of them?",
    "bytes over dp": "what is cut over tp is smaller; two collectives once a step, of numbers of 4 and of 2 bytes",
    "bytes over pp": "whom does this stage have before and behind it? Which stage is this rank's, in this order of axes?",
    "bytes of the ends": "which two stages hold the table, how much of it, and what is 2(n-1)/n for two?",
}
SMALL = (2, 4, 8, 3, 96, 16)  # m, tokens, width, layers, parameters, vocab


# %% check="sent-over-tp-and-dp" points=1
# All-reduces of activations; gradients and weights of what is cut over tp.
expect_sent(
    "bytes over tp",
    ["tp"],
    (0, dict(dp=2, pp=2, tp=2), *SMALL),
    (5, dict(tp=4, dp=1, pp=2), *SMALL),
)
expect_sent(
    "bytes over dp",
    ["dp"],
    (0, dict(dp=2, pp=2, tp=2), *SMALL),
    (5, dict(tp=1, dp=4, pp=2), *SMALL),
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def drawn(p=None):
    sizes = dict(pp=p or draw.integer(2, 5), dp=draw.integer(1, 5), tp=draw.choice([1, 2, 3, 4, 8]))
    sizes = {axis: sizes[axis] for axis in draw.several(["pp", "dp", "tp"], 3)}
    width, m = 24 * draw.integer(1, 9), draw.integer(1, 9)
    numbers = m, draw.integer(1, 50), width, draw.integer(1, 9)
    pieces = sizes["tp"] * sizes["dp"]
    return (
        draw.integer(0, math.prod(sizes.values()) - 1),
        sizes,
        *numbers,
        pieces * draw.integer(1, 99),
        sizes["tp"] * draw.integer(1, 99),
    )


cases = [drawn() for _ in range(20)]
expect_sent("bytes over tp", ["tp"], *cases)
expect_sent("bytes over dp", ["dp"], *cases)
### END HIDDEN TESTS

# %% check="sent-over-pp" points=1
# Messages to the stages before and behind, in any order of the axes.
expect_sent(
    "bytes over pp",
    ["pp", "tp", "dp"],
    (0, dict(dp=2, pp=3, tp=2), *SMALL),
    (3, dict(dp=2, pp=3, tp=2), *SMALL),
    (3, dict(pp=3, dp=2, tp=2), *SMALL),
    (5, dict(tp=2, dp=1, pp=3), *SMALL),
    (1, dict(tp=2, dp=1, pp=1), *SMALL),
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def drawn(p=None):
    sizes = dict(pp=p or draw.integer(2, 5), dp=draw.integer(2, 5), tp=draw.choice([2, 3, 4, 8]))
    sizes = {axis: sizes[axis] for axis in draw.several(["pp", "dp", "tp"], 3)}
    rank = draw.integer(0, math.prod(sizes.values()) - 1)
    pieces = sizes["tp"] * sizes["dp"] * draw.integer(1, 99)
    return rank, sizes, draw.integer(1, 9), draw.integer(1, 50), 24, draw.integer(1, 9), pieces, 48


expect_sent("bytes over pp", ["pp", "tp", "dp"], *(drawn() for _ in range(30)), drawn(1))
### END HIDDEN TESTS

# %% check="sent-by-the-ends" points=1
# The tied table, on the first and the last stage only.
expect_sent(
    "bytes of the ends",
    ["ends", "pp", "tp", "dp"],
    (0, dict(dp=2, pp=3, tp=2), *SMALL),
    (3, dict(dp=2, pp=3, tp=2), *SMALL),
    (11, dict(dp=2, pp=3, tp=2), *SMALL),
    (1, dict(tp=2, dp=1, pp=1), *SMALL),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for p in (1, 2, 3, 4, 5):
    for _ in range(6):
        sizes = dict(pp=p, dp=draw.integer(2, 4), tp=draw.choice([1, 2, 3, 4]))
        sizes = {axis: sizes[axis] for axis in draw.several(["pp", "dp", "tp"], 3)}
        rank = draw.integer(0, math.prod(sizes.values()) - 1)
        rest = sizes["tp"] * sizes["dp"] * 5, 12 * draw.integer(1, 30)
        case = rank, sizes, draw.integer(1, 9), draw.integer(1, 9), 24, 2, *rest
        expect_sent("bytes of the ends", ["ends", "pp", "tp", "dp"], case)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The cheapest order (2 points)
#
# Nodes have `node` ranks each: rank r is on node r // node. Along every axis the ranks of a group send in a ring: each sends so many bytes to the one
# whose coordinate is one higher, the last of the axis to the first. (An axis of size 1 sends nothing.) A byte that leaves its node is expensive.
#
# Return an order of the axes, the outermost first, for which the fewest bytes of all ranks together leave their nodes. Of equally good orders any.
# The busiest axis need not be the innermost one: it may fill half a node, or more than a node.
#
# > **API** `cheapest(sizes, sent, node)` gets a dict {axis: size} (its order says nothing), a dict {axis: bytes that a rank sends to the next one in its
# > group}, and the ranks per node, which divides the number of ranks. It returns a list of all axes. At most 5 axes and 64 ranks.


# %% answer="cheapest"
def cheapest(sizes, sent, node):
    """The axes, outermost first."""

    ### BEGIN SOLUTION
    def leaving(order):
        total, stride = 0, 1
        for axis in reversed(order):
            for rank in range(math.prod(sizes.values()) if sizes[axis] > 1 else 0):
                place = rank // stride % sizes[axis]
                to = rank + ((place + 1) % sizes[axis] - place) * stride
                total += sent[axis] * (rank // node != to // node)
            stride *= sizes[axis]
        return total

    return list(min(permutations(sizes), key=leaving))
    ### END SOLUTION


# %% judge="expect_cheapest"
def crossings(sizes, order, node):
    """{axis: how many ranks have their next one on another node} for that order."""
    grid = torch.arange(math.prod(sizes.values())).view([sizes[axis] for axis in order])
    return {
        axis: int((grid // node != grid.roll(-1, dim) // node).sum())
        for dim, axis in enumerate(order)
    }


def expect_cheapest(*cases):
    for said, (sizes, sent, node) in zip(ask_each(cheapest, list(cases), time_limit_s=15), cases):
        where = f"(seen with {sizes}, bytes {sent}, nodes of {node})"
        expect(
            isinstance(said, list) and sorted(map(str, said)) == sorted(sizes),
            "every axis once",
            f"a list of all axes {where}",
        )
        costs = {
            order: sum(sent[axis] * count for axis, count in crossings(sizes, order, node).items())
            for order in permutations(sizes)
        }
        expect(
            costs[tuple(said)] == min(costs.values()),
            "fewest bytes between nodes",
            f"in another order fewer bytes leave their node; who is the next one of the last rank of a group? {where}",
        )


# %% check="cheapest-fits" points=1
# An axis fills the node.
expect_cheapest(
    (dict(dp=4, pp=2, tp=4), dict(dp=10, pp=3, tp=100), 4),
    (dict(tp=4, dp=2), dict(tp=7, dp=100), 4),
    (dict(dp=2, pp=2, tp=2), dict(dp=5, pp=9, tp=20), 4),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(10):
    axes = draw.several(AXES, draw.integer(2, 4))
    sizes = {axis: draw.choice([1, 2, 2, 4]) for axis in axes}
    ranks = math.prod(sizes.values())
    node = draw.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
    expect_cheapest((sizes, {axis: draw.integer(1, 60) for axis in axes}, node))
### END HIDDEN TESTS

# %% check="cheapest-does-not-fit" points=1
# Groups that are larger than a node, or fill a part of it; sizes that are no powers of two.
expect_cheapest(
    (dict(tp=4, dp=2, pp=2), dict(tp=10, dp=9, pp=9), 2),
    (dict(tp=3, dp=4), dict(tp=10, dp=9), 4),
    (dict(tp=6, dp=2, pp=2), dict(tp=3, dp=2, pp=1), 4),
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for _ in range(12):
    axes = draw.several(AXES, draw.integer(2, 4))
    sizes = {axis: draw.choice([1, 2, 3, 4]) for axis in axes}
    if (ranks := math.prod(sizes.values())) <= 64:
        node = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        expect_cheapest((sizes, {axis: draw.integer(1, 60) for axis in axes}, node))
expect_cheapest(
    (dict(pp=2, dp=2, cp=2, tp=2, ep=2), dict(pp=1, dp=8, cp=2, tp=16, ep=4), 4),
    (dict(a=3, b=5, c=2), dict(a=50, b=1, c=20), 6),
)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. One norm over all axes (3 points)
#
# Clipping needs the norm of the *whole* gradient: the root of the sum of all squares, each number of the model's gradient counted once. A rank holds
# some pieces of it. Of each piece it knows the ranks that hold the very same one, itself included:
#
#     [(gradient, [0, 4]), (gradient, [0, 1, 2, 3]), ...]
#
# What ZeRO has dealt out is on one rank, what is replicated on all ranks of dp, a norm's weight on all of tp as well, a tied table on both ends of a
# pipeline. `None` in the place of a gradient is a frozen parameter. A rank may hold nothing at all.
#
# Return the norm, the same on every rank. All ranks call it once, each with its own list; no rank knows the others'. Numbers are what travels: together
# the ranks may send 16 bytes for each rank but one, which is one all-reduce of one number.
#
# > **API** `norm(held, group)` gets a list of pairs (tensor of float64 of any shape, or None; list of ranks in ascending order) and a group. It returns a
# > tensor of float64 without dimensions. `group.rank()` is this rank, `group.size()` how many there are; `collectives` has `send`, `receive`, `barrier`
# > and `all_reduce(x, group)`, which returns the sum.


# %% answer="norm"
def norm(held, group):
    """[(gradient or None, ranks that hold it)] -> the norm of the whole gradient."""
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float64)
    for gradient, holders in held:
        if gradient is not None and holders[0] == group.rank():
            total = total + gradient.square().sum()
    return collectives.all_reduce(total, group).sqrt()
    ### END SOLUTION


# %% judge="expect_norm"
def expect_norm(property, hint, ranks, pieces):
    """`pieces`: (gradient or None, ranks that hold it); rank r gets those it is among."""
    inputs = [
        ([(x, holders) for x, holders in pieces if rank in holders],) for rank in range(ranks)
    ]
    outcome = run_on_ranks(norm, inputs, collectives="all_reduce")
    wanted = sum((x.square().sum() for x, _ in pieces if x is not None), torch.zeros(()).double())
    where = f"(seen with {ranks} ranks)"
    for result in outcome.results:
        expect(
            isinstance(result, torch.Tensor)
            and result.dtype == torch.float64
            and result.dim() == 0,
            "a number",
            f"a tensor of float64 without dimensions {where}",
        )
    expect(
        len({result.item() for result in outcome.results}) == 1,
        "the same on every rank",
        f"who clips by another norm has other weights from here on {where}",
    )
    expect_equal(
        outcome.results[0],
        wanted.sqrt(),
        property,
        f"{hint} {where}",
        atol=1e-12 * (1 + float(wanted)),
    )
    expect(
        sum(outcome.sent_bytes) <= 16 * (ranks - 1),
        "bytes on the wire",
        f"the gradients stay where they are; one number per rank is enough {where}",
    )


ONCE = (
    "each number of the gradient counts once; how often does a piece count that several ranks hold?"
)


# %% check="norm-pieces" points=1
# Every piece on one rank, or on all.
x = draw.real(3, 2)
expect_norm("all pieces", "what this rank does not hold counts too", 2, [(x, [0]), (2 * x, [1])])
expect_norm("copies count once", ONCE, 2, [(x, [0, 1]), (x[0], [0])])
expect_norm("copies count once", ONCE, 1, [(x, [0])])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (3, 5):
    alone = [(draw.real(draw.integer(1, 9)), [rank]) for rank in range(ranks)]
    expect_norm("all pieces", "what this rank does not hold counts too", ranks, alone)
    expect_norm("copies count once", ONCE, ranks, [(draw.real(4, 3), list(range(ranks))), *alone])
### END HIDDEN TESTS

# %% check="norm-axes" points=1
# dp 2 x tp 2: what is cut over tp has two holders, what is not has four; and tied ends.
x = draw.real(3, 2)
expect_norm("copies count once", ONCE, 4, [(x, [0, 2]), (3 * x, [1, 3]), (x[0], [0, 1, 2, 3])])
expect_norm("tied ends count once", ONCE, 3, [(x, [0, 2]), (x[1], [1]), (2 * x, [0])])
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def some_of(ranks):
    return sorted(draw.several(list(range(ranks)), draw.integer(1, ranks)))


for ranks in (3, 4, 6):
    pieces = [(draw.real(draw.integer(1, 5), 3), some_of(ranks)) for _ in range(12)]
    expect_norm("copies count once", ONCE, ranks, pieces)
expect_norm(
    "tied ends count once", ONCE, 4, [(draw.real(5), [rank]) for rank in range(4)] + [(x, [0, 3])]
)
### END HIDDEN TESTS

# %% check="norm-nothing" points=1
# Frozen parameters, and ranks that hold nothing.
x = draw.real(3, 2)
expect_norm("frozen parameters", "None has no gradient to count", 2, [(None, [0, 1]), (x, [1])])
expect_norm("a rank without gradients", "it takes part all the same", 3, [(x, [1, 2])])
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for ranks in (2, 5):
    some = [(draw.real(3), [draw.integer(1, ranks - 1)]), (None, list(range(ranks)))]
    expect_norm("a rank without gradients", "it takes part all the same", ranks, some)
expect_norm("frozen parameters", "None has no gradient to count", 3, [(None, [0]), (None, [1, 2])])
expect_norm("a rank without gradients", "it takes part all the same", 3, [])
pieces = [(draw.choice([None, draw.real(2, 2)]), [rank, rank + 1]) for rank in range(4)]
expect_norm("copies count once", ONCE, 5, pieces)
### END HIDDEN TESTS
