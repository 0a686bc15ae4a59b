"""Cuts, trees that share no cable, and sums inside the network: brute force, real schedules, closed forms."""

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import ceil, log

import pytest

from minitrain.systems.communication.algorithms import ring_all_reduce
from minitrain.systems.communication.chunk_schedule import check, sent_shares
from minitrain.systems.communication.synthesis import Program
from minitrain.systems.network.graph import Graph
from minitrain.systems.network.packings import arriving, max_flow, spanning_trees, switch_tree
from minitrain.systems.network.topologies import cube_mesh, leaf_spine, torus


def smallest_cut(graph: Graph, a, b) -> int:
    """Over all sets of nodes with a and without b."""
    others = [node for node in graph.next if node not in (a, b)]
    sides = (side for size in range(len(others) + 1) for side in combinations(others, size))
    return min(graph.cut({a, *side}) for side in sides)


def check_trees(graph: Graph, root, trees) -> None:
    """Each spans, from the root on; none uses more of a link than there is."""
    used = Counter((parent, node) for tree in trees for node, parent in tree.items())
    assert all(count <= graph.rates[link] for link, count in used.items())
    for tree in trees:
        reached = [root]
        for node, parent in tree.items():
            assert parent in reached and node not in reached
            reached.append(node)
        assert set(reached) == set(graph.next)


def test_flow_is_the_smallest_cut():
    for graph in (cube_mesh(volta=True), torus(2, 4), leaf_spine(2, 2, 3), cube_mesh().without(1, 6)):
        for a, b in combinations(graph.hosts, 2):
            assert max_flow(graph, a, b) == smallest_cut(graph, a, b)


def test_blink_trees():
    """A job gets some GPUs of a DGX-1V: as many trees as its smallest cut, and each allocation broadcasts."""
    count = {}
    for gpus in (range(4), range(5), range(6), range(8), (0, 1, 4, 5, 7)):
        graph = cube_mesh(volta=True).without(*set(range(8)) - set(gpus))
        trees = spanning_trees(graph, 0)
        check_trees(graph, 0, trees)
        assert len(trees) == min(smallest_cut(graph, 0, other) for other in gpus[1:])
        count[len(gpus)] = count.get(len(gpus), len(trees))
        if gpus == range(len(gpus)):
            program = Program(len(gpus), len(trees))  # a chunk of its own in each tree, parents first
            for index, tree in enumerate(trees):
                for rank, parent in tree.items():
                    program.copy(index, parent, rank)
            check(program.schedule(), "broadcast")
    assert count == {4: 4, 5: 2, 6: 3, 8: 6}


def test_netagg_switchagg_camdoop():
    """64 workers under switches of four: sums arrive four times at the root, not 64 times; a 3D torus has six trees."""
    tree = switch_tree(64, 4)
    root = next(parent for parent in tree.values() if parent not in tree)
    units_of = lambda sums: arriving(tree, 64, sums).items()
    into = lambda sums: sum(units for (_, parent), units in units_of(sums) if parent == root)
    assert (into(True), into(False)) == (4, 64)
    graph = torus(3, 3, 3)
    trees = spanning_trees(graph, (0, 0, 0))
    check_trees(graph, (0, 0, 0), trees)
    assert len(trees) == 6 == max_flow(graph, (0, 0, 0), (1, 1, 1))


def test_sharp():
    """Up and down a tree of switches with 40 ports: 2 ceil(log40 n) hops in place of a ring's 2(n-1)."""
    hops = []
    for n in (40, 1_600, 64_000):
        tree, node, up = switch_tree(n, 40), 0, 0
        while node in tree:
            node, up = tree[node], up + 1
        hops.append(2 * up)
        assert up == ceil(log(n, 40) - 1e-9)
    assert hops == [2, 4, 6] and len(ring_all_reduce(40).steps) == 78
    assert set(arriving(switch_tree(40, 40), 40).values()) == {1}  # S up, and as much down


@pytest.mark.parametrize("n, ratio", [(2, Fraction(1)), (8, Fraction(7, 4)), (32, Fraction(31, 16))])
def test_inet_aggregation(n, ratio):
    """A host sends S, and gets S; in a ring each sends 2(n-1)/n S: towards twice as much."""
    up = {units for (node, _), units in arriving(switch_tree(n, n), n).items()}
    assert {share / max(up) for share in sent_shares(ring_all_reduce(n))} == {ratio} and up == {1}


def test_nvswitch_sharp():
    """Eight GPUs on one switch that adds: 7/4 as much sent by the ring."""
    sent = Counter()
    for (node, _), units in arriving(switch_tree(8, 8), 8).items():
        sent[node] += units
    assert [s / sent[gpu] for gpu, s in enumerate(sent_shares(ring_all_reduce(8)))] == [Fraction(7, 4)] * 8
