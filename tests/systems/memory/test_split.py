"""Micro-tensors: equal results, and peaks that a ledger saw against a formula of sizes."""

import pytest
import torch
import torch.nn.functional as F

from minitrain.memory.recompute import recompute
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.split import Swap, split


class Away:
    """A copy that no ledger counts, in a numpy array; what a transfer to the host gives."""

    copied = 0

    def __init__(self, x):
        self.numbers = x.detach().numpy().copy()
        Away.copied += x.nbytes

    def wait(self):
        return self.numbers


class Back:
    def __init__(self, numbers, device):
        self.x = torch.empty(numbers.shape, dtype=torch.float64, device=device)
        self.x.numpy()[...] = numbers

    def wait(self):
        return self.x


def tensors(B, T, D):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, T, D), (D, 4 * D), (4 * D, D)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes
    ]


def mlp(up, down):
    return lambda x: F.gelu(x @ up) @ down


def attention(x):
    scores = torch.softmax(x @ x.transpose(-1, -2), dim=-1)
    return scores @ x


def measured(sizes, parts, each):
    """(peak of a forward, of forward and backward, gradients) of an MLP in so many parts."""
    x, up, down = tensors(*sizes)
    with Ledger() as ledger:
        y = split(mlp(up, down), x, parts, each and each(up, down))
        forward = ledger.peak_bytes
        y.backward(torch.ones_like(y))
    return forward, ledger.peak_bytes, [y, x.grad, up.grad, down.grad]


EACH = {
    "kept": None,
    "recompute": lambda *weights: recompute,
    "swap": lambda *weights: Swap(Away, Back, resident=weights),
}


@pytest.mark.parametrize("sizes", [(8, 4, 16), (8, 32, 8)], ids=["large weights", "many tokens"])
@pytest.mark.parametrize("each", ["recompute", "swap"])
def test_tsplit(sizes, each):
    """Results equal, and the peak is a formula of k: of the intermediates, 4 times as wide as x, one part counts.

    A part's are U = what went into the GELU and A = what came out, 4x/k each, and their gradients. Gradients
    of the two weights, W/2 each, add up over parts: the old sum, a part's, and the new sum for a moment. Attention's
    scores are of one part as well.
    """
    test_attention_in_parts()
    B, T, D = sizes
    x = y = dy = 8 * B * T * D
    W, peaks = 8 * 8 * D * D, []
    plain = measured(sizes, 1, None)[2]
    for k in (1, 2, 4, 8):
        part = 4 * x // k
        forward, peak, results = measured(sizes, k, EACH[each])
        for ours, theirs in zip(results, plain):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12 * theirs.abs().max().item())
        assert forward == W + x + max(y * (k - 1) // k + 2 * part, 2 * y if k > 1 else 0)
        live = W + x + y + dy + x * (k - 1) // k  # and gradients of the parts of x that are done
        sums = W if k > 1 else 0  # of the weights' gradients of the parts before
        after = {"recompute": 1, "swap": 0}[each]  # is U there while A's product is differentiated?
        moments = [
            sums + W / 2 + (2 + after) * part,  # A, its gradient, a part's gradient of `down`; U
            (sums + W if k > 1 else W / 2) + (1 + after) * part,  # the new sum for `down` beside both
            sums + (0 if k > 1 else W / 2) + 3 * part,  # U and both gradients
        ]
        assert peak == live + max(moments)
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    if each == "recompute":
        kept = [measured(sizes, k, None)[0] for k in (1, 8)]
        assert kept[0] == kept[1], "without recomputation or swap all parts' intermediates stay"


def test_swapped_parts_leave_and_come_back():
    """What a part saves: x_i, U, A of each; not the weights."""
    Away.copied = 0
    sizes = 8, 4, 16
    measured(sizes, 4, EACH["swap"])
    x = 8 * 8 * 4 * 16
    assert Away.copied == x + 4 * x + 4 * x


def test_attention_in_parts():
    """Scores [B, T, T] are the large ones: twice in a forward, of one part."""
    x = torch.randn(8, 32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, peaks = attention(x), []
    for k in (1, 2, 4, 8):
        with torch.no_grad(), Ledger() as ledger:
            y = split(attention, x, k)
        assert torch.allclose(y, expected, rtol=0, atol=1e-14)
        assert ledger.peak_bytes == x.nbytes * (1 + (k - 1) / k) + 2 * 8 * 8 * 32 * 32 / k
        peaks.append(ledger.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_uneven_parts():
    x = torch.arange(14.0).view(7, 2)
    seen = []
    assert torch.equal(split(lambda part: seen.append(len(part)) or part * 2, x, 3), x * 2)
    assert seen == [3, 2, 2]
    for parts in (0, 8):
        with pytest.raises(ValueError, match=f"parts = {parts} of 7 rows; use 1 to 7"):
            split(lambda part: part, x, parts)


def test_what_a_part_saves_goes_as_it_is_and_comes_to_where_it_was():
    """Without a copy of it in between; `resident` ones are not copied at all."""
    weight, x, moved = torch.ones(3, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True), []

    class There:
        def __init__(self, x):
            moved.append(x)

        def wait(self):
            return torch.empty(moved[-1].shape, device="meta")

    class Back(There):
        def wait(self):
            return torch.ones(moved[-1][0].shape)

    swap = Swap(There, lambda x, device: Back((x, device)), resident=[weight])
    y = swap(lambda x: (x @ weight).exp(), x)
    there = {x.untyped_storage().data_ptr() for x in moved}
    assert there == {x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()} and len(moved) == 2
    moved.clear()
    y.sum().backward()
    assert {(x.device.type, device.type) for x, device in moved} == {("meta", "cpu")}
    assert torch.equal(weight.grad, torch.full((3, 3), 4.0))
