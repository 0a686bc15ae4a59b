"""What tests of savers share: copies and writes that stop until they are let go, small runs, all that a run
has, and what a store gives back."""

import threading

import torch

from minitrain.checkpoint.load import Saved
from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.pieces import Piece, whole_piece
from minitrain.systems.simulate.crash_model import Watched
from minitrain.systems.simulate.crashes import SlowCopy as Hold  # noqa: F401  (for tests)
from tests.parallel import small

DEADLOCK_S = 60  # a test that waits so long has failed
ALL = 10**9


class HeldDisk(Watched):
    """Write n of files of ranks is done when more than n are allowed; the call named `broken` fails."""

    def __init__(self, allowed=ALL):
        super().__init__()
        self.allowed, self.written, self.changed = allowed, 0, threading.Condition()
        self.broken, self.once = "", False

    def on(self, what, path, call, *args):
        if self.broken == what:
            self.broken = "" if self.once else self.broken
            raise OSError(28, "No space left on device")
        if what == "write" and path.name.startswith("rank"):
            with self.changed:
                assert self.changed.wait_for(lambda: self.allowed > self.written, DEADLOCK_S)
                self.written += 1
                self.changed.notify_all()
        return call(*args)

    def allow(self, writes=ALL):
        with self.changed:
            self.allowed = writes
            self.changed.notify_all()

    def until(self, writes):
        with self.changed:
            assert self.changed.wait_for(lambda: self.written >= writes, DEADLOCK_S)


def adamw(params):
    """In two groups, so that updates have another order than layers."""
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=1e-2)


def rows():
    def draw(step, rank, ranks):
        return random_tokens(step, rank, ranks, 8, 8, 29, seed=5)

    return Rows(draw, 8, 8)


def run_of(make_optimizer=adamw, config=None, **strategy):
    settings = dict(precision="float64", bucket_bytes=3000) | strategy
    return parallelize(config or small(), Strategy(**settings), make_optimizer, seed=3)


def train(run, *steps, clip=None):
    return [run.total(run.step(run.batch(rows(), step), clip).loss).item() for step in steps]


def copies(pieces):
    return [Piece(p.name, p.whole, p.start, p.values.clone(), p.holders) for p in pieces]


def differing(store, step, wanted):
    """Names of the pieces that were not saved as they are in `wanted`."""
    _, files = store.open(step)
    saved, found = Saved(files), set()
    for piece in wanted:
        got = Piece(piece.name, piece.whole, piece.start, torch.zeros_like(piece.values))
        saved.fill(got)
        if not torch.equal(got.values, piece.values):
            found.add(piece.name)
    return found


def some_pieces(*sizes, value=1.0):
    """parameters/p0, parameters/p1, .. of float64, so many elements each."""
    return [
        whole_piece(f"parameters/p{number}", value * (number + 1) * torch.arange(1.0, size + 1).double())
        for number, size in enumerate(sizes)
    ]
