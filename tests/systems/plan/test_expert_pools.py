"""Pools of hybrid plans against all plans there are, and what a switch moves against the elements of each rank."""

import random
from collections import Counter
from itertools import permutations, product

import pytest

from minitrain.systems.plan import expert_pools
from minitrain.systems.plan.expert_placement import Costs, owners
from minitrain.systems.plan.expert_pools import Grid, greedy, round_robin
from minitrain.systems.plan.expert_pools import MoELayer as Layer

LAYER = Layer(experts=8, expert_weights=24, dense_weights=48)
GIB = 2**30


def drawn_loads(number, seed=0, experts=8):
    draw = random.Random(seed)
    return [[draw.randint(1, 40) * draw.choice([1, 1, 5]) for _ in range(experts)] for _ in range(number)]


def drawn_costs(seed):
    draw = random.Random(seed)
    return Costs(1.0, draw.choice([0.1, 1, 4]), draw.choice([1, 30, 300]))


def shards(grid, holders, layer):
    """Of each rank {expert's number or "dense": (first element, last + 1)}."""
    found = []
    for _, e, t in product(*map(range, grid)):
        sizes = {x: layer.expert_weights for x, (place,) in enumerate(holders) if place == e}
        sizes |= {"dense": layer.dense_weights}
        found.append({name: (t * n // grid.tp, (t + 1) * n // grid.tp) for name, n in sizes.items()})
    return found


def received(before, after):
    """Elements that each rank did not hold before, by name."""
    new = [Counter() for _ in after]
    for found, old, own in zip(new, before, after, strict=True):
        for name, (start, stop) in own.items():
            first, last = old.get(name, (0, 0))
            found[name] = stop - start - max(0, min(stop, last) - max(start, first))
    return [+found for found in new]


def test_a_pool_is_switched_by_placement_alone():
    """Inside a grid: dense layers stay, a rank gets as many elements as it gives up, all of whole shards of experts,
    and the bytes are those counted element by element. Between grids something is cut anew, or sizes change.
    """
    every = expert_pools.grids(8, LAYER, 1, GIB)
    assert len(every) == 10 and {grid.dp * grid.ep * grid.tp for grid in every} == {8}
    assert {grid.ep for grid in expert_pools.grids(6, LAYER, 1, GIB)} == {1, 2}, "8 on 3 places are uneven"
    held = {grid: shards(grid, owners(8, grid.ep), LAYER) for grid in every}
    moved = 0
    for grid, other in product(every, repeat=2):
        if grid != other:
            both = held[grid][0], held[other][0]
            sizes = [sorted(stop - start for start, stop in own.values()) for own in both]
            assert sizes[0] != sizes[1], "ranks of another grid have other shapes"
            continue
        for holders in (round_robin(8, grid.ep), *(greedy(loads, grid.ep) for loads in drawn_loads(4))):
            after = shards(grid, holders, LAYER)
            new, old = received(held[grid], after), received(after, held[grid])
            shard = LAYER.expert_weights // grid.tp
            assert [got.total() for got in new] == [given.total() for given in old]
            assert all(name != "dense" and size == shard for got in new for name, size in got.items())
            found = expert_pools.switch_bytes(grid, owners(8, grid.ep), holders, LAYER, 14)
            assert found == 14 * sum(got.total() for got in new)
            moved += found > 0
    assert moved > 20


def by_hand(grid, holders, loads, costs):
    """Of every rank on its own: products, rows out of its place, sums over tp, gradients; the slowest of each."""
    dp, ep, tp = grid
    place = [sum(load for load, (own,) in zip(loads, holders) if own == e) / dp for e in range(ep)]
    products = max(3 * rows / tp * costs.compute for rows in place)
    crossing = max(4 * (rows - rows / ep) / tp * costs.move for rows in place)
    over_tp = max(4 * (rows - rows / tp) * costs.move for rows in place)
    experts = 2 * (1 - 1 / dp) * (8 // ep) / tp * costs.carry
    dense = 2 * (1 - 1 / (dp * ep)) * 48 / 24 / tp * costs.carry
    return products + crossing + over_tp + experts + dense


def test_smartmoe_chooses_the_pool_offline():
    """The least time over the samples, each with its best plan, of all grids that fit."""
    taken = set()
    for seed in range(24):
        samples, costs = drawn_loads(3, seed), drawn_costs(seed)
        most = random.Random(seed).choice([60, 120, 240])  # elements of a rank
        fit = [
            Grid(8 // ep // tp, ep, tp)
            for ep, tp in product((1, 2, 4, 8), repeat=2)
            if ep * tp <= 8 and 48 // tp + 8 // ep * 24 // tp <= most
        ]
        found = expert_pools.grids(8, LAYER, 2, 2 * most)
        assert found == fit
        pools = {one: expert_pools.pool(samples, one.ep) for one in found}
        best = lambda grid, loads: min(by_hand(grid, holders, loads, costs) for holders in pools[grid])
        times = {grid: sum(best(grid, loads) for loads in samples) for grid in fit}
        best = expert_pools.best_grid(pools, samples, LAYER, costs)
        assert times[best] == pytest.approx(min(times.values()), rel=1e-12)
        taken.add(best)
    assert len(taken) > 3 and len({grid.tp for grid in taken}) > 1, "links, weights and memory decide"


def test_of_equal_grids_the_first_is_taken():
    """Even loads, and copies that cost nothing: all grids take the same time."""
    loads, free = [1] * 8, Costs(1.0, 0.0, 0.0)
    for first, *others in permutations(Grid(8 // ep, ep, 1) for ep in (1, 2, 4)):
        pools = {one: expert_pools.pool([loads], one.ep) for one in (first, *others)}
        assert len({expert_pools.step_s(one, pools[one][0], loads, LAYER, free) for one in pools}) == 1
        assert expert_pools.best_grid(pools, [loads], LAYER, free) == first
