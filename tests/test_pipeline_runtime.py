"""Pipelines on real ranks: loss, every gradient and the trained parameters equal one process to 1e-12, whatever the schedule."""
from functools import cache

import pytest

from minitrain.pipeline.one_direction import breadth_first, gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedule import B, F, I, Schedule, W

from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small

PROBLEM = Problem(config=small(num_layers=8), batch_sizes=(8, 8, 7), microbatches=4, frozen="layers.1.norm1.weight")


@cache
def reference():
    return one_process(PROBLEM)


def split(schedule: Schedule) -> Schedule:
    """The same with each B as I and W in a row."""
    return Schedule(f"{schedule.name}, split", tuple(tuple(
        part for action in entries for part in ((action,) if action.kind == "F" else (I(*action[1:]), W(*action[1:])))) for entries in schedule.ranks),
        schedule.stages, schedule.microbatches)


SCHEDULES = {"gpipe": lambda p: gpipe(p, 4), "1f1b": lambda p: one_f_one_b(p, 4), "interleaved": lambda p: interleaved(p, 4, 2),
             "breadth-first": lambda p: breadth_first(p, 4, 2), "split": lambda p: split(one_f_one_b(p, 4))}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_one_process(name, ranks):
    assert pipeline_difference(PROBLEM, dict(dp=1, pp=ranks), SCHEDULES[name](ranks), reference()) < TOLERANCE


@pytest.mark.parametrize("shape, settings", [(dict(dp=2, pp=2), {}), (dict(dp=1, pp=2, tp=2), {}),
                                             (dict(dp=1, pp=2, tp=2), dict(sequence_parallel=True)), (dict(dp=1, pp=2, cp=2), {})],
                         ids=["dp", "tp", "tp with sequence parallelism", "cp"])
def test_pipelines_compose(shape, settings):
    problem = Problem(config=small(num_layers=4, vocab_size=32), batch_sizes=(8, 8, 9), microbatches=4)
    assert pipeline_difference(problem, shape, split(one_f_one_b(2, 4)), one_process(problem), **settings) < TOLERANCE
