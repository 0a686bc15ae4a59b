"""What a narrow format can say, what a narrow sum loses, whose resolution an outlier takes."""

from collections.abc import Mapping, Sequence
from math import floor, log2

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.charts import bars_by_kind, lines
from minitrain.course.plot.style import BLACK, CENTRED, CYCLE, GREY, ORANGE, PALE, SKY, VERMILLION, Series

Pair = tuple[int, int]
_TAKEN = style.blend(VERMILLION, "white", 0.4)


@style.styled
def number_lines(values: Series, *, title: str, subnormal_below: Mapping | None = None) -> Figure:
    """{format: its numbers}; the positive ones are drawn, on a scale where each doubling is as wide as the
    next. What is below `subnormal_below` of a format is grey."""
    rows = {name: sorted({x for x in numbers if 0 < x < float("inf")}) for name, numbers in values.items()}
    for name, numbers in rows.items():
        if not 0 < len(numbers) <= 300:
            found = f"{name} has {len(numbers)} positive numbers"
            raise ValueError(f"{found}, which cannot be read as a picture; draw 1 to 300, of 8 bits or fewer")
    figure, ax = style.canvas(height=0.9 + 0.42 * len(rows))
    smallest, largest = (pick(pick(row) for row in rows.values()) for pick in (min, max))
    for y, (name, numbers) in enumerate(rows.items()):
        first = (subnormal_below or {}).get(name, 0.0)
        colours = [GREY if x < first else CYCLE[y % len(CYCLE)] for x in numbers]
        ax.vlines(numbers, y - 0.3, y + 0.3, colors=colours, linewidth=0.9)
        look = {"textcoords": "offset points", "va": "center", "fontsize": 7}
        ax.annotate(f"{numbers[-1]:g}", (numbers[-1], y), (4, 0), **look)
    style.row_labels(ax, list(rows))
    ax.set_xscale("log", base=2)
    ax.set(xlim=(smallest / 1.5, largest * 2.0 ** (1 + 0.1 * (log2(largest) - floor(log2(smallest))))))
    return style.finished(figure, title)


def error_by_length(lengths: Sequence, errors: Series, *, title: str, bounds: Series | None = None) -> Figure:
    """Relative error at each length K, both axes logarithmic; an error of 0 leaves a gap."""
    for name, ys in {**errors, **(bounds or {})}.items():
        if len(ys) != len(lengths):
            raise ValueError(f"{name} has {len(ys)} errors for {len(lengths)} lengths; give one for each")
    drawn = {name: [y or float("nan") for y in ys] for name, ys in errors.items()}
    axes = {"xlabel": "numbers in the sum, K", "ylabel": "relative error", "log": "xy"}
    return lines(lengths, drawn, **axes, title=title, formulas=bounds)


def memory_bars(rows: Mapping[str, Mapping[str, int]], parameters: int, *, title: str) -> Figure:
    """{policy: {kind: bytes}} of a model with so many parameters (precision.mixed.bytes_by_kind)."""
    if parameters < 1:
        raise ValueError(f"parameters={parameters}; give the number that the bytes are of, 1 or more")
    kinds = dict.fromkeys(kind for parts in rows.values() for kind, held in parts.items() if held)
    shares = {name: {kind: parts.get(kind, 0) / parameters for kind in kinds} for name, parts in rows.items()}
    return bars_by_kind(shares, title=title, unit="bytes per parameter")


@style.styled
def magnitudes(shares: Mapping[str, Mapping], formats: Mapping[str, tuple], *, title: str) -> Figure:
    """{kind: {exponent: share of its numbers}}, a panel each; below, of each format its smallest number, its
    smallest normal and its largest: what lies between the first two is pale, it has fewer bits."""
    if not shares or not formats:
        raise ValueError(f"{len(shares)} kinds and {len(formats)} formats; give at least one of each")
    heights = [0.62] * len(shares) + [0.25 + 0.24 * len(formats)]
    figure, (*panels, below) = style.stacked(len(heights), 0.6 + sum(heights), heights)
    for i, (ax, (kind, parts)) in enumerate(zip(panels, shares.items())):
        ax.bar(list(parts), [100 * share for share in parts.values()], width=0.9, color=CYCLE[i % len(CYCLE)])
        ax.set(yticks=[])
        ax.set_ylabel(kind, rotation=0, ha="right", va="center", fontsize=8)
    for y, (smallest, normal, largest) in enumerate(formats.values()):
        ends = [log2(x) for x in (smallest, normal, largest)]
        below.barh(y, ends[1] - ends[0], left=ends[0], height=0.6, color=PALE)
        below.barh(y, ends[2] - ends[1], left=ends[1], height=0.6, color=GREY)
    style.row_labels(below, list(formats))
    below.set(xlabel="power of two")
    return style.finished(figure, title)


@style.styled
def gaps(of: Series, *, title: str, xlabel: str) -> Figure:
    """{name: a gap per seed}: a dot each, and a bar from the least to the most; 0 is the reference."""
    if not all(map(len, of.values())):
        raise ValueError(f"{', '.join(name for name in of if not len(of[name]))}: no gap; give one per seed")
    figure, ax = style.canvas(height=0.9 + 0.27 * len(of))
    ax.use_sticky_edges = False
    ax.axvline(0, color=GREY, linewidth=1)
    for y, xs in enumerate(of.values()):
        ax.barh(y, max(xs) - min(xs), left=min(xs), height=0.55, color=style.blend(SKY, "white", 0.5))
        ax.plot(xs, [y] * len(xs), "o", color=style.BLUE, markersize=4)
    style.row_labels(ax, list(of))
    ax.set_xlabel(xlabel)
    return style.finished(figure, title)


@style.styled
def contractions(products: Sequence[tuple[str, tuple, tuple]], *, title: str) -> Figure:
    """(name, left, right): an operand is (label, rows, columns, tile height, tile width), sizes in units of
    the picture, named ("M", 4). What is summed over has the same name, left across and right down: in red."""
    figure = style.Picture(figsize=(style.WIDTH, 2.5))
    for ax, (name, left, right) in zip(figure.subplots(1, len(products), squeeze=False)[0], products):
        if left[2] != right[1]:
            raise ValueError(f"{name}: {left[2]} across and {right[1]} down; sum over one of the two names")
        at = 0.0
        for (label, (row, down), (column, across), height, width), colour in ((left, SKY), (right, ORANGE)):
            for y in range(0, down, height):
                for x in range(0, across, width):
                    size = min(width, across - x), min(height, down - y)
                    ax.add_patch(Rectangle((at + x, y), *size, facecolor=colour, edgecolor="white"))
            ax.text(at + across / 2, down / 2, label, **CENTRED, fontsize=11, fontweight="bold")
            above = column, at + across / 2, -0.25, "center", "bottom"
            for text, x, y, ha, va in (above, (row, at - 0.2, down / 2, "right", "center")):
                summed = dict(color=VERMILLION, fontweight="bold") if text == left[2][0] else {}
                ax.text(x, y, text, ha=ha, va=va, fontsize=9, **summed)
            at += across + 1.4
        tallest = max(left[1][1], right[1][1])
        ax.set(xlim=(-1, at - 1), ylim=(tallest + 0.3, -1.2), aspect="equal")
        ax.set_title(name, fontsize=9)
        ax.set_anchor("NW")
        ax.set_axis_off()
    return style.finished(figure, title)


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
    meaning = {"outlier": BLACK, "has the outlier's scale": _TAKEN, "has another scale": PALE}
    return style.finished(figure, title, meaning)


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
