"""Hanayo: the model is folded over the ranks like a wave, so that both ends are near and no weights stand twice.

    p=3, one wave: 6 stages in V order          rank 0 has stages 0 and 5, rank 1 has 1 and 4, rank 2 has 2 and 3

    m=3         slot  0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15
    rank 0           F0.0  ..  F0.1  ..  F0.2 F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B0.0  ..  B0.1  ..  B0.2
    rank 1            ..  F1.0  ..  F1.1 F4.0 F1.2 F4.1 B4.0 F4.2 B4.1 B1.0 B4.2 B1.1  ..  B1.2  ..
    rank 2            ..   ..  F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 B2.0 B3.1 B2.1 B3.2 B2.2  ..   ..

It is Chimera cut in half and unrolled: where Chimera's pipelines pass each other, Hanayo's one pipeline turns and comes back, with each
stage half as large. More waves go down and up more often through stages of 1/(2W) of a rank's layers; a turn stays on its rank.
The lists come from a rule, not from a search: of S = 2·W·p stages in slots as long as one stage forwards or backwards, microbatch j of
a group of p has stage s forwards in slot s + 2j and backwards in slot 2S - 1 - s + 2j. On the way down a rank's slots have one parity,
on the way up the other, and backwards the two change places, so nothing meets; the next group of p comes 2S slots later and fills up
what is free at the end. Only the order is kept.

Bubble if B = F: 2(p-1) slots, the share (p-1)/(2·m·W+p-1) for m a multiple of p; for m = p that is (p-1)/(2·p·W+p-1). If B = 2F and
m = p the idle time is 4(p-1) forwards of a stage. A last group of only n microbatches takes 2S + 2(n-1) slots all the same.
Memory: parameters once. Activations (2W-1)·p + r + 1 stages on rank r, each 1/(2W) of a rank's layers: at most p microbatches' worth,
the most on the rank with the turn.
Sends 4·W·(p-1) messages a microbatch, 2W times those of 1F1B. No gradients to add between ranks.
Raises ValueError in one line for p, m or waves below 1.
Liu et al. 2023, arXiv:2308.15762, section 3. Differs: the paper's bubble has a term for the time of messages, here simulate.py adds it
(`Costs(send=…)`), and the rule knows nothing of it: where a message takes long another order can be better.
"""

from __future__ import annotations

from minitrain.pipeline.schedule import Action, B, F, Schedule
from minitrain.pipeline.schedules.one_direction import check_sizes


def hanayo(p: int, m: int, waves: int) -> Schedule:
    """Stage s is on rank s % p on the way down, on p-1 - s % p on the way up; each rank does what it has in the order of the slots."""
    check_sizes("hanayo", p=p, m=m, waves=waves)
    stages = 2 * waves * p
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for i in range(m):
        group, j = divmod(i, p)
        begin = 2 * stages * group + 2 * j
        for s in range(stages):
            leg, r = divmod(s, p)
            slots[p - 1 - r if leg % 2 else r] += [
                (begin + s, F(s, i)),
                (begin + 2 * stages - 1 - s, B(s, i)),
            ]
    return Schedule(
        f"Hanayo, p={p}, m={m}, {waves} {'wave' if waves == 1 else 'waves'}",
        tuple(tuple(action for _, action in sorted(own)) for own in slots),
        stages,
        m,
    )
