"""Schedules through PyTorch's files: ours run in its runtime on real ranks, its own are read, checked and
simulated here.
"""

import re
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from minitrain import collectives, launch
from minitrain.pipeline.schedule import B, F, Pair, Schedule, check
from minitrain.pipeline.schedules.chimera import chimera
from minitrain.pipeline.schedules.one_direction import gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedules.slices import terapipe
from minitrain.pipeline.schedules.varuna import recomputed
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.pipeline.torch_csv import from_csv, to_csv
from tests.pipeline.test_pipeline_schedule import everything, folded, paired, split

WIDTH, ROWS, MICROBATCHES = 6, 16, 8


def test_the_text():
    assert to_csv(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (
        to_csv(gpipe(2, 1), comms=True)
        == "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    pair = Schedule(
        "pair", ((F(0, 0), F(1, 0), Pair(F(0, 1), B(1, 0)), F(1, 1), B(1, 1), B(0, 0), B(0, 1)),), 2, 2
    )
    assert "(0F1;1B0)OVERLAP_F_B" in to_csv(pair)
    assert from_csv("0F0,,0B0\r\n").ranks == ((F(0, 0), B(0, 0)),)


def test_round_trip():
    written = 0
    for schedule in everything():
        once = sum(len(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))) == schedule.stages
        if once and schedule.slices == 1 and not schedule.recomputes and not schedule.evicts:
            for comms in False, True:
                again = from_csv(to_csv(schedule, comms), schedule.name)
                assert again == schedule
            written += 1
    assert written > 30


def test_both_ends_name_their_messages_in_one_order():
    """So that they end though each blocks until both ends are there, in whatever direction, as over one NCCL
    channel.
    """
    other = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
    for schedule in [
        one_f_one_b(4, 8),
        split(interleaved(4, 8, 2)),
        folded(4, 4),
        paired(interleaved(2, 8, 2)),
    ]:
        messages = [
            [
                re.fullmatch(r"(\d+)(SEND_.|RECV_.)(\d+)", cell).groups()
                for cell in row.split(",")
                if "SEND" in cell or "RECV" in cell
            ]
            for row in to_csv(schedule, comms=True).splitlines()
        ]
        matched = 0
        while any(messages):
            heads = {(int(row[0][0]), *row[0][1:]): row for row in messages if row}
            met = [
                (heads[head], heads[partner])
                for head in heads
                if head[1] in other
                and (partner := (head[0] + other[head[1]][1], other[head[1]][0], head[2])) in heads
            ]
            assert met, f"{schedule.name}: {list(heads)} wait for one another"
            for rows in met:
                matched += 1
                for row in rows:
                    row.pop(0)
        assert matched


REFUSED = {
    "stage 0 is on rank 0 and on rank 1; PyTorch has each stage on one rank": lambda: to_csv(chimera(2, 2)),
    "no slices of a sequence, this has 2": lambda: to_csv(terapipe(2, 2, 2)),
    "no R; leave recomputation to the stages": lambda: to_csv(recomputed(gpipe(2, 2))),
    "is stuck: rank 0 at B0.0": lambda: to_csv(Schedule("", ((B(0, 0), F(0, 0)),), 1, 1)),
    "row 0, column 1 is '0X0'; cells are": lambda: from_csv("0F0,0X0"),
    "row 1, column 0 is '1F'": lambda: from_csv("0F0\n1F\n"),
    "is '(0F0;0SEND_F1)OVERLAP_F_B'": lambda: from_csv("(0F0;0SEND_F1)OVERLAP_F_B"),
    "is '(0F0)OVERLAP_F_B'": lambda: from_csv("(0F0)OVERLAP_F_B"),
    "no action in this text": lambda: from_csv("\n"),
    "B0.1 is missing": lambda: from_csv("0F0,0F1,0B0"),
    "(F0.0 F0.1) is no pair": lambda: from_csv("(0F0;0F1)OVERLAP_F_B,0B0,0B1"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(ValueError) as refused:
        REFUSED[message]()
    assert message in str(refused.value) and "\n" not in str(refused.value)


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

    group = collectives.world()
    modules = {number: stage_of(number) for number in numbers}

    def example(with_gradient: bool):
        return (torch.zeros(ROWS // MICROBATCHES, WIDTH, dtype=torch.float64, requires_grad=with_gradient),)

    stages = [
        PipelineStage(
            module,
            number,
            num_stages,
            torch.device("cpu"),
            input_args=example(number > 0),
            output_args=example(True),
            group=group,
        )
        for number, module in modules.items()
    ]
    return modules, lambda kind=_PipelineScheduleRuntime, **settings: kind(
        stages, MICROBATCHES, loss_fn=loss_of, **settings
    )


def theirs_runs_ours(
    schedule: Schedule, comms: bool, folder: str, scale_grads: bool = False
) -> dict[int, list[torch.Tensor]]:
    rank = collectives.world().rank()
    modules, make = runtime(schedule.stages_of(rank), schedule.stages)
    run = make(scale_grads=scale_grads)
    path = f"{folder}/{rank}.csv"
    with open(path, "w") as file:
        file.write(to_csv(schedule, comms))
    run._load_csv(path, format="compute_comms" if comms else "compute_only")
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
    schedules = [
        (one_f_one_b(ranks, MICROBATCHES), False),
        (split(interleaved(ranks, MICROBATCHES, 2)), True),
        (paired(interleaved(ranks, MICROBATCHES, 2)), True),
    ]
    if hasattr(
        PipelineScheduleMulti, "_warmup_p2p"
    ):  # before, a V's turn sent its rank a message to itself, which gloo refuses
        schedules.append((folded(ranks, MICROBATCHES), False))

    def rank():
        folder = str(tmp_path)
        return [theirs_runs_ours(*schedule, folder) for schedule in schedules] + [
            theirs_runs_ours(*schedules[0], folder, scale_grads=True)
        ]

    *outcomes, control = zip(*launch.run(rank, ranks=ranks, checked=False))
    for (schedule, _), grads in zip(schedules, outcomes, strict=True):
        assert furthest(grads, schedule.stages) < 1e-12, schedule.name
    assert furthest(control, ranks) > 1


def theirs(ranks: int, folder: str) -> dict[str, tuple[str, str]]:
    """What PyTorch's own schedules say, in both formats; every rank knows all lists, so one rank's dump is
    enough.
    """
    from torch.distributed.pipelining import schedules

    rank, found = collectives.world().rank(), {}
    for name, numbers in {
        "ScheduleInterleaved1F1B": [rank, rank + ranks],
        "ScheduleInterleavedZeroBubble": [rank, rank + ranks],
        "ScheduleLoopedBFS": [rank, rank + ranks],
        "ScheduleZBVZeroBubble": [rank, 2 * ranks - 1 - rank],
        "ScheduleDualPipeV": [rank, 2 * ranks - 1 - rank],
    }.items():
        _, make = runtime(numbers, 2 * ranks)
        dumped, path = make(getattr(schedules, name)), f"{folder}/{rank}.csv"
        texts = []
        for what in "compute_only", "compute_comms":
            dumped._dump_csv(path, format=what)
            with open(path, newline="") as file:
                texts.append(file.read())
        found[name] = tuple(texts)
    return found


def test_ours_reads_theirs(tmp_path):
    ranks, m = 4, MICROBATCHES
    read = {
        name: [from_csv(text, name) for text in texts]
        for name, texts in launch.run(theirs, ranks, str(tmp_path), ranks=ranks)[0].items()
    }
    even = Costs(F=1, I=1, W=1)
    for name, (computation, with_messages) in read.items():
        assert computation.ranks == with_messages.ranks and check(computation)
        assert (computation.stages, computation.microbatches) == (8, m)
        assert simulate(computation, even).bubble < Fraction(1, 2)
    bubbles = {name: simulate(schedule, even).overhead for name, (schedule, _) in read.items()}
    assert (
        bubbles["ScheduleInterleaved1F1B"]
        == simulate(interleaved(ranks, m, 2), even).overhead
        == Fraction(3, 16)
    )
    assert bubbles == {
        "ScheduleInterleaved1F1B": Fraction(3, 16),
        "ScheduleInterleavedZeroBubble": Fraction(1, 16),
        "ScheduleLoopedBFS": Fraction(3, 16),
        "ScheduleZBVZeroBubble": Fraction(1, 16),
        "ScheduleDualPipeV": Fraction(1, 8),
    }
    pairs = [
        entry
        for entries in read["ScheduleDualPipeV"][0].ranks
        for entry in entries
        if isinstance(entry, Pair)
    ]
    assert pairs
    zbv = read["ScheduleZBVZeroBubble"][0]
    assert [zbv.stages_of(rank) for rank in range(ranks)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    run = simulate(
        zbv, even
    )  # 3 of waiting in 48 of work, all of it before a rank's first action or after its last
    assert [spans[-1].end - spans[0].start - run.busy(rank) for rank, spans in enumerate(run.spans)] == [
        0
    ] * ranks
