"""Unity: parallel operators stand in the graph beside the others, so one set of rewrites finds both.

    partition, combine     whole -> cut along a dim, and back       (free, all-gather; backward the other)
    replicate, reduce      whole -> a copy each; terms -> their sum (free, all-reduce; backward the other)

    x·W  =  combine_0(partition_0(x)·replicate(W))  =  combine_1(replicate(x)·partition_1(W))
         =  reduce(partition_1(x)·partition_0(W))
    partition_d(combine_d(x)) = x        f(combine_d(x), combine_d(y)) = combine_d(f(x, y))
    (x·A)*(x·B) = glu(x·[A|B])           algebra: one wide product in place of two

A graph is a nested tuple, ("matmul", ("input", "x"), ("weight", "A")). `optimize` rewrites anywhere, cheapest
first; `sequential` does the algebra first and then the parallel part, which is too late to undo a merger that
is better on one device and in the way of cutting columns.
Unger et al. 2022 (OSDI), Unity. Differs: a few handwritten substitutions, not generated and
verified ones; trees; one axis of devices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from minitrain.systems.plan.search.problem import SearchResult

Graph = tuple  # (operator, arguments ..); partition and combine carry their dim: ("partition", 0, x)


def algebra(g: Graph) -> Iterator[Graph]:
    match g:
        case ("mul", ("matmul", x, a), ("matmul", y, b)) if x == y:
            yield "glu", ("matmul", x, ("beside", a, b))
        case ("glu", ("matmul", x, ("beside", a, b))):
            yield "mul", ("matmul", x, a), ("matmul", x, b)


def parallel(g: Graph) -> Iterator[Graph]:
    match g:
        case ("matmul", x, w) if whole(x) and whole(w):
            yield "combine", 0, ("matmul", ("partition", 0, x), ("replicate", w))
            yield "combine", 1, ("matmul", ("replicate", x), ("partition", 1, w))
            yield "reduce", ("matmul", ("partition", 1, x), ("partition", 0, w))
        case ("partition", d, ("combine", e, x)) if d == e:
            yield x
        case ("relu", ("combine", d, x)):
            yield "combine", d, ("relu", x)
        case ("mul", ("combine", d, x), ("combine", e, y)) if d == e:
            yield "combine", d, ("mul", x, y)
        case ("glu", ("combine", 0, x)):
            yield "combine", 0, ("glu", x)


def whole(g: Graph) -> bool:
    """Does every device have all of it?"""
    if g[0] in ("partition", "replicate"):
        return False
    return g[0] in ("combine", "reduce", "input", "weight", "beside") or whole(g[1])


def rewrites(g: Graph, rules) -> Iterator[Graph]:
    """Every graph that one rule makes of one place."""
    for rule in rules:
        yield from rule(g)
    for at, part in enumerate(g):
        if type(part) is tuple:
            yield from ((*g[:at], new, *g[at + 1 :]) for new in rewrites(part, rules))


@dataclass(frozen=True)
class Rates:
    devices: int
    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 0.0
    element_bytes: int = 4


def seconds(g: Graph, shapes: Mapping[str, tuple[int, int]], rates: Rates) -> float:
    """Forward and backward: three products for one, a launch each way, and what collectives send."""
    return _price(g, shapes, rates)[0]


def _price(g: Graph, shapes, rates: Rates) -> tuple[float, int, int]:
    """(seconds, rows, columns of what a device has)."""
    if g[0] in ("input", "weight"):
        return 0.0, *shapes[g[1]]
    parts = [_price(part, shapes, rates) for part in g[1:] if type(part) is tuple]
    time, (_, rows, columns) = sum(part[0] for part in parts), parts[0]
    p, stored = rates.devices, g[1] if g[0] == "replicate" else g[-1]
    sent = rows * columns * rates.element_bytes / rates.bytes_per_s  # a gather of p shards sends (p-1)·shard
    match g:
        case ("beside", _, _):
            return time, rows, columns + parts[1][2]
        case ("partition", dim, _):
            time += 0 if stored[0] in ("weight", "beside", "input") else (p - 1) / p * sent
            return time, rows // p if dim == 0 else rows, columns // p if dim == 1 else columns
        case ("replicate", _):
            return time + (0 if stored[0] == "input" else 2 * (p - 1) / p * sent), rows, columns
        case ("combine", dim, _):
            return time + (p - 1) * sent, rows * p if dim == 0 else rows, columns * p if dim == 1 else columns
        case ("reduce", _):
            return time + 2 * (p - 1) / p * sent, rows, columns
        case ("matmul", _, _):
            product = 6 * rows * columns * parts[1][2] / rates.flops_per_s
            return time + product + 2 * rates.launch_s, rows, parts[1][2]
    return time + 2 * rates.launch_s, rows, columns // 2 if g[0] == "glu" else columns


def optimize(g: Graph, shapes, rates: Rates, rules=(algebra, parallel), most=3000, slack=3.0) -> SearchResult:
    """The cheapest graph that rewrites lead to: cheapest first, through those that cost up to `slack` times
    the best, `most` of them."""
    best = (seconds(g, shapes, rates), 0, g)  # the number in which it was seen breaks ties
    seen, waiting = {g}, [best]
    while waiting and len(seen) < most:
        cost, _, graph = heappop(waiting)
        if cost > slack * best[0]:
            break
        for new in rewrites(graph, rules):
            if new not in seen:
                heappush(waiting, (seconds(new, shapes, rates), len(seen), new))
                best = min(best, waiting[0])
                seen.add(new)
    return SearchResult(best[2], best[0], len(seen))


def sequential(g: Graph, shapes, rates: Rates) -> SearchResult:
    """The best algebra on one device, then the best parallel form of that."""
    first = optimize(g, shapes, replace(rates, devices=1), (algebra,))
    then = optimize(first.choice, shapes, rates, (parallel,))
    return SearchResult(then.choice, then.cost, first.looked_at + then.looked_at)


def every_graph(g: Graph, shapes, rates: Rates) -> SearchResult:
    """The cheapest of all that rewrites lead to."""
    return optimize(g, shapes, rates, most=10**9, slack=float("inf"))
