"""Grids for the matrices of a layer: formulas against hand numbers and the papers' tables."""

import math

import pytest

from minitrain.systems.plan.grid_costs import Grid, Layer, cost, crossover, grids, mlp

ONE = Layer(32, ((8, 16),))  # m k = 256, k n = 128, m n = 512


@pytest.mark.parametrize(
    "grid, forward, both, weights, activations, working",
    [
        (Grid("2-D", 4), 72, 216, 8, 16, 48),  # 3/16 · 384; three times that; 2 · (16 + 8)
        (Grid("2.5-D", 2, 2), 64, 224, 32, 32, 128),  # 1/4 · (128 + 128); 192 and 1 · 32 for the depth
        (Grid("3-D", 2), 112, 272, 16, 32, 224),  # 1/8 · 896; and 1/8 · 1280
        (Grid("RTP", 8), 112, 336, 16, 32, 32),  # 7/8 · 128; three times that
        (Grid("RTP", 2), 64, 192, 64, 128, 64),  # of two shards only one is away
    ],
)
def test_one_product_by_hand(grid, forward, both, weights, activations, working):
    found = cost(ONE, grid)
    assert (found.forward, found.both) == (forward, both)
    assert (found.weights, found.activations, found.working) == (weights, activations, working)


def test_one_dimension_by_hand():
    found = cost(mlp(tokens=32, width=8, inner=16), Grid("1-D", 4))
    assert (found.forward, found.both) == (384, 768)  # 2 · 3/4 · 256 each way
    assert (found.weights, found.activations, found.working) == (64, 256 + 128, 256)
    assert found.memory_bytes() == 16 * 64 + 2 * (256 + 128 + 256)


@pytest.mark.parametrize("ranks", [4, 16, 64, 256])
def test_optimus_table_1(ranks):
    """A layer forward: 1-D 4(p-1)/p bsh, 2-D log(p)/(2√p) (7 bsh + 12 h²); backward is as many trees, and
    rings in place of their trees of sums."""
    tokens, width = 4096, 1024
    products = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    flat, square = (
        cost(Layer(tokens, products), Grid(*grid)) for grid in (("1-D", ranks), ("2-D", math.isqrt(ranks)))
    )
    assert flat.forward == 4 * (ranks - 1) / ranks * tokens * width
    paper = math.log2(ranks) / (2 * math.sqrt(ranks)) * (7 * tokens * width + 12 * width**2)
    assert square.forward_path == pytest.approx(paper)
    q = math.isqrt(ranks)
    assert square.forward == (q - 1) / q**2 * (7 * tokens * width + 12 * width**2)


def test_tesseract_section_3():
    """Its counts of transfers at p = 64, and what a rank sends: weights are in blocks d times as large."""
    p, square = 64, Layer(1, ((1, 1),))  # m = k = n: in units of one matrix
    assert (2 * p**1.5 - 2 * p**0.5) / (2 * p ** (2 / 3)) == pytest.approx(31.5)
    deep, flat = cost(square, Grid("2.5-D", 4, 4)), cost(square, Grid("2-D", 8))
    assert deep.forward / flat.forward == pytest.approx(15 / 14)
    assert deep.weights == 4 * flat.weights and deep.activations == flat.activations


def test_grids_that_exist():
    def names(ranks):
        return [str(grid) for grid in grids(ranks)]

    assert names(6) == ["1-D 6", "RTP 6"] and names(8) == ["1-D 8", "RTP 8", "2.5-D 2x2x2", "3-D 2x2x2"]
    assert names(64) == ["1-D 64", "RTP 64", "2-D 8x8", "2.5-D 4x4x4", "3-D 4x4x4"]
    assert names(1000)[-1] == "3-D 10x10x10"
    for ranks in range(1, 200):
        assert all(grid.ranks == ranks for grid in grids(ranks))


def test_where_two_dimensions_win():
    """With many tokens: 2 (q² - 1)/q² against 5 (q - 1)/q², for all q; trees 5 log2(q)/q, from q = 8."""
    many = mlp(tokens=10**9, width=1024, inner=4096)
    assert crossover(many) == 4
    by_path = crossover(many, "forward_path")
    assert by_path == 64
    assert cost(many, Grid("2-D", 8)).forward_path < cost(many, Grid("1-D", 64)).forward_path
    few = mlp(tokens=1024, width=1024, inner=4096)  # 13 mk of 2-D against 2 (q + 1) mk: from q = 6
    assert crossover(few) == 36 and crossover(few, most=35) is None
    assert crossover(many, "both") == 9  # 15 (q - 1)/q² of 2-D against 4 (q² - 1)/q²


def test_the_axes_of_a_cube_take_turns():
    """x of product 1 and y of 2 travel along one axis, 8 wide, what is between along the other, 16."""
    found = cost(mlp(tokens=32, width=8, inner=16), Grid("3-D", 2))
    assert found.forward_by_axis == (64, 32, 128)  # 1/8 · (256 + 256), (128 + 128), (512 + 512)
    assert found.backward_by_axis == (96, 64, 192)  # 1/8 · (512 + 256), 4 · 128, (512 + 1024)
