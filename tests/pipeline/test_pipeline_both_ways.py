"""Pipelines in both directions: the published formulas from the lists; real ranks equal one process."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from minitrain import launch
from minitrain.pipeline.deferred import Deferred
from minitrain.pipeline.lower import lower, messages
from minitrain.pipeline.schedule import Action, Pair, Schedule, W, check, parts
from minitrain.pipeline.schedules.bidirectional import chimera, dualpipe, dualpipe_v, hanayo
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import zb_h1
from minitrain.pipeline.simulate import Costs, simulate
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small, train_pipeline
from tests.pipeline.lists import peaks, refuse

PROBLEM = Problem(config=small(num_layers=6), batch_sizes=(8, 9))  # 8 units, with table and head
WIDE = Problem(config=small(num_layers=6), batch_sizes=(16, 17))
EQUAL, DOUBLE = Costs(F=1, B=1), Costs(F=1, B=2)


@cache
def reference(problem: Problem):
    return one_process(problem)


def difference(schedule: Schedule, problem: Problem = PROBLEM, **shape: int) -> float:
    shape = shape or dict(dp=1, pp=len(schedule.ranks))
    same = replace(problem, microbatches=schedule.microbatches)
    return pipeline_difference(same, shape, schedule, reference(problem))


def idle_times(schedule: Schedule, costs: Costs) -> list:
    run = simulate(schedule, costs)
    return [run.idle(rank) for rank in range(len(schedule.ranks))]


def sent(schedule: Schedule) -> int:
    return sum(map(len, messages(schedule).values()))


def stages_of(schedule: Schedule) -> list[list[int]]:
    return [schedule.stages_of(rank) for rank in range(len(schedule.ranks))]


SIZES = [
    *(chimera(p, m) for p in (2, 4, 6) for m in (2, p, p + 2, 3 * p)), chimera(16, 30), chimera(16, 64),
    *(hanayo(p, m, waves) for p in (1, 2, 3, 5) for m in (1, p, p + 1, 2 * p) for waves in (1, 2)),
    hanayo(16, 17, 1), hanayo(4, 64, 2),
    *(dualpipe(p, m) for p in (2, 4, 6) for m in (2 * p, 2 * p + 2, 20)), dualpipe(16, 64),
    *(dualpipe_v(p, m) for p in (1, 2, 3, 5) for m in (2 * p, 2 * p + 1, 20)), dualpipe_v(16, 33),
]  # fmt: skip


def test_everything_is_done_once_and_nobody_waits_for_ever():
    for schedule in SIZES:
        found = [sum(isinstance(step, (Action, Pair)) for step in program) for program in lower(schedule)]
        assert found == list(map(len, schedule.ranks))


def test_chimera():
    for p, units in product((2, 4, 6, 8, 12), (1, 2, 3)):
        m = units * p
        schedule = check(chimera(p, m))
        assert simulate(schedule, EQUAL).bubble == Fraction(p - 2, 2 * m + p - 2)
        assert simulate(schedule, DOUBLE).makespan == 3 * m + (units + 1) * (p - 2)
        if units == 1:
            assert simulate(schedule, DOUBLE).bubble == (p - 2) / (Fraction(3, 2) * m + p - 2)
        # two stages per rank: weights 2x
        assert stages_of(schedule) == [sorted({rank, p - 1 - rank}) for rank in range(p)]
        assert peaks(schedule) == [p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
        assert sent(schedule) == 2 * (p - 1) * m
    for p, equal, double in ((4, Fraction(1, 5), Fraction(1, 4)), (8, Fraction(3, 11), Fraction(1, 3))):
        found = (simulate(chimera(p, p), EQUAL).bubble, simulate(chimera(p, p), DOUBLE).bubble)
        assert found == (equal, double)
    assert simulate(one_f_one_b(4, 4), EQUAL).bubble == Fraction(3, 7)
    assert difference(chimera(2, 8)) < TOLERANCE


@pytest.mark.parametrize("p, whole, rest", [(4, 0, 2), (4, 1, 2), (8, 1, 2), (8, 2, 6)])
def test_a_last_unit_that_is_not_full(p, whole, rest):
    assert simulate(chimera(p, whole * p + rest), EQUAL).makespan == 2 * p * whole + 2 * p + rest - 2


def test_hanayo():
    for p, waves, groups in product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2)):
        m = groups * p
        schedule = check(hanayo(p, m, waves))
        assert simulate(schedule, EQUAL).bubble == Fraction(p - 1, 2 * m * waves + p - 1)
        if groups == 1:
            assert simulate(schedule, EQUAL).bubble == Fraction(p - 1, 2 * p * waves + p - 1)
            assert set(idle_times(schedule, DOUBLE)) == {4 * (p - 1)}
        # every stage once: weights 1x
        assert sorted(sum(stages_of(schedule), [])) == list(range(2 * waves * p))
        assert peaks(schedule) == [(2 * waves - 1) * p + rank + 1 for rank in range(p)]
        assert sent(schedule) == 4 * waves * (p - 1) * m
    got = [simulate(hanayo(4, 4, waves), EQUAL).bubble for waves in (1, 2, 4)]
    assert got == [Fraction(3, 11), Fraction(3, 19), Fraction(3, 35)]
    found = [simulate(hanayo(8, 8, waves), EQUAL).bubble for waves in (1, 2)]
    assert found == [Fraction(7, 23), Fraction(7, 39)]
    assert stages_of(hanayo(3, 3, 2)) == [[0, 5, 6, 11], [1, 4, 7, 10], [2, 3, 8, 9]]
    assert difference(hanayo(4, 8, 1)) < TOLERANCE


def test_more_waves_wait_for_more_messages():
    """With a cost per message the best number of waves is not the largest."""
    times = [
        simulate(
            hanayo(4, 4, waves),
            Costs(F=Fraction(1, 2 * waves), B=Fraction(1, 2 * waves), send=Fraction(1, 16)),
        ).makespan
        for waves in (1, 2, 4)
    ]
    assert times == [12, Fraction(45, 4), 12]


# ---- DualPipe --------------------------------------------------------------------------------------------

TIMES = [(1, 1, 1), (3, 3, 2), (4, 4, 1), (2, 2, 0)]  # F = I >= W


def published(stages: int, costs: Costs):
    return (stages // 2 - 1) * (costs.FB + (costs.I + costs.W) - 3 * costs.W)


def test_dualpipe():
    """The table of the published DualPipe, whose B is I + W, from the lists; and training on 4 ranks."""
    schedules = [(p, dualpipe(p, m)) for p, m in ((2, 4), (4, 8), (4, 18), (6, 12), (8, 16), (8, 20))]
    schedules += [(2 * p, dualpipe_v(p, m)) for p, m in ((1, 2), (2, 4), (2, 9), (3, 6), (4, 8), (4, 13))]
    for (stages, schedule), (f, i, w) in product(schedules, TIMES):
        for hidden in (0, Fraction(f, 2), f):
            costs = Costs(F=f, I=i, W=w, FB=f + i + w - hidden)
            idle = idle_times(schedule, costs)
            assert max(idle) == published(stages, costs) and (hidden or min(idle) == max(idle))
    for p, m in ((4, 8), (8, 20)):
        for f, i, w in TIMES:
            full = i + w
            assert set(idle_times(one_f_one_b(p, m), Costs(F=f, I=i, W=w))) == {(p - 1) * (f + full)}
            assert set(idle_times(zb_h1(p, m), Costs(F=f, I=i, W=w))) == {(p - 1) * (f + full - 2 * w)}
        assert max(peaks(one_f_one_b(p, m))) == max(peaks(zb_h1(p, m))) == p
    for stages, schedule in schedules:
        assert set(peaks(schedule)) == {stages + 1}  # PP + 1
        assert all(len(own) == 2 for own in stages_of(schedule))  # 2 stages per rank: parameters 2x
        microbatches, turns = schedule.microbatches, schedule.stages // len(schedule.ranks) - 1
        assert sent(schedule) == 2 * (stages - 1 - turns) * microbatches
    assert difference(dualpipe(4, 8)) < TOLERANCE


def test_the_example_of_8_ranks_and_20_microbatches():
    schedule, costs = check(dualpipe(8, 20)), Costs(F=1, I=1, W=1, FB=3)
    run = simulate(schedule, costs)
    assert run.makespan == 20 * 3 + published(8, costs) == 66
    for rank, mirror in zip(
        schedule.ranks, reversed(schedule.ranks)
    ):  # the upper half does the same with the other microbatches
        assert [str(entry) for entry in mirror] == [str(exchanged(entry)) for entry in rank]
    for rank in range(4):
        entering = {action.microbatch for action in parts(schedule.ranks[rank]) if action.stage == rank}
        assert entering == set(range(10))


def exchanged(entry):
    if isinstance(entry, Pair):
        return Pair(exchanged(entry.forward), exchanged(entry.backward))
    return entry._replace(microbatch=(entry.microbatch + 10) % 20)


@pytest.mark.parametrize("p", [4, 8, 12])
def test_which_part_of_the_bubble_is_what(p):
    """From the middle outwards a rank costs F + (F&B - B) + (I - W), as published where F = I."""
    schedule, costs = dualpipe(p, 3 * p), Costs(F=10, I=10, W=3, FB=19)
    run = simulate(schedule, costs)
    pairs = [sum(isinstance(entry, Pair) for entry in entries) for entries in schedule.ranks]
    middle = p // 2
    assert run.idle(middle) == (p // 2 - 1) * (10 + (19 - 13) + (10 - 3)) == published(p, costs)
    found = [run.idle(rank) for rank in range(p)]
    assert found == [run.idle(middle) - (10 + 13 - 19) * (pairs[middle] - pairs[rank]) for rank in range(p)]
    slow_input = Costs(F=10, I=12, W=3, FB=25)
    assert simulate(schedule, slow_input).idle(middle) < published(p, slow_input)
    slow_forward = Costs(F=12, I=10, W=3, FB=25)
    assert simulate(schedule, slow_forward).idle(middle) > published(p, slow_forward)


def test_the_v_is_dualpipe_folded():
    """Rank r of p does what rank r of 2p does; late stages are its own, not the mirror's."""
    folded, whole = dualpipe_v(4, 10), dualpipe(8, 20)
    for short, long in zip(folded.ranks, whole.ranks):
        assert [str(entry) for entry in short] == [str(folded_entry(entry)) for entry in long]


def folded_entry(entry):
    if isinstance(entry, Pair):
        return Pair(folded_entry(entry.forward), folded_entry(entry.backward))
    return entry._replace(microbatch=entry.microbatch % 10)


# ---- real ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [chimera(4, 8), dualpipe_v(4, 8)], ids=lambda schedule: schedule.name)
def test_equals_one_process(schedule):
    assert difference(schedule) < TOLERANCE


def test_dualpipe_on_8_ranks():
    assert difference(dualpipe(8, 16), WIDE) < TOLERANCE


def test_copies_of_stages_and_copies_of_data():
    assert difference(chimera(2, 4), dp=2, pp=2) < TOLERANCE


def test_clipping_is_at_work():
    """Else the equalities above would not see that a parameter that stands twice or more was counted once."""
    norm = torch.stack([grad.norm() for grad in reference(PROBLEM).grads.values()]).norm()
    assert abs(norm.item() - PROBLEM.clip) < 1e-5


def error_when(broken, schedule: Schedule) -> float:
    """How far the gradients on the ranks are from the reference if `broken()` was called there first."""

    def rank():
        broken()
        return train_pipeline(
            replace(PROBLEM, microbatches=schedule.microbatches), dict(dp=1, pp=len(schedule.ranks)), schedule
        ).grads

    right = dict(reference(PROBLEM).grads)
    return max(
        (grad - right[name]).abs().max().item()
        for grads in launch.run(rank, ranks=len(schedule.ranks))
        for name, grad in grads.items()
        if name in right
    )


def test_without_the_sum_over_copies_it_does_not():
    def broken():
        from minitrain.compose import parallelize as module

        module.share_stages = lambda *_: None

    assert error_when(broken, chimera(2, 8)) > 1e-3


def test_without_weight_gradients_it_does_not():
    def broken():
        Deferred.weights = lambda self: self.products.clear()

    assert error_when(broken, dualpipe_v(2, 8)) > 1e-3


# ---- what is refused -------------------------------------------------------------------------------------


def without(action, schedule: Schedule) -> Schedule:
    return replace(schedule, ranks=[[e for e in entries if e != action] for entries in schedule.ranks])


def other_way(schedule: Schedule) -> Schedule:
    """Backwards of the two directions exchanged."""
    swap = lambda e: e._replace(microbatch=e.microbatch ^ 1) if e.kind == "B" else e
    return replace(schedule, ranks=[map(swap, entries) for entries in schedule.ranks])


def test_refusals():
    refuse(
        {
            "chimera: p=3 ranks; two pipelines meet between two ranks, use an even": lambda: chimera(3, 4),
            "chimera: m=5 microbatches; half of them goes each way, use an even": lambda: chimera(4, 5),
            "dualpipe: p=5 ranks; two directions meet between two ranks": lambda: dualpipe(5, 20),
            "dualpipe: m=6 microbatches on p=4 ranks; use 8 or more": lambda: dualpipe(4, 6),
            "dualpipe: m=11 microbatches; half of them": lambda: dualpipe(4, 11),
            "dualpipe_v: m=7 microbatches on p=4 ranks; use 8 or more": lambda: dualpipe_v(4, 7),
            "DualPipe, p=4, m=8: W0.3 is missing": lambda: check(without(W(0, 3), dualpipe(4, 8))),
            "stage 0, microbatch 0 stands on ranks [0, 3]": lambda: check(other_way(chimera(4, 4))),
        }
    )
