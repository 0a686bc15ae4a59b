"""Pictures of what a pipeline schedule is made of: its building block, and what its memory buys.

A building block is what every rank does with one microbatch. A schedule repeats it, a fixed time later for
each microbatch, so its slope says how long an activation is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import CENTRED, COLOURS, CYCLE, MARKERS

FORWARD, INPUT = COLOURS["forward"], COLOURS["input gradient"]
HELD = {"early": "#BBD9EC", "late": "#E3CBE0"}


@style.styled
def building_blocks(blocks: Mapping[str, Sequence], *, title: str, period: int = 6) -> Figure:
    """A panel per schedule: ranks down, time to the right, the way of microbatch 0 as a line.

    blocks[name][r] = starts of F of stage r, F of stage 2p-1-r, I of stage 2p-1-r, I of stage r; a unit each.
    A bar reaches from a stage's F to its I: so long is its activation held. `period` is the time between two
    microbatches; a rank's bars over it are the activations of stages that it holds at a time."""
    if not blocks or any(not 2 <= len(ranks) <= 8 for ranks in blocks.values()):
        raise ValueError("building_blocks: give one block or more, of 2 to 8 ranks")
    end = 1.12 * (1 + max(times[-1] for ranks in blocks.values() for times in ranks))
    rows = sum(map(len, blocks.values()))
    figure = style.Picture(figsize=(style.WIDTH, 0.8 + 0.36 * len(blocks) + 0.3 * rows))
    heights = [len(ranks) + 0.6 for ranks in blocks.values()]
    panels = figure.subplots(len(blocks), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (name, ranks) in zip(panels, blocks.items()):
        p = len(ranks)
        for r, (down, up, late, early) in enumerate(ranks):
            for at, until, below, kind in ((down, early, -0.42, "early"), (up, late, 0.21, "late")):
                ax.add_patch(Rectangle((at, r + below), until - at + 1, 0.21, color=HELD[kind], linewidth=0))
            boxes = (
                (down, r, FORWARD),
                (up, 2 * p - 1 - r, FORWARD),
                (late, 2 * p - 1 - r, INPUT),
                (early, r, INPUT),
            )
            for at, stage, colour in boxes:
                ax.add_patch(Rectangle((at, r - 0.3), 1, 0.6, facecolor=colour, edgecolor="white", zorder=2))
                look = {"fontsize": 7, "color": style.ink_on(colour), "zorder": 3}
                ax.text(at + 0.5, r, str(stage), **CENTRED, **look)
            held = (early - down + late - up) / period
            ax.text(end, r, f"{held:.2g} ", ha="right", va="center", fontsize=8)
        way = [
            (ranks[r][leg] + 0.5, r) for leg in range(4) for r in (range(p)[::-1] if leg % 2 else range(p))
        ]
        ax.plot(*zip(*way), color=style.BLACK, linewidth=0.8, zorder=1.5)
        ax.text(end, -0.75, "stages held", ha="right", va="center", fontsize=7, color=style.GREY)
        ax.set_title(name, fontsize=8.5, fontweight="normal")
        ax.set(xlim=(0, end))
        style.row_labels(ax, [f"rank {r}" for r in range(p)])
        ax.grid(visible=False)
        ax.tick_params(axis="y", length=0, labelsize=8)
    panels[-1].set_xlabel("time of microbatch 0, in units of one F, I or W")
    swatches = [
        Patch(facecolor=FORWARD, label="forward of the numbered stage"),
        Patch(facecolor=INPUT, label="input gradient"),
        Patch(facecolor=HELD["early"], label="held for the stage on the way down"),
        Patch(facecolor=HELD["late"], label="held for the stage on the way up"),
    ]
    return style.finished(figure, title, swatches)


@style.styled
def memory_bought(
    limits: Sequence, curves: Mapping[str, Sequence[float]], points: Mapping[str, tuple], *, title: str
) -> Figure:
    """Curves over the memory limit, and schedules as points: {name: (most microbatches held, overhead)}."""
    figure, ax = style.canvas(height=3.4)
    for i, (name, values) in enumerate(curves.items()):
        ax.plot(limits, values, color=CYCLE[i], linewidth=1.2, label=name)
    for i, (name, (held, overhead)) in enumerate(points.items()):
        look = {"marker": MARKERS[i % len(MARKERS)], "color": CYCLE[(i + len(curves)) % len(CYCLE)]}
        ax.plot(held, overhead, linestyle="none", markersize=8, **look, label=name)
    highest = max(overhead for _, overhead in points.values())
    ax.set(xlabel="microbatches that a rank may hold (activations of 1/p of the model)")
    ax.set(ylabel="idle time (own span) / work", ylim=(-0.04 * highest, 2.2 * highest))
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])
