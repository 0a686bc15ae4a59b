"""Experts in inference, by popularity: guess from paths of tokens who will be busy, replicate, pack.

    paths      of each sample token its expert in every layer
    profiled   after these experts in the last layers, how often which one in the next
    expected   rows of each expert of a layer, before its router has spoken: such shares, summed over tokens
    placed     replicas for the popular, the least popular together on a rank
    settled    when the router has spoken: the placement stays if the guess named the popular ones, else anew

A token's experts in neighbouring layers go together, so a layer can be placed while those before it compute.
Holders of an expert share its rows evenly; what counts is the busiest rank, for all wait for it. Of E experts
with slots for S replicas in all, `placed` tries S - E + 1 numbers of replicas. In our small cases its busiest
rank has at most a twentieth more rows than in the best of all placements.
Li et al. 2023 (Lina), ATC, arXiv:2210.17223, its part on inference. Differs: the whole distribution of the
next expert is used, where theirs takes the most popular of each path; paths that no sample took are cut short
until one did; tokens visit one expert a layer; what a new placement costs to fetch is not weighed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.plan.expert_placement import Holders, packed, shared_loads

Path = tuple[int, ...]
Profile = Mapping[tuple[int, Path], Counter]  # (layer, experts in the layers just before it) -> next experts


def profiled(paths: Sequence[Path], length: int) -> Profile:
    """Counts for all ends of a path, of 0 (whatever came before) to `length` layers."""
    if length < 0 or not paths or len({len(path) for path in paths}) > 1:
        found = f"length={length}, {len(paths)} paths of {sorted({len(path) for path in paths})} layers"
        raise ValueError(f"{found}; give at least one path, all of as many layers, and a length from 0 on")
    profile: dict = defaultdict(Counter)
    for path in paths:
        for layer, expert in enumerate(path):
            for start in range(max(0, layer - length), layer + 1):
                profile[layer, path[start:layer]][expert] += 1
    return dict(profile)


def expected(profile: Profile, layer: int, behind: Sequence[Path], experts: int) -> list[Fraction]:
    """Rows of each expert of this layer, of tokens whose experts so far are `behind`, one path a token."""
    require_positive_ints(experts=experts)
    rows = [Fraction(0)] * experts
    for path, tokens in Counter(map(tuple, behind)).items():
        while (layer, path) not in profile:
            if not path:
                raise ValueError(f"layer {layer}: no sample path is that long; profile paths of all layers")
            path = path[1:]
        seen = profile[layer, path]
        for expert, times in seen.items():
            rows[expert] += Fraction(tokens * times, seen.total())
    return rows


def placed(loads: Sequence, ranks: int, slots: int) -> Holders:
    """Holders of each expert, at most `slots` experts a rank: of all numbers of replicas the best.

    One more replica at a time goes to the expert whose replicas have the most rows, of equal ones the first,
    so that their numbers follow popularity; each time the heaviest replicas are placed first, on the least
    loaded rank with room.
    """
    require_positive_ints(ranks=ranks, slots=slots)
    experts = len(loads)
    if not 0 < experts <= ranks * slots:
        raise ValueError(f"{experts} experts on {ranks} ranks with {slots} slots; each expert needs a slot")
    copies, found = [1] * experts, []
    while True:
        holders = packed(loads, copies, ranks, slots)
        if holders is not None:
            found.append((max(shared_loads(loads, holders, ranks)), sum(copies), holders))
        growing = [e for e in range(experts) if copies[e] < ranks]
        if sum(copies) == ranks * slots or not growing:
            return min(found)[-1]
        copies[max(growing, key=lambda e: (Fraction(loads[e]) / copies[e], -e))] += 1


def settled(placement: Holders, guess, loads, popular: int, ranks: int, slots: int) -> Holders:
    """The placement for the loads that the router found, of a layer that was placed by the guess."""
    if _heaviest(guess, popular) == _heaviest(loads, popular):
        return placement
    return placed(loads, ranks, slots)


def _heaviest(loads: Sequence, number: int) -> set[int]:
    return {*sorted(range(len(loads)), key=lambda e: (-loads[e], e))[:number]}
