"""A pipeline schedule is data: for each rank the list of what it does, in order. No torch, no processes.

    F  forward of a stage for one microbatch       B  its backward, whole
    I  backward for the input only                 W  the rest of it: gradients of the weights       B = I + W
    R  forward once more, from the kept input      (recomputation: F kept nothing else)
    E  what F kept leaves for another rank         L  it is back, for B       H, G  that rank has it, gives it back (bpipe.py)

    one_f_one_b(2, 3).ranks  =  (F0.0 F0.1 B0.0 F0.2 B0.1 B0.2,   F1.0 B1.0 F1.1 B1.1 F1.2 B1.2)        "F1.2": stage 1, microbatch 2

Which rank has a stage is not said anywhere else: it is the one in whose list the action stands. A stage may stand in two lists, for
different microbatches (Chimera, DualPipe), and a rank may have several (interleaving, V shapes). `Pair(forward, backward)` is two
actions that run as one, each hiding the other's communication. With `slices` = k a microbatch is cut along the sequence: unit
`m·k + j` is slice j of microbatch m, forwards in order and backwards from the last to the first.

`needs` says what must be done before an action, `check` that a schedule does everything once and cannot get stuck, `in_flight` how
many activations a rank holds after each of its actions: that follows from the list alone. simulate.py adds time, lower.py messages,
runtime.py does it.
A list of your own may be written in plain tuples: ("F", 1, 2), two of them for a pair.
Raises ValueError in one line, naming the entry that is no action, or the action: missing, doubled, before what it needs on the same
rank, or in a circle of waiting.
PyTorch's torch.distributed.pipelining has the same letters (F, B, I, W). Differs: no table from stages to ranks, no send or receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

KINDS = "FBIWREHGL"
GUEST = "HG"  # on a rank that does not have the stage


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


def F(stage: int, microbatch: int) -> Action:
    return Action("F", stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action("B", stage, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743, E741  the paper's letter
    return Action("I", stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    return Action("W", stage, microbatch)


def R(stage: int, microbatch: int) -> Action:
    return Action("R", stage, microbatch)


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is what rank r does, in order. `microbatches` counts units: microbatches times slices."""

    name: str
    ranks: tuple[tuple[Entry, ...], ...]
    stages: int
    microbatches: int
    slices: int = 1
    lengths: tuple[int, ...] = ()  # tokens of each slice; without them they are as equal as they can be
    chain = True  # stage s gives to stage s + 1, and to no other

    def __post_init__(self) -> None:
        """Lists of plain tuples are taken too: ("F", 0, 1), or two of them for a pair."""
        ranks = tuple(
            tuple(_entry(entry, self.name, rank, at) for at, entry in enumerate(entries))
            for rank, entries in enumerate(self.ranks)
        )
        object.__setattr__(self, "ranks", ranks)

    @cached_property
    def place(self) -> dict[Action, int]:
        """The rank of every action."""
        return {action: rank for rank, entries in enumerate(self.ranks) for action in parts(entries)}

    @cached_property
    def recomputes(self) -> bool:
        return any(action.kind == "R" for action in self.place)

    def stages_of(self, rank: int) -> list[int]:
        return sorted({action.stage for action in parts(self.ranks[rank]) if action.kind not in GUEST})

    @cached_property
    def needs(self) -> dict[Entry, Sequence[Action]]:
        """For every entry what must be done before it, without its own parts."""
        found = {}
        for entries in self.ranks:
            for entry in entries:
                found[entry] = (
                    needs(entry, self)
                    if isinstance(entry, Action)
                    else [before for action in entry for before in needs(action, self) if before not in entry]
                )
        return found

    @cached_property
    def evicts(self) -> bool:
        return any(action.kind == "E" for action in self.place)

    @cached_property
    def splits_backward(self) -> bool:
        return any(action.kind == "W" for action in self.place)

    def backward(self, stage: int, microbatch: int) -> Action:
        """The action that gives the gradient of this stage's input: B, or I where it is split."""
        split = I(stage, microbatch)
        return split if self.splits_backward and split in self.place else B(stage, microbatch)

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, entries))}" for rank, entries in enumerate(self.ranks)
        )


def _entry(entry, name: str, rank: int, at: int) -> Entry:
    if type(entry) in (Action, Pair):
        return entry
    match entry:
        case [str(kind), int(stage), int(unit)]:
            return Action(kind, stage, unit)
        case [[_, _, _] as forward, [_, _, _] as backward]:
            return Pair(_entry(forward, name, rank, at), _entry(backward, name, rank, at))
    raise ValueError(
        f'{name}: entry {at} of rank {rank} is {entry!r}; an entry is an Action such as F(0, 1), a tuple ("F", 0, 1), or a pair '
        "of those"
    )


def parts(entries: Iterable[Entry]) -> Iterator[Action]:
    """The actions of a list, pairs taken apart: the forward first."""
    for entry in entries:
        if isinstance(entry, Pair):
            yield from entry
        else:
            yield entry


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must be done, here or elsewhere, before `action`."""
    kind, stage, unit = action
    before = []
    if kind == "F":
        if stage > 0:
            before.append(F(stage - 1, unit))
        if unit % schedule.slices:
            before.append(F(stage, unit - 1))  # later tokens look at the keys of earlier ones
    elif kind == "R":
        before.append(F(stage, unit))
    elif kind == "W":
        before.append(I(stage, unit))
    elif kind in "EHGL":
        before.append(Action("FEHG"["EHGL".index(kind)], stage, unit))
    else:
        again = schedule.recomputes and R(stage, unit) in schedule.place
        before.append(R(stage, unit) if again else F(stage, unit))
        if stage < schedule.stages - 1:
            before.append(schedule.backward(stage + 1, unit))
        if (unit + 1) % schedule.slices:
            before.append(schedule.backward(stage, unit + 1))  # which sends gradients to earlier keys
        if schedule.evicts and Action("L", stage, unit) in schedule.place:
            before.append(Action("L", stage, unit))
    return before


def in_flight(schedule: Schedule, rank: int, kept: Fraction | int = 1) -> list[Fraction | int]:
    """Activations rank holds after each entry of its list, in units of one stage and one microbatch (one slice).

    F takes one and B gives it back; between I and W the share `kept` of it stays. A stage that is recomputed holds its input only,
    counted as nothing, until R.
    """
    counts, held = [], 0
    again = {action[1:] for action in schedule.place if action.kind == "R"}
    for entry in schedule.ranks[rank]:
        for kind, *what in parts([entry]):
            held += {
                "F": 0 if tuple(what) in again else 1,
                "R": 1,
                "B": -1,
                "I": kept - 1,
                "W": -kept,
                "E": -1,
                "H": 1,
                "G": -1,
                "L": 1,
            }[kind]
        counts.append(held)
    return counts


def peak(schedule: Schedule, rank: int, kept: Fraction | int = 1) -> Fraction | int:
    """The most activations rank ever holds: `in_flight`, and inside a pair the forward comes before the backward frees."""
    high, before = 0, 0
    for entry, after in zip(schedule.ranks[rank], in_flight(schedule, rank, kept)):
        high, before = max(high, after, before + 1 if isinstance(entry, Pair) else 0), after
    return high


# ---- what is refused -------------------------------------------------------------------------------------------------


def check(schedule: Schedule) -> Schedule:
    """The schedule, if every action is there once and after all it needs; else ValueError names the action."""
    counted = Counter(action for entries in schedule.ranks for action in parts(entries))
    for action, times in counted.items():
        if action.kind not in KINDS or not (
            0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches
        ):
            raise ValueError(
                f"{schedule.name}: {action} is no action of {schedule.stages} stages and {schedule.microbatches} microbatches; "
                f"the kinds are {', '.join(KINDS)}, both count from 0"
            )
        if times > 1:
            raise ValueError(
                f"{schedule.name}: {action} stands {times} times (rank {schedule.place[action]}); every action once"
            )
    if schedule.microbatches % schedule.slices:
        raise ValueError(
            f"{schedule.name}: {schedule.microbatches} units are not a multiple of slices={schedule.slices}; every microbatch has all "
            "its slices"
        )
    for entry in (entry for entries in schedule.ranks for entry in entries if isinstance(entry, Pair)):
        if (
            entry.forward.kind != "F"
            or entry.backward.kind not in "BI"
            or entry.forward[1:] == entry.backward[1:]
        ):
            raise ValueError(
                f"{schedule.name}: {entry} is no pair; a pair is an F and a B or I, of different microbatches or stages"
            )
    for stage in range(schedule.stages):
        for unit in range(schedule.microbatches):
            missing = _missing(stage, unit, counted)
            if missing:
                raise ValueError(
                    f"{schedule.name}: {missing} is missing; each stage does F and then B, or I and W, of each microbatch once"
                )
            ranks = {
                schedule.place[action]
                for kind in KINDS
                if (action := Action(kind, stage, unit)) in counted and kind not in GUEST
            }
            if len(ranks) > 1:
                raise ValueError(
                    f"{schedule.name}: stage {stage}, microbatch {unit} stands on ranks {sorted(ranks)}; what a forward keeps "
                    "stays on its rank"
                )
    done: set[Action] = set()
    for _ in in_order(schedule, done):
        pass
    return schedule


def _missing(stage: int, unit: int, counted: Counter) -> str:
    if F(stage, unit) not in counted:
        return str(F(stage, unit))
    moves = [Action(kind, stage, unit) for kind in "EHGL"]
    if any(action in counted for action in moves) and not all(action in counted for action in moves):
        return str(next(action for action in moves if action not in counted))
    whole, for_input, for_weights = (make(stage, unit) in counted for make in (B, I, W))
    if whole and (for_input or for_weights):
        raise ValueError(
            f"{B(stage, unit)} stands beside {I(stage, unit) if for_input else W(stage, unit)}; B is I and W together"
        )
    if not whole:
        return (
            ""
            if for_input and for_weights
            else str(W(stage, unit) if for_input else I(stage, unit) if for_weights else B(stage, unit))
        )
    return ""


def in_order(schedule: Schedule, done: set[Action]) -> Iterator[tuple[int, Entry]]:
    """(rank, entry) in an order in which everything comes after what it needs; `done` grows. ValueError if that ends too early.

    A rank goes as far as it can, then sleeps until what it misses is done.
    """
    position, needed = [0] * len(schedule.ranks), schedule.needs
    asleep: dict[Action, list[int]] = {}
    awake = list(range(len(schedule.ranks)))[::-1]
    while awake:
        rank = awake.pop()
        entries = schedule.ranks[rank]
        while position[rank] < len(entries):
            entry = entries[position[rank]]
            missing = next((before for before in needed[entry] if before not in done), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            yield rank, entry
            position[rank] += 1
            for action in entry if isinstance(entry, Pair) else (entry,):
                done.add(action)
                awake += asleep.pop(action, ())
    stuck = [rank for rank, entries in enumerate(schedule.ranks) if position[rank] < len(entries)]
    if stuck:
        heads = [(rank, schedule.ranks[rank][position[rank]]) for rank in stuck]
        waits = ", ".join(
            f"rank {rank} at {head} waits for {unmet(head, schedule, done)}" for rank, head in heads[:4]
        )
        raise ValueError(
            f"{schedule.name} is stuck: {waits}{', ...' * (len(heads) > 4)}; move an action in front of what waits for it"
        )


def unmet(entry: Entry, schedule: Schedule, done: set[Action]) -> Action | None:
    """The first thing that `entry` needs and that is not done."""
    for before in schedule.needs[entry]:
        if before not in done:
            return before
    return None
