"""The passes of `parallelize` for layers of experts: who has which of them, and how rows find them.

    dp × cp ranks   [0 1 2 3 | 4 5 6 7]     ep = 4: each block has all experts, rank i and i + 4 the same ones
                                            their gradients are sums over {i, i + 4}

Sends nothing itself.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from minitrain.model.gpt import GPT, Stages
from minitrain.model.mixture import mixtures
from minitrain.moe.dispatch import Dispatch
from minitrain.moe.parallel import cut, spread
from minitrain.pipeline.halves import Halves
from minitrain.plan.strategy import Strategy
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe.travel import choose_way
from minitrain.systems.plan.expert_placement import shadowed
from minitrain.tensor_parallel.sequence import local_tokens


class ExpertGroups:
    """ep splits dp × cp into blocks of ranks that hold all experts together; the ranks at one place of every
    block hold the same ones, and `summed_over` are these, inside a node first."""

    def __init__(self, strategy: Strategy, mesh: Mesh):
        self.group, self.levels, names = None, {}, ("ep", "edp")
        self.part, self.summed_over = (0, 1), ()
        if strategy.ep == 1:
            return
        *outer, inner = strategy.data_axes
        rows, inside = (*strategy.data_axes, *strategy.context_axes), (inner, *strategy.context_axes)
        self.group, beside = mesh.blocks(*rows, size=strategy.ep, names=names)
        self.part, self.summed_over = (self.group.rank(), strategy.ep), (beside,)
        if outer:  # two levels, of which the blocks take up the inner one first
            node = mesh.size(*inside)
            _, near = mesh.blocks(*inside, size=min(node, strategy.ep), names=names)
            self.summed_over = (near, beside if strategy.ep > node else mesh.group(*outer))
        levels = dict(names=("ep_inside", "ep_across"), of=strategy.ep)
        inside, across = mesh.blocks(*rows, size=strategy.ep_node, **levels)
        self.levels = dict(across=across, inside=inside)


def spread_experts(
    module: GPT | Stages, strategy: Strategy, mesh: Mesh, experts: ExpertGroups, pairs: Halves | None
) -> set[nn.Parameter]:
    """Experts over ep, each cut over tp; the parameters that see a slice of the tokens."""
    in_slices, sequence = set(), strategy.sequence_parallel
    rows = (*strategy.context_axes, *["tp"] * (strategy.tp > 1))
    row_group = mesh.group(*rows) if rows else None
    beside = (mesh.group("tp"),) if strategy.tp > 1 else ()
    for layer in mixtures(module.layers):
        if experts.group is not None:
            meanwhile = pairs.give_way if pairs else None
            spread(layer, experts.group, partial(Dispatch, group=experts.group, meanwhile=meanwhile))
            how = dict(what=strategy.ep_travel, chunks=strategy.ep_chunks, most=strategy.ep_shadow)
            how |= dict(beside=beside, rule=shadowed, meanwhile=meanwhile)
            choose_way(layer, experts.group, **experts.levels, **how)
        layer.row_group, layer.row_ranks = row_group, strategy.cp * (strategy.tp if sequence else 1)
        if strategy.tp > 1:
            own = partial(local_tokens, group=mesh.group("tp")) if sequence else None
            in_slices |= set(cut(layer, mesh.group("tp"), own))
    return in_slices
