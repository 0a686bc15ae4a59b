"""Run: a model in training on this rank, whatever the layout. All that a training loop, a test or a chapter sees of it.

    run = parallelize(config, Strategy(dp=2, tp=2, zero=1), make_optimizer)
    batch = run.batch(rows, step)               this rank's part of global batch `step`, rows as text.rows(batch_size=8, length=64)
    loss, norm = run.step(batch, clip=1.0)      forwards, backwards, sums, clipping, update
    run.evaluate(batch), run(tokens)            the loss, and the logits of whole rows, on every rank
    run.state_dict(), run.load_state_dict(..)   whole parameters and optimizer states by global name: any layout takes them

Every rank calls the same methods in the same order.
Sends what the technique sends, and 8 bytes a batch for the number of valid targets; `run(tokens)` gathers logits over tp and cp and
sends them to all stages; `state_dict` gathers everything on every rank, 16 bytes a parameter with Adam, for models that one rank can
hold. Raises ValueError in one line for rows and lengths that the strategy refuses, and for a state of another model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.context import layout as layouts
from minitrain.data.batches import Rows, rows_of
from minitrain.data_parallel.sync import Sync
from minitrain.mesh import Mesh
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, generate
from minitrain.pipeline.post_validation import PostValidation
from minitrain.pipeline.runtime import Runner
from minitrain.strategy import Strategy
from minitrain.training.step import Batch, StepResult, train_step, valid_tokens


class Run:
    """Made by `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        mesh: Mesh,
        sync: Sync,
        forward_backward: Callable[[Batch], Tensor],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        config: GPTConfig | None = None,
        runner: Runner | None = None,
        layout: layouts.Layout | None = None,
        late: PostValidation | None = None,
    ):
        self.model, self.strategy, self.mesh, self.sync, self.loss_fn, self.config = (
            model,
            strategy,
            mesh,
            sync,
            loss_fn,
            config,
        )
        self.forward_backward, self.runner, self.layout, self.late = forward_backward, runner, layout, late
        rows, tokens = strategy.data_axes, strategy.context_axes
        self.data_group = mesh.group(*rows)  # ranks with other rows
        self.context_group = mesh.group(*tokens) if tokens else None  # with other tokens of the same rows
        self.stage_group = mesh.group("pp") if runner else None  # with other layers
        self.token_group = mesh.group(*rows, *tokens)  # with other tokens
        self.loss_group = (
            mesh.group(*rows, "pp", *tokens) if runner else self.token_group
        )  # whose losses are terms of the loss
        param = next(model.parameters())
        self.device, self.dtype = param.device, param.dtype

    # ---- training ------------------------------------------------------------------------------------------------------

    def batch(self, rows: Rows, step: int) -> Batch:
        """This rank's tokens of its rows of global batch `step`, with their positions and the number of targets that count on all ranks."""
        if self.config:
            self.strategy.check_batch(self.config, rows.batch_size, rows.length)
        rank, ranks = self.data_group.rank(), self.data_group.size()
        tokens, targets = (part.to(self.device) for part in rows.draw(step, rank, ranks))
        positions = None
        if self.layout:
            positions = layouts.positions(self.layout, self.context_group, tokens.size(1), tokens.device)
            tokens, targets = (layouts.split(x, self.layout, self.context_group) for x in (tokens, targets))
        first_row = rows_of(rank, ranks, rows.batch_size).start
        return Batch(tokens, targets, valid_tokens(targets, self.token_group), positions, step, first_row)

    def step(self, batch: Batch, clip: float | None = None) -> StepResult:
        """One step of the optimizer. The loss is this rank's part: the sum over `loss_group` is that of the global batch. With the strategy's
        `post_validation` the norm is that of the step before (0 in the first), as this one's comes later."""
        if self.late is None:
            return train_step(self.forward_backward, batch, self.sync, self.sync, clip, self.stage_group)
        limit = clip or math.inf
        if limit != self.late.max_norm:
            self.settle()
            self.late.max_norm = limit
        loss, _ = train_step(self.forward_backward, batch, self.late, self.sync)
        return StepResult(loss, loss.new_zeros(()) if self.late.norm is None else self.late.norm)

    def settle(self) -> None:
        """The last step is final: with `post_validation` its norm has been checked. The methods below do it themselves."""
        if self.late:
            self.late.finish()

    def total(self, loss: Tensor) -> Tensor:
        """The loss of the global batch on every rank, from this rank's part of it."""
        return collectives.all_reduce(loss, self.loss_group)

    # ---- looking at it -------------------------------------------------------------------------------------------------

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
        """Whole rows of tokens `[B, T]`, the same on all ranks -> logits `[B, T, V]` on every rank, without dropout."""
        length, pieces = tokens.size(1), self.strategy.pieces
        if self.config and length + -length % pieces > self.config.max_positions:
            raise ValueError(
                f"sequence {length}, padded to a multiple of {pieces}, > max_positions {self.config.max_positions}; cut the sequence"
            )
        x, positions = (
            F.pad(tokens, (0, -length % pieces)),
            None,
        )  # causal: what stands behind changes nothing
        if self.layout:
            positions = layouts.positions(self.layout, self.context_group, x.size(1), x.device)
            x = layouts.split(x, self.layout, self.context_group)
        logits = self._through(x, positions)
        if self.runner:
            words = -(-self.config.vocab_size // self.strategy.tp)
            logits = x.new_zeros(*x.shape, words, dtype=self.dtype) if logits is None else logits
            logits = collectives.broadcast(logits, self.runner.last_rank, self.stage_group)
        if self.strategy.tp > 1:
            logits = collectives.all_gather(logits, self.mesh.group("tp"), -1)[..., : self.config.vocab_size]
        if self.layout:
            logits = layouts.join(logits, self.layout, self.context_group)
        return logits[:, :length]

    def _through(self, tokens: Tensor, positions: Tensor | None) -> Tensor | None:
        """What the last layer gives, on the ranks of one stage, without dropout."""
        self.settle()
        training, _ = self.training, self.train(False)
        try:
            if self.runner is None:
                return self.model(tokens, *(() if positions is None else (positions,)))
            return self.runner.through(
                tokens, torch.arange(tokens.size(1), device=tokens.device) if positions is None else positions
            )
        finally:
            self.train(training)

    def sample(self, prompt: Tensor, n: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """`[B, T]` -> `[B, T + n]`, the same on every rank."""
        window = (
            self.config.max_positions // self.strategy.pieces * self.strategy.pieces
        )  # padded to pieces it is no longer
        return generate(self, prompt, n, temperature, seed, window)

    def train(self, mode: bool = True) -> Run:
        self.model.train(mode)
        return self

    @property
    def training(self) -> bool:
        return self.model.training

    # ---- states --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """{"parameters": {name: whole}, "optimizer": {name: {..}}}, the same on every rank."""
        self.settle()
        full = self.sync.full_state_dict()
        if self.stage_group is None:
            return full
        stages = [
            _broadcast(full, rank, self.stage_group, self.device) for rank in range(self.stage_group.size())
        ]
        return {
            what: {name: value for stage in reversed(stages) for name, value in stage[what].items()}
            for what in full
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave under any strategy."""
        self.settle()
        ours = set(self.sync.names.values())
        if self.config:
            check_names(state["parameters"], self.config)
            state = {
                what: {name: value for name, value in state[what].items() if name in ours}
                for what in ("parameters", "optimizer")
            }
        self.sync.load_full_state_dict(state)


def check_names(parameters: dict[str, Tensor], config: GPTConfig) -> None:
    """Is it the state of a model of this config?"""
    wanted = {name: list(param.shape) for name, param in GPT(config, device="meta").named_parameters()}
    found = {name: list(value.shape) for name, value in parameters.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"the state has {name} {found.get(name, 'not at all')}, this model {wanted.get(name, 'has none')}: it is of another model"
            )


def _broadcast(value: dict, source: int, group: ProcessGroup, device: torch.device) -> dict:
    """Nested dicts of tensors and numbers, from one rank to all."""
    data = io.BytesIO()
    if group.rank() == source:
        torch.save(value, data)
    size = collectives.broadcast(torch.tensor([len(data.getvalue())], device=device), source, group).item()
    held = torch.frombuffer(bytearray(data.getvalue() or size), dtype=torch.uint8).to(device)
    data = io.BytesIO(collectives.broadcast(held, source, group).cpu().numpy().tobytes())
    return torch.load(data, map_location=device, weights_only=True)
