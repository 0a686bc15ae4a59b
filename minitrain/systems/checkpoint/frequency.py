"""How often to save: as often as a budget of stalls allows, from what steps and saves are measured to take.

    frequency = Frequency(saver, checkfreq_steps)          every(step_s, update_s, copy_s, write_s) -> steps
    run.step(batch)                                        each step
    saver.after_step()
    if frequency.due():
        saver.save(...)

Every `window` steps the medians of steps and updates, without what they waited for a save, and the last
save's copy and write go into `every`, each as the slowest rank has it (an all-reduce of 32 bytes): so all
save in the same steps. Mohan et al. 2021 (CheckFreq), FAST. Differs: tuned anew in every window.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from minitrain.checkpoint.saver import Saver
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.devices import now


class Frequency:
    """Of one Saver; every rank asks `due` after each step."""

    def __init__(self, saver: Saver, every: Callable[..., int], window: int = 5, clock=None):
        require_positive_ints(window=window)
        self.saver, self.every, self.window, self.clock = saver, every, window, clock
        if clock is None:  # on a GPU an update ends later than the call of it
            self.clock = saver.clock = partial(now, saver.device)
        self.steps = window  # between saves, for now
        self._since = 0  # the last save, in steps
        self._times_s: list[tuple[float, float]] = []  # of steps and their updates
        self._began_s, self._waits = self.clock(), len(saver.waits)

    def due(self) -> bool:
        waits = self.saver.waits[self._waits :]
        step_s = self.clock() - self._began_s - sum(wait.s for wait in waits)
        self._times_s.append((step_s, self.saver.update_s))
        self._since += 1
        if len(self._times_s) == self.window:
            if last := self.saver.last:  # alike on all ranks
                mine = [*map(median, zip(*self._times_s)), last.copy_s, last.write_s]
                mine = torch.tensor(mine, dtype=torch.float64, device=self.saver.device)
                self.steps = self.every(*collectives.all_reduce(mine, self.saver.group, op="max").tolist())
            self._times_s.clear()
        if due := self._since >= self.steps:
            self._since = 0
        self._began_s, self._waits = self.clock(), len(self.saver.waits)
        return due
