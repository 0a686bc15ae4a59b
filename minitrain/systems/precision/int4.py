"""Products of linear layers in INT4: outliers spread by a Hadamard matrix, gradients split and sampled.

    forward    y  = s_x s_w · a · bᵀ               a = int4(x H / s_x), b = int4(W H / s_w): integers to 7
    backward   dy = s · g,  g = 16 · hi + lo       integers to 119, rounded by chance; hi and lo: 4 bits each
               dx = s s_w · (k g) · b · Hᵀ         k g: of the 2M rows of hi and lo M stay on average,
               dW = s s_x · (k g)ᵀ · a · Hᵀ        one with probability p and then divided by p

H [K, K]: blocks of +-1/sqrt(h), h = 32 or the largest power of two that divides K; H Hᵀ = I, so y stays y,
and an outlier is spread: with h = 4, (8, 0, 0, 0) H = (4, 4, 4, 4). Of nine steps s_x, s_w have the least
squared error: what LSQ learns, measured. g = 100 is hi = 6, lo = 4; p grows with what a row adds to the
product (its leverage): |hi| or |lo| for dx, times |a| for dW. E[dx] and E[dW] are the products of dy itself.
Chance hashes the scale of dy (agreed, new in every step) and the place in dy: alike on all ranks and in
recomputation. Saved for backward: 1/2 byte per number. All-reduced over tp: 4 bytes per tensor that is cut,
for x and W 72 more, to agree on a step; 8 a row for |hi| and |lo|, 4 for |a|. Xi et al. 2023, sections 3, 4,
arXiv:2306.11987; Esser et al. 2020 (LSQ), arXiv:1902.08153. Differs: steps measured, gradients pass where
clipped, 1/p before the sum, emulated. Another cut of K has other blocks, another microbatch other scales.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitrain.attention.placed import uniform
from minitrain.precision import formats
from minitrain.precision.blocks import Blocks, Quantized, quantize
from minitrain.precision.products import Grads, Scales, amax_of, usable
from minitrain.precision.rounding import rounded
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.attention import flash_3

FOUR, EIGHT = Blocks(formats.INT4), Blocks(formats.INT8)  # one scale for a tensor
SPLIT, LARGEST = 16, 16 * 7 + 7  # of which hi and lo both are integers of 4 bits, -8 to 7
SHARES = tuple(2 ** (-i / 4) for i in range(9))  # of amax: what is clipped at


@dataclass(frozen=True)
class HadamardProducts:
    block: int = 32
    history = 0
    travels = True

    def enter(self, x: Tensor, scales: Scales) -> Quantized:
        """x [.., K] -> INT4 of x H."""
        return self.quantized(x, scales, "MK")

    def quantized(self, x: Tensor, scales: Scales, dims: str) -> Quantized:
        exact = torch.promote_types(x.dtype, torch.float32)
        return measured(hadamard(x.detach().to(exact), self.block), scales, dims)

    def forward(self, x: Quantized, weight: Tensor, scales: Scales) -> Tensor:
        w = self.quantized(weight, scales, "NK")
        y = integer_product(x.elements(), w.elements().mT, x.multipliers * w.multipliers, weight.dtype)
        return y.to(weight.dtype)

    def enter_grad(self, dy: Tensor, scales: Scales) -> Quantized:
        """dy [.., N] -> INT8, rounded by chance, so that E = dy: moved by up to half a step, then rounded."""
        amax = agreed_amax(dy, scales, EIGHT, "MN")
        chance, top = uniform(bits(amax), *places_of(dy, scales)), usable(amax)
        moved = dy.detach() + (chance.view(dy.shape) - 0.5).to(dy.dtype) * (top / LARGEST).to(dy.dtype)
        moved = torch.where(amax.isfinite(), moved.clamp(-top.to(dy.dtype), top.to(dy.dtype)), amax - amax)
        return quantize(moved, EIGHT, amax=top * (EIGHT.format.max / LARGEST))

    def backward(self, dy, x: Quantized, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        grad = dy if isinstance(dy, Quantized) else self.enter_grad(dy, scales)
        parts, a = halves(grad.codes.flatten(0, -2)), x.elements().flatten(0, -2)
        sizes, dx, dweight = lengths(parts, scales, "N"), None, None
        exact = torch.promote_types(weight.dtype, torch.float32)
        if wanted[0]:
            w, kept = self.quantized(weight, scales, "NK"), sampled(parts, sizes, bits(grad.scales, 1), exact)
            dx = integer_product(kept, w.elements(), grad.multipliers * w.multipliers, weight.dtype)
            dx = hadamard(dx, self.block).to(weight.dtype).view(x.shape)
        if wanted[1]:
            leverage = sizes * lengths(a[None], scales, "K")
            kept = sampled(parts, leverage, bits(grad.scales, 2), exact).mT
            dweight = integer_product(kept, a, grad.multipliers * x.multipliers, weight.dtype)
            dweight = hadamard(dweight, self.block).to(weight.dtype)
        return dx, dweight


def hadamard(x: Tensor, block: int = 32) -> Tensor:
    """x [.., K] · H; H is symmetric, so once more gives x. log2(h) sums and differences a number."""
    require_positive_ints(block=block)
    h = min(block, x.shape[-1] & -x.shape[-1])
    return flash_3.hadamard(x.unflatten(-1, (-1, h))).flatten(-2)


def measured(x: Tensor, scales: Scales, dims: str) -> Quantized:
    """INT4 with the step whose squared error over all of x, on all ranks that have a part of it, is least."""
    amax, shares = agreed_amax(x, scales, FOUR, dims), torch.tensor(SHARES, device=x.device)
    steps = usable(amax) * shares / FOUR.format.max
    errors = [rounded(x / step, FOUR.format, "nearest") * step - x for step in steps.to(x.dtype)]
    errors = torch.stack([error.square().sum(dtype=torch.float64) for error in errors])
    if scales.shared(FOUR, dims):
        errors = collectives.all_reduce(errors, scales.group)
    clip = usable(amax) * shares.take(errors.argmin())
    return quantize(x + (amax - amax).to(x.dtype), FOUR, amax=clip)


def agreed_amax(x: Tensor, scales: Scales, blocks: Blocks, dims: str) -> Tensor:
    amax = amax_of(x, blocks)
    return collectives.all_reduce(amax, scales.group, op="max") if scales.shared(blocks, dims) else amax


def integer_product(a: Tensor, b: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """a [.., M, K] · b [K, N] in float32 at least, which adds up integers to 2^24 exactly; scaled once."""
    exact = torch.promote_types(dtype, torch.float32)
    return a.to(exact) @ b.to(exact) * step


def places_of(dy: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Rows [M] and columns [1, N] that dy [.., T, N] has in the dy of all ranks, which may share it out."""
    rank, ranks = (0, 1) if scales.group is None else (scales.group.rank(), scales.group.size())
    length, width = dy.shape[-2:]
    tokens, first = torch.arange(length, device=dy.device), "N" in scales.cut
    if set("KM") <= set(scales.cut):  # sequence parallelism
        tokens, length = tokens + rank * length, ranks * length
    sequences = torch.arange(dy.numel() // max(dy.shape[-2:].numel(), 1), device=dy.device)
    columns = torch.arange(width, device=dy.device) + rank * width * first
    return (sequences[:, None] * length + tokens).flatten(), columns[None]


def bits(scale: Tensor, use: int = 0) -> Tensor:
    """A seed: the 32 bits of a scale, others for each use."""
    return scale.view(torch.int32).long() + (use << 32)


def halves(codes: Tensor) -> Tensor:
    """INT8 to 119 [M, N] -> hi and lo [2, M, N] int8, -8 to 7, with codes = 16 · hi + lo."""
    hi = codes + SPLIT // 2 >> 4
    return torch.stack((hi, codes - SPLIT * hi))


def lengths(rows: Tensor, scales: Scales, dim: str) -> Tensor:
    """Of rows [.., M, C] of 4-bit integers, of which ranks have parts if they share out `dim`: float64."""
    squares = rows.float().square().sum(-1)  # exact, so the same in any order, for C up to 2^18
    if scales.group is not None and dim in scales.cut:
        squares = collectives.all_reduce(squares, scales.group)
    return squares.double().sqrt()


def keep_shares(sizes: Tensor, budget: int) -> Tensor:
    """Probabilities in proportion to the sizes, at most 1, that add up to `budget` (or all that are not 0 are
    kept): of all that do, the variance of the sum of what is kept is least."""
    if not sizes.numel():
        return sizes
    falling = sizes.flatten().sort(descending=True).values
    room = budget - torch.arange(len(falling), device=sizes.device)  # if those before are kept for sure
    rest = falling.flip(0).cumsum(0).flip(0)
    first = (falling * room <= rest).int().argmax()
    return torch.where(sizes > 0, (sizes * (room.take(first) / rest.take(first))).clamp(max=1.0), 0.0)


def sampled(parts: Tensor, sizes: Tensor, seed: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """hi and lo [2, M, N], sizes [2, M] -> [M, N] whose mean over seeds is 16 · hi + lo."""
    unit = torch.tensor([SPLIT, 1.0], dtype=torch.float64, device=parts.device)[:, None]
    share = keep_shares(sizes * unit, sizes.shape[1])
    places = [torch.arange(n, device=parts.device) for n in sizes.shape]
    drawn = uniform(seed, places[0], places[1][None]) < share
    hi, lo = torch.where(drawn, unit / share, 0.0).to(dtype)[..., None].unbind(-3)
    return (parts[0] * hi).addcmul_(parts[1].to(dtype), lo)


PRODUCTS = {"int4": HadamardProducts()}
