"""In-network aggregation: switches that add what n workers send, on the engine of packets.

    switchml(values, slots=64).results      integers [n, m] -> for each worker their sum [m]

A ring takes 2 (n - 1) / n of the vector out of each worker; a switch that adds takes it once, gives it once.
`Adder` is that switch; systems differ in who may send when, in how many sums are kept, and in what is added:

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

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive
from minitrain.systems.network.congestion import Reno
from minitrain.systems.network.packets import US, Flow, Law, Network, Packet, Port

NUMBERS, SIZE = 32, 192  # of a packet: numbers, and bytes with its header


def _whole(values, dims: int = 2) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != dims or not array.size or array.dtype.kind not in "iu":
        raise ValueError(f"{array.dtype} {list(array.shape)}: give whole numbers, in {dims} dimensions")
    return array.astype(np.int64)


class Adder:
    """Stands in the paths of n flows, as ports do. Packets of one number wait for each other, and all go on
    with the sum. Sums of the latest `memory` numbers stay: what was lost behind the switch and is sent again
    is answered, not added again. With memory 0, who lost a sum waits for ever. Where it `merges`, the last
    packet alone goes on, with all of them. A sum is marked if one of its packets was."""

    delay_ps = byte_ps = 0

    def __init__(self, n: int, memory: int = 0, merges: bool = False):
        self.n, self.memory, self.merges, self.most = n, memory, merges, 0
        self.waiting, self.sums = defaultdict(dict), {}

    def receive(self, packet: Packet) -> None:
        seq, ready = packet.seq, [packet]
        total = self.sums.get(seq)
        if total is None:
            self.sums.pop(seq - self.memory, None)
            self.waiting[seq][packet.flow] = packet
            self.most = max(self.most, len(self.waiting) + len(self.sums))
            if len(self.waiting[seq]) < self.n:
                return
            ready = list(self.waiting.pop(seq).values())
            total = ready if self.merges else sum(other.data for other in ready)
            if self.memory:
                self.sums[seq] = total
        marked = any(other.marked for other in ready)
        for other in ready[-1:] if self.merges else ready:
            other.data, other.marked, other.hop = total, marked, other.hop + 1
            other.go()


class _Slots(Law):
    """The answer to packet c is the permission for packet c + slots."""

    @property
    def window(self) -> float:
        flow = self.flow
        return inf if flow.again or flow.seq < flow.expected + self.slots else 0


class _Worker(Flow):
    """Sends its vector in packets and gets each back with the sum."""

    def __init__(self, net: Network, path: list, vector: np.ndarray, slots: float, late_us: float):
        parts = np.split(vector, range(NUMBERS, len(vector), NUMBERS))
        self.answers, law = [None] * len(parts), _Slots(slots=slots)
        size, data = SIZE * len(parts), parts.__getitem__
        super().__init__(net, path, size, law, mtu=SIZE, start_us=late_us, data=data)

    def receive(self, packet: Packet) -> None:
        self.answers[packet.seq] = packet.data
        super().receive(packet)
        self.pump()  # an answer may be a permission


class Reduced(NamedTuple):
    results: list  # of each worker; None if one never had all
    end_us: float  # when the last had all; inf: never
    resent: int
    sums: int  # in the switch, at most at any time
    goodput: float  # of what links give that never idle


def _reduced(values, slots: float, memory: int, *, beside=False, loss=0.0, late_us=0.0, seed=0) -> Reduced:
    """Each worker has a link of 100 Gb/s and 1 us up to the switch and one down, which lose packets with
    chance `loss`. `beside`: sums are made a link further. The last worker begins `late_us` late."""
    require_nonnegative(late_us=late_us)
    values, net, workers = _whole(values).astype(np.int32), Network(seed), []  # sums wrap, as a switch's do
    switch = Adder(len(values), memory)
    for vector in values:
        up, down = Port(net, loss=loss), Port(net, loss=loss)
        path = [up, Port(net), switch, Port(net), down] if beside else [up, switch, down]
        late = late_us * (len(workers) == len(values) - 1)
        workers.append(_Worker(net, path, vector, slots, late))
    net.run(10_000)
    complete = all(worker.end_ps for worker in workers)
    end_us = max(worker.end_ps - worker.back_ps for worker in workers) / US if complete else inf
    results = [np.concatenate(worker.answers) if complete else None for worker in workers]
    lost = sum(worker.path(0)[end].lost for worker in workers for end in (0, -1))
    return Reduced(results, end_us, lost, switch.most, workers[0].size * up.byte_ps / US / end_us)


def switchml(values, slots: int, *, copies=2, loss: float = 0, late_us: float = 0, seed=0) -> Reduced:
    """Sapio et al. 2021, Scaling distributed machine learning with in-network aggregation, NSDI: integers [n,
    m] through `slots` sums of 32 numbers; with fewer than a bandwidth-delay product has packets, links idle.
    Who sends packet c + slots has the answer to c; once all have sent it, nobody asks for c again. So with
    two copies of a slot, filled in turn, a sum is there for as long as it may be asked for; with one it is
    gone once told. Differs: slots are used in order; a sender hears of each loss, without a timeout."""
    require_ints(1, 10**6, slots=slots)
    require_ints(1, 2, copies=copies)
    memory = 2 * slots if copies == 2 else 0
    return _reduced(values, slots, memory, loss=loss, late_us=late_us, seed=seed)


def iswitch(values, *, late_us: float = 0) -> Reduced:
    """Li et al. 2019, Accelerating distributed reinforcement learning with in-switch computing, ISCA: all
    packets at once, a sum for each. One late worker, and `sums` are the whole gradient: megabytes for a
    game's network, which an FPGA has; an LLM's fit nowhere."""
    return _reduced(values, inf, 0, late_us=late_us)


def netreduce(values, *, inside: bool = False, loss: float = 0, memory: int = 256, seed: int = 0) -> Reduced:
    """Liu et al. 2023, In-network aggregation with transport transparency for distributed training, ASPLOS:
    integers [n, m] in n RoCE flows. An FPGA beside the switch changes payloads, no sequence number or
    address, and keeps its latest sums. `inside`: the switch itself adds (AllReduce-Switch, with the same
    transport), two links less. Differs: no going back to what was lost."""
    require_ints(memory=memory)
    return _reduced(values, 64, memory, beside=not inside, loss=loss, seed=seed)


def quantized(x, scale: float) -> np.ndarray:
    """Integers for a switch. The sum of n, divided by `scale`, errs by n / scale at most, and does not wrap
    while scale < (2^31 - n) / (n max|x|) (SwitchML's theorems)."""
    require_positive(scale=scale)
    scaled = np.rint(np.asarray(x) * scale)
    if not (np.abs(scaled) < 2**62).all():
        raise ValueError(f"{scale=}: x * scale has no 62 bits; use finite x, and a scale that fits")
    return scaled.astype(np.int64)


class _Member(Flow):
    """PANAMA's worker: a sum that arrives is an ack of all packets in it."""

    def receive(self, packet: Packet) -> None:
        for other in packet.data:
            other.marked = packet.marked
            Flow.receive(other.flow, other)


def panama(workers: Sequence[int] = (4, 8), *, plain=0, trees=1, until_us=1500) -> tuple[list[float], float]:
    """Gebara, Ghobadi, Costa 2021, In-network aggregation for shared machine learning clusters, MLSys: jobs
    of so many workers, and `plain` flows, into the links of `trees` roots. All workers of a job hear a sum's
    mark, so to others a job is one flow. -> goodputs after a third of the time, jobs first, as shares of a
    link; the time of a flow of 20 KB in the midst of it (us). Differs: Reno, marks above 30 KB."""
    require_ints(1, 10**4, workers=workers, trees=trees, until_us=until_us)
    require_ints(0, 10**4, plain=plain)
    net = Network()
    roots = [Port(net, mark=(30_000, 30_001, 1)) for _ in range(trees)]

    def begin(kind: type[Flow], *tree: Adder, size=10**9, start_us=0) -> Flow:
        path = lambda seq, nic=Port(net): (nic, *tree, roots[seq % trees])
        return kind(net, path, size, Reno(), start_us=start_us)

    adders = [Adder(n, merges=True) for n in workers]
    flows = [[begin(_Member, adder) for _ in range(adder.n)][0] for adder in adders]
    flows += [begin(Flow) for _ in range(plain)]
    short = begin(Flow, size=20_000, start_us=until_us / 2)
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
    require_ints(1, slots=slots)
    require_ints(seed=seed)
    values, chance = _whole(values, 3), Random(seed)
    jobs, _, m = values.shape
    slot = {(job, seq): chance.randrange(slots) for job in range(jobs) for seq in range(m)}
    arrivals, users, sums = list(np.ndindex(values.shape)), {}, np.zeros((2, jobs, m), np.int64)
    chance.shuffle(arrivals)
    for job, worker, seq in arrivals:
        fits = users.setdefault(slot[job, seq], (job, seq)) == (job, seq)
        sums[int(fits), job, seq] += values[job, worker, seq]
    return sums.sum(0), len(users) / len(slot)  # the server's and the switch's


def fpisa(patterns: Sequence[int], exponent_bits: int = 8, mantissa_bits: int = 23, *, guard: int = 0) -> int:
    """Yuan et al. 2022, Unlocking the power of inline floating-point operations on programmable switches,
    NSDI: the bits of a sum of IEEE numbers. A register of 32 bits has an exponent and a signed mantissa; the
    smaller number is shifted right and cut, and only what is read is normalised. Each sum errs by less than a
    unit in the last place of the largest number so far; with `guard` bits below it, by 2^-guard of that."""
    require_ints(1, 30, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)
    require_ints(0, 29 - min(mantissa_bits, 29), guard=guard)
    top, unit, sign_at = (1 << exponent_bits) - 1, 1 << mantissa_bits, exponent_bits + mantissa_bits
    require_ints(0, (2 << sign_at) - 1, patterns=patterns)
    most = 1 << 30 - mantissa_bits - guard
    finite = all(bits >> mantissa_bits & top < top for bits in patterns)
    if len(patterns) > most or not finite:
        raise ValueError(f"{len(patterns)} numbers, {finite=}: 32 bits hold the sum of {most} finite ones")
    exponent = total = 0
    for bits in patterns:
        power, fraction = bits >> mantissa_bits & top, bits & unit - 1
        number = (fraction + unit if power else fraction) << guard
        number, high = -number if bits >> sign_at else number, max(power, exponent, 1)
        total, exponent = (total >> high - exponent) + (number >> high - max(power, 1)), high
    sign, total = (1 << sign_at if total < 0 else 0), abs(total)
    right = max(total.bit_length() - mantissa_bits - 1, guard + 1 - exponent)  # to a leading one, if it can
    total, exponent = total >> right if right > 0 else total << -right, exponent + right - guard
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
