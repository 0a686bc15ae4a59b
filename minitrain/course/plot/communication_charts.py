"""Pictures of chapter 25: the same step sent in other orders, and what a number costs in loss."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CYCLE, SKY, VERMILLION
from minitrain.systems.simulate.links import Run

_LAYERS = [*CYCLE[1:4], *CYCLE[5:]]  # of the network's lane; the device has forward's and backward's colours


@style.styled
def timelines(runs: Mapping[str, Run], title: str) -> Figure:
    """Runs of communication_order, one below the other: above the device, below it the network. Numbers are
    layers; a line marks the end."""
    figure, ax = style.canvas(height=0.9 + 0.62 * len(runs))
    last = float(max(run.end_s for run in runs.values()))
    for y, run in enumerate(runs.values()):
        for name in run.tasks:
            layer = int("".join(letter for letter in name.split(".")[0] if letter.isdigit()))
            network = run.tasks[name].lane == "network"
            colour = _LAYERS[layer % len(_LAYERS)] if network else SKY if name[0] == "F" else BLUE
            start, end = float(run.start(name)), float(run.end(name))
            middle = y + 0.2 if network else y - 0.18
            ax.barh(middle, end - start, 0.36, start, color=colour, edgecolor="white", linewidth=0.6)
            if end - start > 0.035 * last:
                said = name if not network else name.split(".")[0].replace("C", "")
                ink = style.ink_on(colour)
                ax.text((start + end) / 2, middle, said, color=ink, fontsize=7, **style.CENTRED)
        end = float(run.end_s)
        ax.plot([end, end], [y - 0.45, y + 0.45], color=VERMILLION, linewidth=1.5)
        ax.text(end + 0.01 * last, y, f"{end:g}", color=VERMILLION, va="center", weight="bold")
    style.row_labels(ax, list(runs))
    ax.set(xlim=(0, 1.06 * last), xlabel="seconds (simulated)")
    legend = {"forward F": SKY, "backward B": BLUE}
    legend |= {f"sum of layer {layer}": _LAYERS[layer] for layer in range(3)}
    return style.finished(figure, title, legend)


@style.styled
def loss_against_bytes(points: Mapping[str, tuple[float, float, float | None]], title: str) -> Figure:
    """{what: (bytes a rank sends per step, loss with error feedback, loss without)}; of the first a line."""
    figure, ax = style.canvas(height=3.2)
    for at, (colour, (what, (sent, loss, without))) in enumerate(zip(CYCLE * 2, points.items())):
        if without is not None:
            ax.plot([sent, sent], [loss, without], color=colour, linewidth=1)
            ax.plot(sent, without, "o", color=colour, fillstyle="none")
        ax.plot(sent, loss, "o", color=colour)
        look = dict(textcoords="offset points", fontsize=7, color=colour, **style.CENTRED)
        ax.annotate(what, (sent, loss), (0, -14 - 12 * (at % 3)), **look)
    ax.axhline(next(iter(points.values()))[1], color=style.GREY, linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel="bytes that a rank sends per step", ylabel="loss at the end")
    ax.margins(x=0.1)
    ax.set(ylim=(0, None), xticks=(500, 1000, 2000, 5000), xticklabels=("500", "1,000", "2,000", "5,000"))
    ax.minorticks_off()
    return style.finished(figure, title)
