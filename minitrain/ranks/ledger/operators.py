"""What is known of an operator of torch: whether it reads, writes, allocates or only views; what it costs.

    bytes    input tensors read + output tensors written; 0 for a view and for an allocation
    flops    of a contraction, and its shape: contractions.py; 0 and () for everything else

Bytes are what must move without a cache: an expanded tensor counts its memory, a table that rows are read
from or added to counts those rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minitrain.ranks.ledger.contractions import flops_of, shape_of
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
