"""Pools of hybrid plans: a pool is chosen offline, and online its plans switch by moving experts alone.

    grid      dp replicas, in each ep places that share out the experts, in each tp ranks that cut matrices
    plan      a grid, and which place holds which experts: as many everywhere
    pool      plans of one grid. A rank keeps the dense layers as they are cut, and as many shards of experts
              as before: a switch moves placement and nothing else
    offline   of all grids that fit into memory the one whose pool does best on sampled loads
    online    the plan with the least time over the next steps, the way to it included

Rank ((d · ep) + e) · tp + t. Modelled is one layer's step, tokens evenly spread over dp · ep: products of the
busiest place; four all-to-alls, (ep-1)/ep of its rows; four sums over tp, (tp-1)/tp of them; the gradients of
its experts over dp, and of the dense layers over dp · ep. Nothing hides, and the work of the dense layers is
the same in all plans. A switch takes the busiest rank's new shards, weights and optimizer state, over its
link; replicas do the same side by side. systems/moe/balance.py moves experts for real.
Zhai et al. 2023 (SmartMoE), ATC. Differs: loads are given; a pool's placements are the greedy ones of
`expert_placement.pool`; pipelines are left out, for their stages switch alike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from minitrain.ranks.checks import require_nonempty, require_positive_ints
from minitrain.systems.plan import expert_placement
from minitrain.systems.plan.expert_placement import Costs, Holders, shared_loads

Grid = NamedTuple("Grid", [(axis, int) for axis in ("dp", "ep", "tp")])


class Layer(NamedTuple):
    """Elements: of one of the experts, and of all that is no expert."""

    experts: int
    expert_weights: int
    dense_weights: int


# ---- offline ---------------------------------------------------------------------------------------------


def grids(ranks: int, layer: Layer, bytes_per_element: int, memory_bytes: int) -> list[Grid]:
    """All whose parts are whole and fit; `bytes_per_element`: of weight, gradient and optimizer state."""
    require_positive_ints(1 << 12, ranks=ranks)
    found = []
    for ep, tp in product(range(1, ranks + 1), repeat=2):
        uneven = ranks % (ep * tp) or layer.experts % ep
        uneven = uneven or layer.expert_weights % tp or layer.dense_weights % tp
        here = layer.dense_weights // tp + layer.experts // ep * (layer.expert_weights // tp)
        if not uneven and here * bytes_per_element <= memory_bytes:
            found.append(Grid(ranks // (ep * tp), ep, tp))
    if not found:
        rule = f"no grid of {ranks} ranks fits into {memory_bytes:,} bytes each; use more or larger ranks"
        raise ValueError(f"{layer.experts} experts of {layer.expert_weights:,} elements: {rule}")
    return found


def pools(of: Sequence[Grid], samples: Sequence[Sequence[int]]) -> dict[Grid, list[Holders]]:
    """The plans of each grid: its owners' and those that suit a sample."""
    require_nonempty(samples=samples)
    return {grid: expert_placement.pool(samples, grid.ep) for grid in of}


def step_s(grid: Grid, holders: Holders, loads: Sequence[int], layer: Layer, costs: Costs) -> float:
    """Seconds; `loads` are the rows of each expert in the whole batch."""
    dp, ep, tp = grid
    rows = float(max(shared_loads(loads, holders, ep))) / dp  # of the busiest place
    moved = rows * ((ep - 1) / ep / tp + (tp - 1) / tp)
    carried = layer.experts / ep * (dp - 1) / dp
    carried += layer.dense_weights / layer.expert_weights * (dp * ep - 1) / (dp * ep)
    return 3 * rows * costs.compute / tp + 4 * moved * costs.move + 2 * carried * costs.carry / tp


def pool_s(grid: Grid, pool: Sequence[Holders], samples, layer: Layer, costs: Costs) -> float:
    """Seconds for a step with each sample, every time with the pool's best plan."""
    return sum(min(step_s(grid, plan, loads, layer, costs) for plan in pool) for loads in samples)


def best_grid(pools: Mapping[Grid, Sequence[Holders]], samples, layer: Layer, costs: Costs) -> Grid:
    """Of equal ones the first."""
    return min(pools, key=lambda grid: pool_s(grid, pools[grid], samples, layer, costs))


# ---- online ----------------------------------------------------------------------------------------------


def switch_bytes(grid: Grid, before: Holders, after: Holders, layer: Layer, bytes_per_element: int) -> int:
    """On all links together: whole shards, in each replica."""
    require_positive_ints(bytes_per_element=bytes_per_element)
    changed = sum(old != new for old, new in zip(before, after, strict=True))
    return grid.dp * changed * layer.expert_weights * bytes_per_element


def switch_s(grid: Grid, before: Holders, after: Holders, costs: Costs, states: int = 7) -> float:
    """Of the rank that gets most; an expert moves as `states` times its weights (see expert_placement)."""
    arriving = Counter(new for old, new in zip(before, after, strict=True) if old != new)
    return max(arriving.values(), default=0) * states * costs.carry / grid.tp


def chosen(grid, pool, current: Holders, loads, layer: Layer, costs: Costs, steps, states=7) -> Holders:
    """The plan with the least time over so many steps; of equal ones the present."""

    def total(plan: Holders) -> float:
        on_the_way = switch_s(grid, current, plan, costs, states)
        return steps * step_s(grid, plan, loads, layer, costs) + on_the_way

    return min([current, *pool], key=total)
