"""What a layer should keep: bytes against time (Yuan), behind messages (Lynx), split into parts (TSPLIT).

    front(units), over_layers(front, 12)               [Choice(bytes, time, kept)]; for 12 layers, each its
    own
    offloaded(actions, size, rate)                     a stage whose activations wait on the host
    optimal(*backward_of(layer, windows, 8), room=60)  Lynx's OPT; repeated(layer, windows, 8, room=60): HEU
    split(operators, budget=200).choices               TSPLIT: [SplitChoice(parts=2, again=True), ..]

Yuan: a result of a unit that is not kept is computed again from what is kept. Decided from the last unit to
the first; of two plans that must still be able to compute the same, one that is larger and slower is dropped.
Lynx: a result is kept, or computed again in a window in which the rank waits for messages, or on demand
    exposed = Σ times of those on demand + Σ_windows max(0, Σ times in it - w)
TSPLIT: operators run one after the other, cut into k parts of needs·ceil(rows/k)/rows bytes
    sum of kept_i, i < j, not again  +  needs_j·ceil(rows_j/k_j)/rows_j  (+ kept_j if not again)  <=  budget
    cost = sum of seconds_i (those made again) + launch_i·(k_i - 1)·(1 + again)        as little as can be

Yuan et al. 2024, USENIX ATC '24, sections 3 and 4; Chen et al. 2024 (Lynx), arXiv:2406.08756; Nie et al. 2022
(TSPLIT), ICDE'22. Differs: figures are a model's, not a profile's; Lynx's integer programs are dynamic
programs, and an early result is held for free until it is used; TSPLIT's greedy planner is exact here.
"""

from collections.abc import Sequence
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
            for (size, time), (kept, again) in plans:
                if not (unit.needed or unit.name in wanted):
                    found.setdefault(others, []).append(((size, time), (kept, again)))
                    continue
                more = (size + unit.bytes, time), ((unit.name, *kept), again)
                found.setdefault(others, []).append(more)
                more = (size, time + unit.time), (kept, (unit.name, *again))
                found.setdefault(others | set(unit.inputs), []).append(more)
        unbeaten = {wanted: undominated(plans) for wanted, plans in found.items()}
    return [Choice(*costs, *plan) for costs, plan in unbeaten[frozenset()]]


def over_layers(choices: Sequence[Choice], layers: int) -> list[tuple[Number, Number, str]]:
    """(bytes, time, words) of so many equal layers, each of which chooses: what no other beats."""
    unbeaten = [((0, 0), (0,) * len(choices))]
    for _ in range(layers):
        unbeaten = undominated(
            ((size + one.bytes, time + one.time), (*counts[:i], counts[i] + 1, *counts[i + 1 :]))
            for (size, time), counts in unbeaten
            for i, one in enumerate(choices)
        )
    return [(*costs, policies(choices, counts)) for costs, counts in unbeaten]


def policies(choices: Sequence[Choice], counts: Sequence[int]) -> str:
    parts = [(choice.policy, times) for choice, times in zip(choices, counts) if times]
    return ",".join(word if times == 1 else f"{word}*{times}" for word, times in parts)


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
    loads, shown = [0] * len(windows), 0
    for task, place in zip(tasks, places):
        if place == ON_DEMAND:
            shown += task.time
        elif place != KEPT:
            loads[place] += task.time
    return shown + sum(max(0, load - window) for load, window in zip(loads, windows))


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
    found = [((0, 0), ())]
    for run in _independent(tasks):
        offset = run.start
        own = [tasks[i]._replace(after=None if (j := tasks[i].after) is None else j - offset) for i in run]
        choices = _unbeaten(own, windows, room)
        both = (
            ((shown + more, kept + size), (before, places))
            for (shown, kept), before in found
            for (more, size), places in choices
            if kept + size <= room
        )
        found = undominated(both)
    (shown, _), way = found[0]
    places = ()
    while way:
        way, last = way
        places = (*last, *places)
    return Placement(shown, places)


def _independent(tasks: Sequence[RecomputeTask]) -> list[range]:
    """Runs of tasks that share no window with others and read none of their results."""
    last: dict = {}  # window, or (a task,) -> the last task that has to do with it
    for number, task in enumerate(tasks):
        ends = [*range(task.first, task.last + 1), (number,)] + [(task.after,)] * (task.after is not None)
        last |= dict.fromkeys(ends, number)
    runs, start, end = [], 0, 0
    for number, task in enumerate(tasks):
        end = max(end, *(last[place] for place in [*range(task.first, task.last + 1), (number,)]), number)
        if end == number:
            runs.append(range(start, number + 1))
            start = number + 1
    return runs


def _unbeaten(
    tasks: Sequence[RecomputeTask], windows: Sequence[Number], room: Number
) -> list[tuple[tuple, tuple]]:
    """(exposed, kept bytes) and places of every plan that no other beats."""
    last_reader = {task.after: number for number, task in enumerate(tasks) if task.after is not None}
    groups = {(): [((0, 0, *(0,) * len(windows)), ())]}  # open ends -> (exposed, kept bytes, loads), places
    for number, task in enumerate(tasks):
        found: dict[tuple, list] = {}
        future = {w for later in tasks[number + 1 :] for w in range(later.first, later.last + 1)}
        for (shown, kept, *loads), places in (plan for plans in groups.values() for plan in plans):
            for place in places_for(task, places):
                more, size, now = shown, kept, list(loads)
                if place == KEPT:
                    size += task.bytes
                elif place == ON_DEMAND:
                    more += task.time
                else:
                    now[place] += task.time
                    more += max(0, now[place] - windows[place])
                    now[place] = min(now[place], windows[place])
                if size <= room:
                    now = [load if w in future else 0 for w, load in enumerate(now)]
                    after = (*places, place)
                    ends = tuple(after[i] for i, last in last_reader.items() if i <= number < last)
                    found.setdefault(ends, []).append(((more, size, *now), after))
        groups = {ends: undominated(plans) for ends, plans in found.items()}
    return [(costs[:2], places) for plans in groups.values() for costs, places in plans]


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
    first = optimal([task._replace(first=0, last=-1) for task in layer], windows, room // layers).places
    one = optimal(layer, windows, room // layers).places
    places = list(first)
    for number in range(layers - 1):
        places += [p if isinstance(p, str) else p + number * len(windows) for p in one]
    return Placement(exposed(tasks, all_windows, places), tuple(places))


def check_tasks(tasks: Sequence[RecomputeTask], windows: Sequence[Number], room: Number) -> None:
    require_nonnegative(room=room, **{f"windows[{i}]": window for i, window in enumerate(windows)})
    for number, task in enumerate(tasks):
        if task.first < 0 or task.last >= len(windows):
            rule = f"there are windows 0 to {len(windows) - 1}"
            raise ValueError(f"Lynx: task {number} may use windows {task.first} to {task.last}; {rule}")
        if task.after is not None and not 0 <= task.after < number:
            raise ValueError(f"Lynx: task {number} reads task {task.after}; it may read earlier ones only")


class SplitOperator(NamedTuple):
    """One operator, or a few that are split together."""

    name: str
    seconds: float  # to make its intermediates again
    saved: int  # bytes of them, if they stay
    needs: int  # bytes while it works, all rows at once, that are not kept: of its part
    rows: int
    launch: float = 0.0  # seconds that each further part costs


class SplitChoice(NamedTuple):
    parts: int
    again: bool


class SplitPlan(NamedTuple):
    seconds: float  # more than unsplit and all kept
    saved: int
    choices: tuple[SplitChoice, ...]


def split(works: Sequence[SplitOperator], budget: int) -> SplitPlan:
    """The cheapest choice for each; ValueError names the operator that does not fit even row by row."""
    front = [((0, 0.0), ())]
    for work in works:
        grown = []
        for (before, seconds), choices in front:
            for again in (False, True):
                kept = before + (0 if again else work.saved)
                if parts := fewest_parts(work, budget - kept):
                    choice = SplitChoice(parts, again)
                    grown.append(((kept, seconds + split_cost(work, choice)), (*choices, choice)))
        if not grown:
            least = front[0][0][0] + part_bytes(work, work.rows)
            raise ValueError(f"{work.name} needs {least} bytes by single rows; budget is {budget}, raise it")
        front = undominated(grown)
    return min(SplitPlan(seconds, kept, choices) for (kept, seconds), choices in front)


def fewest_parts(work: SplitOperator, room: int) -> int:
    """The least number of parts of which each fits into so many bytes; 0: not even single rows do."""
    return next((k for k in range(1, work.rows + 1) if part_bytes(work, k) <= room), 0)


def part_bytes(work: SplitOperator, parts: int) -> int:
    """What the largest part needs."""
    return -(-work.needs * -(-work.rows // parts) // work.rows)


def split_cost(work: SplitOperator, choice: SplitChoice) -> float:
    """Seconds more than unsplit and kept."""
    return work.seconds * choice.again + work.launch * (choice.parts - 1) * (1 + choice.again)
