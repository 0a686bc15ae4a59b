"""MPress: for every tensor the cheapest way to be elsewhere while nobody needs it. No torch.

    1F1B, p=4        rank 0 keeps 4 microbatches, rank 3 keeps 1: the same cap is too small for one and half empty for the other

    keep         0                                        held here
    recompute    its forward once more                    held nowhere
    peer         what 2·bytes / fast link exceeds idle    held by ranks with room, over NVLink, there and back
    host         what 2·bytes / slow link exceeds idle    held in the CPU's memory

`idle` is the tensor's lifetime in between: from the end of its forward to the start of its backward. The first microbatches of the first
ranks idle longest, and these ranks lack memory most, so a swap of theirs hides behind other microbatches' work; a short idle time
makes recomputation cheaper. `tensors_at_peak` reads the lifetimes off a simulated schedule.

A swapped tensor is cut in stripes over all ranks with room (the part that fits at home just stays), so a plan fits if no rank holds more
than the cap and all together, what they lend included, no more than all caps. `plan` makes the largest extra time of a rank smallest: per
rank all unbeaten (held + lent bytes, extra time), then over the ranks the sum of bytes and the largest time. Exact, as trying everything.
With fewer ways to choose from it is never better: `ways=("keep", "recompute")` is recomputation alone.
Raises ValueError where nothing fits, and for an unknown way.
Zhou et al. 2023 (MPress), HPCA 2023. Differs: a search that is exact, over a cost model in which each swap has its link to itself and only
its own lifetime to hide in; theirs profiles a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minitrain.pipeline.partition import Number, divided, undominated
from minitrain.pipeline.schedule import Schedule, in_flight, parts
from minitrain.pipeline.simulate import Costs, simulate

WAYS = ("keep", "recompute", "peer", "host")


class Tensor(NamedTuple):
    """`recompute` None: it cannot be (optimizer state); `idle`: the time in which nobody needs it."""

    rank: int
    bytes: Number
    idle: Number
    recompute: Number | None


class Links(NamedTuple):
    """Bytes per time to another rank and to the host."""

    peer: Number
    host: Number


class Plan(NamedTuple):
    """`ways[i]` is what happens to tensor i; `time` the largest extra time of a rank."""

    time: Number
    ways: tuple[str, ...]


def extra_time(tensor: Tensor, way: str, links: Links) -> Number | None:
    """What it costs its rank; None if it cannot be done."""
    match way:
        case "keep":
            return 0
        case "recompute":
            return tensor.recompute
        case "peer" | "host":
            return max(0, divided(2 * tensor.bytes, getattr(links, way)) - tensor.idle)
    raise ValueError(f"MPress: {way!r} is no way to make room; use {', '.join(WAYS)}")


def plan(
    tensors: Sequence[Tensor], fixed: Sequence[Number], cap: Number, links: Links, ways: Iterable[str] = WAYS
) -> Plan:
    """The way of each tensor. `fixed[r]`: bytes that rank r holds anyway; `cap`: what each may hold."""
    ways, everything = tuple(ways), [((0, 0), ())]
    for rank, size in enumerate(fixed):
        own = [((size, 0, 0), ())]  # (held, lent, extra time)
        for i, tensor in enumerate(tensors):
            if tensor.rank == rank:
                costs = {
                    way: (tensor.bytes * (way == "keep"), tensor.bytes * (way == "peer"), extra)
                    for way in ways
                    if (extra := extra_time(tensor, way, links)) is not None
                }
                own = undominated(
                    (tuple(a + b for a, b in zip(so_far, cost)), (*chosen, (i, way)))
                    for so_far, chosen in own
                    for way, cost in costs.items()
                )
        fitting = undominated(
            ((held + lent, time), chosen) for (held, lent, time), chosen in own if held <= cap
        )
        everything = undominated(
            ((total + size, max(slowest, time)), chosen + more)
            for (total, slowest), chosen in everything
            for (size, time), more in fitting
        )
    everything = [(costs, chosen) for costs, chosen in everything if costs[0] <= cap * len(fixed)]
    if not everything:
        raise ValueError(
            f"MPress: {len(tensors)} tensors do not fit {cap} bytes a rank by {', '.join(ways)}; use a larger cap or "
            "more ways"
        )
    (_, time), chosen = min(everything, key=lambda found: found[0][1])
    return Plan(time, tuple(way for _, way in sorted(chosen)))


def fits(tensors: Sequence[Tensor], ways: Sequence[str], fixed: Sequence[Number], cap: Number) -> bool:
    """Does each rank hold at most the cap, and is there room for all that is lent?"""
    held = [
        size
        + sum(tensor.bytes for tensor, way in zip(tensors, ways) if tensor.rank == rank and way == "keep")
        for rank, size in enumerate(fixed)
    ]
    lent = sum(tensor.bytes for tensor, way in zip(tensors, ways) if way == "peer")
    return max(held) <= cap and sum(held) + lent <= cap * len(fixed)


def extra_times(tensors: Sequence[Tensor], ways: Sequence[str], ranks: int, links: Links) -> list[Number]:
    """Of each rank."""
    return [
        sum(extra_time(tensor, way, links) for tensor, way in zip(tensors, ways) if tensor.rank == rank)
        for rank in range(ranks)
    ]


def tensors_at_peak(
    schedule: Schedule, costs: Costs, layers: Sequence[Number], recompute: Sequence[Number]
) -> list[Tensor]:
    """What each rank keeps when it keeps most: for every microbatch in flight a tensor for each layer of `layers` (bytes)."""
    simulation, tensors = simulate(schedule, costs), []
    for rank, entries in enumerate(schedule.ranks):
        counts = in_flight(schedule, rank)
        alive = {}
        for action in parts(entries[: counts.index(max(counts)) + 1]):
            if action.kind == "F":
                alive[action] = (
                    simulation.start(schedule.backward(*action[1:]))
                    - simulation.start(action)
                    - costs.of(action)
                )
            elif action.kind in "BW":
                del alive[action._replace(kind="F")]
        tensors += [
            Tensor(rank, size, idle, time) for idle in alive.values() for size, time in zip(layers, recompute)
        ]
    return tensors
