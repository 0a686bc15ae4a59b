"""Pictures of sequences over ranks: equal data give equal pictures, and what is drawn is what was given."""

from collections import Counter

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Polygon

from minitrain.context.layout import contiguous, tiles, zigzag
from minitrain.course.plot import sequence_charts, style
from minitrain.systems.context.balanced import balanced, unbalanced


def tiles_of(layout):
    held = [layout(rank, 4, 16) for rank in range(4)]
    return lambda rank, owner: tiles(held[rank], held[owner], True)


def owners(layout):
    return {place: rank for rank in range(4) for run in layout(rank, 4, 16) for place in run}


SWITCH = [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
PICTURES = {
    "rings_and_heads": lambda: sequence_charts.rings_and_heads(4),
    "masks": lambda: sequence_charts.masks({"contiguous": owners(contiguous)}, 16, 4),
    "ring_strip": lambda: sequence_charts.ring_strip({"zigzag": tiles_of(zigzag)}, 4, 16),
    "rounds": lambda: sequence_charts.rounds({"ring": unbalanced(4), "balanced": balanced(4)}),
    "heads_and_tokens": lambda: sequence_charts.heads_and_tokens(*SWITCH, length=4),
    "teams": lambda: sequence_charts.teams([1, 2, 4], 16),
}


@pytest.mark.parametrize("name", PICTURES)
def test_equal_data_give_equal_pictures(name):
    first = style.png(PICTURES[name]())
    assert first == style.png(PICTURES[name]())
    assert len(first) < 150_000


def test_half_of_every_frame_is_full_with_zigzag_and_empty_frames_are_contiguous():
    filled = {
        layout: [sum(isinstance(patch, Polygon) for patch in ax.patches) for ax in figure.axes]
        for layout in (contiguous, zigzag)
        for figure in [sequence_charts.ring_strip({"": tiles_of(layout)}, 4, 16)]
    }
    assert filled[contiguous] == [4, 3, 2, 1]
    assert min(filled[zigzag]) >= 4


def test_a_member_of_a_team_computes_as_many_squares_as_each_other_one():
    ax = sequence_charts.teams([2], 16).axes[0]
    found = Counter(to_hex(patch.get_facecolor()) for patch in ax.patches or ax.artists)
    assert list(found.values()) == [32, 32]
    assert {text.get_text() for text in ax.texts} == {"0", "1", "2", "3"}
