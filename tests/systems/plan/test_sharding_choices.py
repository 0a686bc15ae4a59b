"""What a choice of sharding costs: real and dry ranks send the formulas' bytes; the search is exhaustive."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain import collectives, launch
from minitrain.ranks.collectives import all_gather, reduce_scatter
from minitrain.ranks.mesh import Mesh
from minitrain.systems.communication.algorithms import ring_all_reduce
from minitrain.systems.plan.sharding_choices import (
    Choice,
    Cluster,
    amsp_choices,
    cheapest,
    memory_bytes,
    paro,
    paro_choices,
    plans,
    traffic,
)
from tests.parallel import TOLERANCE, Traffic

NAMED = {"DDP": "NNN", "ZeRO-1": "NNG", "ZeRO-2": "NGG", "ZeRO-3": "GGG", "MiCS": "III"}

PSI = 7_500_000_000


def held(choice, parameters=PSI):
    return sum(memory_bytes(choice, parameters).values())


# ---- the formulas of the papers --------------------------------------------------------------------------


def test_named_choices_hold_what_zero_says():
    """Figure 1 of ZeRO: 7.5 billion parameters on 64 ranks, 120 GB, 31.4, 16.6, 1.9."""
    for ranks in (1, 2, 64):
        cluster = Cluster(ranks, per_node=min(ranks, 8))
        by_name = {name: Fraction(held(paro(word, cluster))) for name, word in NAMED.items()}
        assert by_name["DDP"] == 16 * PSI and by_name["ZeRO-1"] == (4 + Fraction(12, ranks)) * PSI
        assert by_name["ZeRO-2"] == (2 + Fraction(14, ranks)) * PSI
        assert by_name["ZeRO-3"] == Fraction(16, ranks) * PSI
        assert by_name["MiCS"] == Fraction(16, cluster.per_node) * PSI
    assert [round(float(by_name[name]) / 1e9, 1) for name in NAMED][:4] == [120, 31.4, 16.6, 1.9]


def test_hybrid_sharding_crosses_hosts_with_less_than_the_ring_bound_of_the_paper():
    for ranks, host in ((8, 1), (16, 8), (64, 8), (512, 8), (8, 8)):
        cluster, M = Cluster(ranks, host), 2 * PSI
        hybrid = traffic(paro("III", cluster), PSI, cluster)
        paper = Fraction(2 * M * (ranks - 1), host * ranks)
        if ranks <= 64 and ranks > host:  # a host's share of one ring through all ranks
            sends = itertools.chain.from_iterable(ring_all_reduce(ranks).steps)
            leaving = [len(one.chunks) for one in sends if one.source // host == 0 != one.to // host]
            assert paper == Fraction(M * sum(leaving), ranks * host)
        assert Fraction(hybrid.inter_bytes) == Fraction(2 * M * (ranks - host), host * ranks)
        assert paper - Fraction(hybrid.inter_bytes) == Fraction(2 * M * (host - 1), host * ranks)
        assert hybrid.inter_bytes <= traffic(paro("GGG", cluster), PSI, cluster).inter_bytes
        again = traffic(paro("III", cluster), PSI, cluster, 7)
        assert again.inter_bytes == hybrid.inter_bytes  # MiCS: once a step


@given(per_node=st.integers(1, 12), nodes=st.integers(1, 12), microbatches=st.integers(1, 4))
def test_a_finer_cut_holds_less_and_sends_more(per_node, nodes, microbatches):
    cluster, parameters = Cluster(per_node * nodes, per_node), 12 * math.lcm(*range(1, 13)) ** 2
    factors = cluster.factors()
    table = [Choice(factor, factor, factor) for factor in factors]
    memory = [held(choice, parameters) for choice in table]
    sent = [traffic(choice, parameters, cluster, microbatches) for choice in table]
    assert memory == [16 * parameters / factor for factor in factors]
    assert all(fine < coarse for coarse, fine in itertools.pairwise(memory))
    for coarse, fine in itertools.pairwise(sent):
        assert coarse.total_bytes < fine.total_bytes
        assert coarse.inter_bytes <= fine.inter_bytes and coarse.intra_bytes <= fine.intra_bytes


# ---- the same choices on ranks ---------------------------------------------------------------------------


def train(choice, mesh, data, start, microbatches=1, second_hop=True):
    """Momentum SGD on a vector, its states cut as chosen; every axis of the mesh is 2, the innermost one cuts
    first.

    The loss of a microbatch is the sum of scale · w²/2 + shift · w, so its gradient is scale · w + shift."""
    axes = [mesh.group(axis) for axis in reversed(mesh.shape)]  # the innermost first: inside the node

    def between(coarse, fine):
        return axes[coarse.bit_length() - 1 : fine.bit_length() - 1]

    def cut(x, coarse, fine):
        for group in between(coarse, fine):
            x = reduce_scatter(x, group)
        return x

    def gather(x, fine, coarse):
        for group in reversed(between(coarse, fine)):
            x = all_gather(x, group)
        return x

    def piece(x, coarse, fine):
        for group in between(coarse, fine):
            x = x.chunk(group.size())[group.rank()]
        return x

    p, g, o = choice.parameters, choice.gradients, choice.optimizer
    weight = piece(start, 1, p).clone()
    momentum = torch.zeros_like(piece(start, 1, o))
    for step in range(len(data) // microbatches):
        gradient = 0
        for scale, shift in data[step * microbatches : (step + 1) * microbatches]:
            local = scale * gather(weight, p, 1)  # forward
            gather(weight, p, 1)  # and again for backward
            gradient = gradient + cut(local + shift, 1, g)
        gradient = cut(gradient, g, o)
        if second_hop:
            gradient = gather(cut(gradient, o, 2 ** len(axes)), 2 ** len(axes), o)
        momentum = 0.9 * momentum + gradient
        weight = gather(piece(weight, p, o) - 0.05 * momentum, o, p)
    return gather(weight, p, 1)


def rank_data(ranks, microbatches, size):
    """[rank][microbatch] -> scale [size], shift [size]."""
    generator = torch.Generator().manual_seed(7)
    return torch.rand(ranks, microbatches, 2, size, dtype=torch.float64, generator=generator)


def test_every_choice_trains_like_one_process_and_sends_the_formula():
    size, ranks, m, steps = 8, 4, 2, 2
    start = torch.linspace(-1, 1, size, dtype=torch.float64)

    def rank():
        mesh = Mesh(node=2, gpu=2)
        data = rank_data(ranks, steps * m, size)[collectives.world().rank()]
        outcomes = {}
        for word, choice in paro_choices(Cluster(ranks, 2)).items():
            with Traffic() as ledger:
                weights = train(choice, mesh, data, start, m)
            outcomes[word] = weights, ledger.sent_bytes(axis="gpu"), ledger.sent_bytes(axis="node")
        return outcomes, train(paro("III", Cluster(ranks, 2)), mesh, data, start, m, second_hop=False)

    reference, momentum = start, torch.zeros_like(start)
    for parts in rank_data(ranks, steps * m, size).split(m, dim=1):
        scale, shift = parts.sum(dim=(0, 1))
        momentum = 0.9 * momentum + scale * reference + shift
        reference = reference - 0.05 * momentum
    cluster = Cluster(ranks, 2)
    for outcomes, without_second_hop in launch.run(rank, ranks=ranks):
        assert len(outcomes) == 10
        for word, (weights, inside, across) in outcomes.items():
            assert (weights - reference).abs().max() < TOLERANCE, word
            assert (inside, across) == expected_bytes(paro(word, cluster), size, cluster, m, 8, steps), word
        assert (without_second_hop - reference).abs().max() > 1e-4


def expected_bytes(choice, size, cluster, microbatches, element_bytes, steps=1):
    """The formula's bytes for elements of another size, and the gather by which `train` shows its result."""
    sent = traffic(choice, size, cluster, microbatches)
    alike = Choice(choice.parameters, choice.parameters, choice.parameters)
    two, one = (traffic(alike, size, cluster, microbatches) for microbatches in (2, 1))  # three gathers apart
    return (
        (steps * sent.intra_bytes + (two.intra_bytes - one.intra_bytes) / 3) * element_bytes / 2,
        (steps * sent.inter_bytes + (two.inter_bytes - one.inter_bytes) / 3) * element_bytes / 2,
    )


# ---- the search ------------------------------------------------------------------------------------------


def brute_force_factors(ranks, per_node):
    """Groups of f neighbours: does each lie in one node, or does each hold whole nodes?"""

    def fits(f):
        groups = [range(first, first + f) for first in range(0, ranks, f)]
        nodes = [{rank // per_node for rank in group} for group in groups]
        inside = all(len(node) == 1 for node in nodes)
        whole = all(len(node) * per_node == f for node in nodes)
        return ranks % f == 0 and (inside or whole)

    return [f for f in range(1, ranks + 1) if fits(f)]


def brute_force_sent(coarse, fine, per_node, size):
    """One ring per prime factor, the inner ones first, on what the ring before it left."""
    sent, pieces = [Fraction(0), Fraction(0)], coarse
    while pieces < fine:
        here = math.gcd(fine // pieces, per_node // pieces) if pieces < per_node else fine // pieces
        ring = next(q for q in range(2, here + 1) if here % q == 0)
        sent[pieces >= per_node] += Fraction(size, pieces) * (ring - 1) / ring
        pieces *= ring
    return sent


def brute_force(limit, triples, parameters, ranks, per_node, intra, inter, m):
    best = None
    for p, g, o in triples:
        memory = float(sum(Fraction(size * parameters, f) for size, f in ((2, p), (2, g), (12, o))))
        if p > g or g % p or g > o or o % g or memory > limit:
            continue
        steps = [(1, p)] * 2 * m + [(1, g)] * m + [(g, o)] + [(o, ranks)] * 2 + [(p, o)]
        sent = [brute_force_sent(*step, per_node, 2 * parameters) for step in steps]
        seconds = float(sum(inside for inside, _ in sent) / intra + sum(across for _, across in sent) / inter)
        best = min(best or (seconds, memory, (p, g, o)), (seconds, memory, (p, g, o)))
    return best


@settings(max_examples=60)
@given(
    per_node=st.sampled_from([1, 2, 3, 4, 6, 8]),
    nodes=st.sampled_from([1, 2, 3, 4]),
    m=st.integers(1, 3),
    parameters=st.integers(1, 10**12),
    intra=st.integers(1, 10**12),
    inter=st.integers(1, 10**12),
    share=st.floats(0.5, 20),
    words=st.booleans(),
)
def test_search_equals_brute_force(per_node, nodes, m, parameters, intra, inter, share, words):
    ranks = per_node * nodes
    cluster, limit = Cluster(ranks, per_node), share * 16 * parameters / ranks
    factors = [1, per_node, ranks] if words else brute_force_factors(ranks, per_node)
    assert words or factors == cluster.factors()
    expected = brute_force(
        limit, itertools.product(factors, repeat=3), parameters, ranks, per_node, intra, inter, m
    )
    space = paro_choices(cluster).values() if words else amsp_choices(cluster)
    candidates = plans(
        space, parameters, cluster, intra_bytes_per_s=intra, inter_bytes_per_s=inter, microbatches=m
    )
    if expected is None:
        with pytest.raises(ValueError, match="no choice needs at most"):
            cheapest(limit, candidates)
    else:
        plan = cheapest(limit, candidates)
        assert (plan.seconds, plan.memory_bytes, plan.choice.factors) == expected


def test_ten_words_of_27_and_the_chains_of_divisors():
    words = {"".join(word) for word in itertools.product("NIG", repeat=3)}
    obey = {word for word in words if sorted(word, key="NIG".index) == list(word)}
    assert len(words) == 27 and set(paro_choices(Cluster(64, 8))) == obey and len(obey) == 10
    for word in words - obey:
        with pytest.raises(ValueError, match="divide the next"):
            paro(word, Cluster(64, 8))
    assert Cluster(24, 6).factors() == [1, 2, 3, 6, 12, 24] and Cluster(4, 4).factors() == [1, 2, 4]
    assert len(amsp_choices(Cluster(64, 8))) == 84
