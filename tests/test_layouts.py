"""Random layouts, a few of them each time; `python -m tests.layouts --draws 500 --seed 7` runs more."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from minitrain import launch
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.plan.strategy import Strategy
from minitrain.ranks.sharding import place
from tests.layouts import (
    FEATURES,
    Draw,
    distance,
    draw,
    features,
    on_rank,
    one_process,
    pretended_verdict,
    verdict,
)
from tests.pretend import needs_pretended

SEED, DRAWS = 1234, 12
LARGE = 1, 4, 5, 6, 7, 8, 9, 10  # the longest of the draws; what is in them has tests of its own
NUMBERS = [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in range(DRAWS)]
DRY = [pytest.param(n, marks=[pytest.mark.slow] * (n in (2, 4, 5, 7, 9))) for n in range(DRAWS)]
CONFIG = GPTConfig(
    vocab_size=29, d_model=24, num_layers=2, num_heads=6, num_kv_heads=2, max_positions=16, tied=True,
    dropout=0.1,
)  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_layout_equals_one_process_and_its_dry_run(number):
    case = draw(number, SEED)
    assert not verdict(case), f"python -m tests.layouts --seed {SEED} --only {number}"


@needs_pretended
@pytest.mark.parametrize("number", DRY)
def test_a_drawn_layout_keeps_to_its_device(number):
    case = draw(number, SEED)
    wrong = pretended_verdict(case, number % case.strategy.ranks)
    assert not wrong, f"python -m tests.layouts --pretend --seed {SEED} --only {number}"


def test_the_draws_meet_every_feature():
    """The first 500 of a seed have each feature, and nearly every pair that can be."""
    found, pairs = Counter(), set()
    for number in range(500):
        names = features(draw(number, 7))
        found.update(names)
        pairs |= {frozenset((a, b)) for a in names for b in names if a < b}
    assert all(found[name] >= 8 for name in FEATURES), found
    others = "tp|tp, sequence|tp, overlap|cp, rings|cp, heads|pp|pp, I and W|recompute|ep|tied|frozen|dropout"
    for one in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid"):
        for other in (*others.split("|"), "clipping", "offload, tied ends"):
            assert frozenset((one, other)) in pairs, (one, other)


def case(**values) -> Draw:
    strategy = Strategy(**(dict(precision="float64", microbatches=2) | values))
    return Draw(CONFIG, strategy, (8, 7), 16, 0.3, (), "adamw", "ragged")


BROKEN = {
    "sums over data ranks": case(dp=2),
    "sums over tp of what saw slices": case(tp=2, sequence_parallel=True), "sums over stages": case(pp=2),
    "places of dropout": case(dp=2),
}  # fmt: skip
EXPERTS = ExpertsConfig(4, 2, balance_alpha=0.5, capacity_factor=1.0)
BROKEN |= {
    name: replace(case(**layout), config=replace(CONFIG, dropout=0.0, experts=EXPERTS))
    for name, layout in {
        "rows of experts come home in order": dict(dp=2, ep=2),
        "a weight is applied once": dict(dp=2, ep=2),
        "losses of routers are sums over tokens": dict(dp=2, ep=2),
        "experts are summed over what is left beside ep": dict(dp=2, ep=2),
        "routers see slices over tp": dict(tp=2),
        "whole rows decide who is dropped": dict(cp=2, ep=2),
    }.items()
}


def summed_over_ep(groups):
    groups.summed_over = (groups.group,)
    return groups


@pytest.mark.parametrize("what", BROKEN)
def test_the_draws_would_notice(what):
    """Controls: what the draws prove is wrong without the one line that does it."""

    def rank(case):
        from minitrain.attention import placed
        from minitrain.compose import parallelize as module
        from minitrain.model import mixture
        from minitrain.moe import dispatch

        if what == "sums over data ranks":
            module.place_gradients = lambda build: [
                place(param, summed_over=(build.mesh.group("pp"),)) for param in build.module.parameters()
            ]
        elif what == "sums over tp of what saw slices":
            module.sequence_sharded_params = lambda layers: set()
        elif what == "sums over stages":
            module.share_stages = lambda *_: None
        elif what == "rows of experts come home in order":
            dispatch.inverse = lambda order: torch.arange(len(order))
        elif what == "a weight is applied once":
            back = dispatch.Dispatch.back
            dispatch.Dispatch.back = lambda self, y, weights: back(self, y, weights.square())
        elif what == "losses of routers are sums over tokens":
            collect, ranks = mixture.RouterLosses.collect, case.strategy.ranks
            mixture.RouterLosses.collect = lambda self, stage=0: collect(self, stage) / ranks
        elif what == "experts are summed over what is left beside ep":
            groups = module.ExpertGroups
            module.ExpertGroups = lambda strategy, mesh: summed_over_ep(groups(strategy, mesh))
        elif what == "routers see slices over tp":
            inside = module.ExpertGroups.place
            module.ExpertGroups.place = lambda *arguments: inside(*arguments) and set()
        elif what == "whole rows decide who is dropped":
            mixture.MixtureOfExperts.whole_rows = lambda self, chosen, positions: (chosen, None)
        else:
            placed.Places.at = lambda self, step, first_row, documents: None
        return on_rank(case)

    reference = one_process(BROKEN[what])
    assert max(distance(outcome, reference) for outcome, _ in launch.run(rank, BROKEN[what], ranks=2)) > 1e-6
    if what == "sums over data ranks":
        assert not verdict(replace(BROKEN[what], strategy=replace(BROKEN[what].strategy, zero=1)))
