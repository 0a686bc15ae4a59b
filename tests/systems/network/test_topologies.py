"""Networks: hosts, distances, cuts and loads against closed forms, brute force and matrices."""

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import islice, permutations
from math import log2, prod

import numpy as np
import pytest

from minitrain.systems.communication.algorithms import (
    blueconnect_all_reduce,
    direct_all_reduce,
    halving_reduce_scatter,
    ring_all_reduce,
)
from minitrain.systems.communication.cost_model import flat, time_s
from minitrain.systems.network.graph import (
    Graph,
    dimension_order,
    ecmp,
    fabric,
    loads,
    permutation,
    spray,
    valiant,
)
from minitrain.systems.network.packings import max_flow, rings
from minitrain.systems.network.topologies import (
    bcube,
    bigraph,
    circuits,
    cube_mesh,
    cubes,
    dcell,
    dcell_hosts,
    dragonfly,
    dragonfly_plus,
    dual_tor,
    fat_tree,
    full_mesh,
    hammingmesh,
    jellyfish,
    leaf_spine,
    rails,
    star,
    torus,
)
from minitrain.systems.simulate.links import shared


def hops_by_matrices(graph: Graph, nodes: list | None = None) -> np.ndarray:
    """[node, node] hops where every node passes traffic on, by powers of the adjacency matrix."""
    nodes = nodes or list(graph.next)
    adjacent = np.array([[a == b or (a, b) in graph.rates for b in nodes] for a in nodes])
    reach, hops = np.eye(len(nodes), dtype=bool), np.zeros((len(nodes),) * 2, dtype=int)
    while not reach.all():
        hops += ~reach
        reach = reach @ adjacent
    return hops


def between(busy: Counter, *kinds: str) -> list:
    """Loads of links whose two ends are switches of these kinds."""
    return [load for (a, b), load in busy.items() if {a[0], b[0]} <= set(kinds)]


def steps_of(schedule, graph: Graph) -> list[list[tuple]]:
    return [[(graph.hosts[source], graph.hosts[to]) for source, to, *_ in step] for step in schedule.steps]


# ---- the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [torus(3, 4), bcube(3, 1), dcell(3, 1), jellyfish(12, 6, 2)])
def test_distances_are_those_of_matrices(graph):
    hops, nodes = hops_by_matrices(graph), list(graph.next)
    assert all(graph.distances(b)[a] == hops[i, j] for i, a in enumerate(nodes) for j, b in enumerate(nodes))


def test_ports_of_every_switch():
    """No switch has more cables than ports; in what is regular no port is free."""
    for graph, ports in ((fat_tree(4), 4), (fat_tree(6), 6), (jellyfish(20, 5, 2, seed=3), 5)):
        assert {len(graph.next[switch]) for switch in graph.switches} == {ports}
    for dims in ((2,), (2, 2), (3, 4), (2, 3, 4)):
        degrees = Counter(len(neighbours) for neighbours in torus(*dims).next.values())
        assert degrees == {sum(min(size - 1, 2) for size in dims): prod(dims)}


def test_failed_nodes_are_gone():
    graph = fat_tree(4).without(("core", 0, 0), ("core", 0, 1), ("agg", 0, 0))
    assert graph.diameter() == 6 and len(graph.hosts) == 16
    with pytest.raises(ValueError, match="no path leads"):
        fat_tree(4).without(("edge", 0, 0)).onward((0, 0, 0), (1, 0, 0))


@pytest.mark.parametrize(
    "graph", [fat_tree(4), leaf_spine(2, 3, 4), dragonfly(1, 2, 1), rails(2, 2, 1), torus(3, 4)]
)
def test_routes_deliver_what_was_sent(graph):
    """At every node as much goes out as came in; all of it leaves the source and reaches the target. Paths of
    ECMP and dimension order are shortest, spraying's mean length is that of all its paths."""
    routes = [ecmp, spray, valiant] + [dimension_order] * graph.forwards
    for route, (a, b) in ((route, pair) for route in routes for pair in permutation(graph.hosts)):
        if route is valiant:
            near_both = graph.distances(a).keys() & graph.distances(b).keys()
            route = partial(valiant, middles=near_both & set(graph.switches or graph.hosts[:1]))
        balance = Counter()
        for (here, there), share in (shares := route(graph, a, b)).items():
            balance[here] -= share
            balance[there] += share
        assert +balance == {b: 1} and -balance == {a: 1}
        if route in (ecmp, dimension_order):
            assert sum(graph.hops(*link) for link in shares) == graph.distances(b)[a]


def test_schedules_on_one_switch_cost_what_ports_cost():
    """`fabric` on a star is the cost model's flat network: port out, port in, twice the latency of a cable."""
    for schedule in (ring_all_reduce(6), direct_all_reduce(6)):
        there = time_s(schedule, 6e6, fabric(star(6, rate=1e9), ecmp, alpha_s=1e-6))
        assert there == pytest.approx(time_s(schedule, 6e6, flat(2e-6, 1e9)), rel=1e-12)


# ---- inside a node ----------------------------------------------------------------------------------------


def test_cube_mesh_dgx1():
    graph = cube_mesh()
    assert len(graph.rates) // 2 == 16 and graph.diameter() == 2
    assert {len(near) for near in graph.next.values()} == {4}
    cycles = [frozenset(map(frozenset, zip(ring, [*ring[1:], ring[0]]))) for ring in rings(graph)]
    brute = [
        order
        for order in permutations(range(1, 8))
        if order[0] < order[-1] and all(link in graph.rates for link in zip((0, *order), (*order, 0)))
    ]
    assert len(cycles) == len(set(cycles)) == len(brute) == 30
    pairs = [(a, b) for i, a in enumerate(cycles) for b in cycles[:i] if not a & b]
    assert len(pairs) == 12 and all(len(a | b) == 16 for a, b in pairs)
    assert {sum(cube_mesh(volta=True).rates[a, b] for b in graph.next[a]) for a in range(8)} == {6}


def test_nvswitch_dgx2():
    """Sixteen GPUs, six planes of 25 GB/s each way: any permutation at 150 out and 150 in."""
    graph = star(16, 25, planes=6)
    for seed in range(5):
        busy = loads(graph, permutation(graph.hosts, seed), spray, 150)
        assert set(busy.values()) == {1} and len(busy) == 2 * 6 * 16


@pytest.mark.parametrize("n", [4, 8])
def test_p2p_full_mesh(n):
    """B for a chip: all to all takes as long as through a switch, one pair n-1 times as long."""
    mesh, switch = full_mesh(n, Fraction(1, n - 1)), star(n, 1)
    every = list(permutations(range(n), 2))
    all_to_all, pair = ([max(loads(g, f, spray).values()) for g in (mesh, switch)] for f in (every, [(0, 1)]))
    assert all_to_all == [n - 1, n - 1] and pair == [n - 1, 1]


# ---- tori -------------------------------------------------------------------------------------------------


def test_torus_tpuv2_v3():
    for k, chips, diameter, links in ((16, 256, 16, 32), (32, 1024, 32, 64)):
        graph = torus(k, k)
        far = max(graph.distances((0, 0)).values())  # of any chip: all are alike
        half = [(x, y) for x, y in graph.hosts if x < k // 2]
        wanted = (chips, diameter, links)
        assert (len(graph.hosts), far, graph.cut(half)) == wanted == (k * k, 2 * (k // 2), 2 * k)


def test_tpuv4_3d_torus():
    """All-reduce along X, Y and Z: every message goes to a neighbour, no cable has two, 2(N-1)/N S a chip."""
    graph, schedule = torus(4, 4, 4), blueconnect_all_reduce(64, (4, 4, 4))
    assert len(graph.hosts) == 16 * 4
    for flows in steps_of(schedule, graph):
        busy = loads(graph, flows, dimension_order)
        assert len(busy) == len(flows) and set(busy.values()) == {1}
    sent = Counter()
    for source, _, chunks, _ in (transfer for step in schedule.steps for transfer in step):
        sent[source] += Fraction(len(chunks), schedule.chunks)
    assert set(sent.values()) == {Fraction(2 * 63, 64)}


def test_tpuv4_ocs():
    """512 chips as 8 x 8 x 8 and as 4 x 4 x 32; any eight cubes of 64, whatever is broken, give the same torus."""
    for dims, diameter, links in (((8, 8, 8), 12, 128), ((4, 4, 32), 20, 32)):
        graph = torus(*dims)
        half = [host for host in graph.hosts if host[2] < dims[2] // 2]
        assert max(graph.distances((0, 0, 0)).values()) == diameter == sum(size // 2 for size in dims)
        assert graph.cut(half) == links == 2 * prod(dims[:2])
    spread = lambda graph, chip: Counter(graph.distances(chip).values())
    wanted = spread(torus(8, 8, 8), (0, 0, 0))
    for healthy in (range(8), range(5, 61, 7), [63, 2, 40, 11, 12, 13, 9, 8]):
        joined = circuits(list(healthy), (2, 2, 2))
        ports = [(cube, axis, side) for a, b, axis in joined for cube, side in ((a, "+"), (b, "-"))]
        assert len(joined) == 24 and len(set(ports)) == len(ports)
        assert {cube for cube, *_ in ports} == set(healthy)
        graph = cubes(list(healthy), (2, 2, 2))
        assert spread(graph, graph.hosts[77]) == wanted
    with pytest.raises(ValueError, match="takes 8 cubes"):
        circuits(range(7), (2, 2, 2))


def test_hammingmesh():
    """Four ports an accelerator; two rings that share no link use all of a 4 x 4 torus; boards of any rows and
    columns are as near as neighbours."""
    graph = hammingmesh(2, 2, 4, 4)
    assert {sum(graph.rates[host, near] for near in graph.next[host]) for host in graph.hosts} == {4}
    cycles = [frozenset(map(frozenset, zip(r, [*r[1:], r[0]]))) for r in islice(rings(torus(4, 4)), 400)]
    one, other = next((a, b) for i, a in enumerate(cycles) for b in cycles[:i] if not a & b)
    assert len(one) == len(other) == 16 and len(one | other) == len(torus(4, 4).rates) // 2
    for board in (1, 2, 3):
        along, across = graph.distances((0, 0, 0, 1)), graph.distances((0, 0, 1, 0))
        assert along[0, board, 0, 0] == across[board, 0, 0, 0] == 2


# ---- trees of switches ------------------------------------------------------------------------------------


def test_clos_fat_tree():
    for k, hosts, switches in ((4, 16, 20), (8, 128, 80)):
        graph = fat_tree(k)
        assert (len(graph.hosts), len(graph.switches)) == (hosts, switches) == (k**3 // 4, 5 * k * k // 4)
    mean = []
    for seed in range(3):
        flows = permutation(graph.hosts, seed)
        assert max(loads(graph, flows, spray).values()) == 1  # full bisection: line rate for all
        hashed = {pair: tuple(ecmp(graph, *pair)) for pair in flows}
        assert 3 <= max(loads(graph, flows, ecmp).values()) <= 5
        mean.append(float(np.mean([float(rate) for rate in shared(hashed, graph.rates).values()])))
    assert all(0.4 < rate < 0.55 for rate in mean)


def test_meta_24k_clos():
    """Eight pods of 3,072; at the top an uplink for seven hosts, each stands for a seventh of a pod."""
    assert 8 * 16 * 192 == 24_576 and 16 * 192 == 3_072
    graph = leaf_spine(8, 7, 1)
    across = [(host, (host + 7) % 56) for host in graph.hosts]
    assert max(loads(graph, across, spray).values()) == 7
    assert round(400 / 7, 1) == round(float(400 * graph.cut(range(7)) / 7) / 7, 1) == 57.1


def test_superpod():
    """A scalable unit of 32 nodes carries any permutation between its cards; 64 of them are 16,384 GPUs."""
    unit = rails(32, 8, spines=4)
    busy = loads(unit, permutation(unit.hosts), spray)
    assert len(unit.hosts) * 64 == 16_384
    assert max(load for (a, b), load in busy.items() if {a[0], b[0]} <= {"leaf", "spine"}) <= 1


def test_rail_optimized():
    """Data parallelism over cards of equal place: no byte over a spine; with a switch for every two nodes, some."""
    ring = [((node, gpu), ((node + 1) % 16, gpu)) for node in range(16) for gpu in range(8)]
    spine = lambda graph: sum(between(loads(graph, ring, spray), "leaf", "spine"))
    assert spine(rails(16, 8, 4)) == 0 < spine(rails(16, 8, 4, by_rail=False))
    last_of_two = sum(node % 2 for node in range(16)) * 8  # leave their leaf; a link of rate 4 up, one down
    assert spine(rails(16, 8, 4, by_rail=False)) == Fraction(2 * last_of_two, 4)


def test_hpn():
    """A pod has 15 segments of 1,024; with a switch gone everybody is still there, on one port in place of two a
    quarter is not; one hash for all switches leaves cores idle."""
    assert (15 * 1024, 51_200 // 400) == (15_360, 128)
    dual, single = dual_tor(32, 4, 4), leaf_spine(4, 8, 4)
    reached = lambda graph: sum(host in graph.distances(0) for host in range(32))
    assert reached(dual.without(("tor", 0, 1))) == 32 and reached(single.without(("leaf", 1))) == 24
    assert all(p[0][1] == p[-1][1] for p in ([n for n, _ in ecmp(dual, 0, 31, f)][1:] for f in range(20)))
    graph = fat_tree(8)
    flows = [(a, b, flow) for a, b in zip(graph.hosts[:16], graph.hosts[64:]) for flow in range(16)]
    used = lambda salted: len(between(loads(graph, flows, partial(ecmp, salted=salted)), "agg", "core"))
    assert used(True) > 1.5 * used(False)


def test_rail_only():
    """No spine: what changes rails goes over NVLink. All to all in two phases: (K-1)/K · N/(N-1) · slow/fast more."""
    overhead = lambda N, K, fast, slow: Fraction(K - 1, K) * Fraction(N, N - 1) * Fraction(slow, fast)
    for N, K in ((4, 4), (3, 5)):
        graph = rails(N, K, 0, nvlink=9, rate=1)
        busy = loads(graph, permutations(graph.hosts, 2), spray)
        nvlink, rail = (max(x for (a, b), x in busy.items() if b[0] == kind) for kind in ("nvswitch", "leaf"))
        assert nvlink / rail == overhead(N, K, 9, 1)
    assert [
        round(100 * float(overhead(*sizes)), 1) for sizes in ((128, 256, 450, 50), (512, 64, 300, 25))
    ] == [11.2, 8.2]


def test_bigraph_eflops():
    """Halving and doubling: with the mapping one flow a cable in every step, in order up to four."""
    most = {}
    for mapped in (True, False):
        graph = bigraph(4, mapped)
        flows = steps_of(halving_reduce_scatter(32, near_first=True), graph)
        is_switch = lambda node: isinstance(node, tuple)
        most[mapped] = [
            max(
                (v for (a, b), v in loads(graph, step, spray).items() if is_switch(a) and is_switch(b)),
                default=0,
            )
            for step in flows
        ]
        assert Counter(map(len, (graph.next[switch] for switch in graph.switches))) == {8: 8}
    assert most == {True: [1] * 5, False: [0, 0, 2, 2, 4]}


# ---- few hops ---------------------------------------------------------------------------------------------


def test_bcube():
    for n, k, hosts, switches in ((4, 1, 16, 8), (4, 2, 64, 48)):
        graph = bcube(n, k)
        assert (len(graph.hosts), len(graph.switches)) == (hosts, switches) == (n ** (k + 1), (k + 1) * n**k)
        assert {max_flow(graph, graph.hosts[0], other) for other in graph.hosts[1:]} == {k + 1}


def test_dcell():
    assert [dcell_hosts(4, k) for k in (1, 2, 3)] == [20, 420, 176_820] and dcell_hosts(6, 3) == 3_263_442
    for k, hosts in ((1, 20), (2, 420)):
        graph = dcell(4, k)
        assert len(graph.hosts) == hosts and {len(graph.next[host]) for host in graph.hosts} == {k + 1}
        assert max(graph.distances(graph.hosts[0])[host] for host in graph.hosts) <= 2 ** (k + 2)


def test_jellyfish():
    """The switches and ports of a fat tree for k = 8, joined at random: 160 hosts for 128, and shorter paths."""
    tree, fish = fat_tree(8), jellyfish(80, 8, 2, seed=1)
    assert (len(tree.hosts), len(fish.hosts), len(fish.switches)) == (128, 160, len(tree.switches))
    hops = lambda graph, nodes: (
        hops_by_matrices(graph, graph.switches)[np.ix_(nodes, nodes)].sum() / (len(nodes) * (len(nodes) - 1))
    )
    racks = [i for i, switch in enumerate(tree.switches) if switch[0] == "edge"]
    there, here = hops(tree, racks), hops(fish, range(80))
    assert there == pytest.approx(3.806, abs=1e-3) and log2(80) / log2(6) < here < 2.7 < there


def test_dragonfly():
    """Three hops between routers; a group that sends to the next has one cable for eight hosts, unless it goes
    by way of all others: 16 seventh parts, over twice the distance."""
    assert [2 * p * p * (2 * p * p + 1) for p in (2, 4, 16)] == [72, 1_056, 262_656]
    graph = dragonfly(2, 4, 2)
    assert len(graph.hosts) == 72 and len(dragonfly(4, 8, 4).hosts) == 1_056
    for target in graph.hosts[::7]:
        for source in graph.hosts:
            path = [{a[1], b[1]} for a, b in ecmp(graph, source, target) if a[0] == b[0] == "router"]
            assert len(path) <= 3 and sum(len(groups) == 2 for groups in path) == (source[0] != target[0])
    adverse = [((g, r, i), ((g + 1) % 9, r, i)) for g in range(9) for r in range(4) for i in range(2)]
    others = lambda a, b: [s for s in graph.switches if s[1] not in (a[0], b[0])]
    roundabout = lambda graph, a, b: valiant(graph, a, b, middles=others(a, b))
    assert max(between(loads(graph, adverse, spray), "router")) == 8
    assert max(between(loads(graph, adverse, roundabout), "router")) == Fraction(16, 7)


def test_dragonfly_plus():
    graph, flat_groups = dragonfly_plus(16), dragonfly(4, 8, 4)  # of 16 ports a router, 15 used
    assert (len(graph.hosts), len(flat_groups.hosts)) == (4_160, 1_056)
    assert max(len(graph.next[switch]) for switch in graph.switches) == 16
    far = [(host, graph.distances((64, 7, 7))[host]) for host in graph.hosts if host[0] != 64]
    assert {length for _, length in far} == {5}  # host, leaf, spine, spine, leaf, host
    kinds = [a[0] for a, _ in ecmp(graph, (0, 0, 0), (64, 7, 7))][1:]
    assert kinds == ["leaf", "spine", "spine", "leaf"]
