"""A core of a name and its groups (names.py has the table): what a Strategy asks for. The layout of the tokens follows."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch.distributed import ProcessGroup

from minitrain.context import layout as layouts
from minitrain.context.balanced import balanced_attention
from minitrain.context.burst import burst_attention
from minitrain.context.hybrid import dealt, double_ring_attention, loongtrain_attention, usp_attention
from minitrain.context.layout import Layout
from minitrain.context.ring import ring_attention
from minitrain.context.ring_self_attention import ring_self_attention
from minitrain.context.ulysses import ulysses_attention
from minitrain.context.wallfacer import wallfacer_attention


LAYOUTS = {"contiguous": layouts.contiguous, "zigzag": layouts.zigzag, "striped": layouts.striped}


def core_for(name: str, groups: Mapping[str, ProcessGroup], layout: str, attend: Callable) -> Callable:
    """core(q, k, v) over the ranks of these groups; `attend`: attention of one device, for Ulysses."""
    how = LAYOUTS[layout]
    match name:
        case "ring":
            return partial(ring_attention, group=groups["cp"], layout=how)
        case "ring_self_attention":
            return partial(ring_self_attention, group=groups["cp"], layout=how)
        case "balanced":
            return partial(balanced_attention, group=groups["cp"])
        case "ulysses":
            return partial(ulysses_attention, group=groups["cp"], core=attend, layout=how)
        case "double_ring":
            return partial(double_ring_attention, outer=groups["outer"], inner=groups["inner"], layout=how)
        case "burst":
            return partial(burst_attention, across=groups["outer"], inside=groups["inner"], layout=how)
        case "wallfacer":
            return partial(wallfacer_attention, ring=groups["outer"], team=groups["inner"], layout=how)
        case "usp":
            return partial(usp_attention, ring=groups["ring"], ulysses=groups["ulysses"], layout=how)
        case "loongtrain":
            return partial(loongtrain_attention, **groups, layout=how)
    raise ValueError(f"core={name!r} is none of names.GROUPS")


def layout_for(name: str, layout: str, ulysses: int) -> Layout:
    """How the tokens of a row lie on the ranks of cp."""
    return dealt(LAYOUTS[layout], ulysses) if name in ("usp", "loongtrain") else LAYOUTS[layout]
