"""What all pictures share: one palette named by meaning, one style, a figure that shows itself, and their small parts.

The palette is Okabe and Ito's (2008), which readers with any colour vision can tell apart. A colour stands for the same
thing everywhere, and what is exposed or waits is hatched too. Figures are registered nowhere (no pyplot): none stays
open, and equal data give equal pictures, to the byte.
"""

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY, PALE = "#999999", "#E8E8E8"

COLOURS = {
    "forward": SKY,
    "backward": BLUE,
    "optimizer": GREEN,
    "compute": GREY,
    "communication": ORANGE,
    "exposed communication": VERMILLION,
    "wait": PALE,
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer state": GREEN,
    "activations": SKY,
    "buffers": PURPLE,
    "input gradient": PURPLE,
    "weight gradient": YELLOW,
    "recomputation": GREY,
    "idle": PALE,
    "measured": BLUE,
    "formula": BLACK,
}
HATCHES = {"exposed communication": ("/////", "white"), "wait": (".....", GREY), "idle": (".....", GREY)}
CYCLE = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK]  # for what has no meaning of its own
MARKERS, DASHES = "o^sDvPX", ["-", "--", "-.", ":"]
WIDTH = 7.2  # inches: 720 pixels at 100 dots an inch
_LETTERS_A_LINE = 120  # of the small font, across that width


def style() -> dict:
    """The house style as matplotlib settings."""
    return {
        "figure.dpi": 100,
        "savefig.dpi": 100,
        "figure.constrained_layout.use": True,
        "figure.facecolor": "white",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "figure.titlesize": 10,
        "figure.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.8,
        "hatch.linewidth": 0.6,
    }


def in_house_style(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """For a function that draws: matplotlib's settings are the house style inside it, and the reader's own outside."""

    @wraps(draw)
    def styled(*args, **kwargs) -> Figure:
        with rc_context(style()):
            return draw(*args, **kwargs)

    return styled


class Picture(Figure):
    """A figure which a notebook shows without pyplot, drawn in the one style wherever it is saved."""

    def _repr_png_(self) -> bytes:
        return png(self)

    def savefig(self, *args, **settings) -> None:
        with rc_context(style()):
            super().savefig(*args, **settings)


def png(figure: Figure) -> bytes:
    """The picture as a PNG of 128 colours, a third of the size of a plain one."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        small, format="png", optimize=True
    )
    return small.getvalue()


def canvas(height: float) -> tuple[Figure, Axes]:
    figure = Picture(figsize=(WIDTH, height))
    return figure, figure.subplots()


def grid_of_panels(down: int, across: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of square cells, pushed together; the caller draws on the first ones, the others stay empty."""
    figure = Picture(figsize=(WIDTH, height), layout="compressed")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in panels:
        panel.set_axis_off()
    return figure, panels


def title_above(figure: Figure, text: str) -> None:
    figure.suptitle("\n".join(textwrap.fill(line, 84) for line in text.splitlines()), x=0.01, ha="left")


def legend_below(figure: Figure, handles: Sequence) -> None:
    """Outside the axes, where it can hide nothing."""
    letters = [len(handle.get_label()) + 8 for handle in handles]  # a swatch and a gap are as wide as 8
    columns = next(
        (
            count
            for count in range(len(letters), 1, -1)
            if sum(max(column) for column in numpy.array_split(letters, count)) <= _LETTERS_A_LINE
        ),
        1,
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=1.6)


def swatch(what: str) -> Patch:
    hatch, edge = HATCHES.get(what, (None, None))
    return Patch(facecolor=colour_of(what), hatch=hatch, edgecolor=edge, linewidth=0, label=what)


def colour_of(what: str, among: Sequence[str] = ()) -> str:
    """By meaning; other things take the colours in turn if they are one of several."""
    return COLOURS.get(what) or (
        CYCLE[among.index(what) % len(CYCLE)] if what in among else COLOURS["compute"]
    )


def unit_for(largest: float, unit: str) -> tuple[str, float]:
    """The unit in which `largest` reads well, and its size: ("MB", 1e6) for "bytes", ("ms", 1e-3) for "s"."""
    units = {
        "s": [("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)],
        "bytes": [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("bytes", 1.0)],
    }.get(unit, [(unit, 1.0)])
    return next((pair for pair in units if largest >= pair[1]), units[-1])


def square_cells(ax: Axes, columns: int, rows: int) -> None:
    ax.set_axis_on()
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=7)


def cell(ax: Axes, column: int, row: int, colour: str, text: str, fontsize: float = 7) -> None:
    square = Rectangle(
        (column - 0.46, row - 0.46), 0.92, 0.92, facecolor=colour, edgecolor="#CCCCCC", linewidth=0.6
    )
    label = ax.text(column, row, text, ha="center", va="center", fontsize=fontsize, color=ink_on(colour))
    for artist in (ax.add_artist(square), label):
        artist.set_in_layout(False)  # the axes have their size already; asking a thousand cells takes seconds


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on it."""
    red, green, blue = to_rgb(colour)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def blend(start: str, end: str, share: float) -> str:
    return to_hex((1 - share) * numpy.array(to_rgb(start)) + share * numpy.array(to_rgb(end)))
