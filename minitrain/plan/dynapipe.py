"""DynaPipe: samples of unequal length in microbatches of unequal size, their order by memory, and messages that cannot get stuck. No torch.

    lengths, sorted   9 8 8 | 3 3 2 2 2 1        a run is a microbatch [rows, longest]: padding only up to the longest of the run

microbatches    step = sum of their times + (stages - 1)·longest, smallest over all runs of the sorted lengths: for each number of samples
                all unbeaten (sum, longest) are kept. If the time of a microbatch grows with rows and with length, no grouping of the
                samples, sorted or not, is better: sorting makes each group's longest sample shorter or leaves it.
adaptive        a list for each rank, from the start on: the next backward if it is there, else the next forward if its activations fit
                under the cap; whoever can start first. With equal times and a cap of p
                microbatches a step takes as long as one of 1F1B.
planned         programs with messages. When microbatches differ, a rank that receives just before it needs and sends just after it has
                (`naive`) meets a neighbour that waits the other way round: both stand still. Here all posts follow one clock: at the
                simulated moment at which a result is there, its sender and its receiver both post the message, so that every program is a
                part of one order of everything, and the message that comes first in it can always go.
samples         the microbatches themselves, for Runner: `cut=samples(groups, lengths)`. A planned program runs there too, `run.program =
                planned(schedule)[rank]`; it lacks `Reduce`, so that a reducer works in its `finish()`.
rendezvous      plays programs where every send waits for its receive and both block their rank, the hardest network there is; it says who
                waits for whom. lower.py's programs post receives early and never block on a send: they need one group a direction.

Messages and memory: as the schedule says. A rank never holds more than the cap.
Raises ValueError for a sample that does not fit the cap, for a message that meets another, for programs that get stuck.
Jiang et al. 2024 (DynaPipe), arXiv:2311.10418, sections 4 (microbatches), 5 (schedule) and 6 (communication). Differs: theirs tries a
set of limits for the longest time, which is an approximation, and balances replicas too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minitrain.pipeline.lower import Receive, Send, Step, user_of
from minitrain.pipeline.partition import Number, undominated
from minitrain.pipeline.schedule import Action, B, F, Schedule, check, in_order, parts
from minitrain.pipeline.simulate import Costs, Measured, simulate


class Plan(NamedTuple):
    """`groups`: the samples of each microbatch, by their number."""

    time: Number
    groups: tuple[tuple[int, ...], ...]


def microbatches(
    lengths: Sequence[int], time: Callable[[int, int], Number], stages: int, cap_tokens: int | None = None
) -> Plan:
    """Runs of the sorted samples with the shortest step; `time(rows, length)` of a microbatch on a stage, rows·length <= cap_tokens."""
    if not lengths or min(lengths) < 1 or (cap_tokens is not None and max(lengths) > cap_tokens):
        raise ValueError(
            f"microbatches: lengths {list(lengths)[:8]} under {cap_tokens} tokens; each sample needs 1 token or more and must "
            "fit alone"
        )
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    best: list[list] = [[((0, 0), ())]]
    for end in range(1, len(order) + 1):
        found = []
        for start in range(end):
            rows, length = end - start, lengths[order[start]]
            if cap_tokens is None or rows * length <= cap_tokens:
                here = time(rows, length)
                found += [
                    ((total + here, max(longest, here)), (*groups, tuple(order[start:end])))
                    for (total, longest), groups in best[start]
                ]
        best.append(undominated(found))
    (total, longest), groups = min(best[-1], key=lambda plan: plan[0][0] + (stages - 1) * plan[0][1])
    return Plan(total + (stages - 1) * longest, groups)


def fixed(samples: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """The usual microbatches: as many samples in each, in the order in which they come."""
    return tuple(tuple(range(start, min(start + rows, samples))) for start in range(0, samples, rows))


def padding(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """Tokens computed in vain."""
    return sum(
        len(group) * max(lengths[sample] for sample in group) - sum(lengths[sample] for sample in group)
        for group in groups
    )


def samples(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> Callable:
    """For Runner: unit i is the rows of groups[i], as long as the longest of them."""

    def cut(batch, schedule: Schedule) -> list[tuple]:
        if len(groups) != schedule.microbatches or len(lengths) != len(batch.tokens):
            raise ValueError(
                f"{schedule.name} has {schedule.microbatches} microbatches and the batch {len(batch.tokens)} rows, the plan "
                f"{len(groups)} and {len(lengths)}; plan for this batch"
            )
        found = []
        for group in groups:
            rows, longest = list(group), max(lengths[sample] for sample in group)
            positions = (
                batch.tokens.new_ones(longest).cumsum(0) - 1
                if batch.positions is None
                else batch.positions[:longest]
            )
            found.append((batch.tokens[rows, :longest], batch.targets[rows, :longest], positions))
        return found

    return cut


# ---- the order of a rank ---------------------------------------------------------------------------------------------


def adaptive(
    times: Sequence[Sequence[tuple[Number, Number]]], sizes: Sequence[Number], cap: Number
) -> Schedule:
    """`times[stage][microbatch]` = (forward, backward); `sizes[microbatch]` of its activations on a rank."""
    p, m = len(times), len(sizes)
    if max(sizes) > cap:
        raise ValueError(
            f"adaptive: a microbatch of {max(sizes)} does not fit the cap {cap}; use smaller microbatches"
        )
    lists: list[list[Action]] = [[] for _ in range(p)]
    free, held, ended = [0] * p, [0] * p, {}
    forwards, backwards = [0] * p, [0] * p  # the next of each rank

    def starts(rank: int):
        """(start, is a forward, rank, action) of what the rank could do next."""
        i = backwards[rank]
        behind = B(rank + 1, i) if rank + 1 < p else F(rank, i)
        if i < forwards[rank] and behind in ended:
            yield max(free[rank], ended[behind]), False, rank, B(rank, i)
        i = forwards[rank]
        if i < m and held[rank] + sizes[i] <= cap and (rank == 0 or F(rank - 1, i) in ended):
            yield max(free[rank], ended.get(F(rank - 1, i), 0)), True, rank, F(rank, i)

    for _ in range(2 * p * m):
        start, forward, rank, action = min(option for rank in range(p) for option in starts(rank))
        i = action.microbatch
        free[rank] = ended[action] = start + times[rank][i][0 if forward else 1]
        held[rank] += sizes[i] if forward else -sizes[i]
        forwards[rank] += forward
        backwards[rank] += not forward
        lists[rank].append(action)
    return check(Schedule(f"DynaPipe, p={p}, m={m}", tuple(map(tuple, lists)), p, m))


# ---- the order of messages -------------------------------------------------------------------------------------------


def planned(schedule: Schedule, costs: Costs | Measured = Costs()) -> tuple[tuple[Step, ...], ...]:
    """Every rank's part of one order: actions by their simulated end, each message behind the action it comes from, on both sides."""
    spans = {span.entry: span for spans in simulate(schedule, costs).spans for span in spans}
    order = [entry for _, entry in in_order(schedule, set())]
    order.sort(key=lambda entry: spans[entry].end)  # keeps the order of needs where ends are equal
    return _programs(schedule, order, lambda user: None)


def naive(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Receive just before the action that needs it, send right behind the action that gives it."""
    return _programs(schedule, [entry for _, entry in in_order(schedule, set())], lambda user: user)


def _programs(schedule: Schedule, order: Sequence, before: Callable) -> tuple[tuple[Step, ...], ...]:
    programs: list[list[Step]] = [[] for _ in schedule.ranks]
    late: dict[Action, list[Receive]] = {}
    for entry in order:
        for action in parts([entry]):
            programs[schedule.place[action]] += late.pop(action, [])
        own = schedule.place[next(parts([entry]))]
        programs[own].append(entry)
        for action in parts([entry]):
            user = user_of(action, schedule)
            if user is not None and schedule.place[user] != own:
                programs[own].append(Send(action, schedule.place[user]))
                if before(user) is None:
                    programs[schedule.place[user]].append(Receive(action, own))
                else:
                    late.setdefault(user, []).append(Receive(action, own))
    return tuple(map(tuple, programs))


def rendezvous(programs: Sequence[Sequence[Step]]) -> None:
    """Nothing, if all programs come to their end; else ValueError with the heads of those that wait."""
    at = [0] * len(programs)

    def head(rank: int) -> Step | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            step = head(rank)
            if isinstance(step, Send):
                there = head(step.to)
                if isinstance(there, Receive) and there.source == rank:
                    if there.what != step.what:
                        raise ValueError(
                            f"rank {rank} sends {step.what} where rank {step.to} receives {there.what}; give both the same "
                            "order"
                        )
                    at[rank] += 1
                    at[step.to] += 1
                    moved = True
            elif step is not None and not isinstance(step, Receive):
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {type(step).__name__}({step[0]}) with rank {step[1]}"
        for rank in range(len(programs))
        if (step := head(rank))
    ]
    if stuck:
        raise ValueError(f"stuck: {', '.join(stuck[:4])}; post messages in one order on all ranks")
