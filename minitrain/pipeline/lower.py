"""From a schedule to programs: what each rank does, with the messages between ranks put in so that nobody waits in a circle.

    schedule, rank 1 of 2    F1.0                B1.0                F1.1 ..
    program                  Receive(F0.0) Receive(F0.1) F1.0  B1.0 Send(B1.0)  F1.1 ..

`Send(what, to)` and `Receive(what, source)` name the action whose result travels: F the activations at the end of its stage, B or I
the gradient at its start. A send stands right behind its action and waits for nobody. A receive is posted two entries before the one
that uses it, for the room of two tensors: the message arrives while others are computed, and finds its receive there (where it does
not, gloo asks the receiver first, and the data follows the answer). It is never posted before a message that the same rank sent
earlier: on each directed link receives are in the order of the sends, because the network matches them by order. So a program waits
only where its schedule waits, and a schedule that passes `check` cannot get stuck, whether sends block until they are received (NCCL)
or not (gloo). For NCCL the two directions of a link need a group each: a stream of its own, or a send would wait behind a send that
waits for it.
`Sent(what)` stands where the receiver must have used the message, as something that it sent afterwards has arrived here: the sent
tensor can go. `Reduce(stage)` stands behind a stage's last gradient: whatever sums gradients over data-parallel ranks can start.
Moves (bpipe.py) are messages too: Send(E) arrives for H, Send(G) for L. They run beside what is computed, as long as that takes no room:
no rank holds more than the largest `peak` of all, with what is leaving and what is coming. So H's receive is posted at H, L's one computing entry
ahead if there is room; Sent stands behind one computing entry, in front of the next that takes room, or earlier if there is none.

Per boundary and unit two messages, activations forward and as much backward; none where neighbouring stages are on one rank (the
turn of a V). No torch here. Raises what `check` raises, and ValueError for stages that are no chain and for moves that wait in a circle.
Differs from torch.distributed.pipelining, which groups sends and receives that meet into one batch: here order alone does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, Entry, Pair, Schedule, check, in_flight, parts, peak


class Send(NamedTuple):
    what: Action
    to: int


class Receive(NamedTuple):
    what: Action
    source: int


class Sent(NamedTuple):
    what: Action


class Reduce(NamedTuple):
    stage: int


Step = Entry | Send | Receive | Sent | Reduce
Link = tuple[int, int]
EARLY = 2  # entries between the post of a receive and what uses it


def lower(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The program of every rank."""
    if not schedule.chain:
        raise ValueError(
            f"{schedule.name}: its stages branch, and programs are made for chains; simulate it, or cut the model into a chain"
        )
    check(schedule)
    sends = messages(schedule)
    most = max(peak(schedule, rank) for rank in range(len(schedule.ranks))) if schedule.evicts else 0
    programs = tuple(_program(rank, schedule, sends, most) for rank in range(len(schedule.ranks)))
    if schedule.evicts:
        _check_moves(programs, schedule)
    return programs


def pause(
    program: tuple[Step, ...], rank: int, schedule: Schedule
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The program up to the rank's first backward, and from there on.

    All that the ranks send before their first backwards is received in the first part, and nothing else: so the forwards that fill the
    pipeline can be run again, messages included, with nothing of them left on a link.
    """
    filling = {action for entries in schedule.ranks for action in parts(entries[: _first_backward(entries)])}
    computed = [step for step in program if isinstance(step, (Action, Pair))]
    at = program.index(computed[_first_backward(computed)])
    for step in parts(computed[: _first_backward(computed)]):
        late = [before for before in schedule.needs[step] if before not in filling]
        if late:
            raise ValueError(
                f"{schedule.name}: rank {rank} needs {late[0]}, which comes behind a first backward, for {step}, in front of its own "
                "first backward; a step can be checked late only where all of that comes before"
            )
    late = [step for step in program[:at] if isinstance(step, Receive) and step.what not in filling]
    early = [step for step in program[at:] if isinstance(step, Receive) and step.what in filling]
    return (
        tuple([step for step in program[:at] if step not in late] + early),
        tuple(late + [step for step in program[at:] if step not in early]),
    )


def _first_backward(entries: Sequence[Entry]) -> int:
    return next(
        i for i, entry in enumerate(entries) if any(action.kind in "BIR" for action in parts([entry]))
    )


def messages(schedule: Schedule) -> dict[Link, list[tuple[Action, Action]]]:
    """For each directed link (source, to) what travels, in the order in which it is sent: (what, the action that uses it)."""
    links = defaultdict(list)
    for source, entries in enumerate(schedule.ranks):
        for what in parts(entries):
            user = user_of(what, schedule)
            if user is not None and schedule.place[user] != source:
                links[source, schedule.place[user]].append((what, user))
    return dict(links)


def user_of(what: Action, schedule: Schedule) -> Action | None:
    """The action that uses what this one gives, on the neighbouring stage: activations go up, gradients down; or on the rank of a move."""
    if what.kind in "EG":
        return Action("H" if what.kind == "E" else "L", *what[1:])
    if what.kind == "F":
        return Action("F", what.stage + 1, what.microbatch) if what.stage + 1 < schedule.stages else None
    if what.kind in "BI":
        return schedule.backward(what.stage - 1, what.microbatch) if what.stage else None
    return None


def _program(
    rank: int, schedule: Schedule, sends: dict[Link, list[tuple[Action, Action]]], most: Fraction | int
) -> tuple[Step, ...]:
    entries = schedule.ranks[rank]
    posted, left = _moves(rank, schedule, most)
    before = _receives(rank, schedule, sends, posted)
    freed = _sent(rank, schedule, sends)
    outgoing = {what: to for (source, to), sent in sends.items() if source == rank for what, _ in sent}
    last = {
        action.stage: i for i, entry in enumerate(entries) for action in parts([entry]) if action.kind in "BW"
    }
    program: list[Step] = []
    for i, entry in enumerate(entries):
        program += [Sent(what) for what in left[i]]
        program += before[i]
        program.append(entry)
        program += [Sent(what) for what in freed[i]]
        program += [Send(action, outgoing[action]) for action in parts([entry]) if action in outgoing]
        program += [Reduce(stage) for stage, at in last.items() if at == i]
    return tuple(program)


def _receives(
    rank: int, schedule: Schedule, sends: dict[Link, list[tuple[Action, Action]]], moves: dict[Action, int]
) -> dict[int, list[Receive]]:
    """For each entry what is posted before it: what the entries to come need, and all that the same link brings before that."""
    at = _positions(rank, schedule)
    wanted = {action: max(i - EARLY, 0) for action, i in at.items()} | moves
    posted = defaultdict(list)
    for (source, to), sent in sends.items():
        if to == rank:
            for i, (what, _) in enumerate(sent):
                earliest = min(
                    (wanted[user], at[user]) for _, user in sent[i:]
                )  # a message behind it on the link may be needed sooner
                posted[earliest[0]].append((earliest, Receive(what, source)))
    return defaultdict(
        list,
        {
            i: [receive for _, receive in sorted(receives, key=lambda pair: pair[0])]
            for i, receives in posted.items()
        },
    )


def _sent(
    rank: int, schedule: Schedule, sends: dict[Link, list[tuple[Action, Action]]]
) -> dict[int, list[Action]]:
    """For each entry the sends known to be over once it has got what it needs."""
    freed, at = defaultdict(list), _positions(rank, schedule)
    for (source, to), sent in sends.items():
        if source == rank:
            there = _positions(to, schedule)
            answers = [
                (there[what], at[user]) for what, user in sends.get((to, rank), []) if what.kind in "FBI"
            ]  # (given there, used here)
            for what, user in sent:
                known = [here for given, here in answers if given >= there[user] and here > at[what]]
                if known and what.kind in "FBI":
                    freed[min(known)].append(what)
    return freed


def _positions(rank: int, schedule: Schedule) -> dict[Action, int]:
    return {action: i for i, entry in enumerate(schedule.ranks[rank]) for action in parts([entry])}


# ---- moves -----------------------------------------------------------------------------------------------------------


def _moves(
    rank: int, schedule: Schedule, most: Fraction | int
) -> tuple[dict[Action, int], dict[int, list[Action]]]:
    """(For H and L the entry before which it is received, for each entry the moves that must have left before it)."""
    posted: dict[Action, int] = {}
    left: dict[int, list[Action]] = defaultdict(list)
    if not schedule.evicts:
        return posted, left
    entries, held = schedule.ranks[rank], [0, *in_flight(schedule, rank)]
    leaving: list[Action] = []  # sent, and perhaps still here
    coming: list[Action] = []  # received ahead of its L
    hidden = 0  # so many of those leaving have had an entry to run beside
    for i, entry in enumerate(entries):
        kind = "F" if isinstance(entry, Pair) else entry.kind
        if entry in coming:
            coming.remove(entry)
        takes = 1 if isinstance(entry, Pair) else max(held[i + 1] - held[i], 0)
        room = most - held[i] - len(coming) - takes
        if kind in "HL":
            posted.setdefault(entry, i)
        elif kind not in "EG":
            ahead = _before_the_next(entries[i + 1 :])[: max(room, 0)]
            posted |= dict.fromkeys(ahead, i)
            coming += ahead
            takes, room = takes + len(ahead), room - len(ahead)
        while leaving and (len(leaving) > room or takes and hidden > 0):
            left[i].append(leaving.pop(0))
            hidden -= 1
        if kind in "EG":
            leaving.append(entry)
        elif kind not in "HL":
            hidden = len(leaving)
    return posted, left


def _before_the_next(entries: tuple[Entry, ...]) -> list[Action]:
    """The L that stand in front of the next entry that computes."""
    found = []
    for entry in entries:
        if isinstance(entry, Pair) or entry.kind not in "EHGL":
            return found
        if entry.kind == "L":
            found.append(entry)
    return found


def _check_moves(programs: tuple[tuple[Step, ...], ...], schedule: Schedule) -> None:
    """Plays the programs on a network where a move has left when its receive is posted; a receive of E first learns how much it is."""
    at, done, posted = [0] * len(programs), set(), set()

    def can(step: Step) -> bool:
        match step:
            case Sent(what):
                return what.kind not in "EG" or what in posted
            case Receive(what, _):
                return what.kind != "E" or what in done
            case Send() | Reduce():
                return True
        return all(before in done for before in schedule.needs[step])

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and can(step := program[at[rank]]):
                done |= set(parts([step])) if isinstance(step, (Action, Pair)) else set()
                posted |= {step.what} if isinstance(step, Receive) else set()
                at[rank], moved = at[rank] + 1, True
    stuck = [
        f"rank {rank} at {program[i]}"
        for rank, (i, program) in enumerate(zip(at, programs))
        if i < len(program)
    ]
    if stuck:
        raise ValueError(
            f"{schedule.name} is stuck in its moves: {', '.join(stuck[:4])}; put H in front of what waits for it, or lend less"
        )
