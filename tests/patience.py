"""Waits for other processes, for as long as these get on: a busy machine makes them slow, and no test fail."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from minitrain.ranks.launch.local import Clock

HANG_S = 120  # of nothing done, or of a processor's time
LONG_S = 1800  # on the clock, where nobody can see what is done


def run(command: list, **settings) -> subprocess.CompletedProcess:
    out, err = output_of(process := start(command, **settings))
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def start(command: list, **settings) -> subprocess.Popen:
    """It listens to interrupts even if tests run in the background of a shell, which has them ignored."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hears = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(list(map(str, command)), **pipes | hears | settings)


def output_of(process: subprocess.Popen) -> tuple[str, str]:
    """What it has printed, once it has ended."""
    clock = Clock(HANG_S)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.2)
        if clock.ended(family := below(process.pid)):
            for pid in family:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{process.args} has come to a stop")


def until(happened: Callable[[], object], pid: int | None = None) -> None:
    """Looks again and again; fails if meanwhile `pid`, or this process, and all below it come to a stop."""
    clock = Clock(HANG_S)
    while not happened():
        stopped = clock.ended(below(pid or os.getpid())) or (pid and gone(pid))
        assert not stopped or happened(), "it has not happened, and nothing goes on"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Or dead, and not yet reaped by its parent."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def below(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]
