"""Contractions: what a product of matrices, a convolution or an attention kernel computes, and its shape.

    product [m, k]·[k, n], `batch` times          flops 2·batch·m·n·k             shape (batch, m, n, k)
    attention Q [B, H, Tq, K], K [B, H', Tk, K]   flops 2·B·H·scores·(K + Kv)     shape (B·H, Tq, Tk, K)

FLOPs are the hardware's, as executed: a forward that runs twice counts twice, and the backward of a fused
attention kernel counts five products, since it computes the scores again. A fused kernel told `is_causal`
counts the T(T+1)/2 scores its mask leaves (tiles on the diagonal are done in full, which is not charged);
`causal="square"` charges all T², as published formulas do. With a mask of numbers all scores are computed, so
all count: shape and FLOPs together tell which it was. Of grouped products, whose rows are shared out among E
matrices as numbers decide, the shape is E products of the mean rows, rounded up; the FLOPs are exact.

Products and convolutions use the formulas of torch.utils.flop_counter. Differs: attention and the backward of
convolutions are ours (torch 2.13 counts nothing for the CPU attention kernel, too much for grouped
convolutions). A convolution has no shape here.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from minitrain.ranks import torch_private
from minitrain.ranks.checks import require_ints
from minitrain.ranks.torch_private import schema_of

aten = torch.ops.aten


def flops_of(packet, causal: str) -> Callable[..., int] | None:
    """The formula (*args, out_val=result, **kwargs) -> FLOPs of an operator; None if it is no contraction."""
    if packet in ATTENTION:
        return partial(_attention, _arguments(packet), *ATTENTION[packet], causal)
    return OUR_FORMULAS.get(packet) or flop_registry.get(packet)


def shape_of(packet) -> Callable[..., tuple[int, ...]] | None:
    """The formula (*args, **kwargs) -> (batch, m, n, k); None if there is none."""
    if packet in ATTENTION:
        return partial(_attention_shape, _arguments(packet))
    if packet is torch_private.grouped_product:
        return _grouped_shape
    return partial(_product_shape, PRODUCTS[packet]) if packet in PRODUCTS else None


def _arguments(packet) -> list[str]:
    return [argument.name for argument in schema_of(packet.default).arguments]


# ---- shapes ----------------------------------------------------------------------------------------------


def _product_shape(first: int, *args, **kwargs) -> tuple[int, ...]:
    """Of a [.., m, k] and b [.., k, n], which are the arguments `first` and the next; either may be [k]."""
    a, b = args[first].shape, args[first + 1].shape
    return prod(a[:-2]), a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1, a[-1]


def _grouped_shape(a: Tensor, b: Tensor, ends: Tensor | None = None, *args, **kwargs) -> tuple[int, ...]:
    """Every row of a [R, D] meets one of E matrices b [E, D, F]; or each of E groups of the columns of a
    [D, R] meets its rows of b [R, F]."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if ends is None:
        return a.shape[0], m, n, k
    groups = len(ends)
    return (groups, -(-m // groups), n, k) if b.ndim == 3 else (groups, m, n, -(-k // groups))


def _attention_shape(names: list[str], *args, **kwargs) -> tuple[int, ...]:
    given = dict(zip(names, args)) | kwargs
    (B, H, T, K), S = given["query"].shape, given["key"].shape[-2]
    return B * H, T, S, K


# ---- FLOPs where torch.utils.flop_counter has no formula, or not a right one -----------------------------


def _attention(
    names: list[str], with_keys: int, with_values: int, aligned: str, causal: str, *args, **kwargs
):
    """So many products of Tq·Tk scores with the width of the keys, and with that of the values. q [B, H, Tq,
    K], k and v [B, H', Tk, K]: heads that are shared, H' < H, save no work."""
    given = dict(zip(names, args)) | kwargs
    (B, H, T, K), S = given["query"].shape, given["key"].shape[-2]
    triangle = given.get("is_causal", False) and causal == "triangle"
    scores = visible_scores(T, S, aligned) if triangle else T * S
    return 2 * B * H * scores * (with_keys * K + with_values * given["value"].shape[-1])


def visible_scores(queries: int, keys: int, aligned: str = "top left") -> int:
    """What a causal mask leaves of [Tq, Tk]: the diagonal starts in the first row or ends in the last."""
    require_ints(queries=queries, keys=keys)
    side = min(queries, keys)
    rest = (queries - side) * keys if aligned == "top left" else queries * (keys - side)
    return side * (side + 1) // 2 + rest


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *settings, **kwargs) -> int:
    """Each of the two gradients, of x and of the weight, takes the multiplications of the forward."""
    bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask = settings
    points = prod((x if transposed else grad).shape[2:])
    return 2 * x.shape[0] * points * weight.numel() * (output_mask[0] + output_mask[1])


def _matrix_vector(matrix: Tensor, *args, **kwargs) -> int:
    return 2 * matrix.numel()


def _grouped_product(a: Tensor, b: Tensor, *args, **kwargs) -> int:
    """Every row of a [R, D] meets one matrix of b [E, D, F]; or a [D, R] and b [R, F] add to one [D, F]."""
    return 2 * a.numel() * b.shape[-1]


# Scores = Q·Kᵀ, out = P·V. Backward: scores again, dP = dO·Vᵀ, dV = Pᵀ·dO, dQ = dS·K, dK = dSᵀ·Q.
ATTENTION = {
    torch_private.flash_cpu: (1, 1, "top left"),
    torch_private.flash_cuda: (1, 1, "lower right"),
    torch_private.efficient: (1, 1, "top left"),
    torch_private.cudnn: (1, 1, "top left"),
    torch_private.flash_cpu_backward: (3, 2, "top left"),
    torch_private.flash_cuda_backward: (3, 2, "lower right"),
    torch_private.efficient_backward: (3, 2, "top left"),
    torch_private.cudnn_backward: (3, 2, "top left"),
}
# Which argument is the first factor.
PRODUCTS = dict.fromkeys((aten.mm, aten.bmm, torch_private.scaled_product, aten.mv, aten.dot, aten.vdot), 0)
PRODUCTS |= dict.fromkeys((aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv), 1)
OUR_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    torch_private.grouped_product: _grouped_product,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.vdot: _matrix_vector,
    aten.addmv: lambda vector, matrix, *args, **kwargs: _matrix_vector(matrix),
    aten.addbmm: lambda matrix, a, b, **kwargs: 2 * a.numel() * b.shape[-1],
}
