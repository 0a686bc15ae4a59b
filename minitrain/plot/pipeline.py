"""Pictures of pipelines: what each rank does when (`schedule`), and how many activations it holds meanwhile (`in_flight`).

Both take what `pipeline.simulate.simulate` returns, one or several, drawn below each other over the same time. A box is an action:
its colour is its kind, its number the microbatch, its shade the stage, if a rank has several (later ones: forwards lighter, the
others darker). A pair of a forward and a backward that run as one is a box of two halves. Dots are idle time. To the right stands
the most activations that the rank ever holds. Raises ValueError for more ranks or time than can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.plot.style import (
    COLOURS,
    CYCLE,
    GREY,
    HATCHES,
    PALE,
    WIDTH,
    Picture,
    blend,
    in_house_style,
    ink_on,
    legend_below,
    swatch,
    title_above,
)

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}


@in_house_style
def schedule(
    *simulations, title: str = "", peaks: Sequence[Sequence] | None = None, until: float | None = None
) -> Figure:
    """Ranks down, time to the right. `peaks[i][rank]` is what stands beside a row of panel i; `until` cuts a long run off."""
    rows = [len(simulation.spans) for simulation in simulations]
    if not simulations or max(rows) > 16 or sum(rows) > 48:
        raise ValueError(
            f"{rows} ranks in {len(simulations)} panels cannot be read; at most 16 ranks a panel and 48 in all"
        )
    end = float(max(simulation.makespan for simulation in simulations) if until is None else until)
    figure = Picture(figsize=(WIDTH, 0.75 + 0.42 * len(rows) + 0.26 * sum(rows)))
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=[n + 1.2 for n in rows])[
        :, 0
    ]
    drawn: set[str] = set()
    for ax, simulation, beside in zip(panels, simulations, peaks or [None] * len(rows)):
        drawn |= _panel(ax, simulation, end, beside)
    panels[-1].set_xlabel("time")
    if title:
        title_above(figure, title)
    legend_below(figure, [swatch(what) for what in COLOURS if what in drawn | {"idle"}])
    return figure


def _panel(ax: Axes, simulation, end: float, beside: Sequence | None) -> set[str]:
    drawn, ranks, width = set(), len(simulation.spans), float(simulation.makespan)
    hatch, ink = HATCHES["idle"]
    for rank, spans in enumerate(simulation.spans):
        ax.add_patch(
            Rectangle(
                (0, rank - 0.42),
                min(width, end),
                0.84,
                facecolor=PALE,
                hatch=hatch,
                edgecolor=ink,
                linewidth=0,
            )
        )
        stages = simulation.schedule.stages_of(rank)
        for entry, start, stop in spans:
            if start < end:
                drawn |= _box(ax, entry, rank, float(start), min(float(stop), end), stages, end)
        if beside is not None:
            ax.text(end * 1.01, rank, f"{float(beside[rank]):.3g}", va="center", fontsize=8)
    if beside is not None:
        ax.text(end * 1.01, -0.75, "peak", va="center", fontsize=7, color=GREY)
    share = simulation.bubble
    exact = f"{share} = " if isinstance(share, Fraction) and share.denominator < 1000 else ""
    ax.set_title(
        f"{simulation.schedule.name}:  bubble {exact}{float(share):.1%}, makespan {_number(simulation.makespan)}",
        fontsize=8.5,
        fontweight="normal",
    )
    ax.set(
        xlim=(0, end),
        ylim=(ranks - 0.5, -0.5),
        yticks=range(ranks),
        yticklabels=[f"rank {rank}" for rank in range(ranks)],
    )
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    return drawn


def _box(
    ax: Axes, entry, rank: int, start: float, stop: float, stages: Sequence[int], end: float
) -> set[str]:
    pair = not hasattr(entry, "kind")
    halves = [(entry.forward, -0.42, 0.42), (entry.backward, 0.0, 0.42)] if pair else [(entry, -0.42, 0.84)]
    for action, below, height in halves:
        towards = (
            "#FFFFFF" if action.kind == "F" else "#000000"
        )  # or a light backward would look like a forward
        colour = blend(
            COLOURS[KINDS[action.kind]], towards, 0.55 * stages.index(action.stage) / max(len(stages) - 1, 1)
        )
        ax.add_patch(
            Rectangle(
                (start, rank + below),
                stop - start,
                height,
                facecolor=colour,
                edgecolor="white",
                linewidth=0.6,
            )
        )
        letters = len(str(action.microbatch))
        if (stop - start) / end * WIDTH * 0.86 > 0.075 * letters:
            label = ax.text(
                (start + stop) / 2,
                rank + below + height / 2,
                str(action.microbatch),
                ha="center",
                va="center",
                fontsize=5 if pair else 7,
                color=ink_on(colour),
            )
            label.set_in_layout(False)
    return {KINDS[action.kind] for action, _, _ in halves}


@in_house_style
def in_flight(
    simulation,
    counts: Sequence[Sequence],
    *,
    title: str,
    limit: float | None = None,
    unit: str = "activations held",
) -> Figure:
    """Activations over time, a line a rank. `counts[rank][i]` is what the rank holds after its i-th entry."""
    figure = Picture(figsize=(WIDTH, 2.6))
    ax = figure.subplots()
    for rank, (spans, held) in enumerate(zip(simulation.spans, counts)):
        times = (
            [0.0]
            + [float(span.start if _takes(span.entry) else span.end) for span in spans]
            + [float(simulation.makespan)]
        )
        ax.step(
            times,
            [0.0, *map(float, held), float(held[-1])],
            where="post",
            color=CYCLE[rank % len(CYCLE)],
            label=f"rank {rank}",
            linestyle=["-", "--"][rank // len(CYCLE) % 2],
        )
    if limit is not None:
        ax.axhline(limit, color=GREY, linestyle=":", label="limit")
    ax.set(xlabel="time", ylabel=unit, xlim=(0, float(simulation.makespan)))
    title_above(figure, title)
    legend_below(figure, ax.get_legend_handles_labels()[0])
    return figure


def _takes(entry) -> bool:
    return getattr(entry, "kind", "F") in "FR"


def _number(value) -> str:
    return (
        str(value)
        if isinstance(value, int) or (isinstance(value, Fraction) and value.denominator < 100)
        else f"{float(value):.4g}"
    )
