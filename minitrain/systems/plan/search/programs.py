"""Searches that rewrite programs: nnScaler's three primitives, Unity's one set of rules.

nnScaler  a program is a dict of operators: seconds, bytes while at work, the names it needs. `op_trans` makes
          parts of one, microbatches or shards; `op_assign` says who computes it, `op_order` what is first.
          1F1B is op_trans by microbatches, stages assigned to devices, and its order; interlaced pipelines
          have an operator of all devices between those of stages; co-shard is op_trans on one device, part
          after part, in 1/parts of the bytes. `search` tries what an expert's constraints leave
Unity     parallel operators stand in the graph beside the others, a nested tuple:
    partition, combine     whole -> cut along a dim, and back       (free, all-gather; backward the other)
    replicate, reduce      whole -> a copy each; terms -> their sum (free, all-reduce; backward the other)
    x·W  =  combine_0(partition_0(x)·replicate(W))  =  combine_1(replicate(x)·partition_1(W))
         =  reduce(partition_1(x)·partition_0(W))           partition_d(combine_d(x)) = x
    f(combine_d(x), combine_d(y)) = combine_d(f(x, y))      (x·A)*(x·B) = glu(x·[A|B]), one wide product
          `optimize` rewrites anywhere, cheapest first; `sequential` the algebra first, then the parallel
          part: too late to undo a merger that is better on one device and in the way of cutting columns

Lin et al. 2024 (nnScaler), OSDI; Unger et al. 2022 (Unity), OSDI. Differs: operators of given times, no
tensors; few handwritten substitutions, not generated and verified ones; trees; one axis of devices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product

from minitrain.systems.plan.search.problem import SearchResult


@dataclass(frozen=True)
class Operator:
    seconds: float
    bytes: float = 0  # while it works
    needs: tuple[str, ...] = ()
    device: int | None = None
    after: tuple[str, ...] = ()  # by op_order


Program = Mapping[str, Operator]


def op_trans(program: Program, name: str, parts: int, aligned: bool = True) -> dict[str, Operator]:
    """`name.0`, .. in its place, each with 1/parts of its seconds and bytes. Part i needs, and is needed by,
    parts i of what is cut into as many (microbatches) if `aligned`; else every part."""
    old, mine = program[name], [f"{name}.{i}" for i in range(parts)]
    shared = replace(old, seconds=old.seconds / parts, bytes=old.bytes / parts)

    def matching(part: str, names: Sequence[str]) -> tuple[str, ...]:
        """Of needed parts those with the number of `part`, wherever there are `parts` of one operator."""
        stems, own = [other.rpartition(".")[0] for other in names], part[part.rindex(".") :]
        alike = lambda other, stem: stems.count(stem) != parts or other.endswith(own)
        return tuple(other for other, stem in zip(names, stems) if not aligned or alike(other, stem))

    new = {}
    for other, operator in program.items():
        if other == name:
            new |= {part: replace(shared, needs=matching(part, old.needs)) for part in mine}
            continue
        needs = tuple(part for need in operator.needs for part in (mine if need == name else [need]))
        stem = other.rpartition(".")[0]
        numbered = name in operator.needs and stem and f"{stem}.{parts - 1}" in program
        new[other] = replace(operator, needs=matching(other, needs) if numbered else needs)
    return new


def op_assign(program: Program, name: str, device: int) -> dict[str, Operator]:
    """The operator of that name, or all its parts."""
    own = [other for other in program if other == name or other.startswith(f"{name}.")]
    return {**program, **{other: replace(program[other], device=device) for other in own}}


def op_order(program: Program, first: str, then: str) -> dict[str, Operator]:
    return {**program, then: replace(program[then], after=(*program[then].after, first))}


def in_row(program: Program, names: Sequence[str]) -> dict[str, Operator]:
    """op_order of each with the next."""
    for first, then in zip(names, names[1:]):
        program = op_order(program, first, then)
    return dict(program)


def times(program: Program) -> dict[str, float]:
    """When each operator ends; a device does what is ready in the program's order. ValueError: a circle."""
    if lost := [name for name, operator in program.items() if operator.device is None]:
        raise ValueError(f"{lost[0]} has no device; assign it")
    ends, free, left = {}, {}, dict(program)
    while left:
        ready = (n for n, o in left.items() if all(before in ends for before in (*o.needs, *o.after)))
        if (name := next(ready, None)) is None:
            raise ValueError(f"{next(iter(left))} waits for itself: orders and needs are a circle")
        operator = left.pop(name)
        before = max((ends[other] for other in (*operator.needs, *operator.after)), default=0)
        ends[name] = free[operator.device] = max(before, free.get(operator.device, 0)) + operator.seconds
    return ends


Constraint = Callable[[dict[str, int]], bool]  # of devices by name


def orders(program: Program, before: Callable | None = None, done=()) -> Iterator[tuple[str, ...]]:
    """Every order in which the needs of all come first, and a before b wherever `before(a, b)` says so."""
    left = [name for name in program if name not in done]
    if not left:
        yield done
    for name in left:
        needed = all(need in done for need in program[name].needs)
        if needed and not any(before and before(other, name) for other in left if other != name):
            yield from orders(program, before, (*done, name))


def search(program: Program, devices: int, fits: Constraint, allowed=None, before=None) -> SearchResult:
    """The shortest of all plans that fit: `allowed` assignments, one order per device with a `before` b.
    Looked at: plans, fitting or not, that differ in what some device does when."""
    best, seen = (float("inf"), {}), set()
    assignments = (dict(zip(program, at)) for at in product(range(devices), repeat=len(program)))
    every = list(orders(program, before))
    for assigned in filter(allowed, assignments):
        for order in every:
            lists = tuple(tuple(n for n in order if assigned[n] == device) for device in range(devices))
            if lists in seen:
                continue
            seen.add(lists)
            if fits(assigned):
                plan = {name: replace(program[name], device=assigned[name]) for name in order}
                for own in lists:
                    plan = in_row(plan, own)
                best = min(best, (max(times(plan).values()), plan), key=lambda one: one[0])
    return SearchResult(best[1], best[0], len(seen))


def pipeline_program(*forward_s: float, microbatches: int = 2):
    """(program, devices, what fits, expert's constraints ..): a stage for each time, forward and backward of
    every microbatch, and as many devices, with room for the weights of one stage each. The expert: all of a
    stage on one device; of the operators of a kind the first microbatch first."""
    program, needs, stages = {}, (), len(forward_s)
    for kind, order in (("F", range(stages)), ("B", reversed(range(stages)))):
        for stage in order:
            time = forward_s[stage] * (1 if kind == "F" else 2)
            program[f"{kind}{stage}"] = Operator(time * microbatches, needs=needs)
            needs = (f"{kind}{stage}",)
    for name in list(program):
        program = op_trans(program, name, microbatches)
    stage_of = lambda name: name[1 : name.index(".")]
    held = lambda assigned, device: {stage_of(name) for name, place in assigned.items() if place == device}
    fits = lambda assigned: all(len(held(assigned, device)) <= 1 for device in range(stages))
    one_place = lambda assigned: len({(stage_of(name), place) for name, place in assigned.items()}) == stages
    first = lambda a, b: a.split(".")[0] == b.split(".")[0] and a < b
    return program, stages, fits, one_place, first


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
    """The cheapest graph that rewrites lead to, through `most` that cost up to `slack` times the best."""
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
