"""Traces of allocations: lifetimes, examples that break an allocator, and a region for what lives long.

    checkpointed(layers, work, kept, asked)    layers work, each leaves a checkpoint; a last, large request
    growing(sizes)                             one tensor, larger every time, as of ever longer texts
    with_region(trace, blocks)                 the same, those blocks in one region that was made beforehand

Fragmentation (Rajbhandari et al. 2020, section 3.2): what lives long lies between what lives short, so memory
that is free is not in a row; in extreme cases it is out while over 30 % is free. `checkpointed` is such a
case. The remedy there, MD of ZeRO-R (section 6.3): a region is set aside for checkpoints and gradients, and
they are copied into it as they are made.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_positive_ints

REGION = -1  # the block number of a region
Event = tuple[str, int, int]


class Lifetime(NamedTuple):
    """A block from event `born` up to `dies`, not included."""

    block: int
    born: int
    dies: int
    bytes: int


def lifetimes(trace: Sequence[Event]) -> list[Lifetime]:
    """Of all blocks by birth; what is never freed dies at the end, and empty ones are left out."""
    born: dict[int, int] = {}
    found = []
    for event, (what, block, size) in enumerate(trace):
        if what == "alloc":
            born[block] = event
        else:
            found.append(Lifetime(block, born.pop(block), event, size))
    sizes = {block: size for what, block, size in trace if what == "alloc"}
    found += [Lifetime(block, start, len(trace), sizes[block]) for block, start in born.items()]
    return sorted((life for life in found if life.bytes), key=lambda life: life.born)


def live_bytes(trace: Sequence[Event]) -> list[int]:
    """After each event."""
    return list(accumulate(size if what == "alloc" else -size for what, _, size in trace))


def checkpointed(layers: int, work_bytes: int, kept_bytes: int, asked_bytes: int) -> list[Event]:
    """Each layer has memory to work in and frees it before it puts its checkpoint somewhere; then comes the
    last request. Blocks 0, 1, .. are checkpoints, those from `layers` on the work, the last the request."""
    require_positive_ints(layers=layers)
    require_ints(work_bytes=work_bytes, kept_bytes=kept_bytes, asked_bytes=asked_bytes)
    trace: list[Event] = []
    for layer in range(layers):
        trace += [(what, layers + layer, work_bytes) for what in ("alloc", "free")]
        trace.append(("alloc", layer, kept_bytes))
    return [*trace, ("alloc", 2 * layers, asked_bytes)]


def growing(sizes: Sequence[int]) -> list[Event]:
    """A block of each size, freed before the next."""
    require_ints(sizes=sizes)
    return [(what, block, size) for block, size in enumerate(sizes) for what in ("alloc", "free")]


def with_region(trace: Sequence[Event], blocks: Collection[int]) -> list[Event]:
    """The trace with a region that is there from the start, as large as these blocks ever are together. Each
    is made outside, copied into the region, and freed at once."""
    if isinstance(trace, str):
        raise ValueError(f"trace={trace!r}: give events, such as ('alloc', 1, 512)")
    kept = set(blocks)
    copied = [("alloc", REGION, max(live_bytes([event for event in trace if event[1] in kept]), default=0))]
    for what, block, size in trace:
        if block not in kept:
            copied.append((what, block, size))
        elif what == "alloc":
            copied += [("alloc", block, size), ("free", block, size)]
    return copied
