"""The first two FP8 trainings: numbers cast as they are, no scale but one of the loss, sums in 16 bits.

              x, W in forward           dy in backward      sums                        updates of weights
    fp8_wang  (1,5,2)                   (1,5,2)             (1,6,9), chunks of 64       (1,6,9), by chance
    hfp8      (1,4,3), bias 11: to 30   (1,5,2)             float32                     as the policy has them

Without scales a format's range must fit the tensor. dy reaches down to 1e-7: multiplied by 2^10 before the
cast and divided after the sum, it is that of a loss scaled so (Wang: by 1,000). Too large x and W saturate,
dy becomes infinity, which no step may use. Saved for backward: x, a byte per number. Sends nothing. hfp8
equals one process under every layout (but for K/V heads that ranks of tp share); fp8_wang differs by its
narrow sums, whose chunks are of a rank's K or tokens. They are emulated, with the products of some rows in
float64 and K roundings of each: for small layers. `sgd_by_chance_`: every result rounded by chance, so that
of a step far below half a unit of the weight nothing is lost on average. Equal weights need one seed.
Wang et al. 2018, arXiv:1812.08011, sections 2 and 3; Sun et al. 2019, NeurIPS (hybrid FP8), section 3.
Differs: first and last layer are not cast at all; HFP8's sums are wide, its batch norms are not there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from minitrain.precision import formats
from minitrain.precision.formats import Format
from minitrain.precision.products import Grads, Scales
from minitrain.precision.rounding import decode, encode, round_to, rounded
from minitrain.systems.precision.accumulate import matmul_in

CHUNK = 64
MOST_PRODUCTS = 1 << 22  # of a narrow sum in memory


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


PRODUCTS = {
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
    """weight and velocity after a step, in place, their numbers those of (1,6,9) in float32: three
    multiplications with an addition, each rounded by chance."""

    def by_chance(x: Tensor) -> Tensor:
        return round_to(x, formats.FP16_WANG, "stochastic", generator=generator)

    grad = by_chance(grad.float() + decay * weight)
    velocity.copy_(by_chance(momentum * velocity + grad))
    weight.copy_(by_chance(weight - lr * velocity))
