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
# A cluster has two levels: n nodes of k ranks, W = k·n, and rank = node·k + place. Links inside a node are fast. Those between
# nodes are slow, and the k ranks of a node share them. Each model state is cut in one of three ways:
#
#     N  not cut           I  over the k ranks of a node           G  over all W ranks
#
# A word of three letters names the cuts of parameters, gradients and optimizer state, in this order, as in PaRO (Wu et al. 2023,
# arXiv:2310.06003). No state is cut finer than the next one, which leaves ten words. III is hybrid sharding (Zhao et al. 2023,
# PyTorch FSDP, arXiv:2304.11277, section 3.2.2) and MiCS with a partition group of one node (Zhang et al. 2022, arXiv:2205.00119,
# section 3).

# %% given="setup"
import math

import torch

from minitrain import collectives

PARO_SHARDINGS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG")

# %% judge="tools"
from minitrain.course.grading.answer_checks import (
    Draw,
    ask_each,
    expect,
    expect_equal,
    run_on_ranks,
)

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


def nig_step_on_a_rank(param, rates, like, per_node, microbatches, group):
    """One step of the answer. A gradient reaches this rank when its microbatch is asked for, not before."""
    gradients = (group.fetch(f"microbatch {number}", like) for number in range(microbatches))
    return nig_step(param, rates, gradients, *levels(per_node, group))


def hierarchical_reduce_scatter_on_a_rank(flat, per_node, group):
    return hierarchical_reduce_scatter(flat, *levels(per_node, group))


# %% [markdown]
# ## 1. Who holds what, for any factors (2 points)
#
# AMSP (Chen et al. 2023, arXiv:2311.00257) allows more than three letters: parameters, gradients and optimizer state are cut into F_p, F_g
# and F_o pieces, each of which divides the next. A factor up to k divides k, a larger one is a multiple of k. Where does each piece lie?
#
# - A state in f pieces is held once by every f neighbours: ranks 0 to f-1, f to 2f-1, and so on.
# - What is cut finer is cut *further*: a rank's gradients lie inside its parameters, its optimizer state inside its gradients.
# - A cut that reaches beyond the node is two cuts: first into k pieces inside the node, then across nodes. So a rank that holds one
#   of 2k pieces holds a part of what it would hold of k pieces.
# - Ranks that held the same before a cut hold its pieces in rank order, from left to right.
#
# The buffer has `size` elements, a multiple of F_o. Nodes of 4, factors (2, 4, 8), 16 elements: rank 6 is place 2 of node 1 and
# holds `[(0, 8), (4, 8), (6, 8)]`: of two halves the first, of that the second half, and of that, across nodes, the second half again.
#
# > **API** `held_slices(rank, per_node, factors, size)`: `factors` is the tuple (F_p, F_g, F_o), everything else an int. Return
# > three pairs (start, stop) of ints; stop is the first element that the rank does not hold. A pure function, no tensors, no network.


# %% answer="held_slices"
def held_slices(rank, per_node, factors, size):
    """[(start, stop)] * 3: what the rank holds of parameters, gradients and optimizer state in a flat buffer of `size` elements."""
    ### BEGIN SOLUTION
    held = {}
    start, pieces = 0, 1
    for finer in sorted({*factors, *([per_node] if max(factors) > per_node else [])}):
        start += rank // pieces % (finer // pieces) * (size // finer)
        held[finer] = (start, start + size // finer)
        pieces = finer
    return [held[factor] for factor in factors]
    ### END SOLUTION


# %% judge="expect_slices"
def expect_slices(per_node, nodes, chains, size):
    """Ask for the slices of all ranks, and look at them property by property."""
    ranks = range(per_node * nodes)
    cases = [(rank, per_node, factors, size) for factors in chains for rank in ranks]
    all_held = iter(ask_each(held_slices, cases))
    for factors in chains:
        held = [next(all_held) for _ in ranks]
        for slices in held:
            expect(
                isinstance(slices, (list, tuple))
                and len(slices) == 3
                and all(
                    isinstance(pair, (list, tuple))
                    and len(pair) == 2
                    and all(type(end) is int for end in pair)
                    for pair in slices
                ),
                "three slices",
                "a list of three pairs (start, stop) of whole numbers, one for each state",
            )
        before = [(0, size)] * len(ranks)  # what each rank held before the next cut
        for state, factor in enumerate(factors):
            own = [tuple(slices[state]) for slices in held]
            expect_state(own, before, per_node, factor, size)
            before = own


def expect_state(own, before, per_node, factor, size):
    """The slices (start, stop) of all ranks of one state, when they held `before` of the state that is cut less finely."""
    ranks = range(len(own))
    expect(
        all((stop - start) * factor == size for start, stop in own),
        "size of a slice",
        "into how many pieces is this state cut? stop is the first element that is not held",
    )
    expect(
        all(
            sorted(own[first : first + factor])
            == [(n * size // factor, (n + 1) * size // factor) for n in range(factor)]
            for first in range(0, len(own), factor)
        ),
        "neighbours hold it once",
        "in each block of as many neighbours as there are pieces, everyone holds another one",
    )
    expect(
        all(wide[0] <= start and stop <= wide[1] for (start, stop), wide in zip(own, before)),
        "cut further",
        "a rank holds something of this state that it does not hold of the one before",
    )
    if factor > per_node:
        of_node = [start * per_node // size for start, _ in own]
        expect(
            all(
                sorted(of_node[first : first + per_node]) == list(range(per_node))
                for first in range(0, len(own), per_node)
            )
            and all(of_node[rank] == of_node[rank % per_node] for rank in ranks),
            "inside the node first",
            "cut into as many pieces as a node has ranks, and then across nodes: what do the ranks of one place share?",
        )
    for rank in ranks:
        for other in range(rank + 1, rank // factor * factor + factor):
            same = before[rank] == before[other]
            if same and factor > per_node and rank % per_node != other % per_node:
                same = rank // per_node == other // per_node  # two cuts: compare within each
            expect(
                not same or own[rank] < own[other],
                "in rank order",
                "of ranks that held the same before the cut, the first one holds the first piece",
            )


# %% check="held_slices-inside" points=1
# Factors up to the size of a node.
expect_slices(4, 2, [(1, 1, 1), (1, 2, 4), (2, 2, 4), (4, 4, 4)], 16)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, chains in (
    (6, [(2, 2, 6), (1, 3, 6), (3, 6, 6), (1, 2, 2)]),
    (8, [(2, 4, 8), (1, 4, 8), (2, 2, 2)]),
    (12, [(2, 6, 12), (3, 3, 12), (1, 4, 12)]),
):
    expect_slices(per_node, draw.integer(1, 3), chains, per_node * draw.integer(1, 30))
### END HIDDEN TESTS

# %% check="held_slices-across" points=1
# Factors beyond the node: inside first, then across.
expect_slices(4, 2, [(2, 4, 8), (1, 1, 8), (4, 4, 8), (8, 8, 8)], 16)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes, chains in (
    (4, 4, [(2, 4, 16), (1, 2, 8), (1, 8, 16), (4, 8, 8)]),
    (2, 6, [(1, 4, 12), (2, 6, 12), (1, 1, 6), (6, 12, 12)]),
    (6, 3, [(3, 6, 18), (1, 2, 18), (18, 18, 18)]),
    (1, 6, [(1, 2, 6), (3, 6, 6)]),
):
    expect_slices(per_node, nodes, chains, per_node * nodes * draw.integer(1, 30))
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A step in the word NIG (2 points)
#
# Parameters whole, gradients cut inside the node, optimizer state cut over all ranks. The optimizer here is gradient descent with a
# learning rate *per element*, and these rates are its state: a rank has the S/W of them which G gives it, elements place·S/k + node·S/W
# and following, and no other rank has the same ones. All ranks have the same parameters. One step with m microbatches is
#
#     param = param - rates · (sum of the gradients of all microbatches of all ranks)
#
# with M the bytes of the S elements, and a rank may send
#
#     inside the node   M (1 - 1/k) in each microbatch, before it asks for the next one, and as much again once
#     between nodes     2 (M/k) (1 - 1/n), once a step, however many microbatches there are
#
# Two nodes of two ranks, param `[0, 0, 0, 0]`, one microbatch, rates 1, 2, 3, 4, and rank r has the gradient `[r, r, r, r]`: the sum
# is 6, and every rank returns `[-6, -12, -18, -24]`. Rank 1 is place 1 of node 0: it has element 2, and rates is `[3]`.
#
# > **API** `gradients` is an iterator: each round of `for gradient in gradients` computes one microbatch and gives its flat gradient
# > [S]; what you sent before counts for the one before. `collectives.reduce_scatter(x, group)`: [d·n] -> [d], this rank's piece of the
# > sum. `all_gather(x, group)`: [d] -> [n·d], in rank order. `all_reduce(x, group)`: a new tensor. All are new tensors, float64.


# %% answer="nig_step"
def nig_step(param, rates, gradients, intra, inter):
    """param [S], the same on all ranks; rates [S/W] of this rank; an iterator of gradients [S] -> the new param [S] on every rank."""
    ### BEGIN SOLUTION
    total = 0
    for gradient in gradients:
        total = total + collectives.reduce_scatter(gradient, intra)
    piece = collectives.reduce_scatter(total, inter)
    old = param.chunk(intra.size())[intra.rank()].chunk(inter.size())[inter.rank()]
    of_this_place = collectives.all_gather(old - rates * piece, inter)
    return collectives.all_gather(of_this_place, intra)
    ### END SOLUTION


# %% judge="expect_step"
def expect_step(per_node, nodes, microbatches, pieces):
    """Run a step: the new parameters are right, and no more crosses nodes than one sum and one gather of shards.

    Returns the outcome and M.
    """
    ranks, numel = per_node * nodes, per_node * nodes * pieces
    param, rates = draw.real(numel), draw.real(numel)
    grads = [[draw.real(numel) for _ in range(microbatches)] for _ in range(ranks)]
    places = [(rank % per_node) * nodes + rank // per_node for rank in range(ranks)]
    inputs = [
        (
            param,
            rates.chunk(ranks)[place].clone(),
            torch.empty(numel).double(),
            per_node,
            microbatches,
        )
        for place in places
    ]
    secrets = [{f"microbatch {m}": grad for m, grad in enumerate(own)} for own in grads]
    outcome = run_on_ranks(nig_step_on_a_rank, inputs, collectives=COLLECTIVES, secrets=secrets)
    new = param - rates * sum(sum(own) for own in grads)
    expect_equal(
        outcome.results,
        [new] * ranks,
        "the new parameters",
        "sums over all microbatches and all ranks, each element with its own rate, all of them on every rank and in order",
        atol=1e-10,
    )
    _, across = sent_inside_and_across(outcome, per_node)
    expect(
        max(across) <= 2 * (nodes - 1) * (numel // ranks) * 8,
        "bytes between nodes",
        "more crosses the slow links than a shard's sum and its new values; what is the smallest thing that has to cross, and how often?",
    )
    sent, asked = [0] * ranks, [0] * ranks
    for event in outcome.events:
        if event.kind == "fetch":
            expect(
                sent[event.rank] * per_node >= asked[event.rank] * numel * 8 * (per_node - 1),
                "cut when it comes",
                "the next microbatch is asked for while the gradient before it is still whole; what may a rank keep of a state with the letter I?",
            )
            asked[event.rank] += 1
        elif event.kind == "send":
            sent[event.rank] += event.bytes
    return outcome, numel * 8


# %% check="nig_step-equal" points=1
# Every rank returns the new parameters, and only shards cross nodes, once a step.
expect_step(2, 2, 2, 3)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (2, 2),
    (draw.integer(3, 4), 1),
    (1, draw.integer(3, 4)),
    draw.choice([(2, 3), (3, 2)]),
):
    expect_step(per_node, nodes, draw.integer(1, 3), draw.integer(1, 5))
### END HIDDEN TESTS


# %% check="nig_step-inside" points=1
# Inside the node each part of a gradient is sent once, and new parameters come back once.
def expect_little_inside(per_node, nodes, microbatches, pieces):
    outcome, whole = expect_step(per_node, nodes, microbatches, pieces)
    inside, _ = sent_inside_and_across(outcome, per_node)
    expect(
        max(inside) * per_node <= (microbatches + 1) * whole * (per_node - 1),
        "bytes inside the node",
        "inside the node each part of a gradient goes to the one rank that needs it, and comes back once as new parameters",
    )


expect_little_inside(2, 2, 3, 5)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in ((2, 2), (draw.integer(3, 4), 1), draw.choice([(2, 3), (3, 2)])):
    expect_little_inside(per_node, nodes, draw.integer(2, 4), draw.integer(2, 9))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The gather backwards: a hierarchical reduce-scatter (2 points)
#
# The partition group of MiCS may span nodes (Zhang et al. 2022, section 3). The chapter gathers its p shards in two levels, across nodes
# first. Gradients take the same way backwards: every rank has a whole flat gradient, M bytes in p pieces in rank order, and rank r needs
# piece r of the sum over all p ranks. A flat ring puts (p-1)/p M on the links that leave a node. In two levels each rank sends
#
#     inside its node   (1 - 1/k) M            between nodes   (1/k - 1/p) M
#
# so the k ranks of a node together send (p-k)/p M to other nodes. Which level comes first now? And in which order must the pieces lie
# before the first call, so that each rank ends with the piece of its own rank?
#
# Two nodes of two ranks; rank r has `[r, 10r, 100r, 1000r]`. The sums are `[6, 60, 600, 6000]`, and rank r returns `[6·10^r]`. M is 32 bytes
# in float64: each rank sends 16 bytes inside its node and 8 to the other one.
#
# > **API** `collectives.reduce_scatter(x, group)`: x [n·d, ..] -> [d, ..], this rank's piece (in rank order along dim 0) of the sum over
# > the group. `x.view(..)`, `x.transpose(..)`, `x.reshape(..)` do the rest; einops is there too. `intra.size()` is k, `inter.size()` p/k.


# %% answer="hierarchical_reduce_scatter"
def hierarchical_reduce_scatter(flat, intra, inter):
    """flat [p·d, ..] on each rank -> [d, ..]: piece inter.rank()·k + intra.rank() of the sum over all p ranks."""
    ### BEGIN SOLUTION
    pieces = flat.view(inter.size(), intra.size(), -1, *flat.shape[1:])
    place_by_place = pieces.transpose(0, 1).reshape(flat.shape)
    return collectives.reduce_scatter(collectives.reduce_scatter(place_by_place, intra), inter)
    ### END SOLUTION


# %% judge="expect_scattered"
def expect_scattered(flats, per_node):
    """Run the answer: each rank has its piece of the sum, and a node sends no more to others than (p-k)/p M.

    Returns bytes sent inside, and across.
    """
    inputs, ranks = [(flat, per_node) for flat in flats], len(flats)
    outcome = run_on_ranks(hierarchical_reduce_scatter_on_a_rank, inputs, collectives=COLLECTIVES)
    pieces = sum(flats).chunk(ranks)
    for said in outcome.results:
        expect(
            isinstance(said, torch.Tensor) and said.shape == pieces[0].shape,
            "one piece",
            "every rank returns [d, ..], one of the p pieces",
        )
        expect(
            any(torch.equal(said, piece) for piece in pieces),
            "the sum over all ranks",
            "what came back is no piece of the sum of all gradients; is every rank's term in it, once?",
        )
    expect_equal(
        outcome.results,
        list(pieces),
        "the rank's own piece",
        "a piece of the sum, but another rank's; after the first call, which pieces does a place have, and for which nodes?",
    )
    inside, across = sent_inside_and_across(outcome, per_node)
    of_nodes = [sum(across[first : first + per_node]) for first in range(0, ranks, per_node)]
    expect(
        max(of_nodes) <= (ranks - per_node) * pieces[0].nbytes,
        "bytes between nodes",
        "a piece leaves a node once, as the sum of the node, not once for every rank there; which level comes first?",
    )
    return inside, across


# %% check="hierarchical_reduce_scatter-order" points=1
# Every rank returns its own piece of the sum, and a node sends (p-k)/p of the whole to other nodes.
expect_scattered([rank * torch.tensor([1.0, 10.0, 100.0, 1000.0]).double() for rank in range(4)], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in (
    (2, 2),
    (draw.integer(2, 4), 1),
    (1, draw.integer(2, 4)),
    draw.choice([(2, 3), (3, 2)]),
):
    rows, rest = per_node * nodes * draw.integer(1, 3), [draw.integer(1, 4)] * draw.integer(0, 2)
    expect_scattered([draw.exact(rows, *rest) for _ in range(per_node * nodes)], per_node)
### END HIDDEN TESTS


# %% check="hierarchical_reduce_scatter-bytes" points=1
# All ranks of a node share the way out, and inside each part is sent once.
def expect_shared_work(flats, per_node):
    (inside, across), ranks = expect_scattered(flats, per_node), len(flats)
    expect(
        max(across) * per_node * ranks <= (ranks - per_node) * flats[0].nbytes,
        "all ranks send across",
        "each place sums what its twins on other nodes need; if one rank does it for all, the others wait",
    )
    expect(
        max(inside) * per_node <= flats[0].nbytes * (per_node - 1),
        "bytes inside the node",
        "inside the node each part goes to the one place that needs it, and nothing comes back",
    )


expect_shared_work([torch.full((40, 2), 1.0 + rank).double() for rank in range(4)], 2)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
for per_node, nodes in ((2, 2), draw.choice([(2, 3), (3, 2)]), (1, 3)):
    shape = per_node * nodes * draw.integer(2, 9), draw.integer(2, 9)
    expect_shared_work([draw.exact(*shape) for _ in range(per_node * nodes)], per_node)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Block quantisation (2 points)
#
# ZeRO++ sends small integers instead of floats (Wang et al. 2023, arXiv:2306.10209, section 3). x of d elements is cut into blocks of `block`; the
# last one may be short. Every block has its own scale, in float32:
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
#
# > **API** Two functions, tensors in and out, no network. `quantize_blocks(x, bits, block)`: x [d] float32, contiguous; return (codes, scales),
# > codes of any integer dtype (`torch.int8` holds -128 to 127, `torch.uint8` 0 to 255), scales float32. `dequantize_blocks(codes, scales, bits,
# > block, numel)` gets the two tensors as you returned them and `numel` = d; return [d] float32. Its process has seen nothing else.


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
#
# > **API** A pure function of five ints. Return a tuple (word, bytes): one of `PARO_SHARDINGS`, which the read-only cell defines, and an int.
# > Bytes between nodes are those that one rank sends. Whole numbers all the way (`//`): 2Ψ is a multiple of every number of pieces.


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
from minitrain.systems.plan import sharding_choices as choices

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
from minitrain.systems.plan import sharding_choices as choices

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
