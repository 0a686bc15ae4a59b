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

import numpy

from minitrain.plan.simulate.links import Number, divided
from minitrain.ranks.checks import require_nonnegative, require_positive, require_positive_ints

Survivals = list[int]  # at k: the sets of k failed machines that lose nothing


def groups(machines: int, replicas: int) -> list[range]:
    """Gemini's rings: of `replicas` machines each; what is left over joins the last."""
    _check(machines, replicas)
    require_positive_ints(machines=machines)
    starts = range(0, machines - replicas + 1, replicas)
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


def replica_survivals(rings: Iterable[Sequence[int]], replicas: int) -> Survivals:
    """Of a placement in rings; for k = 0 .. N."""
    return _product([_ring_survivals(len(members), replicas) for members in rings])


def parity_survivals(members: Iterable[Collection[int]]) -> Survivals:
    """Of groups with a parity each."""
    return _product([[1, len(group)] + [0] * (len(group) - 1) for group in members])


def probability(survivals: Survivals, failures: int) -> Fraction:
    """That so many machines at once, any of them, lose nothing."""
    return Fraction(survivals[failures], comb(len(survivals) - 1, failures))


def reliability(survivals: Survivals, failing: Number) -> Number:
    """The probability that nothing is lost if each machine fails with probability `failing`."""
    machines = len(survivals) - 1
    return sum(count * failing**k * (1 - failing) ** (machines - k) for k, count in enumerate(survivals))


def _ring_survivals(size: int, replicas: int) -> Survivals:
    """Failed machines fill the gaps between those left, at most `replicas` - 1 in each."""
    survivals = []
    for k in range(size):
        gaps = size - k
        fillings = sum(
            (-1) ** full * comb(gaps, full) * comb(k - full * replicas + gaps - 1, gaps - 1)
            for full in range(k // replicas + 1)
        )
        survivals.append(size * fillings // gaps)
    return [*survivals, 0]


def _product(polynomials: Iterable[Survivals]) -> Survivals:
    total = numpy.array([1], dtype=object)
    for factor in polynomials:
        total = numpy.convolve(total, numpy.array(factor, dtype=object))
    return total.tolist()


class Protection(NamedTuple):
    """Bytes a machine: kept beside its own state, sent at a save, received to have a lost state again."""

    stored: Number
    sent: Number
    received: Number


def replicas_cost(state_bytes: Number, replicas: int) -> Protection:
    """Of whole copies on `replicas` - 1 other machines."""
    require_positive_ints(replicas=replicas)
    require_nonnegative(state_bytes=state_bytes)
    return Protection((replicas - 1) * state_bytes, (replicas - 1) * state_bytes, state_bytes)


def parity_cost(state_bytes: Number, machines: int) -> Protection:
    """Of RAIM5 in a group of so many, exact; n - 2 pieces and their parity make a lost piece."""
    return Protection(divided(state_bytes, machines - 1), state_bytes, (machines - 1) * state_bytes)


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
    require_positive(bytes_per_s=bytes_per_s, used=used)
    require_nonnegative(nbytes=nbytes, latency_s=latency_s)
    require_positive_ints(parts=parts, part_bytes=buffer_bytes // parts)
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
