"""The ledger against formulas on paper and torch's own allocator: what it counts, names and leaves behind."""

import gc
import pickle
import re
import threading
import weakref
from functools import partial
from itertools import permutations
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import minitrain
from minitrain import collectives, launch
from minitrain.model.gpt import GPT, Block, GPTConfig, cross_entropy_sum
from minitrain.model.layers import causal_attention, naive_attention
from minitrain.model.training.optim import AdamW
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.collectives import call_log
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.ledger.memory_meter import KINDS, MemoryMeter
from minitrain.ranks.ledger.operators import ATTENTION, Operator, visible_scores
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.process import PROCESS

B, T, D, H, L, V = 2, 24, 32, 4, 3, 50
CONFIG = GPTConfig(vocab_size=V, d_model=D, num_layers=L, num_heads=H, activation="gelu", positions="none")


def account(function, *args):
    with Ledger() as ledger:
        function(*args)
    return ledger


# ---- FLOPs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", ["triangle", "square"])
@pytest.mark.parametrize("core, backward_over_forward", [(naive_attention, 2), (causal_attention, 2.5)])
def test_flops_of_a_layer_are_24bsh2_and_4bs2h(core, backward_over_forward, causal):
    """Backward is twice the forward; a fused core computes its scores anew and has 2.5 times its own, and by
    default counts those of the triangle. Attention in matmuls makes the square, whatever is asked."""
    block = Block(CONFIG, "layers.1", attention=core)
    x = torch.randn(B, T, D, requires_grad=True)
    with Ledger(causal=causal) as ledger:
        with ledger.phase("forward"):
            y = block(x, torch.arange(T))
        with ledger.phase("backward"):
            y.sum().backward()
    scores = T * (T + 1) // 2 if core is causal_attention and causal == "triangle" else T**2
    matrices, attention = 24 * B * T * D**2, 4 * B * scores * D
    assert ledger.flops_by_phase == {
        "forward": matrices + attention,
        "backward": 2 * matrices + backward_over_forward * attention,
    }
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    cores = ["bmm"] if core is naive_attention else [f"{kernel}_backward", kernel]
    assert list(ledger.flops_by_operator) == ["mm", *cores]
    assert sum(ledger.flops_by_operator.values()) == ledger.flops


def test_what_runs_twice_counts_twice():
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    once = account(lambda: F.gelu(linear(x)).sum().backward())
    twice = account(lambda: checkpoint(lambda x: F.gelu(linear(x)), x, use_reentrant=False).sum().backward())
    assert (once.flops, twice.flops) == (3 * 512, 4 * 512)


def test_inference_mode_hides_no_operator():
    """There torch hands over F.linear and attention whole: they are counted by their parts."""
    block, x = Block(CONFIG, "layers.1"), torch.randn(B, T, D)
    expected = account(lambda: block(x, torch.arange(T))).flops_by_operator
    with torch.inference_mode():
        assert account(lambda: block(x, torch.arange(T))).flops_by_operator == expected != {}


def attend(q, k, v):
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()


def tensor(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    "multiply_adds, function",
    [
        (3 * 4 * 5, lambda: tensor(3, 4) @ tensor(4, 5)),
        (2 * 3 * 4 * 5, lambda: tensor(2, 3, 4) @ tensor(2, 4, 5)),
        (3 * 4 * 5, lambda: torch.addmm(tensor(5), tensor(3, 4), tensor(4, 5))),
        (2 * 3 * 4 * 5, lambda: torch.baddbmm(tensor(5), tensor(2, 3, 4), tensor(2, 4, 5))),
        (3 * 4 * 5, lambda: tensor(3, 5).clone().addmm_(tensor(3, 4), tensor(4, 5))),
        (2 * 3 * 4 * 5, lambda: tensor(2, 3, 5).clone().baddbmm_(tensor(2, 3, 4), tensor(2, 4, 5))),
        (2 * 3 * 4 * 5, lambda: torch.addbmm(tensor(5), tensor(2, 3, 4), tensor(2, 4, 5))),
        (3 * 4, lambda: tensor(3, 4) @ tensor(4)),
        (3 * 4, lambda: torch.addmv(tensor(3), tensor(3, 4), tensor(4))),
        (4, lambda: tensor(4) @ tensor(4)),
        (2 * 3 * 4 * 5, lambda: torch.einsum("abc,cd->abd", tensor(2, 3, 4), tensor(4, 5))),
        (3 * 3 * 4 * 5, lambda: (tensor(3, 4) @ tensor(4, 5)).sum().backward()),
        # out 6x6, 2 in-channels a group, 3x3 filter, 8 out-channels; the gradients of x and of the weight
        # take as much each
        (
            3 * 2 * 36 * 2 * 9 * 8,
            lambda: F.conv2d(tensor(2, 4, 8, 8), tensor(8, 2, 3, 3), groups=2).sum().backward(),
        ),
        (
            2 * 2 * 36 * 4 * 9 * 8,
            lambda: F.conv2d(torch.randn(2, 4, 8, 8), tensor(8, 4, 3, 3)).sum().backward(),
        ),
        (
            3 * 2 * 64 * 4 * 9 * 8,
            lambda: F.conv_transpose2d(tensor(2, 4, 8, 8), tensor(4, 8, 3, 3)).sum().backward(),
        ),
        # 4 query heads share 2 key heads; 2 products forward and 5 backward
        (7 * 2 * 4 * 6 * 6 * 8, lambda: attend(tensor(2, 4, 6, 8), tensor(2, 2, 6, 8), tensor(2, 2, 6, 8))),
        (0, lambda: tensor(4).exp().sum().backward()),
    ],
)
def test_flops_of_operators(multiply_adds, function):
    assert account(function).flops == 2 * multiply_adds


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda: tensor(3, 4) @ tensor(4, 5), [(1, 3, 5, 4)]),
        (
            lambda: (tensor(3, 4) @ tensor(4, 5)).sum().backward(),  # dW = Xᵀ·dY, dX = dY·Wᵀ
            [(1, 3, 5, 4), (1, 4, 5, 3), (1, 3, 4, 5)],
        ),
        (lambda: tensor(2, 3, 4) @ tensor(2, 4, 5), [(2, 3, 5, 4)]),
        (lambda: F.linear(tensor(2, 3, 4), tensor(5, 4), tensor(5)), [(1, 6, 5, 4)]),
        (lambda: torch.baddbmm(tensor(5), tensor(2, 3, 4), tensor(2, 4, 5)), [(2, 3, 5, 4)]),
        (lambda: tensor(3, 5).detach().addmm_(tensor(3, 4), tensor(4, 5)), [(1, 3, 5, 4)]),
        (lambda: torch.addbmm(tensor(5), tensor(2, 3, 4), tensor(2, 4, 5)), [(2, 3, 5, 4)]),
        (lambda: tensor(3, 4) @ tensor(4), [(1, 3, 1, 4)]),
        (lambda: torch.addmv(tensor(3), tensor(3, 4), tensor(4)), [(1, 3, 1, 4)]),
        (lambda: tensor(4) @ tensor(4), [(1, 1, 1, 4)]),
        (lambda: tensor(4).exp().sum(), []),
    ],
)
def test_a_product_says_its_shape_and_the_shape_its_flops(function, shapes):
    """In a dry run the same."""
    events = account(function).events
    assert [event.shape for event in events if event.flops] == shapes
    assert all(event.flops == 2 * prod(event.shape) for event in events if event.flops)
    assert not any(event.shape for event in events if not event.flops)
    assert dryrun.run(account, function).events == events


def test_grouped_products_have_as_many_rows_each_as_on_average():
    """32 rows shared out among 3 matrices, or 32 products of a column and a row among 3 sums: 11 at most on
    average; and 3 matrices of 4 rows each."""
    ends = torch.tensor([1, 12, 32], dtype=torch.int32)
    shapes = (32, 8), (3, 8, 16), (8, 32), (32, 16), (3, 4, 8)
    a, b, c, d, e = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    for function, shape, rows in (
        (lambda: F.grouped_mm(a, b, offs=ends), (3, 11, 16, 8), 32),
        (lambda: F.grouped_mm(c, d, offs=ends), (3, 8, 16, 11), 32),
        (lambda: F.grouped_mm(e, b), (3, 4, 16, 8), 12),
    ):
        (event,) = [event for event in account(function).events if event.flops]
        assert (event.shape, event.flops) == (shape, 2 * rows * 8 * 16)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_says_its_shape_and_the_flops_whether_a_triangle_counts(causal):
    """2 rows of 4 heads: 6 queries meet 9 keys of width 8. Forward 2 products, backward 5."""
    q, k = tensor(2, 4, 6, 8), tensor(2, 4, 9, 8)
    ledger = account(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=causal).sum().backward())
    forward, backward = [event for event in ledger.events if event.flops]
    assert "attention" in forward.name and "attention" in backward.name
    assert forward.shape == backward.shape == (8, 6, 9, 8)
    scores = 21 if causal else 6 * 9
    assert (forward.flops, backward.flops) == (2 * 2 * 8 * scores * 8, 5 * 2 * 8 * scores * 8)


def of_kernel(packet, queries, keys, is_causal):
    """One call of a kernel without data: 2 heads, keys of width 8, values of width 16."""
    place = dict(device="meta", dtype=torch.bfloat16)
    given = {}
    for argument in packet.default._schema.arguments:
        if argument.name in ("query", "key", "value", "grad_out", "grad_out_", "out"):
            rows = keys if argument.name in ("key", "value") else queries
            width = 8 if argument.name in ("query", "key") else 16
            given[argument.name] = torch.empty(1, 2, rows, width, **place)
    flops = lambda causal: Operator(packet.default, causal).flops(**given, is_causal=is_causal)
    return flops("triangle"), flops("square")


@pytest.mark.parametrize("packet", ATTENTION, ids=str)
def test_a_causal_kernel_counts_what_its_mask_leaves(packet):
    """Top left, as F.scaled_dot_product_attention documents; torch's flash kernel for CUDA aligns a mask that
    is not square to the lower right, and is called with one by torch.nn.attention.bias.causal_lower_right
    alone."""
    backward = "backward" in str(packet)
    lower_right = "flash_attention" in str(packet) and "cpu" not in str(packet)
    per_score = 2 * 2 * (3 * 8 + 2 * 16 if backward else 8 + 16)
    for queries, keys in ((64, 64), (5, 8), (8, 5), (1, 7), (7, 1)):
        seen = torch.ones(queries, keys).tril(keys - queries if lower_right else 0).sum().item()
        assert of_kernel(packet, queries, keys, True) == (per_score * seen, per_score * queries * keys)
        assert of_kernel(packet, queries, keys, False) == (per_score * queries * keys,) * 2


@pytest.mark.parametrize("queries, keys", [(40, 70), (70, 40), (33, 33)])
def test_the_mask_that_is_counted_is_the_one_that_is_applied(queries, keys):
    """A mask with one more or one less diagonal gives another output, and another count."""
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for length in (queries, keys, keys))
    with Ledger() as ledger:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for shift, same in ((0, True), (1, False), (-1, False), (keys - queries, queries == keys)):
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(shift)
        mask[0, 0] = True  # a row that sees nothing has no output
        assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) == same
        assert (ledger.flops == 2 * 2 * 8 * mask.sum()) == same
    assert ledger.flops == 2 * 2 * 8 * visible_scores(queries, keys)


def test_a_mask_of_numbers_spares_nothing():
    """A bias makes the model give a mask as a tensor: the kernel computes all scores, says the ledger."""
    q, k, v = (torch.randn(1, 2, 16, 4) for _ in range(3))
    biased = account(lambda: causal_attention(q, k, v, bias=torch.zeros(2, 16, 16)))
    assert biased.flops == 4 * 2 * 16 * 16 * 4
    assert account(lambda: causal_attention(q, k, v)).flops == 4 * 2 * (16 * 17 // 2) * 4


@pytest.mark.parametrize(
    "read, written, function",
    [
        (800, 400, lambda x, y: x + y),
        (800, 400, lambda x, y: x.add_(y)),
        (800, 400, lambda x, y: torch._foreach_add_([x], [y])),
        (400, 400, lambda x, y: x.copy_(y)),
        (400, 400, lambda x, y: x.clone()),
        (0, 400, lambda x, y: torch.zeros(100)),
        (0, 0, lambda x, y: torch.empty(100)),
        (0, 0, lambda x, y: (x.view(10, 10).t(), x.detach(), x[5:], x.reshape(50, 2), x.expand(7, 100))),
        (400, 400, lambda x, y: x.view(10, 10).t().contiguous()),
        (400, 4, lambda x, y: x.sum()),
        (400, 7 * 400, lambda x, y: x.expand(7, 100).clone()),
        (0, 400, lambda x, y: torch.ones_like(x)),
        (440, 40, lambda x, y: x.view(10, 10) @ y[:10]),
    ],
)
def test_bytes_are_read_or_written(read, written, function):
    events = account(function, torch.randn(100), torch.randn(100)).events
    assert all(event.bytes == event.read + event.written for event in events)
    assert [(event.read, event.written) for event in events] == ([(read, written)] if written else [])


def test_what_overwrites_reads_nothing_and_rows_are_what_is_touched_of_a_table():
    """100 numbers, two indices of 8 bytes each, two numbers or two rows of 4."""
    two, x, y = torch.tensor([0, 4]), torch.rand(100), torch.rand(100)
    rows, others = x.view(25, 4), y.view(25, 4)[:2]
    overwrites = [
        x.zero_, partial(x.fill_, 2), x.normal_, x.uniform_, x.random_, partial(x.bernoulli_, 0.5),
        x.exponential_, partial(torch.rand_like, x), partial(x.new_zeros, 100), partial(x.new_full, (100,), 2),
    ]  # fmt: skip
    gathers = [lambda: x[two], lambda: x.gather(0, two), lambda: x.index_select(0, two)]
    of_rows = [lambda: F.embedding(two, rows), lambda: rows[two]]
    scatters = [
        lambda: x.index_put_((two,), y[:2]), lambda: x.scatter_(0, two, y[:2]),
        lambda: x.scatter_add_(0, two, y[:2]), lambda: x.index_add_(0, two, y[:2]),
    ]  # fmt: skip
    to_rows = [lambda: rows.index_add_(0, two, others), lambda: rows.index_copy_(0, two, others)]
    for functions, read, written in (
        (overwrites, 0, 400),
        (gathers, 16 + 8, 8),
        (of_rows, 16 + 32, 32),
        (scatters, 16 + 2 * 8, 8),
        ([lambda: x.scatter_(0, two, 3.0)], 16 + 8, 8),
        (to_rows, 16 + 2 * 32, 32),
        ([lambda: torch.add(x, x, out=y)], 800, 400),
        ([lambda: x[:50] + y[:50]], 400, 200),
        ([lambda: torch.stack((x, y))], 800, 800),
    ):
        for function in functions:
            (event,) = account(function).events
            assert (event.read, event.written) == (read, written), event


# ---- memory ----------------------------------------------------------------------------------------------


def allocators_peak(function) -> int:
    """The most that torch's CPU allocator had given out at once beyond its start, by its own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    live = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def test_peak_is_that_of_the_allocator_and_watching_does_not_change_it():
    model, tokens = GPT(GPTConfig(vocab_size=64)), torch.zeros(4, 32, dtype=torch.long)
    optimizer = AdamW(model.parameters())

    def step():
        cross_entropy_sum(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # from here on the optimizer has its state
    older = sum(p.nbytes for p in model.parameters()) * 3 + tokens.nbytes
    ledger = account(step)
    assert ledger.live_bytes == older
    peaks = ledger.peak_bytes - older, allocators_peak(step), allocators_peak(lambda: account(step))
    assert peaks[0] == peaks[1] == peaks[2] > 500_000


def test_memory_by_kind():
    size = 4 * 100 * 100
    model = nn.Linear(100, 100, bias=False)
    x = torch.randn(10, 100)
    with Ledger() as ledger:
        optimizer = AdamW(model.parameters())
        model(x).sum().backward()
        at_backward = ledger.live_by_kind
        optimizer.step()
    assert at_backward == dict(zip(KINDS, (size, size, 0, 4000, 0)))
    assert ledger.live_by_kind == at_backward | {"optimizer state": 2 * size}
    # the square root of the second moment is the step's scratch memory, there when everything else is
    assert ledger.peak_by_kind == at_backward | {"optimizer state": 2 * size, "buffers": size}
    assert sum(ledger.peak_by_kind.values()) == ledger.peak_bytes
    assert sum(ledger.live_by_kind.values()) == ledger.live_bytes


def test_the_peak_by_kind_is_that_of_the_first_moment_it_was_reached():
    weight = nn.Parameter(torch.ones(100))
    with Ledger() as ledger:
        scratch = weight.detach() * 2  # a buffer of 400 bytes
        del scratch
        weight.grad = torch.ones(100)  # as many bytes of another kind, later
    assert ledger.peak_bytes == 800 and ledger.peak_by_kind["gradients"] == 0 == ledger.live_bytes - 800
    assert sum(ledger.peak_by_kind.values()) == 800 > ledger.peak_by_kind["parameters"]
    assert ledger.live_by_kind["gradients"] == 400, "nobody asked while it was open"


def test_of_several_kinds_the_first_holds_in_whatever_order_they_are_named():
    order = ("parameters", "gradients", "optimizer state", "checkpoint", "buffers", "activations")
    for kinds in permutations(order, 3):
        meter, x = MemoryMeter(lambda: 0), torch.ones(2)
        for kind in kinds:
            meter.name(x, kind)
        assert meter.block_kinds() == [min(kinds, key=order.index)]
    meter, x = MemoryMeter(lambda: 0), torch.ones(2)
    meter.write(x), meter.resized(x)
    meter.read(nn.Parameter(x))
    assert meter.block_kinds() == ["buffers"], "for good"


def test_a_dry_run_knows_parameters_and_their_gradients():
    def dry():
        with Ledger() as ledger:
            linear = nn.Linear(10, 10)
            linear(torch.ones(2, 10)).sum().backward()
        return ledger.live_by_kind

    assert dryrun.run(dry, ranks=1) == dry() | {"activations": 0} and dry()["parameters"] == 440


def test_kinds_of_what_was_there_before():
    """A ledger opened in mid-training knows weights, gradients, state and master copies by their owners."""
    model = nn.Linear(10, 10, bias=False).bfloat16()
    optimizer = AdamW(model.parameters(), master_dtype=torch.float32)
    model(torch.ones(1, 10, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    ledger = account(optimizer.step)
    assert ledger.live_by_kind == dict(zip(KINDS, (200, 200, 1200, 0, 0)))


def test_a_gradient_is_one_even_if_a_hook_takes_it_away():
    linear = nn.Linear(100, 100, bias=False)
    linear.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ledger = account(lambda: linear(torch.ones(1, 100)).sum().backward())
    assert ledger.peak_by_kind["gradients"] == 40_000 and ledger.live_by_kind["gradients"] == 0


def test_parameters_on_one_block_all_have_gradients():
    flat = torch.ones(200)
    weights = [torch.nn.Parameter(part) for part in flat.split(100)]
    with Ledger() as ledger:
        sum((weight * weight).sum() for weight in weights).backward()
    assert ledger.live_by_kind["parameters"] == 800 and ledger.live_by_kind["gradients"] == 800


def test_a_frozen_parameter_is_a_parameter_and_a_shared_one_counts_once():
    linear = nn.Linear(10, 10, bias=False).requires_grad_(False)
    ledger = account(lambda x: linear(linear(x)), torch.ones(1, 10))
    assert ledger.live_by_kind["parameters"] == 400 and ledger.live_by_kind["gradients"] == 0


def test_older_memory_counts_from_the_start_views_count_once_and_deaths_count():
    x, unseen = torch.ones(1000), torch.ones(5000)
    with Ledger() as ledger:
        y = torch.zeros(500)
        assert ledger.live_bytes == 2000
        del y
        z = x[10:20].view(2, 5)
        half = x[:500] * 2  # reads memory that was there all along: the peak has it beside y, too
        assert (ledger.live_bytes, ledger.peak_bytes) == (6000, 6000)
        del x, z, half
        assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 6000 and len(unseen) == 5000


def test_what_is_written_into_is_not_new():
    x, out = torch.ones(1000), torch.empty(1000)
    with Ledger() as ledger:
        x.sin()  # gone before `out` is seen, which was there all the same
        torch.cos(x, out=out)
    assert (ledger.live_bytes, ledger.peak_bytes) == (8000, 12_000)


def test_memory_resized_in_place():
    with Ledger() as ledger:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        x.detach()
        assert ledger.live_bytes == 0
        x.untyped_storage().resize_(400)
        x.zero_()
        assert (ledger.live_bytes, ledger.peak_bytes) == (400, 400)


def test_asked_on_the_way_it_says_what_the_whole_list_of_changes_adds_up_to():
    """After each of many actions, also where a block is older, resized, the host's, or changes its kind."""
    kept, older = [], torch.ones(3)
    linear = nn.Linear(4, 4)
    optimizer = AdamW(linear.parameters())

    def actions():
        yield older * 2
        yield kept.append(torch.ones(1000))
        yield kept.append(call_log.announce_host(torch.ones(500)))
        yield linear(torch.ones(2, 4)).sum().backward()
        yield optimizer.step()
        yield kept[0].resize_(10)
        yield kept[0].add_(1)
        yield kept.pop()
        yield kept.append(call_log.announce("buffer", torch.ones(70)))
        yield kept.clear()

    with Ledger() as ledger:
        meter = ledger._memory
        for _ in actions():
            added_up = [meter.by_kind(len(meter._changes) // 3, host) for host in (False, True)]
            assert [ledger.live_by_kind, ledger.host_by_kind] == added_up
            assert [ledger.live_bytes, ledger.host_bytes] == [sum(kinds.values()) for kinds in added_up]
            assert ledger.timeline()[-1][1] == ledger.live_by_kind or ledger.live_bytes < ledger.peak_bytes
    assert ledger.host_peak_bytes == 2000 and ledger.host_bytes == 0 < ledger.live_bytes
    assert ledger.live_by_kind["gradients"] == ledger.live_by_kind["parameters"] == 4 * 20


def test_timeline():
    with Ledger() as ledger:
        x = torch.zeros(100)  # event 0
        y = x + 1  # event 1
        del x
        z = y * 2  # event 2
        del y, z
    activations = [(index, live["activations"]) for index, live in ledger.timeline()]
    assert activations == [(0, 400), (1, 800), (2, 800), (3, 400)]  # after event 2 the fullest is half-way
    assert max(sum(live.values()) for _, live in ledger.timeline()) == ledger.peak_bytes
    assert [event.name for event in ledger.events] == ["zeros", "add", "mul"]


def test_of_equally_full_moments_of_an_event_the_first_counts():
    with Ledger() as ledger:
        x = torch.zeros(100)
        first = call_log.announce("buffer", torch.empty(100))
        del x
        second = call_log.announce("buffer", torch.empty(100))
    (_, then), (_, fullest) = ledger.timeline()
    assert then["activations"] == 400 and (fullest["activations"], fullest["buffers"]) == (400, 400)
    assert len(first) == len(second) and ledger.live_by_kind["buffers"] == 800


def test_what_an_optimizer_holds_is_named_whatever_it_is():
    """A plain tensor that it updates, a number in its state; a gradient that was there when its parameter was
    first read, and is gone before anybody asks."""
    plain, weight = torch.ones(100, requires_grad=True), nn.Parameter(torch.ones(100))
    optimizer = AdamW([plain])
    plain.grad, weight.grad = torch.ones(100), torch.ones(100)
    with Ledger() as ledger:
        weight * 2
        weight.grad = None
        optimizer.step()
        optimizer.state[plain]["number"] = torch.ones(())
        optimizer.step()
        weight.grad = torch.ones(100)
        assert ledger.live_by_kind["gradients"] == 800
        weight.grad = torch.ones(100)
        kinds = ledger.block_kinds
        assert kinds[-1] == "gradients"
        kinds.clear()
    assert ledger.block_kinds, "each asks for a list of his own"
    assert ledger.live_by_kind["optimizer state"] == 804 and ledger.live_by_kind["parameters"] == 800
    assert ledger.timeline()[0][1]["gradients"] == 800, "both were there at first"


# ---- communication ---------------------------------------------------------------------------------------


def one_of_each():
    mesh = Mesh(dp=2, tp=4)
    dp, tp = mesh.group("dp"), mesh.group("tp")
    x = torch.zeros(8, 10)
    with Ledger() as ledger:
        collectives.all_reduce(x, dp)
        collectives.all_reduce(x, tp)
        collectives.all_reduce(x, tp)
        with ledger.phase("gather"):
            handle = collectives.all_gather(x, tp, async_op=True)
            x * 2
            handle.wait()
            handle.wait()  # waiting again is no event
        collectives.exchange(x, 1 - dp.rank(), 1 - dp.rank(), dp)
    return ledger


def test_bytes_by_operation_and_axis():
    ledger = dryrun.run(one_of_each, rank=5, ranks=8)  # row 1 of dp, column 1 of tp
    S = 320
    assert ledger.planned
    assert [ledger.num_calls("all_reduce", axis) for axis in ("dp", "tp", "pp", None)] == [1, 2, 0, 3]
    payload = [ledger.payload_bytes("all_reduce", axis) for axis in ("dp", "tp", "pp", None)]
    sent = [ledger.sent_bytes("all_reduce", axis) for axis in ("dp", "tp", "pp", None)]
    assert (payload, sent) == ([S, 2 * S, 0, 3 * S], [S, 3 * S, 0, 4 * S])
    assert (ledger.payload_bytes("all_gather"), ledger.sent_bytes("all_gather")) == (4 * S, 3 * S)
    assert ledger.sent_bytes(axis="tp") == 6 * S and ledger.sent_bytes() == 8 * S and ledger.num_calls() == 6


def test_order_of_events():
    ledger = dryrun.run(one_of_each, rank=5, ranks=8)
    names = [event.name if isinstance(event, Compute) else event for event in ledger.events]
    issues = {event.id: event for event in names if isinstance(event, Issue)}
    order = [name if isinstance(name, str) else f"{type(name).__name__} {name.id}" for name in names]
    blocking = [f"{what} {number}" for number in range(3) for what in ("Issue", "Wait")]
    behind = ["Issue 3", "mul", "Wait 3", "Issue 4", "Issue 5", "Wait 4", "Wait 5"]
    assert order == blocking + behind
    assert [(issue.op, issue.axis, issue.seq, issue.members) for issue in issues.values()] == [
        ("all_reduce", "dp", 0, (1, 5)), ("all_reduce", "tp", 0, (4, 5, 6, 7)),
        ("all_reduce", "tp", 1, (4, 5, 6, 7)), ("all_gather", "tp", 2, (4, 5, 6, 7)),
        ("send", "dp", 0, (5, 1)), ("receive", "dp", 0, (1, 5)),
    ]  # fmt: skip
    assert [issue.phase for issue in issues.values()] == ["", "", "", "gather", "", ""]
    line = one_of_each.__code__.co_firstlineno
    found = [issue.site for issue in issues.values()]
    assert found == [f"test_ledger.py:{line + n}" for n in (5, 6, 7, 9, 13, 13)]


def from_another_thread():
    """Issued by one thread, waited for by another, while the ledger's own thread computes."""
    handles, x, group = [], torch.zeros(6), collectives.world()
    with Ledger() as ledger:
        issue = lambda: handles.append(collectives.all_reduce(x, group, async_op=True))
        issuer = threading.Thread(target=issue)
        issuer.start()
        issuer.join()
        x + 1
        waiter = threading.Thread(target=lambda: handles.pop().wait())
        waiter.start()
        waiter.join()
    return ledger


def test_calls_of_other_threads_are_in_the_account():
    for ledger in launch.run(from_another_thread, ranks=2):
        issue, compute, wait = ledger.events
        assert (issue.op, compute.name, wait) == ("all_reduce", "add", Wait(issue.id))
        assert issue.sent_bytes == 24 == ledger.sent_bytes() and not ledger.planned


def inside_and_outside():
    """-> (bytes at the fullest moment of an all-reduce, kinds of them, names of operators)"""
    x = torch.ones(1000)
    with Ledger() as ledger:
        collectives.all_reduce(x, collectives.world())
    return ledger.peak_by_kind, [event for event in ledger.events if isinstance(event, Compute)]


def test_a_collective_adds_up_in_buffers_and_its_additions_are_its_own():
    cases = [*launch.run(inside_and_outside, ranks=4), dryrun.run(inside_and_outside, ranks=4)]
    for kinds, computes in cases:
        assert kinds["buffers"] == 3 * 1000 and kinds["activations"] == 8000 and computes == []


def test_gathered_parameters_that_were_there_before_stand_apart():
    x = torch.ones(100)
    with Ledger() as ledger:
        x + 1
        call_log.announce("resized", x)
    first = ledger.timeline(gathered=True)[0][1]
    assert (first["gathered parameters"], first["buffers"]) == (400, 0)


def test_what_is_made_after_an_optimizer_s_step_is_no_scratch_of_it():
    weight = nn.Parameter(torch.ones(10))
    weight.grad = torch.ones(10)
    with Ledger() as ledger:
        torch.optim.SGD([weight], lr=1.0).step()
        kept = torch.ones(100) * 2
    assert ledger.live_by_kind["activations"] == kept.nbytes


# ---- what is left behind ---------------------------------------------------------------------------------


def hooks():
    return (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        len(PROCESS.observers),
        len(_get_current_dispatch_mode_stack()),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_ledger_leaves_nothing_behind(fails):
    model, before = nn.Linear(4, 4), hooks()
    weight = weakref.ref(model.weight)
    ledger = Ledger()
    try:
        with ledger:
            assert hooks() == tuple(n + 1 for n in before)
            result = model(torch.ones(1, 4)).sum()
            result.backward()
            alive = torch.ones(3)
            if fails:
                raise KeyError
    except KeyError:
        pass
    flops, live = ledger.flops, ledger.live_bytes
    assert hooks() == before and not model.weight._post_accumulate_grad_hooks and flops == 2 * 2 * 16
    torch.ones(10) @ torch.ones(10)  # not seen any more
    del model, result
    gc.collect()
    assert weight() is None and (ledger.flops, ledger.live_bytes) == (flops, live)
    copy = pickle.loads(pickle.dumps(ledger))
    for told in (lambda it: it.events, Ledger.timeline, Ledger.table):
        assert told(copy) == told(ledger)
    assert len(alive) == 3


def test_a_ledger_is_for_one_run():
    ledger = account(lambda: torch.ones(1))
    with pytest.raises(ValueError, match="make a new one"):
        ledger.__enter__()


def test_the_innermost_label_holds_and_the_outer_one_again_behind_it():
    with Ledger() as ledger, ledger.phase("outer"):
        with ledger.phase("inner"):
            torch.ones(2) @ torch.ones(2)
        torch.ones(3) @ torch.ones(3)
        with pytest.raises(KeyError), ledger.phase("fails"):
            raise KeyError
        a = torch.ones(4, 4)
        torch.bmm(a[None], a[None]), torch.mm(a, a), a + a
    assert ledger.flops_by_phase == {"outer": 6 + 2 * 128, "inner": 4}
    assert list(ledger.flops_by_operator.items()) == [("bmm", 128), ("mm", 128), ("dot", 10)]


def test_table():
    assert str(dryrun.run(one_of_each, rank=5, ranks=8).table()).splitlines()[:6] == [
        "communication  calls  payload bytes  planned bytes",
        "all_reduce dp      1            320            320",
        "all_reduce tp      2            640            960",
        "all_gather tp      1          1,280            960",
        "send dp            1            320            320",
        "receive dp         1            320              0",
    ]
    linear = nn.Linear(100, 100, bias=False)
    table = account(lambda: linear(torch.ones(10, 100)).sum().backward()).table()
    assert (
        repr(table)
        == str(table)
        == """\
communication  calls  payload bytes  sent bytes
total              0              0           0

computation    FLOPs
mm           400,000
total        400,000

memory           live bytes  at the peak
parameters           40,000       40,000
gradients            40,000       40,000
optimizer state           0            0
activations               0        4,008
buffers                   0            0
total                80,000       84,008"""
    )


def test_instrument_and_formula_share_no_code():
    """What counts imports no formula but the events it writes, and what predicts imports no instrument."""
    package = Path(minitrain.__file__).parent
    instruments, formulas = [*package.glob("ranks/**/*.py")], [*package.glob("plan/**/*.py")]
    assert len(instruments) > 20 and len(formulas) > 10
    for path in instruments:
        assert not re.search(r"^\s*(from|import) minitrain.*\b(plan|systems)\b", path.read_text(), re.M)
    for path in formulas:
        measures = r"^\s*(from|import) minitrain\.ranks.*\b(ledger|launch|collectives)\b"
        assert not re.search(measures, path.read_text(), re.M), path
    assert "from minitrain.ranks.events import" in (package / "ranks/ledger/ledger.py").read_text()


def test_a_product_of_fp8_codes_runs_at_their_rate():
    codes, one = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    ledger = account(lambda: torch._scaled_mm(codes, codes.mT, one, one, out_dtype=torch.bfloat16))
    (product,) = (event for event in ledger.events if event.flops)
    assert (product.name, product.dtype, product.flops) == ("_scaled_mm", "float8_e4m3fn", 2 * 16**3)
    h100 = machine("h100").device
    assert h100.peak(product.dtype) == 2 * h100.peak("bfloat16")


def test_what_did_not_go_through_the_door_is_named():
    def rank():
        x, group = torch.ones(4), dist.group.WORLD
        with Ledger() as ledger:
            dist.all_reduce(x)
            dist.all_gather_into_tensor(torch.empty(8), x)
            functional.all_reduce(x, "sum", group) + 0
            collectives.all_reduce(x, collectives.world())
        return dict(ledger.uncounted), ledger.num_calls(), str(ledger.table())

    uncounted, calls, table = launch.run(rank, ranks=2)[0]
    assert sum(uncounted.values()) >= 3 and calls == 1
    assert {"allreduce_", "_allgather_base_", "all_reduce"} <= uncounted.keys()
    assert "not counted, for torch.distributed was called directly: 1 allreduce_, 1 _allgather_base_" in table

    def through_the_door():
        with Ledger() as ledger:
            collectives.all_reduce(torch.ones(4), collectives.world())
            collectives.all_to_all(torch.ones(4), collectives.world())
            collectives.barrier(collectives.world())
        return dict(ledger.uncounted), "not counted" in str(ledger.table())

    assert launch.run(through_the_door, ranks=2)[0] == ({}, False)
