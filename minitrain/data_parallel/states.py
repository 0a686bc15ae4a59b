"""What a Sync has, as functions of it: whole parameters, and states in pieces for a checkpoint of any layout.

    parameters/W                 this rank's rectangles of W, as views (pieces.py)
    optimizer/W/exp_avg          likewise: a tensor of the optimizer that is cut as what it belongs to
    optimizer/W/step             a tensor of another shape is a number of the whole, alike on all that have W
    numbers_of_states            what is no tensor: {"W": {"step": 7}}

What was saved is any object with
    states_of(W)                 {"exp_avg": (dtype, shape of the whole)}
    plain["numbers"]             numbers_of_states of all ranks
    fill(piece)                  writes what was saved into a piece
checkpoint/load.py has one over files, `WholeTensors` is one over tensors. The optimizer's states are made
from what it says, one shard after the other, and filled before the optimizer gets them: so it does not matter
whether they are here, on the host or in files. Shards come in the order of names, so that ranks which have
the same meet at the same piece. Parameters updated together (in one buffer) need equal numbers. Sends nothing
but for `full_*`, which gather (n-1)/n of what they return, cut by cut.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, views
from minitrain.data_parallel.sync import Sync
from minitrain.ranks import collectives, sharding
from minitrain.ranks.pieces import Piece, part_of, pieces_of, whole_piece
from minitrain.ranks.sharding import placement, whole_shape


class PlainValues:
    """How tensors are stored: as they are. A Sync may have other `values`: codes with scales (scaled.py)."""

    def encode(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """The tensors that are saved of a parameter, by name."""
        return {f"parameters/{name}": whole}

    def extra_tensors(self, one: Flat) -> dict[str, Tensor]:
        """What else is saved of it, by kind."""
        return {}

    def is_updated(self, one: Flat) -> bool:
        """Whether this rank has states of it."""
        return one.shard.requires_grad

    def state_holders(self, holders: tuple[ProcessGroup, ...]) -> tuple[ProcessGroup, ...]:
        """Of the groups with the same values, those with the same states."""
        return holders

    def unchanged(self, one: Flat, value):
        return value

    decode = unchanged  # the numbers of a shard, of its gradient, or of a state
    read_state = unchanged  # what is saved of the optimizer's
    written_state = unchanged  # what the optimizer gets of what was saved
    everywhere = unchanged  # on all ranks, from the one that has it


def values_of(sync: Sync) -> PlainValues:
    return getattr(sync, "values", PlainValues())


# ---- the whole of a parameter


def full_tensor(sync: Sync, param: nn.Parameter) -> Tensor:
    """The whole of a parameter of the model, on every rank (all that have it must ask)."""
    return _full(sync, all_shards(sync), lambda one: one.shard, param)[sync.names[param]]


def full_grad(sync: Sync, param: nn.Parameter) -> Tensor:
    """The whole of its gradient, after `finish()`."""
    return _full(sync, sync.shards, lambda one: grad_of(sync, one), param)[sync.names[param]]


def full_tensors(sync: Sync) -> dict[str, Tensor]:
    """All parameters, whole, by name: a buffer is gathered once, not for each of its parameters."""
    return _full(sync, all_shards(sync), lambda one: one.shard)


def full_grads(sync: Sync) -> dict[str, Tensor]:
    """All gradients likewise, after `finish()`."""
    shards = [one for one in sync.shards if one.shard.requires_grad]
    return _full(sync, shards, lambda one: grad_of(sync, one))


def _full(sync: Sync, shards: list[Flat], local_of: Callable, only: nn.Parameter | None = None) -> dict:
    whole = {}
    for one in shards:
        if only is None or any(only is param for param in one.params):
            for param, part in unfold(sync, one, local_of(one)):
                if only is None or only is param:
                    whole[sync.names[param]] = sharding.full_tensor(part, placement(param).shards).clone()
    return whole


def unfold(sync: Sync, one: Flat, local: Tensor | None) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """All ranks' shards, gathered over the cuts of their buffer, in the shapes of its parameters."""
    local = values_of(sync).decode(one, local).detach().to(one.params[0].device)  # from the host, perhaps
    return zip(one.params, views(sharding.full_tensor(local.reshape(-1), one.cuts), one.params))


def grad_of(sync: Sync, one: Flat) -> Tensor | None:
    """The gradient that the optimizer sees, wherever it is."""
    return sync.listener.grad_of(one.shard) if sync.listener else one.shard.grad


def all_shards(sync: Sync) -> list[Flat]:
    """Frozen parameters too, in the order of names."""
    updated = {param for one in sync.shards for param in one.params}
    frozen = [Flat([param]) for param in sync.names if param not in updated]
    return sorted([*sync.shards, *frozen], key=lambda one: sync.names[one.params[0]])


# ---- in pieces


def pieces(sync: Sync, *same: ProcessGroup) -> Iterator[Piece]:
    """Views of what this rank has of parameters and optimizer states. `same`: groups whose ranks have the
    same parameters, where neither a cut nor a sum goes over them."""
    settle(sync)
    for one in all_shards(sync):
        yield from parameter_pieces(sync, one, same)
        yield from state_pieces(sync, one, state_of(sync, one), same)


def pieces_to_load(sync: Sync, saved, *same: ProcessGroup) -> Iterator[Piece]:
    """As `load_pieces` fills them, without memory. ValueError: numbers of what is updated together differ."""
    for one in all_shards(sync):
        yield from parameter_pieces(sync, one, same)
        yield from state_pieces(sync, one, new_state(sync, one, saved, "meta"), same)


@torch.no_grad()
def load_pieces(sync: Sync, saved, *same: ProcessGroup) -> None:
    """Fill parameters and states from `saved`. A parameter without states there has none here."""
    settle(sync)
    for one in all_shards(sync):
        for piece in parameter_pieces(sync, one, same):
            saved.fill(piece)
        state = new_state(sync, one, saved)
        for piece in state_pieces(sync, one, state, same):
            saved.fill(piece)
        if is_updated(sync, one):
            state = values_of(sync).written_state(one, state)
            if hasattr(sync.optimizer, "set_state"):  # which has states elsewhere
                sync.optimizer.set_state(one.shard, state)
            elif state:
                sync.optimizer.state[one.shard] = state
            else:
                sync.optimizer.state.pop(one.shard, None)
    if hasattr(sync.optimizer, "refresh"):  # it has copies of the parameters
        sync.optimizer.refresh()
    sync.publish(frozen=True)


def tell_updates(sync: Sync, before_update: Callable[[list[str] | None], None]) -> None:
    """Call before_update(names) before parameters of these names or their states change, as soon as backward
    where the host updates; None: before all of them do."""
    names = {one.shard: [sync.names[param] for param in one.params] for one in sync.shards}
    sync.before_update = lambda shard=None: before_update(names.get(shard))
    if hasattr(sync.optimizer, "before_update"):
        sync.optimizer.before_update = sync.before_update


def settle(sync: Sync) -> None:
    """Wait for an update that the host is still making."""
    if hasattr(sync.optimizer, "settle") and sync.optimizer.settle():
        sync.publish()


def is_updated(sync: Sync, one: Flat) -> bool:
    return bool(sync.optimizer) and values_of(sync).is_updated(one)


def numbers_of_states(sync: Sync) -> dict[str, dict]:
    """What states have beside tensors, such as a count of steps: {name: {key: value}}."""
    numbers: dict[str, dict] = {}
    for one in sync.shards:
        plain = {key: x for key, x in state_of(sync, one).items() if not isinstance(x, Tensor)}
        numbers |= {sync.names[param]: plain for param in one.params} if plain else {}
    return numbers


def parameter_pieces(sync: Sync, one: Flat, same: tuple = ()) -> Iterator[Piece]:
    holders = holders_of(sync, one, same)
    yield from _cut_pieces(sync, "parameters/{}", one, one.shard, holders)
    for kind, value in values_of(sync).extra_tensors(one).items():
        yield whole_piece(f"{kind}/{sync.names[one.params[0]]}", value, holders)


def state_pieces(sync: Sync, one: Flat, state: dict[str, Any], same: tuple = ()) -> Iterator[Piece]:
    """`state` is the optimizer's, or one to be loaded."""
    holders = values_of(sync).state_holders(holders_of(sync, one, same))
    cuts = [cut.group for cut in placement(one.shard).shards]
    cuts += [group for group in sync.key_of[one.params[0]].cut_over if group not in cuts]
    everyone = (*holders, *(group for group in cuts if group.size() > 1))
    for key in sorted(state):
        if isinstance(state[key], Tensor) and state[key].shape == one.shard.shape:
            yield from _cut_pieces(sync, "optimizer/{}/" + key, one, state[key], holders)
        elif isinstance(state[key], Tensor):
            for param in one.params:
                yield whole_piece(f"optimizer/{sync.names[param]}/{key}", state[key], everyone)


def _cut_pieces(sync: Sync, name: str, one: Flat, values: Tensor, holders: tuple) -> Iterator[Piece]:
    values, used = values.detach(), 0
    for param, first, last in elements_of(one):
        whole = last - first == values.numel()
        part = values if whole else values.view(-1)[used : used + last - first]
        used += last - first
        yield from pieces_of(name.format(sync.names[param]), part, param, first, last, holders)


def elements_of(one: Flat) -> list[tuple[nn.Parameter, int, int]]:
    """Elements first .. last of which parameters the shard has, in its order; then comes padding."""
    begin, size, elements = 0, one.numel, []
    for cut in one.cuts:
        size //= cut.group.size()
        begin += cut.group.rank() * size
    for param, start in one.start_of.items():
        first, last = (min(max(end - start, 0), param.numel()) for end in (begin, begin + size))
        if first < last:
            elements.append((param, first, last))
    return elements


def holders_of(sync: Sync, one: Flat, same: tuple) -> tuple[ProcessGroup, ...]:
    """Groups that together are the ranks with the same values of a shard."""
    key, cuts = sync.key_of[one.params[0]], {cut.group for cut in placement(one.shard).shards}
    holders = [group for group in key.groups if group not in cuts]
    holders += [key.copies] if key.copies is not None else []
    seen = [set(collectives.members(group)) for group in (*key.cut_over, *key.groups)]
    for group in same:
        if all(len(set(collectives.members(group)) & ranks) == 1 for ranks in seen):
            holders.append(group)
    return tuple(group for group in holders if group.size() > 1)


# ---- states of the optimizer


def state_of(sync: Sync, one: Flat) -> dict[str, Any]:
    """The optimizer's own state of a shard, wherever it is."""
    if not is_updated(sync, one):
        return {}
    elsewhere = hasattr(sync.optimizer, "get_state")
    state = sync.optimizer.get_state(one.shard) if elsewhere else sync.optimizer.state.get(one.shard, {})
    return values_of(sync).read_state(one, state)


def new_state(sync: Sync, one: Flat, saved, device: torch.device | str | None = None) -> dict[str, Any]:
    """The optimizer's state of a shard as `saved` has it, its tensors still to be filled."""
    if not is_updated(sync, one):
        return {}
    names = [sync.names[param] for param in one.params]
    numbers = [saved.plain.get("numbers", {}).get(name, {}) for name in names]
    tensors = [saved.states_of(name) for name in names]
    for name, plain, of_name in zip(names, numbers, tensors):
        if plain != numbers[0] or of_name.keys() != tensors[0].keys():
            first, other = [*numbers[0].items(), *tensors[0]], [*plain.items(), *of_name]
            cure = "and here they are updated together: use zero=0, or freeze what was frozen"
            raise ValueError(f"{names[0]} has the states {first}, {name} {other}, {cure}")
    state = copied(dict(numbers[0]))
    for key, (dtype, shape) in tensors[0].items():
        cut = all(of_name[key][1] == tuple(whole_shape(param)) for of_name, param in zip(tensors, one.params))
        if cut and key != "step":  # of a parameter that is a number both have its shape
            state[key] = torch.zeros_like(one.shard, dtype=dtype, device=device, requires_grad=False)
        else:  # torch's optimizers count steps on the host
            there = device or ("cpu" if key == "step" else one.shard.device)
            state[key] = torch.zeros(shape, dtype=dtype, device=there)
    return state


# ---- whole states


class WholeTensors:
    """What was saved, as whole tensors: by the names of pieces, and states {name: {key: value}}."""

    def __init__(self, tensors: dict[str, Tensor], states: dict[str, dict]):
        self.states, self.tensors, self.plain = states, dict(tensors), {"numbers": {}}
        for name, state in states.items():
            self.tensors |= {f"optimizer/{name}/{k}": x for k, x in state.items() if isinstance(x, Tensor)}
            self.plain["numbers"][name] = {k: x for k, x in state.items() if not isinstance(x, Tensor)}

    def states_of(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        state = self.states.get(name, {})
        return {key: (x.dtype, tuple(x.shape)) for key, x in state.items() if isinstance(x, Tensor)}

    def fill(self, piece: Piece) -> None:
        whole = whole_piece(piece.name, self.tensors[piece.name])
        piece.values.copy_(part_of(whole, piece.start, piece.shape))


def full_state_dict(sync: Sync) -> dict[str, Any]:
    """Copies of whole parameters and optimizer states by name, the same on all ranks that have them."""
    settle(sync)
    states: dict[str, dict] = {}
    for one in sync.shards:
        for key, value in values_of(sync).everywhere(one, state_of(sync, one)).items():
            if isinstance(value, Tensor) and value.shape == one.shard.shape:
                whole = [sharding.full_tensor(x, placement(p).shards) for p, x in unfold(sync, one, value)]
            else:
                whole = [value] * len(one.params)
            for param, x in zip(one.params, whole):
                states.setdefault(sync.names[param], {})[key] = copied(x)
    return {"parameters": full_tensors(sync), "optimizer": states}


def load_full_state_dict(sync: Sync, full: dict[str, Any]) -> None:
    """Load this rank's part of what `full_state_dict` gave, in whatever layout."""
    ours, theirs = set(sync.names.values()), set(full["parameters"])
    if ours != theirs:
        less, more = sorted(ours - theirs)[:3], sorted(theirs - ours)[:3]
        raise ValueError(f"the state lacks {less} and has {more} too many: it is of another model")
    tensors: dict[str, Tensor] = {}
    for name, whole in full["parameters"].items():
        tensors |= values_of(sync).encode(name, whole)
    saved = WholeTensors(tensors, full["optimizer"])
    for _ in pieces_to_load(sync, saved):
        """What cannot be loaded is refused before anything is written."""
    load_pieces(sync, saved)


def copied(value: Any) -> Any:
    """The same nest of dicts and lists with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value
