"""Faults of a launch, by name: every one ends in one error that names who is at fault and why, and leaves nothing.

    python -m tests.ranks.launch.faults                          all
    python -m tests.ranks.launch.faults --draws 40 --seed 7      some
    python -m tests.ranks.launch.faults --only last-async-stop   those whose name has this part

A name says who (of four ranks), when and how. Then no process is left, no directory, no open file, no port.
"""

import argparse
import contextlib
import ctypes
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import psutil
import torch
from tqdm import tqdm

from minitrain import collectives, launch
from minitrain.ranks.launch import local

RANKS, TIMEOUT_S = 4, 3.0
WHO = {"first": (0,), "last": (3,), "several": (1, 2)}
# How a rank fails, and what the error says of it.
ENDS = {
    "raise": "raised ValueError: a fault (faults.py:", "exit": "called sys.exit(3) (faults.py:",
    "os_exit": "ended the process with status 3", "kill": "died of SIGKILL", "term": "died of SIGTERM",
    "segfault": "died of SIGSEGV at faults.py:", "unpicklable": "raised Odd: <exception str() failed>",
    "long": "raised ValueError: xxx",
}  # fmt: skip
STAYS = {"stop": "no answer to signals (stopped?)", "hang": "at faults.py:"}
MISMATCHES = {
    "shape": "all_reduce(float32[5])",
    "dtype": "all_reduce(int32[4])",
    "order": "all_gather(float32[4])",
}
WHEN = {
    "import": {*ENDS, *STAYS},  # while a rank reads its arguments
    "before": {*ENDS, *STAYS, *MISMATCHES},  # the first collective
    "inside": {*ENDS, "stop"},  # a collective, whose record is written
    "async": {*ENDS, *STAYS, *MISMATCHES},  # between a call and its wait
    "after": {*ENDS, *STAYS},  # the others have returned
    "result": {*ENDS, *STAYS},  # what fn returned is written
}


class Fault(NamedTuple):
    who: str
    when: str
    how: str

    def __str__(self) -> str:
        return "-".join(self)

    def here(self, when: str) -> bool:
        return self.when == when and int(os.environ["RANK"]) in WHO[self.who]


FAULTS = [Fault(who, when, how) for who in WHO for when, hows in WHEN.items() for how in sorted(hows)]


class Odd(Exception):
    def __str__(self):
        raise RuntimeError


def strike(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    elif how == "os_exit":
        os._exit(3)
    elif how in ("kill", "term", "stop"):
        os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))
        time.sleep(1000)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "hang":
        time.sleep(1000)
    elif how == "unpicklable":
        error = Odd()
        error.frame = sys._getframe()
        raise error
    raise ValueError("x" * 20_000_000 if how == "long" else "a fault")


class Striking:
    """Strikes while it is read by a rank, or written by one."""

    def __init__(self, fault: Fault):
        self.fault = fault

    def __reduce__(self):
        if "RANK" in os.environ and self.fault.here("result"):
            strike(self.fault.how)
        return arrive, (self.fault,)


def arrive(fault: Fault) -> Striking:
    if "RANK" in os.environ and fault.here("import"):
        strike(fault.how)
    return Striking(fault)


def program(given: Striking) -> Striking:
    """What all ranks run: a collective before, one in the background, one more; then a result."""
    fault = given.fault
    if fault.here("before"):
        call(fault.how)
    else:
        call("")
    if fault.here("inside"):
        with collectives.observe(lambda *_: strike(fault.how)):
            call("")
    call("")
    handle = collectives.all_reduce(torch.ones(4), collectives.world(), async_op=True)
    if fault.here("async"):
        call(fault.how)
    if fault.when != "after" and fault.when != "result":
        handle.wait()
        call("")
    handle.wait()
    if fault.here("after"):
        strike(fault.how)
    return given


def call(how: str) -> None:
    """A collective, or another one, or none."""
    group = collectives.world()
    if how in {*ENDS, *STAYS}:
        strike(how)
    elif how == "order":
        collectives.all_gather(torch.ones(4), group)
    else:
        dtype = torch.int32 if how == "dtype" else torch.float32
        collectives.all_reduce(torch.ones(5 if how == "shape" else 4, dtype=dtype), group, name="together")


def wrong_with(error: launch.RankError | None, fault: Fault) -> str:
    """What is wrong with the error that a fault has led to; "" if nothing is."""
    who, text = WHO[fault.who], str(error)
    if error is None:
        return "no error"
    if "\n" in text or len(text) > 4000:
        return f"not one line, or {len(text)} letters: {text[:300]}"
    if fault.how in MISMATCHES:
        called = f"rank {who[0]} calls" if len(who) == 1 else f"ranks {who[0]}, {who[1]} call"
        said = "CollectiveMismatch" in text and f"{called} {MISMATCHES[fault.how]}" in text
        return "" if said else text
    if not set(error.ranks) <= set(who) or not error.ranks:
        return f"blames {error.ranks}: {text}"
    if fault.how in STAYS:
        late = f"missing: {'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who))}"
        said = (late if fault.when == "import" else STAYS[fault.how]) in text and error.ranks == who
        return "" if said and isinstance(error, launch.LaunchTimeout) else f"blames {error.ranks}: {text}"
    cause = ENDS[fault.how]
    if fault.when == "result" and fault.how in ("raise", "unpicklable", "long"):
        cause = "raised TypeError: fn returned a Striking, which cannot be sent back ("
    return "" if cause in text and type(error) is launch.RankError else text


def what_is_left(folder: str, helper: psutil.Process, descriptors: int) -> str:
    left = [f"{len(helper.children(recursive=True))} processes"] * bool(helper.children())
    left += [f"directory {name}" for name in os.listdir(folder) if name.startswith("minitrain-")]
    if (now := psutil.Process().num_fds()) > descriptors:
        left.append(f"{now - descriptors} open files")
    for process in psutil.Process(), helper:
        left += [f"port {one.laddr}" for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
    return ", ".join(left)


def trouble(fault: Fault, folder: str) -> str:
    """One launch with one fault, its private files in `folder`: what is wrong with its end, or ""."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        launch.run(int, ranks=1)  # the helper is there
        helper, error, descriptors = local.Helper.find().process, None, psutil.Process().num_fds()
        late = fault.how in STAYS
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                launch.run(
                    program,
                    Striking(fault),
                    ranks=RANKS,
                    timeout_s=TIMEOUT_S if late and fault.when != "import" else 120,
                    start_timeout_s=TIMEOUT_S if late and fault.when == "import" else 120,
                )
            except launch.RankError as failure:
                error = failure
        wrong = wrong_with(error, fault)
        left = what_is_left(folder, psutil.Process(helper.pid), descriptors)
        return wrong + f"; left: {left}" * bool(left)
    finally:
        tempfile.tempdir = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, help="as many, drawn; else all")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="those whose name has this part")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if re.search(given.only, str(fault))]
    if given.draws is not None:
        faults = random.Random(given.seed).sample(faults, min(given.draws, len(faults)))
    held = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in tqdm(faults, mininterval=5):
            wrong = trouble(fault, folder)
            held += not wrong
            if wrong:
                tqdm.write(f"{fault}: {wrong}")
    print(f"{len(faults)} faults, {held} named the ranks at fault and left nothing")
    raise SystemExit(not faults or held < len(faults))


if __name__ == "__main__":
    main()
