"""Schedules by name, from plain numbers: what a Strategy and a command line say. No torch.

named("1f1b", p=4, m=8)   named("interleaved", p=4, m=8, chunks=2)   named("seq1f1b", p=4, m=4, slices=2)
"""

from functools import lru_cache

from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules import one_direction as whole
from minitrain.pipeline.schedules.bidirectional import chimera, dualpipe, dualpipe_v, hanayo
from minitrain.pipeline.schedules.greedy import greedy
from minitrain.pipeline.schedules.less_memory import bpipe, recomputed, varuna
from minitrain.pipeline.schedules.zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_interleaved, zb_v
from minitrain.ranks.checks import require_positive_ints

PLAIN = {"gpipe": whole.gpipe, "1f1b": whole.one_f_one_b, "greedy": lambda p, m: greedy(range(p), p, m)}
FIXED = zb_h1, zb_h2, v_min, v_half, zb_v, chimera, dualpipe, dualpipe_v, bpipe, varuna
PLAIN |= {f.__name__: f for f in FIXED}
# by stages per rank, or waves
CHUNKED = {f.__name__: f for f in (whole.interleaved, whole.breadth_first, zb_interleaved, hanayo)}
SLICED = {f.__name__: f for f in (whole.terapipe, whole.seq1f1b)}  # slices of each sequence
NAMES = (*PLAIN, *CHUNKED, *SLICED)


def named(name: str, p: int, m: int, *, chunks=1, slices=1, recompute=False) -> Schedule:
    """The schedule for p ranks and m microbatches; with `recompute` a forward keeps only its input."""
    if name not in NAMES:
        raise ValueError(f"schedule={name!r}; use {', '.join(NAMES)}")
    sizes = []
    for what, given, table in (("chunks", chunks, CHUNKED), ("slices", slices, SLICED)):
        if name in table:
            sizes.append(given)
        elif given > 1:
            raise ValueError(f"{what}={given} with schedule={name!r}; use {what}=1, or {', '.join(table)}")
    schedule = (PLAIN | CHUNKED | SLICED)[name](p, m, *sizes)
    return recomputed(schedule) if recompute and not schedule.recomputes else schedule


def stages_of(name: str, p: int, m: int, *, chunks=1, slices=1, recompute=False) -> int:
    """How many stages that schedule has; ValueError as from `named`, if it is not for these sizes.
    Planners ask thousands of times, and a schedule of many microbatches is long: rules look at m modulo p and
    2p and whether it is at least 2p, so one of 2p to 4p microbatches answers for all that are alike."""
    require_positive_ints(p=p, m=m, chunks=chunks, slices=slices)
    few = m if m < 4 * p else 2 * p + m % (2 * p)
    try:
        return _stages(name, p, few, chunks, slices, recompute)
    except ValueError:  # which names m
        return named(name, p, m, chunks=chunks, slices=slices, recompute=recompute).stages


@lru_cache(maxsize=1 << 12)
def _stages(name: str, p: int, m: int, chunks: int, slices: int, recompute: bool) -> int:
    return named(name, p, m, chunks=chunks, slices=slices, recompute=recompute).stages
