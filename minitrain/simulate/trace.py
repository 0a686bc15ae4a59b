"""A timeline as a file for chrome://tracing and ui.perfetto.dev.

The format is the Trace Event Format of the Chromium project: a process per rank, a thread per stream, a "complete"
event ("X", microseconds) per span, and names for both as metadata ("M"). Equal timelines give equal files.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from minitrain.simulate.events import Compute


def write(spans_by_rank: Mapping[int, list], path: str | Path, ranks: Iterable[int] | None = None) -> Path:
    """Write the spans of `ranks` (default: all) to `path`; returns it. Raises ValueError for a rank without spans."""
    events = []
    for rank in spans_by_rank if ranks is None else ranks:
        if rank not in spans_by_rank:
            raise ValueError(
                f"rank {rank} is not in this timeline; choose from {', '.join(map(str, spans_by_rank))}"
            )
        events += _of_rank(rank, spans_by_rank[rank])
    path = Path(path)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def _of_rank(rank: int, spans: list) -> list[dict]:
    streams = {"compute": 0}  # the stream of computation comes first, then the others in order of use
    for span in spans:
        streams.setdefault(span.stream, len(streams))
    names = [
        _metadata("process_name", rank, 0, name=f"rank {rank}"),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    for stream, thread in streams.items():
        names += [
            _metadata("thread_name", rank, thread, name=stream),
            _metadata("thread_sort_index", rank, thread, sort_index=thread),
        ]
    return names + [_complete(span, rank, streams[span.stream]) for span in spans]


def _metadata(what: str, process: int, thread: int, **arguments) -> dict:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def _complete(span, process: int, thread: int) -> dict:
    event = span.event
    if isinstance(event, Compute):
        arguments = {"flops": event.flops, "bytes": event.bytes, "dtype": event.dtype}
    else:
        arguments = {
            "seq": event.seq,
            "axis": event.axis,
            "payload_bytes": event.payload_bytes,
            "sent_bytes": event.sent_bytes,
            "call": event.site,
            "issued_us": _microseconds(span.issued_s),
        }
    return {
        "ph": "X",
        "name": f"wait for {span.name}" if span.kind == "wait" else span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start_s),
        "dur": _microseconds(span.duration_s),
        "args": {"phase": event.phase, **arguments},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 4)
