"""Schedules through PyTorch's files: ours run in its runtime, its own are checked and simulated."""

from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from minitrain import collectives, launch
from minitrain.pipeline.schedule import B, F, Pair, Schedule, check
from minitrain.pipeline.schedules.bidirectional import chimera
from minitrain.pipeline.schedules.less_memory import recomputed
from minitrain.pipeline.schedules.one_direction import gpipe, interleaved, one_f_one_b, terapipe
from minitrain.pipeline.schedules.zero_bubble import bubble
from minitrain.pipeline.simulate import simulate
from minitrain.systems.pipeline.torch_csv import from_csv, to_csv
from tests.pipeline.lists import everything, folded, paired, refuse, split

WIDTH, ROWS, MICROBATCHES = 6, 16, 8


def test_the_text():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    entries = F(0, 0), F(1, 0), Pair(F(0, 1), B(1, 0)), F(1, 1), B(1, 1), B(0, 0), B(0, 1)
    assert "(0F1;1B0)OVERLAP_F_B" in to_csv(Schedule("pair", (entries,), 2, 2))
    assert from_csv("0F0,,0SEND_F1,0B0\r\n").ranks == ((F(0, 0), B(0, 0)),)


def test_round_trip():
    written = 0
    for schedule in everything():
        once = sum(len(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))) == schedule.stages
        if once and schedule.slices == 1 and not schedule.recomputes and not schedule.evicts:
            assert from_csv(to_csv(schedule), schedule.name) == schedule
            written += 1
    assert written > 30


def test_refusals():
    refuse(
        {
            "each stage on one rank; use one without copies": lambda: to_csv(chimera(2, 2)),
            "no slices of a sequence, this has 2": lambda: to_csv(terapipe(2, 2, 2)),
            "no R; leave recomputation to the stages": lambda: to_csv(recomputed(gpipe(2, 2))),
            "is stuck: rank 0 at B0.0": lambda: to_csv(Schedule("", ((B(0, 0), F(0, 0)),), 1, 1)),
            "row 0, column 1 is '0X0'; cells are": lambda: from_csv("0F0,0X0"),
            "row 1, column 0 is '1F'": lambda: from_csv("0F0\n1F\n"),
            "is '(0F0;0SEND_F1)OVERLAP_F_B'": lambda: from_csv("(0F0;0SEND_F1)OVERLAP_F_B"),
            "no action in this text": lambda: from_csv("\n"),
            "B0.1 is missing": lambda: from_csv("0F0,0F1,0B0"),
        }
    )


# ---- on real ranks ---------------------------------------------------------------------------------------


def stage_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def loss_of(y, targets):
    return (y - targets).square().sum()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9)))


@cache
def one_process(num_stages: int) -> dict[int, list[torch.Tensor]]:
    stages = [stage_of(number) for number in range(num_stages)]
    x, targets = batch()
    loss_of(nn.Sequential(*stages)(x), targets).backward()
    return {number: [param.grad for param in stage.parameters()] for number, stage in enumerate(stages)}


def runtime(numbers: list[int], num_stages: int):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    group, modules = collectives.world(), {number: stage_of(number) for number in numbers}

    def example(with_gradient: bool):
        return (torch.zeros(ROWS // MICROBATCHES, WIDTH, dtype=torch.float64, requires_grad=with_gradient),)

    make_stage = partial(PipelineStage, output_args=example(True), group=group)
    stages = [
        make_stage(module, number, num_stages, torch.device("cpu"), input_args=example(number > 0))
        for number, module in modules.items()
    ]

    def make(kind=_PipelineScheduleRuntime, **settings):
        return kind(stages, MICROBATCHES, loss_fn=loss_of, **settings)

    return modules, make


def theirs_runs_ours(schedule: Schedule, folder: str, scale_grads: bool = False) -> dict[int, list]:
    rank = collectives.world().rank()
    modules, make = runtime(schedule.stages_of(rank), schedule.stages)
    run, path = make(scale_grads=scale_grads), Path(folder) / f"{rank}.csv"
    path.write_text(to_csv(schedule))
    run._load_csv(str(path), format="compute_only")
    x, targets = batch()
    first, last = 0 in modules, schedule.stages - 1 in modules
    run.step(*((x,) if first else ()), **(dict(target=targets, losses=[]) if last else {}))
    return {number: [param.grad for param in module.parameters()] for number, module in modules.items()}


def furthest(per_rank: list[dict[int, list[torch.Tensor]]], num_stages: int) -> float:
    grads = {number: found for rank in per_rank for number, found in rank.items()}
    assert sorted(grads) == list(range(num_stages))
    return max(
        (ours - reference).abs().max().item()
        for number, found in grads.items()
        for ours, reference in zip(found, one_process(num_stages)[number])
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_theirs_runs_ours(ranks, tmp_path):
    """With their default for the divisor, the control, every gradient is an eighth."""
    plain = interleaved(ranks, MICROBATCHES, 2)
    schedules = [one_f_one_b(ranks, MICROBATCHES), split(plain), paired(plain)]
    if hasattr(PipelineScheduleMulti, "_warmup_p2p"):  # before, a V's rank sent to itself: gloo refuses
        schedules.append(folded(ranks, MICROBATCHES))

    def rank():
        found = [theirs_runs_ours(schedule, str(tmp_path)) for schedule in schedules]
        return [*found, theirs_runs_ours(schedules[0], str(tmp_path), scale_grads=True)]

    *outcomes, control = zip(*launch.run(rank, ranks=ranks, checked=False))
    for schedule, grads in zip(schedules, outcomes, strict=True):
        assert furthest(grads, schedule.stages) < 1e-12, schedule.name
    assert furthest(control, ranks) > 1


OVERHEADS = {  # of 4 ranks and 8 microbatches
    "ScheduleInterleaved1F1B": Fraction(3, 16),
    "ScheduleInterleavedZeroBubble": Fraction(1, 16),
    "ScheduleLoopedBFS": Fraction(3, 16),
    "ScheduleZBVZeroBubble": Fraction(1, 16),
    "ScheduleDualPipeV": Fraction(1, 8),
}


def theirs(ranks: int, folder: str) -> dict[str, list[str]]:
    """What PyTorch's own schedules say, in both formats; every rank knows all lists."""
    from torch.distributed.pipelining import schedules

    rank, found = collectives.world().rank(), {}
    for name in OVERHEADS:
        late = 2 * ranks - 1 - rank if "V" in name else rank + ranks
        _, make = runtime([rank, late], 2 * ranks)
        dumped, path, found[name] = make(getattr(schedules, name)), Path(folder) / f"{rank}.csv", []
        for what in "compute_only", "compute_comms":
            dumped._dump_csv(str(path), format=what)
            found[name].append(path.read_text())
    return found


def test_ours_reads_theirs(tmp_path):
    ranks, m = 4, MICROBATCHES
    texts = launch.run(theirs, ranks, str(tmp_path), ranks=ranks)[0]
    read = {name: [from_csv(text, name) for text in both] for name, both in texts.items()}
    for name, (computation, with_messages) in read.items():
        assert computation.ranks == with_messages.ranks and check(computation)
        assert (computation.stages, computation.microbatches) == (8, m)
        assert simulate(computation).overhead == OVERHEADS[name]
    assert simulate(interleaved(ranks, m, 2)).overhead == OVERHEADS["ScheduleInterleaved1F1B"]
    assert read["ScheduleDualPipeV"][0].pairs
    zbv = read["ScheduleZBVZeroBubble"][0]
    assert [zbv.stages_of(rank) for rank in range(ranks)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert bubble(simulate(zbv)) == 0  # all waiting is before a rank's first action or after its last
