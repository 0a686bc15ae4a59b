"""FlexFlow: a random walk over choices, each simulated, that stays where the simulation is fast.

    sample, parameter      dp cuts the samples, col and row the parameters of an operator
    simulate(tasks)        forward, backward, conversions and sums of gradients, each on the compute stream or
                           on a level's link, in list order: they overlap, unlike the sums of problem.py
    Delta(tasks)           the same, kept: after one layer changed only what moves in time is computed again
    accept                 min(1, exp(beta·(cost - new cost))), so that the walk (Metropolis) is in the end at
                           a choice with a probability proportional to exp(-beta·cost)

Jia et al. 2018 (Beyond Data and Model Parallelism), arXiv:1807.05358, sections 4 to 6. Differs: all operators
on all devices (O of SOAP), tokens are rows (A); ties in time are broken by the list, not by what is ready.
"""

import math
import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from minitrain.systems.plan.search.problem import Found, Option, Problem


class Task(NamedTuple):
    name: tuple
    stream: str
    seconds: float
    needs: tuple = ()  # names


def tasks_of(problem: Problem, choice: Sequence[Option]) -> list[Task]:
    """One microbatch. The same names, streams and needs for every choice: only the seconds differ."""
    tasks, levels, words = [], problem.levels, [*(option.words for option in choice), None]

    def sent(name, sizes, needs):
        for i in reversed(range(len(levels))):
            tasks.append(Task((*name, i), f"link{i}", sizes[i] / levels[i].bytes_per_s, needs))
            needs = ((*name, i),)
        return needs

    forward, backward, gathers, sums, thirds = [], [], [], [], []
    for j, (layer, option) in enumerate(zip(problem.layers, choice)):
        there, back = problem.edge_bytes(layer, words[j], words[j + 1], levels)
        often, once = problem.weight_bytes(layer, words[j], levels)
        forward.append(there)
        backward.append(back)
        gathers.append([size / 3 for size in often])
        sums.append([a + b / problem.microbatches for a, b in zip(gathers[j], once)])
        thirds.append(problem.compute_seconds(layer, option, levels) / 3)
    needs = ()
    for j, third in enumerate(thirds):
        ready = sent(("gather", j), gathers[j], ())
        tasks.append(Task(("F", j), "compute", third, needs + ready))
        needs = sent(("to", j), forward[j], (("F", j),))
    for j in reversed(range(len(thirds))):
        needs = sent(("back to", j), backward[j], needs)
        ready = sent(("again", j), gathers[j], ())
        if j + 1 < len(thirds):
            sent(("sum", j + 1), sums[j + 1], (("B", j + 1),))  # behind what this backward waits for
        tasks.append(Task(("B", j), "compute", 2 * thirds[j], needs + ready))
        needs = (("B", j),)
    sent(("sum", 0), sums[0], needs)
    return tasks


def ends(tasks: Sequence[Task]) -> dict[tuple, float]:
    done, free = {}, {}
    for task in tasks:
        start = max([free.get(task.stream, 0.0), *(done[name] for name in task.needs)])
        done[task.name] = free[task.stream] = start + task.seconds
    return done


def simulate(tasks: Sequence[Task]) -> float:
    return max(ends(tasks).values())


class Delta:
    """A simulation that is kept, and what follows each task: in its stream, and by need."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks, self.recomputed, last = list(tasks), 0, {}
        place = {task.name: at for at, task in enumerate(tasks)}
        self.before: list[list[int]] = []
        self.after: list[list[int]] = [[] for _ in tasks]
        for at, task in enumerate(tasks):
            self.before.append([place[name] for name in task.needs] + last.get(task.stream, []))
            for other in self.before[at]:
                self.after[other].append(at)
            last[task.stream] = [at]
        done = ends(tasks)
        self.end = [done[task.name] for task in tasks]

    def change(self, tasks: Sequence[Task]) -> float:
        """The time with these in place of the old ones."""
        waiting = [at for at, (old, new) in enumerate(zip(self.tasks, tasks)) if old.seconds != new.seconds]
        self.tasks, queued = list(tasks), set(waiting)
        while waiting:
            at = heappop(waiting)
            queued.discard(at)
            end = max([0.0, *(self.end[other] for other in self.before[at])]) + self.tasks[at].seconds
            self.recomputed += 1
            if end != self.end[at]:
                self.end[at] = end
                for other in self.after[at]:
                    if other not in queued:
                        queued.add(other)
                        heappush(waiting, other)
        return max(self.end)


def acceptance(cost: float, new: float, beta: float) -> float:
    return 1.0 if new <= cost else math.exp(beta * (cost - new))


def walk(problem: Problem, steps: int, beta: float | None, seed: int, priced: dict | None = None):
    """Where the walk is after each step, from data parallelism on; `priced`: the cost of all it looked at."""
    draw, options = random.Random(seed), problem.options(problem.levels)
    choice, priced = (options[0],) * len(problem.layers), {} if priced is None else priced
    delta = Delta(tasks_of(problem, choice))
    cost = priced[choice] = max(delta.end)
    beta = 5 / cost if beta is None else beta
    for _ in range(steps):
        layer, option = draw.randrange(len(choice)), draw.choice(options)
        proposal = (*choice[:layer], option, *choice[layer + 1 :])
        if proposal not in priced:
            priced[proposal] = delta.change(tasks_of(problem, proposal))
        if draw.random() < acceptance(cost, priced[proposal], beta):
            choice, cost = proposal, priced[proposal]
        yield choice


def flexflow(problem: Problem, steps: int = 2000, beta: float | None = None, seed: int = 0) -> Found:
    """The fastest choice that the walk looked at. By default beta accepts one in e that is slower by a fifth
    of the start."""
    priced: dict[tuple[Option, ...], float] = {}
    for _ in walk(problem, steps, beta, seed, priced):
        pass
    best = min(priced, key=priced.__getitem__)
    return Found(best, priced[best], len(priced))
