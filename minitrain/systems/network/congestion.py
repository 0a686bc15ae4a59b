"""Congestion control: what a sender does with what acks, marks, stamps, credits or the switch tell it.

    port, flows = incast(Hpcc, senders=10)          ten senders into one port, 400 us of it
    port.history, jain([flow.arrived for flow in flows])

    Dcqcn   marks move a rate               Hpcc   each link's queue and rate move a window
    Timely  the RTT's gradient, a rate      Eqds   the receiver's credits are the window
    Swift   the RTT, a window               Rocc   the switch says the rate
    Reno    marks and losses, a window; with mltcp_gain it is MLTCP

Rates in Gb/s, windows in bytes, times in ps; constants are the papers' unless said (gains of RoCC and MLTCP
are quoted from others, not confirmed in print), `law(name=value)` sets another. Scenes: an incast, PFC with
its victim, training jobs on a link.
"""

from collections.abc import Callable
from math import inf

from minitrain.ranks.checks import require_fractions, require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.network.packets import US, Flow, Law, Network, Port


class Dcqcn(Law):
    """Zhu et al. 2015, Congestion control for large-scale RDMA deployments, SIGCOMM, section 3: a mark, at
    most one per 50 us, cuts the rate by alpha/2; each 55 us without one go halfway back to the target, which
    from the sixth on rises by 40 Mb/s. Differs: no counter of bytes, no hyper increase."""

    g, cnp, period, step, fast_steps = 1 / 256, 50 * US, 55 * US, 0.04, 5
    alpha, cut_at, stage = 1.0, -inf, 0

    def begin(self, flow):
        super().begin(flow)
        self.target = self.rate
        flow.net.at(self.period, self.increase, self.cut_at)

    def on_ack(self, ack):
        net = self.flow.net
        if ack.marked and net.now - self.cut_at >= self.cnp:
            self.target, self.rate = self.rate, self.rate * (1 - self.alpha / 2)
            self.alpha += self.g * (1 - self.alpha)
            self.cut_at, self.stage = net.now, 0
            net.at(self.period, self.increase, net.now)

    def increase(self, since):
        if since == self.cut_at and self.flow.end_ps is None:  # a cut starts another timer
            self.alpha, self.stage = self.alpha * (1 - self.g), self.stage + 1
            if self.stage > self.fast_steps:
                self.target = min(self.target + self.step, self.flow.gbps)
            self.rate = (self.target + self.rate) / 2
            self.flow.net.at(self.period, self.increase, since)


class Timely(Law):
    """Mittal et al. 2015, TIMELY, SIGCOMM, algorithm 1: per segment of 16 KB up below `low`, down in
    proportion above `high`, between them by the RTT's gradient, five steps at a time after five that did not
    rise. Begins at a tenth of the line's rate; ten that begin at all of it fill milliseconds of queue before
    a segment is acknowledged. Differs: a gradient counts as 1 at most."""

    low, high, beta, smooth, step, segment = 50 * US, 500 * US, 0.8, 0.875, 0.01, 16_000
    start, part, last, change, falling = 0.1, 0, 0, 0, 0

    def on_ack(self, ack):
        self.part += ack.size
        if self.part < self.segment:
            return
        self.part, rtt = 0, ack.rtt
        self.change += self.smooth * (rtt - (self.last or rtt) - self.change)
        self.last, gradient = rtt, self.change / self.flow.base_rtt
        self.falling = self.falling + 1 if gradient <= 0 else 0
        if rtt < self.low:
            self.rate += self.step
        elif rtt > self.high:
            self.rate *= 1 - self.beta * (1 - self.high / rtt)
        elif gradient <= 0:
            self.rate += self.step * (5 if self.falling >= 5 else 1)
        else:
            self.rate *= 1 - self.beta * min(gradient, 1)
        self.rate = min(max(self.rate, self.step), self.flow.gbps)


class Swift(Law):
    """Kumar et al. 2020, Swift, SIGCOMM, algorithm 1: a packet more per RTT below the target delay; above it,
    at most once per RTT, less in proportion to the excess; below a packet, packets further apart. Differs:
    one fixed target, for the fabric; no window for the host."""

    target, beta, most, cut_at = 25 * US, 0.8, 0.5, -inf

    def begin(self, flow):
        super().begin(flow)
        self.packets = flow.gbps * flow.base_rtt / 8000 / flow.mtu

    def on_ack(self, ack):
        now, excess = self.flow.net.now, 1 - self.target / ack.rtt
        if excess < 0:
            self.packets += 1 / max(self.packets, 1)
        elif now - self.cut_at >= ack.rtt:
            self.cut_at, self.packets = now, self.packets * max(1 - self.beta * excess, self.most)
        self.window = max(self.packets, 1) * self.flow.mtu
        self.rate = inf if self.packets >= 1 else self.packets * self.flow.mtu * 8000 / ack.rtt


class Hpcc(Law):
    """Li et al. 2019, HPCC, SIGCOMM, algorithm 1: two acks' stamps give each link's bytes in flight, as a
    share U of its bandwidth-delay product; W = W_c / (U / eta) + W_AI for the busiest, and W_c = W once per
    RTT. U settles at eta + senders · W_AI / BDP, where W_AI = BDP · (1 - eta) / `share`."""

    eta, stages, share = 0.95, 5, 100
    u, stage, update_at, last = 1, 0, 0, None

    def begin(self, flow):
        super().begin(flow)
        self.bdp = self.window = self.reference = flow.gbps * flow.base_rtt / 8000

    def on_ack(self, ack):
        if self.last:
            self.measure(ack.stamps)
            scale = self.u >= self.eta or self.stage >= self.stages
            wanted = self.reference * self.eta / self.u if scale else self.reference
            self.window = min(wanted + self.bdp * (1 - self.eta) / self.share, self.bdp)
            if ack.seq >= self.update_at:  # the first that left after the last time
                self.reference, self.update_at = self.window, self.flow.seq
                self.stage = 0 if scale else self.stage + 1
            self.rate = self.window * 8000 / self.flow.base_rtt
        self.last = ack.stamps

    def measure(self, stamps):
        base, most = self.flow.base_rtt, (0, 0)
        for (queued, sent, then, _), (still, now_sent, now, gbps) in zip(self.last, stamps):
            if gap := now - then:
                flight = min(queued, still) / base + (now_sent - sent) / gap
                most = max(most, (flight * 8000 / gbps, min(gap, base)))
        self.u += (most[0] - self.u) * most[1] / base


class Eqds(Law):
    """Olteanu et al. 2022, An edge-queued datagram service for all datacenter traffic, NSDI: queues stay at
    the senders; packets leave on credit, but for the first `window` bytes. The receiver gives a credit of a
    packet per packet time, in order of asking; who got one asks again. Differs: nothing is trimmed."""

    window = 0

    def begin(self, flow):
        super().begin(flow)
        self.wanted, self.port = flow.size - self.window, flow.path(0)[-1]
        flow.net.at(round(flow.start_us * US) + flow.back_ps, self.ask)

    def ask(self):
        now, next_ps = self.flow.net.now, max(self.flow.net.now, self.port.control or 0)
        self.port.control = next_ps + self.flow.mtu * self.port.byte_ps  # when it may give another
        self.flow.net.at(next_ps - now, self.give)

    def give(self):
        self.flow.net.at(self.flow.back_ps, self.grant)
        self.wanted -= self.flow.mtu
        if self.wanted > 0:
            self.ask()

    def grant(self):
        self.window += self.flow.mtu
        self.flow.pump()

    def on_ack(self, ack):
        self.window -= ack.size  # a credit is used once


class Rocc(Law):
    """Taheri et al. 2020, RoCC: robust congestion control for RDMA, CoNEXT: the last port says the rate."""

    def begin(self, flow):
        super().begin(flow)
        port = flow.path(0)[-1]
        port.control = port.control or FairRate(port)
        port.control.laws.append(self)


class FairRate:
    """RoCC at a port: every 40 us a PI controller moves one rate for all, by how far the queue is from
    `reference` and how much it grew; four references halve it. Gains halve with each halving of the rate
    below the line's, to 1/32, and so fit any number of flows."""

    period, reference, floor = 40 * US, 75_000, 0.1
    proportional, integral = 1.5 * 0.01 / 600, 0.3 * 0.01 / 600  # steps of 10 Mb/s, per 600 bytes

    def __init__(self, port: Port):
        self.port, self.laws, self.rate, self.queued = port, [], port.gbps, 0
        port.net.at(self.period, self.update)

    def update(self):
        port, level = self.port, 1
        while self.rate < port.gbps / (2 * level) and level < 32:
            level *= 2
        error, growth = port.queued - self.reference, port.queued - self.queued
        change = (self.integral * error + self.proportional * growth) / level
        self.rate = self.rate / 2 if error > 3 * self.reference else self.rate - change
        self.rate, self.queued = min(max(self.rate, self.floor), port.gbps), port.queued
        for law in self.laws:
            port.net.at(law.flow.back_ps, setattr, law, "rate", self.rate)
        port.net.at(self.period, self.update)


def mltcp_gain(x: float) -> float:
    """Rajasekaran, Narang, Zabreyko, Ghobadi 2024, MLTCP, arXiv:2402.09589: the job that is ahead in its
    iteration gets further ahead, and iterations slide apart."""
    require_fractions(x=x)
    return 1.75 * x + 0.25


class Reno(Law):
    """Jacobson 1988, Congestion avoidance and control, SIGCOMM: `gain(x)` packets more per RTT, where x of
    the message is acknowledged; half when one is lost or marked, once per RTT. Differs: no slow start."""

    gain, packets, cut_at = staticmethod(lambda x: 1), 10, -inf

    window = property(lambda self: self.packets * self.flow.mtu)

    def on_ack(self, ack):
        if ack.marked:
            self.cut(ack.rtt)
        else:
            self.packets += self.gain(self.flow.acked / self.flow.size) / self.packets

    def on_loss(self):
        self.cut(self.flow.base_rtt)

    def cut(self, rtt):
        if self.flow.net.now - self.cut_at > rtt:
            self.cut_at, self.packets = self.flow.net.now, max(2, self.packets / 2)


def jain(shares) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    require_nonnegative(shares=shares)
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares) or 1)


def incast(
    law: Callable[[], Law] = Law, senders: int = 10, *, gbps: int = 100, delay_us: float = 1, mtu: int = 1000,
    size: int = 10**9, apart_us: float = 0, mark=None, until_us: int = 400,
) -> tuple[Port, list[Flow]]:  # fmt: skip
    """Senders with a port each into one, which is watched: that port and the flows after `until_us`;
    `port.net.run` goes on. Sender i begins i · `apart_us` later."""
    require_positive_ints(10**5, senders=senders, until_us=until_us)
    require_nonnegative(apart_us=apart_us)
    net = Network()
    port = Port(net, gbps, delay_us, mark=mark)
    paths = [(Port(net, gbps, delay_us), port) for _ in range(senders)]
    flows = [Flow(net, path, size, law(), mtu=mtu, start_us=i * apart_us) for i, path in enumerate(paths)]
    port.watch(2, until_us)
    net.run(until_us)
    return port, flows


def head_of_line(
    pause=(100_000, 80_000), *, per_flow: bool = False, buffer_bytes=inf, hosts: int = 4, until_us: int = 400
) -> tuple[float, list[Port]]:
    """PFC and its victim. Two flows of half line rate share a link; behind it one goes to a port that `hosts`
    others crowd, the other, the victim, to an empty port. In one class, pausing the link for the first stops
    both; `per_flow`, each has a queue and a pause. -> the victim's share of its rate; ports: shared, crowded,
    empty. A port that n feed queues at most n · (on + 2 · delay · rate + 2 packets), and needs that
    buffer."""
    require_ints(0, 1000, hosts=hosts)
    require_positive_ints(10**5, until_us=until_us)
    net = Network()
    shared, hot, cold = ports = [Port(net, pause=pause, buffer_bytes=buffer_bytes) for _ in range(3)]
    for kind, path in enumerate([(hot,)] * hosts + [(shared, hot), (shared, cold)]):
        law, kind = Law(rate=100 / len(path)), kind if per_flow else 0
        flow = Flow(net, (Port(net), *path), 10**9, law, kind=kind)  # the last is the victim
    net.run(until_us)
    return flow.arrived * 8000 / (50 * until_us * US), ports


def jobs(gain: Callable = lambda x: 1, count: int = 2, iterations: int = 24) -> list[list[float]]:
    """Training jobs on a link of 10 Gb/s under Reno with this gain: an iteration sends 1 MB, alone in 800 us,
    and then works for 800 us. Job i begins 10 i us late -> of each, when its messages ended (us)."""
    require_positive_ints(10**5, count=count, iterations=iterations)
    net, ends = Network(), [[] for _ in range(count)]
    link = Port(net, 10, mark=(5_000, 5_001, 1))

    def message(job: list, law: Law, path: tuple, start_us: float) -> None:
        def done() -> None:
            job.append(net.now / US)
            if len(job) < iterations:
                message(job, law, path, 800)

        Flow(net, path, 10**6, law, start_us=start_us, on_done=done)

    for number, job in enumerate(ends):
        message(job, Reno(gain=gain), (Port(net, 10), link), 10 * number)
    net.run()
    return ends
