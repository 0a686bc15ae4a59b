"""Chimera, Hanayo, DualPipe: what goes one way fills the bubbles of what goes the other. No torch.

    Chimera, p=4 m=4: two pipelines in opposite directions share the ranks      "F3.1": stage 3, microbatch 1
    rank 0           F0.0  ..  F0.2 F3.1 B3.1 F3.3 B3.3 B0.0  ..  B0.2
    rank 1            ..  F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2  ..           (2 and 3 are the mirror image)

    Hanayo, p=3, one wave of 6 stages, m=3: the model is folded over the ranks, no weights stand twice
    rank 0           F0.0  ..  F0.1  ..  F0.2 F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B0.0  ..  B0.1  ..  B0.2
    rank 1            ..  F1.0  ..  F1.1 F4.0 F1.2 F4.1 B4.0 F4.2 B4.1 B1.0 B4.2 B1.1  ..  B1.2  ..
    rank 2            ..   ..  F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 B2.0 B3.1 B2.1 B3.2 B2.2  ..   ..

One rule for both (`in_slots`), in slots as long as F and as B; only the order is kept. DualPipe: `steps`.
Li and Hoefler 2021 (Chimera), arXiv:2107.06925, section 3, Table 2, whose share for B = 2F is that of one
unit; Liu et al. 2023 (Hanayo), arXiv:2308.15762, section 3; DeepSeek-V3, arXiv:2412.19437, section 3.2.1, and
the published DualPipe. Differs: two pipelines, no forward doubling; the rule ignores messages' time.
"""

from collections import deque
from collections.abc import Callable, Sequence

from minitrain.pipeline.schedule import Action, B, Entry, F, I, Pair, Schedule, W
from minitrain.pipeline.schedules.one_direction import check_even
from minitrain.ranks.checks import require_positive_ints


def chimera(p: int, m: int) -> Schedule:
    """Stage s is on rank s for even microbatches, which go down, on rank p-1-s for odd ones, which go up.
    The j-th of a direction begins in slot 2j, units of p microbatches every 2p slots. Bubble of K units: p-2
    forwards of idle time if B = F, (K+1)·(p-2) if B = 2F. Memory: two stages per rank; activations of p/2 + 1
    stages at the ends, up to p in the middle. Sends 2(p-1) messages per microbatch and, once per step, all
    gradients between ranks r and p-1-r."""
    require_positive_ints(p=p, m=m)
    check_even("chimera", "two pipelines meet between two ranks", "p", p, "ranks")
    check_even("chimera", "half of them goes each way", "m", m, "microbatches")
    rank = lambda stage, i: p - 1 - stage if i % 2 else stage
    ranks = in_slots(p, p, m, rank, lambda i: 2 * p * (i // p) + 2 * (i % p // 2))
    return Schedule(f"Chimera, p={p}, m={m}", ranks, p, m)


def hanayo(p: int, m: int, waves: int) -> Schedule:
    """Stage s is on rank s % p on the way down, on p-1 - s % p on the way up; groups of p every 2S slots.
    Bubble if B = F: 2(p-1) slots, the share (p-1)/(2·m·W+p-1) for W waves and m a multiple of p. Memory:
    parameters once; activations of (2W-1)·p + r + 1 stages on rank r. Sends 4·W·(p-1) messages each."""
    require_positive_ints(p=p, m=m, waves=waves)
    stages = 2 * waves * p
    rank = lambda stage, i: p - 1 - stage % p if stage // p % 2 else stage % p
    ranks = in_slots(p, stages, m, rank, lambda i: 2 * stages * (i // p) + 2 * (i % p))
    return Schedule(f"Hanayo, p={p}, m={m}, {waves} wave{'s' * (waves > 1)}", ranks, stages, m)


def in_slots(p: int, stages: int, m: int, rank: Callable, begin: Callable) -> list[list[Action]]:
    """Lists by slot: what begins in slot b runs stage s of S forward in b + s, backward in b + 2S - 1 - s."""
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for i in range(m):
        for s in range(stages):
            slots[rank(s, i)] += [(begin(i) + s, F(s, i)), (begin(i) + 2 * stages - 1 - s, B(s, i))]
    return [[action for _, action in sorted(own)] for own in slots]


def dualpipe(p: int, m: int) -> Schedule:
    """Stage s is on rank s for microbatches 0 to m/2-1, which enter on rank 0, on rank p-1-s for the others.
    Sends per microbatch 2(p-1) messages and, once per step, all gradients between ranks r and p-1-r."""
    require_positive_ints(p=p, m=m)
    check_even("dualpipe", "two directions meet between two ranks", "p", p, "ranks")
    check_even("dualpipe", "half of them goes each way", "m", m, "microbatches")
    _check_enough("dualpipe", p, m)
    down, up = range(m // 2), range(m // 2, m)
    ranks = [steps(p, r, down, up) if r < p // 2 else steps(p, p - 1 - r, up, down) for r in range(p)]
    return Schedule(f"DualPipe, p={p}, m={m}", ranks, p, m)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe of 2p ranks folded in the middle: rank r has r and 2p-1-r. Sends 4(p-1) messages each."""
    require_positive_ints(p=p, m=m)
    _check_enough("dualpipe_v", p, m)
    ranks = [steps(2 * p, r, range(m), range(m)) for r in range(p)]
    return Schedule(f"DualPipeV, p={p}, m={m}", ranks, 2 * p, m)


def _check_enough(what: str, p: int, m: int) -> None:
    if m < 2 * p:
        raise ValueError(f"{what}: m={m} microbatches on p={p} ranks; use {2 * p} or more")


def steps(stages: int, h: int, early: Sequence[int], late: Sequence[int]) -> tuple[Entry, ...]:
    """The list of the rank with the stages h and PP-1-h; `early` and `late`: the n microbatches of each.

        1   2a times       F0                        5   a times        B1 (F1 B0)
        2   h+1 times      F0 F1                     6   h+1 times      B1 B0, the second half of these as I
        3   a times        I1 W1 F1                  7   a times        W I0, W from the oldest I without one
        4   n-PP+h+1 times (F0 B1) (F1 B0)           8   h+1 times      W

    `0` is a microbatch at the early stage, `1` at the late one; a: ranks from here to the middle (the turn of
    the V). In a `Pair` (F B) one part hides the all-to-all of the other (halves.py); in the middle the first
    (F0 B1) is no pair, as a neighbour waits for F0. Bubble, F&B: time of a pair, B = I+W: (PP/2-1)·(F&B + B -
    3W) on the middle ranks if F = I >= W. Memory: two stages' parameters per rank, activations of PP + 1."""
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
