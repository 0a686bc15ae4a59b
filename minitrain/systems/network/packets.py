"""Packets through queues, event by event: queues, marks, pauses, losses and order, which rates do not show.

    net = Network()
    hot = Port(net, mark=(40_000, 200_000, 0.2))
    flows = [Flow(net, (Port(net), hot), 10**6) for _ in range(10)]
    net.run();  hot.most_queued, [flow.end_ps / US for flow in flows]

    Port   the sending side of a link: a queue per kind of packet, a rate, a delay; it may mark packets (ECN),
           stamp them (in-band telemetry), pause the ports that feed it (PFC, IEEE 802.1Qbb), or lose them
    Flow   sends bytes along a path as its law allows and receives them at the other end. A path may lead
           through switches that add: through whatever has `receive(packet)`
    Law    how many bytes may be unacknowledged (`window`), how fast they leave (`rate`, Gb/s), what acks do

Times are whole picoseconds and chance has one seed, so equal runs are equal to the last packet. Differs from
hardware: acks come back after the path's delays and never queue; a sender hears of a loss a round trip later,
as of a trimmed packet; PFC's thresholds are fixed, for each port that feeds; headers are in the size. Some
300,000 events per second of one processor, two per packet and port.
"""

from collections import Counter, deque
from heapq import heappop, heappush
from math import inf
from random import Random

from minitrain.ranks.checks import require_fractions, require_ints, require_nonnegative, require_one_of

US = 10**6  # picoseconds in a microsecond


class Network:
    """The clock, what is due, and chance."""

    def __init__(self, seed: int = 0):
        require_ints(seed=seed)
        self.now, self.due, self.events, self.random = 0, [], 0, Random(seed)

    def at(self, delay_ps: int, call, *args) -> None:
        self.events += 1  # ties go in the order of asking
        heappush(self.due, (self.now + delay_ps, self.events, call, args))

    def run(self, until_us: float = inf) -> None:
        while self.due and self.due[0][0] <= until_us * US:
            self.now, _, call, args = heappop(self.due)
            call(*args)


class Packet:
    """`stamps`: (bytes queued, bytes sent, now, gbps) of each port that it left."""

    __slots__ = "flow seq size path data kind hop marked stamps sent_ps rtt".split()

    def __init__(self, flow, seq, size, sent_ps):
        self.flow, self.seq, self.size, self.kind, self.sent_ps = flow, seq, size, flow.kind, sent_ps
        self.path, self.data = flow.path(seq), flow.data(seq)
        self.hop, self.marked, self.stamps = 0, False, []

    def go(self) -> None:
        """On to the next port, or to the end of the path."""
        (self.path[self.hop] if self.hop < len(self.path) else self.flow).receive(self)


class Port:
    """`mark` (low, high, most): above `low` bytes queued a packet is marked, with a chance that rises to
    `most` at `high`, and surely beyond. `pause` (on, off): a port that feeds this one stops sending a kind
    while more than `on` of its bytes wait here, until `off` are left; it knows a link's delay later.
    `buffer_bytes`: packets beyond are lost; `loss`: the chance of any to be. `control`: of a law."""

    def __init__(self, net, gbps=100, delay_us=1, *, mark=None, pause=None, buffer_bytes=inf, loss=0):
        require_nonnegative(delay_us=delay_us, mark=mark or 0, pause=pause or 0)
        require_fractions(loss=loss)
        require_one_of([rate for rate in range(1, 8001) if 8000 % rate == 0], gbps=gbps)  # whole ps a byte
        self.net, self.gbps, self.byte_ps, self.delay_ps = net, gbps, 8000 // gbps, round(delay_us * US)
        self.low, self.high, self.chance = mark or (inf, inf, 0)
        self.on, self.off = pause or (inf, inf)
        self.buffer_bytes, self.loss = buffer_bytes, loss
        self.queues: dict = {}  # of each kind that waits; the first one's turn is next
        self.queued = self.sent = self.most_queued = self.lost = self.pauses = 0
        self.busy, self.control, self.history = False, None, []
        self.paused, self.asked, self.ahead = set(), set(), Counter()  # kinds; bytes at the next port

    def receive(self, packet: Packet) -> None:
        unlucky = self.loss and self.net.random.random() < self.loss
        if unlucky or self.queued + packet.size > self.buffer_bytes:
            self.lost += 1
            packet.flow.lost(packet)
            return
        if (above := self.queued - self.low) > 0:
            chance = self.chance * above / (self.high - self.low) if self.queued <= self.high else 1
            packet.marked = packet.marked or self.net.random.random() < chance
        self.queues.setdefault(packet.kind, deque()).append(packet)
        self._count(packet, packet.size)
        self.most_queued = max(self.most_queued, self.queued)
        self.serve()

    def serve(self) -> None:
        kind = None if self.busy else next((kind for kind in self.queues if kind not in self.paused), None)
        if kind is not None:
            queue = self.queues.pop(kind)
            packet = queue.popleft()
            if queue:
                self.queues[kind] = queue  # behind the other kinds
            self.busy = True
            self.net.at(packet.size * self.byte_ps, self.leave, packet)

    def leave(self, packet: Packet) -> None:
        self.busy = False
        self.sent += packet.size
        self._count(packet, -packet.size)
        packet.stamps.append((self.queued, self.sent, self.net.now, self.gbps))
        packet.hop += 1
        self.net.at(self.delay_ps, packet.go)
        self.serve()

    def _count(self, packet: Packet, size: int) -> None:
        self.queued += size
        if self.on < inf and packet.hop:
            feeder, kind = packet.path[packet.hop - 1], packet.kind
            feeder.ahead[kind] += size
            if feeder.ahead[kind] > self.on and kind not in feeder.asked:
                feeder.asked.add(kind)
                feeder.pauses += 1
                self.net.at(feeder.delay_ps, feeder.paused.add, kind)
            elif feeder.ahead[kind] <= self.off and kind in feeder.asked:
                feeder.asked.remove(kind)
                self.net.at(feeder.delay_ps, feeder.resume, kind)

    def resume(self, kind) -> None:
        self.paused.discard(kind)
        self.serve()

    def watch(self, every_us: float, until_us: float) -> None:
        """Fill `history` with (us, bytes queued, bytes sent), from now on."""
        self.history.append((self.net.now / US, self.queued, self.sent))
        if self.net.now < until_us * US:
            self.net.at(round(every_us * US), self.watch, every_us, until_us)


class Law:
    """No control: any number of bytes, at line rate unless told."""

    rate, window, start = inf, inf, 1  # Gb/s, bytes; the share of the line's rate to begin at

    def __init__(self, **settings: float):
        vars(self).update(settings)  # in place of the class's

    def begin(self, flow: "Flow") -> None:
        self.flow, self.rate = flow, min(self.rate, self.start * flow.gbps)

    def on_ack(self, ack: Packet) -> None: ...  # the packet that has arrived; `rtt` in ps

    def on_loss(self) -> None: ...


class Flow:
    """`path`: ports, or a function of a packet's number that chooses them (the first is always the same).
    `data(seq)`: what a packet carries. `on_done()` is called when all is acknowledged."""

    def __init__(
        self, net, path, size, law=None, *, start_us=0, mtu=1000, kind=0, data=lambda seq: None, on_done=None
    ):
        require_ints(1, 10**12, size=size, mtu=mtu)
        require_nonnegative(start_us=start_us)
        self.net, self.size, self.law, self.start_us, self.mtu = net, size, law or Law(), start_us, mtu
        self.path, self.data = path if callable(path) else lambda seq: path, data
        self.kind, self.on_done, ports = kind, on_done, self.path(0)
        self.gbps, self.back_ps = ports[0].gbps, sum(port.delay_ps for port in ports)
        self.base_rtt = 2 * self.back_ps + sum(mtu * port.byte_ps for port in ports)
        self.left, self.seq, self.out, self.again = size, 0, 0, deque()  # to be sent, of that under way, lost
        self.next = self.alarm = 0  # when the next packet may leave; until when the last pump was put off
        self.arrived, self.acked, self.end_ps = 0, 0, None
        self.expected, self.early, self.most_early, self.out_of_order = 0, set(), 0, 0
        self.law.begin(self)
        net.at(round(start_us * US), self.pump)

    def pump(self) -> None:
        """Send what the law allows."""
        law, now = self.law, self.net.now
        while self.left or self.again:
            if self.out + self.mtu > law.window and (self.out or law.window <= 0):
                return  # a window below a packet lets one go, a window of nothing none
            if now < self.next:
                if self.alarm != self.next:
                    self.alarm = self.next
                    self.net.at(self.next - now, self.pump)
                return
            if self.again:
                seq, size = self.again.popleft()
            else:
                seq, size = self.seq, min(self.mtu, self.left)
                self.seq, self.left = seq + 1, self.left - size
            self.out += size
            self.next = now + round(size * 8000 / min(law.rate, self.gbps))
            Packet(self, seq, size, now).go()

    def receive(self, packet: Packet) -> None:
        self.arrived += packet.size
        self.early.add(packet.seq)
        self.out_of_order += packet.seq != self.expected
        while self.expected in self.early:
            self.early.remove(self.expected)
            self.expected += 1
        self.most_early = max(self.most_early, len(self.early))
        self.net.at(self.back_ps, self.acknowledge, packet)

    def acknowledge(self, packet: Packet) -> None:
        self.out -= packet.size
        self.acked += packet.size
        packet.rtt = self.net.now - packet.sent_ps
        self.law.on_ack(packet)
        if self.acked == self.size:
            self.end_ps = self.net.now
            if self.on_done:
                self.on_done()
        self.pump()

    def lost(self, packet: Packet) -> None:
        self.net.at(2 * self.back_ps, self.resend, packet)

    def resend(self, packet: Packet) -> None:
        self.out -= packet.size
        self.again.append((packet.seq, packet.size))
        self.law.on_loss()
        self.pump()


def spray(first: Port, uplinks, last: Port, random: Random | None = None):
    """Packet spraying (Dixit et al. 2013, On the impact of packet spraying in data center networks, INFOCOM):
    uplinks in turn or by chance, packet by packet; the receiver puts aside those that are early."""
    return lambda seq: (first, random.choice(uplinks) if random else uplinks[seq % len(uplinks)], last)
