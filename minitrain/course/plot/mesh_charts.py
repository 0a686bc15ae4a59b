"""Meshes: who shares a group with whom and where they sit, who sends to whom, what an order costs."""

from collections.abc import Mapping, Sequence

import numpy
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, CYCLE, GREEN, GREY, ORANGE, PALE, PURPLE, SKY, ink_on

AXES = {"tp": BLUE, "dp": GREEN, "pp": ORANGE, "cp": PURPLE, "ep": SKY}  # everywhere the same
Pairs = Mapping[tuple[int, int], float]


@style.styled
def groups(by_axis: Mapping[str, Sequence[Sequence[int]]], devices_per_node: int, *, title: str) -> Figure:
    """{axis: its groups of ranks}. A row is a node; ranks of one colour are a group, a line joins them."""
    ranks, colours = sum(map(len, next(iter(by_axis.values())))), [*CYCLE, GREY]
    nodes = -(-ranks // devices_per_node)
    figure, axes = style.grid_of_panels(1, len(by_axis), height=0.75 + 0.42 * nodes)
    for ax, (axis, found) in zip(axes, by_axis.items()):
        style.square_cells(ax, devices_per_node, nodes)
        ax.set(xlim=(-1.0, devices_per_node - 0.4))
        ax.set_title(f"{axis}: {len(found)} groups of {len(found[0])}", fontsize=9)
        for node in range(nodes):
            frame = dict(facecolor="none", edgecolor=GREY, linewidth=1.0)
            ax.add_patch(Rectangle((-0.5, node - 0.45), devices_per_node, 0.9, **frame))
            ax.text(-0.62, node, f"{node}", ha="right", va="center", fontsize=7, color="#666666")
        for number, group in enumerate(found):
            colour = colours[number % len(colours)]
            at = [(rank % devices_per_node, rank // devices_per_node) for rank in group]
            for start, end in zip(at, at[1:]):
                far = start[0] == end[0] and end[1] - start[1] > 1  # past ranks of other groups
                line = dict(arrowstyle="-", color=colour, linewidth=2.2, shrinkA=0, shrinkB=0, zorder=1)
                line |= dict(connectionstyle=f"arc3,rad={far * (0.5 if start[1] % 2 else -0.5)}")
                ax.annotate("", end, start, arrowprops=line, zorder=1)
            for rank, (x, y) in zip(group, at):
                look = dict(facecolor=colour, edgecolor="white", linewidth=0.6, zorder=2)
                ax.add_patch(Rectangle((x - 0.36, y - 0.32), 0.72, 0.64, **look))
                ax.text(x, y, str(rank), **CENTRED, fontsize=7, color=ink_on(colour), zorder=3)
    return style.finished(figure, title)


@style.styled
def matrix(panels: Mapping[str, Mapping[str, Pairs]], ranks: int, every: int, *, title: str) -> Figure:
    """{name: {axis: {(from, to): bytes}}}: a cell that carries bytes has the colour of its axis; a thin line
    stands after `every` ranks."""
    figure, axes = style.panels(panels, height=3.9 if len(panels) == 2 else 5.2)
    for ax, by_axis in zip(axes, panels.values()):
        image = numpy.ones((ranks, ranks, 3))
        for axis, pairs in by_axis.items():
            for source, to in pairs:
                image[source, to] = to_rgb(AXES[axis])
        ax.imshow(image, interpolation="nearest", extent=(-0.5, ranks - 0.5, ranks - 0.5, -0.5))
        for edge in range(every, ranks, every):
            ax.axhline(edge - 0.5, color=PALE, linewidth=0.4)
            ax.axvline(edge - 0.5, color=PALE, linewidth=0.4)
        ticks = range(0, ranks, ranks // 4)
        ax.set(xticks=ticks, yticks=ticks, xlabel="to rank")
        ax.grid(visible=False)
        ax.spines[:].set_visible(True)
    axes[0].set_ylabel("from rank")
    used = {axis for by_axis in panels.values() for axis in by_axis}
    return style.finished(figure, title, {axis: AXES[axis] for axis in AXES if axis in used})


@style.styled
def times(parts: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """{label: {part: seconds}}, stacked to the right; "waits for tp" has the colour of tp."""
    scale = max(sum(of.values()) for of in parts.values())
    name, size = style.unit_for(scale, "s")
    figure, ax = style.canvas(height=0.9 + 0.34 * len(parts))
    names = list(dict.fromkeys(part for of in parts.values() for part in of))
    for row, of in enumerate(parts.values()):
        left = 0.0
        for part in names:
            ax.barh(row, of.get(part, 0) / size, left=left, color=_colour(part), height=0.7)
            left += of.get(part, 0) / size
        ax.text(left, row, f" {left:.3g} {name}", va="center", fontsize=8)
    style.row_labels(ax, list(parts))
    ax.set(xlim=(0, 1.12 * scale / size), xlabel=name)
    return style.finished(figure, title, {part: _colour(part) for part in names})


def _colour(part: str) -> str:
    return AXES.get(part.split()[-1]) or style.colour_of(part)
