"""STRONGHOLD: a window of layers on the device; all others wait on the host, and so do gradients and states.

    window = LayerWindow(model.layers, window=2)
    optimizer = AdamW(window.parameters)              one flat parameter a layer, on the host
    loss = window.forward_backward(tokens, positions, loss_of)
    optimizer.step()

While layer i computes, the next `window` layers are here or on their way: `window + 1` layers in all, used in
the order of memory/in_turn.py, fetched and evicted by memory/prefetch.py. A layer comes in one copy, its
gradients leave as its backward ends. For L layers of P/L parameters in n bytes and a window of m:

    device     n·P/L·(m + 1) of parameters, n·P/L of gradients        whatever L is
    to_device  n·P/L·(2·L - m - 1)   each layer twice, but where it turns those that are still here
    to_host    n·P                   the gradients

The largest run of m + 1 layers counts where layers differ. How large must m be? See plan/stronghold.py.
Sun et al. 2022, STRONGHOLD, SC22, section III. Differs: the optimizer steps when all gradients are there (so
they can be clipped), not layer by layer beside backward; copies on the device are then brought up to date.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minitrain.memory.in_turn import forward_backward, order_of_use
from minitrain.memory.pools import Transfer, new_host, to_device, to_host
from minitrain.memory.prefetch import Prefetch


class LayerWindow:
    """Takes the parameters of `layers`, which are to be used through this only. ValueError: a parameter that
    two layers share or that is frozen, several dtypes, a window of all layers."""

    def __init__(self, layers: Sequence[nn.Module], window: int, device: torch.device | str | None = None):
        self.layers = list(layers)
        if not 1 <= window < len(self.layers):
            raise ValueError(f"window={window} of {len(self.layers)} layers: use 1 to {len(self.layers) - 1}")
        self._owned = {
            i: params for i, layer in enumerate(self.layers) if (params := list(layer.parameters()))
        }
        self._check()
        self._shapes = {number: [param.shape for param in params] for number, params in self._owned.items()}
        self.device = device or self._params[0].device
        sizes = {number: sum(param.nbytes for param in params) for number, params in self._owned.items()}
        runs = [range(first, first + window + 1) for first in range(len(self.layers) - window)]
        self.room_bytes = max(sum(sizes.get(number, 0) for number in run) for run in runs)
        self._home = {number: self._send(number) for number in self._owned}
        self._here: dict[int, Tensor] = {}  # layers on the device, that have been used there
        order = [number for number in order_of_use(len(self.layers)) if number in sizes]
        settings = dict(ahead=window, circular=False)
        self._engine = Prefetch(order, sizes, self.room_bytes, self._fetch, self._evict, **settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the host, with their gradients: for an optimizer."""
        return list(self._home.values())

    def forward_backward(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions); gradients are added to those of `parameters`."""
        self._bring_up_to_date()

        def run(number: int, x: Tensor) -> Tensor:
            return self.layers[number](x, positions)

        return forward_backward(len(self.layers), run, x, loss_of, self._enter, self._leave)

    def release(self) -> list[nn.Module]:
        """Whole layers again, on the host; the window is closed."""
        self._engine.clear()
        for number, home in self._home.items():
            self._share(number, home)
        return self.layers

    @property
    def _params(self) -> list[nn.Parameter]:
        return [param for params in self._owned.values() for param in params]

    def _check(self) -> None:
        if len(set(self._params)) < len(self._params):
            raise ValueError("two layers share a parameter (a tied table): untie it, or keep both outside")
        if any(not param.requires_grad for param in self._params):
            raise ValueError("a parameter is frozen: keep its layer outside, or train all")
        if len({param.dtype for param in self._params}) != 1:
            raise ValueError("parameters have several dtypes: use one, a layer is one block of memory")

    def _send(self, number: int) -> nn.Parameter:
        """A layer's parameters to the host, in one block."""
        params = self._owned[number]
        home = new_host((sum(param.numel() for param in params),), params[0].dtype, kind="parameters")
        for param, view in zip(params, views(home, self._shapes[number])):
            to_host(param, out=view).wait()
        self._part(number)
        return nn.Parameter(home)

    # ---- a layer comes and goes ---------------------------------------------------------------------------

    def _bring_up_to_date(self) -> None:
        """What is left from the step before has been updated since."""
        for number, copy in self._here.items():
            to_device(self._home[number], out=copy).wait()

    def _fetch(self, number: int) -> Transfer:
        return to_device(self._home[number], self.device)

    def _enter(self, number: int) -> None:
        if number in self._owned:
            copy = self._engine.use(number)
            if number not in self._here:
                self._here[number] = copy
                self._share(number, copy)

    def _evict(self, number: int, transfer: Transfer) -> None:
        self._here.pop(number, None)
        self._part(number)

    def _leave(self, number: int) -> None:
        """Its gradients go to the host."""
        if number not in self._owned:
            return
        home, params = self._home[number], self._owned[number]
        grad = new_host(home.shape, home.dtype, kind="gradients")
        places = views(grad, self._shapes[number])
        copies = [to_host(param.grad, out=place) for param, place in zip(params, places)]
        for param, copy in zip(params, copies):
            copy.wait()
            param.grad = None
        home.grad = grad if home.grad is None else home.grad.add_(grad)

    def _share(self, number: int, flat: Tensor) -> None:
        """A layer's parameters are in this block of memory,"""
        for param, view in zip(self._owned[number], views(flat, self._shapes[number])):
            param.data = view

    def _part(self, number: int) -> None:
        """or nowhere."""
        for param in self._owned[number]:
            param.data = param.data.new_empty(0)


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """A block of memory as tensors of these shapes, one behind the other."""
    parts = flat.detach().split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
