"""PyTorch's caching allocator of CUDA memory, rule by rule, and GMLake's stitching. Nothing is copied.

    done = replay(ledger.memory_trace(), CachingAllocator(80 * 2**30, "expandable_segments:True"))
    done = replay(trace, StitchingAllocator(80 * 2**30))

A request is rounded up to 512 bytes. Up to 1 MiB it goes to the small pool, whose segments have 2 MiB, else
to the large one: 20 MiB below 10 MiB, others rounded up to 2 MiB. The smallest cached block that is large
enough is used; what is over becomes a free block: in the small pool from 512 bytes on, in the large if more
than 1 MiB. A freed block joins free neighbours of its segment. Where the device has no room for a segment,
all without a live block are given back, and after a second failure memory is out. Settings of
PYTORCH_ALLOC_CONF:

    expandable_segments:True             a pool is one range of addresses, backed by pages of 2 or 20 MiB
    max_split_size_mb:N                  larger blocks are never split, nor given to smaller requests
    garbage_collection_threshold:X       beyond this share of the device, old unsplit segments go back first
    roundup_power2_divisions:N           sizes rounded up to N steps between powers of two

c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp; Guo et al. 2024 (GMLake), ASPLOS. Differs: one
stream, no graphs, no private pools, one number of divisions for all sizes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from minitrain.ranks.checks import require_text
from minitrain.systems.simulate.device_memory import PAGE, DeviceMemory, MiB, OutOfMemory

SMALLEST = 512
SMALL = MiB  # the largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB  # of an expandable segment: the pages
DEDICATED_SEGMENT = 10 * MiB  # from here on a request has a segment made to measure
ROUNDED_TO = 2 * MiB


class Settings(NamedTuple):
    """As in PYTORCH_ALLOC_CONF."""

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0


def parsed(text: str) -> Settings:
    """ "max_split_size_mb:128,expandable_segments:True" -> Settings; "" -> what torch does by default."""
    require_text(text=text)
    values: dict = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition(":")
        try:
            if name not in _RULES:
                raise ValueError
            convert, allowed, _ = _RULES[name]
            values[name] = convert(value)
            if not allowed(values[name]):
                raise ValueError
        except (ValueError, KeyError):
            wanted = ", ".join(f"{known}:{rule}" for known, (_, _, rule) in _RULES.items())
            raise ValueError(f"allocator setting {part!r}; use {wanted}, with commas between") from None
    return Settings(**values)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_RULES = {
    "expandable_segments": ({"True": True, "False": False}.__getitem__, lambda value: True, "True or False"),
    "max_split_size_mb": (int, lambda value: value > 20, "more than 20"),
    "garbage_collection_threshold": (float, lambda value: 0 < value < 1, "between 0 and 1"),
    "roundup_power2_divisions": (int, _is_power_of_two, "a power of two"),
}


def rounded(size: int, divisions: int = 0) -> int:
    """Bytes of the block for a request: 1,200 in 4 divisions of 1,024..2,048 is 1,280."""
    if divisions > 1 and size > SMALLEST * divisions:
        below = 1 << (size.bit_length() - 1)
        step = below // divisions
        return -(-size // step) * step
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes of the segment that is made for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < DEDICATED_SEGMENT else -(-size // ROUNDED_TO) * ROUNDED_TO


_OF_SIZE = attrgetter("bytes", "address")
_AT = attrgetter("address")


class _Block:
    """A stretch of addresses between two neighbours of its segment."""

    __slots__ = ("address", "bytes", "pool", "before", "after", "free", "backed", "cached_at")

    def __init__(self, address: int, size: int, pool: "_Pool", backed: bool = True) -> None:
        self.address, self.bytes, self.pool, self.backed = address, size, pool, backed
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.free = True
        self.cached_at = 0  # searches of the pool when it was cached

    @property
    def whole(self) -> bool:
        """It is its segment."""
        return self.before is None and self.after is None

    def cut(self, size: int) -> "_Block":
        """Keeps the first `size` bytes; -> the rest."""
        rest = _Block(self.address + size, self.bytes - size, self.pool, self.backed)
        rest.before, rest.after, self.bytes = self, self.after, size
        if rest.after:
            rest.after.before = rest
        self.after = rest
        return rest


class _Pool:
    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.cached: list[_Block] = []  # free and backed, by size, then address
        self.unbacked: list[_Block] = []  # of expandable segments, by address
        self.searches = 0

    def add(self, block: _Block) -> None:
        block.free, block.cached_at = True, self.searches
        insort(self.cached if block.backed else self.unbacked, block, key=_OF_SIZE if block.backed else _AT)

    def remove(self, block: _Block) -> None:
        blocks, key = (self.cached, _OF_SIZE) if block.backed else (self.unbacked, _AT)
        del blocks[bisect_left(blocks, key(block), key=key)]

    def joined(self, block: _Block) -> _Block:
        """`block`, in no list, together with free neighbours that are backed as it is; put into its list."""
        for other in (block.before, block.after):
            if other is not None and other.free and other.backed == block.backed:
                self.remove(other)
                block, second = (other, block) if other is block.before else (block, other)
                block.bytes += second.bytes
                block.after = second.after
                if block.after:
                    block.after.before = block
        self.add(block)
        return block


class CachingAllocator:
    """`alloc` and `free` as torch's. `memory` may be shared with another allocator."""

    def __init__(self, capacity_bytes: int, settings: str = "", *, memory: DeviceMemory | None = None):
        self.settings = parsed(settings)
        self.memory = memory or DeviceMemory(capacity_bytes)
        self.allocated_bytes = 0
        self.retries = 0  # requests that were tried again when all cached segments had been given back
        self._pools = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, _Block | None] = {}
        most = self.settings.max_split_size_mb
        self._unsplit = float("inf") if most is None else most * MiB  # blocks from this size on stay whole

    def alloc(self, block: int, size: int) -> None:
        """Room for `size` bytes under the name `block`; OutOfMemory if there is none."""
        self._live[block] = self._room(size) if size else None  # torch hands out a null pointer for nothing

    def free(self, block: int) -> None:
        found = self._live.pop(block)
        if found is not None:
            self.allocated_bytes -= found.bytes
            found.pool.joined(found)

    def pieces(self, block: int) -> tuple[tuple[int, int], ...]:
        found = self._live[block]
        return ((found.address, found.bytes),) if found else ()

    def empty_cache(self) -> None:
        """Give everything back to the device that no live block needs."""
        for pool in reversed(self._pools):
            for block in [*pool.cached]:
                if self.settings.expandable_segments:
                    self._take_pages_from(block)
                elif block.whole:
                    self._give_back(block)

    @property
    def largest_bytes(self) -> int:
        """The largest block that cached memory and what the device has left could be made into."""
        left = self.memory.unreserved_bytes
        cached = [pool.cached[-1].bytes for pool in self._pools if pool.cached]
        ends = [bare.before for pool in self._pools for bare in pool.unbacked if bare.before]
        return max(left, *cached, *(left + block.bytes for block in ends if block.free), 0)

    def _room(self, requested: int) -> _Block:
        size = rounded(requested, self.settings.roundup_power2_divisions)
        pool = self._pools[size > SMALL]
        block = self._cached(pool, size)
        if block is None:
            self._collect_garbage()
            block = self._new(pool, size)
        if block is None and self._give_back_unsplit(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new(pool, size)
        if block is None:
            memory = self.memory
            free = memory.capacity_bytes - self.allocated_bytes
            raise OutOfMemory(requested, free, self.largest_bytes, memory.capacity_bytes)
        if self._splits(block, size):
            pool.add(block.cut(size))
        block.free = False
        self.allocated_bytes += block.bytes
        return block

    def _splits(self, block: _Block, size: int) -> bool:
        if block.pool.small or self.settings.expandable_segments:
            return block.bytes - size >= SMALLEST
        return size < self._unsplit and block.bytes - size > SMALL

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """The best fit among cached blocks."""
        pool.searches += 1
        at = bisect_left(pool.cached, (size, -1), key=_OF_SIZE)
        if at == len(pool.cached):
            return None
        if self.settings.expandable_segments:
            # The last block of a range counts as large as it can grow, so that it is used last.
            while at + 1 < len(pool.cached) and _grown(pool.cached[at + 1]) < _grown(pool.cached[at]):
                at += 1
        block = pool.cached[at]
        kept_whole = size < self._unsplit <= block.bytes
        too_large = size >= self._unsplit and block.bytes >= size + LARGE_SEGMENT
        return None if kept_whole or too_large else pool.cached.pop(at)

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """A block of new memory, in no list; None if the device has too little."""
        if self.settings.expandable_segments:
            return self._expanded(pool, size)
        size = segment_size(size)
        if size > self.memory.unreserved_bytes:
            return None
        block = _Block(self.memory.addresses(size), size, pool)
        self.memory.back(block.address, size)
        return block

    def _give_back(self, block: _Block) -> None:
        block.pool.remove(block)
        self.memory.release(block.address, block.bytes)
        self.memory.forget(block.address, block.bytes)

    def _collect_garbage(self) -> None:
        """Give back cached segments that have not been used for longer than the average of them."""
        limit = int(self.settings.garbage_collection_threshold * self.memory.capacity_bytes)
        excess, pool = self.memory.reserved_bytes - limit, self._pools[1]
        if not limit or excess <= 0 or self.settings.expandable_segments:
            return
        ages = {block: pool.searches - block.cached_at for block in pool.cached if block.whole}
        while ages and excess > 0:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                excess -= block.bytes
                del ages[block]
                self._give_back(block)

    def _give_back_unsplit(self, pool: _Pool, size: int) -> bool:
        """With a largest size to split: give back enough of the larger cached blocks, if there is enough."""
        if self.settings.max_split_size_mb is None or self.settings.expandable_segments:
            return False
        larger = [block for block in pool.cached if block.bytes >= self._unsplit]
        one = next((block for block in larger if block.bytes >= size), None)
        released = 0
        for block in [one] if one else reversed(larger):
            if released < size:
                released += block.bytes
                self._give_back(block)
        return released >= size

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """The lowest free addresses of a range with room for `size`, backed as far as they were not; None if
        the device has too few pages."""
        block = next(self._growing(pool, size), None) or self._range(pool)
        while not block.backed or block.bytes < size:
            bare = block.after if block.backed else block
            missing = size - block.bytes if block.backed else size
            pages = -(-min(bare.bytes, missing) // pool.page) * pool.page
            if not self.memory.back(bare.address, pages):
                return None
            pool.remove(bare)
            if pages < bare.bytes:
                pool.add(bare.cut(pages))
            bare.backed = True
            block = pool.joined(bare)
        pool.remove(block)
        return block

    def _growing(self, pool: _Pool, size: int) -> Iterator[_Block]:
        """Free blocks, in order of address, that reach `size` with what follows them."""
        for bare in pool.unbacked:
            first = bare.before if bare.before is not None and bare.before.free else bare
            room, block = 0, first
            while block is not None and block.free:
                room, block = room + block.bytes, block.after
            if room >= size:
                yield first

    def _range(self, pool: _Pool) -> _Block:
        """A new range of addresses, somewhat more than the device has memory."""
        capacity = self.memory.capacity_bytes
        size = -(-(capacity + capacity // 8) // pool.page) * pool.page
        block = _Block(self.memory.addresses(size), size, pool, backed=False)
        pool.add(block)
        return block

    def _take_pages_from(self, block: _Block) -> None:
        """Give back the pages that lie in a cached block entirely."""
        pool, page = block.pool, block.pool.page
        start = -(-block.address // page) * page
        end = (block.address + block.bytes) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            inner = block.cut(start - block.address)
            pool.add(block)
            block = inner
        if end < block.address + block.bytes:
            pool.add(block.cut(end - block.address))
        self.memory.release(start, end - start)
        block.backed = False
        pool.joined(block)


def _grown(block: _Block) -> int:
    """What a cached block could have with the addresses behind it that are not backed."""
    return block.bytes + (block.after.bytes if block.after and not block.after.backed else 0)


class _Primitive:
    """Physical memory in a row: chunks from `address` on."""

    __slots__ = ("address", "bytes", "free")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.bytes, self.free = address, size, True


class StitchingAllocator:
    """`alloc` and `free` for `replay`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.memory = DeviceMemory(capacity_bytes)
        self.stitched = 0  # blocks made of several
        self._small = CachingAllocator(capacity_bytes, memory=self.memory)
        self._primitives: list[_Primitive] = []
        self._stitches: list[list[_Primitive]] = []
        self._live: dict[int, list[_Primitive]] = {}

    @property
    def allocated_bytes(self) -> int:
        return self._small.allocated_bytes + sum(one.bytes for one in self._primitives if not one.free)

    def alloc(self, block: int, size: int) -> None:
        """Room for `size` bytes under the name `block`; OutOfMemory if there is less in all."""
        if size < PAGE:
            self._alloc_small(block, size)
            return
        parts = self._room(size)
        for part in parts:
            part.free = False
        self._live[block] = parts

    def free(self, block: int) -> None:
        if block in self._live:
            for part in self._live.pop(block):
                part.free = True
        else:
            self._small.free(block)

    def pieces(self, block: int) -> tuple[tuple[int, int], ...]:
        """Where it lies physically; its addresses are in a row."""
        if block in self._live:
            return tuple((part.address, part.bytes) for part in self._live[block])
        return self._small.pieces(block)

    def _room(self, requested: int) -> list[_Primitive]:
        size = -(-requested // PAGE) * PAGE
        free = sorted((one for one in self._primitives if one.free), key=lambda one: (one.bytes, one.address))
        free_stitches = [parts for parts in self._stitches if all(one.free for one in parts)]
        for parts in ([one] for one in free), free_stitches:
            if exact := next((found for found in parts if _bytes(found) == size), None):
                return list(exact)
        larger = next((one for one in free if one.bytes > size), None)
        if larger:
            self._split(larger, size)
            return [larger]
        parts: list[_Primitive] = []
        while free and _bytes(parts) < size:
            parts.append(free.pop())
        missing = size - _bytes(parts)
        if missing > 0:
            parts.append(self._new(missing, requested))
        elif missing < 0:
            self._split(parts[-1], parts[-1].bytes + missing)
        if len(parts) > 1:
            self.stitched += 1
            self._stitches.append(list(parts))
        return parts

    def _new(self, size: int, requested: int) -> _Primitive:
        if size > self.memory.unreserved_bytes:
            self._small.empty_cache()
        if size > self.memory.unreserved_bytes:
            free = self.memory.capacity_bytes - self.allocated_bytes
            most = self.memory.unreserved_bytes + _bytes([one for one in self._primitives if one.free])
            raise OutOfMemory(requested, free, most, self.memory.capacity_bytes)
        made = _Primitive(self.memory.addresses(size), size)
        self.memory.back(made.address, size)
        self._primitives.append(made)
        return made

    def _split(self, block: _Primitive, size: int) -> None:
        """`block`, a free one, keeps so many bytes; the rest is a block beside it, in stitched ones too."""
        rest = _Primitive(block.address + size, block.bytes - size)
        block.bytes = size
        self._primitives.append(rest)
        for parts in self._stitches:
            if block in parts:
                parts.insert(parts.index(block) + 1, rest)

    def _alloc_small(self, block: int, size: int) -> None:
        try:
            self._small.alloc(block, size)
        except OutOfMemory:
            for one in [one for one in self._primitives if one.free]:
                self._primitives.remove(one)
                self._stitches = [parts for parts in self._stitches if one not in parts]
                self.memory.release(one.address, one.bytes)
            self._small.alloc(block, size)


def _bytes(parts: Sequence[_Primitive]) -> int:
    return sum(part.bytes for part in parts)
