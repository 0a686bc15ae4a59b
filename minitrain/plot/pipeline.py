"""Pictures of pipelines: what each rank does when (`schedule`), how many activations it holds (`in_flight`).

Both take what `pipeline.simulate.simulate` returns; several are drawn below each other over the same time. A
box is an action: its colour is its kind, its number the microbatch, its shade the stage, if there are several
(later ones: forwards lighter, the others darker). A forward and a backward that run as one are a box of two
halves. Dots are idle time. To the right stands the most activations that the rank ever holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.plot import style
from minitrain.plot.style import CENTRED, COLOURS, CYCLE, GREY, WIDTH, Picture

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}


@style.styled
def schedule(*simulations, title="", peaks: Sequence | None = None, until: float | None = None) -> Figure:
    """Ranks down, time to the right. `peaks[i][rank]` stands beside a row of panel i; `until` cuts it off."""
    rows = [len(simulation.spans) for simulation in simulations]
    if not simulations or max(rows) > 16 or sum(rows) > 48:
        raise ValueError(f"{rows} ranks cannot be read; draw at most 16 ranks a panel and 48 in all")
    end = float(max(simulation.makespan for simulation in simulations) if until is None else until)
    figure = Picture(figsize=(WIDTH, 0.75 + 0.42 * len(rows) + 0.26 * sum(rows)))
    heights = [n + 1.2 for n in rows]
    panels = figure.subplots(len(rows), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    drawn = {"idle"}
    for ax, simulation, beside in zip(panels, simulations, peaks or [None] * len(rows)):
        drawn |= _panel(ax, simulation, end, beside)
    panels[-1].set_xlabel("time")
    return style.finished(figure, title, [style.swatch(what) for what in COLOURS if what in drawn])


def _panel(ax: Axes, simulation, end: float, beside: Sequence | None) -> set[str]:
    drawn, width = set(), min(float(simulation.makespan), end)
    for rank, spans in enumerate(simulation.spans):
        ax.add_patch(Rectangle((0, rank - 0.42), width, 0.84, **style.look_of("idle"), linewidth=0))
        stages = simulation.schedule.stages_of(rank)
        for entry, start, stop in spans:
            if start < end:
                drawn |= _box(ax, entry, rank, float(start), min(float(stop), end), stages, end)
        if beside is not None:
            ax.text(end * 1.01, rank, f"{float(beside[rank]):.3g}", va="center", fontsize=8)
    if beside is not None:
        ax.text(end * 1.01, -0.75, "peak", va="center", fontsize=7, color=GREY)
    bubble, makespan = simulation.bubble, simulation.makespan
    exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble.denominator < 1000 else ""
    time = str(makespan) if Fraction(makespan).denominator < 100 else f"{float(makespan):.4g}"
    title = f"{simulation.schedule.name}:  bubble {exact}{float(bubble):.1%}, makespan {time}"
    ax.set_title(title, fontsize=8.5, fontweight="normal")
    ax.set(xlim=(0, end))
    style.row_labels(ax, [f"rank {rank}" for rank in range(len(simulation.spans))])
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    return drawn


def _box(ax: Axes, entry, rank: int, start: float, stop: float, stages: list, end: float) -> set[str]:
    if hasattr(entry, "kind"):
        parts, fontsize = [(entry, -0.42, 0.84)], 7
    else:
        parts, fontsize = [(entry.forward, -0.42, 0.42), (entry.backward, 0.0, 0.42)], 5
    for action, below, height in parts:
        # A backward gets darker with its stage: a light one would look like a forward.
        towards = "#FFFFFF" if action.kind == "F" else "#000000"
        shade = 0.55 * stages.index(action.stage) / max(len(stages) - 1, 1)
        colour = style.blend(COLOURS[KINDS[action.kind]], towards, shade)
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
        ax.add_patch(Rectangle((start, rank + below), stop - start, height, **look))
        number = str(action.microbatch)
        if (stop - start) / end * WIDTH * 0.86 > 0.075 * len(number):
            x, y, ink = (start + stop) / 2, rank + below + height / 2, style.ink_on(colour)
            ax.text(x, y, number, **CENTRED, fontsize=fontsize, color=ink).set_in_layout(False)
    return {KINDS[action.kind] for action, _, _ in parts}


@style.styled
def in_flight(simulation, counts: Sequence[Sequence], *, title: str, limit: float | None = None) -> Figure:
    """Activations over time, a line a rank. `counts[rank][i]` is what the rank holds after its i-th entry."""
    figure, ax = style.canvas(height=2.6)
    end = float(simulation.makespan)
    for rank, (spans, held) in enumerate(zip(simulation.spans, counts)):
        takes = [getattr(span.entry, "kind", "F") in "FR" for span in spans]  # the others free at their end
        times = [float(span.start if take else span.end) for take, span in zip(takes, spans)]
        look = {"color": CYCLE[rank % len(CYCLE)], "linestyle": ["-", "--"][rank // len(CYCLE) % 2]}
        steps = [0.0, *map(float, held), float(held[-1])]
        ax.step([0.0, *times, end], steps, where="post", label=f"rank {rank}", **look)
    if limit is not None:
        ax.axhline(limit, color=GREY, linestyle=":", label="limit")
    ax.set(xlabel="time", ylabel="activations held", xlim=(0, end))
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])
