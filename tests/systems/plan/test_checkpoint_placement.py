"""Placements: probabilities by counting against enumeration and against every other placement; parity on bits;
chunks in idle spans."""

import random
from fractions import Fraction
from functools import reduce
from itertools import combinations, product
from math import comb
from operator import xor

import pytest

from minitrain.systems.plan import checkpoint_placement as place
from minitrain.systems.simulate.failures import failing


def best_bound(machines, replicas):
    """No placement survives `replicas` failures more often: N states need N/m sets of holders or more."""
    return 1 - Fraction(-(-machines // replicas), comb(machines, replicas))


def enumerated(machines, failures, recovers):
    return sum(recovers(set(failed)) for failed in combinations(range(machines), failures))


def test_gemini_on_16_machines():
    """Pairs: 93.3 % and 80.0 %; in a ring fewer pairs of failures are survived: 86.7 %."""
    pairs = place.replica_survivals(place.groups(16, 2), 2)
    assert [place.probability(pairs, k) for k in (1, 2, 3)] == [1, Fraction(14, 15), Fraction(4, 5)]
    assert [round(100 * float(place.probability(pairs, k)), 1) for k in (2, 3)] == [93.3, 80.0]
    ring = place.replica_survivals(place.ring(16, 2), 2)
    assert round(100 * float(place.probability(ring, 2)), 1) == 86.7
    assert all(place.probability(ring, k) < place.probability(pairs, k) for k in range(2, 9))
    for kind, survivals in ((place.groups, pairs), (place.ring, ring)):
        placement = place.holders(kind(16, 2), 2)
        for k in (2, 3):
            found = enumerated(16, k, lambda failed: place.recovers(placement, failed))
            assert found == survivals[k]


@pytest.mark.parametrize("kind", [place.groups, place.ring])
def test_counting_is_enumeration(kind):
    for machines, replicas in (
        (1, 1),
        (4, 2),
        (5, 2),
        (6, 3),
        (7, 2),
        (7, 3),
        (8, 3),
        (9, 4),
        (8, 8),
        (9, 1),
    ):
        rings = kind(machines, replicas)
        placement, survivals = place.holders(rings, replicas), place.replica_survivals(rings, replicas)
        for k in range(machines + 1):
            assert survivals[k] == enumerated(machines, k, lambda failed: place.recovers(placement, failed))


def test_every_machine_holds_its_own_state_and_as_many_as_others():
    for machines, replicas in ((8, 2), (9, 2), (11, 3), (5, 4)):
        for kind in (place.groups, place.ring):
            placement = place.holders(kind(machines, replicas), replicas)
            assert [*placement] == [*range(machines)]
            assert all(i in held and len(held) == replicas for i, held in placement.items())
            held_by = [sum(i in held for held in placement.values()) for i in range(machines)]
            assert held_by == [replicas] * machines
    assert [*map(list, place.groups(7, 2))] == [[0, 1], [2, 3], [4, 5, 6]], (
        "mixed: what is left joins the last"
    )


def test_groups_of_whole_size_are_best_of_all_placements():
    """Every placement of one replica each on 4 and 5 machines, and of two on 4: none survives m failures more
    often than the bound; groups reach it where m divides N, mixed stays within (2m-3)/C(N,m)."""
    for machines, replicas in ((4, 2), (5, 2), (4, 3)):
        peers = [
            [frozenset({i, *others}) for others in combinations({*range(machines)} - {i}, replicas - 1)]
            for i in range(machines)
        ]
        best = max(
            enumerated(machines, replicas, lambda failed: place.recovers(dict(enumerate(held)), failed))
            for held in product(*peers)
        )
        ours = place.replica_survivals(place.groups(machines, replicas), replicas)[replicas]
        total = comb(machines, replicas)
        assert Fraction(best, total) <= best_bound(machines, replicas)
        if machines % replicas == 0:
            assert ours == best == total * best_bound(machines, replicas)
        else:
            assert best - ours <= 2 * replicas - 3


def test_the_gap_of_mixed_groups_is_bounded():
    for machines in range(3, 60):
        for replicas in range(2, min(machines, 9)):
            ours = place.probability(
                place.replica_survivals(place.groups(machines, replicas), replicas), replicas
            )
            gap = best_bound(machines, replicas) - ours
            limit = Fraction(2 * replicas - 3, comb(machines, replicas))
            assert gap == 0 if machines % replicas == 0 else 0 < gap <= limit
            in_a_ring = place.replica_survivals(place.ring(machines, replicas), replicas)
            assert place.probability(in_a_ring, replicas) <= ours
    assert best_bound(7, 4) - place.probability(
        place.replica_survivals(place.groups(7, 4), 4), 4
    ) == Fraction(5, comb(7, 4)), "and reached"


def test_simulated_failures_are_recovered_as_often_as_counted():
    """The simulator takes three machines of 16 at once, at random: four times in five their memory is elsewhere."""
    placement = place.holders(place.groups(16, 2), 2)
    events = failing(7, 1000.0, 16, together=3)
    found = sum(place.recovers(placement, next(events).machines) for _ in range(4000))
    assert found / 4000 == pytest.approx(0.8, abs=3 * (0.8 * 0.2 / 4000) ** 0.5)


def stripes(states):
    """Pieces [i][j] of machine i for the parity on machine j, and the parities."""
    n = len(states)
    size = len(states[0]) // (n - 1)
    pieces = []
    for i, state in enumerate(states):
        cut = [state[size * p : size * (p + 1)] for p in range(n - 1)]
        pieces.append({j: cut.pop(0) for j in range(n) if j != i})
    parity = [
        bytes(reduce(xor, column) for column in zip(*(pieces[i][j] for i in range(n) if i != j)))
        for j in range(n)
    ]
    return pieces, parity


def test_reft_parity():
    """Any one of n machines is rebuilt from the others bit for bit; bytes kept, sent and received as stated."""
    for n in (2, 3, 4, 6):
        size = 60
        states = [random.Random(i).randbytes(size) for i in range(n)]
        pieces, parity = stripes(states)
        cost = place.parity_cost(size, n)
        assert {len(part) for part in parity} == {cost.stored} and cost.stored == Fraction(size, n - 1)
        assert all(sum(map(len, pieces[i].values())) == cost.sent for i in range(n))
        for lost in range(n):
            received, rebuilt = 0, b""
            for j in (j for j in range(n) if j != lost):
                parts = [parity[j], *(pieces[i][j] for i in range(n) if i not in (lost, j))]
                received += sum(map(len, parts))
                rebuilt += bytes(reduce(xor, column) for column in zip(*parts))
            assert rebuilt == states[lost] and received == cost.received
        replica = place.replicas_cost(size, 2)
        assert replica == (size, size, size) and cost.stored * (n - 1) == replica.stored
    assert place.replicas_cost(10, 3) == (20, 20, 10)


def test_reft_reliability_against_replicas():
    """Groups of n with a parity survive one failure each. Pairs, n = 2, are replicas; larger groups survive less
    for less memory, by enumeration and by counting."""
    for n in (2, 4, 8):
        members = [range(start, start + n) for start in range(0, 8, n)]
        survivals = place.parity_survivals(members)
        for k in range(9):
            assert survivals[k] == enumerated(
                8, k, lambda failed: all(len({*group} & {*failed}) <= 1 for group in members)
            )
    pairs = place.replica_survivals(place.groups(16, 2), 2)
    by_size = [place.parity_survivals([range(s, s + n) for s in range(0, 16, n)]) for n in (2, 4, 8, 16)]
    assert by_size[0] == pairs
    assert [place.probability(survivals, 2) for survivals in by_size] == [
        1 - Fraction(n - 1, 15) for n in (2, 4, 8, 16)
    ], "the second failure must miss the n - 1 others of the first's group"
    survived = [place.reliability(survivals, Fraction(1, 100)) for survivals in by_size]
    assert survived == sorted(survived, reverse=True) and survived[-1] > Fraction(98, 100)


def test_reliability_sums_over_all_numbers_of_failures():
    p = Fraction(1, 7)
    pairs = place.replica_survivals(place.groups(10, 2), 2)
    assert place.reliability(pairs, p) == (1 - p * p) ** 5
    quads = place.parity_survivals([range(4), range(4, 8)])
    assert place.reliability(quads, p) == ((1 - p) ** 4 + 4 * p * (1 - p) ** 3) ** 2
    assert place.reliability(pairs, 0) == 1 and place.reliability(pairs, 1) == 0


# ---- idle spans --------------------------------------------------------------------------------------------

LINK = {"bytes_per_s": 10, "buffer_bytes": 40, "parts": 4}


def test_chunks_by_hand():
    """Chunks of 10 bytes take 1 s; half a chunk goes where half a second is left."""
    fits = place.interleave([2, Fraction(1, 2), 3], 42, **LINK)
    assert fits.chunks == [[10, 10], [5], [10, 7]] and fits.left_bytes == 0 and fits.fits
    short = place.interleave([2, Fraction(1, 2)], 42, **LINK)
    assert short.chunks == [[10, 10], [5]] and short.left_bytes == 17 and not short.fits
    assert place.interleave([2, 1], 42, used=Fraction(1, 2), **LINK).chunks == [[10], [5]]
    late = place.interleave([2, Fraction(1, 4)], 42, latency_s=Fraction(1, 2), **LINK)
    assert late.chunks == [[10], []], "half a second is left, and as much is latency"
    assert place.interleave([1, 1], 0, **LINK) == ([[], []], 0)


@pytest.mark.parametrize("latency_s", [0, Fraction(1, 5)])
def test_chunks_fill_spans_and_fit_the_buffer(latency_s):
    draw = random.Random(0)
    outcomes = set()
    for _ in range(100):
        spans = [Fraction(draw.randint(0, 30), 10) for _ in range(draw.randint(1, 6))]
        nbytes = draw.randint(0, 60)
        used = Fraction(draw.randint(1, 10), 10)
        sent = place.interleave(spans, nbytes, latency_s=latency_s, used=used, **LINK)
        assert sum(map(sum, sent.chunks)) + sent.left_bytes == nbytes
        assert all(0 < chunk <= 10 for chunks in sent.chunks for chunk in chunks)
        for span, chunks in zip(spans, sent.chunks, strict=True):
            busy = sum(latency_s + Fraction(chunk) / 10 for chunk in chunks)
            assert busy <= used * span
            if not sent.fits:
                assert used * span - busy < latency_s + Fraction(1, 10), "room for a byte more"
        outcomes.add(sent.fits)
    assert outcomes == {True, False}


def test_a_checkpoint_that_does_not_fit_a_step_is_spread_over_more():
    spans = [2, Fraction(1, 2)]
    assert [place.steps_to_send(spans, nbytes, **LINK) for nbytes in (0, 1, 25, 26, 50, 51)] == [
        1,
        1,
        1,
        2,
        2,
        3,
    ]
    for nbytes in (1, 26, 51):
        steps = place.steps_to_send(spans, nbytes, **LINK)
        assert place.interleave(spans * steps, nbytes, **LINK).fits
        assert not place.interleave(spans * (steps - 1), nbytes, **LINK).fits
