"""What a layer should keep: bytes against time (Yuan), or behind messages (Lynx).

    front(units)                                       [Choice(bytes, time, kept), ..]
    offloaded(actions, size, rate)                     a stage whose activations wait on the host
    optimal(*backward_of(layer, windows, 8), room=60)  Lynx's OPT; repeated(layer, windows, 8, room=60): HEU

Yuan: a result of a unit that is not kept is computed again from what is kept. Decided from the last unit to
the first; of two plans that must still be able to compute the same, one that is larger and slower is dropped.
Lynx: a result is kept, or computed again in a window in which the rank waits for messages, or on demand
    exposed = Σ times of those on demand + Σ_windows max(0, Σ times in it - w)
Yuan et al. 2024, USENIX ATC '24, sections 3 and 4; Chen et al. 2024 (Lynx), arXiv:2406.08756. Differs:
figures are a model's, not a profile's; Lynx's integer programs are dynamic programs, and an early result is
held for free until it is used.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.plan.simulate.links import Task, play
from minitrain.ranks.checks import require_nonnegative, require_positive_ints


class Unit(NamedTuple):
    name: str
    time: Number  # of its forward
    bytes: Number  # of what is kept if its result is
    inputs: tuple[str, ...] = ()  # the units whose results it reads; what it reads besides is always there
    needed: bool = True  # by backward


class Choice(NamedTuple):
    bytes: Number
    time: Number  # of what is computed again
    saved: tuple[str, ...]
    again: tuple[str, ...]

    @property
    def policy(self) -> str:
        """As Strategy.recompute says it."""
        if not self.again:
            return "none"
        return "keep:" + "+".join(self.saved) if self.saved else "full"


def front(units: Sequence[Unit]) -> list[Choice]:
    """The choices that no other beats or equals in bytes and time, smallest first."""
    for unit in units:
        require_nonnegative(time=unit.time, bytes=unit.bytes)
    unbeaten = {frozenset(): [((0, 0), ((), ()))]}  # results wanted by units behind -> (costs, (kept, again))
    for unit in reversed(units):
        found: dict[frozenset, list] = {}
        for wanted, plans in unbeaten.items():
            others = wanted - {unit.name}
            inputs = others | set(unit.inputs)
            for (size, time), (kept, again) in plans:
                if not (unit.needed or unit.name in wanted):
                    found.setdefault(others, []).append(((size, time), (kept, again)))
                    continue
                here, once_more = (unit.name, *kept), (unit.name, *again)
                found.setdefault(others, []).append(((size + unit.bytes, time), (here, again)))
                found.setdefault(inputs, []).append(((size, time + unit.time), (kept, once_more)))
        unbeaten = {wanted: undominated(plans) for wanted, plans in found.items()}
    return [Choice(*costs, *plan) for costs, plan in unbeaten[frozenset()]]


class Offload(NamedTuple):
    time: Number
    peak_microbatches: int  # microbatches whose activations are on the device, on their way included


def offloaded(actions: Sequence[tuple], size: Number, rate: Number, away=None) -> Offload:
    """One rank's actions ("F" or "B", microbatch, time) in order, with the activations of the microbatches
    `away` on the host meanwhile (of all that have two actions or more between their F and B). A link each
    way, `rate` bytes a time unit. They leave behind their F and are fetched from the start of the action in
    front of their B. A forward waits until all but the last of those in front of it have left."""
    names = [action[:2] for action in actions]
    between = {m: names.index(("B", m)) - names.index(("F", m)) - 1 for kind, m in names if kind == "F"}
    away = {m for m, others in between.items() if others >= 2} if away is None else set(away)
    tasks, left, before = [], [], ()
    for (kind, microbatch, time), then in zip(actions, [*names[1:], None]):
        needs = tuple(left[:-1]) if kind == "F" else (f"in {microbatch}",) * (microbatch in away)
        tasks.append(Task(f"{kind}{microbatch}", "rank", time, after=needs))
        if kind == "F" and microbatch in away:
            left.append(f"out {microbatch}")
            tasks.append(Task(left[-1], "out", size, ("up",), after=(f"F{microbatch}",)))
        if then and then[0] == "B" and then[1] in away:
            needs = *before, *needs, f"out {then[1]}"
            tasks.append(Task(f"in {then[1]}", "in", size, ("down",), after=needs))
        before = (f"{kind}{microbatch}",)
    run = play(tasks, {"up": rate, "down": rate})
    spans = [(run.start(f"F{m}"), run.end(f"out {m}" if m in away else f"B{m}")) for m in between]
    spans += [(run.start(f"in {m}"), run.end(f"B{m}")) for m in away]
    held = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    return Offload(max(map(run.end, run.lane("rank")), default=0), max(held, default=0))


KEPT, ON_DEMAND = "kept", "on demand"


class RecomputeTask(NamedTuple):
    time: Number  # of computing its result again
    bytes: Number  # of its result, in all microbatches in flight
    first: int = 0  # the windows it may use, first to last; none if last < first
    last: int = -1
    after: int | None = None  # an earlier task whose result it reads


class Placement(NamedTuple):
    exposed: Number
    places: tuple[int | str, ...]  # of each task: a window, KEPT or ON_DEMAND


def exposed(tasks: Sequence[RecomputeTask], windows: Sequence[Number], places: Sequence[int | str]) -> Number:
    """The time that recomputation adds."""
    loads = {KEPT: 0, ON_DEMAND: 0} | dict.fromkeys(range(len(windows)), 0)
    for task, place in zip(tasks, places):
        loads[place] += task.time
    return loads[ON_DEMAND] + sum(max(0, loads[w] - window) for w, window in enumerate(windows))


def places_for(task: RecomputeTask, places: Sequence[int | str]) -> list[int | str]:
    """Where it may come, given the places of earlier tasks."""
    before = KEPT if task.after is None else places[task.after]
    if before == ON_DEMAND:
        return [KEPT, ON_DEMAND]
    first = task.first if before == KEPT else max(before, task.first)
    return [KEPT, *range(first, task.last + 1), ON_DEMAND]


def optimal(tasks: Sequence[RecomputeTask], windows: Sequence[Number], room: Number) -> Placement:
    """The places with the least exposed time, kept results within `room` bytes. Exact. OPT."""
    check_tasks(tasks, windows, room)
    last_reader = {task.after: number for number, task in enumerate(tasks) if task.after is not None}
    windows_of = lambda some: {w for task in some for w in range(task.first, task.last + 1)}
    groups = {(): [((0, 0), ())]}  # still read -> (exposed, kept bytes, loads), places
    for number, task in enumerate(tasks):
        found: dict[tuple, list] = {}
        used, future = map(windows_of, (tasks[: number + 1], tasks[number + 1 :]))
        for (shown, kept, *loads), places in (plan for plans in groups.values() for plan in plans):
            for place in places_for(task, places):
                more, size, now = shown, kept, dict(loads)
                if place == KEPT:
                    size += task.bytes
                elif place == ON_DEMAND:
                    more += task.time
                else:
                    load = now.get(place, 0) + task.time
                    more += max(0, load - windows[place])
                    now[place] = min(load, windows[place])
                if size <= room:
                    after = (*places, place)
                    ends = tuple(after[i] for i, last in last_reader.items() if i <= number < last)
                    filled = ((w, now.get(w, 0)) for w in sorted(future & used))
                    found.setdefault(ends, []).append(((more, size, *filled), after))
        groups = {ends: undominated(plans) for ends, plans in found.items()}
    (shown, *_), places = min((plan for plans in groups.values() for plan in plans), key=itemgetter(0))
    return Placement(shown, places)


def backward_of(layer: Sequence[RecomputeTask], windows: Sequence[Number], layers: int) -> tuple[list, list]:
    """(tasks, windows) of equal layers in the order of backward. The windows of a layer's tasks are those in
    the backward of the layer in front, so the first layer's tasks have none."""
    require_positive_ints(layers=layers)
    require_nonnegative(windows=windows)
    tasks = []
    for number in range(layers):
        shift = (number - 1) * len(windows)
        for task in layer:
            after = None if task.after is None else task.after + number * len(layer)
            span = (task.first + shift, task.last + shift) if number else (0, -1)
            tasks.append(task._replace(first=span[0], last=span[1], after=after))
    return tasks, list(windows) * layers


def repeated(
    layer: Sequence[RecomputeTask], windows: Sequence[Number], layers: int, room: Number
) -> Placement:
    """A plan for one layer with its part of the room, taken for all: a search as long as one layer's. The
    first layer of the backward, which has no windows, has a plan of its own. HEU."""
    tasks, all_windows = backward_of(layer, windows, layers)
    check_tasks(tasks, all_windows, room)
    places = [*optimal([task._replace(last=-1) for task in layer], windows, room // layers).places]
    one = optimal(layer, windows, room // layers).places
    for number in range(layers - 1):
        places += [p if isinstance(p, str) else p + number * len(windows) for p in one]
    return Placement(exposed(tasks, all_windows, places), tuple(places))


def check_tasks(tasks: Sequence[RecomputeTask], windows: Sequence[Number], room: Number) -> None:
    require_nonnegative(room=room, windows=windows)
    for number, task in enumerate(tasks):
        reads_later = task.after is not None and not 0 <= task.after < number
        if reads_later or task.first < 0 or task.last >= len(windows):
            rule = f"it has windows 0 to {len(windows) - 1} and reads earlier tasks"
            raise ValueError(f"Lynx: task {number} is {task}; {rule}")
