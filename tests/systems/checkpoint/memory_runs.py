"""Small runs whose ranks can be lost: train some steps, say what they lost, hold a digest of all states."""

import shutil

import pytest
import torch
import xxhash

from minitrain.checkpoint.format import bytes_of
from minitrain.checkpoint.load import Saved
from minitrain.compose.parallelize import parallelize
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.pieces import Piece
from minitrain.systems.checkpoint.in_memory import memory_folder
from tests.parallel import Problem, rows_of_problem, small

STEPS = 6
PROBLEM = Problem(config=small(dropout=0.1), batch_sizes=(8, 7) * (STEPS // 2))


@pytest.fixture
def machines():
    """Folders of shared memory, one per machine, gone at the end."""
    folders = [memory_folder() for _ in range(4)]
    yield folders
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def make_run(**strategy):
    strategy = Strategy(precision="float64", bucket_bytes=3000, **strategy)
    frozen = (PROBLEM.frozen,) if strategy.pp == 1 else ()
    return parallelize(PROBLEM.config, strategy, lambda p: AdamW(p, lr=PROBLEM.lr), seed=3, frozen=frozen)


def train(run, first: int, last: int, after=lambda step: None) -> list[float]:
    """Losses of steps first .. last; `after(step)` right behind each update, before anything is said."""
    losses = []
    for step in range(first, last):
        result = run.step(run.batch(rows_of_problem(PROBLEM, step), step), PROBLEM.clip)
        after(step + 1)
        losses.append(run.total(result.loss).item())
    return losses


def digest(run) -> str:
    """Of every bit that this rank has of parameters and states."""
    said = xxhash.xxh3_64()
    for piece in sorted(run.pieces(), key=lambda piece: (piece.name, piece.start)):
        said.update(f"{piece.name}{piece.start}{piece.shape}".encode())
        said.update(bytes_of(piece.values))
    said.update(repr(sorted(run.plain_state()["numbers"].items())).encode())
    return said.hexdigest()


def load(run, manifest, files) -> int:
    """The step to go on from."""
    run.load_pieces(Saved(files))
    return manifest["step"]


def uninterrupted(**strategy):
    """[(losses, digest)] of the ranks, to be equal to."""
    run = make_run(**strategy)
    return train(run, 0, STEPS), digest(run)


def bytes_in(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def as_pieces(step: int, rank: int, size: int = 1000):
    """Something to save that is no model: a share of `size` bytes, and then some."""
    values = torch.arange(size, dtype=torch.int64).mul_(2654435761 * (rank + 1) + step).to(torch.uint8)
    return [Piece(f"part-{rank}", (size,), (0,), values)]
