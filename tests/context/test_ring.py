"""The ring: equal to full attention in every layout, bytes and memory as it says, overlap, a model."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minitrain import collectives, launch
from minitrain.attention import kernel
from minitrain.attention.kernel import FUSED, PLAIN, empty_result, merge, row_sums, stand_in
from minitrain.context.layout import (
    contiguous,
    efficiency,
    entries,
    join,
    positions,
    split,
    striped,
    tiles,
    zigzag,
)
from minitrain.context.ring import (
    Rings,
    flat_ring,
    nested_ring_pass,
    ring_attention,
    ring_backward,
    ring_forward,
)
from minitrain.course.saved_tensors import SavedTensors
from minitrain.data_parallel import bucketed
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import Block
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Compute, Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.simulate.replay import replay
from tests.context.runs import GQA, MHA, MQA, B, K, T, furthest, hidden, ideal, inputs, over, whole
from tests.parallel import TOLERANCE, Problem, Traffic, difference, one_process, small, train_parallel

LAYOUTS = [contiguous, zigzag, striped]


# ---- numbers ---------------------------------------------------------------------------------------------


def everywhere(layouts, all_heads, kinds=(FUSED,)):
    """Furthest from full attention, and bytes by number of K/V heads."""
    group, apart, sent = collectives.world(), {}, {}
    for heads in all_heads:
        for causal in (True, False):
            expected = whole(heads, causal)
            for layout in layouts:
                for kind in kinds:
                    core = partial(ring_attention, group=group, layout=layout, causal=causal, kernel=kind)
                    found, sent[heads] = over(core, group, layout, heads)
                    apart[heads, causal, layout.__name__, kind is PLAIN] = furthest(found, expected)
    return apart, sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_flat_ring_is_the_ring(ranks):
    """Twelve lines to read first: they equal full attention and send what a ring sends."""

    def rank():
        group = collectives.world()
        q, k, v, _ = (split(x, contiguous, group, 2) for x in inputs())
        with Traffic() as ledger:
            out, _ = flat_ring(q, k, v, group)
        return furthest([join(out, contiguous, group, 2)], whole()[:1]), ledger.sent_bytes()

    for apart, sent in launch.run(rank, ranks=ranks):
        assert apart < TOLERANCE and sent == (ranks - 1) * 2 * B * GQA[1] * T // ranks * K * 8


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_equals_full_attention_and_sends_what_it_says(ranks):
    """Output and all gradients; forward (n-1)·2·B·H_kv·T/n·K elements, backward twice that."""
    settings = {1: ([GQA],), 8: ([GQA],), 2: ([MHA, GQA, MQA], (FUSED, PLAIN)), 4: ([MHA, GQA, MQA],)}[ranks]
    for apart, sent in launch.run(everywhere, LAYOUTS, *settings, ranks=ranks):
        assert max(apart.values()) < TOLERANCE, apart
        for heads, found in sent.items():
            forward = (ranks - 1) * 2 * B * heads[1] * T // ranks * K * 8
            assert found == (forward, 2 * forward)


class Kept:
    """A message that never left."""

    def __init__(self, x):
        self.x = x

    def wait(self):
        return self.x


def broken_run(part, group):
    """How far out, dq, dk, dv are from the truth when one call among many does nothing."""
    true = dict(rotate=collectives.rotate, merge=kernel.merge)
    count = [0]

    def skips(which, name, instead):
        def call(*args, **kwargs):
            count[0] += 1
            return (instead if count[0] == which else true[name])(*args, **kwargs)

        return call

    if part == "hop":  # the second of three hops of K, V
        collectives.rotate = skips(2, "rotate", lambda x, group, async_op: Kept(x))
    elif part == "home":  # 3 hops forward, 3 + 2 backward, and the last one
        collectives.rotate = skips(9, "rotate", lambda x, group, shift: x)
    else:
        kernel.merge = skips(2, "merge", lambda *args: None)
    found, _ = over(partial(ring_attention, group=group, causal=False), group)
    collectives.rotate, kernel.merge = true["rotate"], true["merge"]
    return [(a - b).abs().max().item() for a, b in zip(found, whole(causal=False))]


def test_without_one_of_its_parts_it_fails():
    def rank():
        return {part: broken_run(part, collectives.world()) for part in ("hop", "merge", "home")}

    for found in launch.run(rank, ranks=4):
        for part, (out, dq, dk, dv) in found.items():
            assert dk > 1e-3 and dv > 1e-3, part
            assert max(out, dq) < TOLERANCE if part == "home" else min(out, dq) > 1e-3, part


def test_bfloat16_is_summed_in_float32():
    """On four ranks as near to the exact result as one rank is: only sums that travel are rounded."""

    def rank():
        group = collectives.world()
        core = partial(ring_attention, group=group, layout=zigzag)
        return furthest(over(core, group, zigzag, dtype=torch.bfloat16)[0], whole())

    alone = furthest(whole(dtype=torch.bfloat16), whole())
    assert 1e-4 < launch.run(rank, ranks=4)[0] < 2 * alone


def test_blocks_in_any_order_with_any_masks():
    """Nothing merged with nothing is nothing; D alone gives the gradients that O gives, for tiny and for no
    dO too."""
    q, k, v, dout = inputs(MHA, 8)
    out, lse = empty_result(q)
    merge(out, lse, *empty_result(q))
    assert (out == 0).all() and (lse == -torch.inf).all()
    for tile in reversed([slice(0, 3), slice(3, 4), slice(4, 8)]):
        merge(out, lse, *PLAIN.forward(q, k[..., tile, :], v[..., tile, :], False))
        merge(out, lse, *empty_result(q))
    assert furthest([out], whole(MHA, False, 8)[:1]) < TOLERANCE
    dout[..., 0, :], dout[..., 1, :] = 0, dout[..., 1, :] * 1e-200
    for kind in (PLAIN, FUSED):
        given = stand_in(dout, row_sums(dout, out)), out
        ours, theirs = (kind.backward(dout, q, k, v, o, lse, False) for o in given)
        assert furthest(ours, theirs) < TOLERANCE
        tiny, exact = ours[0][..., 1, :], theirs[0][..., 1, :]
        assert torch.allclose(tiny, exact, rtol=1e-9, atol=0) and exact.any()


# ---- work ------------------------------------------------------------------------------------------------


def product_flops(layout, causal, tokens, ranks, rank):
    def run():
        q, k, v = (torch.empty(1, 1, tokens, 4) for _ in range(3))
        with Ledger() as ledger:
            ring_forward(q, k, v, Rings((collectives.world(),), layout, causal), FUSED)
        return [event.flops for event in ledger.events if isinstance(event, Compute) and event.flops]

    return dryrun.run(run, rank=rank, ranks=ranks)


def test_megatron_cp():
    """Zig-zag: two pairs of half blocks in every step on every rank; half of the full mask's FLOPs; equal."""
    for n in (2, 4, 8):
        c = 16
        pair, table = (c // 2) ** 2, entries(zigzag, n, n * c)
        assert all(count == 2 * pair for step in table[1:] for count in step)
        assert set(table[0]) == {2 * pair + c // 2} and efficiency(zigzag, n, n * c) == 1
        for rank in range(n):
            full = product_flops(zigzag, False, c, n, rank)
            found = product_flops(zigzag, True, c, n, rank)
            assert found == [2 * 2 * 4 * step[rank] for step in table]
            assert [2 * flops for flops in found[1:]] == full[1:]
    apart, _ = launch.run(everywhere, [zigzag], [GQA], ranks=2)[0]
    assert max(apart.values()) < TOLERANCE


def test_striped_attention():
    """A near-triangle in every step: makespan c²n/2 but for the diagonal, contiguous c²(n - 1/2); equal."""
    for n, speedup in ((2, 3 / 2), (4, 7 / 4), (8, 15 / 8)):
        c = 512
        slowest = {layout: sum(map(max, entries(layout, n, n * c))) for layout in LAYOUTS}
        assert slowest[striped] == n * c * (c + 1) // 2
        assert slowest[contiguous] == c * (c + 1) // 2 + (n - 1) * c * c
        assert abs(slowest[contiguous] / slowest[striped] - speedup) < 0.005
        for rank in range(n):
            seen = (tiles(striped(rank, n, n * c), striped(other, n, n * c), True) for other in range(n))
            assert [len(found) for found in seen] == [1] * n
    assert [round(float(efficiency(layout, 4, 4 * 512)), 2) for layout in LAYOUTS] == [0.57, 1.0, 1.0]
    apart, _ = launch.run(everywhere, [striped], [GQA], ranks=2)[0]
    assert max(apart.values()) < TOLERANCE


# ---- memory and time -------------------------------------------------------------------------------------


def test_every_transfer_starts_before_the_product_it_hides_behind():
    def run():
        q, k, v, dout = (torch.empty(1, 1, 8, 4) for _ in range(4))
        with Ledger() as ledger:
            out, lse = ring_forward(q, k, v, Rings((collectives.world(),), zigzag, True), FUSED)
            with ledger.phase("backward"):
                ring_backward(dout, q, k, v, out, lse, Rings((collectives.world(),), zigzag, True), FUSED)
        return ledger.events

    events = dryrun.run(run, rank=2, ranks=4)
    kinds = [
        "product" if isinstance(event, Compute) else event.op
        for event in events
        if isinstance(event, Issue) and event.op == "send" or isinstance(event, Compute) and event.flops
    ]
    kv, dkv = ["send"] * 2, ["send"] * 2
    forward = [*kv, "product"] * 3 + ["product"]
    backward = [*kv, "product"] * 2 + [*kv, *dkv, "product"] + [*dkv, "product"] + dkv
    assert kinds == forward + backward
    between = [count for _, count in hidden(events)]
    # a product between issue and wait, but for the last hop home
    assert between == [1] * (len(between) - 4) + [0] * 4


def peaks(heads, tokens, dtype):
    counts, rings = (heads[0], *heads[1:] * 2, heads[0]), Rings((collectives.world(),), contiguous, False)
    q, k, v, dout = (torch.empty(1, count, tokens, 64, dtype=dtype) for count in counts)
    with Ledger() as forward:
        out, lse = ring_forward(q, k, v, rings, FUSED)
    with Ledger() as backward:
        ring_backward(dout, q, k, v, out, lse, rings, FUSED)
    return forward.peak_bytes / k.nbytes, backward.peak_bytes / k.nbytes


def exposed(tokens, where, ranks=4, kv_heads=8):
    def run():
        counts = 8, kv_heads, kv_heads
        q, k, v = (torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16) for heads in counts)
        with Ledger() as ledger:
            ring_forward(q, k, v, Rings((collectives.world(),), contiguous, False), FUSED)
        return ledger.events

    return round(replay({0: dryrun.run(run, ranks=ranks)}, where).exposed_communication_s, 15)


def first_hidden(where, low, high):
    """The smallest block length at which no transfer shows, by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exposed(middle, where) > 0 else (low, middle)
    return high


def moving(heads, length):
    """Peak of the ring alone, in blocks: what is here, and what comes and goes."""
    group = collectives.world()
    k, v = (torch.zeros(1, heads, length // group.size(), 64) for _ in range(2))
    with Ledger() as ledger:
        nested_ring_pass((k, v), (group,), lambda steps, k, v: None)
    return (ledger.peak_bytes - 2 * k.nbytes) / k.nbytes


def test_blockwise_ring():
    """Memory 6bch for blocks of c for any T; overlap from c = FLOPs/bandwidth; 2(n-1)/n·b·s·h elements."""
    for ranks in (4, 16):
        travelling = dryrun.run(moving, 8, 1024, ranks=ranks)
        if ranks == 4:
            assert launch.run(moving, 8, 1024, ranks=ranks) == [travelling] * ranks
        assert travelling == 4  # K and V in use, K and V arriving: with q and out the paper's 6bch
        forward, backward = dryrun.run(peaks, (8, 8), 1024, torch.float32, ranks=ranks)
        # beside these this rank's own k and v, which backward needs, and a tile's output
        assert 2 + travelling + 2 + 1 <= forward < 2 + travelling + 2 + 1.1
        # q, k, v, out, dout, dq; here, arriving, and three gradients of K and V each; a tile's dq, dk, dv
        assert 19 <= backward < 19.1
    # of an A100 NVLink and InfiniBand, and a TPUv4
    for flops, bytes_per_s, tokens in ((312e12, 300e9, 1040), (312e12, 12.5e9, 24960), (275e12, 268e9, 1027)):
        assert tokens - 1 < flops / bytes_per_s <= tokens
        where = ideal(flops, bytes_per_s)
        assert exposed(tokens, where) == 0 < exposed(tokens - 1, where)
    assert first_hidden(ideal(312e12, 300e9), 512, 2048) == 1040
    shortest = [round(6 * 312e12 / rate / 1e3, 1) for rate in (300e9, 12.5e9)]
    assert shortest == [6.2, 149.8]  # sequence, in thousands
    nvlink = ideal(312e12, 300e9)
    assert exposed(130, nvlink, kv_heads=1) == 0 < exposed(129, nvlink, kv_heads=1)
    # merging partial outputs takes time too, behind which a transfer hides
    assert 900 < first_hidden(machine("a100"), 128, 2048) < 1040


def test_a_million_tokens_on_64_ranks():
    """A layer at T = 2²⁰, dry: seconds; bytes as the formula."""
    sizes = dict(vocab_size=64, d_model=4096, num_layers=1, num_heads=32, num_kv_heads=8, max_positions=2**20)
    config = GPTConfig(**sizes, norm="rms", positions="rope", activation="swiglu")

    def run():
        group = collectives.world()
        core = partial(ring_attention, group=group, layout=zigzag)
        block = Block(config, "layers.1", attention=core, dtype=torch.bfloat16)
        where = positions(zigzag, group, 2**20)
        x = torch.empty(1, len(where), 4096, dtype=torch.bfloat16, requires_grad=True)
        with Ledger() as ledger:
            y, forward = block(x, where), ledger.sent_bytes()
            y.backward(torch.empty_like(y))
        return forward, ledger.sent_bytes(), ledger.flops_by_operator

    forward, total, flops = dryrun.run(run, rank=17, ranks=64)
    assert forward == 63 * 2 * 8 * 2**14 * 128 * 2 and total == 3 * forward
    attention = flops["_scaled_dot_product_flash_attention_for_cpu"]
    assert attention == 4 * 4096 * ((2**20) * (2**20 + 1) // 2) // 64  # an equal share of the triangle


# ---- a model ---------------------------------------------------------------------------------------------


PROBLEMS = {
    "RoPE, tied, 2 K/V heads": Problem(),
    "learned positions, biases, 3 microbatches": Problem(
        config=small(tied=False, norm="layer", positions="learned", bias=True, num_kv_heads=4),
        batch_sizes=(6, 7),
        microbatches=3,
    ),
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_model_equals_one_process(ranks):
    """Loss, every gradient, every parameter after two steps."""

    def rank():
        ways = [(name, layout.__name__) for name in PROBLEMS for layout in LAYOUTS][ranks == 4 :: 2]
        return {way: train_parallel(PROBLEMS[way[0]], Strategy(cp=ranks, layout=way[1])) for way in ways}

    expected = {name: one_process(problem) for name, problem in PROBLEMS.items()}
    for outcomes in launch.run(rank, ranks=ranks):
        for (name, layout), outcome in outcomes.items():
            assert difference(outcome, expected[name]) < TOLERANCE, (name, layout)


def layer_over(ranks, again=False, length=64):
    """Bytes a layer keeps on one of `ranks`, and FLOPs of its step, if `again` with the forward twice."""
    config = small(d_model=64, max_positions=length)

    def run():
        group = collectives.world()
        block = Block(config, "layers.1", attention=partial(ring_attention, group=group, layout=zigzag))
        where = positions(zigzag, group, length)
        x = torch.empty(2, len(where), config.d_model, requires_grad=True)
        with SavedTensors(block) as saved:
            block(x, where)
        with Ledger() as ledger:
            with set_checkpoint_early_stop(False):  # or torch leaves out the last product, of no use here
                y = checkpoint(block, x, where, use_reentrant=False) if again else block(x, where)
                y.backward(torch.empty_like(y))
        return saved.bytes, ledger.flops

    return dryrun.run(run, ranks=ranks)


def test_seq_parallel_concept():
    """1/n of the activations on each rank; gradients want an all-reduce over the group; the loss is one
    process's; recomputing costs a third."""
    kept, flops = layer_over(1)
    for ranks in (2, 4, 8):
        assert layer_over(ranks)[0] * ranks == kept
    # 2/7 in attention, whose backward is 5/2, 1/3 in products
    assert 2 / 7 < layer_over(4, again=True)[1] / layer_over(4)[1] - 1 < 1 / 3

    def rank():
        bucketed.all_reduce = lambda grads, *group, **settings: Kept(grads)
        return train_parallel(Problem(), Strategy(cp=2))

    expected = one_process(Problem())
    for without in launch.run(rank, ranks=2):
        assert abs(without.losses[0] - expected.losses[0]) < TOLERANCE < 1e-3 < difference(without, expected)
