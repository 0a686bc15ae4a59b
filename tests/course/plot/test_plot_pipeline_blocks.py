"""Building blocks: the boxes stand where the block says, and the numbers beside them are what is held."""

import matplotlib
import pytest

from minitrain.course.plot import pipeline_blocks
from minitrain.course.plot.style import png
from minitrain.pipeline.schedule import peak
from minitrain.pipeline.schedules.v_shape import block_of, v_half, v_min, zb_v

SHAPES = {"v_min": v_min, "v_half": v_half, "zb_v": zb_v}


def blocks(p):
    return {shape: [block_of(shape, p)(rank) for rank in range(p)] for shape in SHAPES}


def test_boxes_stand_where_the_block_says():
    figure = pipeline_blocks.building_blocks({"V-Min": blocks(4)["v_min"]}, title="one")
    (ax,) = figure.axes
    colour = matplotlib.colors.to_rgba(pipeline_blocks.FORWARD)
    forwards = {patch.get_xy() for patch in ax.patches if patch.get_facecolor() == colour}
    assert forwards == {(r, r - 0.3) for r in range(4)} | {(7 - r, r - 0.3) for r in range(4)}


@pytest.mark.parametrize("p", [3, 4, 6])
def test_every_rank_holds_alike_and_near_the_peak_of_the_schedule(p):
    for shape, ranks in blocks(p).items():
        held = {(early - down + late - up) / 6 for down, up, late, early in ranks}
        assert len(held) == 1, "the sum of a long and a short life is the same on every rank"
        assert 0 < held.pop() <= peak(SHAPES[shape](p, 3 * p), 0)


def test_the_pictures_repeat_to_the_byte():
    def both():
        points = {"1F1B": (4, 0.25), "ZB-H1": (4, 0.08)}
        curves = {"list scheduler": [0.5, 0.2, 0.1]}
        return (
            pipeline_blocks.building_blocks(blocks(4), title="three blocks"),
            pipeline_blocks.memory_bought([2, 3, 4], curves, points, title="what memory buys"),
        )

    assert [png(one) for one in both()] == [png(one) for one in both()]


def test_blocks_that_cannot_be_read_are_refused():
    for wrong in ({}, {"V": [(0, 1, 2, 3)]}, {"V": [(0, 1, 2, 3)] * 9}):
        with pytest.raises(ValueError, match="2 to 8 ranks"):
            pipeline_blocks.building_blocks(wrong, title="")
