"""ZeRO++: stage 3 with a quarter of the bytes between nodes.

                                  ZeRO-3     ZeRO++     between nodes, M = bytes of the parameters in 16 bits
    gather for forward            M          0.5 M      qwZ: weights travel in 8 bits, a scale per block
    gather for backward           M          0          hpZ: every node keeps a copy, each of its k ranks 1/k
    reduce-scatter of gradients   M          0.25 M     qgZ: in 4 bits, two hops, summed in full precision

All of these times (N-1)/N for N nodes; codes take 4/block bytes more per number, for the scales. The master
weights stay exact; the weights that compute are rounded to 8 bits each time they are gathered. In forward a
rank sends its slice in 8 bits across nodes, and what came, in full width, to its neighbours. That is the
node's copy: 2/k bytes more per parameter on each rank in bf16, kept until the next forward.
Wang et al. 2023, ZeRO++, arXiv:2306.10209, section 3. Differs: weights are quantised on the way between nodes
only, where the paper quantises the whole gather; what crosses nodes runs when it is called, without overlap;
codes and scales are one message; sums, not means; no fused kernels.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.hybrid import Chain, gather_inside
from minitrain.data_parallel.zero3 import UnitBuffer, Zero3
from minitrain.precision.blocks import FLOATS, Blocks, dequantize, from_bytes, quantize, to_bytes
from minitrain.precision.formats import INT4, INT8
from minitrain.ranks.checks import require_one_of, require_positive_ints
from minitrain.ranks.collectives import Handle, all_gather, all_to_all
from minitrain.ranks.torch_private import in_backward


class ZeroPlusPlus(Zero3):
    """Reducer and optimizer of a step. Rank j k + i of `group` is place i (`intra`) of node j (`inter`)."""

    stage = "3++"

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        intra: ProcessGroup,
        inter: ProcessGroup,
        make_optimizer,
        units=None,
        *,
        weight_bits: int | None = 8,
        gradient_bits: int | None = 4,
        secondary: bool = True,
        block: int = 256,
    ):
        (n, k, nodes), (rank, i, j) = zip(*((g.size(), g.rank()) for g in (group, intra, inter)))
        if (n, rank) != (nodes * k, j * k + i):
            raise ValueError(f"rank {rank} is place {i} of {k} in node {j}; use Mesh(inter=..., intra=...)")
        self.intra, self.inter, self.block = intra, inter, block
        self.weight_bits, self.gradient_bits, self.secondary = weight_bits, gradient_bits, secondary
        self.in_node: dict[UnitBuffer, Tensor] = {}  # this rank's part of the node's copy
        super().__init__(model, group, make_optimizer, units)

    def make_flat(self, params: list[nn.Parameter], groups: tuple[ProcessGroup, ...]) -> UnitBuffer:
        flat = super().make_flat(params, groups)
        if flat.shard.numel() < self.block and (self.weight_bits or self.gradient_bits):
            raise ValueError(f"block={self.block} of shards of {flat.shard.numel()}; use a smaller block")
        return flat

    def gather(self, flat: UnitBuffer) -> Handle | Chain:
        if in_backward() and self.secondary:
            return all_gather(self.in_node[flat], self.intra, out=flat.whole, async_op=True)
        shard = flat.shard.detach()
        if self.weight_bits is None:
            column = all_gather(shard, self.inter)  # [N d], place i of every node
        else:
            column = quantized_all_gather(shard, self.inter, self.weight_bits, self.block)
        gather_inside(column, self.intra, self.inter, flat.whole)
        if self.secondary:
            self.in_node[flat] = flat.whole.view(self.intra.size(), -1)[self.intra.rank()].clone()
        return Chain(flat.whole)

    def scatter(self, flat: UnitBuffer, grads: Tensor) -> Chain:
        return Chain(two_hop_reduce_scatter(grads, self.intra, self.inter, self.gradient_bits, self.block))


# ---- its collectives ------------------------------------------------------------------------------------
#
# A rank's slice has d numbers, the flat buffer n·d. A node has L ranks (`intra`); `inter` are those of one
# place in all N nodes, n = L·N. A slice travels as m = ceil(d·bits/8) + 4·ceil(d/block) bytes, codes and
# scales (bits=None: as it is). A rank sends
#                                              within the node   to other nodes
#     quantized_all_gather    [d] -> [n·d]     (n-1) m over its group, wherever that goes            qwZ
#     two_hop_reduce_scatter  [n·d] -> [d]     N(L-1) m          (N-1) m                             qgZ
#
# In one hop (n-L) m would cross. No ring, because codes of different scales cannot be added. A number is
# quantised once per hop, and sums are in full precision: the error is at most half a step per rank and half a
# step for each of N partial sums.
# Memory of a reduce-scatter besides flat, in bytes for each of its n·d numbers, float32 in whole blocks: 5 +
# 4/block to quantise, 5 + m/d + 4/block to dequantise 4 bits (8 bits: 1 less), 4 + 4/L to add up the first
# hop; the largest is the peak. The gather holds what dequantising takes.


def quantized_all_gather(shard: Tensor, group: ProcessGroup, bits=8, block=256) -> Tensor:
    """Everyone's shard [d], as its codes say it, one after the other: [n·d], the same bits on all ranks (this
    one's quantised too: ranks that compute with different weights would drift apart)."""
    blocks, length = integer_blocks(bits, block), slice_length(shard, 1, bits, block)
    messages = all_gather(to_bytes(quantize(shard, blocks, fill=True)), group).view(group.size(), -1)
    return dequantize(from_bytes(messages, length, blocks), shard.dtype).view(-1)


def two_hop_reduce_scatter(flat: Tensor, intra, inter, bits: int | None = 4, block=256) -> Tensor:
    """Slice inter.rank()·L + intra.rank() of the sum over both groups of every rank's flat [n·d]: [d]. In the
    first hop place i gets what the places i of all nodes need, slices i, L+i, .., which are not neighbours:
        flat [N, L, d]  -- reorder -> [L, N, d]  -- over intra, add -> [N, d]  -- over inter, add -> [d]"""
    places, nodes = intra.size(), inter.size()
    slices = flat.detach().view(nodes, places, slice_length(flat, places * nodes, bits, block))
    by_place = rearrange(slices, "node place x -> place node x")
    of_node = _exchange_and_add(by_place, intra, bits, block, flat.dtype)
    return _exchange_and_add(of_node, inter, bits, block, flat.dtype).to(flat.dtype)


def integer_blocks(bits: int, block: int) -> Blocks:
    """Integers of 8 or 4 bits, a float32 scale for every `block` of them."""
    require_one_of((4, 8), bits=bits)
    require_positive_ints(block=block)
    return Blocks(INT8 if bits == 8 else INT4, (block,))


def slice_length(flat: Tensor, ranks: int, bits: int | None, block: int) -> int:
    """Numbers for each rank, of a flat buffer that can be cut into a slice per rank and these into blocks."""
    if flat.dim() != 1 or flat.dtype not in FLOATS or flat.numel() % ranks:
        buffer = f"{flat.dtype} {list(flat.shape)} cannot be cut into {ranks} slices of floating numbers"
        raise ValueError(f"{buffer}; use reshape(-1), float(), or pad with zeros")
    if bits is not None:
        integer_blocks(bits, block)
        require_positive_ints(flat.numel() // ranks, block=block)
    return flat.numel() // ranks


def _exchange_and_add(pieces: Tensor, group: ProcessGroup, bits: int | None, block: int, dtype) -> Tensor:
    """pieces [n, .., d] -> the sum [.., d] of those for here, float32 or wider; not quantised: as `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    if bits is None:
        received = all_to_all(pieces.to(dtype), group)
    else:
        blocks = integer_blocks(bits, block)
        messages = all_to_all(to_bytes(quantize(pieces, blocks, fill=True)), group)
        received = dequantize(from_bytes(messages, pieces.shape[-1], blocks), wide)
        del messages
    return received.sum(0, dtype=wide)
