"""Training under faults for as long as one likes: `python -m benchmarks soak --minutes 120 --seed 0`.

Four ranks, a fault every ten seconds on average: any member is killed, or one of five times stopped, at any
moment of a step, a newcomer included; half a second later another comes. Rounds of 200 steps, with dp, tp, pp
and ZeRO in turn. After each the same steps are made again without a fault, by as many ranks from step to step
as there were (each segment a launch of its own, which takes over the state): the losses must be the same, to
the bit. A round whose state nobody holds any more is Lost and counted apart; that is no error of memory.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import MASKED, Rows, random_tokens, rows_of
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import RankError
from minitrain.systems.faults.survive import Survivor

CONFIG = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=4, max_positions=8)
LAYOUTS = {
    "dp": lambda n: dict(dp=n),
    "tp": lambda n: dict(dp=n // 2, tp=2) if n % 2 == 0 else dict(dp=n),
    "pp": lambda n: dict(dp=n // 2, pp=2, microbatches=2) if n % 2 == 0 else dict(dp=n),
    "zero1": lambda n: dict(dp=n, zero=1),
    "zero3": lambda n: dict(dp=n, zero=3),
}
ROWS, CLIP, RANKS = 12, 0.5, 4


@dataclass(frozen=True)
class Storm:
    """`every` steps a fault on average; a step takes `pace_s` at least."""

    layout: str
    steps: int
    every: float
    seed: int
    pace_s: float = 0.0


def rows(step: int) -> Rows:
    def batch(step, rank=0, ranks=1):
        tokens, targets = random_tokens(step, 0, 1, ROWS, 8, CONFIG.vocab_size, seed=5)
        targets = targets.masked_fill(torch.arange(8) >= 8 - torch.arange(ROWS)[:, None] % 5, MASKED)
        own = rows_of(rank, ranks, ROWS)
        return tokens[own.start : own.stop], targets[own.start : own.stop]

    return Rows(batch, ROWS, 8)


def build(layout: str, ranks: int):
    strategy = Strategy(precision="float64", **LAYOUTS[layout](ranks))
    return parallelize(CONFIG, strategy, lambda params: AdamW(params, lr=1e-3), seed=3)


def train(storm: Storm) -> tuple:
    team, began = launch.team(), time.monotonic()

    def before(step: int) -> None:
        nonlocal began
        time.sleep(max(0.0, began + storm.pace_s - time.monotonic()))
        took_s, began = time.monotonic() - began, time.monotonic()
        draw = random.Random(f"{storm.seed} {team.member} {team.generation} {step}")
        if draw.random() < 1 / (storm.every * RANKS):
            how = signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL
            die = lambda: os.kill(os.getpid(), how)
            threading.Timer(draw.uniform(0, min(took_s, 1.0)), die).start()

    batch_of = lambda run, step: run.batch(rows(step), step)
    copies = int(storm.layout.startswith("zero"))
    survivor = Survivor(team, lambda ranks: build(storm.layout, ranks), batch_of, CLIP, copies)
    return survivor.train(storm.steps, before), survivor.history, survivor.redone, survivor.moved_bytes


def segment(layout: str, first: int, last: int, state) -> tuple[list[float], dict]:
    run = build(layout, int(os.environ["WORLD_SIZE"]))
    if state:
        run.load_state_dict(state)
    results = [run.step(run.batch(rows(step), step), CLIP) for step in range(first, last)]
    return [run.total(result.loss.double()).item() for result in results], run.state_dict()


def undisturbed(storm: Storm, history: list) -> list[float]:
    """The losses of a run that has as many ranks at each step because somebody planned it so."""
    sizes = [[(n, i) for i, (done, n, _) in enumerate(history) if done <= s][-1] for s in range(storm.steps)]
    cuts = [s for s in range(storm.steps) if s == 0 or sizes[s] != sizes[s - 1]] + [storm.steps]
    losses, state = [], None
    for first, last in zip(cuts, cuts[1:]):
        given = dict(ranks=sizes[first][0], timeout_s=600)
        more, state = launch.run(segment, storm.layout, first, last, state, **given)[0]
        losses += more
    return losses


def one_round(storm: Storm) -> dict:
    started = time.monotonic()
    try:
        given = dict(survive=True, replace_s=0.5, hung_s=3.0, timeout_s=40)
        out = launch.run(train, storm, ranks=RANKS, **given)
    except RankError as error:
        return dict(ended=f"{error}", lost="Lost" in str(error), seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    losses, history, redone, moved = max((one for one in out if one), key=lambda one: len(one[0]))
    want = undisturbed(storm, history)
    apart = [abs(losses[step] - want[step]) for step in range(storm.steps)]
    found = dict(faults=out.count(None), groups=len(history), redone=redone, moved=moved, seconds=seconds)
    return found | dict(equal=sum(one == 0.0 for one in apart), apart=max(apart), steps=storm.steps)


def report(minutes: int = 1, seed: int = 0) -> str:
    until, number, total = time.monotonic() + 60 * minutes, 0, Counter()
    worst, wrong = 0.0, []
    while number == 0 or time.monotonic() < until:
        storm = Storm(list(LAYOUTS)[number % len(LAYOUTS)], 200, 100.0, seed + number, pace_s=0.1)
        found = one_round(storm)
        print(f"round {number}, {storm.layout}, seed {storm.seed}: {found}", flush=True)
        number += 1
        if "ended" in found:
            total["Lost"] += found["lost"]
            wrong += [] if found["lost"] else [f"seed {storm.seed}: {found['ended']}"]
            continue
        total.update(
            {name: found[name] for name in ("faults", "groups", "redone", "moved", "steps", "equal")}
        )
        worst = max(worst, found["apart"])
    said = f"{number} rounds, {dict(total)}; losses differ by {worst:.1e} at most from undisturbed runs"
    return "\n".join([said, *wrong])
