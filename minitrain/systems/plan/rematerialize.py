"""Which results to hold and which to compute again: in a layer, behind messages, in any graph, in a chain.

Yuan       bytes against time: what a layer's units may keep, the others computed again from that
Lynx       a result is kept, or computed again in a window w in which the rank waits, or on demand: OPT, HEU
    exposed = Σ times of those on demand + Σ_windows max(0, Σ times in it - w)
Checkmate  R[t, i]: stage t computes node t for the first time, before it earlier ones i again; S[t, i]: held
           from t-1 into t. By HiGHS
    min Σ R[t,i]·cost_i      R[t,i] <= R[t,j] + S[t,j], j an input of i      S[t,i] <= R[t-1,i] + S[t-1,i]
    U[t,0] = Σ S[t,i]·bytes_i + R[t,0]·bytes_0            U[t,k] + R[t,k]·scratch_k <= budget
    U[t,k+1] = U[t,k] - Σ free[t,i,k]·bytes_i + R[t,k+1]·bytes_(k+1)      i: node k and its inputs
    free[t,i,k] <= R[t,k],  1 - S[t+1,i],  1 - R[t,j] for every j > k that reads i
revolve    with c inputs held, x_0 among them, the fewest forwards without a graph of a chain of n layers
    t(n, c) = min over k of k + t(n - k, c - 1) + t(k, c) = r·n - C(c+r, r-1)      r least: n <= C(c+r, c)
Yuan et al. 2024, USENIX ATC, sections 3 and 4; Chen et al. 2024 (Lynx), arXiv:2406.08756; Jain et al. 2020
(Checkmate), arXiv:1910.02653, section 4; Griewank and Walther 2000 (revolve), ACM TOMS 26(1), section 2.
Differs: figures are a model's, not a profile's; Lynx by dynamic programs, an early result held for free until
used; nodes may need scratch memory; `free` is bounded, no equation; revolve's last graph is made forward.
"""

from collections.abc import Iterable, Sequence
from math import comb, inf
from operator import itemgetter
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.memory.chain_plan import Action, advance, check_layers
from minitrain.systems.plan.integer_program import IntegerProgram
from minitrain.systems.simulate.links import Task, play


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
    """The choices that no other beats or equals in bytes and time, smallest first: from the last unit back,
    of plans that must still be able to compute the same those stay that no other beats."""
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
    """One rank's actions ("F" or "B", microbatch, time) in order, activations of the microbatches `away` on
    the host meanwhile (of all with two actions or more between F and B). A link each way; they leave behind
    their F and come back from the start of the action in front of their B. A forward waits until all but the
    last of those in front of it have left."""
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


def repeated(layer: Sequence[RecomputeTask], windows: Sequence, layers: int, room: Number) -> Placement:
    """A plan for one layer with its part of the room, taken for all: a search as long as one layer's. The
    first layer of the backward, which has no windows, has a plan of its own. HEU."""
    tasks, all_windows = backward_of(layer, windows, layers)
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
            raise ValueError(f"Lynx: task {number}, {task}: use {len(windows)} windows, earlier tasks")


class Node(NamedTuple):
    cost: Number
    bytes: Number  # of its result
    inputs: tuple[int, ...] = ()  # earlier nodes
    scratch: Number = 0  # bytes besides, while it is computed


class Rematerialization(NamedTuple):
    cost: Number  # of all that is computed
    extra: Number  # of what is computed again
    peak: Number
    steps: tuple[tuple[str, int], ...]  # ("compute" or "drop", node)

    @property
    def recomputed(self) -> int:
        """How many nodes are computed once more, counted as often as they are."""
        computed = [node for what, node in self.steps if what == "compute"]
        return len(computed) - len(set(computed))


def checkmate(nodes: Sequence[Node], budget: Number) -> Rematerialization:
    """The cheapest plan that ends with the last node and never holds more than `budget` bytes; nodes in an
    order in which they can be computed. ValueError: an operator, or no plan, fits the budget."""
    for number, node in enumerate(nodes):
        inputs = sum(nodes[i].bytes for i in set(node.inputs))
        if (need := inputs + node.bytes + node.scratch) > budget:
            raise ValueError(f"Checkmate: node {number} alone needs {need} bytes, budget {budget}; use more")
    program, n = IntegerProgram(), len(nodes)
    share = lambda size: size / budget if budget else 0.0
    users = [[j for j in range(n) if i in nodes[j].inputs] for i in range(n)]
    R = lambda t, i: ("R", t, i)  # node i is computed in stage t
    S = lambda t, i: ("S", t, i)  # it is held when stage t begins
    Free = lambda t, i, k: ("free", t, i, k)  # it leaves as soon as node k is computed in stage t
    for t in range(n):
        program.add({R(t, t): 1}, 1, 1)  # stage t computes node t for the first time
        for i in range(t + 1):
            for j in nodes[i].inputs:  # R <= R + S: an input is computed in this stage, or held
                program.add({R(t, i): 1, R(t, j): -1, S(t, j): -1}, -inf, 0)
            if i < t:  # S <= R + S of the stage before: what is held was computed there, or held
                before = {} if i == t - 1 else {S(t - 1, i): -1}
                program.add({S(t, i): 1, R(t - 1, i): -1, **before}, -inf, 0)
        used = {S(t, i): share(nodes[i].bytes) for i in range(t)}  # grows by each computation
        for k in range(t + 1):
            used[R(t, k)] = share(nodes[k].bytes)
            program.add({**used, R(t, k): share(nodes[k].bytes + nodes[k].scratch)}, -inf, 1)
            for i in {*nodes[k].inputs, k}:
                used[Free(t, i, k)] = -share(nodes[i].bytes)
                # if k was computed, nobody in this stage needs i after it, and the next one does not hold it
                later = [R(t, j) for j in users[i] if k < j <= t] + [S(t + 1, i)] * (t + 1 < n)
                program.add({Free(t, i, k): 1, R(t, k): -1}, -inf, 0)
                for use in later:
                    program.add({Free(t, i, k): 1, use: 1}, -inf, 1)
    chosen = program.solve({R(t, i): nodes[i].cost for t in range(n) for i in range(t + 1)})
    if chosen is None:
        raise ValueError(f"Checkmate: no plan of {n} nodes fits {budget} bytes; use a larger budget")
    return _result(nodes, chosen)


def _result(nodes: Sequence[Node], chosen: set[tuple]) -> Rematerialization:
    """R and S as steps; what is held too long, or made for nobody, is left out."""
    steps, held = [], set()

    def drop(unwanted: Iterable[int]) -> None:
        steps.extend(("drop", i) for i in sorted(unwanted))
        held.difference_update(unwanted)

    for t in range(len(nodes)):
        drop({i for i in held if ("S", t, i) not in chosen})
        now = [k for k in range(t + 1) if ("R", t, k) in chosen]
        for place, k in enumerate(now):
            steps.append(("compute", k))
            held.add(k)
            later = {i for j in now[place + 1 :] for i in nodes[j].inputs}
            drop({i for i in {*nodes[k].inputs, k} if i not in later and ("S", t + 1, i) not in chosen})
    cost, peak = carried_out(nodes, steps)
    return Rematerialization(cost, cost - sum(node.cost for node in nodes), peak, tuple(steps))


def carried_out(nodes: Sequence[Node], steps: Sequence[tuple[str, int]]) -> tuple[Number, Number]:
    """(cost, peak bytes) of steps. ValueError: a step that cannot be done."""
    held, cost, peak = set(), 0, 0
    for number, (what, i) in enumerate(steps):
        missing = set(nodes[i].inputs) - held if what == "compute" else {i} - held
        if missing:
            raise ValueError(f"step {number}, {what} {i}: node {min(missing)} is not held; compute it before")
        if what == "drop":
            held.remove(i)
            continue
        cost += nodes[i].cost
        held.add(i)
        peak = max(peak, sum(nodes[j].bytes for j in held) + nodes[i].scratch)
    return cost, peak


def checkmate_chain(costs: Sequence[Number], sizes: Sequence[Number], budget: Number) -> Rematerialization:
    """For n layers of these costs whose outputs, and the gradients of which, have these sizes. Nodes 0 .. n-1
    are forwards, n .. 2n-1 backwards from the last layer on, which cost twice as much and need the layer's
    input and the gradient of its output. The chain's own input is always there and not counted."""
    require_nonnegative(costs=costs)
    require_ints(len(costs), len(costs), sizes=len(sizes))
    n = len(costs)
    nodes = [Node(cost, size, (i - 1,) if i else ()) for i, (cost, size) in enumerate(zip(costs, sizes))]
    for i in reversed(range(n)):
        gradient = sizes[i - 1] if i else 0
        inputs = (i - 1, len(nodes) - 1) if i else (len(nodes) - 1,)
        output_again = max(0, sizes[i] - gradient) if i < n - 1 else 0
        nodes.append(Node(2 * costs[i], gradient, inputs, output_again))
    return checkmate(nodes, budget)


def repetitions(layers: int, checkpoints: int) -> int:
    """r: the most often that a layer runs without a graph."""
    check_layers("revolve", layers)
    if checkpoints < 1:
        raise ValueError(f"revolve: c = {checkpoints} held inputs; use 1 (the chain's own input) or more")
    r = 0
    while comb(checkpoints + r, checkpoints) < layers:
        r += 1
    return r


def fewest_forwards(layers: int, checkpoints: int) -> int:
    """t(n, c), by the formula."""
    r = repetitions(layers, checkpoints)
    return r * layers - comb(checkpoints + r, r - 1) if r else 0


def revolve(layers: int, checkpoints: int) -> tuple[Action, ...]:
    """The plan for equal layers. Where to hold next is known from binomials, without a search: O(n·r)."""
    repetitions(layers, checkpoints)  # looks at both
    plan = []

    def add(start: int, end: int, checkpoints: int) -> None:
        while end - start > 1 and checkpoints > 1:
            k = start + next_checkpoint(end - start, checkpoints)
            plan.extend(advance(start, k))
            add(k, end, checkpoints - 1)
            end = k
        for i in reversed(range(start, end)):  # from x_start, which stays, to the gradient of x_i
            plan.extend([*advance(start, i), Action("T", i), Action("B", i)])

    add(0, layers, checkpoints)
    return tuple(plan)


def next_checkpoint(layers: int, checkpoints: int) -> int:
    """A k that the recursion may take: x_k splits the chain into parts that each need what is best for them,
    C(c+r-2, c) <= k <= C(c+r-1, c) in front and C(c+r-2, c-1) <= n-k <= C(c+r-1, c-1) behind."""
    r = repetitions(layers, checkpoints)
    return max(comb(checkpoints + r - 2, checkpoints), layers - comb(checkpoints + r - 1, checkpoints - 1), 1)
