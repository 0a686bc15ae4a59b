"""A job with failures and saves, from one failure to the next: what was useful, what was lost. No torch.

    a save       training stops for `stall_s`; it counts `lag_s` later (written in the background)
    a failure    undoes all since the last save that counts, then costs `restart_s`; it may hit a restart, too
    two levels   a failure that memory survives goes back to the last save of any kind, any other one to the
                 last of every n-th, which are on disk as well

    elapsed = useful + saving + lost + restarting            exactly; waste = 1 - useful / elapsed

Failures are of machines, each renewed where it failed: times between failures of one are exponential (shape
1) or Weibull (below 1: they come in clusters; above: machines wear out). N machines have 1/N of a machine's
mean time between failures. Differs from a real job: a restart, with the time until the failure is
seen, takes always the same; spare machines never run out. A write that a failure cuts short begins again
with the run, if memory survived. REPORTS, LLAMA_3: what was published.
"""

import heapq
import random
from collections.abc import Iterator
from math import ceil, erf, gamma, log, sqrt
from typing import NamedTuple

from minitrain.ranks import checks


class Failure(NamedTuple):
    at_s: float
    machines: tuple[int, ...]  # that are lost together


class Level(NamedTuple):
    """What a save to memory, or to disk, costs."""

    stall_s: float
    restart_s: float = 0.0
    lag_s: float = 0.0


class Outcome(NamedTuple):
    """Seconds, which add up to `elapsed_s`, and failures: all, and those that took the job back to disk."""

    useful_s: float
    saving_s: float
    lost_s: float
    restarting_s: float
    failures: int
    to_disk: int

    elapsed_s = property(lambda self: self.useful_s + self.saving_s + self.lost_s + self.restarting_s)
    waste = property(lambda self: 1 - self.useful_s / self.elapsed_s)


def failing(
    seed: int, machine_mtbf_s: float, machines: int = 1, *, shape: float = 1.0, together: int = 1
) -> Iterator[Failure]:
    """Failures without end, in order of time; each takes `together` machines, all but the first by chance."""
    checks.require_positive_ints(machines=machines)
    checks.require_ints(seed=seed)
    checks.require_positive(machine_mtbf_s=machine_mtbf_s, shape=shape)
    checks.require_positive_ints(machines, together=together)
    draw, scale = random.Random(seed), machine_mtbf_s / gamma(1 + 1 / shape)
    lifetime = lambda: scale * (-log(1 - draw.random())) ** (1 / shape)
    ends = [(lifetime(), machine) for machine in range(machines)]
    heapq.heapify(ends)
    while True:
        at, first = ends[0]
        heapq.heapreplace(ends, (at + lifetime(), first))
        others = draw.sample([m for m in range(machines) if m != first], together - 1) if together > 1 else ()
        yield Failure(at, (first, *others))


def simulate(
    work_s, interval_s, failures, *, memory=None, disk=None, every=1, memory_survives=lambda failure: True
) -> Outcome:
    """`work_s` of training with a save after each `interval_s` of it: to Level `memory`, to `disk`, or, with
    both, each `every`-th to both, the others to memory alone. Without a disk, what memory does not survive is
    lost from the start."""
    checks.require_positive(work_s=work_s, interval_s=interval_s)
    checks.require_positive_ints(every=every)
    checks.require_nonnegative(memory=memory or 0, disk=disk or 0)
    if not (memory or disk) or every > 1 and not (memory and disk):
        raise ValueError(f"every={every}, {memory=}, {disk=}: give a level to save to, two if every > 1")
    survivable = memory is not None
    every = every if disk else 10**18  # never
    memory, disk = memory or disk, disk or memory
    one_s = interval_s + memory.stall_s
    # In a job without failures: when so many saves end, and how many count at a time.
    ends = lambda saves: saves * one_s + saves // every * (disk.stall_s - memory.stall_s)

    def in_memory(at_s: float) -> int:
        periods, rest = divmod(max(0, at_s - memory.lag_s), ends(every))
        return int(periods) * every + min(every - 1, int(rest // one_s))

    def on_disk(at_s: float) -> int:
        return every * int(max(0, at_s - disk.lag_s) // ends(every))

    for lag_s, room_s in (memory.lag_s, interval_s), (disk.lag_s, ends(every) - disk.stall_s):
        if lag_s > room_s:
            raise ValueError(f"a save counts after {lag_s} s, the next begins at {room_s} s; wait longer")
    inside = ceil(work_s / interval_s) - 1  # saves; nothing is saved at the very end
    end = ends(inside) + work_s - inside * interval_s
    at, resumed_s, last, last_on_disk = 0.0, 0.0, 0, 0  # `at`: seconds that a job without failures needs
    lost_s = restarting_s = 0.0
    count = to_disk = 0
    level = memory
    for failure in failures:
        ran_s = failure.at_s - resumed_s
        if ran_s >= end - at:
            break
        count += 1
        if ran_s >= 0:
            at += ran_s
            last, last_on_disk = max(last, in_memory(at)), max(last_on_disk, on_disk(at))
            level = memory  # what was read from disk is in memory again
        else:
            restarting_s += ran_s  # the last restart did not end
        if not (survivable and memory_survives(failure)):
            last, level = last_on_disk, disk
            to_disk += 1
        lost_s += at - ends(last)
        at = ends(last)
        restarting_s += level.restart_s
        resumed_s = failure.at_s + level.restart_s
    return Outcome(work_s, end - work_s, lost_s, restarting_s, count, to_disk)


class Report(NamedTuple):
    """What was published of a run: failures, at least and at most, of so many GPUs in so many days."""

    run: str
    gpus: int
    days: float
    failures: tuple[float, float]
    source: str

    # between two failures, of one GPU and of the job: at least, at most
    gpu_hours = property(lambda self: tuple(24 * self.days * self.gpus / n for n in self.failures[::-1]))
    hours = property(lambda self: tuple(hours / self.gpus for hours in self.gpu_hours))


_SURVEY = "Duan et al. 2024, arXiv:2407.20018, section 8.1"
REPORTS = (  # six times as often in one as in another: a rate is of a fleet, never of a kind of GPU
    Report("Llama 3 405B, all", 16_384, 54, (466, 466), "arXiv:2407.21783, section 3.3.4"),
    Report("Llama 3 405B, unexpected", 16_384, 54, (419, 419), "arXiv:2407.21783, section 3.3.4"),
    Report("OPT-175B", 992, 14, (40, float("inf")), _SURVEY),  # more than 40
    Report("BLOOM-176B", 384, 7, (1, 2), "arXiv:2211.05100; per week"),
    Report("Alibaba, a node", 8, 1, (0.015, 0.015), _SURVEY),
)
# Table 5 of the Llama 3 report, unexpected interruptions by cause: prints 148 as 30.1, GPU's as 58.7 %;
# both fit 126, and the counts give 35.3 and 64.0 %. C4, arXiv:2406.04594: 82.5 % hit one node or device.
LLAMA_3 = {
    "GPU": {"faulty GPU": 148, "HBM3": 72, "SRAM": 19, "system processor": 17, "silent": 6, "thermal": 6},
    "host": {"NIC": 7, "SSD": 3, "power": 3, "chassis": 2, "IO board": 2, "CPU": 2, "memory": 2},
    "network": {"switch or cable": 35},
    "other": {"software": 54, "host maintenance": 32, "NCCL watchdog": 7, "dependency": 2},
}


def at_least_one(chance: float, machines: int) -> float:
    """The chance that any of so many machines fails, if each does by itself with this one."""
    checks.require_fractions(chance=chance)
    checks.require_ints(machines=machines)
    return 1 - (1 - chance) ** machines


def expected_largest(ranks: int) -> float:
    """E[max] of independent normal draws, in standard deviations: how much longer than the mean a step takes,
    which waits for its slowest rank. Less than sqrt(2 ln n): 0.62 of it for 4 ranks, 0.90 for 16,384."""
    checks.require_positive_ints(ranks=ranks)
    below = lambda x: (0.5 * (1 + erf(x / sqrt(2)))) ** ranks  # all of them
    grid = [(i + 0.5) / 200 for i in range(2000)]
    return sum(1 - below(x) - below(-x) for x in grid) / 200
