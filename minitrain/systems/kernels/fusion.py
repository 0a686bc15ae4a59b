"""Fusion by rules, with loads counted, and the graphs that torch.compile sees, across which nothing fuses.

    groups = fuse(steps)                                  bias, GELU, dropout: one group, 2 tensors for 6.25
    y = run(groups, {"x": x, "bias": bias}, Traffic())    by tiles of rows, every load counted
    captured(model, tokens)                               graphs [["embedding", "layer_norm", ..]], no break

A *pointwise* step needs of its inputs what it makes of its output, a *reduction* (softmax, LayerNorm) whole
rows, a *product* more. The rules are TVM's, but that a tile here is whole rows, so reductions join too: a
step joins the group that ends with one of its inputs, if nobody else reads that; a reduction only if there is
no product in the group. A product starts a group; bias and GELU that follow are its epilogue. A group loads
what is made elsewhere and stores its last output; with a product in it, it runs in one piece. Dropout by
position (attention/placed.py) stores no mask. TorchDynamo runs Python's bytecode on tensors without numbers
and writes down what torch is asked to do, until something depends on a number (`item()`, `x.sum() > 0`):
the graph ends and another begins, a break. It takes seconds to load, and forgets what was compiled before.
Chen et al. 2018, arXiv:1802.04799 (TVM), section 3; Ansel et al. 2024 (PyTorch 2), ASPLOS, sections 3 and 5.
Differs: no layouts; graphs run as they are.
"""

from collections import Counter, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.attention.flash import UNCOUNTED
from minitrain.attention.kernel import pieces
from minitrain.ranks.checks import require_one_of, require_positive_ints

Captured = namedtuple("Captured", "result graphs")  # graphs: the operators of each, in order


class Step(NamedTuple):
    """`output` = function(*inputs), or with `by_place` function(*inputs, slice of the rows)."""

    output: str
    kind: str
    function: Callable
    inputs: tuple[str, ...]
    by_place: bool = False


def fuse(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps in groups, each a kernel with one output, in an order in which they can run."""
    readers = Counter(name for step in steps for name in step.inputs)
    groups: list[list[Step]] = []
    for step in steps:
        require_one_of(("pointwise", "reduction", "product"), kind=step.kind)
        joined = []
        for group in groups if step.kind != "product" else ():
            alone = group[-1].output in step.inputs and readers[group[-1].output] == 1
            if alone and (step.kind == "pointwise" or all(one.kind != "product" for one in group)):
                joined = joined or group
        groups = [group for group in groups if group is not joined] + [[*joined, step]]
    return groups


def run(kernels: list[list[Step]], inputs: Mapping[str, Tensor], memory=UNCOUNTED, tile: int = 8) -> Tensor:
    """The last output of groups of steps. What has as many rows as the first input `[rows, ..]` comes by
    tiles of so many, the rest (a bias, a weight) once per group; `memory`: a SlowMemory."""
    require_positive_ints(tile=tile)
    values, rows = dict(inputs), len(next(iter(inputs.values())))
    for group in kernels:
        made = [step.output for step in group]
        read = dict.fromkeys(name for step in group for name in step.inputs if name not in made)
        in_one = any(step.kind == "product" for step in group)
        cut = {name for name in read if not in_one and values[name].shape[1:] and len(values[name]) == rows}
        chip, parts = {name: memory.load(values[name])[0] for name in read if name not in cut}, []
        for piece in pieces(rows, rows if in_one else tile):
            chip |= {name: memory.load(values[name][piece])[0] for name in cut}
            for step in group:
                place = (piece,) if step.by_place else ()
                chip[step.output] = step.function(*(chip[name] for name in step.inputs), *place)
            parts.append(memory.store(chip[made[-1]]))
        values[made[-1]] = torch.cat(parts)
    return values[kernels[-1][-1].output]


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
