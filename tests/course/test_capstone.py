"""The capstone: its table is what ranks hold and send, its budgets are a trap, and it can be lost."""

import pytest

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.course import capstone
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger

SIZES = 4, 3, 2


def build(ranks, layout):
    strategy = Strategy(**{"precision": "float64", "dp": ranks, **layout})
    return parallelize(capstone.MODEL, strategy, lambda params: AdamW(params, lr=1e-2), seed=3)


def real(layout):
    with Ledger() as ledger:
        run, sent = build(3, layout), []
        for step in range(2):
            run.step(run.batch(capstone.DATA, step), capstone.CLIP)
            sent.append(ledger.sent_bytes())
    return ledger.peak_bytes, sent[1] - sent[0]


@pytest.mark.parametrize("layout", [{"zero": 1}, {"zero": 2, "microbatches": 2, "recompute": "full"}])
def test_the_table_is_what_ranks_hold_and_send(layout):
    *counts, step_us = capstone.counted(build, layout, 3)
    assert [*launch.run(real, layout, ranks=3)[0]] == counts
    assert capstone.account(build, layout, 3) == (*counts, step_us)


@pytest.mark.parametrize("kind", capstone.KINDS)
def test_budgets_can_be_kept_by_every_generation_and_not_with_the_layout_of_four(kind):
    for seed in range(30):
        job, fit = capstone.drawn(kind, seed).job, {}
        for layout, ranks, held, sent, _ in job["accounts"]:
            if held <= job["held_cap"] and sent <= job["sent_cap"]:
                fit.setdefault(ranks, layout)
        assert fit.keys() == set(SIZES) and {"zero": 0} not in fit.values()
        assert capstone.counted(build, fit[4], 2)[0] > job["held_cap"]


def test_a_flip_of_sharded_weights_is_not_noticed_and_an_impatient_launch_ends_who_works():
    played = capstone.play(build, capstone.drawn("flip", 3), dict.fromkeys(SIZES, {"zero": 3}), [2, 4, 2.0])
    worst = max(abs(one - other) for one, other in zip(played.losses, capstone.wanted(build)))
    assert played.segments == [[0, 4]] and worst > 1e-6
    slow = capstone.drawn("slow", 3)._replace(faults="slow 0 @3-3 forward 60")
    played = capstone.play(build, slow, dict.fromkeys(SIZES, {"zero": 1}), [2, 4, 2.0])
    assert len(played.segments) > 1 and [-1, "hung"] in [line[:2] for line in played.log]
