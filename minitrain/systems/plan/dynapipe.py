"""Messages of a pipeline: DynaPipe plans those of unequal microbatches, TriRace sends them one way. No torch.

    lengths, sorted   9 8 8 | 3 3 2 2 2 1    a run is a microbatch [rows, longest], padded to its own longest
microbatches   step = sum of their times + (stages - 1)·longest, smallest over all runs of sorted samples. If
               the time of one grows with rows and length, no grouping of the samples is better
adaptive       a rank's next backward if it can, else its next forward under the cap; whoever can start first
planned        programs with messages, which both sides post when, by a simulated clock, the result is there:
               the earliest can always go. `naive`, just before the need and just after, may get stuck
With a Runner (no `Reduce`): `run.cut = samples(groups, lengths)`, `run.program = planned(schedule)[rank]`.
TriRace        sent and received in one call, F3 [up 3 | down 1] B1 .., a rank waits for both: a period of
               F + B + 2c for messages that take c; one way, F3 B1 F4 .., each leaving when made, F + B +
               2c(p-1)/p, with twice as many forwards ahead F + B. Updates at most `bound` steps late: a step
               takes compute + reduce with bound 0, else max(compute, reduce).

Jiang et al. 2024 (DynaPipe), arXiv:2311.10418, sections 4 to 6; Guo et al. (TriRace), as Duan et al. 2024,
arXiv:2407.20018, section 7.2.3, describe it. Differs: DynaPipe tries a set of limits for the longest time, an
approximation, and balances replicas too; TriRace is a model with equal stages, on links that are never full,
messages in the order in which they are made, theirs by critical path.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from minitrain.pipeline.lower import Receive, Send, Step, user_of
from minitrain.pipeline.partition import Number, undominated
from minitrain.pipeline.schedule import Action, B, F, Schedule, check, in_order, parts
from minitrain.pipeline.schedules.greedy import greedy
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.ranks.checks import MOST, require_ints, require_nonnegative, require_positive_ints

Programs = tuple[tuple[Step, ...], ...]


class DynaPipePlan(NamedTuple):
    time: Number
    groups: tuple[tuple[int, ...], ...]  # the samples of each microbatch, by their number


def microbatches(lengths: Sequence[int], time: Callable, stages: int, cap_tokens=None) -> DynaPipePlan:
    """Runs of the sorted samples with the shortest step, none of more than `cap_tokens` = rows·length;
    `time(rows, length)` is that of a microbatch on a stage."""
    require_positive_ints(stages=stages)
    require_positive_ints(cap_tokens or MOST, lengths=lengths)
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    best: list[list] = [[((0, 0), ())]]  # for each number of samples ((sum, longest), groups)
    for end in range(1, len(order) + 1):
        found = []
        for start in range(end):
            rows, length = end - start, lengths[order[start]]
            if cap_tokens is None or rows * length <= cap_tokens:
                here, group = time(rows, length), tuple(order[start:end])
                found += [((a + here, max(b, here)), (*groups, group)) for (a, b), groups in best[start]]
        best.append(undominated(found))
    steps = [(total + (stages - 1) * longest, groups) for (total, longest), groups in best[-1]]
    return DynaPipePlan(*min(steps, key=lambda step: step[0]))


def fixed(samples: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """The usual microbatches: as many samples in each, in the order in which they come."""
    require_ints(0, MOST, samples=samples)
    require_positive_ints(rows=rows)
    return tuple(tuple(range(start, min(start + rows, samples))) for start in range(0, samples, rows))


def padding(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """Tokens computed in vain."""
    require_ints(0, len(lengths) - 1, groups=groups)
    by_group = [[lengths[sample] for sample in group] for group in groups]
    return sum(len(group) * max(group) - sum(group) for group in by_group)


def samples(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> Callable:
    """For Runner: unit i is the rows of groups[i], as long as the longest of them."""

    def cut(batch, schedule: Schedule) -> list[tuple]:
        positions, found = batch.positions, []
        if positions is None:
            positions = batch.tokens.new_ones(max(lengths)).cumsum(0) - 1
        for group in groups:
            rows, longest = list(group), max(lengths[sample] for sample in group)
            found.append((batch.tokens[rows, :longest], batch.targets[rows, :longest], positions[:longest]))
        return found

    return cut


def adaptive(times: Sequence[Sequence[tuple]], sizes: Sequence[Number], cap: Number) -> Schedule:
    """`times[stage][microbatch]` = (forward, backward); `sizes[microbatch]` of its activations on a rank."""
    p, m = len(times), len(sizes)
    if max(sizes) > cap:
        raise ValueError(f"adaptive: a microbatch of {max(sizes)} does not fit the cap {cap}; cut it")
    of = {(s, i): pair for s, own in enumerate(times) for i, pair in enumerate(own)}
    costs = Measured({Action(kind, *at): pair[kind == "B"] for at, pair in of.items() for kind in "FB"})
    schedule = greedy(range(p), p, m, costs, limit=cap, split=False, sizes=sizes)
    return replace(schedule, name=f"DynaPipe, p={p}, m={m}")


def planned(schedule: Schedule, costs: Costs | Measured = Costs()) -> Programs:
    """Actions by their simulated end, each message behind the action it comes from, on both sides."""
    ends = {span.entry: span.end for spans in simulate(schedule, costs).spans for span in spans}
    order = [entry for _, entry in in_order(schedule, set())]
    order.sort(key=ends.__getitem__)  # keeps the order of needs where ends are equal
    return _programs(schedule, order, receive_late=False)


def naive(schedule: Schedule) -> Programs:
    """Receive just before the action that needs it, send right behind the one that gives it."""
    return _programs(schedule, [entry for _, entry in in_order(schedule, set())], receive_late=True)


def _programs(schedule: Schedule, order: Sequence, receive_late: bool) -> Programs:
    programs: list[list[Step]] = [[] for _ in schedule.ranks]
    late: dict[Action, list[Receive]] = {}  # by the action that uses them
    for entry in order:
        actions = list(parts([entry]))
        own = schedule.place[actions[0]]
        programs[own] += [receive for action in actions for receive in late.pop(action, [])]
        programs[own].append(entry)
        for action in actions:
            user = user_of(action, schedule)
            if user is not None and (to := schedule.place[user]) != own:
                programs[own].append(Send(action, to))
                receives = late.setdefault(user, []) if receive_late else programs[to]
                receives.append(Receive(action, own))
    return tuple(map(tuple, programs))


Call = tuple[Action, ...]  # messages, by the action that makes them


def blocking(programs: Sequence[Sequence], seconds: Mapping[str, Number], message: Number = 0) -> tuple:
    """(when each rank has done each action, how many entries are left where ranks wait for ever): a call ends
    when both sides of each message have come to it and all have passed, in turn in each link's direction."""
    came: dict[Action, dict[int, Number]] = defaultdict(dict)  # when each side came to a message
    passed: dict[Action, Number] = {}
    free: dict[tuple[int, str], Number] = {}  # link (source, direction) -> end of its last message
    done: list[dict[Action, Number]] = [{} for _ in programs]
    now, left, moved = [0] * len(done), [deque(program) for program in programs], True

    def ends(call: Call, rank: int) -> bool:
        for what in call:
            came[what].setdefault(rank, now[rank])
            if len(came[what]) == 2 and what not in passed:
                link = what.stage, what.kind
                passed[what] = free[link] = max(*came[what].values(), free.get(link, 0)) + message
        return all(what in passed for what in call)

    while moved:
        moved = False
        for rank, entries in enumerate(left):
            while entries and (isinstance(entries[0], Action) or ends(entries[0], rank)):
                entry, moved = entries.popleft(), True
                if isinstance(entry, Action):
                    now[rank] += seconds.get(entry.kind, 0)
                    done[rank][entry] = now[rank]
                else:
                    now[rank] = max(now[rank], *(passed[what] for what in entry))
    return done, list(map(len, left))


def rendezvous(programs: Sequence[Sequence[Step]]) -> None:
    """Plays programs where every send waits for its receive and both block; ValueError if they get stuck."""
    messages = [[step for step in steps if isinstance(step, Send | Receive)] for steps in programs]
    _, left = blocking([[(step.what,) for step in steps] for steps in messages], {})
    heads = [(rank, steps[-n]) for rank, (steps, n) in enumerate(zip(messages, left)) if n]
    if heads:
        stuck = [f"rank {rank} at {type(s).__name__}({s[0]}) with rank {s[1]}" for rank, s in heads[:4]]
        raise ValueError(f"stuck: {', '.join(stuck)}; post messages in one order on all ranks")


def paired_calls(schedule: Schedule, rank: int) -> list[Action | Call]:
    """As Megatron-LM calls: what goes to a neighbour and what comes from it next are in one call."""
    entries, last = schedule.ranks[rank], schedule.stages - 1
    needed = lambda a: tuple(before for before in schedule.needs[a] if before.stage != a.stage)
    calls = [needed(entries[0])]
    for here, after in zip(entries, (*entries[1:], None)):
        sends = (here,) if (rank < last if here.kind == "F" else rank > 0) else ()
        receives = needed(after) if after else ()
        both = after and here.kind != after.kind  # with the same neighbour
        calls += [here, *([sends + receives] if both else [sends, receives])]
    return [call for call in calls if call]


def period(p: int, forward: Number, backward: Number, message: Number, paired: bool, ahead=1) -> Number:
    """Time from a microbatch to the next in the steady state of 1F1B with `ahead`·(p-r-1) forwards ahead on
    rank r (1 is the usual), exact if the times are."""
    require_positive_ints(1 << 10, p=p, ahead=ahead)
    require_nonnegative(forward=forward, backward=backward, message=message)
    m = 12 * p * ahead
    actions = [[[make(r, i) for i in range(m)] for make in (F, B)] for r in range(p)]
    lists = tuple(alternate(*own, ahead * (p - r - 1)) for r, own in enumerate(actions))
    schedule = check(Schedule(f"1F1B, p={p}, m={m}, {ahead} times ahead", lists, p, m))
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


def delayed(steps: int, compute: Number, reduce: Number, bound: int) -> Fraction:
    """Time from step to step: t waits for the sums, one by one, of all but the last `bound` gradients."""
    require_positive_ints(steps=steps)
    require_nonnegative(compute=compute, reduce=reduce, bound=bound)
    now, begun, summed = 0, [], [0] * (min(bound, steps) + 1)  # the first steps wait for nothing
    for t in range(steps):
        now = max(now, summed[t])
        begun.append(now)
        now += compute
        summed.append(max(now, summed[-1]) + reduce)
    half = steps // 2
    return Fraction(begun[-1] - begun[half]) / max(steps - 1 - half, 1)
