"""Pipelines that save memory: recomputation just in time, activations kept by a partner, a loss over all microbatches at once."""
import random
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from minitrain import launch
from minitrain.mesh import Mesh
from minitrain.model import Stages
from minitrain.optim import AdamW
from minitrain.parallelize import parallelize
from minitrain.pipeline.one_direction import gpipe, one_f_one_b
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import B, R, check, peak
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.pipeline.varuna import jitter, recomputed, varuna

from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small

PROBLEM = Problem(config=small(num_layers=4), batch_sizes=(6, 6, 5), microbatches=4)
GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16)] + [(16, 16), (4, 64)]


@cache
def reference():
    return one_process(PROBLEM)


def on_rank(schedule, problem=PROBLEM):
    """(this rank's run, a batch): what parallelize makes of a model over as many ranks as the schedule has."""
    mesh, cuts = Mesh(dp=1, pp=len(schedule.ranks)), even(problem.config.num_layers, schedule.stages)
    stages = Stages(problem.config, {stage: cuts[stage] for stage in schedule.stages_of(mesh.rank("pp"))}, seed=3, dtype=torch.float64)
    run = parallelize(stages, mesh, schedule=schedule, make_optimizer=lambda params: AdamW(params, lr=problem.lr))
    return run, run.lay_out(*problem.batch(0))


# ---- Varuna ----------------------------------------------------------------------------------------------------------

def test_varuna():
    """The atlas's row: never longer than GPipe with recomputation, and deviations pay when links are uneven."""
    for p, m in GRID:
        for costs in (Costs(F=1, R=1, B=2), Costs(F=2, R=2, B=3), Costs(F=1, R=1, B=2, send=1)):
            ours, theirs = varuna(p, m, costs), recomputed(gpipe(p, m))
            assert not any(action.kind == "R" for action in ours.ranks[-1])
            saved = simulate(theirs, costs).makespan - simulate(ours, costs).makespan
            assert saved >= 0 and (p == 1 or costs != Costs(F=1, R=1, B=2) or saved == 1 + (m - 1) % 3)
    costs, schedule, strict, opportunistic = Costs(F=2, R=2, B=4), varuna(4, 8), 0, 0
    for seed in range(20):
        for late in (1, 8):
            strict += jitter(schedule, costs, uneven(seed, late), opportunistic=False)
            opportunistic += jitter(schedule, costs, uneven(seed, late), opportunistic=True)
    assert opportunistic < strict


def uneven(seed, late):
    draw = random.Random(seed)
    return lambda action: draw.randint(0, 2 * late)


def test_jitter_of_nothing_is_the_simulation():
    for schedule in (varuna(4, 6), recomputed(gpipe(3, 4)), one_f_one_b(4, 6)):
        assert jitter(schedule, Costs(B=2), lambda action: 0, opportunistic=False) == simulate(schedule, Costs(B=2)).makespan
        assert jitter(schedule, Costs(B=2), lambda action: 3, opportunistic=False) == simulate(schedule, Costs(B=2, send=3)).makespan


def test_recomputation_holds_one_microbatch():
    for schedule in (varuna(4, 8), recomputed(gpipe(4, 8)), recomputed(one_f_one_b(4, 8))):
        assert [peak(check(schedule), rank) for rank in range(4)] == [1] * 4
    assert R(2, 3) in recomputed(gpipe(4, 8)).place and recomputed(gpipe(4, 8)).ranks[0][8:10] == (R(0, 0), B(0, 0))


@pytest.mark.parametrize("ranks, schedule", [(4, varuna(4, 4)), (2, recomputed(gpipe(2, 4)))], ids=["varuna", "gpipe recomputed"])
def test_recomputed_equals_one_process(ranks, schedule):
    assert pipeline_difference(PROBLEM, dict(dp=1, pp=ranks), schedule, reference()) < TOLERANCE


def saved_by_action(schedule):
    """{action: bytes that autograd saved in it}, and for each F what the interpreter holds of it afterwards."""
    run, batch = on_rank(schedule)
    saved, held = {}, {}

    @contextmanager
    def watch(name):
        saved[name] = 0

        def pack(x):
            saved[name] += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield
        if name[0] == "F":
            kept = run.pipeline.kept[tuple(map(int, name[1:].split(".")))]
            held[name] = kept.x.nbytes, kept.end is None
    run.pipeline.around = watch
    run.forward_backward(PROBLEM.microbatches)(batch)
    return saved, held


def test_between_forward_and_recomputation_only_the_input_is_held():
    first, last = launch.run(saved_by_action, varuna(2, 4), ranks=2)
    for unit, rows in enumerate((2, 2, 1, 1)):
        saved, held = first
        assert saved[f"F0.{unit}"] == 0 < saved[f"R0.{unit}"] and held[f"F0.{unit}"] == (rows * 8 * 8, True)      # int64 tokens
        saved, held = last
        assert saved[f"F1.{unit}"] > 0 and held[f"F1.{unit}"] == (rows * 8 * 16 * 8, False)


def test_varuna_refuses():
    for call in (lambda: varuna(0, 1), lambda: varuna(2, 0)):
        with pytest.raises(ValueError, match="varuna: .=0; use a whole number"):
            call()
