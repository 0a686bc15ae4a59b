"""Placements: probabilities by enumeration, and against every other placement."""

from fractions import Fraction
from itertools import combinations, product
from math import comb

from minitrain.systems.plan import checkpoint_interval as place


def survived(placement, failures):
    """The share of sets of so many failed machines that lose nothing."""
    sets = [*combinations(placement, failures)]
    return Fraction(sum(place.recovers(placement, failed) for failed in sets), len(sets))


def best_bound(machines, replicas):
    """No placement survives `replicas` failures more often: N states need N/m sets of holders or more."""
    return 1 - Fraction(-(-machines // replicas), comb(machines, replicas))


def test_gemini_on_16_machines():
    """Pairs: 93.3 % and 80.0 %; in a ring fewer pairs of failures are survived: 86.7 %."""
    pairs, ring = (place.holders(kind(16, 2), 2) for kind in (place.groups, place.ring))
    assert [survived(pairs, k) for k in (1, 2, 3)] == [1, Fraction(14, 15), Fraction(4, 5)]
    assert round(100 * float(survived(ring, 2)), 1) == 86.7
    assert all(survived(ring, k) < survived(pairs, k) for k in range(2, 5))


def test_every_machine_holds_its_own_state_and_as_many_as_others():
    for machines, replicas in ((8, 2), (9, 2), (11, 3), (5, 4)):
        for kind in (place.groups, place.ring):
            placement = place.holders(kind(machines, replicas), replicas)
            assert [*placement] == [*range(machines)]
            assert all(i in held and len(held) == replicas for i, held in placement.items())
            held_by = [sum(i in held for held in placement.values()) for i in range(machines)]
            assert held_by == [replicas] * machines
    assert [*map(list, place.groups(7, 2))] == [[0, 1], [2, 3], [4, 5, 6]], "mixed: the rest joins the last"


def test_groups_of_whole_size_are_best_of_all_placements():
    """Every placement of one replica each on 4 and 5 machines, and of two on 4: none survives m failures more
    often than the bound; groups reach it where m divides N, mixed stays within (2m-3)/C(N,m)."""
    for machines, replicas in ((4, 2), (5, 2), (4, 3)):
        peers = [
            [frozenset({i, *others}) for others in combinations({*range(machines)} - {i}, replicas - 1)]
            for i in range(machines)
        ]
        best = max(survived(dict(enumerate(held)), replicas) for held in product(*peers))
        ours = survived(place.holders(place.groups(machines, replicas), replicas), replicas)
        assert best <= best_bound(machines, replicas)
        if machines % replicas == 0:
            assert ours == best == best_bound(machines, replicas)
        else:
            assert best - ours <= Fraction(2 * replicas - 3, comb(machines, replicas))


def test_bytes_of_replicas():
    assert place.replicas_cost(60, 2) == (60, 60, 60) and place.replicas_cost(10, 3) == (20, 20, 10)
