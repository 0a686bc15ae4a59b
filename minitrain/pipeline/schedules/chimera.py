"""Chimera: two pipelines in opposite directions share the ranks, so that each fills the bubbles of the other.

    stage s stands twice: on rank s for the even microbatches, which go down, and on rank p-1-s for the odd ones, which go up

    p=4 m=4     slot  0    1    2    3    4    5    6    7    8    9
    rank 0           F0.0  ..  F0.2 F3.1 B3.1 F3.3 B3.3 B0.0  ..  B0.2          "F3.1": stage 3, microbatch 1
    rank 1            ..  F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2  ..
    rank 2            ..  F1.1 F2.0 F1.3 F2.2 B2.0 B1.1 B2.2 B1.3  ..
    rank 3           F0.1  ..  F0.3 F3.0 B3.0 F3.2 B3.2 B0.1  ..  B0.3

The rule is one line. In slots as long as a forward, and as a backward too, the j-th microbatch of a direction has stage s forwards in
slot s + 2j and backwards in slot 2p - 1 - s + 2j. So a rank's forwards down and backwards up are in slots of its own parity, the other
two in those between; they never meet, as p is even. p microbatches are one unit. Units are concatenated, one every 2p slots: the next
one's first forwards fall into the slots at the end that were free (the paper's direct concatenation). Only the order is kept.

Bubble, K units, m = K·p: p-2 forwards of idle time if B = F, share (p-2)/(2m+p-2) = 1/5 for p=m=4; 1F1B has 2(p-1). If B = 2F it is
(K+1)·(p-2): the forwards of a unit are shorter than the backwards that they have to fill. For one unit that is (p-2)/(3m/2+p-2).
A last unit of only n microbatches takes 2p + n - 2 slots: choose m a multiple of p.
Memory: weights, gradients and optimizer state of two stages a rank, twice those of 1F1B. Activations p/2 + 1 stages at the ends, up to p
in the middle, evener than 1F1B's p to 1 and the same for any K.
Sends per microbatch 2(p-1) messages, as 1F1B, and once a step the gradients of every stage between the ranks r and p-1-r (shared.py).
Raises ValueError in one line for an odd p or m, and for sizes below 1.
Li and Hoefler 2021, arXiv:2107.06925, section 3, Table 2. Differs: the paper writes the share for B = 2F for any number of microbatches,
the lists have it for one unit, see above. Not here: forward doubling and backward halving, which take out what B = 2F leaves between
units, for twice the activations or half the microbatch; more than two pipelines.
"""

from __future__ import annotations

from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import check_sizes


def chimera(p: int, m: int) -> Schedule:
    """Even microbatches start on rank 0, odd ones on rank p-1; each rank does what it has in the order of the slots."""
    check_sizes("chimera", p=p, m=m)
    if p % 2:
        raise ValueError(
            f"chimera: p={p} ranks; two pipelines meet between two ranks, use an even number, {p - 1 or 2} or {p + 1}"
        )
    if m % 2:
        raise ValueError(
            f"chimera: m={m} microbatches; half of them goes each way, use an even number, {m - 1 or 2} or {m + 1}"
        )
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for i in range(m):
        unit, k = divmod(i, p)
        j, goes_up = divmod(k, 2)
        begin = 2 * p * unit + 2 * j
        for s in range(p):
            slots[p - 1 - s if goes_up else s] += [(begin + s, F(s, i)), (begin + 2 * p - 1 - s, B(s, i))]
    return Schedule(
        f"Chimera, p={p}, m={m}", tuple(tuple(action for _, action in sorted(own)) for own in slots), p, m
    )
