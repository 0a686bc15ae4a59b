"""Levels of network: what leaves a node, through how many cards, in how many steps; the same sum."""

from fractions import Fraction
from math import log2, prod

import pytest
from communication_runs import check_on_real_ranks

from minitrain.plan.simulate.collectives import Placement, seconds
from minitrain.systems.communication import algorithms, cost_model
from minitrain.systems.communication.chunk_schedule import check, sent_shares


def sent_between_nodes(schedule, per_node) -> list[Fraction]:
    return sent_shares(schedule, lambda t: t.source // per_node != t.to // per_node)


def test_two_level_allreduce():
    for num_nodes, per_node in ((2, 2), (4, 8), (3, 5), (8, 1), (1, 4)):
        schedule = algorithms.two_level(algorithms.nodes_of(num_nodes * per_node, per_node))
        check(schedule)
        leader, others = Fraction(2 * (num_nodes - 1), num_nodes), [0] * (per_node - 1)
        assert sent_between_nodes(schedule, per_node) == [leader, *others] * num_nodes
        flat = sent_between_nodes(algorithms.ring_all_reduce(num_nodes * per_node), per_node)
        n = num_nodes * per_node
        assert flat == [*others, Fraction(2 * (n - 1), n) if num_nodes > 1 else 0] * num_nodes
    check_on_real_ranks(algorithms.two_level(algorithms.nodes_of(4, 2)))
    check_on_real_ranks(
        algorithms.two_level([[5, 0, 3], [2], [1, 4]])
    )  # nodes of three sizes, ranks in any order


def test_torus2d_allreduce():
    for x in range(1, 9):
        for y in range(1, 9):
            schedule = algorithms.torus2d_all_reduce(x, y)
            check(schedule)
            assert len(schedule.steps) == 2 * (x - 1) + 2 * (y - 1)
            assert set(sent_between_nodes(schedule, x)) == {Fraction(2 * (y - 1), y) / x}, (
                "the column moves S/x"
            )
            assert set(sent_shares(schedule)) == set(sent_shares(algorithms.ring_all_reduce(x * y)))
    assert len(algorithms.torus2d_all_reduce(4, 2).steps) == 8
    assert len(algorithms.ring_all_reduce(8).steps) == 14
    check_on_real_ranks(algorithms.torus2d_all_reduce(4, 2))
    check_on_real_ranks(algorithms.torus2d_all_reduce(2, 2))


def test_accl_hybrid():
    for num_nodes, per_node in ((2, 2), (4, 8), (8, 8), (16, 4), (2, 1)):
        n = num_nodes * per_node
        schedule = algorithms.accl_all_reduce(n, per_node)
        check(schedule)
        leader = Fraction(2 * (num_nodes - 1), num_nodes)
        per_card = leader / per_node
        assert sent_between_nodes(schedule, per_node) == [per_card] * n, "every rank's card carries a g-th"
        assert (
            sent_between_nodes(algorithms.two_level(algorithms.nodes_of(n, per_node)), per_node)[0]
            == leader
            == per_node * per_card
        )
        assert len(schedule.steps) == 2 * (per_node - 1) + 2 * log2(num_nodes)
    check(algorithms.accl_all_reduce(24, 4))  # 6 nodes: no power of two
    check_on_real_ranks(algorithms.accl_all_reduce(8, 2))
    check_on_real_ranks(algorithms.accl_all_reduce(6, 2))


def blueconnect_share(factors) -> Fraction:
    """sum_i 2(p_i - 1)/p_i / prod_{j<i} p_j"""
    share, inside = Fraction(0), 1
    for p in factors:
        share += Fraction(2 * (p - 1), p) / inside
        inside *= p
    return share


def test_blueconnect():
    for factors in ((8, 4), (4, 4, 2), (2, 3, 4), (2,) * 6, (12,), (1, 5, 1)):
        n = prod(factors)
        schedule = algorithms.blueconnect_all_reduce(n, factors)
        check(schedule)
        assert set(sent_shares(schedule)) == {blueconnect_share(factors)} == {Fraction(2 * (n - 1), n)}
        assert len(schedule.steps) == sum(2 * (p - 1) for p in factors)
    assert blueconnect_share((8, 4)) == blueconnect_share((4, 4, 2)) == Fraction("1.9375")
    check_on_real_ranks(algorithms.blueconnect_all_reduce(8, (2, 2, 2)))
    check_on_real_ranks(algorithms.blueconnect_all_reduce(6, (3, 2)))


def test_the_three_papers_are_one_function():
    def messages(schedule):
        return [set(step) for step in schedule.steps]

    assert (
        algorithms.torus2d_all_reduce(4, 2)
        == algorithms.blueconnect_all_reduce(8, (4, 2))
        == algorithms.within_and_across(4, algorithms.ring_all_reduce(2))
    )
    assert messages(algorithms.accl_all_reduce(8, 4)) == messages(algorithms.torus2d_all_reduce(4, 2)), (
        "at two nodes halving is the ring"
    )
    assert messages(algorithms.accl_all_reduce(16, 4)) != messages(algorithms.torus2d_all_reduce(4, 4))


def test_message_by_message_the_schedules_take_the_time_the_replay_charges():
    """Two ways to one figure: closed forms for a placement there, every message on its links here."""
    near, far = (1e-6, 300e9), (5e-6, 50e9)
    for num_nodes, per_node in ((4, 8), (2, 2), (8, 4), (1, 8)):
        n = num_nodes * per_node
        fabric = cost_model.racks([rank // per_node for rank in range(n)], near, far)
        placement = Placement(
            n, num_nodes, fewest=per_node, most=per_node, alpha_in=near[0], alpha_out=far[0],
            rate_in=near[1], rate_out=far[1], rate_card=far[1],
        )  # fmt: skip
        torus, ring = algorithms.torus2d_all_reduce(per_node, num_nodes), algorithms.ring_all_reduce(n)
        of_rings = ("hierarchical", torus) if num_nodes > 1 else ("ring", ring)
        for name, schedule in (("halving", algorithms.halving_doubling_all_reduce(n)), of_rings):
            for size_bytes in (1e3, 1e9):
                charged = pytest.approx(seconds("all_reduce", size_bytes, placement, name), rel=1e-12)
                assert cost_model.time_s(schedule, size_bytes, fabric) == charged, (name, n)
