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
only, where the paper quantises the whole gather; what crosses nodes runs when it is called, without overlap.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.hybrid import Chain, gather_inside
from minitrain.data_parallel.sharded_units import UnitBuffer
from minitrain.data_parallel.zero3 import Zero3, in_backward
from minitrain.ranks.collectives import Handle, all_gather
from minitrain.systems.data_parallel.quantized_collectives import quantized_all_gather, two_hop_reduce_scatter


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
            where = f"rank {rank} of {n} is place {i} of {k} in node {j} of {nodes}"
            raise ValueError(f"{where}; make the mesh with the nodes outside: Mesh(inter=..., intra=...)")
        self.intra, self.inter, self.block = intra, inter, block
        self.weight_bits, self.gradient_bits, self.secondary = weight_bits, gradient_bits, secondary
        self.in_node: dict[UnitBuffer, Tensor] = {}  # this rank's part of the node's copy
        super().__init__(model, group, make_optimizer, units)

    def make_flat(self, params: list[nn.Parameter], groups: tuple[ProcessGroup, ...]) -> UnitBuffer:
        flat = super().make_flat(params, groups)
        if flat.shard.numel() < self.block and (self.weight_bits or self.gradient_bits):
            shard = f"the shard of {flat.shard.numel()} elements of a unit with {flat.numel}"
            raise ValueError(f"block={self.block} is larger than {shard}; use a smaller one")
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
