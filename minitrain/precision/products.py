"""The three products of a linear layer in few bits, each operand quantised along what is summed over.

    y  = x · Wᵀ      over the input width K      x [M, K] and W [N, K] in tiles along K
    dx = dy · W      over the output width N     dy [M, N] and Wᵀ [K, N] in tiles along N
    dW = dyᵀ · x     over the tokens M           dyᵀ [N, M] and xᵀ [K, M] in tiles along M

A scale of a row can leave the sum, which is of narrow numbers: what tensor cores do. Sums are in float32 or
better. Saved for backward are the codes of x along K; for dW they are read back and quantised along M.

`Scales` says which amax an operand is scaled by: its own; over ranks that have the rest of a tile, their
largest (an all-reduce of 4 bytes a tile); or, in delayed scaling, the largest of `history` steps before: what
is larger saturates. Before the first step x is scaled by 1 and dy as if 1 were its largest; a weight is
always measured. On a GPU with kernels for the formats a product is torch._scaled_mm; elsewhere operands are
read back, in float32 at least, and multiplied. Micikevicius et al. 2022 (FP8), arXiv:2209.05433; NVIDIA
Transformer Engine (delayed and current scaling); DeepSeek-AI 2024, arXiv:2412.19437, section 3.3. Differs: W
is quantised again in every microbatch, zero-bubble schedules put no dW off, float32 scales, no fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.precision import formats
from minitrain.precision.blocks import RECIPES, Blocks, Quantized, dequantize, quantize
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints, require_one_of
from minitrain.ranks.devices import cuda_capability
from minitrain.ranks.torch_private import scaled_mm

FIRST_AMAX = {"x": formats.E4M3.max, "dy": 1.0}  # of delayed scaling, before the first step
ROLES = tuple(FIRST_AMAX)
Grads = tuple[Tensor | None, Tensor | None]  # dx [.., K] and dW [N, K], those that are wanted


def product(a: Quantized | Tensor, b: Quantized | Tensor, dtype: torch.dtype) -> Tensor:
    """a [.., M, K], b [N, K] -> a · bᵀ [.., M, N] in `dtype`."""
    both = isinstance(a, Quantized) and isinstance(b, Quantized)
    if both and has_kernel(a.codes.device) and fits_kernel(a.blocks, b.blocks, dtype):
        if all(size % 16 == 0 for size in (*b.shape, a.codes.numel() // a.shape[-1])) and a.codes.numel():
            return by_kernel(a, b, dtype)
    exact = torch.promote_types(dtype, torch.float32)
    with as_one_kernel(kernel_of(a, b, dtype) if both else None):
        left, right = (dequantize(x, exact) if isinstance(x, Quantized) else x for x in (a, b))
        return (left @ right.mT).to(dtype)


@dataclass(frozen=True)
class Products:
    """How x, W and dy are quantised; `history`: steps of which delayed scaling remembers the largest."""

    x: Blocks
    weight: Blocks
    dy: Blocks
    history: int = 0
    cast: Callable = quantize  # or one that a compiler has made (`fused`)
    product = staticmethod(product)  # of two operands; sums in fewer bits have another

    @property
    def travels(self) -> bool:
        """Whether codes of tokens on other ranks can be put beside one's own."""
        return len(self.x.tile) < 2 and len(self.dy.tile) < 2 and self.x.scale != "e4m3"

    def enter(self, x: Tensor, scales: Scales) -> Quantized:
        """x [.., K] -> what is multiplied, kept, and sent."""
        return scales.quantized("x", x, self.x, "MK", self.cast)

    def enter_grad(self, dy: Tensor, scales: Scales) -> Quantized:
        return scales.quantized("dy", dy, self.dy, "MN", self.cast)

    def forward(self, x: Quantized, weight: Tensor, scales: Scales) -> Tensor:
        return self.product(x, scales.quantized("weight", weight, self.weight, "NK", self.cast), weight.dtype)

    def backward(self, dy, x: Quantized, weight: Tensor, wanted: tuple, scales: Scales) -> Grads:
        along_n = dy if isinstance(dy, Quantized) else self.enter_grad(dy, scales)
        dx = dweight = None
        if wanted[0]:
            transposed = scales.quantized("weight", weight.mT, self.weight, "KN", self.cast)
            dx = self.product(along_n, transposed, weight.dtype)
        if wanted[1]:
            exact = torch.promote_types(weight.dtype, torch.float32)
            tokens = self.turned(dy if self.dy.tile else along_n, self.dy, exact, scales, "N")
            dweight = self.product(tokens, self.turned(x, self.x, exact, scales, "K"), weight.dtype)
        return dx, dweight

    def turned(self, x, blocks: Blocks, exact: torch.dtype, scales: Scales, rows: str) -> Quantized | Tensor:
        """[.., R] -> [R, M], in tiles along all tokens; with one scale for all there is nothing to do."""
        values = dequantize(x, exact) if isinstance(x, Quantized) else x
        values = values.flatten(0, -2).mT
        if not blocks.tile and isinstance(x, Quantized):
            codes = x.codes.flatten(0, -2).mT.contiguous()
            return replace(x, codes=codes, shape=codes.shape) if x.blocks.format.bits == 8 else values
        return scales.quantized("", values, blocks, rows + "T", self.cast)


class Scales(nn.Module):
    """Of a matrix's operands. `cut`: which of its widths N, K and the tokens M ranks of `group` share."""

    def __init__(self, history=0, group: ProcessGroup | None = None, cut="", device=None) -> None:
        super().__init__()
        require_ints(0, 1 << 20, history=history)
        self.steps, self.group, self.cut = history, group, cut
        if history:
            self.register_buffer("history", torch.zeros(len(ROLES), history, device=device), persistent=False)
            self.register_buffer("largest", torch.zeros(len(ROLES), device=device), persistent=False)

    def quantized(self, role: str, x: Tensor, blocks: Blocks, dims: str, cast=quantize) -> Quantized:
        """x [.., R, C] whose dims are called so. Role "": a copy of what has been seen."""
        with as_one_kernel(cast_of(role, x, blocks)):
            return self._quantized(role, x, blocks, dims, cast)

    def _quantized(self, role: str, x: Tensor, blocks: Blocks, dims: str, cast: Callable) -> Quantized:
        delayed = self.steps and role in ROLES
        if not delayed and not self.shared(blocks, dims):
            return cast(x, blocks, fill=True)
        amax = amax_of(x, blocks)
        if delayed:
            self.note(role, amax)
            poison, amax = amax - amax, self.expected(role)
        else:
            amax = collectives.all_reduce(amax, self.group, op="max")
            poison = amax - amax  # 0; NaN if x is not finite, which a foreign amax would hide
        return cast(x + poison.to(x.dtype), blocks, amax=usable(amax), fill=True)

    def shared(self, blocks: Blocks, dims: str) -> bool:
        if self.group is None or blocks.scale != "float32" or blocks.tile not in ((), (0,)):
            return False
        return dims[-1] in self.cut if blocks.tile else not set(dims).isdisjoint(self.cut)

    def note(self, role: str, amax: Tensor) -> None:
        """In training; a forward that is done again notes the same."""
        if self.training:
            self.largest[ROLES.index(role)].copy_(torch.maximum(self.largest[ROLES.index(role)], amax))

    def expected(self, role: str) -> Tensor:
        known = self.history[ROLES.index(role)].amax()
        return torch.where(known > 0, known, FIRST_AMAX[role])

    @torch.no_grad()
    def roll(self, largest: Tensor) -> None:
        """After a step: `largest` over all ranks is the newest of the history."""
        newest = torch.where(largest.isfinite(), largest, 0.0)
        self.history.copy_(torch.cat((newest[:, None], self.history[:, :-1]), 1))
        self.largest.zero_()


def amax_of(x: Tensor, blocks: Blocks) -> Tensor:
    """Of the shape of the scales, for a tensor or rows as tiles; of nothing 0."""
    dims = (-1,) if blocks.tile else tuple(range(-x.dim(), 0))
    largest = x.detach().abs().amax if x.numel() else x.detach().sum
    return largest(dims, keepdim=bool(blocks.tile)).float()


def usable(amax: Tensor) -> Tensor:
    return torch.where((amax > 0) & amax.isfinite(), amax, 1.0)


@contextmanager
def as_one_kernel(kernel: tuple | None) -> Iterator[None]:
    """An account has what it would be."""
    collectives.announce("kernel", kernel)
    try:
        yield
    finally:
        collectives.announce("kernel", None)


def cast_of(role: str, x: Tensor, blocks: Blocks) -> tuple:
    """Numbers read, codes written."""
    written = -(-x.numel() * blocks.format.bits // 8)
    name = "cast_weight" if role == "weight" else "cast"
    return name, 0, x.nbytes + written, "", "", (), written


def kernel_of(a: Quantized, b: Quantized, dtype: torch.dtype) -> tuple:
    """As one kernel, which reads codes and scales and writes `dtype`: the values of a `Compute`."""
    batch, k = b.shape[:-2].numel(), a.shape[-1]
    m, n, f = a.shape[:-1].numel() // max(batch, 1), b.shape[-2], a.blocks.format
    name, written = f"{'int' if f.integer else 'float'}{f.bits}", batch * m * n * dtype.itemsize
    read = a.nbytes + b.nbytes
    return "scaled_mm", 2 * batch * m * n * k, read + written, "", name, (batch, m, n, k), written


def has_kernel(device: torch.device) -> bool:
    """Of FP8: on Ada, Hopper and later."""
    return device.type == "cuda" and cuda_capability(device) >= (8, 9)


def fits_kernel(a: Blocks, b: Blocks, dtype: torch.dtype) -> bool:
    """FP8, not E5M2 twice, with a scale for a tensor or a row; of rows in bfloat16."""
    kinds = {a.format, b.format}
    tensors, rows = (a.tile == b.tile == tile for tile in ((), (0,)))
    scaled = a.scale == b.scale == "float32" and (rows or tensors)
    dtypes = (torch.bfloat16,) if rows else (torch.bfloat16, torch.float16, torch.float32)
    return scaled and kinds <= {formats.E4M3, formats.E5M2} and formats.E4M3 in kinds and dtype in dtypes


def by_kernel(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """torch._scaled_mm: codes as they are, scales applied to the sum."""
    left, right = (x.codes.view(x.blocks.format.dtype).flatten(0, -2) for x in (a, b))
    left_scale, right_scale = a.multipliers, b.multipliers
    if a.blocks.tile:
        left_scale, right_scale = left_scale.flatten(0, -2).contiguous(), right_scale.mT.contiguous()
    y = scaled_mm(left.contiguous(), right.contiguous().mT, left_scale, right_scale, out_dtype=dtype)
    return y.view(*a.shape[:-1], len(right))


def emulated(products: Any, weight: Tensor) -> bool:
    """Whether products with this matrix are, for lack of a kernel."""
    if not isinstance(products, Products):
        return True
    pairs = ((products.x, products.weight), (products.dy, products.weight), (products.dy, products.x))
    whole = not any(n % 16 for n in weight.shape[-2:])  # experts are stacked
    fits = whole and all(fits_kernel(*pair, weight.dtype) for pair in pairs)
    return not (fits and has_kernel(weight.device))


def fused(products: Products, **options) -> Products:
    """Its casts by torch.compile: on a GPU a pass or two in the place of ten, else FP8 gains nothing."""
    return replace(products, cast=torch.compile(quantize, dynamic=False, **options))


# ---- layers: an object like Products has `enter`, `forward`, `enter_grad`, `backward` ---------------------


def as_it_is(x):
    return x


@dataclass(frozen=True)
class Route:
    """What stands between a rank's operands and whole ones; alone nothing does.

    x -> enter -> codes, saved -> x -> forward with each W -> y -> sum
    dy -> enter -> dy -> backward with the codes (x again) and each W -> dW, dx -> sum"""

    x: Callable = as_it_is  # what enters -> of all tokens; called again in backward
    y: Callable = as_it_is  # terms of the result -> their sum
    dy: Callable | None = None  # the gradient that enters -> of all tokens
    dx: Callable = as_it_is


def project(x: Tensor, linears: Sequence["LowLinear"]) -> tuple[Tensor, ...]:
    """One input [.., K], several matrices [N, K] -> [.., N] each."""
    weights, scales = [linear.weight for linear in linears], [linear.scales for linear in linears]
    ys = multiply(x, weights, scales, linears[0].products)
    return tuple(y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears))


class LowLinear(nn.Module):
    """An nn.Linear with the same parameters. `scales`: its own, unless ranks share what is measured."""

    together = staticmethod(project)

    def __init__(self, linear: nn.Linear, products: Products, scales: Scales | None = None):
        super().__init__()
        self.weight, self.bias, self.products = linear.weight, linear.bias, products
        self.scales = scales or Scales(products.history, device=linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, (self,))[0]


def multiply(x, weights, scales, products: Products, route: Route = Route()) -> tuple[Tensor, ...]:
    """x [.., K] by each of the weights [N, K], without biases; what x is scaled by, the first one says."""
    if wrong := [one.steps for one in scales if one.steps < products.history]:
        what = f"products that scale by {products.history} steps, and Scales that keep {wrong[0]}"
        raise ValueError(f"{what}: give them Scales({products.history})")
    return _Multiply.apply(x, products, scales, route, *weights)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, products, scales, route, *weights):
        saved = products.enter(x, scales[0])
        tensors, ctx.rebuild = split_tensors(saved)
        ctx.save_for_backward(*weights, *tensors)
        ctx.rest = products, scales, route
        whole = route.x(saved)
        return tuple(route.y(products.forward(whole, w, of_w)) for w, of_w in zip(weights, scales))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *dys):
        products, scales, route = ctx.rest
        saved = ctx.saved_tensors  # once: what is recomputed is gone when it has been read
        weights, tensors = saved[: len(scales)], saved[len(scales) :]
        wants_x, *wanted = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        x, dx, dweights = route.x(ctx.rebuild(tensors)), None, []
        for dy, weight, of_w, wants in zip(dys, weights, scales, wanted):
            if route.dy is not None:
                dy = route.dy(products.enter_grad(dy, of_w))
            term, dweight = products.backward(dy, x, weight, (wants_x, wants), of_w)
            dx = term if dx is None or term is None else dx + term
            dweights.append(dweight)
        return route.dx(dx) if wants_x else None, None, None, None, *dweights


def split_tensors(saved: Any) -> tuple[list[Tensor], Callable]:
    """What autograd can save of a tensor, something quantised, or a tuple of these; and how to join it."""
    if isinstance(saved, Tensor):
        return [saved], lambda tensors: tensors[0]
    if isinstance(saved, Quantized):
        names = [n for n in ("codes", "scales", "tensor_scale") if getattr(saved, n) is not None]
        empty = replace(saved, codes=None, scales=None, tensor_scale=None)
        return [getattr(saved, n) for n in names], lambda tensors: replace(empty, **dict(zip(names, tensors)))
    parts = [split_tensors(part) for part in saved]

    def rebuild(tensors: Sequence[Tensor]) -> tuple:
        left = iter(tensors)
        return tuple(join([next(left) for _ in tensors_of]) for tensors_of, join in parts)

    return [tensor for tensors, _ in parts for tensor in tensors], rebuild


E4M3, E5M2 = Blocks(formats.E4M3), Blocks(formats.E5M2)
PRODUCTS = {
    "fp8_tensor": Products(E4M3, E4M3, E5M2),
    "fp8_delayed": Products(E4M3, E4M3, E5M2, history=16),
    "fp8_e4m3": Products(E4M3, E4M3, E4M3),
    "fp8_tiles": Products(RECIPES["fp8_1x128"], RECIPES["fp8_128x128"], RECIPES["fp8_1x128"]),
}
ONE_RECIPE = dict(fp8_rows="fp8_row", mxfp8="mxfp8", mxfp6="mxfp6", mxfp4="mxfp4", nvfp4="nvfp4")
PRODUCTS |= {name: Products(*3 * (RECIPES[of_all],)) for name, of_all in ONE_RECIPE.items()}


def convert(module: nn.Module, products: str) -> nn.Module:
    """Puts a LowLinear with the products of that name in place of every nn.Linear (no subclass) in `module`;
    returns it, or what stands for it. Raises ValueError for a name that PRODUCTS has not."""
    require_one_of(PRODUCTS, products=products)
    if type(module) is nn.Linear:
        return LowLinear(module, PRODUCTS[products])
    for name, child in module.named_children():
        setattr(module, name, convert(child, products))
    return module
