"""A policy applied to a model and its optimizer: passes of `parallelize`, and the scale of the loss.

    widen             weights that are kept wider than what is computed with; they start equal to it
    keep_gradients    .grad in the policy's dtype: autograd adds a bfloat16 dW to a float32 .grad; buckets,
                      shards and messages follow, for they ask the parameter
    keep_states       master and moments in the policy's dtypes, where the optimizer was not told otherwise;
                      where a policy rounds by chance or scales there is no master, even if it was told so,
                      and where it scales the moments are the policy's
    round_by_place    what is rounded by chance, by the numbers of its place
    loss_scale        of gradients that need one

Memory per parameter is the policy's `state_bytes`; sent per parameter: its gradient as wide as `gradients`.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.2 (LossScale). Differs from torch.amp.GradScaler: the
norm tells of overflow, so there is no search for infinities and no all-reduce of a flag.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitrain.precision.chance import Chance
from minitrain.precision.fp8_lm import narrow
from minitrain.precision.policies import Policy


def widen(params: Iterable[nn.Parameter], policy: Policy) -> None:
    kept = getattr(torch, policy.weights)
    for param in params if policy.copies else ():
        if policy.scaled:
            param.data, param.largest = narrow(param.data, kept)
        else:
            param.data = param.data.to(kept)


def keep_gradients(params: Iterable[nn.Parameter], policy: Policy) -> None:
    dtype = policy.copies if policy.scaled else policy.gradients  # what backward gives, to be made codes of
    if dtype != policy.weights:
        for param in params:
            param.grad_dtype = getattr(torch, dtype)


def keep_states(optimizer: torch.optim.Optimizer | None, policy: Policy) -> None:
    updated = policy.master or ("float32" if policy.by_chance else policy.weights)
    wanted = {}
    if policy.master:
        wanted["master_dtype"] = getattr(torch, policy.master)
    if policy.moments != (updated, updated):
        wanted["moment_dtypes"] = tuple(getattr(torch, dtype) for dtype in policy.moments)
    settings = [optimizer.defaults, *optimizer.param_groups] if optimizer else []
    for group in settings:
        check_knows(optimizer, wanted)
        for name, dtype in wanted.items():
            group[name] = dtype if group[name] is None else group[name]
        if policy.by_chance:
            check_knows(optimizer, ["by_chance"])
            group.update(by_chance=True, master_dtype=None)
        if policy.scaled:
            group.update(wanted, master_dtype=None)


def round_by_place(shards: Iterable, names: Mapping, numbers: Callable, policy: Policy, seed: int) -> None:
    """`shards`: what is updated, and [(parameter, first, last)] of its elements; `numbers` of sharding.py."""
    for shard, elements in shards if policy.by_chance else ():
        named = [(names[part[0]], partial(numbers, *part)) for part in elements]
        shard.chance = Chance(named, seed)


def bytes_by_kind(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What a rank keeps when a step is done: together the policy's `state_bytes`, and scales of 4 bytes."""
    found = dict.fromkeys(("weights", "gradients", "master", "moments", "scales"), 0)
    for param in params:
        state = optimizer.state[param]
        tensors = [("weights", param), ("gradients", param.grad), ("master", state.get("master"))]
        tensors += [("moments", state[name]) for name in ("exp_avg", "exp_avg_sq")]
        tensors += [("scales", x) for name, x in (state | vars(param)).items() if name.endswith("largest")]
        for kind, x in tensors:
            found[kind] += 0 if x is None else x.nbytes
    return found


class LossScale:
    """Dynamic loss scaling: gradients that float16 would round to zero are carried above its smallest number.

        factor · loss  ->  factor · gradients  ->  sums over ranks  ->  norm / factor  ->  update, / factor

    After `window` steps in a row with a finite norm the factor doubles; one that is not, as a gradient has
    overflowed, halves it, and nothing is updated: on all ranks, for the norm is that of all. `factor`, that
    of the step to come, is a power of two, hence exact; it leaves in the optimizer, in the dtype of the
    master: divided earlier, in float16 (2^-24 to 65,504), a gradient would underflow after all. `dtype`: of
    the loss. Sends nothing; waits for one number per step: the norm."""

    def __init__(self, factor: float, window: int, dtype: torch.dtype = torch.float32):
        self.factor, self.window, self.good_steps, self.dtype = float(factor), window, 0, dtype

    def divisor(self, num_tokens: Tensor) -> Tensor:
        """What a scaled loss is divided by."""
        return num_tokens.to(self.dtype) / self.factor

    def finite(self, norm: Tensor) -> bool:
        """Whether this step's gradients can be used; sets the next factor. ValueError where that would fall
        below 1: then not the scale overflows, but the training."""
        if type(norm) is not Tensor or math.isfinite(norm.item()):  # a dry run has no numbers
            self.good_steps += 1
            if self.good_steps == self.window:
                self.factor, self.good_steps = self.factor * 2, 0
            return True
        if self.factor == 1:
            cure = "lower the learning rate, or use bfloat16"
            raise ValueError(f"gradients are not finite at loss scale 1, which is the least: {cure}")
        self.factor, self.good_steps = self.factor / 2, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.good_steps = state["factor"], state["good_steps"]


def loss_scale(optimizer, policy: Policy, factor: float, window: int) -> LossScale | None:
    """None for a factor of 0. The optimizer divides gradients by the factor, in the dtype of the master."""
    if factor and optimizer:
        check_knows(optimizer, ["grad_scale"])
    exact = torch.promote_types(getattr(torch, policy.weights), torch.float32)
    return LossScale(factor, window, exact) if factor else None


def check_knows(optimizer: torch.optim.Optimizer, settings: Iterable[str]) -> None:
    for name in settings:
        if name not in optimizer.defaults:
            kind = type(optimizer).__name__
            cure = "use minitrain's AdamW, or a precision without it: float32, float64"
            raise ValueError(f"{kind} has no {name}, which the strategy's precision needs: {cure}")
