"""Pictures of attention: equal for equal data, to the byte, and drawn from what was given."""

import pytest

from minitrain.course.plot import attention
from minitrain.course.plot.style import ORANGE, PALE, SKY, png

TILES = [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 4)), (slice(4, 8), slice(0, 2))]
STEPS = [
    ("A_S0", "products", 0.0, 1.0),
    ("A_softmax0", "exponentials", 1.0, 1.5),
    ("B_S0", "products", 1.0, 2.0),
]
PICTURES = {
    "schematic": lambda: attention.schematic(5, 2, 3, title="x"),
    "tiles": lambda: attention.tiles({"one": TILES, "two": TILES[::-1]}, 8, title="x"),
    "units": lambda: attention.units({"one": STEPS, "two": STEPS}, title="x"),
    "who": lambda: attention.who_sees_whom({"all": [[True, False], [True, True]]}, [0, 1], title="x"),
    "roofline": lambda: attention.roofline({"a": 32.0, "b": 1000.0}, 990e12, 3.35e12, title="x"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_drawn_twice_a_picture_is_equal_to_the_byte(name):
    assert png(PICTURES[name]()) == png(PICTURES[name]())


def test_one_tile_of_scores_exists_at_a_time():
    patches = PICTURES["schematic"]().axes[0].patches
    colours = [attention.style.to_hex(patch.get_facecolor()).upper() for patch in patches]
    assert [colours.count(colour.upper()) for colour in (SKY, ORANGE, PALE)] == [2, 1, 22]


def test_tiles_are_numbered_in_their_order_and_masked_where_the_diagonal_crosses():
    one, two = PICTURES["tiles"]().axes
    assert (
        [text.get_text() for text in one.texts] == [text.get_text() for text in two.texts] == ["0", "1", "2"]
    )
    _, *drawn = one.patches
    colours = [attention.style.to_hex(patch.get_facecolor()).upper() for patch in drawn]
    assert colours == [ORANGE.upper(), ORANGE.upper(), SKY.upper()]


def test_a_point_stands_under_the_roof():
    heights = [line.get_ydata()[0] for line in PICTURES["roofline"]().axes[0].lines[1:3]]
    assert heights == pytest.approx([32 * 3.35, 990])
