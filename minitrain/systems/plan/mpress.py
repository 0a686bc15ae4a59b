"""MPress: for every tensor the cheapest way to be elsewhere while nobody needs it. No torch.

    keep         0                                        held here
    recompute    its forward once more                    held nowhere
    peer         what 2·bytes / fast link exceeds idle    in stripes on ranks with room, there and back
    host         what 2·bytes / slow link exceeds idle    in the CPU's memory

`idle` is the time from a tensor's forward to its backward. In 1F1B the first ranks hold most microbatches,
and these idle longest, while the last ranks have room. A plan fits if no rank holds more than the cap and all
together, what they lend included, no more than all caps.
Zhou et al. 2023 (MPress), HPCA 2023. Differs: an exact search over a model in which each swap has its link to
itself and only its own idle time to hide in; theirs profiles a run.
"""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from minitrain.pipeline.partition import Number, divided, undominated
from minitrain.pipeline.schedule import Schedule, in_flight, parts
from minitrain.pipeline.simulate import Costs, simulate

WAYS = ("keep", "recompute", "peer", "host")


class Tensor(NamedTuple):
    rank: int
    bytes: Number
    idle: Number  # the time in which nobody needs it
    recompute: Number | None  # None: it cannot be (optimizer state)


class Links(NamedTuple):
    peer: Number  # bytes per time to another rank
    host: Number  # and to the host


class MPressPlan(NamedTuple):
    time: Number  # the largest extra time of a rank
    ways: tuple[str, ...]  # of each tensor


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


def plan_mpress(tensors: Sequence[Tensor], fixed: Sequence, cap, links: Links, ways=WAYS) -> MPressPlan:
    """The way of each tensor, with the smallest largest extra time of a rank: exact, as trying everything.

    `fixed[r]`: bytes that rank r holds anyway; `cap`: what each may hold. Kept is what no other beats: per
    rank in (held + lent bytes, extra time), over ranks in (sum of bytes, largest time)."""
    ways, everything = tuple(ways), [((0, 0), ())]
    for rank, size in enumerate(fixed):
        own = [((size, 0, 0), ())]  # (held, lent, extra time), [(tensor, way)]
        for i, tensor in enumerate(tensors):
            if tensor.rank == rank:
                costs = {
                    way: (tensor.bytes * (way == "keep"), tensor.bytes * (way == "peer"), extra)
                    for way in ways
                    if (extra := extra_time(tensor, way, links)) is not None
                }
                own = undominated(
                    (tuple(map(add, before, more)), (*chosen, (i, way)))
                    for before, chosen in own
                    for way, more in costs.items()
                )
        fitting = undominated(((held + lent, time), way) for (held, lent, time), way in own if held <= cap)
        everything = undominated(
            ((total + size, max(slowest, time)), chosen + more)
            for (total, slowest), chosen in everything
            for (size, time), more in fitting
        )
    everything = [(time, chosen) for (total, time), chosen in everything if total <= cap * len(fixed)]
    if not everything:
        raise ValueError(f"MPress: {cap} bytes per rank are too few; use a larger cap or more than {ways}")
    time, chosen = min(everything, key=lambda found: found[0])
    return MPressPlan(time, tuple(way for _, way in sorted(chosen)))


def tensors_at_peak(schedule: Schedule, costs: Costs, layers: Sequence, recompute: Sequence) -> list[Tensor]:
    """What each rank keeps when it first keeps most: per microbatch in flight a tensor of each layer."""
    simulation, tensors = simulate(schedule, costs), []
    for rank, entries in enumerate(schedule.ranks):
        counts, idle = in_flight(schedule, rank), {}
        for action in parts(entries[: counts.index(max(counts)) + 1]):
            if action.kind == "F":
                back = simulation.start(schedule.backward(action.stage, action.microbatch))
                idle[action] = back - simulation.start(action) - costs.of(action)
            elif action.kind in "BW":
                del idle[action._replace(kind="F")]
        for time in idle.values():
            tensors += [Tensor(rank, size, time, again) for size, again in zip(layers, recompute)]
    return tensors
