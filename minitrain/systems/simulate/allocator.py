"""PyTorch's caching allocator of CUDA memory, rule by rule, and GMLake's stitching. Nothing is copied.

    done = replay(ledger.memory_trace(), CachingAllocator(80 * 2**30, "expandable_segments:True"))

A request is rounded up to 512 bytes. Up to 1 MiB it goes to the small pool, whose segments have 2 MiB, else
to the large one: 20 MiB below 10 MiB, others rounded up to 2 MiB. The smallest cached block that is large
enough is used; what is over becomes a free block: in the small pool from 512 bytes on, in the large if more
than 1 MiB. A freed block joins free neighbours of its segment. Where the device has no room for a segment,
all without a live block are given back, and after a second failure memory is out. Of PYTORCH_ALLOC_CONF:

    expandable_segments:True             a pool is one range of addresses, backed by pages of 2 or 20 MiB
    max_split_size_mb:N                  larger blocks are never split, nor given to smaller requests

GMLake takes free blocks that lie apart and gives them one range of addresses. Requests of 2 MiB and more are
rounded up to pages: a free block or an earlier stitch of this size, else a larger block, split, else the
largest free ones and, if they are too few, new memory. Smaller ones are the caching allocator's.
c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp; Guo et al. 2024 (GMLake), ASPLOS. Differs: one
stream, no graphs, no private pools.
"""

from collections.abc import Sequence
from math import inf

from minitrain.ranks.checks import require_text
from minitrain.systems.simulate.device_memory import PAGE, DeviceMemory, MiB, OutOfMemory

SMALLEST = 512
SMALL = MiB  # the largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB  # of an expandable segment: the pages
DEDICATED_SEGMENT = 10 * MiB  # from here on a request has a segment made to measure, in whole pages


def parsed(text: str) -> dict:
    """ "max_split_size_mb:128,expandable_segments:True" -> {"max_split_size_mb": 128, ..}."""
    require_text(text=text)
    values: dict = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition(":")
        if name == "expandable_segments" and value in ("True", "False"):
            values[name] = value == "True"
        elif name == "max_split_size_mb" and value.isdecimal() and int(value) > 20:
            values[name] = int(value)
        else:
            known = "expandable_segments:True or False, max_split_size_mb:N with N more than 20"
            raise ValueError(f"allocator setting {part!r}; use {known}, with commas between")
    return values


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Block:
    """A stretch of addresses between two neighbours of its segment. No pool: it is one to stitch."""

    def __init__(self, address: int, size: int, pool: "_Pool | None", backed: bool = True) -> None:
        self.address, self.bytes, self.pool, self.backed = address, size, pool, backed
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.free = True

    def cut(self, size: int) -> "_Block":
        """Keeps the first `size` bytes; -> the rest."""
        rest = _Block(self.address + size, self.bytes - size, self.pool, self.backed)
        rest.before, rest.after, self.bytes = self, self.after, size
        if rest.after:
            rest.after.before = rest
        self.after = rest
        return rest


def _by_size(blocks) -> list[_Block]:
    return sorted(blocks, key=lambda block: (block.bytes, block.address))


def _bytes(parts: Sequence[_Block]) -> int:
    return sum(part.bytes for part in parts)


class _Pool:
    def __init__(self, page: int) -> None:
        self.page = page
        self.free: set[_Block] = set()

    def cached(self) -> list[_Block]:
        return _by_size(block for block in self.free if block.backed)

    def take(self, block: _Block) -> _Block:
        self.free.remove(block)
        block.free = False
        return block

    def put(self, block: _Block) -> _Block:
        """`block` is free, and one with free neighbours that are backed as it is."""
        for other in (block.before, block.after):
            if other is not None and other.free and other.backed == block.backed:
                block, second = (other, block) if other is block.before else (block, other)
                block.bytes += second.bytes
                block.after = second.after
                if block.after:
                    block.after.before = block
                self.free.discard(second)
        block.free = True
        self.free.add(block)
        return block


class CachingAllocator:
    """`alloc` and `free` as torch's."""

    def __init__(self, capacity_bytes: int, settings: str = ""):
        given = parsed(settings)
        self.expandable = given.get("expandable_segments", False)
        self.max_split_bytes = given.get("max_split_size_mb", inf) * MiB  # blocks from here on stay whole
        self.memory = DeviceMemory(capacity_bytes)
        self.allocated_bytes = 0
        self.retries = 0  # requests that were tried again when all cached segments had been given back
        self._pools = _Pool(SMALL_SEGMENT), _Pool(LARGE_SEGMENT)
        self._live: dict[int, list[_Block]] = {}

    def alloc(self, block: int, size: int) -> None:
        parts = self._live[block] = self._parts(size) if size else []  # of nothing torch gives a null pointer
        for part in parts:
            part.free = False
        self.allocated_bytes += _bytes(parts)

    def free(self, block: int) -> None:
        for part in self._live.pop(block):
            self.allocated_bytes -= part.bytes
            part.free = True
            if part.pool:
                part.pool.put(part)

    def pieces(self, block: int) -> tuple[tuple[int, int], ...]:
        return tuple((part.address, part.bytes) for part in self._live[block])

    def empty_cache(self) -> None:
        for pool in reversed(self._pools):
            for block in pool.cached():
                if self.expandable:
                    self._take_pages_from(block)
                elif block.before is None and block.after is None:  # a whole segment
                    self._give_back(block)

    @property
    def largest_bytes(self) -> int:
        """The largest block that cached memory and what the device has left could be made into."""
        left, free = self.memory.unreserved_bytes, [block for pool in self._pools for block in pool.free]
        ends = [block.before for block in free if not block.backed and block.before]
        cached = [block.bytes for block in free if block.backed]
        return max(left, *cached, *(left + block.bytes for block in ends if block.free), 0)

    def _parts(self, requested: int) -> list[_Block]:
        size = rounded(requested, SMALLEST)
        pool = self._pools[size > SMALL]
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None and self._give_back_unsplit(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new(pool, size)
        if block is None:
            raise self._out_of_memory(requested, self.largest_bytes)
        rest = block.bytes - size
        if self.expandable or size <= SMALL:
            splits = rest >= SMALLEST
        else:
            splits = rest > SMALL and size < self.max_split_bytes
        if splits:
            pool.put(block.cut(size))
        return [block]

    def _out_of_memory(self, requested: int, largest: int) -> OutOfMemory:
        capacity = self.memory.capacity_bytes
        return OutOfMemory(requested, capacity - self.allocated_bytes, largest, capacity)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        fitting = [block for block in pool.cached() if block.bytes >= size]
        if not fitting:
            return None
        block = fitting[0]
        for other in fitting[1:] if self.expandable else ():
            # The last block of a range counts as large as it can grow, so that it is used last.
            if _grown(other) >= _grown(block):
                break
            block = other
        kept_whole = size < self.max_split_bytes <= block.bytes
        too_large = size >= self.max_split_bytes and block.bytes >= size + LARGE_SEGMENT
        return None if kept_whole or too_large else pool.take(block)

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """A block of new memory, not free; None if the device has too little."""
        if self.expandable:
            return self._expanded(pool, size)
        size = rounded(size, PAGE) if size >= DEDICATED_SEGMENT else pool.page
        address = self.memory.segment(size)
        return None if address is None else pool.take(pool.put(_Block(address, size, pool)))

    def _give_back(self, block: _Block) -> None:
        block.pool.take(block)
        self.memory.release(block.address, block.bytes)
        self.memory.ranges.remove((block.address, block.address + block.bytes))  # in use no more

    def _give_back_unsplit(self, pool: _Pool, size: int) -> bool:
        """With a largest size to split: give back enough of the larger cached blocks, if there is enough."""
        if self.max_split_bytes == inf or self.expandable:
            return False
        larger = [block for block in pool.cached() if block.bytes >= self.max_split_bytes]
        one, released = next((block for block in larger if block.bytes >= size), None), 0
        for block in [one] if one else reversed(larger):
            if released < size:
                released += block.bytes
                self._give_back(block)
        return released >= size

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """The lowest free addresses with room for `size`, now backed; None if there are too few pages."""
        block = self._lowest(pool, size)
        while not block.backed or block.bytes < size:
            bare = block.after if block.backed else block
            missing = size - block.bytes if block.backed else size
            pages = rounded(min(bare.bytes, missing), pool.page)
            if not self.memory.back(bare.address, pages):
                return None
            rest = bare.cut(pages) if pages < bare.bytes else None
            bare.backed = True
            if rest:
                pool.put(rest)
            block = pool.put(bare)
        return pool.take(block)

    def _lowest(self, pool: _Pool, size: int) -> _Block:
        """The first free block that reaches `size` with what follows it; else a new range of addresses,
        somewhat more than the device has memory."""
        for bare in sorted(pool.free - {*pool.cached()}, key=lambda block: block.address):
            first = bare.before if bare.before is not None and bare.before.free else bare
            room, block = 0, first
            while block is not None and block.free:
                room, block = room + block.bytes, block.after
            if room >= size:
                return first
        length = rounded(9 * self.memory.capacity_bytes // 8, pool.page)
        return pool.put(_Block(self.memory.addresses(length), length, pool, backed=False))

    def _take_pages_from(self, block: _Block) -> None:
        pool, page = block.pool, block.pool.page
        start, end = rounded(block.address, page), (block.address + block.bytes) // page * page
        if start >= end:
            return
        bare = block.cut(start - block.address) if start > block.address else block
        rest = [bare.cut(end - start)] if end < start + bare.bytes else []
        self.memory.release(start, end - start)
        bare.backed = False
        for part in dict.fromkeys((block, *rest, bare)):
            pool.put(part)


def _grown(block: _Block) -> int:
    """What a cached block could have with the addresses behind it that are not backed."""
    return block.bytes + (block.after.bytes if block.after and not block.after.backed else 0)


class StitchingAllocator(CachingAllocator):
    """GMLake's: blocks of whole pages, which are put together as they are needed."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.stitched = 0  # blocks made of several
        self._primitives: list[_Block] = []  # physical memory in a row
        self._stitches: list[list[_Block]] = []

    def _free(self) -> list[_Block]:
        return _by_size(one for one in self._primitives if one.free)

    def _parts(self, requested: int) -> list[_Block]:
        if requested >= PAGE:
            return self._together(requested)
        try:
            return super()._parts(requested)
        except OutOfMemory:
            for one in self._free():
                self._primitives.remove(one)
                self._stitches = [parts for parts in self._stitches if one not in parts]
                self.memory.release(one.address, one.bytes)
            return super()._parts(requested)

    def _together(self, requested: int) -> list[_Block]:
        size, free = rounded(requested, PAGE), self._free()
        whole = [parts for parts in self._stitches if all(one.free for one in parts)]
        for parts in [*([one] for one in free), *whole]:
            if _bytes(parts) == size:
                return list(parts)
        if larger := next((one for one in free if one.bytes > size), None):
            self._split(larger, size)
            return [larger]
        parts = []
        while free and _bytes(parts) < size:
            parts.append(free.pop())
        missing = size - _bytes(parts)
        if missing > 0:
            parts.append(self._primitive(missing, requested))
        elif missing < 0:
            self._split(parts[-1], parts[-1].bytes + missing)
        if len(parts) > 1:
            self.stitched += 1
            self._stitches.append(list(parts))
        return parts

    def _primitive(self, size: int, requested: int) -> _Block:
        if size > self.memory.unreserved_bytes:
            self.empty_cache()
        address = self.memory.segment(size)
        if address is None:
            raise self._out_of_memory(requested, self.memory.unreserved_bytes + _bytes(self._free()))
        self._primitives.append(made := _Block(address, size, None))
        return made

    def _split(self, block: _Block, size: int) -> None:
        self._primitives.append(rest := block.cut(size))
        for parts in self._stitches:
            if block in parts:
                parts.insert(parts.index(block) + 1, rest)
