"""Sees every operator of torch on its way to the kernel: what it reads and writes, what it costs.

    bytes    input tensors read + output tensors written; 0 for a view and for an allocation
    flops    of a contraction, which has a shape too; 0 and () for everything else
             product [m, k]·[k, n], `batch` times          2·batch·m·n·k             (batch, m, n, k)
             attention Q [B, H, Tq, K], K [B, H', Tk, K]   2·B·H·scores·(K + Kv)     (B·H, Tq, Tk, K)

Bytes are what must move without a cache: an expanded tensor counts its memory, a table that rows are read
from or added to counts those rows. FLOPs are the hardware's, as executed: the backward of a fused attention
kernel counts five products, since it computes the scores again. Told `is_causal` it counts the T(T+1)/2
scores its mask leaves (not that tiles on the diagonal are done in full); `causal="square"` charges all T². Of
grouped products the shape is E products of the mean rows, rounded up.

Formulas are torch.utils.flop_counter's. Differs: attention and the backward of convolutions (torch 2.13
counts nothing for the CPU attention kernel, too much for grouped convolutions), which have no shape here.
"""

from collections.abc import Callable
from functools import cache, partial
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from minitrain.ranks import torch_private as private
from minitrain.ranks.events import Compute
from minitrain.ranks.torch_private import DispatchMode, OpOverload, has_kernel, schema_of

aten = torch.ops.aten

ALLOCATES = set("empty empty_like empty_strided new_empty new_empty_strided resize_ set_ lift_fresh".split())
BACKENDS = ("CompositeImplicitAutograd", "CPU", "CUDA")
OVERWRITES = set("copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_".split())
GATHERS = {"embedding", "index_select", "gather", "index"}
SCATTERS = {"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"}
DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
FLOATS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype.is_floating_point}


class Operator:
    """What can be said of an operator before its arguments are known."""

    def __init__(self, func: OpOverload, causal: str = "triangle"):
        packet, schema = func.overloadpacket, schema_of(func)
        self.name = name = packet.__name__  # "mm", "add_"
        not_in_place = getattr(aten, name.removesuffix("_"), None)  # addmm_ costs what addmm does
        # (*args, out_val=result, **kwargs) -> FLOPs, and (*args, **kwargs) -> (batch, m, n, k), or None
        self.flops = flops_of(packet, causal) or flops_of(not_in_place, causal)
        self.shape = shape_of(packet) or shape_of(not_in_place)
        written = [(i, argument) for i, argument in enumerate(schema.arguments) if _is_written(argument)]
        # positions of the arguments it writes into: x.add_(y)
        self.written = tuple(i for i, a in written if not a.kwarg_only)
        # names of those it writes into without reading: torch.add(x, y, out=z)
        self.written_keywords = frozenset(a.name for _, a in written if a.kwarg_only)
        self.mutates = bool(written)
        # does not read its first argument: x.zero_(), torch.ones_like(x)
        self.ignores_first = name in OVERWRITES or name.endswith("_like") or name.startswith("new_")
        self.gathers = name in GATHERS  # reads as much of its first argument as it writes
        self.scatters = name in SCATTERS  # reads and writes as much of its first as its last one brings
        aliases = [r.alias_info is not None and not _is_written(r) for r in schema.returns]
        self.views = bool(aliases) and all(aliases)  # gives its argument's memory another shape
        self.allocates = name in ALLOCATES  # gives memory and writes nothing
        # of the profiler, or a question about a device
        self.bookkeeping = func.namespace in ("prim", "profiler")
        kernels = {key for key in BACKENDS if not self.bookkeeping and has_kernel(func.name(), key)}
        # has no kernel: made of others, which are to be counted in its place
        self.composite = kernels == {"CompositeImplicitAutograd"}

    def inputs(self, args: tuple, kwargs: dict) -> list[Tensor]:
        if kwargs:
            args = [*args, *(value for name, value in kwargs.items() if name not in self.written_keywords)]
        return tensors(args)

    def targets(self, args: tuple, kwargs: dict) -> list[Tensor]:
        by_position = [args[i] for i in self.written if i < len(args)]
        return tensors(by_position + [kwargs.get(name) for name in self.written_keywords])


described = cache(Operator)


def operator_cost(func: OpOverload, args, kwargs: dict, out) -> int:
    """FLOPs + bytes read + bytes written: one number for those who choose which result to drop and compute
    again (dtr.py). A view costs nothing. Differs from the account: a table is read whole."""
    operator = described(func)
    if operator.views:
        return 0
    flops = operator.flops(*args, **kwargs, out_val=out) if operator.flops else 0
    inputs = [] if operator.allocates else operator.inputs(tuple(args), kwargs)
    return flops + sum(tensor.nbytes for tensor in (*inputs, *tensors(out)))


def _is_written(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors(values) -> list[Tensor]:
    """In a list or tuple of anything, those in its lists included; of a tensor: itself."""
    if isinstance(values, Tensor):
        return [values]
    several = []
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, Tensor):
            several.append(value)
        elif isinstance(value, (list, tuple)):
            several.extend(v for v in value if isinstance(v, Tensor))
    return several


# ---- contractions: FLOPs, and shapes ---------------------------------------------------------------------


def flops_of(packet, causal: str) -> Callable[..., int] | None:
    """The formula (*args, out_val=result, **kwargs) -> FLOPs of an operator; None if it is no contraction."""
    if packet in ATTENTION:
        return partial(_attention, _names(packet), *ATTENTION[packet], causal)
    return OUR_FORMULAS.get(packet) or flop_registry.get(packet)


def shape_of(packet) -> Callable[..., tuple[int, ...]] | None:
    """The formula (*args, **kwargs) -> (batch, m, n, k); None if there is none."""
    if packet in ATTENTION:
        return partial(_attention_shape, _names(packet))
    if packet is private.grouped_product:
        return _grouped_shape
    return partial(_product_shape, PRODUCTS[packet]) if packet in PRODUCTS else None


def _names(packet) -> list[str]:
    return [argument.name for argument in schema_of(packet.default).arguments]


def _product_shape(first: int, *args, **kwargs) -> tuple[int, ...]:
    """Of a [.., m, k] and b [.., k, n], which are the arguments `first` and the next; either may be [k]."""
    a, b = args[first].shape, args[first + 1].shape
    return prod(a[:-2]), a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1, a[-1]


def _grouped_shape(a: Tensor, b: Tensor, ends: Tensor | None = None, *args, **kwargs) -> tuple[int, ...]:
    """Rows of a [R, D] meet one of E matrices b [E, D, F]; or columns of a [D, R], by groups, rows of b."""
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


def _attention(names, with_keys: int, with_values: int, aligned: str, causal: str, *args, **kwargs) -> int:
    """So many products of Tq·Tk scores with the width of the keys, and with that of the values. q [B, H, Tq,
    K], k and v [B, H', Tk, K]: heads that are shared, H' < H, save no work."""
    given = dict(zip(names, args)) | kwargs
    heads, T, S, K = _attention_shape(names, *args, **kwargs)
    triangle = given.get("is_causal", False) and causal == "triangle"
    scores = visible_scores(T, S, aligned) if triangle else T * S
    return 2 * heads * scores * (with_keys * K + with_values * given["value"].shape[-1])


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


# Scores = Q·Kᵀ, out = P·V. Backward: scores again, dP = dO·Vᵀ, dV = Pᵀ·dO, dQ = dS·K, dK = dSᵀ·Q.
ATTENTION = dict.fromkeys((private.flash_cpu, private.efficient, private.cudnn), (1, 1, "top left"))
BACKWARDS = private.flash_cpu_backward, private.efficient_backward, private.cudnn_backward
ATTENTION |= dict.fromkeys(BACKWARDS, (3, 2, "top left"))
ATTENTION |= {private.flash_cuda: (1, 1, "lower right"), private.flash_cuda_backward: (3, 2, "lower right")}
# Which argument is the first factor.
PRODUCTS = dict.fromkeys((aten.mm, aten.bmm, private.scaled_product, aten.mv, aten.dot, aten.vdot), 0)
PRODUCTS |= dict.fromkeys((aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv), 1)
OUR_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    # every row of a [R, D] meets one matrix of b [E, D, F]; or a [D, R] and b [R, F] add to one [D, F]
    private.grouped_product: lambda a, b, *args, **kwargs: 2 * a.numel() * b.shape[-1],
    aten.addmv: lambda vector, matrix, *args, **kwargs: 2 * matrix.numel(),
    aten.addbmm: lambda matrix, a, b, **kwargs: 2 * a.numel() * b.shape[-1],
}
OUR_FORMULAS |= dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda a, *args, **kwargs: 2 * a.numel())


class Watch(DispatchMode):  # while a ledger is open: writes down every operator of this thread
    def __init__(self, ledger) -> None:
        super().__init__()
        self._ledger, self._memory = ledger, ledger._memory
        self._describe = partial(described, causal=ledger.causal)
        # Equal events are one object: thousands would keep the garbage collector busy.
        self._event = cache(Compute)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is private.DEVICE_OF:  # autograd asks it of every fake tensor that an operator gives
            return args[0].device
        kwargs, operator = kwargs or {}, self._describe(func)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._ledger.uncounted[operator.name] += 1
        if operator.composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not operator.bookkeeping:
            if event := self._account(operator, args, kwargs, result):
                if not self._ledger._emulates:
                    self._ledger._events.append(event)
            if self._memory.limit_bytes is not None and not operator.allocates:  # it may yet be the host's
                self._memory.check_limit()
        return result

    def _account(self, operator: Operator, args: tuple, kwargs: dict, result) -> Compute | None:
        memory = self._memory
        inputs = [] if operator.allocates else operator.inputs(args, kwargs)
        read = [min(tensor.nbytes, memory.read(tensor)) for tensor in inputs]
        if operator.views and not operator.allocates:  # torch.tensor(..) ends in a view of what it has made
            return None
        outputs = tensors(result)
        if operator.mutates:
            for target in operator.targets(args, kwargs):
                memory.read(target)  # lest it be taken for new-born below
                if all(target is not output for output in outputs):
                    outputs.append(target)
        births = memory.births
        written = sum([min(tensor.nbytes, memory.write(tensor)) for tensor in outputs])
        if operator.allocates or (births == memory.births and not operator.mutates):
            return None  # memory that nobody has written yet, or a view by another name
        if operator.gathers:
            read[0] = written
        elif operator.scatters:
            # the last one brings values, or the indices of a number
            read[0] = written = read[-1] * inputs[0].itemsize // inputs[-1].itemsize
        elif operator.ignores_first and read:
            read[0] = 0
        flops = operator.flops(*args, **kwargs, out_val=result) if operator.flops else 0
        if not flops and not written:
            return None
        of_codes = inputs[:1] if flops else []  # an FP8 product gives bfloat16, and runs at FP8's rate
        dtype = next((FLOATS[tensor.dtype] for tensor in of_codes + outputs if tensor.dtype in FLOATS), "")
        shape = operator.shape(*args, **kwargs) if operator.shape else ()
        moved, phase = sum(read) + written, self._ledger._phase
        return self._event(operator.name, flops, moved, phase, dtype, shape, written)
