"""Parameters in flat buffers that divide by the ranks of a group: what all stages of ZeRO stand on.

    W1[F, D]  b1[F]  W2[D, F]   ->   whole[P] = W1 | b1 | W2 | padding            P = the next multiple of n
                                     shard[P/n] = whole[rank P/n : (rank+1) P/n]

A shard is cut wherever n says, in the middle of a matrix if it must: an optimizer that works on elements does not mind.
One buffer holds parameters of one dtype; they are laid out in the order given, so every rank has the same layout.
A shard is an ordinary nn.Parameter with `.shards = (Shard(0, group),)`: clipping and `full_tensor` know what to do.

`Shards` is what a stage gives to the training step: the optimizer over the shards, and states to save and to load, by
parameter name, as this rank's shards (fast, for the same stage and world size) or as the whole (for any).
Sends nothing but in `full_*`, which gathers (n-1)/n of what it returns. Padding costs at most n-1 elements a buffer.
Raises ValueError in one line for parameters on several devices, an optimizer that was built before sharding, a state of
another stage, world size or model.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, section
3.2.3 (FlatParameter). Differs from FSDP2, which cuts every parameter along its dim 0 and so keeps its shape, at the
price of a copy into and out of the buffer at each collective.
"""
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.sharding import Shard, full_tensor

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Flat:
    """The layout of some parameters in one padded buffer, cut over one group or over several, one inside the other."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        self.params, self.groups = params, groups
        self.numels = [param.numel() for param in params]
        self.padding = -sum(self.numels) % math.prod(group.size() for group in groups)
        self.numel = sum(self.numels) + self.padding
        self.shard: nn.Parameter | None = None

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """A new flat buffer [P] with copies of tensors shaped like the parameters."""
        parts = [tensor.detach().reshape(-1) for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a flat buffer, in their shapes."""
        parts = flat.narrow(0, 0, sum(self.numels)).split(self.numels)
        return [part.view(param.shape) for part, param in zip(parts, self.params)]

    def own(self, flat: Tensor, cuts: slice = slice(None)) -> Tensor:
        """This rank's slice of a flat buffer: [P/n] if all groups cut it, or those in `cuts` only."""
        for group in self.groups[cuts]:
            size = flat.numel() // group.size()
            flat = flat.narrow(0, group.rank() * size, size)
        return flat

    def cut(self, own: Tensor, cuts: slice = slice(None)) -> nn.Parameter:
        """Make this rank's slice the shard."""
        self.shard = nn.Parameter(own.detach(), requires_grad=self.params[0].requires_grad)
        self.shard.shards = tuple(Shard(0, group) for group in self.groups[cuts])
        return self.shard

    def own_like_shard(self, flat: Tensor) -> Tensor:
        """What of a whole buffer the shard stands for."""
        return self.own(flat, slice(len(self.shard.shards)))


class Shards:
    """The shards of a model and their optimizer. A stage of ZeRO adds how parameters and gradients get about."""

    stage: int | str

    def __init__(self, flats: list[Flat], names: dict[nn.Parameter, str], make_optimizer: MakeOptimizer):
        if isinstance(make_optimizer, torch.optim.Optimizer):
            raise ValueError(f"{type(make_optimizer).__name__} was built before sharding, over whole parameters; give a function "
                             f"that builds it over the shards: lambda shards: {type(make_optimizer).__name__}(shards, lr=...)")
        self.flats, self.names = flats, names
        self.optimizer = make_optimizer([flat.shard for flat in flats if flat.shard.requires_grad])
        self.enabled = True

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        for flat in self.flats:
            flat.shard.grad = None
            for param in flat.params:
                param.grad = None

    # ---- looking at the whole ----------------------------------------------------------------------------------------

    def full_tensor(self, param: nn.Parameter) -> Tensor:
        """The whole of a parameter of the model, on every rank (all of them must ask)."""
        if any(param is whole for whole in self._not_cut()):
            return param.detach().clone()
        return self._whole(param, lambda flat: flat.shard)

    def full_grad(self, param: nn.Parameter) -> Tensor:
        """The whole of its gradient, after `finish()`."""
        return self._whole(param, lambda flat: flat.shard.grad)

    def _whole(self, param: nn.Parameter, shard_of: Callable[[Flat], Tensor]) -> Tensor:
        for flat in self.flats:
            for position, known in enumerate(flat.params):
                if known is param:
                    return flat.views(full_tensor(shard_of(flat), flat.shard.shards))[position].clone()
        raise ValueError(f"this parameter {list(param.shape)} is not sharded here; give one of the model's, as it was passed")

    # ---- states ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's shards and optimizer state, for the same stage and world size."""
        return {**self._place(), "shards": [flat.shard.detach().clone() for flat in self.flats], "optimizer": copied(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave on the same rank."""
        for what, mine in self._place().items():
            if state.get(what) != mine:
                raise ValueError(f"the state is of {what} {state.get(what)}, this is {what} {mine}: save with full_state_dict(), "
                                 f"which any stage and any number of ranks can load")
        sizes, saved = [flat.shard.numel() for flat in self.flats], [shard.numel() for shard in state["shards"]]
        if sizes != saved:
            raise ValueError(f"the state has shards of {saved[:3]} elements, this model of {sizes[:3]}: it is of another model or "
                             f"was cut into other buffers; use full_state_dict()")
        with torch.no_grad():
            for flat, shard in zip(self.flats, state["shards"]):
                flat.shard.copy_(shard)
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.publish()

    def full_state_dict(self) -> dict[str, Any]:
        """Whole parameters and optimizer state by name, the same on every rank; any stage and world size can load it."""
        full: dict[str, Any] = {"parameters": {self.names[param]: param.detach().clone() for param in self._not_cut()}, "optimizer": {}}
        for flat in self.flats:
            state = self.optimizer.state.get(flat.shard, {})
            whole = {key: flat.views(full_tensor(value, flat.shard.shards)) for key, value in state.items() if is_cut(value, flat)}
            weights = flat.views(full_tensor(flat.shard))
            for position, param in enumerate(flat.params):
                name = self.names[param]
                full["parameters"][name] = weights[position].clone()
                if state:
                    full["optimizer"][name] = {key: whole[key][position].clone() if key in whole else copied(value)
                                               for key, value in state.items()}
        return full

    def load_full_state_dict(self, full: dict[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict` gave, whatever stage and world size it came from."""
        ours, theirs = set(self.names.values()), set(full["parameters"])
        if ours != theirs:
            raise ValueError(f"the state lacks {sorted(ours - theirs)[:3]} and has {sorted(theirs - ours)[:3]} too many: "
                             f"it is of another model")
        with torch.no_grad():
            for param in self._not_cut():
                param.copy_(full["parameters"][self.names[param]])
            for flat in self.flats:
                names = [self.names[param] for param in flat.params]
                flat.shard.copy_(flat.own_like_shard(flat.pack([full["parameters"][name] for name in names])))
                if names[0] not in full["optimizer"]:
                    continue
                states = [full["optimizer"][name] for name in names]
                self.optimizer.state[flat.shard] = {
                    key: flat.own_like_shard(flat.pack([state[key] for state in states])).clone()
                    if isinstance(value, Tensor) and value.shape == flat.params[0].shape else copied(value)
                    for key, value in states[0].items()}
        self.publish()

    def _place(self) -> dict[str, Any]:
        """What must be equal for a rank's shards to fit."""
        groups = self.flats[0].groups
        ranks, rank = [group.size() for group in groups], [group.rank() for group in groups]
        return {"stage": self.stage, "ranks": ranks[0] if len(ranks) == 1 else ranks, "rank": rank[0] if len(rank) == 1 else rank}

    def _not_cut(self) -> list[nn.Parameter]:
        """Parameters that every rank holds whole: the frozen ones, in stages 1 and 2."""
        cut = {param for flat in self.flats for param in flat.params}
        return [param for param in self.names if param not in cut]

    def publish(self) -> None:
        """Bring the model up to date with the shards."""
        raise NotImplementedError


def is_cut(value: object, flat: Flat) -> bool:
    """Does the optimizer keep `value` for every element of the shard?"""
    return isinstance(value, Tensor) and value.shape == flat.shard.shape


def copied(value: Any) -> Any:
    """The same nest of dicts and lists with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def named_once(model: nn.Module) -> dict[nn.Parameter, str]:
    """Every parameter and its first name; all must be on one device."""
    names = {param: name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
    devices = sorted({str(param.device) for param in names})
    if len(devices) > 1:
        raise ValueError(f"parameters are on {', '.join(devices)}; move the model to one device before it is sharded, model.to(device)")
    return dict(reversed(names.items()))


def buckets(params: Iterable[nn.Parameter], group: ProcessGroup, bucket_bytes: int) -> list[Flat]:
    """Trainable parameters, last first (the order in which backward finishes them), in buffers of about `bucket_bytes`."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes={bucket_bytes}; a bucket needs at least one byte, 25_000_000 is usual")
    filled: dict[torch.dtype, list[list[nn.Parameter]]] = {}
    for param in reversed([param for param in params if param.requires_grad]):
        same = filled.setdefault(param.dtype, [[]])
        held = sum(p.numel() for p in same[-1])
        if held and (held + param.numel()) * param.element_size() > bucket_bytes:
            same.append([])
        same[-1].append(param)
    if not filled:
        raise ValueError("no parameter asks for a gradient; set requires_grad=True somewhere")
    return [Flat(params, group) for same in filled.values() for params in same]
