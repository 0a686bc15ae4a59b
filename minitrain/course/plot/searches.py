"""A picture of planners: how much of its space each search looked at, and how far from the best it ended."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, BLUE, GREY, VERMILLION


@style.styled
def race(rows: Sequence, *, title: str) -> Figure:
    """`rows` of race.py: a dot for each search at the share of its space that it priced, least
    first, and in a column on the right how many choices that were and how far from the best it ended. Beyond
    the line it priced more sums than there are choices."""
    rows = sorted(rows, key=lambda row: row.share)
    figure, ax = style.canvas(0.25 * len(rows) + 1.0)
    left, right = min(row.share for row in rows) / 2, 2 * max(1.0, rows[-1].share)
    for place, row in enumerate(rows):
        exact = row.gap == 0
        ax.plot([left, row.share], [place, place], color=GREY, linewidth=1)
        ax.plot(row.share, place, "o" if exact else "D", color=BLUE if exact else VERMILLION, markersize=6)
        ended = "" if exact else f": {row.gap:.1%} above the best"
        beside = {"textcoords": "offset points", "va": "center", "fontsize": 8, "annotation_clip": False}
        ax.annotate(f"{row.looked_at:,} of {row.size:,}{ended}", (right, place), (8, 0), **beside)
    ax.axvline(1, color=BLACK, linewidth=0.8, linestyle="--")
    style.row_labels(ax, [row.name for row in rows])
    ax.set(xscale="log", xlim=(left, right), xlabel="priced, as a share of its own space")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    ax.xaxis.set_minor_locator(NullLocator())
    said = ", ".join(f"{row.name} {row.share:.1%}" for row in rows)
    figure.alt = f"Share of its space that each search priced: {said}."
    return style.finished(figure, title)
