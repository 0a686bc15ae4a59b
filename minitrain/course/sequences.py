"""What the chapter on long sequences compares with: one process, and the bytes of a core over ranks.

A core is any `core(q, k, v)` on this rank's `[B, H, T/n, K]`. float64 throughout.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minitrain.context.layout import Layout, split
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.ranks import launch
from minitrain.ranks.events import Compute
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger


def equal(one: Tensor, other: Tensor) -> bool:
    return ((one - other).abs().max() < 1e-12).item()


def example(heads=8, kv_heads=8, length=16, width=4, batch=2) -> list[Tensor]:
    """q, k, v and dout `[B, H, T, K]`, from one seed: the same on every rank."""
    rng = torch.Generator().manual_seed(7)
    shapes = [(batch, h, length, width) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in shapes]


def whole_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """The whole matrix of scores, a softmax, a product: the definition, on one process."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later & causal, -torch.inf).softmax(-1) @ v


def is_equal(core: Callable, layout: Layout, group, heads=8, kv_heads=8, causal=True) -> bool:
    """This rank's part of the output and of the three gradients is that of one process."""
    *inputs, dout = example(heads, kv_heads)
    local = [split(x, layout, group, 2).requires_grad_() for x in inputs]
    out = core(*local)
    ours = out, *torch.autograd.grad(out, local, split(dout, layout, group, 2))
    inputs = [x.requires_grad_() for x in inputs]
    out = whole_attention(*inputs, causal)
    theirs = out, *torch.autograd.grad(out, inputs, dout)
    return all(equal(a, split(b, layout, group, 2)) for a, b in zip(ours, theirs))


def core_traffic(core: Callable, layout: Layout, group, heads=8, kv_heads=8, length=16) -> tuple[int, int]:
    """Bytes that this rank sends in forward, and in backward."""
    *inputs, dout = (split(x, layout, group, 2) for x in example(heads, kv_heads, length))
    with Ledger() as ledger:
        out = core(*(x.requires_grad_() for x in inputs))
        forward = ledger.sent_bytes()
        out.backward(dout)
    return forward, ledger.sent_bytes() - forward


def on(ranks: int, fn: Callable, *args) -> Any:
    """What rank 0 returns: of real ranks up to 4, of a dry run beyond."""
    return launch.run(fn, *args, ranks=ranks)[0] if ranks <= 4 else dryrun.run(fn, *args, ranks=ranks)


def trained_alone(config: GPTConfig, batches, steps=3, lr=1e-2, clip=0.5) -> Tensor:
    """All parameters, flat, after some steps of one process with PyTorch's own optimizer."""
    model = GPT(config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        tokens, targets = batches.draw(step, 0, 1)
        optimizer.zero_grad()
        (cross_entropy_sum(model(tokens), targets) / (targets != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def by_axis(events: Sequence, what: Callable = lambda event: event.sent_bytes) -> dict[str, int]:
    """Bytes that left this rank, or another sum over its sends, by the axis of the mesh."""
    found: dict[str, int] = {}
    for event in events:
        if not isinstance(event, Compute) and hasattr(event, "axis") and event.op != "receive":
            found[event.axis] = found.get(event.axis, 0) + what(event)
    return found


def leaves_node(events: Sequence, rank: int, devices: int) -> int:
    """Bytes that a rank sends to ranks of other nodes, a collective's shared out evenly among its members."""
    total = 0
    for event in events:
        if getattr(event, "op", "receive") != "receive":
            p2p = event.op == "send"
            others = [event.members[1]] if p2p else [member for member in event.members if member != rank]
            away = sum(member // devices != rank // devices for member in others)
            total += event.sent_bytes * away // len(others)
    return total


def longer(events: Sequence, times) -> list:
    """The events of a sequence so many times as long: products grow with its square, all else with it.
    Without shapes: a product may have the sequence in any two places of its own."""

    def grown(event):
        if isinstance(event, Compute):
            sizes = dict(bytes=event.bytes * times, written=event.written * times, shape=())
            return replace(event, flops=event.flops * times**2, **sizes)
        if not hasattr(event, "op"):
            return event
        sizes = {"payload_bytes": event.payload_bytes * times, "sent_bytes": event.sent_bytes * times}
        return replace(event, **sizes)

    return [grown(event) for event in events]


def apart(events: Sequence, others: Sequence) -> tuple[float, bool]:
    """The largest relative difference of a product's FLOPs, and whether all else is the same."""
    flops = [[e.flops for e in some if isinstance(e, Compute) and e.flops] for some in (events, others)]
    bare = lambda e: replace(e, flops=0, shape=()) if isinstance(e, Compute) else e
    rest = [[bare(event) for event in some] for some in (events, others)]
    return max(abs(one / other - 1) for one, other in zip(*flops)), rest[0] == rest[1]
