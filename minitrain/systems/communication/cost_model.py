"""Seconds of a schedule on a described network: the alpha-beta model with shared links. No torch, no clock.

    time of a step = max over its messages of alpha  +  max over links of (bytes crossing it) / bandwidth

A message crosses the sender's port, the receiver's port, and when their racks differ the uplink of the one
and the downlink of the other. All ranks advance step by step. On equal links this gives the textbook figures;
on shared links what these hide: a ring whose order jumps from rack to rack, a halving that sends S/2 through
an uplink. Not modelled: what a message costs apart from its latency (direct exchange looks better than it
is), the time of additions, ranks out of step. Hockney 1994 (alpha-beta). `simulate` has closed forms on
machines with datasheets; here any schedule runs on any fabric you can write down.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from minitrain.ranks.checks import require_nonnegative
from minitrain.systems.communication.chunk_schedule import Schedule


class Path(NamedTuple):
    """One message's latency, and the links it crosses with their bytes per second."""

    alpha_s: float
    links: dict[Hashable, float]


Fabric = Callable[[int, int], Path]  # (source, destination) -> path


def flat(alpha_s: float, bytes_per_s: float) -> Fabric:
    """Every rank has one port out and one port in, to a network that is never full."""
    return lambda source, to: Path(alpha_s, {("out", source): bytes_per_s, ("in", to): bytes_per_s})


def racks(rack_of: Sequence[int], near: tuple, far: tuple, oversubscription: float = 1.0) -> Fabric:
    """[rank] -> rack or node, and (alpha_s, bytes_per_s) of a rank's ports inside (near) and outside (far).

    The uplink of a rack carries what the far ports of its ranks carry, divided by `oversubscription`: for
    nodes of g ranks 1 with a network card each, g with one card for all, as fast as a far port."""
    ranks_in_rack = Counter(rack_of)

    def path(source: int, to: int) -> Path:
        here, there = rack_of[source], rack_of[to]
        if here == there:
            return flat(*near)(source, to)
        alpha_s, port = far
        up, down = (ranks_in_rack[rack] * port / oversubscription for rack in (here, there))
        links = {("far out", source): port, ("far in", to): port, ("up", here): up, ("down", there): down}
        return Path(alpha_s, links)

    return path


def time_s(schedule: Schedule, size_bytes: float, fabric: Fabric) -> float:
    """Of all steps, one after the other."""
    require_nonnegative(size_bytes=size_bytes)
    total_s = 0.0
    for step in schedule.steps:
        alpha_s, busy_s = 0.0, defaultdict(float)
        for source, to, chunks, _ in step:
            path = fabric(source, to)
            alpha_s = max(alpha_s, path.alpha_s)
            for link, bytes_per_s in path.links.items():
                busy_s[link] += size_bytes * len(chunks) / schedule.chunks / bytes_per_s
        total_s += alpha_s + max(busy_s.values(), default=0.0)
    return total_s
