"""Pieces from ranks to ranks: the bits of the other run, nothing for what is here (bytes: rlhf/test_rlhf.py)."""

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.systems.faults.live import Live
from tests.parallel import Problem, rows_of_problem, small

PROBLEM = Problem(config=small(tied=False))
LAYOUTS = {
    "dp": dict(dp=4), "tp": dict(dp=2, tp=2), "pp": dict(dp=2, pp=2, microbatches=2),
    "zero1": dict(dp=4, zero=1, bucket_bytes=3000), "zero3": dict(dp=4, zero=3, bucket_bytes=3000),
}  # fmt: skip


def made(layout: dict, seed: int = 3):
    make = lambda params: AdamW(params, lr=PROBLEM.lr)
    return parallelize(PROBLEM.config, Strategy(precision="float64", **layout), make, seed=seed)


def states_after_a_move(there: str, here: str) -> tuple:
    old, new = made(LAYOUTS[there]), made(LAYOUTS[here], seed=4)
    old.step(old.batch(rows_of_problem(PROBLEM, 0), 0), PROBLEM.clip)
    live = Live([(old.pieces(), old.plain_state())], collectives.world())
    new.load_pieces(live)
    losses = [
        run.total(run.step(run.batch(rows_of_problem(PROBLEM, 1), 1), PROBLEM.clip).loss).item()
        for run in (old, new)
    ]
    states = [run.state_dict() for run in (old, new)]
    apart = max((states[0]["parameters"][n] - x).abs().max() for n, x in states[1]["parameters"].items())
    return *losses, apart.item(), live.moved_bytes


@pytest.mark.parametrize("there, here", [("dp", "zero3"), ("zero3", "tp"), ("tp", "pp"), ("pp", "zero1")])
def test_any_layout_to_any_other(there, here):
    """The next step is the other run's, with its optimizer states; what is here moves nothing."""
    for before, after, apart, moved in launch.run(states_after_a_move, there, here, ranks=4):
        assert before == pytest.approx(after, abs=1e-12) and apart < 1e-12
        assert (moved == 0) == ((there, here) == ("dp", "zero3"))


def lacking() -> str:
    """Two of four tp ranks give nothing."""
    old, world = made(LAYOUTS["tp"]), collectives.world()
    pieces = old.pieces() if world.rank() % 2 == 0 else []
    new = made(LAYOUTS["dp"], seed=4)
    before = {n: x.clone() for n, x in new.state_dict()["parameters"].items()}
    with pytest.raises(ValueError) as error:
        new.load_pieces(Live([(pieces, {})], world))
    assert all(torch.equal(x, before[n]) for n, x in new.state_dict()["parameters"].items())
    return str(error.value)


def test_what_nobody_has_is_refused_before_anything_changes():
    (said,) = set(launch.run(lacking, ranks=4))
    assert "ranks have" in said and "elements of parameters/" in said
