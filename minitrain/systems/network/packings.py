"""What a network carries at most: cuts, trees that share no cable, rings through all hosts, sums inside.

    max_flow(graph, a, b)            units per second over all paths from a to b: the smallest cut
    spanning_trees(graph, root)      as many as the smallest cut: what a broadcast can use at once (Blink)
    rings(graph)                     cycles through all hosts, as NCCL looks for in a cube mesh
    switch_tree, arriving            sums inside the network: how much arrives over each cable

k trees out of the root that share no cable broadcast S in S/k; no algorithm is faster, as k is some host's
cut. They always exist (Edmonds 1973), and are found one by one: a cable may be given to a tree if the rest
still has k - 1 units to its end (Lovász 1976). Backwards the same trees sum. Wang et al. 2020,
arXiv:1910.04940 (Blink); Mai et al. 2014 (NetAgg); Costa et al. 2012 (CamDoop); Graham et al. 2016 (SHARP).
Differs: Blink packs fractions of trees; where rates are whole numbers, whole trees reach the same.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf

from minitrain.pipeline.simulate import Time as Number
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.network.graph import Graph, Link, Node

Tree = dict[Node, Node]  # node -> parent


def max_flow(graph: Graph, source: Node, target: Node, rates: Mapping = {}, most: Number = inf) -> Number:
    """By shortest augmenting paths (Edmonds, Karp 1972), up to `most`. With cables of 1: how many paths share
    none. `rates`: in place of the graph's."""
    room, total = dict(rates or graph.rates), 0
    while total < most:
        came, reached = {source: source}, [source]
        for node in reached:  # grows
            for other in graph.next[node] if node == source or node not in graph.leaves else ():
                if other not in came and room[node, other]:
                    came[other] = node
                    reached.append(other)
        if target not in came:
            break
        path, node = [], target
        while node != source:
            path.append((came[node], node))
            node = came[node]
        pushed = min(room[link] for link in path)
        for a, b in path:
            room[a, b] -= pushed
            room[b, a] += pushed
        total += pushed
    return total


def spanning_trees(graph: Graph, root: Node) -> list[Tree]:
    """Out of `root` to all nodes, parents first; a link of rate r is in r of them at most."""
    require_ints(1, rates=list(graph.rates.values()))
    room, others = dict(graph.rates), graph.distances(root).keys() - {root}
    trees = []
    for left in reversed(range(min((max_flow(graph, root, node) for node in others), default=0))):
        tree: Tree = {}
        while len(tree) < len(others):
            inside = {root, *tree}
            for a, b in (link for link in room if link[0] in inside and link[1] not in inside and room[link]):
                room[a, b] -= 1
                if max_flow(graph, root, b, room, left) >= left:
                    tree[b] = a
                    break
                room[a, b] += 1
        trees.append(tree)
    return trees


def rings(graph: Graph) -> Iterator[list[Node]]:
    """Each cycle once, from hosts[0] on. Depth first: for a few dozen hosts."""
    number = {host: at for at, host in enumerate(graph.hosts)}

    def extended(path: list[Node]) -> Iterator[list[Node]]:
        if len(path) == len(number) > 2 and path[0] in graph.next[path[-1]]:
            if number[path[1]] < number[path[-1]]:
                yield path
        for other in graph.next[path[-1]]:
            if other in number and other not in path:
                yield from extended([*path, other])

    yield from extended([graph.hosts[0]])


def switch_tree(n: int, radix: int) -> Tree:
    """n hosts in a tree of switches, each of which joins up to `radix` nodes to one above."""
    require_positive_ints(n=n)
    require_ints(2, radix=radix)
    tree: Tree = {}
    level, below = 0, list(range(n))
    while level == 0 or len(below) > 1:
        level += 1
        tree |= {node: ("switch", level, i // radix) for i, node in enumerate(below)}
        below = list(dict.fromkeys(tree[node] for node in below))
    return tree


def arriving(tree: Mapping[Node, Node], hosts: int, sums: bool = True) -> Counter[Link]:
    """{(node, parent): units} when each host sends one unit to the root. A switch passes on the sum of what
    it gets; without `sums`, all of it."""
    require_positive_ints(hosts=hosts)
    carried: Counter[Link] = Counter()
    for node in range(hosts):
        while node in tree and not (sums and carried[node, tree[node]]):
            carried[node, tree[node]] += 1
            node = tree[node]
    return carried
