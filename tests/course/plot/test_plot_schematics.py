"""Schematics: drawn twice they are the same to the byte, everything fits, and they show what they are given."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from minitrain.course.plot import charts, schematics
from minitrain.course.plot.style import GREEN, png
from minitrain.plan.simulate.machines import machine
from minitrain.systems.communication.tree import double_binary_tree, inner

PICTURES = {
    "three_runs": schematics.three_runs,
    "one_matrix": schematics.one_matrix,
    "node": lambda: schematics.node(machine("h100")),
    "ring_and_trees": lambda: schematics.ring_and_trees(*double_binary_tree(8)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_equal_calls_give_equal_pictures(name):
    figure, again = PICTURES[name](), PICTURES[name]()
    assert png(figure) == png(again) and len(png(figure)) < 120_000
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    width, height = figure.get_size_inches()
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, box


@pytest.mark.parametrize("n", (4, 7, 8))
def test_filled_ranks_of_a_tree_are_its_inner_ones(n):
    trees = double_binary_tree(n)
    _, *axes = schematics.ring_and_trees(*trees).axes
    for ax, parents in zip(axes, trees):
        filled = [dot for dot in ax.lines if dot.get_markerfacecolor() == GREEN]
        assert len(filled) == len(inner(parents))
        arrows = [text for text in ax.texts if not text.get_text()]
        assert len(arrows) == n - 1


def test_a_node_has_a_card_for_each_device():
    texts = [text.get_text() for text in schematics.node(machine("h100")).axes[0].texts]
    assert texts.count("card") == 8 and sum(text.startswith("GPU") for text in texts) == 8


@pytest.mark.parametrize("last, wanted", ((2**5, ["8", "16", "32"]), (2**32, ["1 Ki", "64 Mi", "4 Gi"])))
def test_an_axis_of_powers_of_two_says_8_and_not_2_to_the_3(last, wanted):
    xs = [2**3, 2**4, 2**5] if last == 2**5 else [2**10, 2**26, 2**32]
    ax = charts.lines(xs, {"y": [1, 2, 3]}, xlabel="x", ylabel="y", title="t", log="x").axes[0]
    assert [ax.xaxis.get_major_formatter()(x, 0) for x in xs] == wanted
