"""A timeline as a file for chrome://tracing and ui.perfetto.dev.

The Trace Event Format of the Chromium project: a process per rank, a thread per stream, a "complete" event
("X", microseconds) per span, and names for both as metadata ("M"). Equal timelines give equal files.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from minitrain.ranks.events import Compute, Copy, Issue


def write(spans_by_rank: Mapping[int, list], path: str | Path, ranks: Iterable[int] | None = None) -> Path:
    """Write the spans of `ranks` (default: all) to `path`; returns it."""
    events = []
    for rank in spans_by_rank if ranks is None else ranks:
        if rank not in spans_by_rank:
            known = ", ".join(map(str, spans_by_rank))
            raise ValueError(f"rank {rank} is not in this timeline; choose from {known}")
        events += _of_rank(rank, spans_by_rank[rank])
    path = Path(path)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def _of_rank(rank: int, spans: list) -> list[dict]:
    threads = {"compute": 0}  # the stream of computation comes first, then the others in order of use
    for span in spans:
        threads.setdefault(span.stream, len(threads))
    names = _names("process", rank, 0, f"rank {rank}", rank)
    for stream, thread in threads.items():
        names += _names("thread", rank, thread, stream, thread)
    return names + [_complete(span, rank, threads[span.stream]) for span in spans]


def _names(what: str, process: int, thread: int, name: str, order: int) -> list[dict]:
    event = {"ph": "M", "pid": process, "tid": thread}
    arguments = {f"{what}_name": {"name": name}, f"{what}_sort_index": {"sort_index": order}}
    return [{**event, "name": key, "args": args} for key, args in arguments.items()]


def _complete(span, process: int, thread: int) -> dict:
    event, names = span.event, ("seq", "axis", "payload_bytes", "sent_bytes")
    if isinstance(event, Compute):
        names = "flops", "bytes", "dtype"
    elif isinstance(event, Copy):
        names = "axis", "bytes"
    arguments = {name: getattr(event, name) for name in ("phase", *names)}
    if isinstance(event, Issue):
        arguments |= {"call": event.site, "issued_us": _microseconds(span.issued_s)}
    return {
        "ph": "X",
        "name": f"wait for {span.name}" if span.kind == "wait" else span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start_s),
        "dur": _microseconds(span.duration_s),
        "args": arguments,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 4)
