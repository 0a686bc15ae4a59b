"""Results of a layer that have a name, by which a policy says which of them are kept for backward.

    y = self.result("act", compute, gate, up)        compute(gate, up)

`result` can be replaced, as the core of an attention can: recomputation, which keeps some results and
computes others again, passes a function of its own (memory/recompute.py). All tensors with gradients that
`compute` reads are its inputs, or parameters. The names are in memory/recompute_policies.py.
"""

from collections.abc import Callable

from torch import Tensor


def call(name: str, compute: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """As it is: nothing is made of the name."""
    return compute(*inputs)
