"""Training with everything in files: one layer's parameters and gradients are here, and its input.

    layers = FiledLayers(made_one_by_one, store, make_optimizer)
    loss = layers.step(tokens, positions, loss_of)          forward, backward, update

    forward     a layer's parameters are read, used, forgotten; its input is kept
    backward    read again; run again; its gradients go into its update (file_optimizer.py) at once,
                and the new parameters are written

So memory holds parameters and gradients of one layer, L inputs, what one layer keeps, and the store's
buffers. Read in a step: parameters twice, the last layer's once, and states once; written: both once (4 + 4
+ 8 and 4 + 8 bytes per parameter in float32). The gradients of all layers are never there together, so they
cannot be clipped by their norm. A disk that fails stops the step for good: go back to a checkpoint.
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, sections 5 and 6. Differs: one rank, one microbatch;
an update as soon as a layer's gradients are there, not after backward.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from minitrain.systems.memory.file_optimizer import FileOptimizer
from minitrain.systems.memory.files import FileStore
from minitrain.systems.memory.in_turn import forward_backward


class FiledLayers:
    """Takes `layers` one after the other, so that they need never be in memory together. For each,
    `make_optimizer(params)` is called; `piece` elements are read and written at a time. ValueError: layers
    share a parameter."""

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
        return forward_backward(self.layers, x, loss_of, self._enter, self._update, (positions,))

    def parameters(self) -> Iterator[Tensor]:
        """All of them, read as they are asked for."""
        for number, layer in enumerate(self.layers):
            self._enter(number)
            yield from (param.detach() for param in layer.parameters())
        self._leave()

    # ---- a layer ------------------------------------------------------------------------------------------

    def _enter(self, number: int) -> None:
        self._leave()
        for i, (param, shape) in enumerate(zip(self.layers[number].parameters(), self._shapes[number])):
            whole = torch.empty(shape, dtype=param.dtype)
            names = self._names(number, i)
            for name, part in zip(names, whole.view(-1).split(self.piece)):
                self.store.ahead(*names[names.index(name) :][:2])
                part.copy_(self.store.take(name))
                self.store.put_back(name)
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
                self.store.give(name, part)

    def _forget(self, number: int) -> None:
        for param in self.layers[number].parameters():
            param.data = param.data.new_empty(0)

    def _names(self, number: int, i: int) -> list[str]:
        starts = range(0, self._shapes[number][i].numel(), self.piece)
        return [f"layer {number}, {i}.{first}" for first in starts]
