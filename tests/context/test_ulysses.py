"""Ulysses and dynamic sequence parallelism: equal to one device, bytes beside Megatron's, refusals."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.context.layout import contiguous, split, striped, zigzag
from minitrain.context.ulysses import switch, to_heads, ulysses_attention
from minitrain.model.gpt import GPT, GPTConfig
from minitrain.model.layers import causal_attention, naive_attention
from minitrain.ranks.collectives import world
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.context.dynamic_sequence import along, next_cut, run_stages
from minitrain.tensor_parallel import sequence
from minitrain.tensor_parallel.model import cut_attention, cut_mlp
from tests.context.runs import K, distance, inputs
from tests.parallel import TOLERANCE, Traffic

# ---- one device ------------------------------------------------------------------------------------------


def full(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))


def everything():
    group, found = world(), {}
    for heads, kv_heads in ((8, 8), (8, 2), (8, 1), (24, 12)):
        for layout in (contiguous, zigzag, striped):
            for causal, core in ((True, causal_attention), (False, full)):
                run = partial(ulysses_attention, group=group, core=core, layout=layout)
                apart = distance(run, layout, group, heads, kv_heads, causal=causal)
                found[heads, kv_heads, layout.__name__, causal] = apart
    q, k, v, _ = inputs((8, 2), 16, width=6)  # values wider than queries, as in latent attention
    parts = (split(x, contiguous, group, 2) for x in (q, k, v))
    ours = ulysses_attention(*parts, group=group, core=causal_attention)
    theirs = split(naive_attention(q, k, v), contiguous, group, 2)
    found["wide values"] = (ours - theirs).abs().max().item()
    return found


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_equals_one_device(ranks):
    """Forward and all gradients; every layout, causal or not; K/V heads that the ranks divide, or not."""
    for found in launch.run(everything, ranks=ranks):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("broken", ["all-to-all", "order", "copies"])
def test_without_it_the_result_is_another(broken):
    def rank():
        layout = contiguous
        if broken == "all-to-all":
            collectives.all_to_all = lambda x, group, dim=0: x
        elif broken == "order":
            layout = zigzag  # held so, but not said
        else:  # heads 0 1 0 1, where 0 0 1 1 is meant
            torch.Tensor.repeat_interleave = lambda x, n, dim: x.repeat(1, n, 1, 1)
        run = partial(ulysses_attention, group=world(), core=causal_attention)
        return distance(run, layout, world(), kv_heads=2 if broken == "copies" else 8)

    assert min(launch.run(rank, ranks=4)) > 1e-3


# ---- bytes -----------------------------------------------------------------------------------------------

B, T, D = 2, 16, 32
CONFIG = GPTConfig(vocab_size=64, d_model=D, num_layers=1, num_heads=8, max_positions=T, positions="rope")


def block(core=naive_attention, config=CONFIG):
    return GPT(config, dtype=torch.float64, layers=[1], attention=core).layers[0]


def one_layer(way):
    """A layer both ways: bytes sent in forward, in both, number of calls; output, gradients of x, weights."""
    group = world()
    x = torch.linspace(-1, 1, B * T * D, dtype=torch.float64).view(B, T, D)
    positions = split(torch.arange(T), contiguous, group, 0)
    if way == "ulysses":
        layer = block(partial(ulysses_attention, group=group, core=causal_attention))
    else:
        layer, positions = block(), torch.arange(T)
        cut_attention(layer.attention, CONFIG.head_dim, group, sequence.column, sequence.row)
        cut_mlp(layer.mlp, group, sequence.column, sequence.row)
    x = split(x, contiguous, group).requires_grad_()
    with Traffic() as ledger:
        y, forward = layer(x, positions), ledger.sent_bytes()
        y.square().sum().backward()
    calls = ledger.num_calls()
    together = collectives.all_reduce if way == "ulysses" else collectives.all_gather
    weight = together(layer.attention.q.weight.grad, group)
    return forward, ledger.sent_bytes(), calls, (y.detach(), x.grad, weight)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ulysses(ranks):
    """A layer as on one device; 4(P-1)/P·N·h/P elements, P times less than Megatron's 4(P-1)/P·N·h."""
    layer, x = block(), torch.linspace(-1, 1, B * T * D, dtype=torch.float64).view(B, T, D).requires_grad_()
    y = layer(x, torch.arange(T))
    y.square().sum().backward()
    unit = 8 * 4 * B * T * D * (ranks - 1) // ranks
    found = launch.run(lambda: [one_layer(way) for way in ("ulysses", "megatron")], ranks=ranks)
    for way, volume, calls, runs in zip(("ulysses", "megatron"), (unit // ranks, unit), (4, 10), zip(*found)):
        for forward, both, number, (_, _, weight) in runs:
            assert (forward, number) == (volume, calls)
            assert both == (2 * volume if way == "ulysses" else volume * 10 // 4)  # Megatron gathers again
            assert (weight - layer.attention.q.weight.grad).abs().max() < TOLERANCE
        for place, whole in ((0, y), (1, x.grad)):
            assert (torch.cat([found[place] for *_, found in runs], 1) - whole).abs().max() < TOLERANCE
        assert dryrun.run(one_layer, way, rank=ranks - 1, ranks=ranks)[:3] == runs[-1][:3]


def core_bytes(heads, kv_heads):
    q, k, v, _ = (split(x, contiguous, world(), 2) for x in inputs((heads, kv_heads), 16))
    with Traffic() as ledger:
        ulysses_attention(q, k, v, group=world(), core=causal_attention)
    return ledger.num_calls(), ledger.sent_bytes()


@pytest.mark.parametrize(
    "heads, kv_heads, sent_kv_heads", [(8, 8, 8), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 6, 12)]
)
def test_bytes_of_grouped_heads(heads, kv_heads, sent_kv_heads):
    """Few K/V heads are sent as few, unless there are fewer than ranks: then each rank needs a copy."""
    elements = (2 * heads + 2 * sent_kv_heads) * 2 * 16 // 4 * K
    for calls, sent in [dryrun.run(core_bytes, heads, kv_heads, rank=1, ranks=4)]:
        assert (calls, sent) == (2, 8 * elements * 3 // 4)


def core_memory():
    q = torch.ones(1, 8, 64, 32)
    k, v = torch.ones_like(q), torch.ones_like(q)
    with Ledger() as ledger:
        ulysses_attention(q, k, v, group=world(), core=lambda q, k, v: q)
    return ledger.peak_bytes / q.nbytes


def test_memory():
    """Inputs, and twice as much while they travel; nothing that grows with the number of ranks."""
    assert [dryrun.run(core_memory, rank=1, ranks=ranks) for ranks in (2, 8)] == [9, 9]


# ---- dynamic ---------------------------------------------------------------------------------------------

FRAMES, PATCHES = 8, 16
SPATIAL_TEMPORAL = GPTConfig(
    vocab_size=64, d_model=D, num_layers=1, num_heads=8, max_positions=16, positions="rope", norm="rms"
)


def layer_along(layer, positions=None):
    return lambda x: layer(x, torch.arange(x.size(1)) if positions is None else positions)


def video(way, group):
    """A spatial and a temporal layer on x[B, T/n, S, D]: what was sent, the result and its gradients."""
    x = torch.linspace(-1, 1, B * FRAMES * PATCHES * D, dtype=torch.float64).view(B, FRAMES, PATCHES, D).sin()
    x = (x if group is None else split(x, contiguous, group)).clone().requires_grad_()
    ulysses = partial(ulysses_attention, group=group, core=causal_attention)
    spatial = block(config=SPATIAL_TEMPORAL)
    temporal = block(ulysses if way == "ulysses" else naive_attention, SPATIAL_TEMPORAL)
    with Traffic() as ledger:
        if way == "dsp":
            y = run_stages(x, [(2, layer_along(spatial)), (1, layer_along(temporal))], group, cut=1)
        else:
            positions = None if group is None else split(torch.arange(FRAMES), contiguous, group, 0)
            y = along(along(x, 2, layer_along(spatial)), 1, layer_along(temporal, positions))
        forward = ledger.num_calls(), ledger.sent_bytes()
        (y * y.detach().cos()).sum().backward()
    weights = [layer.mlp.up.weight.grad for layer in (spatial, temporal)]
    if group is not None:
        weights = [collectives.all_reduce(weight, group) for weight in weights]
    return forward, (ledger.num_calls(), ledger.sent_bytes()), (y.detach(), x.grad), weights


@pytest.mark.parametrize("ranks", [2, 4])
def test_dsp(ranks):
    """A spatial-temporal block: as on one device, with 2 all-to-alls of M/P where Ulysses sends 4 and on a
    flat sequence 8: 50 to 75 % less."""
    *_, expected, weights = video("one device", None)
    unit = 8 * B * FRAMES * PATCHES * D // ranks * (ranks - 1) // ranks
    sent = {}
    found = launch.run(lambda: [video(way, world()) for way in ("dsp", "ulysses")], ranks=ranks)
    for way, factor, runs in zip(("dsp", "ulysses"), (2, 4), zip(*found)):
        for forward, both, _, summed in runs:
            # q, k and v are one message: 2 calls as well
            assert forward == (2, factor * unit) and both == (4, 2 * factor * unit)
            assert all((ours - theirs).abs().max() < 1e-11 for ours, theirs in zip(summed, weights))
        for place in (0, 1):
            together = torch.cat([found[place] for *_, found, _ in runs], 1)
            assert (together - expected[place]).abs().max() < TOLERANCE
        sent[way] = runs[0][0][1]
    assert sent["dsp"] <= 0.5 * sent["ulysses"] and sent["dsp"] <= 0.25 * 8 * unit


def test_stages_switch_only_when_they_must():
    """Five stages over three dims: each dim is cut while nobody needs it, the one needed last is cut next."""

    def rank():
        x = torch.arange(2 * 4 * 4 * 6 * 3, dtype=torch.float64).view(2, 4, 4, 6, 3)
        layer = lambda x: x.cumsum(1) / (1 + x.mean(1, keepdim=True).abs())
        stages = [(dim, layer) for dim in (2, 3, 1, 3, 2)]
        with Traffic() as ledger:
            y = run_stages(split(x, contiguous, world()), stages, world(), cut=1)
        calls = ledger.num_calls()
        for dim, layer in stages:
            x = along(x, dim, layer)
        return calls, (y - split(x, contiguous, world())).abs().max().item()

    for calls, error in launch.run(rank, ranks=2):
        # dim 2 is cut for the third stage, as it is needed last, and dim 1 for the fifth
        assert calls == 2 and error < TOLERANCE


def test_a_dim_that_nobody_needs_is_cut_where_x_came_cut():
    assert [next_cut([2], [1, 3], home=home) for home in (1, 3)] == [1, 3]
    assert next_cut([3], [1, 3], home=3) == 1 and next_cut([1, 3], [1, 3], home=1) == 3


def test_switch_and_its_adjoint():
    """Both ways it is the identity; <switch x, y> = <x, switch' y>; to_heads does several tensors at once."""

    def rank():
        group, rng = world(), torch.Generator().manual_seed(world().rank())
        x, y = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((3, 8, 2, 5), (3, 2, 8, 5)))
        x.requires_grad_()
        there = switch(x, group, cut=1, join=2)
        assert there.shape == y.shape and torch.equal(switch(there, group, cut=-2, join=-3), x)
        assert torch.equal(to_heads((x, 2 * x), group)[1], 2 * there)
        there.backward(y)
        sums = torch.stack(((there * y).sum(), (x * x.grad).sum())).detach()
        return collectives.all_reduce(sums, group).tolist()

    for left, right in launch.run(rank, ranks=4):
        assert abs(left - right) < TOLERANCE
