"""The capstone: its table is what ranks hold and send, each kind of chaos does what it says, and it can be lost."""

import pytest

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.course import capstone
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger


def build(ranks: int, layout: dict):
    strategy = Strategy(**{"precision": "float64", "dp": ranks, **layout})
    return parallelize(capstone.MODEL, strategy, lambda params: AdamW(params, lr=1e-2), seed=3)


def real(layout: dict, steps: int = 2):
    with Ledger() as ledger:
        run, sent = build(3, layout), []
        for step in range(steps):
            run.step(run.batch(capstone.DATA, step), capstone.CLIP)
            sent.append(ledger.sent_bytes())
    return ledger.peak_bytes, sent[1] - sent[0]


@pytest.mark.parametrize("layout", [{"zero": 1}, {"zero": 2, "microbatches": 2, "recompute": "full"}])
def test_the_table_is_what_ranks_hold_and_send(layout):
    held, sent, step_us = capstone.counted(build, layout, 3)
    assert launch.run(real, layout, ranks=3)[0] == (held, sent)
    assert capstone.account(build, layout, 3) == (held, sent, step_us)


def chosen(job: dict, ranks: int) -> dict:
    fit = [row for row in job["accounts"] if row[1] == ranks and row[2] <= job["held_cap"]]
    return min((row for row in fit if row[3] <= job["sent_cap"]), key=lambda row: row[4])[0]


@pytest.mark.parametrize("kind", capstone.KINDS)
def test_a_budget_can_be_kept_by_every_generation_and_not_with_the_layout_of_four(kind):
    for seed in range(30):
        job = capstone.drawn(kind, seed).job
        layouts = {ranks: chosen(job, ranks) for ranks in (4, 3, 2)}
        assert capstone.counted(build, layouts[4], 2)[0] > job["held_cap"]
        assert capstone.counted(build, {"zero": 0}, 4)[0] > job["held_cap"]
        assert capstone.score(build, capstone.drawn(kind, seed), layouts, [2, 4, 1.0]) > 0


def test_without_whole_weights_a_flip_is_not_noticed_and_an_impatient_launch_ends_who_works():
    flip = capstone.drawn("flip", 3)
    played = capstone.play(build, flip, dict.fromkeys((4, 3, 2), {"zero": 3}), [2, 4, 2.0])
    worst = max(abs(one - other) for one, other in zip(played.losses, capstone.wanted(build)))
    assert played.segments == [[0, 4]] and worst > 1e-6
    slow = capstone.drawn("slow", 3)
    played = capstone.play(
        build, slow, dict.fromkeys((4, 3, 2), {"zero": 1}), [2, 4, slow.job["pause_s"] / 3]
    )
    assert len(played.segments) > 1 and [-1, "hung"] in [line[:2] for line in played.log]
