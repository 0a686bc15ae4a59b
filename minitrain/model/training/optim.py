"""AdamW on whatever tensors it is given, and one norm over parameters cut in any way.

With gradient g, step t, moments m and v, for every element (the paper's symbols):

    θ ← θ - lr·λ·θ                      weight decay, decoupled: not through the moments
    m ← β1·m + (1 - β1)·g               exp_avg
    v ← β2·v + (1 - β2)·g²              exp_avg_sq
    θ ← θ - lr · m̂ / (√v̂ + ε)           m̂ = m / (1 - β1^t), v̂ = v / (1 - β2^t)

Nothing here mixes elements, so the optimizer of a shard is the same; only the norm does, which learns from
`param.placement` over which groups to sum its squares: one number per way of cutting. Memory per parameter: 8
bytes in float32, and 4 more for a float32 master of a bfloat16 parameter.
Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; masters: Micikevicius et al. 2018,
arXiv:1710.03740, section 3.1. Differs from torch.optim.AdamW: it runs on fake tensors (the step is an int);
`state_dict` and `load_state_dict` copy, so that training does not write into a checkpoint held in memory.
"""

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from minitrain.precision.chance import keep_by_chance
from minitrain.precision.fp8_lm import narrow, wide
from minitrain.ranks import checks, collectives
from minitrain.ranks.sharding import placement


def adamw_update(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of one tensor, in place. `state` holds exp_avg, exp_avg_sq and the step, counted from 1."""
    (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"]
    exp_avg, exp_avg_sq = (state[name].to(weight.dtype) for name in ("exp_avg", "exp_avg_sq"))
    weight.mul_(1 - lr * group["weight_decay"])
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if moment is not state[name]:  # kept in fewer bits
            state[name].copy_(moment)


class AdamW(torch.optim.Optimizer):
    """AdamW over parameters or groups of them (`[{"params": ..., "weight_decay": 0.0}, ...]`).

    With `master_dtype=torch.float32` a parameter of lower precision is updated in a float32 copy and rounded
    once a step: bfloat16 keeps 8 bits, so a weight would not notice a change below 1/512 of itself. A step
    makes a denominator, and for a master its gradient, as large as the parameter, or as a `tile` of so many
    elements (DeepSpeed-TED: Singh et al. 2023, arXiv:2303.06318, section 4.2). Moments are kept in
    `moment_dtypes`, else in the dtype of what is updated; gradients are `grad_scale` times too large.
    `by_chance`: what is kept in bfloat16 is rounded by the numbers of `param.chance` (precision/chance.py).
    A parameter with a `largest` is codes with a scale, as gradient and moments are (precision/fp8_lm.py)."""

    before_update = None  # if somebody sets it, called with a parameter before it and its state change
    update = staticmethod(adamw_update)  # an instance may have a kernel in its place

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        master_dtype: torch.dtype | None = None,
        tile: int | None = None,
        moment_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
        grad_scale: float = 1.0,
        by_chance: bool = False,
    ):
        settings = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        kept = dict(master_dtype=master_dtype, moment_dtypes=moment_dtypes, by_chance=by_chance)
        super().__init__(params, settings | kept | dict(grad_scale=grad_scale, tile=tile))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self.before_update:
                    self.before_update(param)
                state = self.state[param] or self._new_state(param, group)
                state["step"] += 1
                if hasattr(param, "largest"):
                    update_scaled(param, state, group)
                    continue
                weight = state.get("master", param)
                tensors = [weight, param.grad, state["exp_avg"], state["exp_avg_sq"]]
                if group["by_chance"]:
                    if not hasattr(param, "chance"):
                        found = f"by_chance=True, and a parameter {list(param.shape)} has no place"
                        raise ValueError(f"{found}: use parallelize with a precision that rounds by chance")
                    tensors.append(param.chance.bits(state["step"], param))
                for part, grad, exp_avg, exp_avg_sq, *bits in tiles(tensors, group["tile"]):
                    moments = dict(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=state["step"])
                    exact = torch.promote_types(part.dtype, torch.float32) if bits else part.dtype
                    grad = grad.to(exact)
                    if group["grad_scale"] != 1:
                        grad = grad / group["grad_scale"]
                    if bits:
                        update_by_chance(part, grad, moments, group, bits[0])
                    else:
                        self.update(part, grad, moments, group)
                if weight is not param:
                    param.copy_(weight)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state, weight, master_dtype = self.state[param], param, group["master_dtype"]
        if master_dtype is not None and master_dtype != param.dtype:
            weight = state["master"] = param.detach().to(master_dtype)
        exact = torch.promote_types(weight.dtype, torch.float32) if group["by_chance"] else weight.dtype
        dtypes = group["moment_dtypes"] or (exact, exact)
        moments = (torch.zeros_like(weight, dtype=dtype) for dtype in dtypes)
        state.update(zip(("step", "exp_avg", "exp_avg_sq"), (0, *moments)))
        if hasattr(param, "largest"):
            for name in ("exp_avg_largest", "exp_avg_sq_largest"):
                state[name] = torch.zeros_like(param.largest)
        return state

    # These four replace torch's, which import its compiler when first used: two seconds in every rank. Its
    # load_state_dict shares tensors with the caller, rounds states of bfloat16, takes those of other shapes.

    def zero_grad(self) -> None:
        for param in self._params():
            param.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given, known = param_group["params"], self._params()
        given = [given] if isinstance(given, Tensor) else list(given)
        group = {**self.defaults, **param_group, "params": given}
        if unknown := sorted(set(group) - set(self.defaults) - {"params"}):
            raise ValueError(f"unknown setting {unknown[0]!r}; AdamW knows {', '.join(self.defaults)}")
        _check_settings(group)
        if not all(isinstance(param, Tensor) and param.is_leaf for param in given):
            raise ValueError("AdamW updates leaf tensors: pass model.parameters()")
        if len({*given, *known}) < len(given) + len(known):
            raise ValueError("a parameter is given twice: it would be updated twice; list each one once")
        self.param_groups.append(group)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state, parameters by their number, to save or to keep in memory."""
        number = {param: i for i, param in enumerate(self._params())}
        groups = [{**group, "params": [number[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {number[p]: _copy(state) for p, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a copy of `state_dict`, on each parameter's device, in the dtypes it was saved in."""
        saved, params = state_dict["param_groups"], self._params()
        sizes, found = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if sizes != found:
            raise ValueError(f"the state has groups of {found} parameters, this optimizer of {sizes}")
        for i, state in state_dict["state"].items():
            if (found := state["exp_avg"].shape) != (shape := params[i].shape):
                raise ValueError(f"the state of parameter {i} is {list(found)}, the parameter {list(shape)}")
        self.state.clear()
        for i, state in state_dict["state"].items():
            self.state[params[i]] = _copy(state, params[i].device)
        for group, saved_group in zip(self.param_groups, saved):
            group.update({name: value for name, value in saved_group.items() if name != "params"})

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def tiles(tensors: Iterable[Tensor], size: int | None) -> Iterable[tuple[Tensor, ...]]:
    """Views of tensors of one shape, `size` elements at a time; None: as they are."""
    if size is None:
        return [tuple(tensors)]
    weight, grad, *moments = tensors  # a gradient may have other strides
    return zip(*(x.split(size) for x in (weight.view(-1), grad.flatten(), *(m.view(-1) for m in moments))))


def update_by_chance(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict, bits: Tensor) -> None:
    """The same in float32, then what is kept in bfloat16 is rounded by chance."""
    kept = dict(weight=weight, exp_avg=state["exp_avg"], exp_avg_sq=state["exp_avg_sq"])
    exact = {name: x.to(grad.dtype) for name, x in kept.items()}
    adamw_update(exact["weight"], grad, dict(exact, step=state["step"]), group)
    for number, (name, x) in enumerate(kept.items()):
        if x.dtype == torch.bfloat16:
            keep_by_chance(x, exact[name], bits, number)
        elif x is not exact[name]:
            x.copy_(exact[name])


def update_scaled(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The same in float32 for a parameter, gradient and moments that are codes with a scale each."""
    names = ("exp_avg", "exp_avg_sq")
    weight, grad = wide(param, param.largest), values_of(param).div_(group["grad_scale"])
    moments = {name: wide(state[name], state[f"{name}_largest"]) for name in names}
    adamw_update(weight, grad, dict(moments, step=state["step"]), group)
    codes, param.largest = narrow(weight, param.dtype)
    param.copy_(codes)
    for name in names:
        state[name], state[f"{name}_largest"] = narrow(moments[name], state[name].dtype)


def values_of(param: Tensor) -> Tensor:
    if hasattr(param, "largest"):
        return wide(param.grad, param.grad_largest)
    return torch.view_as_real(param.grad) if param.grad.is_complex() else param.grad


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor], max_norm: float, *, stages=None, like: Tensor | None = None, grad_scale=1.0
) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm); return the norm of the whole gradient before, a tensor.

    Squares of a parameter cut over groups are summed over exactly those; one that is not cut counts once; one
    with copies on other stages of a pipeline on the first. `stages`: the ranks with the other layers, over
    which squares are added too (a stage may train nothing: `like` has the dtype and device of all). Hence the
    same number on every rank, which must all call this, those of a stage with the same parameters in order. A
    NaN makes the norm so: the caller reads it, and stops. Gradients are `grad_scale` times too large."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: must be > 0 (math.inf measures without clipping)")
    params = list(params)
    square = sum_of_squares(params, like)
    if stages is not None:
        square = collectives.all_reduce(square, stages)
    norm = square.sqrt() if grad_scale == 1 else square.sqrt() / grad_scale
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's epsilon: no division by zero
    for param in params:
        if param.grad is not None:
            (param.grad_largest if hasattr(param, "largest") else param.grad).mul_(scale.to(param.device))
    return norm


def sum_of_squares(params: list[Tensor], like: Tensor | None = None) -> Tensor:
    """Of the whole gradients of this rank's parameters, each counted once; in float32 or better."""
    if not params and like is None:
        raise ValueError("no parameters: there is no norm to clip")
    dtypes = (param.dtype.to_real() for param in params)
    dtype = reduce(torch.promote_types, dtypes, torch.float32 if like is None else like.dtype)
    device = (params[0] if like is None else like).device  # gradients may be on the host
    total = torch.zeros((), dtype=dtype, device=device)
    # The groups that cut -> the parameters they cut, also those without a gradient: a rank whose expert saw
    # no token takes part in the all-reduce too.
    cuts: dict[tuple, list[Tensor]] = {}
    for param in params:
        cuts.setdefault(placement(param).cut_over, []).append(param)
    for groups, held in cuts.items():
        square = torch.zeros_like(total)
        for param in held:
            copies = placement(param).copies
            if param.grad is not None and (copies is None or copies.rank() == 0):
                square = square + torch.linalg.vector_norm(values_of(param), dtype=dtype).square().to(device)
        for group in groups:
            square = collectives.all_reduce(square, group)
        total = total + square
    return total


def _check_settings(group: dict[str, Any]) -> None:
    betas, moment_dtypes = group["betas"], group["moment_dtypes"] or []
    checks.require_nonnegative(lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"])
    checks.require_fractions(betas=betas)
    checks.require_positive(grad_scale=group["grad_scale"])
    if max(betas) == 1:
        raise ValueError(f"betas={betas}: use fractions below 1")
    if group["tile"] is not None:
        checks.require_positive_ints(1 << 40, tile=group["tile"])
    for name, dtypes in (("master_dtype", [group["master_dtype"]]), ("moment_dtypes", moment_dtypes)):
        if not all(dtype is None or getattr(dtype, "is_floating_point", False) for dtype in dtypes):
            raise ValueError(f"{name}={dtypes}: use floating-point dtypes such as torch.float32, or None")


def _copy(state: dict[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    copied = lambda x: x.detach().to(device or x.device, copy=True) if isinstance(x, Tensor) else x
    return {name: copied(value) for name, value in state.items()}
