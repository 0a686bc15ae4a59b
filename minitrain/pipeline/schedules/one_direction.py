"""The schedules with whole backwards and stages in one direction: GPipe, 1F1B, interleaved 1F1B, breadth-first.

    GPipe, p=3 m=4                                   1F1B, p=3 m=4
    F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3              F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3          (B takes as long as F here)
    .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..              .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..              .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

All have p-1 forwards and p-1 backwards of waiting in a step: of m microbatches the share (p-1)/(m+p-1). What differs is memory and
the size of a stage. GPipe holds all m microbatches; 1F1B holds p - r on rank r, as a backward makes room for each forward (DAPPLE
arrives at the same lists and calls this early backward). Interleaving gives a rank v stages of 1/v of the size, every p-th one, so
that filling and draining takes 1/v of the time: the bubble is (p-1)/(v·m) of the work, for v times the messages and those from the
last rank round to the first. Depth-first (interleaved 1F1B) sends p microbatches through all its stages in turn and holds at most
p·(1 + (p-1)/(p·v)) microbatches' worth, on rank 0; breadth-first sends all m through a stage before the next, which holds all m but
touches the weights of a stage in two runs a step, once forwards and once backwards: with sharded weights 2 gathers a stage, where
depth-first, whose forwards and backwards alternate between stages, needs nearly 2m (2m - 3 on the last of 4 ranks, v=2).

Memory and time: `schedule.peak` and simulate.py count them. Sends nothing.
Raises ValueError in one line for p, m, v below 1, and for interleaving when p does not divide m.
Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2; Narayanan et al. 2021 (PipeDream-Flush, interleaved), arXiv:2104.04473,
sections 2.2.1 and 2.2.2; Fan et al. 2021 (DAPPLE), arXiv:2007.01045, section 3; Lamy-Poirier 2023 (breadth-first), arXiv:2211.05953.
Differs: GPipe's backwards come in the order of the forwards, not reversed (the sum is the same, the last stage is the same).
"""

from __future__ import annotations

from minitrain.pipeline.schedule import Action, B, F, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    check_sizes("gpipe", p=p, m=m)
    return Schedule(
        f"GPipe, p={p}, m={m}",
        tuple(tuple([F(r, i) for i in range(m)] + [B(r, i) for i in range(m)]) for r in range(p)),
        p,
        m,
    )


def one_f_one_b(p: int, m: int) -> Schedule:
    """Rank r runs p-r-1 forwards ahead, then one forward and one backward in turn, then what is left of the backwards."""
    check_sizes("one_f_one_b", p=p, m=m)
    return Schedule(
        f"1F1B, p={p}, m={m}",
        tuple(
            alternate([F(r, i) for i in range(m)], [B(r, i) for i in range(m)], p - r - 1) for r in range(p)
        ),
        p,
        m,
    )


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B: rank r has the stages r, r+p, …, and goes through them depth-first, p microbatches at a time."""
    check_sizes("interleaved", p=p, m=m, v=v)
    if m % p:
        raise ValueError(
            f"interleaved: m={m} microbatches are not a multiple of p={p} ranks; use {f'{m // p * p} or ' * (m > p)}{(m // p + 1) * p}"
        )
    # rounds of p microbatches: the k-th forward of a rank is chunk k // p % v, microbatch k % p of round k // (p·v)
    order = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]
    return Schedule(
        f"interleaved 1F1B, p={p}, m={m}, v={v}",
        tuple(
            alternate(
                [F(c * p + r, i) for c, i in order],
                [B((v - 1 - c) * p + r, i) for c, i in order],
                2 * (p - r - 1) + (v - 1) * p,
            )
            for r in range(p)
        ),
        p * v,
        m,
    )


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """The stages of `interleaved`, each run for all microbatches before the next."""
    check_sizes("breadth_first", p=p, m=m, v=v)
    return Schedule(
        f"breadth-first, p={p}, m={m}, v={v}",
        tuple(
            tuple(
                [F(c * p + r, i) for c in range(v) for i in range(m)]
                + [B(c * p + r, i) for c in reversed(range(v)) for i in range(m)]
            )
            for r in range(p)
        ),
        p * v,
        m,
    )


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return tuple(forwards[:ahead] + turns + backwards[len(forwards) - ahead :])


def check_sizes(what: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{what}: {name}={size!r}; use a whole number, 1 or more (p ranks, m microbatches, v stages a rank)"
            )
