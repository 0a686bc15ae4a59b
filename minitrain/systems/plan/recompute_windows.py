"""Lynx: recomputation that happens while messages travel, and so takes no time. No torch.

    layer = [Task(3, 10, 0, 1), Task(2, 10, 0, 1, after=0)]        windows = [4, 4]: idle times in a backward
    optimal(*backward_of(layer, windows, 8), room=60)              OPT: any plan for each layer
    repeated(layer, windows, 8, room=60)                           HEU: one layer's plan in all layers

Each result that backward needs is kept (bytes of the room), or computed again: in a window between `first`
and `last` in which the rank would wait for communication, or when it is asked for. Of what is put into a
window of w the part above w shows:

    exposed = Σ times of those on demand + Σ_windows max(0, Σ times in it - w)       one: t - min(w, t)

A task that reads another's result comes in the same window or a later one. `optimal` decides task by task
and drops a partial plan if another with the same open ends is no worse in anything; where nothing is shared
with the tasks behind, it starts anew.
Chen et al. 2024 (Lynx), arXiv:2406.08756 (OPT and HEU). Differs: theirs are integer programs over a profile;
here a result that is early is held for free until it is used, so `first` should be near.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs, undominated
from minitrain.ranks.checks import require_nonnegative, require_positive_ints

KEPT, ON_DEMAND = "kept", "on demand"


class Task(NamedTuple):
    time: Number  # of computing its result again
    bytes: Number  # of its result, in all microbatches in flight
    first: int = 0  # the windows it may use, first to last; none if last < first
    last: int = -1
    after: int | None = None  # an earlier task whose result it reads


class Placement(NamedTuple):
    exposed: Number
    places: tuple[int | str, ...]  # of each task: a window, KEPT or ON_DEMAND


def exposed(tasks: Sequence[Task], windows: Sequence[Number], places: Sequence[int | str]) -> Number:
    """The time that recomputation adds."""
    loads, shown = [0] * len(windows), 0
    for task, place in zip(tasks, places):
        if place == ON_DEMAND:
            shown += task.time
        elif place != KEPT:
            loads[place] += task.time
    return shown + sum(max(0, load - window) for load, window in zip(loads, windows))


def options(task: Task, places: Sequence[int | str]) -> list[int | str]:
    """Where it may come, given the places of earlier tasks."""
    before = KEPT if task.after is None else places[task.after]
    if before == ON_DEMAND:
        return [KEPT, ON_DEMAND]
    first = task.first if before == KEPT else max(before, task.first)
    return [KEPT, *range(first, task.last + 1), ON_DEMAND]


def optimal(tasks: Sequence[Task], windows: Sequence[Number], room: Number) -> Placement:
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


def _independent(tasks: Sequence[Task]) -> list[range]:
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


def _unbeaten(tasks: Sequence[Task], windows: Sequence[Number], room: Number) -> list[tuple[tuple, tuple]]:
    """(exposed, kept bytes) and places of every plan that no other beats."""
    last_reader = {task.after: number for number, task in enumerate(tasks) if task.after is not None}
    groups = {(): [((0, 0, *(0,) * len(windows)), ())]}  # open ends -> (exposed, kept bytes, loads), places
    for number, task in enumerate(tasks):
        found: dict[tuple, list] = {}
        future = {w for later in tasks[number + 1 :] for w in range(later.first, later.last + 1)}
        for (shown, kept, *loads), places in (plan for plans in groups.values() for plan in plans):
            for place in options(task, places):
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


def backward_of(layer: Sequence[Task], windows: Sequence[Number], layers: int) -> tuple[list, list]:
    """(tasks, windows) of equal layers in the order of backward. The windows of a layer's tasks are those in
    the backward of the layer in front, so the first layer's tasks have none."""
    if layers < 1:
        raise ValueError(f"Lynx: {layers} layers; give 1 or more")
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


def repeated(layer: Sequence[Task], windows: Sequence[Number], layers: int, room: Number) -> Placement:
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


def check_tasks(tasks: Sequence[Task], windows: Sequence[Number], room: Number) -> None:
    check_costs("Lynx", time=[t.time for t in tasks], bytes=[t.bytes for t in tasks])
    check_costs("Lynx", windows=windows, room=[room])
    for number, task in enumerate(tasks):
        if task.first < 0 or task.last >= len(windows):
            rule = f"there are windows 0 to {len(windows) - 1}"
            raise ValueError(f"Lynx: task {number} may use windows {task.first} to {task.last}; {rule}")
        if task.after is not None and not 0 <= task.after < number:
            raise ValueError(f"Lynx: task {number} reads task {task.after}; it may read earlier ones only")
