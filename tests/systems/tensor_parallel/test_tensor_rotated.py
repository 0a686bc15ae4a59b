"""Weights travel round the ring: equal to one process on all batches, hops and memory counted."""

import copy
import weakref

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.model.config import GPTConfig
from minitrain.model.layers import MLP, Attention
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor
from minitrain.systems.plan import grid_costs
from minitrain.systems.tensor_parallel import rotated
from minitrain.systems.tensor_parallel.rotated import RotatedLinear, rotate_linears
from tests.parallel import TOLERANCE, Traffic

K, N = 6, 8
BYTES = 8  # float64
WAYS = [False, True]  # with prefetch, in place


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(module):
    for seed, param in enumerate(module.parameters()):
        param.data = random(*param.shape, seed=seed) / 3
    return module


def whole_linear(bias=True, k=K, n=N):
    return fill(nn.Linear(k, n, bias=bias, dtype=torch.float64))


class Block(nn.Module):
    """Attention and MLP, nothing between."""

    def __init__(self, activation):
        super().__init__()
        sizes = dict(d_model=8, num_heads=4, num_kv_heads=2, d_ff=12, positions="rope")
        config = GPTConfig(**sizes, activation=activation, bias=activation == "gelu")
        self.attention, self.mlp = Attention(config, dtype=torch.float64), MLP(config, dtype=torch.float64)

    def forward(self, x):
        x = x + self.attention(x, torch.arange(x.size(1)))
        return x + self.mlp(x)


def rows(rank):
    """Of the whole batch: rank r has r + 1 sequences."""
    return slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)


def distance(module, reference):
    """Gradients and parameters, whole."""
    pairs, found = dict(reference.named_parameters()), []
    for name, param in module.named_parameters():
        grad = full_tensor(param.grad, param.placement.shards)
        found += [full_tensor(param) - pairs[name], grad - pairs[name].grad]
    return max(apart.abs().max().item() for apart in found)


def compare_linear(in_place):
    """Errors of y, dx and the gradients, after two microbatches whose forwards came before both backwards."""
    group, linear = collectives.world(), whole_linear()
    mine, total = rows(group.rank()), rows(group.size()).start
    ours, errors, losses = RotatedLinear(linear, group, in_place), [], []
    for microbatch in range(2):
        x, dy = random(total, 3, K, seed=7 + microbatch), random(total, 3, N, seed=17 + microbatch)
        whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, y = linear(whole), ours(part)
        errors.append((y - expected[mine]).abs().max().item())
        losses.append((expected, y, dy, whole, part))
    for expected, y, dy, whole, part in losses:
        expected.backward(dy)
        y.backward(dy[mine])
        errors.append((part.grad - whole.grad[mine]).abs().max().item())
    norms = [clip_grad_norm(ours.parameters(), 1e9), torch.nn.utils.clip_grad_norm_(linear.parameters(), 1e9)]
    return errors, distance(ours, linear), abs(norms[0] - norms[1]).item()


def train(activation, in_place):
    """Three steps of a block beside one process: the largest difference of outputs, gradients, weights."""
    group, block = collectives.world(), fill(Block(activation))
    mine, total = rows(group.rank()), rows(group.size()).start
    ours, worst = rotate_linears(copy.deepcopy(block), group, in_place), 0.0
    optimizers = [AdamW(module.parameters(), lr=1e-2) for module in (block, ours)]
    for step in range(3):
        x, target = random(total, 5, 8, seed=20 + step), random(total, 5, 8, seed=30 + step)
        expected, y = block(x), ours(x[mine])
        for optimizer in optimizers:
            optimizer.zero_grad()
        (expected - target).square().sum().backward()
        (y - target[mine]).square().sum().backward()
        worst = max(worst, (y - expected[mine]).abs().max().item(), distance(ours, block))
        for optimizer in optimizers:
            optimizer.step()
    return max(worst, distance(ours, block))


def everything():
    ways = zip(WAYS, ("gelu", "swiglu"))
    return [(compare_linear(in_place), train(activation, in_place)) for in_place, activation in ways]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_process_on_all_batches(ranks):
    for outcome in launch.run(everything, ranks=ranks):
        for (errors, gradients, norm), trained in outcome:
            assert max(*errors, gradients, norm, trained) < TOLERANCE


def standing_still():
    def still(x, group, async_op=False):
        return collectives.rotate(x, group, shift=0, async_op=async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotated, "rotate", still)
        return [compare_linear(in_place) for in_place in WAYS]


def test_without_the_ring_it_does_not():
    for outcomes in launch.run(standing_still, ranks=4):
        for errors, gradients, _ in outcomes:
            assert min(*errors, gradients) > 1e-2


def measure(k, n):
    """Both ways: elements sent forward and backward, with bias or not; weights, gradients at the peak."""
    group, found = collectives.world(), []
    for in_place in WAYS:
        plain, biased = (RotatedLinear(whole_linear(bias, k, n), group, in_place) for bias in (False, True))
        sent = []
        for layer in (plain, biased):
            x = random(2, k, seed=1).requires_grad_()
            with Ledger() as forward:
                y = layer(x)
            with Ledger() as backward:
                y.sum().backward()
            sent.append((forward.sent_bytes() / BYTES, backward.sent_bytes() / BYTES))
        found.append((sent, forward.peak_bytes / BYTES, backward.peak_bytes / BYTES))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_hops_are_the_formulas(ranks):
    shard, bias = K * N // ranks, N * (ranks - 1) / ranks
    cost = grid_costs.cost(grid_costs.Layer(2 * ranks, ((K, N),)), grid_costs.Grid("RTP", ranks))
    for ahead, in_place in launch.run(measure, K, N, ranks=ranks):
        hops = ranks - 1
        assert ahead[0] == [(hops * shard, 2 * hops * shard), (hops * shard + bias, 2 * hops * shard + bias)]
        assert ahead[0][0] == (cost.forward, cost.both - cost.forward)
        assert in_place[0][0] == (ranks * shard, (2 * ranks - 1) * shard)
        assert in_place[0][1] == (ranks * shard + bias, (2 * ranks - 1) * shard + bias)


def memory():
    """In shards, at the peaks of both passes: two rows of activations are small beside 64 · 64."""
    rotated.PIECE_BYTES = 64 * BYTES
    return [(forward * 4 / 64**2, backward * 4 / 64**2) for _, forward, backward in measure(64, 64)]


def test_memory_is_the_formula():
    for (forward, backward), (forward_in_place, backward_in_place) in launch.run(memory, ranks=4):
        assert 3 <= forward < 4 and 1 <= forward_in_place < 2  # own, in use, arriving; own
        assert 6 <= backward < 7 and 2 <= backward_in_place < 3  # and as many gradients


def shards_held_back():
    """Of each shard that forward and backward were lent but the last, whether it is still held when the next
    one is there, so that the next but one may set out; and how many were lent."""
    held, lent, passing = [], 0, rotated.passing

    def watched(*args):
        nonlocal lent
        before = None
        for owner, shard in passing(*args):
            held.extend([] if before is None else [before() is not None])
            before, lent = weakref.ref(shard), lent + 1
            yield owner, shard

    rotated.passing = watched
    try:
        layer = RotatedLinear(whole_linear(), collectives.world())
        layer(random(2, K, seed=1).requires_grad_()).sum().backward()
    finally:
        rotated.passing = passing
    return held, lent


def test_a_shard_is_dropped_before_the_next_but_one_sets_out():
    held, lent = dryrun.run(shards_held_back, rank=1, ranks=4)
    assert lent == 8 and held == [False] * 6


def said(attempt):
    with pytest.raises(ValueError) as error:
        attempt()
    return str(error.value)


def refusals():
    group, mesh = collectives.world(), Mesh(ring=2)
    linear, layer = whole_linear(), rotate_linears(Block("swiglu"), group)
    cut, tied = whole_linear(), Block("gelu")
    cut.weight = RotatedLinear(linear, mesh.group("ring")).weight
    tied.mlp.other = nn.Linear(8, 12, dtype=torch.float64)
    tied.mlp.other.weight = tied.mlp.up.weight
    attempts = [
        lambda: RotatedLinear(whole_linear(n=9), mesh.group("ring")),
        lambda: RotatedLinear(cut, group),
        lambda: rotate_linears(layer, group),
        lambda: rotate_linears(tied, group),
        lambda: RotatedLinear(linear, group)(random(4, 5, seed=0)),
    ]
    return [said(attempt) for attempt in attempts]


def test_refuses_in_one_line():
    assert launch.run(refusals, ranks=2)[0] == [
        "shard: 9 along dim 0 of [9, 6] is not a multiple of the 2 ranks of ring; pad the tensor or change the "
        "size of the axis",
        "RotatedLinear: weight [4, 6] is cut already, along dim 0 over ring; give it whole",
        "Block has no nn.Linear inside; is it rotated already?",
        "Block: two layers use one weight, and would get two; keep one of them out",
        "RotatedLinear: x [4, 5], but the layer takes [.., 6], uncut",
    ]


def test_what_moves_in_place_moves_in_pieces_of_so_many_bytes(monkeypatch):
    monkeypatch.setattr(rotated, "PIECE_BYTES", 128)

    def rank():
        with Traffic() as ledger:
            rotated.move(torch.zeros(8, 8, dtype=torch.float64), collectives.world())
        return ledger.num_calls("send")

    assert dryrun.run(rank, ranks=2) == 8 * 64 // 128
