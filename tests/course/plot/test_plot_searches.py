"""The picture of a race: every search where its share is, the same bytes each time."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from minitrain.course.plot.searches import race
from minitrain.course.plot.style import BLUE, VERMILLION, png
from minitrain.systems.plan.search.race import Row

ROWS = [Row("exact", "step", 2.0, 2.0, 30, 1000), Row("near", "step", 2.5, 2.0, 5, 1000)]


def test_race():
    figure = race(ROWS, title="a race")
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["near", "exact"]  # least looked at on top
    dots = [line for line in ax.lines if line.get_marker() in "oD"]
    assert [(line.get_xdata()[0], line.get_color()) for line in dots] == [(0.005, VERMILLION), (0.03, BLUE)]
    assert [text.get_text() for text in ax.texts] == [
        "5 of 1,000: 25.0% above the best",
        "30 of 1,000: the best",
    ]
    renderer = FigureCanvasAgg(figure).get_renderer()
    inside = ax.get_window_extent(renderer)
    assert not any(text.get_window_extent(renderer).overlaps(inside) for text in ax.texts), "beside the axes"
    assert "near 0.5%" in figure.alt and png(figure) == png(race(ROWS, title="a race"))
