"""What one operator of torch costs: FLOPs of its contractions, and the bytes it reads and writes.

    flops    2·m·k·n for a product [m, k]·[k, n], alike for convolution and attention; 0 for everything else
    bytes    input tensors read + output tensors written; 0 for a view and for an allocation

FLOPs are the hardware's, as executed: a forward that runs twice counts twice, and the backward of a fused
attention kernel counts five products, since it computes the scores again. A fused kernel told `is_causal`
counts the T(T+1)/2 scores its mask leaves (tiles on the diagonal are done in full, which is not charged);
`causal="square"` charges all T², as published formulas do. With a mask of numbers all scores are computed, so
all count. Bytes are what must move without a cache: an expanded tensor counts its memory, a table that rows
are read from or added to counts those rows.

Products and convolutions use the formulas of torch.utils.flop_counter. Differs: attention and the backward of
convolutions are ours (torch 2.13 counts nothing for the CPU attention kernel, too much for grouped
convolutions).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from minitrain import torch_private
from minitrain.checks import whole
from minitrain.torch_private import OpOverload, has_kernel, schema_of

aten = torch.ops.aten

ALLOCATES = set("empty empty_like empty_strided new_empty new_empty_strided resize_ set_ lift_fresh".split())
BACKENDS = ("CompositeImplicitAutograd", "CPU", "CUDA")
OVERWRITES = set("copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_".split())
GATHERS = {"embedding", "index_select", "gather", "index"}
SCATTERS = {"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"}
DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
FLOATS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype.is_floating_point}


@dataclass(slots=True)
class Operator:
    """What can be said of an operator before its arguments are known."""

    name: str  # "mm", "add_"
    flops: Callable[..., int] | None  # (*args, out_val=result, **kwargs) -> int
    written: tuple[int, ...]  # positions of the arguments it writes into: x.add_(y)
    written_keywords: frozenset[str]  # names of those it writes into without reading: torch.add(x, y, out=z)
    mutates: bool  # either of the two
    ignores_first: bool  # does not read its first argument: x.zero_(), torch.ones_like(x)
    gathers: bool  # reads as much of its first argument as it writes
    scatters: bool  # reads and writes as much of its first argument as its last one brings
    views: bool  # gives its argument's memory another shape
    allocates: bool  # gives memory and writes nothing
    composite: bool  # has no kernel: made of others, which are to be counted in its place
    bookkeeping: bool  # of the profiler, or a question about a device

    def inputs(self, args: tuple, kwargs: dict) -> list[Tensor]:
        if kwargs:
            args = [*args, *(value for name, value in kwargs.items() if name not in self.written_keywords)]
        return tensors(args)

    def targets(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """The arguments it writes into."""
        by_position = [args[i] for i in self.written if i < len(args)]
        return tensors(by_position + [kwargs.get(name) for name in self.written_keywords])


def describe(func: OpOverload, causal: str = "triangle") -> Operator:
    packet, schema = func.overloadpacket, schema_of(func)
    name, bookkeeping = packet.__name__, func.namespace in ("prim", "profiler")
    written = [(i, argument) for i, argument in enumerate(schema.arguments) if _is_written(argument)]
    not_in_place = getattr(aten, name.removesuffix("_"), None)  # addmm_ costs what addmm does
    kernels = {key for key in BACKENDS if not bookkeeping and has_kernel(func.name(), key)}
    aliases = [r.alias_info is not None and not _is_written(r) for r in schema.returns]
    return Operator(
        name=name,
        flops=_formula(packet, causal) or _formula(not_in_place, causal),
        written=tuple(i for i, a in written if not a.kwarg_only),
        written_keywords=frozenset(a.name for _, a in written if a.kwarg_only),
        mutates=bool(written),
        ignores_first=name in OVERWRITES or name.endswith("_like") or name.startswith("new_"),
        gathers=name in GATHERS,
        scatters=name in SCATTERS,
        views=bool(aliases) and all(aliases),
        allocates=name in ALLOCATES,
        composite=kernels == {"CompositeImplicitAutograd"},
        bookkeeping=bookkeeping,
    )


def _formula(packet, causal: str) -> Callable[..., int] | None:
    if packet in ATTENTION:
        names = [argument.name for argument in schema_of(packet.default).arguments]
        return partial(_attention, names, *ATTENTION[packet], causal)
    return OUR_FORMULAS.get(packet) or flop_registry.get(packet)


def _is_written(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors(values) -> list[Tensor]:
    """The tensors in a list or tuple of anything, those in its lists included; of a tensor: itself."""
    if isinstance(values, Tensor):
        return [values]
    found = []
    if isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(v for v in value if isinstance(v, Tensor))
    return found


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
    whole(queries=queries, keys=keys)
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
    """Every row of a [R, D] meets one matrix of b [E, D, F]; or b is [R, F], and each row adds to one [D, F]
    (a is then [D, R])."""
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
OUR_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    torch_private.grouped_product: _grouped_product,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.vdot: _matrix_vector,
    aten.addmv: lambda vector, matrix, *args, **kwargs: _matrix_vector(matrix),
    aten.addbmm: lambda matrix, a, b, **kwargs: 2 * a.numel() * b.shape[-1],
}
