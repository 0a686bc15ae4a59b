"""Put the techniques together: the only module that knows the model, the mesh and the techniques. One function, one order.

    model (a list of layers)  +  mesh (dp=2, cp=2, tp=2)   ->   what a training step needs: model, loss, reducer, optimizer, groups

The axes are `dp`, or `inter` (nodes) and `intra` (places in a node) for hybrid sharding, then `cp`, then `tp`, innermost. Tensor
parallelism cuts the model first, context parallelism gives its attention another core, and the data axes look at the parameters that
are left: their gradients are summed over all ranks with different tokens, dp × cp. Ranks of a `cp` group take the same rows and
`lay_out` gives each its tokens of them; those of a `tp` group take the same tokens. With a schedule the model is this rank's stages, and
runs as a pipeline over the axis `pp`, whose ranks take the same rows too.
Dropout on ranks of `cp` is by position (context/dropout.py): masks of scores and of activations are functions of a seed and of where
a token is, so that they differ between ranks and cp ranks drop what one would. The seed is drawn anew at each call, as torch does,
by the first of the ranks with the same rows (`cp` and `tp`) from torch's own generator, and broadcast: 8 bytes a call. Other rows and
other stages have other masks even where all generators are alike. Without `cp`, tensor_parallel/random.py has the masks.

Sends nothing itself. Raises ValueError for an axis of more than one rank that no technique here takes, for an unknown way of
sharding, where sharding is asked for without the function that builds the optimizer over the shards, and for what cannot be
cut: sizes that do not divide, latent attention under tp, ALiBi under cp, dropout of slices under cp, ZeRO under tp.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.context import layout as layouts
from minitrain.context.dropout import drop_tokens, seeded
from minitrain.context.layout import Layout, zigzag
from minitrain.context.ring import ring_attention
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.flat import MakeOptimizer, Shards
from minitrain.data_parallel.hybrid import WORDS, Hybrid
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.layers import Dropout, LatentAttention
from minitrain.mesh import Mesh
from minitrain.model import Block, Embedding, Head, Stages, cross_entropy_sum, lookup
from minitrain.pipeline.bpipe import Balanced
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.shared import Copies, SharedGradients
from minitrain.pipeline.sliced_attention import SlicedAttention, SliceMemory
from minitrain.tensor_parallel import linear, overlap as chunked, ring_overlap, sequence, vocabulary
from minitrain.tensor_parallel.block import SharedHead, cut_attention, cut_mlp
from minitrain.tensor_parallel.random import RandomStates
from minitrain.train import Batch, accumulate, valid_tokens

# (sequence_parallel, overlap) -> how activations get to the matrices and from them. The ring takes dW whole, which is faster.
WAYS = {(False, False): (linear.column, linear.row), (True, False): (sequence.column, sequence.row),
        (False, True): (chunked.column, chunked.row),
        (True, True): tuple(partial(way, dw_by_slice=False) for way in (ring_overlap.column, ring_overlap.row))}


@dataclass(frozen=True)
class Parallel:
    """What `train_step` runs: the model on this rank, the reducer of its gradients, the group whose ranks take different rows, the
    optimizer, if the function that builds it was given, the loss of the logits that this rank computes, the group whose ranks hold
    different tokens (counts of tokens are summed over it), and the one over which the ranks' losses are the loss: with pipelines it has
    the other stages too."""

    model: nn.Module
    reducer: GradReducer | Shards | Reducers
    data_group: ProcessGroup
    optimizer: torch.optim.Optimizer | Shards | None
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    token_group: ProcessGroup
    loss_group: ProcessGroup
    context: tuple[Layout, ProcessGroup] | None = None
    pipeline: Runner | None = None

    def forward_backward(self, num_microbatches: int) -> Callable[[Batch], Tensor]:
        """For train_step: gradient accumulation, or the pipeline, whose schedule has so many microbatches."""
        if self.pipeline is None:
            return accumulate(self.model, self.loss_fn, num_microbatches, self.reducer)
        if (planned := self.pipeline.schedule.microbatches // self.pipeline.schedule.slices) != num_microbatches:
            raise ValueError(f"num_microbatches={num_microbatches}, but {self.pipeline.schedule.name} has {planned}; make the schedule for as many")
        return self.pipeline

    def lay_out(self, tokens: Tensor, targets: Tensor) -> Batch:
        """This rank's tokens of its rows `[B, T]`, with their positions and the number of targets that count on all ranks."""
        positions = None
        if self.context:
            layout, group = self.context
            positions = layouts.positions(layout, group, tokens.size(1), tokens.device)
            tokens, targets = (layouts.split(x, layout, group) for x in (tokens, targets))
        return Batch(tokens, targets, valid_tokens(targets, self.token_group), positions)


class Reducers:
    """Several reducers as one: parameters whose gradients are summed over different groups."""

    def __init__(self, *reducers: GradReducer):
        self.reducers = reducers

    @property
    def enabled(self) -> bool:
        return all(reducer.enabled for reducer in self.reducers)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for reducer in self.reducers:
            reducer.enabled = value

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        for reducer in self.reducers:
            reducer.ready(params)

    def finish(self) -> None:
        for reducer in self.reducers:
            reducer.finish()


def parallelize(model: nn.Module, mesh: Mesh, *, bucket_bytes: int = 25_000_000, zero: int | str = 0,
                make_optimizer: MakeOptimizer | None = None, sequence_parallel: bool = False, overlap: bool = False,
                core: Callable = ring_attention, layout: Layout = zigzag, dropout_seed: int = 0,
                schedule: Schedule | None = None) -> Parallel:
    """Cut `model` over the mesh's `tp` and `cp` axes, if it has them (it must be a GPT then), and attach data parallelism.

    With a `schedule` the model is `Stages`, those of `schedule.stages_of(mesh.rank("pp"))`, and runs as a pipeline over the axis `pp`.

    `zero` is the stage, 1, 2 or 3, over the mesh's `dp` axis, or a word of hybrid.py, "III" say, over `inter` and `intra`.
    `sequence_parallel` cuts the activations between the matrices too, `overlap` hides what is sent behind the products;
    `core(q, k, v, group=, layout=)` is the attention over the ranks of `cp`, whose tokens are laid out by `layout`; `dropout_seed`
    starts the streams of random numbers of the ranks of `tp`, if there is no `cp`.
    """
    if zero not in (0, 1, 2, 3, *WORDS):
        raise ValueError(f"zero={zero!r}; use 0 (no sharding), a stage 1, 2 or 3, or a word of hybrid sharding: {', '.join(WORDS)}")
    if zero and make_optimizer is None:
        raise ValueError(f"zero={zero!r} needs make_optimizer=lambda shards: AdamW(shards, lr=...): an optimizer over whole parameters "
                         "would hold what sharding is to save")
    rows = ("inter", "intra") if isinstance(zero, str) else ("dp",)
    axes = rows if isinstance(zero, str) or "cp" not in mesh.shape else (*rows, "cp")
    unknown = [axis for axis, size in mesh.shape.items() if axis not in (*axes, "tp", "pp") and size > 1]
    if unknown:
        raise ValueError(f"no technique takes the axis {unknown[0]!r} of size {mesh.shape[unknown[0]]}; use {', '.join(rows)}, pp, cp, tp")
    if (schedule is not None) != isinstance(model, Stages) or (schedule is None and mesh.shape.get("pp", 1) > 1):
        raise ValueError("a pipeline needs an axis pp, schedule=one_f_one_b(pp, m) and for a model Stages(config, {stage: layers}); "
                         "without one give none of them")
    if schedule and zero:
        raise ValueError(f"zero={zero!r} with a pipeline: a stage's gradients are complete before the step ends, which sharding does not "
                         "know yet; use zero=0")
    if zero and mesh.shape.get("tp", 1) > 1:
        raise ValueError(f"zero={zero!r} with tp={mesh.shape['tp']}: sharding of cut parameters is not built yet; use zero=0 with tp, "
                         "or tp=1")
    if (sequence_parallel or overlap) and "tp" not in mesh.shape:
        raise ValueError(f"{'sequence_parallel' if sequence_parallel else 'overlap'}=True needs an axis tp; the mesh has {', '.join(mesh.shape)}")
    for axis in (*axes, "pp") if schedule else axes:
        if axis not in mesh.shape:
            raise ValueError(f"the mesh has no axis {axis}: give it one, of size 1 if need be, Mesh({axis}=1, "
                             f"{', '.join(f'{name}={size}' for name, size in mesh.shape.items())})")
    group, loss_fn = mesh.group(*axes), cross_entropy_sum
    if "tp" in mesh.shape:
        loss_fn = cut_over_tp(model, mesh.group("tp"), sequence_parallel, overlap, dropout_seed * group.size() + group.rank())
    if "cp" in axes:
        for layer in model.layers:
            if isinstance(layer, Block):
                layer.attention.core = partial(core, group=mesh.group("cp"), layout=layout)
        if model.config.dropout:
            if schedule and schedule.slices > 1:
                raise ValueError(f"dropout={model.config.dropout} under cp with {schedule.slices} slices of a sequence in the pipeline: masks "
                                 "are by position, which a slice does not know; use slices=1, or dropout=0")
            drop_by_position(model, mesh, (*rows, "pp") if schedule else rows, layout, sequence_parallel)
    reducer, optimizer = reduce_over(group, model, mesh, axes, bucket_bytes, zero, make_optimizer, sequence_parallel)
    context = (layout, mesh.group("cp")) if "cp" in axes else None
    if schedule is None:
        return Parallel(model, reducer, mesh.group(*rows), optimizer, loss_fn, group, group, context)
    reducer, runner = run_as_pipeline(model, schedule, mesh, reducer, loss_fn, sequence_parallel)
    return Parallel(model, reducer, mesh.group(*rows), optimizer, loss_fn, group, mesh.group(*axes, "pp"), context, runner)


def run_as_pipeline(model: Stages, schedule: Schedule, mesh: Mesh, reducer, loss_fn: Callable, sequence_parallel: bool) -> tuple[Reducers, Runner]:
    """The reducer that also adds what stands on several ranks of `pp`, and the interpreter of the schedule."""
    group, stages = mesh.group("pp"), dict(model.items())
    copies = [Copies(ranks, params) for ranks, params in shared_params(stages, schedule, model.config.tied)]
    for param in model.parameters():
        param.pipeline = group
    for ranks, params in copies:
        for same in params:
            for param in same[1:] if ranks[0] == group.rank() else same:
                param.copy = True
    reducer = Reducers(reducer, SharedGradients((held for held in copies if len(held.ranks) > 1 or any(len(same) > 1 for same in held.params)), group))
    cut_length = mesh.shape["tp"] if sequence_parallel else 1
    memory = look_back(stages, schedule, mesh) if schedule.slices > 1 else None
    run = Balanced if schedule.evicts else Runner
    return reducer, run(stages, schedule, group, loss_fn, reducer, width=model.config.d_model, length_over=cut_length,
                        down=mesh.twin("pp"), check=mesh.shape.get("tp", 1) == mesh.shape.get("cp", 1) == 1, memory=memory)


def look_back(stages: dict[int, nn.Module], schedule: Schedule, mesh: Mesh) -> SliceMemory:
    """Gives attention cores that see the keys of earlier slices, in place."""
    if mesh.shape.get("cp", 1) > 1:
        raise ValueError(f"{schedule.name} on cp={mesh.shape['cp']}: slices of a sequence that is cut over ranks are "
                         "not built; use cp=1 or no slices")
    cores = {}
    for number, stage in stages.items():
        blocks = [layer for layer in stage.layers if isinstance(layer, Block)]
        if any(block.config.positions == "alibi" for block in blocks):
            raise ValueError(f"{schedule.name} with ALiBi: its bias is about one slice's keys; use positions='rope', or a "
                             "schedule without slices")
        cores[number] = [SlicedAttention(schedule.slices) for _ in blocks]
        for block, core in zip(blocks, cores[number]):
            block.attention.core = core
    return SliceMemory(cores)


def shared_params(stages: dict[int, nn.Module], schedule: Schedule, tied: bool) -> list[tuple[tuple[int, ...], list[list[nn.Parameter]]]]:
    """What this rank holds of parameters that stand more than once: (the ranks that have it, for each parameter its copies here)."""
    holders = {number: {rank for rank in range(len(schedule.ranks)) if number in schedule.stages_of(rank)} for number in range(schedule.stages)}
    last, shared = schedule.stages - 1, []
    tables = []
    if tied and last:
        tables = [stages[number].layers[at].get_parameter(name) for number, at, name in ((0, 0, "tokens"), (last, -1, "out.weight")) if number in stages]
        if tables:
            shared.append((tuple(sorted(holders[0] | holders[last])), [tables]))
    for number, stage in stages.items():
        if len(holders[number]) > 1:
            shared.append((tuple(sorted(holders[number])), [[param] for param in stage.parameters() if not any(param is table for table in tables)]))
    return shared


def reduce_over(group: ProcessGroup, model: nn.Module, mesh: Mesh, axes: tuple[str, ...], bucket_bytes: int, zero: int | str,
                make_optimizer: MakeOptimizer | None, sequence_parallel: bool) -> tuple:
    """(what sums the gradients, the optimizer) over the ranks with different tokens."""
    if zero:
        if isinstance(zero, str):
            sharded = Hybrid(model, mesh.group("intra"), mesh.group("inter"), make_optimizer, zero)
        elif zero == 3:
            sharded = Zero3(model, group, make_optimizer)
        else:
            sharded = (Zero1 if zero == 1 else Zero2)(model, group, make_optimizer, bucket_bytes)
        return sharded, sharded
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad]) if make_optimizer else None
    if not sequence_parallel:
        return GradReducer(model.parameters(), group, bucket_bytes), optimizer
    sliced = params_of_slices(model)       # they saw one slice of the sequence: theirs are summed over tp as well
    summed = {group: [param for param in model.parameters() if param not in sliced],
              mesh.group(*axes, "tp"): [param for param in model.parameters() if param in sliced]}
    return Reducers(*(GradReducer(params, over, bucket_bytes) for over, params in summed.items()
                      if any(param.requires_grad for param in params))), optimizer


def cut_over_tp(model: nn.Module, group: ProcessGroup, sequence_parallel: bool, overlap: bool, seed: int) -> Callable:
    """Cut every layer of a GPT, or of a slice of one, in place; returns the loss of the logits that are left on this rank."""
    column, row = WAYS[sequence_parallel, overlap]
    states = RandomStates(seed, group, next(model.parameters()).device)
    leave = sequence.scatter_time if sequence_parallel else collectives.reduce_from
    layers = {type(layer): layer for layer in model.layers}
    tied = Embedding in layers and Head in layers and layers[Head].out.weight is layers[Embedding].tokens
    for layer in model.layers:
        if isinstance(layer, Embedding):
            layer.tokens = vocabulary.cut_table(layer.tokens, group)
            layer.token_rows = partial(vocabulary.lookup, group=group, leave=leave)
            if sequence_parallel:
                layer.position_rows = lambda table, positions, *names: lookup(table, sequence.own_time(positions, group), *names)
        elif isinstance(layer, Block):
            if isinstance(layer.attention, LatentAttention):
                raise ValueError("tensor parallelism does not cut latent attention (kv_latent); use multi-head or grouped-query attention")
            cut_attention(layer.attention, model.config.head_dim, group, column, row)
            cut_mlp(layer.mlp, group, column, row)
            if model.config.dropout:
                layer.attention.core = states.different(layer.attention.core)
        elif isinstance(layer, Head):
            vocabulary.check_size(layer.out.out_features, group)
            layer.out = linear.ColumnLinear(layer.out, group, column)
            if tied:
                layer.out.weight = layers[Embedding].tokens
        for module in layer.modules() if model.config.dropout else ():
            if isinstance(module, Dropout):
                module.forward = (states.different if sequence_parallel else states.same)(module.forward)
    return partial(vocabulary.cross_entropy_sum, group=group)


def drop_by_position(model: nn.Module, mesh: Mesh, others: tuple[str, ...], layout: Layout, sequence_parallel: bool) -> None:
    """Every dropout of a GPT whose tokens are cut over `cp`, and perhaps matrices over `tp`: the masks of one process, in place.
    `others`: the axes whose ranks have other rows or other layers."""
    cp, tp = mesh.group("cp"), mesh.group("tp") if "tp" in mesh.shape else None
    parts, part = (tp.size(), tp.rank()) if sequence_parallel else (1, 0)

    def positions(x: Tensor) -> Tensor:
        """Of the tokens that this rank has of x `[B, T/cp, D]`, or with sequence parallelism `[B, T/cp/tp, D]`."""
        return layouts.positions(layout, cp, x.size(1) * parts * cp.size(), x.device).chunk(parts)[part]

    same = mesh.group("cp", "tp") if tp else cp
    seeds = partial(seeded, agree=partial(collectives.broadcast, source=0, group=same, name="dropout seed"),
                    first_row=mesh.rank(*others) << 32)
    for layer in model.layers:
        if isinstance(layer, Block):
            layer.attention.core = seeds(layer.attention.core, part=tp.rank() if tp else 0)
        for module in layer.modules():
            if isinstance(module, Dropout):
                module.forward = partial(drop_if_training, module, seeds(partial(drop_tokens, positions=positions)))


def drop_if_training(module: Dropout, drop: Callable, x: Tensor) -> Tensor:
    return drop(x, dropout=module.p if module.training else 0.0)


def params_of_slices(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that, with sequence parallelism, see only this rank's tokens: those that no rank has cut."""
    shared = {param for module in model.modules() if isinstance(module, SharedHead) for param in module.parameters()}
    return {param for param in model.parameters() if not hasattr(param, "shards")} - shared
