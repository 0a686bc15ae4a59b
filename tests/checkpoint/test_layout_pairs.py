"""Saved by one layout, loaded by another: of nine, and of four with experts, each by itself and by one more.

One launch trains each layout for a step, saves, and goes on for two. A second launch builds each layout
once, loads what the layouts APART places before it have saved, one after the other, and trains on: two steps
in the same layout, one in another.
"""

from pathlib import Path

import pytest

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.data.batches import MASKED, Rows, random_tokens, rows_of
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from tests import saving

TOLERANCE, RANKS, BEFORE, AFTER = 1e-12, 4, 1, 2
APART = (0, 5)  # range(9) for all pairs, which takes longer
CONFIG = GPTConfig(
    vocab_size=29, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=8, tied=True,
    dropout=0.1,
)  # fmt: skip
EXPERTS = GPTConfig(
    vocab_size=29, d_model=16, num_layers=2, num_heads=4, max_positions=8, tied=False,
    experts=ExpertsConfig(num_experts=4, top_k=2, router="deepseek", bias_speed=0.02, expert_width=6),
)  # fmt: skip
LAYOUTS = dict(
    zero1=dict(dp=4, zero=1),
    hybrid=dict(dp=4, node=2, zero="IGG"),
    tp=dict(tp=4),
    tp_sequence=dict(dp=2, tp=2, sequence_parallel=True, zero=3),
    dualpipe=dict(pp=2, dp=2, schedule="dualpipe", microbatches=4),
    zb_v=dict(pp=2, tp=2, schedule="zb_v", microbatches=4, zero=1),
    ring=dict(cp=4, core="ring"),
    gathered=dict(dp=2, cp=2, core="gathered", zero=2),
    offload=dict(dp=4, zero=3, offload="optimizer+parameters", recompute="full"),
)
WITH_EXPERTS = dict(
    dp=dict(dp=4),
    ep=dict(dp=4, ep=4, zero=1),
    ep_tp=dict(dp=2, ep=2, tp=2, zero=3),
    ep_pp=dict(dp=2, ep=2, pp=2, schedule="dualpipe", microbatches=4),
)


def rows(step: int, size: int = 8) -> Rows:
    def draw(_, rank, ranks):
        tokens, targets = random_tokens(step, rank, ranks, size, 8, 29, seed=5)
        for target, row in zip(targets, rows_of(rank, ranks, size)):
            target[: (row + step) % 4] = MASKED
        return tokens, targets

    return Rows(draw, size, 8)


def build(config: GPTConfig, layout: dict, seed: int, precision: str = "float64"):
    def adamw(params):
        return AdamW(params, lr=1e-2, eps=1e-3)

    strategy = Strategy(**layout, precision=precision, bucket_bytes=1500)
    return parallelize(config, strategy, adamw, seed=3, frozen=["layers.1.norm1.weight"] if seed == 3 else ())


def losses(run, first: int, count: int) -> list[float]:
    steps = (run.step(run.batch(rows(step), step), 0.5).loss for step in range(first, first + count))
    return [run.total(loss).item() for loss in steps]


def train_and_save(config: GPTConfig, layouts: dict, folder: Path, precision: str = "float64"):
    found = {}
    for name, layout in layouts.items():
        run = build(config, layout, 3, precision)
        losses(run, 0, BEFORE)
        written, layout_of_it = saving.save(run, folder / name), saving.check_layout(run)
        found[name] = written, saving.state_of(run), losses(run, BEFORE, AFTER), layout_of_it
    return found


def load_all(config: GPTConfig, layouts: dict, checkpoints: dict, states: dict, precision: str = "float64"):
    """{(from, to): (what is not bit for bit as saved, what could not be restored, losses)}"""
    found, order = {}, list(layouts)
    for number, (name, layout) in enumerate(layouts.items()):
        run = build(config, layout, 3, precision)
        for other in [order[(number - places) % len(order)] for places in APART]:
            lost = saving.load(run, checkpoints[other])
            wrong = saving.differing(run, states[other])
            found[other, name] = wrong, lost, losses(run, BEFORE, AFTER if other == name else 1)
    return found


class Pairs:
    def __init__(self, config: GPTConfig, layouts: dict, folder: Path, precision: str = "float64"):
        results = launch.run(train_and_save, config, layouts, folder, precision, ranks=RANKS, timeout_s=200)
        self.checkpoints = {
            n: saving.Checkpoint(folder / n, tuple(r[n][0] for r in results)) for n in layouts
        }
        self.states = {name: results[0][name][1] for name in layouts}
        self.losses = {name: results[0][name][2] for name in layouts}
        self.told = {name: [r[name][3] for r in results] for name in layouts}
        arguments = config, layouts, self.checkpoints, self.states, precision
        self.found = launch.run(load_all, *arguments, ranks=RANKS, timeout_s=200)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Pairs:
    return Pairs(CONFIG, LAYOUTS, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Pairs:
    return Pairs(EXPERTS, WITH_EXPERTS, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("which", ["dense", "experts"])
def test_any_layout_loads_what_any_other_saved(which, request):
    """Tensors to the bit, losses to 1e-12; in the same layout to the bit, with dropout."""
    pairs = request.getfixturevalue(which)
    for found in pairs.found:
        assert [len({pair[i] for pair in found}) for i in (0, 1)] == [len(pairs.losses)] * 2
        assert len(found) == len(APART) * len(pairs.losses)
        for (saved, loaded), (wrong, lost, after) in found.items():
            assert not wrong and not lost, (saved, loaded)
            expected = pairs.losses[saved][: len(after)]
            assert max(abs(a - b) for a, b in zip(after, expected, strict=True)) < TOLERANCE, (saved, loaded)
            assert saved != loaded or after == expected, (saved, loaded)


@pytest.mark.parametrize("which", ["dense", "experts"])
def test_each_rank_writes_its_share_of_what_it_holds(which, request):
    """Every element of every name is written once, by one of the ranks that hold it, each as much as the others;
    and ranks that say they hold the same do."""
    for name, results in request.getfixturevalue(which).told.items():
        held, written = zip(*results)
        assert not saving.wrong_holders(held), name
        assert not saving.wrong_shares(held, written), name
        assert not saving.wrong_cover(written), name
        assert {p.name for pieces in held for p in pieces} == {p.name for pieces in written for p in pieces}
