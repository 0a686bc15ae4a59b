"""Run: a model in training on this rank, whatever the layout; all that a training loop or a test sees of it.

    run = parallelize(config, Strategy(dp=2, tp=2, zero=1), make_optimizer)
    batch = run.batch(rows, step)               this rank's part of global batch `step` of text.rows(..)
    result = run.step(batch, clip=1.0)          forwards, backwards, sums, clipping, update
    run.evaluate(batch), run(tokens)            the loss, and the logits of whole rows, on every rank
    run.pieces(), run.load_pieces(saved)        its state for a checkpoint of any layout (run_states.py)

Every rank calls the same methods in the same order. Sends what the technique sends, and 8 bytes a batch for
the number of valid targets; `run(tokens)` gathers logits over tp and cp and sends them to all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.compose.passes import roll_scales
from minitrain.compose.run_states import RunStates
from minitrain.context import layout as layouts
from minitrain.data_parallel.states import tell_updates
from minitrain.data_parallel.sync import Sync
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, rows_of
from minitrain.model.gpt import generate
from minitrain.model.mixture import move_biases
from minitrain.model.training.step import Batch, StepResult, scaled_train_step, train_step, valid_tokens
from minitrain.pipeline.post_validation import PostValidation
from minitrain.pipeline.runtime import Runner
from minitrain.plan.strategy import Strategy
from minitrain.precision.loss_scale import LossScale
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import placement


@dataclass(eq=False, repr=False)
class Run(RunStates):
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

    def __post_init__(self):
        self.runner = self.forward_backward if isinstance(self.forward_backward, Runner) else None
        rows, tokens, group = self.strategy.data_axes, self.strategy.context_axes, self.mesh.group
        self.data_group = group(*rows)  # ranks with other rows
        self.context_group = group(*tokens) if tokens else None  # with other tokens of the same rows
        self.token_group = group(*rows, *tokens)  # with other tokens
        self.tp_group = group("tp") if self.strategy.tp > 1 else None
        self.stage_group = group("pp") if self.runner else None  # with other layers
        self.loss_group = group(*rows, "pp", *tokens) if self.runner else self.token_group
        param = next(self.model.parameters())
        self.device, self.dtype = param.device, param.dtype  # of activations:
        if self.config:
            self.dtype = getattr(torch, self.strategy.policy.activations)

    def batch(self, rows: Rows, step: int) -> Batch:
        """This rank's tokens of global batch `step`, their positions, and the number of valid targets."""
        if self.config:
            self.strategy.check_batch(self.config, rows.batch_size, rows.length)
        rank, ranks = self.data_group.rank(), self.data_group.size()
        tokens, targets = (part.to(self.device) for part in rows.draw(step, rank, ranks))
        positions = self._positions(tokens.size(1))
        tokens, targets = self._shard(tokens), self._shard(targets)
        first_row = rows_of(rank, ranks, rows.batch_size).start
        return Batch(tokens, targets, valid_tokens(targets, self.token_group), positions, step, first_row)

    def step(self, batch: Batch, clip: float | None = None) -> StepResult:
        """One step of the optimizer; the loss is this rank's term of the global batch's (`total`). With the
        strategy's `post_validation` the norm is that of the step before (0 in the first). With a scaled loss
        that overflows nothing changes but the scale, on all ranks."""
        result = self._step(batch, clip)
        experts, low_bits = self.config and self.config.experts, self.strategy.products != "plain"
        if experts or low_bits:
            self.sync.before_update()  # biases and histories change as well
        if experts:
            move_biases(self.model.layers, self._load_groups, move=result.updated)
        if low_bits:
            roll_scales(self.model.layers, self.tp_group)
        return result

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
        """The loss of a batch, on every rank; nothing is dropped, kept or updated."""
        logits = self._through(batch.tokens, batch.positions)
        loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if logits is not None:
            loss = loss + self.loss_fn(logits, batch.targets) / batch.num_valid
        return self.total(loss)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Whole rows of tokens `[B, T]`, alike on all ranks -> logits `[B, T, V]` on all; nothing dropped."""
        length, pieces = tokens.size(1), self.strategy.pieces
        padding = -length % pieces  # behind the tokens: attention is causal, so it changes nothing
        if self.config and length + padding > (most := self.config.max_positions):
            raise ValueError(f"sequence {length}, padded to {length + padding}, > max_positions {most}")
        x = self._shard(F.pad(tokens, (0, padding)))
        logits = self._through(x, self._positions(length + padding))
        if self.runner:
            words = -(-self.config.vocab_size // self.strategy.tp)
            logits = x.new_zeros(*x.shape, words, dtype=self.dtype) if logits is None else logits
            logits = collectives.broadcast(logits, self.runner.homes[-1], self.stage_group)
        if self.tp_group:
            logits = collectives.all_gather(logits, self.tp_group, -1)[..., : self.config.vocab_size]
        if self.layout:
            logits = layouts.join(logits, self.layout, self.context_group)
        return logits[:, :length]

    def _shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole rows."""
        return layouts.split(x, self.layout, self.context_group) if self.layout else x

    def _positions(self, length: int) -> Tensor | None:
        """Of this rank's tokens of rows of that length; None: they are 0 .. T-1."""
        if self.layout is None:
            return None
        return layouts.positions(self.layout, self.context_group, length, self.device)

    def _through(self, tokens: Tensor, positions: Tensor | None) -> Tensor | None:
        """What the last layer gives, on the ranks of one stage, without dropout."""
        self.settle()
        training, _ = self.training, self.train(False)
        try:
            if self.runner is None:
                return self.model(tokens, *(() if positions is None else (positions,)))
            if positions is None:
                positions = torch.arange(tokens.size(1), device=tokens.device)
            return self.runner.through(tokens, positions)
        finally:
            self.train(training)

    def sample(self, prompt: Tensor, n: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """`[B, T]` -> `[B, T + n]`, the same on every rank."""
        pieces = self.strategy.pieces
        window = self.config.max_positions // pieces * pieces  # no longer when it is padded to pieces
        return generate(self, prompt, n, temperature, seed, window)

    def train(self, mode: bool = True) -> Run:
        self.model.train(mode)
        return self

    training = property(lambda self: self.model.training)

    def attach(self, saver) -> None:
        """Updates wait for what a checkpoint/saver.py has not copied yet; after `update_in_files`."""
        tell_updates(self.sync, saver.before_update)
