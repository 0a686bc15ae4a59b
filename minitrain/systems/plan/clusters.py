"""Which cluster: the fewest ranks on which a model's states fit, and which fleet has seen all tokens first.

least_ranks(7 * 10**9, 32e9, stage=3)             4: 16 bytes per parameter are 112 GB, 28 on each of four
race([task, other], tokens=1e9, work_of=work_of)  the best layout of each (plan/planner.py), fastest first
"""

from collections.abc import Iterable
from math import ceil, inf
from typing import NamedTuple

from minitrain.plan.accounting import zero_bytes
from minitrain.plan.planner import Task, search
from minitrain.plan.predict.predicted_step import Prediction
from minitrain.plan.predict.work import WorkOf
from minitrain.ranks.checks import require_positive


def least_ranks(parameters: int, memory_bytes: float, stage: int = 3) -> int | None:
    """The fewest ranks on which the model's states fit with that stage of ZeRO; None: no number of them, for
    what a stage does not cut is too large. Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1."""
    require_positive(memory_bytes=memory_bytes)
    all_of_it = zero_bytes(parameters, 1, stage)
    cut = 2 * (all_of_it - zero_bytes(parameters, 2, stage))
    room = memory_bytes - (all_of_it - cut)
    if all_of_it <= memory_bytes:
        return 1
    return ceil(cut / room) if cut and room > 0 else None


class Finish(NamedTuple):
    task: Task
    best: Prediction | None  # None: no layout fits
    seconds: float  # for all tokens


def race(tasks: Iterable[Task], tokens: float, work_of: WorkOf) -> list[Finish]:
    require_positive(tokens=tokens)
    found = []
    for task in tasks:
        try:
            best = search(task, work_of)[0]
            found.append(Finish(task, best, best.step_s * tokens / (task.batch * task.length)))
        except ValueError:
            found.append(Finish(task, None, inf))
    return sorted(found, key=lambda one: one.seconds)
