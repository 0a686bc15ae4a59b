"""A pipeline of a traced model: the stages are even, and together they are the model."""

from itertools import combinations

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.model.gpt import GPT
from minitrain.systems.pipeline.traced import flops, run, split, trace
from tests.parallel import TOLERANCE, small

CONFIG = small(num_layers=2, tied=False)


def tokens_and_gradient():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 8), generator=draw)
    return tokens, torch.randn(2, 8, CONFIG.vocab_size, generator=draw, dtype=torch.float64)


class Plain(nn.Module):
    """A toy GPT as anybody would write it, with tied tables and a residual stream."""

    def __init__(self, width=8, vocabulary=11):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
            for _ in range(4)
        )

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return x @ self.table.weight.T


def test_merak():
    """Our GPT, traced unchanged and split in two on two ranks, gives the outputs and the gradients of one
    process; its stages have as even FLOPs as any cuts behind a block; a model with tied tables, split in one
    process, keeps its parameters; it can be traced without memory."""
    model = GPT(CONFIG, seed=3, dtype=torch.float64)
    tokens, gradient = tokens_and_gradient()
    reference = model(tokens)
    reference.backward(gradient)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    outputs, grads = zip(*launch.run(stage_on_rank, ranks=2))
    assert (outputs[1] - reference).abs().max() <= TOLERANCE
    assert sorted(name for some in grads for name in some) == sorted(wanted)  # each on one rank
    for name, found in (pair for some in grads for pair in some.items()):
        assert (found - wanted[name]).abs().max() <= TOLERANCE, name
    traced = trace(model, tokens)
    check_balance(model, tokens, traced)
    check_tied()
    with torch.device("meta"):
        nothing = trace(GPT(CONFIG), tokens.to("meta"))
    assert products(nothing) == products(traced)


def products(traced):
    return [node.name for node in traced.graph.nodes if "linear" in str(node.target)]


def stage_on_rank():
    """(output or None, gradients by name) of this rank's stage; what crosses goes by messages."""
    model, (tokens, gradient) = GPT(CONFIG, seed=3, dtype=torch.float64), tokens_and_gradient()
    traced, group = trace(model, tokens), collectives.world()
    stages = split(traced, 2, flops(traced, tokens))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mine = stages[group.rank()].module
    if group.rank() == 0:
        values = mine(tokens)
        shapes = [(tuple(value.shape), value.dtype) for value in values]
        for value in values:
            collectives.send(value.detach(), 1, group)
        floats = [value for value in values if value.requires_grad]
        torch.autograd.backward(floats, [collectives.receive(value.detach(), 1, group) for value in floats])
        output = None
        assert len(shapes) == len(stages[1].takes) and len(floats) == 1
    else:
        likes = stages[0].module(tokens)  # for their shapes
        values = [collectives.receive(like.detach(), 0, group) for like in likes]
        values = [value.requires_grad_() if value.is_floating_point() else value for value in values]
        (output,) = mine(*values)
        output.backward(gradient)
        for value in values:
            if value.is_floating_point():
                collectives.send(value.grad, 0, group)
        output = output.detach()
    return output, {names[id(parameter)]: parameter.grad for parameter in mine.parameters()}


def check_balance(model, tokens, traced):
    costs = flops(traced, tokens)
    for count in (1, 2, 3):
        stages = split(traced, count, costs)
        assert len(stages) == count and sum(stage.flops for stage in stages) == sum(costs)
        assert (run(stages, tokens) == model(tokens)).all()
        assert all(before.gives == after.takes for before, after in zip(stages, stages[1:]))
        assert max(stage.flops for stage in stages) <= best_by_blocks(model, costs, count)
    assert max(stage.flops for stage in split(traced, 2, costs)) < 1.1 * sum(costs) / 2
    with pytest.raises(ValueError, match="can be cut into"):
        split(traced, 1000, costs)


def best_by_blocks(model, costs, stages):
    """The slowest stage where whole blocks are dealt out: two alike, and a head."""
    head = 2 * 16 * CONFIG.vocab_size * CONFIG.d_model
    units = [(sum(costs) - head) // 2] * 2 + [head]
    cuts = ([0, *cut, 3] for cut in combinations(range(1, 3), stages - 1))
    return min(max(sum(units[a:b]) for a, b in zip(cut, cut[1:])) for cut in cuts)


def check_tied():
    torch.manual_seed(0)
    model, tokens = Plain().double(), torch.arange(10).view(2, 5)
    traced = trace(model, tokens)
    stages = split(traced, 3, flops(traced, tokens))
    output = run(stages, tokens)
    assert (output - model(tokens)).abs().max() <= TOLERANCE
    owners = [{id(parameter) for parameter in stage.module.parameters()} for stage in stages]
    assert id(model.table.weight) in owners[0] & owners[2]
    assert set().union(*owners) == {id(parameter) for parameter in model.parameters()}
    model(tokens).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    output.square().sum().backward()
    assert all((p.grad - grad).abs().max() <= TOLERANCE for p, grad in zip(model.parameters(), wanted))
