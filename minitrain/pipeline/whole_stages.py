"""Breadth-first on sharded weights: a stage is gathered once for all its microbatches (ZeRO stage 3).

    actions       F0.0 F0.1 F0.2   F2.0 F2.1 F2.2   B2.0 B2.1 B2.2   B0.0 B0.1 B0.2      rank 0 of 2, v=2
    all_gather    stage 0          stage 2          stage 2          stage 0
    reduce_scatter                                             stage 2          stage 0

`WholeStages` tells `reducer.keep_gathered(params, whole)` before each action whether the next one on this
rank is of the same stage and in the same direction: then what is gathered stays whole and gradients add up
in it. Sends 2 gathers and one reduce-scatter of each stage per step; without it each of m microbatches
gathers twice and scatters once. Memory: one stage whole, and in backward its gradients, not two units.
Lamy-Poirier 2023, arXiv:2211.05953, section 4. Differs: gathers run ahead inside of a stage, not from one
stage to the next.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

from minitrain.pipeline.runtime import Runner, RunnerHooks
from minitrain.pipeline.schedule import Action, Schedule, parts


class WholeStages(RunnerHooks):
    """For schedules that are `breadth_first`, and reducers that have `keep_gathered`."""

    def __init__(self, schedule: Schedule, rank: int):
        alike = lambda a, b: a.stage == b.stage and (a.kind == "F") == (b.kind == "F")
        actions = parts(schedule.ranks[rank])
        self.followed = {action for action, after in pairwise(actions) if alike(action, after)}

    def around(self, runner: Runner, action: Action) -> AbstractContextManager:
        runner.reducer.keep_gathered(runner.stages[action.stage].parameters(), action in self.followed)
        return nullcontext()
