"""Cuts of a model: the smallest largest stage, and PipeDream's planner, against every other plan there is."""

import random
from fractions import Fraction
from itertools import combinations, product
from math import inf

import pytest
import torch

from minitrain import collectives
from minitrain.pipeline.partition import balanced, even, pipedream, stage_time, undominated
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.simulate import Measured
from minitrain.ranks.launch import dryrun
from minitrain.systems.plan import stage_cuts
from tests.parallel import Traffic
from tests.pipeline.lists import refuse


def cuts_of(layers: int, stages: int):
    """Every way to cut layers into runs."""
    for inner in combinations(range(1, layers), stages - 1):
        ends = (0, *inner, layers)
        yield [range(a, b) for a, b in zip(ends, ends[1:])]


def total(numbers, layers):
    return sum(numbers[layer] for layer in layers)


def numbers(draw, count, low=1, high=20):
    return [draw.randint(low, high) for _ in range(count)]


def timed(schedule: Schedule, stages) -> Measured:
    """Every stage with a forward and a backward time of its own."""
    of = lambda action: stages[action.stage][0 if action.kind == "F" else 1]
    return Measured({action: of(action) for action in schedule.place})


# ---- cuts ------------------------------------------------------------------------------------------------


def test_the_examples_of_the_module():
    assert even(6, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert even(6, 5) == [range(0, 2), range(2, 4), range(4, 5), range(5, 6), range(6, 8)], "not to the first"
    assert even(2, 3) == [range(0, 1), range(1, 2), range(2, 4)]
    assert balanced([1, 3, 3, 3, 3, 5], 3) == [range(0, 3), range(3, 5), range(5, 6)]
    assert pipedream([4, 8, 4], 4) == (4, ((range(0, 3), 4),))


@pytest.mark.parametrize("seed", range(5))
def test_balanced_has_the_smallest_largest_stage(seed):
    draw = random.Random(seed)
    costs = numbers(draw, 9)
    for stages in range(1, 10):
        cut = balanced(costs, stages)
        assert [layer for layers in cut for layer in layers] == list(range(9)) and len(cut) == stages
        assert all(cut)
        slowest = [max(total(costs, layers) for layers in other) for other in cuts_of(9, stages)]
        assert max(total(costs, layers) for layers in cut) == min(slowest)


def the_rule(costs, stages):
    """Of all cuts with the smallest largest stage that with the shortest last stage, and so on in front."""
    if stages == 1:
        return [range(len(costs))]
    every = list(cuts_of(len(costs), stages))
    least = min(max(total(costs, layers) for layers in cut) for cut in every)
    equal = [cut for cut in every if max(total(costs, layers) for layers in cut) == least]
    last = max(cut[-1].start for cut in equal)
    return [*the_rule(costs[:last], stages - 1), range(last, len(costs))]


def test_of_equal_cuts_the_last_stage_is_the_shortest():
    assert balanced([1, 1, 1, 1, 1], 2) == [range(3), range(3, 5)]
    assert balanced([3, 1, 1, 1, 5], 3) == [range(1), range(1, 4), range(4, 5)]
    several = 0
    for seed in range(12):
        draw = random.Random(seed)
        costs, stages = numbers(draw, 8, 0, 2), draw.randint(2, 5)
        assert balanced(costs, stages) == the_rule(costs, stages)
        slowest = [max(total(costs, layers) for layers in cut) for cut in cuts_of(8, stages)]
        several += slowest.count(min(slowest)) > 1
    assert several >= 8


def test_what_no_other_beats_is_kept():
    found = undominated([((2, 1), "a"), ((1, 2), "b"), ((2, 2), "c"), ((1, 2), "d")])
    assert found == [((1, 2), "b"), ((2, 1), "a")]


def slowest(cut, replicas, times, weights, activations, bandwidth):
    """By the paper's words: replicas take turns, and send 2(r-1)/r of the weights each; a boundary carries an
    activation and its gradient."""
    carried = lambda size: 0 if bandwidth == inf else Fraction(size, bandwidth)
    stages = [
        Fraction(max(total(times, layers), carried(2 * (r - 1) * total(weights, layers))), r)
        for layers, r in zip(cut, replicas)
    ]
    return max(stages + [carried(2 * activations[layers.start]) for layers in cut[1:]])


def every_replication(layers, workers):
    for stages in range(1, workers + 1):
        for cut in cuts_of(layers, stages):
            for replicas in product(range(1, workers + 1), repeat=stages):
                if sum(replicas) == workers:
                    yield tuple(cut), replicas


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bandwidth", [inf, 1, 7])
def test_pipedream_planner(seed, bandwidth):
    """The recursion A(j, m) equals trying all partitions of 8 layers with all replications on 4 workers."""
    draw = random.Random(seed)
    lists = numbers(draw, 8), numbers(draw, 8, 0, 9), numbers(draw, 8, 0, 9)
    everything = {plan: slowest(*plan, *lists, bandwidth) for plan in every_replication(8, 4)}
    plan = pipedream(lists[0], 4, *lists[1:], bandwidth)
    cut, replicas = zip(*plan.stages)
    assert plan.time == min(everything.values()) == everything[cut, replicas]


def all_reduced_bytes():
    group = collectives.world()
    with Traffic() as ledger:
        collectives.all_reduce(torch.zeros(120), group)
    return ledger.sent_bytes("all_reduce")


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_planners_sum_gradients_at_the_cost_of_the_real_sum(replicas):
    """Bytes that a rank sends in all-reduce, by the ledger; at one byte per unit of time they are a time."""
    sent = dryrun.run(all_reduced_bytes, rank=0, ranks=replicas)
    assert stage_time(0, 480, replicas, 1) == sent
    model = stage_cuts.Model([0], [0], [480], [0])
    found = stage_cuts.compute_stage(model, range(1), (replicas,), stage_cuts.Cluster((replicas,), 1, 1)).sync
    assert found == sent


def test_pipedream_replicates_what_is_slow():
    # 20 / 4, nothing is sent
    assert pipedream([2, 2, 16], 4).time == 5 and pipedream([4, 8, 4], 4).stages == ((range(3), 4),)
    plan = pipedream([2, 2, 12], 4, weights=[50, 50, 0], activations=[0, 0, 1], bandwidth=1)
    assert plan == (4, ((range(2), 1), (range(2, 3), 3)))  # 3 copies of the stage that has no weights to sum


def test_what_is_refused():
    refuse(
        {
            "use 1 to 3 stages": lambda: balanced([1, 2, 3], 4),
            "costs[1]=-1": lambda: balanced([1, -1], 1),
            "3 weights, 2 activations of 2 layers": lambda: pipedream([1, 2], 2, weights=[1, 2, 3]),
        }
    )
