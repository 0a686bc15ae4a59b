"""Pictures of pipelines: what each rank does when (`schedule`), the way of one microbatch
(`one_microbatch`), what a schedule repeats for each (`building_blocks`), how many activations a rank holds.

Most take what `pipeline.simulate.simulate` returns; several are drawn below each other over the same time. A
box is an action: its colour is its kind, its number the microbatch, its shade the stage, if there are several
(later ones: forwards lighter, the others darker; the legend shows them side by side). A forward and a
backward that run as one are a box of two halves. Dots are idle time. To the right stands the most activations
that the rank ever holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import CENTRED, COLOURS, CYCLE, GREY, MARKERS, WIDTH, Series
from minitrain.pipeline.schedule import Action, Entry, parts

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}
FORWARD, INPUT = COLOURS["forward"], COLOURS["input gradient"]
PERIOD = 6  # of building blocks: the time between two microbatches
HELD = {"early": "#BBD9EC", "late": "#E3CBE0"}
Shades = Mapping[str, Sequence[str]]  # {kind in words: its colours, first stage of a rank first}


@style.styled
def schedule(*simulations, title="", peaks: Sequence | None = None) -> Figure:
    """Ranks down, time to the right. `peaks[i][rank]` stands beside a row of panel i."""
    rows = [len(simulation.spans) for simulation in simulations]
    if not simulations or max(rows) > 16 or sum(rows) > 48:
        raise ValueError(f"{rows} ranks cannot be read; draw at most 16 ranks a panel and 48 in all")
    end = float(max(simulation.makespan for simulation in simulations))
    height = 0.75 + 0.42 * len(rows) + 0.26 * sum(rows)
    figure, panels = style.stacked(len(rows), height, [n + 1.2 for n in rows])
    for ax, simulation, beside in zip(panels, simulations, peaks or [None] * len(rows)):
        _panel(ax, simulation, end, beside)
    panels[-1].set_xlabel("time")
    return style.finished(figure, title, _legend(shades_of(simulations)))


def headline(simulation) -> str:
    """Name, bubble share and makespan, exact where they are short."""
    bubble, makespan = simulation.bubble, simulation.makespan
    exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble.denominator < 1000 else ""
    time = str(makespan) if Fraction(makespan).denominator < 100 else f"{float(makespan):.4g}"
    return f"{simulation.schedule.name}:  bubble share {exact}{float(bubble):.1%}, makespan {time}"


def fill(action: Action, stages: Sequence[int]) -> str:
    """The colour of an action on a rank that has these stages."""
    # A backward gets darker with its stage: a light one would look like a forward.
    towards = "#FFFFFF" if action.kind == "F" else "#000000"
    return style.blend(COLOURS[KINDS[action.kind]], towards, shade(action.stage, stages))


def shade(stage: int, stages: Sequence[int]) -> float:
    return 0.55 * stages.index(stage) / max(len(stages) - 1, 1)


def halves(entry: Entry) -> list[tuple[Action, float, float]]:
    """(action, top, height) of each part of a box, in rows from the middle of a rank's."""
    if isinstance(entry, Action):
        return [(entry, -0.42, 0.84)]
    return [(entry.forward, -0.42, 0.42), (entry.backward, 0.0, 0.42)]


def shades_of(simulations: Iterable) -> Shades:
    """What the legend explains: the colours of every kind that is drawn."""
    found: dict[str, dict[float, str]] = {}
    for simulation in simulations:
        for rank, spans in enumerate(simulation.spans):
            stages = simulation.schedule.stages_of(rank)
            for action in parts(entry for entry, _, _ in spans):
                at = shade(action.stage, stages)
                found.setdefault(KINDS[action.kind], {}).setdefault(at, fill(action, stages))
    order = (what for what in COLOURS if what in found)
    return {what: [colour for _, colour in sorted(found[what].items())] for what in order}


def label_of(what: str, colours: Sequence[str]) -> str:
    return f"{what} (stages of a rank)" if len(colours) > 1 else what


def _legend(shades: Shades) -> list[Patch | tuple[Patch, ...]]:
    """A swatch for each kind, or its shades side by side."""
    handles: list[Patch | tuple[Patch, ...]] = []
    for what, colours in shades.items():
        patches = [Patch(facecolor=colour, label=label_of(what, colours)) for colour in colours]
        handles.append(tuple(patches) if len(patches) > 1 else patches[0])
    return [*handles, style.swatch("idle")]


def _panel(ax: Axes, simulation, end: float, beside: Sequence | None) -> None:
    _idle(ax, simulation)
    for rank, spans in enumerate(simulation.spans):
        stages = simulation.schedule.stages_of(rank)
        for entry, start, stop in spans:
            _box(ax, entry, rank, float(start), float(stop), stages, end)
        if beside is not None:
            ax.text(end * 1.01, rank, f"{float(beside[rank]):.3g}", va="center", fontsize=8)
    if beside is not None:
        ax.text(end * 1.01, -0.75, "peak", va="center", fontsize=7, color=GREY)
    ax.set_title(headline(simulation), fontsize=8.5, fontweight="normal")
    ax.set(xlim=(0, end))


def _idle(ax: Axes, simulation) -> None:
    """Empty rows of ranks, all of it idle until boxes are drawn."""
    for rank in range(len(simulation.spans)):
        place = (0, rank - 0.42), float(simulation.makespan), 0.84
        ax.add_patch(Rectangle(*place, **style.look_of("idle"), linewidth=0))
    style.row_labels(ax, [f"rank {rank}" for rank in range(len(simulation.spans))])
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


def _box(ax: Axes, entry: Entry, rank: int, start: float, stop: float, stages: list, end: float) -> None:
    fontsize = 7 if isinstance(entry, Action) else 5
    for action, below, height in halves(entry):
        colour, number = fill(action, stages), str(action.microbatch)
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
        ax.add_patch(Rectangle((start, rank + below), stop - start, height, **look))
        if (stop - start) / end * WIDTH * 0.86 > 0.075 * len(number):
            x, y, ink = (start + stop) / 2, rank + below + height / 2, style.ink_on(colour)
            ax.text(x, y, number, **CENTRED, fontsize=fontsize, color=ink).set_in_layout(False)


@style.styled
def one_microbatch(simulation, title: str = "") -> Figure:
    """The building block: F and B of one microbatch across its stages, an arrow for each message, and in each
    row what the rank waits for."""
    figure, ax = style.canvas(height=0.95 + 0.42 * len(simulation.spans))
    end = float(simulation.makespan)
    _idle(ax, simulation)
    for rank, spans in enumerate(simulation.spans):
        before = 0.0
        for entry, start, stop in spans:
            colour, needs = fill(entry, [entry.stage]), simulation.schedule.needs[entry]
            look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.6}
            ax.add_patch(Rectangle((float(start), rank - 0.42), float(stop - start), 0.84, **look))
            name, place = f"{entry.kind}{entry.stage}", (float(start + stop) / 2, rank)
            ax.text(*place, name, **CENTRED, fontsize=8, color=style.ink_on(colour))
            for other in needs:
                if (source := simulation.schedule.place[other]) != rank:
                    _arrow(ax, float(simulation.start(entry)), source, rank)
                    said = f"waits for {other.kind}{other.stage}"
                    patch = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                    if float(start) - before >= end / 8:
                        x = (before + float(start)) / 2
                        ax.text(x, rank, said, **CENTRED, fontsize=7, color="black", bbox=patch)
            before = float(stop)
    ax.set(xlim=(0, end), xlabel="time")
    arrow = Patch(facecolor=COLOURS["communication"], label="message: activations down, gradients up")
    return style.finished(figure, title, [*_legend(shades_of([simulation])), arrow])


def _arrow(ax: Axes, time: float, source: int, rank: int) -> None:
    towards = 1 if rank > source else -1
    look = dict(arrowstyle="-|>", color=COLOURS["communication"], linewidth=1.6, shrinkA=0, shrinkB=0)
    ends = {"xy": (time, rank - 0.25 * towards), "xytext": (time, source + 0.25 * towards)}
    ax.annotate("", **ends, arrowprops=look, annotation_clip=False)


@style.styled
def in_flight(simulation, counts: Sequence[Sequence], *, title: str) -> Figure:
    """Activations over time, a line per rank. `counts[rank][i]` is what it holds after its i-th entry."""
    figure, ax = style.canvas(height=2.6)
    end = float(simulation.makespan)
    for rank, (spans, held) in enumerate(zip(simulation.spans, counts)):
        takes = [getattr(span.entry, "kind", "F") in "FR" for span in spans]  # the others free at their end
        times = [float(span.start if take else span.end) for take, span in zip(takes, spans)]
        look = {"color": CYCLE[rank % len(CYCLE)], "linestyle": ["-", "--"][rank // len(CYCLE) % 2]}
        steps = [0.0, *map(float, held), float(held[-1])]
        ax.step([0.0, *times, end], steps, where="post", label=f"rank {rank}", **look)
    ax.set(xlabel="time", ylabel="activations held", xlim=(0, end))
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


@style.styled
def building_blocks(blocks: Mapping[str, Sequence], *, title: str) -> Figure:
    """A panel per schedule: ranks down, time to the right, the way of microbatch 0 as a line. The schedule
    repeats this block for each microbatch, a fixed time later.

    blocks[name][r] = starts of F of stage r, F of stage 2p-1-r, I of stage 2p-1-r, I of stage r; a unit each.
    A bar reaches from a stage's F to its I: so long is its activation held. A rank's bars, over the time
    between two microbatches, are the activations of stages that it holds at a time."""
    if not blocks or any(not 2 <= len(ranks) <= 8 for ranks in blocks.values()):
        raise ValueError("building_blocks: give one block or more, of 2 to 8 ranks")
    end = 1.12 * (1 + max(times[-1] for ranks in blocks.values() for times in ranks))
    rows = sum(map(len, blocks.values()))
    heights = [len(ranks) + 0.6 for ranks in blocks.values()]
    figure, panels = style.stacked(len(blocks), 0.8 + 0.36 * len(blocks) + 0.3 * rows, heights)
    for ax, (name, ranks) in zip(panels, blocks.items()):
        p = len(ranks)
        for r, (down, up, late, early) in enumerate(ranks):
            for at, until, below, kind in ((down, early, -0.42, "early"), (up, late, 0.21, "late")):
                ax.add_patch(Rectangle((at, r + below), until - at + 1, 0.21, color=HELD[kind], linewidth=0))
            stages, colours = (r, 2 * p - 1 - r, 2 * p - 1 - r, r), (FORWARD, FORWARD, INPUT, INPUT)
            for at, stage, colour in zip((down, up, late, early), stages, colours):
                ax.add_patch(Rectangle((at, r - 0.3), 1, 0.6, facecolor=colour, edgecolor="white", zorder=2))
                look = {"fontsize": 7, "color": style.ink_on(colour), "zorder": 3}
                ax.text(at + 0.5, r, str(stage), **CENTRED, **look)
            held = (early - down + late - up) / PERIOD
            ax.text(end, r, f"{held:.2g} ", ha="right", va="center", fontsize=8)
        legs = [[(starts[leg] + 0.5, r) for r, starts in enumerate(ranks)] for leg in range(4)]
        path = [*legs[0], *legs[1][::-1], *legs[2], *legs[3][::-1]]
        ax.plot(*zip(*path), color=style.BLACK, linewidth=0.8, zorder=1.5)
        ax.text(end, -0.75, "stages held", ha="right", va="center", fontsize=7, color=style.GREY)
        ax.set_title(name, fontsize=8.5, fontweight="normal")
        ax.set(xlim=(0, end))
        style.row_labels(ax, [f"rank {r}" for r in range(p)])
        ax.grid(visible=False)
        ax.tick_params(axis="y", length=0, labelsize=8)
    panels[-1].set_xlabel("time of microbatch 0, in units of one F, I or W")
    meaning = {"forward of the numbered stage": FORWARD, "input gradient": INPUT}
    for way, kind in (("down", "early"), ("up", "late")):
        meaning[f"held for the stage on the way {way}"] = HELD[kind]
    return style.finished(figure, title, meaning)


@style.styled
def memory_bought(limits: Sequence, curves: Series, points: Mapping[str, tuple], *, title: str) -> Figure:
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
