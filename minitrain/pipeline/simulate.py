"""When everything in a schedule happens, if an action takes as long as we say: bubble, idle time, peak of activations. No torch.

    simulate(one_f_one_b(4, 8), Costs(F=1, B=2)).makespan  ->  33

An action starts when its rank is free and all it needs is done, plus `send` if that was done on another rank. Nothing else: links
have room for all messages, and a message costs its ranks no time. With whole numbers or Fractions for costs every time is exact.

    makespan        from 0 to the end of the last action              busy(rank)     the time rank computes
    bubble          idle time / (ranks · makespan)                    overhead       idle time / busy time: (p-1)/m where bubble is (p-1)/(m+p-1)

`Costs` are of one whole stage; `stage={3: 2}` makes stage 3 twice as long. Stages that are 1/v of a rank cost 1/v: give
Costs(F=Fraction(1, v), …). B defaults to I + W. A pair takes `FB`, if given, else its two parts in a row. What a forward kept takes
`move` to another rank (bpipe.py), by default `send`.
Takes O(actions): 64 ranks and 512 microbatches in less than a second.
Raises ValueError naming the stuck heads if the ranks wait for each other (schedule.in_order), and for costs below 0.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, Entry, Pair, Schedule, in_order, parts

Time = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action, and of a message between two ranks."""

    F: Time = 1
    B: Time | None = None
    I: Time = 1  # noqa: E741  the paper's letter
    W: Time = 1
    R: Time | None = None
    FB: Time | None = None
    send: Time = 0
    move: Time | None = None
    stage: Mapping[int, Time] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("F", "B", "I", "W", "R", "FB", "send", "move"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"Costs: {name}={value}; a time is 0 or more")

    def of(self, entry: Entry) -> Time:
        if isinstance(entry, Pair):
            if self.FB is not None:
                return (
                    self.FB
                    * (self.stage.get(entry.forward.stage, 1) + self.stage.get(entry.backward.stage, 1))
                    / 2
                    if self.stage
                    else self.FB
                )
            return self.of(entry.forward) + self.of(entry.backward)
        match entry.kind:
            case "F":
                time = self.F
            case "B":
                time = self.I + self.W if self.B is None else self.B
            case "I":
                time = self.I
            case "W":
                time = self.W
            case "R":
                time = self.F if self.R is None else self.R
            case _:  # tensors that move are messages
                return 0
        return time * self.stage.get(entry.stage, 1) if self.stage else time


@dataclass(frozen=True)
class Measured:
    """A time for every action of its own, from a run: `simulate` takes it in place of Costs."""

    times: Mapping[Action, Time]
    send: Time = 0

    def of(self, entry: Entry) -> Time:
        return sum(self.times[action] for action in parts([entry]))


class Span(NamedTuple):
    entry: Entry
    start: Time
    end: Time


@dataclass(frozen=True)
class Simulation:
    """`spans[rank]`, in order."""

    schedule: Schedule
    costs: Costs | Measured
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        return max((spans[-1].end for spans in self.spans if spans), default=0)

    def busy(self, rank: int) -> Time:
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> Time:
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> Time:
        """Share of the ranks' time in which they wait."""
        return _ratio(
            sum(self.idle(rank) for rank in range(len(self.spans))), len(self.spans) * self.makespan
        )

    @property
    def overhead(self) -> Time:
        """Waiting per work."""
        return _ratio(
            sum(self.idle(rank) for rank in range(len(self.spans))),
            sum(self.busy(rank) for rank in range(len(self.spans))),
        )

    def start(self, action: Action) -> Time:
        return next(
            span.start for span in self.spans[self.schedule.place[action]] if action in parts([span.entry])
        )


def simulate(schedule: Schedule, costs: Costs | Measured = Costs()) -> Simulation:
    """As soon as possible, in the order of the lists."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is a cycle, and to look for some takes longer than the rest in a process that has torch
    try:
        return Simulation(schedule, costs, tuple(map(tuple, _spans(schedule, costs))))
    finally:
        if collecting:
            gc.enable()


def _spans(schedule: Schedule, costs: Costs | Measured) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    ended: dict[Action, tuple[Time, int]] = {}  # when, and on which rank
    send, needed = costs.send, schedule.needs
    move = send if getattr(costs, "move", None) is None else costs.move
    for rank, entry in in_order(schedule, set()):
        start = spans[rank][-1].end if spans[rank] else 0
        for before in needed[entry]:
            ready, place = ended[before]
            if place != rank:
                ready += move if before.kind in "EG" else send
            if ready > start:
                start = ready
        end = start + costs.of(entry)
        spans[rank].append(Span(entry, start, end))
        for action in (entry,) if isinstance(entry, Action) else entry:
            ended[action] = end, rank
    return spans


def _ratio(a: Time, b: Time) -> Time:
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)
