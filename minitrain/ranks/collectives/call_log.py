"""Every collective leaves a record before it starts, where others can read it even if the rank never returns.

A process keeps its last `SLOTS` calls in memory (`last_calls`) and, after `log_to(path)`, in a memory-mapped
file of fixed slots: writing one is a copy of 320 bytes and no system call, and a rank that hangs inside the
network library still shows its last calls to whoever opens the file (`read_log`). `observe(callback)` hands
the records to an instrument such as the ledger.

A slot: one state byte (b"i" issued, b"d" done), then the fields as text between tabs, padded with zero bytes.
A recorder of collectives in flight is PyTorch's idea (the NCCL flight recorder). Differs: gloo too, and the
call site.
"""

import mmap
import os
import sys
import zlib
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator

import torch

from minitrain.ranks.process import LAST_CALLS, PROCESS

SLOTS, SLOT_BYTES = LAST_CALLS, 320


@dataclass(slots=True, eq=False)
class Call:
    """One call of one rank. `seq` counts collectives per group, and messages per (group, peer, direction)."""

    seq: int
    op: str
    axis: str  # the mesh axis of the group, "world" for everyone
    members: tuple[int, ...]  # global ranks of the group, one object shared by all calls of the group
    who: str  # the same in short: "0-3"
    payload_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: str  # "file.py:41" of the caller
    peer: int | None = None  # global rank, for send and receive
    name: str | None = None  # given by the caller, to tell calls of one line apart
    dim: int = 0
    source: int | None = None  # of a broadcast
    uneven: bool = False  # all_to_all with sizes: members' shapes differ along dim
    reduction: str = "sum"  # of an all_reduce, or "max"
    sent_bytes: int = 0  # grows while buffers are handed to the network: final once the call is done
    group: str = ""  # torch's name of a group that has no axis
    planned: bool = False  # True: the backend moves the data itself, so the plan's volume is charged
    order: int = -1  # position among all calls of this process

    def __str__(self) -> str:
        return f"{describe(self)} #{self.seq} on {self.axis} at {self.site}"


# What `read_log` gives back: fields of a `Call` as text. `done` is False while it is in flight; `members` are
# "0-3" or "0,2,5", of more than 80 letters the end is a checksum.
LOGGED = "order done seq op axis members shape dtype payload_bytes peer name group site"
LoggedCall = namedtuple("LoggedCall", LOGGED)


def signature(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype)[6:]}[{', '.join(map(str, shape))}]"


def describe(call: Call) -> str:
    """What all members must agree on, in words: "all_gather(float32[4, 8], dim=1)"."""
    shape = tuple("*" if call.uneven and i == call.dim else size for i, size in enumerate(call.shape))
    extra = f", dim={call.dim}" if call.dim else ""
    extra += f", source={call.source}" if call.source is not None else ""
    extra += f", op={call.reduction}" if call.reduction != "sum" else ""
    return f"{call.op}({signature(shape, call.dtype)}{extra})"


def span(ranks: tuple[int, ...]) -> str:
    """(0, 1, 2, 3) -> "0-3", otherwise the ranks with commas; at most 80 letters."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return shortened(",".join(map(str, ranks)), 80)


def shortened(text: str, letters: int) -> str:
    """Of a text that is too long the end becomes a checksum, so that two of them still differ."""
    return text if len(text) <= letters else f"{text[: letters - 9]}~{zlib.crc32(text.encode()):08x}"


# ---- where the caller stands -----------------------------------------------------------------------------

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def name_file(filename: str, label: str) -> None:
    """Call sites in `filename`, the file of a notebook cell say, print as `label:line` from now on."""
    PROCESS.labels[filename] = label


@contextmanager
def standing_at(site: str) -> Iterator[None]:
    """Calls made inside report `site`: a backward collective belongs to the line of its forward."""
    PROCESS.thread.site = site
    try:
        yield
    finally:
        PROCESS.thread.site = None


def call_site() -> str:
    """The first frame outside minitrain's collectives and torch, as "train.py:41"."""
    if getattr(PROCESS.thread, "site", None):
        return PROCESS.thread.site
    frame, labels = sys._getframe(1), PROCESS.labels
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename not in labels:
            labels[filename] = None if filename.startswith((_HERE, _TORCH)) else os.path.basename(filename)
        if labels[filename] is not None:
            return f"{labels[filename]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"  # a backward pass on a thread of torch's own has no Python caller


# ---- the log ---------------------------------------------------------------------------------------------


def issued(call: Call) -> Call:
    """Record a call that is about to start."""
    call.order = PROCESS.num_calls
    PROCESS.num_calls += 1
    PROCESS.recent.append(call)
    if PROCESS.log_file is not None:
        what = call.order, call.seq, call.op, call.axis, call.who, ", ".join(map(str, call.shape))
        name, peer = (
            shortened((call.name or "").replace("\t", " "), 40),
            "" if call.peer is None else call.peer,
        )
        fields = *what, str(call.dtype)[6:], call.payload_bytes, peer, name, call.group, call.site
        text = ("i" + "\t".join(map(str, fields))).encode()[:SLOT_BYTES]
        start = (call.order % SLOTS) * SLOT_BYTES
        PROCESS.log_file[start : start + SLOT_BYTES] = text.ljust(SLOT_BYTES, b"\0")
    announce("issue", call)
    return call


def finished(call: Call) -> None:
    """Mark the call as done (from the worker thread when it is asynchronous)."""
    in_log = PROCESS.num_calls - call.order <= SLOTS  # else its slot already belongs to a later call
    if PROCESS.log_file is not None and in_log:
        start = (call.order % SLOTS) * SLOT_BYTES
        PROCESS.log_file[start : start + 1] = b"d"


def announce(kind: str, subject):
    """Tell the observers; the subject itself.

    issue, wait     a `Call` that starts, and that has been waited for: its `sent_bytes` are final
    copy, copied    a transfer between memories (`direction`, `bytes`), likewise
    buffer, host    scratch memory, and memory of the host, just allocated
    gradient        one that is about to leave its parameter
    resized         a gathered tensor whose storage has just grown or shrunk
    """
    for callback in tuple(PROCESS.observers):
        callback(kind, subject)
    return subject


def announce_host(tensor: torch.Tensor, kind: str = "activations") -> torch.Tensor:
    """Mark the block of `tensor` as memory of the host, not of the device: without an accelerator both are
    the same memory. An account calls it `kind`."""
    tensor.untyped_storage().on_host = kind
    return announce("host", tensor)


@contextmanager
def observe(callback: Callable) -> Iterator[None]:
    """Call `callback(kind, subject)` whenever something is announced."""
    PROCESS.observers.append(callback)
    try:
        yield
    finally:
        PROCESS.observers.remove(callback)


def last_calls() -> list[Call]:
    """This process's last calls, oldest first."""
    return list(PROCESS.recent)


def log_to(path: str | os.PathLike) -> None:
    """Write a record of every further call into the file `path` (created, readable by the owner only)."""
    with open(path, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.truncate(SLOTS * SLOT_BYTES)
        PROCESS.log_file = mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)


def read_log(path: str | os.PathLike) -> list[LoggedCall]:
    """The last calls of the process that logs to `path`, oldest first; at any time, even after its death."""
    with open(path, "rb") as file:
        data = file.read()
    calls = []
    for slot in (data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES)):
        fields = slot[1:].rstrip(b"\0").decode(errors="replace").split("\t")
        try:
            done = {b"i": False, b"d": True}[slot[:1]]
            order, seq, *what, size, peer, name, group, site = fields
            more = int(size), int(peer) if peer else None, name or None, group, site
            calls.append(LoggedCall(int(order), done, int(seq), *what, *more))
        except (TypeError, ValueError, KeyError):
            continue  # never written, or being written right now
    return sorted(calls, key=lambda call: call.order)
