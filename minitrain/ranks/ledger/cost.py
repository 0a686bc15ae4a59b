"""One number for what an operator costs, the same in every run: its FLOPs and the bytes it moves, added.

    operator_cost(torch.ops.aten.add.Tensor, (a, b), {}, c)          120: three tensors of ten float32

For those who compare operators to choose which result to drop and compute again (dtr.py). A view
costs nothing. Tensors may be without numbers. Differs from the ledger's account: an argument is read whole,
also a table of which few rows are used. A time would be max(FLOPs/rate, bytes/rate) on one machine.
"""

from functools import cache

from minitrain.ranks.ledger.operators import describe, tensors
from minitrain.ranks.torch_private import OpOverload

_describe = cache(describe)


def operator_cost(func: OpOverload, args, kwargs: dict, out) -> int:
    """FLOPs + bytes read + bytes written."""
    operator = _describe(func)
    if operator.views:
        return 0
    flops = operator.flops(*args, **kwargs, out_val=out) if operator.flops else 0
    inputs = [] if operator.allocates else operator.inputs(tuple(args), kwargs)
    return flops + sum(tensor.nbytes for tensor in (*inputs, *tensors(out)))
