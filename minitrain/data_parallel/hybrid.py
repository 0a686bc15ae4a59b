"""Hybrid sharding: each model state is cut as finely as memory asks and no finer, on two levels.

                  N: not cut         I: cut inside the node (`intra`)   G: over all ranks, intra then inter
    parameters    whole, as in DDP   gathered inside the node            across nodes, then inside
    gradients     add up locally     reduce-scattered inside             inside, then across, each microbatch
    optimizer     same on all ranks  same on all nodes                   once in the world

Three letters name a sharding. No state is cut finer than the next one, which leaves ten: NNN is DDP, NNG and
NGG are ZeRO-1 and 2, GGG is ZeRO-3, III is FSDP's HYBRID_SHARD. What scatter does not sum, complete sums once
per step: the second hop is an all-reduce of shards over `inter`, however many microbatches there were. Only
shards cross nodes. In GGG the slow hop, across nodes, runs ahead of the layer that needs it.
In MiCS the ranks with one copy may fill several nodes: `intra` are all of them, `by_node` is (this node, its
place on every node), and what goes inside goes node by node, if summed over `intra`: of p ranks on nodes of k
a node sends (p-k)/p of the whole across, and a flat ring (p-1)/p.
Bytes sent and memory: systems/plan/sharding_choices.py, which finds the cheapest sharding under a limit.
Zhao et al. 2023, FSDP, arXiv:2304.11277, section 3.2.2; Zhang et al. 2022, MiCS, arXiv:2205.00119, sections
3.2 to 3.4; Wu et al. 2023, PaRO, arXiv:2310.06003; Chen et al. 2023, AMSP, arXiv:2311.00257. Differs: factors
1, p and W, where AMSP allows any; gradients of all shardings are sent per unit of zero3.py.
"""

import math
from collections.abc import Callable
from itertools import combinations_with_replacement

from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.zero3 import UnitBuffer, Zero3
from minitrain.ranks.collectives import Handle, all_gather, all_reduce, reduce_scatter

# Letters of parameters, gradients and optimizer state, none cut finer than the next.
PARO_SHARDINGS = tuple("".join(letters) for letters in combinations_with_replacement("NIG", 3))


class HybridBuffer(UnitBuffer):
    """A flat buffer whose parameters are cut `param_cuts` times, and the optimizer's state `state_cuts`."""

    def __init__(self, params: list[nn.Parameter], groups: tuple, param_cuts: int, state_cuts: int):
        self.param_cuts, self.state_cuts = param_cuts, state_cuts
        super().__init__(params, *groups)

    def divide(self) -> None:
        cuts = slice(self.param_cuts)
        self.param_shard = self.local_shard(self.whole, cuts).clone() if self.param_cuts else self.whole
        between = slice(self.param_cuts, self.state_cuts)
        self.cut(self.local_shard(self.param_shard, between), slice(self.state_cuts))

    def free(self) -> None:
        if self.param_cuts:
            super().free()
        else:
            self.wait()  # it remains whole


class Chain:
    """A handle: `wait()` waits for the first step (or has its tensor), then takes the others, once."""

    def __init__(self, first: Handle | Tensor, *steps: Callable[[Tensor], Tensor]):
        self.first, self.steps = first, steps

    def wait(self) -> Tensor:
        if not isinstance(self.first, Tensor):
            self.first = self.first.wait()
            for step in self.steps:
                self.first = step(self.first)
        return self.first


class Hybrid(Zero3):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, hybrid, hybrid)."""

    sums_are_final = False  # `complete` adds up over nodes

    def __init__(
        self, model, intra, inter, make_optimizer, sharding="III", units=None, *, by_node=None, **how
    ):
        """`by_node`: two groups, or None; `how`: `reshard` and `prefetch` of Zero3."""
        if sharding not in PARO_SHARDINGS:
            raise ValueError(f"sharding={sharding!r} is none of {', '.join(PARO_SHARDINGS)}")
        if by_node and math.prod(group.size() for group in by_node) != intra.size():
            sizes = " x ".join(str(group.size()) for group in by_node)
            raise ValueError(f"by_node is {sizes} ranks of the {intra.size()} of intra; use mesh.blocks")
        self.groups, self.stage, self.by_node = (intra, inter), sharding, by_node
        self.param_cuts, self.grad_cuts, self.state_cuts = ("NIG".index(letter) for letter in sharding)
        super().__init__(model, intra, make_optimizer, units, **how)

    def make_flat(self, params: list[nn.Parameter], groups: tuple[ProcessGroup, ...]) -> HybridBuffer:
        return HybridBuffer(params, groups, self.param_cuts, self.state_cuts)

    def gather(self, flat: HybridBuffer) -> Handle | Chain:
        """Whole parameters from the pieces that ranks hold: inside the node, or across and then inside."""
        intra, inter = flat.groups
        if self.param_cuts == 1 and self._by_node(intra):
            pieces = all_gather(flat.param_shard, self.by_node[1], async_op=True)
            return Chain(pieces, lambda place: gather_inside(place, *self.by_node, flat.whole))
        if self.param_cuts == 1:
            return all_gather(flat.param_shard, intra, out=flat.whole, async_op=True)
        across = all_gather(flat.param_shard, inter, async_op=True)
        return Chain(across, lambda piece: self._gather(piece, intra, flat.whole))

    def scatter(self, flat: HybridBuffer, grads: Tensor) -> Handle | Chain:
        """What is summed after each microbatch: nothing, inside the node, or over all ranks."""
        intra, inter = flat.groups
        if self.grad_cuts == 0:
            return Chain(grads)
        if self._by_node(intra):
            inside = Chain(hierarchical_reduce_scatter(grads, *self.by_node))
        else:
            inside = reduce_scatter(grads, intra, async_op=True)
        return inside if self.grad_cuts == 1 else Chain(inside, lambda piece: reduce_scatter(piece, inter))

    def complete(self, flat: HybridBuffer) -> Tensor:
        """Once per step: cut the gradient as finely as the optimizer state, and sum it over replicas."""
        for group in flat.groups[self.grad_cuts : self.state_cuts]:
            flat.sum = self._scatter(flat.sum, group)
        intra, inter = flat.groups
        if self.state_cuts == 2:
            return flat.sum
        whole = self.state_cuts == 0  # on every rank; across nodes travels 1/k all the same
        piece = self._scatter(flat.sum, intra) if whole else flat.sum
        all_reduce(piece, inter, out=piece)
        return self._gather(piece, intra, flat.sum) if whole else piece

    def publish(self, frozen: bool = False) -> None:
        """Give every rank its shard of the updated parameters, the last cut first."""
        for flat in self.shards:
            if frozen or flat.shard.requires_grad:
                for cuts in range(self.state_cuts, self.param_cuts, -1):
                    ends = (slice(self.param_cuts, end) for end in (cuts, cuts - 1))
                    piece, whole = (flat.local_shard(flat.param_shard, end) for end in ends)
                    self._gather(piece, flat.groups[cuts - 1], whole)

    def _by_node(self, group: ProcessGroup) -> bool:
        return self.by_node is not None and group is self.groups[0]

    def _gather(self, piece: Tensor, group: ProcessGroup, out: Tensor) -> Tensor:
        if self._by_node(group):
            return hierarchical_all_gather(piece, *self.by_node, out=out)
        return all_gather(piece, group, out=out)

    def _scatter(self, whole: Tensor, group: ProcessGroup) -> Tensor:
        if self._by_node(group):
            return hierarchical_reduce_scatter(whole, *self.by_node)
        return reduce_scatter(whole, group)


# ---- in two levels: a group that spans nodes gathers across them first, with the least bytes ---------------
#
#   p ranks on p/k nodes, rank = node·k + place   inter: the p/k ranks of one place   intra: the k of one node
#   shard      [d, ..]          rank r holds piece r of the whole [p·d, ..]
#   1 across   [p/k, d, ..]     all_gather(shard, inter): pieces of this place from every node, in node order
#   2 inside   [k, p/k, d, ..]  all_gather(that, intra): every piece is here, but place by place
#   3 reorder  [p/k, k, d, ..]  the two leading dims change places: rank order; MiCS orders the chunks first
#
# Of M bytes of the whole each rank sends (1/k - 1/p) M across and (k-1)/k M inside; the adjoint too. Memory:
# besides the result, M/k and M; the adjoint: a reordered copy of M, M/k and what is received.


def hierarchical_all_gather(shard: Tensor, intra: ProcessGroup, inter: ProcessGroup, out=None) -> Tensor:
    """Every rank's shard [d, ..], in the order of rank = inter.rank()·k + intra.rank(): [p·d, ..]."""
    if out is None:
        out = shard.new_empty((intra.size() * inter.size() * shard.shape[0], *shard.shape[1:]))
    return gather_inside(all_gather(shard, inter), intra, inter, out)


def gather_inside(of_this_place: Tensor, intra: ProcessGroup, inter: ProcessGroup, out: Tensor) -> Tensor:
    """Steps 2 and 3: [p/k·d, ..], the pieces of this place, into out [p·d, ..], all in rank order."""
    place_by_place, sizes = all_gather(of_this_place, intra), {"place": intra.size(), "node": inter.size()}
    in_order = rearrange(place_by_place, "(place node row) ... -> node place row ...", **sizes)
    out.detach().view(in_order.shape).copy_(in_order)
    return out


def hierarchical_reduce_scatter(flat: Tensor, intra: ProcessGroup, inter: ProcessGroup) -> Tensor:
    """Piece inter.rank()·k + intra.rank() of the sum of everyone's flat [p·d, ..]: [d, ..]."""
    sizes = {"place": intra.size(), "node": inter.size()}
    if flat.shape[0] % math.prod(sizes.values()):
        rows = f"{flat.shape[0]} along dim 0"
        raise ValueError(f"{rows} is not a multiple of the {math.prod(sizes.values())} ranks; pad it")
    place_by_place = rearrange(flat.detach(), "(node place row) ... -> (place node row) ...", **sizes)
    return reduce_scatter(reduce_scatter(place_by_place, intra), inter)
