"""Placements of experts chosen before a batch's loads are known: from samples. No torch.

    pool, switched           SmartMoE: offline, a placement for each sampled load; online, the cheapest
    grids, step_s, best_grid     and the grid of data, expert and tensor parallelism around it
    profiled, expected, placed   Lina, in inference: paths of sample tokens tell the next layer's loads; what
                                 is popular gets replicas

Holders, costs and loads are those of expert_placement.py. Zhai et al. 2023 (SmartMoE), ATC; Li et al. 2023
(Lina), ATC, arXiv:2210.17223. Of equal choices the first wins. Differs: SmartMoE without pipelines; Lina uses
the whole distribution of the next expert, and tokens visit one expert a layer.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import chain, product
from typing import NamedTuple

from minitrain.ranks.checks import MOST, require_ints, require_nonempty, require_positive_ints
from minitrain.systems.plan.expert_placement import Costs, Holders, owners, shared_loads


# ---- SmartMoE: no copies; a pool of placements made offline, switched online; grids of dp, ep, tp
def greedy(loads: Sequence[int], ranks: int) -> Holders:
    """The heaviest expert first, each to the least loaded rank that has room: all hold as many."""
    return packed(loads, [1] * len(loads), ranks, len(owners(len(loads), ranks)) // ranks)


def packed(loads: Sequence, copies: Sequence[int], ranks: int, slots: int) -> Holders | None:
    """The heaviest replicas first, each to the least loaded rank with room and none of its expert, if any."""
    total, held = [Fraction(0)] * ranks, [[] for _ in range(ranks)]
    share = [Fraction(load) / number for load, number in zip(loads, copies)]
    for e in sorted(range(len(loads)), key=lambda e: (-share[e], e)):
        for _ in range(copies[e]):
            open_ranks = [r for r in range(ranks) if len(held[r]) < slots and e not in held[r]]
            if not open_ranks:
                return None
            to = min(open_ranks, key=lambda r: (total[r], r))
            total[to] += share[e]
            held[to].append(e)
    return tuple(tuple(r for r in range(ranks) if e in held[r]) for e in range(len(loads)))


def round_robin(experts: int, ranks: int) -> Holders:
    """Expert e on rank e mod ranks."""
    require_ints(1, MOST, experts=experts, ranks=ranks)
    return tuple((e % ranks,) for e in range(experts))


def pool(samples: Sequence[Sequence[int]], ranks: int) -> list[Holders]:
    """Offline: the greedy placements of sampled loads, each once, behind that of the owners."""
    require_nonempty(samples=samples)
    return list(dict.fromkeys([owners(len(samples[0]), ranks), *(greedy(loads, ranks) for loads in samples)]))


def switched(pool, current: Holders, loads, costs: Costs, steps: int, states: int = 7) -> Holders:
    """Online: the placement with the least time over the next `steps`, the way to it included: a step takes
    3 · the largest load · compute, a moved expert `states` times its weights (6 for moments and a master)."""
    ranks = 1 + max(chain(*current))

    def total(holders: Holders) -> float:
        moved = sum(old != new for old, new in zip(current, holders))
        load = max(shared_loads(loads, holders, ranks))
        return steps * 3 * float(load) * costs.compute + states * moved * costs.carry

    return min((current, *pool), key=total)


Grid = NamedTuple("Grid", [(axis, int) for axis in ("dp", "ep", "tp")])


class MoELayer(NamedTuple):
    experts: int
    expert_weights: int  # elements of one of them
    dense_weights: int  # of all that is no expert


def grids(ranks: int, layer: MoELayer, bytes_per_element: int, memory_bytes: int) -> list[Grid]:
    """All whose parts are whole and fit; `bytes_per_element`: of weight, gradient and optimizer state."""
    require_positive_ints(1 << 12, ranks=ranks)
    experts, expert, dense = layer
    found = []
    for ep, tp in product(range(1, ranks + 1), repeat=2):
        uneven = ranks % (ep * tp) or experts % ep or expert % tp or dense % tp
        here = dense // tp + experts // ep * (expert // tp)
        if not uneven and here * bytes_per_element <= memory_bytes:
            found.append(Grid(ranks // (ep * tp), ep, tp))
    if not found:
        raise ValueError(f"no grid of {ranks} ranks fits {memory_bytes:,} bytes each; use more ranks")
    return found


def step_s(grid: Grid, holders: Holders, loads: Sequence[int], layer: MoELayer, costs: Costs) -> float:
    """Seconds; `loads` are the rows of each expert in the whole batch."""
    dp, ep, tp = grid
    rows = float(max(shared_loads(loads, holders, ep))) / dp  # of the busiest place
    moved, carried = rows * ((ep - 1) / ep / tp + (tp - 1) / tp), layer.experts / ep * (dp - 1) / dp
    carried += layer.dense_weights / layer.expert_weights * (dp * ep - 1) / (dp * ep)
    return 3 * rows * costs.compute / tp + 4 * moved * costs.move + 2 * carried * costs.carry / tp


def best_grid(pools: Mapping[Grid, Sequence[Holders]], samples, layer: MoELayer, costs: Costs) -> Grid:
    """Of least time for a step with each sample, every time with the pool's best plan."""
    best_s = lambda grid, loads: min(step_s(grid, plan, loads, layer, costs) for plan in pools[grid])
    return min(pools, key=lambda grid: sum(best_s(grid, loads) for loads in samples))


def switch_bytes(grid: Grid, before: Holders, after: Holders, layer: MoELayer, bytes_per_element: int) -> int:
    """On all links together: whole shards, in each replica."""
    require_positive_ints(bytes_per_element=bytes_per_element)
    changed = sum(old != new for old, new in zip(before, after, strict=True))
    return grid.dp * changed * layer.expert_weights * bytes_per_element


# ---- Lina, in inference: expected rows from paths of sample tokens, replicas for the popular
Path = tuple[int, ...]
Profile = Mapping[tuple[int, Path], Counter]  # (layer, experts in the layers just before it) -> next experts


def profiled(paths: Sequence[Path], length: int) -> Profile:
    """Counts for all ends of a path, of 0 (whatever came before) to `length` layers."""
    require_nonempty(paths=paths)
    require_ints(length=length)
    profile: dict = defaultdict(Counter)
    for path in paths:
        for layer, expert in enumerate(path):
            for start in range(max(0, layer - length), layer + 1):
                profile[layer, path[start:layer]][expert] += 1
    return dict(profile)


def expected(profile: Profile, layer: int, behind: Sequence[Path], experts: int) -> list[Fraction]:
    """Rows of each expert of this layer, of tokens whose experts so far are `behind`, one path a token."""
    require_positive_ints(experts=experts)
    rows = [Fraction(0)] * experts
    for path, tokens in Counter(map(tuple, behind)).items():
        while (layer, path) not in profile:
            if not path:
                raise ValueError(f"layer {layer}: no sample path is that long; profile paths of all layers")
            path = path[1:]
        seen = profile[layer, path]
        for expert, times in seen.items():
            rows[expert] += Fraction(tokens * times, seen.total())
    return rows


def placed(loads: Sequence, ranks: int, slots: int) -> Holders:
    """Holders of each expert, at most `slots` experts a rank: of all numbers of replicas the best. The next
    replica goes to the expert whose replicas have the most rows; all are `packed` anew."""
    require_positive_ints(ranks=ranks, slots=slots)
    experts = len(loads)
    if not 0 < experts <= ranks * slots:
        raise ValueError(f"{experts} experts on {ranks} ranks with {slots} slots; each expert needs a slot")
    copies, found = [1] * experts, []
    while True:
        holders = packed(loads, copies, ranks, slots)
        if holders is not None:
            found.append((max(shared_loads(loads, holders, ranks)), sum(copies), holders))
        growing = [e for e in range(experts) if copies[e] < ranks]
        if sum(copies) == ranks * slots or not growing:
            return min(found)[-1]
        copies[max(growing, key=lambda e: (Fraction(loads[e]) / copies[e], -e))] += 1
