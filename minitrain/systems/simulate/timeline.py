"""When everything of a step happened, where the time went, and a file for a browser.

Each rank has a stream of computation, and one for each group (for messages: peer and direction).

    step = compute + exposed communication + idle      on every rank

Exposed: a transfer of this rank is on the wire and nothing computes, which overlap could hide. A copy between
memories is a transfer too, on the axis "host" or "disk". Idle: members are late (a pipeline's bubble, a
straggler), or it is done before the others. A trace is in Chromium's Trace Event Format: a process per rank,
a thread per stream, a "complete" event ("X", microseconds) per span, names as metadata ("M").
"""

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import NamedTuple

from minitrain.plan.simulate.machines import Machine
from minitrain.ranks.events import Compute, Copy, Issue

Intervals = list[tuple[float, float]]  # (start, end) pairs in order of start
# What a trace tells of an event, besides its phase.
ISSUED = ("seq", "axis", "payload_bytes", "sent_bytes")
FACTS = {Compute: ("flops", "bytes", "dtype"), Copy: ("axis", "bytes"), Issue: ISSUED}


class Span(NamedTuple):
    """Something that took time on a stream of a rank. A transfer starts and ends together on all members."""

    stream: str  # "compute", an axis ("dp"), an axis and a peer ("pp to 3", "pp from 1"), a way ("to_host")
    kind: str  # "compute", "wait" (on the compute stream) or "transfer"
    start_s: float
    end_s: float
    event: Compute | Issue | Copy  # of a wait: what it waits for
    issued_s: float  # of a transfer: when this rank asked for it; else start_s

    duration_s = property(lambda self: self.end_s - self.start_s)
    name = property(lambda self: self.event.name if isinstance(self.event, Compute) else self.event.op)


@dataclass(frozen=True)
class Account:  # where one rank's step went
    compute_s: float  # operators at work
    communication_s: float  # at least one transfer of this rank on the wire
    exposed_communication_s: float  # the part of it during which nothing computes
    waiting_s: float  # the compute stream stopped in a wait: exposed communication and late members
    idle_s: float  # neither operators nor transfers

    overlap_s = property(lambda self: self.communication_s - self.exposed_communication_s)


@dataclass(frozen=True, repr=False)
class Timeline:
    """`spans[rank]` in order of start. The five times below are means over the ranks."""

    machine: Machine
    spans: dict[int, list[Span]]

    compute_s = property(lambda self: self.mean.compute_s)
    communication_s = property(lambda self: self.mean.communication_s)
    exposed_communication_s = property(lambda self: self.mean.exposed_communication_s)
    waiting_s = property(lambda self: self.mean.waiting_s)
    idle_s = property(lambda self: self.mean.idle_s)

    @cached_property
    def step_s(self) -> float:
        """From zero to the end of the last thing that happens on any rank."""
        return max((span.end_s for spans in self.spans.values() for span in spans), default=0.0)

    @cached_property
    def accounts(self) -> dict[int, Account]:
        return {rank: _account(spans, self.step_s) for rank, spans in self.spans.items()}

    @cached_property
    def mean(self) -> Account:
        each = self.accounts.values()
        return Account(*(sum(part) / len(each) for part in zip(*map(astuple, each))))

    def mfu(self, model_flops: float, dtype: str = "bfloat16") -> float:
        """Of a device's peak, by a rank's `model_flops` of a step, nothing recomputed (PaLM, appendix B)."""
        return model_flops / (self.step_s * self.machine.device.peak(dtype))

    def transfers(self, rank: int, axis: str | None = None) -> list[Span]:
        transfers = [span for span in self.spans[rank] if span.kind == "transfer"]
        return [span for span in transfers if axis in (None, span.event.axis)]

    def exposed(self, rank: int, axis: str | None = None) -> Intervals:
        """When transfers of this rank (on one axis) were on the wire and nothing computed."""
        return outside(_intervals(self.transfers(rank, axis)), join(_intervals(self.spans[rank], "compute")))

    def table(self) -> str:
        titles = "".join(f"  {title:>15}" for title in ("compute", "exposed comm.", "idle", "hidden comm."))
        lines = [f"{_duration(self.step_s)} a step on {self.machine.name}", f"{'rank':>6}{titles}"]
        for rank, account in self.accounts.items():
            parts = account.compute_s, account.exposed_communication_s, account.idle_s, account.overlap_s
            cells = (f"{_duration(part)} {part / self.step_s if self.step_s else 0:>5.0%}" for part in parts)
            lines.append(f"{rank:>6}" + "".join(f"  {cell:>15}" for cell in cells))
        rank = min(self.spans)
        for axis in sorted({span.event.axis for span in self.transfers(rank)}):
            spans = self.transfers(rank, axis)
            sent = f"{len(spans)} transfers, {sum(span.event.sent_bytes for span in spans):,} bytes sent"
            wire = _duration(sum(span.duration_s for span in spans))
            lines.append(f"rank {rank} on {axis}: {sent}, {wire} on the wire")
        return "\n".join(lines)

    __repr__ = table  # a notebook shows what the last line of a cell returns

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write a trace of all ranks for chrome://tracing or ui.perfetto.dev; returns the path."""
        events = [event for rank, spans in self.spans.items() for event in _trace_of(rank, spans)]
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
        return Path(path)


def _intervals(spans: Iterable[Span], kind: str | None = None) -> Intervals:
    return [(span.start_s, span.end_s) for span in spans if kind in (None, span.kind)]


def _account(spans: list[Span], step_s: float) -> Account:
    compute, transfers = join(_intervals(spans, "compute")), join(_intervals(spans, "transfer"))
    compute_s, exposed_s = length(compute), length(outside(transfers, compute))
    waiting_s = sum(span.duration_s for span in spans if span.kind == "wait")
    idle_s = max(0.0, step_s - compute_s - exposed_s)  # rounding must not make it negative
    return Account(compute_s, length(transfers), exposed_s, waiting_s, idle_s)


def _duration(seconds: float) -> str:
    """1.234 s, 1.234 ms or 1.2 us."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def join(intervals: Iterable[tuple[float, float]], gap: float = 0.0, keep: float = inf) -> Intervals:
    """Fewer: what overlaps or is at most `gap` apart becomes one, unless both are longer than `keep`."""
    joined: Intervals = []
    for start, end in sorted(intervals):
        if joined and start - joined[-1][1] <= gap and min(end - start, joined[-1][1] - joined[-1][0]) < keep:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def outside(intervals: Iterable[tuple[float, float]], covers: Intervals) -> Intervals:
    """The parts of `intervals` that no cover overlaps; covers do not overlap each other. One pass."""
    free, first = [], 0
    for start, end in sorted(intervals):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        i = first
        while i < len(covers) and covers[i][0] < end:
            free.append((start, covers[i][0]))
            start = covers[i][1]
            i += 1
        free.append((start, end))
    return [(start, end) for start, end in free if end > start]


def _trace_of(rank: int, spans: list[Span]) -> list[dict]:
    threads = {"compute": 0}  # the stream of computation comes first, then the others in order of use
    for span in spans:
        threads.setdefault(span.stream, len(threads))
    names = [("process", 0, f"rank {rank}", rank)]
    names += [("thread", thread, stream, thread) for stream, thread in threads.items()]
    events = [
        {"ph": "M", "pid": rank, "tid": thread, "name": f"{kind}_{key}", "args": {key: argument}}
        for kind, thread, name, order in names
        for key, argument in (("name", name), ("sort_index", order))
    ]
    for span in spans:
        begun, took, issued = (round(s * 1e6, 4) for s in (span.start_s, span.duration_s, span.issued_s))
        told = {name: getattr(span.event, name) for name in ("phase", *FACTS[type(span.event)])}
        if isinstance(span.event, Issue):
            told |= {"call": span.event.site, "issued_us": issued}
        name = f"wait for {span.name}" if span.kind == "wait" else span.name
        what = {"name": name, "cat": span.kind, "pid": rank, "tid": threads[span.stream]}
        events.append({"ph": "X", **what, "ts": begun, "dur": took, "args": told})
    return events
