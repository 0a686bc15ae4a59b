"""NVFP4 as NVIDIA's report trains with it: three products of E2M1 operands in blocks of 16.

    forward    y  = q(x) · q(W)ᵀ            x in blocks 1 x 16 along K, W in blocks 16 x 16
    backward   dx = q~(dy) · q(W)           q~ rounds stochastically; q(W) is that of forward, to the bit
               dW = q~(R dy)ᵀ · q(R x)      blocks along the tokens; Rᵀ R = 1

Each block has an E4M3 scale, each tensor a float32 one. R multiplies the tokens by random signs, the same 16
for every layer and step, and each 16 of them by a Hadamard matrix: an outlier in one token is spread over 16
and the product stays what it was. Weights and activations round to nearest. q(R x) comes from the x that
forward has read, not from its codes. Saved for backward: both codes of x, 2 x 4.5 bits per number. Sends
nothing; every rank scales by its own tensors, so another layout is another rounding. The report also keeps
about 15 % of the linear layers in 16 bits, most of them in the last blocks: here whoever calls `swap` leaves
them out. NVIDIA 2025, arXiv:2509.25149, training methodology; Tseng et al. 2024 (QuIP#, random signs
before a Hadamard matrix), arXiv:2402.04396. Differs: emulated; the draws are a function of the largest
gradient, so recomputation repeats them; not one of Strategy's products, whose `nvfp4` is 1 x 16 to nearest.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from minitrain.precision import formats
from minitrain.precision.blocks import RECIPES, Blocks, Quantized, quantize
from minitrain.precision.products import Grads, Scales, product
from minitrain.systems.precision.int4 import bits, hadamard

SIZE = 16
ROWS, SQUARES = RECIPES["nvfp4"], Blocks(formats.E2M1, (SIZE, SIZE), "e4m3")
SIGNS = 1.0 - 2 * torch.randint(2, (SIZE,), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class RecipeProducts:
    """Of a linear layer (products.py); each part of the recipe can be left out."""

    rotated: bool = True
    stochastic: bool = True
    squares: bool = True
    history = 0
    travels = False

    def enter(self, x: Tensor, scales: Scales) -> tuple[Quantized, Quantized]:
        """x [.., K] -> its codes along K for y, and those of R x along the tokens [K, M'] for dW."""
        return quantize(x, ROWS, fill=True), quantize(self.by_token(x), ROWS)

    def forward(self, x: tuple[Quantized, Quantized], weight: Tensor, scales: Scales) -> Tensor:
        return product(x[0], self.of_weight(weight), weight.dtype)

    def backward(self, dy: Tensor, x: tuple, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        dx = dweight = None
        if wanted[0]:
            dx = product(self.of_gradient(dy, 1), self.of_weight(weight.mT), weight.dtype)
        if wanted[1]:
            dweight = product(self.of_gradient(self.by_token(dy), 2), x[1], weight.dtype)
        return dx, dweight

    def of_weight(self, weight: Tensor) -> Quantized:
        """Squares have the same codes in both directions, rows of 16 have not."""
        return quantize(weight, SQUARES if self.squares else ROWS, fill=True)

    def of_gradient(self, dy: Tensor, use: int) -> Quantized:
        if not self.stochastic:
            return quantize(dy, ROWS, fill=True)
        seed = int(bits(dy.detach().abs().amax().float(), use)) if dy.numel() else use
        chance = torch.Generator(dy.device).manual_seed(seed)
        return quantize(dy, ROWS, fill=True, mode="stochastic", generator=chance)

    def by_token(self, x: Tensor) -> Tensor:
        """[.., C] -> [C, M'], the tokens filled up to whole blocks with zeros, and rotated."""
        x = x.detach().flatten(0, -2).mT
        x = pad(x, (0, -x.shape[-1] % SIZE))
        signs = SIGNS.to(x).repeat(x.shape[-1] // SIZE)
        return hadamard(x * signs, SIZE) if self.rotated else x


RECIPE = RecipeProducts()
WITHOUT = {part: replace(RECIPE, **{part: False}) for part in ("rotated", "stochastic", "squares")}
