"""Pipelines against torch.distributed.pipelining: the same schedule, stages and microbatches on 4 ranks,
forward and backward, in turns.

Both run blocks of one GPT, cut into 4 stages or into 8 (two a rank), 8 microbatches of one sequence. Each
keeps to its own list: torch's schedules of these names have the same idea, their lists may differ in the
order of a few actions. Last rows: how long it takes to say when everything happens in a schedule of 64 ranks
and 512 microbatches, and to draw the explorer's picture of two schedules anew.
"""

from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs_of

from benchmarks.measure import Row, in_turns, one_after_the_other, row, slowest_then_median, stock_group
from minitrain import launch
from minitrain.course.plot.pipeline_widget import SCHEDULES, picture
from minitrain.model.gpt import GPTConfig, Stages, cross_entropy_sum
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedules.bidirectional import dualpipe_v
from minitrain.pipeline.schedules.one_direction import gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import zb_interleaved, zb_v
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.ranks.mesh import Mesh

RANKS, MICROBATCHES = 4, 8
LENGTH, LAUNCHES, TURNS = 64, 5, 21
CONFIG = GPTConfig(
    vocab_size=256,
    d_model=64,
    num_layers=8,
    num_heads=4,
    max_positions=LENGTH,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)
PEERS = {
    "GPipe": (gpipe, theirs_of.ScheduleGPipe),
    "1F1B": (one_f_one_b, theirs_of.Schedule1F1B),
    "interleaved 1F1B": (lambda p, m: interleaved(p, m, 2), theirs_of.ScheduleInterleaved1F1B),
    "interleaved zero bubble": (
        lambda p, m: zb_interleaved(p, m, 2),
        theirs_of.ScheduleInterleavedZeroBubble,
    ),
    "ZB-V": (zb_v, theirs_of.ScheduleZBVZeroBubble),
    "DualPipeV": (dualpipe_v, theirs_of.ScheduleDualPipeV),
}


def turn(name: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of our step and of theirs on this rank."""
    mesh = Mesh(pp=RANKS)
    group, down = mesh.group("pp"), mesh.twin("pp")
    stock = stock_group(group, down)
    ours_of, their_schedule = PEERS[name]
    schedule = ours_of(RANKS, MICROBATCHES)
    cuts = even(CONFIG.num_layers, schedule.stages)
    mine = {stage: cuts[stage] for stage in schedule.stages_of(group.rank())}
    ours, theirs = Stages(CONFIG, mine), Stages(CONFIG, mine)
    data = torch.randint(
        CONFIG.vocab_size, (MICROBATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    batch = Batch(tokens, targets, torch.tensor(targets.numel()))

    run = Runner(
        dict(ours.items()), schedule, group, cross_entropy_sum, NoReducer(), width=CONFIG.d_model, down=down
    )
    their_stages = [
        pipelining.PipelineStage(stage, number, schedule.stages, torch.device("cpu"), group=stock)
        for number, stage in theirs.items()
    ]
    them = their_schedule(
        their_stages[0] if schedule.stages == RANKS else their_stages,
        MICROBATCHES,
        scale_grads=False,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target) / batch.num_valid,
    )
    first, last = 0 in mine, schedule.stages - 1 in mine

    def our_step() -> None:
        ours.zero_grad()
        run(batch)

    def their_step() -> None:
        theirs.zero_grad()
        them.step(*([tokens] if first else []), **({"target": targets, "losses": []} if last else {}))

    times = in_turns(our_step, their_step, rounds=rounds, meet=dist.barrier)
    apart = max((a.grad - b.grad).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters()))
    assert apart < 1e-4, f"{name}: the gradients differ by {apart}"
    return times


def rows() -> list[Row]:
    table = []
    for name in PEERS:
        launches = [
            launch.run(turn, name, TURNS, ranks=RANKS, timeout_s=300, checked=False) for _ in range(LAUNCHES)
        ]
        ours, theirs = slowest_then_median(one_after_the_other(launches))
        table.append(
            row(
                f"pipeline step, {name}, 4 ranks",
                "torch.distributed.pipelining",
                ours * 1e3,
                theirs * 1e3,
                "ms",
                0.9,
            )
        )
    schedule, started = one_f_one_b(64, 512), perf_counter()
    simulate(schedule, Costs(B=2))
    table.append(row("simulating 1F1B, p=64, m=512", "one second", perf_counter() - started, 1.0, "s", 1.0))
    slowest = max(min(processor_s_of_a_redraw(name) for _ in range(3)) for name in SCHEDULES)
    limit = "0.15 s of a processor"
    table.append(row("explorer's slowest redraw, p=8, m=24", limit, slowest, 0.15, "s", 1.0))
    return table


def processor_s_of_a_redraw(name: str) -> float:
    started = process_time()
    picture(["1F1B", name], 8, 24, 2, Costs(F=2, I=2, W=2))
    return process_time() - started
