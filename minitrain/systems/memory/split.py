"""A large operator in parts, so that only one part is large at a time: of the batch, or of the weight.

    y = split(mlp, x, 4)                                 TSPLIT: cat(mlp(x_1), .., mlp(x_4))
    y = split(mlp, x, 4, each=recompute)                 a part keeps x_i; its backward makes the rest again
    y = split(mlp, x, 4, each=Swap(to_host, to_device))  what a part saves is on the host until then

With w bytes per row of what is only there while a part is worked on, the peak of n rows in k parts falls from
n·w to ceil(n/k)·w. Each row must be a matter of its own: not a norm or noise over the batch.

`planned` is TSPLIT's planner: where memory is over the budget first, the change that costs least time per
byte that it frees there: to swap or recompute what a layer keeps, in more parts or fewer.

    y = TiledLinear(weight, bias, tiles=4)(x)            ZeRO-Infinity: W, b and their gradients on the host
    y[..., tile] = x · W[tile]ᵀ + b[tile]   dx = Σ dy[..., tile] · W[tile]   dW[tile] = dy[..., tile]ᵀ · x

Working memory: weight and gradient of a tile, 2·F·D/tiles elements. Over the link: each tile twice to the
device, its gradient once to the host. No tensor-parallel group is needed.
Nie et al. 2022 (TSPLIT), ICDE'22; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857, section 5.1.3.
Differs: along the batch only; a chain of layers, planned before it runs; one module, one autograd function.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory.pools import new_host, to_device, to_host
from minitrain.ranks.autograd import vjp_of_inputs
from minitrain.ranks.checks import require_positive
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


class Layer(NamedTuple):
    seconds: float  # forward
    bytes: int  # its input, which stays
    inside: int  # bytes of what its backward reads besides


class Choice(NamedTuple):
    how: str = "keep"  # or "swap", "recompute": what is inside
    parts: int = 1


def peaks(layers: Sequence[Layer], choices: Sequence[Choice]) -> list[int]:
    """Bytes while each layer works: inputs so far, what is kept inside, and a part of its own."""
    found, before = [], 0
    for layer, (how, parts) in zip(layers, choices):
        before += layer.bytes
        found.append(before + -(-layer.inside // parts))
        before += layer.inside * (how == "keep")
    return found


def added_s(layers: Sequence[Layer], choices: Sequence[Choice], bytes_per_s: float, launch_s: float) -> float:
    """Forwards that run again, copies that outlast the step's work, and a launch for each further part, in
    forward and twice in backward."""
    again = sum(layer.seconds for layer, (how, _) in zip(layers, choices) if how == "recompute")
    copied = 2 * sum(layer.inside for layer, (how, _) in zip(layers, choices) if how == "swap") / bytes_per_s
    launches = 3 * launch_s * sum(parts - 1 for _, parts in choices)
    return again + launches + max(0, copied - 3 * sum(layer.seconds for layer in layers) - again)


def planned(layers: Sequence[Layer], budget: int, bytes_per_s: float, launch_s: float, most=8) -> list:
    """A Choice for each layer with which none works in more than `budget` bytes; 1, 2, 4 .. `most` parts."""
    require_positive(bytes_per_s=bytes_per_s, launch_s=launch_s)
    choices = [Choice()] * len(layers)
    changes = [Choice(how, 1 << n) for how in ("swap", "recompute") for n in range(most.bit_length())]
    time = lambda tried: added_s(layers, tried, bytes_per_s, launch_s)
    while over := [i for i, size in enumerate(peaks(layers, choices)) if size > budget]:
        at, found = over[0], []
        for i, change in product(range(at + 1), changes):
            tried = [*choices[:i], change, *choices[i + 1 :]]
            if (less := peaks(layers, choices)[at] - peaks(layers, tried)[at]) > 0:
                found.append(((time(tried) - time(choices)) / less, tried))
        if not found:
            raise ValueError(f"layer {at} does not fit {budget=:,} bytes; give more, or more parts")
        choices = min(found)[1]
    return choices


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
            tile, dtile = to_device(part, x.device).wait(), dy.chunk(tiles, -1)[number].flatten(0, -2)
            dx += (dtile @ tile).view(x.shape)
            del tile
            to_host(dtile.T @ rows, out=place).wait()
            if dbias is not None:
                to_host(dtile.sum(0), out=dbias.chunk(tiles)[number]).wait()
        return dx, dweight, dbias
