"""The comparison finds what is right and what is not, and a planted mistake is felt by the rank that has it."""

import pytest

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.pipelines import agree, batches, losses, one_process, step
from minitrain.model.config import GPTConfig
from minitrain.model.training.optim import AdamW
from minitrain.pipeline.schedules.one_direction import one_f_one_b, seq1f1b
from minitrain.plan.strategy import Strategy

SMALL = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=2, max_positions=16)


def halved(run):
    if 0 in run.runner.schedule.stages_of(run.runner.rank):
        finish = run.sync.finish

        def broken():
            finish()
            next(iter(run.sync.names)).grad.mul_(0.5)

        run.sync.finish = broken


ROWS = batches(SMALL)


def piped(schedule, optimizer=None):
    name, cut = ("seq1f1b", dict(slices=2)) if schedule.slices == 2 else ("1f1b", {})
    microbatches = schedule.microbatches // schedule.slices
    strategy = Strategy(pp=2, microbatches=microbatches, schedule=name, precision="float64", **cut)
    return parallelize(SMALL, strategy, optimizer, schedule=schedule)


def on_two_ranks():
    plain, slices = one_f_one_b(2, 4), seq1f1b(2, 2, 2)
    steps = [step(piped(plain), ROWS), step(piped(slices), ROWS), step(piped(plain), ROWS, plant=halved)]
    return steps, losses(piped(plain, lambda params: AdamW(params, lr=1e-2)), ROWS, steps=3)


def test_a_mistake_is_seen_where_it_is():
    reference = one_process(SMALL)
    ranks = launch.run(on_two_ranks, ranks=2)
    plain, slices, broken = zip(*(steps for steps, _ in ranks))
    assert agree(plain, *reference) == agree(slices, *reference) == [True] * 3
    assert agree(broken, *reference) == [True, False, True]
    assert sum(one["messages"] for one in plain) == 8 and all(one["live"] > 0 for one in plain)
    assert ranks[0][1] == ranks[1][1] and ranks[0][1][0] == pytest.approx(reference[0].item(), abs=1e-12)
    assert ranks[0][1][2] < ranks[0][1][1] < ranks[0][1][0]
