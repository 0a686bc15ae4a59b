"""Searches for the shardings of layers, all devices together: each against every choice of its space."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy
import pytest

from minitrain.course.race import every_placement, every_simulated
from minitrain.systems.plan.search import layerwise, simulated
from minitrain.systems.plan.search import problem as problems
from minitrain.systems.plan.search.layerwise import autoddl, descend, eliminate, frontier, optcnn, tensoropt
from tests.systems.plan.search.drawn import blocks, chain


def drawn_graph(seed, layers, options, edges):
    draw = random.Random(seed)
    row = lambda: [draw.randint(0, 99) for _ in range(options)]
    names = [problems.Option((str(i),)) for i in range(options)]
    matrix = {edge: [row() for _ in range(options)] for edge in edges}
    rows = lambda: [row() for _ in range(layers)]
    return problems.Graph([names] * layers, rows(), matrix, rows())


def test_exhaustive():
    """Every choice once; of equal ones the first; within memory; none fits: refused."""
    names = [problems.Option(("a",)), problems.Option(("b",))]
    equal = problems.Graph([names] * 2, [[1, 1], [2, 2]], {(0, 1): [[0, 0], [0, 0]]}, [[5, 1], [5, 1]])
    assert problems.every(equal) == ((names[0], names[0]), 3, 4)
    assert problems.every(equal, memory_bytes=6).choice == (names[0], names[1])
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        problems.every(equal, memory_bytes=1)
    problem = chain(0, layers=3)
    found = problems.exhaustive(problem)
    picks = [problem.options(problem.levels).index(o) for o in found.choice]
    assert found.looked_at == 16**3 and found.cost == problem.graph().cost(picks)


def test_optcnn():
    """Elimination costs what every choice does: a chain of 6 layers with 4 options; branches that meet again
    (edge elimination); a graph that does not shrink; chains of the problem, with and without skips."""
    six = [(i, i + 1) for i in range(5)]
    shapes = [
        (six, 6),
        ([*six, (0, 2), (2, 5)], 6),
        ([(0, 1), (1, 3), (0, 2), (2, 3), (3, 4)], 5),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 4),
    ]
    for seed, (edges, layers) in product(range(4), shapes):
        graph = drawn_graph(seed, layers, 4, edges)
        found = eliminate(graph)
        picks = [graph.options[0].index(option) for option in found.choice]
        assert found.cost == problems.every(graph).cost == graph.cost(picks)
        assert (found.looked_at < graph.size) == (len(edges) < 6 or layers == 6)
    assert eliminate(drawn_graph(0, 6, 4, six)).looked_at == 4 * 4**3 + 4**2
    for problem in map(chain, range(2)):
        assert optcnn(problem).cost == problems.exhaustive(problem).cost
        assert optcnn(problem).looked_at == 2 * 16**3 + 16**2
        four = tuple(problems.linear(f"{i}", 64, 64) for i in range(4))
        skipping = problems.Problem(four, 256, problem.levels, 2.0**40, skips=((0, 2), (1, 3)))
        assert optcnn(skipping).cost == problems.exhaustive(skipping).cost


def unbeaten(graph) -> list[tuple]:
    """(seconds, bytes) of all choices of which none with fewer bytes is as fast, the fastest first."""
    best = {}
    for cost, size, _ in graph.every():
        best[size] = min(cost, best.get(size, cost))
    return sorted((c, size) for size, c in best.items() if not any(best[s] <= c for s in best if s < size))


def test_tensoropt():
    """The front is the Pareto set of all choices, point by point, and the fastest within a cap is read off it."""
    for seed in range(4):
        graph = drawn_graph(seed, 5, 4, [(i, i + 1) for i in range(4)])
        front, looked_at = frontier(graph)
        assert [point[:2] for point in front] == unbeaten(graph)
        assert all((graph.cost(picks), graph.bytes(picks)) == (cost, size) for cost, size, picks in front)
        assert looked_at < graph.size
        for cap in {size for _, size, _ in front}:
            assert problems.cheapest(p for p in front if p[1] <= cap)[0] == problems.every(graph, cap).cost
            assert [p for p in front if p[1] <= cap] == frontier(graph, cap)[0]
    for seed in range(2):
        problem = chain(seed, shardings=("dp", "sdp", "col"))
        found = tensoropt(problem)
        assert [point[:2] for point in found.choice] == unbeaten(problem.graph())
        cap = found.choice[len(found.choice) // 2][1]
        assert tensoropt(tight := replace(problem, memory_bytes=cap)).cost == problems.exhaustive(tight).cost
        with pytest.raises(ValueError, match="nothing fits"):
            tensoropt(replace(problem, memory_bytes=found.choice[-1][1] - 1))
    alone = problems.Graph([range(4)], [[2, 1, 1, 3]], {}, [[5, 5, 5, 4]])
    assert frontier(alone)[0] == [(1, 5, (1,)), (3, 4, (3,))]
    with pytest.raises(ValueError, match="no chain"):
        frontier(drawn_graph(0, 3, 2, [(0, 1), (1, 2), (0, 2)]))


def test_flexflow():
    """The walk finds what every choice, simulated, gives; a changed layer simulated alone is the whole
    simulation; and the walk's probabilities are exp(-beta·cost), by its transition matrix and by counting."""
    problem = problems.example(shardings=("dp", "col", "row"))
    found, best = simulated.flexflow(problem), every_simulated(problem)
    assert found.cost == best.cost and found.looked_at < best.looked_at / 4
    tasks = simulated.tasks_of(problem, found.choice)
    work = (problem.compute_seconds(*one, problem.levels) for one in zip(problem.layers, found.choice))
    assert sum(task.seconds for task in tasks if task.stream == "compute") == pytest.approx(sum(work))
    check_delta(problem)
    check_stationary()


def check_delta(problem):
    draw, options = random.Random(1), problem.options(problem.levels)
    choice = [options[0]] * 4
    delta, saved = simulated.Delta(simulated.tasks_of(problem, choice)), 0
    for _ in range(100):
        choice[draw.randrange(4)] = draw.choice(options)
        tasks, before = simulated.tasks_of(problem, choice), delta.recomputed
        assert delta.change(tasks) == max(delta.end) and delta.end == simulated.simulate(tasks)
        saved += len(tasks) - (delta.recomputed - before)
    assert saved > 0.2 * 100 * len(tasks)
    still = delta.recomputed
    delta.change(tasks)  # nothing changed, nothing computed
    assert delta.recomputed == still


def check_stationary():
    problem = chain(3, layers=2, levels=1, shardings=("dp", "col", "row"))
    options = problem.options(problem.levels)
    states = list(product(options, repeat=2))
    cost = {state: max(simulated.simulate(simulated.tasks_of(problem, state))) for state in states}
    beta, moves = 2 / min(cost.values()), numpy.zeros((9, 9))
    for i, state in enumerate(states):
        for layer, option in product(range(2), options):
            proposal = (*state[:layer], option, *state[layer + 1 :])
            chance = simulated.acceptance(cost[state], cost[proposal], beta) / 6
            moves[i, states.index(proposal)] += chance
            moves[i, i] += 1 / 6 - chance
    wanted = numpy.array([math.exp(-beta * cost[state]) for state in states])
    wanted /= wanted.sum()
    assert abs(wanted @ moves - wanted).max() < 1e-15 and abs(moves.sum(1) - 1).max() < 1e-15
    assert wanted.max() > 4 * wanted.min()  # uniform would not do
    visits = Counter(simulated.walk(problem, 10_000, beta, seed=0))
    counted = numpy.array([visits[state] for state in states]) / 10_000
    assert abs(counted - wanted).max() < 0.03


def test_tofu():
    """Two halvings, one after the other, move the elements of the best of all cuts in both at once; workers that
    have just their stored quarters compute the MLP's results by fetching exactly so many, the fewest there are."""
    for seed in range(12):
        problem = chain(seed, layers=2)
        found, best = layerwise.tofu(problem), layerwise.every_halving(problem)
        assert found.cost == best.cost and best.looked_at == 4**5 and found.looked_at == 2 * 2 * 8 * 9
    for seed in range(4):
        a, b, c = random.Random(seed).choices((8, 16, 32, 96), k=3)
        small = replace(problem, layers=(problems.linear("0", a, b), problems.linear("1", b, c)), rows=16)
        assert fetched(small, seed) == layerwise.tofu(small).cost
    with pytest.raises(ValueError, match="2 on each"):
        layerwise.tofu(problems.example(levels=(problems.Level(4, 1.0),)))


def fetched(problem, seed):
    """Elements that pass between four workers that run the plan; each owns a quarter of every tensor. No other way
    to cut an operator passes fewer."""
    halved = layerwise.tofu(problem).choice
    draw, layers = numpy.random.default_rng(seed), problem.layers
    integer = lambda *shape: draw.integers(-2, 3, shape).astype(float)
    x, w = [integer(problem.rows, layers[0].takes)], [integer(layer.takes, layer.gives) for layer in layers]
    for matrix in w:
        x.append(x[-1] @ matrix)
    dy = [integer(problem.rows, layers[-1].gives)]
    for matrix in reversed(w):
        dy.insert(0, dy[0] @ matrix.T)
    total, workers = 0, [*product(range(2), repeat=2)]
    for i in range(len(layers)):
        stored = layerwise.stored_as(halved.activations[i], halved.matrices[i], halved.activations[i + 1])
        for name, operands, result in [
            ("forward", {"mk": x[i], "kn": w[i]}, x[i + 1]),
            ("dx", {"mn": dy[i + 1], "kn": w[i]}, dy[i]),
            ("dW", {"mk": x[i], "mn": dy[i + 1]}, x[i].T @ dy[i + 1]),
        ]:
            out, way = layerwise.OPERATORS[name].split("->")[1], halved.operators[i, name]
            tensors, assembled = operands | {out: result}, numpy.zeros_like(result)
            ways = [passed(tensors, stored, one, workers) for one in product("mkn", repeat=2)]
            total += min(ways)
            assert passed(tensors, stored, way, workers) == min(ways)
            for worker in workers:
                has = {of: region(array.shape, of, way, worker) for of, array in tensors.items()}
                parts = [numpy.where(has[of], array, 0) for of, array in operands.items()]
                assembled += numpy.where(has[out], numpy.einsum(layerwise.OPERATORS[name], *parts), 0)
            assert (assembled == result).all()
    return total


def passed(tensors, stored, way, workers):
    """Elements of an operator's tensors that workers need, cut that way, and have not stored."""
    count = 0
    for (of, array), worker in product(tensors.items(), workers):
        own, need = (region(array.shape, of, cuts, worker) for cuts in (stored[of], way))
        assert own.sum() * 4 == own.size  # 2^2 even pieces
        count += (need & ~own).sum()
    return count


def region(shape, letters, along, worker):
    """What a worker has of a tensor that is cut along these indices, step by step: digit s of the index."""
    mask = numpy.ones(shape, bool)
    for step, (index, place) in enumerate(zip(along, worker)):
        if index in letters:
            axis = letters.index(index)
            digit = numpy.arange(shape[axis]) * 2 ** (step + 1) // shape[axis] % 2 == place
            mask &= digit[:, None] if axis == 0 else digit[None, :]
    return mask


ALEXNET = (
    # name, elements of an input and an output sample, weights, FLOPs of a sample forward
    problems.Layer("conv1", 3 * 224 * 224, 96 * 55 * 55, 96 * 3 * 11 * 11, 2 * 96 * 55 * 55 * 3 * 11 * 11),
    problems.Layer("conv2", 96 * 27 * 27, 256 * 27 * 27, 256 * 96 * 25, 2 * 256 * 27 * 27 * 96 * 25),
    problems.Layer("conv3", 256 * 13 * 13, 384 * 13 * 13, 384 * 256 * 9, 2 * 384 * 13 * 13 * 256 * 9),
    problems.Layer("conv4", 384 * 13 * 13, 384 * 13 * 13, 384 * 384 * 9, 2 * 384 * 13 * 13 * 384 * 9),
    problems.Layer("conv5", 384 * 13 * 13, 256 * 13 * 13, 256 * 384 * 9, 2 * 256 * 13 * 13 * 384 * 9),
    problems.linear("fc6", 256 * 6 * 6, 4096),
    problems.linear("fc7", 4096, 4096),
    problems.linear("fc8", 4096, 1000),
)


def test_hypar():
    """Of AlexNet's layers those with convolutions become data-parallel, the wide products model-parallel, on
    every one of four levels; on each level the sum is that of the best of 2^L choices."""
    problem = problems.Problem(ALEXNET, 256, (problems.Level(2, 2.0**30),) * 4, 2.0**42)
    found, best = layerwise.hypar(problem), layerwise.hypar(problem, problems.every)
    assert found == best._replace(looked_at=found.looked_at) and best.looked_at == 4 * 2**8
    shardings = {layer.name: set(option.shardings) for layer, option in zip(ALEXNET, found.choice)}
    assert all(shardings[f"conv{i}"] == {"dp"} for i in range(1, 6))
    assert shardings["fc6"] == shardings["fc7"] == {"row"}
    assert found.cost < problem.cost([problems.Option(("dp",) * 4)] * 8, unit="bytes") / 2
    optimal = 0
    for problem in map(chain, range(10)):
        assert layerwise.hypar(problem).cost == layerwise.hypar(problem, problems.every).cost
        joint = problems.exhaustive(replace(problem, shardings=layerwise.HYPAR_SHARDINGS), "bytes").cost
        assert layerwise.hypar(problem).cost >= joint
        optimal += layerwise.hypar(problem).cost == joint
    assert 5 <= optimal < 10  # level after level is a heuristic


def test_autoddl():
    """Descents end within 10 sweeps where no layer alone improves; the best of them sends the least bytes."""
    traps = []
    for seed in range(6):
        problem = chain(seed)
        found, best = autoddl(problem), problems.exhaustive(problem, "bytes")
        assert found.cost == best.cost and found.looked_at < best.looked_at / 10
        draw, graph = random.Random(seed), problem.graph(unit="bytes")
        for _ in range(5):
            start = [draw.randrange(16) for _ in range(4)]
            picks, sweeps = descend(graph, start)
            assert sweeps < 10
            alone = ([*picks[:i], pick, *picks[i + 1 :]] for i, pick in product(range(4), range(16)))
            assert graph.cost(picks) == min(map(graph.cost, alone))
        traps.append(autoddl(problem, starts=1).cost > best.cost)
    assert any(traps)  # one start is not enough


def test_rl_placement():
    """On 6 operators and 2 devices the policy ends, for at least 9 of 10 seeds, at the fastest of all 64
    placements; it does on 4 layers and 4 devices; without the reward it does not."""
    layers = tuple(problems.linear(f"{i}", 256, 256) for i in range(6))
    six = problems.Problem(layers, 1024, (problems.Level(2, 2.0**33),), 2.0**40, microbatches=4)
    best = every_placement(six)
    assert best.looked_at == 64 and best.choice in ((0, 0, 0, 1, 1, 1), (1, 1, 1, 0, 0, 0))
    ends = [simulated.reinforce(six, seed=seed) for seed in range(10)]
    assert sum(found.cost == best.cost for found in ends) >= 9
    assert all(found.cost == simulated.placement_seconds(six, found.choice) for found in ends)
    blind = [simulated.reinforce(six, seed=seed, rate=0.0) for seed in range(10)]
    assert sum(found.cost == best.cost for found in blind) < 5
    slow = replace(six, levels=(problems.Level(2, 1.0),))  # whose messages cost more than anything else
    assert {*simulated.reinforce(slow).choice} in ({0}, {1})
    assert simulated.reinforce(problems.example()).cost == every_placement(problems.example()).cost


def test_automap():
    """On an MLP that does not fit whole, the search finds Megatron's cut, by columns and then by rows, whose forward has
    one all-reduce and nothing else; others end at the best of all cuts, and few rollouts do as they learn."""
    levels = (problems.Level(4, 2.0**34),)
    layers = problems.linear("up", 1024, 4096), problems.linear("down", 4096, 1024)
    mlp = problems.Problem(layers, 256, levels, 2.0**44, ends="whole", memory_bytes=60 * 2**20)
    found = simulated.automap(mlp)
    assert [option.shardings for option in found.choice] == [("col",), ("row",)]
    up, down = mlp.layers
    assert mlp.edge_bytes(up, ("col",), ("row",), levels) == ((0,), (0,))
    assert mlp.edge_bytes(down, ("row",), None, levels)[0] == (2 * 3 / 4 * 256 * 1024 * 4,)
    assert simulated.propagate({"W0": "f1"}, 2) == {"W0": "f1", "x1": "f1", "W1": "f1"}  # one decision
    assert simulated.shardings_of(simulated.propagate({"x0": "m"}, 2), 2) == ["dp", "dp"]
    assert simulated.shardings_of(simulated.propagate({"x0": "m", "W1": "f1"}, 2), 2) == ["dp", "sdp"]
    for seed in range(3):
        problem = replace(problems.example(), levels=levels) if seed == 0 else chain(seed, levels=1)
        found, best = simulated.automap(problem, seed=seed), simulated.every_set_of_cuts(problem)
        assert found.cost == best.cost and found.looked_at < best.looked_at / 2
    hit = lambda seed, **more: simulated.automap(problem, 50, seed, **more).cost == best.cost
    assert all(map(hit, range(10))) and sum(hit(seed, explore=1e9) for seed in range(10)) < 5  # visits alone
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        simulated.automap(replace(mlp, memory_bytes=1))
    with pytest.raises(ValueError, match="one axis"):
        simulated.automap(problems.example())


def test_words_meet_levels():
    cases = [("past at least one", dict(skips=((0, 1),))), ("shardings", dict(shardings=("mp",)))]
    for said, changes in cases:
        with pytest.raises(ValueError, match=said):
            problems.example(**changes)
    for devices in (3, 8):
        with pytest.raises(ValueError, match=f"{devices} devices do not fill levels"):
            problems.example().mesh(devices)
    assert blocks(0).graph().size == 9**4
