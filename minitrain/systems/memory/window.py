"""STRONGHOLD: a window of layers on the device; all others wait on the host, and so do gradients and states.

    window = LayerWindow(model.layers, window=2)
    optimizer = AdamW(window.parameters)              one flat parameter a layer, on the host
    loss = window.forward_backward(tokens, positions, loss_of)
    optimizer.step()

While layer i computes, the next `window` layers are here or on their way: `window + 1` layers in all, used in
the order of in_turn.py, fetched and evicted by prefetch.py. A layer comes in one copy, its
gradients leave while the layer before it computes. For L layers of P/L parameters in n bytes, a window of m:

    device     n·P/L·(m + 1) of parameters, 2·n·P/L of gradients      whatever L is
    to_device  n·P/L·(2·L - m - 1)   each layer twice, but where it turns those that are still here
    to_host    n·P                   the gradients

The largest run of m + 1 layers counts where layers differ. How large must m be? See offload.py.
Sun et al. 2022, STRONGHOLD, SC22, section III. Differs: the optimizer steps when all gradients are there (so
they can be clipped), not layer by layer beside backward; copies on the device are then brought up to date.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from minitrain.memory.pools import Transfer, new_host, to_device, to_host
from minitrain.memory.prefetch import Prefetch
from minitrain.ranks.checks import require_ints
from minitrain.systems.memory.in_turn import forward_backward, order_of_use


class LayerWindow:
    """Takes the parameters of `layers`, which are to be used through this only. ValueError: a parameter that
    two layers share or that is frozen, several dtypes, a window of all layers."""

    def __init__(self, layers: Sequence[nn.Module], window: int, device: torch.device | str | None = None):
        self.layers, most = list(layers), max(1, len(layers) - 1)
        if not 1 <= window <= most:
            raise ValueError(f"window={window} of {len(self.layers)} layers: use 1 to {most}")
        owned = {number: list(layer.parameters()) for number, layer in enumerate(self.layers)}
        self._owned = {number: params for number, params in owned.items() if params}
        params = parameters_of(self.layers)
        if len({param.dtype for param in params}) != 1:
            raise ValueError("parameters have several dtypes: use one, a layer is one block of memory")
        self.device = device or params[0].device
        sizes = {number: sum(param.nbytes for param in params) for number, params in self._owned.items()}
        runs = [range(first, first + window + 1) for first in range(max(1, len(self.layers) - window))]
        self.room_bytes = max(sum(sizes.get(number, 0) for number in run) for run in runs)
        self._home = {number: nn.Parameter(sent_home(params)) for number, params in self._owned.items()}
        self._here: dict[int, Tensor] = {}  # layers on the device, that have been used there
        self._going: list[tuple[nn.Parameter, Tensor, list[Transfer]]] = []  # gradients on their way
        for number in self._owned:
            self._leave(number)
        order = [number for number in order_of_use(len(self.layers)) if number in sizes]
        settings = dict(ahead=window, circular=False)
        self._engine = Prefetch(order, sizes, self.room_bytes, self._fetch, self._leave, **settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the host, with their gradients: for an optimizer."""
        return list(self._home.values())

    def forward_backward(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions); gradients are added to those of `parameters`."""
        self._bring_up_to_date()
        loss = forward_backward(self.layers, x, loss_of, self._enter, self._send_gradients, (positions,))
        self._take_gradients()
        return loss

    def release(self) -> list[nn.Module]:
        """Whole layers again, on the host; the window is closed."""
        self._engine.clear()
        return self.layers

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
                lie_in(copy, self._owned[number])

    def _leave(self, number: int, transfer: Transfer | None = None) -> None:
        self._here.pop(number, None)
        lie_in(self._home[number], self._owned[number])

    def _send_gradients(self, number: int) -> None:
        """Those of a layer begin to leave, once those of the layer behind it have arrived."""
        self._take_gradients()
        if number in self._owned:
            home, params = self._home[number], self._owned[number]
            grad = new_host(home.shape, home.dtype, home.is_pinned(), "gradients")
            copies = [to_host(param.grad, out=place) for param, place in zip(params, views(grad, params))]
            self._going.append((home, grad, copies))
            for param in params:
                param.grad = None

    def _take_gradients(self) -> None:
        for home, grad, copies in self._going:
            for copy in copies:
                copy.wait()
            home.grad = grad if home.grad is None else home.grad.add_(grad)
        self._going.clear()


# ---- parameters in blocks of memory ------------------------------------------------------------------------


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Of all layers, each of one layer alone, all trained. ValueError: what there is else."""
    params = [param for layer in layers for param in layer.parameters()]
    if not params:
        raise ValueError("these layers have no parameters: give at least one that has some")
    if len(set(params)) < len(params):
        raise ValueError("two layers share a parameter (a tied table): untie it, or keep both outside")
    if any(not param.requires_grad for param in params):
        raise ValueError("a parameter is frozen: keep its layer outside, or train all")
    return params


def sent_home(params: Sequence[Tensor], size: int = 0) -> Tensor:
    """A copy of them on the host, in one block, of `size` elements if it is to have more than they have."""
    require_ints(0, 1 << 40, size=size)
    size, some = size or sum(param.numel() for param in params), params[0]
    home = new_host((size,), some.dtype, some.is_cuda, "parameters").zero_()
    for param, place in zip(params, views(home, params)):
        to_host(param, out=place).wait()
    return home


def views(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """A block of memory as tensors of these shapes, one behind the other."""
    *starts, _ = accumulate((param.numel() for param in params), initial=0)
    return [block.detach()[at : at + p.numel()].view(p.shape) for at, p in zip(starts, params)]


def lie_in(block: Tensor, params: Sequence[nn.Parameter]) -> None:
    """The numbers of these parameters are in this block."""
    for param, place in zip(params, views(block, params)):
        param.data = place
