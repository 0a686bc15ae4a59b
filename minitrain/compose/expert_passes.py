"""The passes of `parallelize` for layers of experts: who has which of them, and how rows find them.

    dp × cp ranks   [0 1 2 3 | 4 5 6 7]     ep = 4: each block has all experts, rank i and i + 4 the same ones
                                            their gradients are sums over {i, i + 4}

Sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from minitrain.model.config import GATED, GPTConfig
from minitrain.model.gpt import GPT, Stages
from minitrain.model.hooks import Hooks
from minitrain.model.mixture import mixtures
from minitrain.moe.dispatch import AllToAll
from minitrain.moe.parallel import CutExperts, Tokens, place_experts
from minitrain.moe.router import Routing
from minitrain.pipeline.halves import Halves
from minitrain.plan.strategy import Strategy
from minitrain.ranks.mesh import Mesh
from minitrain.systems.moe.overlapped_experts import by_capacity
from minitrain.systems.moe.travel import Table, experts_are_cheaper, pull, shadow, table_of
from minitrain.systems.moe.two_level import TwoLevels
from minitrain.systems.plan.expert_placement import shadowed


class ExpertGroups:
    """ep splits dp × cp into blocks of ranks that hold all experts together; the ranks at one place of every
    block hold the same ones, and `summed_over` are these, inside a node first."""

    def __init__(self, strategy: Strategy, mesh: Mesh):
        self.group, names = None, ("ep", "edp")
        self.part, self.summed_over = (0, 1), ()
        if strategy.ep == 1:
            return
        *outer, inner = strategy.data_axes
        rows, node = (*strategy.data_axes, *strategy.context_axes), (inner, *strategy.context_axes)
        self.group, replicas = mesh.blocks(*rows, size=strategy.ep, names=names)
        self.part, self.summed_over = (self.group.rank(), strategy.ep), (replicas,)
        if outer:  # two levels, of which the blocks take up the inner one first
            size = mesh.size(*node)
            _, near = mesh.blocks(*node, size=min(size, strategy.ep), names=names)
            self.summed_over = (near, replicas if strategy.ep > size else mesh.group(*outer))
        names = ("ep_inside", "ep_across")
        self.inside, self.across = mesh.blocks(*rows, size=strategy.ep_node, names=names, of=strategy.ep)


def expert_hooks(
    config: GPTConfig, strategy: Strategy, mesh: Mesh, groups: ExpertGroups, pairs: Halves | None
) -> Hooks:
    """How tokens and experts meet: the one place that says what is wrapped in what."""
    axes = list(strategy.context_axes)
    if strategy.tp > 1:
        axes.append("tp")
    tokens = Tokens(
        tp_group=mesh.group("tp") if strategy.tp > 1 else None,
        sequence_parallel=strategy.sequence_parallel,
        row_group=mesh.group(*axes) if axes else None,
        row_ranks=strategy.cp * strategy.tp if strategy.sequence_parallel else strategy.cp,
    )
    return Hooks(tokens=tokens, experts=travel(config, strategy, mesh, groups, pairs))


def travel(
    config: GPTConfig, strategy: Strategy, mesh: Mesh, groups: ExpertGroups, pairs: Halves | None
) -> Callable:
    """shadow(pull(rows that travel)), each as far as the strategy asks for it."""
    if groups.group is None:
        return AllToAll()
    meanwhile = pairs.yield_turn if pairs else None
    shared_by = (mesh.group("tp"),) if strategy.tp > 1 else ()
    table = partial(table_of, group=groups.group, shared_by=shared_by)
    width, gated = config.expert_width, config.activation in GATED

    def pays(routing: Routing, training: bool) -> bool:
        return experts_are_cheaper(table(routing), width, gated=gated, backward=training)

    def rule(rows: Table) -> Sequence[int]:
        return shadowed(rows, config.d_model, width, 2 + gated)

    if strategy.ep_chunks > 1:
        group, chunks = groups.group, strategy.ep_chunks
        hook = lambda x, routing, experts: by_capacity(x, routing, group, experts, chunks=chunks)
    elif groups.inside.size() > 1:
        hook = TwoLevels(groups.across, groups.inside, meanwhile)
    else:
        hook = AllToAll(groups.group, meanwhile)
    if strategy.ep_travel != "tokens":
        always = strategy.ep_travel == "experts"
        hook = partial(
            pull, hook=hook, across=groups.across, inside=groups.inside, pays=None if always else pays
        )
    if strategy.ep_shadow:
        hook = partial(shadow, hook=hook, group=groups.group, table=table, rule=rule, most=strategy.ep_shadow)
    return hook


def place_on_ranks(
    module: GPT | Stages, strategy: Strategy, mesh: Mesh, groups: ExpertGroups
) -> set[nn.Parameter]:
    """Experts over ep, each cut over tp; the parameters that see a slice of the tokens."""
    sliced = set()
    for layer in mixtures(module.layers):
        if groups.group is not None:
            place_experts(layer.experts, groups.group)
        if strategy.tp > 1:
            layer.experts = CutExperts(layer.experts, mesh.group("tp"))
            sliced |= set(layer.router.parameters())
    return sliced
