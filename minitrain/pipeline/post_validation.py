"""Clipping by the norm of all stages, with no common stop: step first, check later, take the step back if it was wrong.

    step()        rank 0 -> 1 -> ... -> p-1     sum of squares so far; who sees no reason to clip yet updates at once
                  (the first forwards of the next step)
    validate()    rank p-1 -> ... -> 1 -> 0     sum of all squares; who updated although it had to clip goes back and does it right

An all-reduce of the norm makes all ranks wait for the last, and with it the bubble at both ends of a pipeline returns. The sum goes up
the ranks instead, as forwards do, and comes back before the first backward. Clipping is rare after the first steps, so that most steps
stand. A rank whose sum so far is already too large does not guess: it waits for the answer. Call `validate` before any backward of the
next step; if it says True (a step was taken back), the forwards run since are to be run again.

Sends one number to each neighbour a step, 2(p-1) messages in all. Memory: a copy of parameters and optimizer state from `step` to
`validate`. With a norm that is not finite nothing is updated. Raises ValueError in one line for a norm that is not above 0 and for
parameters that are cut, whose squares would need other groups.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section 4. Differs: theirs undoes AdamW in place, by its inverse, without a copy.
"""
from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives


class PostValidation:
    """`group` has the stages in order. A parameter marked `copy` stands on another stage too and is counted there."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float, group: ProcessGroup):
        self.optimizer, self.max_norm, self.group = optimizer, max_norm, group
        self.params = [param for settings in optimizer.param_groups for param in settings["params"]]
        self.sending: list[collectives.Handle] = []
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: must be > 0")
        if any(getattr(param, "shards", ()) for param in self.params):
            raise ValueError("parameters are cut over other ranks, which hold the rest of their squares; use whole parameters, or "
                             "optim.clip_grad_norm before the step")

    @torch.no_grad()
    def step(self) -> None:
        """In place of clipping and `optimizer.step()`."""
        rank, last = self.group.rank(), self.group.size() - 1
        grads = [param.grad for param in self.params if param.grad is not None and not getattr(param, "copy", False)]
        self.squares = torch.zeros((), dtype=torch.float64, device=self.params[0].device)
        for grad in grads:
            self.squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        if rank:
            self.squares += collectives.receive(self.squares, rank - 1, self.group)
        if rank < last:
            self.sending.append(collectives.send(self.squares.clone(), rank + 1, self.group, async_op=True))
        self.before = None
        if self.scale(self.squares) == 1:
            self.before = [param.clone() for param in self.params], copy.deepcopy(self.optimizer.state_dict())
            self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> tuple[Tensor, bool]:
        """The norm of all gradients, and whether this rank's step was taken back."""
        rank, last = self.group.rank(), self.group.size() - 1
        if rank < last:
            self.squares = collectives.receive(self.squares, rank + 1, self.group)
        if rank:
            self.sending.append(collectives.send(self.squares, rank - 1, self.group, async_op=True))
        scale, stepped = self.scale(self.squares), self.before is not None
        if scale != 1:
            if stepped:
                self.take_back()
            if torch.isfinite(self.squares):
                for param in self.params:
                    if param.grad is not None:
                        param.grad.mul_(scale)
                self.optimizer.step()
        for handle in self.sending:
            handle.wait()
        self.sending, self.before = [], None
        return self.squares.sqrt(), stepped and scale != 1

    def take_back(self) -> None:
        params, state = self.before
        for param, old in zip(self.params, params):
            param.copy_(old)
        self.optimizer.load_state_dict(state)

    def scale(self, squares: Tensor) -> float:
        """What gradients are multiplied by; 1 if nothing is clipped (as optim.clip_grad_norm, epsilon and all)."""
        return (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).item()
