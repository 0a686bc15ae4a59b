"""Clipping by the norm of all stages without a common stop: step, check later, undo the step if wrong.

    post = PostValidation(optimizer, max_norm, group)        in the place of clipping and optimizer
    run.hooks.append(post)                                   run: the pipeline's Runner, over the same group
    train_step(run, batch, post, reducer)                    for each batch; at the end post.finish()

    step()             rank 0 -> ... -> p-1     sum of squares so far; where it calls for no clipping, update
                       the forwards of the next step that fill the pipeline
    before_backward()  rank p-1 -> ... -> 0     sum of all squares; a wrong update is undone and done again,
                                                and all ranks run these forwards again

What is done again uses the rate and the random numbers of its own step; with a norm that is not finite
nothing is updated. Sends 2(p-1) numbers per step. Memory, until the check: a copy of parameters and states.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, section 4. Differs: theirs undoes AdamW by its inverse.
"""

import copy
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.model.training.optim import sum_of_squares
from minitrain.pipeline.lower import pause
from minitrain.pipeline.runtime import Runner, RunnerHooks
from minitrain.ranks import collectives
from minitrain.ranks.random_state import random_state, set_random_state
from minitrain.ranks.torch_private import tree_leaves


class PostValidation(RunnerHooks):
    """`group` has the stages in order; `optimizer` is one of torch's, or a Sync; `norm`: the last checked."""

    def __init__(self, optimizer, max_norm: float, group: ProcessGroup):
        self.optimizer, self.max_norm, self.group = optimizer, max_norm, group
        self.inner = getattr(optimizer, "optimizer", optimizer)  # a Sync's; None on a frozen stage
        self.params = [param for settings in optimizer.param_groups for param in settings["params"]]
        some = next(iter((*self.params, *getattr(optimizer, "names", ()))))  # names: of a frozen stage
        like = torch.zeros((), dtype=torch.float64, device=some.device)
        self.sum_squares = partial(sum_of_squares, self.params, like)
        self.unchecked, self.norm = False, None
        self.sending: list[collectives.Handle] = []
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: must be > 0")

    param_groups = property(lambda self: self.optimizer.param_groups)

    def zero_grad(self) -> None:
        """Nothing yet: a wrong update still needs its gradients. `before_backward` clears them."""

    @torch.no_grad()
    def step(self) -> None:
        if self.unchecked:
            raise ValueError("the step before has not been checked; append it to the runner's hooks")
        self.squares = self.sum_squares().to(torch.float64)
        if self.group.rank():
            self.squares = self.squares + self.receive(-1)
        self.send(+1)
        self.unchecked, self.then, self.before = True, self.settings(), None
        if self.scale() == 1:
            state = copied(self.inner.state_dict()) if self.inner else {}
            self.before = [param.clone() for param in self.params], state
            self.optimizer.step()

    def play(self, runner: Runner) -> bool:
        """The forwards that fill the pipeline, and once more if the weights have changed; then the rest."""
        filling, rest = pause(runner.program, runner.rank, runner.schedule)
        drawn = random_state(runner.device)
        runner.play(filling)
        if self.before_backward():
            for what in list(runner.boundary):  # what was sent is received by all, and dropped
                runner.get(what)
            stale = list(runner.sending.values())
            set_random_state(drawn, runner.device)
            runner.begin()
            runner.play(filling)
            for handle in stale:
                handle.wait()
        runner.play(rest)
        return True

    def before_backward(self) -> bool:
        """Have the weights changed since the forwards of this step? The same on all ranks."""
        changed = self.unchecked and self.validate() is not None and self.scale() != 1
        self.optimizer.zero_grad()
        return changed

    def finish(self) -> Tensor | None:
        """After the last step: its norm. Parameters are then final, and gradients those that were applied."""
        if self.unchecked:
            self.validate()
        return self.norm

    @torch.no_grad()
    def validate(self) -> tuple[Tensor, bool]:
        """The norm of all gradients, and whether this rank's step was undone."""
        if self.group.rank() < self.group.size() - 1:
            self.squares = self.receive(+1)
        self.send(-1)
        scale, stepped = self.scale(), self.before is not None
        if scale != 1:
            now = self.settings()
            if stepped:
                self.undo()
            if torch.isfinite(self.squares):
                for param in (param for param in self.params if param.grad is not None):
                    param.grad.mul_(scale)
                self.set(self.then)
                self.optimizer.step()
            self.set(now)
        for handle in self.sending:
            handle.wait()
        self.sending, self.before, self.unchecked, self.norm = [], None, False, self.squares.sqrt()
        return self.norm, stepped and scale != 1

    def undo(self) -> None:
        params, state = self.before
        for param, old in zip(self.params, params):
            param.copy_(old)
        if self.inner:
            self.inner.load_state_dict(state)
        if self.inner is not self.optimizer:
            self.optimizer.publish()  # a Sync brings the model up to date

    def receive(self, step: int) -> Tensor:
        return collectives.receive(self.squares, self.group.rank() + step, self.group)

    def send(self, step: int) -> None:
        to = self.group.rank() + step
        if 0 <= to < self.group.size():
            self.sending.append(collectives.send(self.squares, to, self.group, async_op=True))

    def settings(self) -> list[dict]:
        return [{name: x for name, x in group.items() if name != "params"} for group in self.param_groups]

    def set(self, settings: list[dict]) -> None:
        for group, values in zip(self.param_groups, settings):
            group.update(values)

    def scale(self) -> float:
        """The factor for all gradients; 1 if nothing is clipped (as optim.clip_grad_norm)."""
        return (self.max_norm / (self.squares.sqrt() + 1e-6)).clamp(max=1.0).item()


def copied(state: dict) -> dict:
    """With tensors cloned, which an account sees; a deepcopy of one does not show."""
    return copy.deepcopy(state, {id(x): x.clone() for x in tree_leaves(state) if isinstance(x, Tensor)})
