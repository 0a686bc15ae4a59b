"""Campo: an operator is worth 16 bits if it gains more than the casts around it cost. No torch.

    time(halves) = Σ half or full of each operator + Σ cast of each result that a reader wants otherwise

A graph is operators in an order in which inputs come first. A result is cast at most once, however many read
it. What a framework does operator by operator is `wrapped`: inputs of each are cast down, its result is cast
up; between two neighbours in 16 bits these are a pair that undoes itself, and a tensor with two such readers
is cast twice. `cheapest` is exact, of all 2^n choices the one of the least time, so it is never slower than
all in 32 bits or all in 16. It is an integer program over half_i, down_i and up_i, each 0 or 1,

    min Σ half_i·(16 bits - 32 bits) + (down_i + up_i)·cast_i     down_i >= half_j - half_i, j a reader of i
                                                                 up_i   >= half_i - half_j

Times are `predicted` by lines through measured sizes, or a roofline's (`block_graph`, a Transformer block).
He et al. 2022 (Campo), USENIX ATC. Differs: forward alone; the choice is an integer program's, not theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import linear_regression
from typing import NamedTuple

from minitrain.pipeline.partition import Number
from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.plan.integer_program import IntegerProgram


class Op(NamedTuple):
    """An operator, or a tensor that is there (full = 0, half = None)."""

    name: str
    inputs: tuple[str, ...]
    full: Number  # time in 32 bits
    half: Number | None  # in 16; None: it must not be (a softmax, a loss, a master weight)
    cast: Number  # of its result, either way


class Cast(NamedTuple):
    tensor: str
    to: str  # "half" or "full"
    reader: str | None = None  # for whom; None: for all who want it


def casts(graph: Sequence[Op], halves: Iterable[str]) -> list[Cast]:
    """The casts that are left when each result is cast once, and only for who wants it otherwise."""
    halves, found = _checked(graph, halves), []
    for op in graph:
        half = op.name in halves
        if any((reader.name in halves) != half for reader in graph if op.name in reader.inputs):
            found.append(Cast(op.name, "full" if half else "half"))
    return found


def wrapped(graph: Sequence[Op], halves: Iterable[str]) -> list[Cast]:
    """Operator by operator: every result is in 32 bits between two."""
    halves, found = _checked(graph, halves), []
    for op in graph:
        if op.name in halves:
            found += [Cast(name, "half", op.name) for name in op.inputs]
            found.append(Cast(op.name, "full"))
    return found


def time(graph: Sequence[Op], halves: Iterable[str], done: Iterable[Cast] | None = None) -> Number:
    """Of the operators one after the other, and of the casts `done` (those of `casts`)."""
    halves, cost = _checked(graph, halves), {op.name: op.cast for op in graph}
    done = casts(graph, halves) if done is None else done
    return sum(op.half if op.name in halves else op.full for op in graph) + sum(cost[c.tensor] for c in done)


def all_half(graph: Sequence[Op]) -> frozenset[str]:
    return frozenset(op.name for op in graph if op.half is not None)


def cheapest(graph: Sequence[Op]) -> frozenset[str]:
    """Who computes in 16 bits, so that `time` is least."""
    _checked(graph, ())
    program, costs = IntegerProgram(), {}
    for op in graph:
        half, down, up = ((which, op.name) for which in ("half", "down", "up"))
        costs |= {half: 0 if op.half is None else op.half - op.full, down: op.cast, up: op.cast}
        program.add({half: 1}, 0, 0 if op.half is None else 1)
        for name in op.inputs:
            program.add({("down", name): 1, ("half", name): 1, half: -1}, 0, inf)
            program.add({("up", name): 1, ("half", name): -1, half: 1}, 0, inf)
    return frozenset(name for which, name in program.solve(costs) if which == "half")


def _checked(graph: Sequence[Op], halves: Iterable[str]) -> frozenset[str]:
    seen, halves = set(), frozenset(halves)
    for op in graph:
        misplaced = op.name in seen or not seen.issuperset(op.inputs)
        if misplaced or not all(cost >= 0 for cost in (op.full, op.half or 0, op.cast)):
            raise ValueError(f"casts: {op}: use a new name, inputs made before, and times of 0 or more")
        seen.add(op.name)
    if wrong := sorted(halves - all_half(graph)):
        raise ValueError(f"casts: {wrong} cannot be in 16 bits; use some of {sorted(all_half(graph))}")
    return halves


def predicted(operators: Iterable[tuple], measured: Mapping[tuple[str, int], Sequence]) -> list[Op]:
    """The graph of (name, inputs, kind, size) from a few runs: measured[kind, bits] = [(size, time), ..], and
    of ("cast", 16); a kind without 16 bits stays in 32."""
    lines = {key: linear_regression(*zip(*pairs)) for key, pairs in measured.items()}
    at = lambda n, *key: max(0.0, lines[key].intercept + lines[key].slope * n) if key in lines else None
    return [Op(x, of, at(n, k, 32), at(n, k, 16), at(n, "cast", 16)) for x, of, k, n in operators]


class Device(NamedTuple):
    """FLOPs and bytes in a unit of time."""

    full: Number
    half: Number
    bandwidth: Number


def block_graph(tokens: int, width: int, device: Device, heads: int = 1) -> list[Op]:
    """A pre-norm block with GELU and F = 4D over one sequence, weights kept in 32 bits. Norms, softmax and
    the residual stream stay in 32 bits."""
    require_positive_ints(tokens=tokens, width=width, heads=heads)
    graph: list[Op] = []

    def add(name: str, inputs: tuple[str, ...], size: int, read: int, flops: int = 0, narrow=True) -> None:
        def longer(rate: Number, number: int) -> Number:
            return max(flops / rate, number * (read + size) / device.bandwidth)

        half = longer(device.half, 2) if narrow else None
        graph.append(Op(name, inputs, longer(device.full, 4), half, 6 * size / device.bandwidth))

    def tensor(name: str, size: int) -> None:
        graph.append(Op(name, (), 0, None, 6 * size / device.bandwidth))

    def product(name: str, x: str, inner: int, outer: int) -> None:
        tensor(f"weight of {name}", inner * outer)
        read = tokens * inner + inner * outer
        add(name, (x, f"weight of {name}"), tokens * outer, read, 2 * tokens * inner * outer)

    stream, scores = tokens * width, heads * tokens * tokens
    tensor("x", stream)
    add("norm1", ("x",), stream, stream, narrow=False)
    for name in ("q", "k", "v"):
        product(name, "norm1", width, width)
    add("scores", ("q", "k"), scores, 2 * stream, 2 * tokens * stream)
    add("softmax", ("scores",), scores, scores, narrow=False)
    add("attended", ("softmax", "v"), stream, scores + stream, 2 * tokens * stream)
    product("out", "attended", width, width)
    add("sum1", ("x", "out"), stream, 2 * stream, narrow=False)
    add("norm2", ("sum1",), stream, stream, narrow=False)
    product("up", "norm2", width, 4 * width)
    add("gelu", ("up",), 4 * stream, 4 * stream)
    product("down", "gelu", 4 * width, width)
    add("sum2", ("sum1", "down"), stream, 2 * stream, narrow=False)
    return graph
