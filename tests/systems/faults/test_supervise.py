"""Restarts end with the run that nobody disturbed, to the bit."""

import os
import signal
from pathlib import Path

import pytest

from minitrain import collectives, launch
from minitrain.checkpoint.store import Store
from minitrain.cli.train_command import train as command
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Text
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import RankError
from minitrain.systems.faults.supervise import supervise

HYPER = Hyperparameters(steps=8, batch_size=4, length=8, lr=1e-2, warmup=2)
TEXT = Text(b"It is not enough to have a good mind; the main thing is to use it well. " * 20, "Descartes")


def train(folder: Path, dies_at: tuple[int, ...]) -> list[float]:
    """Goes on from its newest checkpoint; in its n-th life rank 1 dies after step dies_at[n]."""
    config = GPTConfig(d_model=8, num_layers=1, num_heads=2, max_positions=8)
    run = parallelize(config, Strategy(dp=2, zero=1), HYPER.make_optimizer, seed=HYPER.seed)
    trainer = Trainer(run, TEXT, HYPER, store=Store(folder / "saved"), save_every=3, report_every=1)
    trainer.resume()
    lives, rank = folder / "lives", collectives.world().rank()
    life = len(list(lives.iterdir()))
    collectives.barrier(collectives.world())
    for record in trainer.run():
        if rank == 1 and dies_at[life:] and record["step"] == dies_at[life]:
            (lives / str(life)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return [record["loss"] for record in trainer.records]


def test_restarts_go_on_from_checkpoints(tmp_path, capfd):
    for name in ("calm", "restarted"):
        (tmp_path / name / "lives").mkdir(parents=True)
    (want, _) = launch.run(train, tmp_path / "calm", (), ranks=2)
    assert supervise(train, tmp_path / "restarted", (2, 5), restarts=2, ranks=2)[0] == want and len(want) == 8
    assert "rank 1 died of SIGKILL" in (said := capfd.readouterr().err) and "restart 2 of 2" in said


def test_a_job_that_fails_too_often_says_the_last_error():
    with pytest.raises(RankError, match="ZeroDivisionError"):
        supervise(lambda: 1 // 0, restarts=1, ranks=1)
    with pytest.raises(ValueError, match="--checkpoint"):
        command(restarts=1)
