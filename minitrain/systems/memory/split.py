"""A large operator in parts, so that only one part is large at a time: of the batch, or of the weight.

    y = split(mlp, x, 4)                                 TSPLIT: cat(mlp(x_1), .., mlp(x_4))
    y = split(mlp, x, 4, each=recompute)                 a part keeps x_i; its backward makes the rest again
    y = split(mlp, x, 4, each=Swap(to_host, to_device))  what a part saves is on the host until then

With w bytes per row of what is only there while a part is worked on, the peak of n rows in k parts falls from
n·w to ceil(n/k)·w. Each row must be a matter of its own: not a norm or noise over the batch.

    y = TiledLinear(weight, bias, tiles=4)(x)            ZeRO-Infinity: W, b and their gradients on the host
    y[..., tile] = x · W[tile]ᵀ + b[tile]   dx = Σ dy[..., tile] · W[tile]   dW[tile] = dy[..., tile]ᵀ · x

Working memory: weight and gradient of a tile, 2·F·D/tiles elements. Over the link: each tile twice to the
device, its gradient once to the host. No tensor-parallel group is needed.
Nie et al. 2022 (TSPLIT), ICDE'22; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 5.1.3.
Differs: along the batch only, parts chosen by the caller; one module with one autograd function.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory.pools import new_host, to_device, to_host
from minitrain.ranks.autograd import vjp_of_inputs
from minitrain.ranks.torch_private import storage_id
from minitrain.systems.memory.window import sent_home


def split(run: Callable[[Tensor], Tensor], x: Tensor, parts: int, each: Callable | None = None) -> Tensor:
    """run(x) by `parts` parts of the rows of x, as even as can be; each part as `each(run, part)`."""
    if not 1 <= parts <= len(x):
        raise ValueError(f"parts = {parts} of {len(x)} rows; use 1 to {len(x)}")
    few, more = divmod(len(x), parts)
    pieces = x.split([few + 1] * more + [few] * (parts - more))
    return torch.cat([each(run, piece) if each else run(piece) for piece in pieces])


class Swap:
    """`Swap(to_host, to_device, resident)(run, x)`: run(x), and what it saves for backward waits on the host,
    moved by pools.py's functions or others like them; `resident` tensors, parameters say, are not."""

    def __init__(self, to_host: Callable, to_device: Callable, resident: Iterable[Tensor] = ()):
        self.to_host, self.to_device = to_host, to_device
        self.resident = {storage_id(tensor.untyped_storage()) for tensor in resident}

    def __call__(self, run: Callable, *inputs: Tensor):
        back = lambda packed: packed if isinstance(packed, Tensor) else self.to_device(*packed).wait()
        with saved_tensors_hooks(self._away, back):
            return run(*inputs)

    def _away(self, tensor: Tensor):
        if storage_id(tensor.untyped_storage()) in self.resident:
            return tensor
        return self.to_host(tensor).wait(), tensor.device


class TiledLinear(nn.Module):
    """y = x·Wᵀ + b with W [F, D] and b [F] on the host, F / tiles rows of them on the device at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: int):
        super().__init__()
        if tiles < 1 or len(weight) % tiles:
            raise ValueError(f"tiles={tiles}: use a divisor of the {len(weight)} rows")
        self.tiles = tiles
        self.weight = nn.Parameter(sent_home([weight]).view(weight.shape))
        self.bias = None if bias is None else nn.Parameter(sent_home([bias]))

    def forward(self, x: Tensor) -> Tensor:
        return vjp_of_inputs(self.tiled, self.tiled_backward, x, self.weight, self.bias)

    def tiled(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(*x.shape[:-1], len(weight))
        biases = [None] * self.tiles if bias is None else bias.chunk(self.tiles)
        for place, part, shift in zip(y.chunk(self.tiles, -1), weight.chunk(self.tiles), biases):
            tile = to_device(part, x.device).wait()
            shift = None if shift is None else to_device(shift, x.device).wait()
            place.copy_(nn.functional.linear(x, tile, shift))
            del tile  # before the next one comes
        return y

    def tiled_backward(self, dys, saved, _) -> tuple[Tensor, Tensor, Tensor | None]:
        (dy,), (x, weight, bias), tiles = dys, saved, self.tiles
        rows, dx = x.flatten(0, -2), torch.zeros_like(x)
        dweight = new_host(weight.shape, weight.dtype, kind="gradients")
        dbias = None if bias is None else new_host((len(weight),), weight.dtype, kind="gradients")
        for number, (part, place) in enumerate(zip(weight.chunk(tiles), dweight.chunk(tiles))):
            tile = to_device(part, x.device).wait()
            dtile = dy.chunk(tiles, -1)[number].flatten(0, -2)
            dx += (dtile @ tile).view(x.shape)
            del tile
            to_host(dtile.T @ rows, out=place).wait()
            if dbias is not None:
                to_host(dtile.sum(0), out=dbias.chunk(tiles)[number]).wait()
        return dx, dweight, dbias
