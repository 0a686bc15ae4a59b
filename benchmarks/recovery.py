"""From a kill to the next finished step, three ways in turns: `python -m benchmarks recovery --tries 3`.

Four ranks train a GPT by Trainer or Survivor, float32, a step every 50 ms at least; rank 2 is killed in the
middle of a step. Survivors go on as three (dp from each other, ZeRO-1 from copies); `restarts` start four
new ranks, which load a checkpoint of every fifth step; torchrun does so too, with new Pythons. A time on a
shared machine means little: read the ratios.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minitrain import launch
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Text
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.systems.faults.survive import Survivor

CONFIG = GPTConfig(vocab_size=256, d_model=64, num_layers=4, num_heads=4, max_positions=64)
HYPER = Hyperparameters(steps=20, batch_size=12, length=32)
RANKS, VICTIM, AT, EVERY, PACE_S = 4, 2, 13, 5, 0.05
ROOM = Path(__file__).parent.parent / "minitrain/systems/faults"


def note(folder: str, name: str, *what) -> None:
    with open(f"{folder}/{name}", "a") as file:
        file.write(json.dumps([time.time(), *what]) + "\n")


def die_in_backward(run, folder: str) -> None:
    """Once in the life of a folder."""

    def die(grad) -> None:
        if not os.path.exists(f"{folder}/killed"):
            note(folder, "killed")
            os.kill(os.getpid(), signal.SIGKILL)

    next(param for param in run.model.parameters() if param.requires_grad).register_hook(die)


def build(ranks: int, zero: int):
    return parallelize(CONFIG, Strategy(dp=ranks, zero=zero), HYPER.make_optimizer, seed=0)


def survive(folder: str, zero: int) -> tuple[int, int]:
    team, rows = launch.team(), Text.builtin().split()[0].rows(HYPER.batch_size, HYPER.length, HYPER.seed)

    def before(step: int) -> None:
        if step and team.member == 0:
            note(folder, "steps", step)
        time.sleep(PACE_S)
        if (step, team.member) == (AT, VICTIM):
            die_in_backward(survivor.run, folder)

    batch_of = lambda run, step: run.batch(rows, step)
    survivor = Survivor(team, lambda ranks: build(ranks, zero), batch_of, HYPER.clip, copies_every=zero)
    survivor.train(HYPER.steps, before)
    return survivor.redone, survivor.moved_bytes


def resume(folder: str) -> None:
    run = build(RANKS, 1)
    store = Store(Path(folder) / "saved")
    trainer = Trainer(run, Text.builtin().split()[0], HYPER, store=store, save_every=EVERY, report_every=1)
    trainer.resume()
    for record in trainer.run():
        if trainer.rank == 0:
            note(folder, "steps", record["step"])
        time.sleep(PACE_S)
        if (record["step"], trainer.rank) == (AT, VICTIM):
            die_in_backward(run, folder)


def one_try(way: str) -> tuple[float, int, int]:
    """Seconds from the kill to the next finished step, steps that were made again, bytes that ranks moved."""
    with tempfile.TemporaryDirectory() as folder:
        redone = moved = None
        if way.startswith("survivors"):
            given = dict(ranks=RANKS, survive=True, timeout_s=120)
            out = [one for one in launch.run(survive, folder, int("ZeRO" in way), **given) if one]
            redone, moved = max(r for r, _ in out), sum(m for _, m in out)
        elif way == "restarts":
            launch.run(resume, folder, ranks=RANKS, timeout_s=120, restarts=1)
        else:
            program = "from benchmarks import recovery\nfrom minitrain import launch\n"
            Path(folder, "job.py").write_text(
                program + f"launch.run(recovery.resume, {folder!r}, ranks={RANKS})"
            )
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
            command += [f"--nproc-per-node={RANKS}", f"{folder}/job.py"]
            env = os.environ | dict(
                PYTHONPATH=str(ROOM.parents[2]), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
            )
            subprocess.run(command, env=env, check=True, capture_output=True)
        read = lambda name: [json.loads(line) for line in Path(folder, name).read_text().splitlines()]
        ((killed,),), steps = read("killed"), read("steps")
        before = max(step for at, step in steps if at <= killed)
        after, first = next(
            (at, step) for at, step in steps if at > killed and step <= AT + 1 and at > killed
        )
        return after - killed, max(0, before - first + 1) if redone is None else redone, moved or 0


def report(tries: int = 3) -> str:
    ways = ("survivors, dp", "survivors, ZeRO-1", "restarts", "torchrun")
    found = {way: [] for way in ways}
    for _ in range(tries):
        for way in ways:
            found[way].append(one_try(way))
    seconds = {way: statistics.median(s for s, *_ in tried) for way, tried in found.items()}
    files = {way: ("survive.py", "live.py") if "survivors" in way else () for way in ways}
    lines = [f"{'way':20} {'s':>7} {'ratio':>6} {'redone':>7} {'moved':>16} {'lines':>6}"]
    for way, tried in found.items():
        length = sum(len((ROOM / name).read_text().splitlines()) for name in files[way])
        ratio = seconds[way] / seconds["survivors, dp"]
        counts = f"{max(r for _, r, _ in tried):7} {max(m for *_, m in tried):14,} B {length:6}"
        lines.append(f"{way:20} {seconds[way]:7.2f} {ratio:6.1f} {counts}")
    return "\n".join(lines)
