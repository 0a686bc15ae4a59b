"""Which algorithm wins where: the crossover by algebra and by trying; closed forms beside schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.systems.communication import algorithms, cost_model
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer, check
from minitrain.systems.communication.cost_model import (
    Network,
    best_pieces,
    choose,
    crossover_by_sweep,
    crossover_bytes,
    formula_s,
    steps,
)

INFINIBAND = Network(alpha_s=5e-6, bytes_per_s=50e9)
SCHEDULES = {
    "ring": algorithms.ring_all_reduce, "double tree": algorithms.double_tree_all_reduce,
    "halving and doubling": algorithms.halving_doubling_all_reduce,
    "recursive doubling": algorithms.doubling_all_reduce,
}  # fmt: skip
ALL = tuple(SCHEDULES)


def test_nccl_rccl():
    for network in (INFINIBAND, Network(1e-6, 450e9)):
        for n in (2, 3, 4, 5, 8, 13, 64, 100, 1024, 24_576):
            crossover = crossover_bytes(n, network)
            assert crossover_by_sweep(n, network) == pytest.approx(crossover, rel=1e-9)
            if crossover:
                assert choose(n, 0.99 * crossover, network).algorithm == "double tree"
            assert choose(n, 1.01 * crossover, network).algorithm == "ring"
    assert crossover_bytes(2, INFINIBAND) == crossover_bytes(3, INFINIBAND) == 0
    assert crossover_bytes(4, INFINIBAND) == pytest.approx(
        0.8 * 5e-6 * 50e9
    )  # 6a + 1.5 S/B = 4a + 4 S/B at 0.8 a B


@given(st.integers(1, 5_000), st.floats(0, 1e10))
def test_no_other_number_of_pieces_is_better(n, size_bytes):
    def seconds(pieces):
        return formula_s("double tree", n, size_bytes, INFINIBAND, pieces)

    best = best_pieces(n, size_bytes, INFINIBAND)
    assert all(seconds(best) <= seconds(other) for other in (max(1, best - 1), best + 1, 1, 64, 4096))


def test_a_step_has_the_latency_of_its_slowest_message_whichever_stands_first():
    fabric = cost_model.racks([0, 0, 1], near=(1.0, 8.0), far=(10.0, 8.0))
    inside, across = (Transfer(source, to, range(1), reduce=False) for source, to in ((0, 1), (0, 2)))
    for step in ((inside, across), (across, inside)):
        assert cost_model.time_s(Schedule(3, 1, (step,)), 8.0, fabric) == 10.0 + 1.0


def test_the_closed_forms_are_the_schedules_on_equal_links():
    fabric = cost_model.flat(*INFINIBAND[:2])
    for n in (2, 3, 4, 8, 12, 32):
        for algorithm in ALL[:: 1 if n & (n - 1) == 0 else 99]:
            schedule = SCHEDULES[algorithm](n)
            check(schedule)
            assert len(schedule.steps) == steps(algorithm, n)
            if algorithm != "double tree":  # its own test, in test_communication_tree, to within one piece
                formula = pytest.approx(formula_s(algorithm, n, 1e6, INFINIBAND), rel=1e-12)
                assert cost_model.time_s(schedule, 1e6, fabric) == formula, (algorithm, n)
