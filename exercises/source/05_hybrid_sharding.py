# %% [markdown]
# # Exercises 05: hybrid sharding, MiCS, ZeRO++
#
# Five tasks, 10 points, about two hours. Read chapter 05 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken, never the result it wants. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 05
#
# The grader runs the same checks and hidden ones with other sizes, other clusters and other values. A result counts only if no more
# crosses the slow links than the task allows. Three rules:
#
# - An answer cell stands alone. It may use read-only cells, but for those that say they are for checks, and not your other cells.
# - `intra` are the ranks of a node, `inter` the ranks of one place on every node; `intra.rank()` is the place, `inter.rank()` the node.
# - Between ranks there is a network and nothing else. Here `collectives` has `send`, `receive`, `barrier`, `all_reduce`, `all_gather`,
#   `reduce_scatter` and `broadcast`, for either group.
#
# A cluster has two levels: n nodes of k ranks, W = k·n, and rank = node·k + place. Links inside a node are fast, those between nodes
# are slow and shared by its k ranks. Each model state (parameters, gradients, optimizer state) is cut in one of three ways:
#
#     N  not cut           I  over the k ranks of a node           G  over all W ranks
#
# A word of three letters names them in this order, as in PaRO (Wu et al. 2023, arXiv:2310.06003). Here parameters are cut no finer than
# gradients, and these no finer than the optimizer state, which leaves ten words. III is hybrid sharding (Zhao et al. 2023, PyTorch FSDP,
# arXiv:2304.11277, section 3.2.2) and MiCS with a partition group of one node (Zhang et al. 2022, arXiv:2205.00119, section 3).

# %% given="setup"
import math

import torch

from minitrain import collectives

PARO_SHARDINGS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG")

# %% judge="tools"
from minitrain.course.grading.checks import Draw, ask_each, expect, expect_equal, run_on_ranks

COLLECTIVES = (
    "all_reduce all_gather reduce_scatter broadcast"  # what the ranks of this chapter have
)
draw = Draw()  # hidden checks draw sizes, clusters and values


def sent_inside_and_across(outcome, per_node):
    """Bytes that each rank sent to its own node, and to other nodes: two lists in rank order."""
    sent = [[0] * len(outcome.results), [0] * len(outcome.results)]
    for message in outcome.messages:
        across = message.source // per_node != message.destination // per_node
        sent[across][message.source] += message.bytes
    return sent


# %% driver="cluster"
import torch.distributed as dist


def levels(per_node, group):
    """The groups `intra` and `inter` of this rank, when the ranks of `group` fill nodes of `per_node`."""
    node, place = divmod(group.rank(), per_node)
    intra = [node * per_node + other for other in range(per_node)]
    inter = [other * per_node + place for other in range(group.size() // per_node)]
    return [dist.new_group(ranks, use_local_synchronization=True) for ranks in (intra, inter)]


def hybrid_gradient_on_a_rank(flat, per_node, group):
    return hybrid_gradient(flat, *levels(per_node, group))


def hierarchical_all_gather_on_a_rank(shard, per_node, group):
    return hierarchical_all_gather(shard, *levels(per_node, group))


# %% [markdown]
# ## 1. Who holds what (2 points)
#
# A flat buffer of S elements, S a multiple of W, is cut first inside the node, then across nodes:
#
#     N  elements 0 to S
#     I  S/k elements from place·S/k
#     G  S/W elements from place·S/k + node·S/W: what I gives to the place is cut once more, over the nodes
#
# So a rank that holds I of one state and G of another finds G inside what it has, and a gradient that was reduce-scattered inside the node
# goes on across nodes with S/k elements, not with S.
#
# S = 24, k = 2, n = 3: rank 3 is place 1 of node 1, and with the word NIG holds `[(0, 24), (12, 24), (16, 20)]`.


# %% answer="held_slices"
def held_slices(rank, per_node, nodes, word, size):
    """A list of three (start, stop): what the rank holds of parameters, gradients, optimizer state in a flat buffer of `size` elements."""
    ### BEGIN SOLUTION
    node, place = divmod(rank, per_node)
    part, piece = size // per_node, size // (per_node * nodes)
    slices = {
        "N": (0, size),
        "I": (place * part, (place + 1) * part),
        "G": (place * part + node * piece, place * part + (node + 1) * piece),
    }
    return [slices[letter] for letter in word]
    ### END SOLUTION


# %% judge="expect_slices"
def expect_slices(per_node, nodes, words, size):
    """Ask for the slices of all ranks, and look at them property by property."""
    ranks = range(per_node * nodes)
    cases = [(rank, per_node, nodes, word, size) for word in words for rank in ranks]
    all_held = iter(ask_each(held_slices, cases))
    said = {word: [next(all_held) for _ in ranks] for word in words}
    for word in words:
        for rank in ranks:
            held = said[word][rank]
            expect(
                isinstance(held, (list, tuple))
                and len(held) == 3
                and all(
                    isinstance(slice_, (list, tuple))
                    and len(slice_) == 2
                    and all(type(end) is int for end in slice_)
                    for slice_ in held
                ),
                "three slices",
                "a list of three pairs (start, stop) of whole numbers, one for each letter of the word",
            )
        for state, letter in enumerate(word):
            slices = [tuple(said[word][rank][state]) for rank in ranks]
            pieces = {"N": 1, "I": per_node, "G": per_node * nodes}[letter]
            expect(
                all((stop - start) * pieces == size for start, stop in slices),
                "size of a slice",
                f"letter {state + 1} of {word}: over how many ranks is this state cut? stop is the first element that is not held",
            )
            if letter == "N":
                expect(
                    set(slices) == {(0, size)},
                    "size of a slice",
                    "what is not cut is the whole buffer",
                )
            if letter == "I":
                expect(
                    all(slices[rank][0] == rank % per_node * size // per_node for rank in ranks),
                    "inside the node",
                    "the ranks of each node hold the buffer together, from left to right; which number of a rank is its place?",
                )
            if letter == "G":
                expect(
                    sorted(slices)
                    == [(n * size // pieces, (n + 1) * size // pieces) for n in ranks],
                    "every element once",
                    "all ranks together hold the buffer once; do two of them hold the same elements?",
                )
                expect(
                    all(
                        start * per_node // size == rank % per_node == (stop - 1) * per_node // size
                        for rank, (start, stop) in enumerate(slices)
                    ),
                    "inside the node first",
                    "what a rank holds of G lies inside what its place holds of I; in rank order it does not",
                )
                expect(
                    all(
                        slices[rank] < slices[rank + per_node]
                        for rank in range(per_node * (nodes - 1))
                    ),
                    "then across nodes",
                    "ranks of one place: the first node holds the first part of what the place has",
                )


# %% check="held_slices-inside" points=1
# Not cut, or cut over the ranks of the node.
expect_slices(2, 3, ["NNN", "NNI", "III"], 24)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (4, 2),
    (draw.integer(2, 6), 1),
    (1, draw.integer(2, 5)),
    (draw.integer(5, 7), draw.integer(2, 4)),
):
    expect_slices(
        per_node, nodes, ["NNN", "NNI", "NII", "III"], per_node * nodes * draw.integer(1, 50)
    )
### END HIDDEN TESTS

# %% check="held_slices-across" points=1
# Cut over all ranks: inside the node first, then across nodes.
expect_slices(2, 3, ["NNG", "NIG", "GGG"], 24)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (4, 2),
    (draw.integer(2, 6), 1),
    (1, draw.integer(2, 5)),
    (draw.integer(5, 7), draw.integer(2, 4)),
):
    expect_slices(per_node, nodes, PARO_SHARDINGS, per_node * nodes * draw.integer(1, 50))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The gradient of hybrid sharding (2 points)
#
# With the word III a rank needs its place's shard of the gradient, summed over **all** ranks. Every rank has a flat gradient of k·d elements,
# M bytes. Two hops: reduce-scatter inside the node, then all-reduce of the shard over the ranks of the same place. A rank may send
#
#     inside the node  M (1 - 1/k)           between nodes  2 (M/k) (1 - 1/n)
#
# The whole flat gradient never leaves a node.
#
# Two nodes of two ranks with the gradients `[1, 2, 3, 4]`, `[5, 6, 7, 8]` on node 0 and `[10, 20, 30, 40]`, `[50, 60, 70, 80]` on node 1: ranks 0
# and 2 return `[66, 88]`, ranks 1 and 3 `[110, 132]`. M is 16 bytes in float32: each rank sends 8 bytes inside and 8 across.


# %% answer="hybrid_gradient"
def hybrid_gradient(flat, intra, inter):
    """flat [k·d] on each rank -> [d], the shard of this rank's place, summed over all ranks."""
    ### BEGIN SOLUTION
    return collectives.all_reduce(collectives.reduce_scatter(flat, intra), inter)
    ### END SOLUTION


# %% judge="expect_gradient"
def expect_gradient(grads, per_node):
    """Run the answer: the sums are right, across nodes goes an all-reduce of a shard at most, inside one of all. Returns the outcome."""
    inputs, nodes = [(grad, per_node) for grad in grads], len(grads) // per_node
    outcome = run_on_ranks(hybrid_gradient_on_a_rank, inputs, collectives=COLLECTIVES)
    shards = sum(grads).chunk(per_node)
    expect_equal(
        outcome.results,
        [shards[rank % per_node] for rank in range(len(grads))],
        "shard of the sum",
        "the part of this rank's place, added up over the ranks of all nodes; a sum, no mean",
    )
    inside, across = sent_inside_and_across(outcome, per_node)
    piece = math.ceil(shards[0].numel() / nodes) * shards[0].element_size()
    expect(
        max(across) <= 2 * (nodes - 1) * piece,
        "bytes between nodes",
        "more crosses the slow links than an all-reduce of one shard; what is the smallest thing that has to cross, and when is it ready?",
    )
    expect(
        max(inside) * per_node <= 2 * grads[0].nbytes * (per_node - 1),
        "bytes inside the node",
        "more is sent inside the node than in an all-reduce; who needs which part?",
    )
    return outcome


# %% check="hybrid_gradient-sum" points=1
# Every rank returns its place's shard of the sum over all ranks, and only shards cross nodes.
expect_gradient(
    [
        torch.arange(1.0, 5.0),
        torch.arange(5.0, 9.0),
        10 * torch.arange(1.0, 5.0),
        10 * torch.arange(5.0, 9.0),
    ],
    2,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (2, 2),
    (draw.integer(3, 4), 1),
    (1, draw.integer(3, 4)),
    draw.choice([(2, 3), (3, 2)]),
):
    numel = per_node * draw.integer(2, 9)
    expect_gradient([draw.exact(numel) for _ in range(per_node * nodes)], per_node)
### END HIDDEN TESTS


# %% check="hybrid_gradient-inside" points=1
# Inside the node each part is sent once.
def expect_little_inside(grads, per_node):
    inside, _ = sent_inside_and_across(expect_gradient(grads, per_node), per_node)
    expect(
        max(inside) * per_node <= grads[0].nbytes * (per_node - 1),
        "bytes inside the node",
        "inside the node each part of the gradient goes to the one rank that needs it, and nothing comes back",
    )


expect_little_inside([torch.full((40,), 1.0 + rank) for rank in range(4)], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in ((2, 2), (draw.integer(3, 4), 1), (2, 3)):
    numel = per_node * nodes * draw.integer(5, 40)
    expect_little_inside([draw.exact(numel) for _ in range(per_node * nodes)], per_node)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Hierarchical all-gather (2 points)
#
# The partition group of MiCS may span nodes (Zhang et al. 2022, section 3). Its p ranks lie on p/k nodes, and everyone needs everyone's shard
# in rank order, M bytes in all. In one flat ring, (p-1)/p M leave each node through the links of one rank. Three steps do it with less:
#
# 1. **across**: gather the shards of your place from all nodes; each rank sends (1/k - 1/p) M,
# 2. **inside**: gather what the ranks of the node have now; each rank sends (1 - 1/k) M,
# 3. **reorder**: the pieces lie place by place, and have to lie rank by rank.
#
# The k ranks of a node so send across (p-k)/p M together: each of its shards once to each other node.
#
# Two nodes of two ranks with the shards `[0]`, `[1]`, `[2]`, `[3]`: after step 1 rank 0 has `[0, 2]`, after step 2 `[0, 2, 1, 3]`, after step 3
# `[0, 1, 2, 3]`. One shard leaves each rank for the other node, two leave each node; in a flat ring it were three.


# %% answer="hierarchical_all_gather"
def hierarchical_all_gather(shard, intra, inter):
    """shard [d, ..] on each rank, of one shape -> [p·d, ..], the shards in the order of rank = inter.rank()·k + intra.rank()."""
    ### BEGIN SOLUTION
    of_the_place = collectives.all_gather(shard, inter)
    place_by_place = collectives.all_gather(of_the_place, intra).view(
        intra.size(), inter.size(), *shard.shape
    )
    return place_by_place.transpose(0, 1).reshape(-1, *shard.shape[1:])
    ### END SOLUTION


# %% judge="expect_gathered"
def expect_gathered(shards, per_node):
    """Run the answer: shards are in order, and cross to each other node once. Returns bytes sent inside, and across."""
    inputs, ranks = [(shard, per_node) for shard in shards], len(shards)
    outcome = run_on_ranks(hierarchical_all_gather_on_a_rank, inputs, collectives=COLLECTIVES)
    for said in outcome.results:
        expect(
            isinstance(said, torch.Tensor) and said.shape == torch.cat(shards).shape,
            "all shards",
            "every rank returns [p·d, ..]: as many rows as all shards have",
        )
        expect(
            torch.equal(said.flatten().sort().values, torch.cat(shards).flatten().sort().values),
            "all shards",
            "each shard is there once, and none twice",
        )
    expect_equal(
        outcome.results,
        [torch.cat(shards)] * len(shards),
        "rank order",
        "all shards are there, in a wrong order; after the second hop, which index runs faster, the node or the place?",
    )
    inside, across = sent_inside_and_across(outcome, per_node)
    of_nodes = [sum(across[first : first + per_node]) for first in range(0, ranks, per_node)]
    expect(
        max(of_nodes) <= (ranks - per_node) * shards[0].nbytes,
        "bytes between nodes",
        "a shard crosses to each other node once, not once for every rank there; which hop comes first?",
    )
    return inside, across


# %% check="hierarchical_all_gather-order" points=1
# Every rank returns all shards in rank order, and a node sends (p-k)/p of the whole to other nodes.
expect_gathered([torch.tensor([float(rank)]) for rank in range(4)], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (2, 2),
    (draw.integer(2, 4), 1),
    (1, draw.integer(2, 4)),
    draw.choice([(2, 3), (3, 2)]),
):
    shape = [draw.integer(1, 4) for _ in range(draw.integer(1, 3))]
    expect_gathered([draw.exact(*shape) for rank in range(per_node * nodes)], per_node)
### END HIDDEN TESTS


# %% check="hierarchical_all_gather-bytes" points=1
# Each rank sends its part across, and inside the node what it has, once.
def expect_shared_work(shards, per_node):
    (inside, across), ranks = expect_gathered(shards, per_node), len(shards)
    expect(
        max(across) * per_node <= (ranks - per_node) * shards[0].nbytes,
        "all ranks send across",
        "each rank brings its own shard to the other nodes; if one does it for all, the others wait",
    )
    expect(
        max(inside) * per_node <= ranks * shards[0].nbytes * (per_node - 1),
        "bytes inside the node",
        "inside the node a rank sends what it has, once to each neighbour, and gets the rest",
    )


expect_shared_work([torch.full((10, 2), float(rank)) for rank in range(4)], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in ((2, 2), draw.choice([(2, 3), (3, 2)]), (1, 3)):
    shape = draw.integer(2, 9), draw.integer(2, 9)
    expect_shared_work([draw.exact(*shape) for rank in range(per_node * nodes)], per_node)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Block quantisation (2 points)
#
# ZeRO++ sends small integers instead of floats (Wang et al. 2023, arXiv:2306.10209, section 3). x of d elements is cut into blocks of `block`; the
# last one may be short. Every block has its own scale in float32:
#
#     scale = max |x| of the block      L = 2^(bits-1) - 1      step = scale/L      code = round(x/step)      back = code·step
#
# bits is 4 or 8, and a code is an integer from -L to L. Graded: |back - x| is at most half a step **of its block**; a zero comes back as zero,
# also in a block of zeros; an outlier spoils its own block only; the two tensors that are sent have together
#
#     ⌈d·bits/8⌉ + 4·⌈d/block⌉ bytes
#
# For 4 bits that means two codes in a byte. How you lay them out is yours: your own function reads them, in another process.
#
# The block `[3.5, -1, 0.3, 0]` with 4 bits: L = 7, step = 0.5, codes 7, -2, 1, 0, and `[3.5, -1, 0.5, 0]` comes back. It travels in
# 2 + 4 bytes instead of 16.


# %% answer="quantize_blocks"
def quantize_blocks(x, bits, block):
    """x [d] float32 -> (codes, scales): two tensors, all that is sent."""
    ### BEGIN SOLUTION
    levels, short = 2 ** (bits - 1) - 1, -x.numel() % block
    blocks = torch.nn.functional.pad(x, (0, short)).view(-1, block)
    scales = blocks.abs().amax(1)
    step = torch.where(scales > 0, scales, torch.ones_like(scales)) / levels
    codes = (
        (blocks / step[:, None])
        .round()
        .clamp(-levels, levels)
        .to(torch.int8)
        .flatten()[: x.numel()]
    )
    if bits == 4:
        codes = torch.nn.functional.pad(codes + 8, (0, x.numel() % 2)).view(torch.uint8)
        codes = codes[0::2] | codes[1::2] << 4
    return codes, scales
    ### END SOLUTION


def dequantize_blocks(codes, scales, bits, block, numel):
    """What `quantize_blocks` returned for `numel` elements -> [numel] float32."""
    ### BEGIN SOLUTION
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).flatten()[:numel].to(torch.int8) - 8
    steps = (scales / (2 ** (bits - 1) - 1)).repeat_interleave(block)[:numel]
    return codes.float() * steps
    ### END SOLUTION


# %% judge="expect_blocks"
def numbers(numel, block, scales):
    """float32 [numel]: the largest of block i is scales[i], every eighth or so is zero, no other is below a quarter of the largest."""
    x = draw.exact(numel, dtype=torch.float32) / 8
    x = x.sign() * (0.25 + 0.7 * x.abs())
    x[draw.exact(numel).abs() < 1] = 0
    x[::block] = -1  # a negative one
    return x * torch.tensor(scales).repeat_interleave(block)[:numel]


def expect_blocks(*cases):
    """Cases (x, bits, block, property, hint): one process quantises, another dequantises.

    Codes and scales are small, zeros are zeros, and nothing is wrong by more than half a step of its block,
    up to the rounding of float32.
    """
    sent = ask_each(quantize_blocks, [case[:3] for case in cases])
    expect(
        all(
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and all(isinstance(tensor, torch.Tensor) for tensor in pair)
            for pair in sent
        ),
        "two tensors",
        "return codes and scales, and nothing else",
    )
    # what is sent is tensors: the size of x is known on the other side, its numbers are not
    backs = ask_each(
        dequantize_blocks,
        [(*pair, bits, block, x.numel()) for (x, bits, block, *_), pair in zip(cases, sent)],
    )
    for (x, bits, block, property, hint), back in zip(cases, backs):
        expect(
            isinstance(back, torch.Tensor)
            and back.shape == x.shape
            and back.dtype == torch.float32,
            "shape",
            "as many numbers come back as were there, in float32; the last block may be short",
        )
        expect(
            bool((back[x == 0] == 0).all()),
            "zeros",
            "a zero comes back as another number; what does code 0 stand for, and what is the step of a block of zeros?",
        )
        steps = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(block)]) / (
            2 ** (bits - 1) - 1
        )
        expect(bool(((back - x).abs() <= steps * (0.5 + 2**-14)).all()), property, hint)
    for (x, bits, block, *_), (codes, scales) in zip(cases, sent):
        expect(
            scales.dtype == torch.float32 and scales.nbytes <= 4 * math.ceil(x.numel() / block),
            "bytes of the scales",
            "one float32 for each block",
        )
        expect(
            codes.nbytes <= math.ceil(x.numel() * bits / 8),
            "bytes of the codes",
            f"{bits} bits: how many codes share a byte? what fills up a short block needs not be sent",
        )


OWN_BLOCK = (
    "an outlier stays in its block",
    "numbers far from the outlier got worse; whose scale do they use?",
)
HALF = (
    "half a step",
    "a number is further away than half a step; is it rounded to the nearest code, does each code fit, is -x as good as x?",
)
SHORT = (
    "a short last block",
    "the last block may be short; it has its own scale, and all others have `block` elements",
)


def expect_bits(bits):
    """Blocks alike, blocks of zeros and with outliers, and short last blocks, of sizes that are drawn."""
    cases = [(numbers(3, 8, [draw.uniform(1, 2)]), bits, 8, *SHORT)]
    for block in (2 * draw.integer(3, 9), 2 * draw.integer(3, 9) + 1):
        blocks = draw.integer(3, 8)
        alike = [draw.uniform(1e-3, 1e3)] * blocks
        scales = [0.0, *(draw.uniform(0.5, 2) for _ in range(blocks))]
        scales[draw.integer(1, blocks)] *= 10 ** draw.integer(3, 6)
        mixed = [1.0, 1000.0, 1.0, 1000.0, 1.0]
        cases += [
            (numbers(block * blocks, block, alike), bits, block, *HALF),
            (numbers(block * len(scales), block, scales), bits, block, *OWN_BLOCK),
            (numbers(block * 4 + 1, block, mixed), bits, block, *SHORT),
            (numbers(block * 4 + 2, block, mixed), bits, block, *SHORT),
        ]
    expect_blocks(*cases)


# %% check="quantize_blocks-eight" points=1
# 8 bits: nothing is wrong by more than half a step of its own block, zeros are zeros, and a code takes a byte.
scales = [1.0, 1.0, 1000.0, 1.0, 0.0, 1.0]
expect_blocks((numbers(48, 8, [1.0] * 6), 8, 8, *HALF), (numbers(48, 8, scales), 8, 8, *OWN_BLOCK))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_bits(8)
### END HIDDEN TESTS

# %% check="quantize_blocks-four" points=1
# 4 bits: the same, and two codes share a byte.
scales = [1.0, 1.0, 1000.0, 1.0, 0.0, 1.0]
expect_blocks((numbers(48, 8, [1.0] * 6), 4, 8, *HALF), (numbers(48, 8, scales), 4, 8, *OWN_BLOCK))
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_bits(4)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. The cheapest word (2 points)
#
# F_p, F_g and F_o say into how many pieces parameters, gradients and optimizer state are cut: N is 1, I is k, G is W. In mixed precision with Adam
# a rank holds
#
#     2Ψ/F_p + 2Ψ/F_g + 12Ψ/F_o bytes
#
# With M = 2Ψ, the passage from f to h pieces costs a rank M (1/f - 1/h) bytes, in either direction. It goes inside the node as far as it can,
# to c = max(f, min(h, k)) pieces; what is left goes between nodes: M (1/c - 1/h). A step with m microbatches has these passages:
#
#     2m times  1 → F_p        gather parameters, in each forward and backward
#      m times  1 → F_g        reduce-scatter gradients
#      once     F_g → F_o      on to the rank that will update the piece
#     2 times   F_o → W        all-reduce over the replicas of the optimizer state
#      once     F_p → F_o      gather what was updated
#
# Of the words whose states fit into `limit_bytes`, choose the one that sends the fewest bytes between nodes; of equals the one that sends the
# fewest bytes in all; then the one that holds the fewest; then the first in `PARO_SHARDINGS`. Return the word and the bytes it sends between nodes, an
# int. If none fits, raise a ValueError that says so in one line. Ψ is a multiple of W, so that all bytes are whole numbers; only exact
# numbers tell equals.
#
# Ψ = 1.6e9, 64 ranks, 8 in a node, m = 8: a passage to W pieces puts M (1/8 - 1/64) = 0.35 GB between nodes. IIG holds 1.1 GB and sends 0.7 GB
# between nodes, IGG 0.75 GB and 3.15 GB, GGG 0.4 GB and 8.4 GB. With a limit of 2 GB the answer is
# `("IIG", 700000000)`.


# %% answer="cheapest_word"
def cheapest_word(parameters, ranks, per_node, limit_bytes, microbatches):
    """(one of PARO_SHARDINGS, the bytes a rank sends between nodes with it). Raises ValueError if the states fit with none of them."""

    ### BEGIN SOLUTION
    def price(word):
        p, g, o = ({"N": 1, "I": per_node, "G": ranks}[letter] for letter in word)
        across = total = 0
        for times, f, h in (
            (2 * microbatches, 1, p),
            (microbatches, 1, g),
            (1, g, o),
            (2, o, ranks),
            (1, p, o),
        ):
            c = max(f, min(h, per_node))
            across += times * 2 * (parameters // c - parameters // h)
            total += times * 2 * (parameters // f - parameters // h)
        return across, total, 2 * parameters // p + 2 * parameters // g + 12 * parameters // o

    fitting = [word for word in PARO_SHARDINGS if price(word)[2] <= limit_bytes]
    if not fitting:
        raise ValueError(
            f"no word holds at most {limit_bytes} bytes on each of {ranks} ranks; take more ranks"
        )
    word = min(fitting, key=price)
    return word, price(word)[0]
    ### END SOLUTION


# %% driver="word_for"
def word_for(*case):
    """(what cheapest_word answers, ""), or (None, message) for a ValueError."""
    try:
        return cheapest_word(*case), ""
    except ValueError as error:
        return None, str(error)


# %% judge="choose"
def choose(cases, refused=()):
    """Ask for the words of these cases, and for refusals of the others. Returns the pairs (word, bytes between nodes)."""
    said = ask_each(word_for, [*cases, *refused])
    for pair, _ in said[: len(cases)]:
        expect(
            pair is not None,
            "fits",
            "refused, though a word fits; states that fill the limit to the last byte do fit",
        )
        expect(
            isinstance(pair, (list, tuple))
            and len(pair) == 2
            and pair[0] in PARO_SHARDINGS
            and type(pair[1]) is int,
            "a word and its bytes",
            "return two things: one of PARO_SHARDINGS, and a whole number of bytes",
        )
    for pair, message in said[len(cases) :]:
        expect(
            pair is None, "a refusal", "no word fits, and none may be returned: raise a ValueError"
        )
        expect(
            message.strip() and "\n" not in message,
            "a refusal",
            "say in one line what does not fit",
        )
    return [tuple(pair) for pair, _ in said[: len(cases)]]


OWN_BYTES = (
    "bytes of the word",
    "a good word, and other bytes between nodes than it sends; which passages does a step have, and what has to cross?",
)

# %% check="cheapest_word-across" points=1
# The word fits, and no other that fits sends less between nodes.
of_the_text = 1_600_000_000, 64, 8
pairs = choose(
    [(*of_the_text, limit, 8) for limit in (2 * 10**9, 10**9, 4 * 10**8)],
    [(*of_the_text, 2 * 10**8, 8)],
)
words = [word for word, _ in pairs]
expect(
    words[0] not in PARO_SHARDINGS[:7] and words[1] not in PARO_SHARDINGS[:8],
    "fits",
    "which bytes does a rank hold of each state?",
)
expect(
    words == ["IIG", "IGG", "GGG"],
    "bytes between nodes",
    "the example of the text, limits 2, 1 and 0.4 GB; how often does each passage happen?",
)
expect_equal([sent for _, sent in pairs], [700_000_000, 3_150_000_000, 8_400_000_000], *OWN_BYTES)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
from minitrain.data_parallel import choices

drawn = (
    (draw.choice([4, 8]), draw.integer(2, 9)),
    (draw.integer(3, 6), draw.integer(2, 5)),
    (1, draw.integer(2, 6)),
)
for per_node, nodes in ((2, 2), *drawn, (6, 1)):
    cluster, numel = (
        choices.Cluster(per_node * nodes, per_node),
        per_node * nodes * draw.integer(10**5, 10**8),
    )
    held = {
        word: sum(choices.memory_bytes(choices.paro(word, cluster), numel).values())
        for word in PARO_SHARDINGS
    }
    limits = sorted(
        {int(size) + more for size in held.values() for more in (0, draw.integer(1, 9))}
    )
    cases = [
        (numel, cluster.ranks, per_node, limit, m)
        for m in (1, draw.integer(2, 4), draw.integer(8, 32))
        for limit in limits
    ]
    for (word, sent), (*_, limit, m) in zip(
        choose(cases, [(numel, cluster.ranks, per_node, limits[0] - 1, 1)]), cases
    ):
        expect(
            held[word] <= limit,
            "fits",
            "a word was chosen whose states do not fit; which bytes does a rank hold of each state?",
        )
        across = {
            word: choices.traffic(choices.paro(word, cluster), numel, cluster, m).inter_bytes
            for word in PARO_SHARDINGS
        }
        expect(
            across[word] == min(across[other] for other in PARO_SHARDINGS if held[other] <= limit),
            "bytes between nodes",
            "another word that fits sends less between nodes; which passages are needed in every microbatch, and what stays inside the node?",
        )
        expect(sent == across[word], *OWN_BYTES)
### END HIDDEN TESTS

# %% check="cheapest_word-ties" points=1
# Of words that send the same between nodes: the fewest bytes in all, then the smallest, then the first.
of_the_text = 1_600_000_000, 64, 8
words = [word for word, _ in choose([(*of_the_text, limit, 8) for limit in (7 * 10**9, 4 * 10**9)])]
expect(
    words[0][:2] == "NN" and words[1][0] == "N",
    "bytes in all",
    "the example of the text, limits 7 and 4 GB: several words send the same between nodes",
)
[(word, sent)] = choose([(*of_the_text, 10**11, 1)])
expect(
    word not in ("NNN", "NNI", "NII"),
    "ties",
    "the example of the text, all words fit: of those that send the same, choose the one that holds the least",
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
from minitrain.data_parallel import choices

drawn = (
    (draw.choice([4, 8]), draw.integer(2, 9)),
    (draw.integer(3, 7), draw.integer(3, 7)),
    (1, draw.integer(2, 6)),
)
for per_node, nodes in ((3, 2), (6, 2), (7, 3), *drawn, (6, 1)):
    cluster, numel = (
        choices.Cluster(per_node * nodes, per_node),
        per_node * nodes * draw.integer(10**5, 10**8),
    )
    held = {
        word: sum(choices.memory_bytes(choices.paro(word, cluster), numel).values())
        for word in PARO_SHARDINGS
    }
    limits = sorted(
        {int(size) + more for size in held.values() for more in (0, draw.integer(1, 9))}
    )
    cases = [
        (numel, cluster.ranks, per_node, limit, m)
        for m in (1, draw.integer(2, 4), draw.integer(8, 32))
        for limit in limits
    ]
    for (word, _), (*_, limit, m) in zip(choose(cases), cases):
        sent = {
            word: choices.traffic(choices.paro(word, cluster), numel, cluster, m)
            for word in PARO_SHARDINGS
            if held[word] <= limit
        }
        expect(word in sent, "fits", "a word was chosen whose states do not fit")
        best = min(
            sent,
            key=lambda word: (
                sent[word].inter_bytes,
                sent[word].total_bytes,
                held[word],
                PARO_SHARDINGS.index(word),
            ),
        )
        expect(
            sent[word].inter_bytes == sent[best].inter_bytes,
            "bytes between nodes",
            "another word that fits sends less between nodes",
        )
        expect(
            sent[word].total_bytes == sent[best].total_bytes,
            "bytes in all",
            "another word sends as little between nodes, and less in all",
        )
        expect(
            word == best,
            "ties",
            "words that send the same: the one that holds least, and of these the first; are your bytes exact?",
        )
### END HIDDEN TESTS
