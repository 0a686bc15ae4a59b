"""Attention over a cut sequence, causal, forward and backward: ring beside ring, gathered beside gathered.

torch's `context_parallel` has no CPU kernel registered; its ring itself takes any kernel, so it is given the
one that ours uses. It runs with its load balancing (the same zig-zag halves). The peer of our gathered core
gathers K and V with torch's collectives and calls the fused kernel twice: a rank's queries against all keys
before them, and against their own; contiguous tokens, so the last rank has the most work. Peak memory is what
torch's CPU allocator had given out at most during one forward and backward, each side in a launch of its own.
"""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import (
    Row,
    in_turns,
    most_in,
    one_after_the_other,
    row,
    slowest_then_median,
    stock_group,
)
from minitrain import launch
from minitrain.attention.kernel import FUSED, merge
from minitrain.context.layout import contiguous, join, split, zigzag
from minitrain.context.ring import gathered_attention, ring_attention
from minitrain.ranks.collectives.transport import renamed

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = (1024, 4096)
LAUNCHES, TURNS = 6, 15
aten = torch.ops.aten


class _TorchsRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        out, lse = torchs._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        grads = torchs._templated_ring_attention_backward(
            ctx.group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            dout,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            True,
            dropout_p=0.0,
        )
        return *grads[:3], None


class _Gathered(torch.autograd.Function):
    """All keys and values on every rank; dK, dV of all ranks reduce-scattered."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        everyones = q.new_empty(group.size(), 2, *k.shape)
        renamed("all_gather_single", "all_gather_into_tensor")(
            everyones.flatten(0, 1), torch.stack((k, v)), group=group
        )
        before = everyones[: group.rank()].movedim(0, 3).flatten(3, 4)  # [2, B, H, tokens of lower ranks, K]
        out, lse = FUSED.forward(q, k, v, True)
        if group.rank():
            merge(out, lse, *FUSED.forward(q, *before, False))
        ctx.save_for_backward(q, k, v, before, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        (q, k, v, before, out, lse), group = ctx.saved_tensors, ctx.group
        dq, *found = FUSED.backward(dout, q, k, v, out, lse, True)
        everyones = q.new_zeros(group.size(), 2, *k.shape)
        everyones[group.rank()] = torch.stack(found)
        if group.rank():
            more, *found = FUSED.backward(dout, q, *before, out, lse, False)
            dq += more
            everyones[: group.rank()] = torch.stack(found).unflatten(3, (group.rank(), -1)).movedim(3, 0)
        dkv = torch.empty_like(everyones[0])
        renamed("reduce_scatter_single", "reduce_scatter_tensor")(dkv, everyones.flatten(0, 1), group=group)
        return dq, *dkv, None


WAYS = {
    "ring": (zigzag, lambda q, k, v, group: ring_attention(q, k, v, group=group, layout=zigzag)),
    "torch's ring attention": (zigzag, _TorchsRing.apply),
    "gathered": (zigzag, lambda q, k, v, group: gathered_attention(q, k, v, group=group, layout=zigzag)),
    "all-gather by torch": (contiguous, _Gathered.apply),
}
PAIRS = (("ring", "torch's ring attention"), ("gathered", "all-gather by torch"))


def step(way: str, length: int, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Forward and backward of this rank's tokens; the gradients."""
    layout, attention = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        split(torch.randn(BATCH, HEADS, length, WIDTH, generator=generator), layout, group, 2)
        for _ in range(3)
    )

    def run() -> list[Tensor]:
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        attention(*parts, group).square().sum().backward()
        return [part.grad for part in parts]

    return run


def turn(mine: str, peer: str, length: int, rounds: int) -> tuple[list[float], list[float]]:
    stock, group = stock_group(), dist.group.WORLD
    ours, theirs = step(mine, length, group), step(peer, length, stock)
    times = in_turns(ours, theirs, rounds=rounds, meet=dist.barrier)
    for a, b in zip(ours(), theirs()):
        drift = (join(a, zigzag, group, 2) - join(b, WAYS[peer][0], group, 2)).abs().max().item()
        assert drift < 1e-3, f"gradients differ by {drift}"
    return times


def peak_bytes(way: str, length: int) -> int:
    run = step(way, length, dist.group.WORLD)
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("measured"):
            run()
    return most_in("measured", profiler)


def rows() -> list[Row]:
    table = []
    for ranks, length, (mine, peer) in itertools.product((2, 4), LENGTHS, PAIRS):
        launches = [
            launch.run(turn, mine, peer, length, TURNS, ranks=ranks, timeout_s=300, checked=False)
            for _ in range(LAUNCHES)
        ]
        ours, theirs = slowest_then_median(one_after_the_other(launches))
        name = f"{mine}, {length} tokens, cp={ranks}"
        table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 0.95))
        ours, theirs = (
            max(launch.run(peak_bytes, way, length, ranks=ranks, checked=False)) for way in (mine, peer)
        )
        table.append(row(f"{name}, peak memory", peer, ours / 1e6, theirs / 1e6, "MB", 1.0))
    return table
