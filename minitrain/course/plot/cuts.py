"""Pictures of a model that is cut: the table of a search, what each stage recomputes, lends and pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, COLOURS, GREY, PALE, SKY


@style.styled
def table(costs: Sequence[int], stages: int, *, title: str) -> Figure:
    """How dynamic programming fills its table: a row per number of stages, a column per number of layers.

    A cell is the largest stage of the best cut of the first layers; arrows show the choices that the best
    cut of all layers was made of: how many layers came before the last stage."""
    layers = len(costs)
    if not 2 <= stages <= layers <= 12:
        cure = "use 2 to 12 layers, a stage at least each"
        raise ValueError(f"table: {layers} layers on {stages} stages; {cure}")
    best = {(0, 0): (0, 0)}
    for stage in range(1, stages + 1):
        for end in range(stage, layers - stages + stage + 1):
            ways = [(max(best[stage - 1, start][0], sum(costs[start:end])), start) for start in range(end)
                    if (stage - 1, start) in best]  # fmt: skip
            best[stage, end] = min(ways)
    path, end = [], layers
    for stage in range(stages, 0, -1):
        path.append((stage, end))
        end = best[stage, end][1]
    figure, ax = style.canvas(height=0.9 + 0.42 * (stages + 1))
    style.square_cells(ax, layers, stages)
    ax.set(aspect="auto", xticks=range(layers), yticks=range(stages))
    ax.set_xticklabels([f"{n + 1}\n(+{cost})" for n, cost in enumerate(costs)])
    ax.set_yticklabels([f"{n + 1} stage{'s' * (n > 0)}" for n in range(stages)])
    for (stage, end), (largest, _) in best.items():
        if stage:
            chosen = (stage, end) in path
            style.cell(ax, end - 1, stage - 1, SKY if chosen else PALE, str(largest), fontsize=9)
    for (stage, end), (before, start) in zip(path, path[1:]):
        ends = (start - 1, before - 0.75), (end - 1 - 0.25, stage - 1.3)
        arrow = {"arrowstyle": "-|>", "mutation_scale": 10, "color": BLUE, "linewidth": 1.4, "zorder": 5}
        ax.add_patch(FancyArrowPatch(*ends, **arrow))
    ax.set_xlabel("layers in these stages (and the cost of the last of them)")
    swatches = [Patch(color=SKY, label="the best cut of all layers"), Patch(color=PALE, label="other cells")]
    return style.finished(figure, title, swatches)


@style.styled
def recomputed(stages: Sequence, units: Sequence[str], *, title: str) -> Figure:
    """What each stage of `adapipe.plan_adapipe` keeps of each layer, layers to the right, units down."""
    figure, ax = style.canvas(height=2.3)
    for number, stage in enumerate(stages):
        for layer, kept in zip(stage.layers, stage.saved):
            for row, keep in enumerate(kept):
                colour, word = (COLOURS["activations"], "kept") if keep else (GREY, "again")
                style.cell(ax, layer + 0.5 * number, row, colour, word)
        middle = sum(stage.layers) / len(stage.layers) + 0.5 * number
        text = f"stage {number}: again {stage.recomputed}\n{stage.bytes} bytes"
        ax.text(middle, 3.15, text, **CENTRED, fontsize=7.5)
    layers = sum(len(stage.layers) for stage in stages)
    ax.set(xlim=(-0.6, layers + 0.5 * len(stages) - 0.9), ylim=(3.6, -0.6))
    ax.set(xticks=[], yticks=range(len(units)), yticklabels=units)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return style.finished(
        figure, title, {"kept for backward": COLOURS["activations"], "computed again": GREY}
    )


@style.styled
def activations_by_pair(runs: Mapping[str, tuple], ranks: Sequence[int], *, title: str) -> Figure:
    """Activations over time of some ranks, a panel each. runs[name] = (simulation, counts of every rank).

    counts[rank][i] is what the rank holds after its i-th action; forwards and what comes back count from
    their start, everything else frees at its end."""
    figure, panels = style.panels([f"rank {rank}" for rank in ranks], height=2.7)
    for ax, rank in zip(panels, ranks):
        for (name, (run, counts)), colour, line in zip(runs.items(), (GREY, BLUE), ("--", "-")):
            times = [float(span.start if span.entry.kind in "FHL" else span.end) for span in run.spans[rank]]
            steps = [0, *map(float, counts[rank])]
            ax.step([0, *times], steps, where="post", color=colour, linestyle=line, label=name)
        ax.set(xlabel="time")
    panels[0].set_ylabel("activations held")
    return style.finished(figure, title, panels[0].get_legend_handles_labels()[0])


@style.styled
def room_to_hide(idle: Mapping[str, Sequence[float]], moves: Mapping[str, float], *, title: str) -> Figure:
    """A bar per tensor, as long as it idles; a line per kind of move, at the time it takes there and back.

    A bar that reaches over a line hides that move."""
    rows = [(name, time) for name, times in idle.items() for time in times]
    figure, ax = style.canvas(height=1.1 + 0.19 * len(rows))
    ax.barh(range(len(rows)), [time for _, time in rows], height=0.7, color=COLOURS["activations"])
    for i, (name, time) in enumerate(moves.items()):
        look = {"color": style.CYCLE[i + 1], "linestyle": style.DASHES[i + 1], "linewidth": 1.6}
        ax.axvline(time, **look, label=f"{name}: {float(time):g}")
    style.row_labels(ax, [name for name, _ in rows])
    ax.set(xlabel="time from a tensor's forward to its backward", xlim=(0, None))
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


@style.styled
def padding(groupings: Mapping[str, Sequence], lengths: Sequence[int], *, title: str) -> Figure:
    """Microbatches of samples side by side: a column per sample, as high as its length; padding is grey."""
    figure, panels = style.panels(groupings, height=2.6)
    for ax, groups in zip(panels, groupings.values()):
        place = 0
        for group in groups:
            at, real = range(place, place + len(group)), [lengths[sample] for sample in group]
            pads, look = [max(real) - length for length in real], dict(width=1, align="edge", linewidth=0)
            ax.bar(at, real, color=SKY, **look)
            ax.bar(at, pads, bottom=real, color="#BBBBBB", **look)
            ax.axvline(place, color="black", linewidth=0.5)
            place += len(group)
        ax.set(xlabel="samples, microbatch by microbatch", xlim=(0, place), xticks=[])
        ax.grid(visible=False)
    panels[0].set_ylabel("tokens")
    swatches = [Patch(color=SKY, label="tokens"), Patch(color="#BBBBBB", label="padding")]
    return style.finished(figure, title, swatches)
