"""nnScaler: three primitives build every plan, and constraints of an expert leave few of them to search.

    op_trans(program, name, parts)      an operator becomes parts of it: microbatches, or shards
    op_assign(program, name, device)    who computes it
    op_order(program, first, then)      what a device does first

A program is a dict of operators: seconds, bytes while at work, the names it needs. 1F1B is op_trans by
microbatches, stages assigned to devices, and its order; interlaced pipelines have an operator of all devices
(a huge embedding) between those of stages; co-shard is op_trans on one device, part after part, which needs
1/parts of the bytes. `search` tries all assignments and orders that the constraints leave.
Lin et al. 2024 (OSDI), nnScaler. Differs: operators of given times, no tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        stems = [other.rpartition(".")[0] for other in names]
        own = part[part.rindex(".") :]
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
    """When each operator ends; a device does what is ready in the program's order. ValueError: no device, or
    orders and needs in a circle."""
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
    every microbatch, and as many devices, with room for the weights of one stage each.

    The expert: all of a stage on one device; of the operators of a kind the first microbatch first."""
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
