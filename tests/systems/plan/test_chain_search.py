"""The cheapest plan of a chain against every plan there is, and against plans with an idea at their own peak."""

import random

import pytest

from minitrain.systems.memory.chain_plan import (
    Action,
    LayerBytes,
    check,
    every,
    peak_bytes,
    recomputed,
    show,
    sqrt,
)
from minitrain.systems.plan.rematerialize import cheapest_chain as cheapest
from minitrain.systems.plan.rematerialize import drop_sets, revolve


def forwards_cost(plan, costs):
    return sum(costs[action.layer] for action in plan if action.kind in "FT")


def every_plan(n: int, most: int):
    """All lists of F, T, D, B that can be carried out with at most so many forwards, written down once more:
    an x is dropped at any time, a graph is made whenever its input is there.
    """

    def extend(plan, held, taped, left, runs):
        if left == 0:
            yield plan
            return
        for i in range(left):
            if i in held and i not in taped:
                gone = left if i + 1 >= left or i + 1 == n else i + 1
                more = held | {gone} - {left}
                if runs < most:
                    yield from extend([*plan, Action("T", i)], more, taped | {i}, left, runs + 1)
                    if more != held:
                        yield from extend([*plan, Action("F", i)], more, taped, left, runs + 1)
                if i:
                    yield from extend([*plan, Action("D", i)], held - {i}, taped, left, runs)
        if left - 1 in taped:
            i = left - 1
            yield from extend([*plan, Action("B", i)], held - {i}, taped - {i}, i, runs)

    return extend([], frozenset({0}), frozenset(), n, 0)


def some_layers(n: int, seed: int) -> tuple[list, list[LayerBytes]]:
    draw = random.Random(seed)
    layers, before = [], draw.randint(1, 6)
    for _ in range(n):
        output, tape = draw.randint(1, 6), draw.randint(0, 8)
        layers.append(
            LayerBytes(
                output,
                output + draw.randint(0, 3),
                tape,
                output + tape + draw.randint(0, 3),
                before,
                before + draw.randint(0, 4),
                draw.choice((0, 0, 9)),
            )
        )
        before = output
    return [draw.randint(1, 5) for _ in range(n)], layers


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_every_plan_there_is(seed):
    """For each budget from plenty to nothing; where the search finds none there is none."""
    costs, layers = some_layers(3, seed)
    plans = [(peak_bytes(plan, layers), forwards_cost(plan, costs)) for plan in every_plan(3, 6)]
    for budget in range(max(peak for peak, _ in plans), min(peak for peak, _ in plans) - 2, -1):
        fitting = [cost for peak, cost in plans if peak <= budget]
        if not fitting:
            with pytest.raises(ValueError, match=f"no plan of 3 layers fits {budget} bytes"):
                cheapest(costs, layers, budget)
            continue
        plan = cheapest(costs, layers, budget)
        check(plan, 3)
        assert peak_bytes(plan, layers) <= budget and forwards_cost(plan, costs) == min(fitting)


BLOCK = LayerBytes(output=2, forward=8, tape=15, taping=17, gradient=2, backward=20)


def test_never_dearer_than_plans_with_an_idea():
    """8 equal blocks whose graph is 7 times their input: at the peak of each plan of others."""
    found = {}
    for plan in (every(8, 8), every(8, 1), every(8, 2), sqrt(8), revolve(8, 2), revolve(8, 3)):
        best = cheapest([1] * 8, [BLOCK] * 8, peak_bytes(plan, [BLOCK] * 8))
        found[show(plan)] = recomputed(plan, 8), recomputed(best, 8)
    assert list(found.values()) == [(0, 0), (7, 7), (6, 6), (6, 5), (14, 12), (11, 10)]


def test_with_room_for_all_nothing_runs_twice():
    assert cheapest([1] * 5, [BLOCK] * 5, 1000) == every(5, 5)


def test_what_is_let_go_is_no_more_than_must_be():
    """Every set of at least so many bytes in which none could stay, each once; what has no bytes stays."""
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice((0, 1, 2, 3, 5)) for _ in range(6)]
        held, over = draw.randrange(64), draw.randint(-1, 9)
        members_of = lambda drop: [i for i in range(6) if drop >> i & 1]
        size = lambda drop: sum(sizes[i] for i in members_of(drop))
        enough = [drop for drop in range(64) if not drop & ~held and size(drop) >= over]
        least = [drop for drop in enough if all(size(drop) - sizes[i] < over for i in members_of(drop))]
        assert sorted(drop_sets(sizes, held, over)) == (least if over > 0 else [0])
