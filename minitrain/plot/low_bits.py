"""Whose resolution an outlier takes, and which codes numbers get.

sharing        a matrix a panel: what has its scale in common with an outlier, for each kind of tile
code_shares    how often each code is used, a panel for each way to quantise
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minitrain.plot import style
from minitrain.plot.style import BLACK, CYCLE, PALE, VERMILLION


@style.styled
def sharing(
    shape: tuple[int, int],
    tiles: Mapping[str, tuple[int, int]],
    outliers: Sequence[tuple[int, int]],
    *,
    title: str,
) -> Figure:
    """{name: (height, width) of a tile}, 0 for the whole of a side; outliers are (row, column)."""
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
                colour = style.blend(VERMILLION, "white", 0.4) if hit else PALE
                ax.add_patch(
                    Rectangle((left, top), across, down, facecolor=colour, edgecolor="white", linewidth=0.8)
                )
        for row, column in outliers:
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=BLACK))
        ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"{name}\n{taken / rows / columns:.0%} of the numbers", fontsize=8)
    style.title_above(figure, title)
    legend = [Patch(facecolor=BLACK, label="outlier")]
    legend += [Patch(facecolor=style.blend(VERMILLION, "white", 0.4), label="has its scale")]
    style.legend_below(figure, [*legend, Patch(facecolor=PALE, label="has a scale of its own")])
    return figure


@style.styled
def code_shares(shares: Mapping[str, Mapping[int, float]], *, title: str, xlabel: str = "code") -> Figure:
    """{name: {code: share of the numbers}}, with the share above each bar, as percent."""
    if not shares or any(not parts for parts in shares.values()):
        raise ValueError(f"{len(shares)} panels, of which some are empty; give shares of codes for each")
    figure = style.Picture(figsize=(style.WIDTH, 2.6))
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    top = max(share for parts in shares.values() for share in parts.values())
    for i, (ax, (name, parts)) in enumerate(zip(panels, shares.items())):
        ax.bar(
            list(parts), [100 * share for share in parts.values()], width=0.85, color=CYCLE[i % len(CYCLE)]
        )
        for code, share in parts.items():
            if share >= 0.005:
                ax.text(code, 100 * share, f"{100 * share:.0f}", ha="center", va="bottom", fontsize=7)
        ax.set(ylim=(0, 112 * top), xlabel=xlabel)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_title(name, fontsize=9)
        ax.grid(axis="x", visible=False)
    panels[0].set_ylabel("% of the numbers")
    style.title_above(figure, title)
    return figure
