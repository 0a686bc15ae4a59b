"""Energy of training: a pipeline's slack, its front of time and energy, batch size and power limit.

    a task that takes d in place of its shortest time has energy(action, d): less, and less and less so

EnvPipe   computations that are not on the critical path run slower, as long as the makespan stays
Perseus   from all at their slowest, one unit shorter after the other: the cheapest set of critical tasks
          that shortens every critical path, a minimum cut; tasks that cross it backwards get longer
Zeus      cost = eta · energy + (1 - eta) · most power · time, in joules: a power limit for each batch size
          from a profile, the batch size by trying (Thompson sampling), as the time to accuracy is random

Schedules are the pipeline's, of any kind. Choi et al. 2023, USENIX ATC (EnvPipe); Chung et al. 2024, SOSP
(Perseus), section 4; You et al. 2023, NSDI (Zeus), section 3. Differs: times in whole units, in place of
measured frequencies; the cut by a linear program in place of a flow; no energy while a device waits.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random

from minitrain.pipeline.schedule import Action, Schedule
from minitrain.pipeline.simulate import Measured, simulate
from minitrain.ranks import checks
from minitrain.systems.plan.integer_program import IntegerProgram

Durations = Mapping[Action, int]
Energy = Callable[[Action, int], float]


def slack(schedule: Schedule, durations: Durations) -> tuple[int, dict[Action, int], dict[Action, int], list]:
    """(makespan, start of each action, by how much it can be later, edges: what waits for what)."""
    edges = [(a, b) for own in schedule.ranks for a, b in zip(own, own[1:])]
    edges += [(a, b) for b, needed in schedule.needs.items() for a in needed]
    run = simulate(schedule, Measured(durations))
    start = {span.entry: span.start for spans in run.spans for span in spans}
    latest = {action: run.makespan - durations[action] for action in start}
    for a, b in sorted(edges, key=lambda edge: -start[edge[1]]):
        latest[a] = min(latest[a], latest[b] - durations[a])
    return run.makespan, start, {action: latest[action] - start[action] for action in start}, edges


def stretched(schedule: Schedule, energy: Energy, shortest: Durations, longest: Durations) -> Durations:
    """EnvPipe: from all at their shortest, a unit longer wherever there is slack and it saves most."""
    durations = dict(shortest)
    while True:
        _, _, free, _ = slack(schedule, durations)
        longer = {action: d for action, d in durations.items() if free[action] and d < longest[action]}
        saved = {action: energy(action, d) - energy(action, d + 1) for action, d in longer.items()}
        if not saved or max(saved.values()) <= 0:
            return durations
        durations[max(saved, key=saved.get)] += 1


def frontier(schedule: Schedule, energy: Energy, shortest: Durations, longest: Durations) -> list[tuple]:
    """Perseus: [(makespan, least energy)], the slowest first. Needs scipy."""
    checks.require_positive_ints(shortest=list(shortest.values()), longest=list(longest.values()))
    durations, points = dict(longest), []
    while durations:
        makespan = slack(schedule, durations)[0]
        points.append((makespan, sum(energy(action, d) for action, d in durations.items())))
        durations = _one_unit_shorter(schedule, durations, energy, shortest, longest)
    return points


def _one_unit_shorter(schedule, durations, energy, shortest, longest) -> dict[Action, int] | None:
    """By potentials: how much earlier (0 to 1) each critical task begins and ends; None: it cannot be."""
    makespan, start, free, edges = slack(schedule, durations)
    program, costs = IntegerProgram(), {}
    critical = [action for action, room in free.items() if room == 0]
    of = lambda what, action: ("free", what, *action)
    for action in critical:
        begins, ends, less, more = (of(what, action) for what in ("begins", "ends", "less", "more"))
        d = durations[action]
        program.add({ends: 1, begins: -1, less: -1, more: 1}, 0, 0)
        program.add({less: 1}, 0, d > shortest[action])
        program.add({more: 1}, 0, d < longest[action])
        costs[less] = energy(action, d - 1) - energy(action, d) if d > shortest[action] else 0
        costs[more] = energy(action, d + 1) - energy(action, d) if d < longest[action] else 0
        program.add({begins: 1}, 0, start[action] > 0)
        program.add({ends: 1}, start[action] + d == makespan, 1)
    for a, b in edges:
        if free[a] == free[b] == 0 and start[a] + durations[a] == start[b]:
            program.add({of("begins", b): 1, of("ends", a): -1}, -inf, 0)
    found = program.values(costs)
    if found is None:
        return None
    change = {action: found[of("more", action)] - found[of("less", action)] for action in critical}
    return {action: d + round(change.get(action, 0)) for action, d in durations.items()}


def zeus(costs: Mapping[int, Sequence[tuple]], eta: float, most_power: float) -> tuple[int, int, float]:
    """(batch, number of the power limit, cost): costs[batch][limit] = (joules, seconds) to the accuracy."""
    checks.require_nonempty(costs=costs)
    checks.require_fractions(eta=eta)
    checks.require_positive(most_power=most_power)
    cost = lambda joules, seconds: eta * joules + (1 - eta) * most_power * seconds
    best = {batch: min((cost(*pair), i) for i, pair in enumerate(limits)) for batch, limits in costs.items()}
    batch = min(best, key=best.get)
    return batch, best[batch][1], best[batch][0]


def tried(cost_of: Callable[[int], float], batches: Sequence[int], runs: int, seed: int) -> list[int]:
    """The batch size of each of `runs` runs: each once, then the least of means drawn from what was seen."""
    checks.require_nonempty(batches=batches)
    checks.require_positive(batches=list(batches))
    checks.require_positive_ints(10**5, runs=runs)
    checks.require_ints(seed=seed)
    draw, seen, chosen = Random(seed), {batch: [] for batch in batches}, []

    def sample(costs: list[float]) -> float:  # one run is 10 % off, their mean 10 % / sqrt(runs)
        mean = sum(costs) / max(1, len(costs))
        return draw.gauss(mean, 0.1 * mean / len(costs) ** 0.5) if costs else -inf

    for _ in range(runs):
        chosen.append(min(batches, key=lambda batch: sample(seen[batch])))
        seen[chosen[-1]].append(cost_of(chosen[-1]))
    return chosen
