"""Placement by popularity against all placements there are, and guesses from paths against what tokens do."""

import random
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, product

import pytest

from minitrain.systems.plan import expert_pools
from minitrain.systems.plan.expert_placement import owners, shared_loads

EXPERTS, RANKS, SLOTS, LAYERS = 8, 4, 4, 4


def busiest(loads, holders, ranks=RANKS):
    return max(shared_loads(loads, holders, ranks))


def every_placement(experts, ranks, slots):
    sets = [*chain.from_iterable(combinations(range(ranks), size) for size in range(1, ranks + 1))]
    for holders in product(sets, repeat=experts):
        if max(Counter(chain(*holders)).values()) <= slots:
            yield holders


@pytest.mark.parametrize("experts, ranks, slots", [(4, 3, 2), (4, 3, 3), (6, 2, 4), (3, 4, 2)])
def test_at_most_a_twentieth_above_the_best_of_all_placements(experts, ranks, slots):
    every, gaps = [*every_placement(experts, ranks, slots)], []
    for seed in range(8):
        draw = random.Random(seed)
        loads = [draw.randint(0, 60) * draw.choice([1, 1, 6]) for _ in range(experts)]
        best = min(max(_loads(loads, holders, ranks)) for holders in every)
        holders = expert_pools.placed(loads, ranks, slots)
        assert holders in every
        gaps.append(float(busiest(loads, holders, ranks)) / best)
    assert 1 < max(gaps) <= 1.05 and min(gaps) > 1 - 1e-12


def _loads(loads, holders, ranks):
    found = [0.0] * ranks
    for load, held in zip(loads, holders):
        for r in held:
            found[r] += load / len(held)
    return found


def test_the_popular_have_replicas_and_the_others_share_a_rank():
    assert expert_pools.placed([60, 20, 20, 20], 3, 2) == ((0, 1, 2), (0,), (1,), (2,)), "40 rows on each"
    assert expert_pools.placed([90, 10, 10, 10], 4, 3) == ((0, 1, 2), (3,), (3,), (3,)), "30 rows on each"
    assert expert_pools.placed([40, 40, 40, 40], 4, 3) == ((0,), (1,), (2,), (3,)), "as few as will do"
    assert expert_pools.placed([0, 0], 2, 1) == ((0,), (1,))
    assert expert_pools.placed([8, 1], 2, 1) == ((0,), (1,)), "no slot is left for a replica"
    assert expert_pools.placed([8, 1], 2, 2) == ((0, 1), (0, 1)), "two slots more, and a half of each is even"


def walk(draw, follows, topic):
    """A token of a topic: it starts near its topic, and mostly goes where its last expert leads."""
    path = [draw.choice([topic, topic, draw.randrange(EXPERTS)])]
    for layer in range(1, LAYERS):
        stray = draw.random() < 0.2
        path.append(draw.randrange(EXPERTS) if stray else follows[layer][path[-1]])
    return tuple(path)


@cache
def world():
    """Samples of all topics, and batches of one topic mostly: what is popular changes from batch to batch."""
    draw = random.Random(0)
    follows = [draw.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    samples = [walk(draw, follows, draw.randrange(EXPERTS)) for _ in range(600)]
    batches = [
        [walk(draw, follows, draw.choice([topic, topic, draw.randrange(EXPERTS)])) for _ in range(200)]
        for topic in range(EXPERTS)
    ]
    return samples, batches


def outcomes(samples, length):
    """(rows of the busiest rank placed by the guess, in a uniform placement, if all were known) of each batch and layer."""
    profile, found = expert_pools.profiled(samples, length), []
    for batch in world()[1]:
        for layer in range(1, LAYERS):
            loads = [sum(path[layer] == e for path in batch) for e in range(EXPERTS)]
            guess = expert_pools.expected(profile, layer, [path[:layer] for path in batch], EXPERTS)
            assert sum(guess) == len(batch)
            by_guess = expert_pools.placed(guess, RANKS, SLOTS)
            known = expert_pools.placed(loads, RANKS, SLOTS)
            found.append([busiest(loads, holders) for holders in (by_guess, owners(EXPERTS, RANKS), known)])
    return found


def test_lina_places_by_popularity():
    """On skewed paths the guess beats the uniform placement in every batch and layer, and by much; most of what
    knowing everything would gain is gained. Without paths, or with those of other tokens, it is not."""
    samples, _ = world()
    by_paths = outcomes(samples, 2)
    assert all(guess < uniform for guess, uniform, _ in by_paths)
    mean = lambda rows: float(sum(rows)) / len(by_paths)
    guess, uniform, known = (mean(rows) for rows in zip(*by_paths))
    assert guess < 0.6 * uniform and guess < 1.25 * known
    layers_alone = mean([row[0] for row in outcomes(samples, 0)])
    draw = random.Random(1)
    mixed = [
        *zip(*(draw.sample(column, len(column)) for column in zip(*samples)))
    ]  # as often, by other tokens
    others = mean([row[0] for row in outcomes(mixed, 2)])
    assert guess < 0.8 * min(layers_alone, others)


def test_a_guess_is_exact_where_the_path_decides():
    profile = expert_pools.profiled([(0, 1, 2), (1, 0, 1), (0, 1, 2)], 1)
    assert expert_pools.expected(profile, 2, [(0, 1), (1, 0), (1, 0)], 3) == [0, 2, 1]
    assert expert_pools.expected(profile, 0, [(), ()], 3) == [Fraction(4, 3), Fraction(2, 3), 0]
    assert expert_pools.expected(profile, 1, [(2,)], 3) == [Fraction(1, 3), Fraction(2, 3), 0], (
        "a path that no sample took"
    )


def test_longer_paths_see_further():
    """The expert two layers back decides: one layer tells nothing."""
    samples = [(a, 0, a) for a in (0, 1, 2, 2)]
    guesses = [expert_pools.expected(expert_pools.profiled(samples, n), 2, [(1, 0)], 3) for n in (0, 1, 2)]
    assert guesses == [[Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)]] * 2 + [[0, 1, 0]]


def test_of_equally_popular_experts_the_first():
    """Expert 0 has a second replica, and 1 and 2 have as many rows: the next is for 1."""
    assert expert_pools.placed([3, 2, 2], 3, 2) == ((1, 2), (1, 2), (0,))
