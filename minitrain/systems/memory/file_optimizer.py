"""ZeRO-Infinity's files: an optimizer whose states are there, and layers that come one by one.

    sync.optimizer = FileOptimizer(sync.optimizer, store)       a Sync's own, or any AdamW
    for each piece of each parameter    read its states, update, write; the next are on their way

An elementwise update does not see where a tensor is cut, so every bit is that of states in memory. With ZeRO
a rank's parameters are its shards: it reads and writes its 1/n of all states, from and to its own disk. A
step reads and writes every state once: 16 bytes per parameter for two float32 moments, 24 with a master.
Memory: the store's buffers, three pieces' states for the next to be read and the last to be written
meanwhile. A step that a disk has stopped (OSError) is finished by calling `step()` again: each piece is
updated once. Checkpoints hold whole states; to load one writes the files.

    layers = FiledLayers(made_one_by_one, store, make_optimizer)
    loss = layers.step(tokens, positions, loss_of)              forward, backward, update of layer after layer

Then memory holds parameters and gradients of one layer, L inputs, and what one layer keeps: gradients go into
a layer's update at once, so they cannot be clipped by their norm. Read in a step: parameters twice, the last
layer's once, and states once; written: both once (4 + 4 + 8 and 4 + 8 bytes per parameter in float32).
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, sections 5 and 6. Differs: updates on the device of
the parameters; FiledLayers has one rank, one microbatch.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.memory.files import FileStore
from minitrain.systems.memory.window import forward_backward


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
        require_positive_ints(piece=piece)
        self.inner, self.store, self.piece, self.name = optimizer, store, piece, name
        self._done: int  # pieces of a step that has stopped,
        self._last: tuple[Piece, dict] | None  # one that is updated and not yet given to the store,
        self._grads: list[Tensor]  # and of which gradients
        self.forget()
        self.state = _States(self)  # by parameter; what is read is a copy, what is written goes to the files
        first_states, optimizer.state = dict(optimizer.state), self.state
        for param, state in first_states.items():
            self.state[param] = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._done:
            stopped = f"a step stopped after {self._done} pieces"
            raise ValueError(f"{stopped}; call step() again to finish it first")
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
            state = self.state.read(piece)
            if number + 1 < len(todo):
                with contextlib.suppress(OSError):  # the next read tells it, before the next update
                    self.state.prefetch(todo[number + 1][2])
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
            self.state.write(*self._last)
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
        inner.state, inner.param_groups = defaultdict(dict, {part: state}), [dict(group, params=[part])]
        try:
            type(inner).step.__wrapped__(inner)  # without the hooks of a step, which this is not
        finally:
            inner.state, inner.param_groups = self.state, groups

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


class _States(MutableMapping):
    """States by parameter in a FileStore: tensors as large as a piece in files, numbers in memory."""

    def __init__(self, optimizer: FileOptimizer):
        self._optimizer, self._store = optimizer, optimizer.store
        self._names: dict[str, list[str]] = {}  # of a piece's tensors
        self._numbers: dict[str, dict[str, Any]] = {}  # what else there is: the step

    def read(self, piece: Piece) -> dict[str, Any]:
        """Its states, to be written again; empty before its first step. Reads all or none."""
        state = dict(self._numbers.get(piece.name, {}))
        try:
            for name in self._names.get(piece.name, []):
                state[name] = self._store.read(f"{piece.name}.{name}")
        except OSError:
            for name in state.keys() - self._numbers[piece.name].keys():
                self._store.release(f"{piece.name}.{name}")
            raise
        return state

    def write(self, piece: Piece, state: dict[str, Any]) -> None:
        size, is_tensor = piece.last - piece.first, lambda x: isinstance(x, Tensor)
        tensors = {name: x for name, x in state.items() if is_tensor(x) and x.numel() == size}
        for name, value in tensors.items():
            self._store.write(f"{piece.name}.{name}", value.detach())
        self._names[piece.name] = list(tensors)
        self._numbers[piece.name] = {name: value for name, value in state.items() if name not in tensors}

    def prefetch(self, piece: Piece) -> None:
        self._store.prefetch(*(f"{piece.name}.{name}" for name in self._names.get(piece.name, [])))

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        pieces = self._optimizer.pieces(param)
        if pieces[0].name not in self._numbers:
            raise KeyError(param)
        state: dict[str, Any] = dict(self._numbers[pieces[0].name])
        for name in self._names[pieces[0].name]:
            parts = []
            for piece in pieces:
                parts.append(self._store.read(f"{piece.name}.{name}").flatten().clone())
                self._store.release(f"{piece.name}.{name}")
            state[name] = torch.cat(parts).view(param.shape)
        return state

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._optimizer.forget()
        for piece in self._optimizer.pieces(param):
            whole = piece.last - piece.first == param.numel()

            def part(value):
                cut = isinstance(value, Tensor) and value.shape == param.shape and not whole
                return value.flatten()[piece.first : piece.last] if cut else value

            self.write(piece, {name: part(value) for name, value in state.items()})

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


# ---- layers ------------------------------------------------------------------------------------------------


class FiledLayers:
    """Takes `layers` one after the other, so that they need never be in memory together. For each,
    `make_optimizer(params)` is called; `piece` elements are read and written at a time."""

    def __init__(
        self, layers: Iterable[nn.Module], store: FileStore, make_optimizer: Callable, piece: int = 1 << 18
    ):
        self.store, self.piece = store, piece
        self.layers: list[nn.Module] = []
        self._shapes: list[list[torch.Size]] = []
        self.optimizers: list[FileOptimizer] = []
        self._here: int | None = None
        known: set[nn.Parameter] = set()
        for number, layer in enumerate(layers):
            params = list(layer.parameters())
            if not known.isdisjoint(params):
                raise ValueError("two layers share a parameter (a tied table): untie it")
            known.update(params)
            self.layers.append(layer)
            self._shapes.append([param.shape for param in params])
            self.optimizers.append(FileOptimizer(make_optimizer(params), store, piece, f"layer {number}, "))
            self._write(number)
            self._forget(number)

    def step(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions), and an update of all of them."""
        come_and_go = self._enter, self._update
        return forward_backward(self.layers, [x], lambda y, u: loss_of(y), *come_and_go, (positions,))

    def parameters(self) -> Iterator[Tensor]:
        """All of them, read as they are asked for."""
        for number, layer in enumerate(self.layers):
            self._enter(number)
            yield from (param.detach() for param in layer.parameters())
        self._leave()

    def _enter(self, number: int) -> None:
        self._leave()
        for i, (param, shape) in enumerate(zip(self.layers[number].parameters(), self._shapes[number])):
            whole = torch.empty(shape, dtype=param.dtype)
            names = self._names(number, i)
            for name, part in zip(names, whole.view(-1).split(self.piece)):
                self.store.prefetch(*names[names.index(name) :][:2])
                part.copy_(self.store.read(name))
                self.store.release(name)
            param.data = whole.to(param.device)
        self._here = number

    def _leave(self) -> None:
        if self._here is not None:
            self._forget(self._here)
        self._here = None

    def _update(self, number: int) -> None:
        self.optimizers[number].step()
        for param in self.layers[number].parameters():
            param.grad = None
        self._write(number)
        self._leave()

    def _write(self, number: int) -> None:
        for i, param in enumerate(self.layers[number].parameters()):
            for name, part in zip(self._names(number, i), param.detach().view(-1).split(self.piece)):
                self.store.write(name, part)

    def _forget(self, number: int) -> None:
        for param in self.layers[number].parameters():
            param.data = param.data.new_empty(0)

    def _names(self, number: int, i: int) -> list[str]:
        starts = range(0, self._shapes[number][i].numel(), self.piece)
        return [f"layer {number}, {i}.{first}" for first in starts]
