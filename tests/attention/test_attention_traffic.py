"""What attention moves between slow and fast memory: counted at each access, equal to the closed forms."""

from itertools import product

import pytest
import torch

from minitrain.attention import flash
from minitrain.model.layers import naive_attention
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.attention.swattention import two_level_forward

VERSIONS = {1: flash.flash_1, 2: flash.flash_2}


def zeros(tokens, width, heads=1, batch=1, device="cpu"):
    return [torch.zeros(batch, heads, tokens, width, device=device) for _ in range(4)]


def counted(version, tokens, width, fast_elements, causal=False, **more):
    """(forward, backward) of a run."""
    q, k, v, dout = zeros(tokens, width, **more)
    forward, backward = flash.Traffic(), flash.Traffic()
    out, lse = VERSIONS[version](fast_elements, forward).forward(q, k, v, causal)
    VERSIONS[version](fast_elements, backward).backward(dout, q, k, v, out, lse, causal)
    return forward, backward


def standard(tokens, width, **more):
    q, k, v, dout = zeros(tokens, width, **more)
    forward, backward = flash.Traffic(), flash.Traffic()
    _, p = flash.standard_forward(q, k, v, False, forward)
    flash.standard_backward(dout, q, k, v, p, backward)
    return forward, backward


@pytest.mark.parametrize("version", [1, 2])
def test_counts_equal_the_closed_form(version):
    for tokens, width, fast_elements, causal in product((1, 24, 37), (4, 8), (40, 100, 600), (False, True)):
        sizes = flash.tile_sizes(fast_elements, width)
        expected = flash.flash_traffic(version, tokens, width, *sizes, causal)
        found = counted(version, tokens, width, fast_elements, causal)
        assert found == expected, (tokens, width, fast_elements, causal)


def test_flash_attention():
    """Θ(N²d²/M) against Θ(Nd + N²), and the layer of GPT-2 that the paper measured."""
    for tokens, width, fast_elements in product((512, 1024), (16, 32), (4096, 8192)):
        q, k, v, _ = zeros(tokens, width)
        for version, constant in ((1, (12, 14)), (2, (8, 10))):
            VERSIONS[version](fast_elements, memory := flash.Traffic()).forward(q, k, v, False)
            forward = memory.elements
            scale = tokens**2 * width**2 / fast_elements
            assert constant[0] * scale < forward < constant[1] * scale + 6 * tokens * width
        naive = standard(tokens, width)
        assert naive == flash.standard_traffic(tokens, width)
        assert naive[0].elements == 4 * tokens**2 + 4 * tokens * width

    heads_of_all = 16 * 64
    naive_gb = sum(part.elements for part in standard(1024, 64)) * heads_of_all * 2 / 1e9
    elements = sum(part.elements for part in counted(1, 1024, 64, flash.A100_ELEMENTS))
    flash_gb = elements * heads_of_all * 2 / 1e9
    assert round(naive_gb, 1) == 25.2 and round(flash_gb, 1) == 4.1  # algorithm 0; paper: 4.4
    moved, work = dryrun.run(baseline, 64, 16, 1024, 64, ranks=1)
    assert round(moved / 1e9, 1) == 40.3  # the paper's: with its mask and dropout, measured by the ledger
    passes = 2 * 1024 * 1024**2 / 1e9  # over all scores
    assert moved / 1e9 == pytest.approx(naive_gb + 7 * passes, rel=1e-3)
    assert flash_gb == pytest.approx(4.4, rel=0.08)

    with Ledger() as whole:
        standard(48, 16)
    with Ledger() as tiled:
        counted(1, 48, 16, 600)
    assert tiled.flops * 6 == whole.flops * 7  # scores once more: 1.17; paper: 75.2 / 66.6 = 1.13
    once = work / 16 / 6  # of one head, for the batch: the paper's two figures differ by one of these
    assert once / 1e9 == pytest.approx(75.2 - 66.6, abs=0.05)
    assert 66.6 - 6 * once / 1e9 == pytest.approx(15.1, abs=0.05)  # which is no product, and in both


def baseline(batch, heads, tokens, width):
    """(bytes, FLOPs) of PyTorch's operators for attention with an additive mask and dropout, both ways."""
    shape = batch * heads, tokens, width
    q, k, v = (torch.zeros(shape, dtype=torch.float16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(tokens, tokens, dtype=torch.float16)
    with Ledger() as ledger:
        p = (torch.bmm(q, k.mT) + mask).softmax(-1)
        out = torch.bmm(torch.native_dropout(p, 0.1, True)[0], v)
        torch.autograd.grad(out, (q, k, v), torch.empty(shape, dtype=torch.float16))
    return sum(event.bytes for event in ledger.events), ledger.flops


def test_any_size_can_be_counted_without_its_arithmetic():
    several = counted(1, 24, 16, 600, heads=3, batch=2, device="meta")
    for one, six in zip(counted(1, 24, 16, 600), several):
        assert (six.loads, six.stores) == (6 * one.loads, 6 * one.stores)


def test_what_is_held_should_be_large():
    """Version 2 with version 1's large tiles of keys would read K and V once for every d rows, for any M."""
    tokens, width = 1024, 16
    for fast_elements in (4096, 16384):
        outer, inner = flash.tile_sizes(fast_elements, width)
        swapped = flash.flash_traffic(2, tokens, width, inner, outer, False)[0].elements
        straight = flash.flash_traffic(2, tokens, width, outer, inner, False)[0].elements
        assert swapped > 2 * tokens**2 > straight


def test_whole_matrices_are_attention():
    """What is counted as naive is naive attention: output and gradients."""
    generator = torch.Generator().manual_seed(0)
    made = dict(dtype=torch.float64, generator=generator)
    q, k, v = (torch.randn(2, heads, 9, 4, **made).requires_grad_() for heads in (4, 2, 2))
    out, p = flash.standard_forward(q, k, v)
    expected, dout = naive_attention(q, k, v), torch.randn_like(out)
    ours = out, *flash.standard_backward(dout, q, k, v, p)
    theirs = expected, *torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_swattention():
    """Both levels move at most what one moves, the slow one C times less where the rows fill all cores."""
    cases = product((37, 64), (8, 16), (512, 1024), (False, True), (1, 4, 64))
    for tokens, width, fast_elements, causal, cores in cases:
        q, k, v, _ = zeros(tokens, width)
        one = counted(2, tokens, width, fast_elements, causal)[0]
        slow, group = flash.Traffic(), flash.Traffic()
        two_level_forward(q, k, v, causal, cores=cores, fast_elements=fast_elements, slow=slow, group=group)
        assert slow.elements <= one.elements and group.loads == one.loads and group.stores == one.stores
        held = flash.tile_sizes(fast_elements, width)[0]
        if not causal:
            assert slow.loads == tokens * width * (1 + 2 * (-(-(-(-tokens // held)) // cores)))
        if cores == 1:
            assert slow == one
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 37, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    for causal in (False, True):
        ours = two_level_forward(q, k, v, causal, cores=3, fast_elements=100)
        theirs = flash.flash_2_forward(q, k, v, causal, fast_elements=100)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="0 cores"):
        two_level_forward(q, k, v, cores=0)
