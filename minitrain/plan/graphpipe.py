"""GraphPipe: a model with branches stays a graph of stages, and branches run at the same time. No torch.

        a chain of 4 stages                    a graph of 4 stages                   text and pictures, say, that meet in the last layers
        S0 - S1 - S2 - S3                      S0 - S1 \\
                                                        S3          depth 3
                                               S2 ----- /

A stage waits for all before it and none beside it. What counts is the depth, the stages on the longest path: with equal stages

    step = (m + depth - 1)·(F + B)      overhead (depth - 1)/m      in flight on a stage: the stages on the longest path from it to the end

so a graph fills faster than the chain of the same stages and keeps less: 3 + 2 + 2 + 1 = 8 for a diamond, 4 + 3 + 2 + 1 = 10 for a chain.
`GraphSchedule` is a schedule whose `needs` follow edges; check, simulate and peak take it as it is (lower.py
and the runtime send along chains only). `one_f_one_b` gives each stage as many forwards ahead as its longest way to the end has edges.

`plan` cuts a series-parallel model: operators in series, some of which are `Parallel(branches)`, each a series again. A stage is a
run of a series, with all branches in it; or a parallel part is cut inside its branches, which share the devices out. For each number of
operators and devices all unbeaten (depth, slowest stage) are kept, and (m + depth - 1)·slowest decides.

Sends a message along each edge, forward and back. Memory above.
Raises ValueError for an empty branch, for no device, for edges in a circle.
Jeon et al. 2024 (GraphPipe), arXiv:2406.17145. Differs: one device a stage and one size of microbatch; theirs replicates stages and
gives them microbatches of their own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from minitrain.pipeline.partition import Number, undominated
from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import alternate, check_sizes

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
            _, stage, unit = action
            if action.kind == "F":
                found[action] = tuple(F(i, unit) for i, j in self.edges if j == stage)
            else:
                found[action] = (F(stage, unit), *(B(j, unit) for i, j in self.edges if i == stage))
        return found


def heights(stages: int, edges: Edges) -> list[int]:
    """The stages on the longest path from each stage to the end, itself included."""
    found = [1] * stages
    for _ in range(stages):
        longer = [max([1] + [1 + found[j] for i, j in edges if i == stage]) for stage in range(stages)]
        if longer == found:
            return found
        found = longer
    raise ValueError(
        f"the edges {edges} of {stages} stages go round in a circle; a stage cannot wait for itself"
    )


def depth(stages: int, edges: Edges) -> int:
    return max(heights(stages, edges))


def one_f_one_b(stages: int, edges: Edges, m: int) -> GraphSchedule:
    """Stage i on rank i: its height less one forwards ahead, then one forward and one backward in turn."""
    check_sizes("one_f_one_b", stages=stages, m=m)
    lists = tuple(
        alternate([F(stage, i) for i in range(m)], [B(stage, i) for i in range(m)], height - 1)
        for stage, height in enumerate(heights(stages, edges))
    )
    return GraphSchedule(f"graph 1F1B, {stages} stages, m={m}", lists, stages, m, edges=edges)


# ---- the planner -----------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """`time`: forward and backward of a microbatch."""

    name: str
    time: Number


class Parallel(NamedTuple):
    branches: tuple[Series, ...]


Series = Sequence[Op | Parallel]


class Plan(NamedTuple):
    """`stages[i]`: the operators of stage i, by name."""

    time: Number
    depth: int
    slowest: Number
    stages: tuple[tuple[str, ...], ...]
    edges: Edges


def ops(series: Series) -> Iterator[Op]:
    for element in series:
        if isinstance(element, Parallel):
            for branch in element.branches:
                yield from ops(branch)
        else:
            yield element


def plan(model: Series, devices: int, m: int) -> Plan:
    """The graph of at most `devices` stages with the shortest (m + depth - 1)·slowest."""
    check_sizes("plan", devices=devices, m=m)
    unbeaten = undominated(
        (costs, parts) for n in range(1, devices + 1) for costs, parts in cuts(model, devices)[n]
    )
    (deep, slowest), parts = min(unbeaten, key=lambda found: (m + found[0][0] - 1) * found[0][1])
    stages: list[tuple[str, ...]] = []
    edges: list[tuple[int, int]] = []
    _connect(parts, (), stages, edges)
    return Plan((m + deep - 1) * slowest, deep, slowest, tuple(stages), tuple(edges))


def cuts(series: Series, devices: int) -> list[list]:
    """For each number of stages all unbeaten ((depth, slowest), parts); a part is a stage's names, or a list of each branch's parts."""
    if not series:
        raise ValueError(
            "a branch is empty; give every branch an operator (a skip connection needs no stage: leave it out)"
        )
    best = [[[((0, 0), ())]] + [[] for _ in range(devices)]]  # best[elements][stages]
    for end in range(1, len(series) + 1):
        best.append([[] for _ in range(devices + 1)])
        for start in range(end):
            run = list(ops(series[start:end]))
            whole = (1, sum(op.time for op in run))
            for n in range(1, devices + 1):
                best[end][n] += [
                    _behind(costs, whole, (*parts, tuple(op.name for op in run)))
                    for costs, parts in best[start][n - 1]
                ]
        if isinstance(series[end - 1], Parallel):
            for used, inside in _branches(series[end - 1], devices):
                for n in range(used, devices + 1):
                    best[end][n] += [
                        _behind(costs, more, (*parts, [*branches]))
                        for costs, parts in best[end - 1][n - used]
                        for more, branches in inside
                    ]
        best[end] = [undominated(found) for found in best[end]]
    return best[-1]


def _behind(front: tuple, behind: tuple, parts: tuple) -> tuple:
    """Depths add up in series, the slowest stage is the slower one's."""
    return (front[0] + behind[0], max(front[1], behind[1])), parts


def _branches(element: Parallel, devices: int) -> Iterator[tuple[int, list]]:
    """(stages in all, unbeaten plans) with every branch cut on its own."""
    most = devices - len(element.branches) + 1  # every branch needs one
    of_branch = [cuts(branch, max(most, 0)) for branch in element.branches]
    for counts in product(*(range(1, len(found)) for found in of_branch)):
        if sum(counts) <= devices:
            together = product(*(found[n] for found, n in zip(of_branch, counts)))
            yield (
                sum(counts),
                undominated(
                    (tuple(map(max, zip(*(costs for costs, _ in chosen)))), [parts for _, parts in chosen])
                    for chosen in together
                ),
            )


def _connect(parts: Sequence, before: tuple[int, ...], stages: list, edges: list) -> tuple[int, ...]:
    """Numbers the stages and ties them together; returns those at the end."""
    for part in parts:
        if isinstance(part, list):
            before = tuple(last for branch in part for last in _connect(branch, before, stages, edges))
        else:
            edges += [(i, len(stages)) for i in before]
            before = (len(stages),)
            stages.append(part)
    return before
