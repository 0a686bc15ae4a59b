"""Play the events of a run on a described machine: when would everything happen?

Each rank runs its events in order. Compute takes the larger of two costs (roofline: Williams et al. 2009)

    max(flops / (peak x efficiency), bytes / (memory bandwidth x efficiency)) + launch_s

Issue hands a transfer to the stream of its group. The transfer starts when its last member has issued it and
the group's previous one has ended, takes what collectives.py says of the largest payload that a member gives,
and ends on all members together. Wait stops the rank until then. Messages have a stream per (source,
destination), and are on it a latency after both sides are there: one issued while another is under way
follows it without a pause. Copies of one rank and way follow each other likewise, each in latency + bytes /
bandwidth of the machine's `host` or `disk` link. Transfers of several streams share the wires where they
meet: two groups over one card take as long as in turn, be they of one rank or of several; one rank alone on
a card that others could use has all of it.

Ranks without events here are taken to be in step with the others: one rank of a dry run stands for 1,024.
Stages of a pipeline are not, so their messages (on an axis "pp") need both ends. A faster device or network
never makes a step slower where nothing is shared, else it can (Graham 1969). Not modelled: small messages
that wait for no receiver; what a group that leaves the node sends inside it, beside others; switches.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count

from minitrain.plan.predict.rates import rates_of
from minitrain.plan.predict.training_run import Stack
from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import Machine
from minitrain.ranks.checks import require_nonempty
from minitrain.ranks.events import Compute, Copy, Event, Issue
from minitrain.systems.simulate import links
from minitrain.systems.simulate.timeline import Span, Timeline

_MESSAGE = {"send", "receive"}
_END, _JOIN = range(2)
Events = Mapping[int, Iterable[Event]]


def replay(
    events_by_rank: Events, machine, *, dtype=None, algorithms=None, launch_s=0.0, sharing=True
) -> Timeline:
    """Of events in order by global rank. `dtype` ("bf16") takes every product at that rate instead of its own
    dtype's; bytes stay as counted. `algorithms` ({"all_reduce": "ring"}) fixes what is otherwise the
    cheapest; `launch_s` is the dead time before each operator; without `sharing` each group has its wires.
    ValueError, naming rank, collective, line, where ranks do not issue the same in the same order."""
    return _Player(events_by_rank, machine, dtype, algorithms or {}, launch_s, sharing).play()


def calibrated(machine: Machine, stack: Stack) -> Machine:
    """A machine that reaches what runs of such a software reach."""
    rates = rates_of(machine, stack)
    faster = machine.intra.bandwidth_bytes_per_s * rates.nvlink / rates.network
    inside = replace(machine.intra, bandwidth_bytes_per_s=faster)  # of which `network` then is nvlink
    found = dict(compute=rates.products, memory=rates.memory, network=rates.network)
    shares = {(name := f"{kind}_efficiency"): one * getattr(machine, name) for kind, one in found.items()}
    return replace(machine, intra=inside, **shares)


class _Transfer:  # a collective or message on its way; a copy has no stream, and its end is known at once
    def __init__(self, stream: "_Stream | None", wires: links.Links = (), end_s: float = 0.0):
        self.stream, self.wires, self.end_s = stream, wires, end_s
        self.arrived: list[tuple[int, Issue, float]] = []  # (rank, its Issue, when)
        self.start_s = self.on_wire_s = 0.0  # it is on its wires when its latency is over
        self.speed = 1.0  # of what it has alone
        self.version = 0  # grows with every change of `end_s`
        self.ended = stream is None
        self.waiting: list[int] = []  # ranks


class _Stream:  # the transfers of one group, which all members issue in the same order
    def __init__(self, members: Sequence[int], machine: Machine, given: Collection[int], message: bool):
        self.expected = sorted(set(given).intersection(members))
        self.placement = collectives.place(members, machine)
        senders, receivers = (members[:1], members[1:]) if message else (self.expected, self.expected)
        ends = [(rank, "from") for rank in senders] + [(rank, "to") for rank in receivers]
        inside, across = self.placement.nodes == 1, Counter()
        for rank, side in ends:
            if rank in given:
                across["rank" if inside else "card", rank if inside else machine.card_of(rank), side] += 1
        self.wires = across if inside or self.placement.most == 1 else {**across, self: 1}
        self.transfers: list[_Transfer] = []
        self.count = dict.fromkeys(self.expected, 0)  # transfers issued so far, by rank
        self.queue: deque[_Transfer] = deque()  # all members are there; the first is under way
        self.free_s = 0.0


class _Player:
    def __init__(self, events_by_rank, machine, dtype, algorithms, launch_s, sharing):
        require_nonempty(events_by_rank=list(events_by_rank))
        self.machine, self.dtype, self.algorithms, self.launch_s = machine, dtype, algorithms, launch_s
        self.spans: dict[int, list[Span]] = {rank: [] for rank in sorted(events_by_rank)}
        self.running = {rank: self.run(rank, events_by_rank[rank]) for rank in self.spans}
        self.streams: dict[tuple, _Stream] = {}
        self.by_identity: dict[tuple, _Stream] = {}  # hashing a group of 100,000 ranks takes a millisecond
        widths = defaultdict(lambda: 1.0)  # of wires: of a card, as many as there are ranks on it
        for card, ranks in Counter(map(machine.card_of, self.spans)).items():
            widths["card", card, "from"] = widths["card", card, "to"] = float(ranks)
        self.wires = links.Flows(widths) if sharing else None
        self.agenda: list[tuple] = []  # a heap of (when, end or join, tie, transfer, its version)
        self.tie = count()
        self.cost = cache(self.latency_and_cost)
        self.memory_rate = machine.device.memory_bandwidth_bytes_per_s * machine.memory_efficiency

    def play(self) -> Timeline:
        for rank in self.spans:
            self.advance(rank)  # nothing that it issues begins before now
        while self.agenda:
            now_s, kind, _, transfer, version = heapq.heappop(self.agenda)
            if kind == _JOIN:
                self.wires.join(transfer, transfer.wires)
                self.share(now_s)
            elif version == transfer.version:  # else its end has moved since
                self.end(transfer)
        self.refuse_if_stuck()
        for spans in self.spans.values():
            spans.sort(key=lambda span: (span.start_s, span.end_s))
        return Timeline(self.machine, self.spans)

    def advance(self, rank: int) -> None:  # until its events end or it waits
        if transfer := next(self.running[rank], None):
            transfer.waiting.append(rank)

    def run(self, rank: int, events: Iterable[Event]) -> Iterator[_Transfer]:
        """The events of a rank, one after the other; gives each transfer that it has to wait for."""
        now_s, spans = 0.0, self.spans[rank]
        issued: dict[int, tuple[Issue | Copy, _Transfer]] = {}  # by the id
        copied_s: dict[str, float] = {}  # direction -> when its last copy ends
        for event in events:
            if isinstance(event, Compute):
                start, now_s = now_s, now_s + self.duration(event)
                spans.append(Span("compute", "compute", start, now_s, event, start))
            elif isinstance(event, Issue):
                issued[event.id] = event, self.issue(rank, event, now_s)
            elif isinstance(event, Copy):  # follows that before it; nobody else is needed
                start = max(now_s, copied_s.get(event.direction, 0.0))
                end = copied_s[event.direction] = start + self.copy_s(event)
                spans.append(Span(event.direction, "transfer", start, end, event, now_s))
                issued[event.id] = event, _Transfer(None, end_s=end)
            else:
                if event.id not in issued:
                    raise ValueError(f"rank {rank} waits for transfer {event.id}, which it has not issued")
                issue, transfer = issued[event.id]
                if not transfer.ended:
                    yield transfer
                if transfer.end_s > now_s:
                    spans.append(Span("compute", "wait", now_s, transfer.end_s, issue, now_s))
                    now_s = transfer.end_s

    def duration(self, event: Compute) -> float:
        seconds = event.bytes / self.memory_rate
        if event.flops:
            peak = self.machine.device.peak(self.dtype or event.dtype) * self.machine.compute_efficiency
            seconds = max(seconds, event.flops / peak)
        return seconds + self.launch_s

    def copy_s(self, event: Copy) -> float:
        link = getattr(self.machine, event.axis)
        if link is None:
            missing = f"{self.machine.name} has no {event.axis} link"
            cure = f"give it one: dataclasses.replace(machine, {event.axis}=Link(...))"
            raise ValueError(f"{event.bytes:,} bytes {event.direction}, and {missing}; {cure}")
        return link.latency_s + event.bytes / (link.bandwidth_bytes_per_s * self.machine.network_efficiency)

    def issue(self, rank: int, event: Issue, now_s: float) -> _Transfer:
        """This rank arrives at its next transfer of that group; with the last to arrive it can start."""
        stream = self.stream_of(rank, event)
        index = stream.count[rank]
        stream.count[rank] += 1
        if index == len(stream.transfers):
            stream.transfers.append(_Transfer(stream))
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

    def start(self, stream: _Stream) -> None:
        transfer = stream.queue[0]
        op = transfer.arrived[0][1].op
        payload_bytes = max(event.payload_bytes for _, event, _ in transfer.arrived)
        latency, cost = self.cost(op, payload_bytes, stream.placement)
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
        self.will_end(transfer)

    def will_end(self, transfer: _Transfer) -> None:
        heapq.heappush(self.agenda, (transfer.end_s, _END, next(self.tie), transfer, transfer.version))

    def share(self, now_s: float) -> None:
        """After one has joined or left: whoever is slower or faster now ends at another time.

        A wire is one rank's way out of, or into, its node's links, or a card's, as wide as the ranks with
        events here that use it have shares of it. A collective takes both ways of all its members, a message
        the source's way out and the destination's way in, on the links if its group stays in a node, else on
        the cards. Shares are max-min fair (links.py); the slowest member counts, and a group with several
        ranks on a node is never faster than at their shares."""
        for one, speed in self.wires.rates().items():
            if speed != one.speed:
                one.end_s = now_s + max(0.0, one.end_s - now_s) * one.speed / speed
                one.speed, one.version = speed, one.version + 1
                self.will_end(one)

    def end(self, transfer: _Transfer) -> None:
        stream = transfer.stream
        transfer.ended, stream.free_s = True, transfer.end_s
        for rank, event, issued_s in transfer.arrived:
            ends = {"send": f" to {event.members[-1]}", "receive": f" from {event.members[0]}"}
            name = event.axis + ends.get(event.op, "")
            span = Span(name, "transfer", transfer.start_s, transfer.end_s, event, issued_s)
            self.spans[rank].append(span)
        if transfer.wires:
            self.wires.leave(transfer)
            self.share(transfer.end_s)
        stream.queue.popleft()
        if stream.queue:
            self.start(stream)
        for rank in transfer.waiting:
            self.advance(rank)

    def latency_and_cost(self, op: str, payload_bytes: int, placement) -> tuple[float, ...]:
        """Seconds without a byte, and with all of them, by one algorithm."""
        way = collectives.chosen(op, payload_bytes, placement, self.algorithms.get(op, "auto"))
        return tuple(collectives.by_algorithm(op, n, placement)[way] for n in (0, payload_bytes))

    def stream_of(self, rank: int, event: Issue) -> _Stream:
        message = event.op in _MESSAGE
        identity = event.axis, message, id(event.members)  # events share the tuple
        if identity not in self.by_identity:
            key = event.axis, message, tuple(event.members)
            if key not in self.streams:
                self.streams[key] = _Stream(event.members, self.machine, self.spans, message)
            self.by_identity[identity] = self.streams[key]
        stream = self.by_identity[identity]
        if rank not in stream.count:
            members = ", ".join(map(str, event.members[:6])) + ", ..." * (len(event.members) > 6)
            raise ValueError(f"rank {rank} issues {_call(event)}, whose members are {members}")
        if message and "pp" in event.axis.split("_") and len(stream.expected) < 2:
            cure = "give the events of all stages (dry_runs.py does)"
            raise ValueError(f"rank {rank} issues {_call(event)} and stages are not in step; {cure}")
        return stream

    def refuse_if_stuck(self) -> None:
        """Of the transfers that did not end: who is missing where, the earliest calls first."""
        missing = []
        for stream in self.streams.values():
            for transfer in stream.transfers:
                here = {rank for rank, _, _ in transfer.arrived}
                for absent in stream.expected if not transfer.ended else ():
                    rank, event, _ = transfer.arrived[0]
                    missing += [] if absent in here else [(event.seq, absent, rank, _call(event))]
        if missing:
            said = "rank {1} never arrives in {3}, where rank {2} is"
            raise ValueError("; ".join(said.format(*one) for one in sorted(missing)[:4]))


def _call(event: Issue) -> str:
    return f"{event.op} #{event.seq} on {event.axis} ({event.site})"
