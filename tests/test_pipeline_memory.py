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
from minitrain.pipeline.bpipe import Balanced, bpipe
from minitrain.pipeline.one_direction import gpipe, one_f_one_b
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import B, R, Schedule, check, peak
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.pipeline.varuna import jitter, recomputed, varuna

from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small, train_pipeline

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


# ---- BPipe -----------------------------------------------------------------------------------------------------------

def test_bpipe():
    """The atlas's row: at most ceil((p+2)/2) on every rank, no slow-down, and the same training with activations that really move."""
    assert [peak(bpipe(8, 16), rank) for rank in range(8)] == [5, 5, 5, 5, 4, 4, 4, 4]
    for p in (*range(1, 10), 16):
        for m in (1, p // 2 + 1, p, p + 1, 2 * p + 3, 32):
            schedule, plain = bpipe(p, m), one_f_one_b(p, m)
            assert max(peak(schedule, rank) for rank in range(p)) <= (p + 3) // 2                   # ceil((p+2)/2)
            if p % 2 == 0 and m >= p:
                assert sum(peak(schedule, rank) == (p + 2) // 2 for rank in range(p)) >= p // 2
            for move in (0, 1):
                assert simulate(schedule, Costs(F=1, B=2, move=move)).makespan == simulate(plain, Costs(F=1, B=2)).makespan
    assert pipeline_difference(MANY, dict(dp=1, pp=4), bpipe(4, 6), one_process(MANY)) < TOLERANCE


MANY = Problem(config=small(num_layers=4), batch_sizes=(6, 11), microbatches=6)


def held_at_most(schedule, interpreter):
    """(the most bytes this rank ever held for backwards, bytes of one forward of its stage)."""
    run, batch = on_rank(schedule, MANY)
    runner = run.pipeline
    runner.__class__ = interpreter
    most, one = 0, None

    @contextmanager
    def watch(name):
        nonlocal most, one
        yield
        most, one = max(most, runner.held_bytes), one or runner.held_bytes
    runner.around = watch
    run.forward_backward(MANY.microbatches)(batch)
    assert runner.held_bytes == 0
    return most, one


def test_activations_are_held_where_the_lists_say():
    plain, balanced = (launch.run(held_at_most, schedule, Balanced, ranks=4) for schedule in (one_f_one_b(4, 6), bpipe(4, 6)))
    unit = [one for _, one in plain]
    assert [most for most, _ in plain] == [4 * unit[0], 3 * unit[1], 2 * unit[2], unit[3]]
    assert [most for most, _ in balanced][:3] == [3 * unit[0], 3 * unit[1], 2 * unit[2]]
    guest = balanced[3][0] - unit[3]
    assert unit[0] <= guest < 1.1 * unit[0] or 2 * unit[0] <= guest < 2.1 * unit[0]


def loads_another_microbatch():
    swapped, right = {}, Balanced.host

    def host(self, action):
        right(self, action)
        swapped[action[1:]] = self.guests[action[1:]]
        self.guests[action[1:]] = next(iter(swapped.values()))
    Balanced.host = host
    return train_pipeline(MANY, dict(dp=1, pp=4), bpipe(4, 6))


def test_control_what_comes_back_matters():
    outcome = launch.run(loads_another_microbatch, ranks=4)[0]
    exact = one_process(MANY)
    assert max((outcome.grads[name] - exact.grads[name]).abs().max() for name in outcome.grads) > 1e-6


@pytest.mark.parametrize("missing", "EHGL")
def test_moves_come_in_fours(missing):
    schedule = bpipe(4, 6)
    ranks = tuple(tuple(action for action in entries if action.kind != missing or action.microbatch != 2) for entries in schedule.ranks)
    with pytest.raises(ValueError, match=f"{missing}0.2 is missing"):
        check(Schedule("BPipe with a hole", ranks, 4, 6))


def test_bpipe_refuses():
    with pytest.raises(ValueError, match="bpipe: p=0; use a whole number"):
        bpipe(0, 3)
