"""What all pictures share: one palette named by meaning, one style, a figure that shows itself, small parts.

The palette is Okabe and Ito's (2008), which readers with any colour vision can tell apart. A colour means the
same everywhere, and what is exposed or waits is hatched too. Figures are registered nowhere (no pyplot): none
stays open, and equal data give equal pictures, to the byte.
"""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path

import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle
from PIL import Image

import minitrain.course.notebook  # noqa: F401 - an error shows the reader's lines

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, PALE_BLUE = "#999999", "#E8E8E8", "#DCEBF5"
_WORK = {"forward": SKY, "backward": BLUE, "optimizer": GREEN, "compute": GREY}
_TRANSFERS = {"communication": ORANGE, "exposed communication": VERMILLION, "wait": PALE}
_STATE = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
_SPACE = {"activations": SKY, "buffers": PURPLE, "gathered parameters": YELLOW}
_ACTIONS = {"input gradient": PURPLE, "weight gradient": YELLOW, "recomputation": GREY, "idle": PALE}
COLOURS = _WORK | _TRANSFERS | _STATE | _SPACE | _ACTIONS | {"measured": BLUE, "formula": BLACK}
HATCHES = {"exposed communication": ("/////", "white"), "wait": (".....", GREY), "idle": (".....", GREY)}
CYCLE = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK]  # for what has no meaning of its own
Series = Mapping[str, Sequence[float]]  # {name: its values}
Runs = Mapping[str, Sequence[tuple[int, Mapping]]]  # {name: ledger.timeline()}
MARKERS, DASHES = "o^sDvPX", ["-", "--", "-.", ":"]
CENTRED = {"ha": "center", "va": "center"}
WIDTH = 7.2  # inches: 720 pixels at 100 dots an inch
_LETTERS_A_LINE = 120  # of the small font, across that width


def style() -> dict:
    """The house style as matplotlib settings."""
    figure = {"figure.dpi": 100, "savefig.dpi": 100, "figure.facecolor": "white"}
    layout = {"figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False}
    text = {"font.family": "DejaVu Sans", "font.size": 9, "legend.fontsize": 8, "axes.titlelocation": "left"}
    titles = {f"{of}.title{k}": v for of in ("axes", "figure") for k, v in (("size", 10), ("weight", "bold"))}
    grid = {"axes.axisbelow": True, "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6}
    strokes = {"lines.linewidth": 1.8, "hatch.linewidth": 0.6, "legend.frameon": False}
    return figure | layout | text | titles | grid | strokes


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorates a function that draws: the house style inside it, the reader's own settings outside."""

    @wraps(draw)
    def drawn(*args, **kwargs) -> Figure:
        with rc_context(style()):
            return draw(*args, **kwargs)

    return drawn


class Picture(Figure):
    """A figure which a notebook shows without pyplot, drawn in the one style wherever it is saved."""

    alt = ""  # in place of `alternative`

    def _repr_png_(self) -> tuple[bytes, dict]:
        width, height = (int(200 * inches + 1e-6) // 2 for inches in self.get_size_inches())
        return png(self), {"width": width, "height": height, "alt": self.alt or alternative(self)}

    def savefig(self, *args, **settings) -> None:
        with rc_context(style()):
            super().savefig(*args, **settings)


@cache
def _of_chapters() -> dict[str, str]:
    """{title: what the picture shows}"""
    rows = Path(__file__).with_name("pictures.tsv").read_text().splitlines()[1:]
    return dict(row.split("\t")[1:] for row in rows)


def alternative(figure: Figure) -> str:
    """What a picture shows, for those who cannot see it: a chapter's as `pictures.tsv` says it by its title,
    any other by its title, its axes, and where each curve begins and ends."""
    title = " ".join(figure.get_suptitle().split())
    if title in _of_chapters():
        return _of_chapters()[title]
    said, curves = [title], {}
    for ax in figure.axes:
        said.append(" over ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel()))))
        curves |= {str(line.get_label()): line.get_ydata(orig=False) for line in ax.get_lines()}
    named = {name: y for name, y in curves.items() if name and name[0] != "_" and len(y)}
    said += [f"{name} from {y[0]:.4g} to {y[-1]:.4g}" for name, y in named.items()]
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    said += [text for text in legends if text not in curves]
    return ". ".join(dict.fromkeys(filter(None, said)))


def png(figure: Figure) -> bytes:
    """A PNG, sharp when shown at half its size; of 128 colours, so a third of the bytes of a plain one."""
    small, before, figure.dpi = io.BytesIO(), figure.dpi, 200
    with rc_context(style()):
        (canvas := FigureCanvasAgg(figure)).draw()  # savefig would draw twice, once to lay out
    figure.dpi, drawn = before, Image.fromarray(numpy.asarray(canvas.buffer_rgba()))
    drawn.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def canvas(height: float) -> tuple[Figure, Axes]:
    figure = Picture(figsize=(WIDTH, height))
    return figure, figure.subplots()


def panels(names: Iterable[str], height: float) -> tuple[Figure, list[Axes]]:
    """One beside the other, to one scale upwards, each with a name."""
    figure, names = Picture(figsize=(WIDTH, height)), list(names)
    axes = list(figure.subplots(1, len(names), sharey=True, squeeze=False)[0])
    for ax, name in zip(axes, names):
        ax.set_title(name, fontsize=9)
    return figure, axes


def stacked(panels: int, height: float, ratios: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    """One below the other, to one scale to the right."""
    figure = Picture(figsize=(WIDTH, height))
    return figure, list(figure.subplots(panels, squeeze=False, sharex=True, height_ratios=ratios)[:, 0])


def grid_of_panels(down: int, across: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of square cells, pushed together; the caller draws on the first ones, the others stay empty."""
    figure = Picture(figsize=(WIDTH, height), layout="compressed")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in panels:
        panel.set_axis_off()
    return figure, panels


def legend_below(figure: Figure, handles: Sequence) -> None:
    """Outside the axes, where it can hide nothing: as many columns as the width has room for.

    A tuple of handles is one entry: they stand side by side under the label of the first."""
    labels = [(handle[0] if type(handle) is tuple else handle).get_label() for handle in handles]
    letters = [len(label) + 8 for label in labels]  # a swatch and a gap are as wide as 8

    def width(columns: int) -> int:
        return sum(max(column) for column in numpy.array_split(letters, columns))

    columns = next((n for n in range(len(letters), 1, -1) if width(n) <= _LETTERS_A_LINE), 1)
    beside = {tuple: HandlerTuple(ndivide=None, pad=0)}
    place = {"loc": "outside lower center", "ncols": columns, "handlelength": 1.6}
    figure.legend(list(handles), labels, handler_map=beside, **place)


def patches(colours: Mapping[str, str]) -> list[Patch]:
    return [Patch(facecolor=colour, label=label) for label, colour in colours.items()]


def finished(figure: Figure, title: str, handles: Sequence | Mapping[str, str] = ()) -> Figure:
    """With its title above and its legend below, if it has them: handles, or {label: colour}."""
    if title:
        figure.suptitle("\n".join(textwrap.fill(line, 84) for line in title.splitlines()), x=0.01, ha="left")
    if handles:
        legend_below(figure, patches(handles) if isinstance(handles, Mapping) else handles)
    return figure


def stack_of_kinds(
    ax: Axes, timeline: Sequence, kinds: Sequence[str], unit: str, scale: float, shift=(6, 2), fontsize=9
) -> tuple[list, float]:
    """Live bytes by kind over `ledger.timeline()`, the peak named beside its dot -> (handles, the peak)."""
    at = numpy.array([index for index, _ in timeline], dtype=float)
    live = numpy.array([[of.get(kind, 0) for _, of in timeline] for kind in kinds], dtype=float) / scale
    look = {"colors": [colour_of(kind) for kind in kinds], "step": "post", "linewidth": 0}
    stack, total = ax.stackplot(at, live, labels=kinds, **look), live.sum(axis=0)
    x, y = at[total.argmax()], total.max()
    ax.plot(x, y, "o", color=BLACK, markersize=4)
    side, ha = (-1, "right") if x > (at[0] + at[-1]) / 2 else (1, "left")
    place = {"textcoords": "offset points", "ha": ha, "fontweight": "bold", "fontsize": fontsize}
    ax.annotate(f"peak {y:.4g} {unit}", (x, y), (side * shift[0], shift[1]), **place)
    ax.set(xlim=(at[0], max(at[-1], at[0] + 1)))
    return stack, y


def row_labels(ax: Axes, labels: Sequence[str], top: float = -0.5, bottom: float = 0.5) -> None:
    """A label per row in place of grid lines, the first row at the top; `top`, `bottom`: the room around."""
    ax.grid(axis="y", visible=False)
    ax.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - bottom, top))


def look_of(what: str) -> dict:
    """Face, hatch and the colour of the hatch."""
    hatch, edge = HATCHES.get(what, (None, "white"))
    return {"facecolor": colour_of(what), "hatch": hatch, "edgecolor": edge}


def swatch(what: str) -> Patch:
    return Patch(**look_of(what), linewidth=0, label=what)


def colour_of(what: str, among: Sequence[str] = ()) -> str:
    """By meaning; other things take the colours in turn if they are one of several."""
    other = CYCLE[among.index(what) % len(CYCLE)] if what in among else COLOURS["compute"]
    return COLOURS.get(what, other)


def unit_for(largest: float, unit: str) -> tuple[str, float]:
    """The unit in which `largest` reads well, and its size: ("MB", 1e6) for "bytes", ("ms", 1e-3) for "s"."""
    known = {
        "s": [("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)],
        "bytes": [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("bytes", 1.0)],
    }
    units = known.get(unit, [(unit, 1.0)])
    return next((pair for pair in units if largest >= pair[1]), units[-1])


def square_cells(ax: Axes, columns: int, rows: int) -> None:
    ax.set_axis_on()
    ax.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=7)


def cells(ax: Axes, table: Sequence[Sequence], look: Callable[[float], tuple[str, str]], fontsize=7) -> None:
    """A square for each number of a table, whose colour and text `look` gives."""
    square_cells(ax, len(table[0]), len(table))
    for row, numbers in enumerate(table):
        for column, number in enumerate(numbers):
            cell(ax, column, row, *look(number), fontsize)


def cell(ax: Axes, column: int, row: int, colour: str, text: str, fontsize: float = 7) -> None:
    look = {"facecolor": colour, "edgecolor": "#CCCCCC", "linewidth": 0.6}
    square = ax.add_artist(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, **look))
    label = ax.text(column, row, text, **CENTRED, fontsize=fontsize, color=ink_on(colour))
    for artist in (square, label):
        artist.set_in_layout(False)  # the axes have their size already; asking a thousand cells takes seconds


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on it."""
    red, green, blue = to_rgb(colour)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def blend(start: str, end: str, share: float) -> str:
    return to_hex((1 - share) * numpy.array(to_rgb(start)) + share * numpy.array(to_rgb(end)))
