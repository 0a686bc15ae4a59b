"""Searches that draw or run: a random walk, learned placement, a tree of decisions, runs that memory allows.

FlexFlow   Metropolis over choices: accept with min(1, exp(beta·(cost - new cost))). Forward, backward,
           conversions and sums of gradients each run on the compute stream or a level's link, in list order,
           so they overlap; `Delta` computes again only what moves in time after one layer changed
RL         REINFORCE places whole operators: logits[operators, devices]; reward -log(step time), normalised in
           the batch; logits += rate · mean of reward · (one-hot of what was drawn - probabilities)
Automap    decisions cut a tensor along a dim over all devices; in y[m, g] = x[m, f]·W[f, g] what shares it
           is cut alike, so one cuts both matrices of an MLP. Monte Carlo tree search over sets of decisions
DeepSpeed  what ZeRO's bytes and kept activations say will not fit is never run; of the rest, for each stage
           the microbatch halves from the largest that fits until it is slower. Bytes sent by each of n
           devices in a step of m microbatches, in units of (n-1)/n of the parameters:
           stage 0, 1: 2     2: m + 1     3: 3·m      (proved against dry runs of data_parallel/)

Jia et al. 2018 (FlexFlow), arXiv:1807.05358, sections 4 to 6; Mirhoseini et al. 2017, arXiv:1706.04972;
Alabed et al. 2022 (Automap), arXiv:2210.06352; Schaarschmidt et al. 2021, arXiv:2112.02958; Microsoft 2021,
DeepSpeed tutorial "Autotuning". Differs: FlexFlow's operators run on all devices; the policy is a table;
Automap takes most bytes first, no learned ranking, on one axis; no tuner by a learned model.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy

from minitrain.pipeline import simulate as pipeline_simulate
from minitrain.pipeline.schedule import F, Schedule
from minitrain.pipeline.simulate import Costs
from minitrain.plan.accounting import zero_bytes
from minitrain.systems.plan.search.problem import Option, Problem, SearchResult, cheapest, least


class Task(NamedTuple):
    name: tuple
    stream: str
    seconds: float
    needs: tuple = ()  # names


def tasks_of(problem: Problem, choice: Sequence[Option]) -> list[Task]:
    """One microbatch. The same names, streams and needs for every choice: only the seconds differ."""
    tasks, levels, shardings = [], problem.levels, [option.shardings for option in choice]

    def sent(name, sizes, needs):
        for i in reversed(range(len(levels))):
            tasks.append(Task((*name, i), f"link{i}", sizes[i] / levels[i].bytes_per_s, needs))
            needs = ((*name, i),)
        return needs

    edges = zip(problem.layers, shardings, [*shardings[1:], None])
    forward, backward = zip(*(problem.edge_bytes(*edge, levels) for edge in edges))
    thirds = [problem.compute_seconds(*one, levels) / 3 for one in zip(problem.layers, choice)]
    gathers, sums = [], []
    for layer, sharding in zip(problem.layers, shardings):
        often, once = problem.weight_bytes(layer, sharding, levels)
        gathers.append([size / 3 for size in often])
        sums.append([a + b / problem.microbatches for a, b in zip(gathers[-1], once)])
    needs = ()
    for j, third in enumerate(thirds):
        ready = sent(("gather", j), gathers[j], ())
        tasks.append(Task(("F", j), "compute", third, needs + ready))
        needs = sent(("to", j), forward[j], (("F", j),))
    for j in reversed(range(len(thirds))):
        needs, ready = sent(("back to", j), backward[j], needs), sent(("again", j), gathers[j], ())
        if j + 1 < len(thirds):
            sent(("sum", j + 1), sums[j + 1], (("B", j + 1),))  # behind what this backward waits for
        tasks.append(Task(("B", j), "compute", 2 * thirds[j], needs + ready))
        needs = (("B", j),)
    sent(("sum", 0), sums[0], needs)
    return tasks


def simulate(tasks: Sequence[Task]) -> list[float]:
    """When each ends."""
    done, free = {}, {}
    for task in tasks:
        start = max([free.get(task.stream, 0.0), *(done[name] for name in task.needs)])
        done[task.name] = free[task.stream] = start + task.seconds
    return list(done.values())


class Delta:
    """A simulation that is kept, and what comes before each task: in its stream, and by need."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks, self.recomputed, self.end, last = list(tasks), 0, simulate(tasks), {}
        place = {task.name: at for at, task in enumerate(tasks)}
        self.before: list[list[int]] = []
        for at, task in enumerate(tasks):
            self.before.append([place[name] for name in task.needs] + last.get(task.stream, []))
            last[task.stream] = [at]

    def change(self, tasks: Sequence[Task]) -> float:
        """The time with these in place of the old ones."""
        moved = set()
        for at, (old, new) in enumerate(zip(self.tasks, tasks)):
            if old.seconds != new.seconds or not moved.isdisjoint(self.before[at]):
                self.recomputed += 1
                end = max([0.0, *(self.end[other] for other in self.before[at])]) + new.seconds
                if end != self.end[at]:
                    moved.add(at)
                    self.end[at] = end
        self.tasks = list(tasks)
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


def flexflow(problem: Problem, steps: int = 2000, beta: float | None = None, seed: int = 0) -> SearchResult:
    """The fastest that the walk looked at. By default beta accepts one in e a fifth of the start slower."""
    priced: dict[tuple[Option, ...], float] = {}
    for _ in walk(problem, steps, beta, seed, priced):
        pass
    best = min(priced, key=priced.__getitem__)
    return SearchResult(best, priced[best], len(priced))


def placement_seconds(problem: Problem, placement: Sequence[int]) -> float:
    """Forward and backward of an operator as one action; the message is that of the widest layer."""
    ranks = [[] for _ in range(problem.devices)]
    for microbatch in range(problem.microbatches):
        for layer, device in enumerate(placement):
            ranks[device].append(F(layer, microbatch))
    alone = Option(())
    times = {i: problem.compute_seconds(layer, alone, ()) for i, layer in enumerate(problem.layers)}
    size = max(layer.takes for layer in problem.layers[1:]) * problem.rows * problem.element_bytes
    message = 2 * size / problem.levels[-1].bytes_per_s
    schedule = Schedule("placement", ranks, len(times), problem.microbatches)
    return pipeline_simulate.simulate(schedule, Costs(F=1, send=message, stage=times)).makespan


def reinforce(problem: Problem, steps: int = 100, batch: int = 16, rate=0.7, seed: int = 0) -> SearchResult:
    """Where the policy ends: its likeliest placement. Looked at: different ones that it drew."""
    draw, operators, devices = numpy.random.default_rng(seed), len(problem.layers), problem.devices
    logits, time = numpy.zeros((operators, devices)), cache(lambda placed: placement_seconds(problem, placed))
    seen = {}
    for _ in range(steps):
        shares = numpy.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        below = shares.cumsum(1)[None] < draw.random((batch, operators, 1))
        placed = numpy.minimum(below.sum(2), devices - 1)
        seen |= {(one := tuple(map(int, row))): time(one) for row in placed}
        reward = -numpy.log([seen[tuple(map(int, row))] for row in placed])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-9)
        drawn = numpy.eye(devices)[placed]  # [batch, operators, devices]
        logits += rate * (advantage[:, None, None] * (drawn - shares)).mean(0)
    likeliest = tuple(map(int, logits.argmax(1)))
    return SearchResult(likeliest, time(likeliest), len(seen))


@cache
def dims_of(layers: int) -> dict[str, tuple[str, str]]:
    """Dims of every tensor: x0, W0, x1, ..; operator i makes x(i+1) of x(i) and W(i)."""
    activations = {f"x{i}": ("m", f"f{i}") for i in range(layers + 1)}
    return activations | {f"W{i}": (f"f{i}", f"f{i + 1}") for i in range(layers)}


def propagate(cuts: dict[str, str], layers: int) -> dict[str, str]:
    """Until nothing follows any more: forward and backward through every operator."""
    dims, cuts, before = dims_of(layers), dict(cuts), None
    while cuts != before:
        before = dict(cuts)
        for i in range(layers):
            around = (f"x{i}", f"W{i}", f"x{i + 1}")
            for along in [cuts[name] for name in around if name in cuts]:
                for name in around:
                    if name not in cuts and along in dims[name]:
                        cuts[name] = along
    return cuts


def shardings_of(cuts: dict[str, str], layers: int) -> list[str]:
    """What each operator does: rows where its x is cut by them (weights gathered, if those are cut)."""
    found = []
    for i in range(layers):
        w = cuts.get(f"W{i}")
        by_rows, by_weight = "sdp" if w else "dp", {f"f{i}": "row", f"f{i + 1}": "col"}.get(w, "all")
        found.append(by_rows if cuts.get(f"x{i}") == "m" else by_weight)
    return found


def moves(cuts: dict[str, str], problem: Problem) -> list[dict[str, str]]:
    """Where each decision that is left leads to, that of the largest tensor first."""
    layers, sizes = len(problem.layers), {f"W{i}": layer.weights for i, layer in enumerate(problem.layers)}
    sizes |= {f"x{i}": layer.takes * problem.rows for i, layer in enumerate(problem.layers)}
    free = sorted((name for name in sizes if name not in cuts), key=lambda name: (-sizes[name], name))
    return [propagate({**cuts, name: dim}, layers) for name in free for dim in dims_of(layers)[name]]


def pricer(problem: Problem):
    """Seconds of the shardings of a set of cuts; infinite beyond the memory."""
    if len(problem.levels) != 1:
        raise ValueError(f"automap searches one axis, not {len(problem.levels)}; give one level")
    shardings, layers = ("all", "dp", "sdp", "col", "row"), len(problem.layers)
    graph = problem.graph(options=[[Option((sharding,)) for sharding in shardings]] * layers)

    def price(cuts: dict[str, str]) -> float:
        picks = [shardings.index(sharding) for sharding in shardings_of(cuts, layers)]
        return graph.cost(picks) if graph.bytes(picks) <= problem.memory_bytes else math.inf

    return price


def automap(problem: Problem, rollouts: int = 200, seed: int = 0, explore: float = 0.5) -> SearchResult:
    """The fastest shardings for the layers; looked at: different sets of cuts that were priced."""
    draw, price, layers = random.Random(seed), pricer(problem), len(problem.layers)
    slow = min(price(dict.fromkeys(("x0", "x1"), "m")), 1.0)  # the scale of rewards
    tree: dict[tuple, tuple] = {}  # (cuts, are they final) -> [visits, sum of rewards]
    best, seen = (math.inf, []), set()
    for _ in range(rollouts):
        cuts, path, final = {}, [(frozenset(), False)], False
        while path[-1] in tree and not final:  # down to a node that is new
            cuts, final = _next(path, cuts, tree, problem, explore)
        while not final and (further := moves(cuts, problem)) and draw.random() > 0.3:
            cuts = draw.choice(further)
        seen.add(frozenset(cuts.items()))
        cost = price(cuts)
        best = min(best, (cost, shardings_of(cuts, layers)))
        for node in path:
            visits, rewards = tree.get(node, (0, 0.0))
            tree[node] = visits + 1, rewards + slow / (slow + cost)
    cost, shardings = cheapest([best], problem.memory_bytes)
    return SearchResult(tuple(Option((sharding,)) for sharding in shardings), cost, len(seen))


def _next(path: list, cuts: dict, tree: dict, problem: Problem, explore: float) -> tuple[dict, bool]:
    """One node further: the first that is new, else by upper confidence bound. To stop is a move too."""
    nodes = [(frozenset(then.items()), False) for then in moves(cuts, problem)]
    nodes.append((frozenset(cuts.items()), True))
    log_visits = math.log(tree[path[-1]][0])

    def bound(node) -> float:
        visits, rewards = tree.get(node, (0, 0))
        return rewards / visits + explore * math.sqrt(log_visits / visits) if visits else math.inf

    path.append(max(nodes, key=bound))
    return dict(path[-1][0]), path[-1][1]


def every_set_of_cuts(problem: Problem) -> SearchResult:
    """The least of all that decisions lead to."""
    seen = [{}]
    for cuts in seen:  # grows
        for then in moves(cuts, problem):
            if then not in seen:
                seen.append(then)
    return least(seen, pricer(problem))


class Config(NamedTuple):
    zero: int
    rows: int  # of a microbatch on a device


def memory(problem: Problem, config: Config) -> float:
    """Bytes of a device in float32: states as ZeRO cuts them, and each layer's input and inner results."""
    parameters = sum(layer.weights for layer in problem.layers)
    kept = sum(layer.takes + layer.keeps for layer in problem.layers)
    states = zero_bytes(parameters, problem.devices, config.zero, weight=4, gradient=4, optimizer=8)
    return states + config.rows * kept * problem.element_bytes


def sent_bytes(parameters: int, devices: int, zero: int, microbatches: int, element_bytes: int = 4) -> float:
    times = (2, 2, microbatches + 1, 3 * microbatches)[zero]
    return times * parameters * element_bytes * (devices - 1) / devices


def step_seconds(problem: Problem, config: Config, launch_s: float = 1e-4) -> float:
    """Of all rows of a step, those of `problem.microbatches`, shared out to the devices."""
    microbatches = problem.rows * problem.microbatches // (config.rows * problem.devices)
    flops = 3 * sum(layer.flops for layer in problem.layers) * config.rows
    parameters = sum(layer.weights for layer in problem.layers)
    sent = sent_bytes(parameters, problem.devices, config.zero, microbatches, problem.element_bytes)
    work = microbatches * (launch_s * len(problem.layers) + flops / problem.flops_per_s)
    return work + sent / min(level.bytes_per_s for level in problem.levels)


def grid(problem: Problem) -> list[Config]:
    """Every stage with every microbatch that halves a device's rows, the largest first."""
    rows = problem.rows * problem.microbatches // problem.devices
    halved = [rows >> times for times in range(rows.bit_length()) if rows % (1 << times) == 0]
    return [Config(zero, size) for zero in range(4) for size in halved]


def fitting(problem: Problem) -> list[Config]:
    return [config for config in grid(problem) if memory(problem, config) <= problem.memory_bytes]


def autotune(problem: Problem, run: Callable[[Config], float] | None = None) -> SearchResult:
    """The fastest of what was run; of equal ones that which ran first. Looked at: runs."""
    run = run or (lambda config: step_seconds(problem, config))
    tried: list[tuple[float, Config]] = []
    for _, stage in groupby(fitting(problem), key=lambda config: config.zero):
        before = math.inf
        for config in stage:
            time = run(config)
            tried.append((time, config))
            if time > before:
                break
            before = time
    time, best = cheapest(tried, problem.memory_bytes)
    return SearchResult(best, time, len(tried))


def every_config(problem: Problem) -> SearchResult:
    """The fastest of the whole grid that fits; looked at: the grid."""
    best = least(fitting(problem), lambda config: step_seconds(problem, config))
    return best._replace(looked_at=len(grid(problem)))
