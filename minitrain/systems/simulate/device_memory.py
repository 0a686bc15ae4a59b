"""A device's memory as an allocator sees it, and the replay of a trace: bytes are scarce, addresses are not.

    trace = [("alloc", block, bytes), ("free", block, bytes), ...]     of a run: ledger.memory_trace()
    done = replay(trace, CachingAllocator(80 * 2**30))
    done.reserved_peak, done.fragmentation, done.died                  what it took, or why it ended
    print(comparison({"default": done, ..}))

Three sizes in bytes: requested (what the tensors hold), allocated (the blocks they lie in, rounded up;
torch's "allocated" and, without streams, its "active"), reserved (physical memory taken from the device,
cached blocks included). Each is at most the next.

    utilization = peak of allocated / peak of reserved            fragmentation = 1 - utilization

as GMLake measures them (Guo et al. 2024). `backing_calls` are the events in which memory was taken
from the device (cudaMalloc, or cuMemCreate with cuMemMap), `return_calls` those in which it was given back.
Physical memory is handed out in pages of 2 MiB wherever they lie: what the device itself has free it can
always give; holes arise only inside what an allocator holds.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

from minitrain.ranks.tables import aligned

MiB = 2**20
PAGE = 2 * MiB
Trace = Iterable[tuple[str, int, int]]


class OutOfMemory(MemoryError):
    """No room for a request: `free_bytes` are allocated to nobody, at most `largest_bytes` in one block."""

    def __init__(self, requested_bytes: int, free_bytes: int, largest_bytes: int, capacity_bytes: int):
        self.requested_bytes, self.free_bytes = requested_bytes, free_bytes
        self.largest_bytes, self.capacity_bytes = largest_bytes, capacity_bytes
        room = f"of {capacity_bytes:,} {free_bytes:,} are free, {largest_bytes:,} at most in one block"
        super().__init__(f"out of memory: {requested_bytes:,} bytes asked for; {room}")


class DeviceMemory:
    """Addresses without end and `capacity_bytes` of physical memory to put behind them."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < PAGE:
            need = f"at least one page, {PAGE:,}, is needed"
            raise ValueError(f"{capacity_bytes:,} bytes of device memory; {need}")
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.event = 0  # of the trace that is replayed
        self.log: list[tuple[int, int, int, bool]] = []  # event, address, bytes, put behind it or taken away
        self._ranges: list[tuple[int, int]] = []  # addresses in use: (start, end), sorted

    @property
    def unreserved_bytes(self) -> int:
        return self.capacity_bytes - self.reserved_bytes

    def addresses(self, size: int) -> int:
        """The lowest `size` addresses in a row that are not in use; nothing lies behind them yet."""
        start = 0
        for first, end in self._ranges:
            if first - start >= size:
                break
            start = end
        insort(self._ranges, (start, start + size))
        return start

    def forget(self, address: int, size: int) -> None:
        """These addresses are in use no more."""
        self._ranges.remove((address, address + size))

    def back(self, address: int, size: int) -> bool:
        """Put physical memory behind addresses; False if there is not as much."""
        if size > self.unreserved_bytes:
            return False
        self.reserved_bytes += size
        self.log.append((self.event, address, size, True))
        return True

    def take_back(self, address: int, size: int) -> None:
        self.reserved_bytes -= size
        self.log.append((self.event, address, size, False))


class Allocator(Protocol):
    """What `replay` asks of an allocator."""

    memory: DeviceMemory
    allocated_bytes: int

    def alloc(self, block: int, size: int) -> None: ...

    def free(self, block: int) -> None: ...

    def pieces(self, block: int) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of where it lies."""


class Placed(NamedTuple):
    """A block in space and time: from event `born` up to `dies`, not included."""

    block: int
    requested_bytes: int
    born: int
    dies: int
    pieces: tuple[tuple[int, int], ...]


@dataclass
class Replay:
    """What an allocator made of a trace."""

    capacity_bytes: int
    log: list[tuple[int, int, int, bool]] = field(default_factory=list, repr=False)  # as of DeviceMemory
    died: OutOfMemory | None = None
    requested: list[int] = field(default_factory=list, repr=False)  # bytes after each event
    allocated: list[int] = field(default_factory=list, repr=False)
    reserved: list[int] = field(default_factory=list, repr=False)
    placed: list[Placed] = field(default_factory=list, repr=False)

    requested_peak = property(lambda self: max(self.requested, default=0))
    allocated_peak = property(lambda self: max(self.allocated, default=0))
    reserved_peak = property(lambda self: max(self.reserved, default=0))

    @property
    def events(self) -> int:
        """Done; of a trace that died: the number of the event in which it did."""
        return len(self.requested)

    @property
    def backing_calls(self) -> list[int]:
        return [event for event, _, _, gained in self.log if gained]

    @property
    def return_calls(self) -> list[int]:
        return [event for event, _, _, gained in self.log if not gained]

    @cached_property
    def backed(self) -> list[tuple[int, int, int, int]]:
        """(address, bytes, from event, until event) of everything that had memory behind it. Pages in a row
        with one history are one."""
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
        found = []
        for ((born, dies), _), row in rows:
            numbers = [page for _, (_, _, page) in row]
            found.append((numbers[0] * PAGE, len(numbers) * PAGE, born, dies))
        return found

    @property
    def utilization(self) -> float:
        return self.allocated_peak / self.reserved_peak if self.reserved_peak else 1.0

    @property
    def fragmentation(self) -> float:
        return 1 - self.utilization


def replay(trace: Trace, allocator: Allocator) -> Replay:
    """Every event of the trace in turn, until its end or the first request that fails. The allocator is used
    up: it keeps what it holds, so one must be made for each replay."""
    memory = allocator.memory
    if memory.log:
        raise ValueError("this allocator has replayed a trace already; make a new one for each replay")
    done = Replay(memory.capacity_bytes, memory.log)
    live: dict[int, tuple[int, int, tuple]] = {}  # block -> born, bytes, where
    requested = 0
    for event, (what, block, size) in enumerate(trace):
        memory.event = event
        if what not in ("alloc", "free") or size < 0 or (what == "alloc") == (block in live):
            state = "lives" if block in live else "does not live"
            found = f"{what} of {size:,} bytes as block {block}, which {state}"
            cure = "a trace has ('alloc', block, bytes) and then ('free', block, bytes) of each"
            raise ValueError(f"event {event}: {found}; {cure}")
        if what == "free":
            born, size, where = live.pop(block)
            allocator.free(block)
            done.placed.append(Placed(block, size, born, event, where))
            requested -= size
        else:
            try:
                allocator.alloc(block, size)
            except OutOfMemory as error:
                done.died = error
                break
            live[block] = event, size, allocator.pieces(block)
            requested += size
        done.requested.append(requested)
        done.allocated.append(allocator.allocated_bytes)
        done.reserved.append(memory.reserved_bytes)
    ends = ((block, size, born, done.events, where) for block, (born, size, where) in live.items())
    done.placed += [Placed(*end) for end in ends]
    return done


def comparison(replays: Mapping[str, Replay]) -> str:
    """A table: the peaks, utilization, calls to the device, and whether memory was out."""
    sizes = "requested MiB", "allocated MiB", "reserved MiB"
    rows: list[tuple] = [("", *sizes, "utilization", "calls", "returns", "out of memory")]
    for name, done in replays.items():
        peaks = done.requested_peak, done.allocated_peak, done.reserved_peak
        cells = *(f"{peak / MiB:,.0f}" for peak in peaks), f"{done.utilization:.1%}"
        calls, died = (len(done.backing_calls), len(done.return_calls)), f"event {done.events}"
        rows.append((name, *cells, *calls, died if done.died else "no"))
    return aligned(rows)
