"""Play the events of a run on a described machine: when would everything happen?

Each rank runs its events in order. Compute takes the larger of two costs (roofline: Williams et al. 2009)

    max(flops / (peak x efficiency), bytes / (memory bandwidth x efficiency)) + launch_s

Issue hands a transfer to the stream of its group. The transfer starts when its last member has issued it and
the group's previous one has ended, takes what collectives.py says of the largest payload that a member gives,
and ends on all members together. Wait stops the rank until then. Messages have a stream per (source,
destination), and are on it a latency after both sides are there: one issued while another is under way
follows it without a pause. Copies of one rank and way follow each other likewise, each in latency + bytes /
bandwidth of the machine's `host` or `disk` link. Transfers of several streams that meet on a rank's links, or
on its share of the network cards, share them (wires.py): two groups over one card take as long as in turn.

Ranks without events here are taken to be in step with the others: one rank of a dry run stands for 1,024, and
for all of a ring. Stages of a pipeline are not, so their messages (on an axis "pp") need both ends. Where
nothing is shared, a faster device or network never makes a step slower; where something is, it can, as with
a scheduler that reorders work (Graham 1969). Not modelled: small messages that do not wait for a receiver.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import Machine
from minitrain.plan.simulate.timeline import Span, Timeline
from minitrain.plan.simulate.wires import Carried, Wires, wires_of
from minitrain.ranks.events import Compute, Copy, Event, Issue, Wait

_MESSAGE = {"send", "receive"}
_END, _JOIN = range(2)


def replay(
    events_by_rank: Mapping[int, Iterable[Event]],
    machine,
    *,
    dtype=None,
    algorithms=None,
    launch_s=0.0,
    sharing=True,
) -> Timeline:
    """The timeline of `events_by_rank` (global rank -> its events in order) on `machine`.

    `dtype` ("bf16") takes every product at that rate instead of at its own dtype's; bytes stay as counted.
    `algorithms` ({"all_reduce": "ring"}) fixes what is otherwise the cheapest; `launch_s` is the dead time
    before each operator; without `sharing` each group has wires of its own. Ranks that do not issue the same
    collectives in the same order: ValueError, naming rank, collective, line."""
    return _Player(events_by_rank, machine, dtype, algorithms or {}, launch_s, sharing).play()


class _Transfer(Carried):
    """One collective or message on its way."""

    __slots__ = ("arrived", "start_s", "ended", "waiting")

    def __init__(self, end_s: float = 0.0, ended: bool = False):
        super().__init__((), 0.0, end_s)
        self.arrived: list[tuple[int, Issue, float]] = []  # (rank, its Issue, when)
        self.start_s = 0.0
        self.ended = ended
        self.waiting: list[int] = []


class _Stream:
    """The transfers of one group, which all members issue in the same order."""

    def __init__(self, members: Sequence[int], machine: Machine, given: set[int], message: bool):
        self.expected = sorted(given.intersection(members))
        self.placement = collectives.place(members, machine)
        self.wires = wires_of(members, self.placement.nodes, message, self.expected)
        self.transfers: list[_Transfer] = []
        self.count = dict.fromkeys(self.expected, 0)  # transfers issued so far, by rank
        self.queue: deque[_Transfer] = deque()  # all members are there; the first is under way
        self.free_s = 0.0
        self.cost: dict[tuple[str, int], tuple[float, float]] = {}  # latency, and all of it


class _Rank:
    """Where one rank stands in its events."""

    def __init__(self, events: Iterable[Event]):
        self.events = list(events)
        self.position = 0
        self.now_s = 0.0
        self.issued: dict[int, tuple[Issue | Copy, _Transfer]] = {}  # by the id
        self.copied_s: dict[str, float] = {}  # way -> when its last copy ends
        self.spans: list[Span] = []

    @property
    def finished(self) -> bool:
        return self.position == len(self.events)


class _Player:
    def __init__(self, events_by_rank, machine, dtype, algorithms, launch_s, sharing):
        if not events_by_rank:
            raise ValueError("nothing to replay: give the events of at least one rank, {rank: events}")
        self.machine, self.dtype, self.algorithms, self.launch_s = machine, dtype, algorithms, launch_s
        self.ranks = {rank: _Rank(events) for rank, events in sorted(events_by_rank.items())}
        self.refuse_half_a_pipeline()
        self.streams: dict[tuple, _Stream] = {}
        self.by_identity: dict[tuple, _Stream] = {}
        self.wires = Wires() if sharing else None
        self.agenda: list[tuple] = []  # a heap of (when, end or join, tie, transfer, its version)
        self.tie = count()
        self.peak = {}
        self.memory_rate = machine.device.memory_bandwidth_bytes_per_s * machine.memory_efficiency

    def play(self) -> Timeline:
        for rank in self.ranks:
            self.advance(rank)
        while self.agenda:
            now_s, kind, _, transfer, version = heapq.heappop(self.agenda)
            if kind == _JOIN:
                self.moved(self.wires.join(transfer, now_s))
            elif version == transfer.version:  # else its end has moved since
                self.end(transfer)
        self.refuse_if_stuck()
        for state in self.ranks.values():
            state.spans.sort(key=lambda span: (span.start_s, span.end_s))
        return Timeline(self.machine, {rank: state.spans for rank, state in self.ranks.items()})

    def refuse_half_a_pipeline(self) -> None:
        missing: dict[int, tuple[int, Issue]] = {}  # a rank without events -> who speaks to it, and how
        for rank, state in self.ranks.items():
            for event in state.events:
                if isinstance(event, Issue) and event.op in _MESSAGE and "pp" in event.axis.split("_"):
                    for other in event.members:
                        if other not in self.ranks:
                            missing.setdefault(other, (rank, event))
        if missing:
            rank, event = next(iter(missing.values()))
            others = ", ".join(map(str, sorted(missing)))
            cure = f"give the events of ranks {others} too, and of all stages beyond (dry_steps.py does)"
            raise ValueError(f"rank {rank} issues {_call(event)} and stages are not in step; {cure}")

    def advance(self, rank: int) -> None:
        """Run one rank until its events end or it waits. Nothing that it issues begins before now."""
        state = self.ranks[rank]
        while not state.finished:
            event = state.events[state.position]
            if isinstance(event, Compute):
                start, state.now_s = state.now_s, state.now_s + self.duration(event)
                state.spans.append(Span("compute", "compute", start, state.now_s, event, start))
            elif isinstance(event, Issue):
                state.issued[event.id] = event, self.issue(rank, event, state.now_s)
            elif isinstance(event, Copy):
                state.issued[event.id] = event, self.copy(state, event)
            elif not self.wait(rank, state, event):
                return
            state.position += 1

    def duration(self, event: Compute) -> float:
        seconds = event.bytes / self.memory_rate
        if event.flops:
            dtype = self.dtype or event.dtype
            if dtype not in self.peak:
                self.peak[dtype] = self.machine.device.peak(dtype) * self.machine.compute_efficiency
            seconds = max(seconds, event.flops / self.peak[dtype])
        return seconds + self.launch_s

    def issue(self, rank: int, event: Issue, now_s: float) -> _Transfer:
        """This rank arrives at its next transfer of that group; with the last to arrive it can start."""
        stream = self.stream_of(rank, event)
        index = stream.count[rank]
        stream.count[rank] += 1
        if index == len(stream.transfers):
            stream.transfers.append(_Transfer())
        transfer = stream.transfers[index]
        if transfer.arrived:
            first, other, _ = transfer.arrived[0]
            if event.op not in (_MESSAGE - {other.op} if other.op in _MESSAGE else {other.op}):
                clash = f"rank {rank} issues {_call(event)} where rank {first} issues {_call(other)}"
                raise ValueError(f"{clash}: a group's members issue the same collectives in the same order")
        transfer.arrived.append((rank, event, now_s))
        if len(transfer.arrived) == len(stream.expected):
            stream.queue.append(transfer)
            if len(stream.queue) == 1:
                self.start(stream)
        return transfer

    def copy(self, state: _Rank, event: Copy) -> _Transfer:
        """Starts when the copy before it, of that rank and way, has ended; nobody else is needed."""
        link = getattr(self.machine, event.axis)
        if link is None:
            missing = f"{self.machine.name} has no {event.axis} link"
            cure = f"give it one: dataclasses.replace(machine, {event.axis}=Link(...))"
            raise ValueError(f"{event.bytes:,} bytes {event.direction}, and {missing}; {cure}")
        start = max(state.now_s, state.copied_s.get(event.direction, 0.0))
        rate = link.bandwidth_bytes_per_s * self.machine.network_efficiency
        end = state.copied_s[event.direction] = start + link.latency_s + event.bytes / rate
        state.spans.append(Span(event.direction, "transfer", start, end, event, state.now_s))
        return _Transfer(end, ended=True)

    def start(self, stream: _Stream) -> None:
        """The first in a stream's queue is under way."""
        transfer = stream.queue[0]
        op = transfer.arrived[0][1].op
        latency, cost = self.cost(stream, op, max(event.payload_bytes for _, event, _ in transfer.arrived))
        ready = max(now_s for _, _, now_s in transfer.arrived)
        if op in _MESSAGE:  # its latency passes beside the message before, not after it
            transfer.start_s = transfer.on_wire_s = max(ready + latency, stream.free_s)
            transfer.end_s = transfer.start_s + cost - latency
        else:
            transfer.start_s = max(ready, stream.free_s)
            transfer.on_wire_s, transfer.end_s = transfer.start_s + latency, transfer.start_s + cost
        if self.wires and transfer.on_wire_s < transfer.end_s:
            transfer.wires = stream.wires
            heapq.heappush(self.agenda, (transfer.on_wire_s, _JOIN, next(self.tie), transfer, 0))
        self.moved([transfer])

    def moved(self, transfers: Iterable[_Transfer]) -> None:
        for transfer in transfers:
            entry = transfer.end_s, _END, next(self.tie), transfer, transfer.version
            heapq.heappush(self.agenda, entry)

    def end(self, transfer: _Transfer) -> None:
        stream = self.stream_of(*transfer.arrived[0][:2])
        transfer.ended, stream.free_s = True, transfer.end_s
        for rank, event, issued_s in transfer.arrived:
            span = Span(_stream_name(event), "transfer", transfer.start_s, transfer.end_s, event, issued_s)
            self.ranks[rank].spans.append(span)
        if transfer.wires:
            self.moved(self.wires.leave(transfer, transfer.end_s))
        stream.queue.popleft()
        if stream.queue:
            self.start(stream)
        for rank in transfer.waiting:
            self.advance(rank)

    def cost(self, stream: _Stream, op: str, payload_bytes: int) -> tuple[float, float]:
        """Seconds without a byte, and seconds with all of them, both by the algorithm that is taken."""
        key = op, payload_bytes
        if key not in stream.cost:
            way = collectives.chosen(*key, stream.placement, self.algorithms.get(op, "auto"))
            costs = (collectives.by_algorithm(op, n, stream.placement)[way] for n in (0, payload_bytes))
            stream.cost[key] = tuple(costs)
        return stream.cost[key]

    def wait(self, rank: int, state: _Rank, event: Wait) -> bool:
        """Whether the rank can go on."""
        if event.id not in state.issued:
            raise ValueError(f"rank {rank} waits for transfer {event.id}, which it has not issued")
        issue, transfer = state.issued[event.id]
        if not transfer.ended:
            transfer.waiting.append(rank)
            return False
        if transfer.end_s > state.now_s:
            state.spans.append(Span("compute", "wait", state.now_s, transfer.end_s, issue, state.now_s))
            state.now_s = transfer.end_s
        return True

    def stream_of(self, rank: int, event: Issue) -> _Stream:
        # Hashing a group of 100,000 ranks takes a millisecond, but events share the tuple object.
        message = event.op in _MESSAGE
        identity = event.axis, message, id(event.members)
        stream = self.by_identity.get(identity)
        if stream is None:
            key = event.axis, message, tuple(event.members)
            if key not in self.streams:
                self.streams[key] = _Stream(event.members, self.machine, set(self.ranks), message)
            stream = self.by_identity[identity] = self.streams[key]
        if rank not in stream.count:
            members = ", ".join(map(str, event.members[:6])) + ", ..." * (len(event.members) > 6)
            raise ValueError(f"rank {rank} issues {_call(event)}, whose members are {members}")
        return stream

    def refuse_if_stuck(self) -> None:
        missing = []  # (seq, rank that never comes, where another one is)
        for stream in self.streams.values():
            for transfer in stream.transfers:
                if not transfer.ended:
                    here = {rank for rank, _, _ in transfer.arrived}
                    rank, event, _ = transfer.arrived[0]
                    gone = (r for r in stream.expected if r not in here and self.ranks[r].finished)
                    missing += [(event.seq, absent, rank, event) for absent in gone]
        if missing:
            _, absent, rank, event = min(missing, key=lambda entry: entry[:3])
            end = f"the events of rank {absent} end before it"
            raise ValueError(f"rank {absent} never arrives in {_call(event)}, where rank {rank} is: {end}")
        stuck = [(rank, state) for rank, state in self.ranks.items() if not state.finished]
        if stuck:
            waits = [(rank, state.issued[state.events[state.position].id][0]) for rank, state in stuck[:4]]
            heads = "; ".join(f"rank {rank} in {_call(issue)}" for rank, issue in waits)
            raise ValueError(f"deadlock, each waits for another: {heads}")


def _stream_name(event: Issue) -> str:
    if event.op == "send":
        return f"{event.axis} to {event.members[1]}"
    return f"{event.axis} from {event.members[0]}" if event.op == "receive" else event.axis


def _call(event: Issue) -> str:
    return f"{event.op} #{event.seq} on {event.axis} ({event.site})"
