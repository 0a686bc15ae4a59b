"""Pipelines that are never emptied: equal to one process with the same old weights, as many versions as the
formula, no bubble in between.
"""

import weakref
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest
import torch

from minitrain import collectives, launch
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.training.step import Batch
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import B, F, I, R, Schedule, W
from minitrain.pipeline.schedules.one_direction import gpipe, one_f_one_b
from minitrain.systems.pipeline.asynchronous import (
    AsynchronousRunner,
    Policy,
    double_buffered,
    per_microbatch,
    sgd,
)
from minitrain.systems.plan.dynapipe import delayed, period
from tests.parallel import TOLERANCE, check_refusals, small

CONFIG = small(num_layers=4, tied=False)
FROZEN = "layers.1.norm1.weight"
LR = 0.05


def data(m: int) -> Batch:
    tokens, targets = random_tokens(0, 0, 1, m, 8, CONFIG.vocab_size, seed=5)
    return Batch(tokens, targets, torch.tensor(8))  # the tokens of one microbatch


def plain_step(params, grads):
    return [param - LR * grad for param, grad in zip(params, grads)]


def with_momentum() -> Callable:
    velocity = []

    def update(params, grads):
        velocity[:] = [0.5 * old + grad for old, grad in zip(velocity or [0] * len(grads), grads)]
        return [param - LR * step for param, step in zip(params, velocity)]

    return update


# ---- one process, plainly --------------------------------------------------------------------------------


def serial(
    p: int, m: int, k: int, version: Callable[[int, int], int], make_update: Callable = lambda: plain_step
) -> tuple[float, dict]:
    """Batch t of k microbatches: stage s's gradient at `version(s, t)`, a step of the newest weights."""
    model, batch = GPT(CONFIG, seed=3, dtype=torch.float64), data(m)
    model.get_parameter(FROZEN).requires_grad_(False)
    start = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    cuts = even(CONFIG.num_layers, p)
    names = [[name for name in start if int(name.split(".")[1]) in cut] for cut in cuts]
    history, total = [[{name: start[name] for name in own}] for own in names], 0.0
    updates = [make_update() for _ in range(p)]
    for t in range(m // k):
        used = [history[s][version(s, t)] for s in range(p)]
        weights = {name: x.clone().requires_grad_() for stage in used for name, x in stage.items()}
        rows = slice(t * k, (t + 1) * k)
        logits = torch.func.functional_call(model, weights, (batch.tokens[rows],))
        loss = cross_entropy_sum(logits, batch.targets[rows]) / batch.num_valid
        grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        total += loss.item()
        for s, own in enumerate(names):
            newest = [history[s][-1][name] for name in own]
            history[s].append(dict(zip(own, updates[s](newest, [grads[name] for name in own]))))
    return total, {name: tensor for stage in history for name, tensor in stage[-1].items()}


# ---- on ranks --------------------------------------------------------------------------------------------


class Watched(AsynchronousRunner):
    """Counts the versions of a parameter that really live, whoever holds them."""

    def __call__(self, batch):
        self.references, self.alive, self.updating = {}, 0, 0
        return super().__call__(batch)

    def forget(self, stage, unit):
        super().forget(stage, unit)
        self.alive = max(self.alive, self.living(stage))

    def step(self, stage, grads):
        super().step(stage, grads)
        self.updating = max(self.updating, self.living(stage))

    def living(self, stage):
        for version, weights in self.versions[stage].items():
            name = next(name for name, weight in weights.items() if weight.requires_grad)
            self.references.setdefault((stage, version), weakref.ref(weights[name]))
        return sum(reference() is not None for reference in self.references.values())


class Unstashed(AsynchronousRunner):
    """The control: one version, written over, so that a backward meets other weights than its forward."""

    def step(self, stage, grads):
        weights = self.versions[stage][0]
        stepped = self.update([weights[name].detach() for name in grads], list(grads.values()))
        for name, new in zip(grads, stepped):
            weights[name].data.copy_(new)  # behind the back of autograd, which would refuse


def trained(p: int, m: int, policy: Policy, update=None, kind: type = Watched) -> tuple:
    group = collectives.world()
    own = {group.rank(): even(CONFIG.num_layers, p)[group.rank()]}
    stages = Stages(CONFIG, own, seed=3, dtype=torch.float64)
    if FROZEN in (params := dict(stages.items()[0][1].named_parameters())):
        params[FROZEN].requires_grad_(False)
    given = dict(stages.items()), one_f_one_b(p, m), group, cross_entropy_sum, policy, update or sgd(LR)
    run = kind(*given, width=CONFIG.d_model)
    loss, seen = run(data(m)).item(), vars(run)
    params = {name: param.detach() for name, param in params.items() if name != FROZEN}
    return loss, params, seen.get("updating"), run.most[group.rank()], seen.get("alive")


def difference(outcomes: list[tuple], reference: tuple[float, dict]) -> float:
    params = {name: tensor for outcome in outcomes for name, tensor in outcome[1].items()}
    assert params.keys() == reference[1].keys()
    return max(
        [abs(sum(outcome[0] for outcome in outcomes) - reference[0])]
        + [(params[name] - reference[1][name]).abs().max().item() for name in params]
    )


def oldest(p: int) -> Callable[[int, int], int]:
    return lambda s, t: max(0, t - (p - 1 - s))


@cache
def ran(p: int) -> dict[str, list]:
    def rank():
        return {
            "pipedream": trained(p, 12, per_microbatch()),
            "momentum": trained(p, 8, per_microbatch(), with_momentum()),
            "2bw": trained(p, 16, double_buffered(4)),
            "unstashed": trained(p, 12, Policy(1, lambda unit, newest: 0), kind=Unstashed),
        }

    outcomes = launch.run(rank, ranks=p)
    return {name: [outcome[name] for outcome in outcomes] for name in outcomes[0]}


@pytest.mark.parametrize("p", [2, 4])
def test_pipedream(p):
    """w_s(t+1) = w_s(t) - lr · gradient at w_0(t-p+1), ..; p-s versions; 2BW: at w(t-1), two."""
    found, reference = ran(p), serial(p, 12, 1, oldest(p))
    assert difference(found["pipedream"], reference) < TOLERANCE
    assert difference(found["unstashed"], reference) > 1e-6
    assert difference(found["momentum"], serial(p, 8, 1, oldest(p), with_momentum)) < TOLERANCE
    assert [(most, alive) for *_, most, alive in found["pipedream"]] == [(p - s, p - s) for s in range(p)]
    assert [updating for *_, updating, _, _ in found["pipedream"]] == [max(2, p - s) for s in range(p)]
    assert difference(found["2bw"], serial(p, 16, 4, lambda s, t: max(0, t - 1))) < TOLERANCE
    assert difference(found["2bw"], serial(p, 16, 4, lambda s, t: t)) > 1e-6  # not what a flush would give
    assert [(most, alive) for *_, most, alive in found["2bw"]] == [(2, 2)] * p
    assert difference(found["pipedream"], serial(p, 12, 1, lambda s, t: t)) > 1e-6


def test_refusals():
    def runner(schedule, policy):
        stages = dict(Stages(CONFIG, {0: range(6)}, seed=3).items())
        given = stages, schedule, collectives.world(), cross_entropy_sum, policy, sgd(LR)
        return AsynchronousRunner(*given, width=CONFIG.d_model)

    one_by_one, in_twos = per_microbatch(), double_buffered(2)
    alone = lambda *entries, m=1: Schedule("", (entries,), 1, m)
    backwards_turned = alone(F(0, 0), F(0, 1), B(0, 1), B(0, 0), m=2)
    check_refusals(
        {
            "go with whole backwards": lambda: runner(alone(F(0, 0), I(0, 0), W(0, 0)), one_by_one),
            "go with whole backwards; use F and B": lambda: runner(
                alone(F(0, 0), R(0, 0), B(0, 0)), one_by_one
            ),
            "not a multiple of the 2 of an update": lambda: runner(one_f_one_b(1, 3), in_twos),
            "k=0: use a whole number from 1": lambda: runner(one_f_one_b(1, 3), double_buffered(0)),
            "two versions of the weights need at least 4": lambda: runner(one_f_one_b(4, 8), in_twos),
            "updates need backwards in order": lambda: runner(backwards_turned, one_by_one),
            "F0.4 comes before the update whose weights": lambda: runner(gpipe(1, 6), in_twos),
        },
        ranks=1,
    )


# ---- TriRace ---------------------------------------------------------------------------------------------


def test_trirace():
    """One-way messages shorten the period; updates are at most `bound` steps late, and hide the sum."""
    for p in (3, 4, 8):
        for forward, backward, c in [(4, 8, 1), (4, 8, 3), (5, 5, 2), (Fraction(1, 3), 1, Fraction(1, 7))]:
            paired, one_way = (period(p, forward, backward, c, paired=paired) for paired in (True, False))
            assert paired == forward + backward + 2 * c
            assert one_way == forward + backward + 2 * c * Fraction(p - 1, p) < paired
        assert period(p, 4, 8, 2, paired=False, ahead=2) == 12
        assert period(p, 4, 8, 0, paired=True, ahead=2) == p * 12
    assert period(2, 4, 8, 1, paired=True) == period(2, 4, 8, 1, paired=False) == 13
    assert period(1, 4, 8, 1, paired=True) == period(1, 4, 8, 1, paired=False) == 12
    for compute, reduce in [(5, 3), (3, 5), (4, 4)]:
        assert delayed(64, compute, reduce, 0) == compute + reduce
        for bound in (1, 2, 5):
            assert delayed(64, compute, reduce, bound) == max(compute, reduce)
