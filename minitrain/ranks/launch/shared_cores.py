"""Ranks that share cores with each other and with the threads of gloo: what Linux's scheduler is asked.

Four ranks on two cores have an event loop of gloo for every group, and a message for one takes the core from
another in the middle of a product. Two requests, which need no privilege:

    event loops   are "batch" threads: they run when a core is free or their turn has come, no sooner
    ranks         are batch threads too, and compute `SLICE_NS` at a time where Linux's turn is 1.4 to 2.8 ms

Medians, 4 ranks on 2 cores: the first takes an all-reduce of 16 KB from 1 ms of processor time to 0.15, for a
loop that finds the lock of a connection taken tries again without pause. The second makes a pipeline's step 5
to 10 % shorter; it needs the first. Linux only; turns of such a length since 6.12. On NCCL nothing is asked.
"""

import ctypes
import glob
import os
import platform
import struct
import sys
from contextlib import suppress

SLICE_NS = 8_000_000
# The number of a system call.
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine()) if sys.platform == "linux" else None
# `struct sched_attr` of linux/sched/types.h: size, policy, flags, nice, priority, runtime, deadline, period.
SCHED_ATTR = struct.Struct("=IIQiIQQQ")


def calm() -> None:  # asks for both, for the threads there are by now; the rank is the main one
    if SCHED_SETATTR is not None:
        schedule(os.getpid(), os.SCHED_BATCH, SLICE_NS)
        for thread in event_loops():
            schedule(thread, os.SCHED_BATCH)


def schedule(thread: int, policy: int, slice_ns: int = 0) -> None:
    """How Linux runs a thread, how long at a time (0: as the kernel likes). A sandbox may forbid it."""
    with suppress(ProcessLookupError):  # the thread has ended
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        attr = SCHED_ATTR.pack(SCHED_ATTR.size, policy, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(SCHED_SETATTR, thread, attr, 0)


def event_loops() -> list[int]:
    """Threads of this process that are gloo's event loops, one a group; none where there is no /proc."""
    loops = []
    for path in glob.glob("/proc/self/task/*/comm"):
        with suppress(OSError), open(path) as file:  # the thread may have ended
            if file.read().startswith("gloo_tcp_loop"):
                loops.append(int(path.split("/")[-2]))
    return loops
