"""Whose resolution an outlier takes, and which codes numbers get."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CYCLE, PALE, VERMILLION

Pair = tuple[int, int]
_TAKEN = style.blend(VERMILLION, "white", 0.4)


@style.styled
def sharing(shape: Pair, tiles: Mapping[str, Pair], outliers: Sequence[Pair], *, title: str) -> Figure:
    """What shares its scale with an outlier (row, column), a panel for each kind of tile: {name: (height,
    width)}, 0 for the whole of a side."""
    rows, columns = shape
    outside = [at for at in outliers if not (0 <= at[0] < rows and 0 <= at[1] < columns)]
    if outside or not tiles:
        found = f"outliers at {outside}" if outside else "no tiles"
        raise ValueError(f"{found}, a matrix of {rows} x {columns}; give places inside it and a tile or more")
    figure, panels = style.grid_of_panels(1, len(tiles), height=0.9 + 1.7 * rows / columns)
    for ax, (name, (height, width)) in zip(panels, tiles.items()):
        height, width = height or rows, width or columns
        taken = 0
        for top in range(0, rows, height):
            for left in range(0, columns, width):
                down, across = min(height, rows - top), min(width, columns - left)
                hit = any(0 <= r - top < down and 0 <= c - left < across for r, c in outliers)
                taken += hit * down * across
                look = {"facecolor": _TAKEN if hit else PALE, "edgecolor": "white", "linewidth": 0.8}
                ax.add_patch(Rectangle((left, top), across, down, **look))
        for row, column in outliers:
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=BLACK))
        ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"{name}: {taken / rows / columns:.0%}", fontsize=9)
    colours = {"outlier": BLACK, "has its scale": _TAKEN, "has a scale of its own": PALE}
    return style.finished(figure, title, [Patch(facecolor=c, label=name) for name, c in colours.items()])


@style.styled
def code_shares(shares: Mapping[str, Mapping[int, float]], *, title: str, xlabel: str = "code") -> Figure:
    """{name: {code: share of the numbers}}, with the share above each bar, as percent."""
    if not shares or any(not parts for parts in shares.values()):
        raise ValueError(f"{len(shares)} panels, of which some are empty; give shares of codes for each")
    figure, panels = style.panels(shares, height=2.6)
    top = max(share for parts in shares.values() for share in parts.values())
    codes = sorted({code for parts in shares.values() for code in parts})
    for i, (ax, parts) in enumerate(zip(panels, shares.values())):
        percent = {code: 100 * share for code, share in parts.items()}
        ax.bar(list(percent), list(percent.values()), width=0.85, color=CYCLE[i % len(CYCLE)])
        for code, share in percent.items():
            if share >= 0.5:
                ax.text(code, share, f"{share:.0f}", ha="center", va="bottom", fontsize=7)
        ax.set(ylim=(0, 112 * top), xlim=(codes[0] - 0.6, codes[-1] + 0.6), xlabel=xlabel)
        ax.set_xticks(range(codes[0], codes[-1] + 1))
        ax.grid(axis="x", visible=False)
    panels[0].set_ylabel("% of the numbers")
    return style.finished(figure, title)
