"""A policy applied to a model and its optimizer: passes of `parallelize`, and the scale of the loss.

    widen             weights that are kept wider than what is computed with; they start equal to it
    copy_in_time      and the copies of these
    keep_gradients    .grad in the policy's dtype: autograd adds a bfloat16 dW to a float32 .grad; buckets,
                      shards and messages follow, for they ask the parameter
    keep_states       master and moments in the policy's dtypes, where the optimizer was not told otherwise;
                      where a policy rounds by chance or scales there is no master, even if it was told so,
                      and where it scales the moments are the policy's
    round_by_place    what is rounded by chance, by the numbers of its place
    loss_scale        of gradients that need one

Memory per parameter is the policy's `state_bytes`; sent per parameter: its gradient as wide as `gradients`.
Raises ValueError for an optimizer without a setting that the policy needs.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn

from minitrain.precision.chance import Chance
from minitrain.precision.fp8_lm import narrow, wide
from minitrain.precision.jit_copies import make_copies
from minitrain.precision.loss_scale import LossScale
from minitrain.precision.policies import Policy


def widen(params: Iterable[nn.Parameter], policy: Policy) -> None:
    kept = getattr(torch, policy.weights)
    for param in params if policy.copies else ():
        if policy.scaled:
            param.data, param.largest = narrow(param.data, kept)
        else:
            param.data = param.data.to(kept)


def copy_in_time(layers: Iterable[nn.Module], policy: Policy) -> None:
    if policy.copies:
        dtype = getattr(torch, policy.copies)

        def copy_of(param: nn.Parameter) -> torch.Tensor:
            return (wide(param, param.largest) if policy.scaled else param.detach()).to(dtype)

        make_copies(layers, copy_of)


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
    """`shards`: what is updated, which knows the `pieces()` of its parameters; `numbers` of sharding.py."""
    for shard in shards if policy.by_chance else ():
        named = [(names[piece[0]], partial(numbers, *piece)) for piece in shard.pieces()]
        shard.shard.chance = Chance(named, seed)


def bytes_by_kind(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What a rank keeps for these parameters when a step is done: together the policy's `state_bytes`, and
    scales, 4 bytes each."""
    found = dict.fromkeys(("weights", "gradients", "master", "moments", "scales"), 0)
    for param in params:
        state = optimizer.state[param]
        tensors = [("weights", param), ("gradients", param.grad), ("master", state.get("master"))]
        tensors += [("moments", state["exp_avg"]), ("moments", state["exp_avg_sq"])]
        scales = [x for name, x in (state | vars(param)).items() if name.endswith("largest")]
        for kind, x in (*tensors, *(("scales", x) for x in scales)):
            found[kind] += 0 if x is None else x.nbytes
    return found


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
