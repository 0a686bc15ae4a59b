"""Fusion by rules: which operators run in one pass over memory, and what that pass loads and stores.

    groups = fuse(steps)                                  bias, GELU, dropout: one group, 2 tensors for 6.25
    y = run(groups, {"x": x, "bias": bias}, Traffic())    by tiles of rows, every load counted

A *pointwise* step needs of its inputs what it makes of its output, a *reduction* (softmax, LayerNorm) whole
rows, a *product* more. The rules are TVM's, but that a tile here is whole rows, so reductions join too:

    a pointwise step joins the group that ends with one of its inputs, if nobody else reads that
    a reduction likewise, if there is no product in the group
    a product starts a group; bias and GELU that follow join it as its epilogue

A group loads what is made elsewhere and stores its last output; between its steps nothing leaves fast memory.
Dropout drops by position (attention/placed.py): a tile makes its mask itself and none is stored, where torch
keeps one of a byte per number. A group with a product runs in one piece, inputs counted once (tiles.py: what
tiles make of that). Chen et al. 2018, arXiv:1802.04799 (TVM), section 3. Differs: no layouts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.attention.flash import UNCOUNTED
from minitrain.attention.kernel import pieces
from minitrain.ranks.checks import require_one_of, require_positive_ints


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
        joined = next((group for group in groups if _joins(step, group, readers)), [])
        groups = [group for group in groups if group is not joined] + [[*joined, step]]
    return groups


def _joins(step: Step, group: list[Step], readers: Mapping[str, int]) -> bool:
    alone = group[-1].output in step.inputs and readers[group[-1].output] == 1
    whole_rows = all(one.kind != "product" for one in group)
    return alone and (step.kind == "pointwise" or step.kind == "reduction" and whole_rows)


def run(kernels: list[list[Step]], inputs: Mapping[str, Tensor], memory=UNCOUNTED, tile: int = 8) -> Tensor:
    """The last output of groups of steps. What has as many rows as the first input `[rows, ..]` comes by
    tiles of so many, the rest (a bias, a weight) once per group; `memory`: a SlowMemory."""
    require_positive_ints(tile=tile)
    values = dict(inputs)
    rows = next(iter(values.values())).size(0)
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
