"""Networks from one node to 100,000 devices. Each function gives a `Graph`; `rate`: of a cable.

    inside a node      star, full_mesh, cube_mesh                        NVSwitch, wires to all, DGX-1
    trees of switches  fat_tree, leaf_spine, dual_tor, rails, bigraph    a host hangs on one switch, or two
    few hops           dragonfly, dragonfly_plus, jellyfish              groups with a cable between any two
    hosts pass on      bcube, dcell, torus, cubes, hammingmesh           cheaper, and hosts forward

    hosts              fat_tree(k) k^3/4, with 5k^2/4 switches of k ports · bcube(n, k) n^(k+1) · dcell(n, k)
                       t_k = t_(k-1) (t_(k-1) + 1), t_0 = n · dragonfly(p, 2p, p) 2p^2 (2p^2 + 1) ·
                       dragonfly_plus(radix) (radix/2)^2 ((radix/2)^2 + 1) · bigraph(m) 2m^2

Al-Fares 2008 (fat tree); Guo 2008 and 2009 (DCell, BCube); Singla 2012 (Jellyfish); Kim 2008 (Dragonfly);
Shpiner 2017 (Dragonfly+); Jouppi 2023, arXiv:2304.01433 (TPU v4); Wang 2023, arXiv:2307.12169 (rail-only);
Qian 2024 (HPN); Hoefler 2022, arXiv:2209.01346 (HammingMesh); Dong 2020 (EFLOPS). Differs: of each only what
decides who shares a cable with whom; small sizes are built, large ones counted.
"""

from collections.abc import Sequence
from itertools import combinations, product
from math import prod
from random import Random

from minitrain.pipeline.simulate import Time as Number
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.systems.network.graph import Graph

MOST = 4096  # hosts or switches of a graph that is built


def star(n: int, rate: Number = 1, planes: int = 1) -> Graph:
    """All on one switch; or, as in a DGX-2, on each of several, with a cable to every one."""
    require_positive_ints(MOST, n=n, planes=planes)
    return Graph(range(n), [(i, f"switch {p}", rate) for i in range(n) for p in range(planes)])


def full_mesh(n: int, rate: Number = 1) -> Graph:
    require_positive_ints(MOST, n=n)
    return Graph(range(n), [(a, b, rate) for a, b in combinations(range(n), 2)], forwards=True)


def cube_mesh(rate: Number = 1, volta: bool = False) -> Graph:
    """DGX-1: two quads, complete, and a cable between the two GPUs of equal place. With V100s (`volta`),
    which have six cables, eight of the sixteen pairs have two."""
    pairs = [(quad + a, quad + b) for quad in (0, 4) for a, b in combinations(range(4), 2)]
    twice = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)} if volta else set()
    pairs += [(i, i + 4) for i in range(4)]
    return Graph(range(8), [(*pair, rate * (1 + (pair in twice))) for pair in pairs], forwards=True)


def torus(*dims: int, rate: Number = 1) -> Graph:
    """A ring along every axis; of two nodes it is one cable."""
    require_positive_ints(MOST, dims=dims)
    require_positive_ints(MOST, hosts=prod(dims))
    hosts = list(product(*map(range, dims)))
    ahead = lambda host, axis: (*host[:axis], (host[axis] + 1) % dims[axis], *host[axis + 1 :])
    has_cable = lambda at, size: size > 2 or (size == 2 and at == 0)
    steps = [(host, axis) for host in hosts for axis, size in enumerate(dims) if has_cable(host[axis], size)]
    return Graph(hosts, [(host, ahead(host, axis), rate) for host, axis in steps], forwards=True)


def fat_tree(k: int, rate: Number = 1) -> Graph:
    """k pods of k/2 edge and k/2 aggregation switches; core (a, c) joins aggregation switch a of all."""
    require_positive_ints(24, k=k)
    require_ints(0, 0, k_modulo_2=k % 2)
    half, pods = range(k // 2), range(k)
    hosts = list(product(pods, half, half))
    cables = [((pod, edge, i), ("edge", pod, edge), rate) for pod, edge, i in hosts]
    cables += [(("edge", pod, e), ("agg", pod, a), rate) for pod, e, a in hosts]
    cables += [(("agg", pod, a), ("core", a, c), rate) for pod, a, c in hosts]
    return Graph(hosts, cables)


def leaf_spine(leaves: int, per_leaf: int, spines: int, rate: Number = 1, up: Number | None = None) -> Graph:
    """`up`: the rate of a cable from leaf to spine. Oversubscription: per_leaf · rate / (spines · up)."""
    require_positive_ints(MOST, leaves=leaves, per_leaf=per_leaf, spines=spines)
    require_positive_ints(MOST, hosts=leaves * per_leaf)
    hosts = range(leaves * per_leaf)
    wires = [(("leaf", a), ("spine", b), up or rate) for a in range(leaves) for b in range(spines)]
    return Graph(hosts, [(host, ("leaf", host // per_leaf), rate) for host in hosts] + wires)


def dual_tor(hosts: int, tors: int, aggs: int, rate: Number = 1) -> Graph:
    """HPN: the two ports of a host lie in two planes with switches of their own, which meet nowhere else."""
    require_positive_ints(MOST, hosts=hosts, tors=tors, aggs=aggs)
    per_tor = -(-hosts // tors)
    cables = [(host, ("tor", plane, host // per_tor), rate) for host in range(hosts) for plane in (0, 1)]
    wires = product((0, 1), range(tors), range(aggs))
    return Graph(range(hosts), cables + [(("tor", p, t), ("agg", p, a), rate) for p, t, a in wires])


def rails(
    nodes: int, gpus: int, spines: int, nvlink: Number = 9, rate: Number = 1, by_rail: bool = True
) -> Graph:
    """Nodes with an NVSwitch, a card for each GPU: card g of every node on leaf g, or (`by_rail` False) the
    cards of neighbouring nodes on one leaf. All spines of a leaf together carry what its hosts do. Without
    spines, rail-only, what changes rails does so over NVLink, and GPUs pass it on."""
    require_positive_ints(MOST, nodes=nodes, gpus=gpus)
    require_ints(0, MOST, spines=spines)
    hosts = list(product(range(nodes), range(gpus)))
    leaf = lambda node, gpu: gpu if by_rail else node * gpus // nodes
    cables = [((node, gpu), ("nvswitch", node), nvlink) for node, gpu in hosts]
    cables += [((node, gpu), ("leaf", leaf(node, gpu)), rate) for node, gpu in hosts]
    wires = product(range(gpus), range(spines))
    up = rate * nodes / max(spines, 1)
    return Graph(hosts, cables + [(("leaf", a), ("spine", b), up) for a, b in wires], forwards=not spines)


def bigraph(m: int, mapped: bool = True) -> Graph:
    """EFLOPS: m lower and m upper switches, all joined, m ranks on each. `mapped`: a rank with an even number
    of set bits sits below, where its upper bits choose the switch, others above by their lower bits; so
    partners of halving and doubling sit on different sides, all pairs on different cables. Else in order."""
    require_positive_ints(32, m=m)
    require_ints(0, 0, m_is_a_power_of_two=m & (m - 1))
    bits, n = m.bit_length() - 1, 2 * m * m

    def switch(rank: int) -> tuple[str, int]:
        if not mapped:
            return ("upper" if rank < n // 2 else "lower"), rank % (n // 2) // m
        return ("upper", rank % m) if rank.bit_count() % 2 else ("lower", (rank >> bits) % m)

    wires = [(("upper", a), ("lower", b)) for a in range(m) for b in range(m)]
    return Graph(range(n), [(rank, switch(rank)) for rank in range(n)] + wires)


def jellyfish(switches: int, ports: int, per_switch: int, seed: int = 0) -> Graph:
    """Switches joined at random with the ports that hosts leave free. Where two ports are left that cannot be
    joined, a cable is taken out and its ends go to them."""
    require_positive_ints(1024, switches=switches, ports=ports, per_switch=per_switch)
    require_ints(seed=seed)
    degree = ports - per_switch
    if not 2 <= degree < switches:
        raise ValueError(f"{degree} ports to {switches} switches; leave 2 ports, fewer than switches")
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
    hosts = list(product(range(switches), range(per_switch)))
    wires = [(("switch", a), ("switch", b)) for a, b in sorted(cables)]
    return Graph(hosts, [(host, ("switch", host[0])) for host in hosts] + wires)


def dragonfly(p: int, a: int, h: int, rate: Number = 1) -> Graph:
    """a·h + 1 groups of a routers, each with p hosts and h global cables; one cable between any two groups.
    It counts as three hops, so that shortest paths are minimal routes: one global cable, never two."""
    require_positive_ints(64, p=p, a=a, h=h)
    require_positive_ints(MOST, hosts=p * a * (a * h + 1))
    groups = range(a * h + 1)
    hosts = list(product(groups, range(a), range(p)))
    cables = [((g, r, i), ("router", g, r), rate) for g, r, i in hosts]
    cables += [
        (("router", g, r), ("router", g, s), rate) for g in groups for r, s in combinations(range(a), 2)
    ]
    for g, other in combinations(groups, 2):  # the global cables of a group are numbered by the other group
        cables.append((("router", g, (other - 1) // h), ("router", other, g // h), rate))
    is_global = lambda a, b: a[0] == b[0] == "router" and a[1] != b[1]
    return Graph(hosts, cables, hops=lambda a, b: 3 if is_global(a, b) else 1)


def dragonfly_plus(radix: int, rate: Number = 1) -> Graph:
    """Groups of radix/2 leaves and radix/2 spines, all joined; half of a spine's ports are global cables."""
    require_positive_ints(14, radix=radix)
    require_ints(0, 0, radix_modulo_2=radix % 2)
    h = radix // 2
    groups, half = range(h * h + 1), range(h)
    hosts = list(product(groups, half, half))
    cables = [((g, leaf, i), ("leaf", g, leaf), rate) for g, leaf, i in hosts]
    cables += [(("leaf", g, leaf), ("spine", g, spine), rate) for g, leaf, spine in hosts]
    ends = lambda g, other: (("spine", g, (other - 1) // h), ("spine", other, g // h), rate)
    return Graph(hosts, cables + [ends(g, other) for g, other in combinations(groups, 2)])


def bcube(n: int, k: int, rate: Number = 1) -> Graph:
    """A host is k + 1 digits below n; a switch of level i joins the n hosts that differ in digit i alone."""
    require_ints(0, 12, k=k)
    require_positive_ints(MOST, n=n)
    require_positive_ints(MOST, hosts=n ** (k + 1))
    hosts = list(product(range(n), repeat=k + 1))
    wires = [(host, ("switch", i, *host[:i], *host[i + 1 :]), rate) for host in hosts for i in range(k + 1)]
    return Graph(hosts, wires, forwards=True)


def dcell(n: int, k: int, rate: Number = 1) -> Graph:
    """Copies of the level below, one more than it has hosts; copies a < b join hosts b-1 and a of theirs."""
    require_ints(0, 4, k=k)
    require_positive_ints(MOST, n=n)
    require_positive_ints(MOST, hosts=dcell_hosts(n, k))
    cables = []

    def build(level: int, place: tuple) -> list[tuple]:
        if level == 0:
            cables.extend(((*place, i), ("switch", *place), rate) for i in range(n))
            return [(*place, i) for i in range(n)]
        copies = [build(level - 1, (*place, copy)) for copy in range(dcell_hosts(n, level - 1) + 1)]
        cables.extend((copies[a][b - 1], copies[b][a], rate) for a, b in combinations(range(len(copies)), 2))
        return sum(copies, [])

    return Graph(build(k, ()), cables, forwards=True)


def dcell_hosts(n: int, k: int) -> int:
    require_ints(0, 4, k=k)
    require_positive_ints(n=n)
    return n if k == 0 else dcell_hosts(n, k - 1) * (dcell_hosts(n, k - 1) + 1)


def hammingmesh(a: int, b: int, x: int, y: int, rate: Number = 1) -> Graph:
    """x · y boards of a · b accelerators in a mesh; both ends of a board's row hang on the switch of that row
    across boards, those of a column likewise. So any set of board rows and columns is a torus."""
    require_positive_ints(MOST, a=a, b=b, x=x, y=y)
    require_positive_ints(MOST, hosts=a * b * x * y)
    hosts = list(
        product(range(x), range(y), range(a), range(b))
    )  # board row and column, row and column on it
    cables = []
    for host in hosts:
        board_row, board_column, row, column = host
        right, below = (*host[:3], column + 1), (*host[:2], row + 1, column)
        cables += [(host, right, rate)] * (column + 1 < b) + [(host, below, rate)] * (row + 1 < a)
        cables += [(host, ("row", board_row, row), rate)] * ((column == 0) + (column == b - 1))
        cables += [(host, ("column", board_column, column), rate)] * ((row == 0) + (row == a - 1))
    return Graph(hosts, cables, forwards=True)


# ---- TPU v4: cubes of 4 · 4 · 4, joined by optical circuit switches --------------------------------------


def circuits(healthy: Sequence[int], shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """(from cube, to cube, axis): the faces that the switches join, for a job of `shape` cubes. Which cubes
    they are does not matter, so a broken one is left out and any other takes its place."""
    require_positive_ints(64, shape=shape)
    if len(shape) != 3 or len(set(healthy)) < prod(shape):
        raise ValueError(f"shape {tuple(shape)} needs three sizes and that many of {len(healthy)} cubes")
    places = list(product(*map(range, shape)))
    cube_at = dict(zip(places, healthy))
    ahead = lambda place, axis: (*place[:axis], (place[axis] + 1) % shape[axis], *place[axis + 1 :])
    return [(cube_at[place], cube_at[ahead(place, axis)], axis) for place in places for axis in range(3)]


def cubes(healthy: Sequence[int], shape: tuple[int, int, int], size: int = 4) -> Graph:
    """The torus that these circuits make of cubes with `size` chips along an edge, and so size^2 a face."""
    require_positive_ints(16, size=size)
    joined = circuits(healthy, shape)
    require_positive_ints(MOST, hosts=len(joined) // 3 * size**3)
    ends = list(product(range(size), repeat=3))
    at = lambda cube, axis, value, face: (cube, *face[:axis], value, *face[axis:])
    cables = []
    for here, there, axis in joined:
        for face in product(range(size), repeat=2):
            line = [at(here, axis, value, face) for value in range(size)]
            cables += zip(line, [*line[1:], at(there, axis, 0, face)])
    return Graph(
        [(here, *end) for here, _, axis in joined if axis == 0 for end in ends], cables, forwards=True
    )
