"""Checked mode: the ranks of a group swap a header before each collective, and say if they disagree.

gloo does not look: it adds float32 to the bits of int32, sums two tensors of one shape in swapped order, and
aborts the process when sizes differ. A header of 256 bytes says what is called, where and with which `name`:

    collective  The description (operation, dtype, shape, dim, source, sum or max) must be the same on all
                members, and so must the call site: SPMD code is one program, and two tensors summed in
                swapped order differ in nothing else.
                Where branches meet on purpose (`if rank == 0: broadcast(..) else: broadcast(..)`), or where
                one line issues many tensors (a loop over buckets), pass `name=`: then names must agree, and
                sites may differ.
    all_to_all  With uneven sizes, what each rank sends must be what its receiver expects.
    message     The header travels ahead, and dtype and shape go into the tag of the data, so that a message
                the receiver does not expect is never written into its tensor. Sites may differ.

A rank that calls something else is caught; a rank that calls nothing leaves the others waiting, and the
launch reports the hang. Each header is a small message, n-1 per call; headers are not counted as sent bytes.
On NCCL and in a dry run nothing is compared.
"""

import zlib
from functools import lru_cache

import torch

from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.call_log import Call
from minitrain.ranks.process import PROCESS

HEADER_BYTES = 256
ROOM = (112, 48, 72, 20)  # bytes for what, name, site and count, which with three separators fit a header
SEPARATOR = "\x1f"


def set_checked(on: bool) -> None:
    """Turn checked mode on or off in this process: alike on all ranks, and not between halves of a call."""
    PROCESS.checked = bool(on)


class CollectiveMismatch(RuntimeError):
    """The ranks of a group do not call the same collective."""


@lru_cache(maxsize=256)
def pack(*fields: str) -> bytes:
    """Text fields as a header."""
    texts = [field.encode("ascii", "backslashreplace").decode() for field in fields]
    cut = [call_log.shortened(text, room) for text, room in zip(texts, ROOM)]
    return SEPARATOR.join(cut).encode().ljust(HEADER_BYTES, b"\0")


def unpack(header: bytes) -> list[str]:
    return header.rstrip(b"\0").decode().split(SEPARATOR)


def as_tensor(header: bytes) -> torch.Tensor:
    """A header as a message."""
    return torch.frombuffer(bytearray(header), dtype=torch.uint8)


def headers_of(call: Call, sends: list[int] | None) -> list[bytes]:
    """The header for each member; it also says how many elements go there, where sizes may differ."""
    counts = [""] * len(call.members) if sends is None else map(str, sends)
    return [pack(call_log.describe(call), call.name or "", call.site, count) for count in counts]


def compare(call: Call, headers: list[bytes], expects: list[int] | None) -> None:
    """Raise CollectiveMismatch if the members' headers, in rank order, do not belong together."""
    if expects is None and headers.count(headers[0]) == len(headers):
        return
    calls = {member: unpack(header) for member, header in zip(call.members, headers)}
    if len({(what, name, "" if name else site) for what, name, site, _ in calls.values()}) > 1:
        raise CollectiveMismatch(disagreement(call, calls))
    for member, expected in zip(call.members, expects or ()):
        sent = calls[member][-1]
        if int(sent) != expected:
            raise CollectiveMismatch(
                f"{place(call)}: rank {member} sends {sent} elements at {call.site}, "
                f"but here receive_sizes asks for {expected}; pass what it sends"
            )


def disagreement(call: Call, calls: dict[int, list[str]]) -> str:
    """Who calls what, the fewest first: "rank 2 calls all_reduce(..) at .., others all_reduce(..) at .."."""
    ranks: dict[str, list[int]] = {}
    for member, (what, name, site, _) in calls.items():
        named = f" named {name!r}" if name else ""
        ranks.setdefault(f"{what}{named} at {site}", []).append(member)
    sides = sorted(ranks.items(), key=lambda side: len(side[1]))
    texts = [
        f"ranks {', '.join(map(str, who))} call {what}" if len(who) > 1 else f"rank {who[0]} calls {what}"
        for what, who in sides
    ]
    if len(sides) == 2 and len(sides[0][1]) < len(sides[1][1]):
        texts[1] = f"others {sides[1][0]}"
    only_sites_differ = len({(what, name) for what, name, *_ in calls.values()}) == 1
    hint = "; if these belong together, give both the same name=" if only_sites_differ else ""
    return f"{place(call)}: {', '.join(texts)}{hint}"


def place(call: Call) -> str:
    return f"collective #{call.seq}" + ("" if call.axis == "world" else f" on {call.axis}")


# ---- messages --------------------------------------------------------------------------------------------


def message_header(call: Call) -> bytes:
    return pack(call_log.signature(call.shape, call.dtype), "", call.site)


def fingerprint(sent: Call) -> int:
    """16 bits of what is sent."""
    return zlib.crc32(call_log.signature(sent.shape, sent.dtype).encode()) & 0xFFFF


def compare_message(call: Call, header: bytes) -> None:
    """Raise CollectiveMismatch if the message announced by `header` is not what `call` expects."""
    what, _, site = unpack(header)
    expected = call_log.signature(call.shape, call.dtype)
    if what != expected:
        raise CollectiveMismatch(
            f"message #{call.seq} from rank {call.peer}: it sends {what} at {site}, "
            f"this rank expects {expected} at {call.site}"
        )
