"""Planners under a limit of memory: mCAP, AdaPipe, MPress. Peaks against a dry run of the real code, plans
against all plans there are.
"""

import random
from fractions import Fraction
from functools import cache
from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.partition import least_largest
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.plan.simulate.machines import Device, Link, Machine
from minitrain.ranks.events import Compute, Copy, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan import stage_memory
from minitrain.systems.plan.stage_memory import fit, mcap, profiled
from minitrain.systems.simulate.replay import replay
from tests.parallel import small
from tests.systems.plan.test_stage_cuts import bound


def cuts_of(layers: int, stages: int):
    for inner in combinations(range(1, layers), stages - 1):
        ends = (0, *inner, layers)
        yield tuple(range(a, b) for a, b in zip(ends, ends[1:]))


# ---- mCAP ------------------------------------------------------------------------------------------------

P, M, LENGTH = 3, 3, 128
TOY = small(num_layers=4, d_model=32, vocab_size=500, max_positions=LENGTH, tied=False)


@cache
def measured() -> dict:
    """Peak bytes of every rank of 1F1B for every cut, by the ledgers of real runs."""
    cuts = list(cuts_of(6, P))

    def rank():
        peaks, group = [], collectives.world()
        for cut in cuts:
            with Ledger() as ledger:
                stage = {group.rank(): GPT(TOY, layers=cut[group.rank()])}
                given = stage, one_f_one_b(P, M), group, cross_entropy_sum, NoReducer()
                runner = Runner(*given, width=TOY.d_model)
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
    """4 measured cuts predict the peaks of all 10 within 3%; the chosen cut is the best by measurement."""
    in_flight = [peak(one_f_one_b(P, M), rank) for rank in range(P)]
    assert in_flight == [3, 2, 1] and len(profiled(6, P)) == 4 and len(measured()) == 10
    asked = []
    chosen, peaks = mcap(6, P, in_flight, lambda cut: asked.append(cut) or measured()[cut])
    assert asked == profiled(6, P) and worst_error(peaks) < 0.03
    largest = {cut: max(found) for cut, found in measured().items()}
    assert 2 * largest[chosen] == 2 * min(largest.values()) < max(largest.values())

    few = {cut: measured()[cut] for cut in profiled(6, P)}
    one_number_a_layer = fit(few, [1] * P)  # the control: as if all stages kept as many
    assert worst_error(one_number_a_layer) > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_peak_equals_brute_force(seed):
    draw = random.Random(seed)
    table = {(s, a, b): draw.randint(1, 100) for s in range(4) for a in range(8) for b in range(a + 1, 9)}

    def of(stage, layers):
        return table[stage, layers.start, layers.stop]

    largest = {cut: max(of(stage, layers) for stage, layers in enumerate(cut)) for cut in cuts_of(8, 4)}
    assert largest[least_largest(8, 4, of)] == min(largest.values())


@cache
def small_case(seed: int) -> stage_memory.Model:
    """6 layers of 2 units each: (seconds, bytes kept) of what may be recomputed."""
    draw, layers = random.Random(seed), []
    for _ in range(6):
        times = draw.randint(5, 9), draw.randint(10, 18), draw.randint(0, 5)
        units = tuple(stage_memory.Unit(draw.randint(1, 4), draw.randint(2, 9)) for _ in range(2))
        layers.append(stage_memory.Layer(*times, units))
    return stage_memory.Model(tuple(layers), boundary=draw.randint(1, 2))


def every_plan(model, p, m, cap):
    """(time, plan) of every subset of units in every cut that fits."""
    for cut in cuts_of(len(model.layers), p):
        stages = []
        for stage, layers in enumerate(cut):
            units = [len(model.layers[number].units) for number in layers]
            subsets = product(*(product((True, False), repeat=count) for count in units))
            forward = sum(model.layers[number].forward for number in layers)
            backward = sum(model.layers[number].backward for number in layers)
            fit = (f for f in subsets if held_bytes(model, layers, f, min(p - stage, m)) <= cap)
            stages.append([(forward, backward + again(model, layers, flags), 0) for flags in fit])
        for plan in product(*stages):
            yield bound(plan, m)


def held_bytes(model, layers, flags, in_flight):
    """Weights; per microbatch in flight the input of each layer and what is kept; one layer's lost bytes."""
    size, lost = 0, []
    for number, keeps in zip(layers, flags):
        units = model.layers[number].units
        kept = sum(unit.bytes for unit, keep in zip(units, keeps) if keep)
        size += model.layers[number].fixed + in_flight * (model.boundary + kept)
        lost.append(sum(unit.bytes for unit, keep in zip(units, keeps) if not keep))
    return size + max(lost)


def again(model, layers, flags):
    kept = [pair for i, keeps in zip(layers, flags) for pair in zip(model.layers[i].units, keeps)]
    return sum(unit.time for unit, keep in kept if not keep)


def simulated(model, plan, m):
    stages = [stage_memory.stage_of(model, stage) for stage in plan.stages]
    schedule = one_f_one_b(len(stages), m)
    times = {action: stages[action.stage][0 if action.kind == "F" else 1] for action in schedule.place}
    return simulate(schedule, Measured(times)).makespan


@pytest.mark.parametrize("seed, cap", [(0, 55), (1, 50), (2, 70)])
def test_adapipe(seed, cap):
    """6 layers, 3 stages: the two levels of dynamic programming equal all subsets of units in all cuts."""
    model, m = small_case(seed), 6
    plan = stage_memory.plan_adapipe(model, 3, m, cap)
    assert plan.time == min(every_plan(model, 3, m, cap))
    assert any(stage.recomputed for stage in plan.stages)  # the cap binds
    for stage, found in enumerate(plan.stages):
        assert found.bytes == held_bytes(model, found.layers, found.saved, 3 - stage) <= cap
        assert found.bytes == stage_memory.bytes_of(model, found.layers, found.saved, 3 - stage)
        assert found.recomputed == again(model, found.layers, found.saved)
    assert Fraction(95, 100) * simulated(model, plan, m) <= plan.time <= simulated(model, plan, m)


def test_no_more_microbatches_are_in_flight_than_there_are():
    """One microbatch keeps all of its units in each of three stages, under a cap of one."""
    layers = (stage_memory.Layer(1, 2, 0, (stage_memory.Unit(1, 10),)),) * 3
    plan = stage_memory.plan_adapipe(stage_memory.Model(layers, 0), p=3, m=1, cap=10)
    assert [(stage.recomputed, stage.bytes) for stage in plan.stages] == [(0, 10)] * 3


ROWS, FLOATS = 64, 4 * 64  # of a tensor; its bytes


class OfUnits(nn.Module):
    """A layer that keeps its input, for the sine, and then only what its units keep: one output per tanh."""

    def __init__(self, depths, kept):
        super().__init__()
        self.weight, self.parts = nn.Parameter(torch.ones(1)), list(zip(depths, kept))

    def forward(self, x):
        first, rest = self.parts[0], self.parts[1:]
        x = self.unit(lambda x: tanhs(torch.sin(x), first[0]), x, first[1])
        for depth, keep in rest:
            x = self.unit(lambda x, depth=depth: tanhs(x, depth), x, keep)
        return x + self.weight  # keeps nothing

    def unit(self, run, x, keep):
        return run(x) if keep else checkpoint(run, x, use_reentrant=False)


def tanhs(x, depth):
    for _ in range(depth):
        x = torch.tanh(x)
    return x


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("flags", [((True, True), (True, False)), ((False, True), (True, False))])
def test_adapipe_counts_the_bytes_that_a_stage_holds(in_flight, flags):
    """By the ledger, of forwards in flight and at the first backward's peak. Two layers, units of 2 and 3
    tensors; the second layer's are recomputed first, while all else is still there."""
    unit = lambda depth: stage_memory.Unit(depth, depth * FLOATS)
    layers = (stage_memory.Layer(0, 0, 4, (unit(2), unit(3))),) * 2
    model, stage = stage_memory.Model(layers, boundary=FLOATS), [OfUnits((2, 3), keeps) for keeps in flags]
    weights = sum(param.nbytes for layer in stage for param in layer.parameters())
    inputs = [torch.ones(ROWS, requires_grad=True) for _ in range(in_flight)]
    with Ledger() as ledger:
        outputs = [stage[1](stage[0](x)).sum() for x in inputs]  # the sum keeps nothing
        live = ledger.live_bytes - ledger.live_by_kind["buffers"] - 4 * in_flight  # the sums themselves
        outputs[0].backward()
    held = held_bytes(model, range(2), flags, in_flight) - 3 * FLOATS  # but for what is recomputed
    assert weights == 8 and live == held
    counted = stage_memory.bytes_of(model, range(2), flags, in_flight)
    assert counted == held + 3 * FLOATS and counted <= ledger.peak_bytes <= counted + 4 * FLOATS


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
        there_and_back = Fraction(2 * tensor.bytes, links.peer if way == "peer" else links.host)
        costs = {"keep": 0, "recompute": tensor.recompute}
        times[tensor.rank] += costs[way] if way in costs else max(0, there_and_back - tensor.idle)
    return max(times)


@pytest.mark.parametrize("idle", [0, 1, 3, 4, 7])
def test_a_swap_costs_what_its_copies_leave_exposed(idle):
    """A tensor of 4 GB over a link of 2 GB/s, replayed: out, the work of others, back, and wait for it."""
    link = Link("host", 0.0, 2e9, "none")
    device = Device("", {"float32": 1e12}, 1e12, 1e30, "none")
    work = lambda seconds: Compute("mm", int(seconds * 10**12), 0, "", "float32")
    first = min(idle, 2)  # so long the way out takes
    out, back = Copy(0, "to_host", 4 * 10**9), Copy(1, "to_device", 4 * 10**9)
    events = [out, work(first), Wait(0), back, work(idle - first), Wait(1)]
    step = replay({0: events}, Machine("", device, 1, link, link, 1, host=link)).step_s
    tensor = stage_memory.Tensor(0, 4 * 10**9, idle, None)
    links = stage_memory.Links(1, 2 * 10**9)
    assert step - idle == pytest.approx(stage_memory.extra_time(tensor, "host", links))
    assert stage_memory.extra_time(tensor, "peer", stage_memory.Links(2 * 10**9, 1)) == max(0, 4 - idle)


def test_what_a_rank_keeps_is_read_at_its_first_peak():
    """1F1B on two ranks, F=1, B=2: rank 0 holds microbatches 0 and 1 first, then 1 and 2, and so on."""
    tensors = stage_memory.tensors_at_peak(one_f_one_b(2, 4), Costs(F=1, B=2), layers=[4], recompute=[1])
    assert [(tensor.rank, tensor.idle) for tensor in tensors] == [(0, 3 - 0), (0, 6 - 1), (1, 0)]


def test_mpress():
    """All ways of all tensors on small cases: the plan fits, is best, never worse than recomputation."""
    chosen, better = set(), 0
    for seed in range(12):
        draw = random.Random(seed)
        sizes = lambda: (draw.randint(2, 8), draw.randint(0, 6), draw.randint(1, 6))
        tensors = [stage_memory.Tensor(rank, *sizes()) for rank in (0, 0, 0, 1, 1, 2)]
        fixed, links = (2, 3, 1), stage_memory.Links(peer=draw.choice([4, 8]), host=draw.choice([1, 2]))
        cap = draw.randint(9, 12)
        plan = stage_memory.plan_mpress(tensors, fixed, cap, links)
        times = {
            ways: longest_extra_time(tensors, ways, 3, links)
            for ways in product(stage_memory.PLACES, repeat=6)
            if fits(tensors, ways, fixed, cap)
        }
        assert plan.time == min(times.values()) == times[plan.places]
        alone = stage_memory.plan_mpress(tensors, fixed, cap, links, places=("keep", "recompute"))
        assert fits(tensors, alone.places, fixed, cap) and plan.time <= alone.time
        chosen |= set(plan.places)
        better += plan.time < alone.time
    assert chosen == set(stage_memory.PLACES) and better >= 6, (chosen, better)


def test_idle_ranks_of_a_pipeline_take_what_the_first_ranks_lack():
    """1F1B on 4 ranks, 2 tensors of 4 bytes, a cap of 20: ranks hold 32, 24, 16 and 8."""
    tensors = stage_memory.tensors_at_peak(one_f_one_b(4, 8), Costs(F=2, B=4), [4, 4], recompute=[1, 1])
    of_rank = [[tensor for tensor in tensors if tensor.rank == rank] for rank in range(4)]
    assert [sum(tensor.bytes for tensor in own) for own in of_rank] == [32, 24, 16, 8]
    idle = [[tensor.idle for tensor in own] for own in of_rank]
    assert idle[3] == [0, 0] and min(idle[0]) > min(idle[2])
    links = stage_memory.Links(peer=2, host=Fraction(1, 16))
    plan, alone = (
        stage_memory.plan_mpress(tensors, (0,) * 4, 20, links, ways)
        for ways in (stage_memory.PLACES, ("keep", "recompute"))
    )
    assert (plan.time, alone.time) == (0, 3)
    assert "peer" in plan.places and fits(tensors, plan.places, (0,) * 4, 20)
    nothing_free = stage_memory.plan_mpress(tensors, (0, 0, 4, 12), 20, links)  # less room elsewhere
    assert 0 < nothing_free.time <= alone.time
