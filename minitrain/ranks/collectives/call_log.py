"""Every collective leaves a record before it starts, where others can read it even if the rank never returns.

A process keeps its last `SLOTS` calls in memory (`last_calls`) and, after `log_to(path)`, in a memory-mapped
file of fixed slots: a copy of 320 bytes and no system call, and of a rank that hangs in the network library
others can read the last calls (`read_log`). A slot is one state byte (b"i" issued, b"q" queued on a stream of
a GPU, b"d" done), then fields as text between tabs. `observe(callback)` hands records to an instrument such
as the ledger. PyTorch's NCCL flight recorder is the model. Differs: gloo too, the call site.
"""

import mmap
import os
import sys
import zlib
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Iterator

import torch

from minitrain.ranks.process import LAST_CALLS, PROCESS

SLOTS, SLOT_BYTES = LAST_CALLS, 320
HEADER_BYTES = 256
ROOM = (112, 48, 72, 20)  # bytes for what, name, site and count, which with three separators fit a header
SEPARATOR = "\x1f"


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


# What `read_log` gives back: fields of a `Call` as text. `done` is False while it is in flight, `queued` True
# if then its GPU has been told; `members`: "0-3" or "0,2,5", of more than 80 letters the end is a checksum.
LOGGED = "order done seq op axis members shape dtype payload_bytes peer name group site queued"
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
    call.order = PROCESS.num_calls
    PROCESS.num_calls += 1
    PROCESS.recent.append(call)
    if PROCESS.log_file is not None:
        what = call.order, call.seq, call.op, call.axis, call.who, ", ".join(map(str, call.shape))
        name = shortened((call.name or "").replace("\t", " "), 40)
        peer = "" if call.peer is None else call.peer
        fields = *what, str(call.dtype)[6:], call.payload_bytes, peer, name, call.group, call.site
        text = ("i" + "\t".join(map(str, fields))).encode()[:SLOT_BYTES]
        start = (call.order % SLOTS) * SLOT_BYTES
        PROCESS.log_file[start : start + SLOT_BYTES] = text.ljust(SLOT_BYTES, b"\0")
    announce("issue", call)
    return call


def finished(call: Call) -> None:
    _mark(call, b"d")


def queued(call: Call) -> None:
    """Its GPU has been told to do it, and the host goes on."""
    _mark(call, b"q")


def _mark(call: Call, state: bytes) -> None:
    in_log = PROCESS.num_calls - call.order <= SLOTS  # else its slot already belongs to a later call
    if PROCESS.log_file is not None and in_log:
        start = (call.order % SLOTS) * SLOT_BYTES
        PROCESS.log_file[start : start + 1] = state


def announce(kind: str, subject):
    """Tell the observers; the subject itself.

    issue, wait     a `Call` that starts, and that has been waited for: its `sent_bytes` are final
    copy, copied    a transfer between memories (`direction`, `bytes`), likewise
    buffer, host    scratch memory, and memory of the host, just allocated
    gradient        one that is about to leave its parameter
    resized         a gathered tensor whose storage has just grown or shrunk
    kernel          the values of the `Compute` that the operators from here to the next None stand for
    forward, gradients, update    of a step's batch: it begins; all gradients are sums; weights are new"""
    for callback in tuple(PROCESS.observers):
        callback(kind, subject)
    return subject


def announce_host(tensor: torch.Tensor, kind: str = "activations") -> torch.Tensor:
    """Mark the block of `tensor` as the host's, which on a CPU is the same memory; an account's `kind`."""
    tensor.untyped_storage().on_host = kind
    return announce("host", tensor)


@contextmanager
def observe(callback: Callable) -> Iterator[None]:
    PROCESS.observers.append(callback)
    try:
        yield
    finally:
        PROCESS.observers.remove(callback)


def last_calls() -> list[Call]:
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
            done, queued = {b"i": (False, False), b"q": (False, True), b"d": (True, False)}[slot[:1]]
            order, seq, *what, size, peer, name, group, site = fields
            more = int(size), int(peer) if peer else None, name or None, group, site
            calls.append(LoggedCall(int(order), done, int(seq), *what, *more, queued))
        except (TypeError, ValueError, KeyError):
            continue  # never written, or being written right now
    return sorted(calls, key=lambda call: call.order)


# ---- checked mode ----------------------------------------------------------------------------------------


def set_checked(on: bool) -> None:
    """Turn checked mode on or off in this process: alike on all ranks, and not between halves of a call."""
    PROCESS.checked = bool(on)


class CollectiveMismatch(RuntimeError):
    """The ranks of a group do not call the same collective. In checked mode they swap a header before each.

    gloo does not look: it adds float32 to the bits of int32, sums two tensors of one shape in swapped order,
    and aborts the process when sizes differ. A header of 256 bytes says what is called, where and as what:

        collective  Description (operation, dtype, shape, dim, source, sum or max) and call site must be the
                    same on all members: two tensors summed in swapped order differ in nothing else. Where
                    branches meet on purpose, or one line issues many tensors, pass `name=`: then names must
                    agree, and sites may differ.
        all_to_all  With uneven sizes, what each rank sends must be what its receiver expects.
        message     The header travels ahead, and the data's tag has dtype and shape: what the receiver does
                    not expect is never written into its tensor. Sites may differ.

    n-1 headers per call are not counted as sent bytes. Nothing is compared of messages on NCCL, in a dry run,
    or of a rank that calls nothing: the others wait, and the launch reports the hang."""


@lru_cache(maxsize=256)
def pack(*fields: str) -> torch.Tensor:
    texts = [field.encode("ascii", "backslashreplace").decode() for field in fields]
    cut = [shortened(text, room) for text, room in zip(texts, ROOM)]
    header = SEPARATOR.join(cut).encode().ljust(HEADER_BYTES, b"\0")
    return torch.frombuffer(bytearray(header), dtype=torch.uint8)


def unpack(header: torch.Tensor) -> tuple[str, ...]:
    return tuple(bytes(header.tolist()).rstrip(b"\0").decode().split(SEPARATOR))


def compare(call: Call, received: list[torch.Tensor], expects: list[int] | None) -> None:
    """Raise CollectiveMismatch if the members' headers, in rank order, do not belong together."""
    headers = [unpack(header) for header in received]
    if expects is None and headers.count(headers[0]) == len(headers):
        return
    calls = dict(zip(call.members, headers))
    if len({(what, name, "" if name else site) for what, name, site, _ in calls.values()}) > 1:
        raise CollectiveMismatch(disagreement(call, calls))
    for member, expected in zip(call.members, expects or ()):
        sent = calls[member][-1]
        if int(sent) != expected:
            both = f"rank {member} sends {sent} elements at {call.site}, but here receive_sizes asks"
            raise CollectiveMismatch(f"{place(call)}: {both} for {expected}; pass what it sends")


def disagreement(call: Call, calls: dict[int, tuple[str, ...]]) -> str:
    """Who calls what, the fewest first: "rank 2 calls all_reduce(..) at .., others all_reduce(..) at .."."""
    ranks: dict[str, list[int]] = {}
    for member, (what, name, site, _) in calls.items():
        named = f" named {name!r}" if name else ""
        ranks.setdefault(f"{what}{named} at {site}", []).append(member)
    sides = sorted(ranks.items(), key=lambda side: len(side[1]))
    plural = lambda who, what: f"ranks {', '.join(map(str, who))} call {what}"
    texts = [plural(who, what) if len(who) > 1 else f"rank {who[0]} calls {what}" for what, who in sides]
    if len(sides) == 2 and len(sides[0][1]) < len(sides[1][1]):
        texts[1] = f"others {sides[1][0]}"
    only_sites_differ = len({(what, name) for what, name, *_ in calls.values()}) == 1
    hint = "; if these belong together, give both the same name=" if only_sites_differ else ""
    return f"{place(call)}: {', '.join(texts)}{hint}"


def place(call: Call) -> str:
    return f"collective #{call.seq}" + ("" if call.axis == "world" else f" on {call.axis}")


def compare_message(call: Call, header: torch.Tensor) -> None:
    (what, _, site), expected = unpack(header), signature(call.shape, call.dtype)
    if what != expected:
        both = f"it sends {what} at {site}, this rank expects {expected} at {call.site}"
        raise CollectiveMismatch(f"message #{call.seq} from rank {call.peer}: {both}")
