"""Which ranks hold which experts: planners on one model of a layer's time. No torch.

    counts[r][e]   rows that rank r has for expert e         holders[e]   its ranks, the owner first

    seconds = 3 · rows of the busiest rank · compute         three products of forward and backward
            + 4 · rows of the busiest link · move            four all-to-alls
            + 2 · experts of the busiest link · carry        copies there, gradients back (He et al., 4)

A rank with a copy keeps its rows; others send to the owner. Of counts ((6, 2), (4, 0)) the owners compute 10
and 2 rows, and 4 and 2 arrive; with expert 0 copied, holders ((0, 1), (1,)), 6 and 6, and 0 and 2.

He et al. 2022 (FasterMoE), PPoPP; Wang et al. 2023 (Prophet), CLUSTER; Nie et al. 2023 (FlexMoE),
arXiv:2304.03946. Of equal choices the first wins. systems/moe/balance.py runs what is decided;
expert_pools.py has the planners that decide before loads are known. Differs: loads are given, not predicted
or profiled; `seconds` hides nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, product
from typing import NamedTuple

from minitrain.plan.simulate.machines import Machine
from minitrain.ranks.checks import MOST, require_ints, require_nonempty, require_positive_ints

Counts = Sequence[Sequence[int]]
Holders = tuple[tuple[int, ...], ...]


def owners(experts: int, ranks: int) -> Holders:
    """No copies: expert e on rank e // (experts / ranks)."""
    require_ints(1, MOST, experts=experts, ranks=ranks)
    if experts % ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks; each rank owns as many, so choose a divisor")
    return tuple((e // (experts // ranks),) for e in range(experts))


def everywhere(chosen: Sequence[int], experts: int, ranks: int) -> Holders:
    """Copies of the chosen experts on every rank."""
    copies = lambda e, own: (r for r in range(ranks) if r != own and e in chosen)
    return tuple((own, *copies(e, own)) for e, (own,) in enumerate(owners(experts, ranks)))


class Costs(NamedTuple):  # seconds
    compute: float  # of a row's products in forward
    move: float  # of a row over a link
    carry: float  # of an expert's weights over a link


def costs_of(machine: Machine, d_model: int, d_ff: int, matrices: int = 2) -> Costs:
    """Of experts of `matrices` matrices (3 if gated), 2 bytes per element, a device a node's link away."""
    require_positive_ints(d_model=d_model, d_ff=d_ff, matrices=matrices)
    weights, bytes_per_s = matrices * d_model * d_ff, machine.inter_bytes_per_s
    flops_per_s = machine.device.peak("bfloat16") * machine.compute_efficiency
    return Costs(2 * weights / flops_per_s, 2 * d_model / bytes_per_s, 2 * weights / bytes_per_s)


class Loads(NamedTuple):  # of each rank
    computed: list[int]  # rows, as in the next two
    sent: list[int]
    received: list[int]
    carried: list[float]  # experts' weights over its link, the larger of in and out


def loads_of(counts: Counts, holders: Holders) -> Loads:
    require_nonempty(counts=counts)
    ranks = range(len(counts))
    computed, sent, received, given, taken = ([0 for _ in ranks] for _ in range(5))
    for e, (owner, *copies) in enumerate(holders):
        given[owner] += bool(copies)  # once, in slices: whoever gets one passes it on to the others
        for r in copies:
            taken[r] += 1
            given[r] += (len(copies) - 1) / len(copies)
        for r in ranks:
            home = r == owner or r in copies
            computed[r if home else owner] += counts[r][e]
            sent[r] += 0 if home else counts[r][e]
            received[owner] += 0 if home else counts[r][e]
    return Loads(computed, sent, received, [max(pair) for pair in zip(given, taken)])


def seconds(counts: Counts, holders: Holders, costs: Costs) -> float:
    """Forward and backward of the layer, nothing hidden."""
    loads = loads_of(counts, holders)
    rows, experts = max(*loads.sent, *loads.received), max(loads.carried)
    return 3 * max(loads.computed) * costs.compute + 4 * rows * costs.move + 2 * experts * costs.carry


def shared_loads(loads: Sequence[int], holders: Holders, ranks: int) -> list[Fraction]:
    """Rows of each rank if the holders of an expert share its rows evenly."""
    require_ints(1, MOST, ranks=ranks)
    total = [Fraction(0)] * ranks
    for load, held in zip(loads, holders, strict=True):
        for rank in held:
            total[rank] += Fraction(load, len(held))
    return total


def balance_ratio(loads: Sequence) -> float:
    """Largest over mean: 1 if all carry the same (also if nobody carries anything)."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


# ---- FasterMoE and Prophet: copies for a layer
def shadowed(counts: Counts, d_model: int, d_ff: int, matrices: int = 2) -> tuple[int, ...]:
    """Experts whose remote rows put more on their owner's link than their weights would: 2·d_model elements
    a row, in and out, against matrices·d_model·d_ff. The least sum; theirs stops when `seconds` grows."""
    require_nonempty(counts=counts)
    found = []
    for e, (owner,) in enumerate(owners(len(counts[0]), len(counts))):
        remote = sum(row[e] for r, row in enumerate(counts) if r != owner)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return tuple(found)


def prophet(counts: Counts, costs: Costs) -> list[tuple[float, Holders]]:
    """(seconds, holders) whenever a `descent` from the eight best starts (the k heaviest everywhere) gains;
    a move adds or removes one copy. At most 5 % above the best in our small cases."""
    require_nonempty(counts=counts)
    experts, ranks = len(counts[0]), len(counts)
    priced = lambda holders: (seconds(counts, holders, costs), holders)

    def moves(state: tuple[float, Holders]) -> Iterator[tuple[float, Holders]]:
        for e, (owner, *copies) in enumerate(state[1]):
            for r in set(range(ranks)) - {owner}:
                there = [rank for rank in copies if rank != r] if r in copies else [*copies, r]
                yield priced((*state[1][:e], (owner, *there), *state[1][e + 1 :]))

    order = sorted(range(experts), key=lambda e: (-sum(row[e] for row in counts), e))
    starts = [priced(everywhere(order[:k], experts, ranks)) for k in range(experts + 1)]
    trace = starts[:1]
    for start in sorted(starts)[:8]:
        for here in (start, *descent(start, moves, few=4)):
            trace += [here] if here[0] < trace[-1][0] else []
    return trace


def descent(state: tuple, moves: Callable[[tuple], Iterable[tuple]], few: int) -> Iterator[tuple]:
    """From state to state (cost, ..): the least that a move leads to, else two, one of the `few` best."""
    while True:
        options = sorted(moves(state))
        if options and options[0][0] >= state[0]:
            options = sorted(two for one in options[:few] for two in moves(one))
        if not options or options[0][0] >= state[0]:
            return
        state = options[0]
        yield state


def layerwise(compute: Sequence[float], copies: Sequence[float], *, hidden: bool = True) -> float:
    """Seconds of a step: copies travel before a layer's forward, gradients as long after its backward, twice
    as much work. `hidden`: over a link of their own, copies while the layer before computes (there is room
    for one layer's), gradients while the layers before go backward."""
    if not hidden:
        return 3 * sum(compute) + 2 * sum(copies)
    end = link = start = 0.0
    for work, copy in zip(compute, copies, strict=True):
        link = max(link, start) + copy  # may leave when the layer before starts
        start = max(end, link)
        end = start + work
    for work, copy in zip(reversed(compute), reversed(copies)):
        end += 2 * work
        link = max(link, end) + copy
    return max(end, link)


# ---- FlexMoE: replicas that share rows evenly
Expand = NamedTuple("Expand", [("expert", int), ("to", int)])
Shrink = NamedTuple("Shrink", [("expert", int), ("rank", int)])
Migrate = NamedTuple("Migrate", [("expert", int), ("source", int), ("to", int)])
Step = Expand | Shrink | Migrate


def applied(holders: Holders, steps: Sequence[Step]) -> Holders:
    """The holders after these steps."""
    require_nonempty(holders=holders)
    found = [list(ranks) for ranks in holders]
    for step in steps:
        ranks, gone = found[step.expert], step[1] if isinstance(step, (Shrink, Migrate)) else None
        new = step.to if isinstance(step, (Expand, Migrate)) else None
        if new in ranks or gone not in [None, *ranks] or (new is None and len(ranks) == 1):
            raise ValueError(f"{step} with ranks {ranks}: a rank holds an expert once, and one always does")
        at = len(ranks) if gone is None else ranks.index(gone)
        ranks[at : at + 1] = [] if new is None else [new]
    return tuple(map(tuple, found))


def flexmoe(loads, holders: Holders, ranks: int, slots: int, threshold=1.1, most=64) -> list[Step]:
    """At most `most` steps, until the busiest rank has at most `threshold` times the mean, or none helps: a
    descent from loads, largest first, to the least."""
    require_ints(1, MOST, ranks=ranks, slots=slots)

    def state(steps: list[Step]) -> tuple:
        now = sorted(shared_loads(loads, applied(holders, steps), ranks), reverse=True)
        return now, len(steps), steps

    def rounds(before: tuple) -> Iterator[tuple]:
        here = applied(holders, before[2])
        reliefs = _reliefs(shared_loads(loads, here, ranks), here, ranks, slots)
        return (state(before[2] + relief) for relief in reliefs)

    found = state([])
    for better in descent(found, rounds, few=8):
        if balance_ratio(found[0]) <= threshold or better[1] > most:
            break
        found = better
    return found[2]


def _reliefs(busy: list[Fraction], holders: Holders, ranks: int, slots: int) -> Iterator[list[Step]]:
    """Of the busiest rank by one of its experts: a copy of it, or itself, goes to a rank with room; or to a
    full one, where a replica shrinks, or from where an expert comes in exchange."""
    hot, places = busy.index(max(busy)), Counter(chain(*holders))
    for (e, held), to in product(enumerate(holders), range(ranks)):
        if hot not in held or to in held:
            continue
        if places[to] < slots:
            yield [Expand(e, to)]
            yield [Migrate(e, hot, to)]
            continue
        for other, there in enumerate(holders):
            if to in there and len(there) > 1:
                yield [Shrink(other, to), Expand(e, to)]
                yield [Shrink(other, to), Migrate(e, hot, to)]
            if to in there and hot not in there:
                yield [Migrate(e, hot, to), Migrate(other, to, hot)]
