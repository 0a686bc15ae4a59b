"""Run: a model in training on this rank, whatever the layout; all that a training loop or a test sees of it.

    run = parallelize(config, Strategy(dp=2, tp=2, zero=1), make_optimizer)
    batch = run.batch(rows, step)               this rank's part of global batch `step` of text.rows(..)
    result = run.step(batch, clip=1.0)          forwards, backwards, sums, clipping, update
    run.evaluate(batch), run(tokens)            the loss, and the logits of whole rows, on every rank
    run.pieces(), run.load_pieces(saved)        its state for a checkpoint of any layout: pieces named
        parameters/layers.1.attention.q.weight, optimizer/layers.1.attention.q.weight/exp_avg,
        amax/layers.1.attention.q (of products in few bits), random/rank-3/cpu, residual/3/layers.0.tokens
    run.state_dict()                            or whole, by name, on every rank; residuals begin anew
    run.sample(tokens, n)                       text, a token at a time (cached_run.py)

Every rank calls the same methods in the same order. Sends what the technique sends, 8 bytes a batch for the
number of valid targets; `run(tokens)` gathers logits over tp and cp and sends them to all stages;
`load_pieces` agrees twice, 8 bytes each; `state_dict` gathers 16 bytes per parameter with Adam. Step, rate
and position in the data are the caller's, and masks of dropout follow from the step.
Lian et al. 2025, Universal Checkpointing, arXiv:2406.18820, section 3. Differs: loads without a conversion.
"""

import io
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.attention.placed import Places
from minitrain.checkpoint.load import agree
from minitrain.compose.cached_run import cached
from minitrain.compose.passes import roll_scales, scales_of
from minitrain.context import layout as layouts
from minitrain.data_parallel import states
from minitrain.data_parallel.states import tell_updates
from minitrain.data_parallel.sync import Sync
from minitrain.memory.pools import is_fake
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, rows_of
from minitrain.model.gpt import GPT, generate
from minitrain.model.layers import Hooks
from minitrain.model.mixture import RouterLosses, mixtures, move_biases
from minitrain.model.training.step import Batch, StepResult, scaled_train_step, train_step, valid_tokens
from minitrain.pipeline.runtime import Runner
from minitrain.plan.strategy import Strategy
from minitrain.precision.mixed import LossScale
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.pieces import Piece, share_out, whole_piece
from minitrain.ranks.random_state import random_state, set_random_state
from minitrain.ranks.sharding import placement, whole_shape
from minitrain.ranks.torch_private import outside_modes
from minitrain.systems.data_parallel.compressed import Compression
from minitrain.systems.pipeline.post_validation import PostValidation

Shapes = dict[str, tuple[int, ...]]


@dataclass(eq=False, repr=False)
class Run:
    """Made by `parallelize`."""

    model: nn.Module
    strategy: Strategy
    mesh: Mesh
    sync: Sync
    forward_backward: Callable[[Batch], Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    config: GPTConfig | None  # None: a module of the reader's own
    layout: layouts.Layout | None  # of the tokens over cp
    late: PostValidation | None
    scale: LossScale | None  # of a loss that is scaled
    router_losses: RouterLosses | None = None
    places: Places = field(default_factory=Places)
    seed: int = 0  # of what a module of the reader's own draws
    compression: Compression | None = None  # of gradients

    def __post_init__(self):
        self.runner = self.forward_backward if isinstance(self.forward_backward, Runner) else None
        rows, tokens, group = self.strategy.data_axes, self.strategy.context_axes, self.mesh.group
        self.data_group = group(*rows)  # ranks with other rows
        self.context_group = group(*tokens) if tokens else None  # with other tokens of the same rows
        self.token_group = group(*rows, *tokens)  # with other tokens
        self.tp_group = group("tp") if self.strategy.tp > 1 else None
        self.stage_group = group("pp") if self.runner else None  # with other layers
        self.loss_group = group(*rows, "pp", *tokens) if self.runner else self.token_group
        self.same_params = [self.tp_group] if self.tp_group else []
        self.steps = 0  # made so far, for batches that do not say which they are
        param = next(self.model.parameters())
        activations = getattr(torch, self.strategy.policy.activations)
        self.device, self.dtype = param.device, activations if self.config else param.dtype

    def batch(self, rows: Rows, step: int) -> Batch:
        """This rank's tokens of global batch `step`, their positions, and the number of valid targets."""
        if self.config:
            self.strategy.check_batch(self.config, rows.batch_size, rows.length)
        rank, ranks = self.data_group.rank(), self.data_group.size()
        tokens, targets = (part.to(self.device) for part in rows.draw(step, rank, ranks))
        positions = self._positions(tokens.size(1))
        tokens, targets = self._shard(tokens), self._shard(targets)
        first_row = rows_of(rank, ranks, rows.batch_size).start
        num_valid, num_tokens = valid_tokens(targets, self.token_group), rows.batch_size * rows.length
        documents = rows.documents(step, rank, ranks) if rows.documents else None
        return Batch(tokens, targets, num_valid, positions, step, first_row, num_tokens, documents)

    def step(self, batch: Batch, clip: float | None = None) -> StepResult:
        """One step of the optimizer; the loss is this rank's term of the global batch's (`total`). With the
        strategy's `post_validation` the norm is that of the step before (0 in the first). With a scaled loss
        that overflows nothing changes but the scale, on all ranks."""
        self._check_batch(batch)
        if self.router_losses:
            total = batch.num_tokens
            if total is None:
                total = valid_tokens(torch.zeros_like(batch.targets), self.token_group)
            self.router_losses.weight = batch.num_valid.double() / total
        with module_draws(self, batch):
            result = self._step(batch, clip)
        self.places.documents = None  # of that batch: whoever calls the model next has other rows
        same_buffers(self)
        if self.compression:
            self.compression.settle(result.updated)
        experts, low_bits = self.config and self.config.experts, self.strategy.products != "plain"
        if experts or low_bits:
            self.sync.before_update()  # biases and histories change as well
        if experts:
            move_biases(self.model.layers, self._load_groups, move=result.updated)
        if low_bits:
            roll_scales(self.model.layers, self.tp_group)
        return result

    def _check_batch(self, batch: Batch) -> None:
        """That it is one for this layout, if it is not from `batch`."""
        if batch.documents is not None and not self.config:
            raise ValueError(f"documents= is for a GPT; mask them inside of your {type(self.model).__name__}")
        if not self.config or is_fake(batch.tokens):
            return
        if batch.tokens.device != self.device:
            cure = "move it, or take run.batch(rows, step)"
            raise ValueError(f"the batch is on {batch.tokens.device}, and this run on {self.device}; {cure}")
        if batch.targets.dtype != torch.int64:
            raise ValueError(f"targets are {batch.targets.dtype}; expected torch.int64")
        ranks = self.context_group.size() if self.context_group else 1
        length, given = batch.tokens.size(1) * ranks, batch.positions
        wanted = self._positions(length)
        if given is None and wanted is not None:
            raise ValueError("a batch without positions, and cp gives each rank its part: see run.batch")
        for row, lengths in enumerate(batch.documents or ()):
            if sum(lengths) != length or min(lengths) < 1:
                what = f"documents of {sum(lengths)} tokens in row {row}, which has {length}"
                raise ValueError(f"{what}; give the lengths of its documents, 1 or more each")
        if batch.documents is not None and len(batch.documents) != len(batch.tokens):
            what = f"documents of {len(batch.documents)} rows for the {len(batch.tokens)} of this rank"
            raise ValueError(f"{what}; give the lengths in each row")
        if given is not None:
            wanted = torch.arange(length, device=self.device) if wanted is None else wanted
            if not torch.equal(given, wanted):
                what = f"positions {given.flatten()[:4].tolist()} .. are not those of this rank's tokens"
                raise ValueError(f"{what}, {wanted[:4].tolist()} ..; of packed rows give document_lengths")

    def _step(self, batch: Batch, clip: float | None) -> StepResult:
        if self.sync.listener:
            self.sync.listener.early = clip is None and self.scale is None
        if self.late is None:
            step, more = (scaled_train_step, (self.scale,)) if self.scale else (train_step, ())
            return step(self.forward_backward, batch, self.sync, self.sync, *more, clip, self.stage_group)
        limit = clip or math.inf
        if limit != self.late.max_norm:
            self.settle()
            self.late.max_norm = limit
        loss = train_step(self.forward_backward, batch, self.late, self.sync).loss
        return StepResult(loss, loss.new_zeros(()) if self.late.norm is None else self.late.norm)

    def _load_groups(self, layer: nn.Module) -> list[ProcessGroup]:
        """Over whose ranks the tokens of a router are spread: those of its weight's gradient."""
        at = placement(layer.router.weight)
        return [*at.summed_over, *([at.copies] if at.copies is not None else [])]

    def settle(self) -> None:
        """With `post_validation`: check the norm of the last step. The methods below do it themselves."""
        if self.late:
            self.late.finish()

    def total(self, loss: Tensor) -> Tensor:
        """The loss of the global batch on every rank, from this rank's part of it."""
        return collectives.all_reduce(loss, self.loss_group)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        logits = self._through(batch.tokens, batch.positions, batch.documents)
        loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if logits is not None:
            loss = loss + self.loss_fn(logits, batch.targets) / batch.num_valid
        return self.total(loss)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Whole rows of tokens `[B, T]`, alike on all ranks -> logits `[B, T, V]` on all; nothing dropped."""
        length, pieces = tokens.size(1), self.strategy.pieces
        if self.config and length > (most := self.config.max_positions):
            raise ValueError(f"sequence {length} > max_positions {most}; cut the one or raise the other")
        padding = -length % pieces  # behind the tokens: attention is causal, so it changes nothing
        x = self._shard(F.pad(tokens.to(self.device), (0, padding)))
        logits = self.logits(x, self._positions(length + padding), padding)
        if self.layout:
            logits = layouts.join(logits, self.layout, self.context_group)
        return logits[:, :length]

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor | None, padding: int = 0) -> Tensor:
        """`[B, T/cp, V]` of this rank's tokens, the last `padding` of which nobody reads; on every stage."""
        hooks = self.model.hooks if self.config else Hooks()
        hooks.padding = padding
        try:
            logits = self._through(tokens, positions)
        finally:
            hooks.padding = 0
        if self.runner:
            words = -(-self.config.vocab_size // self.strategy.tp)
            logits = tokens.new_zeros(*tokens.shape, words, dtype=self.dtype) if logits is None else logits
            logits = collectives.broadcast(logits, self.runner.homes[-1], self.stage_group)
        if self.tp_group:
            logits = collectives.all_gather(logits, self.tp_group, -1)[..., : self.config.vocab_size]
        return logits

    def _shard(self, x: Tensor) -> Tensor:
        return layouts.split(x, self.layout, self.context_group) if self.layout else x

    def _positions(self, length: int) -> Tensor | None:
        """Of this rank's tokens of rows of that length; None: they are 0 .. T-1."""
        if self.layout is None:
            return None
        return layouts.positions(self.layout, self.context_group, length, self.device)

    def _through(self, tokens: Tensor, positions: Tensor | None, documents=None) -> Tensor | None:
        """What the last layer gives, on the ranks of one stage, without dropout."""
        self.settle()
        training, _ = self.training, self.train(False)
        try:
            with self.places.during(self.places.step, self.places.first_row, documents):
                if self.runner is None:
                    return self.model(tokens, *(() if positions is None else (positions,)))
                if positions is None:
                    positions = torch.arange(tokens.size(1), device=tokens.device)
                return self.runner.through(tokens, positions)
        finally:
            self.train(training)

    def sample(self, prompt: Tensor, n: int, temperature: float = 1.0, seed: int = 0, top_k=0) -> Tensor:
        """`[B, T]` -> `[B, T + n]`, the same on every rank and in every layout (cached_run.py)."""
        if not self.config:
            raise ValueError(f"sample writes text of a GPT, and this is a {type(self.model).__name__}")
        same = partial(collectives.broadcast, source=0, group=collectives.world())
        with cached(self, most=n - 1) as logits:
            how = n, temperature, seed, top_k
            return generate(self, prompt.to(self.device), *how, logits=logits, same=same)

    def train(self, mode: bool = True) -> "Run":
        self.model.train(mode)
        return self

    training = property(lambda self: self.model.training)

    def attach(self, saver) -> None:
        """Updates wait for what a checkpoint/saver.py has not copied yet; after `update_in_files`."""
        tell_updates(self.sync, saver.before_update)

    def pieces(self) -> list[Piece]:
        """Views of all tensors of this rank that a run needs to go on, with who else holds them; of random
        states copies."""
        self.settle()
        pieces = [*states.pieces(self.sync, *self.same_params), *self._more_pieces()]
        pieces += self.compression.pieces(self.same_params) if self.compression else []
        return pieces + ([] if is_fake(pieces[0].values) else self._random_pieces())

    def plain_state(self) -> dict[str, Any]:
        self.settle()
        plain = {"numbers": states.numbers_of_states(self.sync)}
        plain |= {"optimizer": self.optimizer_name} if self.sync.optimizer else {}
        plain |= {"compressed_steps": self.compression.steps} if self.compression else {}
        return plain | ({"loss_scale": self.scale.state_dict()} if self.scale else {})

    def load_pieces(self, saved) -> list[str]:
        """Take a checkpoint's `Saved` (checkpoint/load.py); returns what could not be restored, a line each.
        ValueError, on all ranks: it is of another model, and nothing has changed; or it is Damaged, and this
        run is of no use until it has loaded another. Names, shapes and dtypes are looked at before."""
        self.settle()
        agree(lambda: self._check(saved), collectives.world(), self.device)
        return agree(lambda: self._load(saved), collectives.world(), self.device)

    def _check(self, saved) -> None:
        own = {name: tuple(whole_shape(p)) for p, name in self.sync.names.items() if p.numel()}
        check_names(saved.shapes("parameters"), shapes_of(self.config) if self.config else own)
        self._check_optimizer(saved.plain.get("optimizer"))
        residuals = self.compression.pieces(self.same_params, saved) if self.compression else []
        more = *self._more_pieces(), *residuals
        for piece in (*states.pieces_to_load(self.sync, saved, *self.same_params), *more):
            if not begins_anew(piece, saved):
                saved.check(piece)

    def _check_optimizer(self, was: str | None) -> None:
        if self.sync.optimizer and was not in (None, self.optimizer_name):
            now = self.optimizer_name
            raise ValueError(f"the states are of {was}, and this run updates by {now}: take the same")

    @property
    def optimizer_name(self) -> str:
        """The class that updates, also where it has been taken to the host."""
        return type(getattr(self.sync.optimizer, "inner", self.sync.optimizer)).__name__

    def _load(self, saved) -> list[str]:
        if self.scale and "loss_scale" in saved.plain:
            self.scale.load_state_dict(saved.plain["loss_scale"])
        states.load_pieces(self.sync, saved, *self.same_params)
        left = 0
        for piece in self._more_pieces():
            if begins_anew(piece, saved):
                piece.values.zero_()
                left += 1
            else:
                saved.fill(piece)
        lost = [f"histories of {left} scales, which begin anew"] if left else []
        if self.compression:
            lost += self.compression.load(saved, self.same_params)
        elif saved.shapes("residual"):
            lost.append("residuals of compressed gradients: this run sends whole ones")
        own, ranks = self._random_pieces(), collectives.world().size()
        before = len({name.split("/")[0] for name in saved.shapes("random")})
        kinds = all(piece.name in saved for piece in own)
        for piece in own if before == ranks and kinds else ():
            saved.fill(piece)
        saved.finish()
        if before != ranks:
            lost.append(f"random states of {before} ranks: this run has {ranks}, which draw on as they are")
        elif not kinds:
            lost.append(f"random states: none of a generator on {self.device.type} was saved")
        else:
            set_random_state(tuple(piece.values for piece in own), self.device)
        return lost

    def _more_pieces(self) -> list[Piece]:
        """Of buffers, and of what scales remember."""
        if not self.config:
            holders = (self.data_group,) if self.data_group.size() > 1 else ()
            buffers = sorted(module_buffers(self.model).items())
            return [whole_piece(f"buffers/{name}", x, holders) for name, x in buffers]
        found = []
        for layer in self.model.layers:
            own = {f"parameters/{name}": x for name, x in saved_buffers([layer]).items()}
            own |= {f"amax/{name}": one.history for name, one in scales_of([layer]).items()}
            copies = placement(next(layer.parameters())).copies if own else None
            holders = (self.token_group, *self.same_params, *([copies] if copies is not None else []))
            holders = tuple(group for group in holders if group.size() > 1)
            found += [whole_piece(name, x, holders) for name, x in own.items()]
        return sorted(found, key=lambda piece: piece.name)  # alike on ranks that have other layers as well

    def _random_pieces(self) -> list[Piece]:
        name, states = f"random/rank-{collectives.world().rank()}", random_state(self.device)
        return [whole_piece(f"{name}/{kind}", state) for kind, state in zip(("cpu", "cuda"), states)]

    def state_dict(self) -> dict[str, Any]:
        """{"parameters": {name: whole}, "optimizer": {name: {..}}}, the same on every rank; "loss_scale",
        "optimizer_name", and "amax", the histories of delayed scaling."""
        self.settle()
        full, group = states.full_state_dict(self.sync), self.stage_group
        full |= {"amax": {}} if self.config else {}
        for piece in self._more_pieces():
            kind, _, name = piece.name.partition("/")
            full.setdefault(kind, {})[name] = piece.values.clone()
        if group is not None:
            stages = [_broadcast(full, rank, group, self.device) for rank in range(group.size())]
            full = {what: dict(ChainMap(*(stage[what] for stage in stages))) for what in full}
        full |= {"optimizer_name": self.optimizer_name} if self.sync.optimizer else {}
        return full | ({"loss_scale": self.scale.state_dict()} if self.scale else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle()
        self._check_optimizer(state.get("optimizer_name"))
        if self.compression:
            self.compression.begin()
        if self.scale and "loss_scale" in state:
            self.scale.load_state_dict(state["loss_scale"])
        if self.config:
            given = {name: tuple(x.shape) for name, x in state["parameters"].items()}
            check_names(given, shapes_of(self.config))
        for piece in self._more_pieces():
            kind, _, name = piece.name.partition("/")
            if kind == "amax" and name not in state.get(kind, {}):
                piece.values.zero_()  # it begins anew
            else:
                piece.values.copy_(state[kind][name])
        if self.config:  # it has other stages as well
            ours, kinds = set(self.sync.names.values()), ("parameters", "optimizer")
            state = {what: {n: value for n, value in state[what].items() if n in ours} for what in kinds}
        states.load_full_state_dict(self.sync, state)


def make_states(run: Run) -> None:
    """In a dry run: the optimizer's states as its first step makes them, without that step's work."""
    for one in run.sync.shards:
        if states.is_updated(run.sync, one) and not states.state_of(run.sync, one):
            one.shard.grad = torch.zeros_like(one.shard, dtype=one.shard.grad_dtype)
    run.sync.optimizer.step()
    run.sync.zero_grad()


def bytes_to_save(run: Run) -> Counter[str]:
    """Bytes that this rank writes, by kind, as "parameters"; in a dry run those after a step, made or not."""
    if is_fake(next(run.model.parameters())) and run.sync.optimizer:
        make_states(run)
    found: Counter[str] = Counter()
    for piece in share_out(run.pieces()):
        found[piece.name.partition("/")[0]] += piece.values.nbytes
    return found


def begins_anew(piece: Piece, saved) -> bool:
    """A history that was not saved, for those products were computed otherwise."""
    return piece.name.startswith("amax/") and piece.name not in saved


def shapes_of(config: GPTConfig) -> Shapes:
    model = GPT(config, device="meta")
    named = (*model.named_parameters(), *saved_buffers(model.layers).items())
    return {name: tuple(x.shape) for name, x in named}


def check_names(saved: Shapes, wanted: Shapes) -> None:
    for name in sorted(wanted.keys() | saved.keys()):
        if wanted.get(name) != saved.get(name):
            here = list(saved[name]) if name in saved else "not at all"
            there = list(wanted[name]) if name in wanted else "has none"
            raise ValueError(f"the state has {name} {here}, this model {there}: it is of another model")


def saved_buffers(layers: Iterable[nn.Module]) -> dict[str, Tensor]:
    """What is part of a model's state and no parameter, by its name in the whole: biases of routers."""
    routed = {layer.name: layer.mlp.router for layer in layers if mixtures([layer])}
    return {f"{name}.mlp.router.{n}": x for name, router in routed.items() for n, x in router.named_buffers()}


def _broadcast(value: dict, source: int, group: ProcessGroup, device: torch.device) -> dict:
    """Nested dicts of tensors and numbers, from one rank to all."""
    data = io.BytesIO()
    if group.rank() == source:
        torch.save(value, data)
    size = collectives.broadcast(torch.tensor([len(data.getvalue())], device=device), source, group).item()
    sent = torch.frombuffer(bytearray(data.getvalue() or size), dtype=torch.uint8).to(device)
    data = io.BytesIO(collectives.broadcast(sent, source, group).cpu().numpy().tobytes())
    return torch.load(data, map_location=device, weights_only=True)


# ---- what a module of the reader's own has beside parameters ---------------------------------------------


def module_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent ones, by name."""
    names = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def same_buffers(run: Run) -> None:
    """Statistics of BatchNorm are the first rank's after each step: one broadcast, so that all ranks evaluate
    alike. DDP: before the next forward. For statistics over all rows take nn.SyncBatchNorm."""
    buffers = [] if run.config or run.data_group.size() == 1 else module_buffers(run.model).values()
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        first = collectives.broadcast(torch.cat([x.flatten() for x in alike]), 0, run.data_group)
        for buffer, part in zip(alike, first.split([x.numel() for x in alike])):
            buffer.copy_(part.view_as(buffer))


@contextmanager
def module_draws(run: Run, batch: Batch) -> Iterator[None]:
    """What a step draws follows from (seed, step, rank among those with other rows): no two ranks drop alike,
    and a resumed run draws what it would have drawn. Afterwards torch's generators are as before."""
    if run.config or is_fake(batch.tokens):
        yield
        return
    before = random_state(run.device)
    with outside_modes():
        step = run.steps if batch.step is None else batch.step
        torch.manual_seed(hash((run.seed, step, run.data_group.rank())) % 2**63)
    try:
        yield
        run.steps += 1
    finally:
        set_random_state(before, run.device)
