"""Searches against enumeration, and what they search against sums written down differently."""

from fractions import Fraction
from itertools import permutations, product
from math import prod

from minitrain.systems.plan import communication_search as plans

OPERATIONS = {
    "all-reduce": {"flat": [("ib", 6)], "levels": [("nvlink", 2), ("ib", 3), ("nvlink", 2)]},
    "all-to-all": {"flat": [("ib", 5)], "levels": [("nvlink", 3), ("ib", 3)]},
    "send": {"flat": [("ib", 2)]},
}


def test_syndicate():
    """Walks of 100 steps find what all orders and motifs hold; in turn takes longer; and links are never two-timed."""
    every = [
        (order, {key: OPERATIONS[key][name] for key, name in zip(OPERATIONS, names)})
        for order in permutations(OPERATIONS)
        for names in product(*OPERATIONS.values())
    ]
    best = min(plans.motifs_s(*plan) for plan in every)
    flat = {key: motifs["flat"] for key, motifs in OPERATIONS.items()}
    assert best == 8 and plans.motifs_s(list(OPERATIONS), flat) == 13
    for seed in range(5):
        seconds, order, names = plans.annealed(OPERATIONS, 100, seed)
        motifs = {key: OPERATIONS[key][name] for key, name in names.items()}
        assert seconds == best == plans.motifs_s(order, motifs)
    for order, motifs in every:
        busy = sum(seconds for motif in motifs.values() for link, seconds in motif if link == "ib")
        alone = max(sum(seconds for _, seconds in motif) for motif in motifs.values())
        assert plans.motifs_s(order, motifs) >= max(alone, busy)


def test_centauri():
    """Choosing group, then primitives, then chunks finds the least of all 32."""
    inside, across = (Fraction(1, 10), Fraction(1, 9)), (Fraction(1, 4), 1)
    space = ("AR", "RS+AG"), ("flat", "nodes"), range(1, 9)

    def seconds(choice, work=12, size=12, after=6):
        return plans.centauri_s(*choice, work, size, after, 4, inside, across)

    table = {choice: seconds(choice) for choice in product(*space)}
    here = ["AR", "flat", 1]
    for axis in (1, 0, 2):
        options = [[*here[:axis], option, *here[axis + 1 :]] for option in space[axis]]
        here = min(options, key=seconds)
    assert tuple(here) == min(table, key=table.get) == ("RS+AG", "nodes", 8)
    assert (round(float(table[tuple(here)]), 3), table["AR", "flat", 1]) == (19.225, Fraction(169, 4))
    # in one chunk nothing is hidden: each phase's alpha and bytes, in turn, as far as they are waited for,
    # or, flat, to the all-gather's end
    near, far = Fraction(1, 10) + Fraction(1, 9) * 9, lambda elements: Fraction(1, 4) + elements
    waits = {("AR", "flat"): far(24), ("RS+AG", "flat"): 2 * far(12) - 6, ("AR", "nodes"): 2 * near + far(6)}
    waits["RS+AG", "nodes"] = near + far(6)
    assert all(table[*two, 1] == 12 + seconds + 6 for two, seconds in waits.items())
    assert all(18 < table[*two, k] <= table[*two, 1] + 3 * k for two in waits for k in space[2])


def test_p2_placement():
    """2 and 3 matrices, as products of all factors that fit have them; the best puts the heavy axis inside."""
    for levels, axes, count in (((2, 8), (4, 4), 2), ((4, 8), (8, 4), 3), ((2, 2, 4), (4, 2, 2), 7)):
        rows = [list(product(range(1, axis + 1), repeat=len(levels))) for axis in axes]
        rows = [[row for row in some if prod(row) == axis] for some, axis in zip(rows, axes)]
        fitting = [matrix for matrix in product(*rows) if tuple(map(prod, zip(*matrix))) == levels]
        assert sorted(plans.placements(levels, axes)) == sorted(fitting) and len(fitting) == count
    # 100 on the first axis, 1 on the second; 1 byte/s between nodes, 9 inside
    inner, outer = ((1, 4), (2, 2)), ((2, 2), (1, 4))
    times = {both: plans.placement_s(both, (1, 9), (100, 1)) for both in plans.placements((2, 8), (4, 4))}
    assert times[inner] == Fraction(3, 2) * 100 / 9 + Fraction(1, 9) + Fraction(1, 2)
    assert times[outer] == Fraction(100, 9) + Fraction(100, 2) + Fraction(3, 2) / 9
    assert min(times, key=times.get) == inner
