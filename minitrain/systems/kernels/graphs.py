"""What torch.compile sees of a function: its graphs, their operators, and where it breaks off (PyTorch 2).

    captured(model, tokens)       Captured(result, graphs=[["embedding", "layer_norm", ..]], breaks=0)

TorchDynamo runs Python's bytecode on tensors without numbers and writes down what torch is asked to do, until
something depends on a number: a branch on `x.sum() > 0`, an `item()`, a `print`. There the graph ends, Python
decides, and what is left of the function is compiled as another: a break. A graph holds under guards, such as
its arguments' shapes; with others it is captured again. A compiler (TorchInductor) gets one graph at a time,
so it fuses nothing across a break; the backend here runs the graph as it is. Dynamo takes seconds to load,
and forgets what it has compiled in this process. Ansel et al. 2024 (PyTorch 2), ASPLOS, sections 3 and 5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Captured(NamedTuple):
    result: Any
    graphs: list[list[str]]  # the operators of each, in order

    breaks = property(lambda self: len(self.graphs) - 1)


def captured(fn: Callable, *args) -> Captured:
    """One call of `fn`, compiled, by a backend that writes its graphs down."""
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        called = [node for node in module.graph.nodes if node.op.startswith("call")]
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in called])
        return module.forward

    torch.compiler.reset()
    result = torch.compile(fn, backend=backend, dynamic=False)(*args)
    torch.compiler.reset()
    return Captured(result, graphs)
