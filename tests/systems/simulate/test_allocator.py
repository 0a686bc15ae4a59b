"""The simulated caching allocator against the rules of PyTorch's, worked out by hand, and against an account of
its own: no two blocks overlap, every byte of a block has memory behind it, and the sums are right.
"""

import pytest

from minitrain.systems.simulate.allocator import CachingAllocator, StitchingAllocator
from minitrain.systems.simulate.device_memory import (
    PAGE,
    MiB,
    OutOfMemory,
    checkpointed,
    growing,
    lifetimes,
    live_bytes,
    replay,
)
from tests.systems.simulate.allocation_traces import BROKEN, CAPACITY, drawn

KiB = 2**10
EXPANDABLE = "expandable_segments:True"
GiB = 2**30


def allocator(capacity=GiB, settings=""):
    return CachingAllocator(capacity, settings)


def alloc(into, **sizes):
    """Blocks by name; -> the address of the last."""
    for name, size in sizes.items():
        into.alloc(name, size)
    return into.pieces(name)[0][0]


def calls(memory, backing):
    """How often memory was taken from the device, or given back."""
    return sum(gained == backing for *_, gained in memory.log)


def segments(of):
    """(address, bytes) of memory taken from the device and not given back, without expandable ones."""
    held = {}
    for _, address, size, gained in of.memory.log:
        held.pop(address, None)
        if gained:
            held[address] = size
    return sorted(held.items())


@pytest.mark.parametrize("size, block", [(1, 512), (512, 512), (513, 1024), (3 * MiB + 1, 3 * MiB + 512)])
def test_requests_are_rounded(size, block):
    cache = allocator()
    cache.alloc(0, size)
    assert cache.allocated_bytes == block


@pytest.mark.parametrize(
    "size, segment",
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (31 * MiB, 32 * MiB),
    ],
)
def test_segments_are_made_to_measure_from_10_mib(size, segment):
    cache = allocator()
    cache.alloc(0, size)
    assert cache.memory.reserved_bytes == segment


def test_small_and_large_requests_never_share_a_segment():
    cache = allocator()
    alloc(cache, large=5 * MiB)
    assert cache.memory.reserved_bytes == 20 * MiB and cache.largest_bytes >= 15 * MiB
    alloc(cache, small=MiB)
    assert cache.memory.reserved_bytes == 22 * MiB
    assert alloc(cache, other=2 * MiB) == 5 * MiB  # the large one lies behind the first


def test_a_block_of_the_small_pool_is_split_from_512_bytes_on():
    cache = allocator()
    assert alloc(cache, a=MiB, b=MiB - 512) == MiB
    assert alloc(cache, c=512) == 2 * MiB - 512  # what was left over
    assert cache.memory.reserved_bytes == 2 * MiB == cache.allocated_bytes


@pytest.mark.parametrize("rest, block", [(MiB, 20 * MiB), (MiB + 512, 19 * MiB - 512)])
def test_a_block_of_the_large_pool_is_split_only_if_more_than_1_mib_is_left(rest, block):
    """Freed and asked for again: 1 MiB less than the segment gets the segment."""
    cache = allocator()
    alloc(cache, a=20 * MiB)
    cache.free("a")
    alloc(cache, b=20 * MiB - rest)
    assert cache.allocated_bytes == block and cache.memory.reserved_bytes == 20 * MiB


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest():
    cache = allocator()
    places = {name: alloc(cache, **{name: size * MiB}) for name, size in dict(a=60, b=40, c=50, d=40).items()}
    for name in "dacb":
        cache.free(name)
    assert alloc(cache, x=39 * MiB) == places["b"]  # 40, the lower one
    assert alloc(cache, y=41 * MiB) == places["c"] and alloc(cache, z=40 * MiB) == places["d"]
    assert calls(cache.memory, backing=True) == 4


def test_freed_blocks_join_their_free_neighbours():
    cache = allocator()
    alloc(cache, whole=80 * MiB)
    cache.free("whole")
    for name in "abcd":
        alloc(cache, **{name: 20 * MiB})
    cache.free("a")
    cache.free("c")
    alloc(cache, e=40 * MiB)  # neither hole has room: a segment of its own
    assert cache.memory.reserved_bytes == 120 * MiB
    cache.free("b")  # a + b + c
    assert alloc(cache, f=60 * MiB) == 0
    cache.free("d")
    cache.free("f")
    cache.free("e")
    assert alloc(cache, g=80 * MiB) == 0
    assert cache.memory.reserved_bytes == 120 * MiB  # segments do not join


def test_out_of_memory_gives_back_whole_segments_and_tries_again():
    cache = allocator(100 * MiB)
    alloc(cache, a=40 * MiB, b=40 * MiB)
    cache.free("a")
    alloc(cache, c=60 * MiB)
    assert cache.retries == 1 and cache.memory.reserved_bytes == 100 * MiB
    assert calls(cache.memory, backing=False) == 1


def test_a_segment_with_one_live_block_cannot_be_given_back():
    cache = allocator(100 * MiB)
    alloc(cache, a=40 * MiB, b=40 * MiB)
    cache.free("a")
    alloc(cache, c=2 * MiB)  # in a's segment
    with pytest.raises(OutOfMemory) as died:
        cache.alloc("d", 60 * MiB)
    error = died.value
    assert (error.requested_bytes, error.free_bytes) == (60 * MiB, 58 * MiB)
    assert error.largest_bytes == 38 * MiB  # behind c; the device has 20
    assert "of 104,857,600 60,817,408 are free" in str(error) and "62,914,560 bytes asked for" in str(error)
    full = allocator(100 * MiB)
    with pytest.raises(OutOfMemory):
        full.alloc("all", 100 * MiB + 1)
    assert full.retries == 1
    allocator(100 * MiB).alloc("all", 100 * MiB)


def test_max_split_size_keeps_large_blocks_whole():
    """30 MiB may be split at 20, 50 may not; a larger request gets it if at most 20 MiB smaller."""
    limited = allocator(settings="max_split_size_mb:40")
    places = {name: alloc(limited, **{name: size * MiB}) for name, size in dict(a=30, b=50).items()}
    limited.free("a")
    limited.free("b")
    assert alloc(limited, c=20 * MiB) == places["a"]
    assert alloc(limited, d=35 * MiB) not in places.values()  # not b, which is larger than may be split
    assert limited.memory.reserved_bytes == 116 * MiB and alloc(limited, e=40 * MiB) == places["b"]
    assert limited.allocated_bytes == (20 + 36 + 50) * MiB  # d and e whole
    limited.free("e")
    where = alloc(limited, f=72 * MiB)
    limited.free("f")
    assert alloc(limited, g=52 * MiB) != where  # 20 MiB less: a segment of its own
    assert alloc(limited, h=52 * MiB + 512) == where
    assert limited.allocated_bytes == (20 + 36 + 52 + 72) * MiB
    exact = allocator(settings="max_split_size_mb:40")
    alloc(exact, a=40 * MiB)
    exact.free("a")
    alloc(exact, b=30 * MiB)  # 40 is whole already
    assert exact.memory.reserved_bytes == 70 * MiB


def test_max_split_size_gives_back_no_more_than_is_needed():
    """Of cached blocks above the limit the first that is large enough; else the largest ones until it is."""
    for asked, left in ((60, [50, 120]), (150, [50]), (260, [])):
        limited = allocator(300 * MiB, "max_split_size_mb:40")
        for name, size in dict(a=50, b=80, c=120).items():
            alloc(limited, **{name: size * MiB})
        for name in "abc":
            limited.free(name)
        limited.alloc("small", 38 * MiB)  # a segment for itself: 12 MiB are left
        limited.memory.event = 1
        if asked == 260:
            limited.free("small")
        limited.alloc("new", asked * MiB)
        kept = sorted(size // MiB for address, size in segments(limited) if size // MiB not in (38, asked))
        assert kept == left and limited.retries == (asked == 260)


def test_expandable_segments_grow_by_pages_and_split_from_512_bytes():
    cache = allocator(settings=EXPANDABLE)
    assert alloc(cache, a=15 * MiB) == 0 and cache.memory.reserved_bytes == 20 * MiB
    assert alloc(cache, b=15 * MiB) == 15 * MiB  # 5 MiB of the first page, then a second
    assert cache.memory.reserved_bytes == 40 * MiB and cache.allocated_bytes == 30 * MiB
    alloc(cache, c=10 * MiB - 512)
    assert cache.memory.reserved_bytes == 40 * MiB
    assert alloc(cache, d=512 + MiB) == 40 * MiB - 512  # the 512 bytes left, and a page more
    assert cache.memory.reserved_bytes == 60 * MiB
    few = allocator(100 * MiB, EXPANDABLE)
    alloc(few, a=10 * MiB, b=50 * MiB)
    assert few.largest_bytes == 40 * MiB  # nothing is free in front of what the device has left
    few.free("b")
    assert few.largest_bytes == 90 * MiB
    small = allocator(settings=EXPANDABLE)
    alloc(small, a=MiB, b=MiB, c=512)
    assert small.memory.reserved_bytes == 4 * MiB  # the small pool's pages have 2 MiB


def test_expandable_segments_give_back_empty_pages_in_the_middle():
    """And fill them again before they grow."""
    cache = allocator(200 * MiB, EXPANDABLE)
    for name in "abcdefghij":
        alloc(cache, **{name: 20 * MiB})
    cache.free("b")
    cache.free("d")
    assert alloc(cache, k=30 * MiB) == 200 * MiB  # addresses beyond the tenth page, the memory of b and d
    assert cache.retries == 1 and cache.memory.reserved_bytes == 200 * MiB
    cache.free("k")
    cache.empty_cache()
    assert cache.memory.reserved_bytes == 160 * MiB and alloc(cache, l=20 * MiB) == 20 * MiB
    assert alloc(cache, m=20 * MiB) == 60 * MiB and cache.retries == 1


ALLOCATORS = {
    "default": lambda capacity: CachingAllocator(capacity),
    "expandable": lambda capacity: CachingAllocator(capacity, EXPANDABLE),
    "no splits": lambda capacity: CachingAllocator(capacity, "max_split_size_mb:21"),
    "stitching": StitchingAllocator,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALLOCATORS)
def test_blocks_never_overlap_and_lie_in_memory(name, seed):
    """Checked at every event from what the replay wrote down, page by page and block by block."""
    trace = drawn(seed)
    done = replay(trace, ALLOCATORS[name](420 * MiB))
    live = live_bytes(trace)
    assert done.requested == live[: done.events]
    for event in range(0, done.events, 7):
        now = [p for p in done.placed if p.born <= event < p.dies]
        pieces = sorted(piece for placed in now for piece in placed.pieces)
        assert all(a + size <= b for (a, size), (b, _) in zip(pieces, pieces[1:])), "two blocks overlap"
        assert all(sum(size for _, size in p.pieces) >= p.bytes for p in now)
        assert sum(size for _, size in pieces) == done.allocated[event]
        backed = [span for span in done.backed if span[2] <= event < span[3]]
        assert sum(size for _, size, *_ in backed) == done.reserved[event]
        pages = {at + i for at, size, *_ in backed for i in range(0, size, PAGE)}
        for address, size in pieces:
            assert set(range(address // PAGE * PAGE, address + size, PAGE)) <= pages
    for requested, allocated, reserved in zip(done.requested, done.allocated, done.reserved):
        assert requested <= allocated <= reserved <= 420 * MiB
    assert done.died or done.events == len(trace)


@pytest.mark.parametrize("name", ["default", "expandable", "stitching"])
def test_all_is_given_back_when_all_is_free(name):
    """What was split has joined again: the whole cache goes back to the device."""
    trace = drawn(9)
    freed = {block for what, block, _ in trace if what == "free"}
    trace += [("free", block, size) for what, block, size in trace if what == "alloc" and block not in freed]
    cache = ALLOCATORS[name](4 * GiB)
    done = replay(trace, cache)
    assert done.died is None and done.allocated[-1] == done.requested[-1] == 0 < done.reserved[-1]
    if name != "stitching":
        cache.empty_cache()
        assert cache.memory.reserved_bytes == 0


def test_memory_fragmentation():
    """A request of 30 % of the memory fails while 32 % is free, in ten holes; 68 % is in use."""
    done = replay(BROKEN, CachingAllocator(CAPACITY))
    assert done.events == len(BROKEN) - 1 and done.died.requested_bytes == 0.3 * CAPACITY
    assert done.died.free_bytes == 0.32 * CAPACITY and done.died.largest_bytes == 32 * MiB
    assert (done.allocated[-1], done.reserved[-1]) == (680 * MiB, CAPACITY)
    assert done.utilization == 0.712  # the last layer's work on nine checkpoints, of all that is reserved
    assert done.allocated[-1] / done.reserved[-1] == 0.68
    fits = checkpointed(10, work_bytes=100 * MiB, checkpoint_bytes=68 * MiB, asked_bytes=32 * MiB)
    assert replay(fits, CachingAllocator(CAPACITY)).died is None
    one_hole = [event for event in BROKEN if event[1] not in range(10, 20)]  # without the work between
    assert replay(one_hole, CachingAllocator(CAPACITY)).died is None


def test_expandable_segments():
    """A tensor that grows: one segment of the largest size in place of all sizes together. The pages of the
    large pool have 20 MiB, ten of the 2 MiB that the driver maps, so with whole pages the formulas are one.
    """
    sizes = [20 * i * MiB for i in range(1, 11)]
    grown = replay(growing(sizes), CachingAllocator(4 * GiB, EXPANDABLE))
    assert grown.reserved_peak == -(-max(sizes) // (2 * MiB)) * 2 * MiB == 200 * MiB
    assert replay(growing(sizes), CachingAllocator(4 * GiB)).reserved_peak == sum(sizes) == 1100 * MiB
    odd = [i * 7 * MiB + 1000 for i in range(2, 30)]
    assert replay(growing(odd), CachingAllocator(4 * GiB, EXPANDABLE)).reserved_peak == 220 * MiB
    assert -(-max(odd) // (20 * MiB)) * 20 * MiB == 220 * MiB
    small = [i * 32 * KiB for i in range(1, 33)]
    assert replay(growing(small), CachingAllocator(4 * GiB, EXPANDABLE)).reserved_peak == 2 * MiB
    survives = replay(BROKEN, CachingAllocator(CAPACITY, EXPANDABLE))
    assert survives.died is None and survives.fragmentation == 0


def test_gmlake():
    """The trace that died lives: the one hole it leaves is stitched to new memory, so ten never arise; several holes
    are stitched, the last is split; nothing moves."""
    test_stitches_take_the_largest_holes_and_split_the_last()
    cache = StitchingAllocator(CAPACITY)
    done = replay(BROKEN, cache)
    assert done.died is None and done.reserved_peak == done.reserved[-1] <= CAPACITY
    last = done.placed[-1]
    assert last.block == 20 and len(last.pieces) > 1 and sum(size for _, size in last.pieces) == 300 * MiB
    lies = sorted(piece for p in done.placed if p.block < 10 or p is last for piece in p.pieces)
    assert all(a + size <= b for (a, size), (b, _) in zip(lies, lies[1:])), "a hole of the stitch is none"
    before = {p.block: p.pieces for p in done.placed if p.block < 10}
    kept = replay(BROKEN[:-1], StitchingAllocator(CAPACITY))
    assert before == {p.block: p.pieces for p in kept.placed if p.block < 10}  # no checkpoint was copied
    assert done.utilization > replay(BROKEN, CachingAllocator(CAPACITY)).utilization


def stitching(capacity=100 * MiB, **sizes):
    into = StitchingAllocator(capacity)
    for name, size in sizes.items():
        into.alloc(name, size * MiB)
    return into


def test_stitches_take_the_largest_holes_and_split_the_last():
    cache = stitching(a=10, x=2, b=20, y=2, c=30, z=36)
    for name in "abc":
        cache.free(name)
    cache.alloc("d", 40 * MiB)
    assert cache.pieces("d") == ((34 * MiB, 30 * MiB), (12 * MiB, 10 * MiB))
    assert cache.stitched == 1 and cache.memory.reserved_bytes == 100 * MiB
    cache.alloc("e", 20 * MiB)  # what is left of b, and a
    assert sorted(cache.pieces("e")) == [(0, 10 * MiB), (22 * MiB, 10 * MiB)]
    with pytest.raises(OutOfMemory) as died:
        cache.alloc("f", 2 * MiB)
    assert died.value.free_bytes == died.value.largest_bytes == 0


def test_a_part_of_a_live_stitch_is_nobody_elses():
    cache = stitching(a=20, b=30)
    cache.free("a")
    cache.free("b")
    cache.alloc("c", 50 * MiB)
    cache.free("c")
    cache.alloc("d", 30 * MiB)  # a part of the stitch: the whole may not be handed out
    cache.alloc("e", 50 * MiB)
    assert not {at for at, _ in cache.pieces("d")} & {at for at, _ in cache.pieces("e")}
    assert cache.memory.reserved_bytes == 80 * MiB


def test_lifetimes():
    trace = [
        ("alloc", 5, 8), ("alloc", 6, 0), ("alloc", 7, 4), ("free", 5, 8), ("free", 6, 0), ("alloc", 5, 2),
    ]  # fmt: skip
    assert [life[:4] for life in lifetimes(trace)] == [(5, 0, 3, 8), (7, 2, 6, 4), (5, 5, 6, 2)]
    assert live_bytes(trace) == [8, 8, 12, 4, 4, 6]
