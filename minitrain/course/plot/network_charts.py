"""Pictures of chapter 26: who meets on a cable, an all-reduce on many networks, queues, jobs that slide."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import (
    BLACK,
    BLUE,
    CENTRED,
    GREEN,
    ORANGE,
    PALE,
    PALE_BLUE,
    PURPLE,
    SKY,
    VERMILLION,
)

LINES = [BLUE, ORANGE, GREEN, PURPLE, SKY, BLACK]  # six that differ beside each other


@style.styled
def meeting(
    title: str = "Two flows of four on one uplink: half the rate for both, and a step waits for them",
) -> Figure:
    """Two leaves, four spines, four flows from left to right; two were hashed to one spine."""
    figure, ax = style.canvas(height=2.9)
    chosen = (0, 2, 2, 3)  # flow -> spine: one is left without work
    for spine in range(4):
        idle = spine not in chosen
        ax.text(
            1.5,
            3 - spine,
            f"spine {spine}{': idle' if idle else ''}",
            bbox=_box(PALE if idle else PALE_BLUE),
            **CENTRED,
        )
    for x, name in ((0.6, "leaf A"), (2.4, "leaf B")):
        ax.text(x, 1.5, name, bbox=_box(PALE_BLUE), **CENTRED)
    for flow, spine in enumerate(chosen):
        shared = chosen.count(spine) > 1
        look = {"color": VERMILLION if shared else BLUE, "linewidth": 2.4 if shared else 1.6}
        shift = 0.1 * (1.5 - flow)
        at = 1.5 + shift
        ax.plot([0, 0.48], [3 - flow, at], **look)
        ax.plot([0.72, 1.37], [at, 3 - spine + shift / 2], **look)
        ax.plot([1.63, 2.28], [3 - spine + shift / 2, at], **look)
        ax.plot([2.52, 3], [at, 3 - flow], **look)
        for x, name in ((-0.14, f"rank {flow}"), (3.14, f"rank {4 + flow}")):
            ax.text(x, 3 - flow, name, bbox=_box(PALE), **CENTRED)
    ax.set(xlim=(-0.45, 3.45), ylim=(-0.4, 3.4))
    ax.set_axis_off()
    return style.finished(figure, title, {"alone on its cable": BLUE, "meets another": VERMILLION})


def _box(colour: str) -> dict:
    return {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"}


@style.styled
def algorithms_on_networks(times: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """{network: {algorithm: time as a multiple of the bound}}: a table, dark where it takes long."""
    networks, algorithms = list(times), list(next(iter(times.values())))
    figure, ax = style.canvas(height=0.9 + 0.34 * len(networks))
    ax.grid(False)
    shades = [[min(times[network][algorithm], 6) for algorithm in algorithms] for network in networks]
    ax.imshow(shades, cmap="Blues", vmin=0, vmax=7, aspect="auto")
    for row, network in enumerate(networks):
        best = min(times[network].values())
        for column, (algorithm, value) in enumerate(times[network].items()):
            ink = "white" if shades[row][column] > 4 else "black"
            weight = "bold" if value <= best * 1.001 else "normal"
            ax.text(column, row, f"{value:.2f}", color=ink, weight=weight, **CENTRED)
    ax.set_xticks(range(len(algorithms)), algorithms)
    ax.set_yticks(range(len(networks)), networks)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    return style.finished(figure, title)


@style.styled
def uplinks(loads: Mapping[str, Sequence[float]], fair: float, title: str) -> Figure:
    """{route: [uplink] -> load}, sorted from the busiest down, beside the even share."""
    figure, axes = style.panels(loads, height=2.3)
    for ax, values in zip(axes, loads.values()):
        ordered = sorted(map(float, values), reverse=True)
        ax.bar(range(len(ordered)), ordered, color=[VERMILLION if one > fair else BLUE for one in ordered])
        ax.axhline(fair, color="black", linestyle=":", linewidth=1)
        ax.set(xlabel=f"uplinks, busiest first: {ordered[0]:.2f}", xticks=[])
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("load, in flows")
    return style.finished(figure, title, {"above the even share": VERMILLION, "at it or below": BLUE})


@style.styled
def queues(history: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """{law: [(us, KB queued)]}: the port that all senders share."""
    figure, ax = style.canvas(height=3.0)
    for number, (law, points) in enumerate(history.items()):
        us, kilobytes = zip(*points)
        look = {"color": LINES[number % len(LINES)], "linestyle": style.DASHES[number % len(style.DASHES)]}
        ax.plot(us, kilobytes, label=law, linewidth=1.5, **look)
    ax.set_yscale("symlog", linthresh=1, linscale=0.4)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set(xlabel="time (µs)", ylabel="bytes queued (KB)", ylim=(0, None))
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


@style.styled
def sliding(sends: Mapping[str, Sequence[Sequence[tuple[float, float]]]], title: str) -> Figure:
    """{law: [job] -> [(start, end) of what it sends]}: a lane per job."""
    figure, axes = style.stacked(len(sends), height=0.5 + 0.95 * len(sends))
    for ax, (law, jobs) in zip(axes, sends.items()):
        for lane, spans in enumerate(jobs):
            bars = [(start, end - start) for start, end in spans]
            ax.broken_barh(bars, (lane - 0.4, 0.8), color=(BLUE, ORANGE)[lane % 2])
        style.row_labels(ax, [f"job {job}" for job in range(len(jobs))])
        ax.set_title(law, fontsize=9, fontweight="normal")
    axes[-1].set_xlabel("time (ms)")
    return style.finished(figure, title, {"job 0 sends": BLUE, "job 1 sends": ORANGE})
