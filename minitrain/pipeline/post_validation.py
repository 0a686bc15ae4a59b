"""Clipping by the norm of all stages, with no common stop: step first, check later, take the step back if it was wrong.

    post = PostValidation(optimizer, max_norm, group)            in the place of clipping and optimizer
    run.before_backward = post.before_backward                   run: the Runner of the pipeline over the same group
    for batch in batches:
        train_step(run, batch, post, reducer)                    zero_grad() waits, step() guesses
    post.finish()                                                the last step is checked too

    step()             rank 0 -> 1 -> ... -> p-1     sum of squares so far; who sees no reason to clip yet updates at once
                       the forwards of the next step that fill the pipeline
    before_backward()  rank p-1 -> ... -> 1 -> 0     sum of all squares; who updated although it had to clip goes back and does it right,
                                                     and as weights are not those that these forwards saw, all run them again

An all-reduce of the norm makes all ranks wait for the last, and with it the bubble at both ends of a pipeline returns. The sum goes up
the ranks instead, as forwards do, and comes back before the first backward. Clipping is rare after the first steps, so that most steps
stand. A rank whose sum so far is already too large does not guess: it waits for the answer. What is done again is done with the rate of
its own step, whatever the optimizer's is by now, and draws the random numbers that it drew.

`squares()`, where parameters are cut over other groups (tp, ZeRO), is the sum of the squares of this rank's stage, each counted once and
summed over those groups (optim.sum_of_squares). Without it parameters are whole; one with copies on other stages is counted on the first.
`optimizer` is one of torch's, or a Sync, whose `publish` brings the model up to date with what was taken back.
Sends one number to each neighbour a step, 2(p-1) messages in all, and the activations that fill the pipeline once more after a clip.
Memory: a copy of parameters and optimizer state, and the gradients, until the check. With a norm that is not finite nothing is updated.
Raises ValueError in one line for a norm that is not above 0, for cut parameters without `squares`, for a step that comes before the one
before it was checked; Runner for schedules whose filling needs what comes behind a first backward. Asks for a number: no dry run.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section 4. Differs: theirs undoes AdamW in place, by its inverse, without a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.sharding import placement


class PostValidation:
    """`group` has the stages in order. `norm` is that of the last gradient that was checked."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        group: ProcessGroup,
        squares: Callable[[], Tensor] | None = None,
    ):
        self.optimizer, self.max_norm, self.group = optimizer, max_norm, group
        self.inner = getattr(
            optimizer, "optimizer", optimizer
        )  # what has the states; None on a stage that is frozen as a whole
        self.params = [param for settings in optimizer.param_groups for param in settings["params"]]
        self.own_squares = squares or self.squares_of_whole
        self.unchecked = False
        self.norm: Tensor | None = None
        self.sending: list[collectives.Handle] = []
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: must be > 0")
        if squares is None and any(placement(param).cut_over for param in self.params):
            raise ValueError(
                "parameters are cut over other ranks, which hold the rest of their squares; give squares=, a function that returns the "
                "sum over those ranks, or use optim.clip_grad_norm before the step"
            )

    # ---- what a training step calls --------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Not yet: if the step before was wrong, its gradients are needed. `before_backward` does it."""

    @torch.no_grad()
    def step(self) -> None:
        """In place of clipping and `optimizer.step()`."""
        if self.unchecked:
            raise ValueError(
                "the step before has not been checked; set run.before_backward = post.before_backward, or call post.validate()"
            )
        rank, last = self.group.rank(), self.group.size() - 1
        self.squares = self.own_squares().to(torch.float64)
        if rank:
            self.squares = self.squares + collectives.receive(self.squares, rank - 1, self.group)
        if rank < last:
            self.sending.append(collectives.send(self.squares, rank + 1, self.group, async_op=True))
        self.unchecked, self.then, self.before = True, self.settings(), None
        if self.scale(self.squares) == 1:
            self.before = (
                [param.clone() for param in self.params],
                copy.deepcopy(self.inner.state_dict()) if self.inner else {},
            )
            self.optimizer.step()

    def before_backward(self) -> bool:
        """For Runner: are the weights others than the forwards of this step have seen? The same answer on all ranks."""
        again = self.unchecked
        if again:
            self.validate()
            again = self.scale(self.squares) != 1
        self.optimizer.zero_grad()
        return again

    def finish(self) -> Tensor | None:
        """Behind the last step: its norm. Parameters are final, and gradients those that were applied."""
        if self.unchecked:
            self.validate()
        return self.norm

    # ---- the check -------------------------------------------------------------------------------------------------------

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
            now = self.settings()
            if stepped:
                self.take_back()
            if torch.isfinite(self.squares):
                for param in self.params:
                    if param.grad is not None:
                        param.grad.mul_(scale)
                self.set(self.then)
                self.optimizer.step()
            self.set(now)
        for handle in self.sending:
            handle.wait()
        self.sending, self.before, self.unchecked, self.norm = [], None, False, self.squares.sqrt()
        return self.norm, stepped and scale != 1

    def take_back(self) -> None:
        params, state = self.before
        for param, old in zip(self.params, params):
            param.copy_(old)
        if self.inner:
            self.inner.load_state_dict(state)
        if self.inner is not self.optimizer:
            self.optimizer.publish()

    def settings(self) -> list[dict[str, Any]]:
        """The rate and all else that may change from step to step."""
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self.param_groups
        ]

    def set(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.param_groups, settings):
            group.update(values)

    def squares_of_whole(self) -> Tensor:
        some = next(
            iter((*self.params, *getattr(self.optimizer, "names", ())))
        )  # a frozen stage has no other
        total = torch.zeros((), dtype=torch.float64, device=some.device)
        for param in self.params:
            copies = placement(param).copies
            if param.grad is not None and (copies is None or copies.rank() == 0):
                total += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
        return total

    def scale(self, squares: Tensor) -> float:
        """What gradients are multiplied by; 1 if nothing is clipped (as optim.clip_grad_norm, epsilon and all)."""
        return (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).item()
