"""Networks: hosts, switches, distances and cuts against closed forms, brute force and matrices."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from minitrain.systems.network.graph import Graph
from minitrain.systems.network.topologies import bcube, cubes, dcell, fat_tree, jellyfish, torus


def hops_by_matrices(graph: Graph) -> np.ndarray:
    """[node, node] hops where every node passes traffic on, by powers of the adjacency matrix."""
    nodes = list(graph.next)
    adjacent = np.array([[(a, b) in graph.rates for b in nodes] for a in nodes]) | np.eye(
        len(nodes), dtype=bool
    )
    reach, hops = np.eye(len(nodes), dtype=bool), np.zeros((len(nodes),) * 2, dtype=int)
    while not reach.all():
        hops += ~reach
        reach = reach @ adjacent
    return hops


@pytest.mark.parametrize("graph", [torus(3, 4), bcube(3, 1), dcell(3, 1), jellyfish(12, 6, 2)])
def test_distances_are_those_of_matrices(graph):
    hops, nodes = hops_by_matrices(graph), list(graph.next)
    assert all(graph.distances(b)[a] == hops[i, j] for i, a in enumerate(nodes) for j, b in enumerate(nodes))


def test_ports_of_every_switch():
    """No switch has more cables than ports, no port is free in what is regular."""
    for graph, ports in ((fat_tree(4), 4), (fat_tree(6), 6), (jellyfish(20, 5, 2, seed=3), 5)):
        assert {len(graph.next[switch]) for switch in graph.switches} == {ports}
    for dims in ((2,), (2, 2), (3, 4), (2, 3, 4)):
        degrees = Counter(len(neighbours) for neighbours in torus(*dims).next.values())
        assert degrees == {sum(min(size - 1, 2) for size in dims): prod(dims)}
    assert {
        len(cubes(range(8), (2, 2, 2), size=2).next[host]) for host in cubes(range(8), (2, 2, 2), 2).hosts
    } == {6}


def test_failed_nodes_are_gone():
    graph = fat_tree(4).without(("core", 0, 0), ("core", 0, 1), ("agg", 0, 0))
    assert graph.diameter() == 6 and len(graph.hosts) == 16
    with pytest.raises(ValueError, match="no path leads"):
        fat_tree(4).without(("edge", 0, 0)).onward((0, 0, 0), (1, 0, 0))
