"""Which results to drop when memory is short, decided while the program runs.

    evictor = Evictor(limit_bytes=8, rule="dtr")          programs: eviction_traces.py, systems/memory/dtr.py
    (out,) = evictor.run("mul", [a, b], [4], cost=12)     makes room, makes a and b again if it must, 4 bytes
    evictor.operators, evictor.recomputed, evictor.evictions, evictor.peak_bytes

A block is the memory of one result and its views. It remembers the operator that made it, so it can be
dropped, and made again when an operator needs it (which may need others first). Dropped is the one with least

    dtr            (cost + cost of its evicted neighbourhood) / (bytes · staleness)     DTR's h_DTR^eq
    neighbourhood  cost + that of its evicted neighbourhood                             h_e*, of the theorem
    local          cost / (bytes · staleness)
    msps           (cost + that of the evicted it would need) / bytes                   Peng et al. 2020
    lru, size      least recently used; largest

Neighbourhood: evicted blocks joined to it by operators, kept as sums in a union-find, which cannot split: a
block made again leaves its sum, not the link. Staleness: cost run since its last use. Locked: what the
running operator and those that wait for it read. The clock is the operators' own cost, so a run repeats
exactly. Kirisame et al. 2021, arXiv:2006.09616, sections 3 and 4. Differs: cost is counted, not timed.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from weakref import WeakValueDictionary, ref

Work = Callable[["list[Block | None]"], None] | None


class Block:
    """Memory of `bytes`, made by an operator (or None: pinned, it came from outside).

    `held` is what its owner keeps in it; it is emptied when the block is evicted. `uses`: the program's."""

    def __init__(self, evictor: "Evictor", bytes: int, made_by: "Operator | None" = None):
        self.evictor, self.bytes, self.made_by, self.held = evictor, bytes, made_by, {}
        self.number, self.resident, self.locks, self.used, self.uses = evictor.numbered(self), False, 0, 0, 1
        self.place: int | None = None  # its address, for those who care (eviction_addresses.py)
        self.group: _Group | None = None  # of the evicted
        self.children: WeakValueDictionary[int, Block] = WeakValueDictionary()
        for parent in self.parents:
            parent.children[self.number] = self

    @property
    def parents(self) -> "tuple[Block, ...]":
        return self.made_by.inputs if self.made_by else ()

    @property
    def cost(self) -> int:
        return self.made_by.cost if self.made_by else 0

    def __del__(self):
        if self.resident:
            self.evictor.leave(self)
        elif self.group:
            self.group.top().cost -= self.cost


class Operator:
    """What makes blocks. `work(blocks)` fills the `held` of its outputs; None stands for one nobody needs."""

    def __init__(self, name: str, inputs: Iterable[Block], sizes: Iterable[int], cost: int, work: Work):
        self.name, self.cost, self.work, self.times = name, cost, work, 0
        self.inputs, self.sizes = tuple(dict.fromkeys(inputs)), tuple(sizes)
        self.outputs: list[ref[Block]] = []


class _Group:
    """Evicted blocks that hang together, in a union-find: the cost of them all."""

    __slots__ = ("cost", "above")

    def __init__(self, cost: int):
        self.cost, self.above = cost, None

    def top(self) -> "_Group":
        group = self
        while group.above:
            if group.above.above:
                group.above = group.above.above
            group = group.above
        return group

    def join(self, other: "_Group") -> None:
        mine, others = self.top(), other.top()
        if mine is not others:
            others.above, mine.cost = mine, mine.cost + others.cost


def _evicted(block: Block) -> bool:
    return not block.resident and block.made_by is not None


class Evictor:
    """Keeps the bytes of all resident blocks within `limit_bytes`, and writes down the program's trace:

    ("constant", block, bytes)  ("run", name, inputs, ((block, bytes), ..), cost)  ("release" or "pin", block)
    """

    def __init__(self, limit_bytes: float = inf, rule: str = "dtr"):
        if rule not in RULES:
            raise ValueError(f"rule {rule!r}; use one of {', '.join(RULES)}")
        self.limit_bytes, self.rule, self.trace = limit_bytes, rule, []
        self.operators = self.recomputed = self.evictions = 0
        self.recomputed_cost = self.clock = self.evicted_bytes = 0
        self.resident_bytes = self.peak_bytes = 0
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
        self._count = 0

    def numbered(self, block: Block) -> int:
        self._blocks[self._count] = block
        self._count += 1
        return self._count - 1

    # ---- what the program does ----------------------------------------------------------------------------

    def constant(self, bytes: int) -> Block:
        """A block from outside: a parameter, an input. It stays until it is gone."""
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
            if block.made_by and block.resident and not block.locks:
                self._drop(block)

    def pin(self, block: Block) -> Block:
        """The program keeps this memory for itself (a gradient): a constant in the place of the block."""
        self.restore(block)
        constant = Block(self, block.bytes)
        self.trace.append(("pin", block.number, constant.number))
        place = block.place
        self._drop(block)
        self.settle(constant, place)
        return constant

    def restore(self, block: Block) -> None:
        """Makes it again if it is evicted."""
        if not block.resident:
            self._execute(block.made_by)

    # ---- recomputation ------------------------------------------------------------------------------------

    def _execute(self, operator: Operator) -> None:
        """Run it, after whatever has to run again for its inputs; no recursion, so chains may be long."""
        waiting, locked = [operator], {}
        try:
            while waiting:
                last = waiting[-1]
                for block in last.inputs:
                    if block.resident and (last, block) not in locked:
                        locked[last, block] = None
                        block.locks += 1
                missing = next((block for block in last.inputs if not block.resident), None)
                if missing is not None:
                    waiting.append(missing.made_by)
                    continue
                self._run(last)
                waiting.pop()
                for block in last.inputs:
                    del locked[last, block]
                    block.locks -= 1
        finally:
            for _, block in locked:
                block.locks -= 1

    def _run(self, operator: Operator) -> None:
        """Also outputs that are there already are made once more, and need room until they are dropped."""
        places = self.reserve(operator.sizes, operator.name, operator.cost)
        blocks = [output() for output in operator.outputs]
        missing = [block if block and not block.resident else None for block in blocks]
        if operator.work:
            operator.work(missing)
        for block, place in zip(missing, places):
            if block:
                self.settle(block, place)
            else:
                self.unreserve(place)
        self.operators += 1
        if operator.times:
            self.recomputed += 1
            self.recomputed_cost += operator.cost
        operator.times += 1
        self.clock += operator.cost
        for block in (*operator.inputs, *filter(None, missing)):
            block.used = self.clock

    def settle(self, block: Block, place: int | None) -> None:
        block.resident, block.place, block.used = True, place, self.clock
        self.resident_bytes += block.bytes
        if block.group:
            block.group.top().cost -= block.cost
            block.group = None

    # ---- eviction -----------------------------------------------------------------------------------------

    def reserve(self, sizes: Sequence[int], what: str, cost: float) -> list[int | None]:
        """Room for all results of an operator at once, and their places (here: no matter where)."""
        needed = sum(sizes)
        while self.resident_bytes + needed > self.limit_bytes:
            if (victim := self.least()) is None:
                raise ValueError(self._too_small(needed, what))
            self.evict(victim)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + needed)
        return [None] * len(sizes)

    def unreserve(self, place: int | None) -> None:
        """The room at that place is not needed after all."""

    def leave(self, block: Block) -> None:
        """A resident block is gone: evicted, released, or nobody knows it any more."""
        self.resident_bytes -= block.bytes

    def _too_small(self, needed: int, what: str) -> str:
        stays = f"{self.resident_bytes} that cannot go (pinned, or read by"
        asked = f"{what} asks for {needed} bytes beside {stays}"
        cure = f"limit_bytes is {self.limit_bytes}, raise it to {self.resident_bytes + needed} or more"
        return f"{asked} it or by operators that wait for it); {cure}"

    def candidates(self) -> list[Block]:
        """What may be evicted now."""
        return [b for b in self._blocks.values() if b.resident and b.made_by and not b.locks and b.bytes]

    def least(self) -> Block | None:
        """Who is evicted first, by the rule."""
        rule = RULES[self.rule]
        return min(self.candidates(), key=lambda block: (rule(block), block.number), default=None)

    def evict(self, block: Block) -> None:
        self.evictions += 1
        self.evicted_bytes += block.bytes
        self._drop(block)

    def _drop(self, block: Block) -> None:
        self.leave(block)
        block.held.clear()
        block.resident, block.group = False, _Group(block.cost)
        for other in (*block.parents, *block.children.values()):
            if other.group:
                block.group.join(other.group)


# ---- rules -------------------------------------------------------------------------------------------------


def neighbourhood(block: Block) -> int:
    """Its own cost and that of the groups of evicted blocks it touches."""
    others = (*block.parents, *block.children.values())
    touched = {other.group.top() for other in others if other.group is not None}
    return block.cost + sum(group.cost for group in touched)


def needed_again(block: Block) -> int:
    """The cost of making it again now: its own and its evicted ancestors'."""
    seen, waiting = {block}, [block]
    while waiting:
        for parent in waiting.pop().parents:
            if _evicted(parent) and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return sum({id(found.made_by): found.cost for found in seen}.values())


def staleness(block: Block) -> int:
    return block.evictor.clock - block.used + 1


RULES: dict[str, Callable[[Block], float]] = {
    "dtr": lambda block: neighbourhood(block) / (block.bytes * staleness(block)),
    "neighbourhood": neighbourhood,
    "local": lambda block: block.cost / (block.bytes * staleness(block)),
    "msps": lambda block: needed_again(block) / block.bytes,
    "lru": lambda block: block.used,
    "size": lambda block: -block.bytes,
}
