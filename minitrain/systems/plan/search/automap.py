"""Automap: few decisions on tensors, carried on by propagation, in an order that a tree search finds.

    decide         cut a tensor along one of its dims over all devices           ("x1", "f1")
    propagate      y[m, g] = x[m, f] · W[f, g]: what shares the dim and is not decided yet is cut alike
    sum            an operator whose f is cut: every device has a term of y, summed for who needs it

So one decision, the hidden units of an MLP, cuts both its matrices, by columns and by rows. The tree's nodes
are sets of decisions; Monte Carlo tree search (UCT) plays each to a drawn end, prices the layers' shardings
with problem.py, and goes on where the mean is good.
Alabed et al. 2022, arXiv:2210.06352; Schaarschmidt et al. 2021, arXiv:2112.02958. Differs: they rank the
tensors by a learned model; here those with most bytes come first, and one axis is searched.
"""

import math
import random
from functools import cache

from minitrain.systems.plan.search.problem import Option, Problem, SearchResult, cheapest, least


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
    layers = len(problem.layers)
    sizes = {f"W{i}": layer.weights for i, layer in enumerate(problem.layers)}
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
    waiting, seen = [{}], [{}]
    while waiting:
        for then in moves(waiting.pop(), problem):
            if then not in seen:
                seen.append(then)
                waiting.append(then)
    return least(seen, pricer(problem))
