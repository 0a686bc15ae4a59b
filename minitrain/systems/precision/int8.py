"""Products of linear layers in INT8, each operand in blocks of 32 x 32 with a scale of its own (Jetfire).

    y[i, j] = Σ_k  s_x[i, k] s_w[j, k] · (x[i, k] · w[j, k]ᵀ)        i, j, k count blocks of 32

A product of two blocks is a sum of 32 products of 7-bit numbers, at most 32 · 127² < 2^19: an exact integer,
in INT32 on a tensor core, here in float32. It is multiplied by its two scales once and added up in float32
or wider, k in order. A block is as wide as high, so the codes of x, W and dy are those of xᵀ, Wᵀ and dyᵀ:
nothing is quantised twice. An outlier costs the resolution of 1,024 numbers, not of its token or of all.
x [.., T, K] is cut into blocks of tokens of one sequence, W [N, K], dy [.., T, N]; short last blocks are
filled up with zeros. Saved for backward: codes of x, 1 + 4/1024 bytes per number (1/2 + 1/512 of FP16).
Sends nothing: cuts at multiples of 32 change no code; gathers are in the dtype of activations.
Xi et al. 2024 (Jetfire), arXiv:2403.12422, sections 4 and 5. Differs: emulated, one block after the other;
gradients round to nearest, where the authors' code draws.
"""

import torch
from torch import Tensor

from minitrain.precision.blocks import RECIPES, Quantized
from minitrain.precision.products import Grads, Products, Scales

TILE = 32


class BlockProducts(Products):
    def forward(self, x: Quantized, weight: Tensor, scales: Scales) -> Tensor:
        y = block_product(rows(x), rows(scales.quantized("weight", weight, self.weight, "NK")), weight.dtype)
        return without_filling(y, x.shape[:-1], len(weight))

    def backward(self, dy, x: Quantized, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        along_n = rows(dy if isinstance(dy, Quantized) else self.enter_grad(dy, scales))
        dx = dweight = None
        if wanted[0]:
            w = turned(rows(scales.quantized("weight", weight, self.weight, "NK")))
            dx = without_filling(block_product(along_n, w, weight.dtype), x.shape[:-1], weight.shape[1])
        if wanted[1]:
            dweight = block_product(turned(along_n), turned(rows(x)), weight.dtype)
            dweight = dweight[: weight.shape[0], : weight.shape[1]]
        return dx, dweight


def rows(q: Quantized) -> tuple[Tensor, Tensor]:
    """[.., R, C] as whole blocks below each other: codes [R', C'] float32, steps [R'/32, C'/32]."""
    missing = [(0, -length % TILE) for length in reversed(q.shape[-2:])]
    codes = torch.nn.functional.pad(q.codes.float(), sum(missing, ()))
    return codes.flatten(0, -2), q.multipliers.flatten(0, -2)


def turned(matrix: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, steps = matrix
    return codes.mT, steps.mT


def block_product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a [M, K], b [N, K], codes and steps -> a · bᵀ [M, N] in `dtype`."""
    (x, x_steps), (w, w_steps) = a, b
    total = x.new_zeros(len(x), len(w), dtype=torch.promote_types(dtype, torch.float32))
    blocks = zip(x.split(TILE, 1), w.split(TILE, 1), x_steps.unbind(1), w_steps.unbind(1))
    for x_codes, w_codes, x_step, w_step in blocks:
        whole = (x_codes @ w_codes.mT).to(total.dtype)
        total += whole.mul_(x_step.repeat_interleave(TILE)[:, None]).mul_(w_step.repeat_interleave(TILE))
    return total.to(dtype)


def without_filling(y: Tensor, leading: tuple[int, ...], width: int) -> Tensor:
    """[M', N'] -> [.., T, N]."""
    filled = leading[-1] + -leading[-1] % TILE
    return y.view(*leading[:-1], filled, y.shape[1])[..., : leading[-1], :width]


PRODUCTS = {"int8": BlockProducts(RECIPES["int8_32x32"], RECIPES["int8_32x32"], RECIPES["int8_32x32"])}
