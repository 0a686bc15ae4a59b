"""Data parallelism: who keeps which part of what, when gradients travel, loss against their bytes."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minitrain.course.plot import style
from minitrain.course.plot.charts import transfers
from minitrain.course.plot.style import CENTRED, CYCLE
from minitrain.systems.simulate.timeline import join

# Bytes per parameter, Adam in mixed precision.
_SIZES = {"optimizer state": 12, "gradients": 2, "parameters": 2}
_TRAVEL = ("communication", "exposed communication")


@style.styled
def who_keeps(cut: Mapping[str, Sequence[str]], *, title: str) -> Figure:
    """{panel: the kinds of which each of 4 ranks keeps its piece only}; heights are bytes per parameter."""
    ranks, (figure, panels) = 4, style.panels(cut, height=3.3)
    for ax, kinds in zip(panels, cut.values()):
        for rank in range(ranks):
            bottom = 0.0
            for kind, size in _SIZES.items():
                for piece in range(ranks):
                    here = kind not in kinds or piece == rank
                    colour = style.colour_of(kind) if here else "white"
                    edges = {"color": colour, "edgecolor": "#CCCCCC", "linewidth": 0.5}
                    ax.bar(rank, size / ranks, bottom=bottom, width=0.8, **edges)
                    bottom += size / ranks
        held = sum(size / ranks if kind in kinds else size for kind, size in _SIZES.items())
        ax.set_xlabel(f"rank\n{held:g} bytes per parameter")
        ax.set_xticks(range(ranks))
        ax.grid(visible=False)
    panels[0].set(ylabel="bytes per parameter", yticks=(0, 12, 14, 16))
    absent = Patch(facecolor="white", edgecolor="#CCCCCC", label="kept by another rank")
    return style.finished(figure, title, [*map(style.swatch, reversed(_SIZES)), absent])


@style.styled
def summing(layers: int = 6, *, work=1.0, latency=0.7, transfer=0.5, bucket=2, title: str) -> Figure:
    """Backward over `layers`, the last one first, and its all-reduces: latency + transfer per layer each."""
    numbers = list(range(layers, 0, -1))
    done = layers * work
    buckets = [numbers[i : i + bucket] for i in range(0, layers, bucket)]
    full = [min(i + bucket, layers) * work for i in range(0, layers, bucket)]
    ways = {
        "one call for each\ngradient, afterwards": ([[n] for n in numbers], [done] * layers),
        "one call for all,\nafterwards": ([numbers], [done]),
        f"buckets of {bucket},\nduring backward": (buckets, full),
    }
    figure, ax = style.canvas(height=3.3)
    for row, (calls, ready) in enumerate(ways.values()):
        y, free = 2.6 * row, 0.0
        for place, number in enumerate(numbers):
            _box(ax, place * work, work, y, f"B{number}", "backward")
        for numbers_of_call, start in zip(calls, ready):
            start, length = max(start, free), latency + transfer * len(numbers_of_call)
            hidden = min(length, max(0.0, done - start))
            label = "+".join(f"g{number}" for number in numbers_of_call)
            if hidden:
                _box(ax, start, hidden, y + 1, label, "communication")
            if hidden < length:
                words = label if length - hidden > hidden else ""
                _box(ax, start + hidden, length - hidden, y + 1, words, "exposed communication")
            free = start + length
        ax.text(free + 0.1, y + 0.5, f"{free:g}", va="center", fontweight="bold")
        for lane, name in enumerate(("compute", "network")):
            ax.text(-0.1, y + lane, name, ha="right", va="center", fontsize=8)
    ax.set(xlim=(0, layers * (work + latency + transfer) + 0.8), ylim=(2.6 * len(ways) - 0.9, -0.6))
    ax.set(yticks=[2.6 * row + 0.5 for row in range(len(ways))], yticklabels=list(ways), xlabel="time")
    ax.tick_params(axis="y", length=0, pad=48)
    ax.grid(visible=False)
    return style.finished(figure, title, list(map(style.swatch, ("backward", *_TRAVEL))))


def _box(ax: Axes, start: float, length: float, y: float, label: str, what: str) -> None:
    ax.broken_barh([(start, length)], (y - 0.42, 0.84), **style.look_of(what), linewidth=0.6)
    behind = {"facecolor": style.colour_of(what), "edgecolor": "none", "pad": 1}
    ink = style.ink_on(style.colour_of(what))
    ax.text(start + length / 2, y, label, **CENTRED, fontsize=7, color=ink, bbox=behind if label else None)


@style.styled
def replayed(timelines: Mapping, *, title: str) -> Figure:
    """{name: a `simulate.timeline.Timeline`}: rank 0's computation and transfers, a step below the other."""
    figure, ax = style.canvas(height=0.9 + 0.75 * len(timelines))
    drawn = draw_replayed(ax, timelines)
    return style.finished(figure, title, [style.swatch(what) for what in style.COLOURS if what in drawn])


def draw_replayed(ax: Axes, timelines: Mapping) -> set[str]:
    """On axes: two lanes per step, its length behind them. Returns what was drawn."""
    longest, drawn = max(timeline.step_s for timeline in timelines.values()), set()
    unit, scale = style.unit_for(longest, "s")
    for row, timeline in enumerate(timelines.values()):
        y = 2.6 * row
        lanes = ("compute", _work(timeline)), ("network", transfers(timeline, 0))
        for lane, (label, pieces) in enumerate(lanes):
            ax.text(-0.008 * longest / scale, y + lane, label, ha="right", va="center", fontsize=8)
            for what, intervals in pieces.items():
                bars = join(intervals, gap=longest / 600)
                widths = [(start / scale, (end - start) / scale) for start, end in bars]
                ax.broken_barh(widths, (y + lane - 0.44, 0.88), **style.look_of(what), linewidth=0)
                drawn |= {what} if widths else set()
        end = f" {timeline.step_s / scale:.3g} {unit}"
        ax.text(timeline.step_s / scale, y + 0.5, end, va="center", fontweight="bold")
    ax.set(xlim=(0, 1.12 * longest / scale), ylim=(2.6 * len(timelines) - 0.9, -0.7))
    rates = " · ".join(dict.fromkeys(timeline.machine.said for timeline in timelines.values()))
    ax.set(xlabel=f"time ({unit}) · {rates}")
    ax.set(yticks=[2.6 * row + 0.5 for row in range(len(timelines))], yticklabels=list(timelines))
    ax.tick_params(axis="y", length=0, pad=48)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    return drawn


def _work(timeline) -> dict[str, list]:
    pieces: dict[str, list] = {}
    for span in timeline.spans[0]:
        if span.kind == "compute":
            phase = span.event.phase if span.event.phase in style.COLOURS else "compute"
            pieces.setdefault(phase, []).append((span.start_s, span.end_s))
    return pieces


@style.styled
def loss_against_bytes(points: Mapping[str, tuple[float, float, float | None]], title: str) -> Figure:
    """{what: (bytes a rank sends per step, loss with error feedback, loss without)}; of the first a line."""
    figure, ax = style.canvas(height=3.2)
    for colour, marker, (what, (sent, loss, without)) in zip(CYCLE, style.MARKERS, points.items()):
        ax.plot(sent, loss, marker, color=colour, label=what)
        if without is not None:
            ax.plot([sent, sent], [loss, without], color=colour, marker=marker, fillstyle="none", linewidth=1)
    ax.axhline(next(iter(points.values()))[1], color=style.GREY, linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel="bytes that a rank sends per step", ylabel="loss at the end", ylim=(0, None))
    ax.set(xticks=(500, 1000, 2000, 5000), xticklabels=("500", "1,000", "2,000", "5,000"))
    ax.minorticks_off()
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])
