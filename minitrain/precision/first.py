"""Precision on a page: products in 16 or 8 bits, weights learned in 32.

    BF16    8 bits of exponent, 7 of mantissa        the range of float32, so nothing overflows
    FP16    5 and 10                                 gradients under 6e-8 vanish: the loss is scaled first
    FP8     E4M3 to 448 for x and w, E5M2 to 57,344 for gradients: each tensor, or each tile, has a scale

The optimizer has float32 masters: an update under 1/512 of a weight is lost in bfloat16. `Masters` steps
them and rounds; a step whose scaled gradients overflow is left out and halves the scale, `patience` good ones
double it. An FP8 linear computes y = (x/s_x as codes) (w/s_w as codes)^T s_x s_w, sums in float32 or wider;
tiles of 128 elements in a row have scales of their own, so that one outlier costs its tile alone. Bytes of a
weight: 2, its master's 4, 8 of Adam's, 2 or 4 of a gradient. Micikevicius et al. 2018, arXiv:1710.03740;
2022, arXiv:2209.05433; DeepSeek-V3 2024, arXiv:2412.19437, section 3.3. General: mixed.py, products.py (GPU
kernels), blocks.py.
"""

import torch
from torch import Tensor, nn


class Masters:
    """Each step: (loss * masters.scale).backward(), masters.step(). `make`: an optimizer of a list; `scale`:
    2**16 for FP16. Ranks that have parts of a model must agree on what step() returns."""

    def __init__(self, params: list[nn.Parameter], make, scale: float = 1.0, patience: int = 2000):
        self.params, self.scale, self.patience, self.good = params, scale, patience, 0
        self.masters = [nn.Parameter(param.detach().float()) for param in params]
        self.optimizer = make(self.masters)

    def step(self) -> bool:
        """False if gradients have overflowed, and nothing was updated."""
        for param, master in zip(self.params, self.masters):
            master.grad, param.grad = param.grad.float() / self.scale, None
        finite = all(bool(master.grad.isfinite().all()) for master in self.masters)
        if finite:
            self.optimizer.step()
            for param, master in zip(self.params, self.masters):
                param.data.copy_(master.data)  # rounds to the nearest
                master.grad = None
        self.good = self.good + 1 if finite else 0
        if not finite or self.good == self.patience:
            self.scale, self.good = self.scale * (2 if finite else 0.5), 0
        return finite


E4M3, E5M2, TILE = torch.float8_e4m3fn, torch.float8_e5m2, 128


def quantize(x: Tensor, dtype: torch.dtype, tiles: bool) -> tuple[Tensor, Tensor]:
    """Codes, and what they are to be multiplied with: one scale, or one for each TILE along the last dim."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # a scale of float16 might be 0
    parts = x.unflatten(-1, (-1, TILE)) if tiles else x.flatten().unsqueeze(0)
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(dtype).max
    return (parts / scale).to(dtype).view(x.shape), scale


def product(a: Tensor, b: Tensor, dtypes, tiles: bool) -> Tensor:
    """a [M, K], b [N, K] -> a b^T, of codes. torch._scaled_mm does it on a GPU; here codes are spread out
    again, which gives the same numbers but for the order of sums."""
    spread = []
    for x, dtype in zip((a, b), dtypes):
        codes, scale = quantize(x, dtype, tiles)
        wide = codes.to(scale.dtype)
        spread.append((wide.unflatten(-1, (-1, TILE)) * scale).view(x.shape) if tiles else wide * scale)
    return (spread[0] @ spread[1].T).to(a.dtype)


class Linear8(torch.autograd.Function):
    """Linear8.apply(x [N, D], weight [F, D], tiles) -> y [N, F]; for tiles all sizes are multiples of 128."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, tiles: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tiles = tiles
        return product(x, weight, (E4M3, E4M3), tiles)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = product(dy, weight.T.contiguous(), (E5M2, E4M3), ctx.tiles)
        return dx, product(dy.T.contiguous(), x.T.contiguous(), (E5M2, E4M3), ctx.tiles), None
