"""A chain run by any plan: gradients of plain autograd, runs what the plan says, holds it to the byte."""

import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from minitrain import launch
from minitrain.attention.placed import Places, drop_by_place
from minitrain.compose.parallelize import parallelize
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory import chain as chain_module
from minitrain.systems.memory.chain import chain
from minitrain.systems.memory.chain_plan import LayerBytes, check, every, forwards, peak_bytes, sqrt, walk
from minitrain.systems.plan.rematerialize import revolve
from tests.parallel import Problem, rows_of_problem, small
from tests.systems.memory.plans import parse, recomputed, show

WIDTHS = [8, 16, 4, 32, 8, 8, 24, 12]
N, ROWS = 7, 64


class Sine(nn.Module):
    """y = sin(x W): keeps x for W's gradient and x W for the sine's."""

    def __init__(self, before: int, behind: int):
        super().__init__()
        self.w = nn.Parameter(torch.randn(before, behind, dtype=torch.float64) / before**0.5)

    def forward(self, x):
        return (x @ self.w).sin()


class Noisy(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.linear, self.norm, self.runs = nn.Linear(width, width), nn.LayerNorm(width), 0

    def forward(self, x, scale):
        self.runs += 1
        return x + torch.dropout(torch.relu(self.linear(self.norm(x)) * scale), 0.3, True)


def plans(n: int) -> list:
    found = [every(n, size) for size in range(1, n + 1)] + [sqrt(n)]
    return found + [revolve(n, held) for held in (1, 2, 3, n)]


def sine_bytes(before: int, behind: int) -> LayerBytes:
    """By hand: F and T make x W and its sine. In backward the cosine of x W lies beside its product with dy,
    then that product beside dW and dx; dW stays."""
    a, b, w = 8 * ROWS * before, 8 * ROWS * behind, 8 * before * behind
    return LayerBytes(b, 2 * b, b, 2 * b, a, max(2 * b, b + a + w), w)


def noisy_layers():
    torch.manual_seed(1)
    return nn.ModuleList(Noisy() for _ in range(N)).double()


def gradients(layers, plan, x, scale=0.7, seed=5) -> list:
    """Output, gradient of x and of each parameter; then the random state after the step."""
    torch.manual_seed(seed)
    for layer in layers:
        layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    if plan is None:
        y = x
        for layer in layers:
            y = layer(y, scale)
    else:
        y = chain(layers, plan)(x, scale)
    drawn = torch.get_rng_state()
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters()), drawn]


def same(a, b) -> bool:
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b)
    )


X = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("plan", plans(N), ids=show)
def test_gradients_are_bit_equal_and_forwards_as_planned(plan):
    """With dropout: what is run again draws what it drew; the state after the step is that of a plain step."""
    layers = noisy_layers()
    plain = gradients(layers, None, X.requires_grad_())
    for layer in layers:
        layer.runs = 0
    assert same(gradients(layers, plan, X.requires_grad_()), plain)
    assert {i: layer.runs for i, layer in enumerate(layers)} == dict(forwards(plan))
    assert recomputed(plan, N) == sum(layer.runs for layer in layers) - N


def test_without_the_random_state_gradients_differ(monkeypatch):
    layers = noisy_layers()
    plain = gradients(layers, None, X)
    monkeypatch.setattr(chain_module, "drawing_from", lambda state, device: nullcontext())
    assert not same(gradients(layers, every(N, 1), X), plain)
    assert same(gradients(layers, every(N, N), X), plain)  # nothing runs twice


def test_frozen_layers_and_inputs_without_gradients():
    layers = noisy_layers()
    for frozen in ([0], [0, 1, 2], [3], [6], [0, 6]):
        for trainable_input in (False, True):
            for i, layer in enumerate(layers):
                layer.requires_grad_(i not in frozen)
            layers[4].norm.requires_grad_(False)
            x = X.detach().requires_grad_(trainable_input)
            plain = gradients(layers, None, x)
            for plan in (every(N, 2), revolve(N, 2)):
                assert same(gradients(layers, plan, x), plain)


def test_nothing_to_train_builds_no_graph():
    layers = noisy_layers().requires_grad_(False)
    assert not chain(layers, every(N, 2))(X.detach(), 1.0).requires_grad
    with torch.no_grad():
        assert not chain(noisy_layers(), every(N, 2))(X, 1.0).requires_grad


def test_one_layer_used_twice_gets_both_gradients():
    layers = noisy_layers()
    tied = [layers[0], layers[1], layers[0], layers[2]]
    plain = gradients(tied, None, X)
    for plan in plans(4):
        assert same(gradients(tied, plan, X), plain)


def test_dropout_by_place_is_that_of_the_first_pass():
    """In a pipeline another microbatch has set step and rows when backward comes: `replay` brings them back."""
    config, places = small(num_layers=4, dropout=0.3), Places(seed=1)
    model = GPT(config, seed=1, dtype=torch.float64)
    drop_by_place(model.layers, places)
    tokens, positions = torch.arange(16).view(2, 8), torch.arange(8)

    def step(plan, **how):
        model.zero_grad()
        places.at(3, 2)
        logits = chain(model.layers, plan, **how)(tokens, positions) if plan else model(tokens, positions)
        places.at(4, 6)
        cross_entropy_sum(logits, tokens).backward()
        assert (places.step, places.first_row) == (4, 6)
        return [parameter.grad for parameter in model.parameters()]

    plain = step(None)
    for plan in (every(6, 2), revolve(6, 2)):
        assert same(step(plan, replay=[places.again]), plain)
        assert not same(step(plan), plain)


def test_a_second_backward_is_refused():
    y = chain(noisy_layers(), every(N, 2))(X, 1.0).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def allocated(layers, plan) -> int:
    """The ledger's peak, without the parameters, x and dy."""
    for layer in layers:
        layer.zero_grad()
    x = torch.randn(ROWS, WIDTHS[0], dtype=torch.float64, requires_grad=True)
    dy = torch.randn(ROWS, WIDTHS[-1], dtype=torch.float64)
    with Ledger() as ledger:
        fixed = x.nbytes + dy.nbytes + sum(layer.w.sum().element_size() * layer.w.numel() for layer in layers)
        y = chain(layers, plan)(x)
        y.backward(dy)
    return ledger.peak_bytes - fixed


def sines() -> nn.ModuleList:
    torch.manual_seed(2)
    return nn.ModuleList(Sine(a, b) for a, b in zip(WIDTHS, WIDTHS[1:]))


SPEC = [sine_bytes(a, b) for a, b in zip(WIDTHS, WIDTHS[1:])]


@pytest.mark.parametrize("plan", plans(N), ids=show)
def test_the_peak_is_as_planned_to_the_byte(plan):
    assert allocated(sines(), plan) == peak_bytes(plan, SPEC)


def test_forwards_are_as_many_flops_as_planned():
    """Layers of other sizes each; the chain's input has no gradient."""
    costs = [2 * ROWS * a * b for a, b in zip(WIDTHS, WIDTHS[1:])]
    layers, spent = sines(), set()
    for plan in plans(N):
        with Ledger() as ledger:
            chain(layers, plan)(torch.randn(ROWS, 8, dtype=torch.float64)).sum().backward()
        forward = sum(costs[a.layer] for a in plan if a.kind in "FT")
        assert ledger.flops == forward + 2 * sum(costs) - costs[0]
        spent.add(forward)
    assert len(spent) > 3


def test_equal_layers_hold_sqrt_n():
    """16 layers whose graph is as large as their input: held are 4 inputs and 4 graphs, not 16."""
    spec = [LayerBytes(1, 1, 1, 2, 1, 1)] * 16
    held = {size: peak_bytes(every(16, size), spec) for size in range(1, 17)}
    assert [sqrt(n) == every(n, size) for n, size in ((1, 1), (2, 2), (5, 3), (9, 3))] == [True] * 4
    assert sqrt(16) == every(16, 4) and min(held.values()) == held[4]
    assert held[16] == 32 + 1 and held[4] <= 4 * math.isqrt(16) < held[1] + 2
    most_held = [max(len(held) for _, held in walk(plan)) for plan in (every(16, 16), revolve(16, 3))]
    assert most_held[0] == 16 and most_held[1] <= 5


def test_a_gpt_and_a_dry_run():
    """Tokens in, logits out: losses and gradients of the model itself; fake tensors give the same account."""
    config = small(num_layers=4, dropout=0.1, tied=True)
    model = GPT(config, seed=1, dtype=torch.float64)
    tokens = torch.randint(0, config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8)

    def step(plan):
        torch.manual_seed(3)
        model.zero_grad()
        logits = chain(model.layers, plan)(tokens, positions) if plan else model(tokens, positions)
        cross_entropy_sum(logits, tokens).backward()
        return [logits.detach()] + [p.grad for p in model.parameters()]

    plain = step(None)
    for plan in (every(6, 1), every(6, 2), revolve(6, 2), revolve(6, 3)):
        assert same(step(plan), plain)

    def account():
        model = GPT(config, seed=1, dtype=torch.float64)
        with Ledger() as ledger:
            logits = chain(model.layers, revolve(6, 2))(torch.zeros(2, 8, dtype=torch.int64), torch.arange(8))
            logits.sum().backward()
        return ledger.peak_bytes, ledger.flops, len(ledger.events)

    assert account() == dryrun.run(account)


@pytest.mark.parametrize(
    "plan, said",
    [
        ("T1 B1 T0 B0", "action 0, T1, needs x_1"),
        ("F0 T1 B1", "it ends before B0"),
        ("F0 T1 T1 B1 T0 B0", "while the graph of layer 1"),
        ("F0 F1 B1", "makes the output without a graph"),
        ("T0 T1 B0 B1", "B0, comes before B1"),
        ("F0 T1 B0", "B0, needs the graph of layer 0"),
        ("F0 T1 B1 D1 T0 B0", "D1, needs x_1"),
        ("T0 D0 T1 B1 B0", "while the graph of layer 0"),
        ("F0 T1 B1 T0 B0 T0", "T0, needs x_0"),
        ("X0", "X0, is none of"),
        ("F0 T2 B2", "layers 0 to 1"),
        ("F0 T1 B1 T0 F0 T1 B0", "action 5, T1, needs x_1"),
    ],
)
def test_plans_that_cannot_be_carried_out(plan, said):
    for use in (lambda: check(parse(plan), 2), lambda: chain([nn.Tanh(), nn.Tanh()], parse(plan))):
        with pytest.raises(ValueError, match=said) as error:
            use()
        assert "\n" not in str(error.value)


def test_the_result_is_the_callers_alone():
    x = torch.randn(3, requires_grad=True)
    y = chain([nn.Linear(3, 3), nn.Linear(3, 3)], every(2, 1))(x)
    storage, loss = weakref.ref(y.untyped_storage()), y.sum()
    del y
    assert storage() is None
    loss.backward()
    assert x.grad is not None


def trained(layout: dict, plan) -> tuple:
    """Two steps on a rank, the layers of the model through the plan."""
    tied = layout.pop("tied", False)  # a plan brings its two gradients one by one
    problem = Problem(config=small(num_layers=4, tied=tied), batch_sizes=(8, 7))
    run = parallelize(
        problem.config, Strategy(precision="float64", **layout), lambda params: AdamW(params, lr=1e-2), seed=3
    )
    if plan:
        run.model.run_layers = lambda layers, x, positions: chain(layers, plan)(x, positions)
    batches = [run.batch(rows_of_problem(problem, step), step) for step in range(2)]
    losses = [run.total(run.step(batch, 0.5).loss).item() for batch in batches]
    return losses, run.state_dict()["parameters"]


def differing(layout: dict) -> list[str]:
    losses, params = trained(dict(layout), None)
    wrong = []
    for plan in (every(6, 2), revolve(6, 2)):
        found, theirs = trained(dict(layout), plan)
        if found != losses or not all(torch.equal(theirs[name], params[name]) for name in params):
            wrong.append(show(plan))
    return wrong


@pytest.mark.parametrize("layout", [dict(tp=2), dict(dp=2, zero=3), dict(cp=2)], ids=str)
def test_on_ranks_a_plan_changes_no_bit(layout):
    assert launch.run(differing, layout, ranks=2) == [[], []]


@pytest.mark.parametrize("layout", [dict(cp=2), dict(dp=2, zero=1)], ids=str)
def test_a_table_of_two_layers_is_not_sent_before_it_is_whole(layout):
    said = r"gradient \[.*\] grew after its bucket was sent; give layers that share it one backward"
    with pytest.raises(launch.RankError, match=said):
        launch.run(trained, layout | dict(tied=True), every(6, 2), ranks=2)
