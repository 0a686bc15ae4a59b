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
Rate = Callable[[Layout], float]  # useful work per second
Change = Callable[[Layout, Layout], float]  # seconds from one to another


def work(layouts: Sequence[Layout], rate: Rate, change_s: Change) -> float:
    """What is trained in a layout for each minute, less change_s(old, new) of one that begins with another
    layout than the last: all of it at most."""
    changes = [0, *(change_s(old, new) if old != new else 0 for old, new in zip(layouts, layouts[1:]))]
    return sum(rate(new) * max(0, MINUTE_S - lost) for new, lost in zip(layouts, changes) if all(new))


def reactive(nodes: Sequence[int], layouts: Collection[Layout], rate: Rate) -> list[Layout]:
    """In each minute the fastest layout that fits: pipelines x stages <= nodes."""
    return [max(fits, key=lambda one: rate(one) if all(one) else 0) for fits in _fitting(nodes, layouts)]


def proactive(
    nodes: Sequence[int], layouts: Collection[Layout], rate: Rate, change_s: Change
) -> list[Layout]:
    """Parcae's plan: the layouts of most `work` over a forecast of `nodes`, by dynamic programming over the
    one in use. It may keep a slower one that still fits after the next preemption, or sit out a short rise.
    Differs: one forecast, taken as certain; theirs is made anew in every interval, and weighs by liveput."""
    best: dict = {None: (0, [])}
    for fits in _fitting(nodes, layouts):
        gain = lambda path, new: work([*path[-1:], new], rate, change_s) - work(path[-1:], rate, change_s)
        before = best.values()
        best = {new: max((done + gain(path, new), [*path, new]) for done, path in before) for new in fits}
    return max(best.values())[1]


def _fitting(nodes: Sequence[int], layouts: Collection[Layout]) -> list[list[Layout]]:
    require_ints(0, MOST_NODES, nodes=tuple(nodes), layouts=tuple(map(tuple, layouts)))
    return [[(0, 0), *(one for one in layouts if one[0] * one[1] <= count)] for count in nodes]
