"""A Strategy and a model's config -> a Run on this rank. The only module that knows model and techniques.

`parallelize` is a list of passes, each of which reads and changes one `Build`, and says which groups and
layers a technique gets. What a pass swaps keeps the names of parameters. Sends nothing.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from minitrain.attention.placed import Places, drop_by_place
from minitrain.compose.attention_cores import core_for, core_of_slices, data_layout
from minitrain.compose.passes import PRODUCTS, ExpertGroups, multiply_in, offload, recompute_in
from minitrain.compose.run import Run
from minitrain.context.layout import Layout
from minitrain.data_parallel.hybrid import Hybrid
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.states import elements_of
from minitrain.data_parallel.sync import MakeOptimizer, Sync
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.memory.pools import is_fake
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.layers import Hooks
from minitrain.model.mixture import RouterLosses, mixtures
from minitrain.model.training.step import Batch, accumulate
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Runner, RunnerHooks, WholeStages
from minitrain.pipeline.schedule import Action, Schedule
from minitrain.pipeline.schedules.one_direction import on_each_rank
from minitrain.plan.strategy import Strategy
from minitrain.precision import mixed
from minitrain.precision.mixed import LossScale
from minitrain.ranks import collectives, launch
from minitrain.ranks.checks import require_device
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import numbers, place
from minitrain.ranks.torch_private import outside_modes
from minitrain.systems.data_parallel.compressed import Compression
from minitrain.systems.data_parallel.scaled import Scaled
from minitrain.systems.pipeline.bpipe_eviction import Balanced
from minitrain.systems.pipeline.halves import Halves
from minitrain.systems.pipeline.post_validation import PostValidation
from minitrain.systems.pipeline.sliced_attention import attend, look_back
from minitrain.systems.precision.jit_copies import copy_in_time
from minitrain.tensor_parallel.model import cut_layers, sequence_sharded_params
from minitrain.tensor_parallel.sequence import local_tokens
from minitrain.tensor_parallel.vocabulary import whole_logits


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
    """This rank's part of training a GPT, or any nn.Module of your own (dp and ZeRO; alike on all ranks).
    `loss_fn(outputs, targets)` is the sum over targets, of whole logits; a step divides by how many count.
    That it is a sum is tried on a few targets, unless the loss says so itself (`sums_terms = True`).
    `make_optimizer(params)` builds the optimizer (data_parallel/sync.py); without it nothing is updated.
    `seed` fills the parameters and draws dropout's masks; `frozen` are patterns of global names
    ("layers.0.*"); a GPT is built on `device`, this rank's if None. For a pipeline, `schedule` is one of your
    own in the place of the strategy's, `cuts` the layers of each stage (else even), and `runner` a kind of
    Runner, for actions of your own."""
    settings = seed, tuple(frozen), device, loss_fn, schedule, cuts, runner
    build = Build(model, strategy, make_optimizer, *settings)
    for pass_ in (
        check,  # before any rank waits for another
        make_groups,  # the mesh, and who has all experts together
        build_layers,  # the layers of this rank, seeded by name
        freeze,
        cut_over_tp,  # heads, hidden units and words
        deal_experts,  # over ep; rows travel to them
        lambda build: multiply_in(build.module, build.strategy, build.mesh),  # in few bits
        attend_over_cp,  # and over earlier slices of a sequence
        mask_by_global_place,  # of dropout, and of documents in packed rows
        place_gradients,  # over whom each gradient is a sum
        share_stages,  # who else holds a tied table, or a stage that stands on two ranks
        sync_gradients,  # replicated, ZeRO 1 to 3 or hybrid sharding; the optimizer, precision, compression
        save_memory,  # what the host keeps, narrow copies of weights, what blocks keep for their backward
        clip_late,  # without a common stop of the stages
        run_microbatches,  # gradient accumulation, or a pipeline
    ):
        pass_(build)
    step = build.module, strategy, build.mesh, build.sync, build.forward_backward, build.loss_fn
    more = build.layout, build.late, build.scale, build.router_losses, build.places, build.seed
    return Run(*step, build.config, *more, build.compression)


@dataclass
class Build:
    """A Run in the making: what `parallelize` was given, then what its passes have made of it."""

    model: GPTConfig | nn.Module
    strategy: Strategy
    make_optimizer: MakeOptimizer | None
    seed: int
    frozen: tuple[str, ...]
    device: torch.device | str | None
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule | None  # None: gradient accumulation
    cuts: list[range] | None
    runner: type[Runner] | None

    mesh: Mesh = field(init=False)
    module: nn.Module = field(init=False)  # the layers of this rank
    sync: Sync = field(init=False)
    forward_backward: Callable[[Batch], Tensor] = field(init=False)
    experts: ExpertGroups | None = None
    router_losses: RouterLosses | None = None
    sequence_sharded_params: set[nn.Parameter] = field(default_factory=set)
    layout: Layout | None = None  # of the tokens over cp
    model_hooks: Hooks = field(default_factory=Hooks)
    runner_hooks: list[RunnerHooks] = field(default_factory=list)
    scale: LossScale | None = None
    late: PostValidation | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        self.config = self.model if isinstance(self.model, GPTConfig) else None
        self.places = Places(self.seed)
        self.dtype = getattr(torch, self.strategy.policy.activations)


def check(build: Build) -> None:
    if build.device is None:
        build.device = torch.get_default_device() if is_fake(torch.empty(0)) else launch.device()
    require_device(device=build.device)
    strategy, ranks = build.strategy, collectives.world().size()
    if build.loss_fn is not cross_entropy_sum and not getattr(build.loss_fn, "sums_terms", False):
        build.loss_fn = SumOfTerms(build.loss_fn)
    if build.config:
        strategy.check(build.config, ranks)
    else:
        check_module(build.model, strategy, ranks)
    if build.schedule is not None:
        check_schedule(build.schedule, strategy)
    elif strategy.pipelined:
        build.schedule = strategy.build_schedule()


def check_module(module: nn.Module, strategy: Strategy, ranks: int) -> None:
    policy, name, wanted = strategy.policy, type(module).__name__, getattr(torch, strategy.policy.weights)
    layers_known = strategy.products != "plain" or policy.copies or strategy.recompute != "none"
    if layers_known or max(strategy.pp, strategy.cp, strategy.tp, strategy.ep) > 1:
        why = "a module of your own gets dp and ZeRO; for products in few bits swap its layers for LowLinear"
        raise ValueError(f"{name} with {strategy}: {why}")
    if policy.narrow and {param.dtype for param in module.parameters()} != {wanted}:
        raise ValueError(f"precision={strategy.precision!r} is for weights in {wanted}; convert {name} first")
    narrow = {param.dtype for param in module.parameters()} & {torch.bfloat16, torch.float16}
    if narrow and not policy.narrow:
        what = f"{name} has weights in {narrow.pop()}, and precision={strategy.precision!r} no master copies"
        raise ValueError(f"{what}: small updates are rounded away; take precision='bfloat16', or convert it")
    if strategy.dp != ranks:
        raise ValueError(f"dp={strategy.dp}, but the job has {ranks} ranks; use dp={ranks}")


def check_same_everywhere(module: nn.Module) -> None:
    """All ranks begin with the same numbers. Sends 8 bytes a tensor, of digests, once."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    fake, digests = any(is_fake(value) for value in named.values()), [0] * len(named)
    if not fake:
        with outside_modes():  # no line in an account
            numbers = [value.detach().cpu().flatten().view(torch.uint8).numpy() for value in named.values()]
            digests = [int.from_bytes(hashlib.blake2b(x, digest_size=7).digest()) for x in numbers]
    device = next(iter(named.values())).device
    seen = collectives.all_gather(torch.tensor([digests], device=device), collectives.world())
    rows = [] if fake else seen.tolist()
    for rank, row in enumerate(rows):
        if other := [name for name, here, there in zip(named, row, rows[0]) if here != there]:
            cure = "seed ranks alike, or call broadcast_parameters(module, group) before"
            raise ValueError(f"{other[0]} of rank {rank} differs from that of rank 0: {cure}")


def check_schedule(schedule: Schedule, strategy: Strategy) -> None:
    sizes = (len(schedule.ranks), schedule.microbatches // schedule.slices, schedule.slices)
    wanted = (strategy.pp, strategy.microbatches, strategy.slices)
    if sizes != wanted:
        what = "pp={}, microbatches={}, slices={}".format(*sizes)
        raise ValueError(f"{schedule.name} is for {what}, and the strategy has {', '.join(map(str, wanted))}")


def check_cuts(cuts: list[range], num_layers: int, schedule: Schedule) -> None:
    """Every layer once, in order, from the embedding (0) to the head (num_layers + 1); no stage is empty."""
    if len(cuts) != schedule.stages:
        raise ValueError(f"{len(cuts)} cuts for the {schedule.stages} stages of {schedule.name}")
    if [layer for cut in cuts for layer in cut] != list(range(num_layers + 2)) or not all(map(len, cuts)):
        layers = f"layers 0 (embedding) to {num_layers + 1} (head)"
        raise ValueError(f"cuts {cuts}: give each stage some of {layers}, each layer once, in order")


def make_groups(build: Build) -> None:
    build.mesh = Mesh(**build.strategy.axes)
    if not (build.config and build.config.experts):
        return
    build.experts = ExpertGroups(build.strategy, build.mesh)
    pairs = [Halves()] if build.strategy.hides_transfers(build.schedule) else []
    build.runner_hooks += pairs
    build.model_hooks = build.experts.hooks(build.config, pairs[0] if pairs else None)


def build_layers(build: Build) -> None:
    config, schedule, cuts = build.config, build.schedule, build.cuts
    if config is None:
        build.module = build.model
        check_same_everywhere(build.module)
        return
    settings = dict(seed=build.seed, dtype=build.dtype, device=build.device, hooks=build.model_hooks)
    settings["expert_part"] = build.experts.part if build.experts else (0, 1)
    if schedule is None:
        build.module = GPT(config, **settings)
    else:
        cuts = cuts or even(config.num_layers, schedule.stages)
        check_cuts(cuts, config.num_layers, schedule)
        stages = schedule.stages_of(build.mesh.rank("pp"))
        build.module = Stages(config, {stage: cuts[stage] for stage in stages}, **settings)
    mixed.widen(build.module.parameters(), build.strategy.policy)


def freeze(build: Build) -> None:
    """A tied table has two names, on both ends; a pattern may be about layers of other ranks."""
    config, module, tied = build.config, build.module, {}
    if not build.frozen:
        return
    parameter_names(build.model, build.frozen)
    if config and config.tied:
        tied["layers.0.tokens"] = f"layers.{config.num_layers + 1}.out.weight"
    parts = module.parts() if isinstance(module, Stages) else [{p: n for n, p in module.named_parameters()}]
    for param, name in (pair for part in parts for pair in part.items()):
        names = {name, tied.get(name, name)}
        if any(fnmatchcase(one, pattern) for pattern in build.frozen for one in names):
            param.requires_grad_(False)


def parameter_names(model: GPTConfig | nn.Module, frozen: Iterable[str]) -> list[str]:
    """A tied table under both of its names. ValueError for a pattern that matches none."""
    everywhere = GPT(model, device="meta") if isinstance(model, GPTConfig) else model
    names = [name for name, _ in everywhere.named_parameters(remove_duplicate=False)]
    if idle := [pattern for pattern in frozen if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ValueError(f"frozen={idle[0]!r} matches no parameter; there are {names[0]} to {names[-1]}")
    return names


class SumOfTerms:
    """A loss of the reader's own; the first time it is asked whether it is a sum: of two equal rows, or of a
    row twice as long, twice that of one. A mean is not, and would be divided again."""

    def __init__(self, loss_fn: Callable):
        self.loss_fn, self.asked = loss_fn, False

    def __call__(self, outputs, targets) -> Tensor:
        tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if tensors and not (self.asked or is_fake(outputs)):
            with outside_modes(), torch.enable_grad():
                self.ask(outputs.detach()[:1], targets[:1])
        return self.loss_fn(outputs, targets)

    def ask(self, outputs: Tensor, targets: Tensor) -> None:
        for dim in range(min(outputs.dim(), targets.dim(), 2)):
            outputs = outputs.requires_grad_()
            one = self.loss_fn(outputs, targets)
            two = self.loss_fn(torch.cat((outputs, outputs), dim), torch.cat((targets, targets), dim))
            slopes = torch.autograd.grad(one, outputs, allow_unused=True)[0] if one.requires_grad else None
            if slopes is None or not slopes.any():  # of targets that do not count
                return
            if torch.allclose(two, one, rtol=1e-4):
                raise ValueError("loss_fn is a mean: twice the targets give the same; return the sum")
        self.asked = True


def cut_over_tp(build: Build) -> None:
    """And the loss: ours of the logits left on this rank, any other of whole ones."""
    strategy, config = build.strategy, build.config
    if strategy.tp == 1:
        return
    layers, group, products = build.module.layers, build.mesh.group("tp"), PRODUCTS.get(strategy.products)
    how = dict(sequence_parallel=strategy.sequence_parallel, overlap=strategy.overlap, products=products)
    loss_of_cut_logits = cut_layers(layers, config.head_dim, config.vocab_size, group, **how)
    if build.loss_fn is cross_entropy_sum:
        build.loss_fn = loss_of_cut_logits
    else:
        whole, loss_fn = partial(whole_logits, group=group, vocab_size=config.vocab_size), build.loss_fn
        build.loss_fn = lambda logits, targets: loss_fn(whole(logits), targets)
    if strategy.sequence_parallel:
        build.sequence_sharded_params |= sequence_sharded_params(layers)


def deal_experts(build: Build) -> None:
    if build.experts:
        build.sequence_sharded_params |= build.experts.place(build.module)
        layers = {number: stage.layers for number, stage in build.module.items()}
        build.router_losses = RouterLosses(layers, build.experts.tp)


def attend_over_cp(build: Build) -> None:
    strategy, schedule = build.strategy, build.schedule
    slices = schedule and schedule.lengths or strategy.slices
    groups = dict(zip(strategy.context_groups, map(build.mesh.group, strategy.context_axes)))
    if groups:
        build.layout = data_layout(strategy.core, strategy.context_groups, strategy.layout, slices)
    if schedule and schedule.slices > 1:
        core = core_of_slices(strategy.core, groups, strategy.layout, slices) if groups else attend
        build.runner_hooks.append(look_back(dict(build.module.items()), schedule, core))
    elif groups:
        for layer in build.module.layers:
            if hasattr(layer, "attention"):
                layer.attention.core = core_for(strategy.core, groups, strategy.layout)


def mask_by_global_place(build: Build) -> None:
    if not build.config:
        return
    build.model_hooks.in_document = build.places.in_document
    shard = {}
    if build.strategy.tp > 1:
        group = build.mesh.group("tp")
        shard["part"] = group.rank()
        if build.strategy.sequence_parallel:
            shard["local_positions"] = partial(local_tokens, group=group)
    drop_by_place(build.module.layers, build.places, **shard)


def place_gradients(build: Build) -> None:
    """A gradient is a sum over all ranks with other tokens: dp × cp, and tp for what sees a slice of them;
    for experts, which see the tokens of all ranks of ep, over the other blocks of experts."""
    strategy, mesh, experts = build.strategy, build.mesh, build.experts
    *outer, inner = strategy.data_axes
    levels = [(axis,) for axis in outer] + [(inner, *strategy.context_axes)]
    groups = tuple(mesh.group(*names) for names in reversed(levels))  # inside a node first
    with_tp, dealt = groups, set()
    if strategy.sequence_parallel or experts and strategy.tp > 1:  # made on every rank, used or not: see Mesh
        with_tp = (mesh.group(*levels[-1], "tp"), *groups[1:])
    if experts and experts.group is not None:
        dealt = {param for layer in mixtures(build.module.layers) for param in layer.experts.parameters()}
    for param in build.module.parameters():
        dense = with_tp if param in build.sequence_sharded_params else groups
        place(param, summed_over=experts.summed_over if param in dealt else dense)


def share_stages(build: Build) -> None:
    module, schedule, mesh = build.module, build.schedule, build.mesh
    if schedule is None:
        return
    ranks, stages, tied = range(len(schedule.ranks)), range(schedule.stages), build.config.tied
    holders = {stage: {rank for rank in ranks if stage in schedule.stages_of(rank)} for stage in stages}
    ends = holders[0] | holders[schedule.stages - 1] if tied else set()
    sets = sorted({tuple(sorted(holding)) for holding in (ends, *holders.values()) if len(holding) > 1})
    groups = {holding: mesh.part("pp", holding) for holding in sets}
    for stage, part in module.items():
        for name, param in part.named_parameters():
            at_an_end = tied and name in ("layers.0.tokens", f"{module.head}.out.weight")
            place(param, copies=groups.get(tuple(sorted(ends if at_an_end else holders[stage]))))


def sync_gradients(build: Build) -> None:
    strategy, mesh, policy = build.strategy, build.mesh, build.strategy.policy
    mixed.keep_gradients(build.module.parameters(), policy)
    if strategy.hybrid:  # sharded inside a node
        inside, names, by_node = ("intra", *strategy.context_axes), ("node", "nodes"), None
        if strategy.nodes > 1:
            by_node = mesh.blocks(*inside, size=strategy.node * strategy.cp, names=names)
        given = build.module, mesh.group(*inside), mesh.group("inter"), build.make_optimizer
        build.sync = Hybrid(*given, strategy.zero, by_node=by_node)
    else:
        rows = mesh.group(*strategy.data_axes, *strategy.context_axes)
        given = build.module, rows, build.make_optimizer
        if policy.scaled:
            build.sync = Scaled(*given, strategy.bucket_bytes, deal=strategy.zero == 1)
        else:  # what is compressed adds up first
            late = dict(accumulate="keep") if strategy.compress != "none" and strategy.zero in (2, 3) else {}
            more = (strategy.bucket_bytes,) if strategy.zero < 3 else ()
            build.sync = (Replicated, Zero1, Zero2, Zero3)[strategy.zero](*given, *more, **late)
    optimizer = build.sync.optimizer
    mixed.keep_states(optimizer, policy)
    shards = [(one.shard, elements_of(one)) for one in build.sync.shards]
    mixed.round_by_place(shards, build.sync.names, numbers, policy, build.seed)
    factor, window = strategy.first_loss_scale, strategy.loss_scale_window
    build.scale = mixed.loss_scale(optimizer, policy, factor, window)
    if strategy.compress != "none":
        build.compression = Compression(build.sync, strategy.compress, build.scale)


def save_memory(build: Build) -> None:
    offload(build.module, build.sync, build.strategy)
    copy_in_time(build.module.layers if build.config else (), build.strategy.policy)
    recompute_in(build.module, build.strategy, build.mesh, build.places)


def clip_late(build: Build) -> None:
    if not build.strategy.post_validation:
        return
    build.late = PostValidation(build.sync, math.inf, build.mesh.group("pp"))
    build.runner_hooks.append(build.late)


def run_microbatches(build: Build) -> None:
    strategy, schedule, sync, losses = build.strategy, build.schedule, build.sync, build.router_losses
    if schedule is None:
        given = build.module, build.loss_fn, strategy.microbatches, sync, build.places.at
        build.forward_backward = accumulate(*given, losses.collect) if losses else accumulate(*given)
        return
    sync.driven = True
    build.runner_hooks.append(ModelHooks(build.places, losses))
    if schedule.breadth_first and isinstance(sync, Zero3):
        build.runner_hooks.append(WholeStages(schedule, build.mesh.rank("pp")))
    kind = build.runner or (Balanced if schedule.evicts else Runner)
    stages, lists = dict(build.module.items()), on_each_rank(schedule, strategy.cp)
    form = dict(width=build.config.d_model, dtype=build.dtype, down=build.mesh.twin("pp"))
    form["sequence_shards"] = strategy.tp if strategy.sequence_parallel else 1
    given = stages, lists, build.mesh.group("pp"), build.loss_fn, sync
    build.forward_backward = kind(*given, **form, hooks=build.runner_hooks)


class ModelHooks(RunnerHooks):
    """Which rows of the global batch masks are drawn for; the losses that routers add."""

    def __init__(self, places: Places, router_losses: RouterLosses | None):
        self.places, self.router_losses = places, router_losses

    def begin(self, runner: Runner) -> None:
        if self.router_losses:
            self.router_losses.forget()

    def around(self, runner: Runner, action: Action) -> AbstractContextManager:
        slices = runner.schedule.slices
        *before, here = (len(tokens) for tokens, *_ in runner.units[: action.microbatch + 1 : slices])
        batch, row = runner.batch, sum(before)
        self.places.at(batch.step, batch.first_row + row, batch.documents_of(row, here))
        return nullcontext()

    def extra_loss(self, stage: int) -> Tensor | None:
        return self.router_losses.collect(stage) if self.router_losses else None
