"""Other ways round: whole rows of scores, work for idle ranks, rings in rings, a checkpoint."""

from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.kernel import FUSED, PLAIN
from minitrain.context.layout import contiguous, positions, striped, zigzag
from minitrain.context.ring import Rings, burst_attention, ring_attention, ring_forward
from minitrain.memory.recompute import Results, recompute
from minitrain.model.gpt import Block
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.context import balanced as balanced_module
from minitrain.systems.context.balanced import (
    Work,
    balanced,
    balanced_attention,
    balanced_forward,
    check,
    idle_fraction,
    inputs_from,
    inputs_to,
    unbalanced,
)
from minitrain.systems.context.ring_self_attention import (
    Rows,
    ring_self_attention,
    rows_backward,
    rows_forward,
)
from minitrain.systems.simulate.replay import replay
from tests.context.runs import GQA, MHA, MQA, B, K, T, furthest, hidden, ideal, over, whole
from tests.parallel import TOLERANCE, small

# ---- ring self-attention ----------------------------------------------------------------------------------


def row_peaks(tokens):
    q, k, v, dout = (torch.empty(1, 2, tokens, 8) for _ in range(4))
    group = collectives.world()
    rows = Rows(group, contiguous, False)
    with Ledger() as forward:
        out, p = rows_forward(q, k, v, rows)
        calls = forward.num_calls("send")
    with Ledger() as backward:
        rows_backward(dout, q, k, v, p, rows)
    with Ledger() as by_blocks:
        ring_forward(q, k, v, Rings((group,), contiguous, False), FUSED)
    peaks = [ledger.peak_bytes for ledger in (forward, backward, by_blocks)]
    return p.nbytes, *peaks, calls, backward.num_calls("send")


def test_ring_self_attention():
    """Equal to full attention; two passes of n-1 steps; stored are T scores for T/n queries, O(T²/n)."""

    def rank():
        group, found = collectives.world(), []
        for heads, causal, layout in ((GQA, True, zigzag), (MHA, False, contiguous), (MQA, True, contiguous)):
            core = partial(ring_self_attention, group=group, layout=layout, causal=causal)
            ours, sent = over(core, group, layout, heads)
            found.append((furthest(ours, whole(heads, causal)), sent, heads[1]))
        return found

    for ranks in (2, 4):
        for found in launch.run(rank, ranks=ranks):
            for apart, sent, kv_heads in found:
                once = (ranks - 1) * B * kv_heads * T // ranks * K * 8
                assert apart < TOLERANCE and sent == (2 * once, 4 * once)
    n = 8
    for tokens in (128, 256):
        rows, forward, backward, by_blocks, calls, more = dryrun.run(row_peaks, tokens, ranks=n)
        assert rows == 2 * (n * tokens) ** 2 // n * 4  # B·H·T²/n in float32
        assert rows < forward < 1.4 * rows and 2 * rows < backward < 2.4 * rows
        assert (calls, more) == (2 * (n - 1), 4 * (n - 1)) and by_blocks < forward / (tokens / 32)


# ---- DistFlashAttention ----------------------------------------------------------------------------------


def test_balanced_schedules_are_complete():
    for n in range(1, 17):
        for schedule, rounds, idle in (
            (balanced(n), n // 2 + 1, Fraction(0) if n % 2 else Fraction(1, 2 * n)),
            (unbalanced(n), n, Fraction(n * n - n, 2 * n * n)),
        ):
            check(schedule)
            assert len(schedule) == rounds and idle_fraction(schedule) == idle
            for t in range(rounds):  # what one is given, another needs; each gives and takes at most once
                gifts = [(rank, *gift) for rank in range(n) if (gift := inputs_to(schedule, t, rank))]
                needs = [(rank, need) for rank in range(n) if (need := inputs_from(schedule, t, rank))]
                assert sorted(gifts) == sorted((need[0], rank, need[1]) for rank, need in needs)


def test_a_schedule_with_a_fault_is_refused():
    def run(schedule):
        q = torch.empty(1, 1, 4, 4)
        balanced_attention(q, q, q, group=collectives.world(), schedule=lambda n: schedule)

    missing, twice, stranger, busy = (balanced(4) for _ in range(4))
    busy[1][2], busy[2][2] = Work(2, 0), Work(2, 1)
    missing[1][2], twice[2][0], stranger[1][0], stranger[1][1] = None, Work(3, 0), Work(1, 0), Work(3, 0)
    for schedule, text in (
        (missing, "not every causal tile is computed once"),
        (twice, "not every causal tile is computed once"),
        (stranger, "by a rank that owns neither"),
        (busy, "two ranks want data of the same rank in one round"),
    ):
        with pytest.raises(ValueError, match=text):
            dryrun.run(run, schedule, ranks=4)


def tile_bytes(schedule, rank, heads, tokens):
    """What the docstring says a rank sends, forward and backward, float64."""
    block, row = B * tokens * K * 8, B * heads[0] * tokens * 8
    forward = backward = 0
    for t in range(len(schedule)):
        if gift := inputs_to(schedule, t, rank):
            forward += 2 * heads[1] * block if gift[1] == "keys" else heads[0] * block
            backward += 2 * heads[1] * block if gift[1] == "keys" else 2 * heads[0] * block + 2 * row
        if need := inputs_from(schedule, t, rank):
            forward += 0 if need[1] == "keys" else heads[0] * block + row
            backward += 2 * heads[1] * block if need[1] == "keys" else heads[0] * block
    return forward, backward


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_balanced_equals_full_attention_and_sends_what_it_says(ranks):
    length, ways = 8 * ranks, [(GQA, balanced, FUSED), (MHA, balanced, PLAIN), (GQA, unbalanced, FUSED)]

    def rank():
        group, found = collectives.world(), []
        for heads, schedule, blocks in ways:
            core = partial(balanced_attention, group=group, schedule=schedule, kernel=blocks)
            ours, sent = over(core, group, contiguous, heads, length)
            found.append((furthest(ours, whole(heads, True, length)), sent))
        return found

    for number, found in enumerate(launch.run(rank, ranks=ranks)):
        for (heads, schedule, _), (apart, sent) in zip(ways, found):
            assert apart < TOLERANCE, (heads, schedule)
            assert sent == tile_bytes(schedule(ranks), number, heads, 8)


def test_without_the_helpers_results_it_fails():
    def rank():
        group, run = collectives.world(), balanced_module.run_schedule
        balanced_module.run_schedule = lambda *args: run(*args[:-1], lambda what, result: None)
        ours, _ = over(partial(balanced_attention, group=group), group, contiguous, GQA, 12)
        return furthest(ours, whole(GQA, True, 12))

    assert min(launch.run(rank, ranks=3)) > 1e-3


def test_balanced_data_travel_a_round_ahead():
    def run():
        q, k, v = (torch.empty(1, 1, 8, 4) for _ in range(3))
        with Ledger() as ledger:
            balanced_forward(q, k, v, collectives.world(), balanced(8), FUSED)
        return ledger.events

    for rank in range(8):
        calls = hidden(dryrun.run(run, rank=rank, ranks=8))
        assert calls and all(products == 1 for op, products in calls if op == "receive")


def attention_time(core, n, tokens=1024):
    """Of a forward pass, in tiles' times, on devices joined by links that cost nothing."""

    def run():
        q, k, v = (torch.empty(1, 1, tokens, 128, dtype=torch.bfloat16) for _ in range(3))
        with Ledger() as ledger:
            core(q, k, v, group=collectives.world())
        return ledger.events

    events = {rank: dryrun.run(run, rank=rank, ranks=n) for rank in range(n)}
    timeline = replay(events, ideal(1e12, 1e20))
    return timeline.step_s / (4 * tokens**2 * 128 / 1e12)


def layer_step(way, group, x, where):
    """A layer forward and backward, its core a ring: as it is, computed again, or but for attention."""
    core, results = partial(ring_attention, group=group, layout=zigzag), Results()
    block = Block(small(d_model=64, max_positions=4096), "layers.1", attention=core, dtype=x.dtype)
    for param in block.parameters():
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(1))
    block.attention.hooks.result, keep = results, {"core"} if way == "spared" else ()
    again = partial(recompute, block, results=results, keep=keep, early_stop=False)
    with Ledger() as ledger:
        layer = block if way == "plain" else again
        y = layer(x, where)
        kept = ledger.live_bytes
        y.square().sum().backward()
    return [y, x.grad, *(param.grad for param in block.parameters())], ledger, kept


def test_dist_flash_attn():
    """n // 2 + 1 rounds instead of n, on the clock too, where the round of triangles is half a round; a
    checkpoint that computes no attention again, with the same gradients."""
    for n in (4, 5):
        assert abs(attention_time(partial(ring_attention, causal=True), n) - (n - 1 / 2)) < 0.01
        assert abs(attention_time(balanced_attention, n) - (n // 2 + 1 / 2)) < 0.01

    def dry(way):
        x = torch.empty(1, 1024, 64, requires_grad=True)
        group = collectives.world()
        _, ledger, kept = layer_step(way, group, x, positions(zigzag, group, 4096))
        attention = ledger.flops_by_operator["_scaled_dot_product_flash_attention_for_cpu"]
        return attention, ledger.flops, ledger.sent_bytes(), kept

    plain, again, spared = (dryrun.run(dry, way, ranks=4) for way in ("plain", "again", "spared"))
    assert again[0] == 2 * plain[0] and spared[0] == plain[0]  # recomputed attention: 0 FLOPs
    assert again[1] - spared[1] == plain[0] and spared[1] > plain[1]  # everything else is computed again
    assert spared[2] == plain[2] == 3 * (again[2] - plain[2])  # and K, V do not go round again
    assert spared[3] - again[3] == 1024 * 64 * 4 + 1024 * 4 * 4  # for O and lse of 4 heads
    assert spared[3] < plain[3] / 4

    def rank():
        group, found = collectives.world(), []
        for way in ("plain", "spared", "again"):
            made = dict(dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank()))
            x, where = torch.randn(2, 8, 64, **made), positions(zigzag, group, 8 * group.size())
            results, *_ = layer_step(way, group, x.requires_grad_(), where)
            found.append([y.detach() for y in results])
        return furthest(found[1], found[0]), furthest(found[2], found[0])

    assert max(map(max, launch.run(rank, ranks=2))) < TOLERANCE


# ---- BurstAttention --------------------------------------------------------------------------------------


def side_bytes(side, heads, n, tokens):
    """Backward, float64, from the docstring."""
    block, row = B * tokens * K * 8, B * tokens * 8
    return (n - 1) * (4 * heads[1] * block if side == "keys" else 3 * heads[0] * block + 2 * heads[0] * row)


def two_level(q, k, v, mesh):
    return burst_attention(q, k, v, inside=mesh.group("tp"), across=mesh.group("dp"), causal=False)


def flat(q, k, v, mesh):
    return ring_attention(q, k, v, group=collectives.world(), causal=False)


def burst_steps(core, tokens, nodes, devices):
    def run():
        mesh = Mesh(dp=nodes, tp=devices)
        q, k, v = (torch.empty(1, 8, tokens, 128, dtype=torch.bfloat16) for _ in range(3))
        with Ledger() as ledger:
            core(q, k, v, mesh)
        return ledger.events

    return {rank: dryrun.run(run, rank=rank, ranks=nodes * devices) for rank in range(nodes * devices)}


def test_burst_attention():
    """Equal to full attention by either backward; bytes; exposed = max(0, t_comm - t_comp) a step."""

    def rank():
        mesh, found = Mesh(dp=2, tp=2), {}
        burst = partial(burst_attention, inside=mesh.group("tp"), across=mesh.group("dp"))
        cases = [(MHA, True, zigzag), (GQA, True, striped), (MQA, False, contiguous), (GQA, True, contiguous)]
        for heads, causal, layout in cases:
            expected = whole(heads, causal)
            for side in ("queries", "keys"):
                core = partial(burst, layout=layout, causal=causal, backward_sends=side)
                ours, sent = over(core, collectives.world(), layout, heads)
                found[heads, layout.__name__, side] = furthest(ours, expected), sent
        return found

    for found in launch.run(rank, ranks=4):
        for (heads, layout, side), (apart, (forward, backward)) in found.items():
            assert apart < TOLERANCE, (heads, layout, side)
            assert forward == 3 * 2 * B * heads[1] * T // 4 * K * 8
            assert backward == side_bytes(side, heads, 4, T // 4)
    # a quarter less, but for two numbers per row; with shared heads keys are the lighter side
    assert side_bytes("queries", MHA, 4, 8) / side_bytes("keys", MHA, 4, 8) == 3 / 4 + 2 / (4 * K)
    assert side_bytes("queries", GQA, 4, 8) > side_bytes("keys", GQA, 4, 8)

    nodes, devices, flops, inside, across = 2, 4, 1e12, 8e9, 1e9
    for tokens in (128, 512, 1024):
        product, block = 4 * 8 * tokens**2 * 128 / flops, 2 * 2 * 8 * tokens * 128
        step, far = max(product, block / inside), block / across
        inner = (devices - 1) * step + product
        where = ideal(flops, inside, across, devices)
        two_rings = replay(burst_steps(two_level, tokens, nodes, devices), where)
        one_ring = replay(burst_steps(flat, tokens, nodes, devices), where)
        assert two_rings.step_s == pytest.approx((nodes - 1) * max(far, inner) + inner, rel=1e-6)
        assert one_ring.step_s == pytest.approx((nodes * devices - 1) * max(far, product) + product, rel=1e-6)
        shown = (nodes - 1) * max(0, far - inner) + nodes * (devices - 1) * max(0, block / inside - product)
        assert two_rings.step_s - two_rings.compute_s == pytest.approx(shown, abs=1e-9)


def test_a_node_s_next_block_is_on_its_way_during_the_whole_inner_ring():
    events = burst_steps(two_level, 16, 3, 4)[5]
    sends = Counter(event.axis for event in events if isinstance(event, Issue) and event.op == "send")
    assert sends == {"dp": 2 * 2, "tp": 2 * 9}  # K and V, N - 1 times and N·(M - 1) times
    both = {("receive", 1): 18, ("receive", 4): 4, ("send", 1): 18, ("send", 4): 4}
    assert Counter(hidden(events)) == both
