"""From a name to what runs: an attention core, the layout that cuts batches, the core of a slice.

    core_for("usp", {"ring": .., "ulysses": ..}, "zigzag")              core(q, k, v, bias=, dropout=)
    data_layout("usp", {"ring": 2, "ulysses": 2}, "zigzag", slices=1)   Layout over cp = ring x ulysses
    core_of_slices("usp", {"ring": .., ..}, "zigzag", slices=4)         attend(q, k, v, lengths, bias=, ..)

`groups` are those of the axes in core_names.CORES; cp is all of them together and cuts batches. With Ulysses
the layout is that of the rings, whose ranks deal their tokens further; every slice is laid out for itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.context import ring
from minitrain.context.core_names import dealt_to, slice_lengths
from minitrain.context.layout import Layout, contiguous, sliced, striped, zigzag
from minitrain.context.ulysses import dealt, loongtrain_attention, ulysses_attention, usp_attention
from minitrain.ranks.checks import require_one_of
from minitrain.systems.context.balanced import balanced_attention
from minitrain.systems.context.ring_self_attention import ring_self_attention
from minitrain.systems.context.wallfacer import wallfacer_attention

Slices = int | Sequence[int]
LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
RINGS = ring.ring_attention, ring.gathered_attention, ring.burst_attention, ring.double_ring_attention
OTHERS = balanced_attention, wallfacer_attention, usp_attention, loongtrain_attention
FUNCTIONS = {function.__name__.removesuffix("_attention"): function for function in (*RINGS, *OTHERS)}
FUNCTIONS["ring_self_attention"] = ring_self_attention
FUNCTIONS["ulysses"] = partial(ulysses_attention, core=ring.last_attention)


def core_for(name: str, groups: Mapping[str, ProcessGroup], layout: str) -> Callable:
    require_one_of(LAYOUTS, layout=layout)
    require_one_of(FUNCTIONS, name=name)
    return _core(name, groups, LAYOUTS[layout])


def data_layout(name: str, sizes: Mapping[str, int], layout: str, slices: Slices = 1) -> Layout:
    require_one_of(LAYOUTS, layout=layout)
    dealing = dealt_to(name, sizes)
    whole = dealt(LAYOUTS[layout], dealing) if dealing > 1 else LAYOUTS[layout]
    return whole if slices == 1 else sliced(whole, slices)


def core_of_slices(name: str, groups: Mapping[str, ProcessGroup], layout: str, slices: Slices) -> Callable:
    """attend(q, k, v, lengths): a rank's tokens of each slice so far, or None for a whole sequence."""
    sizes = {axis: group.size() for axis, group in groups.items()}
    ranks = math.prod(sizes.values())

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None, **extras) -> Tensor:
        so_far = [length * ranks for length in lengths] if lengths else slices
        so_far = slice_lengths(k.size(2) * ranks, so_far, ranks)
        if len(sizes) > 1 and "ulysses" in sizes:
            return _core(name, groups, LAYOUTS[layout], slices=so_far)(q, k, v, **extras)
        return _core(name, groups, sliced(LAYOUTS[layout], so_far))(q, k, v, **extras)

    return attend


def _core(name: str, groups: Mapping[str, ProcessGroup], layout: Layout, **more) -> Callable:
    where = groups if len(groups) > 1 else dict(group=next(iter(groups.values())))
    return partial(FUNCTIONS[name], **where, **({} if name == "balanced" else {"layout": layout}), **more)
