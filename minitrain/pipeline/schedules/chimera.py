"""Chimera and Hanayo: forwards on their way back meet backwards, and fill each other's bubbles. No torch.

    Chimera, p=4 m=4: two pipelines in opposite directions share the ranks      "F3.1": stage 3, microbatch 1
    rank 0           F0.0  ..  F0.2 F3.1 B3.1 F3.3 B3.3 B0.0  ..  B0.2
    rank 1            ..  F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2  ..           (2 and 3 are the mirror image)

    Hanayo, p=3, one wave of 6 stages, m=3: the model is folded over the ranks, no weights stand twice
    rank 0           F0.0  ..  F0.1  ..  F0.2 F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B0.0  ..  B0.1  ..  B0.2
    rank 1            ..  F1.0  ..  F1.1 F4.0 F1.2 F4.1 B4.0 F4.2 B4.1 B1.0 B4.2 B1.1  ..  B1.2  ..
    rank 2            ..   ..  F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 B2.0 B3.1 B2.1 B3.2 B2.2  ..   ..

One rule for both, in slots as long as F and as B (only the order is kept): what begins in slot b has stage s
of S forwards in slot b + s and backwards in slot b + 2S - 1 - s.
Li and Hoefler 2021 (Chimera), arXiv:2107.06925, section 3, Table 2, whose share for B = 2F is that of one
unit; Liu et al. 2023 (Hanayo), arXiv:2308.15762, section 3. Differs: no forward doubling or backward halving,
no more than two pipelines; the rule ignores the time of messages.
"""

from collections.abc import Callable

from minitrain.pipeline.schedule import Action, B, F, Schedule
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
    """Lists by slot: stage s of microbatch i on rank(s, i), F in slot begin(i) + s, B as far from the end."""
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for i in range(m):
        for s in range(stages):
            slots[rank(s, i)] += [(begin(i) + s, F(s, i)), (begin(i) + 2 * stages - 1 - s, B(s, i))]
    return [[action for _, action in sorted(own)] for own in slots]
