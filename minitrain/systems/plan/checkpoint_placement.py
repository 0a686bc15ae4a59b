"""Whose memory holds whose checkpoint, and what k failures at once leave. No torch.

N machines stand in rings; each keeps its own state and that of the m - 1 before it in its ring (Gemini):

    groups    rings of m where m divides N; else the last one has m + N mod m machines ("mixed")
    ring      one ring of N

A state is lost when m neighbours of a ring fail. Where m divides N, no placement survives m failures more
often than groups; else mixed is at most (2m-3)/C(N,m) below the best.
Wang et al. 2023 (Gemini), SOSP. Differs: when copies travel is left to systems/checkpoint.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from minitrain.plan.simulate.links import Number
from minitrain.ranks.checks import require_nonnegative, require_positive_ints


def groups(machines: int, replicas: int) -> list[range]:
    """Gemini's rings: of `replicas` machines each; what is left over joins the last."""
    starts = range(0, len(ring(machines, replicas)[0]) - replicas + 1, replicas)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], machines])]


def ring(machines: int, replicas: int) -> list[range]:
    """All machines in one."""
    require_positive_ints(machines=machines)
    require_positive_ints(machines, replicas=replicas)
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


class Protection(NamedTuple):  # bytes a machine
    stored: Number  # beside its own state
    sent: Number  # at a save
    received: Number  # to have a lost state again


def replicas_cost(state_bytes: Number, replicas: int) -> Protection:
    """Of whole copies on `replicas` - 1 other machines."""
    require_positive_ints(replicas=replicas)
    require_nonnegative(state_bytes=state_bytes)
    return Protection((replicas - 1) * state_bytes, (replicas - 1) * state_bytes, state_bytes)
