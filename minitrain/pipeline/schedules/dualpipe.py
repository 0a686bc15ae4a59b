"""DualPipe: microbatches enter at both ends, and a rank runs a forward of one direction and a backward of the other as one.

    DualPipe     stage s on rank s for the first half of the microbatches and on rank p-1-s for the second half; PP = p
    DualPipeV    2p stages in V order: rank r has r and 2p-1-r, all microbatches enter on rank 0; PP = 2p

So each rank has an early stage, near an entrance, and a late one, near an exit. `0` is a microbatch at the early stage, `1` one at the
late stage. A forward of the one and a backward of the other do not need each other, so the all-to-all of experts in the one hides
behind the products of the other: that is what a `Pair` is for, written (F B). Where nothing can be paired, B is split and W fills the
hole. With a = ranks between this one and the middle (or the turn of the V), h = PP/2 - 1 - a and n microbatches each way:

    1   2a times       F0                        the way to the middle fills
    2   h+1 times      F0 F1                     the other direction has arrived
    3   a times        I1 W1 F1                  its first backwards; W at once, while the next forward is on its way
    4   n-PP+h+1 times (F0 B1) (F1 B0)           the main part; in the middle the first F0 B1 are no pair, as their neighbour waits for F0
    5   a times        B1 (F1 B0)
    6   h+1 times      B1 B0                     the second half of these as I, W later
    7   a times        W  I0                     what is split now leaves its W at the end of a queue, from whose head W is taken
    8   h+1 times      W

    p=4, m=8, rank 0:   F0.0 F0.1  F0.2 F3.4  I3.4 W3.4 F3.5  (F0.3 B3.5)(F3.6 B0.0)  B3.6 (F3.7 B0.1)  B3.7 I0.2  W0.2 I0.3  W0.3

Bubble, with F&B the time of a pair and B = I + W: (PP/2-1)·(F&B + B - 3W), for any n. The simulator has exactly this on the middle ranks
if F = I >= W. There each of the PP/2-1 ranks outside costs F (fill) + F&B - B (a pair where this rank has a lone B) + I - W (drain),
which is the published term, as F = I. If I > F >= W the idle time is less, if I < F or W > F = I it is more. Further out it is less by
F + B - F&B for each pair that a rank has not. Beside it 1F1B: (PP-1)(F+B), ZB1P: (PP-1)(F+B-2W).
Memory: parameters of two stages a rank, 2 times the model's share 1/PP. DualPipe keeps each stage twice; DualPipeV none, on half as many
ranks. Activations PP + 1 of a stage on every rank, as the forward of a pair comes before its backward frees; between I and W part of one.
Sends per microbatch 2(PP-1) messages, for DualPipeV 4(p-1): the turn sends none. DualPipe: once a step the gradients of every stage
between the ranks r and p-1-r (shared.py).
Raises ValueError in one line for an odd p or m (DualPipe), and for fewer than 2p microbatches.
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.1, Table 2, Figure 5 (8 ranks, 20 microbatches), and the description of
the published DualPipe, whose 8 steps these are. Differs: lists, no class with counters; runtime.py runs a pair's parts in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minitrain.pipeline.schedule import B, Entry, F, I, Pair, Schedule, W
from minitrain.pipeline.schedules.one_direction import check_sizes


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches 0 … m/2-1 enter on rank 0, the others on rank p-1; the second half of the ranks is the mirror image."""
    check_sizes("dualpipe", p=p, m=m)
    if p % 2:
        raise ValueError(
            f"dualpipe: p={p} ranks; two directions meet between two ranks, use an even number, {p - 1 or 2} or {p + 1}"
        )
    if m % 2 or m < 2 * p:
        raise ValueError(
            f"dualpipe: m={m} microbatches on p={p} ranks; m must be even and >= 2p, use {max(2 * p, m + 1)} or more"
        )
    down, up = range(m // 2), range(m // 2, m)
    return Schedule(
        f"DualPipe, p={p}, m={m}",
        tuple(steps(p, r, down, up) if r < p // 2 else steps(p, p - 1 - r, up, down) for r in range(p)),
        p,
        m,
    )


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe of 2p ranks folded in the middle: the ranks of the second half are the late stages of those of the first."""
    check_sizes("dualpipe_v", p=p, m=m)
    if m < 2 * p:
        raise ValueError(
            f"dualpipe_v: m={m} microbatches on p={p} ranks; m must be >= 2p, use {2 * p} or more"
        )
    return Schedule(
        f"DualPipeV, p={p}, m={m}", tuple(steps(2 * p, r, range(m), range(m)) for r in range(p)), 2 * p, m
    )


def steps(stages: int, h: int, early: Sequence[int], late: Sequence[int]) -> tuple[Entry, ...]:
    """The list of the rank with the stages h and stages-1-h, for the microbatches that come to the one and to the other."""
    a = stages // 2 - 1 - h
    f0, b0 = (iter([(h, i) for i in early]) for _ in range(2))
    f1, b1 = (iter([(stages - 1 - h, i) for i in late]) for _ in range(2))
    entries: list[Entry] = [F(*next(f0)) for _ in range(2 * a)]
    for _ in range(h + 1):
        entries += [F(*next(f0)), F(*next(f1))]
    for _ in range(a):
        what = next(b1)
        entries += [I(*what), W(*what), F(*next(f1))]
    for turn in range(len(early) - stages + h + 1):
        forward, backward = F(*next(f0)), B(*next(b1))
        entries += [forward, backward] if turn == a == 0 else [Pair(forward, backward)]
        entries.append(Pair(F(*next(f1)), B(*next(b0))))
    for _ in range(a):
        entries += [B(*next(b1)), Pair(F(*next(f1)), B(*next(b0)))]
    later: deque[tuple[int, int]] = deque()
    for k in range(2 * (h + 1)):
        what = next(b0 if k % 2 else b1)
        if k > h:
            later.append(what)
        entries.append(I(*what) if k > h else B(*what))
    for _ in range(a):
        later.append(next(b0))
        entries += [W(*later.popleft()), I(*later[-1])]
    return (*entries, *(W(*what) for what in later))
