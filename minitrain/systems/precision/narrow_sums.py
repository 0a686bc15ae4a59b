"""Sums in a narrow accumulator: where they stall, the two cures, and the first FP8 trainings, which met them.

    sum_in       t = round(t + x_k), k = 1 .. K                   |error| <= ((1 + u)^(K-1) - 1) Σ|x|
      in chunks  partial sums of c numbers, then their sum        |error| <= ((1 + u)^(c + K/c - 2) - 1) Σ|x|
    u = 2^-(M+1) for M mantissa bits, rounding to nearest, without overflow

A sum of ones stalls (swamping) at 2^(M+1): 4,096 ones give 2,048 in FP16.

`tensor_core_matmul` emulates Hopper's FP8 product. An instruction adds 32 exact products to the accumulator:
it aligns all to the largest exponent and cuts each off after its `bits` = 14 highest bits, so it loses less
than 33·2^(1-bits) of the largest. Every `promote` products the sum is added to a float32 elsewhere, times the
scales of these products, and starts again from zero. `fp8_tiles_14` trains so. Wang et al. 2018,
arXiv:1812.08011, section 2.2; DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2. Differs: not compared
with a GPU; cut toward zero.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from minitrain.precision import formats
from minitrain.precision.blocks import RECIPES, Quantized
from minitrain.precision.formats import Format
from minitrain.precision.products import Grads, Products, Scales, as_one_kernel, kernel_of
from minitrain.precision.rounding import checked, decode, encode, round_to, rounded
from minitrain.ranks.checks import require_ints

LANES = 32  # products of an instruction of the tensor core
PROMOTE = 128  # of them in 14 bits, then their sum goes to float32
MOST_PRODUCTS = 1 << 22  # of a narrow sum in memory


def sum_in(x, format: str | Format, chunk: int | None = None, mode="nearest", generator=None) -> Tensor:
    """x [.., K] -> its sums [..] in the format, one number after the other, or in chunks: float64."""
    f, numbers = checked("sum_in", x, format, mode, None, generator), x.shape[-1]
    _divides("sum_in", numbers, chunk, "chunk")
    chunk = chunk or numbers
    partial = _one_by_one(x.double().unflatten(-1, (numbers // chunk, chunk)), f, mode, generator)
    return _one_by_one(partial, f, mode, generator)


def matmul_in(a: Tensor, b: Tensor, format: str | Format, chunk: int | None = None) -> Tensor:
    """a [M, K] @ b [K, N], exact products summed as `sum_in` does. Memory: all products, [M, N, K]."""
    _fit("matmul_in", a, b)
    return sum_in(a.double().unsqueeze(-2) * b.double().mT, format, chunk)


def tensor_core_matmul(a, b, *, bits=14, promote=PROMOTE, scale_a=None, scale_b=None) -> Tensor:
    """a [M, K] @ b [K, N] of FP8 numbers -> [M, N] float32; scale_a [M, K/promote], scale_b [K/promote, N].
    promote=None: one sum over all of K."""
    _fit("tensor_core_matmul", a, b)
    numbers = a.shape[1]
    _divides("tensor_core_matmul", numbers, promote, "promote")
    promote = promote or numbers
    _divides("tensor_core_matmul", promote, LANES, "lanes")
    require_ints(2, 40, bits=bits)
    parts = numbers // promote
    scale_a = torch.ones(len(a), parts, device=a.device) if scale_a is None else scale_a
    scale_b = torch.ones(parts, b.shape[1], device=a.device) if scale_b is None else scale_b
    if scale_a.shape != (len(a), parts) or scale_b.shape != (parts, b.shape[1]):
        needed = f"{[len(a), parts]} and {[parts, b.shape[1]]}, one for every {promote} products"
        raise ValueError(f"scale_a {list(scale_a.shape)}, scale_b {list(scale_b.shape)}: use {needed}")
    total = torch.zeros(len(a), b.shape[1], device=a.device)
    for part in range(parts):
        accumulator = torch.zeros_like(total, dtype=torch.float64)
        for k in range(part * promote, (part + 1) * promote, LANES):
            products = a[:, None, k : k + LANES].double() * b.mT[None, :, k : k + LANES].double()
            accumulator = _aligned(torch.cat((accumulator.unsqueeze(-1), products), -1), bits).sum(-1)
        total += accumulator.float() * scale_a[:, part, None] * scale_b[part]
    return total


def _aligned(x: Tensor, bits: int) -> Tensor:
    """x [.., n], each cut to multiples of 2^(e + 1 - bits), e the exponent of the largest of the n."""
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent - 1
    step = torch.ldexp(torch.ones_like(x[..., :1]), exponent + 1 - bits)
    return (x / step).trunc_().mul_(step)


class TensorCoreProducts(Products):
    """Of tiles of 128, whose sums are those of `tensor_core_matmul`."""

    @staticmethod
    def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        numbers, tile = b.shape[-1], b.blocks.tile
        promote = min(PROMOTE, -(-numbers // LANES) * LANES) or PROMOTE  # what is missing are zeros
        x, w = (pad(q.elements().flatten(0, -2), (0, -numbers % promote)) for q in (a, b))
        scale_b = b.multipliers.repeat_interleave(tile[0] if len(tile) > 1 else 1, 0)[: len(w)].mT
        few = max(1, MOST_PRODUCTS // (LANES * max(len(w), 1)))
        parts, how = zip(x.split(few), a.multipliers.flatten(0, -2).split(few)), dict(promote=promote)
        with as_one_kernel(kernel_of(a, b, dtype)):
            y = [tensor_core_matmul(rows, w.mT, scale_a=s, scale_b=scale_b, **how) for rows, s in parts]
        return torch.cat(y).unflatten(0, a.shape[:-1]).to(dtype)


def _one_by_one(x: Tensor, f: Format, mode: str, generator: Generator | None) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for k in range(x.shape[-1]):
        total = rounded(total + x[..., k], f, mode, None, generator)
    return total


def _fit(what: str, a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{what}: {list(a.shape)} @ {list(b.shape)}; use [M, K] and [K, N]")


def _divides(what: str, numbers: int, part: int | None, name: str) -> None:
    if part is not None and (not isinstance(part, int) or part < 1 or numbers % part):
        raise ValueError(f"{what}: {name}={part!r} does not divide {numbers} numbers; pad with zeros")


# ---- the first two FP8 trainings: numbers cast as they are, no scale but one of the loss -------------------
#
#               x, W in forward           dy in backward    sums                      updates of weights
#     fp8_wang  (1,5,2)                   (1,5,2)           (1,6,9), chunks of 64     (1,6,9), by chance
#     hfp8      (1,4,3), bias 11: to 30   (1,5,2)           float32                   as the policy has them
#
# Without scales a format's range must fit the tensor. dy reaches down to 1e-7: multiplied by 2^10 before the
# cast and divided after the sum, it is that of a loss scaled so (Wang: by 1,000). Too large x and W saturate,
# dy becomes infinity, which no step may use. Saved for backward: x, a byte per number. Sends nothing. hfp8
# equals one process under every layout (but for K/V heads that ranks of tp share); fp8_wang differs by its
# narrow sums, whose chunks are of a rank's K or tokens. They are emulated, with the products of some rows in
# float64 and K roundings of each: for small layers. Wang et al. 2018, sections 2 and 3; Sun et al. 2019,
# NeurIPS (hybrid FP8), section 3. Differs: first and last layer are not cast at all; HFP8's sums are wide,
# its batch norms are not there.


CHUNK = 64


@dataclass(frozen=True)
class CastProducts:
    """Of a linear layer (products.py); `sums`: the format that products are added in, float32 if None."""

    ahead: Format  # of x and W
    back: Format  # of dy
    sums: Format | None = None
    factor: float = 2.0**10  # on dy
    history: int = 0
    travels: bool = False

    def enter(self, x: Tensor, scales: Scales) -> Tensor:
        return encode(x, self.ahead, overflow="saturate")

    def forward(self, saved: Tensor, weight: Tensor, scales: Scales) -> Tensor:
        return self.product(decode(saved, self.ahead), self.cast(weight), weight.dtype)

    def backward(self, dy: Tensor, saved: Tensor, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        dx = dweight = None
        dy = rounded(dy * self.factor, self.back, "nearest")
        if wanted[0]:
            dx = self.product(dy, self.cast(weight).mT, weight.dtype) / self.factor
        if wanted[1]:
            x = decode(saved, self.ahead).flatten(0, -2)
            dweight = self.product(dy.flatten(0, -2).mT, x.mT, weight.dtype) / self.factor
        return dx, dweight

    def cast(self, weight: Tensor) -> Tensor:
        return rounded(weight, self.ahead, "nearest", "saturate")

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """a [.., M, K], b [N, K] -> a · bᵀ [.., M, N]."""
        if self.sums is None:
            exact = torch.promote_types(dtype, torch.float32)
            return (a.to(exact) @ b.to(exact).mT).to(dtype)
        return narrow_product(a.flatten(0, -2), b, self.sums).unflatten(0, a.shape[:-1]).to(dtype)


TILE, SQUARE = RECIPES["fp8_1x128"], RECIPES["fp8_128x128"]
PRODUCTS = {
    "fp8_tiles_14": TensorCoreProducts(TILE, SQUARE, TILE),
    "fp8_wang": CastProducts(formats.E5M2, formats.E5M2, formats.FP16_WANG),
    "hfp8": CastProducts(formats.HFP8_FORWARD, formats.E5M2),
}


def narrow_product(a: Tensor, b: Tensor, sums: Format, chunk: int = CHUNK) -> Tensor:
    """a [M, K], b [N, K] -> a · bᵀ [M, N] float64, filled up with zeros to whole chunks."""
    missing = -a.shape[-1] % chunk if a.shape[-1] else chunk
    a, b = (pad(x, (0, missing)) for x in (a, b))
    rows = a.split(max(1, MOST_PRODUCTS // max(b.numel(), 1)))
    return torch.cat([matmul_in(part, b.mT, sums, chunk) for part in rows])


@torch.no_grad()
def sgd_by_chance_(weight, grad, velocity, generator, *, lr, momentum=0.9, decay=0.0) -> None:
    """weight and velocity after a step, in place, numbers of (1,6,9) in float32. Each result is rounded by
    chance, so steps far below half a unit of a weight are kept on average. Equal weights need one seed."""
    by_chance = lambda x: round_to(x, formats.FP16_WANG, "stochastic", generator=generator)
    grad = by_chance(grad.float() + decay * weight)
    velocity.copy_(by_chance(momentum * velocity + grad))
    weight.copy_(by_chance(weight - lr * velocity))
