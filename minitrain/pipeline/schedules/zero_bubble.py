"""Zero bubble: a backward in two halves, I and W, of which only I is waited for. ZB-H1 and ZB-H2. No torch.

    ZB-H1, p=3, m=5     F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4     (1F1B waits for 6, this for 2)
                        .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
                        .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

            forwards ahead    W held back   bubble                           peak on every rank    m at least
    1F1B    p - r - 1         -             (p-1)·(TF + TI + TW)             p - r                 p
    ZB-H1   p - r - 1         r             (p-1)·(TF + TI - TW)             p                     p
    ZB-H2   2(p - r - 1)      2r            (p-1)·max(0, TF + TI - 2TW)      2p - 1                2p - 1

For rank r and TW <= TF: a longer W hides no more than a forward. `bubble` is idle time in a rank's own span.
With fewer microbatches lists hold less and wait longer. An activation counts whole until its W. Sends what
1F1B, or its interleaved form, sends.
Qi et al. 2023 (Zero Bubble), arXiv:2401.10241, sections 2 and 3, table 2, whose B and W are our I and W.
`zb_interleaved` is torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
"""

from minitrain.pipeline.schedule import Action, F, I, Schedule, W
from minitrain.pipeline.schedules.one_direction import depth_first
from minitrain.pipeline.simulate import Simulation, Time
from minitrain.ranks.checks import require_ints, require_positive_ints


def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble where all times are equal, in 1F1B's memory."""
    require_positive_ints(p=p, m=m)
    ranks = [delayed(*_straight(r, m), ahead=p - r - 1, w_delay=r) for r in range(p)]
    return Schedule(f"ZB-H1, p={p}, m={m}", ranks, p, m)


def zb_h2(p: int, m: int) -> Schedule:
    """No bubble where all times are equal, in twice the memory."""
    require_positive_ints(p=p, m=m)
    ranks = [delayed(*_straight(r, m), ahead=2 * (p - r - 1), w_delay=2 * r) for r in range(p)]
    return Schedule(f"ZB-H2, p={p}, m={m}", ranks, p, m)


def zb_interleaved(p: int, m: int, v: int) -> Schedule:
    """ZB-H1 with v stages per rank, every p-th one: 1/v of its bubble, at most v·p activations of a stage."""
    order, ranks = depth_first("zb_interleaved", p, m, v), []
    for r in range(p):
        forwards = [F(c * p + r, i) for c, i in order]
        backwards = [I((v - 1 - c) * p + r, i) for c, i in order]
        ranks.append(delayed(forwards, backwards, ahead=(v - 1) * p + p - r - 1, w_delay=r))
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


def _straight(stage: int, m: int) -> tuple[list[Action], list[Action]]:
    return [F(stage, i) for i in range(m)], [I(stage, i) for i in range(m)]
