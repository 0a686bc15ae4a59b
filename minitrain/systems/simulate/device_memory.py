"""A device's memory as an allocator sees it, the replay of a trace on it, and traces that break an allocator.

    trace = [("alloc", block, bytes), ("free", block, bytes), ...]     of a run: ledger.memory_trace()
    done = replay(trace, CachingAllocator(80 * 2**30))                 its peaks, or why it ended: done.died

requested: what the tensors hold; allocated: the blocks they lie in, rounded up (torch's "allocated");
reserved: physical memory of the device, cached blocks included. Each is at most the next. Utilization: peak
of allocated / peak of reserved; fragmentation: 1 - utilization (Guo et al. 2024, GMLake). Physical memory is
handed out in pages of 2 MiB wherever they lie: holes arise only inside what an allocator holds.
Fragmentation (Rajbhandari et al. 2020, sections 3.2 and 6.3): what lives long lies between what lives short,
as in `checkpointed`. The remedy, MD of ZeRO-R, is `with_region`.
"""

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.ranks.tables import aligned

MiB = 2**20
PAGE = 2 * MiB
REGION = -1  # the block number of a region
Event = tuple[str, int, int]


class OutOfMemory(MemoryError):
    """No room for a request: `free_bytes` are allocated to nobody, at most `largest_bytes` in one block."""

    def __init__(self, requested_bytes: int, free_bytes: int, largest_bytes: int, capacity_bytes: int):
        self.requested_bytes, self.free_bytes, self.largest_bytes = requested_bytes, free_bytes, largest_bytes
        room = f"of {capacity_bytes:,} {free_bytes:,} are free, {largest_bytes:,} at most in one block"
        super().__init__(f"out of memory: {requested_bytes:,} bytes asked for; {room}")


class DeviceMemory:
    """Addresses without end and `capacity_bytes` of physical memory to put behind them."""

    def __init__(self, capacity_bytes: int) -> None:
        require_ints(PAGE, capacity_bytes=capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.event = 0  # of the trace that is replayed
        self.log: list[tuple[int, int, int, bool]] = []  # event, address, bytes, put behind it or taken away
        self.ranges: list[tuple[int, int]] = []  # addresses in use: (start, end), sorted

    unreserved_bytes = property(lambda self: self.capacity_bytes - self.reserved_bytes)

    def addresses(self, size: int) -> int:
        """The lowest `size` addresses in a row that are not in use; nothing lies behind them yet."""
        start = 0
        for first, end in self.ranges:
            if first - start >= size:
                break
            start = end
        insort(self.ranges, (start, start + size))
        return start

    def segment(self, size: int) -> int | None:
        """The address of as much memory in a row; None if there is not as much."""
        if size > self.unreserved_bytes:
            return None
        address = self.addresses(size)
        self.back(address, size)
        return address

    def back(self, address: int, size: int) -> bool:
        if size > self.unreserved_bytes:
            return False
        self.reserved_bytes += size
        self.log.append((self.event, address, size, True))
        return True

    def release(self, address: int, size: int) -> None:
        self.reserved_bytes -= size
        self.log.append((self.event, address, size, False))


class Lifetime(NamedTuple):
    """A block from event `born` up to `dies`, not included; `pieces`: (address, bytes) of a replay."""

    block: int
    born: int
    dies: int
    bytes: int
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass
class Replay:
    log: list[tuple[int, int, int, bool]]  # as of DeviceMemory
    died: OutOfMemory | None = None
    requested: list[int] = field(default_factory=list, repr=False)  # bytes after each event
    allocated: list[int] = field(default_factory=list, repr=False)
    reserved: list[int] = field(default_factory=list, repr=False)
    placed: list[Lifetime] = field(default_factory=list, repr=False)

    requested_peak = property(lambda self: max(self.requested, default=0))
    allocated_peak = property(lambda self: max(self.allocated, default=0))
    reserved_peak = property(lambda self: max(self.reserved, default=0))
    utilization = property(lambda self: (self.allocated_peak or 1) / (self.reserved_peak or 1))
    fragmentation = property(lambda self: 1 - self.utilization)
    events = property(lambda self: len(self.requested))  # done; the number of the one in which a trace died
    backing_calls = property(lambda self: [event for event, _, _, gained in self.log if gained])
    return_calls = property(lambda self: [event for event, _, _, gained in self.log if not gained])

    @cached_property
    def backed(self) -> list[tuple[int, int, int, int]]:
        """(address, bytes, from event, until event) of what had memory; alike pages in a row are one."""
        since: dict[int, int] = {}
        pages: list[tuple[int, int, int]] = []  # from, until, number
        for event, address, size, gained in self.log:
            for page in range(address // PAGE, (address + size) // PAGE):
                if gained:
                    since[page] = event
                else:
                    pages.append((since.pop(page), event, page))
        pages += [(event, self.events, page) for page, event in since.items()]
        rows = groupby(enumerate(sorted(pages)), key=lambda item: (item[1][:2], item[1][2] - item[0]))
        row_of = [[item[1] for item in row] for _, row in rows]
        return [(row[0][2] * PAGE, len(row) * PAGE, *row[0][:2]) for row in row_of]


def replay(trace: Sequence[Event], allocator) -> Replay:
    """Every event of the trace in turn, until its end or the first request that fails. The allocator is used
    up: it keeps what it holds, so one must be made for each replay."""
    memory = allocator.memory
    if memory.log:
        raise ValueError("this allocator has replayed a trace already; make a new one for each replay")
    live: set[int] = set()
    for event, (what, block, size) in enumerate(trace):
        if what not in ("alloc", "free") or size < 0 or (what == "alloc") == (block in live):
            raise ValueError(f"event {event}: {what} of block {block}, {size}; give alloc, then free")
        live ^= {block}
    done = Replay(memory.log)
    pieces = {}  # of the block born at an event
    for event, (what, block, size) in enumerate(trace):
        memory.event = event
        try:
            if what == "free":
                allocator.free(block)
            else:
                allocator.alloc(block, size)
                pieces[event] = allocator.pieces(block)
        except OutOfMemory as error:
            done.died = error
            break
        done.allocated.append(allocator.allocated_bytes)
        done.reserved.append(memory.reserved_bytes)
    past = trace[: len(done.allocated)]
    done.requested = live_bytes(past)
    done.placed = [life._replace(pieces=pieces[life.born]) for life in lifetimes(past)]
    return done


def comparison(replays: Mapping[str, Replay]) -> str:
    sizes = "requested MiB", "allocated MiB", "reserved MiB"
    rows: list[tuple] = [("", *sizes, "utilization", "calls", "returns", "out of memory")]
    for name, done in replays.items():
        peaks = done.requested_peak, done.allocated_peak, done.reserved_peak
        cells = *(f"{peak / MiB:,.0f}" for peak in peaks), f"{done.utilization:.1%}"
        calls, died = (len(done.backing_calls), len(done.return_calls)), f"event {done.events}"
        rows.append((name, *cells, *calls, died if done.died else "no"))
    return aligned(rows)


def lifetimes(trace: Sequence[Event]) -> list[Lifetime]:
    """Of all blocks by birth; what is never freed dies at the end, and empty ones are left out."""
    alive: dict[int, Lifetime] = {}
    ended = []
    for event, (what, block, size) in enumerate(trace):
        if what == "alloc":
            alive[block] = Lifetime(block, event, len(trace), size)
        else:
            ended.append(alive.pop(block)._replace(dies=event))
    return sorted((life for life in [*ended, *alive.values()] if life.bytes), key=lambda life: life.born)


def live_bytes(trace: Sequence[Event]) -> list[int]:
    return list(accumulate(size if what == "alloc" else -size for what, _, size in trace))


def checkpointed(layers: int, work_bytes: int, checkpoint_bytes: int, asked_bytes: int) -> list[Event]:
    """Each layer frees what it works in before it puts its checkpoint somewhere; then comes the last request.
    Blocks 0, 1, .. are checkpoints, those from `layers` on the work, the last the request."""
    require_positive_ints(layers=layers)
    require_ints(work_bytes=work_bytes, checkpoint_bytes=checkpoint_bytes, asked_bytes=asked_bytes)
    trace: list[Event] = []
    for layer in range(layers):
        trace += [(what, layers + layer, work_bytes) for what in ("alloc", "free")]
        trace.append(("alloc", layer, checkpoint_bytes))
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
