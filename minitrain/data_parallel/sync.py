"""Sync: what sums gradients over ranks and owns the optimizer. All stages of sharding are one of these to a training step.

    forward_backward   ->   finish()            ->   clip            ->   step()                     ->   the next forward
    hooks see gradients     all are sums             over the shards      optimizer, then publish()       sees the new parameters

Who tells it that a gradient is complete? Autograd's hooks while `enabled`, or whoever runs backwards in an order of its own (a
pipeline), which then sets `driven`: `arrived(params)` after each microbatch, `ready(params)` when it was the last.

The optimizer is the reader's: `make_optimizer(params)` is called once with a stand-in for every trainable parameter, which has its
`.global_name` and the shape of the whole and no memory. So groups by name or shape (`p.dim() >= 2`) mean the same whatever is cut; then what
this rank keeps of the parameters takes their places. Nothing that is kept mixes two groups.

States: `full_state_dict()` has whole parameters and optimizer states by global name, the same on all ranks that hold them, and
`load_full_state_dict` takes them into any stage, any number of ranks and any cut.
Sends nothing but for `full_*`, which gathers (n-1)/n of what it returns, cut by cut.
Raises ValueError in one line for an optimizer that was built already, that leaves parameters out or is over others, for a state of
another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitrain import collectives
from minitrain.sharding import full_tensor, own_slice, placement, whole_shape

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Whole:
    """A parameter that this rank updates as it is. Flat (flat.py) has the same face for many, of which a rank keeps a slice."""

    def __init__(self, param: nn.Parameter):
        self.shard, self.params = param, [param]

    def unfold(self, kept: Tensor) -> list[Tensor]:
        """What all ranks keep together, a tensor for each parameter."""
        return [kept.detach().clone()]

    def fold(self, tensors: list[Tensor]) -> Tensor:
        """What this rank keeps of one tensor for each parameter."""
        return tensors[0]


class Sync:
    """A stage adds how gradients and parameters get about: `finish`, `publish`, and what it does when it is told."""

    enabled = True  # hooks count: this backward is the last of the step
    driven = False  # hooks do not count: `arrived` and `ready` are called

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        held: Iterable[Any],
        optimizer: torch.optim.Optimizer | None,
        early: Mapping[nn.Parameter, dict],
        group_of: Mapping[nn.Parameter, int],
    ):
        """`names`: of every parameter, frozen ones too; `held`: what it keeps of them (Whole, Flat); the others are what `built` says."""
        self.names, self.held, self.optimizer = names, list(held), optimizer
        for kept in self.held:
            if optimizer and kept.shard.requires_grad:
                optimizer.param_groups[group_of[kept.params[0]]]["params"].append(kept.shard)
                if kept.params[0] in early:
                    self._take_state(kept, [early[param] for param in kept.params])

    # ---- a training step -----------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups if self.optimizer else []

    def zero_grad(self) -> None:
        for kept in self.held:
            kept.shard.grad = None
            for param in kept.params:
                param.grad = None

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete for this step."""

    def arrived(self, params: Iterable[nn.Parameter]) -> None:
        """A microbatch has added its gradients to these."""

    def lives(self) -> list[Tensor]:
        """Memory of parameters besides their own."""
        return []

    def finish(self) -> None:
        """Every gradient that the optimizer will see is the sum over all ranks and microbatches."""
        raise NotImplementedError

    def step(self) -> None:
        """Update, then bring the model up to date."""
        if self.optimizer:
            self.optimizer.step()
        self.publish()

    def publish(self) -> None:
        """Bring the model up to date with what was updated. Here: it is."""

    def add_copies(self, kept) -> None:
        """Ranks of other stages that hold the same have terms of the same gradient."""
        copies = placement(kept.params[0]).copies
        if copies is not None:
            collectives.all_reduce(kept.shard.grad, copies, out=kept.shard.grad)

    def missing(self, params: Iterable[nn.Parameter]) -> ValueError:
        return ValueError(
            f"no gradient for {', '.join([self.names[param] for param in params][:3])}; use every parameter in the loss on "
            "every rank, freeze it with requires_grad_(False), or set enabled=True before the last backward"
        )

    # ---- looking at the whole ------------------------------------------------------------------------------------------

    def full_tensor(self, param: nn.Parameter) -> Tensor:
        """The whole of a parameter of the model, on every rank (all that hold it must ask)."""
        if any(param is loose for loose in self.loose()):
            return full_tensor(param).clone()
        return self._whole(param, lambda kept: kept.shard)

    def full_grad(self, param: nn.Parameter) -> Tensor:
        """The whole of its gradient, after `finish()`."""
        return self._whole(param, lambda kept: kept.shard.grad)

    def _whole(self, param: nn.Parameter, shard_of: Callable) -> Tensor:
        for kept in self.held:
            for position, known in enumerate(kept.params):
                if known is param:
                    return full_tensor(kept.unfold(shard_of(kept))[position].clone(), placement(param).shards)
        raise ValueError(
            f"this parameter {list(param.shape)} is not sharded here; give one of the model's, as it was passed"
        )

    def loose(self) -> list[nn.Parameter]:
        """Parameters that are not kept for updates: frozen ones."""
        kept = {param for held in self.held for param in held.params}
        return [param for param in self.names if param not in kept]

    # ---- states --------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """Copies of whole parameters and optimizer states by name."""
        full: dict[str, Any] = {
            "parameters": {self.names[param]: full_tensor(param).clone() for param in self.loose()},
            "optimizer": {},
        }
        for kept in self.held:
            state = self.optimizer.state.get(kept.shard, {}) if self.optimizer else {}
            weights = kept.unfold(kept.shard)
            whole = {key: kept.unfold(value) for key, value in state.items() if is_cut(value, kept.shard)}
            for position, param in enumerate(kept.params):
                name, shards = self.names[param], placement(param).shards
                full["parameters"][name] = full_tensor(weights[position], shards).clone()
                if state:
                    full["optimizer"][name] = {
                        key: full_tensor(whole[key][position], shards).clone()
                        if key in whole
                        else copied(value)
                        for key, value in state.items()
                    }
        return full

    def load_full_state_dict(self, full: dict[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict` gave, wherever that came from."""
        ours, theirs = set(self.names.values()), set(full["parameters"])
        if ours != theirs:
            raise ValueError(
                f"the state lacks {sorted(ours - theirs)[:3]} and has {sorted(theirs - ours)[:3]} too many: it is of another model"
            )
        with torch.no_grad():
            for param in self.loose():
                param.copy_(own_slice(full["parameters"][self.names[param]], param))
            for kept in self.held:
                names = [self.names[param] for param in kept.params]
                own = [
                    own_slice(full["parameters"][name].to(param.device), param)
                    for name, param in zip(names, kept.params)
                ]
                kept.shard.copy_(kept.fold(own))
                if self.optimizer and kept.shard.requires_grad and names[0] in full["optimizer"]:
                    self._take_state(kept, [full["optimizer"][name] for name in names])
        self.publish()

    def _take_state(self, kept, states: list[dict]) -> None:
        """`states`: of the whole parameters."""
        shape, device = whole_shape(kept.params[0]), kept.params[0].device
        self.optimizer.state[kept.shard] = {
            key: kept.fold(
                [own_slice(state[key].to(device), param) for state, param in zip(states, kept.params)]
            ).clone()
            if isinstance(value, Tensor) and list(value.shape) == shape
            else copied(value)
            for key, value in states[0].items()
        }


def built(make_optimizer: MakeOptimizer | None, names: Mapping[nn.Parameter, str]) -> tuple:
    """(the optimizer, states it has made already, the group of each trainable parameter); its groups are empty, to be filled."""
    trainable = {param: name for param, name in names.items() if param.requires_grad}
    if isinstance(make_optimizer, torch.optim.Optimizer):
        kind = type(make_optimizer).__name__
        raise ValueError(
            f"{kind} was built before sharding, over whole parameters; give a function that builds it: "
            f"lambda params: {kind}(params, lr=...)"
        )
    if make_optimizer is None or not trainable:
        return None, {}, {}
    stand_ins = {}
    for param, name in trainable.items():
        stand_in = nn.Parameter(param.new_empty(()).expand(whole_shape(param)))
        stand_in.global_name = name
        stand_ins[stand_in] = param
    optimizer = make_optimizer(list(stand_ins))
    group_of = {}
    for number, group in enumerate(optimizer.param_groups):
        if any(param not in stand_ins for param in group["params"]):
            raise ValueError(
                "make_optimizer built its optimizer over other tensors than those it was given; use its argument, "
                "lambda params: AdamW(params, lr=...)"
            )
        group_of |= {stand_ins[param]: number for param in group["params"]}
        group["params"] = []
    if left := [name for param, name in trainable.items() if param not in group_of]:
        raise ValueError(
            f"make_optimizer left out {', '.join(left[:3])}; give it every parameter, or freeze those, requires_grad_(False)"
        )
    early = {stand_ins[param]: state for param, state in optimizer.state.items()}
    optimizer.state.clear()
    return optimizer, early, group_of


def parts_of(model: nn.Module) -> list[dict[nn.Parameter, str]]:
    """Parameters that become complete together, each once with its name: all of a model, or stage by stage if it says `parts()`."""
    parts = model.parts() if hasattr(model, "parts") else [named_once(model)]
    devices = sorted({str(param.device) for part in parts for param in part})
    if len(devices) > 1:
        raise ValueError(
            f"parameters are on {', '.join(devices)}; move the model to one device before it is sharded, model.to(device)"
        )
    return parts


def named_once(model: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter and its first name, in the order of these: the gradient of a tied table is complete last."""
    return {param: name for name, param in model.named_parameters()}


def check_trainable(names: dict[nn.Parameter, str], model: nn.Module) -> dict[nn.Parameter, str]:
    """The names; a model without any parameter to train is a mistake, a frozen stage of a pipeline is none."""
    if not hasattr(model, "parts") and not any(param.requires_grad for param in names):
        raise ValueError("no parameter asks for a gradient; set requires_grad=True somewhere")
    return names


def together(parts: Iterable[dict[nn.Parameter, str]]) -> dict[nn.Parameter, str]:
    return {param: name for part in parts for param, name in part.items()}


def sums_alike(
    parts: Iterable[dict[nn.Parameter, str]], groups: tuple, group_of: Mapping[nn.Parameter, int]
) -> Iterator[tuple[nn.Parameter, tuple]]:
    """Each parameter, and a key that is equal for those that may share a buffer: they become complete together, are summed over the same
    ranks (`groups`, where no placement says so), cut alike and updated alike."""
    for number, part in enumerate(parts):
        for param in part:
            where = placement(param)
            yield (
                param,
                (
                    number,
                    param.dtype,
                    where.summed_over or groups,
                    where.copies,
                    where.cut_over,
                    group_of.get(param),
                ),
            )


def is_cut(value: object, shard: Tensor) -> bool:
    """Does the optimizer keep `value` for every element of the shard?"""
    return isinstance(value, Tensor) and value.shape == shard.shape


def copied(value: Any) -> Any:
    """The same nest of dicts and lists with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value
