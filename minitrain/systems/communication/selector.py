"""Which algorithm for how many bytes: the choice that NCCL makes at every call, by alpha-beta.

n ranks, h = ceil(log2 n); a message costs alpha seconds, a port carries B bytes per second:

    ring                   2(n-1) (alpha + S/(n B))        least bytes, most steps
    double tree, k pieces  2(h-1+k) (alpha + S/(k B))      few steps; pieces fill the tree like a pipe
    halving and doubling   2h alpha + 2(n-1)/n S/B         n a power of two, all links equal
    recursive doubling     h (alpha + S/B)                 n a power of two

The best k is an integer beside sqrt((h-1) S / (alpha B)). For a given k both times are straight lines in S,
and the tree with its best k is faster than the ring exactly below the largest of their meeting points:

    S* = alpha B · max over k of  k (n-h-k) / (p + k/n)      p = h-1

with k beside (sqrt(p^2 + p (n-h)/n) - p) n. On equal links halving and doubling beats both at every S; real
links are not equal (`cost`), NCCL does not have it, and `choose` takes it only when asked to. Jeaugey 2019,
NVIDIA's blog on NCCL 2.4; NCCL's src/graph/tuning.cc; Thakur, Rabenseifner and Gropp 2005, section 4.
Differs: in NCCL's table a tree attains 0.92 of the bandwidth, here all of it.
"""

from math import ceil, floor, sqrt
from typing import NamedTuple

from minitrain.ranks.checks import require_one_of, require_positive_ints

AS_NCCL = ("ring", "double tree")
POWERS_OF_TWO_ONLY = ("halving and doubling", "recursive doubling")


class Network(NamedTuple):
    alpha_s: float
    bytes_per_s: float


class Choice(NamedTuple):
    algorithm: str
    seconds: float
    pieces: int = 1  # of each half of the tensor, for the double tree


def _costs(n: int, pieces: int) -> dict[str, tuple[int, float]]:
    """{algorithm: messages that follow one another, bytes through a port as a multiple of S}, at any n."""
    height = _height(n)
    tree = 2 * (height - 1 + pieces) if n > 1 else 0
    return {
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "double tree": (tree, tree / pieces),
        "halving and doubling": (2 * height, 2 * (n - 1) / n),
        "recursive doubling": (height, height),
    }


def steps(algorithm: str, n: int, pieces: int = 1) -> int:
    """Messages that follow one another, at any n; `pieces` concerns the double tree."""
    _check(algorithm, n, pieces)
    return _costs(n, pieces)[algorithm][0]


def time_s(algorithm: str, n: int, size_bytes: float, network: Network, pieces: int = 1) -> float:
    """Seconds of an all-reduce."""
    _check(algorithm, n, pieces)
    messages, at_port = _costs(n, pieces)[algorithm]
    return messages * network.alpha_s + at_port * size_bytes / network.bytes_per_s


def best_pieces(n: int, size_bytes: float, network: Network) -> int:
    """The k with the least time for the double tree: an integer beside the root of the derivative."""
    ideal = sqrt(max(0, _height(n) - 1) * size_bytes / (network.alpha_s * network.bytes_per_s))
    return min(_beside(ideal), key=lambda pieces: time_s("double tree", n, size_bytes, network, pieces))


def choose(n: int, size_bytes: float, network: Network, among: tuple[str, ...] = AS_NCCL) -> Choice:
    """The fastest of `among`; at equal times the earlier one."""

    def priced(algorithm: str) -> Choice:
        pieces = best_pieces(n, size_bytes, network) if algorithm == "double tree" else 1
        return Choice(algorithm, time_s(algorithm, n, size_bytes, network, pieces), pieces)

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

    def tree_wins(size_bytes: float) -> bool:
        return choose(n, size_bytes, network).algorithm == "double tree"

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


def _check(algorithm: str, n: int, pieces: int) -> None:
    require_one_of(AS_NCCL + POWERS_OF_TWO_ONLY, algorithm=algorithm)
    require_positive_ints(n=n, pieces=pieces)
    if algorithm in POWERS_OF_TWO_ONLY and n & (n - 1):
        raise ValueError(f"{algorithm} is for powers of two only, not n={n}; choose {' or '.join(AS_NCCL)}")
