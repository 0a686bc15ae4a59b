"""Where tokens go (lines to experts, choices of routers, bytes between ranks), and who has how much to do:
experts over a training, ranks before and after experts move."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, BLUE, CENTRED, CYCLE, PALE, PALE_BLUE, ink_on
from minitrain.systems.simulate.timeline import Timeline

_SHADES = LinearSegmentedColormap.from_list("share", ["white", style.SKY, style.BLUE, BLACK])
_COLOURS = [*CYCLE, style.YELLOW]
Table = Sequence[Sequence[float]]


@style.styled
def flow(table: Table, sources: Sequence[str], targets: Sequence[str], *, title: str, owners=()) -> Figure:
    """Lines as wide as the counts, table[source][target]; a box is as tall as what meets in it. Targets with
    one number in `owners`, a rank each, have one colour, and so have the lines to them."""
    owners, gap = list(owners) or [0] * len(targets), 0.05
    total = sum(map(sum, table)) or 1
    arriving = [sum(row[target] for row in table) for target in range(len(targets))]
    figure, ax = style.canvas(height=3.0)
    left, right = _stacked([sum(row) for row in table], total, gap), _stacked(arriving, total, gap)
    for x, boxes, names in ((0.0, left, sources), (1.0, right, targets)):
        for i, ((low, tall), name) in enumerate(zip(boxes, names, strict=True)):
            colour = CYCLE[owners[i] % len(CYCLE)] if x else "#666666"
            ax.add_patch(Rectangle((x - 0.012, low), 0.024, max(tall, 0.004), facecolor=colour, linewidth=0))
            place = {"ha": "left" if x else "right", "va": "center", "fontsize": 8}
            ax.text(x + (0.02 if x else -0.02), low + tall / 2, name, **place)
    begins, ends = [low for low, _ in left], [low for low, _ in right]
    for source, row in enumerate(table):
        for target, amount in enumerate(row):
            wide = amount / total
            if amount:
                a, b, colour = begins[source], ends[target], CYCLE[owners[target] % len(CYCLE)]
                corners = [(0.012, a), (0.988, b), (0.988, b + wide), (0.012, a + wide)]
                look = {"facecolor": colour, "alpha": 0.55, "edgecolor": "white", "linewidth": 0.5}
                ax.add_patch(Polygon(corners, **look))
            begins[source], ends[target] = begins[source] + wide, ends[target] + wide
    ax.set(xlim=(-0.25, 1.3), ylim=(1 + gap * max(len(left), len(right)), -0.03))
    ax.set_axis_off()
    ranks = sorted(set(owners)) if len(set(owners)) > 1 else []
    return style.finished(figure, title, {f"rank {r}'s experts": CYCLE[r % len(CYCLE)] for r in ranks})


def _stacked(amounts: Sequence[float], total: float, gap: float) -> list[tuple[float, float]]:
    """(top, height) of each box, one under the other."""
    heights = [amount / total for amount in amounts]
    return list(zip(accumulate((height + gap for height in heights), initial=0.0), heights))


@style.styled
def choices(panels: Mapping[str, Table], *, title: str) -> Figure:
    """{router: weights[token][expert]}, 0 where a token does not go. Dropped choices may be negative."""
    tokens, experts = len(next(iter(panels.values()))), len(next(iter(panels.values()))[0])
    side = min(0.3, (style.WIDTH - 0.6) / len(panels) / (experts + 1.2))
    figure, axes = style.grid_of_panels(1, len(panels), height=1.05 + side * tokens)
    for ax, (name, weights) in zip(axes, panels.items()):
        look = lambda x: (style.blend(PALE_BLUE, BLUE, min(1.0, x)) if x > 0 else "white", "")
        style.cells(ax, weights, look)
        ax.set_xticks(range(experts), [sum(row[e] > 0 for row in weights) for e in range(experts)])
        ax.set_title(name, fontsize=8)
    axes[0].set_yticks(range(tokens), [f"token {token}" for token in range(tokens)])
    return style.finished(figure, title, {"weight near 0": PALE_BLUE, "weight 1": BLUE})


@style.styled
def heat(table: Table, *, title: str, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Numbers in cells; the diagonal, what stays at home, is grey."""
    most = max((x for i, row in enumerate(table) for j, x in enumerate(row) if i != j), default=1) or 1
    figure, ax = style.canvas(height=0.9 + 0.42 * len(rows))
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    for i, row in enumerate(table):
        for j, amount in enumerate(row):
            colour = PALE if i == j else style.blend("#FFFFFF", BLUE, 0.9 * amount / most)
            ax.add_patch(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="#CCCCCC"))
            ax.text(j, i, f"{amount:,}", **CENTRED, fontsize=9, color=ink_on(colour))
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.xaxis.tick_top()
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return style.finished(figure, title)


@style.styled
def expert_loads(loads: Mapping[str, Sequence[Sequence[int]]], *, top_k: int, title: str) -> Figure:
    """{run: [steps][E] choices}; black is an expert that all tokens visit, white one that none does."""
    figure, panels = style.panels(loads, height=2.5)
    for ax, counts in zip(panels, loads.values()):
        counts = numpy.array(counts, dtype=float)
        share = top_k * counts / counts.sum(1, keepdims=True)  # of tokens
        look = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 1, "cmap": _SHADES}
        image = ax.imshow(share.T, **look)
        ax.set(xlabel="step", yticks=range(counts.shape[1]))
        ax.grid(visible=False)
    panels[0].set_ylabel("expert")
    figure.colorbar(image, ax=panels, label="share of tokens", pad=0.01)
    return style.finished(figure, title)


@style.styled
def placements(ranks_of: Mapping[str, Sequence[Mapping[int, float]]], *, title: str) -> Figure:
    """{placement: [{expert: rows} of each rank]}; a line at the mean, numbers of low bars above the pile."""
    figure, panels = style.panels(ranks_of, height=2.7)
    for ax, ranks in zip(panels, ranks_of.values()):
        mean = sum(sum(parts.values()) for parts in ranks) / len(ranks)
        for rank, parts in enumerate(ranks):
            start, low = 0.0, [str(expert) for expert, rows in parts.items() if rows <= 0.15 * mean]
            for expert, rows in parts.items():
                colour = _COLOURS[expert % len(_COLOURS)]
                ax.bar(rank, rows, bottom=start, color=colour, edgecolor="white", width=0.8)
                if str(expert) not in low:
                    ink = ink_on(colour)
                    ax.text(rank, start + rows / 2, str(expert), **CENTRED, fontsize=8, color=ink)
                start += rows
            above = max(start, mean) if start > 0.7 * mean else start  # clear of the line at the mean
            ax.annotate(
                ", ".join(low), (rank, above), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        ax.axhline(mean, color=BLACK, linestyle="--", linewidth=1)
        ax.set(xticks=range(len(ranks)), xlabel="rank")
        ax.grid(axis="x", visible=False)
    panels[0].set_ylabel("rows, by expert")
    return style.finished(figure, title)


@style.styled
def pairs(timelines: Mapping[str, Timeline], links: Mapping[str, str], *, title: str) -> Figure:
    """{order: `pair_timeline`}, coloured by microbatch: the last letter of a name. Rows for products and for
    `links` {axis: label}; hatched is a transfer while nothing computes."""
    figure, axes = style.stacked(len(timelines), 0.9 + 1.3 * len(timelines))
    for ax, (name, timeline) in zip(axes, timelines.items()):
        for y, axis in enumerate(["", *links]):
            spans = [span for span in timeline.spans[0] if getattr(span.event, "axis", "") == axis]
            for span in (span for span in spans if span.kind != "wait"):
                colour = style.SKY if getattr(span.event, "site", span.name).endswith("F") else BLUE
                bar = [(1e3 * span.start_s, 1e3 * span.duration_s)]
                ax.broken_barh(bar, (y - 0.4, 0.8), facecolor=colour, edgecolor="white")
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in timeline.exposed(0, axis)]
            ax.broken_barh(bars, (y - 0.4, 0.8), facecolor="none", hatch="/////", edgecolor="white")
        style.row_labels(ax, ["computing", *links.values()])
        ax.grid(axis="y", visible=True)
        exposed = 1e3 * timeline.exposed_communication_s
        ax.set_title(f"{name}: {1e3 * timeline.step_s:.1f} ms, {exposed:.1f} of them exposed", fontsize=9)
    ax.set_xlabel("time (ms)")
    handles = style.patches({"microbatch a, forward": style.SKY, "microbatch b, backward": BLUE})
    handles.append(Patch(facecolor=style.GREY, hatch="/////", edgecolor="white", label="nothing computes"))
    return style.finished(figure, title, handles)
