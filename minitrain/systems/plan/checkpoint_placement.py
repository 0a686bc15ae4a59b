"""Whose memory holds whose checkpoint, what k failures at once leave, and when copies may travel. No torch.

N machines stand in rings; each keeps its own state and that of the m - 1 before it in its ring (Gemini):

    groups    rings of m where m divides N; else the last one has m + N mod m machines ("mixed")
    ring      one ring of N

A state is lost when m neighbours of a ring fail: s/(s-k)·[x^k](1 + x + .. + x^(m-1))^(s-k) sets of k < s
failures leave a ring of s whole, and rings multiply as polynomials in x. Where m divides N, no placement
survives k = m more often; else mixed is at most (2m-3)/C(N,m) below the best.

Parity (REFT's RAIM5): n machines cut their states into n - 1 pieces; piece by piece, the XOR of n - 1 lies on
the n-th, in turn. Beside a state of S bytes:      a replica (m = 2)    parity (n machines)
    bytes kept more, a machine                      S                    S/(n-1)
    bytes sent at a save, a machine                 S                    S
    bytes received to have a lost state again       S                    (n-1)·S
    failures survived, of a group                   1 of 2               1 of n
Wang et al. 2023 (Gemini), SOSP; Wang et al. 2023 (REFT), arXiv:2310.12670. Differs: transfers take a latency
and bytes over one link's bandwidth; spans of idle network are given, not profiled.
"""

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import ceil, comb
from typing import NamedTuple

from minitrain.plan.simulate.links import Number, divided
from minitrain.ranks.checks import require_nonnegative, require_positive_ints

Ways = list[int]  # at k: the sets of k failed machines that lose nothing

# ---- placements --------------------------------------------------------------------------------------------


def groups(machines: int, replicas: int) -> list[range]:
    """Gemini's rings: of `replicas` machines each; what is left over joins the last."""
    _check(machines, replicas)
    require_positive_ints(machines=machines)
    count = machines // replicas
    starts = [replicas * i for i in range(count)]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], machines])]


def ring(machines: int, replicas: int) -> list[range]:
    """All machines in one."""
    _check(machines, replicas)
    return [range(machines)]


def holders(rings: Iterable[Sequence[int]], replicas: int) -> dict[int, frozenset[int]]:
    """The machines that have each machine's state: itself and the next in its ring."""
    require_positive_ints(replicas=replicas)
    return {
        machine: frozenset(members[(i + step) % len(members)] for step in range(replicas))
        for members in rings
        for i, machine in enumerate(members)
    }


def recovers(placement: dict[int, frozenset[int]], failed: Collection[int]) -> bool:
    """Whether each state has a holder that did not fail."""
    return all(not held <= set(failed) for held in placement.values())


def parity_recovers(members: Iterable[Collection[int]], failed: Collection[int]) -> bool:
    """Whether no group with a parity lost more than one machine."""
    return all(len({*group} & {*failed}) <= 1 for group in members)


# ---- probabilities, by counting ----------------------------------------------------------------------------


def replica_ways(rings: Iterable[Sequence[int]], replicas: int) -> Ways:
    """Of a placement in rings; for k = 0 .. N."""
    return _product([_ring_ways(len(members), replicas) for members in rings])


def parity_ways(members: Iterable[Collection[int]]) -> Ways:
    """Of groups with a parity each."""
    return _product([[1, len(group)] + [0] * (len(group) - 1) for group in members])


def probability(ways: Ways, failures: int) -> Fraction:
    """That so many machines at once, any of them, lose nothing."""
    if not 0 <= failures < len(ways):
        raise ValueError(f"{failures} failures among {len(ways) - 1} machines; choose 0 to {len(ways) - 1}")
    return Fraction(ways[failures], comb(len(ways) - 1, failures))


def reliability(ways: Ways, failing: Number) -> Number:
    """The probability that nothing is lost if each machine fails with probability `failing`."""
    machines = len(ways) - 1
    return sum(count * failing**k * (1 - failing) ** (machines - k) for k, count in enumerate(ways))


def group_bound(machines: int, replicas: int, failures: int) -> Fraction:
    """At least: each of N/m groups is lost in C(N-m, k-m) sets, counted as if no two groups were."""
    _check(machines, replicas)
    if machines % replicas:
        raise ValueError(f"{machines} machines in groups of {replicas}: the bound is for whole groups")
    if failures < replicas:
        return Fraction(1)
    lost = machines // replicas * comb(machines - replicas, failures - replicas)
    return max(Fraction(0), 1 - Fraction(lost, comb(machines, failures)))


def best_bound(machines: int, replicas: int) -> Fraction:
    """No placement survives `replicas` failures more often: N states need N/m sets of holders or more."""
    _check(machines, replicas)
    return 1 - Fraction(ceil(Fraction(machines, replicas)), comb(machines, replicas))


def _ring_ways(size: int, replicas: int) -> Ways:
    """Failed machines fill the gaps between those left, at most `replicas` - 1 in each."""
    ways = []
    for k in range(size):
        gaps = size - k
        fillings = sum(
            (-1) ** full * comb(gaps, full) * comb(k - full * replicas + gaps - 1, gaps - 1)
            for full in range(k // replicas + 1)
        )
        ways.append(size * fillings // gaps)
    return [*ways, 0]


def _product(polynomials: Iterable[Ways]) -> Ways:
    total = [1]
    for factor in polynomials:
        longer = [0] * (len(total) + len(factor) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(factor):
                longer[i + j] += a * b
        total = longer
    return total


# ---- bytes -------------------------------------------------------------------------------------------------


class Protection(NamedTuple):
    """Bytes a machine: kept beside its own state, sent at a save, received to have a lost state again."""

    kept: Number
    sent: Number
    received: Number


def replicas_cost(state_bytes: Number, replicas: int) -> Protection:
    """Of whole copies on `replicas` - 1 other machines."""
    _check(replicas, replicas)
    require_nonnegative(state_bytes=state_bytes)
    return Protection((replicas - 1) * state_bytes, (replicas - 1) * state_bytes, state_bytes)


def parity_cost(state_bytes: Number, machines: int) -> Protection:
    """Of RAIM5 in a group of so many, exact; n - 2 pieces and their parity make a lost piece."""
    if machines < 2:
        raise ValueError(f"{machines} machines: a parity needs 2 machines or more")
    return Protection(divided(state_bytes, machines - 1), state_bytes, (machines - 1) * state_bytes)


# ---- copies while the network is idle ----------------------------------------------------------------------


class Interleaved(NamedTuple):
    """Bytes of the chunks sent in each span, and those for which there was no room."""

    chunks: list[list[int]]
    left_bytes: int

    @property
    def fits(self) -> bool:
        return not self.left_bytes


def interleave(
    idle_s: Sequence[Number],
    nbytes: int,
    *,
    bytes_per_s: Number,
    buffer_bytes: int,
    parts: int = 4,
    latency_s: Number = 0,
    used: Number = 1,
) -> Interleaved:
    """A checkpoint's copies in the idle spans of a step, in order: as much as fits in `used` of each.

    A chunk is at most one of the `parts` of the receiver's buffer, so that one can move on to the host while
    the next arrives; it takes latency_s + bytes / bytes_per_s.
    """
    if (
        min(bytes_per_s, parts) <= 0
        or buffer_bytes < parts
        or not 0 < used <= 1
        or min(nbytes, latency_s) < 0
    ):
        given = f"{nbytes=}, {bytes_per_s=}, {buffer_bytes=}, {parts=}, {latency_s=}, {used=}"
        raise ValueError(
            f"{given}: need 0 < used <= 1, a byte or more a part, nothing below 0, a speed above"
        )
    chunks: list[list[int]] = []
    for span_s in idle_s:
        left_s = used * span_s
        chunks.append([])
        while nbytes and (room := int((left_s - latency_s) * bytes_per_s)) > 0:
            chunk = min(nbytes, buffer_bytes // parts, room)
            chunks[-1].append(chunk)
            nbytes -= chunk
            left_s -= latency_s + divided(chunk, bytes_per_s)
    return Interleaved(chunks, nbytes)


def steps_to_send(idle_s: Sequence[Number], nbytes: int, **link) -> int:
    """The fewest steps with these spans over which a checkpoint fits; `link` as for `interleave`."""
    a_step = nbytes - interleave(idle_s, nbytes, **link).left_bytes
    if nbytes and not a_step:
        raise ValueError(f"spans of {[*idle_s]} s: none has room for a byte; give longer ones")
    return max(1, ceil(divided(nbytes, a_step))) if nbytes else 1


def _check(machines: int, replicas: int) -> None:
    if not 1 <= replicas <= machines:
        raise ValueError(f"{replicas} replicas on {machines} machines; use 1 to {machines}, its own included")
