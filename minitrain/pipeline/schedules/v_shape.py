"""V-shaped schedules: two stages a rank, folded so that early and late ones meet, and a block of four offsets that sets the memory.

    stage on rank, p=3     0 1 2 | 2 1 0           rank r has the stages r and 2p-1-r: what is held long, and what is held briefly

Every microbatch does the same on a rank, 6 units of time after the one before (two stages, each F, I and W, all of one unit). So the
times of F and I in microbatch 0, by rank, are the whole schedule: the block. What a rank holds is the time from F to I of its two
stages together (their lifespans) over 6, whatever the number of microbatches. In 1F1B rank 0 has the longest life and the last rank
the shortest; in a V each rank has a long and a short one, the same in sum: p times the four steps from rank to rank. Small steps hold
little, and large ones leave time to fill the pipeline:

              F down, F up, I down, I up: units from rank to rank       peak / microbatches        bubble in units, of B = 6(p-1)
    v_min     1, 1, 1, 1                                                floor((p+4)/3)             2/3 B - 1, or + 1 if 3 divides p
    v_half    2, 1, 2, 1                                                floor((p+2)/2)             1/2 B, or - 1 if p is odd
    zb_v      4, 2, 4, 2                                                p                          0

1F1B on the same ranks has peak p and bubble B = (p-1)·(TF + TI + TW) with the times of a whole rank, two units each. Two microbatches
of the same rank must not meet in a unit, so the four offsets differ modulo 6: for v_min if 3 divides p, and for v_half if p is even,
backwards start 2 or 3 units later.

`squeezed` makes lists of a block: each rank keeps to the block's order of F and I, starts each as soon as it can, and does a W when it
would wait or is full. In zb_v a rank that waits before its first backward runs forwards of its early stage ahead of their turn.

Bubble: `zero_bubble.bubble`, from a rank's first action to its last; from m = 2p-1 on for zb_v, and p for the others. Fewer
microbatches are valid too and hold less. Other times than equal ones: the lists stay valid, `simulate` says what they cost.
Memory: `schedule.peak` counts activations of a stage, two of which are one of 1F1B's. Sends twice the messages of 1F1B: 2p-1 boundaries
less the one at the turn. For p = 1 the bubble is 0. Raises ValueError in one line for p or m below 1.
Qi et al. 2024, arXiv:2405.15362 (Pipeline Parallelism with Controllable Memory), section 3; ZB-V also Qi et al. 2023, arXiv:2401.10241,
section 6. The offsets of v_min and v_half, and the peaks, are those that the authors publish with their code. Differs: they give bubbles
of about 2/3 and 1/2 of B and move actions of warm-up and draining forward one by one; here `squeezed` is all, and the remainders above
are what it has in the simulator, for p from 2 to 16. The offsets of zb_v are ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from minitrain.pipeline.schedule import Action, F, I, Schedule, W, check
from minitrain.pipeline.schedules.one_direction import check_sizes

Block = Callable[[int], tuple[int, int, int, int]]
PERIOD = 6


def v_min(p: int, m: int) -> Schedule:
    """A third of 1F1B's memory, two thirds of its bubble."""
    check_sizes("v_min", p=p, m=m)
    later = 2 if p % 3 == 0 else 0
    return squeezed(
        f"V-Min, p={p}, m={m}",
        p,
        m,
        lambda r: (r, 2 * p - 1 - r, 2 * p + r + later, 4 * p - 1 - r + later),
        2 * ((p + 4) // 3),
    )


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's memory, half of its bubble."""
    check_sizes("v_half", p=p, m=m)
    later = 3 if p % 2 == 0 else 0
    return squeezed(
        f"V-Half, p={p}, m={m}",
        p,
        m,
        lambda r: (2 * r, 3 * p - 2 - r, 3 * p - 1 + 2 * r + later, 6 * p - 2 - r + later),
        2 * ((p + 2) // 2),
    )


def zb_v(p: int, m: int) -> Schedule:
    """1F1B's memory, no bubble."""
    check_sizes("zb_v", p=p, m=m)
    return squeezed(
        f"ZB-V, p={p}, m={m}",
        p,
        m,
        lambda r: (4 * r, 6 * p - 5 - 2 * r, 6 * p - 4 + 4 * r, 12 * p - 9 - 2 * r),
        2 * p,
        early=True,
    )


def rank_of(stage: int, p: int) -> int:
    return min(stage, 2 * p - 1 - stage)


def block_order(p: int, m: int, block: Block, rank: int) -> list[Action]:
    """F and I of a rank in the order of the block, a copy of it every 6 units."""
    early, late = rank, 2 * p - 1 - rank
    at = {}
    for i in range(m):
        for start, action in zip(block(rank), (F(early, i), F(late, i), I(late, i), I(early, i))):
            assert start + PERIOD * i not in at, "the block's offsets must differ modulo 6"
            at[start + PERIOD * i] = action
    return [at[start] for start in sorted(at)]


def squeezed(name: str, p: int, m: int, block: Block, limit: int, early: bool = False) -> Schedule:
    """The block's order, each action as soon as it can be; W where a rank would wait or holds `limit` activations of a stage."""
    ranks = [_Rank(deque(block_order(p, m, block, rank))) for rank in range(p)]
    done: set[Action] = set()
    while any(rank.order or rank.later for rank in ranks):
        now = [rank.next(done, 2 * p, limit, early) for rank in ranks]  # what each does in this unit of time
        assert any(now), f"{name}: the block's order is stuck with limit={limit}"
        done.update(action for action in now if action)
    return check(Schedule(name, tuple(tuple(rank.list) for rank in ranks), 2 * p, m))


class _Rank:
    def __init__(self, order: deque[Action]):
        self.order, self.later, self.list, self.held, self.turned = order, deque(), [], 0, False

    def next(self, done: set[Action], stages: int, limit: int, early: bool) -> Action | None:
        action = self.choose(done, stages, limit, early)
        if action is not None:
            (self.later if action.kind == "W" else self.order).remove(action)
            self.list.append(action)
            self.held += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                self.turned = True
                self.later.append(W(*action[1:]))
        return action

    def choose(self, done: set[Action], stages: int, limit: int, early: bool) -> Action | None:
        """What the order has next, or else a W, or else, before the first backward, a forward ahead of its turn."""
        if (
            self.order
            and _can(self.order[0], done, stages)
            and (self.order[0].kind == "I" or self.held < limit)
        ):
            return self.order[0]
        if self.later:
            return self.later[0]
        if early and not self.turned and self.held + 2 <= limit:  # room stays for the one whose turn it is
            ahead = next(
                (action for action in self.order if action.kind == "F" and action.stage < stages // 2), None
            )
            return ahead if ahead is not None and _can(ahead, done, stages) else None
        return None


def _can(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, i = action
    if kind == "F":
        return stage == 0 or F(stage - 1, i) in done
    return F(stage, i) in done and (stage == stages - 1 or I(stage + 1, i) in done)
