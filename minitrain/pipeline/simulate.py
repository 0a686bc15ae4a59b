"""When everything in a schedule happens, given the time of each action: bubble, idle time. No torch.

    simulate(one_f_one_b(4, 8), Costs(F=1, B=2)).makespan  ->  33

An action starts when its rank is free and all it needs is done, plus `send` if that was done on another rank.
A message takes no time of its ranks. With whole numbers or Fractions for costs every time is exact.

    makespan   from 0 to the end of the last action      idle(rank)   makespan - the time that rank computes
    bubble     the bubble share: idle time / (makespan · ranks)       overhead     idle time / work

Where bubble is (p-1)/(m+p-1), overhead is (p-1)/m. `Costs` are of one whole stage: stages that are 1/v of a
rank cost Fraction(1, v); `stage={3: 2}` makes stage 3 twice as long. B defaults to I + W; a pair takes `FB`,
if given (times the mean of its stages' factors), else its parts in a row; `move` is for moves (`bpipe`).
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush

from minitrain.pipeline.schedule import MOVES, Action, Entry, Pair, Schedule, in_order, parts

Time = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action, and of a message between two ranks."""

    F: Time = 1
    B: Time | None = None
    I: Time = 1
    W: Time = 1
    R: Time | None = None
    FB: Time | None = None
    send: Time = 0
    move: Time | None = None
    stage: Mapping[int, Time] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "stage" and value is not None and not value >= 0:
                raise ValueError(f"Costs: {name}={value}; a time is 0 or more")

    @cached_property
    def times(self) -> dict[str, Time]:
        whole = self.I + self.W if self.B is None else self.B
        return dict(F=self.F, B=whole, I=self.I, W=self.W, R=self.F if self.R is None else self.R)

    def of(self, entry: Entry) -> Time:
        if isinstance(entry, Pair):
            if self.FB is None:
                return self.of(entry.forward) + self.of(entry.backward)
            forward, backward = (self.stage.get(action.stage, 1) for action in entry)
            return divided(self.FB * (forward + backward), 2) if self.stage else self.FB
        if entry.kind in MOVES:
            return 0  # tensors that move are messages
        time = self.times[entry.kind]
        return time * self.stage.get(entry.stage, 1) if self.stage else time


@dataclass(frozen=True)
class Measured:  # a time for every action of its own, from a run: `simulate` takes it in place of Costs
    times: Mapping[Action, Time]
    send: Time = 0
    move: Time | None = None

    def of(self, entry: Entry) -> Time:
        return sum(self.times[action] for action in parts([entry]) if action.kind not in MOVES)


Span = namedtuple("Span", "entry start end")


@dataclass(frozen=True)
class Simulation:
    """`spans[rank]`, in order."""

    schedule: Schedule
    costs: Costs | Measured
    spans: tuple[tuple[Span, ...], ...]

    makespan = property(lambda self: max((spans[-1].end for spans in self.spans if spans), default=0))

    def busy(self, rank: int) -> Time:
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> Time:
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> Time:
        """The bubble share: idle time / (makespan · ranks)."""
        return divided(sum(map(self.idle, range(len(self.spans)))), len(self.spans) * self.makespan)

    @property
    def overhead(self) -> Time:
        ranks = range(len(self.spans))
        return divided(sum(map(self.idle, ranks)), sum(map(self.busy, ranks)))

    def start(self, action: Action) -> Time:
        spans = self.spans[self.schedule.place[action]]
        return next(span.start for span in spans if action in parts([span.entry]))


def simulate(schedule: Schedule, costs: Costs | Measured = Costs()) -> Simulation:
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    ended: dict[Action, tuple[Time, int]] = {}  # when, and on which rank
    send, needed = costs.send, schedule.needs
    move = send if costs.move is None else costs.move
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
        for action in entry if isinstance(entry, Pair) else (entry,):
            ended[action] = end, rank
    return Simulation(schedule, costs, tuple(map(tuple, spans)))


def play(p: int, choose: Callable, costs: Costs, later: Callable) -> tuple[list[list[Action]], Time]:
    """(lists, makespan): a free rank starts what choose(rank, now, ended) gives, None to wait.
    All are asked when an action ends, and each of `later(action)` after that, the last rank first: what it
    begins is seen at once, as `ended[action]` is known from the start."""
    ranks, free, ended, clock = [[] for _ in range(p)], [0] * p, {}, [0]
    while clock:
        now = heappop(clock)
        for rank in reversed(range(p)):
            if free[rank] <= now and (action := choose(rank, now, ended)):
                ranks[rank].append(action)
                free[rank] = ended[action] = now + costs.of(action)
                for after in (0, *later(action)):
                    heappush(clock, max(now, free[rank] + after))
    return ranks, max(free)


def divided(a: Time, b: Time) -> Time:
    """a / b, exact where both are."""
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)
