"""Stages and schedules of the reader's own: plain modules, lists of tuples, stages that train nothing."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minitrain import collectives, launch
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.lower import lower
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Action, Pair, Schedule, check
from minitrain.pipeline.schedules.less_memory import bpipe, recomputed
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import zb_h1
from minitrain.systems.pipeline.bpipe_eviction import Balanced
from tests.parallel import TOLERANCE
from tests.pipeline.lists import said_by

WIDTH, ROWS, LENGTH = 6, 7, 3
linear = partial(nn.Linear, dtype=torch.float64)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(9, WIDTH, dtype=torch.float64))

    def forward(self, tokens):
        return self.rows[tokens]


class Digits(nn.Module):
    """A first stage without any parameter."""

    def forward(self, tokens):
        return F.one_hot(tokens % WIDTH, WIDTH).double()


class Wave(nn.Module):
    """A stage without any parameter, with an argument that is not for Runner to give."""

    def forward(self, x, scale=1.5):
        return torch.sin(scale * x)


class Turned(nn.Module):
    """A stage that asks where its tokens stand."""

    def __init__(self):
        super().__init__()
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x, positions):
        return self.out(x) * torch.cos(positions)[:, None]


class Stopped(nn.Module):
    """Trained, and lets no gradient through."""

    def __init__(self):
        super().__init__()
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x.detach())


def block():
    return nn.Sequential(linear(WIDTH, WIDTH), nn.Tanh(), linear(WIDTH, WIDTH))


def loss_fn(y, targets):
    return (y.sum(-1) - targets).square().sum()


MODELS = {
    "plain modules": (Table, block, Turned, block), "no parameters first": (Digits, block, block, block),
    "none in the middle, none last": (Table, Wave, block, Wave),
    "no gradient passes": (Table, block, Stopped, block),
}  # fmt: skip


def model(name, frozen=()):
    with torch.random.fork_rng():
        torch.manual_seed(8)
        stages = [make() for make in MODELS[name]]
    for number in frozen:
        stages[number].requires_grad_(False)
    return stages


def batch():
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 5 % 9
    return Batch(tokens, tokens.double() / 3, torch.tensor(ROWS * LENGTH))


def one_process(name, frozen=()):
    stages, (tokens, targets, count, *_) = model(name, frozen), batch()
    x = tokens
    for stage in stages:
        x = stage(x, torch.arange(LENGTH)) if isinstance(stage, Turned) else stage(x)
    loss = loss_fn(x, targets) / count
    if loss.requires_grad:
        loss.backward()
    return loss.item(), [[param.grad for param in stage.parameters()] for stage in stages]


def on_ranks(cases):
    """[(loss, gradients of this rank's stage)] for (name, frozen, schedule), one after the other."""
    group, found = collectives.world(), []
    for name, frozen, schedule in cases:
        stage = model(name, frozen)[group.rank()]
        run = (Balanced if schedule.evicts else Runner)(
            {group.rank(): stage}, schedule, group, loss_fn, NoReducer(), width=WIDTH, dtype=torch.float64
        )
        found.append((run(batch()).item(), [param.grad for param in stage.parameters()]))
    return found


def far(cases):
    """How far each case is from one process, over all ranks."""
    for case, ranks in zip(cases, zip(*launch.run(on_ranks, cases, ranks=4))):
        loss, grads = one_process(*case[:2])
        differences = [abs(sum(part for part, _ in ranks) - loss)]
        for number, ((_, found), expected) in enumerate(zip(ranks, grads)):
            assert [grad is None for grad in found] == [number in case[1]] * len(expected), case
            both = [pair for pair in zip(found, expected) if pair[0] is not None]
            differences += [(a - (0 if b is None else b)).abs().max().item() for a, b in both]
        yield case, max(differences)


SCHEDULES = one_f_one_b(4, 3), zb_h1(4, 3), recomputed(one_f_one_b(4, 3)), bpipe(4, 6)


def test_plain_modules_and_stages_without_parameters():
    for case, difference in far([(name, (), schedule) for name in MODELS for schedule in SCHEDULES]):
        assert difference < TOLERANCE, case


def test_frozen_stages():
    """At the start, in the middle, at the end, all; whole and split backwards; None here, right elsewhere."""
    frozen = (0,), (2,), (3,), (0, 1), (1, 2, 3), (0, 1, 2, 3)
    for case, difference in far([("plain modules", some, s) for some in frozen for s in SCHEDULES]):
        assert difference < TOLERANCE, case


def test_a_list_of_plain_tuples_is_a_schedule():
    first = [("F", 0, 0), ("F", 0, 1), (("F", 0, 2), ("B", 0, 0)), ("B", 0, 1), ["B", 0, 2]]
    second = [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("F", 1, 2), ("B", 1, 1), ("B", 1, 2)]
    others = [[(kind, stage, i) for i in range(3) for kind in "FB"] for stage in (2, 3)]
    mine = check(Schedule("mine", [first, second, *others], 4, 3))
    assert mine.ranks[0][2:4] == (Pair(Action("F", 0, 2), Action("B", 0, 0)), Action("B", 0, 1))
    assert lower(mine) and len(set(mine.ranks)) == 4 and str(mine.ranks[1][0]) == "F1.0"
    ((_, difference),) = far([("plain modules", (), mine)])
    assert difference < TOLERANCE
    for wrong in [("F", 0), "F0.1", ("F", "0", 1), (0, "F", 1), None, (("F", 0, 1),), (("F", 0, 1), "B")]:
        said = said_by(lambda: Schedule("mine", ((("F", 0, 0), wrong),), 1, 1))
        assert "mine: entry 1 of rank 0 is " in said and "an entry is an Action" in said


def test_the_dtype_without_parameters():
    def made(**settings):
        world = collectives.world()
        return Runner({0: Digits()}, one_f_one_b(1, 1), world, loss_fn, NoReducer(), width=WIDTH, **settings)

    dtypes = launch.run(lambda: [made().dtype, made(dtype=torch.float64).dtype], ranks=1)
    assert dtypes == [[torch.float32, torch.float64]]
