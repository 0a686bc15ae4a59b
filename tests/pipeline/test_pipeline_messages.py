"""Messages name the right rank and the right stage: here stage 0 stands on rank 1 and stage 1 on rank 0, so that a
mix-up shows. And what a runner begins a step with."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minitrain import collectives
from minitrain.attention.placed import Places
from minitrain.compose.parallelize import ModelHooks
from minitrain.pipeline.runtime import Runner, check_fits
from minitrain.pipeline.schedule import B, F, Schedule, check, in_flight, peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.ranks.launch import dryrun
from minitrain.systems.pipeline.post_validation import PostValidation
from tests.pipeline.lists import said_by

FIRST, LAST = one_f_one_b(2, 3).ranks
STUCK = (B(1, 0), F(1, 0), *LAST[2:])
WIDTH = 4


def turned(last=LAST, first=FIRST) -> Schedule:
    return Schedule("turned", (last, first), 2, 3)


def runner(own=1, **settings) -> Runner:
    stages = {own: nn.Linear(WIDTH if own else 2, WIDTH, dtype=torch.float64)}
    run = Runner(stages, check(turned()), collectives.world(), None, None, width=WIDTH, **settings)
    run.device = torch.device("cpu")
    return run


@pytest.mark.parametrize(
    "words, first, last",
    [
        ("turned: F0.1 stands 2 times (rank 1); every action", (*FIRST, F(0, 1)), LAST),
        ("turned: B1.2 stands 2 times (rank 0); every action", FIRST, (*LAST, B(1, 2))),
        ("turned is stuck: rank 0 at B1.0 waits for F1.0, rank 1 at B0.0 waits for B1.0; move", FIRST, STUCK),
        ("turned: entry 0 of rank 1 is 3; an entry", (3,), LAST),
    ],
)
def test_schedules_that_cannot_be(words, first, last):
    assert words in said_by(lambda: check(turned(last, first)))


def test_who_holds_what():
    """The first stage holds two activations at most, wherever it stands."""
    schedule = check(turned())
    assert [schedule.stages_of(rank) for rank in (0, 1)] == [[1], [0]]
    assert [peak(schedule, rank) for rank in (0, 1)] == [1, 2]
    assert [in_flight(schedule, rank) for rank in (0, 1)] == [[1, 0] * 3, [1, 2, 1, 2, 1, 0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_runner_tells_ranks_from_stages(rank):
    own, other = 1 - rank, rank
    middle = Schedule("three", (LAST, *one_f_one_b(2, 3).ranks), 2, 3)

    def on_rank():
        group, run = collectives.world(), runner(own)
        run.units = [(torch.zeros(2, 3),) * 2] * 3

        def fail(action):
            raise FloatingPointError("planted")

        run.forward = fail
        return [
            said_by(lambda: check_fits({other: None}, run.schedule, group)),
            said_by(lambda: check_fits({own: None}, middle, group)),
            said_by(lambda: run.play((F(own, 1),))),
            said_by(lambda: run.check_output(0, 1, torch.zeros(2, 3, 5))),
        ]

    wrong, size, failed, shape = dryrun.run(on_rank, rank=rank, ranks=2)
    assert f"turned: rank {rank} runs the stages [{own}], but was given [{other}]; build" in wrong
    assert "three is for 3 ranks, and the group has 2; make it fit" in size
    assert f"turned, rank {rank}: F{own}.1 failed: planted" in failed
    assert "stage 0 gives [2, 3, 5] torch.float32, stage 1 expects [2, 3, 4] torch.float64; cut" in shape


def test_what_routers_have_counted_is_forgotten_when_forwards_run_again():
    """And when a step begins: the one before may have failed. What is kept for backwards goes as well."""

    def on_rank():
        routers, run = SimpleNamespace(forget=lambda: forgotten.append(len(run.in_flight))), runner()
        run.hooks, run.play = [ModelHooks(Places(), routers)], lambda program: None
        run.begin()
        run.in_flight[1, 0] = None
        PostValidation.play(SimpleNamespace(before_backward=lambda: True), run)

    forgotten = []
    dryrun.run(on_rank, rank=0, ranks=2)
    assert forgotten == [0, 0]


@pytest.mark.parametrize(
    "dtype, wide", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_the_losses_of_microbatches_add_up_in_float32_at_least(dtype, wide):
    def on_rank():
        run = runner(dtype=getattr(torch, dtype))
        run.begin()
        return run.loss.dtype

    assert dryrun.run(on_rank, rank=0, ranks=2) is getattr(torch, wide)
