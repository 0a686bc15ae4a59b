"""Chimera: two pipelines in opposite directions share the ranks; each fills the other's bubbles.

    p=4 m=4     slot  0    1    2    3    4    5    6    7    8    9
    rank 0           F0.0  ..  F0.2 F3.1 B3.1 F3.3 B3.3 B0.0  ..  B0.2          "F3.1": stage 3, microbatch 1
    rank 1            ..  F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2  ..           (2 and 3 are the mirror image)

Stage s is on rank s for even microbatches, which go down, and on rank p-1-s for odd ones, which go up. In
slots as long as F and as B the j-th microbatch of a direction has stage s forwards in slot s + 2j and
backwards in slot 2p - 1 - s + 2j; units of p microbatches follow every 2p slots. Only the order is kept.
Bubble of K units: p-2 forwards of idle time if B = F, (K+1)·(p-2) if B = 2F. Memory: two stages per rank;
activations of p/2 + 1 stages at the ends, up to p in the middle. Sends 2(p-1) messages per microbatch and,
once per step, all gradients between ranks r and p-1-r.
Li and Hoefler 2021, arXiv:2107.06925, section 3, Table 2, whose share for B = 2F is that of one unit.
Differs: no forward doubling or backward halving, no more than two pipelines.
"""

from collections.abc import Callable

from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import check_even
from minitrain.ranks.checks import require_positive_ints


def chimera(p: int, m: int) -> Schedule:
    """Even microbatches start on rank 0, odd ones on rank p-1."""
    require_positive_ints(p=p, m=m)
    check_even("chimera", "two pipelines meet between two ranks", "p", p, "ranks")
    check_even("chimera", "half of them goes each way", "m", m, "microbatches")
    rank = lambda stage, i: p - 1 - stage if i % 2 else stage
    ranks = in_slots(p, p, m, rank, lambda i: 2 * p * (i // p) + 2 * (i % p // 2))
    return Schedule(f"Chimera, p={p}, m={m}", ranks, p, m)


def in_slots(p: int, stages: int, m: int, rank: Callable, begin: Callable) -> list[list[Action]]:
    """Lists by slot: stage s of microbatch i on rank(s, i), F in slot begin(i) + s, B as far from the end."""
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for i in range(m):
        for s in range(stages):
            slots[rank(s, i)] += [(begin(i) + s, F(s, i)), (begin(i) + 2 * stages - 1 - s, B(s, i))]
    return [[action for _, action in sorted(own)] for own in slots]
