"""Where every tensor of a step lies, decided beforehand: rectangles as wide as lives, as high as tensors.

    lives = lifetimes(ledger.memory_trace())                block, born, dies, bytes
    addresses = annealed(lives, seed=0)                     {block: address}
    height(lives, addresses)                                bytes of the arena that holds all of them

The order of a step is known, so are all lives; a rectangle may be moved up and down, not in time. Two that
live at once must not overlap. No layout is lower than most_live(lives), the most bytes that live at once.

    best_fit     each at its birth into the smallest gap that holds it, as by an allocator that knows no more
    annealed     each in turn falls to the lowest gap that holds it; what is searched is the order: one gets
                 another place in it, and a change for the worse stays with a chance that sinks to 0

The search starts from the order of best_fit's addresses, in which nothing falls higher than it lay, and ends
early at the bound. Some order leads to an optimum: that of the addresses in it.
Imanishi and Xu 2024 (ISMM): periodic allocations as rectangles, annealing over topological orders of "lies
below". Differs: a rectangle falls into gaps below others, not only upon those before it.
"""

from collections.abc import Mapping, Sequence
from math import exp
from random import Random

from minitrain.ranks.checks import require_ints
from minitrain.systems.simulate.memory_traces import Lifetime

Addresses = dict[int, int]


def most_live(lives: Sequence[Lifetime]) -> int:
    """The most bytes that live at one moment."""
    changes = [(life.born, life.bytes) for life in lives] + [(life.dies, -life.bytes) for life in lives]
    live = most = 0
    for _, size in sorted(changes):  # of one moment deaths come first
        live += size
        most = max(most, live)
    return most


def height(lives: Sequence[Lifetime], addresses: Mapping[int, int]) -> int:
    """Bytes from 0 to the highest end."""
    return max((addresses[life.block] + life.bytes for life in lives), default=0)


def best_fit(lives: Sequence[Lifetime]) -> Addresses:
    """In order of birth, each into the smallest gap between those alive, or else above them."""
    addresses: Addresses = {}
    alive: list[Lifetime] = []
    for life in sorted(lives, key=lambda life: life.born):
        alive = [other for other in alive if other.dies > life.born]
        gaps, top = _gaps([(addresses[other.block], other.bytes) for other in alive])
        fitting = [(size, at) for at, size in gaps if size >= life.bytes]
        addresses[life.block] = min(fitting)[1] if fitting else top
        alive.append(life)
    return addresses


def annealed(lives: Sequence[Lifetime], *, steps=2000, seed=0, around=()) -> Addresses:
    """The best layout of so many tries; equal seeds give equal layouts. `around`: (life, address) of others
    that lie there already. ValueError if a block has two lives: give each a number of its own."""
    require_ints(steps=steps, seed=seed)
    if len({life.block for life in lives}) < len(lives):
        raise ValueError("a block has several lives; give each life a number of its own")
    if steps < 0:
        raise ValueError(f"steps={steps}; a number of tries, 0 or more")
    draw, falling = Random(seed), _Falling(lives, around)
    bound = most_live([*lives, *(life for life, _ in around)])
    start = best_fit(lives) if not around else {life.block: life.born for life in lives}
    order = sorted(range(len(lives)), key=lambda i: (start[lives[i].block], lives[i].born))
    now, found = falling.drop(order)
    best, result = now, found
    for step in range(steps if len(lives) > 1 else 0):
        if best <= bound:
            break
        tried = order.copy()
        tried.insert(draw.randrange(len(order)), tried.pop(draw.randrange(len(order))))
        new, found = falling.drop(tried)
        warmth = 0.02 * bound * (1 - step / steps)
        if new <= now or draw.random() < exp((now - new) / warmth):
            order, now = tried, new
            if now < best:
                best, result = now, found
    return {life.block: address for life, address in zip(lives, result)}


class _Falling:
    """Rectangles that fall, one after another, to the lowest place where they overlap none before them."""

    def __init__(self, lives: Sequence[Lifetime], around: Sequence[tuple[Lifetime, int]]) -> None:
        self._sizes = [life.bytes for life in lives]
        self._meets, self._fixed = [], []
        for i, life in enumerate(lives):
            self._meets.append([j for j, other in enumerate(lives) if j != i and _together(life, other)])
            self._fixed.append([(at, other.bytes) for other, at in around if _together(life, other)])
        self._least = max((address + life.bytes for life, address in around), default=0)

    def drop(self, order: Sequence[int]) -> tuple[int, list[int]]:
        """-> the height, and the address of each rectangle."""
        addresses = [-1] * len(order)
        top = self._least
        for i in order:
            size = self._sizes[i]
            below = [(addresses[j], self._sizes[j]) for j in self._meets[i] if addresses[j] >= 0]
            gaps, end = _gaps(below + self._fixed[i])
            addresses[i] = next((at for at, room in gaps if room >= size), end)
            top = max(top, addresses[i] + size)
        return top, addresses


def _together(one: Lifetime, other: Lifetime) -> bool:
    return one.born < other.dies and other.born < one.dies


def _gaps(occupied: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """(address, bytes) of the holes below and between (address, bytes), and the end of the highest."""
    gaps, end = [], 0
    for address, size in sorted(occupied):
        if address > end:
            gaps.append((end, address - end))
        end = max(end, address + size)
    return gaps, end
