"""Intervals between saves: published figures, formulas against each other, and all of them against a simulated
job; CheckFreq's steps against simulated saves."""

import random
from fractions import Fraction
from math import ceil, sqrt

import pytest

from minitrain.systems.plan import checkpoint_interval as plan
from minitrain.systems.plan.checkpoint_interval import TwoLevels
from minitrain.systems.simulate import checkpoint_pipeline as pipeline
from minitrain.systems.simulate.checkpoint_pipeline import State, Work
from minitrain.systems.simulate.failures import Level, failing, simulate

LLAMA_S = 3.09 * 3600  # between failures
MEMORY, DISK, SURVIVES = Level(5.0, 30.0), Level(120.0, 600.0), 0.9


def run(interval_s, failures=20_000, seed=0, **levels):
    """A job of so many failures: the statistical error of its waste is about 0.5 %."""
    return simulate(failures * LLAMA_S, interval_s, failing(seed, LLAMA_S), **levels)


def two_level_run(chosen, failures=20_000, seed=0):
    draw = random.Random(seed)
    survives = lambda failure: draw.random() < SURVIVES
    levels = {"memory": MEMORY, "disk": DISK, "every": chosen.every, "memory_survives": survives}
    return run(chosen.interval_s, failures, seed, **levels)


def waste_estimate(interval_s, save_s):
    """To first order: what is saved, and half an interval lost with each failure."""
    return save_s / interval_s + interval_s / (2 * LLAMA_S)


@pytest.mark.parametrize("save_s, interval_s, percent", [(10, 472, 4.2), (60, 1156, 10.4), (300, 2585, 23.2)])
def test_young_for_llama_3(save_s, interval_s, percent):
    assert plan.young_s(save_s, LLAMA_S) == pytest.approx(interval_s, abs=2)
    at_best = waste_estimate(plan.young_s(save_s, LLAMA_S), save_s)
    assert at_best == pytest.approx(sqrt(2 * save_s / LLAMA_S), rel=1e-12)
    assert 100 * at_best == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("mtbf_minutes, minutes", [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_has_the_figures_of_his_paper(mtbf_minutes, minutes):
    """Saves of 5 minutes; the captions of figures 3, 4 and 5."""
    digits = 1 if minutes < 10 else 0
    assert round(plan.daly_s(5, mtbf_minutes), digits) == minutes
    exact = plan.exact_s(5, mtbf_minutes)
    assert (
        abs(plan.daly_s(5, mtbf_minutes) - exact) < 0.01 * abs(plan.young_s(5, mtbf_minutes) - exact) + 0.03
    )
    assert plan.daly_s(30, 15) == plan.daly_s(60, 15) == 15


@pytest.mark.parametrize("save_s", [0.001, 1.0, 60.0, 1000.0, 40_000.0])
def test_the_exact_interval_is_where_the_waste_is_least(save_s):
    best = plan.exact_s(save_s, LLAMA_S)
    x = best / LLAMA_S
    assert x - 1 + 2.718281828459045 ** -(x + save_s / LLAMA_S) == pytest.approx(0, abs=1e-12)  # dE/dτ = E/τ
    least = plan.waste(best, save_s, LLAMA_S, 300)
    for other in (0.9, 0.99, 1.01, 1.1):
        assert plan.waste(best * other, save_s, LLAMA_S, 300) > least
    for rule in (plan.young_s, plan.daly_s):
        assert plan.waste(rule(save_s, LLAMA_S), save_s, LLAMA_S, 300) >= least


@pytest.mark.parametrize("save_s", [10.0, 60.0, 300.0])
def test_young_and_daly_against_a_simulated_job(save_s):
    """The waste at Young's interval, at a third of it and at its triple, within 2 %; and it is least at Young's."""
    found = {}
    for factor in (1 / 3, 1, 3):
        interval_s = factor * plan.young_s(save_s, LLAMA_S)
        found[factor] = run(interval_s, disk=Level(save_s, 120.0)).waste
        assert found[factor] == pytest.approx(plan.waste(interval_s, save_s, LLAMA_S, 120.0), rel=0.02)
    assert found[1] < min(found[1 / 3], found[3])
    best = plan.exact_s(save_s, LLAMA_S) / plan.young_s(save_s, LLAMA_S)
    assert best == pytest.approx({10: 0.986, 60: 0.966, 300: 0.924}[save_s], abs=5e-4)
    assert found[1] / sqrt(2 * save_s / LLAMA_S) == pytest.approx(
        1 + 120 / sqrt(2 * save_s * LLAMA_S), rel=0.12
    )


def test_two_levels_without_memory_are_one():
    for restart_s in (0.0, 600.0):
        one = plan.waste(500.0, 120.0, LLAMA_S, restart_s)
        levels = (Level(120.0, 0.0), Level(120.0, restart_s))
        assert plan.two_levels_waste(TwoLevels(500.0, 1), *levels, LLAMA_S, 0.0) == pytest.approx(
            one, rel=1e-12
        )
    same = Level(120.0, 600.0)
    once = plan.waste(500.0, 120.0, LLAMA_S, 600.0)
    for survives in (0.3, 0.999):
        assert plan.two_levels_waste(TwoLevels(500.0, 1), same, same, LLAMA_S, survives) == pytest.approx(
            once
        )


def test_of_two_numbers_of_saves_the_one_that_costs_less():
    """Of n around the 1.45 that would be best: (1 + 2.1025/n) · (.5 + .5n) is 3.10 for 1 and 3.08 for 2."""
    assert plan.two_levels(1.0, 3.1025, 1000.0, 0.5).every == 2
    assert plan.two_levels(1.0, 2.96, 1000.0, 0.5).every == 1  # 1.4: 2.96 and 2.97


def test_the_best_two_levels_are_best():
    """Against all numbers up to 40 and intervals around; the first-order plan is close."""
    chosen = plan.best_two_levels(MEMORY, DISK, LLAMA_S, SURVIVES)
    least = plan.two_levels_waste(chosen, MEMORY, DISK, LLAMA_S, SURVIVES)
    for every in range(1, 41):
        for factor in (0.5, 0.8, 0.95, 0.999, 1.001, 1.05, 1.25, 2):
            other = TwoLevels(factor * chosen.interval_s, every)
            assert plan.two_levels_waste(other, MEMORY, DISK, LLAMA_S, SURVIVES) > least
    first = plan.two_levels(MEMORY.stall_s, DISK.stall_s, LLAMA_S, SURVIVES)
    assert plan.two_levels_waste(first, MEMORY, DISK, LLAMA_S, SURVIVES) < 1.01 * least


@pytest.mark.parametrize("disk_save_s, restart_s", [(120.0, 0.0), (120.0, 3000.0), (5000.0, 3000.0)])
@pytest.mark.parametrize("chosen", [TwoLevels(360.0, 14), TwoLevels(1500.0, 2)])
def test_two_levels_against_a_simulated_job(chosen, disk_save_s, restart_s):
    levels = Level(5.0, restart_s), Level(disk_save_s, 2 * restart_s)
    draw = random.Random(1)
    survives = lambda failure: draw.random() < SURVIVES
    both = dict(zip(("memory", "disk"), levels), every=chosen.every, memory_survives=survives)
    found = run(chosen.interval_s, 15_000 if disk_save_s < 1000 else 4_000, **both)
    assert found.waste == pytest.approx(plan.two_levels_waste(chosen, *levels, LLAMA_S, SURVIVES), rel=0.02)
    assert found.to_disk / found.failures == pytest.approx(1 - SURVIVES, abs=0.05)


def test_in_memory_ckpt():
    """Memory is 24 times as fast, so the best interval of a simulated job is shorter by about sqrt(24); both levels beat
    either alone."""
    tried = [100 * 1.1**k for k in range(36)]
    best_s = lambda **level: min(tried, key=lambda interval_s: run(interval_s, 1500, **level).waste)
    assert best_s(disk=DISK) / best_s(memory=MEMORY) == pytest.approx(sqrt(24), rel=0.15)
    chosen = plan.best_two_levels(MEMORY, DISK, LLAMA_S, SURVIVES)
    both = two_level_run(chosen).waste
    disk_alone = run(plan.exact_s(DISK.stall_s, LLAMA_S), disk=DISK).waste
    # Memory alone: a tenth of the failures begin the job again, so it must be short to end at all.
    jobs = []
    for seed in range(40):
        draw = random.Random(seed)
        interval_s = plan.young_s(MEMORY.stall_s, LLAMA_S)
        survives = lambda failure: draw.random() < SURVIVES
        failures = failing(seed, LLAMA_S)
        jobs.append(simulate(30 * LLAMA_S, interval_s, failures, memory=MEMORY, memory_survives=survives))
    memory_alone = 1 - sum(job.useful_s for job in jobs) / sum(job.elapsed_s for job in jobs)
    assert both < 0.5 * disk_alone < 0.5 * memory_alone
    assert both == pytest.approx(plan.two_levels_waste(chosen, MEMORY, DISK, LLAMA_S, SURVIVES), rel=0.02)
    assert both == pytest.approx(0.08, abs=0.002) and disk_alone == pytest.approx(0.18, abs=0.01)
    never = run(plan.young_s(MEMORY.stall_s, LLAMA_S), memory=MEMORY).waste
    assert never < both, "the control: were memory never lost, it would do alone"


def overhead(work, state, way, every):
    """(stalls / training, whether a copy waits for the write of the one before), of three saves."""
    played = pipeline.train(work, state, way, 3 * every + 1, every)
    late = any(played.start(f"copy {s}.0") > played.end(f"U {(s + 1) * every - 1}.0") for s in range(3))
    return played.stall("train") / (3 * every * sum(work)), late


def test_checkfreq_steps():
    """The chosen number keeps the budget, played, and no save waits for another; one step fewer does not."""
    draw, by_budget = random.Random(0), 0
    for _ in range(40):
        work = Work(*(Fraction(draw.randint(2, 9)) for _ in range(3)))
        state = State(Fraction(draw.randint(1, 30)), Fraction(draw.randint(1, 90)))
        budget = Fraction(draw.choice([35, 100, 200]), 1000)
        every = plan.checkfreq_steps(sum(work), work.update_s, *state, budget)
        share, late = overhead(work, state, pipeline.checkfreq(), every)
        assert share <= budget and not late
        if every > 1:
            share, late = overhead(work, state, pipeline.checkfreq(), every - 1)
            assert share > budget or late
            by_budget += share > budget and not late
    assert by_budget > 10, "both conditions must have decided"


def test_checkfreq_default_budget():
    assert plan.checkfreq_steps(1.0, 0.1, 2.3, 5.0) == 40, "1.4 s of stall are 3.5 % of 40 s"
    assert plan.checkfreq_steps(1.0, 0.1, 0.9, 5.0) == 6, "no stall: the write decides"
    assert plan.checkfreq_steps(10.0, 0.1, 0.9, 5.0) == 1


def test_snapshot_stall_interval_is_the_time_to_persist():
    draw = random.Random(0)
    for _ in range(25):
        work = Work(*(Fraction(draw.randint(1, 9)) for _ in range(3)))
        state = State(Fraction(draw.randint(1, 30)), Fraction(draw.randint(1, 99)))
        every = max(1, ceil(state.write_s / sum(work)))
        share, late = overhead(work, state, pipeline.snapshot_stall(), every)
        assert not late and share == state.copy_s / (every * sum(work))
        assert every == 1 or overhead(work, state, pipeline.snapshot_stall(), every - 1)[1]
