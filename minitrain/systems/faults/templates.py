"""Before nodes leave: pipelines for every number of them (Oobleck), the layout to be in (Parcae). No torch.

templates(9, 2, 1)              range(2, 8): pipelines of 2 to 7 nodes are planned before the job begins
instantiate(7, range(2, 8), 2)  (3, 4); with one node less (3, 3)
liveput(4, 3, 3)                123/55 of four pipelines survive three preemptions, 84/55 if none migrates
"""

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from math import comb

from minitrain.ranks.checks import require_ints, require_positive_ints

MOST_NODES, MINUTE_S = 1 << 12, 60


def templates(nodes: int, least: int, failures: int) -> range:
    """Oobleck's sizes of pipelines, in nodes: from `least`, which the model needs, to what is left beside
    `failures` pipelines of that size. Any number from (failures + 1)·least to `nodes` is a sum of more than
    `failures` of them: a copy of every stage survives that many losses.
    Raises ValueError below (failures + 1)·least nodes. Jang et al. 2023 (Oobleck), arXiv:2309.08125."""
    require_ints(1, MOST_NODES, nodes=nodes, least=least)
    require_ints(0, MOST_NODES, failures=failures)
    if nodes < (enough := (failures + 1) * least):
        raise ValueError(f"nodes={nodes}; {failures} losses need {failures + 1} x {least} = {enough}")
    return range(least, nodes - failures * least + 1)


def instantiate(nodes: int, sizes: Collection[int], pipelines: int) -> tuple[int, ...] | None:
    """`pipelines` or more that use every node, in rising order: the fewest, and of these the most equal ones
    (least sum of squares), by dynamic programming over (pipelines, nodes). None: no sum of `sizes` does.
    Differs: Oobleck takes the sum of highest estimated throughput."""
    require_ints(0, MOST_NODES, nodes=nodes)
    require_positive_ints(MOST_NODES, sizes=tuple(sizes), pipelines=pipelines)
    best = {0: (0, ())}  # of each number of nodes: (sum of squares, sizes), for 0, 1, .. pipelines
    for count in range(1, nodes // min(sizes) + 1):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (squares, before) in best.items():
            for size in (size for size in sizes if used + size <= nodes):
                found = squares + size * size, tuple(sorted((*before, size)))
                longer[used + size] = min(longer.get(used + size, found), found)
        best = longer
        if count >= pipelines and nodes in best:
            return best[nodes][1]
    return None


def liveput(pipelines: int, stages: int, preempted: int, migrate: bool = True) -> Fraction:
    """Parcae's metric: how many pipelines are expected to go on when `preempted` of all workers leave, any
    set as likely. Intra-stage migration: a worker may take over the same stage of another pipeline, so as
    many go on as the scarcest stage has workers; without it, those that lost nobody.
    Raises ValueError if more leave than there are. Duan et al. 2024 (Parcae), arXiv:2403.14097. Differs:
    pipelines, not their throughput; exact, from how many ways there are to lose i of a stage; no spares."""
    require_ints(1, MOST_NODES, pipelines=pipelines, stages=stages)
    require_ints(0, pipelines * stages, preempted=preempted)
    total = comb(pipelines * stages, preempted)
    if not migrate:
        return Fraction(pipelines * comb((pipelines - 1) * stages, preempted), total)

    def ways(left: int) -> int:  # in which every stage keeps so many
        lost, few = [1] + [0] * preempted, range(min(pipelines - left, preempted) + 1)
        for _ in range(stages):
            lost = [sum(lost[k - i] * comb(pipelines, i) for i in few if i <= k) for k in range(len(lost))]
        return lost[preempted]

    return Fraction(sum(map(ways, range(1, pipelines + 1))), total)


Layout = tuple[int, int]  # pipelines, stages; (0, 0) waits


def proactive(nodes: Sequence[int], layouts: Collection[Layout], rate: Callable, change_s: Callable) -> list:
    """Parcae's plan: for each minute of a forecast of `nodes` a layout of so many or fewer, by which most is
    trained: rate(new) per second, but for change_s(old, new) after a change, the minute at most. Dynamic
    programming over the one in use. It may keep a slower one that still fits after the next preemption, or
    sit out a short rise. Differs: one forecast, taken as certain; theirs is made anew in every interval, and
    weighs by liveput."""
    require_ints(0, MOST_NODES, nodes=tuple(nodes), layouts=tuple(map(tuple, layouts)))

    def gain(old: Layout | None, new: Layout) -> float:
        lost_s = change_s(old, new) if old not in (None, new) else 0
        return rate(new) * max(0, MINUTE_S - lost_s) if all(new) else 0

    best: dict = {None: (0, [])}  # by the last layout: what was trained, and all so far
    for count in nodes:
        fits, paths = [(0, 0), *(one for one in layouts if one[0] * one[1] <= count)], best.items()
        best = {new: max((done + gain(old, new), [*way, new]) for old, (done, way) in paths) for new in fits}
    return max(best.values())[1]
