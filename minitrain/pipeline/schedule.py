"""A pipeline schedule is data: for each rank the list of what it does, in order. No torch, no processes.

    F  forward of a stage for one microbatch       B  its whole backward = I and W
    I  backward for the input only                 W  the rest, gradients of the weights
    R  forward once more, from the kept input (recomputation: F kept nothing else)
    E  what F kept leaves for another rank, H  is hosted there, G  given back, L  loaded for B (`bpipe`)

    one_f_one_b(2, 3).ranks = (F0.0 F0.1 B0.0 F0.2 B0.1 B0.2,      "F1.2": stage 1, microbatch 2
                               F1.0 B1.0 F1.1 B1.1 F1.2 B1.2)

A rank may have several stages (interleaving), and a stage stand in two lists, for different microbatches
(Chimera). With `slices` = k, unit m·k + j is slice j of microbatch m; forwards go from the first slice to the
last, backwards from the last to the first. Letters are torch's; its schedules map stages to ranks, and send.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, groupby, product
from typing import NamedTuple

from minitrain.ranks.checks import require_ints

KINDS = "FBIWREHGL"
MOVES = "EHGL"
GUEST = "HG"  # on a rank that does not have the stage
AFTER = {"R": "F", "W": "I", "E": "F", "H": "E", "G": "H", "L": "G"}  # of the same stage and microbatch


class Action(NamedTuple):
    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward (B or I) of the same rank that run as one."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward} {self.backward})"


Entry = Action | Pair
F, B, I, W, R = (partial(Action, kind) for kind in "FBIWR")  # F(1, 2) is Action("F", 1, 2)


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is what rank r does, in order. `microbatches` counts units: microbatches times slices."""

    name: str
    ranks: tuple[tuple[Entry, ...], ...]
    stages: int
    microbatches: int
    slices: int = 1
    lengths: tuple[int, ...] = ()  # tokens of each slice; by default as equal as they can be
    chain = True  # stage s gives to stage s + 1, and to no other

    def __post_init__(self) -> None:
        """Accepts any iterables, and plain tuples for actions: ("F", 0, 1), or two of them for a pair."""
        entries = lambda rank, own: tuple(_entry(entry, self.name, rank, at) for at, entry in enumerate(own))
        object.__setattr__(self, "ranks", tuple(entries(rank, own) for rank, own in enumerate(self.ranks)))

    # of each action: its rank, and its entry's number there
    place = cached_property(lambda s: {one: rank for rank, own in enumerate(s.ranks) for one in parts(own)})
    position = cached_property(
        lambda s: {one: i for own in s.ranks for i, entry in enumerate(own) for one in in_entry(entry)}
    )
    kinds = cached_property(lambda self: {action.kind for action in self.place})
    recomputes = property(lambda self: "R" in self.kinds)
    evicts = property(lambda self: "E" in self.kinds)
    splits_backward = property(lambda self: "W" in self.kinds)
    pairs = property(lambda self: any(isinstance(entry, Pair) for own in self.ranks for entry in own))

    @cached_property
    def needs(self) -> dict[Entry, Sequence[Action]]:
        """For every entry what must be done before it, other than its own parts."""
        of = lambda own: [before for action in own for before in needs(action, self) if before not in own]
        return {entry: of(in_entry(entry)) for entries in self.ranks for entry in entries}

    @cached_property
    def breadth_first(self) -> bool:
        """Do ranks have several stages, each of which runs all microbatches before the next does?"""
        for rank, entries in enumerate(self.ranks):
            runs = [key for key, _ in groupby((a.stage, a.kind == "F") for a in parts(entries))]
            if len(self.stages_of(rank)) < 2 or len(set(runs)) < len(runs):
                return False
        return True

    def stages_of(self, rank: int) -> list[int]:
        return sorted({action.stage for action in parts(self.ranks[rank]) if action.kind not in GUEST})

    def backward(self, stage: int, microbatch: int) -> Action:
        """The action that gives the gradient of this stage's input: B, or I where it is split."""
        split = I(stage, microbatch)
        return split if split in self.place else B(stage, microbatch)

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {' '.join(map(str, entries))}" for r, entries in enumerate(self.ranks))


def _entry(entry, name: str, rank: int, at: int) -> Entry:
    if type(entry) in (Action, Pair):
        return entry
    match entry:
        case [str(kind), int(stage), int(unit)]:
            return Action(kind, stage, unit)
        case [[_, _, _] as forward, [_, _, _] as backward]:
            return Pair(_entry(forward, name, rank, at), _entry(backward, name, rank, at))
    rule = 'an entry is an Action such as F(0, 1), a tuple ("F", 0, 1), or a pair of those'
    raise ValueError(f"{name}: entry {at} of rank {rank} is {entry!r}; {rule}")


def in_entry(entry: Entry) -> Sequence[Action]:
    return entry if type(entry) is Pair else (entry,)


def parts(entries: Iterable[Entry]) -> Iterator[Action]:
    """The actions of a list, pairs taken apart: the forward first."""
    return chain.from_iterable(map(in_entry, entries))


def needs(action: Action, schedule: Schedule) -> list[Action]:
    kind, stage, unit = action
    if kind in AFTER:
        return [Action(AFTER[kind], stage, unit)]
    if kind == "F":
        before = [F(stage - 1, unit)] if stage else []
        if unit % schedule.slices:
            before.append(F(stage, unit - 1))  # later tokens look at the keys of earlier ones
        return before
    again, back, place = R(stage, unit), Action("L", stage, unit), schedule.place
    before = [again if again in place else F(stage, unit)]
    if stage < schedule.stages - 1:
        before.append(schedule.backward(stage + 1, unit))
    if (unit + 1) % schedule.slices:
        before.append(schedule.backward(stage, unit + 1))  # which sends gradients to earlier keys
    return before + [back] if back in place else before


def in_flight(schedule: Schedule, rank: int) -> list[int]:
    """Activations on a rank after each entry of its list, in units of one stage and one microbatch or slice.
    One counts whole until its W. Before R a recomputed stage counts as nothing."""
    require_ints(0, len(schedule.ranks) - 1, rank=rank)
    holds = {"F": 1, "R": 1, "B": -1, "I": 0, "W": -1, "E": -1, "H": 1, "G": -1, "L": 1}
    again = {action[1:] for action in schedule.place if action.kind == "R"}
    value = lambda action: 0 if action.kind == "F" and action[1:] in again else holds[action.kind]
    return list(accumulate(sum(map(value, parts([entry]))) for entry in schedule.ranks[rank]))


def peak(schedule: Schedule, rank: int) -> int:
    """The most activations that a rank ever holds; in a pair the forward adds before the backward frees."""
    after = in_flight(schedule, rank)
    steps = zip(schedule.ranks[rank], [0, *after], after)
    return max((max(now, before + isinstance(entry, Pair)) for entry, before, now in steps), default=0)


def check(schedule: Schedule) -> Schedule:
    """Returns the schedule if every action is there once, and after all that it needs; else ValueError."""
    name, stages, units, place = schedule.name, schedule.stages, schedule.microbatches, schedule.place
    counted = Counter(action for entries in schedule.ranks for action in parts(entries))
    for action, times in counted.items():
        kind, stage, unit = action
        if kind not in KINDS or not (0 <= stage < stages and 0 <= unit < units):
            found = f"{action} is no action of {stages} stages and {units} microbatches"
            raise ValueError(f"{name}: {found}; the kinds are {', '.join(KINDS)}, both count from 0")
        if times > 1:
            what = f"{action} stands {times} times (rank {place[action]}); every action once"
            raise ValueError(f"{name}: {what}")
    if units % schedule.slices:
        raise ValueError(f"{name}: {units} units are not a multiple of slices={schedule.slices}")
    for pair in (entry for entries in schedule.ranks for entry in entries if isinstance(entry, Pair)):
        forward, backward = pair
        if forward.kind != "F" or backward.kind not in "BI" or forward[1:] == backward[1:]:
            rule = "a pair is an F and a B or I, of different microbatches or stages"
            raise ValueError(f"{name}: {pair} is no pair; {rule}")
    for stage, unit in product(range(stages), range(units)):
        _check_unit(schedule, stage, unit)
    deque(in_order(schedule, set()), maxlen=0)
    return schedule


def _check_unit(schedule: Schedule, stage: int, unit: int) -> None:
    here = {kind: rank for kind in KINDS if (rank := schedule.place.get((kind, stage, unit))) is not None}
    split = here.keys() & set("IW")
    due = "F" + MOVES * bool(here.keys() & set(MOVES)) + ("IW" if split and "B" not in here else "B")
    if missing := [kind for kind in due if kind not in here]:
        rule = "each stage does F and then B, or I and W, of each microbatch once"
        raise ValueError(f"{schedule.name}: {Action(missing[0], stage, unit)} is missing; {rule}")
    if "B" in here and split:
        raise ValueError(f"{B(stage, unit)} stands beside {min(split)}{stage}.{unit}; B is I and W together")
    ranks = {rank for kind, rank in here.items() if kind not in GUEST}
    if len(ranks) > 1:
        where = f"stage {stage}, microbatch {unit} stands on ranks {sorted(ranks)}"
        raise ValueError(f"{schedule.name}: {where}; what a forward keeps stays on its rank")


def in_order(schedule: Schedule, done: set[Action]) -> Iterator[tuple[int, Entry]]:
    """(rank, entry), each after what it needs; `done` grows. ValueError if the schedule gets stuck."""
    position, asleep = [0] * len(schedule.ranks), {}
    awake = list(range(len(schedule.ranks)))[::-1]
    while awake:
        rank = awake.pop()
        entries = schedule.ranks[rank]
        while position[rank] < len(entries):
            entry = entries[position[rank]]
            missing = next((before for before in schedule.needs[entry] if before not in done), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            yield rank, entry
            position[rank] += 1
            for action in in_entry(entry):
                done.add(action)
                awake += asleep.pop(action, ())
    if asleep:
        stuck = sorted((rank, missing) for missing, ranks in asleep.items() for rank in ranks)
        at = [schedule.ranks[rank][position[rank]] for rank, _ in stuck]
        waits = [f"rank {rank} at {entry} waits for {missing}" for entry, (rank, missing) in zip(at, stuck)]
        rule = "move an action in front of what waits for it"
        raise ValueError(f"{schedule.name} is stuck: {', '.join(waits[:4])}; {rule}")
