"""TriRace: where weights may be old, communication gets out of the way. Two small simulations, no torch.

**One-way messages.** Activations go up the stages and gradients down. Sent and received in one call
(Megatron-LM's send_forward_recv_backward), a rank waits until both have come, though what it does next may
need neither:

    paired     F3 [up 3 | down 1] B1 [down 1 | up 4] F4 ..   a period of F + B + 2c for messages that take c
    one-way    F3 B1 F4 ..   each message leaves as soon as it is made; a rank waits for what it uses alone

One-way: F + B + 2c(p-1)/p, for a microbatch goes down the ranks and back while p others pass; with twice as
many forwards ahead, which an asynchronous pipeline may afford, F + B. Paired, as many make ranks take turns.
**Late updates.** The gradient of step t, summed over data-parallel ranks, is used when it has come, at most
`bound` steps later. A step takes compute + reduce with bound 0, else max(compute, reduce).
Guo et al. (TriRace), as the survey of Duan et al. 2024, arXiv:2407.20018, section 7.2.3, describes it.
Differs: a model with equal stages, on links that are never full; messages go in the order in which they are
made, theirs by critical path.
"""

from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.schedule import Action, B, F, Schedule, check
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.pipeline.simulate import Costs, Time, simulate
from minitrain.ranks.checks import require_nonnegative, require_positive_ints
from minitrain.systems.plan.dynapipe import Call, blocking


def one_f_one_b_ahead(p: int, m: int, ahead: int) -> Schedule:
    """1F1B with `ahead`·(p-r-1) forwards ahead on rank r; 1 is the usual."""
    forwards, backwards = ([[make(r, i) for i in range(m)] for r in range(p)] for make in (F, B))
    lists = tuple(alternate(forwards[r], backwards[r], ahead * (p - r - 1)) for r in range(p))
    return check(Schedule(f"1F1B, p={p}, m={m}, {ahead} times ahead", lists, p, m))


def paired_calls(schedule: Schedule, rank: int) -> list[Action | Call]:
    """As Megatron-LM calls: what goes to a neighbour and what comes from it next are in one call."""
    entries, last = schedule.ranks[rank], schedule.stages - 1

    def needed(action: Action) -> Call:
        return tuple(before for before in schedule.needs[action] if before.stage != action.stage)

    calls = [needed(entries[0])]
    for here, after in zip(entries, (*entries[1:], None)):
        sends = (here,) if (rank < last if here.kind == "F" else rank > 0) else ()
        receives = needed(after) if after else ()
        both = after and here.kind != after.kind  # with the same neighbour
        calls += [here, *([sends + receives] if both else [sends, receives])]
    return [call for call in calls if call]


def period(p: int, forward: Time, backward: Time, message: Time, paired: bool, ahead: int = 1) -> Time:
    """Time from a microbatch to the next in the steady state, exact if the times are."""
    require_positive_ints(1 << 10, p=p, ahead=ahead)
    require_nonnegative(forward=forward, backward=backward, message=message)
    m = 12 * p * ahead
    schedule = one_f_one_b_ahead(p, m, ahead)
    if paired:
        calls = [paired_calls(schedule, rank) for rank in range(p)]
        ends, left = blocking(calls, {"F": forward, "B": backward}, message)
        if any(left):
            raise ValueError(f"{schedule.name}: ranks wait in calls for one another; send one-way")
        done = ends[0]
    else:
        spans = simulate(schedule, Costs(F=forward, B=backward, send=message)).spans[0]
        done = {span.entry: span.end for span in spans}
    first, last = m // 3, m // 3 + 2 * p * ahead  # whole rounds: a round may be uneven inside
    return Fraction(done[B(0, last)] - done[B(0, first)]) / (last - first)


class Delayed(NamedTuple):
    period: Time
    latest: int  # steps between the gradient that came last and the update that used it


def delayed(steps: int, compute: Time, reduce: Time, bound: int) -> Delayed:
    """Step t waits until the sums of all but the last `bound` gradients have come; sums go in turn."""
    require_positive_ints(steps=steps)
    require_nonnegative(compute=compute, reduce=reduce, bound=bound)
    now, summed, applied, latest, begun = 0, [], 0, 0, []
    for t in range(steps):
        if t - applied > bound:
            now = max(now, summed[t - bound - 1])
        while applied < t and summed[applied] <= now:  # what has come by now is used at once
            latest = max(latest, t - 1 - applied)
            applied += 1
        assert t - applied <= bound
        begun.append(now)
        now += compute
        summed.append(max(now, summed[-1] if summed else 0) + reduce)
    half = steps // 2
    return Delayed(Fraction(begun[-1] - begun[half]) / max(steps - 1 - half, 1), latest)
