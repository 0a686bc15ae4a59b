"""Attention over a cut sequence against one process: inputs, reference, and how far a core is from it."""

import torch
import torch.nn.functional as F

from minitrain.context.layout import contiguous, join, split
from minitrain.plan.simulate.machines import Device, Link, Machine
from minitrain.ranks.events import Compute, Issue
from tests.parallel import Traffic

B, T, K = 2, 32, 4  # T: two pieces for each of 16 ranks
MHA, GQA, MQA = (4, 4), (4, 2), (4, 1)  # query heads, K/V heads


def inputs(heads=GQA, length=T, dtype=torch.float64, width=K):
    """q, k, v and what dO is to be: whole, and alike on all ranks. `width`: of v."""
    generator = torch.Generator().manual_seed(7)
    shapes = (heads[0], K), (heads[1], K), (heads[1], width), (heads[0], width)
    made = dict(dtype=torch.float64, generator=generator)
    return [torch.randn(B, count, length, wide, **made).to(dtype) for count, wide in shapes]


def whole(heads=GQA, causal=True, length=T, dtype=torch.float64):
    """Out, dq, dk, dv of torch's attention on the whole sequence."""
    *qkv, dout = inputs(heads, length, dtype)
    qkv = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=heads[0] != heads[1])
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)]


def over(core, group, layout=contiguous, heads=GQA, length=T, dtype=torch.float64, width=K):
    """The same four, put together from all ranks, and (bytes forward, bytes backward) of this one."""
    q, k, v, dout = (split(x, layout, group, 2) for x in inputs(heads, length, dtype, width))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    with Traffic() as ledger:
        out, forward = core(*qkv), ledger.sent_bytes()
        out.backward(dout)
    found = [join(x, layout, group, 2) for x in (out, *(x.grad for x in qkv))]
    return found, (forward, ledger.sent_bytes() - forward)


def furthest(ours, theirs):
    assert len(ours) == len(theirs)
    return max((a.double() - b).abs().max().item() for a, b in zip(ours, theirs))


def distance(core, layout, group, heads=8, kv_heads=8, length=16, causal=True):
    """How far output and gradients of q, k and v are from those of one device."""
    ours, _ = over(core, group, layout, (heads, kv_heads), length)
    return furthest(ours, whole((heads, kv_heads), causal, length))


def hidden(events):
    """For every call, in the order of waiting: (operation, products between its issue and its wait)."""
    issued, products, found = {}, 0, []
    for event in events:
        if isinstance(event, Compute):
            products += bool(event.flops)
        elif isinstance(event, Issue):
            issued[event.id] = event.op, products
        else:
            op, before = issued[event.id]
            found.append((op, products - before))
    return found


def ideal(flops, inside, across=None, per_node=64):
    """A paper's machine: FLOP/s, bytes/s in a node and between two, and all else costs nothing."""
    device = Device("device", {"bfloat16": flops, "float32": flops}, 80e9, 1e30, "a test")
    speeds = {"inside": inside, "across": across or inside}
    links = [Link(name, 0.0, speed, "a test") for name, speed in speeds.items()]
    return Machine("ideal", device, per_node, *links, per_node)
