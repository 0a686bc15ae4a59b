"""An optimizer whose states are in files: read, updated and written back a piece at a time.

    sync.optimizer = FileOptimizer(sync.optimizer, store)       a Sync's own, or any AdamW
    for each piece of each parameter    take its states, update, give back; the next are on their way

An elementwise update does not see where a tensor is cut, so every bit is that of states in memory. With ZeRO
a rank's parameters are its shards: it reads and writes its own 1/n of all states, from and to its own disk.
A step reads and writes every state once: 16 bytes per parameter for two float32 moments, 24 with a master;
the first only writes. Memory: the store's buffers, three pieces' states for the next to be read and the last
to be written meanwhile (at least one piece's, which then all wait for), and what the update of a piece needs.
A step that a disk has stopped (OSError) is finished by calling `step()` again, and in no other way: each
piece is updated once. Checkpoints hold whole states, as always; to load one writes the files.
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.2.2 (NVMe offload of the optimizer step).
Differs: updates on the device of the parameters, not always by the CPU; any AdamW with its settings.
"""

import contextlib
from collections.abc import Iterator, MutableMapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitrain.systems.memory.files import FileStore


class Piece(NamedTuple):
    """Elements first .. last of a parameter."""

    name: str
    first: int
    last: int


def piece_of(param: Tensor, piece: int) -> int:
    """Elements of a parameter that are updated at a time. One that has more about it than its elements (codes
    with a scale, numbers to round by) is whole."""
    whole = hasattr(param, "largest") or hasattr(param, "chance")
    return param.numel() if whole else min(piece, param.numel())


class FileOptimizer:
    """Takes over `optimizer`: its states go into `store`, updated so many elements, a `piece`, at a time.
    Those that share a store have each a `name`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, store: FileStore, piece: int = 1 << 18, name: str = ""
    ):
        if piece < 1:
            raise ValueError(f"piece={piece}: use a number of elements, 1 or more")
        self.inner, self.store, self.piece, self.name = optimizer, store, piece, name
        self._done: int  # pieces of a step that has stopped,
        self._last: tuple[Piece, dict] | None  # one that is updated and not yet given to the store,
        self._grads: list[Tensor]  # and of which gradients
        self.forget()
        self.states = _States(self)
        first_states, optimizer.state = dict(optimizer.state), self.states
        for param, state in first_states.items():
            self.states[param] = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @property
    def state(self) -> MutableMapping[Tensor, dict]:
        """By parameter; what is read is a copy, what is written goes to the files."""
        return self.states

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._done:
            raise ValueError(
                f"a step stopped after {self._done} pieces; call step() again to finish it first"
            )
        self.inner.zero_grad(set_to_none)

    def step(self) -> None:
        """Update every parameter that has a gradient, or what the last call has left."""
        todo = [(group, param) for group in self.param_groups for param in group["params"]]
        todo = [(*both, piece) for both in todo if both[1].grad is not None for piece in self.pieces(both[1])]
        grads = [param.grad for _, param, _ in todo]
        if self._done and any(mine is not other for mine, other in zip_longest(grads, self._grads)):
            stopped = f"a step stopped after {self._done} pieces, and these are other gradients"
            raise ValueError(f"{stopped}; go back to a checkpoint, or finish the step before zero_grad()")
        self._grads = grads
        self._write_last()
        for number in range(self._done, len(todo)):
            group, param, piece = todo[number]
            state = self.states.take(piece)
            if number + 1 < len(todo):
                with contextlib.suppress(OSError):  # the next take tells it, before the next update
                    self.states.ahead(todo[number + 1][2])
            self._update(group, param, piece, state)
            self._done, self._last = number + 1, (piece, state)
            self._write_last()
        self.forget()

    def forget(self) -> None:
        """No step has stopped: it is complete, or a checkpoint is loaded."""
        self._done, self._last, self._grads = 0, None, []

    def _write_last(self) -> None:
        """Of the piece that was updated last: its new states may wait for room."""
        if self._last is not None:
            self.states.give(*self._last)
            self._last = None

    @torch.no_grad()
    def _update(self, group: dict[str, Any], param: Tensor, piece: Piece, state: dict[str, Any]) -> None:
        whole = piece.last - piece.first == param.numel()
        part = param if whole else param.detach().view(-1)[piece.first : piece.last]
        if not whole:
            part.grad_dtype = param.grad_dtype
            part.grad = param.grad.flatten()[piece.first : piece.last]
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(param.device)
        inner, groups = self.inner, self.param_groups
        inner.state, inner.param_groups = _OneState({part: state}), [dict(group, params=[part])]
        try:
            type(inner).step.__wrapped__(inner)  # without the hooks of a step, which this is not
        finally:
            inner.state, inner.param_groups = self.states, groups

    def pieces(self, param: Tensor) -> list[Piece]:
        """Of a parameter."""
        number = next(i for i, other in enumerate(self._params()) if other is param)
        size, numel = piece_of(param, self.piece), param.numel()
        starts = range(0, numel, max(1, size))
        return [Piece(f"{self.name}{number}.{first}", first, min(first + size, numel)) for first in starts]

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own, read from the files."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the optimizer's own, into the files. A step that has stopped is forgotten."""
        self.inner.load_state_dict(state)


class _OneState(dict):
    def __missing__(self, param: Tensor) -> dict:
        return self.setdefault(param, {})


class _States(MutableMapping):
    """States by parameter in a FileStore: tensors as large as a piece in files, numbers in memory."""

    def __init__(self, optimizer: FileOptimizer):
        self._optimizer, self._store = optimizer, optimizer.store
        self._names: dict[str, list[str]] = {}  # of a piece's tensors
        self._numbers: dict[str, dict[str, Any]] = {}  # what else there is: the step

    # ---- a piece ------------------------------------------------------------------------------------------

    def take(self, piece: Piece) -> dict[str, Any]:
        """Its states, to be given back; empty before its first step. Takes all or none."""
        state = dict(self._numbers.get(piece.name, {}))
        try:
            for name in self._names.get(piece.name, []):
                state[name] = self._store.take(f"{piece.name}.{name}")
        except OSError:
            for name in state.keys() - self._numbers[piece.name].keys():
                self._store.put_back(f"{piece.name}.{name}")
            raise
        return state

    def give(self, piece: Piece, state: dict[str, Any]) -> None:
        tensors = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.numel() == piece.last - piece.first
        }
        for name, value in tensors.items():
            self._store.give(f"{piece.name}.{name}", value.detach())
        self._names[piece.name] = list(tensors)
        self._numbers[piece.name] = {name: value for name, value in state.items() if name not in tensors}

    def ahead(self, piece: Piece) -> None:
        self._store.ahead(*(f"{piece.name}.{name}" for name in self._names.get(piece.name, [])))

    # ---- a parameter --------------------------------------------------------------------------------------

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        pieces = self._optimizer.pieces(param)
        if pieces[0].name not in self._numbers:
            raise KeyError(param)
        found: dict[str, Any] = dict(self._numbers[pieces[0].name])
        for name in self._names[pieces[0].name]:
            parts = []
            for piece in pieces:
                parts.append(self._store.take(f"{piece.name}.{name}").flatten().clone())
                self._store.put_back(f"{piece.name}.{name}")
            found[name] = torch.cat(parts).view(param.shape)
        return found

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._optimizer.forget()
        for piece in self._optimizer.pieces(param):
            whole = piece.last - piece.first == param.numel()

            def part(value):
                cut = isinstance(value, Tensor) and value.shape == param.shape and not whole
                return value.flatten()[piece.first : piece.last] if cut else value

            self.give(piece, {name: part(value) for name, value in state.items()})

    def __delitem__(self, param: Tensor) -> None:
        for piece in self._optimizer.pieces(param):
            del self._names[piece.name], self._numbers[piece.name]

    def clear(self) -> None:
        """Forget all, without a look at it: it may be what a checkpoint is to replace."""
        self._optimizer.forget()
        self._names.clear()
        self._numbers.clear()

    def __iter__(self) -> Iterator[Tensor]:
        params = self._optimizer._params()
        return (param for param in params if self._optimizer.pieces(param)[0].name in self._numbers)

    def __len__(self) -> int:
        return sum(1 for _ in self)
