"""One start for all: equal bits, tied tensors once, buffers too, bytes; without it replicas drift."""

import math

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel.naive import all_reduce_gradients
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import shard
from minitrain.systems.data_parallel.negotiated import broadcast_parameters
from tests.parallel import TOLERANCE, check_refusals


class Own(nn.Module):
    """A reader's module: a tied table, a frozen matrix, batch norm with counters, a mask, another dtype."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.frozen = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("mask", torch.rand(7) > 0.5, persistent=False)
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked += seed

    def forward(self, tokens):
        return self.head(self.frozen(self.norm(self.table(tokens)))) + self.narrow.sum()


def tensors(module):
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def start(source):
    group, places = collectives.world(), []
    module = Own(seed=10 + group.rank())
    before, places = tensors(module), [tensor.data_ptr() for tensor in module.parameters()]
    with Ledger() as ledger:
        broadcast_parameters(module, group, source)
    assert places == [tensor.data_ptr() for tensor in module.parameters()]
    assert module.head.weight is module.table.weight
    assert not module.frozen.weight.requires_grad and module.table.weight.requires_grad
    return before, tensors(module), (ledger.sent_bytes(), ledger.payload_bytes(), ledger.num_calls())


@pytest.mark.parametrize("ranks, source", [(1, 0), (2, 1), (3, 0), (4, 2)])
def test_all_ranks_have_the_bits_of_the_source(ranks, source):
    found = launch.run(start, source, ranks=ranks)
    expected = found[source][0]
    assert ranks == 1 or any(not torch.equal(found[0][0][name], found[-1][0][name]) for name in expected)
    for _, after, _ in found:
        assert after.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(after[name], value) and after[name].dtype == value.dtype
    size = sum(value.nbytes for value in expected.values())  # named_parameters has a tied one once
    assert size == 8 * (30 + 42 + 12 + 12) + 8 + 2 * 6 + 7
    sent, payload, calls = zip(*(account for _, _, account in found))
    assert set(payload) == {size} and set(calls) == {4} and sum(sent) == (ranks - 1) * size
    assert sent[source] == math.ceil(math.log2(ranks)) * size


def train(ranks_of_batch, same_start, group):
    """Two steps of a module that was seeded by its rank; a BatchNorm would not be data parallel."""
    torch.manual_seed(group.rank())
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    if same_start:
        broadcast_parameters(module, group)
    whole = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    x = whole.chunk(ranks_of_batch)[group.rank() % ranks_of_batch]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        all_reduce_gradients(module.parameters(), group)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def test_training_equals_one_process_and_drifts_without():
    (alone,) = launch.run(lambda: train(1, True, collectives.world()), ranks=1)
    together = launch.run(lambda: train(4, True, collectives.world()), ranks=4)
    apart = launch.run(lambda: train(4, False, collectives.world()), ranks=4)
    assert max((params - alone).abs().max() for params in together) < TOLERANCE
    assert all(torch.equal(params, together[0]) for params in together)
    assert min((params - apart[0]).abs().max() for params in apart[1:]) > 0.1


def test_over_one_axis_of_a_mesh():
    """Replicas agree, and what is cut over the other axis keeps its slices."""

    def rank():
        mesh = Mesh(dp=2, tp=2)
        module = nn.Linear(4, 4, dtype=torch.float64)
        torch.manual_seed(mesh.rank("dp"))
        nn.init.normal_(module.weight), nn.init.normal_(module.bias)
        module.weight = shard(module.weight, 0, mesh.group("tp"))
        broadcast_parameters(module, mesh.group("dp"))
        return module.weight.detach(), mesh.rank("tp")

    first, second, third, fourth = (weight for weight, _ in launch.run(rank, ranks=4))
    assert torch.equal(first, third) and torch.equal(second, fourth) and not torch.equal(first, second)


def broadcast_what_is_cut(group):
    module = nn.Linear(4, 4)
    module.weight = shard(module.weight, 0, group)
    broadcast_parameters(module, collectives.world())


def test_refusals_are_one_line():
    refused = {
        "Tanh has no parameters and no buffers": lambda: broadcast_parameters(nn.Tanh(), collectives.world()),
        "weight is cut over world; broadcast first": lambda: broadcast_what_is_cut(collectives.world()),
        "weight is cut over tp": lambda: broadcast_what_is_cut(Mesh(dp=1, tp=2).group("tp")),
    }
    check_refusals(refused, ranks=2)
