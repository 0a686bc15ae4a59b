"""Detectors of faults where there is none: false alarms in clean runs, and what all of them cost a step.

    python -m benchmarks detectors --runs 200        a report

A clean run is four ranks and five steps, one of them made again, with every detector of systems/faults. What
they cost: steps without and with them in turn, in one run, of one layer of width 512 on 1,024 tokens per
rank; processor time of all ranks, the least of each kind. Replicas are compared every 10 steps and a step is
made again every 200, and their cost counts as that part.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens, rows_of
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.systems.faults import detect
from minitrain.systems.faults.corruption import ProductCheck, odd_replicas, replayed

RANKS, STEPS, AT_ONCE, PAIRS = 4, 5, 25, 8
SMALL = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=4, max_positions=16)
LARGE = GPTConfig(vocab_size=256, d_model=512, num_layers=1, num_heads=8, max_positions=256)
GOAL = 1.03


def make(config: GPTConfig):
    strategy = Strategy(dp=RANKS, precision="float32")
    run = parallelize(config, strategy, lambda params: AdamW(params, lr=1e-3), seed=1)

    def batch(step: int):
        def part(step: int, rank: int, size: int):
            rows = rows_of(rank, size, 4 * RANKS)
            tokens = random_tokens(step, 0, 1, 4 * RANKS, config.max_positions, config.vocab_size, seed=5)
            return tuple(x[rows.start : rows.stop] for x in tokens)

        return run.batch(Rows(part, 4 * RANKS, config.max_positions), step)

    return run, batch


def clean(runs: int, folder: Path) -> Counter:
    """On a rank: how often each detector gave an alarm."""
    world, alarms = collectives.world(), Counter()
    for number in range(runs):
        run, batch = make(SMALL)
        own, heart = [], detect.Heartbeat(folder / f"beats-{number}", world.rank(), RANKS)
        collectives.barrier(world)
        with heart, detect.LocalTime() as clock, ProductCheck(run.model) as check:
            for step in range(STEPS):
                rows = batch(step)
                clock.lap()
                if step == 3:
                    alarms["replayed"] += len(replayed(run, rows)[1])
                else:
                    run.step(rows)
                own.append(clock.lap())
                alarms["ProductCheck"] += len(check.wrong())
                alarms["odd_replicas"] += len(odd_replicas(run.pieces()))
                alarms["Heartbeat"] += len(heart.silent())
        alarms["stragglers"] += len(detect.stragglers(detect.heat_map(own, world)[1:]))
        alarms["probe and blame"] += bool(detect.blame(detect.probe(world)))
        alarms["self_check"] += bool(detect.self_check(world, 128))
    return alarms


def costs(folder: Path) -> dict[str, list[float]]:
    """On a rank: processor seconds of steps of each kind."""
    world = collectives.world()
    run, batch = make(LARGE)
    spent: dict[str, list[float]] = {}

    def timed(kind: str, work) -> None:
        collectives.barrier(world)
        began = time.process_time()
        work()
        spent.setdefault(kind, []).append(time.process_time() - began)

    for step in range(PAIRS):
        rows = batch(step)
        timed("step", lambda rows=rows: run.step(rows))
        with detect.Heartbeat(folder / "beats", world.rank(), RANKS) as heart, detect.LocalTime() as clock:
            with ProductCheck(run.model) as check:
                timed(
                    "watched", lambda rows=rows: (run.step(rows), clock.lap(), check.wrong(), heart.silent())
                )
        timed("odd_replicas", lambda: odd_replicas(run.pieces()))
        timed("replayed", lambda rows=rows: replayed(run, rows))
    return spent


def report(runs: int = 20) -> str:
    alarms, began = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, runs, AT_ONCE):
            part = Path(folder, str(first))
            part.mkdir()
            for counted in launch.run(clean, min(AT_ONCE, runs - first), part, ranks=RANKS, timeout_s=600):
                alarms.update(counted)
        seconds = time.monotonic() - began
        ranks = launch.run(costs, Path(folder), ranks=RANKS, timeout_s=600)
    least = {kind: min(map(sum, zip(*(spent[kind] for spent in ranks)))) for kind in ranks[0]}
    step = least["step"]
    parts = {
        "heartbeat, own time, products": least["watched"] / step - 1,
        "replicas, every 10 steps": least["odd_replicas"] / step / 10,
        "a step again, every 200": (least["replayed"] - step) / step / 200,
    }
    ratio = 1 + sum(parts.values())
    lines = [f"{runs} clean runs on {RANKS} ranks in {seconds:.0f} s, {STEPS} steps each: alarms"]
    lines += [f"    {name:16} {count}" for name, count in alarms.items()]
    lines += [
        f"a step with all detectors takes {ratio:.3f} of one without ({step / RANKS:.2f} s, goal {GOAL})"
    ]
    return "\n".join(lines + [f"    {name:32} {share:+.4f}" for name, share in parts.items()])
