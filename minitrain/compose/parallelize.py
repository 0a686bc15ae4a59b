"""A Strategy and a model's config -> a Run on this rank. The only module that knows model and techniques.

Its passes, in this order:
    1 stages     the layers of this rank, built from the config and seeds by name; what is frozen
    2 tp, ep     every layer cut by heads, hidden units and words; experts that tokens travel to; the loss of
                 the logits that are left
    3 cp         attention over the ranks that hold the other tokens; slices of a sequence
      products   of blocks in few bits
    4 dropout    every mask a function of the place
    5 placements how each parameter is cut, over whom its gradient is a sum, who else holds it
    6 sync       what sums gradients and owns the optimizer: replicated, ZeRO 1 to 3, hybrid sharding; in
                 which precision gradients add up and states are kept; what the host keeps
    7 recompute  what blocks keep for their backward
    8 schedule   gradient accumulation, or a pipeline

A pass lives with its technique and takes groups; what it swaps keeps the names of parameters. Sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from minitrain.attention.dropout import Places, drop_by_place
from minitrain.compose.attention_cores import core_for, core_of_slices, data_layout
from minitrain.compose.expert_passes import ExpertGroups, expert_hooks, place_on_ranks
from minitrain.compose.offload_passes import offload
from minitrain.compose.product_passes import multiply_in
from minitrain.compose.products_by_name import PRODUCTS
from minitrain.compose.recompute_passes import recompute_in
from minitrain.compose.run import Run
from minitrain.data_parallel.hybrid import Hybrid
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.states import elements_of
from minitrain.data_parallel.sync import MakeOptimizer, Sync
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.hooks import Hooks
from minitrain.model.mixture import RouterLosses, mixtures
from minitrain.model.training.optim import sum_of_squares
from minitrain.model.training.step import accumulate
from minitrain.pipeline.halves import Halves
from minitrain.pipeline.partition import even
from minitrain.pipeline.post_validation import PostValidation
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules.slices import on_each_rank
from minitrain.pipeline.sliced_attention import look_back
from minitrain.pipeline.whole_stages import WholeStages
from minitrain.plan.strategy import Strategy
from minitrain.precision import mixed
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_device
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import numbers, place
from minitrain.systems.data_parallel.scaled import Scaled
from minitrain.systems.pipeline.bpipe_eviction import Balanced
from minitrain.tensor_parallel.model import cut_layers, sequence_sharded_params
from minitrain.tensor_parallel.sequence import local_tokens


def parallelize(
    model: GPTConfig | nn.Module,
    strategy: Strategy,
    make_optimizer: MakeOptimizer | None = None,
    *,
    seed: int = 0,
    frozen: Iterable[str] = (),
    device: torch.device | str | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum,
    schedule: Schedule | None = None,
    cuts: list[range] | None = None,
    runner: type[Runner] | None = None,
) -> Run:
    """This rank's part of training a GPT, or a module of your own (dp and ZeRO; alike on all ranks).

    `make_optimizer(params)` builds the optimizer (data_parallel/sync.py); without it nothing is updated.
    `seed` fills the parameters and draws dropout's masks; `frozen` are patterns of global names
    ("layers.0.*"). For a pipeline, `schedule` is one of your own in the place of the strategy's, `cuts` the
    layers of each stage (else as even as they can be), and `runner` a kind of Runner, for actions of your
    own.
    """
    require_device(device="cpu" if device is None else device)
    ranks, config = collectives.world().size(), model if isinstance(model, GPTConfig) else None
    if config:
        strategy.check(config, ranks)
    else:
        check_module(model, strategy, ranks)
    mesh = Mesh(**strategy.axes)
    if schedule is not None:
        check_schedule(schedule, strategy)
    elif strategy.pipelined:
        schedule = strategy.build_schedule()
    experts = ExpertGroups(strategy, mesh) if config and config.experts else None
    pairs = Halves() if strategy.hides_transfers(schedule) else None
    hooks = expert_hooks(config, strategy, mesh, experts, pairs) if experts else Hooks()
    module = build(config, strategy, mesh, schedule, cuts, seed, device, experts, hooks) if config else model
    mixed.widen(module.parameters() if config else (), strategy.policy)
    freeze(module, frozen, config)

    places, memory, in_slices, losses, played = Places(seed), None, set(), None, None
    if config:
        loss_fn, in_slices = cut_model(module, config, strategy, mesh, loss_fn)
        if experts:
            in_slices |= place_on_ranks(module, strategy, mesh, experts)
            layers = {number: stage.layers for number, stage in module.items()}
            losses = RouterLosses(layers, mesh.group("tp") if strategy.tp > 1 else None)
        multiply_in(module, strategy, mesh)
        memory = attend_over(module, strategy, mesh, schedule)
        if config.dropout or experts:
            drop_by_place(module.layers, places, **parts_of_places(strategy, mesh))
    sum_over(module, strategy, mesh, in_slices, experts)
    if schedule:
        share_stages(module, schedule, mesh)
    mixed.keep_gradients(module.parameters(), strategy.policy)
    sync = make_sync(module, strategy, mesh, make_optimizer)
    mixed.keep_states(sync.optimizer, strategy.policy)
    mixed.round_by_place(
        [(one.shard, elements_of(one)) for one in sync.shards], sync.names, numbers, strategy.policy, seed
    )
    factor, window = strategy.first_loss_scale, strategy.loss_scale_window
    scale = mixed.loss_scale(sync.optimizer, strategy.policy, factor, window)

    offload(module, sync, strategy)
    mixed.copy_in_time(module.layers if config else (), strategy.policy)
    if config:
        recompute_in(module, strategy, mesh, places, memory)
    if schedule is None:
        more = dict(router_loss=losses.collect) if losses else {}
        forward_backward = accumulate(module, loss_fn, strategy.microbatches, sync, places.at, **more)
    else:
        sync.driven = True
        settings = dict(width=config.d_model, down=mesh.twin("pp"), check=False, memory=memory, at=places.at)
        settings |= dict(length_over=strategy.tp if strategy.sequence_parallel else 1, router_losses=losses)
        settings |= dict(pairs=pairs, dtype=getattr(torch, strategy.policy.activations))
        stages, units = dict(module.items()), on_each_rank(schedule, strategy.cp)
        stays = schedule.breadth_first and isinstance(sync, Zero3)
        kind = runner or (Balanced if schedule.evicts else WholeStages if stays else Runner)
        forward_backward = played = kind(stages, units, mesh.group("pp"), loss_fn, sync, **settings)
    late = check_late(sync, mesh, played) if strategy.post_validation else None
    layout = layout_of(strategy, schedule)
    return Run(module, strategy, mesh, sync, forward_backward, loss_fn, config, played, layout, late, scale)


def check_module(module: nn.Module, strategy: Strategy, ranks: int) -> None:
    if max(strategy.pp, strategy.cp, strategy.tp, strategy.ep) > 1 or strategy.recompute != "none":
        why = "a module of your own gets dp and ZeRO, for nobody knows its layers; use these, or a GPTConfig"
        raise ValueError(f"{type(module).__name__} with {strategy}: {why}")
    if strategy.products != "plain":
        cure = "swap its linear layers for LowLinear (precision/quantized_linear.py)"
        raise ValueError(f"{type(module).__name__} with products={strategy.products!r}: {cure}")
    dtypes, wanted = {param.dtype for param in module.parameters()}, getattr(torch, strategy.policy.weights)
    if strategy.policy.copies:
        said = f"precision={strategy.precision!r} makes copies for the layers of a GPTConfig"
        raise ValueError(f"{said}, and {type(module).__name__} is none; use another precision: bfloat16")
    if strategy.policy.narrow and dtypes != {wanted}:
        said = f"precision={strategy.precision!r} is for weights in {wanted}"
        raise ValueError(f"{said}; convert the module first")
    if strategy.dp != ranks:
        raise ValueError(f"dp={strategy.dp}, but the job has {ranks} ranks; use dp={ranks}")


def check_schedule(schedule: Schedule, strategy: Strategy) -> None:
    """Of your own: it must be for the ranks, the microbatches and the slices of the strategy."""
    found = (len(schedule.ranks), schedule.microbatches // schedule.slices, schedule.slices)
    wanted = (strategy.pp, strategy.microbatches, strategy.slices)
    if found != wanted:
        said = ", ".join(f"{name}={size}" for name, size in zip(("pp", "microbatches", "slices"), found))
        ours = f"and the strategy has {', '.join(map(str, wanted))}; make both for the same"
        raise ValueError(f"{schedule.name} is for {said}, {ours}")


# ---- 1: the layers of this rank --------------------------------------------------------------------------


def build(
    config: GPTConfig, strategy: Strategy, mesh: Mesh, schedule, cuts, seed, device, experts, hooks: Hooks
) -> GPT | Stages:
    settings = dict(seed=seed, dtype=getattr(torch, strategy.policy.activations), device=device, hooks=hooks)
    if experts:
        settings["expert_part"] = experts.part
    if schedule is None:
        return GPT(config, **settings)
    cuts, stages = cuts or even(config.num_layers, schedule.stages), schedule.stages
    if len(cuts) != stages:
        cure = "give the layers of each stage"
        raise ValueError(f"{len(cuts)} cuts for the {stages} stages of {schedule.name}; {cure}")
    return Stages(config, {stage: cuts[stage] for stage in schedule.stages_of(mesh.rank("pp"))}, **settings)


def freeze(module: nn.Module, patterns: Iterable[str], config: GPTConfig | None) -> None:
    """A tied table has two names, on both ends; a pattern may be about layers of other ranks."""
    tied = {"layers.0.tokens": f"layers.{config.num_layers + 1}.out.weight"} if config and config.tied else {}
    parts = module.parts() if isinstance(module, Stages) else [{p: n for n, p in module.named_parameters()}]
    for param, name in (pair for part in parts for pair in part.items()):
        if any(fnmatchcase(one, pattern) for pattern in patterns for one in (name, tied.get(name, name))):
            param.requires_grad_(False)


# ---- 2 to 4: what is swapped -----------------------------------------------------------------------------


def cut_model(
    module: GPT | Stages, config: GPTConfig, strategy: Strategy, mesh: Mesh, loss_fn: Callable
) -> tuple[Callable, set[nn.Parameter]]:
    """The loss of what this rank has of the logits; and the parameters that see a slice of the tokens."""
    if strategy.tp == 1:
        return loss_fn, set()
    how = dict(sequence_parallel=strategy.sequence_parallel, overlap=strategy.overlap)
    how |= dict(products=PRODUCTS.get(strategy.products))
    loss_fn = cut_layers(module.layers, config.head_dim, config.vocab_size, mesh.group("tp"), **how)
    return loss_fn, sequence_sharded_params(module.layers) if strategy.sequence_parallel else set()


def attend_over(module: GPT | Stages, strategy: Strategy, mesh: Mesh, schedule: Schedule | None):
    """Attention over the ranks of cp; with slices, also over earlier ones, and what remembers their keys."""
    groups = dict(zip(strategy.context_groups, (mesh.group(axis) for axis in strategy.context_axes)))
    if schedule is not None and schedule.slices > 1:
        lengths, how = schedule.lengths or schedule.slices, {}
        if groups:
            how["attend"] = core_of_slices(strategy.core, groups, strategy.layout, lengths)
        return look_back(dict(module.items()), schedule, **how)
    if groups:
        for layer in module.layers:
            if hasattr(layer, "attention"):
                layer.attention.core = core_for(strategy.core, groups, strategy.layout)
    return None


def parts_of_places(strategy: Strategy, mesh: Mesh) -> dict:
    """Which heads and which tokens this rank has, where ranks of tp share them out."""
    if strategy.tp == 1:
        return {}
    group = mesh.group("tp")
    parts = dict(part=group.rank())
    if strategy.sequence_parallel:
        parts["local_positions"] = lambda positions: local_tokens(positions, group)
    return parts


def layout_of(strategy: Strategy, schedule: Schedule | None):
    """How the tokens of a row are laid out over the ranks of cp: slice by slice, if there are any."""
    if strategy.cp == 1:
        return None
    slices = schedule and schedule.lengths or strategy.slices
    return data_layout(strategy.core, strategy.context_groups, strategy.layout, slices)


# ---- 5: placements ---------------------------------------------------------------------------------------


def sum_over(module: nn.Module, strategy: Strategy, mesh: Mesh, in_slices: set, experts) -> None:
    """A gradient is a sum over all ranks with other tokens: dp × cp, and tp for what sees a slice of them;
    for experts, which see the tokens of all ranks of ep, over what is left beside it."""
    *outer, inner = strategy.data_axes
    levels = [(axis,) for axis in outer] + [(inner, *strategy.context_axes)]
    groups = tuple(mesh.group(*names) for names in reversed(levels))  # inside a node first
    with_tp, spread_out = groups, set()
    if strategy.sequence_parallel or experts and strategy.tp > 1:  # made on every rank, used or not: see Mesh
        with_tp = (mesh.group(*levels[-1], "tp"), *groups[1:])
    if experts and experts.group is not None:
        spread_out = {param for layer in mixtures(module.layers) for param in layer.experts.parameters()}
    for param in module.parameters():
        over = experts.summed_over if param in spread_out else with_tp if param in in_slices else groups
        place(param, summed_over=over)


def share_stages(module: Stages, schedule: Schedule, mesh: Mesh) -> None:
    """Who else has the tied table, or a stage that stands on two ranks."""
    ranks, stages, tied = range(len(schedule.ranks)), range(schedule.stages), module.config.tied
    holders = {stage: {rank for rank in ranks if stage in schedule.stages_of(rank)} for stage in stages}
    ends = holders[0] | holders[schedule.stages - 1] if tied else set()
    sets = sorted({tuple(sorted(holding)) for holding in (ends, *holders.values()) if len(holding) > 1})
    groups = {holding: mesh.part("pp", holding) for holding in sets}
    for stage, part in module.items():
        for name, param in part.named_parameters():
            at_an_end = tied and name in ("layers.0.tokens", f"{module.head}.out.weight")
            place(param, copies=groups.get(tuple(sorted(ends if at_an_end else holders[stage]))))


# ---- 6: sync ---------------------------------------------------------------------------------------------


def make_sync(
    module: nn.Module, strategy: Strategy, mesh: Mesh, make_optimizer: MakeOptimizer | None
) -> Sync:
    if strategy.hybrid:
        inside, by_node = ("intra", *strategy.context_axes), None
        if strategy.nodes > 1:
            size = strategy.node * strategy.cp
            by_node = mesh.blocks(*inside, size=size, names=("node", "nodes"))
        groups = mesh.group(*inside), mesh.group("inter")
        return Hybrid(module, *groups, make_optimizer, strategy.zero, by_node=by_node)
    rows = mesh.group(*strategy.data_axes, *strategy.context_axes)
    if strategy.policy.scaled:
        return Scaled(module, rows, make_optimizer, strategy.bucket_bytes, deal=strategy.zero == 1)
    if strategy.zero == 3:
        return Zero3(module, rows, make_optimizer)
    return (Replicated, Zero1, Zero2)[strategy.zero](module, rows, make_optimizer, strategy.bucket_bytes)


# ---- 7: how a step ends ----------------------------------------------------------------------------------


def check_late(sync: Sync, mesh: Mesh, runner: Runner) -> PostValidation:
    """Clipping that no rank waits for: the runner asks before its first backward."""
    like = torch.zeros((), dtype=torch.float64, device=runner.device)

    def squares() -> Tensor:
        return sum_of_squares([param for group in sync.param_groups for param in group["params"]], like)

    late = PostValidation(sync, math.inf, mesh.group("pp"), squares)
    runner.before_backward = late.before_backward
    return late
