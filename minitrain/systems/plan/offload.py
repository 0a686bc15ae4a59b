"""How much goes to the host or the disks, and when it must be back: planned before the run. No torch.

Elixir         chunk size, chunks cached, chunks on the host: the fastest step within a cap. A chunk of c
               parameters is 2c bytes where it is gathered; its shard is 2c/N and its states 12c/N
Fuyou          one device with disks: the share of activations that is swapped, the others are recomputed
               phase = max(GPU, bus to host, bus to device, SSD, CPU), updates on the CPU during the backward
ZeRO-Infinity  states 20·P bytes, P = 12·L·D²; kept activations 2·b·s·D·L / c; working memory 4·D·4D
               efficiency = ait·bandwidth / (ait·bandwidth + peak); ait: `flops_per_byte`
STRONGHOLD     the smallest window of layers on the device that hides the transfers of the others
Mobius         more stages than devices, weights from the host: stage s on device order[s mod N] computes
               while those of s + N are on their way; neighbours load through different root complexes

Huang et al. 2022 (Elixir), arXiv:2212.05339; Liao et al. 2024 (Fuyou), arXiv:2403.06504; Rajbhandari et al.
2021, arXiv:2104.07857, sections 3 to 5.1; Sun et al. 2022 (STRONGHOLD), SC22, section III-D; Feng et al. 2023
(Mobius), ASPLOS. Differs: Elixir's profile is given, and copies hide; Fuyou's layers are equal; STRONGHOLD's
link is a resource, one window for all phases; Mobius's cut is given, activations do not move.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from minitrain.plan.accounting import model_state_bytes
from minitrain.ranks import checks
from minitrain.systems.simulate.links import Number, Task, divided


class Profile(NamedTuple):  # known before the run, of one rank
    modules: Sequence[Sequence[int]]  # parameters of each tensor, of modules in the order they run
    activation_bytes: int  # and all else that is no model data, at the peak
    compute_s: Number


class Rates(NamedTuple):
    ranks: int
    network: Number  # bytes/s that a rank gathers
    host: Number  # bytes/s over its PCIe link
    device_update: Number  # parameters/s
    host_update: Number


class ElixirPlan(NamedTuple):
    seconds: Number
    bytes: Number  # of a rank, at the peak
    chunk: int  # parameters
    cached: int  # gathered chunks that are kept at a time
    offloaded: int  # chunks whose shard and states are on the host


def packed(modules: Sequence[Sequence[int]], chunk: int) -> tuple[int, int]:
    """(chunks, the most that a module needs): whole tensors in order; what does not fit begins another."""
    used, number, places = 0, 0, [set() for _ in modules]
    for module, own in zip(modules, places):
        for size in module:
            if used + size > chunk:
                used, number = 0, number + 1
            used += size
            own.add(number)
    return number + 1, max(map(len, places))


def elixir_cost(profile: Profile, rates: Rates, chunk: int, cached: int, offloaded: int) -> ElixirPlan:
    """A chunk is gathered forward and again backward, then its gradient is scattered. What is cached beyond
    what one module needs saves the last chunks their second gather. An offloaded shard crosses PCIe for each
    gather, its gradient once; the host updates it."""
    count, least = packed(profile.modules, chunk)
    kept, shard = cached - least, divided(chunk, rates.ranks)
    both = max(0, kept + offloaded - count)  # the last chunks are kept, the first are offloaded
    moved, crossing = (3 * count - kept) * 2 * (chunk - shard), (3 * offloaded - both) * 2 * shard
    seconds = max(profile.compute_s, divided(moved, rates.network), divided(crossing, rates.host))
    seconds += divided((count - offloaded) * shard, rates.device_update)
    seconds += divided(offloaded * shard, rates.host_update)
    held = profile.activation_bytes + cached * 2 * chunk + (count - offloaded) * 14 * shard
    return ElixirPlan(seconds, held, chunk, cached, offloaded)


def elixir(profile: Profile, rates: Rates, cap: Number, chunks: Iterable[int]) -> ElixirPlan:
    """The fastest plan within `cap` bytes. Each chunk offloaded costs time, so only the fewest that fit are
    tried, for every size and number of cached chunks."""
    checks.require_nonnegative(device_update_faster_by=rates.device_update - rates.host_update)
    found = []
    for chunk in chunks:
        count, least = packed(profile.modules, chunk)
        share = 14 * divided(chunk, rates.ranks)
        for cached in range(least, count + 1):
            over = profile.activation_bytes + cached * 2 * chunk + count * share - cap
            offloaded = max(0, -int(-over // share))
            if offloaded <= count:
                found.append(elixir_cost(profile, rates, chunk, cached, offloaded))
    if not found:
        raise ValueError(f"Elixir: nothing fits {cap} bytes; use a larger cap, or smaller chunks")
    return min(found)


class Work(NamedTuple):
    parameters: int
    activation_bytes: int  # of all layers, but for what recomputation starts from
    forward_s: Number
    backward_s: Number
    recompute_s: Number  # of all activations


class Server(NamedTuple):
    bus: Number  # bytes/s each way, between host and device
    read: Number  # bytes/s of the disks, which do one at a time
    write: Number
    update: Number  # parameters/s of the CPU
    host_bytes: Number = 0  # activations that may stay in the host's memory


def fuyou_phases(work: Work, server: Server, share: Number) -> dict[str, dict[str, Number]]:
    """{phase: {what: seconds that it is busy}} if this share of the activations is swapped."""
    checks.require_fractions(share=share)
    weights, states, swapped = 2 * work.parameters, 12 * work.parameters, share * work.activation_bytes
    deep = max(0, swapped - server.host_bytes)
    forward = {
        "GPU": work.forward_s,
        "bus to device": divided(weights, server.bus),
        "bus to host": divided(swapped, server.bus),
        "SSD": divided(weights, server.read) + divided(deep, server.write),
    }
    backward = {
        "GPU": work.backward_s + (1 - share) * work.recompute_s,
        "bus to device": divided(weights + swapped, server.bus),
        "bus to host": divided(weights, server.bus),
        "SSD": divided(weights + states + deep, server.read) + divided(weights + states, server.write),
        "CPU": divided(work.parameters, server.update),
    }
    return {"forward": forward, "backward": backward}


def fuyou_s(work: Work, server: Server, share: Number, *, overlapped: bool = True) -> Number:
    """Seconds of an iteration. Not overlapped: the update begins when the backward has ended."""
    phases, update = fuyou_phases(work, server, share), 0
    if not overlapped:
        states, back = 12 * work.parameters, phases["backward"]
        disk = divided(states, server.read) + divided(states + 2 * work.parameters, server.write)
        back["SSD"] -= disk
        update = max(disk, back.pop("CPU"))
    return update + sum(max(busy.values()) for busy in phases.values())


def fuyou_share(work: Work, server: Server) -> Number:
    """The share with the fastest iteration, the smallest of several; exact: all are straight lines in the
    share, with one bend where the host's memory is full. The sum of two largest of them is lowest at an end,
    at the bend, or where two lines of a phase cross."""
    if not work.activation_bytes:
        return 0
    shares = {0, min(1, divided(server.host_bytes, work.activation_bytes)), 1}
    for low, high in pairwise(sorted(shares)):
        ends = fuyou_phases(work, server, low), fuyou_phases(work, server, high)
        for first, last in zip(*(phases.values() for phases in ends)):
            for a, b in combinations(first, 2):
                before, after = first[a] - first[b], last[a] - last[b]
                if before * after < 0:
                    shares.add(low + (high - low) * divided(before, before - after))
    return min(sorted(shares), key=lambda share: fuyou_s(work, server, share))


TIB = 2**40


class TransformerShape(NamedTuple):
    """A Transformer as ZeRO-Infinity counts it: blocks of width D with MLPs of 4·D, embeddings left out."""

    num_layers: int  # L
    width: int  # D
    heads: int  # H

    parameters = property(lambda self: 12 * self.num_layers * self.width**2)

    def model_state_bytes(self) -> int:
        return model_state_bytes(self.parameters, gradient=6)  # the gradient in fp16 and in fp32

    def checkpoint_bytes(self, batch: int = 32, length: int = 1024, every: int = 1) -> int:
        """Of all kept activations; `every` must divide the number of layers."""
        return 2 * batch * length * self.width * (self.num_layers // every)

    def working_bytes(self) -> int:
        """Of the largest linear's weight and gradient, gathered for use."""
        return 4 * self.width * 4 * self.width

    def activation_bytes(self, batch: int = 32, length: int = 1024, every: int = 1) -> int:
        """Between two kept activations, while they are recomputed."""
        return batch * length * every * (16 * self.width + 2 * self.heads * length)


# Figure 2a, the row of every model: 0.1, 0.5, 1, 10 and 100 trillion parameters.
FIGURE_2A = {
    "0.1T": TransformerShape(80, 10 << 10, 128),
    "0.5T": TransformerShape(100, 20 << 10, 160),
    "1T": TransformerShape(128, 25 << 10, 256),
    "10T": TransformerShape(195, 64 << 10, 512),
    "100T": TransformerShape(315, 160 << 10, 1024),
}


def flops_per_byte(kind: str, batch: int, length: int, width: int = 0, every: int = 1) -> float:
    """What is computed for each byte that is moved on a GPU: 8·b·s·P FLOPs (forward, again, backward) over
    8·P bytes (weights three times, gradients once), 32·P (states, masters and gradients in fp32, read and
    written) or 4·b·s·D·L/c (there and back)."""
    checks.require_positive_ints(batch=batch, length=length)
    checks.require_one_of(("parameters", "optimizer", "activations"), kind=kind)
    if kind == "activations":
        return 24 * width * every
    return length * batch / (4 if kind == "optimizer" else 1)


def efficiency(flops_per_byte: float, bandwidth_bytes_per_s: float, peak_flops: float) -> float:
    """Share of the peak that is left if nothing overlaps."""
    rate = flops_per_byte * bandwidth_bytes_per_s
    return rate / (rate + peak_flops)


def bandwidth_for(efficiency: float, flops_per_byte: float, peak_flops: float) -> float:
    """Bytes per second that an efficiency asks for."""
    # without overlap it is between 0 and 1
    checks.require_positive(efficiency=efficiency, rest=1 - efficiency)
    checks.require_positive(flops_per_byte=flops_per_byte, peak_flops=peak_flops)
    return efficiency / (1 - efficiency) * peak_flops / flops_per_byte


def fetch_s(bytes: int, links: Mapping[str, float], ranks: int, *, partitioned: bool) -> float:
    """Seconds until every rank has a tensor that is off the devices: one owner reads all and sends it on, or
    all read 1/n at once and gather in a ring. `links`: bytes per second of "slow" (PCIe, disk), "network"."""
    checks.require_ints(bytes=bytes)
    checks.require_positive_ints(ranks=ranks)
    read = bytes / ranks if partitioned else bytes
    sent = bytes * (ranks - 1) / ranks if partitioned else bytes * (ranks > 1)
    return read / links["slow"] + sent / links["network"]


def stalls(compute: Sequence[Number], transfer: Sequence[Number], window: int) -> list[Number]:
    """How long each layer waits. The first `window` are here at the start; the transfer of a later one begins
    with the layer whose place it gets, when the link is free."""
    checks.require_nonnegative(compute=compute, transfer=transfer)
    checks.require_ints(len(compute), len(compute), transfers=len(transfer))
    checks.require_positive_ints(len(compute), window=window)
    starts, waits = [], []
    now = free = 0  # free: when the link is
    for i, duration in enumerate(compute):
        if i >= window and transfer[i]:
            free = max(starts[i - window], free) + transfer[i]
        waits.append(max(0, free - now))
        starts.append(now + waits[i])
        now = starts[i] + duration
    return waits


def smallest_window(compute: Sequence[Number], transfer: Sequence[Number]) -> int:
    """The smallest window without a stall; all layers always do."""
    checks.require_nonempty(compute=compute, transfer=transfer)
    return next(m for m in range(1, len(compute) + 1) if not any(stalls(compute, transfer, m)))


class StageLayer(NamedTuple):
    forward_s: Number  # of a microbatch
    backward_s: Number
    bytes: Number  # weights, and as many of gradients


def crossed(roots: Sequence[int]) -> list[int]:
    """Devices in an order in which neighbours are behind different root complexes, while there are such."""
    order: list[int] = []
    while left := [device for device in range(len(roots)) if device not in order]:
        other = [device for device in left if not order or roots[device] != roots[order[-1]]]
        waiting = Counter(roots[device] for device in left)
        order.append(max(other or left, key=lambda device: waiting[roots[device]]))
    return order


def mobius_tasks(stages: Sequence[StageLayer], m: int, order, roots, *, prefetch: bool = True) -> list[Task]:
    """A step, on the links "to device r" and "to host r" of each root complex r. Without prefetch a stage
    is loaded into the room of the one before it on its device, when that has ended."""
    checks.require_ints(0, len(roots) - 1, order=order)
    checks.require_positive_ints(m=m)
    made, n, numbers = [], len(order), range(len(stages))

    def add(kind: str, s: int, seconds: Number, before: int, room: int, load: bool) -> None:
        """All microbatches of a stage behind the stage `before`, its load behind the stage whose `room` it
        gets, if there are such."""
        d, needs = order[s % n], [f"{kind}{before}.0"] * (before in numbers)
        if load:
            freed = f"begin {kind}{room}" if prefetch else f"{kind}{room}.{m - 1}"
            link, wait = (f"to device {roots[d]}",), (freed,) * (room in numbers)
            made.append(Task(f"load {kind}{s}", f"loads {d}", stages[s].bytes, link, wait))
            needs.append(f"load {kind}{s}")
        made.append(Task(f"begin {kind}{s}", f"device {d}", 0, after=tuple(needs)))
        for j in range(m):
            after = (f"{kind}{before}.{j}",) * (before in numbers)
            made.append(Task(f"{kind}{s}.{j}", f"device {d}", seconds, after=after))

    for s in numbers:
        add("F", s, stages[s].forward_s, s - 1, s - n, True)
    for s in reversed(numbers):  # the last stages are still here
        add("B", s, stages[s].backward_s, s + 1, s + n, s + n in numbers)
        d, after = order[s % n], (f"B{s}.{m - 1}",)
        made.append(Task(f"store {s}", f"stores {d}", stages[s].bytes, (f"to host {roots[d]}",), after))
    return made
