"""ROAM: in which order the operators of a step run, and where their tensors lie, so that a step needs least
memory.

    graph = Graph(sizes={"a": 8, ..}, operators=[Operator("f", reads=("x",), writes=("a",)), ..])
    order = least_memory(graph)             numbers of graph.operators; the program's order is 0, 1, 2, ..
    addresses = laid_out(graph, order)      {number of the tensor: address}

A tensor lives from the operator that writes it through its last reader; what nobody writes is there from the
start, what is `kept` stays to the end. While an operator runs, its inputs and outputs are alive.

The tree: an operator that is before or after every other one has the same place in every order, and cuts the
graph into segments whose orders do not concern each other; the lowest peak of all is the largest of theirs. A
segment is searched exactly, by sets of operators done, the lowest peak first; an operator that neither raises
the peak nor leaves more behind is done at once. Layout: first the tensors that cross from one segment to
another, then around them, segment by segment, those that live inside one. With updates as soon as a gradient
is there, not after the last one, gradients need not wait: that is most of the gain on a training step. Shu et
al. 2023 (ROAM), arXiv:2310.19295. Differs: they solve integer programs over a tree of several levels and
choose where updates go by a rule; here a segment must be small enough to be searched (`most_states`).
"""

from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.plan.memory_layout import Addresses, annealed, best_fit, height
from minitrain.systems.simulate.memory_traces import Lifetime


class Operator(NamedTuple):
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Graph:
    """Operators in the order of the program, and the bytes of every tensor."""

    def __init__(self, sizes: dict[str, int], operators: Sequence[Operator], kept: Sequence[str] = ()):
        self.sizes, self.operators = dict(sizes), tuple(operators)
        self.names = tuple(self.sizes)
        self.kept = frozenset(kept)
        written: set[str] = set()
        all_written = [name for one in operators for name in one.writes]
        for number, one in enumerate(self.operators):
            for name in one.reads:
                if name in all_written and name not in written:
                    what = f"operator {number}, {one.name}, reads {name}"
                    raise ValueError(f"{what} before it is written; put it later")
            again = written & set(one.writes)
            if again:
                raise ValueError(f"{one.name} writes {sorted(again)[0]} again; give each result its own name")
            written |= set(one.writes)
        used = written | {name for one in operators for name in one.reads} | self.kept
        if used - self.sizes.keys():
            raise ValueError(f"tensor {sorted(used - self.sizes.keys())[0]} has no size; add it to `sizes`")

    @cached_property
    def before(self) -> list[int]:
        """Bits of all operators that must run before each."""
        writer = {name: number for number, one in enumerate(self.operators) for name in one.writes}
        found: list[int] = []
        for one in self.operators:
            bits = 0
            for number in {writer[name] for name in one.reads if name in writer}:
                bits |= 1 << number | found[number]
            found.append(bits)
        return found

    @cached_property
    def readers(self) -> dict[str, int]:
        """Bits of the operators that read each tensor."""
        found = dict.fromkeys(self.sizes, 0)
        for number, one in enumerate(self.operators):
            for name in one.reads:
                found[name] |= 1 << number
        return found

    def after(self, number: int, done: int) -> int:
        """How many bytes more, or fewer, live when operator `number` has run after those of `done`."""
        one, readers = self.operators[number], self.readers
        grown = sum(self.sizes[name] for name in one.writes if name in self.kept or readers[name])
        done |= 1 << number
        dead = {name for name in one.reads if name not in self.kept and not readers[name] & ~done}
        return grown - sum(self.sizes[name] for name in dead)

    @property
    def given_bytes(self) -> int:
        """Of tensors that are there from the start."""
        written = {name for one in self.operators for name in one.writes}
        given = (name for name, readers in self.readers.items() if readers or name in self.kept)
        return sum(self.sizes[name] for name in given if name not in written)

    def result_bytes(self, number: int) -> int:
        return sum(self.sizes[name] for name in self.operators[number].writes)


def memory(graph: Graph, order: Sequence[int]) -> list[int]:
    """Live bytes while each operator runs. ValueError if the order is none of the graph."""
    _check_order(graph, order)
    found, done, live = [], 0, graph.given_bytes
    for number in order:
        if graph.before[number] & ~done:
            name = graph.operators[number].name
            raise ValueError(f"{name} runs before what it reads; give an order that the graph allows")
        found.append(live + graph.result_bytes(number))
        live += graph.after(number, done)
        done |= 1 << number
    return found


def _check_order(graph: Graph, order: Sequence[int]) -> None:
    if sorted(order) != list(range(len(graph.operators))):
        raise ValueError(f"{len(order)} operators of {len(graph.operators)}; give each number once")


def lives(graph: Graph, order: Sequence[int]) -> list[Lifetime]:
    """Of every tensor by its number in `graph.sizes`, in steps of the order."""
    _check_order(graph, order)
    place = {number: step for step, number in enumerate(order)}
    writer = {name: number for number, one in enumerate(graph.operators) for name in one.writes}
    found = []
    for number, name in enumerate(graph.names):
        born = place[writer[name]] if name in writer else 0
        readers = [place[reader] for reader, one in enumerate(graph.operators) if name in one.reads]
        end = len(order) if name in graph.kept else max([born, *readers]) + 1
        if graph.sizes[name] and (name in writer or readers or name in graph.kept):
            found.append(Lifetime(number, born, end, graph.sizes[name]))
    return found


# ---- order -----------------------------------------------------------------------------------------------


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
    done, live = 0, graph.given_bytes
    # Below this no order comes: the largest operator with all that it reads and writes.
    own = ({*one.reads, *one.writes} for one in graph.operators)
    peak = max((sum(graph.sizes[name] for name in names) for names in own), default=0)
    for group in segments(graph):
        peak, found = _searched(graph, group, done, live, peak, most_states)
        for number in found:
            live += graph.after(number, done)
            done |= 1 << number
        order += found
    return order


def _searched(graph: Graph, group, done: int, live: int, peak: int, most_states: int) -> tuple:
    """The lowest peak, at least `peak`, with which the group runs after `done`, and an order that has it."""
    goal = done | sum(1 << number for number in group)
    came: dict[int, tuple[int, int]] = {}  # set -> the operator that completed it, and the set before
    waiting, settled = [(peak, 0, done, live, -1, -1)], 0
    while waiting:
        peak, left, state, live, number, previous = heappop(waiting)
        if state in came:
            continue
        came[state] = number, previous
        if state == goal:
            break
        settled += 1
        if settled > most_states:
            what = f"a segment of {len(group)} operators has more than {most_states:,} sets to look at"
            raise ValueError(f"{what}; raise most_states, or give a graph of fewer branches")
        steps = []
        for number in group:
            if not state >> number & 1 and not graph.before[number] & ~state:
                during, change = live + graph.result_bytes(number), graph.after(number, state)
                steps.append((number, during, change))
                if during <= peak and change <= 0:
                    steps = steps[-1:]  # whenever it ran later, running it now would do no harm
                    break
        for number, during, change in steps:
            new = state | 1 << number
            heappush(waiting, (max(peak, during), left - 1, new, live + change, number, state))
    order = []
    while state != done:
        number, state = came[state]
        order.append(number)
    return peak, order[::-1]


# ---- layout ----------------------------------------------------------------------------------------------


def laid_out(graph: Graph, order: Sequence[int], *, steps: int = 500, seed: int = 0) -> Addresses:
    """Addresses by the tree; or, if that is lower, by best fit."""
    _check_order(graph, order)
    require_ints(steps=steps, seed=seed)
    group_of = {number: at for at, group in enumerate(segments(graph)) for number in group}
    every = lives(graph, order)
    inside: dict[int, list[Lifetime]] = {}
    crossing: list[Lifetime] = []
    for life in every:
        first, last = group_of[order[life.born]], group_of[order[life.dies - 1]]
        (crossing if first != last else inside.setdefault(first, [])).append(life)
    addresses = annealed(crossing, steps=steps, seed=seed)
    fixed = [(life, addresses[life.block]) for life in crossing]
    for group in inside.values():
        addresses |= annealed(group, steps=steps, seed=seed, around=fixed)
    plain = best_fit(every)
    return min(addresses, plain, key=lambda found: height(every, found))


def training(layers: int, activation_bytes: int, weight_bytes: int) -> Graph:
    """A step as a framework runs it: forward, backward, and then all updates. Each layer writes what its
    backward needs and its result; its backward makes the gradient of its input, and of its weights."""
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
