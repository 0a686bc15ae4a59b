"""Costs of collectives: closed forms, played message by message, and what holds for every group and size."""

from dataclasses import replace
from math import ceil, inf, log2, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.plan.simulate.collectives import ALGORITHMS, Placement, by_algorithm, place, seconds
from minitrain.plan.simulate.machines import GB, Device, Link, Machine, machine
from minitrain.ranks.events import Issue, Wait
from minitrain.systems.simulate.replay import replay

ALPHA, BETA = 2e-6, 1e-10  # one level: 2 us and 10 GB/s
DEVICE = Device("test", {"float32": 1e12}, 1e9, 1e11, "made up")
FLAT = Machine(
    "flat", DEVICE, 64, Link("in", ALPHA, 1 / BETA, "made up"), Link("out", 1.0, 1.0, "made up"), 64
)
INSIDE, OUTSIDE = Link("in", 1e-6, 100 * GB, "made up"), Link("out", 5e-6, 10 * GB, "made up")
TWO = Machine("two levels", DEVICE, 4, INSIDE, OUTSIDE, 2)

rel = pytest.approx


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("S", [0, 1000, 10**8])
def test_closed_forms_on_one_level(n, S):
    p = place(range(n), FLAT)
    reduce = by_algorithm("all_reduce", S, p)
    assert reduce["ring"] == rel(2 * (n - 1) * (ALPHA + S / n * BETA))
    half = rel(reduce["ring"] / 2)
    assert seconds("reduce_scatter", S, p, "ring") == seconds("all_gather", S, p, "ring") == half
    assert seconds("all_to_all", S, p, "pairwise") == rel((n - 1) * (ALPHA + S / n * BETA))
    assert seconds("all_to_all", S, p, "bruck") == rel(ceil(log2(n)) * (ALPHA + S / 2 * BETA))
    assert seconds("barrier", 0, p) == rel(ceil(log2(n)) * ALPHA)
    assert ("halving" in reduce) == (n in (2, 4, 8, 16))
    if "halving" in reduce:
        assert reduce["halving"] == rel(2 * log2(n) * ALPHA + 2 * (n - 1) / n * S * BETA)
    assert "hierarchical" not in reduce and "leader" not in reduce  # there is one node


@pytest.mark.parametrize("n, S", [(2, 10**6), (8, 10), (8, 10**7), (100, 10**9)])
def test_chunks_are_the_best_number_of_chunks(n, S):
    p = place(range(n), replace(FLAT, devices_per_node=128, nics_per_node=128))
    for depth, algorithm in ((ceil(log2(n)), "tree"), (n - 1, "ring")):
        brute = min((depth - 1 + k) * (ALPHA + S / k * BETA) for k in range(1, 20_000))
        # k need not be whole in the formula
        assert seconds("broadcast", S, p, algorithm) == rel(brute, rel=2e-3)
        assert seconds("broadcast", S, p, algorithm) <= brute * (1 + 1e-12)
    assert seconds("all_reduce", S, p, "tree") == rel(2 * seconds("broadcast", S, p, "tree"))


def test_two_levels_by_hand():
    # 8 ranks, 4 a node; 2 cards of 10 GB/s a node, so 5 GB/s a rank and 20 GB/s over the boundary of a node.
    p, S = place(range(8), TWO), 1e9
    assert (p.nodes, p.fewest, p.most, p.rate) == (2, 4, 4, 20 * GB)
    ring = 2 * (5 * 1e-6 + 2 * 5e-6) + 2 * 7 / 8 * S / (20 * GB)
    assert seconds("all_reduce", S, p, "ring") == rel(ring)
    rings = 2 * 3 * (1e-6 + S / 4 / (100 * GB)) + 2 * 1 * (5e-6 + S / 8 / (5 * GB))
    assert seconds("all_reduce", S, p, "hierarchical") == rel(rings)
    halving = 2 * (2 * 1e-6 + S * (1 / 2 + 1 / 4) / (100 * GB)) + 2 * (5e-6 + S / 8 / (5 * GB))
    assert seconds("all_reduce", S, p, "halving") == rel(halving)
    inside = (sqrt(1e-6) + sqrt(S / (100 * GB))) ** 2  # a tree of depth 2 in each node
    leader = 2 * inside + 2 * (5e-6 + S / 2 / (10 * GB))
    assert seconds("all_reduce", S, p, "leader") == rel(leader)
    # all-to-all: 3/8 of S stays in the node, 4/8 leaves through the rank's share, both at once
    assert seconds("all_to_all", S, p, "pairwise") == rel(3 * 1e-6 + 4 * 5e-6 + S / 2 / (5 * GB))


def test_every_chunk_behind_the_first_starts_as_its_slowest_hop_does():
    """Two nodes of four ranks: of three hops down a tree one leaves the node, at 5 us; so do chunks."""
    p, S = place(range(8), TWO), 1e7
    hops = 2 * 1e-6 + 5e-6
    brute = min(hops + (k - 1) * 5e-6 + (1 + 2 / k) * S / (20 * GB) for k in range(1, 1000))
    assert seconds("broadcast", S, p, "tree") == rel(brute, rel=1e-4)


def test_spread_over_the_nodes_or_packed():
    packed, spread = place([0, 1, 2, 3], TWO), place([0, 4, 8, 12], TWO)
    assert (packed.nodes, spread.nodes, spread.most) == (1, 4, 1)
    assert spread.rate == TWO.inter_bytes_per_s == 5 * GB  # its share, though no neighbour is in the group
    assert seconds("all_reduce", 1e9, packed) < seconds("all_reduce", 1e9, spread) / 10
    assert (packed.ring_hops, spread.ring_hops, place([0, 4], TWO).ring_hops) == ((3, 0), (0, 3), (0, 1))
    ring = 2 * (3 * 5e-6 + 3 / 4 * 1e9 / (5 * GB))  # one rank a node: every hop leaves one
    assert seconds("all_reduce", 1e9, spread, "ring") == rel(ring)
    assert place([0, 1, 4, 5, 8, 9], TWO).ring_hops == (2, 3)  # once round: every node is left once
    uneven = place([0, 1, 2, 4], TWO)
    assert (uneven.nodes, uneven.fewest, uneven.most, uneven.rate) == (2, 1, 3, 5 * GB)
    said = "'hierarchical' with 4 ranks on 2 nodes; choose from auto, ring, tree, lead"
    with pytest.raises(ValueError, match=said):
        seconds("all_reduce", 1e9, uneven, "hierarchical")


def test_halving_is_for_powers_of_two_in_nodes_and_of_nodes():
    allowed = {
        (1, 4): [0, 4, 8, 12], (2, 2): [0, 1, 4, 5], (4, 1): [0, 1, 2, 3], (2, 3): [0, 1, 4, 5, 8, 9],
        (1, 3): [0, 4, 8], (3, 2): [0, 1, 2, 4, 5, 6], (3, 1): [0, 1, 2],
    }  # fmt: skip
    for (inside, nodes), members in allowed.items():
        p = place(members, TWO)
        assert (p.fewest, p.most, p.nodes) == (inside, inside, nodes)
        for op in "all_reduce", "all_gather", "reduce_scatter":
            assert ("halving" in by_algorithm(op, 100, p)) == (3 not in (inside, nodes)), (members, op)
    with pytest.raises(ValueError, match="cannot run as 'halving' with 6 ranks on 3 nodes"):
        seconds("all_reduce", 100, place(allowed[2, 3], TWO), "halving")


def test_cut_links_slow_the_all_reduce_in_proportion():
    group, S = range(8), 1e12  # so large that latency is nothing
    h100, h800 = (seconds("all_reduce", S, place(group, machine(name)), "ring") for name in ("h100", "h800"))
    assert h800 / h100 == rel(900 / 400, rel=1e-5)


def test_ring_and_tree_cross_where_the_algebra_says():
    # ring = tree: (n-1-d+1) alpha = x/n + 2 sqrt((d-1) alpha x) with x = S beta, a quadratic in sqrt(x).
    n, d = 24_576, 15
    flat = replace(FLAT, devices_per_node=n, nics_per_node=n)
    p = place(range(n), flat)
    root = -sqrt((d - 1) * ALPHA) + sqrt((d - 1) * ALPHA + (n - 1 - (d - 1)) * ALPHA / n)
    crossing = (n * root) ** 2 / BETA
    for factor, cheapest in ((0.99, "tree"), (1.01, "ring")):
        costs = {name: seconds("all_reduce", crossing * factor, p, name) for name in ("ring", "tree")}
        assert min(costs, key=costs.get) == cheapest
    assert 2 * p.tree_hops[0] == 30 and 2 * sum(p.ring_hops) == 49_150  # steps of the two at 24,576 ranks


# ---- the same costs, from messages: two texts that share nothing but alpha + S/B -------------------------
class Script:
    """Events of ranks that send messages; payloads in bytes."""

    def __init__(self, n):
        self.events = {rank: [] for rank in range(n)}
        self.ids = {rank: 0 for rank in range(n)}

    def add(self, rank, op, source, destination, S):
        self.events[rank].append(Issue(self.ids[rank], op, "x", (source, destination), S, S, 0, "here"))
        self.ids[rank] += 1
        return self.ids[rank] - 1

    def swap(self, rank, to, source, S):
        ids = self.add(rank, "send", rank, to, S), self.add(rank, "receive", source, rank, S)
        self.events[rank] += [Wait(id) for id in ids]

    def seconds(self):
        return replay(self.events, FLAT).step_s


@pytest.mark.parametrize("n", [2, 4, 8])
def test_formulas_equal_the_messages_played_one_by_one(n):
    S, p = 8 * 10**5, place(range(n), FLAT)
    ring, halving = Script(n), Script(n)
    for rank in range(n):
        for _ in range(2 * (n - 1)):
            ring.swap(rank, (rank + 1) % n, (rank - 1) % n, S // n)
        distances = [2**i for i in range(int(log2(n)))]
        for distance in distances + distances[::-1]:
            halving.swap(rank, rank ^ distance, rank ^ distance, S // (2 * distance))
    assert ring.seconds() == rel(seconds("all_reduce", S, p, "ring"))
    assert halving.seconds() == rel(seconds("all_reduce", S, p, "halving"))


@pytest.mark.parametrize("n, chunks", [(2, 1), (5, 3), (8, 10)])
def test_a_chain_of_chunks_takes_depth_plus_chunks(n, chunks):
    S, chain = 10**6, Script(n)
    for rank in range(n):
        for _ in range(chunks):
            if rank:
                chain.events[rank].append(Wait(chain.add(rank, "receive", rank - 1, rank, S // chunks)))
            if rank < n - 1:
                chain.add(rank, "send", rank, rank + 1, S // chunks)
    assert chain.seconds() == rel((n - 2 + chunks) * (ALPHA + S // chunks * BETA))
    assert chain.seconds() >= seconds("broadcast", S, place(range(n), FLAT), "ring") * (1 - 1e-5)


# ---- what holds for every group, size and machine --------------------------------------------------------
groups = st.lists(st.integers(0, 31), min_size=1, max_size=16, unique=True)
sizes = st.integers(0, 10**10)
operations = st.sampled_from(sorted(ALGORITHMS))


@given(operations, groups, sizes, sizes)
def test_more_bytes_never_cost_less(op, members, S, more):
    p = place(members, TWO)
    small, large = by_algorithm(op, S, p), by_algorithm(op, S + more, p)
    assert small.keys() == large.keys()
    assert all(0 <= small[name] <= large[name] * (1 + 1e-12) for name in small)


@given(operations, groups, sizes, st.floats(1, 100), st.floats(1, 100), st.floats(1, 100), st.floats(1, 100))
def test_a_faster_network_never_costs_more(op, members, S, in_rate, out_rate, in_alpha, out_alpha):
    fast = replace(
        TWO,
        intra=Link("in", 1e-6 / in_alpha, 100 * GB * in_rate, ""),
        inter=Link("out", 5e-6 / out_alpha, 10 * GB * out_rate, ""),
    )
    slow, fast = by_algorithm(op, S, place(members, TWO)), by_algorithm(op, S, place(members, fast))
    assert all(fast[name] <= slow[name] * (1 + 1e-12) for name in slow)


@given(operations, groups, sizes)
def test_auto_is_the_cheapest_and_order_does_not_matter(op, members, S):
    costs = by_algorithm(op, S, place(members, TWO))
    assert seconds(op, S, place(members[::-1], TWO)) == min(costs.values())
    if len(members) == 1:
        assert set(costs.values()) == {0.0}


@given(st.integers(2, 64), sizes)
def test_no_all_reduce_beats_the_lower_bounds(n, S):
    # Some rank must move 2(n-1)/n of S (Patarasuk, Yuan 2009); news needs log2 n hops to reach everyone.
    for name, cost in by_algorithm("all_reduce", S, place(range(n), FLAT)).items():
        assert cost >= 2 * (n - 1) / n * S * BETA * (1 - 1e-12), name
        assert cost >= ceil(log2(n)) * ALPHA * (1 - 1e-12), name


def test_errors_say_what_is_allowed():
    said = "all_gather cannot run as 'tree' .* choose from auto, ring, halving"
    with pytest.raises(ValueError, match=said):
        seconds("all_gather", 1, place([0, 1], TWO), "tree")


def test_uneven_nodes_and_one_rank_a_node():
    """What is true of full and equal nodes only: the rate of a pipeline, who may halve, and what leaves a node."""
    single = Placement(2, 2, 1, 1, 0.0, 0.0, rate_in=1.0, rate_out=5.0, rate_card=5.0)
    assert single.rate == 5.0  # no link inside a node is passed
    uneven = Placement(3, 2, 1, 2, 1.0, 10.0, rate_in=inf, rate_out=inf, rate_card=inf)
    assert "halving" not in by_algorithm("all_gather", 1.0, uneven)
    # the one alone in its node sends both away
    assert seconds("all_to_all", 0.0, uneven, "pairwise") == 1.0 + 2 * 10.0
