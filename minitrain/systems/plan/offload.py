"""How much goes to the host or the disks: planned before the run, from a profile. No torch.

    Elixir    chunk size, chunks cached on the device, chunks whose shard and states are on the host:
              the fastest step that fits a cap on memory
    Fuyou     one device with disks: the share of activations that is swapped, the others are recomputed
              phase = max(GPU, bus up, bus down, SSD, CPU), for updates run on the CPU during the backward

Bytes: a chunk of c parameters is 2c on a rank that has gathered it; its shard is 2c/N and its states 12c/N
(gradients take the place of the parameters). Rates are bytes, or parameters, per second.
Huang et al. 2022 (Elixir), arXiv:2212.05339; Liao et al. 2024 (Fuyou), arXiv:2403.06504. Differs: Elixir's
copies do not hide behind computation here, and its profile is given, not taken by hooks; Fuyou's layers are
equal, and a phase is as long as what is busiest in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from minitrain.plan.simulate.links import Number, divided
from minitrain.ranks.checks import require_fractions

# ---- Elixir ------------------------------------------------------------------------------------------------


class Profile(NamedTuple):
    """What is known before the run, of one rank."""

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


def packed(modules: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """The chunk of every tensor: in order, whole, and a new chunk for what no longer fits."""
    used, number, places = 0, 0, []
    for module in modules:
        places.append([])
        for size in module:
            if size > chunk:
                raise ValueError(f"a tensor of {size} in chunks of {chunk} parameters; use chunks as large")
            if used + size > chunk:
                used, number = 0, number + 1
            used += size
            places[-1].append(number)
    return places


def elixir_cost(profile: Profile, rates: Rates, chunk: int, cached: int, offloaded: int) -> ElixirPlan:
    """A chunk is gathered for the forward and again for the backward, then its gradient is scattered.

    What is cached beyond what one module needs saves the last chunks their second gather. An offloaded shard
    crosses PCIe for each gather, its gradient once; the host updates it."""
    places = packed(profile.modules, chunk)
    count, least = places[-1][-1] + 1, max(len(set(module)) for module in places)
    if not (least <= cached <= count and 0 <= offloaded <= count):
        rule = f"{least} to {count} cached, 0 to {count} offloaded"
        raise ValueError(f"{cached} chunks cached, {offloaded} offloaded, of {count}; use {rule}")
    kept, shard = cached - least, divided(chunk, rates.ranks)
    both = max(0, kept + offloaded - count)  # the last chunks are kept, the first are offloaded
    moved = (3 * count - kept) * 2 * (chunk - shard)
    crossing = (3 * offloaded - both) * 2 * shard
    updates = divided((count - offloaded) * shard, rates.device_update)
    updates += divided(offloaded * shard, rates.host_update)
    seconds = profile.compute_s + divided(moved, rates.network) + divided(crossing, rates.host) + updates
    held = profile.activation_bytes + cached * 2 * chunk + (count - offloaded) * 14 * shard
    return ElixirPlan(seconds, held, chunk, cached, offloaded)


def elixir(profile: Profile, rates: Rates, cap: Number, chunks: Iterable[int]) -> ElixirPlan:
    """The fastest plan within `cap` bytes. Each chunk offloaded costs time, so as few as fit: none is tried
    but the smallest number, for every size and number of cached chunks."""
    if rates.host_update > rates.device_update:
        given = f"host_update={rates.host_update}, device_update={rates.device_update}"
        raise ValueError(f"Elixir: {given}; the host updates no faster than the device")
    found = []
    for chunk in chunks:
        places = packed(profile.modules, chunk)
        count, least = places[-1][-1] + 1, max(len(set(module)) for module in places)
        share = 14 * divided(chunk, rates.ranks)
        for cached in range(least, count + 1):
            over = profile.activation_bytes + cached * 2 * chunk + count * share - cap
            offloaded = max(0, -int(-over // share))
            if offloaded <= count:
                found.append(elixir_cost(profile, rates, chunk, cached, offloaded))
    if not found:
        raise ValueError(f"Elixir: nothing fits {cap} bytes; use a larger cap, or smaller chunks")
    return min(found)


# ---- Fuyou -------------------------------------------------------------------------------------------------


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


Phases = dict[str, dict[str, Number]]


def fuyou_phases(work: Work, server: Server, share: Number) -> Phases:
    """{phase: {what: seconds that it is busy}} if this share of the activations is swapped."""
    require_fractions(share=share)
    weights, states, swapped = 2 * work.parameters, 12 * work.parameters, share * work.activation_bytes
    deep = max(0, swapped - server.host_bytes)
    forward = {
        "GPU": work.forward_s,
        "bus down": divided(weights, server.bus),
        "bus up": divided(swapped, server.bus),
        "SSD": divided(weights, server.read) + divided(deep, server.write),
    }
    backward = {
        "GPU": work.backward_s + (1 - share) * work.recompute_s,
        "bus down": divided(weights + swapped, server.bus),
        "bus up": divided(weights, server.bus),
        "SSD": divided(weights + states + deep, server.read) + divided(weights + states, server.write),
        "CPU": divided(work.parameters, server.update),
    }
    return {"forward": forward, "backward": backward}


def fuyou_s(work: Work, server: Server, share: Number, *, overlapped: bool = True) -> Number:
    """Seconds of an iteration. Not overlapped: the update begins when the backward has ended."""
    phases = fuyou_phases(work, server, share)
    if overlapped:
        return sum(max(busy.values()) for busy in phases.values())
    states, back = 12 * work.parameters, phases["backward"]
    disk = divided(states, server.read) + divided(states + 2 * work.parameters, server.write)
    back["SSD"] -= disk
    update = max(disk, back.pop("CPU"))
    return max(phases["forward"].values()) + max(back.values()) + update


def fuyou_share(work: Work, server: Server) -> Number:
    """The share with the fastest iteration, the smallest of several; exact.

    Seconds of everything are straight lines in the share, with one bend where the host's memory is full. The
    sum of two largest of them is lowest at an end, at the bend, or where two lines of a phase cross."""
    if not work.activation_bytes:
        return 0
    bend = min(1, divided(server.host_bytes, work.activation_bytes))
    shares = {0, bend, 1}
    for low, high in pairwise(sorted(shares)):
        ends = fuyou_phases(work, server, low), fuyou_phases(work, server, high)
        for phase in ends[0]:
            shares |= {*_crossings(low, high, ends[0][phase], ends[1][phase])}
    return min(sorted(shares), key=lambda share: fuyou_s(work, server, share))


def _crossings(low: Number, high: Number, first: Mapping, last: Mapping) -> Iterator[Number]:
    for a, b in combinations(first, 2):
        before, after = first[a] - first[b], last[a] - last[b]
        if before * after < 0:
            yield low + (high - low) * divided(before, before - after)
