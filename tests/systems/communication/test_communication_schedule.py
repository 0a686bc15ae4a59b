"""Schedules as data: proved for every n up to 64 without a process; a checker refuses what is wrong."""

from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.systems.communication import algorithms
from minitrain.systems.communication import chunk_schedule as chunks

ALL_REDUCES = {
    "ring": algorithms.ring_all_reduce, "direct": algorithms.direct_all_reduce,
    "binomial": algorithms.binomial_all_reduce,
    "halving near first": algorithms.halving_doubling_all_reduce,
    "halving far first": lambda n: algorithms.halving_doubling_all_reduce(n, near_first=False),
    "doubling": algorithms.doubling_all_reduce, "double tree": algorithms.double_tree_all_reduce,
    "double tree in 5 pieces": lambda n: algorithms.double_tree_all_reduce(n, pieces=5),
}  # fmt: skip

SIZES = [*range(1, 18), 23, 31, 32, 33, 63, 64]


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_every_chunk_gets_every_contribution_once(name):
    for n in (*range(1, 34), 63, 64):
        chunks.check(ALL_REDUCES[name](n))


def test_the_other_collectives():
    for n in SIZES:
        chunks.check(algorithms.ring_reduce_scatter(n), "reduce_scatter")
        chunks.check(algorithms.ring_all_gather(n), "all_gather")
        chunks.check(chunks.mirror(algorithms.ring_reduce_scatter(n)), "all_gather")
        chunks.check(algorithms.direct_reduce_scatter(n), "reduce_scatter")
        chunks.check(chunks.mirror(algorithms.direct_reduce_scatter(n)), "all_gather")
        chunks.check(algorithms.binomial_reduce(n), "reduce")
        chunks.check(chunks.mirror(algorithms.binomial_reduce(n)), "broadcast")
    for n in (1, 2, 4, 8, 16, 32, 64):
        chunks.check(algorithms.halving_reduce_scatter(n), "reduce_scatter")
        chunks.check(chunks.mirror(algorithms.halving_reduce_scatter(n)), "all_gather")


# ---- the checker can fail --------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.sampled_from(sorted(ALL_REDUCES)), st.integers(2, 9), st.data())
def test_no_transfer_can_be_dropped_doubled_or_change_its_kind(name, n, data):
    schedule = ALL_REDUCES[name](n)
    index = data.draw(st.integers(0, len(schedule.steps) - 1))
    step = schedule.steps[index]
    which = data.draw(st.integers(0, len(step) - 1))
    transfer, others = step[which], step[:which] + step[which + 1 :]
    again = (step, (transfer,)) if transfer.reduce else (step,)  # copying twice harms nobody
    broken = [((*others,),), ((*others, transfer._replace(reduce=not transfer.reduce)),), again]
    for steps in broken[: 3 if transfer.reduce else 2]:
        with pytest.raises(ValueError):
            others = schedule.steps[:index], schedule.steps[index + 1 :]
            chunks.check(chunks.Schedule(n, schedule.chunks, others[0] + steps + others[1]))


@pytest.mark.parametrize(
    "steps, message",
    [
        ([[(0, 1, True)]], "in the end rank 0 lacks ranks \\[1\\] in chunk 0"),
        ([[(0, 1, True)], [(0, 1, True)]], "step 1: rank 0 sends chunk 0 to rank 1 to be added twice"),
        ([[(0, 1, False), (0, 1, True)]], "another transfer of this step writes"),
        ([[(0, 1, True), (0, 1, False)]], "another transfer of this step writes"),
    ],
)
def test_the_checker_names_the_fault(steps, message):
    steps = tuple(tuple(chunks.Transfer(s, t, range(1), reduce) for s, t, reduce in step) for step in steps)
    with pytest.raises(ValueError, match=message):
        chunks.check(chunks.Schedule(2, 1, steps))


def test_nothing_is_sent_before_it_is_there():
    late = chunks.Schedule(3, 3, tuple(reversed(algorithms.ring_all_gather(3).steps)))
    with pytest.raises(ValueError, match="holds nothing of it yet"):
        chunks.check(late, "all_gather")
    with pytest.raises(ValueError, match="to be added to nothing"):
        chunks.check(chunks.Schedule(2, 2, ((chunks.Transfer(0, 1, range(1), True),),)), "all_gather")


# ---- costs -----------------------------------------------------------------------------------------------


def test_steps_and_bytes_of_the_flat_algorithms():
    for n in SIZES[1:]:
        optimal, height = Fraction(2 * (n - 1), n), ceil(log2(n))
        for build, steps in ((algorithms.ring_all_reduce, 2 * (n - 1)), (algorithms.direct_all_reduce, 2)):
            assert len(build(n).steps) == steps and set(chunks.sent_shares(build(n))) == {optimal}, (build, n)
        assert len(algorithms.binomial_all_reduce(n).steps) == 2 * height
        assert chunks.sent_shares(chunks.mirror(algorithms.binomial_reduce(n)))[0] == height
    for n in (2, 3, 7, 16, 33):
        for build in ALL_REDUCES.values():
            assert sum(chunks.sent_shares(build(n))) >= 2 * (n - 1), "below the least of any all-reduce"


def test_halving_sends_what_a_ring_sends_in_log_steps():
    for power in (2, 4, 8, 16, 32, 64):
        height = power.bit_length() - 1
        schedule = algorithms.halving_doubling_all_reduce(power)
        assert len(schedule.steps) == 2 * height
        assert set(chunks.sent_shares(schedule)) == {Fraction(2 * (power - 1), power)}
        assert len(algorithms.doubling_all_reduce(power).steps) == height
        assert set(chunks.sent_shares(algorithms.doubling_all_reduce(power))) == {height}
        for rest in range(
            1, power if power < 64 else 1
        ):  # n between two powers: two more steps, two ranks that pay S
            inner = Fraction(2 * (power - 1), power)
            schedule = algorithms.halving_doubling_all_reduce(power + rest)
            assert len(schedule.steps) == 2 * height + 2
            assert chunks.sent_shares(schedule) == [inner + 1, 1] * rest + [inner] * (power - rest)


def test_near_first_sends_half_to_the_neighbour_and_far_first_across():
    def share_sent_over(distance, near_first):
        far = chunks.sent_shares(
            algorithms.halving_doubling_all_reduce(16, near_first), lambda t: abs(t.source - t.to) == distance
        )
        return set(far)

    assert share_sent_over(1, near_first=True) == {1}
    assert share_sent_over(8, near_first=True) == {Fraction(1, 8)}
    assert share_sent_over(1, near_first=False) == {Fraction(1, 8)}
    assert share_sent_over(8, near_first=False) == {1}


# ---- algebra ---------------------------------------------------------------------------------------------


def test_two_rings_in_both_directions_share_the_work():
    """A composition of one's own: half of the data turns right, half left, and all links work both ways."""
    n, size = 6, (6, 12)
    right = chunks.place(algorithms.ring_all_reduce(n), range(n), range(0, n), of=size)
    left = chunks.place(algorithms.ring_all_reduce(n), range(n - 1, -1, -1), range(n, 2 * n), of=size)
    both = chunks.in_parallel([right, left])
    chunks.check(both)
    assert len(both.steps) == 2 * (n - 1)
    assert set(chunks.sent_shares(both, lambda t: (t.to - t.source) % n == 1)) == {Fraction(n - 1, n)}


def test_the_chunk_matrix_is_drawn():
    assert chunks.draw(algorithms.ring_all_reduce(3)).splitlines() == [
        "rank     start   step 1  step 2  step 3  step 4",
        "0        111     121     #21     #2#     ###",
        "1        111     112     1#2     ##2     ###",
        "2        111     211     21#     2##     ###",
    ]
    frames = chunks.history(algorithms.ring_all_reduce(3))
    assert len(frames) == 5 and frames[0] == [[1] * 3] * 3 and frames[-1] == [[3] * 3] * 3
    cells = {
        cell
        for line in chunks.draw(algorithms.ring_all_reduce(12)).splitlines()[1:]
        for cell in "".join(line.split()[1:])
    }
    assert cells == set("123456789+#")
