"""PipeDream: a pipeline that is never emptied. Every stage updates its weights on its own, and keeps old ones for what is in flight.

    rank 0 of 3   F0 F1 F2 .. B0 F3 B1 F4 B2 F5 B3 F6 ..      1F1B for ever: after the first fill no rank waits
    its weights   w0 w0 w0    w0 w1 w1 w2 w2 w3 w3 w4         F3 takes the newest, w1, and B3 takes w1 again though w3 is the newest

A forward and its backward must take the same weights, or what comes out is the gradient of nothing. So a stage *stashes* the weights
of each forward until its backward is done. `each_its_own` (PipeDream) updates after every microbatch: a forward takes the newest
weights, and stage s of p keeps p - s versions, as many as it has microbatches in flight. With w_s(t) for stage s after t updates

    w_s(t+1) = w_s(t) - lr · grad_s of microbatch t, taken at w_0(t-p+1), w_1(t-p+2), .., w_{p-1}(t)        (not below 0)

`double_buffered(k)` (PipeDream-2BW) adds up the gradients of k >= p microbatches, then updates. Batch t takes w(t-1) on every stage, for
w(t) is not there when its first microbatch comes. That is a delay of one, the same everywhere, and two versions do:

    w(t+1) = w(t) - lr · grad(w(t-1))                       w(0) for the first two batches

A call runs `schedule.microbatches` of them from filling to draining: make the schedule as long as the training. The bubble is
(p-1)/(m+p-1) of all of it, so it goes to 0; the steady state has none. Messages as in runtime.py. Memory: activations of the schedule,
a gradient, and `versions` copies of the weights, of which `most[stage]` says how many there were. After the call the stages hold the
newest weights. `update(params, grads)` gives new tensors, in the same order: plain SGD here, or an optimizer of yours; with data-parallel
ranks it is the place to sum the gradients. `batch.num_valid` is the divisor of one update, not of the whole call.
Raises ValueError in one line for a split backward or recomputation, for microbatches that are not whole updates, and for fewer than p
microbatches an update with two versions.
Narayanan et al. 2019 (PipeDream), arXiv:1806.03377, sections 3.1 and 3.3; Narayanan et al. 2021 (PipeDream-2BW), arXiv:2006.09503,
section 3.1. Differs: no vertical sync, no replicated stages; parameters that two stages share are trained apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Action, Schedule, parts

Update = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Policy:
    """An update after `every` microbatches; `version(unit, newest)` is the one that the forward of `unit` takes."""

    every: int
    version: Callable[[int, int], int]


def each_its_own() -> Policy:
    """PipeDream: an update after each microbatch, a forward takes the newest weights."""
    return Policy(1, lambda unit, newest: newest)


def double_buffered(k: int) -> Policy:
    """PipeDream-2BW: an update after k microbatches; batch t takes the weights after t-1 updates."""
    return Policy(k, lambda unit, newest: max(unit // k - 1, 0))


def sgd(lr: float) -> Update:
    return lambda params, grads: [param - lr * grad for param, grad in zip(params, grads)]


class Versioned(nn.Module):
    """A stage that runs with the weights it is told to."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage, self.weights = stage, dict(stage.named_parameters())

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.func.functional_call(self.stage, self.weights, inputs)


class AsynchronousRunner(Runner):
    """The interpreter of runtime.py, with a choice of weights before each forward and an update after backwards."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: ProcessGroup,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        policy: Policy,
        update: Update,
        **settings,
    ):
        check_policy(schedule, policy)
        super().__init__(
            stages,
            schedule,
            group,
            loss_fn,
            SimpleNamespace(arrived=lambda params: None, ready=lambda params: None),
            **settings,
        )
        self.policy, self.update = policy, update
        self.stages = {number: Versioned(stage) for number, stage in stages.items()}

    def __call__(self, batch) -> Tensor:
        self.versions = {
            number: {
                0: {
                    name: param.detach().clone().requires_grad_(param.requires_grad)
                    for name, param in stage.stage.named_parameters()
                }
            }
            for number, stage in self.stages.items()
        }
        self.used: dict[tuple[int, int], int] = {}  # (stage, unit) in flight -> version
        self.most = dict.fromkeys(self.stages, 1)
        loss = super().__call__(batch)
        with torch.no_grad():
            for number, stage in self.stages.items():
                for name, newest in self.versions[number][max(self.versions[number])].items():
                    stage.stage.get_parameter(name).copy_(newest)
                stage.weights = {}
        return loss

    def forward(self, action: Action) -> None:
        _, stage, unit = action
        versions = self.versions[stage]
        self.used[stage, unit] = version = self.policy.version(unit, max(versions))
        self.stages[stage].weights = versions[version]
        super().forward(action)
        self.stages[stage].weights = {}

    def backward(self, action: Action) -> None:
        super().backward(action)
        _, stage, unit = action
        version = self.used.pop((stage, unit))
        if (unit + 1) % self.policy.every == 0:
            grads = taken(self.versions[stage][version])
            self.forget(stage, unit)
            self.step(stage, grads)
            self.forget(stage, unit)
            self.most[stage] = max(self.most[stage], len(self.versions[stage]))

    def step(self, stage: int, grads: dict[str, Tensor]) -> None:
        """The newest weights, less a step along a gradient that was taken at older ones."""
        versions = self.versions[stage]
        newest = versions[max(versions)]
        with torch.no_grad():
            stepped = self.update([newest[name].detach() for name in grads], list(grads.values()))
        versions[max(versions) + 1] = newest | {
            name: param.detach().requires_grad_() for name, param in zip(grads, stepped, strict=True)
        }

    def forget(self, stage: int, unit: int) -> None:
        """The versions that no microbatch in flight has taken and none behind `unit` will take."""
        versions, newest = self.versions[stage], max(self.versions[stage])
        needed = {version for (at, _), version in self.used.items() if at == stage} | {
            newest,
            self.policy.version(unit + 1, newest),
        }
        for version in [version for version in versions if version not in needed]:
            del versions[version]


def taken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of what is trained, which start from zero again."""
    grads = {}
    for name, weight in weights.items():
        if weight.requires_grad:
            grads[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
    return grads


def check_policy(schedule: Schedule, policy: Policy) -> None:
    p, m, k = len(schedule.ranks), schedule.microbatches, policy.every
    if schedule.splits_backward or schedule.recomputes:
        raise ValueError(
            f"{schedule.name} has {'W' if schedule.splits_backward else 'R'}; stashed weights go with whole backwards: use F and B "
            "only"
        )
    if k < 1 or m % k:
        raise ValueError(
            f"{schedule.name}: {m} microbatches are not a multiple of the {k} of an update; use a multiple"
        )
    if 1 < k < p:
        raise ValueError(
            f"{schedule.name}: {k} microbatches an update for {p} ranks; two versions of the weights need at least {p}"
        )
    for entries in schedule.ranks:
        done = dict.fromkeys({action.stage for action in parts(entries)}, 0)
        for action in parts(entries):
            newest = done[action.stage] // k
            if action.kind == "B" and action.microbatch != done[action.stage]:
                raise ValueError(
                    f"{schedule.name}: {action} comes before B{action.stage}.{done[action.stage]}; updates need backwards in "
                    "order"
                )
            if action.kind == "F" and policy.version(action.microbatch, newest) > newest:
                raise ValueError(
                    f"{schedule.name}: {action} comes before the update whose weights it takes; use a schedule that starts "
                    "fewer forwards ahead, such as 1F1B"
                )
            done[action.stage] += action.kind == "B"
