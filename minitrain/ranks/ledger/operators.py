"""What is known of an operator of torch: whether it reads, writes, allocates or only views; what it costs.

    bytes    input tensors read + output tensors written; 0 for a view and for an allocation
    flops    of a contraction, which has a shape too; 0 and () for everything else
             product [m, k]·[k, n], `batch` times          2·batch·m·n·k             (batch, m, n, k)
             attention Q [B, H, Tq, K], K [B, H', Tk, K]   2·B·H·scores·(K + Kv)     (B·H, Tq, Tk, K)

Bytes are what must move without a cache: an expanded tensor counts its memory, a table that rows are read
from or added to counts those rows. FLOPs are the hardware's, as executed: the backward of a fused attention
kernel counts five products, since it computes the scores again. Told `is_causal` it counts the T(T+1)/2
scores its mask leaves (tiles on the diagonal are done in full, which is not charged); `causal="square"`
charges all T², as published formulas do. With a mask of numbers all scores count. Of grouped products, whose
rows numbers share out among E matrices, the shape is E products of the mean rows, rounded up.

Products and convolutions use the formulas of torch.utils.flop_counter. Differs: attention and the backward of
convolutions are ours (torch 2.13 counts nothing for the CPU attention kernel, too much for grouped
convolutions). A convolution has no shape here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from minitrain.ranks import torch_private as private
from minitrain.ranks.torch_private import OpOverload, has_kernel, schema_of

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
    shape: Callable[..., tuple[int, ...]] | None  # (*args, **kwargs) -> batch, m, n, k
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
        flops=flops_of(packet, causal) or flops_of(not_in_place, causal),
        shape=shape_of(packet) or shape_of(not_in_place),
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


@cache
def _described(func: OpOverload) -> Operator:
    return describe(func)


def operator_cost(func: OpOverload, args, kwargs: dict, out) -> int:
    """FLOPs + bytes read + bytes written: one number for those who choose which result to drop and compute
    again (dtr.py). A view costs nothing. Differs from the account: a table is read whole."""
    operator = _described(func)
    if operator.views:
        return 0
    flops = operator.flops(*args, **kwargs, out_val=out) if operator.flops else 0
    inputs = [] if operator.allocates else operator.inputs(tuple(args), kwargs)
    return flops + sum(tensor.nbytes for tensor in (*inputs, *tensors(out)))


def _is_written(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors(values) -> list[Tensor]:
    """The tensors in a list or tuple of anything, those in its lists included; of a tensor: itself."""
    if isinstance(values, Tensor):
        return [values]
    several = []
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, Tensor):
            several.append(value)
        elif isinstance(value, (list, tuple)):
            several.extend(v for v in value if isinstance(v, Tensor))
    return several


# ---- contractions ----------------------------------------------------------------------------------------


def flops_of(packet, causal: str) -> Callable[..., int] | None:
    """The formula (*args, out_val=result, **kwargs) -> FLOPs of an operator; None if it is no contraction."""
    if packet in ATTENTION:
        return partial(_attention, _arguments(packet), *ATTENTION[packet], causal)
    return OUR_FORMULAS.get(packet) or flop_registry.get(packet)


def shape_of(packet) -> Callable[..., tuple[int, ...]] | None:
    """The formula (*args, **kwargs) -> (batch, m, n, k); None if there is none."""
    if packet in ATTENTION:
        return partial(_attention_shape, _arguments(packet))
    if packet is private.grouped_product:
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
    private.flash_cpu: (1, 1, "top left"),
    private.flash_cuda: (1, 1, "lower right"),
    private.efficient: (1, 1, "top left"),
    private.cudnn: (1, 1, "top left"),
    private.flash_cpu_backward: (3, 2, "top left"),
    private.flash_cuda_backward: (3, 2, "lower right"),
    private.efficient_backward: (3, 2, "top left"),
    private.cudnn_backward: (3, 2, "top left"),
}
# Which argument is the first factor.
PRODUCTS = dict.fromkeys((aten.mm, aten.bmm, private.scaled_product, aten.mv, aten.dot, aten.vdot), 0)
PRODUCTS |= dict.fromkeys((aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv), 1)
OUR_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    private.grouped_product: _grouped_product,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.vdot: _matrix_vector,
    aten.addmv: lambda vector, matrix, *args, **kwargs: _matrix_vector(matrix),
    aten.addbmm: lambda matrix, a, b, **kwargs: 2 * a.numel() * b.shape[-1],
}
