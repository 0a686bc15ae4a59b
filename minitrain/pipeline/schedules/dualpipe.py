"""DualPipe: microbatches enter at both ends; a forward one way and a backward the other run as one.

    DualPipe     stage s on rank s for the first half of microbatches, on rank p-1-s for the second; PP = p
    DualPipeV    2p stages in V order: rank r has r and 2p-1-r, all microbatches enter on rank 0; PP = 2p

    1   2a times       F0                        5   a times        B1 (F1 B0)
    2   h+1 times      F0 F1                     6   h+1 times      B1 B0, the second half of these as I
    3   a times        I1 W1 F1                  7   a times        W I0, W from the oldest I without one
    4   n-PP+h+1 times (F0 B1) (F1 B0)           8   h+1 times      W

`0` is a microbatch at the rank's early stage, `1` at its late one; n enter each way; a: ranks from here to
the middle (the turn of the V), h = PP/2-1-a. In a `Pair` (F B) one part hides the all-to-all of the other;
in the middle the first (F0 B1) is no pair, as a neighbour waits for F0. Bubble, F&B: time of a pair, B = I+W:
(PP/2-1)·(F&B + B - 3W) on the middle ranks if F = I >= W. Memory: two stages' parameters per rank,
activations of PP + 1. Sends per microbatch 2(PP-1) messages, DualPipeV 4(p-1); DualPipe once per step all
gradients between ranks r and p-1-r.
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.1, Table 2, Figure 5, and the published
DualPipe's 8 steps. How the parts of a pair run: halves.py.
"""

from collections import deque
from collections.abc import Sequence

from minitrain.pipeline.schedule import B, Entry, F, I, Pair, Schedule, W
from minitrain.pipeline.schedules.one_direction import check_even
from minitrain.ranks.checks import require_positive_ints


def dualpipe(p: int, m: int) -> Schedule:
    """Microbatches 0 to m/2-1 enter on rank 0, the others on rank p-1."""
    require_positive_ints(p=p, m=m)
    check_even("dualpipe", "two directions meet between two ranks", "p", p, "ranks")
    check_even("dualpipe", "half of them goes each way", "m", m, "microbatches")
    _check_enough("dualpipe", p, m)
    down, up = range(m // 2), range(m // 2, m)
    ranks = [steps(p, r, down, up) if r < p // 2 else steps(p, p - 1 - r, up, down) for r in range(p)]
    return Schedule(f"DualPipe, p={p}, m={m}", ranks, p, m)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe of 2p ranks folded in the middle: rank r has the late stage of rank 2p-1-r too."""
    require_positive_ints(p=p, m=m)
    _check_enough("dualpipe_v", p, m)
    ranks = [steps(2 * p, r, range(m), range(m)) for r in range(p)]
    return Schedule(f"DualPipeV, p={p}, m={m}", ranks, 2 * p, m)


def _check_enough(what: str, p: int, m: int) -> None:
    if m < 2 * p:
        raise ValueError(f"{what}: m={m} microbatches on p={p} ranks; use {2 * p} or more")


def steps(stages: int, h: int, early: Sequence[int], late: Sequence[int]) -> tuple[Entry, ...]:
    """The list of the rank with the stages h and stages-1-h; `early` and `late`: the microbatches of each."""
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
