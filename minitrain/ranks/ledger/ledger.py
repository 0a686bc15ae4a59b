"""The exact account of what one rank does: bytes it sends, FLOPs it spends, memory it holds, in which order.

    with Ledger() as ledger:
        with ledger.phase("forward"):
            loss = loss_of(model(tokens), targets)
    print(ledger.table())

A dispatch mode of torch sees every operator, those of backward too (`operators.py`); weak references see
every tensor die (`memory_meter.py`). The collectives report every call: bytes are counted where a buffer is
handed to the network; where the backend moves the data itself they are charged from the chunk plan, and
`planned` is True. A real run and a dry run of the same code give the same account, event by event.

What is inside a collective is communication: its additions are no Compute events, its memory counts. So is
the emulation of a product in few bits: one Compute, of that kernel.
Operators of your own threads are not seen, nor is the inside of a compiled function; direct calls of
torch.distributed are named in `uncounted`, without bytes. A causal attention kernel counts the scores its
mask leaves; `Ledger(causal="square")` counts all T², as the papers' do. After torch.utils.flop_counter and
torch.distributed._tools.mem_tracker. Differs: communication and dry runs too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_one_of
from minitrain.ranks.collectives.call_log import Call
from minitrain.ranks.events import DIRECTIONS, Compute, Copy, Event, Issue, Wait
from minitrain.ranks.ledger.memory_meter import KINDS, MemoryMeter
from minitrain.ranks.ledger.operators import Watch
from minitrain.ranks.tables import aligned


class Ledger:
    """One run's account, to be read while it is open or after; bytes are this rank's. With `limit_bytes`
    what lets more be alive on the device raises MemoryError, on a CPU too."""

    def __init__(self, *, causal: str = "triangle", limit_bytes: int | None = None) -> None:
        require_one_of(("triangle", "square"), causal=causal)
        self.causal = causal
        self._events: list[Event] = []
        self._calls: list[tuple[Call, int]] = []  # and where in the events it is
        # id of a call or transfer -> the id of its event, until it has been waited for
        self._pending: dict[int, int] = {}
        self._memory = MemoryMeter(lambda: len(self._events), limit_bytes)
        self._copies: list[Copy] = []
        self.uncounted: Counter[str] = Counter()  # calls of torch.distributed beside the door
        self._phase, self._emulates = "", False  # a kernel that there is not on every device
        self._open, self._used = ExitStack(), False

    def __enter__(self) -> "Ledger":
        if self._used:
            raise ValueError("this Ledger has accounted for a run already; make a new one")
        self._used = True
        self._open.callback(self._memory.close)
        self._memory.open()
        self._open.enter_context(collectives.observe(self._on_call))
        self._open.enter_context(Watch(self))
        return self

    def __exit__(self, *error) -> None:
        self._open.close()
        self._pending.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label the events inside: `with ledger.phase("forward")`. The innermost label holds."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    # ---- communication: all calls, or those of one operation and one mesh axis -----------------------------

    def sent_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        return sum(call.sent_bytes for call in self._matching(op, axis))

    def payload_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """The sum of the sizes S which the papers' formulas start from."""
        return sum(call.payload_bytes for call in self._matching(op, axis))

    def num_calls(self, op: str | None = None, axis: str | None = None) -> int:
        return len(self._matching(op, axis))

    def _matching(self, op: str | None = None, axis: str | None = None) -> list[Call]:
        return [call for call, _ in self._calls if op in (None, call.op) and axis in (None, call.axis)]

    # Some volume was charged from the plan, not counted (NCCL, dry run).
    planned = property(lambda self: any(call.planned for call in self._matching()))

    # ---- computation: of every operator, or phase, that has FLOPs, the most expensive first ---------------

    flops = property(lambda self: sum(self.flops_by_operator.values()))
    flops_by_operator = property(lambda self: self._flops_by(lambda compute: compute.name))
    flops_by_phase = property(lambda self: self._flops_by(lambda compute: compute.phase))

    def _flops_by(self, key) -> dict[str, int]:
        total: Counter[str] = Counter()
        for event in self._events:
            if type(event) is Compute and event.flops:
                total[key(event)] += event.flops
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    # ---- memory -------------------------------------------------------------------------------------------
    #
    # Bytes of all tensors that live now (of a closed ledger: that lived when it was closed), and at most; of
    # the device, and of the memory marked as the host's (memory/pools.py), which is not part of it.

    live_bytes = property(lambda self: self._memory.live_bytes())
    host_bytes = property(lambda self: self._memory.live_bytes(host=True))
    peak_bytes = property(lambda self: max(self._memory.totals()))
    host_peak_bytes = property(lambda self: max(self._memory.totals(host=True)))
    live_by_kind = property(lambda self: self._memory.by_kind())
    host_by_kind = property(lambda self: self._memory.by_kind(host=True))
    block_kinds = property(lambda self: self._memory.block_kinds())  # by the numbers of `memory_trace`

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak consists of (the first moment at which it was reached)."""
        totals = self._memory.totals()
        return self._memory.by_kind(after=totals.index(max(totals)))

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
    def events(self) -> list[Event]:
        """In order. What a call sent is known, hence asked for, when it is complete."""
        events = list(self._events)
        for call, at in self._calls:
            events[at] = replace(events[at], sent_bytes=call.sent_bytes)
        return events

    def table(self) -> str:
        """Calls per operation and axis, FLOPs per operator, memory per kind; copies, if there are any."""
        traffic = lambda *one: (self.num_calls(*one), self.payload_bytes(*one), self.sent_bytes(*one))
        calls = dict.fromkeys((call.op, call.axis) for call, _ in self._calls)
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
        lines = list(map(aligned, tables))
        if self.uncounted:
            calls = ", ".join(f"{count} {name}" for name, count in self.uncounted.items())
            lines.append(f"not counted, for torch.distributed was called directly: {calls}")
        return _Shown("\n\n".join(lines))

    def _on_call(self, kind: str, subject) -> None:
        if kind == "buffer":
            self._memory.name(subject, "buffers", older=False)
        elif kind == "gradient":
            self._memory.name(subject, "gradients")
        elif kind == "resized":
            self._memory.resized(subject)
        elif kind == "host":
            self._memory.is_host(subject)
        elif kind == "kernel":
            if subject:
                self._events.append(replace(Compute(*subject), phase=self._phase))
            self._emulates = subject is not None
        elif kind in ("copy", "issue"):
            number = self._pending[id(subject)] = len(self._calls) + len(self._copies)
            if kind == "copy":
                self._copies.append(event := Copy(number, subject.direction, subject.bytes, self._phase))
            else:
                members, size = subject.members, subject.payload_bytes
                if subject.peer is not None:  # of a message: (source, destination)
                    pair = collectives.world().rank(), subject.peer
                    members = pair if subject.op == "send" else pair[::-1]
                what = number, subject.op, subject.axis, members, size, subject.sent_bytes
                event = Issue(*what, subject.seq, subject.site, self._phase)
                self._calls.append((subject, len(self._events)))
            self._events.append(event)
        elif id(subject) in self._pending:
            self._events.append(Wait(self._pending.pop(id(subject))))
        self._memory.check_limit()


class _Shown(str):  # a notebook shows it as it is, without print
    def __repr__(self) -> str:
        return str(self)
