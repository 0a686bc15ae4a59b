"""Messages name the right rank and the right stage: here stage 0 stands on rank 1 and stage 1 on rank 0, so that a
mix-up shows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minitrain import collectives
from minitrain.attention.dropout import Places
from minitrain.compose.parallelize import ModelHooks
from minitrain.pipeline.runtime import Runner, check_fits
from minitrain.pipeline.schedule import B, F, Schedule, check, in_flight, peak
from minitrain.pipeline.schedules.greedy import greedy
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.ranks.launch import dryrun

FIRST, LAST = one_f_one_b(2, 3).ranks
WIDTH = 4


def turned(last=LAST, first=FIRST) -> Schedule:
    return Schedule("turned", (last, first), 2, 3)


def without(entries, *gone):
    return tuple(entry for entry in entries if entry not in gone)


REFUSED = {
    "turned: F0.1 stands 2 times (rank 1); every action": lambda: check(turned(first=(*FIRST, F(0, 1)))),
    "turned: B1.2 stands 2 times (rank 0); every action": lambda: check(turned((*LAST, B(1, 2)))),
    "turned: stage 1, microbatch 2 stands on ranks [0, 1]; what": lambda: check(
        turned(without(LAST, B(1, 2)), (*FIRST, B(1, 2)))
    ),
    "turned: B0.2 is missing; each stage": lambda: check(turned(first=without(FIRST, B(0, 2)))),
    "turned is stuck: rank 0 at B1.0 waits for F1.0, rank 1 at B0.0 waits for B1.0; move": lambda: check(
        turned((B(1, 0), *without(LAST, B(1, 0))))
    ),
    "turned: entry 0 of rank 1 is 3; an entry": lambda: turned(first=(3,)),
    "turned: entry 2 of rank 0 is 4; an entry": lambda: turned((*LAST[:2], 4)),
    "limit=(1, 9): rank 0 may hold 1 activations, but a microbatch has 2 stages there and": lambda: greedy(
        [1, 0, 0], 3, 2, limit=(1, 9)
    ),
    "rank 1 may hold 1 activations, but a microbatch has 2 stages there and": lambda: greedy(
        [1, 0, 1], 3, 2, limit=(9, 1)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_schedules_that_cannot_be(words):
    with pytest.raises(ValueError) as error:
        REFUSED[words]()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_who_holds_what():
    """The first stage holds two activations at most, wherever it stands."""
    schedule = check(turned())
    assert [schedule.stages_of(rank) for rank in (0, 1)] == [[1], [0]]
    assert [peak(schedule, rank) for rank in (0, 1)] == [1, 2]
    assert [in_flight(schedule, rank) for rank in (0, 1)] == [[1, 0] * 3, [1, 2, 1, 2, 1, 0]]


def stages(*numbers, width=WIDTH) -> dict[int, nn.Module]:
    return {number: nn.Linear(WIDTH if number else 2, width, dtype=torch.float64) for number in numbers}


def said_by(call) -> str:
    try:
        return str(call())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("given", [(), (0,), (1,), (3, 1), (0, 1, 3), (1, 2)])
def test_all_stages_of_a_rank_are_compared_and_named(given):
    """Rank 1 of two runs stages 1 and 3 of an interleaved schedule; those given are named, all and in order."""
    schedule = interleaved(2, 4, 2)

    def on_rank():
        return said_by(lambda: check_fits(stages(*given), schedule, collectives.world()))

    said = dryrun.run(on_rank, rank=1, ranks=2)
    if sorted(given) == [1, 3]:
        assert said == "None"
    else:
        assert f": rank 1 runs the stages [1, 3], but was given {sorted(given)}; build" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_runner_tells_ranks_from_stages(rank):
    own, other, schedule = 1 - rank, rank, check(turned())
    middle = Schedule("three", (schedule.ranks[0], *one_f_one_b(2, 3).ranks), 2, 3)

    def on_rank():
        group = collectives.world()
        runner = Runner(stages(own), schedule, group, None, None, width=WIDTH)
        runner.units = [(torch.zeros(2, 3),) * 2] * 3

        def fail(action):
            raise FloatingPointError("planted")

        runner.forward = fail
        return [
            said_by(lambda: check_fits(stages(other), schedule, group)),
            said_by(lambda: check_fits(stages(own), middle, group)),
            said_by(lambda: runner.play((F(own, 1),))),
            said_by(lambda: runner.check_output(0, 1, torch.zeros(2, 3, 5))),
        ]

    wrong, size, failed, shape = dryrun.run(on_rank, rank=rank, ranks=2)
    assert f"turned: rank {rank} runs the stages [{own}], but was given [{other}]; build" in wrong
    assert "three is for 3 ranks, the group world has 2; make it fit" in size
    assert failed.startswith(f"RuntimeError: turned, rank {rank}: F{own}.1 failed, ")
    assert "stage 0 gives [2, 3, 5] torch.float32, stage 1 expects [2, 3, 4] torch.float64; cut" in shape


def test_what_routers_have_counted_is_forgotten_when_forwards_run_again():
    """And when a step begins: the one before may have failed. What is kept for backwards goes as well."""

    def on_rank():
        routers = SimpleNamespace(forget=lambda: forgotten.append(len(runner.in_flight)))
        again = SimpleNamespace(begin=lambda runner: None, before_backward=lambda: True)
        runner = Runner(stages(1), check(turned()), collectives.world(), None, None, width=WIDTH)
        runner.hooks, runner.device = [ModelHooks(Places(), routers), again], torch.device("cpu")
        runner.begin()
        runner.in_flight[1, 0] = None
        runner.play_with_restart((), ())

    forgotten = []
    dryrun.run(on_rank, rank=0, ranks=2)
    assert forgotten == [0, 0]


@pytest.mark.parametrize(
    "dtype, wide", [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_the_losses_of_microbatches_add_up_in_float32_at_least(dtype, wide):
    def on_rank():
        how = dict(width=WIDTH, dtype=getattr(torch, dtype))
        runner = Runner(stages(1), check(turned()), collectives.world(), None, None, **how)
        runner.device = torch.device("cpu")
        runner.begin()
        return runner.loss.dtype

    assert dryrun.run(on_rank, rank=0, ranks=2) is getattr(torch, wide)
