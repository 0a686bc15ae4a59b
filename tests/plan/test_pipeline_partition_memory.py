"""Planners under a limit of memory: mCAP, AdaPipe, MPress. Peaks against a dry run of the real code, plans
against all plans there are.
"""

import random
from fractions import Fraction
from functools import cache
from itertools import combinations, product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.ledger import Ledger
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.pipeline.partition import least_largest
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.plan import adapipe, dapple, mpress
from minitrain.plan.memory_balance import fit, mcap, profiled
from minitrain.training.step import Batch, NoReducer
from tests.parallel import small


def cuts_of(layers: int, stages: int):
    for inner in combinations(range(1, layers), stages - 1):
        ends = (0, *inner, layers)
        yield tuple(range(a, b) for a, b in zip(ends, ends[1:]))


# ---- mCAP ------------------------------------------------------------------------------------------------

P, M, LENGTH = 3, 3, 128
TOY = small(num_layers=4, d_model=32, vocab_size=500, max_positions=LENGTH, tied=False)


@cache
def measured() -> dict:
    """Peak bytes of every rank of 1F1B for every cut, by the ledgers of real runs: parameters, gradients,
    activations, messages.
    """
    cuts = list(cuts_of(6, P))

    def rank():
        peaks, group = [], collectives.world()
        for cut in cuts:
            with Ledger() as ledger:
                stage = {group.rank(): GPT(TOY, layers=cut[group.rank()])}
                runner = Runner(
                    stage,
                    one_f_one_b(P, M),
                    group,
                    cross_entropy_sum,
                    NoReducer(),
                    width=TOY.d_model,
                    check=False,
                )
                tokens = torch.zeros(M, LENGTH, dtype=torch.int64)
                runner(Batch(tokens, tokens, M * LENGTH))
            peaks.append(ledger.peak_bytes)
        return peaks

    return dict(zip(cuts, zip(*launch.run(rank, ranks=P))))


def worst_error(peaks) -> float:
    return max(
        abs(peaks.of(stage, layers) / found - 1)
        for cut, found_all in measured().items()
        for stage, (layers, found) in enumerate(zip(cut, found_all))
    )


def test_mcap():
    """4 measured cuts predict the peaks of all 10 within 3%, and the chosen cut is the best of the 10 by
    measurement too.
    """
    in_flight = [peak(one_f_one_b(P, M), rank) for rank in range(P)]
    assert in_flight == [3, 2, 1] and len(profiled(6, P)) == 4 and len(measured()) == 10
    asked = []
    chosen, peaks = mcap(6, P, in_flight, lambda cut: asked.append(cut) or measured()[cut])
    assert asked == profiled(6, P) and worst_error(peaks) < 0.03
    largest = {cut: max(found) for cut, found in measured().items()}
    assert 2 * largest[chosen] == 2 * min(largest.values()) < max(largest.values())

    one_number_a_layer = fit(
        {cut: measured()[cut] for cut in profiled(6, P)}, [1] * P
    )  # the control: as if all stages kept as many
    assert worst_error(one_number_a_layer) > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_peak_equals_brute_force(seed):
    draw = random.Random(seed)
    table = {
        (stage, a, b): draw.randint(1, 100) for stage in range(4) for a in range(8) for b in range(a + 1, 9)
    }

    def of(stage, layers):
        return table[stage, layers.start, layers.stop]

    largest = {cut: max(of(stage, layers) for stage, layers in enumerate(cut)) for cut in cuts_of(8, 4)}
    assert largest[least_largest(8, 4, of)] == min(largest.values())


# ---- AdaPipe ---------------------------------------------------------------------------------------------


@cache
def small_case(seed: int) -> adapipe.Model:
    """6 layers of 2 units each: (seconds, bytes kept) of what may be recomputed."""
    draw = random.Random(seed)
    layers = [
        adapipe.Layer(
            forward=draw.randint(5, 9),
            backward=draw.randint(10, 18),
            fixed=draw.randint(0, 5),
            units=tuple(adapipe.Unit(draw.randint(1, 4), draw.randint(2, 9)) for _ in range(2)),
        )
        for _ in range(6)
    ]
    return adapipe.Model(tuple(layers), boundary=draw.randint(1, 2))


def every_plan(model, p, m, cap):
    """(time, plan) of every subset of units in every cut that fits."""
    for cut in cuts_of(len(model.layers), p):
        stages = []
        for stage, layers in enumerate(cut):
            subsets = product(
                *(list(product((True, False), repeat=len(model.layers[number].units))) for number in layers)
            )
            kept = [
                flags for flags in subsets if adapipe.bytes_of(model, layers, flags, min(p - stage, m)) <= cap
            ]
            stages.append(
                [adapipe.StagePlan(layers, flags, again(model, layers, flags), 0) for flags in kept]
            )
        for plan in product(*stages):
            yield dapple.latency([adapipe.stage_of(model, stage) for stage in plan], m)


def again(model, layers, flags):
    return sum(
        unit.time
        for number, keeps in zip(layers, flags)
        for unit, keep in zip(model.layers[number].units, keeps)
        if not keep
    )


def simulated(model, plan, m):
    stages = [adapipe.stage_of(model, stage) for stage in plan.stages]
    schedule = one_f_one_b(len(stages), m)
    times = {action: stages[action.stage][0 if action.kind == "F" else 1] for action in schedule.place}
    return simulate(schedule, Measured(times)).makespan


@pytest.mark.parametrize("seed, cap", [(0, 55), (1, 50), (2, 70)])
def test_adapipe(seed, cap):
    """6 layers, 3 stages: the two levels of dynamic programming equal all subsets of units in all cuts."""
    model, m = small_case(seed), 6
    plan = adapipe.plan_adapipe(model, 3, m, cap)
    assert plan.time == min(every_plan(model, 3, m, cap))
    assert any(stage.recomputed for stage in plan.stages)  # the cap binds
    for stage, found in enumerate(plan.stages):
        assert found.bytes == adapipe.bytes_of(model, found.layers, found.kept, 3 - stage) <= cap
        assert found.recomputed == again(model, found.layers, found.kept)
    assert Fraction(95, 100) * simulated(model, plan, m) <= plan.time <= simulated(model, plan, m)


def test_later_stages_recompute_less():
    layer = adapipe.Layer(
        forward=10, backward=20, fixed=2, units=(adapipe.Unit(2, 3), adapipe.Unit(3, 4), adapipe.Unit(5, 5))
    )
    model, m = adapipe.Model((layer,) * 8, boundary=1), 8
    plan = adapipe.plan_adapipe(model, 4, m, cap=70)
    shares = [Fraction(stage.recomputed, 10 * len(stage.layers)) for stage in plan.stages]
    assert shares[0] > shares[-1] == 0 and shares == sorted(shares, reverse=True)
    uniform = [dapple.Stage(20, 40 + 20)] * 4  # recompute everything everywhere
    assert plan.time < dapple.latency(uniform, m)
    assert adapipe.plan_adapipe(model, 4, m, cap=10**6).time == dapple.latency(
        [dapple.Stage(20, 40)] * 4, m
    )  # no cap, nothing recomputed


# ---- MPress ----------------------------------------------------------------------------------------------


def fits(tensors, ways, fixed, cap):
    """Does each rank hold at most the cap, and is there room for all that is lent?"""
    held = list(fixed)
    for tensor, way in zip(tensors, ways):
        held[tensor.rank] += tensor.bytes * (way == "keep")
    lent = sum(tensor.bytes for tensor, way in zip(tensors, ways) if way == "peer")
    return max(held) <= cap and sum(held) + lent <= cap * len(fixed)


def longest_extra_time(tensors, ways, ranks, links):
    times = [0] * ranks
    for tensor, way in zip(tensors, ways):
        times[tensor.rank] += mpress.extra_time(tensor, way, links)
    return max(times)


def test_mpress():
    """All ways of all tensors on small cases: the plan fits the cap, is the best that fits, and never worse
    than recomputation alone.
    """
    chosen, better = set(), 0
    for seed in range(12):
        draw = random.Random(seed)
        tensors = [
            mpress.Tensor(rank, draw.randint(2, 8), draw.randint(0, 6), draw.randint(1, 6))
            for rank in (0, 0, 0, 1, 1, 2)
        ]
        fixed, links = (2, 3, 1), mpress.Links(peer=draw.choice([4, 8]), host=draw.choice([1, 2]))
        cap = draw.randint(9, 12)
        plan = mpress.plan_mpress(tensors, fixed, cap, links)
        times = {
            ways: longest_extra_time(tensors, ways, 3, links)
            for ways in product(mpress.WAYS, repeat=6)
            if fits(tensors, ways, fixed, cap)
        }
        assert plan.time == min(times.values()) == times[plan.ways]
        alone = mpress.plan_mpress(tensors, fixed, cap, links, ways=("keep", "recompute"))
        assert fits(tensors, alone.ways, fixed, cap) and plan.time <= alone.time
        chosen |= set(plan.ways)
        better += plan.time < alone.time
    assert chosen == set(mpress.WAYS) and better >= 6, (chosen, better)


def test_idle_ranks_of_a_pipeline_take_what_the_first_ranks_lack():
    """1F1B on 4 ranks, 2 tensors of 4 bytes per microbatch, a cap of 20: ranks 0 and 1 hold 32 and 24, ranks 2
    and 3 16 and 8.
    """
    tensors = mpress.tensors_at_peak(one_f_one_b(4, 8), Costs(F=2, B=4), layers=[4, 4], recompute=[1, 1])
    assert [sum(tensor.bytes for tensor in tensors if tensor.rank == rank) for rank in range(4)] == [
        32,
        24,
        16,
        8,
    ]
    assert [tensor.idle for tensor in tensors if tensor.rank == 3] == [0, 0]
    assert min(tensor.idle for tensor in tensors if tensor.rank == 0) > min(
        tensor.idle for tensor in tensors if tensor.rank == 2
    )
    links = mpress.Links(peer=2, host=Fraction(1, 16))
    plan, alone = (
        mpress.plan_mpress(tensors, (0,) * 4, 20, links, ways)
        for ways in (mpress.WAYS, ("keep", "recompute"))
    )
    assert (
        plan.time == 0 and alone.time == 3 and "peer" in plan.ways and fits(tensors, plan.ways, (0,) * 4, 20)
    )
    nothing_free = mpress.plan_mpress(tensors, (0, 0, 4, 12), 20, links)  # less room elsewhere
    assert 0 < nothing_free.time <= alone.time


@pytest.mark.parametrize(
    "words, call",
    [
        ("at least 2·stages - 1 layers", lambda: profiled(4, 3)),
        ("2 stages or more", lambda: profiled(4, 1)),
        ("one number per stage", lambda: fit({(range(2), range(2, 4)): [1]}, [2, 1])),
        ("use 1 to 6 stages", lambda: adapipe.plan_adapipe(small_case(0), 7, 2, 100)),
        ("no cut into 3 stages fits 5 bytes", lambda: adapipe.plan_adapipe(small_case(0), 3, 2, 5)),
        (
            "use a larger cap",
            lambda: mpress.plan_mpress(
                [mpress.Tensor(0, 5, 1, None)], [0], 4, mpress.Links(1, 1), ["keep", "recompute"]
            ),
        ),
        (
            "'drop' is no way",
            lambda: mpress.plan_mpress([mpress.Tensor(0, 5, 1, None)], [0], 4, mpress.Links(1, 1), ["drop"]),
        ),
    ],
)
def test_what_is_refused(words, call):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)
