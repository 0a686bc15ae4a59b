"""Placements: probabilities by counting against enumeration and against every other placement."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

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
    pairs = place.survivals(place.groups(16, 2), 2)
    assert [place.probability(pairs, k) for k in (1, 2, 3)] == [1, Fraction(14, 15), Fraction(4, 5)]
    assert [round(100 * float(place.probability(pairs, k)), 1) for k in (2, 3)] == [93.3, 80.0]
    ring = place.survivals(place.ring(16, 2), 2)
    assert round(100 * float(place.probability(ring, 2)), 1) == 86.7
    assert all(place.probability(ring, k) < place.probability(pairs, k) for k in range(2, 9))
    for kind, survivals in ((place.groups, pairs), (place.ring, ring)):
        placement = place.holders(kind(16, 2), 2)
        for k in (2, 3):
            found = enumerated(16, k, lambda failed: place.recovers(placement, failed))
            assert found == survivals[k]


@pytest.mark.parametrize("kind", [place.groups, place.ring])
def test_counting_is_enumeration(kind):
    for machines, replicas in [
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
    ]:
        rings = kind(machines, replicas)
        placement, survivals = place.holders(rings, replicas), place.survivals(rings, replicas)
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
        ours = place.survivals(place.groups(machines, replicas), replicas)[replicas]
        total = comb(machines, replicas)
        assert Fraction(best, total) <= best_bound(machines, replicas)
        if machines % replicas == 0:
            assert ours == best == total * best_bound(machines, replicas)
        else:
            assert best - ours <= 2 * replicas - 3


def test_the_gap_of_mixed_groups_is_bounded():
    for machines in range(3, 60):
        for replicas in range(2, min(machines, 9)):
            ours = place.probability(place.survivals(place.groups(machines, replicas), replicas), replicas)
            gap = best_bound(machines, replicas) - ours
            limit = Fraction(2 * replicas - 3, comb(machines, replicas))
            assert gap == 0 if machines % replicas == 0 else 0 < gap <= limit
            in_a_ring = place.survivals(place.ring(machines, replicas), replicas)
            assert place.probability(in_a_ring, replicas) <= ours
    assert best_bound(7, 4) - place.probability(place.survivals(place.groups(7, 4), 4), 4) == Fraction(
        5, comb(7, 4)
    ), "and reached"


def test_simulated_failures_are_recovered_as_often_as_counted():
    """The simulator takes three machines of 16 at once, at random: four times in five their memory is elsewhere."""
    placement = place.holders(place.groups(16, 2), 2)
    events = failing(7, 1000.0, 16, together=3)
    found = sum(place.recovers(placement, next(events).machines) for _ in range(4000))
    assert found / 4000 == pytest.approx(0.8, abs=3 * (0.8 * 0.2 / 4000) ** 0.5)


def test_bytes_of_replicas():
    assert place.replicas_cost(60, 2) == (60, 60, 60) and place.replicas_cost(10, 3) == (20, 20, 10)
