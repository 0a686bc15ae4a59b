"""From a schedule to programs: what each rank does, with the messages between ranks put in. No torch.

    schedule, rank 1 of 2    F1.0                B1.0                F1.1 ..
    program                  Receive(F0.0) Receive(F0.1) F1.0  B1.0 Send(B1.0)  F1.1 ..

`Send(what, to)` and `Receive(what, source)` name the action whose result travels: for F the activations at
the end of its stage, for B or I the gradient at its start. A send stands right after its action and waits for
nobody. A receive is posted two entries before its use, which costs two tensors; on each link receives keep
the order of the sends, since the network matches messages by order alone. So a program cannot get stuck if
its schedule passes `check`, whether sends block (NCCL) or not (gloo), if each pair of ranks has a queue for
each direction: on NCCL a group for each, communicators made by pair (no `device_id`), opened by the Runner.
With one queue a group nearly all schedules hang, with one for each direction 1F1B on 4 ranks still does.
`Sent(what)` stands where the sent tensor can be freed: an answer that was sent after its use has arrived.
`Reduce(stage)` stands after a stage's last gradient. Moves (`bpipe`) are messages too: Send(E) is for H,
Send(G) for L. They run beside one computing entry if no rank then holds more than the largest `peak`, moves
under way included; else L's receive is posted later, and Sent stands earlier. Differs: in order alone, where
torch.distributed.pipelining batches sends and receives that meet.
"""

from collections import defaultdict, namedtuple
from collections.abc import Sequence
from itertools import takewhile

from minitrain.pipeline.schedule import MOVES, Action, Entry, F, Pair, Schedule, check, in_flight, parts, peak

Send = namedtuple("Send", "what to")  # the result of an action, to a rank
Receive = namedtuple("Receive", "what source")
Sent = namedtuple("Sent", "what")
Reduce = namedtuple("Reduce", "stage")
Step = Entry | Send | Receive | Sent | Reduce
Program = tuple[Step, ...]
Messages = dict[tuple[int, int], list[tuple[Action, Action]]]  # (source, to) -> [(what, who uses it)]
EARLY = 2  # entries between the post of a receive and what uses it


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """The program of every rank. ValueError for what `check` refuses."""
    if not schedule.chain:
        raise ValueError(f"{schedule.name}: its stages branch, and programs are made for chains; simulate it")
    ranks, sends = range(len(check(schedule).ranks)), messages(schedule)
    most = max(peak(schedule, rank) for rank in ranks) if schedule.evicts else 0
    return tuple(_program(rank, schedule, sends, most) for rank in ranks)


def pause(program: Program, rank: int, schedule: Schedule) -> tuple[Program, Program]:
    """Before the rank's first backward, and from there on. The first parts of all ranks together receive
    exactly what they send, so they can be run again."""
    filling = {action for entries in schedule.ranks for action in _forwards(entries)}
    computed = [step for step in program if isinstance(step, (Action, Pair))]
    own = _forwards(computed)
    for step in own:
        if late := [before for before in schedule.needs[step] if before not in filling]:
            why = f"rank {rank} needs {late[0]}, behind a first backward, for {step}, before its own"
            raise ValueError(f"{schedule.name}: {why}; such a step cannot be checked late")
    at = program.index(computed[len(own)])
    late = [step for step in program[:at] if isinstance(step, Receive) and step.what not in filling]
    early = [step for step in program[at:] if isinstance(step, Receive) and step.what in filling]
    first = (*(step for step in program[:at] if step not in late), *early)
    return first, (*late, *(step for step in program[at:] if step not in early))


def _forwards(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries before the first that runs a backward or a recomputation."""
    backwards = (any(action.kind in "BIR" for action in parts([entry])) for entry in entries)
    return entries[: next(i for i, found in enumerate(backwards) if found)]


def messages(schedule: Schedule) -> Messages:
    links = defaultdict(list)
    for source, what in ((rank, what) for rank, own in enumerate(schedule.ranks) for what in parts(own)):
        user = user_of(what, schedule)
        if user is not None and schedule.place[user] != source:
            links[source, schedule.place[user]].append((what, user))
    return dict(links)


def user_of(what: Action, schedule: Schedule) -> Action | None:
    """The action on the neighbouring stage, or on the other rank of a move, that uses this one's result."""
    kind, stage, unit = what
    match kind:
        case "E" | "G":
            return Action("H" if kind == "E" else "L", stage, unit)
        case "F" if stage + 1 < schedule.stages:
            return F(stage + 1, unit)
        case "B" | "I" if stage:
            return schedule.backward(stage - 1, unit)


def _program(rank: int, schedule: Schedule, sends: Messages, most: int) -> Program:
    posted, left = _moves(rank, schedule, most)
    received, freed = _receives(rank, schedule, sends, posted), _sent(rank, schedule, sends)
    receiver = {what: to for (source, to), sent in sends.items() if source == rank for what, _ in sent}
    complete = (action for action in parts(schedule.ranks[rank]) if action.kind in "BW")
    last = {action.stage: schedule.position[action] for action in complete}
    program: list[Step] = []
    for i, entry in enumerate(schedule.ranks[rank]):
        program += [*map(Sent, left[i]), *received[i], entry, *map(Sent, freed[i])]
        program += [Send(action, receiver[action]) for action in parts([entry]) if action in receiver]
        program += [Reduce(stage) for stage, at in last.items() if at == i]
    return tuple(program)


def _receives(rank: int, schedule: Schedule, sends: Messages, moves: dict) -> dict[int, list[Receive]]:
    """For each entry the receives posted before it, for itself or later entries; each link in order."""
    at, posts, received = schedule.position, [], defaultdict(list)
    for (source, to), sent in sends.items():
        for i, (what, _) in enumerate(sent if to == rank else ()):
            # a later message on the link may be needed sooner
            early = min((moves.get(user, max(at[user] - EARLY, 0)), at[user]) for _, user in sent[i:])
            posts.append((early, Receive(what, source)))
    for (i, _), receive in sorted(posts, key=lambda post: post[0]):
        received[i].append(receive)
    return received


def _sent(rank: int, schedule: Schedule, sends: Messages) -> dict[int, list[Action]]:
    """For each entry the sends (not moves) that are known to be over once it has its input."""
    at, freed = schedule.position, defaultdict(list)
    for (source, to), sent in sends.items():
        if source == rank:
            back = [pair for pair in sends.get((to, rank), []) if pair[0].kind not in MOVES]
            for what, user in sent:
                known = [at[used] for given, used in back if at[given] >= at[user] and at[used] > at[what]]
                if known and what.kind not in MOVES:
                    freed[min(known)].append(what)
    return freed


def _moves(rank: int, schedule: Schedule, most: int) -> tuple[dict[Action, int], dict[int, list[Action]]]:
    """(For H and L the entry before which it is received, for each entry the moves waited for before it)."""
    posted, left = {}, defaultdict(list)
    if not schedule.evicts:
        return posted, left
    entries, held = schedule.ranks[rank], [0, *in_flight(schedule, rank)]
    leaving: list[Action] = []  # sent, and perhaps still here
    coming: list[Action] = []  # received ahead of its L
    hidden = 0  # how many of `leaving` have had an entry to run beside
    for i, entry in enumerate(entries):
        kind = "F" if isinstance(entry, Pair) else entry.kind
        coming = [move for move in coming if move != entry]
        takes = 1 if isinstance(entry, Pair) else max(held[i + 1] - held[i], 0)
        room = most - held[i] - len(coming) - takes
        if kind in "HL":
            posted.setdefault(entry, i)
        elif kind not in "EG":
            moves = takewhile(lambda e: isinstance(e, Action) and e.kind in MOVES, entries[i + 1 :])
            ahead = [move for move in moves if move.kind == "L"][: max(room, 0)]
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
