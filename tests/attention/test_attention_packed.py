"""Sequences without padding: equal to each one alone and to a padded batch, with the FLOPs of the formula."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minitrain.attention.flash import flash_2, flash_attention
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import Block
from minitrain.model.layers import naive_attention
from minitrain.ranks.ledger import Ledger
from minitrain.systems.attention.lazy import lazy_attention
from minitrain.systems.attention.packed import (
    Padding,
    blank_infilling,
    flop_shares,
    packed_attention,
    positions,
    sequence_lengths,
)

OFFSETS = [0, 4, 5, 12]


def row(tokens=12, heads=4, kv_heads=2, width=4):
    made = dict(dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = heads, kv_heads, kv_heads
    return [torch.randn(1, h, tokens, width, **made).requires_grad_() for h in counts]


def document_mask(offsets):
    """0 within a sequence, -inf between two."""
    lengths = sequence_lengths(offsets, offsets[-1])
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.zeros(len(of), len(of), dtype=torch.float64).masked_fill(of[:, None] != of, -torch.inf)


@pytest.mark.parametrize(
    "core", [flash_attention, partial(flash_attention, kernel=flash_2(48)), lazy_attention]
)
def test_varlen_attention(core):
    """A block-diagonal mask and each sequence alone give the same; nothing flows back from one to another."""
    q, k, v = row()
    out = packed_attention(q, k, v, cu_seqlens=torch.tensor(OFFSETS), core=core)
    masked = naive_attention(q, k, v, bias=document_mask(OFFSETS))
    cut = [[x[..., a:b, :] for x in (q, k, v)] for a, b in zip(OFFSETS, OFFSETS[1:])]
    alone = torch.cat([naive_attention(*qkv) for qkv in cut], dim=-2)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    results = [(y, *torch.autograd.grad(y, (q, k, v), weights)) for y in (out, masked, alone)]
    for ours, *others in zip(*results):
        for other in others:
            torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)
    assert (out - naive_attention(q, k, v)).abs().max() > 0.1  # control: without the offsets

    later = packed_attention(q, k, v, cu_seqlens=OFFSETS, core=core)[..., 5:, :]
    dq, dk, dv = torch.autograd.grad(later.sum(), (q, k, v))
    for gradient in (dq, dk, dv):
        assert (gradient[..., :5, :] == 0).all() and (dv[..., 5:, :] != 0).any()


@pytest.mark.parametrize("lengths", [[5, 2, 7], [4, 4], [1, 9, 3, 3]])
def test_bytetransformer(lengths):
    """Equal to the padded batch at valid tokens; FLOPs Σl / (B·l_max) and Σl² / (B·l_max²) of it, exactly."""
    longest, config = max(lengths), GPTConfig(num_layers=1, d_model=16, num_heads=2, activation="gelu")
    padding = Padding(torch.arange(longest) < torch.tensor(lengths)[:, None])

    def block(core):
        block = Block(config, "layers.1", attention=core, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        for param in block.parameters():
            torch.nn.init.normal_(param, std=0.2, generator=generator)
        return block

    def padded_core(q, k, v):  # bidirectional: padding must be hidden by a mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=padding.valid[:, None, None, :])

    def whole_core(q, k, v):
        return flash_attention(q, k, v, causal=False)

    made = dict(dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = torch.randn(len(lengths), longest, 16, **made).requires_grad_()
    places = torch.arange(longest)
    expected = block(padded_core)(x, places)
    packed_core = partial(packed_attention, cu_seqlens=padding.cu_seqlens, causal=False)
    with Ledger() as packed:
        y = padding.unpack(block(packed_core)(padding.pack(x), positions(padding.cu_seqlens)))
    with Ledger() as padded:
        block(whole_core)(x, places)
    torch.testing.assert_close(y[padding.valid], expected[padding.valid], rtol=0, atol=1e-12)
    assert (y[~padding.valid] == 0).all()
    dx, expected_dx = (torch.autograd.grad(out[padding.valid].square().sum(), x)[0] for out in (y, expected))
    torch.testing.assert_close(dx[padding.valid], expected_dx[padding.valid], rtol=0, atol=1e-11)

    def flops(ledger):
        attention = sum(n for name, n in ledger.flops_by_operator.items() if "attention" in name)
        return ledger.flops - attention, attention

    assert tuple(ours / whole for ours, whole in zip(flops(packed), flops(padded))) == flop_shares(lengths)


def test_the_map_is_a_prefix_sum():
    padding = Padding(torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool())
    assert padding.places[padding.valid].tolist() == [0, 1, 2, 3, 4]
    assert padding.source.tolist() == [0, 1, 2, 4, 5] and padding.cu_seqlens == [0, 3, 5]
    holes = Padding(torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1]]).bool())  # padding may be anywhere
    x = torch.arange(8.0).view(2, 4, 1)
    assert holes.pack(x).flatten().tolist() == [1, 3, 4, 7]
    assert torch.equal(holes.unpack(holes.pack(x)), x * holes.valid[..., None])
    assert positions([0, 3, 5]).tolist() == [0, 1, 2, 0, 1]


def test_offsets_and_padding_are_checked():
    for offsets in ([1, 12], [0, 5, 4, 12], [0, 5, 11]):
        with pytest.raises(ValueError, match="do not ascend from 0 to the 12 tokens that there are$"):
            packed_attention(*row(), cu_seqlens=offsets)
    with pytest.raises(ValueError, match="torch.int64"):
        Padding(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="sequence 1 of 2 has no token"):
        Padding(torch.tensor([[True], [False]]))
    with pytest.raises(ValueError, match="2 rows"):
        packed_attention(*(x.expand(2, -1, -1, -1) for x in row()), cu_seqlens=[0, 12])


def test_blank_infilling():
    """With V = 1 the output is the probabilities: who sees whom; and gradients are those of a masked softmax."""
    context, tokens = 3, 7
    qkv, dout = row(tokens, kv_heads=4), row(tokens)[0].detach()
    sees = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    sees[:, :context] = True
    one = torch.eye(tokens, dtype=torch.float64).expand(1, 4, -1, -1)
    shares = blank_infilling(*qkv[:2], one, context=context)
    assert torch.equal(shares > 0, sees.expand_as(shares)) and (shares.sum(-1) - 1).abs().max() < 1e-12
    both = blank_infilling(*qkv, context=context), F.scaled_dot_product_attention(*qkv, attn_mask=sees)
    for ours, wanted in [both, *zip(*(torch.autograd.grad(out, qkv, dout) for out in both))]:
        assert (ours - wanted).abs().max() < 1e-12
    with pytest.raises(ValueError, match="context=7"):
        blank_infilling(*qkv, context=tokens)
