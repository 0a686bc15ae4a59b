"""What communication tests do on real ranks: schedules and loops beside torch's, every message counted."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.systems.communication.chunk_schedule import Schedule, sent_elements, sent_shares
from minitrain.systems.communication.interpreter import run_schedule


def own_tensor(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank)
    )


def metered(fn: Callable) -> tuple[object, list[tuple[int, int]]]:
    """fn's result, and the messages that this rank sent meanwhile as (peer, bytes), without empty ones."""
    calls = []
    with collectives.observe(lambda kind, call: calls.append(call) if kind == "issue" else None):
        result = fn()
    return result, [(call.peer, call.sent_bytes) for call in calls if call.op == "send" and call.sent_bytes]


def beside_torch(schedules: list[Schedule], numels: list[int]) -> list[dict]:
    """On every rank: each schedule on each size, its distance from torch's all-reduce, its bits, its bytes."""
    group, found = dist.group.WORLD, []
    for schedule in schedules:
        for numel in numels:
            x = own_tensor(group.rank(), numel)
            kept, expected = x.clone(), x.clone()
            dist.all_reduce(expected)
            result, messages = metered(lambda: run_schedule(schedule, x, group))
            assert torch.equal(x, kept), "the input was written to"
            difference = (result - expected).abs().max().item() if numel else 0.0
            sent = sum(sent_bytes for _, sent_bytes in messages)
            found.append({"difference": difference, "bits": result.numpy().tobytes(), "sent_bytes": sent})
    return found


def check_on_real_ranks(*schedules: Schedule, numels: Sequence[int] = (840, 1001)) -> None:
    """The sum is torch's, every rank has the same bits, and the bytes counted are the schedule's."""
    n = schedules[0].ranks
    outcomes = zip(*launch.run(beside_torch, list(schedules), list(numels), ranks=n))
    for (schedule, numel), by_rank in zip(product(schedules, numels), outcomes, strict=True):
        assert max(each["difference"] for each in by_rank) < 1e-12, (schedule, numel)
        assert len({each["bits"] for each in by_rank}) == 1, f"ranks differ in their last bits: {schedule}"
        planned = [8 * sent_elements(schedule, rank, numel) for rank in range(n)]
        assert [each["sent_bytes"] for each in by_rank] == planned, (schedule, numel)
        if numel % schedule.chunks == 0:
            assert planned == [share * 8 * numel for share in sent_shares(schedule)]
