"""What is used in a known order waits where there is room, and is fetched before it is needed. No torch.

    engine = Prefetch(order, sizes, room_bytes, fetch, evict, ahead=1, policy="belady")
    for chunk in order:
        value = engine.use(chunk)       valid until the next `use`; those behind it are on their way

`order` names the chunk of every use of one pass, and passes repeat (`circular`). `fetch` starts to bring a
chunk and returns something with `wait()`; `evict(chunk, that)` takes it back. A use that finds its chunk
neither here nor on its way is late. After it the chunks of the next `ahead` uses are fetched as long as there
is room, or a chunk that is used later than they are to make room:

    belady    out goes what is used again latest: the fewest fetches there can be, for chunks of one size
    lru       out goes what was not used for longest

With one chunk ahead the room must hold two. Belady 1966, IBM Systems Journal 5(2), section on MIN.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from math import inf
from typing import Any

from minitrain.ranks.checks import MOST, require_ints, require_one_of


class Prefetch:
    """Counts `fetched` chunks and `late` uses, since it was made."""

    def __init__(self, order, sizes, room_bytes, fetch, evict, *, ahead=1, policy="belady", circular=True):
        require_one_of(("belady", "lru"), policy=policy)
        require_ints(0, MOST, ahead=ahead)
        if not order or not set(order) <= sizes.keys():
            raise ValueError("give the order in which chunks of known size are used in one pass")
        if (largest := max(sizes[chunk] for chunk in order)) > room_bytes:
            what = f"a chunk has {largest:,} bytes, and there is room for {room_bytes:,}"
            raise ValueError(f"{what}; give more room, or cut chunks")
        self.order, self.sizes, self.room_bytes, self.policy = list(order), sizes, room_bytes, policy
        self.ahead, self.circular = ahead, circular
        self._fetch, self._evict = fetch, evict
        self._uses: dict[Hashable, list[int]] = defaultdict(list)
        for position, chunk in enumerate(self.order):
            self._uses[chunk].append(position)
        self._here: dict[Hashable, Any] = {}  # chunk -> what fetch returned; least recently used first
        self._position = 0  # of the next use, in the order
        self.fetched = self.late = 0

    def use(self, chunk: Hashable) -> Any:
        """What `fetch(chunk).wait()` gives. Uses must come in the order given."""
        if chunk != (wanted := self.order[self._position]):
            raise ValueError(f"use of {chunk!r}, and {wanted!r} is next; give the order as it is used")
        if chunk not in self._here:
            self.late += 1
            self._bring(chunk, set())
        transfer = self._here[chunk] = self._here.pop(chunk)  # now the most recently used
        value = transfer.wait()
        self._look_ahead(chunk)
        self._position = (self._position + 1) % len(self.order)
        return value

    def clear(self) -> None:
        """Give back everything; the next use is the first of a pass."""
        for chunk in list(self._here):
            self._evict(chunk, self._here.pop(chunk))
        self._position = 0

    def next_use(self, chunk: Hashable, after: int) -> float:
        """Position of the first use of a chunk behind `after`, counted on into the next pass."""
        uses = self._uses[chunk]
        index = bisect_right(uses, after)
        if index < len(uses):
            return uses[index]
        return uses[0] + len(self.order) if self.circular else inf

    def _look_ahead(self, current: Hashable) -> None:
        keep = {current}  # and what is used before the chunk that is to come
        for position in range(self._position + 1, self._position + 1 + self.ahead):
            if position >= len(self.order) and not self.circular:
                return
            chunk = self.order[position % len(self.order)]
            if chunk not in self._here and not self._bring(chunk, keep):
                return
            keep.add(chunk)

    def _bring(self, chunk: Hashable, keep: set) -> bool:
        """Fetch it, in the room of others but of none in `keep`: rather nothing at all, and False."""
        size = self.sizes[chunk]
        free, victims = self.room_bytes - sum(map(self.sizes.get, self._here)), []
        candidates = [other for other in self._here if other not in keep]
        if self.policy == "belady":
            candidates.sort(key=lambda other: self.next_use(other, self._position), reverse=True)
        for other in candidates:
            if free >= size:
                break
            victims.append(other)
            free += self.sizes[other]
        if free < size:
            return False
        for other in victims:
            self._evict(other, self._here.pop(other))
        self._here[chunk] = self._fetch(chunk)
        self.fetched += 1
        return True
