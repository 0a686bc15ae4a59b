"""Which of several fleets finishes a training first, and the fewest devices that hold its model. No torch.

    least_ranks(7 * 10**9, 32e9, stage=3)     4: 16 bytes per parameter are 112 GB, 28 on each of four
    race([Task(.., machine("h100"), 16, ..), Task(.., v100s, 64, ..)], tokens=1e9, work_of=work_of)

What ZeRO leaves on each of n ranks (memory_formulas.py) falls with n to a part that it does not cut, so a
stage whose rest alone is too large never fits. Activations come on top: `race` counts them too, since it
searches each fleet's layouts (planner.py). Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from minitrain.plan.planner import Task, search
from minitrain.plan.predict.predicted_step import Prediction
from minitrain.plan.predict.rates import RATES, Rates
from minitrain.plan.predict.work import WorkOf
from minitrain.ranks.checks import require_one_of, require_positive, require_positive_ints

STATES = (2, 2, 12)  # bytes per parameter: weights, gradients, what the optimizer keeps


def least_ranks(parameters: int, memory_bytes: float, stage: int = 3) -> int | None:
    """The fewest ranks on which the model's states fit with that stage of ZeRO; None: no number of them."""
    require_positive_ints(1 << 60, parameters=parameters)
    require_positive(memory_bytes=memory_bytes)
    require_one_of((0, 1, 2, 3), stage=stage)
    whole = parameters * sum(STATES[: 3 - stage])
    cut = parameters * sum(STATES) - whole
    if whole + cut <= memory_bytes:
        return 1
    return ceil(cut / (memory_bytes - whole)) if cut and whole < memory_bytes else None


class Finish(NamedTuple):
    task: Task
    best: Prediction | None  # None: no layout fits
    seconds: float  # for all tokens


def race(tasks: Iterable[Task], tokens: float, work_of: WorkOf, rates: Rates = RATES) -> list[Finish]:
    """Each fleet with its fastest layout, the one that has seen all tokens first in front."""
    require_positive(tokens=tokens)
    found = []
    for task in tasks:
        try:
            best = search(task, work_of, rates, keep=1).best[0]
        except ValueError:
            found.append(Finish(task, None, float("inf")))
            continue
        found.append(Finish(task, best, best.step_s * tokens / (task.batch * task.length)))
    return sorted(found, key=lambda one: one.seconds)
