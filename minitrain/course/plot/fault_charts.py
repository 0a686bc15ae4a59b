"""Pictures of chapter 20: where detectors listen, who is slow, which check sees which flip."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, GREEN, GREY, ORANGE, SKY, VERMILLION

PARTS = {"forward": SKY, "backward": BLUE, "sums": ORANGE, "update": GREEN}
# (fault, at which part of the step, its detector, what is compared)
LISTENING = (
    ("stopped", 0.5, "heartbeat", "does every rank still beat?"),
    ("slow", 1.5, "local time", "who needs longer, waiting left out?"),
    ("a bad link", 2.3, "delay matrix", "which row, column or cell?"),
    ("elsewhere", 2.75, "flight recorder", "who makes another call?"),
    ("a wrong number", 3.5, "checksums", "do replicas agree?"),
)


@style.styled
def listening(title: str = "One step of a rank: five faults that raise no error, and who notices") -> Figure:
    """The parts of a step, under each the fault that is planted there in the chapter, and its detector."""
    figure, ax = style.canvas(height=2.7)
    for at, (part, colour) in enumerate(PARTS.items()):
        ax.barh(0, 1, left=at, height=0.7, color=colour, edgecolor="white")
        ax.text(at + 0.5, 0, part, color="white" if part != "forward" else "black", **CENTRED)
    for row, (fault, at, detector, question) in enumerate(LISTENING, start=1):
        ax.plot([at, at], [-0.35, -row], color=VERMILLION, linewidth=1)
        ax.plot(at, -row, "X", color=VERMILLION, markersize=7)
        ax.text(at - 0.12, -row, fault, ha="right", va="center")
        ax.text(4.15, -row, f"{detector}: {question}", va="center", color=style.BLACK)
    ax.text(4.15, 0, "detector: what it asks", va="center", weight="bold")
    ax.set(xlim=(-0.4, 7.6), ylim=(-5.6, 0.6))
    ax.set_axis_off()
    return style.finished(figure, title)


@style.styled
def heat_maps(maps: Mapping[str, np.ndarray], *, xlabel: str, ylabel: str, title: str, marks=()) -> Figure:
    """Milliseconds as colours, dark is long; `marks` {name: [(row, column)]} are framed."""
    figure, axes = style.panels(maps, height=2.6)
    largest = max(float(values.max()) for values in maps.values())
    marks = dict(marks)
    for ax, (name, values) in zip(axes, maps.items()):
        ax.grid(False)
        ax.imshow(1e3 * values, cmap="Blues", vmin=0, vmax=1e3 * largest, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            ink = "white" if value > 0.6 * largest else "black"
            ax.text(column, row, f"{1e3 * abs(value):.0f}", fontsize=7, color=ink, **CENTRED)
        for row, column in marks.get(name, ()):
            ax.plot(column, row, "s", markersize=17, fillstyle="none", color=VERMILLION, markeredgewidth=1.6)
        ax.set(xlabel=xlabel, xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    axes[0].set_ylabel(ylabel)
    return style.finished(figure, title)


@style.styled
def seen_by(table: Mapping[str, Mapping[str, bool]], *, title: str) -> Figure:
    """{fault: {detector: has it noticed}}: a filled circle is yes, an empty one no."""
    faults, detectors = list(table), list(next(iter(table.values())))
    figure, ax = style.canvas(height=0.9 + 0.34 * len(faults))
    for row, fault in enumerate(faults):
        for column, detector in enumerate(detectors):
            seen = table[fault][detector]
            ax.plot(
                column,
                row,
                "o",
                markersize=11,
                color=BLUE if seen else GREY,
                fillstyle="full" if seen else "none",
            )
            ax.text(column + 0.13, row, "seen" if seen else "not seen", va="center", fontsize=8)
    ax.set(xlim=(-0.4, len(detectors) - 0.4), ylim=(len(faults) - 0.5, -0.5))
    ax.set_xticks(range(len(detectors)), detectors)
    ax.set_yticks(range(len(faults)), faults)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)
    return style.finished(figure, title)


def account(outcomes: Mapping[str, tuple]) -> dict[str, dict[str, float]]:
    """{row: simulate.failures.Outcome} in per cent of the time that passed, for `charts.bars_by_kind`."""
    names = ("useful", "saving", "lost work", "detecting and restarting")
    return {
        row: {name: 100 * s / sum(one[:4]) for name, s in zip(names, one[:4])}
        for row, one in outcomes.items()
    }
