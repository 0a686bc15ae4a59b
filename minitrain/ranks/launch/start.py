"""Run a function on N ranks: fresh processes of this machine or, under torchrun, the ranks there are.

    results = run(fn, *args, ranks=4)      fn(*args) on every rank, in one process group; results by rank

Ranks are forked from a helper that has torch loaded (`ranks.py`): the first launch of a process takes 2 s,
every later one 0.1 s. `fn` travels by value (cloudpickle): a function of a notebook cell, a lambda or a
closure works, and the caller's script is not run again. Every launch has new processes.

Ranks find each other through a file in a private directory, and gloo is bound to the loopback. (A TCP store
listens on every interface, needs a free port, and stalled 5 s in one start of five.)

The first rank that fails ends the launch within a second with a `RankError` that names it; a launch that
takes longer than `timeout_s` ends with a `LaunchTimeout` that says where each rank was. Either way, and after
an interrupt, every process is killed before `run` returns. Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT are set) `run` starts nothing: see `job.py`.
"""

import math
import os
from collections.abc import Callable

import torch

from minitrain.ranks.checks import require_positive, require_positive_ints
from minitrain.ranks.launch import job, local, pickled

LONGEST_S = 10 * 24 * 3600.0  # what torch can count in milliseconds, twice; `timeout_s=inf` means this


def run(
    fn: Callable,
    *args,
    ranks: int = 2,
    timeout_s: float = 60.0,
    start_timeout_s: float = 60.0,
    checked: bool | None = None,
    echo: bool = True,
    grace_s: float | None = None,
) -> list:
    """Call fn(*args) on every rank and return the results in rank order.

    `timeout_s` is for fn, `start_timeout_s` for starting processes and finding each other. `checked` compares
    every collective across ranks before it runs (None: yes, unless MINITRAIN_CHECKED=0). `echo` shows what
    ranks print, as "[rank 3] text" in rank order: rank 0 as it runs, the others at the end. A rank has the
    environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), one torch thread, and
    all seeds at 0. When fn has returned everywhere the ranks are killed, not asked to leave: what must be
    closed is closed in fn, with `with`.

    `grace_s`: after the first failure the other ranks have that long to see it and come to an end by
    themselves, to save what they have say: a collective in which one waits for a rank that is gone fails
    after a third of that time at the latest (not under torchrun, which ends them itself). Raises ValueError
    before anything starts; RankError and LaunchTimeout after.
    """
    if os.environ.get("MINITRAIN_INSIDE"):
        raise ValueError(
            "run was called inside a rank; a rank cannot start ranks: call run from the outside, or use "
            "dist.new_group for fewer ranks than there are"
        )
    if not callable(fn):
        raise ValueError(
            f"fn={fn!r} is not a function; write run(fn) with the function itself, not run(fn())"
        )
    times = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s, "grace_s": grace_s}
    require_positive_ints(ranks=ranks)
    require_positive(**{name: seconds for name, seconds in times.items() if seconds not in (None, math.inf)})
    checked = os.environ.get("MINITRAIN_CHECKED") != "0" if checked is None else checked
    timeout_s, start_timeout_s = min(timeout_s, LONGEST_S), min(start_timeout_s, LONGEST_S)
    if job.here():
        return job.Job.find(ranks, start_timeout_s).run(fn, args, timeout_s, checked)
    call = pickled.call(fn, args)
    return local.run_local(call, int(ranks), timeout_s, start_timeout_s, checked, echo, grace_s)


def device() -> torch.device:
    """This rank's: a GPU of its own if there are enough, a shared one if there are fewer, else the CPU."""
    gpus = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")
