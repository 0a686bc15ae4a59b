"""Pictures of who has how much to do: experts over a training, ranks before and after experts move."""

from collections.abc import Mapping, Sequence

import numpy
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CENTRED, CYCLE, DASHES, Series
from minitrain.systems.simulate.timeline import Timeline

_SHADES = LinearSegmentedColormap.from_list("share", ["white", style.SKY, style.BLUE, BLACK])
_COLOURS = [*CYCLE, style.YELLOW]


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
def balance_curves(ratios: Series, losses: Mapping[str, Mapping], *, limit: float, title: str) -> Figure:
    """Left the ratios by step under the largest there can be, right {run: {step: held-out loss}}."""
    figure = style.Picture(figsize=(style.WIDTH, 2.9))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, (name, ys) in enumerate(ratios.items()):
        look = {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i % len(DASHES)], "label": name}
        left.plot(range(1, len(ys) + 1), ys, **look)
        right.plot(list(losses[name]), list(losses[name].values()), marker=style.MARKERS[i], **look)
    left.axhline(limit, color=BLACK, linewidth=0.8)
    left.text(1, 1.02 * limit, "all tokens at the same experts", fontsize=8, va="bottom")
    left.axhline(1, color=style.GREY, linewidth=0.8)
    left.set(xlabel="step", ylabel="largest load / mean", ylim=(0.8, 1.1 * limit))
    right.set(xlabel="step", ylabel="held-out loss (nats per token)")
    return style.finished(figure, title, left.get_legend_handles_labels()[0])


@style.styled
def placements(ranks_of: Mapping[str, Sequence[Mapping[int, float]]], *, title: str) -> Figure:
    """{placement: [{expert: rows} of each rank]}; a line at the mean."""
    figure, panels = style.panels(ranks_of, height=2.7)
    for ax, ranks in zip(panels, ranks_of.values()):
        mean = sum(sum(parts.values()) for parts in ranks) / len(ranks)
        for rank, parts in enumerate(ranks):
            start = 0.0
            for expert, rows in parts.items():
                colour = _COLOURS[expert % len(_COLOURS)]
                ax.bar(rank, rows, bottom=start, color=colour, edgecolor="white", width=0.8)
                if rows > 0.15 * mean:
                    ink = style.ink_on(colour)
                    ax.text(rank, start + rows / 2, str(expert), **CENTRED, fontsize=8, color=ink)
                start += rows
        ax.axhline(mean, color=BLACK, linestyle="--", linewidth=1)
        ax.set(xticks=range(len(ranks)), xlabel="rank")
        ax.grid(axis="x", visible=False)
    panels[0].set_ylabel("rows, by expert")
    return style.finished(figure, title)


@style.styled
def pairs(timelines: Mapping[str, Timeline], links: Mapping[str, str], *, title: str) -> Figure:
    """{order: `pair_timeline`}, one under the other, coloured by microbatch (the last letter of a name); rows
    for products and for each of `links` {axis: its label}. Hatched is a transfer while nothing computes."""
    figure = style.Picture(figsize=(style.WIDTH, 0.9 + 1.3 * len(timelines)))
    colours = {"F": style.SKY, "B": style.BLUE, "W": style.BLUE}
    hidden = {"facecolor": "none", "hatch": "/////", "edgecolor": "white", "linewidth": 0}
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, timeline) in zip(axes, timelines.items()):
        rows = {"": 0} | {axis: y for y, axis in enumerate(links, 1)}
        for span in timeline.spans[0]:
            if span.kind != "wait":
                y = rows[span.event.axis if span.kind == "transfer" else ""] - 0.4
                bar = [(1e3 * span.start_s, 1e3 * span.duration_s)]
                whose = getattr(span.event, "site", span.name)[-1]
                ax.broken_barh(bar, (y, 0.8), facecolor=colours[whose], edgecolor="white")
        for axis in links:
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in timeline.exposed(0, axis)]
            ax.broken_barh(bars, (rows[axis] - 0.4, 0.8), **hidden)
        style.row_labels(ax, ["computing", *links.values()])
        exposed = 1e3 * timeline.exposed_communication_s
        ax.set_title(f"{name}: {1e3 * timeline.step_s:.1f} ms, {exposed:.1f} of them exposed", fontsize=9)
        ax.grid(axis="y", visible=False)
    ax.set_xlabel("time (ms)")
    names = {"F": "microbatch a, forward", "B": "microbatch b, backward"}
    handles = [Patch(facecolor=colours[whose], label=label) for whose, label in names.items()]
    handles.append(Patch(facecolor=style.GREY, hatch="/////", edgecolor="white", label="nothing computes"))
    return style.finished(figure, title, handles)
