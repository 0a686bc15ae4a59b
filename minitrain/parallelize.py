"""A Strategy and a model's config -> a Run on this rank: passes in one order. The only module that knows model, mesh and techniques.

    1 stages     the layers of this rank, built from the config and seeds by name; what is frozen
    2 tp         every layer cut by heads, hidden units and words; the loss of the logits that are left
    3 cp         attention over the ranks that hold the other tokens; slices of a sequence
    4 dropout    every mask a function of the place
    5 placements how each parameter is cut, over whom its gradient is a sum, who else holds it
    6 sync       what sums gradients and owns the optimizer: replicated, ZeRO 1 to 3, hybrid sharding
    7 schedule   gradient accumulation, or a pipeline

A pass lives with its technique and takes groups; what it swaps keeps the names of parameters. A new technique is one more.
Sends nothing itself. Raises ValueError in one line, before any rank waits, for what `Strategy.check` refuses and for a module of the
reader's own under more than data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.dropout import Places, drop_by_place
from minitrain.context.choices import core_for, core_of_slices, data_layout
from minitrain.data_parallel.hybrid import Hybrid
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.sync import MakeOptimizer, Sync, all_names, parts_of
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.mesh import Mesh
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.pipeline.eviction import Balanced
from minitrain.pipeline.partition import even
from minitrain.pipeline.post_validation import PostValidation
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules.slices import on_each_rank
from minitrain.pipeline.sliced_attention import look_back
from minitrain.run import Run
from minitrain.sharding import place
from minitrain.strategy import Strategy
from minitrain.tensor_parallel.model import cut_layers, seen_in_slices
from minitrain.tensor_parallel.sequence import own_time
from minitrain.training.optim import sum_of_squares
from minitrain.training.step import accumulate


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
    """This rank's part of training a GPT of that config, or a module of the reader's own (dp and ZeRO; alike on all ranks), over all ranks.

    `make_optimizer(params)` builds the optimizer (data_parallel/sync.py); without it nothing is updated. `seed` fills the parameters and
    draws dropout's masks; `frozen` are patterns of global names ("layers.0.*"). For a pipeline, `schedule` is one of the reader's own in
    the place of the strategy's, `cuts` the layers of each stage, as even as they can be otherwise, and `runner` what plays the schedule:
    a kind of Runner, for actions of the reader's own.
    """
    if isinstance(model, GPTConfig):
        strategy.check(model, collectives.world().size())
    else:
        check_module(model, strategy, collectives.world().size())
    mesh = Mesh(**strategy.axes)
    if schedule is not None:
        check_schedule(schedule, strategy)
    elif strategy.pipelined:
        schedule = strategy.build_schedule()
    if isinstance(model, GPTConfig):
        module, config = build(model, strategy, mesh, schedule, cuts, seed, device), model
    else:
        module, config = model, None
    freeze(module, frozen, config)

    places, memory = Places(seed), None
    if config:
        loss_fn = cut_model(module, config, strategy, mesh, loss_fn)
        memory = attend_over(module, strategy, mesh, schedule)
        if config.dropout:
            drop_by_place(module.layers, places, **parts_of_places(strategy, mesh))
    sum_over(module, strategy, mesh)
    if schedule:
        share_stages(module, schedule, mesh)
    sync = SYNCS[strategy.zero if not strategy.word else "word"](module, strategy, mesh, make_optimizer)

    if schedule is None:
        forward_backward, played = accumulate(module, loss_fn, strategy.microbatches, sync, places.at), None
    else:
        sync.driven = True
        kind = runner or (Balanced if schedule.evicts else Runner)
        forward_backward = played = kind(
            dict(module.items()),
            on_each_rank(schedule, strategy.cp),
            mesh.group("pp"),
            loss_fn,
            sync,
            width=config.d_model,
            down=mesh.twin("pp"),
            check=False,
            length_over=strategy.tp if strategy.sequence_parallel else 1,
            memory=memory,
            at=places.at,
        )
    late = check_late(sync, strategy, mesh, played) if strategy.post_validation else None
    return Run(
        module,
        strategy,
        mesh,
        sync,
        forward_backward,
        loss_fn,
        config=config,
        runner=played,
        layout=layout_of(strategy, schedule),
        late=late,
    )


def check_schedule(schedule: Schedule, strategy: Strategy) -> None:
    """Of the reader's own: it must be for the ranks and the microbatches of the strategy."""
    microbatches = schedule.microbatches // schedule.slices
    if (len(schedule.ranks), microbatches, schedule.slices) != (
        strategy.pp,
        strategy.microbatches,
        strategy.slices,
    ):
        raise ValueError(
            f"{schedule.name} is for pp={len(schedule.ranks)}, microbatches={microbatches}, slices={schedule.slices}, and the strategy has "
            f"{strategy.pp}, {strategy.microbatches}, {strategy.slices}; make both for the same"
        )


# ---- 1: the layers of this rank ----------------------------------------------------------------------------------------


def build(
    config: GPTConfig,
    strategy: Strategy,
    mesh: Mesh,
    schedule: Schedule | None,
    cuts: list[range] | None,
    seed: int,
    device: torch.device | str | None,
) -> GPT | Stages:
    settings = dict(seed=seed, dtype=getattr(torch, strategy.precision), device=device)
    if schedule is None:
        return GPT(config, **settings)
    cuts = cuts or even(config.num_layers, schedule.stages)
    if len(cuts) != schedule.stages:
        raise ValueError(
            f"{len(cuts)} cuts for the {schedule.stages} stages of {schedule.name}; give the layers of each stage"
        )
    return Stages(config, {stage: cuts[stage] for stage in schedule.stages_of(mesh.rank("pp"))}, **settings)


def freeze(module: nn.Module, patterns: Iterable[str], config: GPTConfig | None) -> None:
    """A parameter is frozen under any of its names, a tied table so on both ends; a pattern may be about layers of other ranks."""
    tied = {"layers.0.tokens": f"layers.{config.num_layers + 1}.out.weight"} if config and config.tied else {}
    for param, name in all_names(parts_of(module)).items():
        if any(fnmatchcase(one, pattern) for pattern in patterns for one in (name, tied.get(name, name))):
            param.requires_grad_(False)


# ---- 2 to 4: what is swapped -------------------------------------------------------------------------------------------


def cut_model(
    module: GPT | Stages, config: GPTConfig, strategy: Strategy, mesh: Mesh, loss_fn: Callable
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of what this rank has of the logits."""
    if strategy.tp == 1:
        return loss_fn
    return cut_layers(
        module.layers,
        config.head_dim,
        config.vocab_size,
        mesh.group("tp"),
        sequence_parallel=strategy.sequence_parallel,
        overlap=strategy.overlap,
    )


def attend_over(module: GPT | Stages, strategy: Strategy, mesh: Mesh, schedule: Schedule | None):
    """Attention over the ranks of cp; with slices, also over earlier ones, and what remembers their keys."""
    groups = dict(zip(strategy.context_groups, (mesh.group(axis) for axis in strategy.context_axes)))
    if schedule is not None and schedule.slices > 1:
        how = (
            dict(
                attend=core_of_slices(
                    strategy.core, groups, strategy.layout, schedule.lengths or schedule.slices
                )
            )
            if groups
            else {}
        )
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
    own = (lambda positions: own_time(positions, group)) if strategy.sequence_parallel else None
    return dict(part=group.rank()) | (dict(own=own) if own else {})


def layout_of(strategy: Strategy, schedule: Schedule | None):
    """How the tokens of a row are laid out over the ranks of cp: slice by slice, if there are any."""
    slices = schedule and schedule.lengths or strategy.slices
    return (
        data_layout(strategy.core, strategy.context_groups, strategy.layout, slices)
        if strategy.cp > 1
        else None
    )


# ---- 5: placements -----------------------------------------------------------------------------------------------------


def sum_over(module: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    """A gradient is a sum over all ranks with other tokens: dp × cp, and tp for what sees a slice of the sequence there."""
    *outer, inner = strategy.data_axes
    levels = [(axis,) for axis in outer] + [(inner, *strategy.context_axes)]
    groups = tuple(mesh.group(*names) for names in reversed(levels))  # inside a node first
    with_tp = (
        (mesh.group(*levels[-1], "tp"), *groups[1:]) if strategy.sequence_parallel else groups
    )  # on every rank, used or not: see Mesh
    in_slices = seen_in_slices(module.layers) if strategy.sequence_parallel else set()
    for param in module.parameters():
        place(param, summed_over=with_tp if param in in_slices else groups)


def share_stages(module: Stages, schedule: Schedule, mesh: Mesh) -> None:
    """Who else has the tied table, or a stage that stands on two ranks."""
    holders = {
        stage: {rank for rank in range(len(schedule.ranks)) if stage in schedule.stages_of(rank)}
        for stage in range(schedule.stages)
    }
    ends = holders[0] | holders[schedule.stages - 1] if module.config.tied else set()
    sets = sorted({tuple(sorted(ranks)) for ranks in (ends, *holders.values()) if len(ranks) > 1})
    groups = {ranks: mesh.part("pp", ranks) for ranks in sets}
    for stage, part in module.items():
        for name, param in part.named_parameters():
            tied = module.config.tied and name in ("layers.0.tokens", f"{module.head}.out.weight")
            ranks = tuple(sorted(ends if tied else holders[stage]))
            place(param, copies=groups.get(ranks))


# ---- 6: sync -----------------------------------------------------------------------------------------------------------


def _rows(strategy: Strategy, mesh: Mesh) -> ProcessGroup:
    return mesh.group(*strategy.data_axes, *strategy.context_axes)


SYNCS: dict[int | str, Callable[..., Sync]] = {
    0: lambda module, strategy, mesh, make: Replicated(
        module, _rows(strategy, mesh), make, strategy.bucket_bytes
    ),
    1: lambda module, strategy, mesh, make: Zero1(module, _rows(strategy, mesh), make, strategy.bucket_bytes),
    2: lambda module, strategy, mesh, make: Zero2(module, _rows(strategy, mesh), make, strategy.bucket_bytes),
    3: lambda module, strategy, mesh, make: Zero3(module, _rows(strategy, mesh), make),
    "word": lambda module, strategy, mesh, make: Hybrid(
        module, mesh.group("intra", *strategy.context_axes), mesh.group("inter"), make, strategy.zero
    ),
}


# ---- 7: how a step ends ------------------------------------------------------------------------------------------------


def check_late(sync: Sync, strategy: Strategy, mesh: Mesh, runner: Runner) -> PostValidation:
    """Clipping that no rank waits for: the runner asks before its first backward."""
    like = torch.zeros((), dtype=torch.float64, device=runner.device)

    def squares() -> Tensor:
        return sum_of_squares([param for group in sync.param_groups for param in group["params"]], like)

    late = PostValidation(sync, math.inf, mesh.group("pp"), squares)
    runner.before_backward = late.before_backward
    return late


def check_module(module: nn.Module, strategy: Strategy, ranks: int) -> None:
    if any(size > 1 for size in (strategy.pp, strategy.cp, strategy.tp, strategy.ep)) or strategy.recompute:
        raise ValueError(
            f"{type(module).__name__} with {strategy}: a module of your own gets data parallelism and ZeRO, for nobody knows its "
            "layers; use dp and zero, or give a GPTConfig"
        )
    if strategy.dp != ranks:
        raise ValueError(f"dp={strategy.dp}, but the job has {ranks} ranks; use dp={ranks}")
