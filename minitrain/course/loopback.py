"""Bytes on the wire by the kernel's own account: the instrument that the ledger is checked with.

    bytes_on_the_wire(f, g, ranks=4)        [what crosses the loopback while ranks run f() once, g() once]

The ledger counts what is handed to `send`; what a library then does with it, only the network sees. Here
ranks run in a network namespace of their own (`unshare`), whose loopback carries their messages and nothing
else, and the count is the difference of two readings of the interface between barriers. It holds the headers
of TCP and IP too, some 0.1 % of large tensors; fn runs once before, because connections are opened when they
are first used.

Where the system gives no namespace the shared loopback is read. Other programs only add to it, so the least
of several runs is returned: right on a quiet machine, too much on a busy one. Costs a fresh interpreter, 2 to
4 s. Raises RuntimeError with the last line of what a failed run said.
"""

import base64
import fcntl
import pickle
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import psutil

from minitrain.ranks import collectives, launch
from minitrain.ranks.launch import pickled

PRIVATE = ("unshare", "--user", "--map-root-user", "--net")
SET_FLAGS, UP_AND_RUNNING = 0x8914, 0x41  # linux/sockios.h, linux/if.h
RUNS_WHEN_SHARED = 5


def bytes_on_the_wire(*fns: Callable, ranks: int = 4) -> list[int]:
    """[fn] -> bytes that all ranks together put on the network in one fn(), headers included."""
    private = has_private_network()
    command = [*(PRIVATE if private else ()), sys.executable, "-m", "minitrain.course.loopback"]
    calls = [base64.b64encode(pickled.call(fn, ())).decode() for fn in fns]
    command += ["private" if private else "shared", str(ranks), *calls]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "without a word").splitlines()[-1]
        raise RuntimeError(f"the measurement failed: {last}")
    return [int(count) for count in done.stdout.split()]


def has_private_network() -> bool:
    """Whether this system lets us have a network namespace."""
    found = bool(shutil.which(PRIVATE[0]))
    return found and not subprocess.run([*PRIVATE, "true"], capture_output=True).returncode


def between_readings(fn: Callable) -> int:
    group = collectives.world()
    fn()
    collectives.barrier(group)
    before = loopback_bytes()
    collectives.barrier(group)  # nobody begins before everybody has read
    fn()
    collectives.barrier(group)
    return loopback_bytes() - before


def loopback_bytes() -> int:
    """What the loopback has carried so far; each byte is sent and received there, and counted once here."""
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)
    return interfaces["lo" if "lo" in interfaces else "lo0"].bytes_sent


def bring_up_loopback() -> None:
    """A new namespace has a loopback that is switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh22x", b"lo", UP_AND_RUNNING))


def main(network: str, ranks: str, *calls: str) -> None:
    if network == "private":
        bring_up_loopback()
    runs = 1 if network == "private" else RUNS_WHEN_SHARED
    for call in calls:
        fn, _ = pickle.loads(base64.b64decode(call))
        once = partial(launch.run, between_readings, fn, ranks=int(ranks), checked=False, echo=False)
        print(min(once()[0] for _ in range(runs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
