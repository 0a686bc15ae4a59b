"""Pictures of chapter 26: who meets on a cable, an all-reduce on many networks, queues, jobs that slide."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, ORANGE, PALE, PALE_BLUE, VERMILLION


@style.styled
def meeting() -> Figure:
    """Two leaves, four spines, four flows from left to right; two were hashed to one spine."""
    title = "Two flows of four on one uplink: half the rate for both, and a step waits for them"
    figure, ax = style.canvas(height=2.9)
    chosen = (0, 2, 2, 3)  # flow -> spine: one is left without work
    boxes = [(0.6, 1.5, "leaf A", PALE_BLUE), (2.4, 1.5, "leaf B", PALE_BLUE)]
    for spine in range(4):
        name, colour = (f"spine {spine}", PALE_BLUE) if spine in chosen else (f"spine {spine}: idle", PALE)
        boxes.append((1.5, 3 - spine, name, colour))
    for flow, spine in enumerate(chosen):
        alone, shift = chosen.count(spine) == 1, 0.1 * (1.5 - flow)
        y = [3 - flow, 1.5 + shift, 3 - spine + shift / 2, 1.5 + shift, 3 - flow]
        colour, width = (BLUE, 1.6) if alone else (VERMILLION, 2.4)
        ax.plot([0, 0.6, 1.5, 2.4, 3], y, color=colour, linewidth=width)
        boxes += [(-0.14, 3 - flow, f"rank {flow}", PALE), (3.14, 3 - flow, f"rank {4 + flow}", PALE)]
    for x, y, name, colour in boxes:
        box = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"}
        ax.text(x, y, name, bbox=box, **CENTRED)
    ax.set(xlim=(-0.45, 3.45), ylim=(-0.4, 3.4))
    ax.set_axis_off()
    return style.finished(figure, title, {"alone on its cable": BLUE, "meets another": VERMILLION})


@style.styled
def algorithms_on_networks(times: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """{network: {algorithm: time as a multiple of the bound}}: a table, dark where it takes long."""
    networks, algorithms = list(times), list(next(iter(times.values())))
    figure, ax = style.canvas(height=0.9 + 0.34 * len(networks))
    shades = [[min(value, 6) for value in row.values()] for row in times.values()]
    ax.imshow(shades, cmap="Blues", vmin=0, vmax=7, aspect="auto")
    for at, row in enumerate(times.values()):
        for column, value in enumerate(row.values()):
            look = {"color": "white" if value > 4 else "black"}
            look["weight"] = "bold" if value <= min(row.values()) * 1.001 else "normal"
            ax.text(column, at, f"{value:.2f}", **look, **CENTRED)
    ax.set_xticks(range(len(algorithms)), algorithms)
    ax.set_yticks(range(len(networks)), networks)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
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
    colours = [*style.CYCLE[:5], style.BLACK]  # six that differ beside each other
    for number, (law, points) in enumerate(history.items()):
        dash = style.DASHES[number % len(style.DASHES)]
        ax.plot(*zip(*points), dash, color=colours[number % 6], label=law, linewidth=1.5)
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
