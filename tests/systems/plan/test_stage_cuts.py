"""DAPPLE's and AutoPipe's planners: each plan against every other plan there is, each time against the simulator."""

import random
from fractions import Fraction
from itertools import product

import pytest

from minitrain.pipeline.partition import balanced, even
from minitrain.pipeline.schedule import B, F, check
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.plan import stage_cuts
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small
from tests.pipeline.lists import refuse
from tests.pipeline.test_pipeline_partition import cuts_of, numbers, timed, total

# ---- DAPPLE ----------------------------------------------------------------------------------------------


def random_stages(draw, p):
    return [stage_cuts.Stage(draw.randint(5, 15), draw.randint(5, 15)) for _ in range(p)]


def bound(stages, m):
    """The docstring's sum over pivots, for the end of each stage, and then its sum of gradients."""
    F, B, sync = zip(*stages)
    p, work = len(F), [f + b for f, b in zip(F, B)]

    def waits(q):
        k = min(p - q, m)
        after, before = (max(0, sum(work[q + 1 :]) - (k - 1) * time) for time in (F[q], B[q]))
        return after + before if m > k else max(after, before)

    ends = [max(sum(work[s : q + 1]) + (m - 1) * work[q] + waits(q) for q in range(s, p)) for s in range(p)]
    return max(sum(F[:s]) + ends[s] + sync[s] for s in range(p))


def test_dapple_latency_is_the_sum_over_pivots():
    for seed, m in product(range(40), [1, 2, 3, 8]):
        draw = random.Random(seed)
        stages = [
            stage_cuts.Stage(*numbers(draw, 2, 0, 9), draw.choice([0, 0, 30])) for _ in range(1 + seed % 5)
        ]
        assert stage_cuts.latency(stages, m) == bound(stages, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_dapple_latency_is_a_bound_within_4_percent_of_the_simulator(p):
    worst, worst_of_paper = 0, 0
    for seed, m in product(range(16), [1, p, p + 1, 3 * p]):
        draw = random.Random(seed)
        stages = random_stages(draw, p)
        schedule = one_f_one_b(p, m)
        step = simulate(schedule, timed(schedule, stages)).makespan
        assert stage_cuts.latency(stages, m) <= step
        worst = max(worst, 1 - Fraction(stage_cuts.latency(stages, m), step))
        worst_of_paper = max(worst_of_paper, 1 - Fraction(stage_cuts.paper_latency(stages, m), step))
        if m > 1:
            shares = [Fraction(stage.F, 10) for stage in stages]  # stage={...}: backward twice forward
            costs = Costs(F=10, B=20, stage=dict(enumerate(shares)))
            step = simulate(schedule, costs).makespan
            assert (
                Fraction(95, 100) * step
                <= stage_cuts.latency([stage_cuts.Stage(10 * x, 20 * x) for x in shares], m)
                <= step
            )
    assert worst <= Fraction(4, 100) and (p > 2 or worst == 0)
    assert p == 1 or worst_of_paper > Fraction(9, 100)  # without the pivot's waits


def small_model(draw, layers):
    return stage_cuts.Model(
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


def stages_and_links(plan, model, cluster):
    """(forward, backward, sum of gradients) of each stage, with the links as stages between."""
    found = []
    for i, (layers, devices) in enumerate(plan):
        used = {machine for machine, count in enumerate(devices) if count}
        if i:
            both = used | {machine for machine, count in enumerate(plan[i - 1][1]) if count}
            message = Fraction(
                model.activations[layers.start], (cluster.inside, cluster.between)[len(both) > 1]
            )
            found.append((message, message, 0))
        n, link = sum(devices), (cluster.inside, cluster.between)[len(used) > 1]
        sums = [total(times, layers) for times in (model.forward, model.backward, model.weights)]
        found.append((Fraction(sums[0], n), Fraction(sums[1], n), Fraction(2 * (n - 1) * sums[2], n * link)))
    return found


def simulated_step(stages, m):
    """With links as ranks of their own, and the sum of gradients behind the last backward."""
    schedule = one_f_one_b(len(stages), m)
    spans = simulate(schedule, timed(schedule, stages)).spans
    return max(own[-1].end + sync for own, (_, _, sync) in zip(spans, stages))


def test_dapple_planner():
    """The chosen cut, replication and placement equal trying everything, by formulas of this test's own; and
    simulated, the plan is within 5% of its prediction and of the fastest plan there is."""
    kinds = set()
    for seed in range(6):
        draw = random.Random(seed)
        model, m = small_model(draw, 4), draw.choice([2, 4, 8])
        cluster = stage_cuts.Cluster(
            ((2, 2), (3, 1), (1, 1, 1, 1))[seed % 3],
            inside=draw.choice([1, 10, 100]),
            between=draw.choice([1, 4]),
        )
        plan = stage_cuts.plan_dapple(model, cluster, m)
        every = {stages: stages_and_links(stages, model, cluster) for stages in every_plan(4, cluster)}
        times = {stages: bound(timed, m) for stages, timed in every.items()}
        assert plan.time == min(times.values()) == times[plan.stages]
        assert len(plan.stages) == min(len(stages) for stages in times if times[stages] == plan.time)
        step = simulated_step(every[plan.stages], m)
        assert Fraction(95, 100) * step <= plan.time <= step
        near = [stages for stages in times if times[stages] <= step]  # no other is faster
        assert Fraction(95, 100) * step <= min(simulated_step(every[stages], m) for stages in near)
        kinds.add(len(plan.stages))
    assert len(kinds) > 1, kinds


# ---- AutoPipe --------------------------------------------------------------------------------------------


def units_of(layers: range, blocks: int) -> range:
    """Whole layers as units: a block is attention and MLP."""
    starts = [0, *range(1, 2 * blocks + 2, 2), 2 * blocks + 2]
    return range(starts[layers.start], starts[layers.stop])


def gpt_units(draw, blocks):
    """Embedding, (attention, MLP) of every block, head: that of a large vocabulary weighs several blocks."""
    attention, mlp = draw.randint(3, 6), draw.randint(6, 9)
    forward = [draw.randint(1, 3), *[attention, mlp] * blocks, draw.randint(5, 40)]
    return forward, [2 * time for time in forward]


def test_autopipe():
    """Balance: never slower than whole layers cut evenly. Slicing: half a forward less for each link."""
    best = 0
    for seed in range(30):
        draw = random.Random(seed)
        blocks, p = draw.choice([(8, 4), (9, 4), (12, 3), (6, 2), (10, 5)])
        m = 2 * p
        forward, backward = gpt_units(draw, blocks)
        work = [f + b for f, b in zip(forward, backward)]
        by_layers = [units_of(layers, blocks) for layers in even(blocks, p)]
        plan = stage_cuts.plan_autopipe(forward, backward, p, m)
        assert [unit for layers in plan.stages for unit in layers] == list(range(2 * blocks + 2))
        assert len(plan.stages) == p
        assert max(total(work, a) for a in plan.stages) <= max(total(work, a) for a in by_layers)
        assert plan.time <= stage_cuts.simulated_step(by_layers, forward, backward, m).makespan
        assert plan.time <= stage_cuts.simulated_step(balanced(work, p), forward, backward, m).makespan
        if p <= 3:
            shortest = min(
                stage_cuts.simulated_step(cut, forward, backward, m).makespan
                for cut in cuts_of(2 * blocks + 2, p)
            )
            assert plan.time <= Fraction(102, 100) * shortest
            best += plan.time == shortest
    assert best >= 5  # moving one unit at a time nearly always finds the shortest

    for p, m, k in [(2, 4, 1), (4, 8, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2), (16, 24, 4)]:
        schedule = check(stage_cuts.sliced(p, m, k))
        simulation = simulate(schedule, stage_cuts.sliced_times(schedule, k))
        assert simulate(one_f_one_b(p, m), Costs(F=1, B=2)).start(B(p - 1, 0)) == p
        assert simulation.start(B(p - 1, 0)) == Fraction(p + 1, 2)  # p·F becomes (p+1)·F/2
        assert all(simulation.start(F(stage, 0)) == Fraction(stage, 2) for stage in range(p))


@pytest.mark.parametrize("p, m, k", [(2, 4, 1), (4, 8, 1), (6, 12, 2), (8, 16, 2), (12, 24, 3)])
def test_enough_slices_shorten_the_whole_step(p, m, k):
    assert stage_cuts.slices_needed(p, m) == k
    schedule = stage_cuts.sliced(p, m, k)
    step = simulate(schedule, stage_cuts.sliced_times(schedule, k)).makespan
    assert step == 3 * (m + p - 1) - Fraction(p - 1, 2)
    fewer = stage_cuts.sliced(p, m, k - 1)
    assert simulate(fewer, stage_cuts.sliced_times(fewer, k - 1)).makespan > step


def test_an_uneven_cut_and_slices_equal_one_process():
    problem = Problem(config=small(num_layers=6), batch_sizes=(8, 7), microbatches=5)
    cuts = balanced([1, 3, 3, 3, 3, 3, 3, 8], 4)
    assert cuts != even(6, 4) and {len(layers) for layers in cuts} == {1, 2, 3}
    schedule = stage_cuts.sliced(4, 4, 1)  # the interpreter gives every unit as many rows
    assert (
        pipeline_difference(problem, dict(dp=1, pp=4), schedule, one_process(problem), cuts=cuts) < TOLERANCE
    )


def test_what_is_refused():
    refuse(
        {
            "len(backward)=2: use 1": lambda: stage_cuts.Model([1], [1, 2], [0], [0]),
            "machines[1]=0: use a finite number above 0": lambda: stage_cuts.Cluster((2, 0), 1, 1),
            "give each unit both": lambda: stage_cuts.plan_autopipe([1, 2], [1], 1, 1),
            "use 1 to 2 stages": lambda: stage_cuts.plan_autopipe([1, 2], [1, 2], 3, 1),
            "k=5: use a whole number from 0 to 4": lambda: stage_cuts.sliced(2, 4, 5),
        }
    )
