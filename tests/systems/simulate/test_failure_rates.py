"""Published failures: the arithmetic of reports, and chances against draws of a random generator."""

import random
from math import log, sqrt
from statistics import fmean

import pytest

from minitrain.plan.accounting import training_days
from minitrain.systems.simulate import failures as rates
from minitrain.systems.simulate.failures import LLAMA_3, Level, failing, simulate
from tests.pipeline.lists import refuse

DAY = 24 * 3600.0


def test_failure_statistics():
    """GPU-hours between two failures, of all and of the unexpected ones for Llama 3; OPT's are at most."""
    every, unexpected, opt, bloom, alibaba = rates.REPORTS
    assert every.hours == pytest.approx((2.781, 2.781), abs=5e-4)
    assert unexpected.gpu_hours[0] == pytest.approx(50_677, abs=1) and bloom.gpu_hours == (32_256, 64_512)
    assert opt.gpu_hours == pytest.approx((0, 8333), abs=0.5) and alibaba.gpu_hours[0] == pytest.approx(
        12_800
    )
    assert every.gpu_hours[0] / opt.gpu_hours[1] > 5, "six times, by the report"


def test_failure_taxonomy():
    counts = {where: sum(causes.values()) for where, causes in LLAMA_3.items()}
    share = lambda count, percent: 100 * count / 419 == pytest.approx(percent, abs=0.05)
    assert sum(counts.values()) == 419 and LLAMA_3["GPU"]["faulty GPU"] == 148
    assert share(148, 35.3) and share(counts["GPU"], 64.0), "by the counts"
    assert share(126, 30.1) and share(counts["GPU"] - 148 + 126, 58.7), "as printed: of 126"
    assert share(counts["GPU"] + counts["host"] + counts["network"], 77.3), "hardware; printed is 78"


def test_a_node_in_a_day():
    chance, draw = rates.at_least_one(0.015, 125), random.Random(0)
    assert chance == pytest.approx(0.84881, abs=5e-6)
    drawn = fmean(any(draw.random() < 0.015 for _ in range(125)) for _ in range(20_000))
    assert drawn == pytest.approx(chance, abs=4 * sqrt(chance * (1 - chance) / 20_000))
    refuse({"chance=1.5": lambda: rates.at_least_one(1.5, 3)})


def test_ideal_days_of_57():
    """OPT-175B, 300e9 tokens at 147 TFLOP/s on 992 GPUs, and with the forward that recomputation does again."""
    ideal, again = (training_days(175e9, 300e9, 992, 147e12, flops) for flops in (6, 8))
    assert (ideal, again) == pytest.approx((25.0, 33.34), abs=0.01)
    assert (1 - 25 / 57, 1 - again / 57) == pytest.approx((0.561, 0.415), abs=5e-4)


def test_the_slowest_of_many():
    draw = random.Random(0)
    for ranks, ratio in (4, 0.62), (64, 0.81), (1024, 0.87), (16_384, 0.90):
        largest = rates.expected_largest(ranks)
        assert largest / sqrt(2 * log(ranks)) == pytest.approx(ratio, abs=5e-3)
        drawn = [max(draw.gauss(0, 1) for _ in range(ranks)) for _ in range(400_000 // ranks)]
        assert fmean(drawn) == pytest.approx(largest, abs=4 / sqrt(len(drawn)))


def test_54_days_of_llama_3():
    """Goodput by how soon a failure is seen."""
    mtbf_s, waste = 54 * DAY / 419, {}
    for seen_s in (60, 600, 1800):
        run = simulate(54 * DAY, 600, failing(1, mtbf_s), disk=Level(5, seen_s + 300))
        waste[seen_s] = run.waste
        estimate = 5 / 605 + (300 + seen_s + 605 / 2) / mtbf_s
        assert run.elapsed_s / run.useful_s - 1 == pytest.approx(estimate, rel=0.15)
    assert waste[60] < 0.08 < waste[600] < 0.14 < waste[1800], "detection takes more than saves do"
