"""A run under a hard limit: what it needs is found to the page, and each way to fail is told apart."""

import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from minitrain.systems.memory.limits import LimitedRuns
from tests import patience

MEGA = 1 << 20


def hold(size, kind="torch"):
    """So many bytes at once."""
    held = torch.ones(size, dtype=torch.uint8) if kind == "torch" else bytearray(size)
    return len(held)


def warm():
    hold(MEGA)


@pytest.fixture(scope="module")
def runs():
    with LimitedRuns(warm) as runs:
        yield runs


@pytest.mark.parametrize("size, kind", [(3 * MEGA + 5, "torch"), (40 * MEGA, "bytes")])
def test_finds_what_a_run_holds(runs, size, kind):
    found = runs.smallest_limit(hold, size, kind, most_bytes=64 * MEGA, step_bytes=4096)
    assert abs(found - size) < 0.5 * MEGA  # the interpreter's own small change
    again = runs.smallest_limit(hold, size, kind, most_bytes=64 * MEGA, step_bytes=4096)
    assert abs(again - found) <= 0.25 * MEGA


def test_a_run_gives_its_result_and_one_that_does_not_fit_an_error_of_one_line(runs):
    assert runs.run(hold, 5 * MEGA) == runs.run(hold, 5 * MEGA, limit_bytes=6 * MEGA) == 5 * MEGA
    for kind, said in (("torch", "can't allocate memory"), ("bytes", "MemoryError")):
        with pytest.raises(MemoryError, match=f"hold does not fit in 4,194,304 bytes: .*{said}") as error:
            runs.run(hold, 5 * MEGA, kind, limit_bytes=4 * MEGA)
        assert "\n" not in str(error.value)
    assert runs.run(hold, 5 * MEGA, limit_bytes=6 * MEGA) == 5 * MEGA  # one failure is not the next one's
    found = runs.run(bytes, 3 * MEGA, limit_bytes=4 * MEGA)  # there is room to tell the result
    assert len(found) == 3 * MEGA


def test_an_error_that_is_not_of_memory_is_not_called_so(runs):
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        runs.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        runs.smallest_limit(lambda: 1 / 0, most_bytes=MEGA)
    with pytest.raises(RuntimeError, match="its process ended without an answer"):
        runs.run(lambda: os._exit(3))
    with pytest.raises(MemoryError, match="ended without an answer"):  # as libraries do who cannot say it
        runs.run(lambda: os.abort(), limit_bytes=MEGA)
    with pytest.raises(RuntimeError, match="no answer in 0.2 s"):
        runs.run(lambda: time.sleep(30), timeout_s=0.2)
    with pytest.raises(MemoryError, match="no answer in 0.2 s"):  # a thread that died, for whom others wait
        runs.run(lambda: time.sleep(30), limit_bytes=MEGA, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="SystemExit: 4"):
        runs.run(lambda: sys.exit(4))
    with pytest.raises(MemoryError, match="hold does not fit in 0 bytes"):
        runs.run(hold, 5 * MEGA, limit_bytes=0)
    assert runs.run(lambda: "still there") == "still there"


def test_what_a_warm_up_leaves_is_no_room_and_a_run_ends_with_its_helper():
    """A ring that nobody refers to: collected within the run it would make room for another tensor."""

    def leaves_a_ring():
        gc.disable()
        ring = [torch.ones(20 * MEGA, dtype=torch.uint8)]
        ring.append(ring)

    def collects():
        gc.collect()
        return hold(10 * MEGA)

    read, write = os.pipe()

    def sleeps():
        with open(f"/proc/{caller}/fd/{write}", "wb", buffering=0) as line:
            line.write(b"%d" % os.getpid())
        time.sleep(60)

    caller = os.getpid()
    with LimitedRuns(leaves_a_ring) as runs:
        with pytest.raises(MemoryError):
            runs.run(collects, limit_bytes=4 * MEGA)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(runs.run, sleeps)
            child = int(os.read(read, 20))
            assert not patience.gone(child)
            runs._helper.kill()
            with pytest.raises((EOFError, OSError)):
                ended.result(patience.LONG_S)
        patience.until(lambda: patience.gone(child))
    os.close(read), os.close(write)


def test_wrong_use_is_refused(runs):
    with pytest.raises(ValueError, match="most_bytes=1,048,576 will not do either: try 2,097,152"):
        runs.smallest_limit(hold, 5 * MEGA, most_bytes=MEGA)
    with pytest.raises(ValueError, match="limit_bytes=-1"):
        runs.run(hold, 1, limit_bytes=-1)
    with pytest.raises(ValueError, match="the warm-up failed: ZeroDivisionError: division by zero; it must"):
        LimitedRuns(lambda: 1 / 0)


def test_no_process_stays_behind():
    with LimitedRuns() as runs:
        child, helper = runs.run(os.getpid), runs._helper.pid
    assert patience.gone(child) and patience.gone(helper)
    with pytest.raises(OSError, match="closed"):
        runs.run(os.getpid)
    code = """
import os, time
from minitrain.systems.memory.limits import LimitedRuns
runs = LimitedRuns()
runs.run(lambda: print("of a run", flush=True))
print(runs.run(os.getppid), flush=True)
caller = os.getpid()
runs.run(lambda: open("/dev/stderr", "w").write(str(os.getpid())) and os.kill(caller, 9) or time.sleep(60))
"""
    ended = patience.run([sys.executable, "-c", code])
    said, child = ended.stderr.rsplit("\n", 1)  # what a run prints goes where errors go
    helper, child = int(ended.stdout), int(child)
    assert said == "of a run"
    patience.until(lambda: patience.gone(child) and patience.gone(helper))


@pytest.mark.parametrize("need", range(1, 40))
def test_bisection_ends_at_the_smallest_multiple(need):
    class Pretended(LimitedRuns):
        def __init__(self):
            pass

        def run(self, function, *args, limit_bytes=None, timeout_s=60):
            assert timeout_s == 7 and args == ("x",)
            if limit_bytes is not None and limit_bytes < need:
                raise MemoryError

    ask = partial(Pretended().smallest_limit, None, "x", timeout_s=7)
    assert ask(most_bytes=39, step_bytes=4) == -(-need // 4) * 4
    need = 3 * need << 16
    assert ask() == need  # to 64 KiB, of at most a GiB
    need = (1 << 30) + 1
    with pytest.raises(ValueError, match="try 2,147,483,648"):
        ask()
