"""Zero bubble: a backward in two halves, I and W, of which only I is waited for; lines and Vs. No torch.

    ZB-H1, p=3, m=5     F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4     (1F1B waits for 6, this for 2)
                        .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
                        .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

            forwards ahead    W held back   bubble                           peak on every rank    m at least
    1F1B    p - r - 1         -             (p-1)·(TF + TI + TW)             p - r                 p
    ZB-H1   p - r - 1         r             (p-1)·(TF + TI - TW)             p                     p
    ZB-H2   2(p - r - 1)      2r            (p-1)·max(0, TF + TI - 2TW)      2p - 1                2p - 1

For rank r and TW <= TF: a longer W hides no more than a forward. `bubble` is idle time in a rank's own span.
With fewer microbatches lists hold less and wait longer. An activation counts whole until its W. Sends what
1F1B, or its interleaved form, sends; V shapes (`block_of`) nearly twice the messages of 1F1B.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, sections 2, 3 and 6, table 2, whose B and W are our I and W;
Qi et al. 2024 (V shapes), arXiv:2405.15362, section 3, and its code for the offsets of v_min and v_half;
torch's ScheduleInterleavedZeroBubble. Differs: `squeezed` alone follows the block; offsets of zb_v are ours.
"""

from collections import deque
from collections.abc import Callable

from minitrain.pipeline.schedule import Action, F, I, Schedule, W, check
from minitrain.pipeline.schedules.one_direction import depth_first, on_rank
from minitrain.pipeline.simulate import Costs, Simulation, Time, play
from minitrain.ranks.checks import require_ints, require_one_of, require_positive_ints


def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble where all times are equal, in 1F1B's memory."""
    return _in_a_line("ZB-H1", p, m, 1)


def zb_h2(p: int, m: int) -> Schedule:
    """No bubble where all times are equal, in twice the memory."""
    return _in_a_line("ZB-H2", p, m, 2)


def _in_a_line(name: str, p: int, m: int, steps: int) -> Schedule:
    require_positive_ints(p=p, m=m)
    lists = [on_rank(r, p, 1, [(0, i) for i in range(m)], I) for r in range(p)]
    ranks = [delayed(*own, ahead=steps * (p - r - 1), w_delay=steps * r) for r, own in enumerate(lists)]
    return Schedule(f"{name}, p={p}, m={m}", ranks, p, m)


def zb_interleaved(p: int, m: int, v: int) -> Schedule:
    """ZB-H1 with v stages per rank, every p-th one: 1/v of its bubble, at most v·p activations of a stage."""
    order = depth_first("zb_interleaved", p, m, v)
    ranks = [delayed(*on_rank(r, p, v, order, I), ahead=v * p - r - 1, w_delay=r) for r in range(p)]
    return Schedule(f"interleaved zero bubble, p={p}, m={m}, v={v}", ranks, p * v, m)


def delayed(forwards: list[Action], backwards: list[Action], ahead: int, w_delay: int) -> list[Action]:
    """`ahead` forwards; then F, I and the W of the I `w_delay` places back, in turn; then the other W."""
    require_ints(ahead=ahead, w_delay=w_delay)
    entries = forwards[:ahead]
    for k, backward in enumerate(backwards):
        entries += [*forwards[ahead + k : ahead + k + 1], backward]
        if k >= w_delay:
            entries.append(W(*backwards[k - w_delay][1:]))
    return entries + [W(*backward[1:]) for backward in backwards[max(0, len(backwards) - w_delay) :]]


def bubble(simulation: Simulation) -> Time:
    """Idle time in a rank's own span, from its first action to its last: that of the rank with most."""
    ranks = enumerate(simulation.spans)
    return max(spans[-1].end - spans[0].start - simulation.busy(rank) for rank, spans in ranks)


Block = Callable[[int], tuple[int, int, int, int]]
PERIOD = 6


def v_min(p: int, m: int) -> Schedule:
    """A third of 1F1B's memory, two thirds of its bubble."""
    return squeezed("V-Min", p, m, block_of("v_min", p), limit=2 * ((p + 4) // 3))


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's memory, half of its bubble."""
    return squeezed("V-Half", p, m, block_of("v_half", p), limit=2 * ((p + 2) // 2))


def zb_v(p: int, m: int) -> Schedule:
    """1F1B's memory, no bubble."""
    return squeezed("ZB-V", p, m, block_of("zb_v", p), limit=2 * p, early=True)


def block_of(shape: str, p: int) -> Block:
    """When rank r starts F of stage r, F of stage 2p-1-r, and I of both in turn, for microbatch 0.

                  F down, F up, I down, I up     peak / microbatches     bubble in units, of B = 6(p-1)
        v_min     1, 1, 1, 1                     floor((p+4)/3)          2/3 B - 1, or + 1 if 3 divides p
        v_half    2, 1, 2, 1                     floor((p+2)/2)          1/2 B, or - 1 if p is odd
        zb_v      4, 2, 4, 2                     p                       0 (1F1B: peak p, bubble B)

    Two stages per rank, folded: r (held long) and 2p-1-r (held briefly). Every microbatch does the same, 6
    units after the one before (F, I and W of one unit), so this block is the schedule. A rank holds the time
    from F to I of both stages, over 6: small steps from rank to rank hold little, large ones leave time to
    fill the pipeline. Bubble for m >= p (zb_v: 2p-1), p from 2 to 16."""
    require_positive_ints(p=p)
    require_one_of(("v_min", "v_half", "zb_v"), shape=shape)
    gap, wide = 2 if p % 3 == 0 else 0, 3 if p % 2 == 0 else 0  # so that no two actions need the same unit
    return {
        "v_min": lambda r: (r, 2 * p - 1 - r, 2 * p + r + gap, 4 * p - 1 - r + gap),
        "v_half": lambda r: (2 * r, 3 * p - 2 - r, 3 * p - 1 + 2 * r + wide, 6 * p - 2 - r + wide),
        "zb_v": lambda r: (4 * r, 6 * p - 5 - 2 * r, 6 * p - 4 + 4 * r, 12 * p - 9 - 2 * r),
    }[shape]


def rank_of(stage: int, p: int) -> int:
    require_positive_ints(p=p)
    require_ints(0, 2 * p - 1, stage=stage)
    return min(stage, 2 * p - 1 - stage)


def block_order(p: int, m: int, block: Block, rank: int) -> list[Action]:
    """F and I of a rank in the order of the block, a copy of it every 6 units."""
    early, late = rank, 2 * p - 1 - rank
    kinds = (F, early), (F, late), (I, late), (I, early)
    starts = [(start, *kind) for start, kind in zip(block(rank), kinds)]
    every = [(start + PERIOD * i, kind(stage, i)) for start, kind, stage in starts for i in range(m)]
    return [action for _, action in sorted(every)]


def squeezed(shape: str, p: int, m: int, block: Block, limit: int, early: bool = False) -> Schedule:
    """The block's order, each action as soon as it can be; W where a rank would wait or is full (`limit`).
    With `early` a rank that waits before its first backward runs forwards of its early stage ahead."""
    require_positive_ints(m=m)
    orders, name = [deque(block_order(p, m, block, rank)) for rank in range(p)], f"{shape}, p={p}, m={m}"
    needs, later = Schedule(name, orders, 2 * p, m).needs, [deque() for _ in range(p)]
    held, begun = [0] * p, [False] * p  # activations; the first backward

    def choose(rank: int, now: Time, ended: dict[Action, Time]) -> Action | None:
        order, action = orders[rank], None
        done = lambda before: before in ended and ended[before] <= now
        can = lambda action: all(map(done, needs[action]))
        if order and can(order[0]) and (order[0].kind == "I" or held[rank] < limit):
            action = order[0]
        elif later[rank]:
            action = later[rank][0]
        elif early and not begun[rank] and held[rank] + 2 <= limit:
            ahead = [action for action in order if action.kind == "F" and action.stage < p][:1]
            action = next(filter(can, ahead), None)  # room stays for the one whose turn it is
        if action is not None:
            (later if action.kind == "W" else orders)[rank].remove(action)
            held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                begun[rank] = True
                later[rank].append(W(*action[1:]))
        return action

    ranks, _ = play(p, choose, Costs(), lambda action: ())
    return check(Schedule(name, ranks, 2 * p, m))
