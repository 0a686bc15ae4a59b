"""ZeRO-Infinity's files: an optimizer whose states are there, and layers that come one by one.

    sync.optimizer = FileOptimizer(sync.optimizer, store)       a Sync's own, or any AdamW
    for each piece of each parameter    read its states, update, write; the next are on their way

An elementwise update does not see where a tensor is cut, so every bit is that of states in memory. A rank of
ZeRO has its 1/n of all states on its own disk. A step reads and writes every state once: 16 bytes per
parameter for two float32 moments, 24 with a master. Memory: the store's buffers, three pieces' states. A step
that a disk has stopped (OSError) is finished by calling `step()` again: each piece is updated once.

    layers = FiledLayers(made_one_by_one, store, make_optimizer)
    loss = layers.step(tokens, positions, loss_of)              forward, backward, update of layer after layer

Then memory holds parameters and gradients of one layer, L inputs, and what one layer keeps: gradients go into
a layer's update at once, so they cannot be clipped by their norm. Read in a step: parameters twice, the last
layer's once, and states once; written: both once (4 + 4 + 8 and 4 + 8 bytes per parameter in float32).
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, sections 5 and 6. Differs: updates on the device of
the parameters; FiledLayers has one rank, one microbatch.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitrain.memory.host_optimizer import OptimizerOfOne
from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.memory.files import FileStore
from minitrain.systems.memory.window import forward_backward


class Piece(NamedTuple):
    """Elements first .. last of a parameter."""

    name: str
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        whole = self.last - self.first == tensor.numel()
        return tensor if whole else tensor.detach().flatten()[self.first : self.last]


def piece_of(param: Tensor, piece: int) -> int:
    """Elements that are updated at a time: all, if there is more than they (codes' scale, what rounds)."""
    whole = hasattr(param, "largest") or hasattr(param, "chance")
    return param.numel() if whole else min(piece, param.numel())


class FileOptimizer:
    """Takes over `optimizer`: its states go into `store`, updated so many elements, a `piece`, at a time.
    Those that share a store have each a `name`."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: FileStore, piece=1 << 18, name=""):
        require_positive_ints(piece=piece)
        self.inner, self.store, self.piece, self.name = optimizer, store, piece, name
        self.param_groups = optimizer.param_groups
        self._tensors: dict[str, list[str]] = {}  # states of a piece that are in files,
        self._numbers: dict[str, dict[str, Any]] = {}  # and what else there is: the step
        self._done = 0  # pieces of a step that has stopped,
        self._last: tuple[Piece, dict] | None = None  # and one updated and not yet given to the store
        states, optimizer.state = optimizer.state, None  # nobody looks for them there
        for param, state in states.items():
            self.set_state(param, state)

    def zero_grad(self) -> None:
        if self._done:
            raise ValueError(f"a step stopped after {self._done} pieces; call step() to finish it first")
        self.inner.zero_grad()

    def step(self) -> None:
        """Update every parameter that has a gradient, or what the last call has left."""
        todo = [(group, param) for group in self.param_groups for param in group["params"]]
        todo = [(*both, piece) for both in todo if both[1].grad is not None for piece in self.pieces(both[1])]
        self._write_last()
        for number in range(self._done, len(todo)):
            group, param, piece = todo[number]
            state = self._read(piece)
            for _, _, following in todo[number + 1 : number + 2]:
                with contextlib.suppress(OSError):  # the next read tells it, before the next update
                    self.store.prefetch(*self._names(following))
            part = piece.of(param)
            if part is not param:
                part.grad_dtype, part.grad = param.grad_dtype, piece.of(param.grad)
            on_device = {key: x.to(param.device) if isinstance(x, Tensor) else x for key, x in state.items()}
            updated = OptimizerOfOne(self.inner, group, part, on_device).updated()
            self._done, self._last = number + 1, (piece, updated)
            self._write_last()
        self._done = 0

    def _write_last(self) -> None:
        if self._last is not None:  # it may have waited for room
            self._write(*self._last)
            self._last = None

    def pieces(self, param: Tensor) -> list[Piece]:
        params = [param for group in self.param_groups for param in group["params"]]
        number = next(i for i, other in enumerate(params) if other is param)
        size, numel = piece_of(param, self.piece), param.numel()
        starts = range(0, numel, max(1, size))
        return [Piece(f"{self.name}{number}.{first}", first, min(first + size, numel)) for first in starts]

    def get_state(self, param: Tensor) -> dict[str, Any]:
        """A copy, whole; {} before the first step."""
        pieces = self.pieces(param)
        state = dict(self._numbers.get(pieces[0].name, {}))
        for name in self._tensors.get(pieces[0].name, []):
            parts = []
            for piece in pieces:
                parts.append(self.store.read(f"{piece.name}.{name}").flatten().clone())
                self.store.release(f"{piece.name}.{name}")
            state[name] = torch.cat(parts).view(param.shape)
        return state

    def set_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """{} takes it away. A step that has stopped is forgotten."""
        self._done, self._last = 0, None
        like = {name for name, x in state.items() if isinstance(x, Tensor) and x.shape == param.shape}
        for piece in self.pieces(param):
            self._write(piece, {name: piece.of(x) if name in like else x for name, x in state.items()})

    def _names(self, piece: Piece) -> list[str]:
        return [f"{piece.name}.{name}" for name in self._tensors.get(piece.name, [])]

    def _read(self, piece: Piece) -> dict[str, Any]:
        """Its states, to be written again; empty before its first step. Reads all or none."""
        read: dict[str, Tensor] = {}
        try:
            for name in self._tensors.get(piece.name, []):
                read[name] = self.store.read(f"{piece.name}.{name}")
        except OSError:
            for name in read:
                self.store.release(f"{piece.name}.{name}")
            raise
        return self._numbers.get(piece.name, {}) | read

    def _write(self, piece: Piece, state: dict[str, Any]) -> None:
        size = piece.last - piece.first
        tensors = [name for name, x in state.items() if isinstance(x, Tensor) and x.numel() == size]
        for name in tensors:
            self.store.write(f"{piece.name}.{name}", state[name].detach())
        self._tensors[piece.name] = tensors
        self._numbers[piece.name] = {name: value for name, value in state.items() if name not in tensors}


class FiledLayers:
    """Takes `layers` one after the other, so that they need never be in memory together. For each,
    `make_optimizer(params)` is called; `piece` elements are read and written at a time."""

    def __init__(self, layers: Iterable[nn.Module], store: FileStore, make_optimizer, piece=1 << 18):
        self.store = store
        self.layers: list[nn.Module] = []
        self.optimizers: list[FileOptimizer] = []
        self._cut: list[list[tuple[torch.Size, list[Piece]]]] = []  # the parameters of each
        self._here: int | None = None
        for number, layer in enumerate(layers):
            params = list(layer.parameters())
            if any(not param.numel() for param in params):  # gone with a layer before
                raise ValueError("two layers share a parameter (a tied table): untie it")
            self.layers.append(layer)
            optimizer = FileOptimizer(make_optimizer(params), store, piece, f"layer {number}, ")
            self.optimizers.append(optimizer)
            self._cut.append([(param.shape, optimizer.pieces(param)) for param in params])
            self._here = number
            self._write(number)
            self._leave()

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
        for param, (shape, pieces) in zip(self.layers[number].parameters(), self._cut[number]):
            whole = torch.empty(shape, dtype=param.dtype)
            for at, piece in enumerate(pieces):
                self.store.prefetch(*(one.name for one in pieces[at:][:2]))
                piece.of(whole).copy_(self.store.read(piece.name))
                self.store.release(piece.name)
            param.data = whole.to(param.device)
        self._here = number

    def _leave(self) -> None:
        if self._here is not None:
            for param in self.layers[self._here].parameters():
                param.data = param.data.new_empty(0)
        self._here = None

    def _update(self, number: int) -> None:
        self.optimizers[number].step()
        for param in self.layers[number].parameters():
            param.grad = None
        self._write(number)
        self._leave()

    def _write(self, number: int) -> None:
        for param, (_, pieces) in zip(self.layers[number].parameters(), self._cut[number]):
            for piece in pieces:
                self.store.write(piece.name, piece.of(param.detach()))
