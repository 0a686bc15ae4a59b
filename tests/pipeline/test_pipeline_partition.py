"""Planners by time: PipeDream's, DAPPLE's, AutoPipe's. Each plan against every other plan there is, each time
against the simulator.
"""

import random
from fractions import Fraction
from itertools import combinations, product

import pytest

from minitrain.pipeline.partition import balanced, even, pipedream, stage_time, undominated
from minitrain.pipeline.schedule import B, F, Schedule, check
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.plan import autopipe, dapple
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small


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
    return Measured(
        {action: stages[action.stage][0 if action.kind == "F" else 1] for action in schedule.place}
    )


# ---- cuts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_balanced_has_the_smallest_largest_stage(seed):
    draw = random.Random(seed)
    costs = numbers(draw, 9)
    for stages in range(1, 10):
        cut = balanced(costs, stages)
        assert (
            [layer for layers in cut for layer in layers] == list(range(9))
            and len(cut) == stages
            and all(cut)
        )
        slowest = [max(total(costs, layers) for layers in other) for other in cuts_of(9, stages)]
        assert max(total(costs, layers) for layers in cut) == min(slowest)


def test_what_no_other_beats_is_kept():
    assert undominated([((2, 1), "a"), ((1, 2), "b"), ((2, 2), "c"), ((1, 2), "d")]) == [
        ((1, 2), "b"),
        ((2, 1), "a"),
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bandwidth", [None, 1, 7])
def test_pipedream_planner(seed, bandwidth):
    """The recursion A(j, m) equals trying all partitions of 8 layers with all replications on 4 workers."""
    draw = random.Random(seed)
    times, weights, activations = numbers(draw, 8), numbers(draw, 8, 0, 9), numbers(draw, 8, 0, 9)

    def slowest(cut, replicas):
        ours = [
            stage_time(total(times, layers), total(weights, layers), r, bandwidth)
            for layers, r in zip(cut, replicas)
        ]
        return max(
            ours + [Fraction(2 * activations[layers.start], bandwidth) for layers in cut[1:] if bandwidth]
        )

    everything = {
        (tuple(cut), replicas): slowest(cut, replicas)
        for stages in range(1, 5)
        for cut in cuts_of(8, stages)
        for replicas in product(range(1, 5), repeat=stages)
        if sum(replicas) == 4
    }
    plan = pipedream(times, 4, weights, activations, bandwidth)
    cut, replicas = zip(*plan.stages)
    assert plan.time == min(everything.values()) == everything[cut, replicas]


def test_pipedream_replicates_what_is_slow():
    assert pipedream([2, 2, 16], 4).time == 5 and pipedream([4, 8, 4], 4).stages == (
        (range(3), 4),
    )  # 20 / 4, nothing is sent
    plan = pipedream([2, 2, 12], 4, weights=[50, 50, 0], activations=[0, 0, 1], bandwidth=1)
    assert plan == (4, ((range(2), 1), (range(2, 3), 3)))  # 3 copies of the stage that has no weights to sum


# ---- DAPPLE ----------------------------------------------------------------------------------------------


def random_stages(draw, p):
    return [dapple.Stage(draw.randint(5, 15), draw.randint(5, 15)) for _ in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_dapple_latency_is_a_bound_within_4_percent_of_the_simulator(p):
    worst, worst_of_paper = 0, 0
    for seed, m in product(range(16), [1, p, p + 1, 3 * p]):
        draw = random.Random(seed)
        stages = random_stages(draw, p)
        schedule = one_f_one_b(p, m)
        step = simulate(schedule, timed(schedule, stages)).makespan
        assert dapple.latency(stages, m) <= step
        worst = max(worst, 1 - Fraction(dapple.latency(stages, m), step))
        worst_of_paper = max(worst_of_paper, 1 - Fraction(dapple.paper_latency(stages, m), step))
        if m > 1:
            shares = [Fraction(stage.F, 10) for stage in stages]  # stage={...}: backward twice forward
            costs = Costs(F=10, B=20, stage=dict(enumerate(shares)))
            step = simulate(schedule, costs).makespan
            assert (
                Fraction(95, 100) * step
                <= dapple.latency([dapple.Stage(10 * x, 20 * x) for x in shares], m)
                <= step
            )
    assert worst <= Fraction(4, 100) and (p > 2 or worst == 0)
    assert p == 1 or worst_of_paper > Fraction(9, 100)  # without the pivot's waits


def test_dapple_latency_of_equal_stages_is_exact():
    for p, m in product([1, 2, 4, 8], [1, 2, 8, 33]):
        assert (
            dapple.latency([dapple.Stage(1, 2)] * p, m)
            == 3 * (m + p - 1)
            == simulate(one_f_one_b(p, m), Costs(F=1, B=2)).makespan
        )


def small_model(draw, layers):
    return dapple.Model(
        forward=numbers(draw, layers, 5, 15),
        backward=numbers(draw, layers, 10, 30),
        weights=numbers(draw, layers, 0, 40),
        activations=numbers(draw, layers, 0, 30),
    )


def every_plan(layers, cluster):
    """All cuts with all numbers of devices from each machine."""
    some = [devices for devices in product(*(range(count + 1) for count in cluster.machines)) if any(devices)]
    for stages in range(1, min(layers, sum(cluster.machines)) + 1):
        for devices in product(some, repeat=stages):
            if all(sum(used) <= count for used, count in zip(zip(*devices), cluster.machines)):
                for cut in cuts_of(layers, stages):
                    yield tuple(zip(cut, devices))


def test_dapple_planner():
    """The chosen cut, replication and placement equal trying everything; the plan, simulated with its links,
    takes what was predicted.
    """
    same, kinds = 0, set()
    for seed in range(6):
        draw = random.Random(seed)
        model, m = small_model(draw, 4), draw.choice([2, 4, 8])
        cluster = dapple.Cluster(
            ((2, 2), (3, 1), (1, 1, 1, 1))[seed % 3],
            inside=draw.choice([1, 10, 100]),
            between=draw.choice([1, 4]),
        )
        plan = dapple.plan_dapple(model, cluster, m)
        times = {
            stages: dapple.latency(dapple.stages_of(stages, model, cluster), m)
            for stages in every_plan(4, cluster)
        }
        assert plan.time == min(times.values()) == times[plan.stages]
        stages = dapple.stages_of(plan.stages, model, cluster)
        schedule = one_f_one_b(len(stages), m)  # links are ranks of their own
        simulation = simulate(schedule, timed(schedule, stages))
        step = max(spans[-1].end + stage.sync for spans, stage in zip(simulation.spans, stages))
        assert Fraction(95, 100) * step <= plan.time <= step
        tried_by_paper = dapple.plan_dapple(model, cluster, m, dapple.paper_placements)
        assert tried_by_paper.time >= plan.time
        same += tried_by_paper.time == plan.time
        kinds.add(len(plan.stages))
    assert same >= 5 and len(kinds) > 1, (same, kinds)  # the paper's three placements nearly always suffice


# ---- AutoPipe --------------------------------------------------------------------------------------------


def units_of(layers: range, blocks: int) -> range:
    """Whole layers as units: a block is attention and MLP."""
    starts = [0, *range(1, 2 * blocks + 2, 2), 2 * blocks + 2]
    return range(starts[layers.start], starts[layers.stop])


def gpt_units(draw, blocks):
    """Embedding, (attention, MLP) of every block, head: the head of a large vocabulary weighs as much as
    several blocks.
    """
    attention, mlp = draw.randint(3, 6), draw.randint(6, 9)
    forward = [draw.randint(1, 3), *[attention, mlp] * blocks, draw.randint(5, 40)]
    return forward, [2 * time for time in forward]


def test_autopipe():
    """Balance: never slower than whole layers cut evenly. Slicing: half a forward less for each link of the
    warm-up.
    """
    best = 0
    for seed in range(30):
        draw = random.Random(seed)
        blocks, p = draw.choice([(8, 4), (9, 4), (12, 3), (6, 2), (10, 5)])
        m = 2 * p
        forward, backward = gpt_units(draw, blocks)
        work = [f + b for f, b in zip(forward, backward)]
        by_layers = [units_of(layers, blocks) for layers in even(blocks, p)]
        plan = autopipe.plan_autopipe(forward, backward, p, m)
        assert [unit for layers in plan.cut for unit in layers] == list(range(2 * blocks + 2)) and len(
            plan.cut
        ) == p
        assert max(total(work, layers) for layers in plan.cut) <= max(
            total(work, layers) for layers in by_layers
        )
        assert plan.time <= autopipe.step(by_layers, forward, backward, m).makespan
        assert plan.time <= autopipe.step(balanced(work, p), forward, backward, m).makespan
        if p <= 3:
            shortest = min(
                autopipe.step(cut, forward, backward, m).makespan for cut in cuts_of(2 * blocks + 2, p)
            )
            assert plan.time <= Fraction(102, 100) * shortest
            best += plan.time == shortest
    assert best >= 5  # moving one unit at a time nearly always finds the shortest

    for p, m, k in [(2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2), (16, 24, 4)]:
        schedule = check(autopipe.sliced(p, m, k))
        simulation = simulate(schedule, autopipe.sliced_times(schedule, k))
        assert simulate(one_f_one_b(p, m), Costs(F=1, B=2)).start(B(p - 1, 0)) == p
        assert simulation.start(B(p - 1, 0)) == Fraction(p + 1, 2)  # p·F becomes (p+1)·F/2
        assert all(simulation.start(F(stage, 0)) == Fraction(stage, 2) for stage in range(p))


@pytest.mark.parametrize("p, m, k", [(2, 4, 1), (4, 8, 1), (6, 12, 2), (8, 16, 2), (12, 24, 3)])
def test_enough_slices_shorten_the_whole_step(p, m, k):
    assert autopipe.slices_needed(p, m) == k
    schedule = autopipe.sliced(p, m, k)
    step = simulate(schedule, autopipe.sliced_times(schedule, k)).makespan
    assert step == 3 * (m + p - 1) - Fraction(p - 1, 2)
    fewer = autopipe.sliced(p, m, k - 1)
    assert simulate(fewer, autopipe.sliced_times(fewer, k - 1)).makespan > step


def test_an_uneven_cut_and_slices_equal_one_process():
    problem = Problem(config=small(num_layers=6), batch_sizes=(8, 7), microbatches=5)
    cuts = balanced([1, 3, 3, 3, 3, 3, 3, 8], 4)
    assert cuts != even(6, 4) and {len(layers) for layers in cuts} == {1, 2, 3}
    schedule = autopipe.sliced(4, 4, 1)  # the interpreter gives every unit as many rows
    assert (
        pipeline_difference(problem, dict(dp=1, pp=4), schedule, one_process(problem), cuts=cuts) < TOLERANCE
    )


@pytest.mark.parametrize(
    "words, call",
    [
        ("use 1 to 3 stages", lambda: balanced([1, 2, 3], 4)),
        ("costs[1] = -1", lambda: balanced([1, -1], 1)),
        ("3 weights of 2 layers", lambda: pipedream([1, 2], 2, weights=[1, 2, 3])),
        ("use 1 worker or more", lambda: pipedream([1, 2], 0)),
        ("each layer all four", lambda: dapple.Model([1], [1, 2], [0], [0])),
        ("must be above 0", lambda: dapple.Cluster((2, 0), 1, 1)),
        (
            "use 1 or more",
            lambda: dapple.plan_dapple(dapple.Model([1], [1], [0], [0]), dapple.Cluster((1,), 1, 1), 0),
        ),
        ("give each unit both", lambda: autopipe.plan_autopipe([1, 2], [1], 1, 1)),
        ("use 1 to 2 stages", lambda: autopipe.plan_autopipe([1, 2], [1, 2], 3, 1)),
        ("use 0 to 4", lambda: autopipe.sliced(2, 4, 5)),
        ("use a whole number, 1 or more", lambda: autopipe.slices_needed(0, 2)),
    ],
)
def test_what_is_refused(words, call):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)
