"""The one problem of every search: a chain of layers, devices in levels, a sharding for each of both.

    sharding   x is needed   y comes as   W on a device          sent besides, of W
    dp     rows          rows         whole                  dW: an all-reduce, once a step
    sdp    rows          rows         1/p, gathered in use   two all-gathers and a reduce-scatter
    col    whole         cols         its columns            -
    row    cols          sum          its rows               -
    tp     whole         sum          its part               -        (a block: columns, then rows: Megatron)
    all    whole         whole        whole                  -        (every device does the same)

rows and cols: 1/p of a tensor's rows or features; sum: every device has a term of it. Gradients go back in
the same way: dy is needed as y comes (whole where y is a sum), dx comes as x was needed (a sum where that was
whole). From layer to layer an activation travels as it must: all-gather, reduce-scatter, all-to-all or both
of the first two. Levels are independent, the outermost first: level l of a dim is its l-th digit. Sums go
from the innermost level outwards, gathers back inwards, so that slow links carry shards.

    seconds = FLOPs / rate  +  sum over levels of bytes sent / bandwidth         (nothing overlaps)
    bytes of memory = states of the stored weights + kept x and inner results of each microbatch in flight

Left out: latency, weights while they are gathered. Sizes and rates that are powers of two make sums exact.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import inf, prod
from operator import itemgetter, truediv
from typing import NamedTuple

from minitrain.ranks.checks import require_nonempty, require_one_of, require_positive, require_positive_ints


class Sharding(NamedTuple):
    x: str
    y: str
    dy: str
    dx: str


SHARDINGS = {
    "dp": Sharding("rows", "rows", "rows", "rows"),
    "sdp": Sharding("rows", "rows", "rows", "rows"),
    "col": Sharding("whole", "cols", "cols", "sum"),
    "row": Sharding("cols", "sum", "whole", "cols"),
    "tp": Sharding("whole", "sum", "whole", "sum"),
    "all": Sharding("whole", "whole", "whole", "whole"),
}
CUT = ("rows", "cols")  # a tensor of which a device has 1/p
SHARED = ("col", "row", "tp")  # weights of which a device uses 1/p
SPLIT = ("dp", "sdp", "col", "row", "tp")  # the work is split, too


class Layer(NamedTuple):  # y = x·W
    name: str
    takes: int  # elements of a row of x
    gives: int  # of y
    weights: int
    flops: float  # of a row forward
    keeps: int = 0  # elements of a row, inside for backward


def linear(name: str, takes: int, gives: int) -> Layer:
    require_positive_ints(takes=takes, gives=gives)
    return Layer(name, takes, gives, takes * gives, 2 * takes * gives)


def block(name: str, width: int, inner: int) -> Layer:
    """width -> inner -> width, for the sharding tp; the inner result is kept."""
    return Layer(name, width, width, 2 * width * inner, 4 * width * inner, keeps=inner)


class Level(NamedTuple):
    devices: int
    bytes_per_s: float  # of a device, per direction


class Option(NamedTuple):
    shardings: tuple[str, ...]  # for each level
    again: bool = False  # inner results of the layer are computed again in backward


class SearchResult(NamedTuple):
    choice: object
    cost: float
    looked_at: int  # partial or whole choices that were priced


def cheapest(priced: Iterable[tuple], memory_bytes: float = inf) -> tuple:
    """That with the least first entry, of equal ones the first. ValueError if none is there, or the least is
    infinite: nothing fits into so many bytes."""
    best = min(priced, key=itemgetter(0), default=(inf,))
    if best[0] == inf:
        raise ValueError(f"nothing fits into {memory_bytes:,} bytes; give more memory or devices")
    return best


@dataclass(frozen=True)
class Problem:
    """`rows` of a microbatch, `microbatches` of a step; an edge goes from every layer to the next, and to
    those behind it in `skips`. The output is wanted as `ends`, "rows" or "whole", on every level."""

    layers: tuple[Layer, ...]
    rows: int
    levels: tuple[Level, ...]
    flops_per_s: float
    memory_bytes: float = inf
    microbatches: int = 1
    shardings: tuple[str, ...] = ("dp", "sdp", "col", "row")
    skips: tuple[tuple[int, int], ...] = ()
    ends: str = "rows"
    element_bytes: int = 4
    state_bytes: int = 16  # of a weight with its gradient and AdamW's moments

    def __post_init__(self) -> None:
        require_nonempty(layers=self.layers, shardings=self.shardings)
        for sharding in self.shardings:
            require_one_of(SHARDINGS, shardings=sharding)
        require_one_of(("rows", "whole"), ends=self.ends)
        require_positive_ints(rows=self.rows, microbatches=self.microbatches)
        require_positive(flops_per_s=self.flops_per_s)
        for level in self.levels:
            require_positive_ints(devices=level.devices)
            require_positive(bytes_per_s=level.bytes_per_s)
        for i, j in self.skips:
            if not 0 <= i < j - 1 < len(self.layers) - 1:
                raise ValueError(f"skip {(i, j)} of {len(self.layers)} layers; it goes past at least one")

    devices = property(lambda self: prod(level.devices for level in self.levels))

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return (*((i, i + 1) for i in range(len(self.layers) - 1)), *self.skips)

    def mesh(self, devices: int) -> tuple[Level, ...]:
        """The levels of so many devices, the innermost filled first."""
        levels, left = [], devices
        for level in reversed(self.levels):
            here = min(level.devices, left)
            if left == 1 or left % here:
                break
            levels.append(Level(here, level.bytes_per_s))
            left //= here
        if left > 1:
            raise ValueError(f"{devices} devices do not fill levels of {self.levels}; use other numbers")
        return tuple(reversed(levels))

    def options(self, levels: Sequence[Level]) -> list[Option]:
        return [Option(shardings) for shardings in product(self.shardings, repeat=len(levels))]

    def weight_bytes(self, layer: Layer, shardings: Sequence[str], levels: Sequence[Level]):
        """(in every microbatch, once a step) for the weights and their gradients."""
        often, once = [0.0] * len(levels), [0.0] * len(levels)
        shard = layer.weights * self.element_bytes * fraction(shardings, levels, (*SHARED, "sdp"))
        whole = shard
        for i, (sharding, level) in enumerate(zip(shardings, levels)):  # gathers go inwards
            if sharding == "sdp":
                often[i] = 3 * (level.devices - 1) * whole  # two gathers; the reduce-scatter is one backwards
                whole *= level.devices
        for i, (sharding, level) in reversed(list(enumerate(zip(shardings, levels)))):
            if sharding == "dp":
                once[i] = 2 * (level.devices - 1) / level.devices * shard
                shard /= level.devices
        return often, once

    def edge_bytes(self, source: Layer, shardings, then, levels: Sequence[Level]) -> tuple[tuple, tuple]:
        """(forward, backward) of the activation from a layer with `shardings` to `then`, or the end."""
        size, end = source.gives * self.rows * self.element_bytes, (self.ends,) * len(levels)
        placed = lambda what, some: tuple(getattr(SHARDINGS[sharding], what) for sharding in some)
        x, dx = (end, end) if then is None else (placed("x", then), placed("dx", then))
        y, dy = placed("y", shardings), placed("dy", shardings)
        return moved(y, x, size, levels), moved(dx, dy, size, levels)

    def compute_seconds(self, layer: Layer, option: Option, levels: Sequence[Level]) -> float:
        """Forward and backward, 1 + 2, of a microbatch; one more forward if `again`."""
        here = fraction(option.shardings, levels, SPLIT)
        return (3 + option.again) * layer.flops * self.rows * here / self.flops_per_s

    def memory(self, layer: Layer, option: Option, levels: Sequence[Level], in_flight: int = 1) -> float:
        stored = layer.weights * fraction(option.shardings, levels, (*SHARED, "sdp"))
        x = layer.takes * fraction([SHARDINGS[sharding].x for sharding in option.shardings], levels, CUT)
        inside = layer.keeps * fraction(option.shardings, levels, SPLIT)
        kept = in_flight * x + (1 if option.again else in_flight) * inside
        return self.state_bytes * stored + self.rows * self.element_bytes * kept

    def graph(self, layers=None, devices=None, options=None, unit="seconds", in_flight=1) -> "Graph":
        """Costs of these layers on so many devices, by default all on all, each with its `options`. `unit`:
        seconds of a microbatch, or bytes that a device sends in a step of one. Edges that leave the layers
        are not in it; the last one gives rows, or `ends`."""
        layers = layers or range(len(self.layers))
        levels, counted = self.mesh(devices or self.devices), unit == "bytes"
        options = options or [self.options(levels)] * len(layers)
        rates, own = [level.bytes_per_s for level in levels], dict(zip(layers, options))

        def price(sent, share=1):
            return sum(sent) if counted else share * sum(map(truediv, sent, rates))

        def edge(i, a, b=None):
            return sum(map(price, self.edge_bytes(self.layers[i], a.shardings, b and b.shardings, levels)))

        def node(i, option):
            often, once = self.weight_bytes(self.layers[i], option.shardings, levels)
            work = 0 if counted else self.compute_seconds(self.layers[i], option, levels)
            return work + price(often) + price(once, 1 / self.microbatches)

        memory = lambda i, option: self.memory(self.layers[i], option, levels, in_flight)
        nodes, sizes = ([[of(i, one) for one in some] for i, some in own.items()] for of in (node, memory))
        nodes[-1] = [cost + edge(layers[-1], option) for cost, option in zip(nodes[-1], options[-1])]
        inside, first = [(i, j) for i, j in self.edges if i in own and j in own], layers[0]
        edges = {(i - first, j - first): [[edge(i, a, b) for b in own[j]] for a in own[i]] for i, j in inside}
        return Graph(options, nodes, edges, sizes)

    def cost(self, choice: Sequence[Option], layers=None, devices=None, unit: str = "seconds") -> float:
        """Of one choice: an option for each of these layers."""
        alone = self.graph(layers, devices, [[option] for option in choice], unit)
        return alone.cost([0] * len(choice))


@lru_cache(1 << 16)
def moved(source: Sequence[str], target: Sequence[str], size: float, levels: Sequence[Level]) -> tuple:
    """Bytes that a device sends on each level until a tensor of `size` bytes, as `source`, is as `target`."""
    sent, now = [0.0] * len(levels), size * fraction(source, levels, CUT)
    each = list(enumerate(zip(source, target, levels)))
    for _, (a, b, level) in each:
        if a == "whole" and b in CUT:
            now /= level.devices  # a slice of what is there
    for i, (a, b, level) in reversed(each):
        if a == "sum" or (a in CUT and b in CUT and a != b):  # reduce-scatter, all-to-all
            sent[i] += (level.devices - 1) / level.devices * now
            now /= level.devices if a == "sum" else 1
    for i, (a, b, level) in each:
        if b == "whole" and a != "whole":  # all-gather
            sent[i] += (level.devices - 1) * now
            now *= level.devices
    return tuple(sent)


def fraction(shardings: Sequence[str], levels: Sequence[Level], that_cut: Sequence[str]) -> float:
    return 1 / prod(level.devices for sharding, level in zip(shardings, levels) if sharding in that_cut)


@dataclass(frozen=True)
class Graph:
    """Layers i with `options[i]`; node[i][a], memory[i][a], edge[i, j][a][b], i < j: what picking costs."""

    options: Sequence[Sequence[Option]]
    node: list[list[float]]
    edge: dict[tuple[int, int], list[list[float]]]
    memory: list[list[float]]

    def cost(self, picks: Sequence[int]) -> float:
        own = sum(costs[pick] for costs, pick in zip(self.node, picks))
        return own + sum(costs[picks[i]][picks[j]] for (i, j), costs in self.edge.items())

    def bytes(self, picks: Sequence[int]) -> float:
        return sum(costs[pick] for costs, pick in zip(self.memory, picks))

    def every(self, picks: tuple[int, ...] = (), cost: float = 0.0, size: float = 0.0) -> Iterator[tuple]:
        """(cost, bytes, picks) of every choice that begins with `picks`, in the order of the options."""
        if (j := len(picks)) == len(self.options):
            yield cost, size, picks
            return
        into = [costs[picks[i]] for (i, to), costs in self.edge.items() if to == j]
        for pick, (own, held) in enumerate(zip(self.node[j], self.memory[j])):
            yield from self.every((*picks, pick), cost + own + sum(row[pick] for row in into), size + held)

    size = property(lambda self: prod(map(len, self.options)))

    def choice(self, picks: Sequence[int]) -> tuple[Option, ...]:
        return tuple(options[pick] for options, pick in zip(self.options, picks))


def example(**changes) -> Problem:
    """Two MLPs, a wide and a narrow one, on two nodes of two devices: for chapter 23."""
    shapes = {"up": (512, 4096), "down": (4096, 512), "up2": (512, 2048), "down2": (2048, 512)}
    layers = tuple(linear(name, *shape) for name, shape in shapes.items())
    sizes = dict(rows=1024, microbatches=4, memory_bytes=2**26, flops_per_s=2.0**44)
    return Problem(**dict(layers=layers, levels=(Level(2, 2.0**30), Level(2, 2.0**34)), **sizes) | changes)


def exhaustive(problem: Problem, unit: str = "seconds") -> SearchResult:
    """Of equal choices that which comes first in the order of `problem.shardings`."""
    return every(problem.graph(unit=unit), problem.memory_bytes)


def every(graph: Graph, memory_bytes: float = inf) -> SearchResult:
    fitting = (one for one in graph.every() if one[1] <= memory_bytes)
    cost, _, picks = cheapest(fitting, memory_bytes)
    return SearchResult(graph.choice(picks), cost, graph.size)


def least(choices: Iterable, cost: Callable[..., float]) -> SearchResult:
    priced = [(cost(choice), choice) for choice in choices]
    best, choice = cheapest(priced)
    return SearchResult(choice, best, len(priced))
