"""Attention in pieces: tiles of scores, an online softmax, who sees whom, units of a chip, a roofline."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CENTRED, CYCLE, GREY, ORANGE, PALE, SKY

Tiles = Sequence[tuple[slice, slice]]  # rows and columns, in the order in which they are computed


@style.styled
def schematic(tokens: int, tile: int, row: int, *, title: str) -> Figure:
    """One tile of queries at work: tiles of keys come one by one, and beside them what the row carries on."""
    figure, ax = style.canvas(height=3.0)
    for column in range(tokens):
        for line in range(tokens):
            seen = line == row and column < tile
            colour = SKY if seen else ORANGE if line == row and column == tile else PALE
            ax.add_patch(Rectangle((column, line), 0.94, 0.94, facecolor=colour, linewidth=0))
    ax.text(-0.2, row + 0.5, "queries Q_i", ha="right", va="center", fontsize=9)
    for column in range(tokens):
        ax.text(column + 0.47, -0.3, f"K{column}, V{column}", **CENTRED, fontsize=8)
    right = tokens + 0.9
    lines = (
        ("in fast memory, for each query of the tile:", BLACK, "bold"),
        ("m   the largest score so far", BLACK, "normal"),
        ("l    the sum of exp(score - m)", BLACK, "normal"),
        ("o   the sum of exp(score - m) · value", BLACK, "normal"),
        ("a larger m comes: l and o times exp(old m - new m)", "#9A6A00", "normal"),
        ("after the last tile: out = o / l,  lse = m + log l", "#005A8C", "normal"),
    )
    for at, (text, colour, weight) in enumerate(lines):
        ax.text(right, 0.4 + 0.72 * at, text, va="center", fontsize=9, color=colour, fontweight=weight)
    ax.set(xlim=(-1.9, right + 7.6), ylim=(tokens + 0.1, -0.7), aspect="equal")
    ax.set_axis_off()
    meaning = {"seen: only m, l, o are left of it": SKY, "the tile of scores that exists now": ORANGE}
    return style.finished(figure, title, meaning | {"does not exist": PALE})


@style.styled
def tiles(versions: Mapping[str, Tiles], tokens: int, *, title: str) -> Figure:
    """{name: tiles in their order}: numbered where they lie in the score matrix of a causal mask."""
    figure, panels = style.grid_of_panels(1, len(versions), height=3.9)
    for ax, (name, ordered) in zip(panels, versions.items()):
        ax.set_axis_on()
        ax.add_patch(Rectangle((0, 0), tokens, tokens, facecolor=PALE, edgecolor="none"))
        for number, (rows, columns) in enumerate(ordered):
            wide, tall = columns.stop - columns.start, rows.stop - rows.start
            colour = ORANGE if columns.stop > rows.start + 1 else SKY
            place = columns.start, rows.start
            ax.add_patch(Rectangle(place, wide, tall, facecolor=colour, edgecolor="white"))
            ax.text(place[0] + wide / 2, place[1] + tall / 2, str(number), **CENTRED, fontsize=7)
        ticks = range(0, tokens + 1, 8)
        ax.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal", xticks=ticks, yticks=ticks)
        ax.set(xlabel="keys", ylabel="queries")
        ax.grid(visible=False)
        ax.set_title(name, fontsize=8)
    meaning = {"computed without a mask": SKY, "crossed by the diagonal: masked": ORANGE, "skipped": PALE}
    return style.finished(figure, title, meaning)


@style.styled
def units(schedules: Mapping[str, Sequence[tuple[str, str, float, float]]], *, title: str) -> Figure:
    """{name: (step, unit, start, end)}: two units of a chip; a step's first letter is its warpgroup."""
    names = ["products", "exponentials"]
    figure, panels = style.stacked(len(schedules), 3.4)
    for ax, (name, steps) in zip(panels, schedules.items()):
        for step, unit, start, end in steps:
            look = {"height": 0.8, "color": SKY if step.startswith("A") else ORANGE, "edgecolor": "white"}
            ax.barh(names.index(unit), end - start, left=start, **look)
            text = step[2:].replace("softmax", "exp ")
            ax.text((start + end) / 2, names.index(unit), text, **CENTRED, fontsize=6.5)
        style.row_labels(ax, names, top=-0.6, bottom=0.4)
        ax.set_title(f"{name}: {max(end for *_, end in steps):g}", fontsize=8)
    panels[-1].set_xlabel("time, in products of one block (S and PV together)")
    return style.finished(figure, title, {"warpgroup A": SKY, "warpgroup B": ORANGE})


@style.styled
def who_sees_whom(masks: Mapping[str, Sequence], text_of: Sequence[int], *, title: str) -> Figure:
    """{name: mask[query][key]}, in the colour of the query's text."""
    tokens = len(text_of)
    figure, panels = style.grid_of_panels(1, len(masks), height=2.9)
    for ax, (name, mask) in zip(panels, masks.items()):
        style.square_cells(ax, tokens, tokens)
        for row, column in itertools.product(range(tokens), repeat=2):
            style.cell(ax, column, row, CYCLE[text_of[row]] if mask[row][column] else "white", "")
        ax.set_title(name, fontsize=8)
    return style.finished(figure, title, {f"queries of text {i}": CYCLE[i] for i in sorted(set(text_of))})


@style.styled
def roofline(points: Mapping[str, float], peak: float, bandwidth: float, *, title: str) -> Figure:
    """{name: FLOPs per byte} under the roof of a chip: `peak`, or `bandwidth` times the intensity."""
    figure, ax = style.canvas(height=3.4)
    edge = peak / bandwidth
    xs = sorted([2**i for i in range(4, 13)] + [edge])
    roof = [min(peak, x * bandwidth) / 1e12 for x in xs]
    ax.plot(xs, roof, color=BLACK, linewidth=1.4, label="the chip: min(peak, bandwidth x intensity)")
    for i, (name, ratio) in enumerate(points.items()):
        look = {"linestyle": "none", "markersize": 8, "marker": style.MARKERS[i % len(style.MARKERS)]}
        at = min(peak, ratio * bandwidth) / 1e12
        ax.plot(ratio, at, color=CYCLE[i % len(CYCLE)], label=name, **look)
    ax.axvline(edge, color=GREY, linestyle=":", linewidth=1)
    ax.text(edge / 1.08, 60, "slow memory decides", ha="right", fontsize=8)
    ax.text(edge * 1.08, 60, "products decide", ha="left", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="FLOPs for each byte of slow memory")
    ax.set(ylabel="TFLOP/s at most (bfloat16)", xticks=[16, 64, 256, 1024, 4096], yticks=[100, 1000])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])
