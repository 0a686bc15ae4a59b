"""Training that is killed again and again: no checkpoint is lost or torn, every loss is the uninterrupted run's.

    python -m tests.kills --kills 1000 --seed 7            a line per 50 kills; ends with 1 if something was lost
    python -m tests.kills --kills 1000 --seed 7 --clock    kills by the clock, not by events

A life: four ranks (dp 2, tp 2, ZeRO 1, dropout) go on from the newest checkpoint and save every other step
beside the next ones, until one process is killed with SIGKILL: a rank, or the launcher, with which all die.
By events it dies at its n-th call to the file system (half of the bytes written, if it is a write), or at its
n-th step; these are drawn, so a seed is a history. A run that reaches its end is followed by a new one.

After each life:  what was acknowledged (commit returned) is there, or something newer
                  every complete checkpoint verifies, to the last byte
                  every loss of every life is, to the bit, that of the run nobody killed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from minitrain import collectives, launch
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Text
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch.report import RankError
from minitrain.systems.simulate.crash_model import Watched
from tests import patience

CONFIG = GPTConfig(d_model=8, num_layers=1, num_heads=2, max_positions=8, dropout=0.1)
STRATEGY = Strategy(dp=2, tp=2, zero=1)
HYPER = Hyperparameters(steps=24, batch_size=4, length=8, lr=1e-2, warmup=2)
TEXT = Text(b"It is not enough to have a good mind; the main thing is to use it well. " * 20, "Descartes")
EVERY, RANKS = 2, 4
MOST = dict(disk=200, step=7)  # events that are counted until somebody dies


@dataclass(frozen=True)
class Death:
    """Who dies, and at which of which events; by the clock if `after_s` is given."""

    victim: int  # a rank; RANKS: the launcher
    kind: str = "step"
    number: int = 1
    after_s: float | None = None


class Mortal(Watched):
    """Dies at one of its calls; a write has then written half."""

    def __init__(self, death: Death | None):
        super().__init__()
        self.death, self.calls = death, 0

    def count(self, last: Callable = lambda: None) -> None:
        self.calls += 1
        if self.death is not None and self.calls == self.death.number:
            last()
            die(self.death)

    def on(self, what, path, call, *args):
        if what == "write":
            file, offset, data = args
            self.count(lambda: call(file, offset, memoryview(data).cast("B")[: memoryview(data).nbytes // 2]))
        elif what != "make_folder":
            self.count()
        made = call(*args)
        if what == "rename":  # also right after it
            self.count()
        return made


def die(death: Death) -> None:
    victim = int(os.environ["KILLS_LAUNCHER"]) if death.victim == RANKS else os.getpid()
    os.kill(victim, signal.SIGKILL)
    time.sleep(60)  # until the launcher's death has reached this rank


def descendants(pid: int) -> set[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


class Acknowledging(Store):
    """Writes down what has been committed."""

    def commit(self, step, *args):
        super().commit(step, *args)
        note(self.folder, dict(acknowledged=step))


def note(folder: Path, what: dict) -> None:
    """Into the history, in one call: it outlives this process."""
    file = os.open(folder.parent / "history.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


def live(folder: Path, death: Death | None, launcher: int = 0, way: str = "asynchronous") -> None:
    """On a rank: go on until the end, or until somebody dies."""
    os.environ["KILLS_LAUNCHER"] = str(launcher)
    rank = collectives.world().rank()
    mine = death if death and death.victim in (rank, RANKS) and (death.victim != RANKS or rank == 0) else None
    disk = Mortal(mine if mine and mine.kind == "disk" else None)
    run = parallelize(CONFIG, STRATEGY, HYPER.make_optimizer, seed=HYPER.seed)
    store = Acknowledging(folder, disk=disk)
    trainer = Trainer(run, TEXT, HYPER, store=store, save_every=EVERY, save_how=way, report_every=1)
    trainer.resume()
    if rank == 0:
        note(folder, dict(resumed=trainer.step))
    steps = 0
    for record in trainer.run():
        if rank == 0:
            note(folder, dict(step=record["step"], loss=record["loss"].hex()))
        steps += 1
        if mine and mine.kind == "step" and steps == mine.number:
            die(mine)


class History:
    """Lives of runs in one folder, and what must be true of them."""

    def __init__(self, root: Path, seed: int, way: str = "asynchronous"):
        self.root, self.draw, self.way = root, random.Random(seed), way
        self.counts, self.runs, self.wrong = Counter(), 0, []
        self.expected = self._uninterrupted()
        self._new_run()

    def _uninterrupted(self) -> dict[int, str]:
        folder = self.root / "whole" / "saved"
        folder.mkdir(parents=True)
        launch.run(live, folder, None, 0, self.way, ranks=RANKS)
        return {line["step"]: line["loss"] for line in read(folder) if "loss" in line}

    def _new_run(self) -> None:
        self.runs += 1
        self.folder = self.root / f"run{self.runs}" / "saved"
        self.folder.mkdir(parents=True)
        self.acknowledged, self.seen = 0, 0

    def death(self, by_clock: bool = False) -> Death:
        victim = self.draw.choice((*range(RANKS), *range(RANKS), RANKS))
        if by_clock:
            return Death(victim, after_s=self.draw.uniform(0.2, 2.0))
        kind = self.draw.choice(("disk", "disk", "step"))
        return Death(victim, kind, self.draw.randint(1, MOST[kind]))

    def life(self, death: Death) -> None:
        ended = self._with_launcher(death) if death.victim == RANKS or death.after_s else self._here(death)
        self.counts["killed" if not ended else "ended"] += 1
        if not ended:
            self.counts["the launcher" if death.victim == RANKS else f"rank {death.victim}"] += 1
        self.check(death)
        if ended:
            shutil.rmtree(self.folder.parent)
            self._new_run()

    def _here(self, death: Death) -> bool:
        try:
            launch.run(live, self.folder, death, os.getpid(), self.way, ranks=RANKS)
        except RankError as error:
            if "SIGKILL" not in str(error):  # a survivor's connection may be what is told first
                self.counts["told by a survivor"] += 1
                if "is gone" not in str(error):
                    self.wrong.append((death, str(error)))
            return False
        return True

    def _with_launcher(self, death: Death) -> bool:
        """In a process of its own, which is killed, or one of its ranks is, by the clock."""
        command = [sys.executable, "-m", "tests.kills", "--life", str(self.folder), json.dumps(vars(death))]
        process = subprocess.Popen([*command, self.way], stderr=subprocess.DEVNULL, start_new_session=True)
        tree = set(self._kill_later(process, death) if death.after_s else ())
        while process.poll() is None:
            tree |= descendants(process.pid)
            time.sleep(0.02)
        psutil.wait_procs(tree, patience.LONG_S)  # orphans tidy up: until then the folder is theirs
        return process.wait() == 0

    def _kill_later(self, process: subprocess.Popen, death: Death) -> list[psutil.Process]:
        started = len(read(self.folder))
        while process.poll() is None and len(read(self.folder)) == started:
            time.sleep(0.01)  # until it has resumed
        time.sleep(death.after_s)
        tree = sorted(descendants(process.pid), key=lambda one: one.pid)
        ranks = tree[-RANKS:]
        victim = process.pid if death.victim == RANKS or len(ranks) < RANKS else ranks[death.victim].pid
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return tree

    def check(self, death: Death) -> None:
        lines, store = read(self.folder), Store(self.folder)
        for line in lines[self.seen :]:
            if "acknowledged" in line:
                self.acknowledged = line["acknowledged"]
                self.counts["acknowledged"] += 1
            elif "loss" in line:
                self.counts["losses"] += 1
                if line["loss"] != self.expected[line["step"]]:
                    self.wrong.append((death, f"the loss of step {line['step']} is another"))
            elif line["resumed"] < self.acknowledged:
                told = f"resumed at step {line['resumed']} after {self.acknowledged} was acknowledged"
                self.wrong.append((death, told))
        self.seen = len(lines)
        steps = store.steps()
        if self.acknowledged and (not steps or steps[-1] < self.acknowledged):
            self.wrong.append((death, f"step {self.acknowledged} was acknowledged, there are {steps}"))
        for step in steps:
            try:
                store.verify(step)
            except ValueError as error:
                self.wrong.append((death, str(error)))
        self.counts["left half-written"] += len(list(self.folder.glob("*.writing")))


def read(folder: Path) -> list[dict]:
    path = folder.parent / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--life", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.life:
        folder, death, way = given.life
        launch.run(live, Path(folder), Death(**json.loads(death)), os.getpid(), way, ranks=RANKS)
        return 0
    with tempfile.TemporaryDirectory() as root:
        history, started = History(Path(root), given.seed), time.monotonic()
        while history.counts["killed"] < given.kills and not history.wrong:
            history.life(history.death(given.clock))
            if history.counts["killed"] % 50 == 0:
                print(f"{time.monotonic() - started:6.0f} s  {dict(history.counts)}", flush=True)
        for death, what in history.wrong:
            print(f"WRONG after {death}: {what}")
        print(f"seed {given.seed}: {history.counts['killed']} kills, {len(history.wrong)} wrong")
    return bool(history.wrong)


if __name__ == "__main__":
    sys.exit(main())
