"""Networks from one node to 100,000 devices. Each function gives a `Graph`; `rate`: of a cable, each way.

    inside a node      star, full_mesh, cube_mesh                        NVSwitch, wires to all, DGX-1
    trees of switches  fat_tree, leaf_spine, dual_tor, rails, bigraph    a host hangs on one switch, or two
    few hops           dragonfly, dragonfly_plus, jellyfish              groups with a cable between any two
    hosts pass on      bcube, dcell, torus, cubes, hammingmesh           cheaper, and hosts forward

    hosts              fat_tree(k) k^3/4, with 5k^2/4 switches of k ports; bcube(n, k) n^(k+1); dcell(n, k)
                       t_k = t_(k-1) (t_(k-1) + 1), t_0 = n; dragonfly(p, 2p, p) 2p^2 (2p^2 + 1);
                       dragonfly_plus(radix) (radix/2)^2 ((radix/2)^2 + 1); bigraph(m) 2m^2

Al-Fares 2008 (fat tree); Guo 2008 and 2009 (DCell, BCube); Singla 2012 (Jellyfish); Kim 2008 (Dragonfly);
Shpiner 2017 (Dragonfly+); Jouppi 2023, arXiv:2304.01433 (TPU v4); Wang 2023, arXiv:2307.12169 (rail-only);
Qian 2024 (HPN); Hoefler 2022, arXiv:2209.01346 (HammingMesh); Dong 2020 (EFLOPS). Differs: of each only what
decides who shares a cable with whom; at most 8,192 hosts are built, more are counted.
"""

from collections.abc import Sequence
from itertools import combinations, product
from math import prod
from random import Random

from minitrain.pipeline.simulate import Time as Number
from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.network.graph import Graph

MOST = 8192


def _places(*sizes: int) -> list[tuple[int, ...]]:
    """Coordinates below the sizes."""
    require_positive_ints(MOST, sizes=sizes)
    require_positive_ints(MOST, hosts=prod(sizes))
    return list(product(*map(range, sizes)))


def _half(ports: int) -> int:
    require_positive_ints(MOST, ports=ports)
    require_ints(0, 0, ports_modulo_2=ports % 2)
    return ports // 2


def star(n: int, rate: Number = 1, planes: int = 1) -> Graph:
    """All on one switch; or, as in a DGX-2, on each of several, with a cable to every one."""
    return Graph(range(n), [(i, f"switch {plane}", rate) for i, plane in _places(n, planes)])


def full_mesh(n: int, rate: Number = 1) -> Graph:
    hosts = range(len(_places(n)))
    return Graph(hosts, [(a, b, rate) for a, b in combinations(hosts, 2)], forwards=True)


def cube_mesh(rate: Number = 1, volta: bool = False) -> Graph:
    """DGX-1: two quads, complete, and a cable between the two GPUs of equal place. With V100s (`volta`),
    which have six cables, eight of the sixteen pairs have two."""
    pairs = [(quad + a, quad + b) for quad in (0, 4) for a, b in combinations(range(4), 2)]
    twice = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)} if volta else set()
    pairs += [(i, i + 4) for i in range(4)]
    return Graph(range(8), [(*pair, rate * (1 + (pair in twice))) for pair in pairs], forwards=True)


def _ahead(place: tuple[int, ...], axis: int, dims: Sequence[int]) -> tuple[int, ...]:
    return (*place[:axis], (place[axis] + 1) % dims[axis], *place[axis + 1 :])


def torus(x: int, y: int = 1, z: int = 1) -> Graph:
    """A ring along every axis of more than one node; of two it is one cable."""
    dims = [size for size in (x, y, z) if size != 1] or [1]
    hosts = _places(*dims)
    pairs = [(host, _ahead(host, axis, dims)) for host in hosts for axis in range(len(dims))]
    cables = {frozenset(pair): pair for pair in pairs if pair[0] != pair[1]}
    return Graph(hosts, cables.values(), forwards=True)


def fat_tree(k: int, rate: Number = 1) -> Graph:
    """k pods of k/2 edge and k/2 aggregation switches; core (a, c) joins aggregation switch a of all."""
    hosts = _places(k, _half(k), k // 2)
    cables = [((pod, edge, i), ("edge", pod, edge), rate) for pod, edge, i in hosts]
    cables += [(("edge", pod, e), ("agg", pod, a), rate) for pod, e, a in hosts]
    cables += [(("agg", pod, a), ("core", a, c), rate) for pod, a, c in hosts]
    return Graph(hosts, cables)


def leaf_spine(leaves: int, per_leaf: int, spines: int, rate: Number = 1) -> Graph:
    """Oversubscribed per_leaf to spines."""
    cables = [(leaf * per_leaf + i, ("leaf", leaf), rate) for leaf, i in _places(leaves, per_leaf)]
    wires = [(("leaf", a), ("spine", b), rate) for a, b in _places(leaves, spines)]
    return Graph(range(leaves * per_leaf), cables + wires)


def dual_tor(hosts: int, tors: int, aggs: int) -> Graph:
    """HPN: the two ports of a host lie in two planes with switches of their own, which meet nowhere else."""
    wires = [(("tor", p, t), ("agg", p, a)) for p, t, a in _places(2, tors, aggs)]
    ports = [(host, ("tor", plane, host * tors // hosts)) for host, plane in _places(hosts, 2)]
    return Graph(range(hosts), ports + wires)


def rails(nodes: int, gpus: int, spines: int, nvlink: Number = 9, rate: Number = 1, by_rail=True) -> Graph:
    """Nodes with an NVSwitch, a card for each GPU: card g of every node on leaf g, or (`by_rail` False) the
    cards of neighbouring nodes on one leaf. All spines of a leaf together carry what its hosts do. Without
    spines, rail-only, what changes rails does so over NVLink, and GPUs pass it on."""
    hosts = _places(nodes, gpus)
    require_ints(0, MOST, spines=spines)
    cables = [((node, gpu), ("nvswitch", node), nvlink) for node, gpu in hosts]
    cables += [((node, g), ("leaf", g if by_rail else node * gpus // nodes), rate) for node, g in hosts]
    up = divided(rate * nodes, max(spines, 1))
    wires = [(("leaf", leaf), ("spine", spine), up) for leaf in range(gpus) for spine in range(spines)]
    return Graph(hosts, cables + wires, forwards=not spines)


def bigraph(m: int, mapped: bool = True) -> Graph:
    """EFLOPS: m lower and m upper switches, all joined, m ranks on each. `mapped`: a rank with an even number
    of set bits sits below, where its upper bits choose the switch, others above by their lower bits; so
    partners of halving and doubling sit on different sides, all pairs on different cables. Else in order."""
    n = len(_places(2, m, m))
    require_ints(0, 0, m_is_no_power_of_two=m & (m - 1))
    parity, upper = [rank.bit_count() % 2 for rank in range(n)], [rank // m % m for rank in range(n)]
    place = lambda rank: (parity[rank], rank % m if parity[rank] else upper[rank])
    hosts = [(rank, place(rank) if mapped else (rank * 2 // n, upper[rank])) for rank in range(n)]
    return Graph(range(n), hosts + [((0, low), (1, high)) for low, high in _places(m, m)])


def jellyfish(switches: int, ports: int, per_switch: int, seed: int = 0) -> Graph:
    """Switches joined at random with the ports that hosts leave free. Where two ports are left that cannot be
    joined, a cable is taken out and its ends go to them."""
    hosts, degree = _places(switches, per_switch), ports - per_switch
    require_ints(seed=seed)
    require_ints(2, switches - 1, ports_to_switches=degree)
    draw, free, cables = Random(seed), [degree] * switches, set()
    pairs = list(combinations(range(switches), 2))
    for a, b in draw.sample(pairs, len(pairs)):
        if free[a] and free[b]:
            cables.add((a, b))
            free[a], free[b] = free[a] - 1, free[b] - 1
    left = [switch for switch in range(switches) for _ in range(free[switch])]
    pair = lambda a, b: (min(a, b), max(a, b))
    for a, b in zip(left[::2], left[1::2]):
        fits = lambda x, y: not {a, b} & {x, y} and not {pair(a, x), pair(b, y)} & cables
        x, y = draw.choice([cable for cable in sorted(cables) if fits(*cable)])
        cables = cables - {(x, y)} | {pair(a, x), pair(b, y)}
    wires = [(("switch", a), ("switch", b)) for a, b in sorted(cables)]
    return Graph(hosts, [(host, ("switch", host[0])) for host in hosts] + wires)


def _pairs(groups: int, h: int) -> list[tuple[int, int, int, int]]:
    """A cable for any two groups, (group, member, group, member), of which each member has h."""
    return [(g, (other - 1) // h, other, g // h) for g, other in combinations(range(groups), 2)]


def dragonfly(p: int, a: int, h: int, rate: Number = 1) -> Graph:
    """a·h + 1 groups of a routers, each with p hosts and h global cables; one cable between any two groups.
    It counts as three hops, so that shortest paths are minimal routes: one global cable, never two."""
    require_positive_ints(MOST, h=h)
    hosts, router = _places(a * h + 1, a, p), lambda group, number: ("router", group, number)
    local = [(g, r, g, s) for g in range(a * h + 1) for r, s in combinations(range(a), 2)]
    cables = [(router(g, r), router(other, s), rate) for g, r, other, s in local + _pairs(a * h + 1, h)]
    is_global = lambda a, b: a[0] == b[0] == "router" and a[1] != b[1]
    ports = [(host, router(*host[:2]), rate) for host in hosts]
    return Graph(hosts, ports + cables, hops=lambda a, b: 3 if is_global(a, b) else 1)


def dragonfly_plus(radix: int) -> Graph:
    """Groups of radix/2 leaves and radix/2 spines, all joined; half of a spine's ports are global cables."""
    h = _half(radix)
    hosts = _places(h * h + 1, h, h)
    cables = [((g, leaf, i), ("leaf", g, leaf)) for g, leaf, i in hosts]
    cables += [(("leaf", g, leaf), ("spine", g, spine)) for g, leaf, spine in hosts]
    cables += [(("spine", g, spine), ("spine", other, far)) for g, spine, other, far in _pairs(h * h + 1, h)]
    return Graph(hosts, cables)


def bcube(n: int, k: int) -> Graph:
    """A host is k + 1 digits below n; a switch of level i joins the n hosts that differ in digit i alone."""
    require_ints(0, 12, k=k)
    hosts = _places(*[n] * (k + 1))
    wires = [(host, ("switch", i, *host[:i], *host[i + 1 :])) for host in hosts for i in range(k + 1)]
    return Graph(hosts, wires, forwards=True)


def dcell(n: int, k: int) -> Graph:
    """Copies of the level below, one more than it has hosts; copies a < b join hosts b-1 and a of theirs."""
    require_positive_ints(MOST, hosts=dcell_hosts(n, k))
    cables = []

    def build(level: int, place: tuple) -> list[tuple]:
        if level == 0:
            cables.extend(((*place, i), ("switch", *place)) for i in range(n))
            return [(*place, i) for i in range(n)]
        copies = [build(level - 1, (*place, copy)) for copy in range(dcell_hosts(n, level - 1) + 1)]
        cables.extend((copies[a][i], copies[b][j]) for a, i, b, j in _pairs(len(copies), 1))
        return sum(copies, [])

    return Graph(build(k, ()), cables, forwards=True)


def dcell_hosts(n: int, k: int) -> int:
    require_ints(0, 4, k=k)
    require_positive_ints(n=n)
    return n if k == 0 else dcell_hosts(n, k - 1) * (dcell_hosts(n, k - 1) + 1)


def hammingmesh(a: int, b: int, x: int, y: int) -> Graph:
    """x · y boards of a · b accelerators in a mesh; both ends of a board's row hang on the switch of that row
    across boards, those of a column likewise. So any set of board rows and columns is a torus."""
    hosts, cables = _places(x, y, a, b), []  # board row and column, row and column on it
    for host in hosts:
        board_row, board_column, row, column = host
        right, below = (*host[:3], column + 1), (*host[:2], row + 1, column)
        cables += [(host, right)] * (column + 1 < b) + [(host, below)] * (row + 1 < a)
        cables += [(host, ("row", board_row, row))] * ((column == 0) + (column == b - 1))
        cables += [(host, ("column", board_column, column))] * ((row == 0) + (row == a - 1))
    return Graph(hosts, cables, forwards=True)


def circuits(healthy: Sequence[int], shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """TPU v4: (cube, next cube, axis), the faces that optical switches join for a job of `shape` cubes. Which
    cubes they are does not matter: a broken one is left out, and any other takes its place."""
    places = _places(*shape)
    require_ints(healthy=list(healthy))
    if len(shape) != 3 or len(set(healthy)) < len(places):
        raise ValueError(f"shape {shape} takes {len(places)} cubes, on three axes; given {len(healthy)}")
    cube_at = dict(zip(places, healthy))
    return [(cube_at[at], cube_at[_ahead(at, axis, shape)], axis) for at in places for axis in range(3)]


def cubes(healthy: Sequence[int], shape: tuple[int, int, int]) -> Graph:
    """The torus that these circuits make of cubes of 4 x 4 x 4 chips: a circuit joins 16 lines of them."""
    _places(*shape, 4, 4, 4)
    cables = []
    for here, there, axis in circuits(healthy, shape):
        for face in _places(4, 4):
            line = [(here, *face[:axis], depth, *face[axis:]) for depth in range(4)]
            cables += zip(line, [*line[1:], (there, *face[:axis], 0, *face[axis:])])
    return Graph(dict.fromkeys(here for here, _ in cables), cables, forwards=True)
