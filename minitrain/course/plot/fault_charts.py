"""Pictures of chapters 20 and 21: where detectors listen, who is slow, and what a death finds."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, GREEN, ORANGE, SKY, VERMILLION


def step_of(ax: Axes, *parts: str) -> None:
    """The four parts of a step, one beside the other."""
    ax.set_axis_off()
    for at, (part, colour) in enumerate(zip(parts, (SKY, BLUE, ORANGE, GREEN))):
        ax.barh(0, 1, left=at, height=0.65, color=colour, edgecolor="white")
        ax.text(at + 0.5, 0, part, color=style.ink_on(colour), **CENTRED)


@style.styled
def listening(title: str = "One step of a rank: five faults that raise no error, and who notices") -> Figure:
    """The parts of a step, under each the fault that is planted there in the chapter, and its detector."""
    figure, ax = style.canvas(height=2.7)
    step_of(ax, "forward", "backward", "sums", "update")
    faults = (  # at which part of the step, its detector, what is compared
        ("stopped", 0.5, "heartbeat", "does every rank still beat?"),
        ("slow", 1.5, "local time", "who needs longer, waiting left out?"),
        ("a bad link", 2.3, "delay matrix", "which row, column or cell?"),
        ("out of step", 2.75, "flight recorder", "who makes another call?"),
        ("a wrong number", 3.5, "checksums", "do replicas agree?"),
    )
    for row, (fault, at, detector, question) in enumerate(faults, start=1):
        ax.plot([at, at], [-0.35, -row], color=VERMILLION, linewidth=1)
        ax.plot(at, -row, "X", color=VERMILLION, markersize=7)
        ax.text(at - 0.12, -row, fault, ha="right", va="center")
        ax.text(4.15, -row, f"{detector}: {question}", va="center", color=style.BLACK)
    ax.text(4.15, 0, "detector: what it asks", va="center", weight="bold")
    ax.set(xlim=(-0.4, 7.6), ylim=(-5.6, 0.6))
    return style.finished(figure, title)


@style.styled
def heat_maps(maps: Mapping[str, np.ndarray], *, xlabel: str, ylabel: str, title: str, marks={}) -> Figure:
    """Milliseconds as colours, dark is long; `marks` {name: [(row, column)]} are framed."""
    figure, axes = style.panels(maps, height=2.6)
    largest = max(float(values.max()) for values in maps.values())
    for ax, (name, values) in zip(axes, maps.items()):
        style.cells(ax, values, lambda x: (style.blend("#FFFFFF", BLUE, x / largest), f"{1e3 * abs(x):.0f}"))
        for row, column in marks.get(name, ()):
            ax.plot(column, row, "s", markersize=25, fillstyle="none", color=VERMILLION, markeredgewidth=1.6)
        ax.set(xlabel=xlabel, xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    axes[0].set_ylabel(ylabel)
    return style.finished(figure, title)


@style.styled
def commit(title: str = "A death at each point of a step, and what the survivors do") -> Figure:
    """The parts of a step; below them who has entered and who has passed the vote, and what follows."""
    figure, ax = style.canvas(height=2.0)
    step_of(ax, "forward", "backward, sums", "vote", "update")
    for left, right, said, then in (
        (0.02, 2.45, "nobody has passed the vote", "the step is made again by those who are left"),
        (2.55, 3.98, "somebody has passed", "all have entered: all update"),
    ):
        ax.annotate("", (right, -0.75), (left, -0.75), arrowprops={"arrowstyle": "<->", "color": VERMILLION})
        ax.text((left + right) / 2, -1.05, said, weight="bold", **CENTRED)
        ax.text((left + right) / 2, -1.4, then, **CENTRED)
    ax.set(xlim=(-0.1, 4.3), ylim=(-1.7, 0.4))
    return style.finished(figure, title)
