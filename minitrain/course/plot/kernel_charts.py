"""Kernels in pictures: blocks that programs touch, loads beside products, and seconds by size of tile."""

from collections.abc import Mapping, Sequence

import numpy
from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, BLUE, GREEN, ORANGE, PALE, SKY, VERMILLION

Spans = Sequence[tuple[float, float, float]]  # a load begins, ends, its product ends


@style.styled
def touched(programs: Mapping[str, Sequence], side: int, *, title: str) -> Figure:
    """{order: touches of its first programs}: blocks of A, B and C among `side` x `side`, a row an order."""
    figure, panels = style.grid_of_panels(len(programs), 3, height=0.8 + 2.0 * len(programs))
    colours = {"A": SKY, "B": ORANGE, "C": BLUE}
    for row, (name, touches) in enumerate(programs.items()):
        at = {array: {touch.tile for touch in touches if touch.array == array} for array in colours}
        for ax, (array, colour) in zip(panels[3 * row :], colours.items()):
            there = [[(i, j) in at[array] for j in range(side)] for i in range(side)]
            style.cells(ax, there, lambda yes, colour=colour: (colour if yes else "white", ""))
            ax.set_title(f"{array}: {len(at[array])} blocks", fontsize=8)
        panels[3 * row].set_ylabel(name, fontsize=8)
    return style.finished(figure, title, {"loaded of A": SKY, "loaded of B": ORANGE, "computed": BLUE})


@style.styled
def loads_and_products(kernels: Mapping[str, Spans], *, title: str) -> Figure:
    """{name: spans}: what is loaded above what is computed, tile by tile, to one scale."""
    figure, panels = style.stacked(len(kernels), 0.9 + 0.85 * len(kernels))
    look = {"height": 0.8, "edgecolor": "white", "linewidth": 0.8}
    for ax, (name, spans) in zip(panels, kernels.items()):
        before = 0.0
        for begin, ready, end in spans:
            start = max(ready, before)
            ax.barh(0, ready - begin, left=begin, color=SKY, **look)
            ax.barh(1, end - start, left=start, color=GREEN, **look)
            before = end
        style.row_labels(ax, ["loads", "products"], top=-0.6, bottom=0.4)
        ax.set_title(f"{name}: done at {before:g}", fontsize=8)
    panels[-1].set_xlabel("time")
    return style.finished(figure, title, {"a tile is loaded": SKY, "its product": GREEN})


@style.styled
def tile_times(sizes: Sequence[int], seconds: Sequence[Sequence], chosen: Sequence, *, title: str) -> Figure:
    """seconds[m][n] of tiles by their sizes, over the least; infinite ones do not fit. `chosen`: (m, n)."""
    figure, ax = style.canvas(height=3.4)
    times = numpy.array(seconds, dtype=float)
    shown = numpy.ma.masked_invalid(times / times.min())
    ax.set_facecolor(PALE)
    ax.grid(visible=False)
    mesh = ax.pcolormesh(sizes, sizes, shown, cmap="cividis_r", vmin=1, vmax=3, shading="nearest")
    figure.colorbar(mesh, ax=ax, label="time over the best", extend="max")
    ring = {"s": 90, "facecolor": "none", "edgecolor": VERMILLION, "linewidths": 2}
    name = f"made: {chosen[0]} x {chosen[1]}"
    made = ax.scatter(chosen[1], chosen[0], **ring, label=name)
    ax.text(0.96, 0.93, "do not fit", transform=ax.transAxes, ha="right", color=BLACK)
    ax.set(xlabel="its columns", ylabel="rows of a tile of C")
    return style.finished(figure, title, [made])
