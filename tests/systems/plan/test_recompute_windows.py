"""Lynx: what is hidden in windows of communication; the exact plan against all plans, the quick one against it."""

import random
from itertools import product

from minitrain.systems.plan.rematerialize import KEPT, ON_DEMAND, backward_of, exposed, optimal, repeated
from minitrain.systems.plan.rematerialize import RecomputeTask as Task


def brute_force(tasks, windows, room):
    """The least exposed time of all plans that fit, by the rules as the equations say them."""
    best = None
    for places in product([KEPT, ON_DEMAND, *range(len(windows))], repeat=len(tasks)):
        kept = sum(task.bytes for task, place in zip(tasks, places) if place == KEPT)
        when = [place if isinstance(place, int) else {KEPT: -1, ON_DEMAND: 99}[place] for place in places]
        allowed = all(w in (-1, 99) or task.first <= w <= task.last for task, w in zip(tasks, when)) and all(
            task.after is None or w == -1 or when[task.after] <= w for task, w in zip(tasks, when)
        )
        if kept <= room and allowed:
            sums = [sum(t.time for t, p in zip(tasks, places) if p == w) for w in range(len(windows))]
            time = sum(max(0, total - window) for total, window in zip(sums, windows))
            time += sum(task.time for task, place in zip(tasks, places) if place == ON_DEMAND)
            best = time if best is None or time < best else best
    return best


def some_tasks(seed: int):
    draw = random.Random(seed)
    count, windows = draw.randint(2, 5), [draw.randint(0, 8) for _ in range(draw.randint(1, 3))]
    tasks = []
    for i in range(count):
        first = draw.randrange(len(windows))
        span = first, draw.randrange(first - 1, len(windows))
        tasks.append(Task(draw.randint(1, 9), draw.randint(1, 9), *span, draw.choice([None, *range(i)])))
    return tasks, windows, draw.randint(0, 15)


# norm1, qkv, core, out, norm2, up, act: (time, bytes), each made from the one before
UNITS = [(2, 1), (6, 3), (5, 1), (3, 1), (1, 1), (10, 4), (2, 4)]
LAYER = [Task(time, size, 0, 1, i - 1 if i else None) for i, (time, size) in enumerate(UNITS)]
STEP = 3 * sum(time for time, _ in UNITS)  # forward and backward of a layer


def test_lynx():
    """One window hides min(window, recomputation); OPT equals brute force; HEU's step is within 10% of OPT's,
    for every room and window tried."""
    sizes = [(2, 0), (2, 5), (2, 9), (3, 0), (3, 2), (3, 5)]  # layers, window
    for time, window in product((1, 4, 9), (0, 4, 7)):
        assert time - optimal([Task(time, 1, 0, 0)], [window], room=0).exposed == min(window, time)
    for seed in range(25):
        tasks, windows, room = some_tasks(seed)
        plan = optimal(tasks, windows, room)
        assert plan.exposed == brute_force(tasks, windows, room) == exposed(tasks, windows, plan.places)
    worst = 0
    for (layers, window), share in product(sizes, (0, 3, 6, 9, 12)):
        problem = backward_of(LAYER, [window] * 2, layers)
        best, quick = optimal(*problem, share * layers), repeated(LAYER, [window] * 2, layers, share * layers)
        assert best.exposed <= quick.exposed == exposed(*problem, quick.places)
        assert sum(t.bytes for t, place in zip(problem[0], quick.places) if place == KEPT) <= share * layers
        worst = max(worst, (layers * STEP + quick.exposed) / (layers * STEP + best.exposed))
    assert 1 < worst < 1.1
    test_what_reads_a_late_result_is_late()
    assert repeated(LAYER, [100, 100], 3, 0).exposed == sum(time for time, _ in UNITS)  # the first layer's
    first, others = (brute_force(LAYER, [window] * 2, 6) for window in (0, 5))  # HEU's, each with its room
    assert repeated(LAYER, [5, 5], 3, 18).exposed == first + 2 * others < 3 * first


def test_the_first_layer_has_nothing_to_hide_behind():
    """Its recomputation shows; that of the others disappears when windows are long."""
    for layers in (5, 1):
        problem = backward_of(LAYER, [100, 100], layers)
        assert optimal(*problem, room=0).exposed == sum(time for time, _ in UNITS)


def test_what_reads_a_late_result_is_late():
    """The second could use window 0, but reads the first, which may not come before window 1."""
    tasks = [Task(3, 9, 1, 1), Task(4, 9, 0, 1, after=0)]
    assert optimal(tasks, [4, 3], room=0).exposed == 4
    assert optimal([tasks[0], tasks[1]._replace(after=None)], [4, 3], room=0).exposed == 0
    assert optimal(tasks, [4, 3], room=9).exposed == 0  # keep the first: the second reads what is there
    # a full window is worth using, for what reads the result and has room to hide: 7 in 2 shows 5, 9 in 9 none
    tasks = [Task(5, 9, 0, 0), Task(2, 9, 0, 0, after=0), Task(9, 9, 1, 1, after=1)]
    assert optimal(tasks, [2, 9], room=0) == (5, (0, 0, 1))
