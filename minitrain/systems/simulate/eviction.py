"""Which results to drop when memory is short, decided while the program runs; with addresses, and on traces.

    evictor = Evictor(limit_bytes=8, rule="dtr")          systems/memory/dtr.py runs tensors on it
    (out,) = evictor.run("mul", [a, b], [4], cost=12)     makes room, makes a and b again if it must, 4 bytes
    simulate(evictor.trace, Coop(limit_bytes=..))         what the same program would do under another rule

A block, the memory of one result and its views, can be dropped and made again when it is needed. First goes

    dtr            (cost + cost of its evicted neighbourhood) / (bytes · staleness)     DTR's h_DTR^eq
    neighbourhood  cost + that of its evicted neighbourhood                             h_e*, of the theorem
    local          cost / (bytes · staleness)
    lru, size      least recently used; largest

Neighbourhood: evicted blocks joined to it by operators, sums in a union-find. Staleness: cost run since its
last use. Kirisame et al. 2021 (DTR), arXiv:2006.09616, sections 3 and 4; Hu et al. 2022 (MegTaiChi), ICS'22;
Zhang et al. 2023 (Coop), NeurIPS'23, arXiv:2311.00591. Differs: cost is counted, not timed; MegTaiChi without
its partition of tensors over GPUs; Coop without updates in place; no rounding, streams or pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from weakref import WeakValueDictionary, ref

from minitrain.ranks.checks import require_ints, require_one_of, require_positive_ints


class Block:
    """Memory of `bytes`, made by an operator (or None: pinned, it came from outside). `data` is what its
    owner keeps in it, until the block is evicted; `uses` are the program's."""

    def __init__(self, evictor: Evictor, bytes: int, made_by: Operator | None = None):
        self.evictor, self.number, self.bytes, self.made_by = evictor, next(evictor.numbers), bytes, made_by
        self.data, self.resident, self.used, self.uses = {}, False, 0, 1
        self.parents, self.cost = (made_by.inputs, made_by.cost) if made_by else ((), 0)
        self.place: int | None = None  # its address
        self.group: _Group | None = None  # of the evicted
        self.children: WeakValueDictionary[int, Block] = WeakValueDictionary()
        for parent in self.parents:
            parent.children[self.number] = self
        evictor.blocks[self.number] = self

    def __del__(self):
        if self.resident:
            self.evictor.leave(self)
        elif self.group:
            self.group.top().cost -= self.cost


class Operator:
    """What makes blocks. `work(blocks)` fills the `data` of its outputs; None stands for one nobody needs."""

    def __init__(self, name: str, inputs: Iterable[Block], sizes: Iterable[int], cost: int, work):
        self.name, self.cost, self.work, self.again = name, cost, work, False
        self.inputs, self.sizes = tuple(dict.fromkeys(inputs)), tuple(sizes)
        self.outputs: list[ref[Block]] = []


class _Group:
    """Evicted blocks that hang together, in a union-find: the cost of them all."""

    def __init__(self, cost: int):
        self.cost, self.above = cost, None

    def top(self) -> _Group:
        group = self
        while group.above:
            group.above = group.above.above or group.above
            group = group.above
        return group

    def join(self, other: _Group) -> None:
        mine, others = self.top(), other.top()
        if mine is not others:
            others.above, mine.cost = mine, mine.cost + others.cost


class Evictor:
    """Keeps the bytes of all resident blocks within `limit_bytes`, and writes down the program's trace:

    ("constant", block, bytes)  ("run", name, inputs, ((block, bytes), ..), cost)  ("release" or "pin", block)
    """

    def __init__(self, limit_bytes: float = inf, rule: str = "dtr"):
        require_one_of(RULES, rule=rule)
        self.limit_bytes, self.rule, self.trace = limit_bytes, rule, []
        self.operators = self.recomputed = self.evictions = 0
        self.recomputed_cost = self.clock = self.evicted_bytes = 0
        self.resident_bytes = self.peak_bytes = 0
        # Operators to run, each for the inputs of the one before, and which of its own inputs stay for it.
        self.waiting: list[tuple[Operator, set[Block]]] = []
        self.blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
        self.numbers = count()

    def constant(self, bytes: int) -> Block:
        """A block from outside: a parameter, an input."""
        (place,) = self.reserve((bytes,), f"a constant of {bytes} bytes", inf)
        block = Block(self, bytes)
        self.trace.append(("constant", block.number, bytes))
        self.settle(block, place)
        return block

    def run(self, name: str, inputs: Iterable[Block], sizes: Iterable[int], cost, work=None) -> list[Block]:
        """The program runs an operator -> its outputs, blocks of these sizes, resident, one use each."""
        operator = Operator(name, inputs, sizes, cost, work)
        blocks = [Block(self, size, operator) for size in operator.sizes]
        operator.outputs = [ref(block) for block in blocks]
        read = tuple(block.number for block in operator.inputs)
        made = tuple((block.number, block.bytes) for block in blocks)
        self.trace.append(("run", name, read, made, cost))
        self._execute(operator)
        return blocks

    def release(self, block: Block) -> None:
        """One use less; after the last its memory goes, though others may have to make it again."""
        block.uses -= 1
        if block.uses == 0:
            self.trace.append(("release", block.number))
            if block.made_by and block.resident and block not in self._read():
                self._drop(block)

    def pin(self, block: Block) -> Block:
        """The program keeps this memory for itself (a gradient): a constant in the place of the block."""
        self.restore(block)
        constant = Block(self, block.bytes)
        self.trace.append(("pin", block.number, constant.number))
        self._drop(block)
        self.settle(constant, block.place)
        return constant

    def restore(self, block: Block) -> None:
        if not block.resident:
            self._execute(block.made_by)

    def _execute(self, operator: Operator) -> None:
        """Run it, after whatever has to run again for its inputs; no recursion, so chains may be long."""
        before = len(self.waiting)
        self.waiting.append((operator, set()))
        try:
            while len(self.waiting) > before:
                last, stays = self.waiting[-1]
                stays.update(block for block in last.inputs if block.resident)
                missing = next((block for block in last.inputs if not block.resident), None)
                if missing is None:
                    self._run(last)
                    self.waiting.pop()
                else:
                    self.waiting.append((missing.made_by, set()))
        finally:
            del self.waiting[before:]

    def _read(self) -> set[Block]:
        """What operators that wait have found: it stays."""
        return {block for _, stays in self.waiting for block in stays}

    def _run(self, operator: Operator) -> None:
        """Also outputs that are there already are made once more, and need room until they are dropped."""
        places = self.reserve(operator.sizes, operator.name, operator.cost)
        blocks = [output() for output in operator.outputs]
        missing = [block if block and not block.resident else None for block in blocks]
        if operator.work:
            operator.work(missing)
        for block, place in zip(missing, places):
            self.settle(block, place) if block else self.vacate(place)
        self.operators += 1
        self.recomputed += operator.again
        self.recomputed_cost += operator.again * operator.cost
        operator.again = True
        self.clock += operator.cost
        for block in (*operator.inputs, *filter(None, missing)):
            block.used = self.clock

    def settle(self, block: Block, place: int | None) -> None:
        block.resident, block.place, block.used = True, place, self.clock
        self.resident_bytes += block.bytes
        if block.group:
            block.group.top().cost -= block.cost
            block.group = None

    def reserve(self, sizes: Sequence[int], what: str, cost: float) -> list[int | None]:
        """Room for all results of an operator at once, and their places (here: no matter where)."""
        needed = sum(sizes)
        while self.resident_bytes + needed > self.limit_bytes:
            if not (candidates := self.candidates()):
                stays = f"{self.resident_bytes} that cannot go (pinned, or read by it or what waits for it)"
                cure = f"raise limit_bytes, {self.limit_bytes}, to {self.resident_bytes + needed} or more"
                raise ValueError(f"{what} asks for {needed} bytes beside {stays}; {cure}")
            self.evict(min(candidates, key=self.rank))
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + needed)
        return [None] * len(sizes)

    def vacate(self, place: int | None) -> None:
        """The room at that place is free again."""

    def leave(self, block: Block) -> None:
        self.resident_bytes -= block.bytes
        self.vacate(block.place)

    def candidates(self) -> list[Block]:
        stays = self._read()
        return [b for b in self.blocks.values() if b.resident and b.made_by and b.bytes and b not in stays]

    def rank(self, block: Block) -> tuple[float, int]:
        return RULES[self.rule](block), block.number  # the least goes first

    def evict(self, block: Block) -> None:
        self.evictions += 1
        self.evicted_bytes += block.bytes
        self._drop(block)

    def _drop(self, block: Block) -> None:
        self.leave(block)
        block.data.clear()
        block.resident, block.group = False, _Group(block.cost)
        for other in (*block.parents, *block.children.values()):
            if other.group:
                block.group.join(other.group)


def neighbourhood(block: Block) -> int:
    others = (*block.parents, *block.children.values())
    return block.cost + sum(group.cost for group in {other.group.top() for other in others if other.group})


def staleness(block: Block) -> int:
    return block.evictor.clock - block.used + 1


RULES: dict[str, Callable[[Block], float]] = {
    "dtr": lambda block: neighbourhood(block) / (block.bytes * staleness(block)),
    "neighbourhood": neighbourhood,
    "local": lambda block: block.cost / (block.bytes * staleness(block)),
    "lru": lambda block: block.used,
    "size": lambda block: -block.bytes,
}


def simulate(trace: list[tuple], evictor: Evictor) -> Evictor:
    """Replays what a program did under another limit or rule; -> the evictor, for its counts."""
    named: dict[int, Block] = {}
    for event in trace:
        match event:
            case "constant", number, size:
                named[number] = evictor.constant(size)
            case "run", name, inputs, outputs, cost:
                blocks = evictor.run(name, [named[i] for i in inputs], [size for _, size in outputs], cost)
                named.update(zip((number for number, _ in outputs), blocks))
            case "release", number:
                evictor.release(named.pop(number))
            case "pin", number, constant:
                named[constant] = evictor.pin(named[number])
    return evictor


def chain(layers: int, bytes: int = 1, cost: int = 1, every: int = 0) -> list[tuple]:
    """The trace of x_i = f(x_{i-1}) and g_{i-1} = b(x_{i-1}, g_i); a result is kept until its backward. With
    `every`, a static plan: the forward keeps only x_0, x_every, .., and the backward makes those between two
    of them once more, all at once."""
    require_positive_ints(layers=layers)
    require_ints(bytes=bytes, cost=cost, every=every)
    trace: list[tuple] = [("constant", 0, bytes)]
    numbers = count(1)

    def run(name: str, *inputs: int) -> int:
        number = next(numbers)
        trace.append(("run", name, inputs, ((number, bytes),), cost))
        return number

    x = {0: 0}
    for i in range(layers):
        x[i + 1] = run(f"forward {i}", x[i])
        if every and i % every:
            trace.append(("release", x.pop(i)))
    gradient = x.pop(layers)
    for i in reversed(range(layers)):
        if i not in x:
            for j in range(i - i % every, i):
                x[j + 1] = run(f"forward {j}", x[j])
        above, gradient = gradient, run(f"backward {i}", x[i], gradient)
        trace.append(("release", above))
        if i:
            trace.append(("release", x.pop(i)))
    return trace


class BestFit(Evictor):
    """DTR above an allocator that takes the smallest hole that fits."""

    def __init__(self, limit_bytes: int, rule: str = "dtr"):
        super().__init__(limit_bytes, rule)
        self.stranded_bytes = 0
        self._taken: dict[int, int] = {}  # address -> where it ends

    def reserve(self, sizes: Sequence[int], what: str, cost: float) -> list[int | None]:
        places = [self._allocate(size, what, cost) if size else None for size in sizes]
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + sum(sizes))
        return places

    def vacate(self, place: int | None) -> None:
        self._taken.pop(place, None)

    def settle(self, block: Block, place: int | None) -> None:
        super().settle(block, place)
        if place is not None:
            self._taken[place] = place + block.bytes

    def _allocate(self, bytes: int, what: str, cost: float) -> int:
        evicted: list[tuple[int, int]] = []
        while not (fitting := [hole for hole in self.holes() if hole[1] - hole[0] >= bytes]):
            if not (victims := self.victims(bytes)):
                sizes = [end - start for start, end in self.holes()]
                free = f"{sum(sizes)} are free, at most {max(sizes, default=0)} side by side"
                raise ValueError(f"{what} asks for {bytes} bytes; {free}; raise {self.limit_bytes=}")
            for block in victims:
                evicted.append((block.place, block.bytes))
                self.evict(block)
        start, end = min(fitting, key=lambda hole: hole[1] - hole[0])
        self.stranded_bytes += sum(size for place, size in evicted if not start <= place < end)
        place = self.put(start, end, bytes, cost)
        self._taken[place] = place + bytes
        return place

    def holes(self) -> list[tuple[int, int]]:
        starts = sorted(self._taken)
        ends = [0, *(self._taken[start] for start in starts)]
        return [(a, b) for a, b in zip(ends, [*starts, self.limit_bytes]) if a < b]

    def put(self, start: int, end: int, bytes: int, cost: float) -> int:
        return start  # of a hole up to `end`, for what costs so much to make

    def victims(self, bytes: int) -> list[Block]:
        return sorted(self.candidates(), key=self.rank)[:1]


class MegTaiChi(BestFit):
    """First goes what leaves a hole that is large enough, with its free neighbours counted in."""

    def victims(self, bytes: int) -> list[Block]:
        after = {start: end - start for start, end in self.holes()}
        before = {end: end - start for start, end in self.holes()}

        def key(block: Block) -> tuple:
            end = block.place + block.bytes
            hole = block.bytes + before.get(block.place, 0) + after.get(end, 0)
            return hole < bytes, neighbourhood(block) / (hole * staleness(block)), block.number

        return sorted(self.candidates(), key=key)[:1]


class Coop(BestFit):
    """Evicts side by side, and puts results that are cheap to make together."""

    CHEAP = 6.0  # cost of a byte, at most

    def put(self, start: int, end: int, bytes: int, cost: float) -> int:
        return start if cost <= self.CHEAP * bytes or cost == inf else end - bytes

    def parts(self) -> list[tuple[int, float, Block | None]]:
        """All memory in order of address: (bytes, cost of having it free, the block or None: a hole)."""
        parts = {start: (end - start, inf, None) for start, end in self._taken.items()}
        parts |= {start: (end - start, 0, None) for start, end in self.holes()}
        for block in self.candidates():
            parts[block.place] = block.bytes, neighbourhood(block) / staleness(block), block
        return [parts[start] for start in sorted(parts)]

    def victims(self, bytes: int) -> list[Block]:
        parts = self.parts()
        window = cheapest_window([(size, cost) for size, cost, _ in parts], bytes)
        return [block for *_, block in parts[slice(*window)] if block] if window else []


def cheapest_window(parts: Sequence[tuple[int, float]], bytes: int) -> tuple[int, int] | None:
    """(first, end) of the cheapest run of parts (bytes, cost) of at least so many bytes; None: there is none
    of a finite cost. One sweep: a window that is large enough loses what it can at its left."""
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
