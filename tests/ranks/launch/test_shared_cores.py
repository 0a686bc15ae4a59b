"""What Linux is asked about threads: a rank on gloo and its event loops are calm, others are not."""

import ctypes
import os
import platform

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.launch import shared_cores

pytestmark = pytest.mark.skipif(shared_cores.SCHED_SETATTR is None, reason="Linux on x86-64 or arm64 only")


def policies():
    """Of the rank and of its loops, before and after its first collective, and of a loop made after that."""
    known: set[int] = set()

    def now():
        loops = shared_cores.event_loops({*known})
        return os.sched_getscheduler(0), [os.sched_getscheduler(loop) for loop in loops]

    found = [now()]
    collectives.all_reduce(torch.ones(2), dist.group.WORLD)
    found.append(now())
    shared_cores.schedule(os.getpid(), os.SCHED_OTHER)
    known.update(shared_cores.event_loops(set()))
    group = dist.new_group()
    found.append(now())
    known.clear()
    collectives.all_reduce(torch.ones(2), group)
    return [*found, now()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL has no event loops")
def test_ranks_and_loops_are_calm_from_the_first_use_of_a_group():
    before = os.sched_getscheduler(0)
    for first, used, stock, again in launch.run(policies):
        assert first == (os.SCHED_OTHER, [os.SCHED_OTHER]) and used == (os.SCHED_BATCH, [os.SCHED_BATCH])
        assert stock == (os.SCHED_OTHER, [os.SCHED_OTHER])
        assert again == (os.SCHED_BATCH, [os.SCHED_BATCH] * 2)
    assert os.sched_getscheduler(0) == before


def slice_ns() -> int:
    """Of the calling thread, as sched_getattr says (since Linux 6.12)."""
    size = shared_cores.SCHED_ATTR.size
    attr = ctypes.create_string_buffer(size)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attr, size, 0) == 0
    return shared_cores.SCHED_ATTR.unpack(attr.raw)[5]


def turns():
    shared_cores.calm()
    calm = slice_ns()
    shared_cores.schedule(os.getpid(), os.SCHED_OTHER)
    return calm, slice_ns()


def test_a_calm_rank_has_longer_turns():
    [(calm, left)] = launch.run(turns, ranks=1)
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("turns of a length of one's own: since Linux 6.12")
    assert calm == shared_cores.SLICE_NS > left


def test_the_niceness_stays():
    def nice():
        nicer = os.nice(3)
        shared_cores.calm()
        return os.getpriority(os.PRIO_PROCESS, 0) - nicer

    assert launch.run(nice, ranks=1) == [0]
