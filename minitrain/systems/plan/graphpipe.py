r"""GraphPipe: a model with branches stays a graph of stages, and branches run at the same time. No torch.

    a chain of 4 stages     S0 - S1 - S2 - S3        a graph of 4 stages     S0 - S1 \
                                                     of depth 3                       S3
                                                                             S2 ----- /

What counts is the depth, the stages on the longest path. Stages of equal cost take (m + depth - 1)·(F + B),
the overhead (depth - 1)/m, and a stage has as many microbatches in flight as stages are on its longest path
to the end: 3 + 2 + 2 + 1 = 8 for a diamond, 10 for a chain. Messages: one along each edge, forward and back;
lower.py and the runtime send along chains only. A stage is a run of operators, with all branches in it; or
branches are cut on their own and share the devices.
Jeon et al. 2024 (GraphPipe), arXiv:2406.17145. Differs: one device per stage and one size of microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.ranks.checks import require_positive_ints

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class GraphSchedule(Schedule):
    """Stage j needs stage i for every edge (i, j); its backward comes first."""

    edges: Edges = ()
    chain = False

    @cached_property
    def needs(self) -> dict[Action, tuple[Action, ...]]:
        found = {}
        for action in self.place:
            kind, stage, unit = action
            if kind == "F":
                found[action] = tuple(F(i, unit) for i, j in self.edges if j == stage)
            else:
                found[action] = (F(stage, unit), *(B(j, unit) for i, j in self.edges if i == stage))
        return found


def heights(stages: int, edges: Edges) -> list[int]:
    """The stages on the longest path from each stage to the end, itself included."""
    require_positive_ints(stages=stages)
    found = [1] * stages
    for _ in range(stages):
        before = found
        found = [max([1] + [1 + before[j] for i, j in edges if i == stage]) for stage in range(stages)]
        if found == before:
            return found
    raise ValueError(f"the edges {edges} of {stages} stages go round in a circle: a stage waits for itself")


def depth(stages: int, edges: Edges) -> int:
    return max(heights(stages, edges))


def one_f_one_b(stages: int, edges: Edges, m: int) -> GraphSchedule:
    """Stage i on rank i: its height less one forwards ahead, then one forward and one backward in turn."""
    require_positive_ints(stages=stages, m=m)
    require_positive_ints(stages=stages, m=m)
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
    require_positive_ints(devices=devices, m=m)
    found = [((m + deep - 1) * slow, deep, slow, parts) for (_, deep, slow), parts in cuts(model, devices)]
    *costs, parts = min(found, key=lambda plan: plan[:2])
    stages, edges = [], []
    _connect(parts, (), stages, edges)
    return GraphPipePlan(*costs, tuple(stages), tuple(edges))


def cuts(series: Series, devices: int) -> list[tuple]:
    """All ((stages, depth, slowest), parts) of at most `devices` stages that no other beats in every number.

    A part is the names of a stage, or a list of each branch's parts."""
    if not series:
        raise ValueError("a branch is empty; give every branch an operator (leave a skip connection out)")
    best = [[((0, 0, 0), ())]]  # for each number of elements
    for end in range(1, len(series) + 1):
        runs = [list(ops(series[start:end])) for start in range(end)]
        last = [[((1, 1, sum(op.time for op in run)), tuple(op.name for op in run))] for run in runs]
        if isinstance(series[end - 1], Parallel):
            last[-1] = last[-1] + _branches(series[end - 1], devices)
        found = (
            ((used + n, deep + d, max(slow, s)), (*parts, part))
            for in_front, choices in zip(best, last)
            for (used, deep, slow), parts in in_front
            for (n, d, s), part in choices
        )
        best.append(undominated(plan for plan in found if plan[0][0] <= devices))
    return best[-1]


def _branches(element: Parallel, devices: int) -> list[tuple]:
    """The same of one part with every branch, which needs a stage at least, cut on its own."""
    most, found = devices - len(element.branches) + 1, []
    for pick in product(*(cuts(branch, most) for branch in element.branches)):
        costs, parts = zip(*pick)
        used, deep, slow = zip(*costs)
        if sum(used) <= devices:
            found.append(((sum(used), max(deep), max(slow)), list(parts)))
    return undominated(found)


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
