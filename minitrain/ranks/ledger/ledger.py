"""The exact account of what one rank does: bytes it sends, FLOPs it spends, memory it holds, in which order.

    with Ledger() as ledger:
        with ledger.phase("forward"):
            loss = loss_of(model(tokens), targets)
    print(ledger.table())

A dispatch mode of torch sees every operator, those of backward too (`operators.py`). The collectives report
every call: bytes are counted where a buffer is handed to the network; where the backend moves the data itself
they are charged from the chunk plan, and `planned` is True. Weak references see every tensor die
(`memory_meter.py`). A real run and a dry run of the same code give the same account, event by event.

What is inside a collective is communication: its additions are no Compute events, its memory counts.
Operators of your own threads are not seen, nor is the inside of a compiled function. A closed ledger can be
sent elsewhere. A causal attention kernel counts the scores its mask leaves; `Ledger(causal="square")` counts
all T², as the papers' formulas do (plan/accounting.py has both). Costs some 10 us per operator while open.

FLOP counting by dispatch mode is the idea of torch.utils.flop_counter, weak references to storages that of
torch.distributed._tools.mem_tracker. Differs: one account for both and for communication, of a dry run too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_one_of
from minitrain.ranks.collectives.call_log import Call
from minitrain.ranks.events import DIRECTIONS, Compute, Copy, Event, Issue, Wait
from minitrain.ranks.ledger.memory_meter import KINDS, MemoryMeter
from minitrain.ranks.ledger.watch import Watch
from minitrain.ranks.tables import aligned


class Ledger:
    """One run's account, to be read while it is open or after. Bytes are bytes of this rank.

    With `limit_bytes` the operator, buffer or copy that lets more be alive on the device raises MemoryError:
    what does not fit fails on a CPU too."""

    def __init__(self, *, causal: str = "triangle", limit_bytes: int | None = None) -> None:
        require_one_of(("triangle", "square"), causal=causal)
        self.causal = causal
        self._events: list[Compute | _Issued | Wait | Copy] = []
        self._calls: list[_Issued] = []
        # id of a call or transfer -> what was written down of it, until it has been waited for
        self._pending: dict[int, _Issued | Copy] = {}
        self._memory = MemoryMeter(lambda: len(self._events), limit_bytes)
        self._copies: list[Copy] = []
        self._phase = ""
        self._open: ExitStack | None = None
        self._used = False

    def __enter__(self) -> "Ledger":
        if self._used:
            raise ValueError("this Ledger has accounted for a run already; make a new one")
        self._used = True
        self._open = ExitStack()
        self._open.callback(self._memory.close)
        self._memory.open()
        self._open.enter_context(collectives.observe(self._on_call))
        self._open.enter_context(Watch(self))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._open = None
        self._pending.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label the events inside: `with ledger.phase("forward")`. The innermost label holds."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    # ---- communication ------------------------------------------------------------------------------------

    def sent_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Bytes this rank handed to the network, in all calls or those of one operation and one mesh axis."""
        return sum(call.sent_bytes for call in self._matching(op, axis))

    def payload_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """The sum of the sizes S which the papers' formulas start from."""
        return sum(call.payload_bytes for call in self._matching(op, axis))

    @property
    def sent_by_dtype(self) -> dict[str, int]:
        """Bytes handed to the network as numbers of each dtype; codes are uint8."""
        total: Counter[str] = Counter()
        for issued in self._calls:
            total[str(issued.call.dtype).removeprefix("torch.")] += issued.call.sent_bytes
        return dict(total)

    def num_calls(self, op: str | None = None, axis: str | None = None) -> int:
        return len(self._matching(op, axis))

    @property
    def planned(self) -> bool:
        """Some volume was charged from the plan, not counted (NCCL, dry run)."""
        return any(issued.call.planned for issued in self._calls)

    def _matching(self, op: str | None, axis: str | None) -> list:
        calls = (issued.call for issued in self._calls)
        return [call for call in calls if op in (None, call.op) and axis in (None, call.axis)]

    # ---- computation --------------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        return sum(self.flops_by_operator.values())

    # FLOPs of every operator, or phase, that has some, the most expensive first.
    flops_by_operator = property(lambda self: self._flops_by(lambda compute: compute.name))
    flops_by_phase = property(lambda self: self._flops_by(lambda compute: compute.phase))

    def _flops_by(self, key) -> dict[str, int]:
        total: Counter[str] = Counter()
        for event in self._events:
            if type(event) is Compute and event.flops:
                total[key(event)] += event.flops
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    # ---- memory -------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors that live now; of a closed ledger: that lived when it was closed."""
        return self._memory.live_bytes()

    @property
    def peak_bytes(self) -> int:
        return max(self._memory.totals())

    @property
    def live_by_kind(self) -> dict[str, int]:
        return self._memory.by_kind()

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak consists of (the first moment at which it was reached)."""
        totals = self._memory.totals()
        return self._memory.by_kind(after=totals.index(max(totals)))

    @property
    def host_bytes(self) -> int:
        """As `live_bytes`, of the memory marked as the host's (memory/pools.py); not part of it."""
        return self._memory.live_bytes(host=True)

    @property
    def host_peak_bytes(self) -> int:
        return max(self._memory.totals(host=True))

    @property
    def host_by_kind(self) -> dict[str, int]:
        return self._memory.by_kind(host=True)

    def copied_bytes(self, direction: str | None = None) -> int:
        """Bytes copied between memories: "to_host", "to_device", "to_disk", "from_disk", or all."""
        if direction is not None:
            require_one_of(DIRECTIONS, direction=direction)
        return sum(copy.bytes for copy in self._copies if direction in (None, copy.direction))

    def memory_trace(self) -> list[tuple[str, int, int]]:
        """("alloc" or "free", block number, bytes) of the device's blocks in order; older ones first."""
        return list(self._memory.trace())

    def timeline(self, gathered: bool = False) -> list[tuple[int, dict[str, int]]]:
        """(index of the event, live bytes by kind at its fullest moment), where one is born or dies; with
        `gathered`, "gathered parameters" (ZeRO-3) stand apart from the other buffers."""
        return list(self._memory.timeline(gathered))

    @property
    def block_kinds(self) -> list[str]:
        """The kind of every block by its number in `memory_trace`."""
        return self._memory.block_kinds()

    # ---- the order of things ------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        return [event.event() if type(event) is _Issued else event for event in self._events]

    def table(self) -> str:
        """Three small tables: calls per operation and axis, FLOPs per operator, memory per kind; two more if
        something was copied to another memory."""

        def traffic(*which):
            return self.num_calls(*which), self.payload_bytes(*which), self.sent_bytes(*which)

        calls = dict.fromkeys((issued.call.op, issued.call.axis) for issued in self._calls)
        live, peak = self.live_by_kind, self.peak_by_kind
        head = "communication", "calls", "payload bytes", f"{'planned' if self.planned else 'sent'} bytes"
        rows = [(f"{op} {axis}", *traffic(op, axis)) for op, axis in calls]
        kinds = [(kind, live[kind], peak[kind]) for kind in KINDS]
        tables = (
            (head, *rows, ("total", *traffic())),
            (("computation", "FLOPs"), *self.flops_by_operator.items(), ("total", self.flops)),
            (("memory", "live bytes", "at the peak"), *kinds, ("total", self.live_bytes, self.peak_bytes)),
        )
        if self._copies or self.host_peak_bytes:
            copies = [(one, self.copied_bytes(one)) for one in DIRECTIONS if self.copied_bytes(one)]
            host = ("host memory", "live bytes", "peak"), ("total", self.host_bytes, self.host_peak_bytes)
            tables += ((("copies", "bytes"), *copies, ("total", self.copied_bytes())), host)
        return _Shown("\n\n".join(map(aligned, tables)))

    # ---- what the instruments report ----------------------------------------------------------------------

    def _on_call(self, kind: str, subject) -> None:
        if kind == "buffer":
            self._memory.name(subject, "buffers", older=False)
        elif kind == "gradient":
            self._memory.name(subject, "gradients")
        elif kind == "resized":
            self._memory.resized(subject)
        elif kind == "host":
            self._memory.is_host(subject)
        elif kind == "copy":
            copy = Copy(self._next_id, subject.direction, subject.bytes, self._phase)
            self._begun(subject, copy, self._copies)
        elif kind == "issue":
            self._begun(subject, _Issued(subject, self._next_id, self._phase, _members(subject)), self._calls)
        elif id(subject) in self._pending:
            self._events.append(Wait(self._pending.pop(id(subject)).id))
        self._memory.check_limit()

    def _begun(self, subject, event, alike: list) -> None:
        self._pending[id(subject)] = event
        alike.append(event)
        self._events.append(event)

    @property
    def _next_id(self) -> int:
        return len(self._calls) + len(self._copies)


@dataclass(slots=True)
class _Issued:
    """A call in its place among the events. What it sent is known, hence asked for, when it is complete."""

    call: Call
    id: int
    phase: str
    members: tuple[int, ...]

    def event(self) -> Issue:
        call = self.call
        sizes = call.payload_bytes, call.sent_bytes
        return Issue(self.id, call.op, call.axis, self.members, *sizes, call.seq, call.site, self.phase)


def _members(call: Call) -> tuple[int, ...]:
    """The ranks that take part; of a message: (source, destination)."""
    if call.peer is None:
        return call.members
    rank = collectives.world().rank()
    return (rank, call.peer) if call.op == "send" else (call.peer, rank)


class _Shown(str):
    """Text that a notebook shows as it is, without print."""

    def __repr__(self) -> str:
        return str(self)
