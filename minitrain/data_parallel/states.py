"""States: what a Sync keeps, in pieces for a checkpoint of any layout, or whole by name.

    parameters/W                 this rank's rectangles of W, as views (pieces.py)
    optimizer/W/exp_avg          likewise: a tensor of the optimizer that is cut as what it belongs to
    optimizer/W/step             a tensor of another shape is a number of the whole, alike on all that have W
    numbers_of_states            what is no tensor: {"W": {"step": 7}}

Where to go on from is told by any object with
    states_of(W)                 {"exp_avg": (dtype, shape of the whole)}
    plain["numbers"]             numbers_of_states of all ranks
    fill(piece)                  writes what was saved into a piece
checkpoint/load.py has one over files; `Whole`, here, one over whole tensors. The optimizer's states are made
from what it says, one parameter or buffer after the other, and filled before the optimizer gets them: so it
does not matter whether it keeps them here, on the host or in files. What is kept comes in the order of names,
so that ranks which hold the same meet at the same piece. Parameters that are updated together (in one buffer)
need equal numbers. Sends nothing but for `full_state_dict`, which gathers (n-1)/n of what it returns.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece, part_of, pieces_of, whole_piece
from minitrain.ranks.sharding import full_tensor, placement, whole_shape


class WholeParameter:
    """A parameter that this rank has as it is; flat.Flat has the same interface for a slice of many."""

    def __init__(self, param: nn.Parameter):
        self.shard, self.params = param, [param]

    def unfold(self, kept: Tensor) -> list[Tensor]:
        """What all ranks keep, put together: a tensor for each parameter."""
        return [kept.detach().clone()]

    def pieces(self) -> list[tuple[nn.Parameter, int, int]]:
        """Elements first .. last of which parameter are kept, in the order of the shard."""
        return [(self.shard, 0, self.shard.numel())]


class Whole:
    """Whole tensors by name, to fill pieces from: `parameters`, and {name: {key: value}} of the optimizer."""

    def __init__(self, parameters: dict[str, Tensor], states: dict[str, dict], **more: Tensor):
        self.states, self.tensors = states, {f"parameters/{name}": x for name, x in parameters.items()} | more
        for name, state in states.items():
            self.tensors |= {f"optimizer/{name}/{k}": x for k, x in state.items() if isinstance(x, Tensor)}
        numbers = {
            name: {k: x for k, x in s.items() if not isinstance(x, Tensor)} for name, s in states.items()
        }
        self.plain = {"numbers": numbers}

    def states_of(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        state = self.states.get(name, {})
        return {key: (x.dtype, tuple(x.shape)) for key, x in state.items() if isinstance(x, Tensor)}

    def fill(self, piece: Piece) -> None:
        whole = whole_piece(piece.name, self.tensors[piece.name])
        piece.values.copy_(part_of(whole, piece.start, piece.shape))


class States:
    """Part of a Sync, whose `held`, `names`, `key_of`, `optimizer` and `host` it reads and writes."""

    # ---- in pieces

    def pieces(self, *beside: ProcessGroup) -> Iterator[Piece]:
        """Views of what this rank has of parameters and optimizer states. `beside`: groups whose ranks have
        the same parameters, where neither a cut nor a sum goes over them."""
        self.settle()
        for kept in self.by_name():
            yield from self.pieces_of_parameters(kept, beside)
            yield from self.pieces_of_states(kept, self.state_of(kept), beside)

    def pieces_to_load(self, saved, *beside: ProcessGroup) -> Iterator[Piece]:
        """As `load_pieces` will fill them, but without memory for states. ValueError: numbers differ for what
        is updated together."""
        for kept in self.by_name():
            yield from self.pieces_of_parameters(kept, beside)
            yield from self.pieces_of_states(kept, self.new_state(kept, saved, "meta"), beside)

    @torch.no_grad()
    def load_pieces(self, saved, *beside: ProcessGroup) -> None:
        """Take parameters and states from `saved`. A parameter without states there has none here."""
        self.settle()
        if self.host:
            self.host.updates = 0
        for kept in self.by_name():
            for piece in self.pieces_of_parameters(kept, beside):
                saved.fill(piece)
            self.load_state(kept, saved, beside)
        if self.host:
            self.host.refresh()
        self.publish_all()

    def load_state(self, kept, saved, beside: tuple = ()) -> None:
        state = self.new_state(kept, saved)
        for piece in self.pieces_of_states(kept, state, beside):
            saved.fill(piece)
        if self.is_updated(kept):
            self.put_state(kept, state)

    def numbers_of_states(self) -> dict[str, dict]:
        """What states have beside tensors, such as a count of steps: {name: {key: value}}."""
        found: dict[str, dict] = {}
        for kept in self.held:
            plain = {key: x for key, x in self.state_of(kept).items() if not isinstance(x, Tensor)}
            found |= {self.names[param]: plain for param in kept.params} if plain else {}
        return found

    # ---- of one that is kept

    def by_name(self) -> list:
        """All that this rank keeps, frozen parameters too, by the name of the first in each."""
        kept = [*self.held, *(WholeParameter(param) for param in self.frozen())]
        return sorted(kept, key=lambda one: self.names[one.params[0]])

    def is_updated(self, kept) -> bool:
        return bool(self.optimizer) and kept.shard.requires_grad

    def pieces_of_parameters(self, kept, beside: tuple = ()) -> Iterator[Piece]:
        yield from self._elements("parameters/{}", kept, kept.shard, self.holders(kept, beside))

    def pieces_of_states(self, kept, state: dict[str, Any], beside: tuple = ()) -> Iterator[Piece]:
        """`state` is the optimizer's, or one to be loaded."""
        holders, cuts = self.holders(kept, beside), [cut.group for cut in placement(kept.shard).shards]
        cuts += [group for group in self.key_of[kept.params[0]].cut_over if group not in cuts]
        everyone = (*holders, *(group for group in cuts if group.size() > 1))
        for key in sorted(state):
            if not isinstance(state[key], Tensor):
                continue
            if state[key].shape == kept.shard.shape:
                yield from self._elements("optimizer/{}/" + key, kept, state[key], holders)
            else:
                for param in kept.params:
                    yield whole_piece(f"optimizer/{self.names[param]}/{key}", state[key], everyone)

    def _elements(self, name: str, kept, values: Tensor, holders: tuple) -> Iterator[Piece]:
        values, used = values.detach(), 0
        for param, first, last in kept.pieces():
            whole = last - first == values.numel()
            part = values if whole else values.view(-1)[used : used + last - first]
            used += last - first
            yield from pieces_of(name.format(self.names[param]), part, param, first, last, holders)

    def holders(self, kept, beside: tuple) -> tuple[ProcessGroup, ...]:
        """Groups that together are the ranks with the same values of what is kept."""
        key, cuts = self.key_of[kept.params[0]], {cut.group for cut in placement(kept.shard).shards}
        holders = [group for group in key.groups if group not in cuts]
        holders += [key.copies] if key.copies is not None else []
        seen = [set(collectives.members(group)) for group in (*key.cut_over, *key.groups)]
        for group in beside:
            if all(len(set(collectives.members(group)) & ranks) == 1 for ranks in seen):
                holders.append(group)
        return tuple(group for group in holders if group.size() > 1)

    def new_state(self, kept, saved, device: torch.device | str | None = None) -> dict[str, Any]:
        """The optimizer's state of what is kept, as `saved` has it, its tensors still to be filled."""
        if not self.is_updated(kept):
            return {}
        names = [self.names[param] for param in kept.params]
        numbers = [saved.plain.get("numbers", {}).get(name, {}) for name in names]
        found = [saved.states_of(name) for name in names]
        for name, plain, tensors in zip(names, numbers, found):
            if plain != numbers[0] or tensors.keys() != found[0].keys():
                what = [sorted({*a, *b}) for a, b in ((numbers[0], found[0]), (plain, tensors))]
                what = [
                    ", ".join(f"{k}={p[k]}" if k in p else k for k in keys) or "none"
                    for keys, p in zip(what, (numbers[0], plain))
                ]
                cure = "and here they are updated together: use zero=0, or freeze what was frozen"
                raise ValueError(f"{names[0]} has the states {what[0]}, {name} {what[1]}, {cure}")
        state = copied(dict(numbers[0]))
        for key in found[0]:
            dtype, shape = found[0][key]
            shapes = [tensors[key][1] == tuple(whole_shape(p)) for tensors, p in zip(found, kept.params)]
            if all(shapes) and key != "step":  # of a parameter that is a number both have its shape
                state[key] = torch.zeros_like(kept.shard, dtype=dtype, device=device, requires_grad=False)
            else:  # torch's optimizers count steps on the host
                there = device or ("cpu" if key == "step" else kept.shard.device)
                state[key] = torch.zeros(shape, dtype=dtype, device=there)
        return state

    def state_of(self, kept) -> dict[str, Any]:
        """The optimizer's own state of what is kept, wherever it is."""
        if not self.is_updated(kept):
            return {}
        return self.host.own_state(kept.shard) if self.host else self.optimizer.state.get(kept.shard, {})

    def put_state(self, kept, state: dict[str, Any]) -> None:
        if state:
            self.optimizer.state[kept.shard] = state
        else:
            with suppress(KeyError):
                del self.optimizer.state[kept.shard]

    # ---- whole

    def full_state_dict(self) -> dict[str, Any]:
        """Copies of whole parameters and optimizer states by name, the same on all ranks that hold them."""
        self.settle()
        states: dict[str, dict] = {}
        for kept in self.held:
            state = self.optimizer.state.get(kept.shard, {}) if self.is_updated(kept) else {}
            cut = [k for k, x in state.items() if isinstance(x, Tensor) and x.shape == kept.shard.shape]
            device = kept.params[0].device  # what the host keeps is gathered from there
            whole = {key: kept.unfold(state[key].to(device)) for key in cut}
            for position, param in enumerate(kept.params):
                name, shards = self.names[param], placement(param).shards
                for key, value in state.items():
                    full = full_tensor(whole[key][position], shards).clone() if key in cut else copied(value)
                    states.setdefault(name, {})[key] = full
        return {"parameters": self.full_tensors(), "optimizer": states}

    def load_full_state_dict(self, full: dict[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict` gave, in whatever layout."""
        ours, theirs = set(self.names.values()), set(full["parameters"])
        if ours != theirs:
            less, more = sorted(ours - theirs)[:3], sorted(theirs - ours)[:3]
            raise ValueError(f"the state lacks {less} and has {more} too many: it is of another model")
        saved = self.whole_of(full)
        for _ in self.pieces_to_load(saved):
            """What cannot be loaded is refused before anything is written."""
        self.load_pieces(saved)

    def whole_of(self, full: dict[str, Any]) -> Whole:
        return Whole(full["parameters"], full["optimizer"])


def copied(value: Any) -> Any:
    """The same nest of dicts and lists with copies of the tensors in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value
