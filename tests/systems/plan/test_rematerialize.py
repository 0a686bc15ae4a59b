"""Checkmate's plans against all plans there are, by the paper's own equations."""

import random
from itertools import product
from math import isqrt

import pytest

from minitrain.systems.plan.rematerialize import Node, carried_out, checkmate, checkmate_chain


def program(nodes, kept, budget):
    """Cost of Checkmate's program (section 4.3 to 4.6) for a given S, or None if U exceeds the budget. S in
    rows by stage; R is the least that S and the graph ask for."""
    n, cost = len(nodes), 0
    users = [[j for j in range(n) if i in nodes[j].inputs] for i in range(n)]
    for t in range(n):
        R = [i == t or (i < t and kept[t + 1][i] > kept[t][i]) for i in range(n)]
        for i in reversed(range(t + 1)):
            for j in nodes[i].inputs:
                R[j] |= R[i] and not kept[t][j]
        U = sum(node.bytes for node, held in zip(nodes, kept[t]) if held)
        for k in range(t + 1):
            if R[k]:
                U += nodes[k].bytes
                if kept[t][k] or U + nodes[k].scratch > budget:
                    return None
                cost += nodes[k].cost
                for i in {*nodes[k].inputs, k}:
                    if not kept[t + 1][i] and not any(R[j] for j in users[i] if j > k):
                        U -= nodes[i].bytes
    return cost


def brute_force(nodes, budget):
    """The least cost over every S there is."""
    n = len(nodes)
    places = [(t, i) for t in range(1, n) for i in range(t)]
    best = None
    for bits in product((0, 1), repeat=len(places)):
        kept = [[0] * n for _ in range(n + 1)]
        for (t, i), bit in zip(places, bits):
            kept[t][i] = bit
        cost = program(nodes, kept, budget)
        if cost is not None and (best is None or cost < best):
            best = cost
    return best


def some_graph(seed: int) -> list[Node]:
    draw = random.Random(seed)
    nodes = []
    for i in range(6):
        sizes = draw.randint(1, 9), draw.randint(1, 9)
        inputs = sorted(draw.sample(range(i), draw.randint(min(i, 1), min(i, 2))))
        nodes.append(Node(*sizes, tuple(inputs), draw.choice((0, 0, 3))))
    return nodes


def smallest(nodes) -> int:
    return max(sum(nodes[j].bytes for j in node.inputs) + node.bytes + node.scratch for node in nodes)


def forward_and_back(costs, sizes) -> list[Node]:
    """Backward i needs x_i and the gradient behind it."""
    n = len(costs)
    nodes = [Node(cost, size, (i - 1,) if i else ()) for i, (cost, size) in enumerate(zip(costs, sizes))]
    for i in reversed(range(n)):
        nodes.append(
            Node(2 * costs[i], sizes[i - 1] if i else 0, ((i - 1,) if i else ()) + (len(nodes) - 1,))
        )
    return nodes


def sqrt_steps(n: int) -> list[tuple[str, int]]:
    """Chen's segments on that graph, by hand: hold the last x of each segment, run a segment again when its
    backward comes; what is in a segment is let go as soon as used."""
    size = isqrt(n - 1) + 1
    steps, held = [], set()

    def drop(node):
        if node in held:
            held.remove(node)
            steps.append(("drop", node))

    for i in range(n):
        steps.append(("compute", i))
        held.add(i)
        if i and i % size:  # node i - 1 is x_i, a segment's input if i is a multiple of size
            drop(i - 1)
    for i in reversed(range(n)):
        start = i - i % size
        for j in range(start, i):
            if j not in held:
                steps.append(("compute", j))
                held.add(j)
        steps.append(("compute", 2 * n - 1 - i))
        held.add(2 * n - 1 - i)
        drop(2 * n - 2 - i)
        drop(i - 1)
    return steps


def test_checkmate():
    """Equal to brute force on 6-node graphs; never dearer than sqrt(n) at the peak that sqrt(n) has."""
    extra = []
    for seed in range(3):
        nodes = some_graph(seed)
        for budget in (smallest(nodes), smallest(nodes) + 4):
            plan = checkmate(nodes, budget)
            assert plan.cost == brute_force(nodes, budget) and plan.peak <= budget
            assert carried_out(nodes, plan.steps) == (plan.cost, plan.peak)
            extra.append(plan.extra)
        assert checkmate(nodes, sum(node.bytes + node.scratch for node in nodes)).extra == 0
    assert min(extra) > 0  # budgets under which something must be computed again
    # beside node 3 node 0 may stay, or 1 and 2: two cheap ones are computed again, not one dear
    nodes = [Node(9, 4), Node(1, 2), Node(1, 2), Node(1, 1, (), 5), Node(1, 1, (0, 1, 2, 3))]
    assert checkmate(nodes, 10).cost == brute_force(nodes, 10) == 13 + 2
    draw, dearer = random.Random(1), 0
    for n in (4, 6, 8, 9):
        costs, sizes = ([draw.randint(1, 9) for _ in range(n)] for _ in range(2))
        nodes = forward_and_back(costs, sizes)
        cost, peak = carried_out(nodes, sqrt_steps(n))
        plan = checkmate(nodes, peak)
        assert plan.cost <= cost and plan.peak <= peak
        dearer += plan.cost < cost
    assert dearer


def test_the_example_of_the_module():
    plan = checkmate([Node(1, 4), Node(1, 4, (0,)), Node(1, 1, (0, 1))], budget=9)
    steps = [*(("compute", node) for node in range(3)), *(("drop", node) for node in range(3))]
    assert plan == (3, 0, 9, tuple(steps)), "what goes at once goes in order"


def test_no_plan_and_too_large_an_operator_are_told_apart():
    nodes = [Node(1, 5), Node(1, 5), Node(1, 1, (0,)), Node(1, 1, (1,)), Node(1, 1, (0, 1, 2, 3))]
    assert checkmate([Node(1, 4), Node(1, 1, (0, 0))], 5).peak == 5, "what is read twice is held once"
    three = [Node(1, 1), Node(1, 1), Node(1, 1, (1, 0))]
    with pytest.raises(ValueError, match="^step 0, compute 2: node 0 is not held; compute it before$"):
        carried_out(three, [("compute", 2)])
    with pytest.raises(ValueError, match="node 4 alone needs 13 bytes, budget 12"):
        checkmate(nodes, 12)
    assert checkmate(nodes, 13).extra == 0
    # 0 and 1 are needed together at the end with 2 and 3, whose inputs they are: no order needs less
    nodes = [Node(1, 3), Node(1, 3, (0,)), Node(1, 3, (0,)), Node(1, 1, (1, 2))]
    with pytest.raises(ValueError, match="no plan of 4 nodes fits 8 bytes"):
        checkmate(nodes, 8)
    assert brute_force(nodes, 8) is None and checkmate(nodes, 9).cost == brute_force(nodes, 9)


def test_a_stage_computes_in_order_and_each_node_once():
    """As their program does: this graph fits 15 bytes if a stage may compute its nodes in any order."""
    costs = ((9, 1), (1, 3), (6, 7), (1, 5), (8, 4), (8, 2))
    inputs = ((), (0,), (0, 1), (1,), (0, 1, 3), (0, 2, 3))
    nodes = [Node(*cost, some) for cost, some in zip(costs, inputs)]
    assert brute_force(nodes, 15) is None and brute_force(nodes, 16) == checkmate(nodes, 16).cost
    with pytest.raises(ValueError, match="no plan of 6 nodes fits 15 bytes"):
        checkmate(nodes, 15)


def test_a_chain_of_equal_layers():
    """With room for everything nothing is computed again; the chain's graph is the one written by hand."""
    assert checkmate_chain([1] * 6, [1] * 6, 20).extra == 0
    for budget in (4, 5, 6):
        plan = checkmate_chain([1] * 6, [1] * 6, budget)
        assert plan.cost == checkmate(forward_and_back([1] * 6, [1] * 6), budget).cost
        assert plan.recomputed == plan.extra > 0 or budget == 7
