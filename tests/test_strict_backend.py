"""Real ranks under NCCL's rules of order: as one process to 1e-12; what must hang hangs, and is told."""

import os
from functools import cache, partial

import pytest
import torch

from minitrain import launch
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedules.bidirectional import dualpipe_v
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import zb_v
from minitrain.ranks.collectives import all_reduce, world
from minitrain.ranks.launch import LaunchTimeout, RankError
from tests import parallel
from tests.context.cores import in_one_axis
from tests.context.runs import distance
from tests.layouts import compared, draw, on_rank
from tests.ranks.nccl_order import play, step_of
from tests.ranks.test_nccl_order import LAYOUTS, case_of, run_pipeline
from tests.strict_backend import strict, strictly

PROBLEM = parallel.Problem(config=parallel.small(num_layers=6), batch_sizes=(8, 7), microbatches=4)


@cache
def reference():
    return parallel.one_process(PROBLEM)


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(2, 4), one_f_one_b(4, 4), interleaved(2, 4, 2), zb_v(4, 4), dualpipe_v(2, 4)],
    ids=lambda s: s.name,
)
def test_pipelines_equal_one_process(schedule):
    shape = dict(dp=1, pp=len(schedule.ranks))
    outcomes = launch.run(strictly, parallel.train_pipeline, PROBLEM, shape, schedule, ranks=shape["pp"])
    assert parallel.difference(parallel.together(outcomes), reference()) < parallel.TOLERANCE


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name):
    case = case_of(name)
    assert not compared(case, launch.run(strictly, on_rank, case, ranks=case.strategy.ranks), False, False)


# on 2 to 4 ranks: LoongTrain, halves in turns with Ulysses, balanced tiles with chunks of experts, a step checked
# later on three stages in ZeRO-3, experts of two ranks with tensor parallelism
@pytest.mark.parametrize(
    "number", [66, 98, *(pytest.param(n, marks=pytest.mark.slow) for n in (26, 70, 135))]
)
def test_drawn_layouts_equal_one_process(number):
    case = draw(number, 41)
    assert case.strategy.ranks <= 4
    assert not compared(case, launch.run(strictly, on_rank, case, ranks=case.strategy.ranks), False, False)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_equals_one_process(ranks):
    names = ("ring zigzag", "balanced", "unbalanced", "Ulysses contiguous")[: 4 if ranks != 3 else 3]

    def on_rank():
        group = world()
        cores = in_one_axis(group)
        return [distance(*cores[name], group, length=12 * ranks) for name in names]

    for far in launch.run(strictly, on_rank, ranks=ranks):
        assert max(far) < parallel.TOLERANCE


# ---- what hangs -------------------------------------------------------------------------------------------

STEP = dict(lazy=True, twin=True, opened=True)
HANGING = {
    "one queue for all messages of a group": (one_f_one_b(4, 8), dict(lazy=False, twin=False)),
    "one for each direction": (one_f_one_b(4, 8), dict(lazy=False)),
    "one for each pair": (one_f_one_b(2, 4), dict(twin=False)),
    "links are opened by the first message": (one_f_one_b(2, 4), dict(opened=False)),
}


def one_step(schedule, twin, opened):
    if not opened:
        Runner.open_links = lambda self: None
    run_pipeline(schedule, "", {}, twin)


@pytest.mark.parametrize("name", HANGING)
def test_what_is_played_to_hang_hangs_and_is_told(name):
    schedule, more = HANGING[name]
    settings, ranks = STEP | more, len(schedule.ranks)
    lazy = settings.pop("lazy")
    assert play(step_of(schedule, **settings), lazy)
    told = r"not finished after 1.5 s: ranks? 0.* waits? in receive from rank 1 #\d of pp 0"
    with pytest.raises(LaunchTimeout, match=told):
        launch.run(
            partial(strictly, one_step, schedule, *settings.values(), lazy=lazy), ranks=ranks, timeout_s=1.5
        )


def test_patience_alone_ends_a_wait_for_a_rank_that_is_gone(capsys):
    """A work raises nothing; without `grace_s` the wait would return, and the values be what they are."""

    def on_rank():
        with strict():
            group, x = world(), torch.ones(3)
            all_reduce(x, group)
            if group.rank():
                os._exit(3)
            try:
                all_reduce(x, group, async_op=True).wait()
            except RuntimeError as error:
                print(error)

    with pytest.raises(RankError, match="rank 1"):
        launch.run(on_rank, ranks=2, grace_s=3)
    assert "another rank is gone, and nothing ends this wait" in capsys.readouterr().out
