"""Whole backwards and stages in one direction: GPipe, 1F1B, interleaved 1F1B, breadth-first. No torch.

    GPipe, p=3 m=4                                   1F1B, p=3 m=4
    F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3              F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3  (B as long as F)
    .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..              .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..              .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Bubble share: (p-1)/(m+p-1). Memory: GPipe holds all m microbatches; rank r of 1F1B holds p - r.
Interleaving gives a rank v stages of 1/v of the size: the overhead is (p-1)/(v·m), for v times the messages.
Depth-first (interleaved 1F1B) holds at most p·(1 + (p-1)/(p·v)) microbatches' worth, on rank 0. Breadth-first
holds all m, but gathers sharded weights twice per step, not 2m times (`runtime.WholeStages`).
Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2; Narayanan et al. 2021, arXiv:2104.04473, sections
2.2.1 and 2.2.2; Fan et al. 2021 (DAPPLE: 1F1B as early backward), arXiv:2007.01045, section 3; Lamy-Poirier
2023 (breadth-first), arXiv:2211.05953. Differs: GPipe's backwards come in the order of the forwards.
"""

from collections.abc import Callable

from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.ranks.checks import require_positive_ints


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    require_positive_ints(p=p, m=m)
    ranks = [[kind(r, i) for kind in (F, B) for i in range(m)] for r in range(p)]
    return Schedule(f"GPipe, p={p}, m={m}", ranks, p, m)


def one_f_one_b(p: int, m: int, extra: int = 0) -> Schedule:
    """Rank r runs p-r-1 forwards ahead, then a forward and a backward in turn, then the other backwards.

    `extra` more forwards ahead give messages time to travel; fewer (below 0) make every backward wait."""
    require_positive_ints(p=p, m=m)
    order = [(0, i) for i in range(m)]
    ranks = [alternate(*on_rank(r, p, 1, order, B), max(0, p - r - 1 + extra)) for r in range(p)]
    return Schedule(f"1F1B{f' {extra:+}' if extra else ''}, p={p}, m={m}", ranks, p, m)


def interleaved(p: int, m: int, v: int, room: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r has the stages r, r+p, ..., and goes through them depth-first.

    A rank is `room` forwards further ahead than the next one: 2 leave time for messages, 1 is enough if
    they take none."""
    order = depth_first("interleaved", p, m, v)
    ahead = [room * (p - r - 1) + (v - 1) * p for r in range(p)]
    ranks = [alternate(*on_rank(r, p, v, order, B), ahead[r]) for r in range(p)]
    return Schedule(f"interleaved 1F1B, p={p}, m={m}, v={v}", ranks, p * v, m)


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """The stages of `interleaved`, each run for all microbatches before the next."""
    require_positive_ints(p=p, m=m, v=v)
    order = [(F, c) for c in range(v)] + [(B, c) for c in reversed(range(v))]
    ranks = [[kind(c * p + r, i) for kind, c in order for i in range(m)] for r in range(p)]
    return Schedule(f"breadth-first, p={p}, m={m}, v={v}", ranks, p * v, m)


def on_rank(r: int, p: int, v: int, order: list[tuple[int, int]], backward: Callable) -> tuple[list, list]:
    """(Forwards, backwards) of rank r, which has v stages, every p-th; `order` of (stage, microbatch)."""
    forwards = [F(c * p + r, i) for c, i in order]
    return forwards, [backward((v - 1 - c) * p + r, i) for c, i in order]


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return tuple(forwards[:ahead] + turns + backwards[len(forwards) - ahead :])


def depth_first(what: str, p: int, m: int, v: int) -> list[tuple[int, int]]:
    """(which of its v stages, microbatch) of each forward: p microbatches go through all, then the next p."""
    require_positive_ints(p=p, m=m, v=v)
    if m % p:
        raise ValueError(f"{what}: m={m} microbatches are not a multiple of p={p} ranks; use {m + -m % p}")
    return [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]


def check_even(what: str, why: str, name: str, size: int, of: str) -> None:
    if size % 2:
        raise ValueError(f"{what}: {name}={size} {of}; {why}, use an even number")
