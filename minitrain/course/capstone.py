"""The capstone of chapter 29: a small job within budgets, and six kinds of chaos on four real ranks.

    scenario = drawn("stop", seed=7)              scenario.job: the plain values that an answer gets
    played = play(build, scenario, layouts, [2, 4, 1])     losses, segments, steps made again, bytes, a log

    kill     a rank dies                      neighbours   two at once, one of which had the other's copy
    stop     one hangs, and closes nothing    within       one dies, and another while the rest regroup
    slow     one pauses, and is not hung      flip         a bit of one rank's weights changes

A layout is fields of Strategy, for each number of ranks; `build(ranks, layout)` makes a Run of it. A
protection is steps between copies, steps between saves, and the seconds after which a rank is taken for hung.
capstone.tsv has what `account` says of layouts: a dry run's bytes, which are the real run's, and a step on a
machine with a slow link. `score`, tokens per simulated second, has no ceiling: any layout may be tried.
ValueError: no layout, or no protection.
"""

import csv
import io
import json
import random
import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.plan.simulate.machines import machine
from minitrain.ranks import checks, launch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.faults.chaos import Plan
from minitrain.systems.faults.watched import Watched
from minitrain.systems.simulate.replay import replay

KINDS = ("kill", "stop", "slow", "flip", "neighbours", "within")
TABLE = Path(__file__).with_suffix(".tsv")
MODEL = GPTConfig(vocab_size=48, d_model=32, num_layers=2, num_heads=4, max_positions=16)
RANKS, ROWS, LENGTH, STEPS, CLIP = 4, 12, 16, 9, 1.0
COPY_US, SAVE_US, REGROUP_US = 200, 1500, 2000
SIZES = dict(batch_size=ROWS, length=LENGTH)
DATA = Rows(partial(random_tokens, **SIZES, vocab=48, seed=5), **SIZES)


# `job` is what an answer gets, `faults` a line of chaos.py; members `silent` do not make the last step.
Scenario = namedtuple("Scenario", "kind job faults silent step")
Played = namedtuple("Played", "losses segments redone moved_bytes log")  # [first step, ranks] is a segment


def account(build: Callable, layout: Mapping, ranks: int) -> tuple[int, int, int]:
    """Most bytes held, bytes sent in a step, its microseconds; of rank 0, dry, the step replayed."""

    def two_steps():
        with Ledger() as ledger:
            run, ends = build(ranks, layout), [0]
            for step in range(2):
                run.step(run.batch(DATA, step), CLIP)
                ends.append(ledger.sent_bytes())
                if not step:
                    first = len(ledger.events)
        return ledger.peak_bytes, ends[2] - ends[1], ledger.events[first:]

    held, sent, events = dryrun.run(two_steps, rank=0, ranks=ranks)
    fast = machine("h100")
    slow = replace(fast.inter, bandwidth_bytes_per_s=fast.inter.bandwidth_bytes_per_s / 50)
    slow = replace(fast, devices_per_node=1, nics_per_node=1, inter=slow)
    return held, sent, round(1e6 * replay({0: events}, slow, dtype="float64").step_s)


@cache
def accounts() -> list[list]:
    """Lines of capstone.tsv: layout, ranks, bytes held, bytes sent, microseconds of a step."""
    with open(TABLE, newline="") as file:
        return [[json.loads(field) for field in line] for line in csv.reader(file, delimiter="\t")]


def counted(build: Callable, layout: Mapping, ranks: int) -> list[int]:
    """As `account` says, from the table if it is there. ValueError, TypeError: no layout of so many ranks."""
    known = [rest for one, size, *rest in accounts() if (one, size) == (layout, ranks)]
    return known[0] if known else [*account(build, layout, ranks)]


def drawn(kind: str, seed: int) -> Scenario:
    """A job with its budgets, and a fault of this kind; the same from the same seed."""
    checks.require_one_of(KINDS, kind=kind)
    checks.require_ints(seed=seed)
    draw = random.Random(f"{kind} {seed}")
    copies, saves, pause_s = draw.choice([2, 3]), draw.choice([4, 6]), draw.choice([0.2, 0.3])
    first, step = draw.randrange(RANKS), draw.randint(3, STEPS - 3)
    second = (first + (1 if kind == "neighbours" else 2)) % RANKS
    faults = {
        "kill": f"kill {first} @{step} forward",
        "stop": f"stop {first} @{step} gradients",
        "slow": f"slow {first} @{step}-{step + 2} forward {pause_s}",
        "flip": f"flip {first} @{step} forward weight:layers.2.mlp.up.weight 7 50",
        "neighbours": f"kill {first} @{step} forward; kill {second} @{step} forward",
        "within": f"kill {first} @{step} gradients; kill {second} @{step} all_to_all#0",
    }[kind]
    silent = () if kind == "slow" else (first, second) if kind in KINDS[4:] else (first,)
    least = {n: min(held for _, ranks, held, *_ in accounts() if ranks == n) for n in (4, 3, 2)}
    job = dict(ranks=RANKS, steps=STEPS, accounts=accounts(), sent_cap=draw.choice([500_000, 900_000]))
    job |= dict(held_cap=draw.randint(int(1.05 * max(least.values())), 1_440_000))
    job |= dict(redone_cap=copies - 1, lost_cap=saves - 1, copy_us=COPY_US, save_us=SAVE_US)
    job |= dict(protect_us=COPY_US // copies + SAVE_US // saves + 20)
    job |= dict(pause_s=pause_s, hung_cap_s=8 * pause_s + 7)
    return Scenario(kind, job, faults, tuple(sorted(silent)), step)


def planned(scenario: Scenario, protection: Sequence) -> list[list[int]]:
    """[first step, ranks] of each group that trains, if the run goes as it must."""
    copies, saves, _ = protection
    every = saves if scenario.kind == "neighbours" else copies
    left = RANKS - len(scenario.silent)
    return [[0, RANKS]] + [[scenario.step // every * every, left]] * (left < RANKS)


def score(build: Callable, scenario: Scenario, layouts: Mapping[int, Mapping], protection: Sequence) -> float:
    """Tokens per simulated second of the planned run."""
    segments = planned(scenario, protection)
    ends = [scenario.step + 1] * (len(segments) - 1) + [STEPS]
    total_us = REGROUP_US * (len(segments) - 1)
    for (first, ranks), end in zip(segments, ends):
        step_us = counted(build, layouts[ranks], ranks)[2]
        total_us += (end - first) * (step_us + COPY_US / protection[0] + SAVE_US / protection[1])
    return 1e6 * STEPS * ROWS * LENGTH / total_us


def train(build: Callable, folder: str, line: str, layouts: Mapping, copies: int, saves: int):
    made = lambda ranks: build(ranks, layouts.get(ranks, {}))  # of one rank, whatever is left
    survivor = Watched(launch.team(), made, lambda run, step: run.batch(DATA, step), CLIP, copies)
    losses = survivor.train_through(Plan.parse(line), STEPS, saves, folder)
    return losses, survivor.history, survivor.redone, survivor.moved_bytes


def play(build: Callable, scenario: Scenario, layouts: Mapping[int, Mapping], protection: Sequence) -> Played:
    """The scenario on real ranks; lines of member -1 are the launcher's."""
    copies, saves, hung_s = protection
    checks.require_positive_ints(copies=copies, saves=saves)
    checks.require_positive(hung_s=hung_s)
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()) as said:
        given = build, folder, scenario.faults, dict(layouts), copies, saves
        ended = launch.run(train, *given, ranks=RANKS, survive=True, hung_s=hung_s, checked=False, echo=False)
        log = [json.loads(line) for line in Path(f"{folder}/log").read_text().splitlines()]
    for member in re.findall(r"rank (\d+) has not got on", said.getvalue()):
        place = next((place for place, line in enumerate(log) if line[1] == "gave up"), len(log))
        log.insert(place, [-1, "hung", int(member)])
    ended = [one for one in ended if one]
    losses, history, redone, _ = ended[0]
    segments = [[done, ranks] for done, ranks, _ in history]
    return Played([*losses.values()], segments, redone, sum(one[3] for one in ended), log)


@cache
def wanted(build: Callable) -> list[float]:
    """The losses of one process."""

    def alone():
        run = build(1, {})
        return [run.step(run.batch(DATA, step), CLIP).loss.item() for step in range(STEPS)]

    return launch.run(alone, ranks=1)[0]
