"""A network as a graph: cables that carry so much each way, routes, and what traffic loads on every cable.

    graph = fat_tree(8)                                      `topologies` has more; rank i is graph.hosts[i]
    loads(graph, permutation(graph.hosts), spray)            {link: seconds it is busy}, one unit a flow
    time_s(ring_all_reduce(16), S, fabric(graph, ecmp))      any schedule of `communication` on any network

A route is a function (graph, source, target, flow) -> {link: share of the flow's bytes}:

    ecmp               one shortest path: every switch hashes (source, target, flow) and takes that next hop
    spray              all shortest paths, divided evenly at every switch
    dimension_order    on a torus: along the first axis to its end, then the second, the short way round
    valiant            first to a switch in the middle, any, then on: any traffic loads like even traffic

With whole numbers and Fractions all loads are exact. Not modelled: packets, queues and latencies that grow
with them (`packets`), rates that change while flows end (`simulate.links`). Thaler, Hopps 2000, RFC 2992
(ECMP); Dally, Towles 2004, chapters 8 and 9 (dimension order, Valiant). Differs: spray and valiant are means
over all paths, not draws.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from hashlib import blake2b
from math import inf
from random import Random

from minitrain.pipeline.simulate import Time as Number
from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_ints, require_nonempty, require_nonnegative, require_positive
from minitrain.systems.communication.cost_model import Fabric, Path

Node = Hashable
Link = tuple[Node, Node]
Shares = dict[Link, Number]  # of a flow's bytes
Route = Callable[..., Shares]


class Graph:
    """`hosts` send and receive; a cable (a, b) or (a, b, units per second each way) is a link in each
    direction, parallel cables add up. `forwards`: traffic may pass through hosts. `hops(a, b)`: how far a
    link is when shortest paths are looked for."""

    def __init__(self, hosts: Iterable[Node], cables: Iterable[tuple], forwards=False, hops=lambda a, b: 1):
        self.hosts, self.cables, self.forwards, self.hops = list(hosts), list(cables), forwards, hops
        self.rates: dict[Link, Number] = {}
        self.next: dict[Node, list[Node]] = {host: [] for host in self.hosts}
        self.leaves = frozenset(() if forwards else self.hosts)  # no path leads through
        self._far: dict[Node, dict[Node, int]] = {}
        require_nonempty(hosts=self.hosts)
        for a, b, *rate in self.cables:
            require_positive(rate=rate or 1)
            for link in ((a, b), (b, a)):
                if link not in self.rates:
                    self.next.setdefault(link[0], []).append(link[1])
                self.rates[link] = self.rates.get(link, 0) + (rate[0] if rate else 1)

    switches = property(lambda self: list(self.next)[len(self.hosts) :])  # hosts came first

    def distances(self, target: Node) -> dict[Node, int]:
        """{node: hops to target}, of the nodes that reach it."""
        if target not in self.next:
            raise ValueError(f"{target!r} is no node of this network; a host is {self.hosts[-1]!r}")
        if target not in self._far:
            far, waiting = {target: 0}, [target]
            for node in waiting:  # grows: a node waits again when a shorter path to it is found
                for other in self.next[node] if node == target or node not in self.leaves else ():
                    hops = far[node] + self.hops(other, node)
                    if hops < far.get(other, inf):
                        far[other] = hops
                        waiting.append(other)
            self._far[target] = far
        return self._far[target]

    def onward(self, node: Node, target: Node) -> list[Node]:
        """The next hops of all shortest paths from node to target."""
        far = self.distances(target)
        if node not in far:
            raise ValueError(f"no path leads from {node!r} to {target!r}; choose hosts that are connected")
        passing = (other for other in self.next[node] if other == target or other not in self.leaves)
        return [n for n in passing if n in far and far[n] + self.hops(node, n) == far[node]]

    def diameter(self) -> int:
        """Hops between the two hosts that are farthest apart."""
        return max(self.distances(b)[a] for b in self.hosts for a in self.hosts)

    def cut(self, side: Iterable[Node]) -> Number:
        """Units per second out of these nodes into the others."""
        side = set(side)
        return sum(rate for (a, b), rate in self.rates.items() if a in side and b not in side)

    def without(self, *gone: Node) -> "Graph":
        """After these hosts and switches have failed."""
        hosts = [host for host in self.hosts if host not in gone]
        cables = [cable for cable in self.cables if not {*cable[:2]} & set(gone)]
        return Graph(hosts, cables, self.forwards, self.hops)


# ---- routes ------------------------------------------------------------------------------------------------


def hashed(*key) -> int:
    """32 bits that are the same in every run."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest())


def ecmp(graph: Graph, source: Node, target: Node, flow: int = 0, salted: bool = True) -> Shares:
    """`flow` tells flows of one pair of hosts apart: a source port. Not `salted`, all switches have the same
    hash function, and a flow that went left at the first goes left at the second: polarisation."""
    path, node = {}, source
    while node != target:
        choices = graph.onward(node, target)
        following = choices[hashed(source, target, flow, node if salted else 0) % len(choices)]
        path[node, following] = 1
        node = following
    return path


def spray(graph: Graph, source: Node, target: Node, flow: int = 0) -> Shares:
    shares, arrived = {}, {source: Fraction(1)}
    far = graph.distances(target)
    while (node := max(arrived, key=lambda node: far.get(node, 0))) != target:
        share, choices = arrived.pop(node), graph.onward(node, target)
        for following in choices:
            shares[node, following] = share / len(choices)
            arrived[following] = arrived.get(following, 0) + share / len(choices)
    return shares


def dimension_order(graph: Graph, source: tuple, target: tuple, flow: int = 0) -> Shares:
    """Hosts are tuples of coordinates."""
    path, here = {}, source
    for axis, size in enumerate(1 + max(column) for column in zip(*graph.hosts)):
        ahead = (target[axis] - source[axis]) % size
        for _ in range(min(ahead, size - ahead)):
            step = 1 if 2 * ahead <= size else -1
            there = (*here[:axis], (here[axis] + step) % size, *here[axis + 1 :])
            path[here, there], here = 1, there
    return path


def valiant(graph: Graph, source: Node, target: Node, flow=0, middles: Collection[Node] = ()) -> Shares:
    """Over each of these nodes (all switches, if none are given) an equal share."""
    shares, middles = Counter(), middles or graph.switches
    for middle in middles:
        for part in (spray(graph, source, middle), spray(graph, middle, target)):
            for link, share in part.items():
                shares[link] += share / len(middles)
    return shares


# ---- traffic -----------------------------------------------------------------------------------------------


def loads(graph: Graph, flows: Iterable[tuple], route: Route, size: Number = 1) -> Counter[Link]:
    """{link: seconds it is busy} when each of the flows, (source, target) or (source, target, flow), has
    `size` units. The largest is the time of all together, if no flow waits for another's rate."""
    require_nonnegative(size=size)
    busy_s: Counter[Link] = Counter()
    for source, target, *flow in flows:
        for link, share in route(graph, source, target, *flow).items():
            busy_s[link] += divided(share * size, graph.rates[link])
    return busy_s


def permutation(hosts: Sequence[Node], seed: int = 0) -> list[Link]:
    """Each host sends to one other, each receives from one other, drawn at random."""
    require_ints(seed=seed)
    require_ints(2, number_of_hosts=len(hosts))
    draw, targets = Random(seed), list(hosts)
    while any(source == target for source, target in zip(hosts, targets)):
        draw.shuffle(targets)
    return list(zip(hosts, targets))


def fabric(graph: Graph, route: Route, alpha_s: float = 0.0) -> Fabric:
    """For `communication.cost_model`: the path of a message between two ranks, alpha_s for each hop."""
    require_nonnegative(alpha_s=alpha_s)

    @cache
    def path(source: int, to: int) -> Path:
        a, b = graph.hosts[source], graph.hosts[to]
        links = {link: graph.rates[link] / float(share) for link, share in route(graph, a, b).items()}
        return Path(alpha_s * graph.distances(b)[a], links)

    return path
