"""What to keep of a layer: the front against every choice there is; stages whose activations wait on the host."""

import random
from fractions import Fraction
from itertools import product

from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.systems.plan.rematerialize import Choice, Unit, front, offloaded

# a pre-norm block with 8 heads of a sequence of 2h tokens: times and bytes in units of its input
BLOCK = [
    Unit("norm1", 1, 2), Unit("qkv", 6, 6, ("norm1",)), Unit("core", 8, 3, ("qkv",)),
    Unit("out", 2, 2, ("core",), needed=True), Unit("norm2", 1, 2, ("out",)), Unit("up", 8, 8, ("norm2",)),
    Unit("act", 1, 8, ("up",)), Unit("down", 8, 2, ("act",), needed=False),
]  # fmt: skip


def costs_of(units, kept) -> tuple:
    """(bytes, time): results that backward wants and are not kept are made, and what they are made from."""
    by_name, again = {unit.name: unit for unit in units}, set()

    def make(name):
        if name not in kept and name not in again:
            again.add(name)
            for other in by_name[name].inputs:
                make(other)

    for unit in units:
        if unit.needed:
            make(unit.name)
    return sum(by_name[name].bytes for name in kept), sum(by_name[name].time for name in again)


def exhaustive(units) -> set:
    """Undominated (bytes, time) of all sets of results."""
    names = [unit.name for unit in units]
    points = {
        costs_of(units, {name for name, keep in zip(names, flags) if keep})
        for flags in product((0, 1), repeat=len(names))
    }
    return {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}


def some_units(seed: int) -> list[Unit]:
    draw = random.Random(seed)
    names, units = "abcdefgh"[: draw.randint(4, 8)], []
    for i, name in enumerate(names):
        sizes = draw.randint(1, 9), draw.randint(1, 9)
        inputs = tuple(draw.sample(names[:i], draw.randint(0, min(i, 3))))
        units.append(Unit(name, *sizes, inputs, draw.random() < 0.6))
    return units


def test_yuan_pareto():
    """The front is the exhaustive Pareto set; an offloaded stage adds no time while its bytes cross in the
    compute time of an interval, and exactly the rest when they do not."""
    test_a_stage_waits_for_what_does_not_cross_in_time()
    test_one_link_carries_one_stage_at_a_time()
    for units in (BLOCK, *map(some_units, range(40))):
        found = front(units)
        assert {(choice.bytes, choice.time) for choice in found} == exhaustive(units)
        for choice in found:
            assert costs_of(units, set(choice.saved)) == (choice.bytes, choice.time)
            names = [unit.name for unit in units]
            assert [*choice.saved] == [name for name in names if name in choice.saved], "in order"
            assert [*choice.again] == [name for name in names if name in choice.again]
    for stages, microbatches in ((4, 8), (3, 5)):
        ranks = one_f_one_b(stages, microbatches).ranks
        for rank, actions in enumerate(ranks):
            timed = [(action.kind, action.microbatch, 2 if action.kind == "F" else 4) for action in actions]
            plain = sum(time for _, _, time in timed)
            for size in (0, 1, 10, 20):  # 10 bytes a time unit; the shortest interval is one forward of 2
                assert offloaded(timed, size, 10).time == plain
            assert (offloaded(timed, 30, 10).time > plain) == (rank < stages - 1)  # the last has none away
            assert offloaded(timed, 20, 10).peak_microbatches <= 3
            assert offloaded(timed, 20, 10, away=[]) == (plain, min(stages - rank, microbatches))


def test_the_ends_of_the_front_and_its_words():
    found = front(BLOCK)
    assert [found[0].policy, found[-1].policy] == ["full", "none"]
    assert (found[0].bytes, found[0].time) == (0, 27) and found[-1].time == 0
    assert Choice(5, 2, ("core", "up"), ("act",)).policy == "keep:core+up"
    assert len(found) < 2**7 and all(a.time > b.time for a, b in zip(found, found[1:]))


def test_a_stage_waits_for_what_does_not_cross_in_time():
    """Two microbatches, F F B B of 2: the second is needed at once and stays; the first leaves from 2 to
    2 + c, comes back from 4 (when its neighbour's backward starts) or later until that + c, and is wanted at
    6."""
    actions = [("F", 0, 2), ("F", 1, 2), ("B", 1, 2), ("B", 0, 2)]
    assert offloaded(actions, 20, 10).time == 8
    for copy in (3, 4, 9):
        assert offloaded(actions, 10 * copy, 10).time == 2 + 2 * copy + 2
    assert offloaded(actions, 25, 10).time == max(4, 2 + Fraction(5, 2)) + Fraction(5, 2) + 2
    assert offloaded(actions, 40, 10, away=[]) == (8, 2)


def test_one_link_carries_one_stage_at_a_time():
    """Four forwards that take 1, copies that take 3: the second forward behind the first waits for neither,
    the third until the first has left."""
    actions = [("F", m, 1) for m in range(4)] + [("B", m, 9) for m in (0, 1, 2, 3)]
    # F0 0-1, out 1-4; F1 1-2, out 4-7; F2 from 4 to 5, out 7-10; F3 from 7 to 8; B0 is fetched from 7 to 10
    assert offloaded(actions, 3, 1) == (10 + 4 * 9, 3)  # from 7 on two are on their way out and one back
