"""The units that ZeRO-3 finds by itself: in modules, containers, shared, repeated; and others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero3 import Zero3, elements
from minitrain.model.gpt import GPT, GPTConfig
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from tests.parallel import TOLERANCE, Traffic

W = 16


def linear(width=W):
    return nn.Linear(width, width, dtype=torch.float64)


class Attributes(nn.Module):
    """Layers as attributes, and a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear() for _ in range(4))
        self.act, self.scale = nn.ReLU(), nn.Parameter(torch.ones(W, dtype=torch.float64))

    def forward(self, x):
        return self.d(self.act(self.c(self.act(self.b(self.act(self.a(x) * self.scale))))))


class Twice(Attributes):
    """One child is called three times."""

    def forward(self, x):
        return self.d(self.a(self.act(self.b(self.a(self.c(self.a(x * self.scale)))))))


class Block(nn.Module):
    """A module with submodules and a parameter of its own; no list in it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gain = linear(), linear(), nn.Parameter(torch.ones(W, dtype=torch.float64))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x * self.gain)))


class Experts(Block):
    """A block with a list in it, one of which it uses at a time."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x):
        return super().forward(sum(expert(x) for expert in self.experts))


class Language(nn.Module):
    """As many are written: a ModuleDict with tables, a list and a norm in it, and a tied head beside."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(11, W, dtype=torch.float64),
                drop=nn.Dropout(0.0),
                h=nn.ModuleList([Block(), Experts()]),
                ln_f=nn.LayerNorm(W, dtype=torch.float64),
            )
        )
        self.head = nn.Linear(W, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.transformer.wte.weight

    def forward(self, x):
        x = self.transformer.drop(self.transformer.wte((x[:, 0] * 100).long() % 11))
        for block in self.transformer.h:
            x = block(x)
        return self.head(self.transformer.ln_f(x))


class Wrapped(nn.Module):
    """A model inside a model, its layers in plain containers that cannot be called, in lists of lists."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.towers = nn.ModuleList(nn.ModuleList([linear(), nn.ReLU(), linear()]) for _ in range(2))
        self.inner.more = nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Tanh(), linear())

    def forward(self, x):
        for tower in self.inner.towers:
            for layer in tower:
                x = layer(x)
        return self.inner.more(x)


class Functional(Attributes):
    """`b` is never called: its weight is used by hand."""

    def forward(self, x):
        return self.d(self.c(F.linear(self.a(x) * self.scale, self.b.weight, self.b.bias)))


class Iterated(nn.Module):
    """Stages that are lists of layers, walked through and never called themselves."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(linear(), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


MODELS = {
    "attributes": (Attributes, "a b c d"),
    "called several times": (Twice, "a b c d"),
    "sequential": (lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear()), "0 2 4"),
    "sequential of sequentials": (
        lambda: nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear(), Block())),
        "0 1",
    ),
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(3))), "0 1 2"),
    "language model": (Language, "transformer.wte transformer.h.0 transformer.h.1 transformer.ln_f head"),
    "wrapped": (
        Wrapped,
        "inner.towers.0.0 inner.towers.0.2 inner.towers.1.0 inner.towers.1.2 inner.more.0 inner.more.2",
    ),
    "one layer": (linear, ""),
    "one block": (Block, "up down"),
}


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind][0]() if isinstance(kind, str) else kind()


def sgd(shards):
    return torch.optim.SGD(shards, lr=0.1)


def inputs(rank):
    return torch.linspace(-1, 1, 3 * W, dtype=torch.float64).view(3, W) + rank


@pytest.mark.parametrize("kind", MODELS)
def test_units(kind):
    model, wanted = made(kind), MODELS[kind][1].split()
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in elements(model)] == wanted


def test_units_of_our_model():
    model = GPT(GPTConfig(num_layers=3))
    assert elements(model) == list(model.layers)


def train(kind, units=None):
    """(furthest gradient from one process, peak of gathered bytes in forward 2, the same for one unit)"""
    group, peaks = collectives.world(), []
    for given in (units, lambda model: []):
        model, plain = made(kind), made(kind)
        zero = Zero3(model, group, sgd, given and given(model), prefetch=False)
        for _ in range(2):
            zero.zero_grad()
            with Ledger() as ledger:
                y = model(inputs(group.rank()))
            peaks.append(ledger.peak_by_kind["buffers"])
            y.square().sum().backward()
            zero.finish()
    for rank in range(group.size()):
        plain(inputs(rank)).square().sum().backward()
    apart = max(
        (states.full_grad(zero, ours) - theirs.grad).abs().max().item()
        for ours, theirs in zip(model.parameters(), plain.parameters())
    )
    return apart, peaks[1], peaks[3], ledger.live_by_kind["buffers"]


def both_ways(kind):
    """The default units against the same given by hand."""
    return train(kind), train(kind, lambda model: [model.get_submodule(n) for n in MODELS[kind][1].split()])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equal_to_one_process_at_the_peak_of_units_given(ranks):
    found = launch.run(lambda: {kind: both_ways(kind) for kind in MODELS}, ranks=ranks)
    for results in found:
        for kind, (default, given) in results.items():
            assert default[0] < TOLERANCE and given[0] < TOLERANCE, kind
            assert default[1] == given[1], kind
            assert default[1] < default[2] / 1.3 or not MODELS[kind][1], (kind, default)
            assert default[3] == given[3] == 0


def test_peak_of_attributes_is_the_model_s_own_and_the_largest_child():
    """W² + W of a layer, W of the model itself, padded to the ranks; as one unit it is four layers."""
    _, peak, as_one, _ = launch.run(train, "attributes", ranks=2)[0]
    assert peak == 8 * (W + W * W + W) and as_one == 8 * (W + 4 * (W * W + W))


def refused(kind):
    group, said = collectives.world(), []
    for units in (
        None,
        lambda model: (
            [model.a, model.c] if kind is Functional else list(model.stages[0]) + list(model.stages[1])[:1]
        ),
    ):
        model = made(kind)
        try:
            zero = Zero3(model, group, sgd, units and units(model))
            model(inputs(0)).square().sum().backward()
            zero.finish()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("kind, name", [(Functional, "b.weight"), (Iterated, "stages.0.0.weight")])
def test_a_unit_that_never_ran_forward_is_an_error(kind, name):
    """Nothing reads its parameters; what the message advises works (a ReLU by hand has none: refused)."""
    for first, second in launch.run(refused, kind, ranks=2):
        assert first.startswith(f"{name} is sharded, and read outside its unit") and "\n" not in first
        assert second == "nothing" if kind is Functional else "unit ReLU has no parameters" in second


def test_each_step_is_looked_at_anew():
    def rank():
        model = made("attributes")
        zero = Zero3(model, collectives.world(), sgd)
        model(inputs(0)).square().sum().backward()
        zero.finish()
        with zero.whole():  # where it can be read, and autograd saves where it was
            loss = Functional.forward(model, inputs(0)).square().sum()
        try:
            loss.backward()
        except ValueError as error:
            return str(error)

    assert all("unit of b." in said for said in launch.run(rank, ranks=2))


def test_a_step_without_a_unit_is_no_such_error():
    """Evaluation that leaves a child out, and a call of a child alone."""

    def rank():
        model = made("attributes")
        zero = Zero3(model, collectives.world(), sgd)
        with torch.no_grad():
            alone = model.a(inputs(0))
        model(inputs(0)).square().sum().backward()
        zero.finish()
        return (alone - made("attributes").a(inputs(0))).abs().max().item()

    assert max(launch.run(rank, ranks=2)) < TOLERANCE


class WithItsOwn(nn.Module):
    """The model's own parameter is used last, and so done first in backward."""

    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x @ self.out


def test_a_unit_that_is_done_in_a_pass_is_not_gathered_again_in_it():
    def rank():
        model = WithItsOwn()
        zero = Zero3(model, collectives.world(), None)
        with Traffic() as ledger:
            model(torch.ones(2, 4)).sum().backward()
            zero.finish()
        return ledger.num_calls("all_gather")

    assert dryrun.run(rank, ranks=2) == 2 * 3


def test_what_is_read_whole_of_a_frozen_parameter_is_a_copy():
    def rank():
        model = WithItsOwn()
        model.out.requires_grad_(False)
        zero = Zero1(model, collectives.world(), None)
        states.full_tensor(zero, model.out).zero_()
        states.full_tensors(zero)["out"].zero_()
        return model.out.tolist()

    assert launch.run(rank, ranks=1) == [[1.0] * 4]
