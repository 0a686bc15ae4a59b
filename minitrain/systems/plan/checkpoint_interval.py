"""How often to save: saves and lost work together cost least; and whose memory has whose state. No torch.

    E(τ) = M·e^(R/M)·(e^((τ+C)/M) - 1)   expected time for τ of training and its save, C, with failures at
                                         random, one in M on average, and a restart, R, after each
    waste = 1 - τ/E(τ)  ≈  C/τ + τ/2M    least, whatever R, at Young's sqrt(2CM), Daly's
            sqrt(2CM)·(1 + sqrt(C/2M)/3 + C/18M) - C (M from C = 2M on), exactly M·(1 + W(-e^(-1-C/M)))
Two levels: every n-th save goes to disk as well (D in all), the others to memory alone (C), which survives a
share p of the failures; the others, q = 1 - p, cost all since the last on disk, and a restart from there, S:
    E = (M/q + M·(e^(S/M) - 1))·(g(C)^(n-1)·g(D) - 1),   g(C) = 1 + q·(e^((τ+C)/M) - 1)/(1 - p + p·e^(-R/M))
    waste ≈ (C + (D-C)/n)/τ + (p + qn)·τ/2M        least at n = sqrt((D-C)·p / C·q), where it is
            sqrt(2Cp/M) + sqrt(2(D-C)q/M)          what each level would cost alone
CheckFreq asks for no M: the fewest steps between saves that keep a budget.
Gemini: a machine has its own state and those of the m - 1 before it in its ring, of m machines (the last of
m + N mod m) or all N. Lost is a state when m neighbours fail; groups are the best placement where m divides
N, else at most (2m-3)/C(N,m) below it.
Young 1974; Daly 2006; Vaidya 1998 (two levels); Moody et al. 2010 (SCR); Mohan et al. 2021 (CheckFreq), FAST;
Wang et al. 2023 (Gemini), SOSP. Differs: SCR may have more levels; CheckFreq also chooses between snapshots
on the GPU and the CPU; a level's lag until a save counts is left to the simulator, travel to checkpoint/.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil, expm1, floor, inf, log1p, sqrt
from typing import NamedTuple

from minitrain.ranks.checks import require_fractions, require_ints, require_nonnegative, require_positive
from minitrain.systems.simulate.failures import Level
from minitrain.systems.simulate.links import Number, divided


def young_s(save_s: float, mtbf_s: float) -> float:
    require_nonnegative(save_s=save_s)
    require_positive(mtbf_s=mtbf_s)
    return sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - save_s


def exact_s(save_s: float, mtbf_s: float) -> float:
    """The interval of least expected time: M·x with ln(1 - x) + x = -C/M, by halving."""
    require_nonnegative(save_s=save_s)
    require_positive(mtbf_s=mtbf_s)
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if log1p(-middle) + middle > -save_s / mtbf_s:
            low = middle
        else:
            high = middle
    return mtbf_s * high


def expected_s(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """E: of training for an interval, with its save and all that failures undo."""
    require_nonnegative(save_s=save_s, restart_s=restart_s)
    require_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    return mtbf_s * (1 + _expm1(restart_s / mtbf_s)) * _expm1((interval_s + save_s) / mtbf_s)


def waste(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """The expected share of time that is not useful."""
    return 1 - interval_s / expected_s(interval_s, save_s, mtbf_s, restart_s)


class TwoLevels(NamedTuple):
    interval_s: float
    every: int  # saves, one of them to disk


def two_levels(memory_save_s: float, disk_save_s: float, mtbf_s: float, survives: float) -> TwoLevels:
    """The first-order optimum; `survives` is the share of failures after which memory is still there."""
    require_positive(memory_save_s=memory_save_s, mtbf_s=mtbf_s)
    require_nonnegative(more_to_disk_s=disk_save_s - memory_save_s)
    require_fractions(survives=survives)
    more_s = disk_save_s - memory_save_s
    saves_s, undone = (lambda n: memory_save_s + more_s / n), (lambda n: survives + (1 - survives) * n)
    best = sqrt(more_s * survives / (memory_save_s * (1 - survives)))
    every = min({max(1, floor(best)), ceil(best) or 1}, key=lambda n: saves_s(n) * undone(n))
    return TwoLevels(sqrt(2 * mtbf_s * saves_s(every) / undone(every)), every)


def two_levels_waste(plan: TwoLevels, memory: Level, disk: Level, mtbf_s: float, survives: float) -> float:
    """The expected share of time that is not useful, from one save on disk to the next. Seen from the disk:
    failures M/q apart, and 1/g the chance that a segment ends before one of them, however often it restarts
    from memory."""
    undone = 1 - survives
    again = undone / (1 + survives * expm1(-memory.restart_s / mtbf_s))
    growth = lambda save_s: log1p(again * _expm1((plan.interval_s + save_s) / mtbf_s))
    total = (plan.every - 1) * growth(memory.stall_s) + growth(disk.stall_s)
    expected = mtbf_s * (1 / undone + _expm1(disk.restart_s / mtbf_s)) * _expm1(total)
    return 1 - plan.every * plan.interval_s / expected


def best_two_levels(memory: Level, disk: Level, mtbf_s: float, survives: float) -> TwoLevels:
    """The plan of least expected waste, searched for around the first-order one."""
    start = two_levels(memory.stall_s, disk.stall_s, mtbf_s, survives)

    def of(every: int) -> tuple[float, TwoLevels]:
        cost = lambda s: two_levels_waste(TwoLevels(s, every), memory, disk, mtbf_s, survives)
        interval_s = _lowest(cost, start.interval_s / 10, 10 * start.interval_s)
        return cost(interval_s), TwoLevels(interval_s, every)

    best = of(start.every)
    for step in (1, -1):
        while best[1].every + step >= 1 and (other := of(best[1].every + step)) < best:
            best = other
    return best[1]


def _lowest(cost: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley, by golden sections."""
    golden = (sqrt(5) - 1) / 2
    while high - low > 1e-7 * high:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    return (low + high) / 2


def checkfreq_steps(step_s: Number, update_s: Number, snapshot_s: Number, persist_s: Number, budget=0.035):
    """The fewest steps between saves, of which one is under way at a time, with stalls in the budget. A
    snapshot hides behind the forward and backward that follow, all of a step but its update."""
    require_nonnegative(update_s=update_s, snapshot_s=snapshot_s, persist_s=persist_s)
    require_positive(budget=budget, forward_and_backward_s=step_s - update_s)
    stall_s = max(0, snapshot_s - (step_s - update_s))
    for_one = ceil(divided(snapshot_s + persist_s - stall_s, step_s))
    return max(1, for_one, ceil(divided(stall_s, budget * step_s)))


def _expm1(x: float) -> float:
    return expm1(x) if x < 700 else inf  # such a job has no end


def groups(machines: int, replicas: int) -> list[range]:
    """Gemini's rings: of `replicas` machines each; what is left over joins the last."""
    starts = range(0, len(ring(machines, replicas)[0]) - replicas + 1, replicas)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], machines])]


def ring(machines: int, replicas: int) -> list[range]:
    """All machines in one."""
    require_ints(1, 1 << 20, machines=machines)
    require_ints(1, machines, replicas=replicas)
    return [range(machines)]


def holders(rings: Iterable[Sequence[int]], replicas: int) -> dict[int, frozenset[int]]:
    """The machines that have each machine's state: itself and the next in its ring."""
    require_ints(1, 1 << 20, replicas=replicas)
    return {
        machine: frozenset(members[(i + step) % len(members)] for step in range(replicas))
        for members in rings
        for i, machine in enumerate(members)
    }


def recovers(placement: dict[int, frozenset[int]], failed: Collection[int]) -> bool:
    """Whether each state has a holder that did not fail."""
    return all(not held <= set(failed) for held in placement.values())


class Protection(NamedTuple):  # bytes a machine
    stored: Number  # beside its own state
    sent: Number  # at a save
    received: Number  # to have a lost state again


def replicas_cost(state_bytes: Number, replicas: int) -> Protection:
    """Of whole copies on `replicas` - 1 other machines."""
    require_ints(1, 1 << 20, replicas=replicas)
    require_nonnegative(state_bytes=state_bytes)
    return Protection((replicas - 1) * state_bytes, (replicas - 1) * state_bytes, state_bytes)
