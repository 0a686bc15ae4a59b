"""Modules as readers have them: a branch that some microbatches skip, complex and integer parameters, some
without elements, some compiled; moving averages and torch's own checkpointing around them.
"""

import pytest
import torch
from torch import nn

from minitrain import launch
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.data.batches import Text
from minitrain.model.gpt import cross_entropy_sum
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.step import accumulate
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch.report import RankError
from tests.compose.test_brought_along import B, T, V, rows_with
from tests.parallel import TOLERANCE


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.branch, self.calls = nn.Linear(8, 8), 0

    def inside(self, x):
        return torch.tanh(self.branch(x))

    def forward(self, tokens):
        self.calls += 1
        return self.head(self.inside(self.table(tokens)))


class Skips(Net):
    """Its branch is used by every other microbatch."""

    def inside(self, x):
        return super().inside(x) if self.calls % 2 else x


class Never(Net):
    def inside(self, x):
        return x


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def inside(self, x):
        return super().inside((x * self.turn).abs())


class Frozen8(Net):
    """A table of 8-bit codes that nobody trains."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.arange(64, dtype=torch.int8).view(8, 8), requires_grad=False)

    def inside(self, x):
        return super().inside(x @ self.codes.double() / 64)


class Nothing(Net):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def inside(self, x):
        return super().inside(x) + self.none.sum()


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def of_one_process(kind, clip, microbatches):
    """Plain PyTorch: (losses, parameters after them)."""
    model, losses = made(kind), []
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        tokens, targets = rows_with().draw(step, 0, 1)
        total = 0.0
        for rank_tokens, rank_targets in zip(tokens.chunk(2), targets.chunk(2)):  # as two ranks cut them
            for some, wanted in zip(rank_tokens.chunk(microbatches), rank_targets.chunk(microbatches)):
                loss = cross_entropy_sum(model(some), wanted) / (B * T)
                loss.backward()
                total += loss.item()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def on_two_ranks(kind, strategy, clip):
    def rank():
        run = parallelize(made(kind), strategy, sgd)
        losses = [run.total(run.step(run.batch(rows_with(), step), clip).loss).item() for step in range(2)]
        return losses, run.state_dict()["parameters"]

    return launch.run(rank, ranks=2)[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Net, Complex, Frozen8, Nothing])
def test_any_parameters(kind, zero):
    losses, params = of_one_process(kind, 0.1, 1)
    found, state = on_two_ranks(kind, Strategy(dp=2, zero=zero), 0.1)
    assert max(abs(a - b) for a, b in zip(losses, found)) < TOLERANCE and state.keys() == params.keys()
    assert all((state[name] - x).abs().max() < TOLERANCE for name, x in params.items() if x.numel())


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_branch_that_some_microbatches_skip(zero):
    losses, params = of_one_process(Skips, None, 2)
    found, state = on_two_ranks(Skips, Strategy(dp=2, zero=zero, microbatches=2), None)
    assert max(abs(a - b) for a, b in zip(losses, found)) < TOLERANCE
    assert all((state[name] - x).abs().max() < TOLERANCE for name, x in params.items())


@pytest.mark.parametrize("kind, zero", [(Skips, 2), (Never, 0), (Never, 1), (Never, 2), (Never, 3)])
def test_what_has_no_gradient_is_named(kind, zero):
    with pytest.raises(RankError, match=r"no gradient for .*branch\.(bias|weight)"):
        on_two_ranks(kind, Strategy(dp=2, zero=zero, microbatches=2), None)


def test_a_checkpoint_has_place_for_what_has_no_elements(tmp_path):
    def rank():
        text = Text(bytes(1 + i * i % (V - 1) for i in range(400)), "numbers")
        hyper, said = Hyperparameters(batch_size=2, length=T, steps=1), []
        for _ in range(2):
            run = parallelize(made(Nothing), Strategy(dp=2, zero=3), sgd)
            trainer = Trainer(run, text, hyper, store=Store(tmp_path), save_every=1)
            said.append(trainer.resume())
            list(trainer.run())
        return said

    assert launch.run(rank, ranks=2)[0] == ["", "resumed at step 1"]


def test_what_cannot_be_is_one_line():
    def compiled():
        model = made(Net)
        model.branch = torch.compile(model.branch, backend="eager")
        parallelize(model, Strategy(dp=2, zero=3), sgd)

    def averaged():
        torch.optim.swa_utils.AveragedModel(parallelize(made(Net), Strategy(dp=2, zero=3), sgd).model)

    def sampled():
        parallelize(made(Net), Strategy(dp=2), sgd).sample(torch.zeros(1, 1, dtype=torch.int64), 1)

    def saved():
        parallelize(made(Net), Strategy(dp=2, zero=3), sgd).model.state_dict()

    said = {
        compiled: "branch was compiled, which swallows the hooks",
        averaged: "table.weight is sharded, and read outside its unit",
        sampled: "sample writes text of a GPT, and this is a Net",
        saved: "weight is sharded, and read outside its unit",
    }
    for rank, line in said.items():
        with pytest.raises(RankError, match=line):
            launch.run(rank, ranks=2)


def test_gradients_are_sums_before_they_are_used():
    """zero_grad, backward, step: without finish no rank has the others' terms."""

    def rank(zero):
        run = parallelize(made(Net), Strategy(dp=2, zero=zero), sgd)
        batch = run.batch(rows_with(), 0)
        run.sync.zero_grad()
        accumulate(run.model, cross_entropy_sum, 1, run.sync)(batch)
        run.sync.step()

    for zero in range(4):
        with pytest.raises(RankError, match=r"step\(\) before finish\(\): gradients are not sums"):
            launch.run(rank, zero, ranks=2)


def test_what_is_thawed_later_is_refused():
    def rank(zero):
        model = made(Net)
        model.branch.requires_grad_(False)
        run = parallelize(model, Strategy(dp=2, zero=zero), sgd)
        run.step(run.batch(rows_with(), 0))
        run.model.branch.requires_grad_(True)
        run.step(run.batch(rows_with(), 1))

    for zero in range(4):
        with pytest.raises(RankError, match="branch.weight.requires_grad has changed since this"):
            launch.run(rank, zero, ranks=2)
