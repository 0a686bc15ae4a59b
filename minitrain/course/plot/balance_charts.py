"""Pictures of who has how much to do: experts over a training, ranks before and after experts move."""

from collections.abc import Mapping, Sequence

import numpy
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CENTRED, CYCLE
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
    """{order: `pair_timeline`}, coloured by microbatch: the last letter of a name. Rows for products and for
    `links` {axis: label}; hatched is a transfer while nothing computes."""
    figure = style.Picture(figsize=(style.WIDTH, 0.9 + 1.3 * len(timelines)))
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, timeline) in zip(axes, timelines.items()):
        for y, axis in enumerate(["", *links]):
            spans = [span for span in timeline.spans[0] if getattr(span.event, "axis", "") == axis]
            for span in (span for span in spans if span.kind != "wait"):
                colour = style.SKY if getattr(span.event, "site", span.name).endswith("F") else style.BLUE
                bar = [(1e3 * span.start_s, 1e3 * span.duration_s)]
                ax.broken_barh(bar, (y - 0.4, 0.8), facecolor=colour, edgecolor="white")
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in timeline.exposed(0, axis)]
            ax.broken_barh(bars, (y - 0.4, 0.8), facecolor="none", hatch="/////", edgecolor="white")
        style.row_labels(ax, ["computing", *links.values()])
        exposed = 1e3 * timeline.exposed_communication_s
        ax.set_title(f"{name}: {1e3 * timeline.step_s:.1f} ms, {exposed:.1f} of them exposed", fontsize=9)
    ax.set_xlabel("time (ms)")
    looks = {"microbatch a, forward": style.SKY, "microbatch b, backward": style.BLUE}
    handles = [Patch(facecolor=colour, label=label) for label, colour in looks.items()]
    handles.append(Patch(facecolor=style.GREY, hatch="/////", edgecolor="white", label="nothing computes"))
    return style.finished(figure, title, handles)
