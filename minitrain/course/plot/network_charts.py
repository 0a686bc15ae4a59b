"""Pictures of chapter 26: who meets on a cable, an all-reduce on many networks."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, PALE, PALE_BLUE, VERMILLION


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
    algorithms = list(next(iter(times.values())))
    figure, ax = style.canvas(height=0.9 + 0.34 * len(times))
    look = lambda value: (style.blend("#FFFFFF", BLUE, min(value, 6) / 7), f"{value:.2f}")
    style.cells(ax, [list(row.values()) for row in times.values()], look, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.xaxis.tick_top()
    ax.set(xticks=range(len(algorithms)), xticklabels=algorithms, aspect="auto")
    ax.set(yticks=range(len(times)), yticklabels=list(times))
    return style.finished(figure, title)
