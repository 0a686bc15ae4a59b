"""ZeRO-Infinity's memory-centric tiling: a large linear as a row of tiles, each fetched, used and let go.

    y[..., tile] = x · W[tile]ᵀ + b[tile]                 forward, a tile of rows at a time
    dx = Σ dy[..., tile] · W[tile],   dW[tile] = dy[..., tile]ᵀ · x        backward

    linear = TiledLinear(weight, bias, tiles=4)           parameters stay where they are: the host, say
    working memory    weight and gradient of a tile: 2·F·D/tiles elements instead of 2·F·D

No tensor-parallel group is needed for layers whose weight alone does not fit beside all else. The product of
a row of W is the same in a tile, dx is summed in another order. Over the link: each tile twice to the device,
its gradient once to the host. Activations are whole.
Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, section 5.1.3. Differs: one module with one autograd
function, not a sequence of modules.
"""

import torch
from torch import Tensor, nn

from minitrain.memory.pools import new_host, to_device, to_host


class TiledLinear(nn.Module):
    """y = x·Wᵀ + b with W [F, D] and b [F] on the host, F / tiles rows of them on the device at a time.

    Gradients add up on the host. ValueError: F is not a multiple of `tiles`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: int):
        super().__init__()
        if tiles < 1 or len(weight) % tiles:
            raise ValueError(f"tiles={tiles}: use a divisor of the {len(weight)} rows")
        self.tiles = tiles
        self.weight = nn.Parameter(_home(weight))
        self.bias = None if bias is None else nn.Parameter(_home(bias))

    def forward(self, x: Tensor) -> Tensor:
        return _Tiled.apply(x, self.weight, self.bias, self.tiles)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tiles: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tiles, ctx.bias = tiles, bias
        y = x.new_empty(*x.shape[:-1], len(weight))
        biases = [None] * tiles if bias is None else bias.chunk(tiles)
        for place, part, shift in zip(y.chunk(tiles, -1), weight.chunk(tiles), biases):
            tile = to_device(part, x.device).wait()
            shift = None if shift is None else to_device(shift, x.device).wait()
            place.copy_(nn.functional.linear(x, tile, shift))
            del tile  # before the next one comes
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        rows, dx = x.flatten(0, -2), torch.zeros_like(x)
        dweight = new_host(weight.shape, weight.dtype, kind="gradients")
        dbias = None if ctx.bias is None else new_host((len(weight),), weight.dtype, kind="gradients")
        for number, (part, place) in enumerate(zip(weight.chunk(ctx.tiles), dweight.chunk(ctx.tiles))):
            tile = to_device(part, x.device).wait()
            dtile = dy.chunk(ctx.tiles, -1)[number].flatten(0, -2)
            dx += (dtile @ tile).view(x.shape)
            del tile
            to_host(dtile.T @ rows, out=place).wait()
            if dbias is not None:
                to_host(dtile.sum(0), out=dbias.chunk(ctx.tiles)[number]).wait()
        return dx, dweight, dbias, None


def _home(tensor: Tensor) -> Tensor:
    home = new_host(tensor.shape, tensor.dtype, tensor.is_cuda, "parameters")
    return to_host(tensor.detach(), out=home).wait()
