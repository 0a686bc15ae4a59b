"""The smallest window of layers: the simulation against hand, the paper's condition and bounds."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from minitrain.systems.plan.offload import smallest_window, stalls

times = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=9)


def test_by_hand():
    compute, transfer = [1] * 8, [3] * 8
    # the link brings a layer every 3, the device wants one every 1: each layer beyond the window is late by 2
    assert stalls(compute, transfer, 3) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert sum(stalls(compute, transfer, 1)) == 7 * 2 and smallest_window(compute, transfer) == 6
    assert stalls([2, 2, 2], [9, 9, Fraction(5, 2)], 1) == [0, 7, Fraction(1, 2)]


@given(layers=times)
def test_the_paper_s_condition_is_needed_and_a_larger_window_never_stalls_longer(layers):
    compute, transfer = zip(*layers)
    waits = [stalls(compute, transfer, m) for m in range(1, len(layers) + 1)]
    for m, here in enumerate(waits, 1):
        paper = all(sum(compute[i : i + m]) >= transfer[i + m] for i in range(len(layers) - m))
        assert (not any(here)) <= paper
    total = list(map(sum, waits))
    assert total == sorted(total, reverse=True) and total[-1] == 0
