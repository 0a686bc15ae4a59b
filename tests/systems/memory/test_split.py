"""Micro-tensors: equal results, and peaks that a ledger saw against a formula of sizes."""

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitrain.memory.pools import on_host
from minitrain.memory.recompute import recompute
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory import split as parts_module
from minitrain.systems.memory.split import Choice, Layer, Swap, TiledLinear, added_s, planned, split


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
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


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
    scores are of one part as well."""
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


def test_tsplit_plans():
    """The planner fits every budget that some choices fit, in at most a fifth of the step's work more than the best of
    all of them, and mostly in as little. Blocks that run as planned give the same results, and forward needs no more
    than planned, beside weights and outputs; unplanned it needs more than the budget."""
    peak = lambda layers, choices: max(parts_module.peaks(layers, choices))
    rates, gaps = dict(bytes_per_s=8.0, launch_s=0.05), []
    ways = [Choice(), *(Choice(how, parts) for how in ("swap", "recompute") for parts in (1, 2, 4))]
    for seed, share in product(range(12), (0.9, 0.6, 0.3, 0)):
        draw = random.Random(seed)
        layers = [Layer(draw.choice((1, 2, 4)), draw.randint(1, 4), 8 << draw.randrange(4)) for _ in range(4)]
        every = [(peak(layers, one), added_s(layers, one, **rates)) for one in product(ways, repeat=4)]
        least, whole = min(every)[0], peak(layers, [Choice()] * 4)
        budget = int(least + share * (whole - least))
        plan = planned(layers, budget, most=4, **rates)
        assert peak(layers, plan) <= budget
        best = min(time for size, time in every if size <= budget)
        gaps.append((added_s(layers, plan, **rates) - best) / sum(3 * layer.seconds for layer in layers))
    assert max(gaps) < 0.2 and sum(gap < 1e-9 for gap in gaps) > 0.8 * len(gaps)
    with pytest.raises(ValueError, match="give more, or more parts"):
        planned(layers, least - 1, most=4, **rates)
    x, up, down = tensors(8, 32, 8)
    blocks, size = [Layer(1.0, x.nbytes, 8 * x.nbytes)] * 4, up.nbytes + down.nbytes
    plan = planned(blocks, 16 * x.nbytes, 1e9 * x.nbytes, 0.01)
    each = {"keep": None, "recompute": recompute, "swap": Swap(Away, Back, resident=(up, down))}

    def run(choices):
        y = tensors(8, 32, 8)[0]
        with Ledger() as ledger:
            for how, parts in choices:
                y = split(mlp(up, down), y, parts, each[how])
        forward = ledger.peak_bytes
        y.sum().backward()
        found = [y.detach(), up.grad, down.grad]
        up.grad = down.grad = None
        return forward - size, found

    (free, wanted), (tight, found) = run([Choice()] * 4), run(plan)
    assert tight <= peak(blocks, plan) + 2 * x.nbytes <= 18 * x.nbytes < free
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, wanted))


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
    x, seen = torch.arange(14.0).view(7, 2), []
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


# ---- tiles of a weight -----------------------------------------------------------------------------------

WIDTH = 24  # D, and F = 4·D


def linears(tiles, bias=True):
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, 4 * WIDTH, bias=bias, dtype=torch.float64)
    return whole, TiledLinear(whole.weight, whole.bias, tiles)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 8, 96])
def test_tiles_give_what_the_whole_gives(tiles, bias):
    whole, tiled = linears(tiles, bias)
    for _ in range(2):  # gradients add up
        results = []
        for linear in (whole, tiled):
            x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            y = linear(x.requires_grad_())
            (y.tanh() ** 2).sum().backward()
            results.append((y, x.grad, *(param.grad for param in linear.parameters())))
        for one, other in zip(*results):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def peaks(tiles, rows=1):
    """Of the device, beside x, y and their gradients: in forward, in backward; and bytes over the link."""
    _, tiled = linears(tiles, bias=False)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    with Ledger() as ledger:
        y = tiled(x)
    forward, up = ledger.peak_bytes - x.nbytes - y.nbytes, ledger.copied_bytes("to_device")
    dy = torch.ones_like(y)
    with Ledger() as ledger:
        y.backward(dy)
    down, again = ledger.copied_bytes("to_host"), ledger.copied_bytes("to_device")
    return forward, ledger.peak_bytes - 2 * x.nbytes - dy.nbytes, (up, again, down)


@pytest.mark.parametrize("tiles", [1, 2, 8, 32])
def test_the_working_memory_is_a_tile(tiles):
    """8 bytes per element. With one row of x the rest, a tile of y and dx once more, is small: exact."""
    weight = 8 * 4 * WIDTH * WIDTH
    forward, backward, copied = peaks(tiles)
    assert forward == weight // tiles + 8 * 4 * WIDTH // tiles  # a tile of W, a tile of y
    assert backward == weight // tiles + 8 * WIDTH  # a tile of W and its part of dx; or a tile of dW
    assert copied == (weight, weight, weight) and peaks(1)[0] == tiles * forward


def test_parameters_and_gradients_are_the_hosts():
    """Copies of what was given. Each tile, of W and b, crosses once in each direction and pass."""
    whole, tiled = linears(4)
    for mine, given in zip(tiled.parameters(), whole.parameters(), strict=True):
        assert on_host(mine) and mine.untyped_storage().on_host == "parameters"
        assert mine.data_ptr() != given.data_ptr()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with Ledger() as ledger:
        y = tiled(x)
    assert ledger.copied_bytes("to_device") == tiled.weight.nbytes + tiled.bias.nbytes
    with Ledger() as ledger:
        y.sum().backward()
    assert ledger.copied_bytes("to_device") == tiled.weight.nbytes
    assert ledger.copied_bytes("to_host") == tiled.weight.nbytes + tiled.bias.nbytes
    assert {param.grad.untyped_storage().on_host for param in tiled.parameters()} == {"gradients"}
    assert ledger.host_by_kind["gradients"] == tiled.weight.nbytes + tiled.bias.nbytes


def test_wrong_use_is_refused():
    for tiles in (-1, 0, 5, 97):
        with pytest.raises(ValueError, match=f"tiles={tiles}: use a divisor of the 96 rows"):
            linears(tiles)
