"""Blocks of matrices on grids of ranks: which terms meet where, the cube of 3-D, shards on a ring, and curves
over the number of ranks.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import isqrt

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, BLUE, CENTRED, CYCLE, GREEN, ORANGE, SKY, VERMILLION, ink_on

Block = tuple[int, int]  # row and column of a block in its matrix
Held = Mapping[Block, tuple[Block, Block]]  # {rank (i, j): (block of A, block of B)}
_OCHRE, _MOSS = "#9A6A00", "#006B4E"  # orange and green that can be read as text
_DONE = style.blend("#FFFFFF", SKY, 0.55)


@style.styled
def blocks(panels: Mapping[str, Held], *, title: str, arrows: Callable[[int], Sequence] = lambda panel: ()):
    """A panel per step; a block has the colour of its term s, A(i, s) or B(s, j), a frame on its own rank.

    `arrows(panel)` are (start, end, is it A); places are (j, i) of ranks, drawn in black for A, red for B.
    """
    side = isqrt(len(next(iter(panels.values()))))
    figure, axes = style.grid_of_panels(1, len(panels), height=1.3 + 6.0 / len(panels))
    for number, (ax, (name, held)) in enumerate(zip(axes, panels.items())):
        style.square_cells(ax, side, side)
        ax.set(xlim=(-0.85, side - 0.45), ylim=(side - 0.4, -0.85))
        for (i, j), (a, b) in held.items():
            _half(ax, j, i - 0.44, f"A{a[0]}{a[1]}", CYCLE[a[1]], a == (i, j))
            _half(ax, j, i, f"B{b[0]}{b[1]}", CYCLE[b[0]], b == (i, j))
        for start, end, is_a in arrows(number):
            shift = (-0.08, -0.22) if is_a else (0.38, 0.22)
            ends = [(x + shift[0], y + shift[1]) for x, y in (end, start)]
            look = {"arrowstyle": "-|>", "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", *ends, arrowprops=look | {"color": BLACK if is_a else VERMILLION})
        ax.set_title(name, fontsize=9)
    terms = style.patches({f"term s = {s}": CYCLE[s] for s in range(side)})
    frame = Patch(facecolor="white", edgecolor=BLACK, linewidth=2, label="this rank's own block")
    return style.finished(figure, title, [*terms, frame])


def _half(ax, column: int, top: float, text: str, colour: str, own: bool) -> None:
    look = {"facecolor": colour, "edgecolor": BLACK if own else "white", "linewidth": 2 if own else 0.5}
    ax.add_artist(Rectangle((column - 0.44, top), 0.72, 0.44, **look))
    weight = {"fontsize": 8, "color": ink_on(colour), "fontweight": "bold" if own else "normal"}
    ax.text(column - 0.08, top + 0.22, text, **CENTRED, **weight)


def outwards(side: int, step: int) -> list:
    """The arrows of a SUMMA step: column `step` of A along the rows, row `step` of B along the columns."""
    arrows = []
    for line in range(side):
        for at in range(side):
            for way in (-1, 1):
                if 0 <= at + way < side and (at - step) * way >= 0:
                    arrows.append(((at + 0.28 * way, line), (at + 0.72 * way, line), True))
                    arrows.append(((line, at), (line, at + way), False))
    return arrows


def to_neighbours(side: int) -> list:
    """The arrows of a Cannon shift: all of A one place to the left, all of B one place up."""
    places = [(j, i) for i in range(side) for j in range(side)]
    left = [((j - 0.30, i), (j - 0.68, i), True) for j, i in places]
    return left + [((j, i), (j, i - 0.92), False) for j, i in places]


@style.styled
def cube(side: int, *, title: str) -> Figure:
    """The side³ products of two matrices in side×side blocks: A, B, C are faces, a rank is a small cube."""
    figure, ax = style.canvas(height=3.5)

    def point(j, i, p):  # j to the right, i down, p into the page
        return j + 0.52 * p, -i + 0.42 * p

    around = (0, 0), (1, 0), (1, 1), (0, 1)
    faces = {
        "A": (BLUE, lambda u, v: point(side, u, v)),
        "B": (ORANGE, lambda u, v: point(v, 0, u)),
        "C": (GREEN, lambda u, v: point(v, u, 0)),
    }
    for name, (colour, corner) in faces.items():
        for u, v in ((u, v) for u in range(side) for v in range(side)):
            corners = [corner(u + du, v + dv) for du, dv in around]
            ax.add_artist(Polygon(corners, facecolor=colour, edgecolor="white", linewidth=2))
            middle = [sum(axis) / 4 for axis in zip(*corners)]
            bold = {"fontsize": 10, "fontweight": "bold", "color": ink_on(colour)}
            ax.text(*middle, f"{name}{u}{v}", **CENTRED, **bold)
    half, italic = side / 2, {"fontsize": 11, "fontstyle": "italic"}
    ax.text(half, -side - 0.2, "j", **CENTRED, **italic)
    ax.text(-0.17, -half, "i", **CENTRED, **italic)
    ax.text(side + 0.52 * half + 0.2, -side + 0.42 * half - 0.2, "p", **CENTRED, **italic)
    kept = "each keeps 1/l of it"
    said = {
        "Rank (i, j, p) is one small cube; it multiplies A(i,p) by B(p,j).": BLACK,
        f"The ranks along j (input_group) need the same A(i,p); {kept}: all-gather.": BLUE,
        f"The ranks along i (weight_group) need the same B(p,j); {kept}: all-gather.": _OCHRE,
        f"The ranks along p (output_group) add up C(i,j); {kept}: reduce-scatter.": _MOSS,
    }
    for row, (text, colour) in enumerate(said.items()):
        look = {"va": "center", "fontsize": 9, "color": colour, "fontweight": "normal" if row else "bold"}
        ax.text(1.8 * side, 0.35 - 0.66 * row, textwrap.fill(text, 46), **look)
    ax.set(xlim=(-0.4, 1.8 * side + 4.3), ylim=(-side - 0.35, side / 2), aspect="equal")
    ax.set_axis_off()
    return style.finished(figure, title)


@style.styled
def shards_on_a_ring(journeys: Sequence[Sequence[int]], *, title: str) -> Figure:
    """journeys[rank][step] is whose shard is on that rank; a rank's row of Y fills up block by block."""
    ranks = len(journeys)
    figure, panels = style.grid_of_panels(1, ranks, height=2.5)
    for step, ax in enumerate(panels):
        style.square_cells(ax, ranks, ranks)
        for rank, owners in enumerate(journeys):
            for owner in range(ranks):
                now, done = owners[step] == owner, owner in owners[:step]
                colour = ORANGE if now else _DONE if done else "white"
                style.cell(ax, owner, rank, colour, f"W{owner}" if now else "", fontsize=8)
        ax.set_title(f"step {step}", fontsize=9)
    panels[0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    meaning = {"the shard that is here, and the block of Y that it gives": ORANGE}
    return style.finished(figure, title, meaning | {"blocks of Y that are done": _DONE})


@style.styled
def against_ranks(
    curves: Mapping[str, Mapping[int, float]], *, title: str, ylabel: str, bound: Mapping[int, float] = {}
) -> Figure:
    """{name: {ranks: value}}, both axes logarithmic; values of 0 are left out. `bound` is a dashed line."""
    figure, ax = style.canvas(height=3.3)
    sizes = sorted({ranks for curve in curves.values() for ranks in curve})
    for number, (name, curve) in enumerate(curves.items()):
        there = [(ranks, value) for ranks, value in curve.items() if value > 0]
        look = {"color": CYCLE[number], "marker": style.MARKERS[number], "markersize": 5}
        ax.plot(*zip(*there), **look, label=name)
    if bound:
        ax.plot(*zip(*bound.items()), color=BLACK, linestyle="--", linewidth=1.2, label="computing, at peak")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlabel="ranks", ylabel=ylabel, xticks=sizes, xticklabels=[f"{ranks:,}" for ranks in sizes])
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])
