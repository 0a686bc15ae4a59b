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

GMLake takes free blocks that lie apart and gives them one range of addresses. Requests of 2 MiB and more are
rounded up to pages: a free block or an earlier stitch of this size, else a larger block, split, else the
largest free ones and, if they are too few, new memory. Smaller ones are the caching allocator's.
c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp; Guo et al. 2024 (GMLake), ASPLOS. Differs: one
stream, no graphs, no private pools.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from minitrain.ranks.checks import require_text
from minitrain.systems.simulate.device_memory import PAGE, DeviceMemory, MiB, OutOfMemory

SMALLEST = 512
SMALL = MiB  # the largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB  # of an expandable segment: the pages
DEDICATED_SEGMENT = 10 * MiB  # from here on a request has a segment made to measure
ROUNDED_TO = 2 * MiB


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


def segment_size(size: int) -> int:
    """Bytes of the segment that is made for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < DEDICATED_SEGMENT else rounded(size, ROUNDED_TO)


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_OF_SIZE = attrgetter("bytes", "address")
_AT = attrgetter("address")


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


class _Pool:
    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.cached: list[_Block] = []  # free and backed, by size, then address
        self.unbacked: list[_Block] = []  # of expandable segments, by address

    def add(self, block: _Block) -> None:
        block.free = True
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
    """`alloc` and `free` as torch's."""

    def __init__(self, capacity_bytes: int, settings: str = ""):
        given = parsed(settings)
        self.expandable = given.get("expandable_segments", False)
        self.max_split_bytes = given.get("max_split_size_mb", inf) * MiB  # blocks from here on stay whole
        self.memory = DeviceMemory(capacity_bytes)
        self.allocated_bytes = 0
        self.retries = 0  # requests that were tried again when all cached segments had been given back
        self._pools = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, list[_Block]] = {}

    def alloc(self, block: int, size: int) -> None:
        """Room for `size` bytes under the name `block`; OutOfMemory if there is none."""
        # torch hands out a null pointer for nothing
        self._live[block] = [self._room(size)] if size else []

    def free(self, block: int) -> None:
        for part in self._live.pop(block):
            self.allocated_bytes -= part.bytes
            part.free = True
            if part.pool:
                part.pool.joined(part)

    def pieces(self, block: int) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of where it lies physically."""
        return tuple((part.address, part.bytes) for part in self._live[block])

    def empty_cache(self) -> None:
        """Give everything back to the device that no live block needs."""
        for pool in reversed(self._pools):
            for block in [*pool.cached]:
                if self.expandable:
                    self._take_pages_from(block)
                elif block.before is None and block.after is None:  # a whole segment
                    self._give_back(block)

    @property
    def largest_bytes(self) -> int:
        """The largest block that cached memory and what the device has left could be made into."""
        left = self.memory.unreserved_bytes
        cached = [pool.cached[-1].bytes for pool in self._pools if pool.cached]
        ends = [bare.before for pool in self._pools for bare in pool.unbacked if bare.before]
        return max(left, *cached, *(left + block.bytes for block in ends if block.free), 0)

    def _room(self, requested: int) -> _Block:
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
        if self._splits(block, size):
            pool.add(block.cut(size))
        block.free = False
        self.allocated_bytes += block.bytes
        return block

    def _out_of_memory(self, requested: int, largest: int) -> OutOfMemory:
        capacity = self.memory.capacity_bytes
        return OutOfMemory(requested, capacity - self.allocated_bytes, largest, capacity)

    def _splits(self, block: _Block, size: int) -> bool:
        if block.pool.small or self.expandable:
            return block.bytes - size >= SMALLEST
        return size < self.max_split_bytes and block.bytes - size > SMALL

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """The best fit among cached blocks."""
        at = bisect_left(pool.cached, (size, -1), key=_OF_SIZE)
        if at == len(pool.cached):
            return None
        if self.expandable:
            # The last block of a range counts as large as it can grow, so that it is used last.
            while at + 1 < len(pool.cached) and _grown(pool.cached[at + 1]) < _grown(pool.cached[at]):
                at += 1
        block = pool.cached[at]
        kept_whole = size < self.max_split_bytes <= block.bytes
        too_large = size >= self.max_split_bytes and block.bytes >= size + LARGE_SEGMENT
        return None if kept_whole or too_large else pool.cached.pop(at)

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """A block of new memory, in no list; None if the device has too little."""
        if self.expandable:
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

    def _give_back_unsplit(self, pool: _Pool, size: int) -> bool:
        """With a largest size to split: give back enough of the larger cached blocks, if there is enough."""
        if self.max_split_bytes == inf or self.expandable:
            return False
        larger = [block for block in pool.cached if block.bytes >= self.max_split_bytes]
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
            pages = rounded(min(bare.bytes, missing), pool.page)
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
        size = rounded(capacity + capacity // 8, pool.page)
        block = _Block(self.memory.addresses(size), size, pool, backed=False)
        pool.add(block)
        return block

    def _take_pages_from(self, block: _Block) -> None:
        """Give back the pages that lie in a cached block entirely."""
        pool, page = block.pool, block.pool.page
        start = rounded(block.address, page)
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


class StitchingAllocator(CachingAllocator):
    """GMLake's: blocks of whole pages, which are put together as they are needed."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.stitched = 0  # blocks made of several
        self._primitives: list[_Block] = []  # physical memory in a row
        self._stitches: list[list[_Block]] = []

    def alloc(self, block: int, size: int) -> None:
        """Room for `size` bytes under the name `block`; OutOfMemory if there is less in all."""
        if size >= PAGE:
            parts = self._live[block] = self._parts(size)
            self.allocated_bytes += _bytes(parts)
            for part in parts:
                part.free = False
            return
        try:
            super().alloc(block, size)
        except OutOfMemory:
            for one in self._free():
                self._primitives.remove(one)
                self._stitches = [parts for parts in self._stitches if one not in parts]
                self.memory.release(one.address, one.bytes)
            super().alloc(block, size)

    def _free(self) -> list[_Block]:
        return sorted((one for one in self._primitives if one.free), key=_OF_SIZE)

    def _parts(self, requested: int) -> list[_Block]:
        size, free = rounded(requested, PAGE), self._free()
        whole = [parts for parts in self._stitches if all(one.free for one in parts)]
        for parts in [*([one] for one in free), *whole]:
            if _bytes(parts) == size:
                return list(parts)
        larger = next((one for one in free if one.bytes > size), None)
        if larger:
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
        made = _Block(self.memory.addresses(size), size, None)
        if not self.memory.back(made.address, size):
            raise self._out_of_memory(requested, self.memory.unreserved_bytes + _bytes(self._free()))
        self._primitives.append(made)
        return made

    def _split(self, block: _Block, size: int) -> None:
        """`block`, a free one, keeps so many bytes; the rest is a block beside it, in stitched ones too."""
        rest = block.cut(size)
        self._primitives.append(rest)
        for parts in self._stitches:
            if block in parts:
                parts.insert(parts.index(block) + 1, rest)


def _bytes(parts: Sequence[_Block]) -> int:
    return sum(part.bytes for part in parts)
