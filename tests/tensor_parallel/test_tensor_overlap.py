"""Tensor parallelism that hides communication: equal to the plain, same bytes, hidden by order."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import Block
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.simulate import links
from minitrain.systems.simulate.replay import replay
from minitrain.tensor_parallel import linear, overlap, ring_overlap, sequence
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear
from minitrain.tensor_parallel.model import SharedHead, cut_attention, cut_mlp
from tests.parallel import TOLERANCE, Traffic

B, T, D, F = 2, 8, 8, 16
BY_SLICE = ring_overlap.column, ring_overlap.row
WHOLE_DW = partial(ring_overlap.column, dw_by_slice=False), partial(ring_overlap.row, dw_by_slice=False)
PAIRS = {  # column and row; those that hide nothing
    "plain": ((overlap.column, overlap.row), (linear.column, linear.row)),
    "sequence": (BY_SLICE, (sequence.column, sequence.row)),
    "sequence, whole dW": (WHOLE_DW, (sequence.column, sequence.row)),
}


def whole(bias=True, frozen=False):
    """Two column matrices, a third whose one head all ranks share, a row matrix; float64, alike on all."""
    torch.manual_seed(1)
    modules = [nn.Linear(*sizes, bias=bias) for sizes in ((D, F), (D, F), (D, 4), (F, D))]
    for module in modules:
        module.double().weight.requires_grad_(not frozen)
    return modules


def passes(column, row, sequence_parallel, bias=True, frozen=False):
    """Of a small pair of layers: (output, dx, all gradients), (bytes forward, bytes backward)."""
    group = collectives.world()
    first, second, shared, last = whole(bias, frozen)
    torch.manual_seed(2)
    x, weigh = torch.randn(2, B, T, D, dtype=torch.float64)
    if sequence_parallel:
        x, weigh = (a.chunk(group.size(), 1)[group.rank()] for a in (x, weigh))
    x = x.clone().requires_grad_()
    up, gate = ColumnLinear(first, group, column), ColumnLinear(second, group, column)
    key, down = SharedHead(shared, group, column, 4), RowLinear(last, group, row)
    with Traffic() as ledger:
        ups, gates, keys = column(x, (up, gate, key), group)
        y = down(ups.tanh() * gates * keys.sum(-1, keepdim=True))
        forward = ledger.sent_bytes()
        (y * weigh).sum().backward()
    params = nn.ModuleList((up, gate, key, down)).parameters()
    grads = [param.grad for param in params if param.requires_grad]
    return (y.detach(), x.grad, *grads), (forward, ledger.sent_bytes() - forward)


def furthest(ours, theirs):
    assert len(ours) == len(theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", PAIRS)
def test_numbers_and_bytes_are_those_of_the_plain_way(kind, ranks):
    def rank():
        found = []
        for settings in (dict(), dict(bias=False), dict(frozen=True)):
            a, b = (passes(*way, kind != "plain", **settings) for way in PAIRS[kind])
            found.append((furthest(a[0], b[0]), a[1], b[1]))
        return found

    for with_bias, without, frozen in launch.run(rank, ranks=ranks):
        for apart, ours, theirs in (with_bias, without):
            assert apart < TOLERANCE and ours == theirs and min(ours) > 0
        apart, ours, theirs = frozen  # a ring has no use for X where no weight wants a gradient
        assert apart < TOLERANCE and ours[0] == theirs[0]
        saved = B * T * D * 8 * (ranks - 1) // ranks if kind == "sequence" else 0  # one round
        assert ours[1] == theirs[1] - saved


def test_bytes_equal_the_formulas():
    def rank():
        return [
            passes(*BY_SLICE, True, bias=False)[1],
            passes(overlap.column, overlap.row, False, bias=False)[1],
        ]

    once = B * T * D * 8 * 3 // 4  # (t-1)/t · B·T·D elements
    shared_head = 2 * 4 * D * 8 * 3 // 4  # the gradient of a K/V head that all ranks use
    for ring, plain in launch.run(rank, ranks=4):
        assert ring == (2 * once, 3 * once + shared_head) and plain == (2 * once, 2 * once + shared_head)


def test_any_number_of_chunks_and_of_tokens():
    """1 piece, pieces of unequal size, more pieces than tokens, one token, a plain vector, a group of one."""

    def rank():
        group, found = collectives.world(), []
        for shape in ((1, 3, D), (7, D), (1, D), (D,)):
            for chunks in (1, 2, 5):
                results = []
                ours = partial(overlap.column, chunks=chunks), partial(overlap.row, chunks=chunks)
                for column, row in (ours, (linear.column, linear.row)):
                    up, down = ColumnLinear(whole()[0], group, column), RowLinear(whole()[3], group, row)
                    numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64)
                    x = numbers.view(shape).requires_grad_()
                    y = down(up(x))
                    y.square().sum().backward()
                    grads = up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad
                    results.append([y.detach(), x.grad, *grads])
                found.append(furthest(*results))
        return max(found)

    assert max(launch.run(rank, ranks=2)) < TOLERANCE and max(launch.run(rank, ranks=1)) < TOLERANCE


def test_a_ring_of_one_sends_nothing():
    def rank():
        ours, theirs = (passes(*way, True) for way in (BY_SLICE, (sequence.column, sequence.row)))
        return furthest(ours[0], theirs[0]), ours[1]

    assert launch.run(rank, ranks=1) == [(pytest.approx(0, abs=TOLERANCE), (0, 0))]


def test_bfloat16_stays_near():
    """The ring rounds at each hop; near the exact sum all the same."""

    def rank():
        torch.manual_seed(3)
        group = collectives.world()
        x = torch.randn(1, 64, 32 * 4, dtype=torch.bfloat16)
        weight = torch.randn(16, 32 * 4, dtype=torch.bfloat16) / 11
        own = slice(32 * group.rank(), 32 * group.rank() + 32)
        exact = (x.double() @ weight.double().T).chunk(4, 1)[group.rank()]
        return (ring_overlap.row_forward(x[..., own], weight[:, own], group) - exact).abs().max().item()

    assert max(launch.run(rank, ranks=4)) < 0.05


class Stays:
    """In place of a transfer: what was sent comes back, nothing arrives."""

    def __init__(self, x):
        self.x = x.clone()

    def wait(self):
        return self.x


@pytest.mark.parametrize("kind", PAIRS)
def test_without_one_hop_it_does_not(kind):
    """Control: every rank leaves out the third transfer of the layers, and only that one."""

    def rank():
        ours, theirs = PAIRS[kind]
        op, count = ("all_reduce" if kind == "plain" else "rotate"), 0
        real = getattr(collectives, op)

        def third_stays(x, group, *args, **settings):
            nonlocal count
            count += settings.get("async_op", False)
            return Stays(x) if settings.get("async_op") and count == 3 else real(x, group, *args, **settings)

        reference = passes(*theirs, kind != "plain")[0]
        setattr(collectives, op, third_stays)
        try:
            return furthest(passes(*ours, kind != "plain")[0], reference)
        finally:
            setattr(collectives, op, real)

    assert all(apart > 1e-4 for apart in launch.run(rank, ranks=4))


# ---- hidden: by the order of events ----------------------------------------------------------------------


def words(events):
    """The events as `issue`, `wait` and `product`; the rest is left out, repeats are joined."""
    found = []
    for event in events:
        word = {Issue: "issue", Wait: "wait"}.get(type(event)) or ("product" if event.flops else None)
        if word and found[-1:] != [word]:
            found.append(word)
    return found


def layer_inputs(t=4):
    x, y = torch.zeros(1, T // t, D), torch.zeros(1, T, F // t)
    return x, y, torch.zeros(F // t, D), torch.zeros(D, F // t)


def test_every_hop_of_the_ring_is_issued_before_a_product_and_awaited_after_it():
    def rank():
        group = collectives.world()
        x, y, a, b = layer_inputs()
        order = {}
        for name, work in (
            ("column forward", lambda: ring_overlap.column_forward(x, [a], [None], group)),
            ("row forward", lambda: ring_overlap.row_forward(y, b, group)),
            ("column backward", lambda: ring_overlap.column_backward([y], x, [a], [True], group)),
            ("row backward", lambda: ring_overlap.row_backward(x, y, b, True, group)),
        ):
            with Ledger() as ledger:
                work()
            order[name] = words(ledger.events)
        return order

    hops = ["issue", "product", "wait"] * 3
    for order in launch.run(rank, ranks=4):
        assert order["column forward"] == order["row backward"] == [*hops, "product"]
        assert order["row forward"] == ["product", *hops]
        assert order["column backward"] == ["product", *hops, *hops, "product"]


def test_every_piece_but_the_last_is_summed_behind_a_product():
    def rank():
        group = collectives.world()
        x, y, a, b = torch.zeros(1, T, D), *layer_inputs()[1:]
        order = []
        for work in (
            lambda: overlap.row_forward(y, b, group, 4),
            lambda: overlap.column_backward([y], x, [a], [True], group, 4),
        ):
            with Ledger() as ledger:
                work()
            order.append(words(ledger.events))
        return order

    for row, column in launch.run(rank, ranks=4):
        assert row == [*["product", "issue"] * 4, "wait"]
        assert column == [*["product", "issue"] * 4, "product", "wait"]


# ---- time and memory on a machine we do not have ---------------------------------------------------------


def gpt3_layer(column, row, sequences, cut):
    """A layer of GPT-3 on rank 0 of t=8, T=2048: timeline on H100s, (bytes sent, FLOPs), peak bytes."""

    def rank():
        group = collectives.world()
        sizes = dict(vocab_size=50_304, d_model=12_288, num_layers=1, num_heads=96, max_positions=2048)
        config = GPTConfig(**sizes, activation="gelu")
        layer = Block(config, "layers.0", dtype=torch.bfloat16)
        cut_attention(layer.attention, 128, group, column, row)
        cut_mlp(layer.mlp, group, column, row)
        x = torch.zeros(sequences, 2048 // cut, 12_288, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(2048)
        with Ledger() as ledger:
            layer(x, positions).sum().backward()
        return ledger.events, (ledger.sent_bytes(), ledger.flops), ledger.peak_bytes

    events, *account = dryrun.run(rank, ranks=8)
    return replay({0: events}, machine("h100")), *account


def test_less_is_exposed_in_a_layer_of_gpt3():
    """But products of 256 tokens are bound by memory: by slices the ring wants more than one sequence."""
    ways = {
        "linear": (linear.column, linear.row, 1),
        "overlap": (overlap.column, overlap.row, 1),
        "sequence": (sequence.column, sequence.row, 8),
        "ring": (*BY_SLICE, 8),
        "ring, whole dW": (*WHOLE_DW, 8),
    }
    for sequences in (1, 4):
        step, exposed, account, peak = {}, {}, {}, {}
        for name, (column, row, cut) in ways.items():
            timeline, account[name], peak[name] = gpt3_layer(column, row, sequences, cut)
            step[name], exposed[name] = 1e3 * timeline.step_s, 1e3 * timeline.exposed_communication_s
        assert account["overlap"] == account["linear"]
        assert account["ring"] == account["ring, whole dW"] == account["sequence"]
        assert exposed["overlap"] < 0.3 * exposed["linear"] and step["overlap"] < 0.89 * step["linear"]
        assert exposed["ring"] < 0.05 * exposed["sequence"]
        assert exposed["ring, whole dW"] < 0.1 * exposed["sequence"]
        assert step["ring, whole dW"] < 0.96 * step["sequence"]
        slower = step["ring"] / step["sequence"]
        assert slower < 0.85 if sequences == 4 else slower > 1.3
        assert peak["overlap"] == peak["linear"] and peak["ring, whole dW"] == peak["sequence"]
        assert peak["ring"] < 0.9 * peak["sequence"]


def test_the_ring_never_holds_the_whole():
    """Peaks of the four passes in slices of B·T/t·D, t = 8; what is F/t wide is less than 1/2 in all."""

    def rank():
        group = collectives.world()
        x, y, a, b = map(torch.zeros, ((1, 512, 512), (1, 4096, 8), (8, 512), (512, 8)))
        peaks = []
        for work in (
            lambda: ring_overlap.column_forward(x, [a], [None], group),
            lambda: sequence.column_forward(x, [a], [None], group),
            lambda: ring_overlap.column_backward([y, y], x, [a, a], [True, True], group),
            lambda: sequence.column_backward([y, y], x, [a, a], [True, True], group),
            lambda: ring_overlap.row_forward(y, b, group),
            lambda: sequence.scatter_time(y @ b.T, group),
            lambda: ring_overlap.row_backward(x, y, b, True, group),
        ):
            with Ledger() as ledger:
                kept = work()
            del kept
            peaks.append(int(2 * ledger.peak_bytes / x.nbytes) / 2)
        return peaks

    column, gathered, backward, gathered_backward, row, scattered, row_backward = dryrun.run(rank, ranks=8)
    assert column == row_backward == 1 + 2  # the own slice; one at work, one arriving
    assert row == 3  # one sum leaving, one arriving, the term at work
    assert backward == 1 + 3  # the own slice of X; three of dX, then dX and two of X
    assert gathered >= 8 and gathered_backward >= 16 and scattered >= 8


def test_wang_decompose():
    """n-1 permutes among n partial products are the gather and the product, in the same bytes; exposed is what a
    hop takes longer than the product beside it."""

    def rank():
        return [passes(*way, True, bias=False) for way in (BY_SLICE, (sequence.column, sequence.row))]

    for ours, theirs in launch.run(rank, ranks=4):
        assert furthest(ours[0], theirs[0]) < TOLERANCE and ours[1] == theirs[1]
    for n, hop, product in ((4, 3, 5), (4, 5, 3), (8, 2, 2)):
        tasks = [
            links.Task(f"hop {i}", "link", hop, after=(f"hop {i - 1}",) if i > 1 else ()) for i in range(1, n)
        ]
        tasks += [
            links.Task(f"mm {i}", "device", product, after=(f"hop {i}",) if i else ()) for i in range(n)
        ]
        assert links.play(tasks).end_s - n * product == (n - 1) * max(0, hop - product)
