"""Planners of expert placement against all placements there are, on small cases."""

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, product

import pytest

from minitrain.plan.simulate.machines import machine
from minitrain.systems.plan import expert_placement as plan
from minitrain.systems.plan import expert_pools
from minitrain.systems.plan.expert_placement import Costs, Expand, Migrate, Shrink
from tests.systems.plan import test_expert_pools


def zipf(experts: int, exponent: float, seed: int, total: int = 100_000) -> list[int]:
    heat = [total / (k + 1) ** exponent for k in range(experts)]
    random.Random(seed).shuffle(heat)
    return [int(load) for load in heat]


def counts_of(ranks: int, experts: int, seed: int, total: int = 4000) -> list[list[int]]:
    draw, heat = random.Random(seed), zipf(experts, 1.2, seed, total)
    return [[int(load * draw.uniform(0.3, 1.7)) for load in heat] for _ in range(ranks)]


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def test_costs_are_those_of_the_machine():
    """An H800: 989.5 TFLOP/s, 50 GB/s of network a device. A gated expert has a matrix more."""
    compute, move, carry = plan.costs_of(machine("h800"), 4096, 14336)
    assert compute == pytest.approx(4 * 4096 * 14336 / 989.5e12)
    assert move == pytest.approx(2 * 4096 / 50e9) and carry == pytest.approx(4 * 4096 * 14336 / 50e9)
    half = replace(machine("h800"), compute_efficiency=0.5)
    assert plan.costs_of(half, 4096, 14336) == pytest.approx((2 * compute, move, carry))
    gated = plan.costs_of(machine("h800"), 4096, 14336, matrices=3)
    assert gated == pytest.approx((1.5 * compute, move, 1.5 * carry))


def test_seconds_of_a_layer_by_hand():
    """Two ranks, two experts. Alone: 12 rows on rank 0, of which 5 arrive; a copy brings rank 1 its own 5."""
    counts, costs = [[7, 1], [5, 3]], Costs(compute=10.0, move=1.0, carry=4.0)
    assert plan.seconds(counts, plan.owners(2, 2), costs) == 3 * 12 * 10 + 4 * 5 * 1
    shadow = plan.everywhere([0], 2, 2)
    assert shadow == ((0, 1), (1,)) and plan.loads_of(counts, shadow) == ([7, 9], [1, 0], [0, 1], [1, 1])
    assert plan.seconds(counts, shadow, costs) == 3 * 9 * 10 + 4 * 1 * 1 + 2 * 1 * 4
    # an owner gives its expert once; two who get it give half of it to each other
    busy = plan.everywhere([0, 1], 3, 3)
    assert plan.loads_of([[0, 0, 0]] * 3, busy).carried == [1.5, 1.5, 2]
    one_sends = [[0, 4, 5], [0, 0, 0], [0, 0, 0]]
    # its link is the busiest
    assert plan.seconds(one_sends, plan.owners(3, 3), costs) == 3 * 5 * 10 + 4 * 9 * 1


@pytest.mark.parametrize("ranks, experts", [(2, 8), (4, 8), (3, 9)])
def test_fastermoe_shadows_equal_brute_force(ranks, experts):
    """Over all sets of experts: elements through the owners' links, forward and backward."""
    d_model, tried = 8, set()
    for seed, d_ff, matrices in product(range(12), (20, 120, 700), (2, 3)):
        counts = counts_of(ranks, experts, seed, 300)

        def elements(chosen):
            total = 0
            for e in range(experts):
                remote = sum(counts[r][e] for r in range(ranks) if r != e // (experts // ranks))
                each_way = matrices * d_model * d_ff if e in chosen else 2 * remote * d_model
                total += 2 * each_way
            return total

        best = min(subsets(range(experts)), key=lambda chosen: (elements(chosen), len(chosen), chosen))
        assert plan.shadowed(counts, d_model, d_ff, matrices) == best
        tried.add(len(best))
    assert len(tried) > 4, "few and many shadows"


def test_a_tie_stays_home():
    """T remote rows of an expert of 2·D·F weights: shadowed from T = F + 1 on."""
    assert plan.shadowed([[0, 0], [6, 0]], d_model=4, d_ff=6) == ()
    assert plan.shadowed([[0, 0], [7, 0]], d_model=4, d_ff=6) == (0,)
    assert plan.shadowed([[9, 0], [6, 0]], d_model=4, d_ff=6) == (), "rows of the owner itself do not travel"


# ---- Prophet ---------------------------------------------------------------------------------------------

CASES = [(2, 4, 12), (3, 3, 24), (3, 6, 10), (4, 4, 6)]  # ranks, experts, draws


@cache
def searches():
    found = []
    for ranks, experts, draws in CASES:
        for seed in range(draws):
            draw = random.Random(seed)
            costs = Costs(1.0, draw.choice([0.5, 1, 2, 4]), draw.choice([100, 500, 2000]))
            costs = costs if seed % 4 else plan.costs_of(machine("h800"), 4096, 14336)
            counts = counts_of(ranks, experts, seed, 4000 if seed % 4 else 16_000)
            sets = [
                [(own, *others) for others in subsets([r for r in range(ranks) if r != own])]
                for (own,) in plan.owners(experts, ranks)
            ]
            best = min(plan.seconds(counts, holders, costs) for holders in product(*sets))
            found.append((counts, costs, plan.prophet(counts, costs), best))
    return found


def test_prophet():
    """The modelled time falls along the search and ends at most 5 % above the best of all placements."""
    test_seconds_of_a_layer_by_hand()
    test_prophet_hides_transfers_behind_the_layer_before()
    gains = []
    for counts, costs, trace, best in searches():
        times = [time for time, _ in trace]
        assert all(later < earlier for earlier, later in zip(times, times[1:]))
        assert [plan.seconds(counts, holders, costs) for _, holders in trace] == times
        assert trace[0][1] == plan.owners(len(counts[0]), len(counts))
        heat = [sum(row[e] for row in counts) for e in range(len(counts[0]))]
        order = sorted(range(len(heat)), key=lambda e: (-heat[e], e))
        starts = [plan.everywhere(order[:k], len(heat), len(counts)) for k in range(len(heat) + 1)]
        start = min((plan.seconds(counts, holders, costs), holders) for holders in starts)
        assert start[0] == times[0] or trace[1] == start, "copies everywhere of the heaviest"
        assert [holders[0] for holders in trace[-1][1]] == [own for (own,) in trace[0][1]]
        assert best <= times[-1] <= 1.05 * best
        gains.append(times[0] / times[-1])
    exact = sum(trace[-1][0] <= best * (1 + 1e-12) for _, _, trace, best in searches())
    assert max(gains) > 3 and exact >= 0.8 * len(gains)


def by_events(compute, copies):
    """The same rules, as a list of things that wait for each other."""
    layers, done = range(len(compute)), {}
    forward_start = {0: copies[0]}
    arrived = {0: copies[0]}
    for l in layers:
        if l:
            arrived[l] = max(arrived[l - 1], forward_start[l - 1]) + copies[l]
            forward_start[l] = max(forward_start[l - 1] + compute[l - 1], arrived[l])
    now = forward_start[layers[-1]] + compute[-1]
    free = now
    for l in reversed(layers):
        now += 2 * compute[l]
        done[l] = free = max(free, now) + copies[l]
    return max(now, *done.values())


def test_prophet_hides_transfers_behind_the_layer_before():
    draw = random.Random(0)
    for _ in range(300):
        layers = draw.randint(1, 6)
        compute = [draw.randint(1, 9) for _ in range(layers)]
        copies = [draw.choice([0, 0, 1, 3, 8, 20]) for _ in range(layers)]
        hidden, plain = plan.layerwise(compute, copies), plan.layerwise(compute, copies, hidden=False)
        assert plain == 3 * sum(compute) + 2 * sum(copies) and hidden == by_events(compute, copies)
        assert max(3 * sum(compute), 2 * sum(copies)) <= hidden <= plain
        if all(copy <= work for copy, work in zip(copies[1:], compute)):
            exposed = 2 * copies[0]  # of the first layer, there and back: nothing is before it
            assert hidden == 3 * sum(compute) + exposed, "all but the first layer's is hidden"
    assert plan.layerwise([4, 4, 4], [0, 3, 3]) == 36 and plan.layerwise([4, 4, 4], [0, 6, 0]) == 38


# ---- FlexMoE ---------------------------------------------------------------------------------------------

FLEX = [(8, 4, 4), (16, 8, 4), (64, 8, 12), (16, 4, 6)]  # experts, ranks, slots


@pytest.mark.parametrize("experts, ranks, slots", FLEX)
def test_flexmoe_levels_zipf_loads(experts, ranks, slots):
    """Zipf loads end below 1.1, within two steps an expert, and no rank ever holds more than its slots."""
    for seed, exponent in enumerate([0.8, 1.0, 1.2]):
        loads, holders = zipf(experts, exponent, seed), plan.owners(experts, ranks)
        before = plan.balance_ratio(plan.shared_loads(loads, holders, ranks))
        steps = plan.flexmoe(loads, holders, ranks, slots)
        assert 0 < len(steps) <= 2 * experts and before > 1.3
        for step in steps:
            holders = plan.applied(holders, [step])
        shared = plan.shared_loads(loads, holders, ranks)
        assert plan.balance_ratio(shared) <= 1.1 and sum(shared) == sum(loads)
        assert max(sum(r in there for there in holders) for r in range(ranks)) <= slots
        assert plan.flexmoe(loads, holders, ranks, slots) == [], "balanced: nothing is done"


def test_flexmoe_takes_replicas_back_when_the_load_moves():
    """The hot expert changes. With two slots a rank the old one must give up replicas for the new one."""
    first, then = [90, 10, 10, 10], [10, 10, 10, 90]
    holders = plan.applied(plan.owners(4, 4), plan.flexmoe(first, plan.owners(4, 4), 4, slots=2))
    steps = plan.flexmoe(then, holders, 4, slots=2)
    after = plan.applied(holders, steps)
    assert len(holders[0]) == 4 and len(after[3]) == 4 and any(isinstance(s, Shrink) for s in steps)
    assert plan.balance_ratio(plan.shared_loads(then, after, 4)) <= 1.1


def test_primitives():
    holders = ((0,), (1, 2))
    assert plan.applied(holders, [Expand(0, 2), Shrink(1, 1), Migrate(0, 0, 1)]) == ((1, 2), (2,))
    for step in (Expand(1, 2), Shrink(0, 0), Shrink(1, 0), Migrate(1, 1, 2), Migrate(0, 1, 2)):
        with pytest.raises(ValueError, match="once"):
            plan.applied(holders, [step])
    assert plan.shared_loads([6, 5], holders, 3) == [6, Fraction(5, 2), Fraction(5, 2)]


def placements(experts, ranks):
    """All with equal numbers of experts, up to the names of ranks."""
    if not experts:
        yield ()
        return
    first, *rest = experts
    for others in combinations(rest, len(experts) // ranks - 1):
        left = [e for e in rest if e not in others]
        for more in placements(left, ranks - 1):
            yield ((first, *others), *more)


ALL_PAIRS = list(placements(range(8), 4))


def largest(loads, holders, ranks):
    return max(plan.shared_loads(loads, holders, ranks))


def test_smartmoe():
    """Of 8 experts on 4 ranks the greedy placement is a best one, no swap needed: heaviest with lightest, and so
    on inwards. It is never worse than round robin. Of a pool of them the one that pays is taken."""
    test_smartmoe_switches_when_that_pays()
    test_expert_pools.test_smartmoe_chooses_the_pool_offline()
    better = 0
    for seed in range(60):
        draw = random.Random(seed)
        loads = zipf(8, draw.uniform(0, 1.5), seed) if seed % 2 else draw.choices(range(99), k=8)
        holders = expert_pools.greedy(loads, 4)
        assert sorted(r for (r,) in holders) == [0, 0, 1, 1, 2, 2, 3, 3]
        found, turns = largest(loads, holders, 4), largest(loads, expert_pools.round_robin(8, 4), 4)
        assert found == min(max(sum(loads[e] for e in part) for part in parts) for parts in ALL_PAIRS)
        better += found < turns
    assert better > 40 and expert_pools.round_robin(5, 2) == ((0,), (1,), (0,), (1,), (0,))
    assert len(ALL_PAIRS) == 105


@pytest.mark.parametrize("experts, ranks", [(9, 3), (12, 4)])
def test_greedy_of_three_a_rank_is_within_a_tenth_of_the_best(experts, ranks):
    every, gaps = list(placements(range(experts), ranks)), []
    for seed in range(12):
        draw = random.Random(seed)
        loads = [draw.randint(1, 99) for _ in range(experts)]
        best = min(max(sum(loads[e] for e in part) for part in parts) for parts in every)
        gaps.append(largest(loads, expert_pools.greedy(loads, ranks), ranks) / best)
    assert 1 < max(gaps) < 1.1


def test_smartmoe_switches_when_that_pays():
    """The pool is made offline; online a placement is taken if its gain over the steps exceeds the way to it."""
    samples = [zipf(8, 0.5, seed) for seed in range(5)]
    pool, costs = expert_pools.pool([*samples, samples[0]], 4), Costs(1e-6, 0.0, 1.0)
    assert pool[0] == plan.owners(8, 4) and len(pool) == len({*pool}) == 6
    loads, current = samples[3], pool[3]

    def total(holders, steps):
        moved = sum(a != b for a, b in zip(current, holders))
        return steps * 3 * float(largest(loads, holders, 4)) * 1e-6 + 7 * moved

    taken = {n: expert_pools.switched(pool, current, loads, costs, n) for n in (0, 1, 300, 600, 10_000)}
    for steps, holders in taken.items():
        assert total(holders, steps) == min(total(other, steps) for other in pool)
    assert taken[0] == taken[1] == current and len({*taken.values()}) > 1
    stranger = expert_pools.round_robin(8, 4)
    assert expert_pools.switched(pool, stranger, loads, costs, steps=0) == stranger, "who stays pays nothing"
    assert largest(loads, taken[10_000], 4) == largest(loads, expert_pools.greedy(loads, 4), 4)
