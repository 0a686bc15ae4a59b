"""What holds for every picture."""

from collections.abc import Callable

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from minitrain.course.plot.style import png

LONG = "A title that is so long that it would run out of the picture on the right if nobody broke it into two lines"


def check(draw: Callable[[], Figure], twice: bool = True) -> None:
    """Equal calls (`twice`) give equal bytes, and few; everything is inside, no legend hides data, the reader's style stays."""
    before, figure = dict(rcParams), draw()
    data = png(figure)
    assert data.startswith(b"\x89PNG") and len(data) < 150_000 and not (twice and data != png(draw()))
    assert dict(rcParams) == before
    width, height = figure.get_size_inches()
    assert abs(width - 7.2) < 1e-6 and height < 9
    renderer = FigureCanvasAgg(figure).get_renderer()
    box = figure.get_tightbbox(renderer)  # in inches
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, box
    for legend in figure.legends:
        assert not any(text.get_text().startswith("_") for text in legend.get_texts())
        for ax in figure.axes:
            # it hides data
            assert not legend.get_window_extent(renderer).overlaps(ax.get_window_extent(renderer))


def colour(patch) -> str:
    return to_hex(patch.get_facecolor()).upper()


def words(*axes) -> list[str]:
    return [text.get_text() for ax in axes for text in ax.texts]
