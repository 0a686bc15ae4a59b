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
# - Only task 4 runs on ranks. There is a network between them and nothing else.
#
# Tasks 1 to 3 are the placement of Narayanan et al. 2021 (Megatron-LM, arXiv:2104.04473, section 3), with the optimizer of Rajbhandari et al. 2020
# (ZeRO, arXiv:1910.02054, section 7); task 4 is the norm that all of them clip by.

# %% given="setup"
import math
from functools import cache
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
# ## 1. A group of a large mesh (2 points)
#
# A group over some axes holds the ranks that differ along these axes only. Return the group of one rank: its ranks in ascending order.
#
# The axes of a group are named in any order, which changes nothing. An axis of size 1 is an axis. With no axes, a rank is alone; with
# all of them, all ranks are one group.
#
# The mesh has up to 10^12 ranks, so nothing that lists them all has room: a rank of 131,072 makes its own groups, and no others. What does one step
# along an axis add to a rank?
#
# > **API** `group(rank, sizes, axes)` gets a rank, a dict {axis: size}, the outermost axis first, and a tuple of names of some of its axes. It returns a
# > list of whole numbers (no tensor). The names are never looked at: they may be any text. The largest group has 512 ranks.
#
# In `{"pp": 2, "dp": 2}` the group of rank 3 over `("dp",)` is `[2, 3]`, over `("pp",)` it is `[1, 3]`.


# %% answer="groups"
def group(rank, sizes, axes):
    """The ranks that differ from this one along `axes` only, this one included."""
    ### BEGIN SOLUTION
    stride, first, steps = math.prod(sizes.values()), rank, []
    for axis, size in sizes.items():
        stride //= size
        if axis in axes:
            first -= rank // stride % size * stride
            steps.append([place * stride for place in range(size)])
    return [first + sum(way) for way in product(*steps)]
    ### END SOLUTION


# %% judge="expect_groups"
def expect_groups(cases, wanted):
    """cases: (rank, sizes, axes)."""
    for said, case, right in zip(ask_each(group, cases), cases, wanted, strict=True):
        rank, sizes, axes = case
        where = f"(seen with rank {rank} of {sizes}, a group over {axes})"
        formed = isinstance(said, list) and all(type(one) is int for one in said)
        expect(formed, "a list of ranks", f"whole numbers {where}")
        wide = math.prod(size for axis, size in sizes.items() if axis in axes)
        hint = f"over several axes it is the product of their sizes {where}"
        expect(len(said) == wide, "size of a group", hint)
        hint = f"ranks of a group differ along its axes only; how far apart are neighbours along an axis? {where}"
        expect(sorted(said) == right, "who is together", hint)
        expect(said == right, "order", f"ranks ascend {where}")


# %% check="groups-one" points=1
# One axis: the first, the last, one in the middle; small meshes and large ones.
expect_groups(
    [
        (3, {"pp": 2, "dp": 2}, ("dp",)),
        (3, {"pp": 2, "dp": 2}, ("pp",)),
        (7, {"pp": 2, "dp": 3, "tp": 2}, ("dp",)),
        (2, {"tp": 1, "dp": 3}, ("tp",)),
        (123_456_789_012, {"pp": 1000, "dp": 10**6, "tp": 4, "cp": 250}, ("tp",)),
    ],
    [
        [2, 3],
        [1, 3],
        [7, 9, 11],
        [2],
        [123_456_789_012, 123_456_789_262, 123_456_789_512, 123_456_789_762],
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_grid(rank, sizes, axes):
    names, grid = [*sizes], torch.arange(math.prod(sizes.values())).view(*sizes.values())
    here = (grid == rank).nonzero()[0].tolist()
    where = tuple(slice(None) if n in axes else i for n, i in zip(names, here))
    return sorted(grid[where].reshape(-1).tolist())


cases = []
for _ in range(12):
    sizes = drawn_mesh(draw.integer(2, 5))
    cases.append((draw.integer(0, math.prod(sizes.values()) - 1), sizes, (draw.choice([*sizes]),)))
cases += [(17, {"a": 3, "b": 4, "c": 2}, ("b",)), (3, {"x y": 5}, ("x y",))]
expect_groups(cases, [by_grid(*case) for case in cases])
outer, size, inner = draw.integer(10**4, 10**5), draw.integer(2, 9), draw.integer(10**4, 10**5)
rank = draw.integer(0, outer * size * inner - 1)
right = [(rank // inner // size * size + place) * inner + rank % inner for place in range(size)]
expect_groups([(rank, {"a": outer, "b": size, "c": inner}, ("b",))], [right])
### END HIDDEN TESTS

# %% check="groups-several" points=1
# Several axes, named in any order; none; all.
expect_groups(
    [
        (5, {"dp": 2, "cp": 2, "tp": 2}, ("tp", "dp")),
        (5, {"dp": 2, "cp": 2, "tp": 2}, ("cp", "dp")),
        (4, {"pp": 2, "tp": 3}, ()),
        (4, {"pp": 2, "tp": 3}, ("tp", "pp")),
    ],
    [[0, 1, 4, 5], [1, 3, 5, 7], [4], [0, 1, 2, 3, 4, 5]],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def by_grid(rank, sizes, axes):
    names, grid = [*sizes], torch.arange(math.prod(sizes.values())).view(*sizes.values())
    here = (grid == rank).nonzero()[0].tolist()
    where = tuple(slice(None) if n in axes else i for n, i in zip(names, here))
    return sorted(grid[where].reshape(-1).tolist())


cases = [(300, {"pp": 4, "dp": 4, "cp": 2, "tp": 16}, ("cp", "dp"))]
for _ in range(14):
    sizes = drawn_mesh(draw.integer(3, 5))
    axes = tuple(draw.several([*sizes], draw.integer(0, len(sizes))))
    cases.append((draw.integer(0, math.prod(sizes.values()) - 1), sizes, axes))
expect_groups(cases, [by_grid(*case) for case in cases])
large = draw.integer(10**8, 10**9)
rank = draw.integer(0, 24 * large - 1)
a, b, c = rank // (12 * large), rank // (3 * large) % 4, rank % 3
right = [((x * 4 + b) * large + rank // 3 % large) * 3 + y for x in range(2) for y in range(3)]
sizes = {"a": 2, "b": 4, "z": large, "c": 3}
expect_groups([(rank, sizes, ("c", "a"))], [right])
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
def expect_sent(property, axes, cases, wanted):
    """Of each case these axes; `property` is what is wrong if they differ. wanted: dicts with these axes."""
    for said, case, right in zip(ask_each(sent, cases), cases, wanted, strict=True):
        rank, sizes, m, *_ = case
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
        for axis in axes:
            expect(said[axis] == right[axis], property, f"{HINTS[property]} {where}")


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
    [(0, dict(dp=2, pp=2, tp=2), *SMALL), (5, dict(tp=4, dp=1, pp=2), *SMALL)],
    [{"tp": 1536}, {"tp": 2304}],
)
expect_sent(
    "bytes over dp",
    ["dp"],
    [(0, dict(dp=2, pp=2, tp=2), *SMALL), (5, dict(tp=1, dp=4, pp=2), *SMALL)],
    [{"dp": 144}, {"dp": 432}],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def counted(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
    stage = rank // math.prod([*sizes.values()][[*sizes].index("pp") + 1 :]) % p
    block = 2 * tokens * width
    ends = block and p > 1 and (stage == 0 or stage == p - 1)
    return {
        "tp": m * layers * 8 * (block - block // t),
        "pp": m * block * (2 - (stage == 0) - (stage == p - 1)),
        "dp": 6 * (parameters // t - parameters // t // d),
        "ends": 4 * vocab * width // t if ends else 0,
    }


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
expect_sent("bytes over tp", ["tp"], cases, [counted(*case) for case in cases])
expect_sent("bytes over dp", ["dp"], cases, [counted(*case) for case in cases])
### END HIDDEN TESTS

# %% check="sent-over-pp" points=1
# Messages to the stages before and behind, in any order of the axes.
expect_sent(
    "bytes over pp",
    ["pp", "tp", "dp"],
    [
        (0, dict(dp=2, pp=3, tp=2), *SMALL),
        (3, dict(dp=2, pp=3, tp=2), *SMALL),
        (3, dict(pp=3, dp=2, tp=2), *SMALL),
        (5, dict(tp=2, dp=1, pp=3), *SMALL),
        (1, dict(tp=2, dp=1, pp=1), *SMALL),
    ],
    [
        {"pp": pp, "tp": 1536, "dp": dp}
        for pp, dp in ((128, 144), (256, 144), (128, 144), (128, 0), (0, 0))
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def counted(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
    stage = rank // math.prod([*sizes.values()][[*sizes].index("pp") + 1 :]) % p
    block = 2 * tokens * width
    ends = block and p > 1 and (stage == 0 or stage == p - 1)
    return {
        "tp": m * layers * 8 * (block - block // t),
        "pp": m * block * (2 - (stage == 0) - (stage == p - 1)),
        "dp": 6 * (parameters // t - parameters // t // d),
        "ends": 4 * vocab * width // t if ends else 0,
    }


def drawn(p=None):
    sizes = dict(pp=p or draw.integer(2, 5), dp=draw.integer(2, 5), tp=draw.choice([2, 3, 4, 8]))
    sizes = {axis: sizes[axis] for axis in draw.several(["pp", "dp", "tp"], 3)}
    rank = draw.integer(0, math.prod(sizes.values()) - 1)
    pieces = sizes["tp"] * sizes["dp"] * draw.integer(1, 99)
    return rank, sizes, draw.integer(1, 9), draw.integer(1, 50), 24, draw.integer(1, 9), pieces, 48


cases = [*(drawn() for _ in range(30)), drawn(1)]
expect_sent("bytes over pp", ["pp", "tp", "dp"], cases, [counted(*case) for case in cases])
### END HIDDEN TESTS

# %% check="sent-by-the-ends" points=1
# The tied table, on the first and the last stage only.
expect_sent(
    "bytes of the ends",
    ["ends", "pp", "tp", "dp"],
    [
        (0, dict(dp=2, pp=3, tp=2), *SMALL),
        (3, dict(dp=2, pp=3, tp=2), *SMALL),
        (11, dict(dp=2, pp=3, tp=2), *SMALL),
        (1, dict(tp=2, dp=1, pp=1), *SMALL),
    ],
    [
        {"ends": ends, "pp": pp, "tp": 1536, "dp": dp}
        for ends, pp, dp in ((256, 128, 144), (0, 256, 144), (256, 128, 144), (0, 0, 0))
    ],
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS


def counted(rank, sizes, m, tokens, width, layers, parameters, vocab):
    t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
    stage = rank // math.prod([*sizes.values()][[*sizes].index("pp") + 1 :]) % p
    block = 2 * tokens * width
    ends = block and p > 1 and (stage == 0 or stage == p - 1)
    return {
        "tp": m * layers * 8 * (block - block // t),
        "pp": m * block * (2 - (stage == 0) - (stage == p - 1)),
        "dp": 6 * (parameters // t - parameters // t // d),
        "ends": 4 * vocab * width // t if ends else 0,
    }


for p in (1, 2, 3, 4, 5):
    for _ in range(6):
        sizes = dict(pp=p, dp=draw.integer(2, 4), tp=draw.choice([1, 2, 3, 4]))
        sizes = {axis: sizes[axis] for axis in draw.several(["pp", "dp", "tp"], 3)}
        rank = draw.integer(0, math.prod(sizes.values()) - 1)
        rest = sizes["tp"] * sizes["dp"] * 5, 12 * draw.integer(1, 30)
        case = rank, sizes, draw.integer(1, 9), draw.integer(1, 9), 24, 2, *rest
        expect_sent("bytes of the ends", ["ends", "pp", "tp", "dp"], [case], [counted(*case)])
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The cheapest order of many axes (2 points)
#
# Nodes have `node` ranks each: rank r is on node r // node. Along every axis the ranks of a group send in a ring: each sends so many bytes to the one
# whose coordinate is one higher, the last of the axis to the first. (An axis of size 1 sends nothing.) A byte that leaves its node is expensive.
#
# Return an order of the axes, the outermost first, for which the fewest bytes of all ranks together leave their nodes; if several orders are equally
# good, any of them. The busiest axis need not be the innermost one: it may fill half a node, or more than a node.
#
# Meshes have up to 14 axes (networks with levels, each with several kinds of parallelism), and 14 axes have 87 billion orders. So ask what the bytes of one
# axis depend on: on the whole order of the axes inside it, or on less?
#
# > **API** `cheapest(sizes, sent, node)` gets a dict {axis: size} (its order says nothing), a dict {axis: bytes that a rank sends to the next one in its
# > group}, and the ranks per node, which divides the number of ranks. It returns a list of all axes. At most 14 axes and 20,000 ranks.


# %% answer="cheapest"
def cheapest(sizes, sent, node):
    """The axes, outermost first."""

    ### BEGIN SOLUTION
    ranks = math.prod(sizes.values())

    @cache
    def leaving(size, stride):
        """Ranks whose next one along an axis of this size is on another node; `stride` ranks lie inside the axis."""
        where = torch.arange(ranks)
        place = where // stride % size
        to = where + ((place + 1) % size - place) * stride
        return int((where // node != to // node).sum())

    best = {frozenset(): (0, ())}  # the axes that are inside -> (bytes, their order)
    for _ in sizes:
        found = {}
        for inside, (cost, order) in best.items():
            stride = math.prod(sizes[axis] for axis in inside)
            for axis in sizes.keys() - inside:
                more = cost + sent[axis] * leaving(sizes[axis], stride) * (sizes[axis] > 1)
                both = inside | {axis}
                if both not in found or more < found[both][0]:
                    found[both] = more, (axis, *order)
        best = found
    return list(best[frozenset(sizes)][1])
    ### END SOLUTION


# %% judge="expect_cheapest"
def crossings(sizes, order, node):
    """{axis: how many ranks have their next one on another node} for that order."""
    grid = torch.arange(math.prod(sizes.values())).view([sizes[axis] for axis in order])
    return {
        axis: int((grid // node != grid.roll(-1, dim) // node).sum())
        for dim, axis in enumerate(order)
    }


def expect_cheapest(cases, wanted):
    """wanted: the bytes that leave their nodes in the best order."""
    for said, (sizes, sent, node), least in zip(
        ask_each(cheapest, cases), cases, wanted, strict=True
    ):
        where = f"(seen with {sizes}, bytes {sent}, nodes of {node})"
        expect(
            isinstance(said, list) and sorted(map(str, said)) == sorted(sizes),
            "every axis once",
            f"a list of all axes {where}",
        )
        cost = sum(sent[axis] * count for axis, count in crossings(sizes, said, node).items())
        expect(
            cost <= least,
            "fewest bytes between nodes",
            f"in another order fewer bytes leave their node; who is the next one of the last rank of a group? {where}",
        )


# %% check="cheapest-fits" points=1
# An axis fills the node; more axes than can be tried in every order.
expect_cheapest(
    [
        (dict(dp=4, pp=2, tp=4), dict(dp=10, pp=3, tp=100), 4),
        (dict(tp=4, dp=2), dict(tp=7, dp=100), 4),
        (dict(dp=2, pp=2, tp=2), dict(dp=5, pp=9, tp=20), 4),
        ({f"a{n}": 2 for n in range(12)}, {f"a{n}": n * n % 23 + 1 for n in range(12)}, 16),
    ],
    [416, 28, 40, 167_936],
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def least(sizes, sent, node):
    return min(
        sum(sent[axis] * count for axis, count in crossings(sizes, order, node).items())
        for order in permutations(sizes)
    )


cases = []
for _ in range(10):
    axes = draw.several(AXES, draw.integer(2, 4))
    sizes = {axis: draw.choice([1, 2, 2, 4]) for axis in axes}
    ranks = math.prod(sizes.values())
    node = draw.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
    cases.append((sizes, {axis: draw.integer(1, 60) for axis in axes}, node))
expect_cheapest(cases, [least(*case) for case in cases])
# axes of two alone: those that send most fill the node, and each of the others sends all it has to another node
busy = {f"x{n}": draw.integer(1, 10**6) for n in range(13)}
outside = sorted(busy.values())[: 13 - 3]
expect_cheapest([({axis: 2 for axis in busy}, busy, 8)], [2**13 * sum(outside)])
### END HIDDEN TESTS

# %% check="cheapest-does-not-fit" points=1
# Groups that are larger than a node, or fill a part of it; sizes that are no powers of two.
expect_cheapest(
    [
        (dict(tp=4, dp=2, pp=2), dict(tp=10, dp=9, pp=9), 2),
        (dict(tp=3, dp=4), dict(tp=10, dp=9), 4),
        (dict(tp=6, dp=2, pp=2), dict(tp=3, dp=2, pp=1), 4),
    ],
    [304, 120, 60],
)
print("the visible checks pass")


### BEGIN HIDDEN TESTS
def least(sizes, sent, node):
    """Of few axes every order; of many the best order of what is inside, set by set."""
    if len(sizes) < 6:
        return min(
            sum(sent[axis] * count for axis, count in crossings(sizes, order, node).items())
            for order in permutations(sizes)
        )
    names, ranks, known = [*sizes], math.prod(sizes.values()), {}
    best = [0] * 2 ** len(names)
    for code in range(1, len(best)):
        ways = []
        for bit, axis in enumerate(names):
            if code >> bit & 1:
                rest = code & ~(1 << bit)
                inner = math.prod(sizes[a] for n, a in enumerate(names) if rest >> n & 1)
                if (key := (sizes[axis], inner)) not in known:
                    grid = torch.arange(ranks).view(-1, sizes[axis], inner)
                    known[key] = int((grid // node != grid.roll(-1, 1) // node).sum())
                ways.append(best[rest] + sent[axis] * known[key])
        best[code] = min(ways)
    return best[-1]


cases = [
    (dict(pp=2, dp=2, cp=2, tp=2, ep=2), dict(pp=1, dp=8, cp=2, tp=16, ep=4), 4),
    (dict(a=3, b=5, c=2), dict(a=50, b=1, c=20), 6),
]
for _ in range(12):
    axes = draw.several(AXES, draw.integer(2, 4))
    sizes = {axis: draw.choice([1, 2, 3, 4]) for axis in axes}
    ranks = math.prod(sizes.values())
    node = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    cases.append((sizes, {axis: draw.integer(1, 60) for axis in axes}, node))
many = {f"x{n}": size for n, size in enumerate([2] * 6 + [3] * 4 + [1, 1])}
cases.append((many, {axis: draw.integer(1, 10**4) for axis in many}, draw.choice([6, 8, 9, 12])))
expect_cheapest(cases, [least(*case) for case in cases])
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
