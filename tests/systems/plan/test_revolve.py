"""revolve: its formula and its plans against each other and against a search of all plans."""

from heapq import heappop, heappush
from math import comb

import pytest

from minitrain.systems.memory.chain_plan import check, forwards, walk
from minitrain.systems.plan.rematerialize import fewest_forwards, repetitions, revolve
from tests.systems.memory.plans import recomputed, show


def searched(n, held):
    """The fewest forwards by searching states (held x, place of the running x, gradients still to come): no rule
    about how plans look is assumed but that an x is held or on its way."""
    waiting, seen, tie = [(0, 0, frozenset({0}), 0, n)], set(), 0
    while waiting:
        cost, _, kept, now, left = heappop(waiting)
        if left == 0:
            return cost
        if (kept, now, left) in seen:
            continue
        seen.add((kept, now, left))
        moves = [(0, kept - {x}, now, left) for x in kept if x]
        moves += [(0, kept, x, left) for x in kept]
        if now == left - 1:
            moves.append((0, kept, now, left - 1))  # T and B
        if now < left - 1:
            moves.append((1, kept, now + 1, left))
        if len(kept) < held:
            moves.append((0, kept | {now}, now, left))
        for more, *state in moves:
            tie += 1
            heappush(waiting, (cost + more, tie, *state))


@pytest.mark.parametrize("held", [1, 2, 3, 4])
def test_equal_to_a_search_of_all_plans(held):
    for n in range(1, 9):
        assert fewest_forwards(n, held) == searched(n, held)


def test_formula_and_plans_agree():
    for n in range(1, 40):
        for held in range(1, 9):
            r = repetitions(n, held)
            assert comb(held + r, held) >= n and (r == 0 or comb(held + r - 1, held) < n)
            plan = revolve(n, held)
            check(plan, n)
            runs = [sum(action == ("F", i) for action in plan) for i in range(n)]
            assert sum(runs) == recomputed(plan, n) == fewest_forwards(n, held) and max(runs) == r
            assert all(forwards(plan)[i] == runs[i] + 1 for i in range(n))  # and one with a graph


def test_no_more_than_c_inputs_are_held():
    """Behind an F that is going somewhere one x is on its way; where a graph is made all count."""
    for n in (1, 2, 5, 17):
        for held in (1, 2, 3, 5):
            states = list(walk(revolve(n, held)))
            assert max(len(kept) for action, kept in states if action.kind == "B" or n == 1) <= held
            assert max(len(kept) for _, kept in states) <= held + 2


def test_known_values():
    assert show(revolve(3, 1)) == "F0 F1 D1 T2 B2 F0 T1 B1 T0 B0"
    assert show(revolve(4, 2)) == "F0 F1 F2 D2 T3 B3 F1 T2 B2 T1 B1 T0 B0"
    assert [fewest_forwards(10, held) for held in (1, 2, 3, 10, 99)] == [45, 20, 15, 9, 9]
    assert fewest_forwards(comb(5 + 3, 3), 5) == 3 * 56 - comb(8, 2)
