"""The double binary tree: nobody works in both trees, few steps, and what its pieces cost."""

from math import ceil, log2

import pytest
from communication_runs import check_on_real_ranks

from minitrain.systems.communication import algorithms, cost_model
from minitrain.systems.communication.chunk_schedule import check, sent_shares


def test_double_binary_tree():
    for n in range(2, 65):
        trees = algorithms.double_binary_tree(n)
        assert len(algorithms.inner(trees[0]) & algorithms.inner(trees[1])) <= n % 2, f"n={n}: one is in both"
        for tree in trees:
            assert tree.count(None) == 1 and max(map(tree.count, range(n))) <= 2, (
                "a binary tree with one root"
            )
            assert max(algorithms.depths(tree)) == ceil(log2(n))
        assert len(algorithms.double_tree_all_reduce(n).steps) == 2 * ceil(log2(n))
        check(algorithms.double_tree_all_reduce(n))
    assert [2 * max(algorithms.depths(tree)) for tree in algorithms.double_binary_tree(24_576)] == [30, 30]
    assert cost_model.steps("double tree", 24_576) == 30 and cost_model.steps("ring", 24_576) == 49_150
    for n in (3, 4):
        check_on_real_ranks(algorithms.double_tree_all_reduce(n, pieces=2))


def test_control_one_tree_twice_would_overload_the_inner_ranks():
    """Why a second tree: with the first one twice half of the ranks would send 3 S, the others S."""
    assert sorted(set(sent_shares(algorithms.tree_all_reduce(algorithms.binary_tree(16))))) == [1, 3]
    assert sorted(sent_shares(algorithms.double_tree_all_reduce(16))) == [1, 1] + [2] * 14  # 1: the two roots


def test_no_rank_sends_more_than_twice_the_tensor():
    for n in range(2, 65):
        for pieces in (1, 4):
            shares = sent_shares(algorithms.double_tree_all_reduce(n, pieces))
            assert max(shares) <= 2 and sum(shares) == 2 * (n - 1)


def test_every_tree_is_right_in_any_number_of_pieces():
    for n in range(1, 34):
        for pieces in (1, 2, 3, 8):
            for schedule in (
                algorithms.tree_all_reduce(algorithms.binary_tree(n), pieces),
                algorithms.double_tree_all_reduce(n, pieces),
            ):
                check(schedule)
                assert len(schedule.steps) == (2 * (ceil(log2(n)) - 1 + pieces) if n > 1 else 0)
            assert cost_model.steps("double tree", n, pieces) == len(
                algorithms.double_tree_all_reduce(n, pieces).steps
            )
        check(algorithms.tree_reduce(algorithms.binary_tree(n)), "reduce")


def test_the_time_of_the_schedule_is_the_closed_form_less_at_most_one_piece():
    """2(h-1+k) (alpha + S/(k B)) takes every step as full; at the root a step moves one half-piece."""
    network = cost_model.Network(alpha_s=1.0, bytes_per_s=1.0)
    for n in range(4, 65):
        for pieces in (1, 2, 7, 20):
            size_bytes = 100.0
            formula = cost_model.formula_s("double tree", n, size_bytes, network, pieces)
            simulated = cost_model.time_s(
                algorithms.double_tree_all_reduce(n, pieces), size_bytes, cost_model.flat(1.0, 1.0)
            )
            assert 0 <= formula - simulated <= 3 * size_bytes / pieces + 1e-9, (n, pieces)
            if n & (n - 1) == 0:
                assert formula - simulated == pytest.approx(size_bytes / pieces)
