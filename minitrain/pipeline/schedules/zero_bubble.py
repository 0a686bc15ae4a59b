"""Zero bubble: a backward in two halves, I and W, of which only I is waited for; W fills what would be bubbles. ZB-H1 and ZB-H2.

    ZB-H1, p=3, m=5     F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4             (1F1B waits for 6 where this waits for 2)
                        .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
                        .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    ZB-H2               F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4                   (no rank waits once it has begun)
                        .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
                        .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

Both are 1F1B with two numbers for each rank r: how many forwards it runs ahead, and how many of its W it holds back.

                ahead           held back     bubble                               peak on every rank      needs m of at least
    1F1B        p - r - 1       -             (p-1)·(TF + TI + TW)                 p - r                   p
    ZB-H1       p - r - 1       r             (p-1)·(TF + TI - TW)                 p                       p
    ZB-H2       2(p - r - 1)    2r            (p-1)·max(0, TF + TI - 2TW)          2p - 1                  2p - 1

The last rank holds W back most, so it answers forwards with I at once while the pipeline fills, and works off W while it drains. The
bubble is `bubble(...)`: the longest that any rank takes from its first action to its last, minus its work. This is what a step costs
when the next one follows without a common stop (see post_validation.py); from rank 0's first action to the end of all it is at least
(p-1)·TF, as the last rank begins so late. With fewer microbatches both lists are still valid, hold less and wait longer.
With TW > TF both bubbles are those of TW = TF: a longer W hides no more than a forward.

`zb_interleaved` does the same to interleaved 1F1B with v stages a rank: (v-1)p + p-r-1 forwards ahead, r held back. With the times of
its shorter stages the bubble is ZB-H1's, so 1/v of it, and the peak v·p activations of a stage: p microbatches' worth.

Sends what 1F1B (or its interleaved form) sends. Memory: the peaks above count an activation whole until its W (`kept` = 1): what I
frees is not in them. Raises ValueError in one line for p, m, v below 1, and for interleaving when p does not divide m.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, sections 2 and 3, table 2, with B and W for our I and W. Differs: table 2's bubbles of
general times hold for TW <= TF, as simulated, and its 2p-1 and p are of all ranks; `zb_interleaved` is torch.distributed.pipelining's
ScheduleInterleavedZeroBubble, of which there is no formula in print: the one above is simulated.
"""

from __future__ import annotations

from minitrain.pipeline.schedule import Action, F, I, Schedule, W
from minitrain.pipeline.schedules.one_direction import check_sizes
from minitrain.pipeline.simulate import Simulation, Time


def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble where all times are equal, in 1F1B's memory."""
    check_sizes("zb_h1", p=p, m=m)
    return Schedule(
        f"ZB-H1, p={p}, m={m}", tuple(_straight(r, m, ahead=p - r - 1, held_back=r) for r in range(p)), p, m
    )


def zb_h2(p: int, m: int) -> Schedule:
    """No bubble where all times are equal, in twice the memory."""
    check_sizes("zb_h2", p=p, m=m)
    return Schedule(
        f"ZB-H2, p={p}, m={m}",
        tuple(_straight(r, m, ahead=2 * (p - r - 1), held_back=2 * r) for r in range(p)),
        p,
        m,
    )


def zb_interleaved(p: int, m: int, v: int) -> Schedule:
    """ZB-H1 with v stages a rank, every p-th one; p microbatches go through all of them in turn."""
    check_sizes("zb_interleaved", p=p, m=m, v=v)
    if m % p:
        raise ValueError(
            f"zb_interleaved: m={m} microbatches are not a multiple of p={p} ranks; "
            f"use {m // p * p or p} or {(m // p + 1) * p}"
        )
    # the k-th forward of a rank: (which of its stages, microbatch)
    order = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]
    return Schedule(
        f"interleaved zero bubble, p={p}, m={m}, v={v}",
        tuple(
            delayed(
                [F(c * p + r, i) for c, i in order],
                [I((v - 1 - c) * p + r, i) for c, i in order],
                (v - 1) * p + p - r - 1,
                r,
            )
            for r in range(p)
        ),
        p * v,
        m,
    )


def delayed(
    forwards: list[Action], backwards: list[Action], ahead: int, held_back: int
) -> tuple[Action, ...]:
    """`ahead` forwards; then a forward, an I and the W of the I that was `held_back` places earlier, in turn; then the W that are left."""
    entries = forwards[:ahead]
    for k, backward in enumerate(backwards):
        entries += [*forwards[ahead + k : ahead + k + 1], backward]
        if k >= held_back:
            entries.append(W(*backwards[k - held_back][1:]))
    return tuple(entries + [W(*backward[1:]) for backward in backwards[max(0, len(backwards) - held_back) :]])


def bubble(simulation: Simulation) -> Time:
    """The longest that a rank takes from its first action to its last, minus its work."""
    return max(
        spans[-1].end - spans[0].start - simulation.busy(rank) for rank, spans in enumerate(simulation.spans)
    )


def _straight(r: int, m: int, ahead: int, held_back: int) -> tuple[Action, ...]:
    return delayed([F(r, i) for i in range(m)], [I(r, i) for i in range(m)], ahead, held_back)
