"""What the communication tests do on real ranks: schedules and loops beside torch's own, every message
counted.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from minitrain import collectives
from minitrain.systems.communication.chunk_schedule import Schedule
from minitrain.systems.communication.interpreter import run_schedule


def own_tensor(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank)
    )


def metered(fn: Callable) -> tuple[object, list[tuple[int, int]]]:
    """fn's result, and the messages this rank sent meanwhile as (peer, bytes). An empty tensor is no
    message.
    """
    calls = []
    with collectives.observe(lambda kind, call: calls.append(call) if kind == "issue" else None):
        result = fn()
    return result, [(call.peer, call.sent_bytes) for call in calls if call.op == "send" and call.sent_bytes]


def beside_torch(schedules: list[Schedule], numels: list[int]) -> list[dict]:
    """On every rank: each schedule on each size, its distance from torch's all-reduce, its bits, its
    messages.
    """
    group, found = dist.group.WORLD, []
    for schedule in schedules:
        for numel in numels:
            x = own_tensor(group.rank(), numel)
            kept, expected = x.clone(), x.clone()
            dist.all_reduce(expected)
            result, messages = metered(lambda: run_schedule(schedule, x, group))
            assert torch.equal(x, kept), "the input was written to"
            found.append(
                {
                    "difference": (result - expected).abs().max().item() if numel else 0.0,
                    "bits": result.numpy().tobytes(),
                    "messages": messages,
                    "sent_bytes": sum(sent_bytes for _, sent_bytes in messages),
                }
            )
    return found
