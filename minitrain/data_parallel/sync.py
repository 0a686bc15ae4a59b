"""Sync: what sums gradients over ranks and owns the optimizer; every stage of sharding is one of these.

    forward_backward   ->   finish()       ->   clip           ->   step()                   ->   forward
    hooks see gradients     all are sums        over the shards     optimizer, then publish()     new weights

A gradient is complete when autograd's hook says so while `enabled`; a pipeline, which runs backwards in an
order of its own, sets `driven` and calls `arrived(params)` after each microbatch and `ready(params)` after
the last.
`make_optimizer(params)` is called once with a stand-in for every trainable parameter: its `.global_name`, the
shape of the whole, no memory. So groups by name or shape (`p.dim() >= 2`) mean the same whatever is cut. Then
what this rank keeps takes the stand-ins' places; nothing that is kept mixes two groups.
What a checkpoint has of it is in states.py. Sends nothing but for `full_*`, which gathers (n-1)/n of what it
returns, cut by cut.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitrain.data_parallel.states import States, Whole
from minitrain.ranks import collectives
from minitrain.ranks.sharding import full_tensor, placement, whole_shape

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class BufferKey(NamedTuple):
    """Parameters with equal keys may share a buffer: complete, summed, cut and updated alike."""

    part: int  # of a pipeline: the stage
    groups: tuple  # over whose ranks the gradient is a sum
    copies: object  # who else holds them
    cut_over: tuple
    dtype: torch.dtype
    settings: int | None  # the optimizer's group


class Sync(States):
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
        """What this rank keeps of the parameters (states.WholeParameter, flat.Flat) is what is updated."""
        first = {self.names[param]: state for param, state in self._first_states.items()}
        self.held, self._first_states, first_states = list(held), {}, Whole({}, first)
        for kept in self.held:
            if self.optimizer and kept.shard.requires_grad:
                group = self.optimizer.param_groups[self.key_of[kept.params[0]].settings]
                group["params"].append(kept.shard)
                if first:
                    self.load_state(kept, first_states)

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
            if not hasattr(self.optimizer, "before_update"):  # else it says which parameter is next
                self.before_update()
            self.optimizer.step()
        self.publish()

    def before_update(self, shard: Tensor | None = None) -> None:
        """What is kept, and its states, are about to change; None: of all parameters."""

    def tell_updates(self, listener: Callable[[list[str] | None], None]) -> None:
        """Call listener(names) before parameters of these names or their states change, as soon as backward
        where the host updates; None: before all of them do."""
        names = {kept.shard: [self.names[param] for param in kept.params] for kept in self.held}
        self.before_update = lambda shard=None: listener(names.get(shard))
        optimizer = self.host or self.optimizer
        if hasattr(optimizer, "before_update"):
            optimizer.before_update = self.before_update

    def publish(self) -> None:
        """Bring the model up to date with what was updated. Here: it is."""

    def publish_all(self) -> None:
        """And with what was loaded: frozen parameters too."""
        self.publish()

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
