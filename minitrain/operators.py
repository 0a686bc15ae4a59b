"""What one operator of torch costs: FLOPs of its contractions, and the bytes it reads and writes.

    flops    2·m·k·n for a matrix product [m, k]·[k, n], alike for convolution and attention; 0 for everything else
    bytes    input tensors read + output tensors written; 0 for a view and for an allocation, which move nothing

FLOPs are the hardware's, as executed: a forward pass that runs twice counts twice, and the backward of a fused
attention kernel counts five products, not four, because it computes the scores anew (2.5 times its forward; attention
written with matmul counts twice). A causal kernel is charged for the full square of scores, as in the papers' formulas.
Bytes are what an operator must move if no cache helps it: a tensor that was expanded counts its memory, a table that
rows are read from or added to counts those rows.

The formulas for products and convolutions are those of torch.utils.flop_counter. Differs: attention and the backward of
convolutions are ours (torch 2.13 counts nothing for the CPU attention kernel, and too much for grouped convolutions).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh"}
OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
GATHERS = {"embedding", "index_select", "gather", "index"}
SCATTERS = {"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"}
FLOATS = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values()
          if isinstance(dtype, torch.dtype) and dtype.is_floating_point}


@dataclass(slots=True)
class Operator:
    """What can be said of an operator before its arguments are known."""

    name: str                           # "mm", "add_"
    flops: Callable[..., int] | None    # (*args, out_val=result, **kwargs) -> int
    written: tuple[int, ...]            # positions of the arguments it writes into: x.add_(y)
    written_keywords: frozenset[str]    # names of those it writes into without reading: torch.add(x, y, out=z)
    mutates: bool                       # either of the two
    ignores_first: bool                 # does not read its first argument: x.zero_(), torch.ones_like(x)
    gathers: bool                       # reads as much of its first argument as it writes
    scatters: bool                      # reads and writes as much of its first argument as its last one brings
    views: bool                         # gives its argument's memory another shape
    allocates: bool                     # gives memory and writes nothing
    composite: bool                     # has no kernel: made of others, which are to be counted in its place
    bookkeeping: bool                   # of the profiler, or a question about a device

    def inputs(self, args: tuple, kwargs: dict) -> list[Tensor]:
        if kwargs:
            return tensors([*args, *(value for name, value in kwargs.items() if name not in self.written_keywords)])
        return tensors(args)

    def targets(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """The arguments it writes into."""
        by_position = [args[i] for i in self.written if i < len(args)]
        return tensors(by_position + [kwargs.get(name) for name in self.written_keywords])


def describe(func: torch._ops.OpOverload) -> Operator:
    packet, schema = func.overloadpacket, func._schema
    name, bookkeeping = packet.__name__, func.namespace in ("prim", "profiler")
    written = [_is_written(argument) for argument in schema.arguments]
    return Operator(
        name=name,
        flops=_formula(packet) or _formula(getattr(aten, name.removesuffix("_"), None)),        # c.addmm_(a, b) as addmm(c, a, b)
        written=tuple(i for i, a in enumerate(schema.arguments) if written[i] and not a.kwarg_only),
        written_keywords=frozenset(a.name for i, a in enumerate(schema.arguments) if written[i] and a.kwarg_only),
        mutates=any(written),
        ignores_first=name in OVERWRITES or name.endswith("_like") or name.startswith("new_"),
        gathers=name in GATHERS,
        scatters=name in SCATTERS,
        views=bool(schema.returns) and all(r.alias_info is not None and not _is_written(r) for r in schema.returns),
        allocates=name in ALLOCATES,
        composite=not bookkeeping and has_kernel(func.name(), "CompositeImplicitAutograd")
        and not has_kernel(func.name(), "CPU") and not has_kernel(func.name(), "CUDA"),
        bookkeeping=bookkeeping,
    )


def _formula(packet) -> Callable[..., int] | None:
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


# ---- FLOPs where torch.utils.flop_counter has no formula, or not a right one -----------------------------------------

def _attention(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> int:
    """scores = Q·Kᵀ, out = P·V. q [B, H, T, K], k and v [B, H', S, K]: H' < H heads are shared, which saves no work."""
    B, H, T, K = q.shape
    return 2 * B * H * T * k.shape[-2] * (K + v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> int:
    """scores once more, dP = dO·Vᵀ, dV = Pᵀ·dO, dQ = dS·K, dK = dSᵀ·Q."""
    B, H, T, K = q.shape
    return 2 * B * H * T * k.shape[-2] * (3 * K + 2 * v.shape[-1])


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes, stride, padding, dilation,
                          transposed: bool, output_padding, groups, output_mask: list[bool], **kwargs) -> int:
    """Each of the two gradients, of x and of the weight, takes the multiplications of the forward."""
    points = prod((x if transposed else grad).shape[2:])
    return 2 * x.shape[0] * points * weight.numel() * (output_mask[0] + output_mask[1])


def _matrix_vector(matrix: Tensor, *args, **kwargs) -> int:
    return 2 * matrix.numel()


OUR_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten.convolution_backward: _convolution_backward,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.vdot: _matrix_vector,
    aten.addmv: lambda vector, matrix, *args, **kwargs: _matrix_vector(matrix),
    aten.addbmm: lambda matrix, a, b, **kwargs: 2 * a.numel() * b.shape[-1],
}
