"""Where the four models of RLHF are, what that costs in memory, and when each call runs. No torch.

    call      generate  ->  score, refer, value  ->  train_actor, train_critic       of one batch
    memory    of a device: 16 bytes per parameter of each model that trains there, 2 of each that does not
    time      a lane per group of devices (simulate/links.py); a result for another lane is a copy on its way

Colocated (DeepSpeed-Chat)  all on one lane: the sum of all calls, and of all models
separate (OpenRLHF, APP)    a lane per model, or generation apart from training: `stale` batches later a call
                            has the weights of a training call. With one: a batch each max(t_gen, t_train), or
                            half of a round trip, (t_gen + t_train + 2 transfers) / 2, if that is longer
PUZZLE                      calls of a lane by the longest path that waits for them, if that is shorter
ReaLHF                      each call a plan of its own; weights move where plans differ: Metropolis

Xiao et al. 2023 (APP), arXiv:2312.11819, section 3; Hu et al. 2024 (OpenRLHF), arXiv:2405.11143, section 3;
Mei et al. 2024 (ReaLHF), arXiv:2406.14088, section 5; Lei et al. 2024 (PUZZLE), DAC. Differs: seconds are
given; ReaLHF's estimate overlaps calls on other devices, here a model's calls are in a circle.
"""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.simulate.links import Number, Run, Task, play

Table = Sequence[Sequence[Number]]
TRAINED, FROZEN = 16, 2  # bytes per parameter: bfloat16 with masters and Adam; bfloat16


class Call(NamedTuple):
    name: str
    model: str
    seconds: Number
    after: tuple[str, ...] = ()
    trains: bool = False


def device_bytes(parameters: Mapping[str, Number], devices: Mapping[str, str], trained=("actor", "critic")):
    """{device: bytes} of models {name: parameters} on devices {name: device}."""
    require_nonnegative(**parameters)
    size = {model: n * (TRAINED if model in trained else FROZEN) for model, n in parameters.items()}
    return {at: sum(n for model, n in size.items() if devices[model] == at) for at in devices.values()}


def tasks_of(calls: Sequence[Call], lanes: Mapping, batches=1, stale=0, transfer: Number = 0) -> list[Task]:
    """For `play`: "generate 0", .., each call on its lane. A call has a model's weights after the training
    `stale` batches before the last one."""
    require_positive_ints(1 << 12, batches=batches)
    require_ints(0, stale=stale)
    require_nonnegative(transfer=transfer)
    tasks = {}
    for batch, call in product(range(batches), calls):
        old, here, needs = batch - 1 - stale, lanes[call.name], []
        updates = [c.name for c in calls if c.trains and c.model == call.model and not call.trains]
        for name, number in [(x, batch) for x in call.after] + [(x, old) for x in updates if old >= 0]:
            needs.append(f"{name} {number}")
            if lanes[name] != here:
                copy, way = f"{needs[-1]} to {here}", f"{lanes[name]} to {here}"
                tasks[copy], needs[-1] = Task(copy, way, transfer, (), (needs[-1],)), copy
        name = f"{call.name} {batch}"
        tasks[name] = Task(name, here, call.seconds, (), tuple(needs))
    return list(tasks.values())


def longest_paths(tasks: Sequence[Task]) -> dict[str, Number]:
    """Of each task: the seconds from its start to the end of all, were there lanes enough."""
    paths: dict[str, Number] = {}
    for task in reversed(tasks):  # each comes after those it waits for
        later = max((paths[other.name] for other in tasks if task.name in other.after), default=0)
        paths[task.name] = task.amount + later
    return paths


def puzzle(tasks: Sequence[Task]) -> Run:
    """In the order given, or by longest paths: whichever ends first."""
    paths = longest_paths(tasks)
    return min((play(tasks), play(tasks, by=lambda task: -paths[task.name])), key=lambda run: run.end_s)


def cycle_seconds(plans: Sequence[int], seconds: Table, moves: Table) -> Number:
    """Of calls in a circle, call i by plan plans[i]: seconds[i][plan], and moves[plan][next plan]."""
    require_ints(0, len(moves) - 1, plans=plans)
    require_nonnegative(seconds=seconds, moves=moves)
    behind = [*plans[1:], plans[0]]
    return sum(row[a] + moves[a][b] for row, a, b in zip(seconds, plans, behind))


def realhf(seconds: Table, moves: Table, seed: int = 0) -> list[int]:
    """The best plans of a random walk: a worse one is accepted with exp(-more/T), T falling from the longest
    call to a thousandth of it."""
    require_ints(0, seed=seed)
    if not all(isinstance(row, (list, tuple)) and len(row) == len(moves) for row in (*seconds, *moves)):
        raise ValueError("seconds and moves: use rows as long as there are plans, one per call and per plan")
    draw, plans, cost = random.Random(seed), [0] * len(seconds), lambda x: cycle_seconds(x, seconds, moves)
    best, hot = plans, max(map(max, seconds)) or 1
    for step in range(2000):
        tried = [*plans]
        tried[draw.randrange(len(plans))] = draw.randrange(len(moves))
        more = cost(tried) - cost(plans)
        if more <= 0 or draw.random() < math.exp(-more / (hot * 0.001 ** (step / 2000))):
            plans = tried
            best = min(best, plans, key=cost)
    return best
