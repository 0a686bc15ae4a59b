"""Schedules by name, from plain numbers: what a Strategy and a command line say. No torch.

    named("1f1b", p=4, m=8)      named("interleaved", p=4, m=8, chunks=2)      named("seq1f1b", p=4, m=4, slices=2)      recompute=True

Raises ValueError in one line for an unknown name, for chunks or slices where a schedule has none, and what the schedules refuse.
"""

from __future__ import annotations

from collections.abc import Callable

from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules import dualpipe, one_direction, v_shape, zero_bubble
from minitrain.pipeline.schedules import slices as sliced
from minitrain.pipeline.schedules.bpipe import bpipe
from minitrain.pipeline.schedules.chimera import chimera
from minitrain.pipeline.schedules.greedy import greedy
from minitrain.pipeline.schedules.hanayo import hanayo
from minitrain.pipeline.schedules.varuna import recomputed, varuna

PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": one_direction.gpipe,
    "1f1b": one_direction.one_f_one_b,
    "zb_h1": zero_bubble.zb_h1,
    "zb_h2": zero_bubble.zb_h2,
    "v_min": v_shape.v_min,
    "v_half": v_shape.v_half,
    "zb_v": v_shape.zb_v,
    "chimera": chimera,
    "dualpipe": dualpipe.dualpipe,
    "dualpipe_v": dualpipe.dualpipe_v,
    "bpipe": bpipe,
    "varuna": varuna,
    "greedy": lambda p, m: greedy(range(p), p, m),
}
CHUNKED = {
    "interleaved": one_direction.interleaved,
    "breadth_first": one_direction.breadth_first,
    "zb_interleaved": zero_bubble.zb_interleaved,
    "hanayo": hanayo,
}  # chunks: stages a rank, or waves
SLICED = {"terapipe": sliced.terapipe, "seq1f1b": sliced.seq1f1b}  # slices of each sequence
NAMES = (*PLAIN, *CHUNKED, *SLICED)


def named(
    name: str, p: int, m: int, *, chunks: int = 1, slices: int = 1, recompute: bool = False
) -> Schedule:
    """The schedule for p ranks and m microbatches; with `recompute` a forward keeps its input only."""
    if name not in NAMES:
        raise ValueError(f"schedule={name!r}; use {', '.join(NAMES)}")
    if chunks > 1 and name not in CHUNKED:
        raise ValueError(
            f"chunks={chunks} with schedule={name!r}, whose stages are fixed; use chunks=1, or {', '.join(CHUNKED)}"
        )
    if slices > 1 and name not in SLICED:
        raise ValueError(
            f"slices={slices} with schedule={name!r}, which runs whole sequences; use slices=1, or {', '.join(SLICED)}"
        )
    if name in CHUNKED:
        schedule = CHUNKED[name](p, m, chunks)
    elif name in SLICED:
        schedule = SLICED[name](p, m, slices)
    else:
        schedule = PLAIN[name](p, m)
    return recomputed(schedule) if recompute and not schedule.recomputes else schedule
