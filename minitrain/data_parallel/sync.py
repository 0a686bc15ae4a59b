"""Sync: what sums gradients over ranks and owns the optimizer; every stage of sharding is one of these.

    forward_backward   ->   finish()       ->   clip           ->   step()                   ->   forward
    hooks see gradients     all are sums        over the shards     optimizer, then publish()     new weights

A gradient is complete when autograd's hook says so while `enabled`; a pipeline, which runs backwards in an
order of its own, sets `driven` and calls `arrived(params)` after each microbatch and `ready(params)` after
the last.
`make_optimizer(params)` is called once with a stand-in for every trainable parameter: its `.global_name`, the
shape of the whole, no memory. So groups by name or shape (`p.dim() >= 2`) mean the same whatever is cut. Then
what this rank keeps takes the stand-ins' places; nothing that is kept mixes two groups.
`full_state_dict()` has whole parameters and optimizer states by global name, the same on all ranks that hold
them; `load_full_state_dict` takes them into any stage, number of ranks and cut.
Sends nothing but for `full_*`, which gathers (n-1)/n of what it returns, cut by cut.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitrain import collectives
from minitrain.sharding import full_tensor, own_slice, placement, whole_shape

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class BufferKey(NamedTuple):
    """Parameters with equal keys may share a buffer: complete, summed, cut and updated alike."""

    part: int  # of a pipeline: the stage
    groups: tuple  # over whose ranks the gradient is a sum
    copies: object  # who else holds them
    cut_over: tuple
    dtype: torch.dtype
    settings: int | None  # the optimizer's group


class WholeParameter:
    """A parameter that this rank updates as it is; flat.Flat has the same interface for a slice of many."""

    def __init__(self, param: nn.Parameter):
        self.shard, self.params = param, [param]

    def unfold(self, kept: Tensor) -> list[Tensor]:
        """What all ranks keep, put together: a tensor for each parameter."""
        return [kept.detach().clone()]

    def fold(self, tensors: list[Tensor]) -> Tensor:
        """What this rank keeps of one tensor for each parameter."""
        return tensors[0]

    def pieces(self) -> list[tuple[nn.Parameter, int, int]]:
        """Elements first .. last of which parameter are kept, in the order of the shard."""
        return [(self.shard, 0, self.shard.numel())]


class Sync:
    """A stage adds how gradients and parameters travel: `finish`, `publish`, and what hooks call."""

    enabled = True  # hooks count: this backward is the last of the step
    driven = False  # hooks do not count: `arrived` and `ready` are called
    host = None  # who takes gradients away as soon as they are sums: an optimizer of the host

    def __init__(self, model: nn.Module, groups: tuple, make_optimizer: MakeOptimizer | None):
        """`groups`: over whose ranks gradients are sums, where a parameter's placement names no others."""
        self.parts = parts_of(model)
        self.names = all_names(self.parts)  # of every parameter, frozen ones too
        self.trainable = [param for param in self.names if param.requires_grad]
        self.optimizer, self._first_states, group_of = build_optimizer(make_optimizer, self.names)
        self.key_of: dict[nn.Parameter, BufferKey] = {}
        for number, part in enumerate(self.parts):
            for param in part:
                at, over = placement(param), placement(param).summed_over or groups
                key = BufferKey(number, over, at.copies, at.cut_over, param.dtype, group_of.get(param))
                self.key_of[param] = key

    def hold(self, held: Iterable) -> None:
        """What this rank keeps of the parameters (WholeParameter, Flat) is what the optimizer updates."""
        self.held, first_states, self._first_states = list(held), self._first_states, {}
        for kept in self.held:
            if self.optimizer and kept.shard.requires_grad:
                group = self.optimizer.param_groups[self.key_of[kept.params[0]].settings]
                group["params"].append(kept.shard)
                if kept.params[0] in first_states:
                    self._take_state(kept, [first_states[param] for param in kept.params])

    # ---- a training step

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups if self.optimizer else []

    def zero_grad(self) -> None:
        for kept in self.held:
            for param in (kept.shard, *kept.params):
                param.grad = None
        if self.host:
            self.host.zero_grad()

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

    def send_to(self, host) -> None:
        """From now on `host` updates: an optimizer (memory/host_optimizer.py) made of this one's."""
        self.optimizer = self.host = host

    def final(self, kept) -> None:
        """The gradient of what is kept is the sum, unless other stages have terms of it."""
        if self.host and placement(kept.params[0]).copies is None:
            self.host.take(kept.shard, kept.shard.grad)

    def all_final(self) -> None:
        """So are all; `finish` ends with it."""
        if self.host:
            for kept in self.held:
                if kept.shard.grad is not None and not self.host.has_taken(kept.shard):
                    self.host.take(kept.shard, kept.shard.grad)
            self.host.taken()

    def found(self, kept, grad: Tensor) -> None:
        """A sum over data ranks: the gradient of what is kept, when other stages have added theirs."""
        copies = placement(kept.params[0]).copies
        if copies is not None:
            collectives.all_reduce(grad, copies, out=grad)
        if self.host:
            self.host.take(kept.shard, grad)
        else:
            kept.shard.grad = grad

    def grad_of(self, kept) -> Tensor | None:
        """The gradient that the optimizer sees, wherever it is."""
        return self.host.grad_of(kept.shard) if self.host else kept.shard.grad

    def settle(self) -> None:
        """Bring in updates that are still being made."""
        if self.host and self.host.settle():
            self.publish()

    def add_copies(self, kept) -> None:
        """Ranks of other stages that hold the same parameters have terms of the same gradient."""
        copies = placement(kept.params[0]).copies
        if copies is not None:
            collectives.all_reduce(kept.shard.grad, copies, out=kept.shard.grad)

    def no_gradient(self, params: Iterable[nn.Parameter]) -> ValueError:
        names = ", ".join([self.names[param] for param in params][:3])
        ways_out = (
            "use all in the loss on every rank, freeze them, or set enabled=True before the last backward"
        )
        return ValueError(f"no gradient for {names}; {ways_out}")

    # ---- the whole of a parameter

    def full_tensor(self, param: nn.Parameter) -> Tensor:
        """The whole of a parameter of the model, on every rank (all that hold it must ask)."""
        if any(param is frozen for frozen in self.frozen()):
            return full_tensor(param).clone()
        return self._whole(param, lambda kept: kept.shard)

    def full_grad(self, param: nn.Parameter) -> Tensor:
        """The whole of its gradient, after `finish()`."""
        return self._whole(param, self.grad_of)

    def _whole(self, param: nn.Parameter, shard_of: Callable) -> Tensor:
        for kept in self.held:
            for position, known in enumerate(kept.params):
                if known is param:
                    mine = shard_of(kept).to(param.device)  # from the host, perhaps
                    return full_tensor(kept.unfold(mine)[position].clone(), placement(param).shards)
        raise ValueError(f"this parameter {list(param.shape)} is not sharded here; give one of the model")

    def full_tensors(self) -> dict[str, Tensor]:
        """All parameters, whole, by name: a buffer is gathered once, not for each of its parameters."""
        whole = {self.names[param]: full_tensor(param).clone() for param in self.frozen()}
        return whole | self._all_whole(self.held, lambda kept: kept.shard)

    def full_grads(self) -> dict[str, Tensor]:
        """All gradients likewise, after `finish()`."""
        trainable = [kept for kept in self.held if kept.shard.requires_grad]
        return self._all_whole(trainable, self.grad_of)

    def _all_whole(self, held: Iterable, shard_of: Callable) -> dict[str, Tensor]:
        whole = {}
        for kept in held:
            mine = shard_of(kept).to(kept.params[0].device)
            for param, part in zip(kept.params, kept.unfold(mine)):
                whole[self.names[param]] = full_tensor(part, placement(param).shards).clone()
        return whole

    def frozen(self) -> list[nn.Parameter]:
        """Parameters that are not kept for updates."""
        kept = {param for held in self.held for param in held.params}
        return [param for param in self.names if param not in kept]

    # ---- states

    def full_state_dict(self) -> dict[str, Any]:
        """Copies of whole parameters and optimizer states by name."""
        self.settle()
        states: dict[str, dict] = {}
        for kept in self.held:
            state, shape = (
                self.optimizer.state.get(kept.shard, {}) if self.optimizer else {},
                kept.shard.shape,
            )
            cut = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
            device = kept.params[0].device  # what the host keeps is gathered from there
            whole = {key: kept.unfold(state[key].to(device)) for key in state if key in cut}
            for position, param in enumerate(kept.params):
                name, shards = self.names[param], placement(param).shards
                for key, value in state.items():
                    full = full_tensor(whole[key][position], shards).clone() if key in cut else copied(value)
                    states.setdefault(name, {})[key] = full
        return {"parameters": self.full_tensors(), "optimizer": states}

    def load_full_state_dict(self, full: dict[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict` gave, in whatever layout."""
        self.settle()
        parameters, states = full["parameters"], full["optimizer"]
        ours, theirs = set(self.names.values()), set(parameters)
        if ours != theirs:
            less, more = sorted(ours - theirs)[:3], sorted(theirs - ours)[:3]
            raise ValueError(f"the state lacks {less} and has {more} too many: it is of another model")
        with torch.no_grad():
            for param in self.frozen():
                param.copy_(own_slice(parameters[self.names[param]], param))
            for kept in self.held:
                names = [self.names[param] for param in kept.params]
                own = [own_slice(parameters[self.names[p]].to(p.device), p) for p in kept.params]
                kept.shard.copy_(kept.fold(own))
                if self.optimizer and kept.shard.requires_grad and names[0] in states:
                    self._take_state(kept, [states[name] for name in names])
        if self.host:
            self.host.refresh()
        self.publish()

    def _take_state(self, kept, states: list[dict]) -> None:
        """`states`: of the whole parameters."""
        shape, mine = whole_shape(kept.params[0]), {}
        for key, value in states[0].items():
            if isinstance(value, Tensor) and list(value.shape) == shape:
                own = [own_slice(state[key].to(p.device), p) for state, p in zip(states, kept.params)]
                mine[key] = kept.fold(own).clone()
            else:
                mine[key] = copied(value)
        self.optimizer.state[kept.shard] = mine


def build_optimizer(make_optimizer: MakeOptimizer | None, names: Mapping[nn.Parameter, str]) -> tuple:
    """(the optimizer, its groups emptied; states it made already; the group of each trainable parameter)."""
    if isinstance(make_optimizer, torch.optim.Optimizer):
        kind = type(make_optimizer).__name__
        way_out = f"give a function that builds it: lambda params: {kind}(params, lr=...)"
        raise ValueError(f"{kind} was built before sharding, over whole parameters; {way_out}")
    trainable = {param: name for param, name in names.items() if param.requires_grad}
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
            raise ValueError("make_optimizer built its optimizer over other tensors; use those it is given")
        group_of |= {stand_ins[param]: number for param in group["params"]}
        group["params"] = []
    if left := [name for param, name in trainable.items() if param not in group_of]:
        raise ValueError(f"make_optimizer left out {', '.join(left[:3])}; give it all, or freeze those")
    first_states = {stand_ins[param]: state for param, state in optimizer.state.items()}
    optimizer.state.clear()
    return optimizer, first_states, group_of


def parts_of(model: nn.Module) -> list[dict[nn.Parameter, str]]:
    """Parameters that become complete at one time, with names: all of a model, or its `parts()` (stages)."""
    parts = model.parts() if hasattr(model, "parts") else [{p: name for name, p in model.named_parameters()}]
    devices = sorted({str(param.device) for part in parts for param in part})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {', '.join(devices)}; move the model to one device first")
    return parts


def all_names(parts: Iterable[dict[nn.Parameter, str]]) -> dict[nn.Parameter, str]:
    return {param: name for part in parts for param, name in part.items()}


def copied(value: Any) -> Any:
    """The same nest of dicts and lists with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value
