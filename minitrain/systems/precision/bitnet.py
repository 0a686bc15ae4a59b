"""BitNet: weights of one bit or three values, activations of 8 bits, and gradients that go straight through.

    1 bit        W~ = sign(W - mean W), 0 as -1     x^ = LayerNorm(x)
    1.58 bits    W~ = RoundClip(W / b, -1, 1)       x^ = RMSNorm(x)              b = mean |W|
    y  = b · s · (codes of x^ · W~ᵀ)       a sum of integers: with W~ of three values add, subtract or skip
    dW = dyᵀ · x^     dx = norm'(dy · b W~)    as if rounding and sign were not there

x [M, K], W [N, K]. The optimizer updates W as it is: steps too small for W~ add up. x^ has INT8 codes, s =
max / 127 for each token; K + 8 bytes per token are saved for backward (in float64 K + 12). Stored: 1 bit per
weight; of three values 5 in a byte (3^5 = 243): 1.6. Over tp mean W, b, the norm and max are the whole's, so
a layout changes no code: 2 numbers per matrix each way, and per token, where K is cut, 3 forward, 2 backward
(RMS one fewer). Wang et al. 2023 (BitNet), arXiv:2310.11453, section 2; Ma et al. 2024 (b1.58),
arXiv:2402.17764, section 2. `PUBLISHED` is theirs: BitNet's training has one scale per tensor of x^, b1.58's
one per token. Differs: `PRODUCTS` have one per token, agreed over tp; the block keeps its norm, all
activations have signs; head and tables have all bits; no packed kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minitrain.precision.blocks import Blocks, Quantized, dequantize, pack, unpack
from minitrain.precision.formats import INT8, Format
from minitrain.precision.products import Grads, Scales
from minitrain.precision.rounding import rounded
from minitrain.ranks import collectives

TERNARY = Format("ternary", 0, 1, 0, "none")  # two's complement without the most negative: -1, 0, 1
TOKENS = Blocks(INT8, (0,))
EPS = 1e-5  # of the norm
PLACES = (1, 3, 9, 27, 81)  # of five trits in a byte


def signs(weight: Tensor, mean: Tensor, size: Tensor) -> Tensor:
    return torch.where(weight > mean, 1.0, -1.0).to(weight.dtype)


def trits(weight: Tensor, mean: Tensor, size: Tensor) -> Tensor:
    return rounded(weight / size.clamp(min=torch.finfo(size.dtype).tiny), TERNARY, "nearest")


@dataclass(frozen=True)
class BitProducts:
    """Of a linear layer (products.py). `few(weight, mean, mean of sizes)` -> W~ of -1, 0 and 1."""

    few: Callable[[Tensor, Tensor, Tensor], Tensor]
    centred: bool  # the norm subtracts the mean
    normed: bool = True  # without it x^ = x
    codes: Blocks = TOKENS
    history: int = 0
    travels: bool = False

    def weights(self, weight: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
        """W [N, K] -> W~ of -1, 0, 1 and b, of the whole matrix, in float32 or wider."""
        weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        numbers, sums = weight.numel(), torch.stack((weight.sum(), weight.abs().sum()))
        if scales.group is not None and set("NK") & set(scales.cut):
            numbers, sums = numbers * scales.group.size(), collectives.all_reduce(sums, scales.group)
        mean, size = sums / numbers
        return self.few(weight, mean, size), size

    def enter(self, x: Tensor, scales: Scales) -> tuple[Quantized, Tensor]:
        """x [.., K] -> codes of x^ [.., K] and 1 / deviation [.., 1]."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.normed:
            return scales.quantized("x", x, self.codes, "MK"), torch.ones_like(x[..., :1])
        if self.centred:
            x = x - over_width(x, scales)
        inverse = (over_width(x.square(), scales) + EPS).rsqrt()
        return scales.quantized("x", x * inverse, self.codes, "MK"), inverse

    def forward(self, saved: tuple[Quantized, Tensor], weight: Tensor, scales: Scales) -> Tensor:
        """-> y [.., N]; of the rank's part of K, where it is cut."""
        few, size = self.weights(weight, scales)
        whole = saved[0].elements().to(few.dtype) @ few.mT  # exact in float32 to K = 132,104
        return (whole * (saved[0].multipliers.to(few.dtype) * size)).to(weight.dtype)

    def backward(self, dy: Tensor, saved: tuple, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        dx = dweight = None
        few, size = self.weights(weight, scales)
        dy, normed = dy.to(few.dtype), dequantize(saved[0], few.dtype)
        if wanted[0]:
            dx = dy @ (few * size)
            if self.normed:
                along = over_width(dx * normed, scales)
                if self.centred:
                    dx = dx - over_width(dx, scales)
                dx = (dx - normed * along) * saved[1]
            dx = dx.to(weight.dtype)
        if wanted[1]:
            dweight = (dy.flatten(0, -2).mT @ normed.flatten(0, -2)).to(weight.dtype)
        return dx, dweight


PRODUCTS = {"bitnet": BitProducts(signs, centred=True), "bitnet_b158": BitProducts(trits, centred=False)}
PUBLISHED = PRODUCTS | {"bitnet": replace(PRODUCTS["bitnet"], codes=Blocks(INT8))}  # one scale for a tensor


def over_width(x: Tensor, scales: Scales) -> Tensor:
    """[.., K] -> mean over the whole width [.., 1]."""
    if scales.group is None or "K" not in scales.cut:
        return x.mean(-1, keepdim=True)
    return collectives.all_reduce(x.sum(-1, keepdim=True), scales.group) / (x.shape[-1] * scales.group.size())


def pack_signs(few: Tensor) -> Tensor:
    """[.., n] of -1 and 1 -> [.., ceil(n/8)] uint8."""
    return pack((few > 0).to(torch.uint8), 1)


def unpack_signs(packed: Tensor, length: int) -> Tensor:
    return unpack(packed, 1, length).to(torch.int8) * 2 - 1


def pack_trits(few: Tensor) -> Tensor:
    """[.., n] of -1, 0 and 1 -> [.., ceil(n/5)] uint8, the first trit in the lowest place."""
    digits = torch.nn.functional.pad(few.to(torch.int16) + 1, (0, -few.shape[-1] % len(PLACES)))
    places = torch.tensor(PLACES, dtype=torch.int16, device=few.device)
    return (digits.unflatten(-1, (-1, len(PLACES))) * places).sum(-1).to(torch.uint8)


def unpack_trits(packed: Tensor, length: int) -> Tensor:
    places = torch.tensor(PLACES, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) // places % 3).flatten(-2)[..., :length].to(torch.int8) - 1


def add_subtract_skip(codes: Tensor, few: Tensor) -> Tensor:
    """codes [.., K] int8 and W~ [N, K] of -1, 0, 1 -> their product [.., N] int32, by additions alone."""
    codes = codes.to(torch.int32)
    rows = [codes[..., row > 0].sum(-1) - codes[..., row < 0].sum(-1) for row in few]
    return torch.stack(rows, -1).to(torch.int32)
