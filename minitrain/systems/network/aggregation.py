"""In-network aggregation: switches that add what n workers send, on the engine of packets.

    switchml(values, slots=64).results      integers [n, m] -> for each worker their sum [m]

A ring takes 2 (n - 1) / n of the vector out of each worker; a switch that adds takes it once, gives it once.

    SwitchML   a pool of sums of 32 bits; a slot's answer is the permission to use it again
    iSwitch    a sum for each packet of the gradient, and so memory for all of it
    NetReduce  RoCE's packets go on to where they went, as they were, with the sum for a payload
    PANAMA     packets of n workers become one, whose ack is everyone's; trees take turns
    ATP        slots by hash: who finds his taken goes on to a server, as he is
    FPISA      floating point by compare, shift and integer add
    Libra      keys that are often updated in the switch, the others on a server
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np

from minitrain.ranks.checks import (
    require_fractions,
    require_ints,
    require_nonnegative,
    require_one_of,
    require_positive,
    require_positive_ints,
)
from minitrain.systems.network.congestion import Reno
from minitrain.systems.network.packets import US, Flow, Law, Network, Packet, Port

HEADER = 64  # bytes of a packet beside its numbers


def _whole(values, dims: int = 2) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != dims or not array.size or array.dtype.kind not in "iu":
        raise ValueError(f"{array.dtype} {list(array.shape)}: give whole numbers, in {dims} dimensions")
    return array.astype(np.int64)


def _packets(values, per_packet: int) -> tuple[list, int]:
    """Of each worker the parts of its vector that fill a packet; a packet's bytes."""
    parts = [[vector[at : at + per_packet] for at in range(0, len(vector), per_packet)] for vector in values]
    return parts, 4 * per_packet + HEADER


class Reduced(NamedTuple):
    results: list  # of each worker; None if it never had all
    end_us: float  # inf: never
    resent: int
    sums: int  # in the switch, at most at any time
    goodput: float  # of what links give that never idle


def _reduced(answers, ends, resent, sums, size, gbps) -> Reduced:
    end_us = max(inf if end is None else end / US for end in ends)
    whole = lambda got: np.concatenate([got[seq] for seq in sorted(got)]) if end_us < inf else None
    goodput = len(answers[0]) * size * 8e-3 / gbps / end_us
    return Reduced([whole(got) for got in answers], end_us, resent, sums, goodput)


class _Worker:
    """When chunk c is answered, c + slots may go."""

    def __init__(self, net, number, parts, size, slots, switch, up, timeout_us):
        self.net, self.number, self.parts, self.size, self.slots = net, number, parts, size, slots
        self.switch, self.up, self.timeout_us = switch, up, timeout_us
        self.answers, self.asked, self.resent, self.end_ps = {}, set(), 0, None

    def begin(self) -> None:
        for chunk in range(min(self.slots, len(self.parts))):
            self.send(chunk)

    def send(self, chunk: int) -> None:
        if chunk not in self.answers:
            self.resent += chunk in self.asked
            self.asked.add(chunk)
            Packet(self, chunk, self.size, (self.up,), self.switch, (self.number, self.parts[chunk])).go()
            if self.timeout_us < inf:
                self.net.at(round(self.timeout_us * US), self.send, chunk)

    def lost(self, packet): ...  # nobody hears of it

    def receive(self, packet: Packet) -> None:
        if packet.seq not in self.answers:
            self.answers[packet.seq] = packet.data
            if len(self.answers) == len(self.parts):
                self.end_ps = self.net.now
            if packet.seq + self.slots < len(self.parts):
                self.send(packet.seq + self.slots)


class _Slots:
    """Who sends chunk c + slots has the answer for c; once all have sent it, nobody asks for c again. So with
    two copies in turn a slot's last sum is there for as long as it may be asked for."""

    def __init__(self, workers, downs, slots, copies):
        self.workers, self.downs, self.slots, self.copies, self.most = workers, downs, slots, copies, 0
        self.sums: dict = {}  # (slot, copy) -> chunk, who was added, sum

    def receive(self, packet: Packet) -> None:
        (number, part), chunk, everyone = packet.data, packet.seq, range(len(self.downs))
        place = chunk % self.slots, chunk // self.slots % self.copies
        if place not in self.sums or self.sums[place][0] != chunk:
            self.sums[place] = chunk, set(), np.zeros(len(part), np.int32)
            self.most = max(self.most, len(self.sums))
        _, added, total = self.sums[place]
        to = [number] if number in added else everyone  # it was sent again, or is new
        if number not in added:
            added.add(number)
            total += part  # wraps, as the switch does
        if len(added) == len(everyone):
            for other in to:
                Packet(self, chunk, packet.size, (self.downs[other],), self.workers[other], total).go()
            if self.copies == 1:
                del self.sums[place]

    def lost(self, packet): ...


def switchml(
    values, slots: int, *, copies: int = 2, loss: float = 0, per_packet: int = 32, timeout_us: int = 20,
    late_us: float = 0, gbps: int = 100, delay_us: float = 1, seed: int = 0, until_us: int = 10_000,
) -> Reduced:  # fmt: skip
    """Sapio et al. 2021, Scaling distributed machine learning with in-network aggregation, NSDI: integers [n,
    m] through `slots` sums of `per_packet` numbers; with fewer than a bandwidth-delay product has packets,
    links idle. `loss`: a packet's chance, per link; what has no answer after `timeout_us` is sent again. With
    one copy a sum is gone once told, and who lost it waits for ever. The last worker is `late_us` late."""
    require_positive_ints(10**6, slots=slots, per_packet=per_packet, timeout_us=timeout_us, until_us=until_us)
    require_one_of((1, 2), copies=copies)
    require_fractions(loss=loss)
    require_nonnegative(late_us=late_us)
    net, workers = Network(seed), []
    parts, size = _packets(_whole(values).astype(np.int32), per_packet)
    drop = (lambda packet: net.random.random() < loss) if loss else None
    ups, downs = ([Port(net, gbps, delay_us, drop=drop) for _ in parts] for _ in "ud")
    switch = _Slots(workers, downs, slots, copies)
    for number, up in enumerate(ups):
        again_us = timeout_us if loss else inf
        workers.append(_Worker(net, number, parts[number], size, slots, switch, up, again_us))
        net.at(round(late_us * US) if number == len(ups) - 1 else 0, workers[-1].begin)
    net.run(until_us)
    answers, ends = [worker.answers for worker in workers], [worker.end_ps for worker in workers]
    return _reduced(answers, ends, sum(worker.resent for worker in workers), switch.most, size, gbps)


def iswitch(values, *, per_packet: int = 32, late_us: float = 0) -> Reduced:
    """Li et al. 2019, Accelerating distributed reinforcement learning with in-switch computing, ISCA: all
    packets at once, a sum for each. One late worker, and `sums` are the whole gradient: megabytes for a
    game's network, which an FPGA has; an LLM's fit nowhere."""
    require_positive_ints(10**6, per_packet=per_packet)
    packets = -(-_whole(values).shape[1] // per_packet)
    return switchml(values, packets, copies=1, per_packet=per_packet, late_us=late_us)


def quantized(x, scale: float) -> np.ndarray:
    """Integers for a switch. The sum of n, divided by `scale`, errs by n / scale at most, and does not wrap
    while scale < (2^31 - n) / (n max|x|) (SwitchML's theorems)."""
    require_positive(scale=scale)
    scaled = np.rint(np.asarray(x) * scale)
    if not (np.abs(scaled) < 2**62).all():
        raise ValueError(f"{scale=}: x * scale has no 62 bits; use finite x, and a scale that fits")
    return scaled.astype(np.int64)


class _NetReduce:
    """Stands in the paths of n flows: packets of one number wait for each other, get the sum, and go on."""

    delay_ps = byte_ps = 0

    def __init__(self, n: int, remember: int):
        self.n, self.remember, self.waiting, self.sums = n, remember, defaultdict(dict), {}

    def receive(self, packet: Packet) -> None:
        seq, ready = packet.seq, [packet]
        if (total := self.sums.get(seq)) is None:
            self.waiting[seq][packet.flow] = packet
            if len(self.waiting[seq]) < self.n:
                return
            ready = self.waiting.pop(seq).values()
            total = self.sums[seq] = sum(other.data for other in ready)
            self.sums.pop(seq - self.remember, None)
        for other in ready:
            other.data, other.hop = total, other.hop + 1
            other.go()


class _Receiver(Flow):
    def receive(self, packet: Packet) -> None:
        self.answers[packet.seq] = packet.data
        super().receive(packet)


def netreduce(
    values, *, inside: bool = False, loss: float = 0, remember: int = 256, per_packet: int = 32, seed: int = 0
) -> Reduced:
    """Liu et al. 2023, In-network aggregation with transport transparency for distributed training, ASPLOS:
    integers [n, m] in n RoCE flows. An FPGA beside the switch changes payloads, no sequence number or
    address; it keeps its latest sums, so what is sent again is answered, not added again. `inside`: the
    switch itself adds (AllReduce-Switch, with the same transport), two links less. Differs: no going back to
    what was lost."""
    require_positive_ints(10**6, per_packet=per_packet)
    require_ints(remember=remember)
    require_fractions(loss=loss)
    net, (parts, size) = Network(seed), _packets(_whole(values), per_packet)
    drop = (lambda packet: net.random.random() < loss) if loss else None
    switch, flows = _NetReduce(len(parts), remember), []
    for part in parts:
        ends = [Port(net, drop=drop) for _ in "ud"]
        path = [ends[0], switch, ends[1]] if inside else [ends[0], Port(net), switch, Port(net), ends[1]]
        law = Law(window=64 * size)
        flows.append(_Receiver(net, path, size * len(part), law, mtu=size, data=part.__getitem__))
        flows[-1].answers = {}
    net.run(10_000)
    lost = sum(port.lost for flow in flows for port in (flow.path(0)[0], flow.path(0)[-1]))
    answers, ends = [flow.answers for flow in flows], [flow.end_ps for flow in flows]
    return _reduced(answers, ends, lost, min(remember, len(parts[0])), size, 100)


class _Tree:
    """PANAMA's: the last of n packets of one number goes on for all to the root; all are acknowledged
    there."""

    delay_ps = byte_ps = 0

    def __init__(self, n: int):
        self.n, self.waiting = n, defaultdict(list)

    def receive(self, packet: Packet) -> None:
        if packet.data:  # at the root
            for other in packet.data:
                other.marked = packet.marked
                other.flow.receive(other)
        else:
            self.waiting[packet.seq].append(packet)
            if len(self.waiting[packet.seq]) == self.n:
                packet.data, packet.hop = self.waiting.pop(packet.seq), packet.hop + 1
                packet.marked = any(other.marked for other in packet.data)
                packet.go()


def panama(
    workers: Sequence[int] = (4, 8), *, plain: int = 0, trees: int = 1, until_us: int = 1500
) -> tuple[list[float], float]:
    """Gebara, Ghobadi, Costa 2021, In-network aggregation for shared machine learning clusters, MLSys: jobs
    of so many workers, and `plain` flows, into the links of `trees` roots. All workers of a job hear a sum's
    mark, so to others a job is one flow. -> goodputs after a third of the time, jobs first, as shares of a
    link; the time of a flow of 20 KB in the midst of it (us). Differs: Reno, marks above 30 KB."""
    require_positive_ints(10**4, workers=workers, trees=trees, until_us=until_us)
    require_ints(0, 10**4, plain=plain)
    net, flows = Network(), []
    roots = [Port(net, mark=(30_000, 30_001, 1)) for _ in range(trees)]

    def begin(*switch: _Tree, size=10**9, start_us=0) -> Flow:
        nic = Port(net)
        path, to = lambda seq: (nic, *switch, roots[seq % trees]), switch[0] if switch else None
        return Flow(net, path, size, Reno(), to=to, start_us=start_us)

    for tree in map(_Tree, workers):
        flows.append([begin(tree) for _ in range(tree.n)][0])
    flows += [begin() for _ in range(plain)]
    short = begin(size=20_000, start_us=until_us / 2)
    net.run(until_us / 3)
    before = [flow.arrived for flow in flows]
    net.run(until_us)
    full = until_us * 2 / 3 * US / roots[0].byte_ps
    goodputs = [(flow.arrived - then) / full for flow, then in zip(flows, before)]
    return goodputs, (short.end_ps or inf) / US - until_us / 2


def atp(values, slots: int, *, seed: int = 0) -> tuple[np.ndarray, float]:
    """Lao et al. 2021, ATP: in-network aggregation for multi-tenant learning, NSDI: integers [jobs, workers,
    m], a number a packet, in any order. A slot is its first user's; what others' hash (here: chance) sends
    there goes on to the server, which adds all that comes. -> sums [jobs, m]; the share of packets that the
    switch added. Differs: all are on their way at once, so no slot is given back."""
    require_positive_ints(slots=slots)
    require_ints(seed=seed)
    values, chance, pool, inside = _whole(values, 3), Random(seed), {}, 0
    jobs, n, m = values.shape
    place = {(job, seq): chance.randrange(slots) for job in range(jobs) for seq in range(m)}
    arrivals, server = list(np.ndindex(values.shape)), np.zeros((jobs, m), np.int64)
    chance.shuffle(arrivals)
    for job, worker, seq in arrivals:
        entry = pool.setdefault(place[job, seq], [(job, seq), 0, 0])  # whose, sum, how many
        if entry[0] == (job, seq):
            inside += 1
            entry[1:] = entry[1] + values[job, worker, seq], entry[2] + 1
            server[job, seq] += entry[1] if entry[2] == n else 0
        else:
            server[job, seq] += values[job, worker, seq]
    return server, inside / len(arrivals)


def fpisa(patterns: Sequence[int], exponent_bits: int = 8, mantissa_bits: int = 23, *, guard: int = 0) -> int:
    """Yuan et al. 2022, Unlocking the power of inline floating-point operations on programmable switches,
    NSDI: the bits of a sum of IEEE numbers. A register of 32 bits has an exponent and a signed mantissa; the
    smaller number is shifted right and cut, and only what is read is normalised. Each sum errs by less than a
    unit in the last place of the largest number so far; with `guard` bits below it, by 2^-guard of that."""
    require_positive_ints(30, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)
    require_ints(0, 29 - min(mantissa_bits, 29), guard=guard)
    top, unit, sign_at = (1 << exponent_bits) - 1, 1 << mantissa_bits, exponent_bits + mantissa_bits
    require_ints(0, (2 << sign_at) - 1, patterns=patterns)
    most, finite = (
        1 << 30 - mantissa_bits - guard,
        all(bits >> mantissa_bits & top < top for bits in patterns),
    )
    if len(patterns) > most or not finite:
        raise ValueError(f"{len(patterns)} numbers, {finite=}: 32 bits hold the sum of {most} finite ones")
    exponent = total = 0
    for bits in patterns:
        power, fraction = bits >> mantissa_bits & top, bits & unit - 1
        number = (fraction + unit if power else fraction) << guard
        number, high = -number if bits >> sign_at else number, max(power, exponent, 1)
        total, exponent = (total >> high - exponent) + (number >> high - max(power, 1)), high
    sign, total = (1 << sign_at if total < 0 else 0), abs(total)
    while total >> guard >= 2 * unit:
        total, exponent = total >> 1, exponent + 1
    while 0 < total >> guard < unit and exponent > 1:
        total, exponent = total << 1, exponent - 1
    total >>= guard
    if exponent >= top:
        return sign | top << mantissa_bits  # infinity
    return sign | (exponent << mantissa_bits if total >= unit else 0) | total & unit - 1


def libra(keys, values, hot_keys) -> tuple[np.ndarray, np.ndarray, float]:
    """Pan et al. 2022, Libra, arXiv:2205.05243: updates (key, value) of a sparse model -> sums by key in the
    switch, of `hot_keys` alone; on the server; the share of updates that the switch takes."""
    keys, values, hot = _whole(keys, 1), _whole(values, 1), np.isin(keys, hot_keys)
    require_ints(0, 1 << 24, least_key=int(keys.min()), most_key=int(keys.max()))
    sums = np.zeros((2, int(keys.max()) + 1), np.int64)
    np.add.at(sums, (1 - hot, keys), values)
    return sums[0], sums[1], float(hot.mean())
