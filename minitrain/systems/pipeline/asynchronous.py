"""PipeDream: a pipeline that never empties. Each stage updates on its own, and keeps weights still in use.

    rank 0 of 3   F0 F1 F2 .. B0 F3 B1 F4 B2 F5 B3 F6 ..    1F1B for ever: after the first fill no rank waits
    its weights   w0 w0 w0    w0 w1 w1 w2 w2 w3 w3 w4       F3 takes the newest, w1, and B3 takes w1 again

A stage *stashes* the weights of each forward until its backward. `per_microbatch` (PipeDream) updates after
every microbatch, and stage s of p keeps p - s versions: w_s(t+1) = w_s(t) - lr · grad_s(w_0(t-p+1), ..,
w_{p-1}(t)), indices not below 0. `double_buffered(k)` (PipeDream-2BW) updates after k >= p: w(t+1) = w(t) -
lr · grad(w(t-1)); two versions are enough. A call runs `schedule.microbatches`, the whole training;
`batch.num_valid` is the divisor of one update. `update(params, grads)` returns new tensors, and is the place
to sum gradients over ranks. Memory: activations, a gradient, `most[stage]` copies of the weights.
Narayanan et al. 2019, arXiv:1806.03377, sections 3.1 and 3.3; 2021 (2BW), arXiv:2006.09503, section 3.1.
Differs: no vertical sync, no replicated stages; parameters that two stages share train separately.
"""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Action, Schedule, parts
from minitrain.ranks.checks import require_positive_ints

Update = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


class Policy(NamedTuple):
    """An update after `every` microbatches; the forward of `unit` uses `version(unit, newest)`."""

    every: int
    version: Callable[[int, int], int]


def per_microbatch() -> Policy:
    """PipeDream: an update after each microbatch; a forward uses the newest weights."""
    return Policy(1, lambda unit, newest: newest)


def double_buffered(k: int) -> Policy:
    """PipeDream-2BW: an update after k microbatches; batch t uses the weights after t-1 updates."""
    require_positive_ints(k=k)
    return Policy(k, lambda unit, newest: max(unit // k - 1, 0))


def sgd(lr: float) -> Update:
    return lambda params, grads: [param - lr * grad for param, grad in zip(params, grads)]


class AsynchronousRunner(Runner):
    """Runner with a choice of weights before each forward and an update after backwards."""

    def __init__(self, stages, schedule, group, loss_fn, policy: Policy, update: Update, **settings):
        check_policy(schedule, policy)
        nothing = lambda params: None
        reducer = SimpleNamespace(on_microbatch_grads=nothing, on_step_grads=nothing)
        super().__init__(stages, schedule, group, loss_fn, reducer, **settings)
        self.policy, self.update, self.weights = policy, update, {}

    def __call__(self, batch) -> Tensor:
        copy = lambda param: param.detach().clone().requires_grad_(param.requires_grad)
        copies = lambda stage: {name: copy(param) for name, param in stage.named_parameters()}
        self.versions = {number: {0: copies(stage)} for number, stage in self.stages.items()}
        self.used: dict[tuple[int, int], int] = {}  # (stage, unit) in flight -> version
        self.most = dict.fromkeys(self.stages, 1)
        loss = super().__call__(batch)
        for number, stage in self.stages.items():
            stage.load_state_dict(self.versions[number][max(self.versions[number])], strict=False)
        return loss

    def run(self, stage: int, x: Tensor, positions: Tensor) -> Tensor:
        inputs = (x, positions) if stage in self.with_positions else (x,)
        return torch.func.functional_call(self.stages[stage], self.weights, inputs)

    def forward(self, action: Action) -> None:
        _, stage, unit = action
        self.used[stage, unit] = version = self.policy.version(unit, max(self.versions[stage]))
        self.weights = self.versions[stage][version]
        super().forward(action)
        self.weights = {}

    def backward(self, action: Action) -> None:
        super().backward(action)
        _, stage, unit = action
        version = self.used.pop((stage, unit))
        if (unit + 1) % self.policy.every == 0:
            grads = {}
            for name, weight in self.versions[stage][version].items():
                if weight.requires_grad:
                    grads[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    weight.grad = None
            self.forget(stage, unit)
            self.step(stage, grads)
            self.forget(stage, unit)
            self.most[stage] = max(self.most[stage], len(self.versions[stage]))

    @torch.no_grad()
    def step(self, stage: int, grads: dict[str, Tensor]) -> None:
        """Adds a version: the newest weights, moved along a gradient that was taken at older ones."""
        versions = self.versions[stage]
        newest = versions[max(versions)]
        params = self.update([newest[name].detach() for name in grads], list(grads.values()))
        stepped = {name: param.detach().requires_grad_() for name, param in zip(grads, params, strict=True)}
        versions[max(versions) + 1] = newest | stepped

    def forget(self, stage: int, unit: int) -> None:
        """Drops versions that no microbatch in flight uses, and none after `unit` will."""
        newest = max(self.versions[stage])
        needed = {version for (at, _), version in self.used.items() if at == stage}
        needed |= {newest, self.policy.version(unit + 1, newest)}
        for version in self.versions[stage].keys() - needed:
            del self.versions[stage][version]


def check_policy(schedule: Schedule, policy: Policy) -> None:
    p, m, k, wrong = len(schedule.ranks), schedule.microbatches, policy.every, None
    if schedule.splits_backward or schedule.recomputes:
        wrong = "stashed weights go with whole backwards; use F and B only"
    elif k < 1 or m % k:
        wrong = f"{m} microbatches are not a multiple of the {k} of an update; use a multiple"
    elif 1 < k < p:
        wrong = f"{k} microbatches per update; two versions of the weights need at least {p} for {p} ranks"
    done = dict.fromkeys(product(range(p), range(schedule.stages)), 0)  # backwards
    for rank, action in ((rank, action) for rank in range(p) for action in parts(schedule.ranks[rank])):
        kind, stage, unit = action
        newest = done[rank, stage] // max(k, 1)
        if kind == "B" and unit != done[rank, stage]:
            wrong = wrong or f"{action} comes too early or late; updates need backwards in order"
        if kind == "F" and not wrong and policy.version(unit, newest) > newest:
            wrong = f"{action} comes before the update whose weights it takes; run fewer ahead"
        done[rank, stage] += kind == "B"
    if wrong:
        raise ValueError(f"{schedule.name}: {wrong}")
