"""Pictures of published runs: relations between printed numbers; predicted beside published times."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CYCLE, VERMILLION

BOXES = {  # where a quantity stands, from the left and from below
    "tp": (0, 2.4), "pp": (0, 1.2), "dp": (0, 0), "devices": (2.4, 1.8), "rows": (2.4, -0.6),
    "batch": (4.8, -0.6), "length": (4.8, 0.6), "tokens of a batch": (7.2, 0),
    "seconds of a step": (9.6, 0), "rate": (9.6, 1.2), "mfu": (9.6, 2.4), "peak": (7.2, 2.4),
}  # fmt: skip
PRODUCTS = [("tp", "devices"), ("pp", "devices"), ("dp", "devices"), ("dp", "batch"), ("rows", "batch")]
PRODUCTS += [("batch", "tokens of a batch"), ("length", "tokens of a batch"), ("devices", "rate")]
PRODUCTS += [("tokens of a batch", "rate"), ("seconds of a step", "rate"), ("mfu", "rate"), ("peak", "rate")]


@style.styled
def relations(title: str = "A number that stands in two products can be found") -> Figure:
    """Quantities of a report as boxes; a line joins a factor to its product; dp is in two of them."""
    figure, ax = style.canvas(height=2.8)
    for one, other in PRODUCTS:
        colour = VERMILLION if "dp" in (one, other) else BLACK
        ax.plot(*zip(BOXES[one], BOXES[other]), color=colour, linewidth=2 if "dp" in (one, other) else 0.8)
    for name, (x, y) in BOXES.items():
        frame = dict(boxstyle="round", facecolor="white", edgecolor=BLACK)
        ax.text(x, y, name, ha="center", va="center", fontsize=8, bbox=frame)
    ax.set(xlim=(-0.8, 10.6), ylim=(-1.2, 3))
    ax.axis("off")
    return style.finished(figure, title)


@style.styled
def ratios(runs: Mapping[str, float], bars: Mapping[str, tuple[float, float]], title: str) -> Figure:
    """Predicted over published time as a point per run; a bar from `low` to `high` times the prediction is
    what other runs' ratios would make of it."""
    figure, ax = style.canvas(height=1.1 + 0.3 * len(runs))
    for place, (name, ratio) in enumerate(runs.items()):
        low, high = (ratio * end for end in bars[name])
        ax.plot((low, high), (place, place), color=CYCLE[0], linewidth=2, alpha=0.5)
        ax.plot(ratio, place, marker="o", color=CYCLE[0])
    ax.axvline(1, color=BLACK, linestyle=":", linewidth=1)
    style.row_labels(ax, list(runs), top=-0.6, bottom=0.4)
    ax.set(xlabel="predicted over published time of a step")
    return style.finished(figure, title)
