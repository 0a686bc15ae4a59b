"""Attention cores of one process: equal to naive attention, forward and gradients, with no scores kept."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from minitrain.attention import flash, kernel
from minitrain.attention.flash import SlowMemory, Traffic, flash_1, flash_2, flash_2_forward, flash_attention
from minitrain.attention.kernel import FUSED, PLAIN, empty_result, merge, row_sums
from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, Block
from minitrain.model.layers import naive_attention
from minitrain.ranks.ledger import Ledger
from minitrain.systems.attention import lazy
from minitrain.systems.attention.blockwise import blockwise_block, blockwise_layer
from minitrain.systems.attention.flash_3 import (
    fp8_attention,
    hadamard,
    pingpong,
    random_signs,
    sequential,
    turned,
    within,
)
from minitrain.systems.attention.lazy import lazy_attention
from minitrain.systems.simulate.links import play

SIZES = [(1, 2, 2, 4), (7, 4, 2, 4), (13, 4, 1, 6)]  # T, H, H_kv, K: tiles of 2, 3, 5 do not divide them


def inputs(tokens, heads=2, kv_heads=2, width=4, batch=2, dtype=torch.float64, seed=0):
    made = dict(dtype=dtype, generator=torch.Generator().manual_seed(seed))
    counts = heads, kv_heads, kv_heads
    return [torch.randn(batch, h, tokens, width, **made).requires_grad_() for h in counts]


def reference(q, k, v, causal):
    if causal:
        return naive_attention(q, k, v)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


def difference(core, size, causal):
    """The largest difference to naive attention: output and dq, dk, dv."""
    q, k, v = inputs(*size)
    results = []
    for out in (core(q, k, v, causal=causal), reference(q, k, v, causal)):
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad(out, (q, k, v), weights)))
    return max((a - b).abs().max().item() for a, b in zip(*results))


def equal(core):
    for size in SIZES:
        for causal in (True, False):
            assert difference(core, size, causal) < 1e-12, (size, causal)


class Core(nn.Module):
    """A core as a module, whose saved tensors can be watched."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, *args):
        return self.core(*args)


def saved_by(core, *args):
    with SavedTensors(Core(core)) as saved:
        core(*args)
    return saved


def extra_bytes(core, tokens, backward):
    """Peak of forward, or of both, above what the caller holds anyway: inputs, output and gradients."""
    q, k, v = inputs(tokens, batch=1, dtype=torch.float32)
    with Ledger() as ledger:
        out = core(q, k, v)
        held = [q, k, v, out]
        if backward:
            held += [dout := torch.ones_like(out), *torch.autograd.grad(out, (q, k, v), dout)]
    return ledger.peak_bytes - sum(x.nbytes for x in held)


def test_attention_op():
    """It saves 2·a·s²·b bytes of scores in bf16, and what it saves, moves and multiplies grows with s²."""
    heads, batch = 4, 2

    def one(tokens):
        """Bytes of scores saved; bytes moved by operators on scores alone and in all; FLOPs."""
        qkv = inputs(tokens, heads, heads, batch=batch, dtype=torch.bfloat16)
        with Ledger() as ledger:
            saved = saved_by(naive_attention, *qkv).saved
        square = 2 * heads * tokens**2 * batch
        scores = sum(block.bytes for block in saved if block.shape[-2:] == (tokens, tokens))
        return square, scores, sum(event.bytes for event in ledger.events), ledger.flops

    (half_square, half_scores, half_moved, half_flops), (square, scores, moved, flops) = one(64), one(128)
    quarter_moved = one(32)[2]
    assert (scores, half_scores) == (square, half_square) and flops == 4 * half_flops
    passes = 2 * (moved - 2 * half_moved)  # the c·s² of c·s² + d·s
    assert passes == 4 * 2 * (half_moved - 2 * quarter_moved) and passes > 0.95 * moved


def test_rabe_memeff():
    for query_chunk, key_chunk in [(3, 5), (5, 2), (1024, None)]:
        equal(partial(lazy_attention, query_chunk=query_chunk, key_chunk=key_chunk))
    q, k, v = inputs(40, 4, 2)
    assert saved_by(lazy_attention, q, k, v).bytes == q.nbytes + k.nbytes + v.nbytes

    def chunk_bytes(tokens):  # what one chunk would have to keep, were it not computed again
        q, k, v = (x[..., -8:, :].contiguous() for x in inputs(tokens))
        rows = columns = slice(tokens - 8, tokens)
        return saved_by(lambda: lazy.summarize(q, k, v, rows, columns, 0)).bytes

    assert chunk_bytes(16) == chunk_bytes(64)

    def products(core):
        q, k, v = inputs(24)
        with Ledger() as ledger:
            core(q, k, v).sum().backward()
        return ledger.flops

    assert products(partial(lazy_attention, causal=False, query_chunk=6)) * 6 == products(naive_attention) * 9

    chunked = partial(lazy_attention, query_chunk=16, key_chunk=16)
    assert extra_bytes(chunked, 64, False) == extra_bytes(chunked, 192, False)
    assert extra_bytes(naive_attention, 192, False) > 8 * extra_bytes(naive_attention, 64, False)


def test_lazy_backward_holds_the_summaries_of_one_chunk_of_queries():
    """Four times the tokens: dk, dv and chunks of dq grow 4 times, summaries twice, naive's scores 16."""
    chunked = partial(lazy_attention, query_chunk=8)
    assert extra_bytes(chunked, 144, True) < 4 * extra_bytes(chunked, 36, True)
    assert extra_bytes(naive_attention, 144, True) > 16 * extra_bytes(naive_attention, 36, True)


# ---- flash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [flash_1, flash_2])
@pytest.mark.parametrize("fast_elements", [1, 48, 10_000])
def test_tiles_equal_naive(version, fast_elements):
    equal(partial(flash_attention, kernel=version(fast_elements)))


def test_the_fused_kernel_is_the_same_core():
    equal(flash_attention)


def test_without_rescaling_the_result_is_wrong(monkeypatch):
    """Controls: version 1 finds another maximum than it left, version 2 does not scale what it has summed."""

    class Forgetful(SlowMemory):
        def load(self, *tensors):
            return (*tensors[:3], tensors[3] + 1) if len(tensors) == 4 else tensors

    def forgetful(state, scores, v_j, see=flash.see):
        summed, row_sum, row_max = see(state, scores, v_j)
        return summed + (1 - (state[2] - row_max).exp()) * state[0], row_sum, row_max

    size = (13, 2, 2, 4)
    assert difference(partial(flash_attention, kernel=flash_1(48, Forgetful())), size, True) > 1e-3
    assert difference(partial(flash_attention, kernel=flash_2(48)), size, True) < 1e-12
    monkeypatch.setattr(flash, "see", forgetful)
    assert difference(partial(flash_attention, kernel=flash_2(48)), size, True) > 1e-3


@pytest.mark.parametrize("version", [flash_1, flash_2])
def test_queries_may_be_the_last_of_a_longer_text(version):
    q, k, v = inputs(13)
    last = flash_attention(q[..., 8:, :], k, v, kernel=version(48))
    torch.testing.assert_close(last, naive_attention(q, k, v)[..., 8:, :], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="first ones see nothing"):
        flash_attention(q, k[..., :5, :], v[..., :5, :], kernel=version(48))


def test_flash_attention_2():
    q, k, v = (x.detach() for x in inputs(29))
    once, thrice = Traffic(), Traffic()
    out, lse = flash_2(64, once).forward(q, k, v, False)  # K = 4: tiles of 4 tokens, 8 of them
    first, first_lse = flash_1(64, thrice).forward(q, k, v, False)
    rows = q[..., 0].numel()
    assert once.divisions == rows and thrice.divisions == 8 * rows
    torch.testing.assert_close(out, first, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, first_lse, rtol=0, atol=1e-13)
    straight = flash_2(64).forward(q, k, v, True)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 5, 2, 4]):
        other = flash_2_forward(q, k, v, True, fast_elements=64, order=order)
        assert all(map(torch.equal, other, straight))
    with pytest.raises(ValueError, match="name each of 0 .. 7 once"):
        flash_2(64, order=[0, 0]).forward(q, k, v, True)


@pytest.mark.parametrize("version", [flash_1, flash_2])
def test_extra_memory_is_flat(version):
    """Beside inputs, results and numbers per row (l, m, D) a tile is all there is: naive grows with N²."""
    core, number = partial(flash_attention, kernel=version(1024)), 4 * 2 * (256 - 128)  # bytes · heads · rows
    for backward in (False, True):
        grown = extra_bytes(core, 256, backward) - extra_bytes(core, 128, backward)
        assert grown in (number, 2 * number)  # l and m, or lse, or lse and D
        assert extra_bytes(naive_attention, 256, backward) > 3.9 * extra_bytes(naive_attention, 128, backward)


@pytest.mark.parametrize("version", [flash_1, flash_2])
def test_tiles_are_blocks_that_merge(version):
    """Halves of the keys, by tiles: merged they are the whole; backward needs only the whole's O and lse."""
    q, k, v = (x.detach() for x in inputs(13, 4, 2))
    kernel, halves = version(48), (slice(0, 6), slice(6, 13))
    whole, whole_lse = kernel.forward(q, k, v, False)
    out, lse = empty_result(q)
    for keys in halves:
        merge(out, lse, *kernel.forward(q, k[..., keys, :], v[..., keys, :], False))
    torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=0, atol=1e-13)
    dq, dk, dv = kernel.backward(out, q, k, v, whole, whole_lse, False)
    parts = [kernel.backward(out, q, k[..., keys, :], v[..., keys, :], out, lse, False) for keys in halves]
    torch.testing.assert_close(sum(part[0] for part in parts), dq, rtol=0, atol=1e-12)
    for i, whole in ((1, dk), (2, dv)):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], dim=-2), whole, rtol=0, atol=1e-12)


def test_saved_is_one_number_a_row():
    q, k, v = inputs(40, 4, 2)
    saved = saved_by(partial(flash_attention, kernel=flash_2(48)), q, k, v).bytes
    assert saved == 2 * q.nbytes + k.nbytes + v.nbytes + q.nbytes // 4


class Remembered(SlowMemory):
    def __init__(self):
        self.stored = []

    def store(self, tensor):
        self.stored.append(tensor)
        return tensor


def test_row_sums_of_half_precision_are_float32():
    """D = rowsum(dO · O) is a difference's other half: in bfloat16 it would be wrong by more than gradients are."""
    memory, (q, k, v) = Remembered(), inputs(9, width=64, dtype=torch.bfloat16)
    (dout,) = inputs(9, width=64, dtype=torch.bfloat16, seed=1)[:1]
    (q, k, v, dout), kernel = (x.detach() for x in (q, k, v, dout)), flash_2(10**6, memory)
    out, lse = kernel.forward(q, k, v, True)
    exact = (dout.double() * out.double()).sum(-1)
    memory.stored.clear()
    second = kernel.backward(dout, q, k, v, out, lse, True)
    for found in (row_sums(dout, out), memory.stored[0].squeeze(-1)):
        assert found.dtype == torch.float32 and (found - exact).abs().max() < 1e-5 < 1e-4 < exact.abs().max()
    assert (exact.bfloat16() - exact).abs().max() > 1e-3
    assert all(map(torch.equal, flash_1(10**6).backward(dout, q, k, v, out, lse, True), second))


@pytest.mark.parametrize("core", [lazy_attention, partial(flash_attention, kernel=flash_2(64))])
def test_keys_and_values_may_differ_in_width(core):
    q, k, _ = inputs(9, width=6)
    v = inputs(9, width=4)[2]
    torch.testing.assert_close(core(q, k, v), naive_attention(q, k, v), rtol=0, atol=1e-12)


def test_of_narrower_values_no_zeros_are_kept_beside_the_result():
    q, k, _ = inputs(9, width=6)
    out, _ = FUSED.forward(q, k, inputs(9, width=4)[2], True)
    assert out.size(-1) == 4 and out.untyped_storage().nbytes() == out.nbytes


def test_refused_in_one_line():
    q, k, v = inputs(5)
    with pytest.raises(ValueError, match="not a multiple"):
        flash_attention(q[:, :1], k, v, kernel=flash_2())
    with pytest.raises(ValueError, match="first ones see nothing"):
        lazy_attention(q, k[..., :2, :], v[..., :2, :])


# ---- blockwise -------------------------------------------------------------------------------------------


BLOCKS = [{}, dict(num_kv_heads=2, activation="swiglu"), dict(positions="learned", norm="layer", bias=True)]


@pytest.mark.parametrize("settings", BLOCKS)
def test_blockwise_equals_the_block(settings):
    config = GPTConfig(**{"num_layers": 1, "d_model": 32, "num_heads": 4, **settings})
    block = Block(config, "layers.1", dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for param in block.parameters():
        nn.init.normal_(param, std=0.2, generator=generator)
    x, weights = torch.randn(2, 2, 13, 32, dtype=torch.float64, generator=generator)
    x, positions = x.clone().requires_grad_(), torch.arange(13)
    wanted = [x, *block.parameters()]
    expected = block(x, positions)
    expected_grads = torch.autograd.grad(expected, wanted, weights)
    for rows in (1, 5, 13, 64):
        y = blockwise_block(block, x, positions, rows=rows)
        for ours, theirs in zip((y, *torch.autograd.grad(y, wanted, weights)), (expected, *expected_grads)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_bpt():
    """The widest kept tensor in bytes of 2: 8bsh by tiles alone, 2bsh blockwise; and the peak of each."""
    batch, tokens, width = 1, 256, 32
    bsh = batch * tokens * width
    tiled = partial(flash_attention, kernel=flash_2(1024))
    config = GPTConfig(num_layers=1, d_model=width, num_heads=4, activation="gelu")
    block = Block(config, "layers.1", attention=tiled, dtype=torch.bfloat16)
    for param in block.parameters():
        nn.init.normal_(param, std=0.1)
    positions = torch.arange(tokens)
    blockwise = partial(blockwise_block, block, rows=16, core=tiled)

    def measure(layer):
        x = torch.randn(batch, tokens, width, dtype=torch.bfloat16).requires_grad_()
        with SavedTensors(block) as saved:
            layer(x, positions)
        with Ledger() as ledger:
            x = x.detach().clone().requires_grad_()
            layer(x, positions).sum().backward()
            params = sum(param.nbytes for param in block.parameters())
        block.zero_grad()
        widest = max(each.bytes for each in saved.saved)
        return widest / bsh, saved.bytes / bsh, (ledger.peak_bytes - 2 * params) / bsh

    widest, kept, peak = measure(block)
    widest_blockwise, kept_blockwise, peak_blockwise = measure(blockwise)
    assert (widest, widest_blockwise) == (8, 2)
    assert kept > 35 and kept_blockwise == 6 + positions.nbytes / bsh  # X, K, V; positions are data, int64
    assert peak > 42 and peak_blockwise < 26  # forward and backward, gradients of X, K, V included


def test_blockwise_without_a_mask_and_what_it_refuses():
    q, k, v = inputs(9)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    query, keys_values = (lambda x, positions: q[..., positions, :]), (lambda x, positions: (k, v))
    finish = lambda x, attended: x + attended.transpose(1, 2).flatten(-2)
    out = blockwise_layer(x, torch.arange(9), query, keys_values, finish, rows=4, causal=False)
    torch.testing.assert_close(out, finish(x, reference(q, k, v, False)), rtol=0, atol=1e-12)
    block = Block(GPTConfig(num_layers=1, residual="parallel"), "layers.1")
    with pytest.raises(ValueError, match="residual=parallel"):
        blockwise_block(block, torch.zeros(1, 4, 64), torch.arange(4), rows=2)


# ---- FlashAttention-3, simulated -------------------------------------------------------------------------


def rmse(seed, **ways):
    """Of the output, with the paper's outliers: N(0, 1), and one entry in a thousand has N(0, 100) more."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        shape = (1, 4, 1024, 64)
        noise, outlier = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return noise + 10 * outlier * (torch.rand(shape, generator=generator) < 1e-3)

    q, k, v = draw(), draw(), draw()
    exact = reference(q, k, v, False)
    apart = {name: fp8_attention(q, k, v, causal=False, **way) - exact for name, way in ways.items()}
    return {name: far.square().mean().sqrt().item() for name, far in apart.items()}


def test_flash_attention_3():
    """Time goes from the sum to the larger; block scales and Hadamard beat one scale a tensor on outliers."""
    for gemm, softmax in ((1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (3.0, 0.25)):
        for blocks in (1, 2, 8, 64):
            assert play(sequential(blocks, gemm, softmax, "AB")).end_s == 2 * blocks * (gemm + softmax)
            longest, both = 2 * blocks * max(gemm, softmax), play(pingpong(blocks, gemm, softmax)).end_s
            assert longest <= both <= longest + gemm + softmax
            later = (blocks - 1) * (gemm / 2 + max(gemm / 2, softmax))
            assert play(within(blocks, gemm, softmax)).end_s == gemm / 2 + softmax + later + gemm / 2
    assert 0.49 < ((1 / 3.9e12) / (4 * 128 / 989e12)) < 0.5

    blocks, signs = {"rows": 64}, {"signs": random_signs(64)}
    errors = rmse(0, tensor={}, blocks=blocks, turned=signs, both=blocks | signs)
    assert errors["both"] < errors["turned"] < errors["blocks"] < errors["tensor"]
    assert 1.6 < errors["tensor"] / errors["both"] < 1.8  # paper: 2.6


def test_hadamard_is_orthogonal():
    x = torch.randn(3, 16, dtype=torch.float64)
    matrix = hadamard(torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(hadamard(x), x @ matrix)
    outlier = torch.zeros(1, 16)
    outlier[0, 5] = 100
    assert hadamard(outlier).abs().amax() == 25  # spread over its row: 100 / sqrt(16)
    q, k, signs = torch.randn(5, 16).double(), torch.randn(7, 16).double(), random_signs(16, seed=3)
    assert set(signs.tolist()) == {-1, 1}
    torch.testing.assert_close(turned(q, signs) @ turned(k, signs).mT, q @ k.mT, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="12 columns: give a power of two, 16"):
        hadamard(torch.zeros(1, 12))


def test_the_fused_kernel_is_given_rows_wherever_they_lie():
    """As RoPE on heads of two leaves them: the last dim is not the one that lies in a row."""
    q, k, v, dout = torch.randn(4, 2, 3, 2, 5, dtype=torch.float64).mT
    for causal in (False, True):
        out, lse = FUSED.forward(q, k, v, causal)
        torch.testing.assert_close((out, lse), PLAIN.forward(q, k, v, causal), rtol=0, atol=1e-12)
        ours, theirs = (kernel.backward(dout, q, k, v, out, lse, causal) for kernel in (FUSED, PLAIN))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_is_there_already_is_not_copied():
    """A first result and gradient of all tokens, rows as the kernel wants them, and what backward needs."""
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    by_token = q.transpose(1, 2)
    assert kernel.for_kernel(by_token, q[..., :2])[0] is by_token
    out, lse = kernel.plain_forward(q, k, v, True)
    online = kernel.OnlineSoftmax(q)
    online.add(slice(0, 6), out, lse)
    assert online.exact()[0] is out and online.exact()[1] is lse and online.result()[0] is out
    total = kernel.GradSum(q)
    total.add(slice(0, 6), out)
    assert total.total is out
    kept, q = [], q.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = kernel.recomputed(kernel.fused_forward, kernel.fused_backward, q, k, v, True)
    assert [x.data_ptr() for x in kept[:4]] == [x.data_ptr() for x in (q, k, v, y)] and len(kept) == 5


def test_results_of_half_precision_are_rounded_once_and_nothing_is_a_number():
    q = torch.randn(1, 2, 6, 4).bfloat16()
    online = kernel.OnlineSoftmax(q)
    online.add(slice(0, 3), *kernel.plain_forward(q[..., :3, :], q, q, False))
    out, lse = online.result()
    assert (out.dtype, lse.dtype, online.exact()[0].dtype) == (torch.bfloat16, torch.float32, torch.float32)
    ours, theirs = kernel.empty_result(q), kernel.empty_result(q)
    kernel.merge(*ours, *theirs)
    assert not ours[0].any() and (ours[1] == -math.inf).all(), "of nothing and nothing"
    nothing = kernel.GradSum(q)
    assert nothing.by_token.is_contiguous() and nothing.by_token.shape == (1, 6, 2, 4)
    nothing.add(slice(0, 2), torch.ones(1, 2, 2, 4))
    assert nothing.by_token.is_contiguous() and nothing.total.dtype == torch.float32
    for forward in (kernel.plain_forward, kernel.fused_forward):  # fewer queries than keys are the last ones
        last, whole = (forward(q[..., first:, :].float(), q.float(), q.float(), True)[0] for first in (3, 0))
        assert (last - whole[..., 3:, :]).abs().max() < 1e-6


def test_tiles_are_as_large_as_the_fast_memory_allows():
    assert flash.A100_ELEMENTS == 98_304
    found = [flash.tile_sizes(*sizes) for sizes in ((98_304, 64), (100, 7), (112, 7), (1, 3))]
    assert found == [(384, 64), (4, 4), (4, 4), (1, 1)]


def test_lazy_attention_takes_1024_queries_and_a_root_of_the_keys_at_a_time(monkeypatch):
    chunks, x = [], torch.ones(1, 1, 1030, 2)
    monkeypatch.setattr(lazy, "attend_rows", lambda q, k, v, *how: chunks.append((q.size(-2), how[-1])) or q)
    lazy_attention(x, x, x)
    assert chunks == [(1024, 32), (6, 32)]


def test_a_blockwise_block_drops_where_the_block_does():
    class Times(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x, positions=None):
            return self.by * x

    block = GPT(GPTConfig(d_model=16, num_layers=1, num_heads=2), seed=1, dtype=torch.float64).layers[1]
    block.dropout1, block.dropout2 = Times(2), Times(3)
    x, positions = torch.randn(2, 8, 16, dtype=torch.float64), torch.arange(8)
    found = blockwise_block(block, x, positions, rows=3)
    assert torch.allclose(found, block(x, positions), rtol=0, atol=1e-12)
