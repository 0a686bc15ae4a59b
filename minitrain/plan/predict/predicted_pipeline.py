"""The longest way through a schedule, remembered by structure: what a step of the pipeline is made of.

    makespan(layout, costs)         seconds of all microbatches
    longest(layout, costs)          how many passes of each kind and messages are on the longest path

A step's time is the longest path through its actions: a sum of whole numbers of passes and messages, the
same for all costs that are alike. `longest` simulates once for costs rounded to an eighth of a doubling; with
the exact ones that is a lower bound, and exact where rounding does not change the path. In the steady state p
more microbatches add what the p before added. Both together are within 0.7 % of whole simulations (tested on
every schedule). Costs of a stage: its blocks, and the embedding or the head where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import log2
from operator import mul

from minitrain.model.config import GPTConfig
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import MOVES, Schedule, in_entry, in_order, parts
from minitrain.pipeline.schedules_by_name import named
from minitrain.plan.predict.work import LAYERS
from minitrain.plan.strategy import Strategy

KINDS = "FBIWRP"  # P: F of a layer and B of another, in turns, each behind the other's transfers to experts
SOON = ("gpipe", "1f1b", "interleaved")  # in their steady state after p microbatches
NO_STEADY_STATE = ("varuna", "greedy", "v_min")  # not of p microbatches at least
Counts = tuple[float, ...]  # of KINDS x LAYERS, then messages


@dataclass(frozen=True)
class Layout:  # a schedule, and how many layers of each of LAYERS its stages have, and its ranks
    schedule: str
    p: int
    microbatches: int
    chunks: int
    slices: int
    again: bool  # R before B
    hides: bool = False  # halves of a pair take turns (systems/pipeline/halves.py)
    stages: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[tuple[int, ...], ...] = ()

    def build(self) -> Schedule:
        return _built(self.schedule, self.p, self.microbatches, self.chunks, self.slices, self.again)

    @property
    def repeats_after(self) -> int:
        """Microbatches after which every p more do what the p before did, or all there are."""
        if self.schedule in NO_STEADY_STATE:
            return self.microbatches
        few = (2 if self.schedule in SOON else 4) * self.p + self.microbatches % self.p
        return few if self.microbatches > few + self.p else self.microbatches

    short = property(lambda self: replace(self, microbatches=self.repeats_after))


@lru_cache(maxsize=1 << 7)
def _built(schedule: str, p: int, microbatches: int, chunks: int, slices: int, again: bool) -> Schedule:
    return named(schedule, p, microbatches, chunks=chunks, slices=slices, recompute=again)


@lru_cache(maxsize=1 << 14)
def layout_of(config: GPTConfig, s: Strategy) -> Layout:
    schedule, *sizes = (s.schedule, s.chunks, s.slices) if s.pp > 1 else ("1f1b", 1, 1)  # nobody sends
    bare = Layout(schedule, s.pp, s.microbatches, *sizes, s.recompute == "stage")
    return replace(bare, hides=s.hides_transfers(bare.short.build()), **_stages(bare.short, config))


@lru_cache(maxsize=1 << 12)
def _stages(layout: Layout, config: GPTConfig) -> dict:
    schedule, last, stages = layout.build(), config.num_layers + 1, []
    for layers in even(config.num_layers, schedule.stages):
        blocks = [number for number in layers if 0 < number < last]
        dense = sum(config.experts is not None and not config.experts_in(number) for number in blocks)
        stages.append((int(0 in layers), len(blocks) - dense, dense, int(last in layers)))
    own = ([stages[stage] for stage in schedule.stages_of(rank)] for rank in range(layout.p))
    return dict(stages=tuple(stages), ranks=tuple(tuple(map(sum, zip(*each))) for each in own))


@lru_cache(maxsize=1 << 12)
def edges(layout: Layout, before: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Of the first rank's stages, the last to be done first: how many of LAYERS it has, and how many pass
    forward and backward after its last backward. With `before`: before its first forward, the first first."""
    actions = [action for action in parts(layout.build().ranks[0]) if action.kind in "FBI"]
    passed = {"F": [0] * len(LAYERS), "B": [0] * len(LAYERS)}
    found, seen = [], set()
    for action in actions if before else actions[::-1]:
        kind, layers = "F" if action.kind == "F" else "B", layout.stages[action.stage]
        if action.stage not in seen and (kind == "F") == before:
            seen.add(action.stage)
            found.append((layers, tuple(passed["F"]), tuple(passed["B"])))
        passed[kind] = [a + b for a, b in zip(passed[kind], layers)]
    return tuple(found)


@dataclass(frozen=True)
class Costs:  # seconds of KINDS x LAYERS, and of a message: `blocking` holds up its sender, else it is late
    passes: tuple[float, ...]
    message_s: float = 0.0
    blocking: bool = False

    def rounded(self) -> Costs:
        """In units of a block forward and back, to an eighth of a doubling."""
        block = LAYERS.index("block")
        unit = sum(self.passes[KINDS.index(kind) * len(LAYERS) + block] for kind in "FB") or 1.0
        about = lambda time: 2.0 ** (round(8 * log2(time / unit)) / 8) if time > 0 else 0.0
        return Costs(tuple(map(about, self.passes)), about(self.message_s), self.blocking)


def makespan(layout: Layout, costs: Costs) -> float:
    return sum(map(mul, longest(layout, costs.rounded()), (*costs.passes, costs.message_s)))


@cache
def splits(schedule: str) -> bool:
    return named(schedule, 2, 4).splits_backward


@lru_cache(maxsize=1 << 14)
def longest(layout: Layout, costs: Costs) -> Counts:
    return in_steady_state(layout, lambda some: _path(some, costs))


@lru_cache(maxsize=1 << 12)
def pairs(layout: Layout) -> Counts:
    """How many of LAYERS all ranks run in pairs."""
    own = slice(KINDS.index("P") * len(LAYERS), -1)
    of = lambda cast: tuple(map(sum, zip(*(cast.passes[role][own] for role in cast.roles))))
    return in_steady_state(layout, lambda some: of(_cast(some))) if layout.hides else ()


def in_steady_state(layout: Layout, counted: Callable[[Layout], Counts]) -> Counts:
    """What is counted of a schedule, from few microbatches: p more add what the p before added."""
    few, shorter = layout.repeats_after, counted(layout.short)
    if few == layout.microbatches:
        return shorter
    longer = counted(replace(layout, microbatches=few + layout.p))
    times = (layout.microbatches - few) // layout.p
    return tuple(a + times * (b - a) for a, b in zip(shorter, longer))


@lru_cache(maxsize=1 << 12)
def _path(layout: Layout, costs: Costs) -> Counts:
    cast = _cast(layout)
    send = 0.0 if costs.blocking else costs.message_s
    vector = (*costs.passes, costs.message_s * costs.blocking)
    times, ends = [sum(map(mul, passes, vector)) for passes in cast.passes], [0.0] * (len(cast.roles) + 1)
    for at, (role, start, messages) in enumerate(zip(cast.roles, cast.previous, cast.messages)):
        start = ends[start]  # of -1, nothing before, 0
        for need in messages:
            start = sent if (sent := ends[need] + send) > start else start
        ends[at] = start + times[role]
    visits, late, at = [0] * len(cast.passes), 0, max(cast.last, key=ends.__getitem__)
    while True:
        visits[cast.roles[at]] += 1
        before = [(ends[need] + send, 1, cast.ranks[need], need) for need in cast.messages[at]]
        if (previous := cast.previous[at]) >= 0:
            before.append((ends[previous], 0, cast.ranks[previous], previous))
        if not before or max(before)[0] <= 0:
            break
        _, sent, _, at = max(before)
        late += sent
    *counts, blocking = (sum(map(mul, visits, each)) for each in zip(*cast.passes))
    return (*counts, blocking if costs.blocking else float(late))


class _Cast:  # what a schedule's entries are made of: those alike have one role; numbers are places in order
    def __init__(self, layout: Layout) -> None:
        self.schedule, self.layout = layout.build(), layout
        self.ranks: list[int] = []
        self.roles: list[int] = []
        self.previous: list[int] = []  # of the same rank; -1: none
        self.messages: list[list[int]] = []  # what other ranks must have done
        newest, done, numbers, place = [-1] * layout.p, {}, {}, self.schedule.place
        needs = ((place[in_entry(entry)[0]], needed) for entry, needed in self.schedule.needs.items())
        self.sent = {action for rank, needed in needs for action in needed if place[action] != rank}
        for number, (rank, entry) in enumerate(in_order(self.schedule, set())):
            own = tuple((action.kind, action.stage, action in self.sent) for action in in_entry(entry))
            self.roles.append(numbers.setdefault(own, len(numbers)))
            needed = {done[need] for need in self.schedule.needs[entry]}
            self.messages.append([need for need in needed if self.ranks[need] != rank])
            self.previous.append(newest[rank])
            self.ranks.append(rank)
            newest[rank] = number
            done |= dict.fromkeys(in_entry(entry), number)
        self.passes = [self.of(own) for own in numbers]
        self.last = [number for number in newest if number >= 0]

    def of(self, actions: tuple) -> Counts:
        counts = [0.0] * (len(KINDS) * len(LAYERS) + 1)
        for kind, stage, sent in actions:
            if kind not in MOVES:
                first = KINDS.index(kind) * len(LAYERS)
                for layer, number in enumerate(self.layout.stages[stage], start=first):
                    counts[layer] += number / self.layout.slices
                counts[-1] += sent
        stages = {stage: kind for kind, stage, _ in actions}
        if self.layout.hides and {*stages.values()} == {"F", "B"}:  # a pair, not of one stage
            for layer, number in enumerate(map(min, *(self.layout.stages[stage] for stage in stages))):
                for kind, change in zip("FBP", (-number, -number, number)):
                    counts[KINDS.index(kind) * len(LAYERS) + layer] += change
        return tuple(counts)


_cast = lru_cache(maxsize=1 << 8)(_Cast)
