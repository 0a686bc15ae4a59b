"""Seconds of a collective by alpha-beta, on any network, and which algorithm for how many bytes.

    time of a step = max over its messages of alpha  +  max over links of (bytes crossing it) / bandwidth

A message crosses the sender's port, the receiver's port, and when their racks differ the uplink of the one
and the downlink of the other. Not modelled: what a message costs apart from its latency (direct exchange
looks better than it is), the time of additions, ranks out of step. Hockney 1994 (alpha-beta); NCCL's
src/graph/tuning.cc; Thakur, Rabenseifner and Gropp 2005, section 4. Differs: NCCL's trees attain 0.92 of the
bandwidth, here all of it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import ceil, floor, sqrt
from typing import NamedTuple

from minitrain.ranks.checks import require_nonnegative, require_one_of, require_positive_ints
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
    A rack's uplink carries what the far ports of its ranks carry, divided by `oversubscription`: for nodes of
    g ranks 1 with a network card each, g with one card for all, as fast as a far port."""
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


# ---- the same in closed form -------------------------------------------------------------------------------
#
# n ranks on equal links, h = ceil(log2 n); a message costs alpha seconds, a port carries B bytes per second:
#     ring                   2(n-1) (alpha + S/(n B))        least bytes, most steps
#     double tree, k pieces  2(h-1+k) (alpha + S/(k B))      few steps; pieces fill the tree like a pipe
#     halving and doubling   2h alpha + 2(n-1)/n S/B         n a power of two, all links equal
#     recursive doubling     h (alpha + S/B)                 n a power of two
# The best k is an integer beside sqrt((h-1) S / (alpha B)). For a given k both times are straight lines in S,
# and the tree with its best k is faster than the ring exactly below the largest of their meeting points:
#     S* = alpha B · max over k of  k (n-h-k) / (p + k/n)      p = h-1, k beside (sqrt(p^2 + p (n-h)/n) - p) n
# Halving and doubling beats both at every S; real links are not equal, NCCL does not have it, and `choose`,
# NCCL's choice at every call, takes it only when asked to.

AS_NCCL = ("ring", "double tree")
POWERS_OF_TWO_ONLY = ("halving and doubling", "recursive doubling")


class Network(NamedTuple):
    alpha_s: float
    bytes_per_s: float


class Choice(NamedTuple):
    algorithm: str
    seconds: float
    pieces: int = 1  # of each half of the tensor, for the double tree


def _costs(algorithm: str, n: int, pieces: int) -> tuple[int, float]:
    """Messages that follow one another, and bytes through a port as a multiple of S, at any n."""
    require_one_of(AS_NCCL + POWERS_OF_TWO_ONLY, algorithm=algorithm)
    require_positive_ints(n=n, pieces=pieces)
    if algorithm in POWERS_OF_TWO_ONLY and n & (n - 1):
        raise ValueError(f"{algorithm} is for powers of two only, not n={n}; choose {' or '.join(AS_NCCL)}")
    height = _height(n)
    tree = 2 * (height - 1 + pieces) if n > 1 else 0
    return {
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "double tree": (tree, tree / pieces),
        "halving and doubling": (2 * height, 2 * (n - 1) / n),
        "recursive doubling": (height, height),
    }[algorithm]


def steps(algorithm: str, n: int, pieces: int = 1) -> int:
    """Messages that follow one another; `pieces` concerns the double tree."""
    return _costs(algorithm, n, pieces)[0]


def formula_s(algorithm: str, n: int, size_bytes: float, network: Network, pieces: int = 1) -> float:
    """Seconds of an all-reduce."""
    messages, at_port = _costs(algorithm, n, pieces)
    return messages * network.alpha_s + at_port * size_bytes / network.bytes_per_s


def best_pieces(n: int, size_bytes: float, network: Network) -> int:
    """The k with the least time for the double tree: an integer beside the root of the derivative."""
    ideal = sqrt(max(0, _height(n) - 1) * size_bytes / (network.alpha_s * network.bytes_per_s))
    return min(_beside(ideal), key=lambda pieces: formula_s("double tree", n, size_bytes, network, pieces))


def choose(n: int, size_bytes: float, network: Network, among: tuple[str, ...] = AS_NCCL) -> Choice:
    """The fastest of `among`; at equal times the earlier one."""

    def priced(algorithm: str) -> Choice:
        pieces = best_pieces(n, size_bytes, network) if algorithm == "double tree" else 1
        return Choice(algorithm, formula_s(algorithm, n, size_bytes, network, pieces), pieces)

    return min(map(priced, among), key=lambda choice: choice.seconds)


def crossover_bytes(n: int, network: Network) -> float:
    """S*: below it the double tree is faster than the ring. 0 for n <= 3, where the ring is never slower."""
    if n == 1:
        return 0.0
    height = _height(n)
    p = height - 1
    ideal = (sqrt(p * p + p * (n - height) / n) - p) * n
    meeting_points = (k * (n - height - k) / (p + k / n) for k in _beside(ideal))
    return max(0.0, *meeting_points) * network.alpha_s * network.bytes_per_s


def crossover_by_sweep(n: int, network: Network) -> float:
    """The same without algebra: double the size until the ring wins, then halve the interval."""
    tree_wins = lambda size_bytes: choose(n, size_bytes, network).algorithm == "double tree"
    low, high = 0.0, 1.0
    while tree_wins(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high and high > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if tree_wins(middle) else (low, middle)
    return low


def _height(n: int) -> int:
    return (n - 1).bit_length()


def _beside(ideal: float) -> set[int]:
    return {max(1, floor(ideal)), max(1, ceil(ideal))}
