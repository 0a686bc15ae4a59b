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


_seen: set[int] = set()  # threads that `calm` need not look at again


def calm() -> None:  # asks for both, for the threads there are by now; the rank is the main one
    if SCHED_SETATTR is not None:
        schedule(os.getpid(), os.SCHED_BATCH, SLICE_NS)
        for thread in event_loops(_seen):
            schedule(thread, os.SCHED_BATCH)


def schedule(thread: int, policy: int, slice_ns: int = 0) -> None:
    """How Linux runs a thread, how long at a time (0: as the kernel likes). A sandbox may forbid it."""
    with suppress(ProcessLookupError):  # the thread has ended
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        attr = SCHED_ATTR.pack(SCHED_ATTR.size, policy, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(SCHED_SETATTR, thread, attr, 0)


def event_loops(seen: set[int]) -> list[int]:
    """Threads of this process that are gloo's event loops, one a group, and not in `seen`. To that go all
    that have named themselves: a thread begins with its maker's name. None where there is no /proc."""
    loops, makers = [], ("", name_of(os.getpid()))
    with suppress(FileNotFoundError):
        for thread in {*map(int, os.listdir("/proc/self/task"))} - seen:
            if (name := name_of(thread)) not in makers:
                seen.add(thread)
            if name == "gloo_tcp_loop":
                loops.append(thread)
    return loops


def name_of(thread: int) -> str:
    with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # it may have ended
        return file.read().strip()
    return ""
