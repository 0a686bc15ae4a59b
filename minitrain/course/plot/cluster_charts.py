"""Pictures of chapter 27: who has which devices when."""

from collections.abc import Mapping, Sequence
from math import inf

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import CENTRED, CYCLE, WIDTH

Box = tuple[float, float, str, float, float, bool]  # start, end, name; bottom, height: parts of 1; works?


def unfinished(jobs: Sequence, outcome, hours: Sequence[float]) -> list[int]:
    """How many jobs have arrived and not ended, at each hour."""
    ends = {job: job.at_s + outcome.jct_s[job.name] for job in jobs}
    return [sum(job.at_s <= 3600 * hour < ends[job] for job in jobs) for hour in hours]


def lanes(outcome, nodes: Sequence) -> list[list[Box]]:
    """[node] -> boxes of jobs, as high as their part of its devices; endless if jobs are stuck."""
    found: list[dict] = [{} for _ in nodes]  # (where it lies, until when) -> box, to be longer
    until = inf if outcome.stuck else outcome.makespan_s
    for (start, shares), end in zip(outcome.history, [*(at for at, _ in outcome.history[1:]), until]):
        bottom = [0.0] * len(nodes)
        for name, share in shares.items():
            for node, count in share.devices:
                height = count * share.part / nodes[node].devices
                lies = name, bottom[node], height, share.rate > 0
                before = found[node].pop((lies, start), None)
                found[node][lies, end] = (before[0] if before else start, end, *lies)
                bottom[node] += height
    return [list(boxes.values()) for boxes in found]


@style.styled
def devices_over_time(panels: Mapping, labels: Sequence[str], *, title: str, xlabel="time (s)") -> Figure:
    """{panel: [lane] -> boxes}, a colour for each name, a pale one where nothing works."""
    every = [box for rows in panels.values() for boxes in rows for box in boxes]
    names, end = list(dict.fromkeys(box[2] for box in every)), max(box[1] for box in every if box[1] < inf)
    colours = {name: CYCLE[i % len(CYCLE)] for i, name in enumerate(names)}
    figure, axes = style.stacked(len(panels), height=0.8 + len(panels) * (0.3 + 0.4 * len(labels)))
    for ax, (panel, rows) in zip(axes, panels.items()):
        for row, boxes in enumerate(rows):
            ax.broken_barh([(0, end)], (row - 0.44, 0.88), **style.look_of("idle"), linewidth=0)
            for start, stop, name, bottom, height, works in boxes:
                colour = colours[name] if works else style.blend("#FFFFFF", colours[name], 0.35)
                low, tall, stop = row + 0.44 - 0.88 * (bottom + height), 0.88 * height, min(stop, end)
                look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
                ax.add_patch(Rectangle((start, low), stop - start, tall, **look))
                said = name if works else f"{name} has these and waits"
                if (stop - start) / end * WIDTH > 0.12 * len(said) and tall > 0.2:
                    ink = {"fontsize": 7, "color": style.ink_on(colour)}
                    ax.text((start + stop) / 2, low + tall / 2, said, **CENTRED, **ink)
        style.row_labels(ax, labels)
        ax.set_title(panel, fontsize=9, fontweight="normal")
        ax.set(xlim=(0, end))
    axes[-1].set_xlabel(xlabel)
    return style.finished(figure, title, [*style.patches(colours), style.swatch("idle")])
