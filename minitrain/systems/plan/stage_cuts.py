"""Where to cut a pipeline into stages by the time of a whole step: DAPPLE, AutoPipe, GraphPipe. No torch.

DAPPLE     step = warm-up + steady + ending: F_0+…+F_Q, (m-1)(F_Q+B_Q), B_Q+…+B_0 and the sum of gradients;
           the pivot Q is the stage that never waits in between (`paper_latency`). Links are stages of their
           own. It leaves out that a pivot waits twice. With `rest` the F+B of stages behind it, K its warm-up
             latency  =  max over Q of  sum over s <= Q of (F_s+B_s)  +  (m-1)(F_Q+B_Q)  +  w(F_Q)  +  w(B_Q)
             w(t) = max(0, rest - (K-1)·t); for m <= K the larger of the two waits alone
           No step is faster; simulated 1F1B with stage times up to a factor of 3 apart is at most 4 % slower.
AutoPipe   units are embedding | attention 1 | MLP 1 | … | head; one leaves the stage that waits least, as
           long as the simulated step gets shorter. The first microbatches run in halves of their rows.
GraphPipe  a model with branches stays a graph of stages. What counts is its depth, the stages on the longest
           path: equal stages take (m + depth - 1)·(F + B), and hold as many microbatches as stages are on
           their longest path to the end: 3 + 2 + 2 + 1 = 8 for a diamond, 10 for a chain of four.

Fan et al. 2021, arXiv:2007.01045, section 4; Liu et al. 2022 (AutoPipe), IEEE Cluster; Jeon et al. 2024,
arXiv:2406.17145. Differs: `plan_dapple` minimises `latency`; AutoPipe's backwards are in halves too, and a
simulator prices; GraphPipe with one device per stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, Partition, balanced, divided, undominated
from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import alternate, one_f_one_b
from minitrain.pipeline.simulate import Measured, Simulation, simulate
from minitrain.ranks.checks import MOST, require_ints, require_nonnegative, require_one_of, require_positive

Devices = tuple[int, ...]  # how many of each machine


class Stage(NamedTuple):
    F: Number
    B: Number
    sync: Number = 0  # sum of gradients after the last backward


def paper_latency(stages: Sequence[Stage], m: int) -> Number:
    """With the paper's pivot, found from the last stage back to the first."""
    require_ints(1, MOST, m=m)
    F, B, sync = zip(*((stage.F, stage.B, stage.sync) for stage in stages))
    steady, pivot = [(m - 1) * (f + b) for f, b in zip(F, B)], len(stages) - 1
    for s in reversed(range(pivot)):
        if steady[s] > steady[pivot] + sum(F[s + 1 : pivot]) + sum(B[s + 1 : pivot]):
            pivot = s
    ends = [sync[s] + sum(B[s : pivot + 1]) - sum(B[pivot + 1 : s + 1]) for s in range(len(stages))]
    return sum(F[: pivot + 1]) + steady[pivot] + max(ends)


class Ahead(NamedTuple):  # what a stage needs to know of those behind it, from their first forward on
    rest: Number = 0  # sum of F+B
    first: Number = 0  # end of the first one's last backward
    all: Number = 0  # end of everything


def in_front(stage: Stage, behind: Ahead, number: int, m: int) -> Ahead:
    """The same with one more stage in front; `number` stages are behind it."""
    own, k = m * (stage.F + stage.B), min(number + 1, m)
    waits = max(0, behind.rest - (k - 1) * stage.F), max(0, behind.rest - (k - 1) * stage.B)
    first = max(own + (sum(waits) if m > k else max(waits)), stage.F + behind.first + stage.B)
    return Ahead(behind.rest + stage.F + stage.B, first, max(stage.F + behind.all, first + stage.sync))


def latency(stages: Sequence[Stage], m: int) -> Number:
    """The time of a 1F1B step of m microbatches, from below."""
    behind = Ahead()
    for number, stage in enumerate(reversed(stages)):
        behind = in_front(stage, behind, number, m)
    return behind.all


@dataclass(frozen=True)
class Model:
    """Per layer: forward and backward of a microbatch on one device, bytes of weights and of its input."""

    forward: Sequence[Number]
    backward: Sequence[Number]
    weights: Sequence[Number]
    activations: Sequence[Number]

    def __post_init__(self) -> None:
        require_nonnegative(**vars(self))
        require_one_of([len(self.forward)], **{f"len({name})": len(of) for name, of in vars(self).items()})


@dataclass(frozen=True)
class Cluster:
    """`machines[i]` devices in machine i; bytes per time inside a machine and between two."""

    machines: Devices
    inside: Number
    between: Number

    def __post_init__(self) -> None:
        require_positive(machines=self.machines, inside=self.inside, between=self.between)

    def bandwidth(self, *groups: Devices) -> Number:
        """Of the slowest link among these devices."""
        return self.inside if sum(any(counts) for counts in zip(*groups)) == 1 else self.between


def compute_stage(model: Model, layers: range, devices: Devices, cluster: Cluster) -> Stage:
    """Layers on replicas, which split each microbatch and sum their gradients in a ring."""
    n, lists = sum(devices), (model.forward, model.backward, model.weights)
    forward, backward, weights = (sum(numbers[layers.start : layers.stop]) for numbers in lists)
    sync = divided(2 * (n - 1) * weights, n * cluster.bandwidth(devices))
    return Stage(divided(forward, n), divided(backward, n), sync)


def plan_dapple(model: Model, cluster: Cluster, m: int) -> Partition:
    """The cut, replicas and places with the least `latency`; of equal ones, with fewest stages."""
    require_ints(1, MOST, m=m)

    def choices(end: int, state: tuple[int, Devices, Devices]) -> Iterator[tuple]:
        """`state`: stages and links behind, devices left, devices of the stage behind."""
        number, free, behind = state
        for start, *devices in product(range(end), *(range(count + 1) for count in free)):
            devices = tuple(devices)
            left = tuple(a - b for a, b in zip(free, devices))
            if any(devices) and (any(left) or not start):
                added = [compute_stage(model, range(start, end), devices, cluster)]
                if behind:  # the message, both ways, is a stage
                    message = divided(model.activations[end], cluster.bandwidth(devices, behind))
                    added.insert(0, Stage(message, message))
                yield start, (number + len(added), left, devices), added, (range(start, end), devices)

    whole = in_front_of_all(len(model.forward), (0, cluster.machines, ()), choices, m)
    ahead, stages = min(whole, key=lambda found: (found[0].all, len(found[1])))
    return Partition(ahead.all, stages)


def in_front_of_all(layers: int, state: tuple, choices: Callable, m: int) -> list[tuple[Ahead, tuple]]:
    """(Ahead, plan) of all layers: from the last on, stages go in front of stages. `choices(end, state)`:
    (start, the state then, stages added, what the plan says of them) for layers up to `end`; a state begins
    with the number of stages behind. Kept is all that no other beats in every number of `Ahead`: the latency
    never falls if one rises, so this equals trying everything."""
    frontier, whole = {(layers, state): [(Ahead(), ())]}, []
    for end in range(layers, 0, -1):
        for key in [key for key in frontier if key[0] == end]:
            unbeaten = undominated(frontier.pop(key))
            for start, then, added, said in choices(*key):
                found = frontier.setdefault((start, then), []) if start else whole
                for ahead, plan in unbeaten:
                    for number, stage in enumerate(added, key[1][0]):
                        ahead = in_front(stage, ahead, number, m)
                    found.append((ahead, (said, *plan)))
    return whole


def plan_autopipe(forward: Sequence[Number], backward: Sequence[Number], p: int, m: int) -> Partition:
    """The cut of units into p stages that the search ends at, and its simulated 1F1B step. Of equal moves the
    first: over the front, over the back, and so again with a unit handed on."""
    require_nonnegative(forward=forward, backward=backward)
    require_ints(1, MOST, p=p, m=m)
    if len(forward) != len(backward):
        raise ValueError(f"{len(forward)} forward times and {len(backward)} backward; give each unit both")
    cut, before = tuple(balanced([f + b for f, b in zip(forward, backward)], p)), None
    best = simulated_step(cut, forward, backward, m)
    while cut != before:
        before, cuts = cut, [cut, *without_one_unit(cut, min(range(p), key=best.idle))]
        steps = [(simulated_step(one, forward, backward, m), one) for one in cuts]
        best, cut = min(steps, key=lambda step: step[0].makespan)  # of equal ones this cut
    return Partition(best.makespan, cut)


def simulated_step(cut: Sequence[range], forward: Sequence, backward: Sequence, m: int) -> Simulation:
    """1F1B over these stages."""
    schedule, times = one_f_one_b(len(cut), m), {"F": forward, "B": backward}
    sums = {(kind, s): sum(times[kind][run.start : run.stop]) for kind in times for s, run in enumerate(cut)}
    return simulate(schedule, Measured({action: sums[action[:2]] for action in schedule.place}))


def without_one_unit(cut: Sequence[range], stage: int) -> list[tuple[range, ...]]:
    """The cuts in which a unit of the stage went to a neighbour, who may hand one on to the next."""
    starts, found = [units.start for units in cut] + [cut[-1].stop], []
    for moves in [{stage: 1}, {stage + 1: -1}, {stage: 1, stage - 1: 1}, {stage + 1: -1, stage + 2: -1}]:
        ends = [start + moves.get(i, 0) for i, start in enumerate(starts)]
        moved = tuple(range(a, b) for a, b in zip(ends, ends[1:]))
        if all(0 < i < len(cut) for i in moves) and all(moved):
            found.append(moved)
    return found


def sliced(p: int, m: int, k: int = 1) -> Schedule:
    """1F1B with the first k of m microbatches in halves: units 2i and 2i+1 if i < k, else unit i + k."""
    require_ints(1, MOST, p=p, m=m)
    require_ints(0, m, k=k)

    def halves(action: Action) -> list[Action]:
        i = action.microbatch
        return [action._replace(microbatch=unit) for unit in ([2 * i, 2 * i + 1] if i < k else [i + k])]

    whole = one_f_one_b(p, m).ranks
    ranks = tuple(tuple(unit for action in entries for unit in halves(action)) for entries in whole)
    return Schedule(f"1F1B, p={p}, m={m}, {k} in halves", ranks, p, m + k)


def sliced_times(schedule: Schedule, k: int, F: Number = 1, B: Number = 2) -> Measured:
    """A half takes half of the time."""
    whole, half = {"F": F, "B": B}, Fraction(1, 2)
    return Measured({a: whole[a.kind] * (half if a.microbatch < 2 * k else 1) for a in schedule.place})


def slices_needed(p: int, m: int, F: Number = 1, B: Number = 2) -> int:
    """The fewest halved microbatches that make the whole step (p-1)·F/2 shorter; all m always do."""
    require_positive(F=F, B=B)

    def time(k: int) -> Number:
        schedule = sliced(p, m, k)
        return simulate(schedule, sliced_times(schedule, k, F, B)).makespan

    whole = time(0)
    return next(k for k in range(m + 1) if whole - time(k) >= (p - 1) * F * Fraction(1, 2))


Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GraphSchedule(Schedule):
    """Stage j needs stage i for every edge (i, j); its backward comes first."""

    edges: Edges = ()
    chain = False

    @cached_property
    def needs(self) -> dict[Action, tuple[Action, ...]]:
        def before(kind: str, stage: int, unit: int) -> tuple[Action, ...]:
            if kind == "F":
                return tuple(F(i, unit) for i, j in self.edges if j == stage)
            return (F(stage, unit), *(B(j, unit) for i, j in self.edges if i == stage))

        return {action: before(*action) for action in self.place}


def heights(stages: int, edges: Edges) -> list[int]:
    """The stages on the longest path from each stage to the end, itself included."""
    require_ints(1, MOST, stages=stages)
    found = [1] * stages
    for _ in range(stages):
        before = found
        found = [max([1] + [1 + before[j] for i, j in edges if i == stage]) for stage in range(stages)]
        if found == before:
            return found
    raise ValueError(f"the edges {edges} of {stages} stages go round in a circle: a stage waits for itself")


def depth(stages: int, edges: Edges) -> int:
    return max(heights(stages, edges))


def graph_one_f_one_b(stages: int, edges: Edges, m: int) -> GraphSchedule:
    """Stage i on rank i: its height less one forwards ahead, then one forward and one backward in turn."""
    require_ints(1, MOST, stages=stages, m=m)
    lists = []
    for stage, height in enumerate(heights(stages, edges)):
        lists.append(alternate([F(stage, i) for i in range(m)], [B(stage, i) for i in range(m)], height - 1))
    return GraphSchedule(f"graph 1F1B, {stages} stages, m={m}", tuple(lists), stages, m, edges=edges)


class Op(NamedTuple):
    name: str
    time: Number  # forward and backward of a microbatch


class Parallel(NamedTuple):
    branches: tuple[Series, ...]


Series = Sequence[Op | Parallel]


class GraphPipePlan(NamedTuple):
    time: Number
    depth: int
    slowest: Number
    stages: tuple[tuple[str, ...], ...]  # the operators of each stage, by name
    edges: Edges


def ops(series: Series) -> Iterator[Op]:
    for element in series:
        if isinstance(element, Parallel):
            for branch in element.branches:
                yield from ops(branch)
        else:
            yield element


def plan_graphpipe(model: Series, devices: int, m: int) -> GraphPipePlan:
    """The graph of at most `devices` stages with the shortest (m + depth - 1)·slowest."""
    require_ints(1, MOST, devices=devices, m=m)
    time = lambda deep, slow: (m + deep - 1) * slow
    cuts = graph_cuts(model, devices)
    (_, *costs), parts = min(cuts, key=lambda found: (time(*found[0][1:]), found[0][1]))
    stages, edges = [], []
    _connect(parts, (), stages, edges)
    return GraphPipePlan(time(*costs), *costs, tuple(stages), tuple(edges))


def graph_cuts(series: Series, devices: int) -> list[tuple]:
    """All ((stages, depth, slowest), parts) of at most `devices` stages that no other beats in every number.
    A part is the names of a stage, or a list of each branch's parts."""
    if not series:
        raise ValueError("a branch is empty; give every branch an operator (leave a skip connection out)")
    best = [[((0, 0, 0), ())]]  # for each number of elements
    for end in range(1, len(series) + 1):
        runs = [list(ops(series[start:end])) for start in range(end)]
        last = [[((1, 1, sum(op.time for op in run)), tuple(op.name for op in run))] for run in runs]
        if isinstance(series[end - 1], Parallel):  # every branch, which needs a stage at least, on its own
            branches = series[end - 1].branches
            for pick in product(*(graph_cuts(one, devices - len(branches) + 1) for one in branches)):
                (used, deep, slow), parts = zip(*(costs for costs, _ in pick)), [part for _, part in pick]
                last[-1].append(((sum(used), max(deep), max(slow)), parts))
        found = (
            ((used + n, deep + d, max(slow, s)), (*parts, part))
            for in_front, choices in zip(best, last)
            for (used, deep, slow), parts in in_front
            for (n, d, s), part in choices
        )
        best.append(undominated(plan for plan in found if plan[0][0] <= devices))
    return best[-1]


def _connect(parts: Sequence, before: tuple[int, ...], stages: list, edges: list) -> tuple[int, ...]:
    """Numbers the stages and adds their edges; returns the stages at the end."""
    for part in parts:
        if isinstance(part, list):
            before = tuple(last for branch in part for last in _connect(branch, before, stages, edges))
        else:
            edges += [(i, len(stages)) for i in before]
            before = (len(stages),)
            stages.append(part)
    return before
