"""Results of a layer that have a name, so that one can speak of what is kept of them for backward.

    y = self.result("act", compute, gate, up)        compute(gate, up)

`result` is a seam, as the core of an attention is: who keeps some results and makes others again brings a
door of its own (memory/recompute.py). All tensors with gradients that `compute` reads are its inputs, or
parameters. The names are in memory/policies.py.
"""

from collections.abc import Callable

from torch import Tensor


def call(name: str, compute: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """As it is: nothing is made of the name."""
    return compute(*inputs)
