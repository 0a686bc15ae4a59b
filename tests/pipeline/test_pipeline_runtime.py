"""Pipelines on real ranks: loss, gradients, trained parameters equal one process to 1e-12, any schedule."""

from collections import defaultdict
from functools import cache
from itertools import product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import Stages, cross_entropy_sum
from minitrain.model.training.step import Batch, NoReducer, valid_tokens
from minitrain.pipeline.lower import lower
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Around, Runner, cut_evenly
from minitrain.pipeline.schedules.one_direction import breadth_first, gpipe, interleaved, one_f_one_b
from minitrain.pipeline.simulate import Measured, simulate
from minitrain.plan.simulate.machines import Device, Link, Machine
from minitrain.ranks.ledger import Ledger
from minitrain.systems.simulate.replay import replay
from tests import parallel
from tests.pipeline.lists import split

# 8 units, with table and head, for up to 8 stages.
PROBLEM = parallel.Problem(
    config=parallel.small(num_layers=6), batch_sizes=(8, 7), microbatches=4, frozen="layers.1.norm1.weight"
)


@cache
def reference():
    return parallel.one_process(PROBLEM)


SCHEDULES = {
    "gpipe": lambda p: gpipe(p, 4), "1f1b": lambda p: one_f_one_b(p, 4),
    "interleaved": lambda p: interleaved(p, 4, 2), "breadth-first": lambda p: breadth_first(p, 4, 2),
    "split": lambda p: split(one_f_one_b(p, 4), late=0),
}  # fmt: skip


@cache
def distance(name, ranks):
    """From one process."""
    return parallel.pipeline_difference(PROBLEM, dict(dp=1, pp=ranks), SCHEDULES[name](ranks), reference())


ELSEWHERE = {("gpipe", 2), ("1f1b", 2), ("interleaved", 2), ("breadth-first", 2)}  # test_pipeline_schedule.py


@pytest.mark.parametrize(
    "name, ranks", [case for case in product(SCHEDULES, (2, 4)) if case not in ELSEWHERE]
)
def test_equals_one_process(name, ranks):
    assert distance(name, ranks) < parallel.TOLERANCE


@pytest.mark.parametrize(
    "shape, settings",
    [
        (dict(dp=2, pp=2), {}),
        (dict(dp=1, pp=2, tp=2), {}),
        (dict(dp=1, pp=2, tp=2), dict(sequence_parallel=True)),
        (dict(dp=1, pp=2, cp=2), {}),
    ],
    ids=["dp", "tp", "tp with sequence parallelism", "cp"],
)
def test_pipelines_compose(shape, settings):
    config = parallel.small(num_layers=4, vocab_size=32)
    problem = parallel.Problem(config=config, batch_sizes=(8, 9), microbatches=4)
    assert (
        parallel.pipeline_difference(
            problem, shape, split(one_f_one_b(2, 4), late=0), parallel.one_process(problem), **settings
        )
        < parallel.TOLERANCE
    )


# ---- what is sent, computed and kept ---------------------------------------------------------------------


def account(schedule, rows=8, layers=8):
    """One step of this rank's part of a pipeline, in the ledger: {action: FLOPs}, bytes sent, events."""
    group, config = collectives.world(), parallel.small(num_layers=layers, tied=False)
    cuts = {stage: even(layers, schedule.stages)[stage] for stage in schedule.stages_of(group.rank())}
    stages, ledger = dict(Stages(config, cuts, dtype=torch.float64).items()), Ledger()
    tokens, targets = random_tokens(0, 0, 1, rows, 8, config.vocab_size, seed=5)
    run = Runner(stages, schedule, group, cross_entropy_sum, NoReducer(), width=config.d_model)
    run.hooks.append(Around(ledger.phase))
    with ledger:
        run(Batch(tokens, targets, valid_tokens(targets)))
    return ledger.flops_by_phase, ledger.sent_bytes("send"), ledger.events


def test_pipeline_parallel():
    """Each boundary carries b·s·h numbers per microbatch each way; the loss is that of the whole model."""
    p, m, rows, length, width = 4, 4, 8, 8, 16
    sent = [sent for _, sent, _ in launch.run(account, one_f_one_b(p, m), ranks=p)]
    boundary = rows * length * width * 8  # all microbatches together, float64
    assert sent == [boundary, 2 * boundary, 2 * boundary, boundary]
    assert distance("1f1b", p) < parallel.TOLERANCE


def test_mpmd():
    """Ranks run different programs, which send to each other; together they compute the unsplit model."""
    assert len(set(lower(SCHEDULES["1f1b"](4)))) == 4 and distance("1f1b", 4) < parallel.TOLERANCE


def test_both_halves_of_a_backward_cost_what_the_whole_costs():
    whole, halves = (
        launch.run(account, schedule, ranks=2)
        for schedule in (one_f_one_b(2, 4), split(one_f_one_b(2, 4), late=0))
    )
    for (whole_flops, _, _), (flops, _, _) in zip(whole, halves):
        for action, cost in whole_flops.items():
            if action.startswith("B"):
                i, w = flops[f"I{action[1:]}"], flops[f"W{action[1:]}"]
                assert i + w == cost and i > 0 and w > 0


def test_a_replayed_run_has_the_bubble_that_the_simulator_says():
    """Events of four real ranks, replayed on links without time, against the simulator with those times."""
    schedule = one_f_one_b(4, 8)
    events = {rank: found for rank, (_, _, found) in enumerate(launch.run(account, schedule, ranks=4))}
    free = Link("free", 0.0, 1e30, "none")
    device = Device("a device", {"float64": 1e12}, 1e12, 1e30, "none")
    timeline = replay(events, Machine("free links", device, 4, free, free, 1))
    times = defaultdict(float)
    for spans in timeline.spans.values():
        for span in spans:
            if span.kind == "compute":
                times[span.event.phase] += span.duration_s
    simulation = simulate(schedule, Measured({action: times[str(action)] for action in schedule.place}))
    assert simulation.makespan == pytest.approx(timeline.step_s, rel=1e-9)
    assert simulation.bubble == pytest.approx(timeline.idle_s / timeline.step_s, rel=1e-9)
    assert simulation.bubble > 0.2


# ---- controls and refusals -------------------------------------------------------------------------------


def test_without_the_sum_over_both_ends_a_tied_table_goes_wrong(monkeypatch):
    def train():
        from minitrain.compose import parallelize as module

        module.share_stages = lambda *_: None
        return parallel.train_pipeline(PROBLEM, dict(dp=1, pp=2), one_f_one_b(2, 4))

    outcomes = launch.run(train, ranks=2)
    assert difference_of_table(outcomes) > 1e-6


def difference_of_table(outcomes):
    return (outcomes[0].params["layers.0.tokens"] - reference().params["layers.0.tokens"]).abs().max().item()


def test_without_the_last_w_the_gradient_is_wrong():
    """A runner that skips one W: nothing hangs and nothing complains, only the equality fails."""

    def train():
        weights = Runner.weights
        Runner.weights = lambda self, action: (
            weights(self, action) if action.microbatch else self.in_flight.pop(action[1:])
        )
        return parallel.train_pipeline(PROBLEM, dict(dp=1, pp=2), split(one_f_one_b(2, 4), late=0))

    outcomes = launch.run(train, ranks=2)
    name = "layers.2.mlp.up.weight"
    assert (outcomes[0].params[name] - reference().params[name]).abs().max() > 1e-6


def test_refusals():
    def pipeline(schedule=one_f_one_b(2, 4), numbers=None, rows=8):
        group, config = collectives.world(), parallel.small(num_layers=4)
        numbers = schedule.stages_of(group.rank() % len(schedule.ranks)) if numbers is None else numbers
        stages = dict(Stages(config, {s: even(4, schedule.stages)[s] for s in numbers}).items())
        run = Runner(stages, schedule, group, cross_entropy_sum, NoReducer(), width=16)
        tokens = torch.zeros(rows, 8, dtype=torch.int64)
        cut_evenly(Batch(tokens, tokens, torch.tensor(1)), run.schedule)

    parallel.check_refusals(
        {
            "is for 3 ranks, and the group has 2": lambda: pipeline(one_f_one_b(3, 4)),
            "but was given [0, 1]": lambda: pipeline(numbers=[0, 1]),
            "4 microbatches, but this rank has 3 rows": lambda: pipeline(rows=3),
            "7 stages of a model of 6 layers": lambda: even(4, 7),
        },
        ranks=2,
    )
