"""Where every tensor of a step lies, and in which order operators run, so that a step needs least memory.

A lifetime (block, born, dies, bytes) is a rectangle, moved up or down; those that live at once do not
overlap. `height` is the arena's, never lower than `most_live`.

best_fit   each at its birth into the smallest gap that holds it, as by an allocator that knows no more
annealed   each in turn falls to the lowest gap that holds it; the order is searched: one gets another place
           in it, a change for the worse is accepted with a chance that sinks to 0. It ends early at the bound
ROAM       an operator that is before or after every other one cuts the graph into segments. A segment is
           searched exactly, by sets of operators done, the lowest peak first. Layout: first the tensors that
           cross from one segment to another, then those inside one

Imanishi and Xu 2024 (ISMM); Shu et al. 2023 (ROAM), arXiv:2310.19295. Differs: a rectangle falls into gaps
below others, not only upon those before it; ROAM solves integer programs over a tree of several levels and
places updates by a rule; here a segment must be small enough to be searched (`most_states`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from math import exp
from random import Random
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_one_of, require_positive_ints
from minitrain.systems.simulate.device_memory import Lifetime

Addresses = dict[int, int]


def most_live(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes that live at one moment."""
    changes = [(one.born, one.bytes) for one in lifetimes] + [(one.dies, -one.bytes) for one in lifetimes]
    sizes = (size for _, size in sorted(changes))  # of one moment deaths come first
    return max(accumulate(sizes), default=0)


def height(lifetimes: Sequence[Lifetime], addresses: Mapping[int, int]) -> int:
    return max((addresses[life.block] + life.bytes for life in lifetimes), default=0)


def best_fit(lifetimes: Sequence[Lifetime]) -> Addresses:
    """In order of birth, each into the smallest gap between those alive, or else above them."""
    addresses: Addresses = {}
    alive: list[Lifetime] = []
    for life in sorted(lifetimes, key=lambda life: life.born):
        alive = [other for other in alive if other.dies > life.born]
        gaps, top = _gaps([(addresses[other.block], other.bytes) for other in alive])
        fitting = [(size, at) for at, size in gaps if size >= life.bytes]
        addresses[life.block] = min(fitting)[1] if fitting else top
        alive.append(life)
    return addresses


def annealed(lifetimes: Sequence[Lifetime], *, steps=2000, seed=0, around=()) -> Addresses:
    """The best layout of so many tries. `around`: (life, address) of others that lie there already."""
    require_ints(steps=steps, seed=seed)
    draw, drop = Random(seed), falling(lifetimes, around)
    bound = most_live([*lifetimes, *(life for life, _ in around)])
    start = best_fit(lifetimes) if not around else {life.block: life.born for life in lifetimes}
    order = sorted(range(len(lifetimes)), key=lambda i: (start[lifetimes[i].block], lifetimes[i].born))
    now, found = drop(order)
    best, result = now, found
    for step in range(steps if len(lifetimes) > 1 else 0):
        if best <= bound:
            break
        tried = order.copy()
        tried.insert(draw.randrange(len(order)), tried.pop(draw.randrange(len(order))))
        new, found = drop(tried)
        warmth = 0.02 * bound * (1 - step / steps)
        if new <= now or draw.random() < exp((now - new) / warmth):
            order, now = tried, new
            if now < best:
                best, result = now, found
    return {life.block: address for life, address in zip(lifetimes, result)}


def falling(lifetimes: Sequence[Lifetime], around: Sequence[tuple[Lifetime, int]] = ()) -> Callable:
    """Rectangles that fall, one after another, to the lowest place where they overlap none before them: a
    function of their order that gives the height, and the address of each."""
    sizes, lives = [life.bytes for life in lifetimes], list(enumerate(lifetimes))
    together = lambda one, other: one.born < other.dies and other.born < one.dies
    meets = [[j for j, other in lives if j != i and together(life, other)] for i, life in lives]
    fixed = [[(at, other.bytes) for other, at in around if together(life, other)] for life in lifetimes]
    least = max((address + life.bytes for life, address in around), default=0)

    def drop(order: Sequence[int]) -> tuple[int, list[int]]:
        addresses, top = [-1] * len(order), least
        for i in order:
            below = [(addresses[j], sizes[j]) for j in meets[i] if addresses[j] >= 0]
            gaps, end = _gaps(below + fixed[i])
            addresses[i] = next((at for at, room in gaps if room >= sizes[i]), end)
            top = max(top, addresses[i] + sizes[i])
        return top, addresses

    return drop


def _gaps(occupied: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """(address, bytes) of the holes below and between (address, bytes), and the end of the highest."""
    gaps, end = [], 0
    for address, size in sorted(occupied):
        if address > end:
            gaps.append((end, address - end))
        end = max(end, address + size)
    return gaps, end


class Operator(NamedTuple):
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Operators in the order of the program, and the bytes of every tensor. `results` live to the end."""

    sizes: dict[str, int]
    operators: Sequence[Operator]
    results: Sequence[str] = ()

    @cached_property
    def writer(self) -> dict[str, int]:
        return {name: number for number, one in enumerate(self.operators) for name in one.writes}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        numbered = list(enumerate(self.operators))
        return {name: [number for number, one in numbered if name in one.reads] for name in self.sizes}

    @cached_property
    def before(self) -> list[int]:
        """Bits of all operators that must run before each."""
        found: list[int] = []
        for one in self.operators:
            bits = 0
            for number in {self.writer[name] for name in one.reads if name in self.writer}:
                bits |= 1 << number | found[number]
            found.append(bits)
        return found

    def bytes(self, names: Iterable[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def wanted(self, name: str, done: int = 0) -> bool:
        """Once the operators of `done` have run, does anybody still need the tensor?"""
        return name in self.results or any(not done >> number & 1 for number in self.readers[name])

    def after(self, number: int, done: int) -> int:
        """How many bytes more, or fewer, live when operator `number` has run after those of `done`."""
        one, done = self.operators[number], done | 1 << number
        dead = {name for name in one.reads if not self.wanted(name, done)}
        return self.bytes(filter(self.wanted, one.writes)) - self.bytes(dead)


def memory(graph: Graph, order: Sequence[int]) -> list[int]:
    """Live bytes while each operator runs. ValueError if the order is none of the graph."""
    lives, done = lifetimes_in(graph, order), 0
    for number in order:
        if graph.before[number] & ~done:
            name = graph.operators[number].name
            raise ValueError(f"{name} runs before what it reads; give an order that the graph allows")
        done |= 1 << number
    return [sum(life.bytes for life in lives if life.born <= now < life.dies) for now in range(len(order))]


def lifetimes_in(graph: Graph, order: Sequence[int]) -> list[Lifetime]:
    """Of every tensor by its number in `graph.sizes`, in steps of the order."""
    require_one_of([list(range(len(graph.operators)))], numbers=sorted(order))
    place, found = {number: step for step, number in enumerate(order)}, []
    for number, (name, size) in enumerate(graph.sizes.items()):
        born = place[graph.writer[name]] if name in graph.writer else 0
        last = max([born, *(place[reader] for reader in graph.readers[name])])
        if size and (name in graph.writer or graph.wanted(name)):
            found.append(Lifetime(number, born, len(order) if name in graph.results else last + 1, size))
    return found


def segments(graph: Graph) -> list[list[int]]:
    """Groups of operators: in every order a group runs after the one before. A cut is a group of its own."""
    count, before = len(graph.operators), graph.before
    after = [sum(1 << i for i in range(count) if before[i] >> number & 1) for number in range(count)]
    everyone = (1 << count) - 1
    cuts = [number for number in range(count) if before[number] | after[number] | 1 << number == everyone]
    groups: dict[int, list[int]] = {}
    for number in range(count):
        passed = sum(before[number] >> cut & 1 for cut in cuts)
        groups.setdefault(2 * passed + (number in cuts), []).append(number)
    return [group for _, group in sorted(groups.items())]


def least_memory(graph: Graph, *, most_states: int = 100_000) -> list[int]:
    """An order with the lowest peak. ValueError if a segment has more than `most_states` sets to look at."""
    order: list[int] = []
    given = {name for name in graph.sizes if name not in graph.writer and graph.wanted(name)}
    done, live = 0, graph.bytes(given)
    # Below this no order comes: the largest operator with all that it reads and writes.
    peak = max((graph.bytes({*one.reads, *one.writes}) for one in graph.operators), default=0)
    for group in segments(graph):
        peak, done, live, found = _searched(graph, group, done, live, peak, most_states)
        order += found
    return order


def _searched(graph: Graph, group, done: int, live: int, peak: int, most_states: int) -> tuple:
    """The lowest peak, at least `peak`, with which the group runs after `done`; what is done and lives then;
    and an order that has it."""
    waiting, seen = [(peak, 0, done, live, ())], set()  # the lowest peak first, then the longest order
    while True:
        peak, _, state, live, order = heappop(waiting)
        if len(order) == len(group):
            return peak, state, live, order
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > most_states:
            raise ValueError(f"more than {most_states:,} sets to look at; raise most_states, or branch less")
        steps = []
        for number in group:
            if not state >> number & 1 and not graph.before[number] & ~state:
                during = live + graph.bytes(graph.operators[number].writes)
                steps.append((number, during, graph.after(number, state)))
                if during <= peak and steps[-1][2] <= 0:
                    steps = steps[-1:]  # whenever it ran later, running it now would do no harm
                    break
        for number, during, change in steps:
            longer = (*order, number)
            heappush(waiting, (max(peak, during), -len(longer), state | 1 << number, live + change, longer))


def laid_out(graph: Graph, order: Sequence[int], *, steps: int = 500, seed: int = 0) -> Addresses:
    """Addresses by the tree; or, if that is lower, by best fit."""
    group_of = {number: at for at, group in enumerate(segments(graph)) for number in group}
    every = lifetimes_in(graph, order)
    inside: dict[int, list[Lifetime]] = {}
    crossing: list[Lifetime] = []
    for life in every:
        first, last = group_of[order[life.born]], group_of[order[life.dies - 1]]
        (crossing if first != last else inside.setdefault(first, [])).append(life)
    addresses = annealed(crossing, steps=steps, seed=seed)
    fixed = [(life, addresses[life.block]) for life in crossing]
    for group in inside.values():
        addresses |= annealed(group, steps=steps, seed=seed, around=fixed)
    return min(addresses, best_fit(every), key=lambda found: height(every, found))


def training(layers: int, activation_bytes: int, weight_bytes: int) -> Graph:
    """A step as a framework runs it: forward, backward, then all updates. Each layer writes what its backward
    needs and its result; its backward makes the gradient of its input, and of its weights."""
    require_positive_ints(layers=layers)
    sizes, operators = {"x0": activation_bytes}, []
    for i in range(1, layers + 1):
        sizes |= {f"kept{i}": activation_bytes, f"x{i}": activation_bytes}
        operators.append(Operator(f"forward {i}", (f"x{i - 1}",), (f"kept{i}", f"x{i}")))
    sizes[f"g{layers}"] = activation_bytes
    operators.append(Operator("loss", (f"x{layers}",), (f"g{layers}",)))
    for i in range(layers, 0, -1):
        sizes |= {f"g{i - 1}": activation_bytes, f"w{i}": weight_bytes}
        operators.append(Operator(f"weight gradient {i}", (f"g{i}", f"kept{i}"), (f"w{i}",)))
        operators.append(Operator(f"backward {i}", (f"g{i}", f"kept{i}"), (f"g{i - 1}",)))
    operators += [Operator(f"update {i}", (f"w{i}",), ()) for i in range(1, layers + 1)]
    return Graph(sizes, operators)
