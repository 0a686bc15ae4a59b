"""The longest way through a schedule, remembered by structure: what a step of the pipeline is made of.

    makespan(layout, costs)         seconds of all microbatches
    longest(layout, costs)          how many passes of each kind and messages are on the longest path

A step's time is the longest path through its actions, so it is a sum of whole numbers of passes and
messages: the same numbers for all costs that are alike. `longest` simulates once for costs rounded to 1 %
of a block and adds up the exact ones, which is a lower bound, and exact where rounding does not change the
path. A schedule repeats itself in its steady state: beyond 3p microbatches, p more add what the p before
added (tested against whole simulations). Costs of a stage: its blocks, and the embedding or the head where
they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul

from minitrain.model.config import GPTConfig
from minitrain.pipeline.named import named
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import MOVES, Action, Entry, Schedule, parts
from minitrain.pipeline.simulate import simulate
from minitrain.strategy import Strategy

KINDS = "FBIWR"
LAYERS = ("embedding", "block", "dense", "head")
Counts = tuple[float, ...]  # of KINDS x LAYERS, then messages


@dataclass(frozen=True)
class Layout:
    """A schedule, and how many layers of each of LAYERS its stages have, and its ranks."""

    schedule: str
    p: int
    microbatches: int
    chunks: int
    slices: int
    again: bool  # R before B
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    def build(self) -> Schedule:
        sizes = dict(chunks=self.chunks, slices=self.slices, recompute=self.again)
        return named(self.schedule, self.p, self.microbatches, **sizes)

    @property
    def repeats_after(self) -> int:
        """Microbatches after which every p more do what the p before did, or all there are."""
        few = 2 * self.p + self.microbatches % self.p
        return few if self.microbatches > few + self.p else self.microbatches


def layout_of(config: GPTConfig, strategy: Strategy) -> Layout:
    s = strategy
    if s.pp == 1:  # nobody sends, whatever the schedule
        return _layout("1f1b", 1, s.microbatches, 1, 1, s.recompute == "stage", config)
    return _layout(s.schedule, s.pp, s.microbatches, s.chunks, s.slices, s.recompute == "stage", config)


@lru_cache(maxsize=1 << 14)
def _layout(name: str, p: int, m: int, chunks: int, slices: int, again: bool, config: GPTConfig) -> Layout:
    layout = Layout(name, p, m, chunks, slices, again, (), ())
    return replace(layout, **_stages(replace(layout, microbatches=layout.repeats_after), config))


@lru_cache(maxsize=1 << 12)
def _stages(layout: Layout, config: GPTConfig) -> dict:
    schedule, last, stages = layout.build(), config.num_layers + 1, []
    for layers in even(config.num_layers, schedule.stages):
        blocks = [number for number in layers if 0 < number < last]
        dense = sum(config.experts is not None and not config.experts_in(number) for number in blocks)
        stages.append((int(0 in layers), len(blocks) - dense, dense, int(last in layers)))
    own = [[stages[stage] for stage in schedule.stages_of(rank)] for rank in range(layout.p)]
    return dict(stages=tuple(stages), ranks=tuple(tuple(map(sum, zip(*layers))) for layers in own))


Edge = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def edges(layout: Layout, before: bool) -> tuple[Edge, ...]:
    """Of the first rank's stages, the last to be done first: how many of LAYERS it has, and how many pass
    forward and backward after its last backward. With `before`: before its first forward, the first first."""
    return _edges(replace(layout, microbatches=layout.repeats_after), before)


@lru_cache(maxsize=1 << 12)
def _edges(layout: Layout, before: bool) -> tuple[Edge, ...]:
    schedule = layout.build()
    actions = [action for action in parts(schedule.ranks[0]) if action.kind in "FBI"]
    actions = actions if before else actions[::-1]
    passed = {"F": [0] * len(LAYERS), "B": [0] * len(LAYERS)}
    found, seen = [], set()
    for action in actions:
        way, layers = "F" if action.kind == "F" else "B", layout.stages[action.stage]
        if action.stage not in seen and (way == "F") == before:
            seen.add(action.stage)
            found.append((layers, tuple(passed["F"]), tuple(passed["B"])))
        passed[way] = [a + b for a, b in zip(passed[way], layers)]
    return tuple(found)


@dataclass(frozen=True)
class Costs:
    """Seconds of KINDS x LAYERS, and of a message: `blocking` holds up its sender, else it is late."""

    passes: tuple[float, ...]
    message_s: float = 0.0
    blocking: bool = False

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.passes, self.message_s)

    def rounded(self) -> Costs:
        """In units of a block forward and back, to a hundredth; what is small but there stays there."""
        block = LAYERS.index("block")
        unit = sum(self.passes[KINDS.index(kind) * len(LAYERS) + block] for kind in "FB") or 1.0
        about = [max(round(time / unit, 2), 0.002) if time > 0 else 0.0 for time in self.vector]
        return Costs(tuple(about[:-1]), about[-1], self.blocking)


def makespan(layout: Layout, costs: Costs) -> float:
    return sum(map(mul, longest(layout, costs.rounded()), costs.vector))


@lru_cache(maxsize=1 << 14)
def longest(layout: Layout, costs: Costs) -> Counts:
    """How many passes of each kind and messages are on the longest path."""
    few = layout.repeats_after
    shorter = _path(replace(layout, microbatches=few), costs)
    if few == layout.microbatches:
        return shorter
    longer = _path(replace(layout, microbatches=few + layout.p), costs)
    times = (layout.microbatches - few) // layout.p
    return tuple(a + times * (b - a) for a, b in zip(shorter, longer))


@lru_cache(maxsize=1 << 12)
def _path(layout: Layout, costs: Costs) -> Counts:
    schedule = layout.build()
    timed = _Timed(layout, schedule, costs)
    spans = simulate(schedule, timed).spans
    ended = {}
    for rank, own in enumerate(spans):
        for place, span in enumerate(own):
            for action in parts([span.entry]):
                ended[action] = rank, place
    rank = max((rank for rank, own in enumerate(spans) if own), key=lambda rank: spans[rank][-1].end)
    place = len(spans[rank]) - 1
    counts = [0.0] * (len(KINDS) * len(LAYERS) + 1)
    while True:
        span = spans[rank][place]
        timed.add(span.entry, counts)
        before = [(spans[rank][place - 1].end, 0, rank, place - 1)] if place else []
        for need in schedule.needs[span.entry]:
            other, at = ended[need]
            before.append((spans[other][at].end + timed.send * (other != rank), other != rank, other, at))
        if not before or span.start <= 0:
            return tuple(counts)
        _, sent, rank, place = max(before)
        counts[-1] += sent and not costs.blocking


class _Timed:
    """What `simulate` asks of costs, by stage."""

    def __init__(self, layout: Layout, schedule: Schedule, costs: Costs) -> None:
        self.stages, self.schedule, self.costs = layout.stages, schedule, costs
        self.send = 0.0 if costs.blocking else costs.message_s
        self.move = self.send
        self.units = 1 / schedule.slices
        self.known: dict[tuple, float] = {}

    def of(self, entry: Entry) -> float:
        return sum(self.time(action) for action in parts([entry]) if action.kind not in MOVES)

    def time(self, action: Action) -> float:
        key = action.kind, action.stage, self.sends(action)
        if key not in self.known:
            kind, layers = KINDS.index(action.kind) * len(LAYERS), self.stages[action.stage]
            passes = self.costs.passes[kind : kind + len(LAYERS)]
            own = sum(map(mul, layers, passes)) * self.units
            self.known[key] = own + self.costs.message_s * key[2]
        return self.known[key]

    def sends(self, action: Action) -> bool:
        """Whether a rank is held up while what the action made leaves it."""
        if not self.costs.blocking or action.kind not in "FBI":
            return False
        step = 1 if action.kind == "F" else -1
        stage = action.stage + step
        if not 0 <= stage < self.schedule.stages:
            return False
        kind = "F" if step == 1 else self.schedule.backward(stage, action.microbatch).kind
        place = self.schedule.place
        return place[Action(kind, stage, action.microbatch)] != place[action]

    def add(self, entry: Entry, counts: list[float]) -> None:
        for action in parts([entry]):
            if action.kind in MOVES:
                continue
            kind = KINDS.index(action.kind) * len(LAYERS)
            for layer, number in enumerate(self.stages[action.stage]):
                counts[kind + layer] += number * self.units
            counts[-1] += self.sends(action)
