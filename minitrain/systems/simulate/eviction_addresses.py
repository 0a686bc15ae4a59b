"""Eviction where blocks have addresses: freed bytes help only if they lie side by side.

    evictor = simulate(trace, Coop(limit_bytes=1_000_000))
    evictor.evictions, evictor.recomputed_cost, evictor.stranded_bytes

A result needs its bytes at consecutive addresses of 0 .. limit_bytes. `stranded_bytes` counts, over all
requests, what was evicted for a request and lies outside of the hole that it got: evicted in vain.

    BestFit      the smallest hole that fits, at its low end; evicts by DTR's rule, wherever, until one fits
    MegTaiChi    first what would leave a hole that is large enough; counts the free bytes on both sides as if
                 they were its own: cost / ((bytes + free neighbours) · staleness)
    Coop         evicts the run of blocks and holes that is large enough and costs least (a window slides
                 over the addresses); results that are cheap to make again lie at the low end, the
                 others at the high end: so runs of cheap ones form

Hu et al. 2022 (MegTaiChi), ICS'22; Zhang et al. 2023 (Coop), NeurIPS'23, arXiv:2311.00591. Differs: MegTaiChi
without its partition of tensors over GPUs, eviction and allocation in one rule; Coop without updates in place
(our traces write to copies). No rounding, streams or pools: see the allocator.
"""

from bisect import insort
from collections.abc import Sequence
from math import inf

from minitrain.systems.simulate.eviction import Block, Evictor, neighbourhood, staleness


class BestFit(Evictor):
    """DTR above an allocator that takes the smallest hole that fits."""

    def __init__(self, limit_bytes: int, rule: str = "dtr"):
        super().__init__(limit_bytes, rule)
        self.stranded_bytes = 0
        self._ends: dict[int, int] = {}  # address of taken memory -> where it ends
        self._starts: list[int] = []  # sorted
        self._at: dict[int, Block] = {}

    def reserve(self, sizes: Sequence[int], what: str, cost: float) -> list[int | None]:
        places = [self._allocate(size, what, cost) if size else None for size in sizes]
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + sum(sizes))
        return places

    def unreserve(self, place: int | None) -> None:
        if place is not None:
            del self._ends[place]
            self._starts.remove(place)
            self._at.pop(place, None)

    def leave(self, block: Block) -> None:
        super().leave(block)
        self.unreserve(block.place)

    def settle(self, block: Block, place: int | None) -> None:
        super().settle(block, place)
        if place is not None:
            if place not in self._ends:  # a pinned block comes to where the other was
                self._take(place, block.bytes)
            self._at[place] = block

    def _take(self, place: int, bytes: int) -> None:
        self._ends[place] = place + bytes
        insort(self._starts, place)

    def _allocate(self, bytes: int, what: str, cost: float) -> int:
        evicted: list[tuple[int, int]] = []
        while not (fitting := [hole for hole in self.holes() if hole[1] - hole[0] >= bytes]):
            victims = self.victims(bytes)
            if not victims:
                raise ValueError(self._too_small(bytes, what))
            evicted += [(block.place, block.bytes) for block in victims]
            for block in victims:
                self.evict(block)
        start, end = min(fitting, key=lambda hole: hole[1] - hole[0])
        self.stranded_bytes += sum(size for place, size in evicted if not start <= place < end)
        place = self.put(start, end, bytes, cost)
        self._take(place, bytes)
        return place

    def _too_small(self, needed: int, what: str) -> str:
        sizes = [end - start for start, end in self.holes()]
        free = f"{sum(sizes)} are free, at most {max(sizes, default=0)} side by side"
        cure = f"and nothing else can go; raise limit_bytes {self.limit_bytes}"
        return f"{what} asks for {needed} bytes; {free}, {cure}"

    def holes(self) -> list[tuple[int, int]]:
        """(first address, end) of what is free, in order."""
        ends = [0, *(self._ends[start] for start in self._starts)]
        return [(a, b) for a, b in zip(ends, [*self._starts, self.limit_bytes]) if a < b]

    def put(self, start: int, end: int, bytes: int, cost: float) -> int:
        """Where in that hole."""
        return start

    def victims(self, bytes: int) -> list[Block]:
        """Whom to evict next for a request of so many bytes; nobody: it cannot be met."""
        best = self.least()
        return [best] if best else []


class MegTaiChi(BestFit):
    """Looks at the neighbours of what it evicts."""

    def victims(self, bytes: int) -> list[Block]:
        after = {start: end - start for start, end in self.holes()}
        before = {end: end - start for start, end in self.holes()}

        def key(block: Block) -> tuple:
            end = block.place + block.bytes
            hole = block.bytes + before.get(block.place, 0) + after.get(end, 0)
            return hole < bytes, neighbourhood(block) / (hole * staleness(block)), block.number

        best = min(self.candidates(), key=key, default=None)
        return [best] if best else []


class Coop(BestFit):
    """Evicts side by side. A result is cheap if making it costs at most `cheap` a byte."""

    def __init__(self, limit_bytes: int, cheap: float = 6.0):
        super().__init__(limit_bytes)
        self.cheap = cheap

    def put(self, start: int, end: int, bytes: int, cost: float) -> int:
        return start if cost <= self.cheap * bytes or cost == inf else end - bytes

    def parts(self) -> list[tuple[int, float, Block | None]]:
        """All memory in order of address: (bytes, cost of having it free, the block or None: a hole)."""
        free = {block.number for block in self.candidates()}
        taken = [(start, self._ends[start], self._at.get(start)) for start in self._starts]
        parts = [(start, end - start, 0, None) for start, end in self.holes()]
        for start, end, block in taken:
            movable = block is not None and block.number in free
            cost = neighbourhood(block) / staleness(block) if movable else inf
            parts.append((start, end - start, cost, block if movable else None))
        return [part for _, *part in sorted(parts, key=lambda part: part[0])]

    def victims(self, bytes: int) -> list[Block]:
        parts = self.parts()
        found = cheapest_window([(size, cost) for size, cost, _ in parts], bytes)
        return [block for *_, block in parts[slice(*found)] if block] if found else []


def cheapest_window(parts: Sequence[tuple[int, float]], bytes: int) -> tuple[int, int] | None:
    """(first, end) of the cheapest run of parts (bytes, cost) of at least so many bytes; None: there is none.

    An infinite cost cannot be paid. One sweep: a window that is large enough loses what it can at its left,
    since costs are not negative."""
    best, least, left, size = None, inf, 0, 0
    for right, (more, cost) in enumerate(parts):
        if cost == inf:
            left, size = right + 1, 0
            continue
        size += more
        while size - parts[left][0] >= bytes:
            size -= parts[left][0]
            left += 1
        if size >= bytes and (total := sum(cost for _, cost in parts[left : right + 1])) < least:
            best, least = (left, right + 1), total
    return best
