"""Who holds what: the coloured cells are what the ranks hold; pictures repeat to the byte."""

import matplotlib

from minitrain.course.plot import sharding_charts as plot_sharding
from minitrain.course.plot.style import BLUE, COLOURS, GREEN, png

HELD = {"N": [[0, 1, 2, 3]] * 4, "I": [[0, 1], [2, 3]] * 2, "G": [[0], [2], [1], [3]]}


def held(letter, rank, elements):
    return [elements[i] for i in HELD[letter][rank]]


def coloured(ax, colour: str) -> int:
    return sum(matplotlib.colors.to_hex(patch.get_facecolor()).upper() == colour for patch in ax.patches)


def artists(ax, colour: str) -> int:
    faces = [a.get_facecolor() for a in ax.get_children() if isinstance(a, matplotlib.patches.Rectangle)]
    return sum(matplotlib.colors.to_hex(face).upper() == colour for face in faces)


def test_bars_of_two_levels():
    def draw():
        return plot_sharding.two_levels(HELD, elements=4, per_node=2, title="two nodes of two")

    assert coloured(draw().axes[0], BLUE) == 16 + 8 + 4
    assert png(draw()) == png(draw())


def test_cells_of_words():
    def draw():
        words = {"NIG": "", "III": "MiCS"}
        return plot_sharding.who_holds_what(words, held, ranks=4, elements=4, title="words")

    first = draw().axes[0]
    counts = [artists(first, COLOURS[state]) for state in plot_sharding.STATES]
    assert counts == [16, 8, 4]
    assert first.get_title(loc="left") == "NIG  " and png(draw()) == png(draw())


def test_words_and_the_cheapest_repeat():
    def valid():
        return plot_sharding.all_choices(["NNN", "IGG"], title="two")

    def cheapest():
        plans = {"NNN": (100e9, 0.1), "GGG": (2e9, 0.7)}
        return plot_sharding.cheapest(plans, ["GGG"], [(100e9, 0.1), (2e9, 0.7)], title="two words")

    assert [artists(ax, GREEN) for ax in valid().axes] == [1, 1, 0]
    assert png(valid()) == png(valid()) and png(cheapest()) == png(cheapest())
