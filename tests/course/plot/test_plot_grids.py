"""Pictures of grids: equal for equal data, to the byte, and drawn from what was given."""

import pytest

from minitrain.course.plot import grids
from minitrain.course.plot.style import VERMILLION, png

SIDE = 3
AT_HOME = {(i, j): ((i, j), (i, j)) for i in range(SIDE) for j in range(SIDE)}
SUMMA = {
    f"step {s}": {(i, j): ((i, s), (s, j)) for i in range(SIDE) for j in range(SIDE)} for s in range(SIDE)
}
PICTURES = {
    "blocks": lambda: grids.blocks(SUMMA, title="SUMMA", arrows=lambda step: grids.outwards(SIDE, step)),
    "home": lambda: grids.blocks({"home": AT_HOME}, title="x", arrows=lambda _: grids.to_neighbours(SIDE)),
    "cube": lambda: grids.cube(2, title="A cube"),
    "ring": lambda: grids.shards_on_a_ring([[0, 2, 1], [1, 0, 2], [2, 1, 0]], title="A ring"),
    "curves": lambda: grids.against_ranks(
        {"1-D": {4: 1.0, 8: 2.0}, "2-D": {4: 0.0, 16: 3.0}}, title="x", ylabel="y", bound={4: 1.0, 16: 0.5}
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_drawn_twice_a_picture_is_equal_to_the_byte(name):
    assert png(PICTURES[name]()) == png(PICTURES[name]())


def test_a_block_in_a_frame_is_the_rank_s_own_and_arrows_say_which_matrix_travels():
    panels = PICTURES["blocks"]().axes
    framed = [[patch.get_linewidth() for patch in panel.patches] for panel in panels]
    assert [sum(width == 2 for width in widths) for widths in framed] == [2 * SIDE] * SIDE
    arrows = [text.arrow_patch for text in panels[0].texts if getattr(text, "arrow_patch", None)]
    red = [
        arrow for arrow in arrows if arrow.get_edgecolor()[:3] == pytest.approx((0xD5 / 255, 0x5E / 255, 0))
    ]
    assert len(arrows) == 2 * len(red) == 2 * SIDE * (SIDE - 1) and VERMILLION == "#D55E00"


def test_curves_leave_out_zeros_and_join_over_the_ranks_that_have_no_such_grid():
    ax = PICTURES["curves"]().axes[0]
    assert [list(line.get_xdata()) for line in ax.lines] == [[4, 8], [16], [4, 16]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "8", "16"]
