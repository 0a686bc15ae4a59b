"""Saving: what an interval wastes, what a save does beside training, who keeps whose state, and where."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CENTRED, CYCLE, DASHES, VERMILLION
from minitrain.systems.plan.checkpoint_interval import holders
from minitrain.systems.simulate.links import Run
from minitrain.systems.simulate.timeline import outside

Points = Sequence[tuple[float, float]]
Curves = Mapping[str, Points]
_TRAINING = {"F": "forward", "B": "backward", "U": "optimizer"}
_SAVING = {"copy": style.ORANGE, "write": style.PURPLE}
_LEFT = {"old": style.SKY, "new": style.GREEN}


@style.styled
def waste(formulas: Curves, simulated: Curves | None = None, *, title: str, best: Mapping = {}) -> Figure:
    """(interval in s, share wasted) of each name, as a line; `simulated` points and the `best` one, a star,
    go with the line of their name."""
    names = list(formulas)
    if not 0 < len(names) <= len(CYCLE) or not all(formulas.values()):
        raise ValueError(f"{len(names)} formulas {names}; draw 1 to {len(CYCLE)}, each with points")
    if unknown := {*(simulated or {}), *best} - {*names}:
        raise ValueError(f"{sorted(unknown)} have no formula; use names among {names}")
    figure, ax = style.canvas(height=3.3)
    handles: list = []
    for i, name in enumerate(names):
        x, y = _percent(formulas[name])
        label = name
        if name in best:
            (at,), (least,) = _percent([best[name]])
            ax.plot([at], [least], "*", color=BLACK, markersize=11, zorder=4)
            label = f"{name}: least, {least:.1f} %, at {at:,.0f} s"
        handles += ax.plot(x, y, color=CYCLE[i], linestyle=DASHES[i % len(DASHES)], label=label)
        look = dict(s=22, color=CYCLE[i], marker=style.MARKERS[i], edgecolors=BLACK, linewidths=0.5)
        if name in (simulated or {}):
            ax.scatter(*_percent(simulated[name]), **look, zorder=3)
    look = {"color": "none", "markeredgecolor": BLACK, "linestyle": ""}
    if simulated:
        handles.append(Line2D([], [], marker="o", markersize=5, **look, label="simulated jobs"))
    ax.set_xscale("log")
    ax.set(ylim=(0, ax.get_ylim()[1]), xlabel="training between saves (s)", ylabel="time wasted (%)")
    return style.finished(figure, title, handles)


def _percent(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [100 * share for _, share in points]


@style.styled
def saves(runs: Mapping[str, Run], *, title: str) -> Figure:
    """{way: `checkpoint_pipeline.train(...)`}: lanes of training, copies and writes, with the seconds that
    training waits."""
    if not 0 < len(runs) <= 9:
        raise ValueError(f"{len(runs)} ways cannot be read as a picture; draw 1 to 9")
    end_s = max(float(run.end_s) for run in runs.values())
    unit, scale = style.unit_for(end_s, "s")
    labels: list[str] = []
    figure, ax = style.canvas(height=1.2 + 0.16 * sum(len(_lanes(run)) + 1 for run in runs.values()))
    seen: dict[str, Patch] = {}
    for name, run in runs.items():
        for lane in _lanes(run):
            y, busy = len(labels), []
            labels.append(name if lane == "train" else lane)
            for task in run.lane(lane):
                span = (float(run.start(task)) / scale, float(run.end(task)) / scale)
                busy.append(span)
                what = _TRAINING[task[0]] if lane == "train" else lane
                look = {"facecolor": _SAVING.get(what) or style.colour_of(what), "edgecolor": "white"}
                ax.broken_barh([(span[0], span[1] - span[0])], (y - 0.42, 0.84), **look, linewidth=0.4)
                seen.setdefault(what, Patch(**look, linewidth=0, label=what))
            waits = outside([(0.0, busy[-1][1])], busy) if lane == "train" else []
            look = style.look_of("exposed communication")
            for start, stop in waits:
                ax.broken_barh([(start, stop - start)], (y - 0.42, 0.84), **look, linewidth=0)
                seen["training waits"] = Patch(**look, linewidth=0, label="training waits")
            if lane == "train":
                waited = float(run.stall("train")) / scale
                ax.text(busy[-1][1], y, f"  waits {waited:.3g} {unit}", va="center", fontsize=7)
        labels.append("")
    style.row_labels(ax, labels[:-1])
    for tick, label in zip(ax.get_yticklabels(), labels):
        is_way = label in runs
        tick.set(fontweight="bold" if is_way else "normal", fontsize=8 if is_way else 6)
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1.1 * end_s / scale or 1), xlabel=f"time ({unit})")
    order = [*_TRAINING.values(), "training waits", *_SAVING]
    return style.finished(figure, title, [seen[what] for what in order if what in seen])


def _lanes(run: Run) -> list[str]:
    return [lane for lane in ("train", *_SAVING) if run.lane(lane)]


@style.styled
def placement(
    rings: Mapping[str, Sequence[Sequence[int]]], replicas: int, *, failed: Sequence[int] = (), title: str
) -> Figure:
    """{name: rings of machines}: a panel each, groups with edges; failed machines are crossed out. A column
    is a machine: its own state, and below it the states it keeps for others."""
    machines = max((sum(map(len, of)) for of in rings.values()), default=0)
    if not 0 < machines <= 24 or not 1 <= len(rings) <= 4:
        raise ValueError(f"{len(rings)} placements of {machines} machines; draw 1 to 4 of 1 to 24")
    side = min(0.4, (style.WIDTH - 0.9) / machines)
    height = 0.7 + len(rings) * (0.45 + side * replicas)
    figure, panels = style.grid_of_panels(len(rings), 1, height)
    for ax, (name, of) in zip(panels, rings.items()):
        held = holders(of, replicas)
        lost = [state for state, by in held.items() if by <= set(failed)]
        style.square_cells(ax, machines, replicas)
        for machine in held:
            others = [state for state, by in held.items() if machine in by and state != machine]
            for row, state in enumerate([machine, *others]):
                colour = style.PALE if machine in failed else CYCLE[state % len(CYCLE)]
                style.cell(ax, machine, row, colour, str(state), fontsize=min(8, 20 * side))
            if machine in failed:
                ends = (machine - 0.46, machine + 0.46), (-0.46, replicas - 0.54)
                ax.plot(*ends, color=VERMILLION, linewidth=1.5)
                ax.plot(ends[0], ends[1][::-1], color=VERMILLION, linewidth=1.5)
        for members in of[1:]:
            x = members[0] - 0.5
            ax.plot([x, x], [-0.6, replicas - 0.4], color=BLACK, linewidth=1.6)
        told = f"lost: state {', '.join(map(str, lost))}" if lost else "nothing is lost"
        ax.set_title(f"{name}: {told}" if failed else name, fontsize=9)
        ax.set_yticks(range(replicas), ["own", *["kept for others"] * (replicas > 1), *[""] * (replicas - 2)])
    panels[-1].set_xlabel(f"machines 0 to {machines - 1}; a number is a state", fontsize=8)
    handles = [Line2D([], [], color=BLACK, linewidth=1.6, label="edge of a group")]
    if failed:
        handles.append(Line2D([], [], color=VERMILLION, marker="x", linestyle="", label="failed machine"))
    return style.finished(figure, title, handles)


@style.styled
def calls(saves: Mapping[str, Sequence[tuple[str, object]]], *, title: str) -> Figure:
    """{how: [(call, what a crash there leaves: "old", "new" or anything else, which is lost), ..]}."""
    rows = max(map(len, saves.values()), default=0)
    if not 0 < rows <= 30 or len(saves) > 3:
        raise ValueError(f"{len(saves)} saves of up to {rows} calls; draw 1 to 3 of 1 to 30")
    figure = style.Picture(figsize=(style.WIDTH, 0.8 + 0.2 * rows))
    axes = list(figure.subplots(1, len(saves), squeeze=False).flat)
    for ax, (name, found) in zip(axes, saves.items()):
        ax.set(xlim=(0, 1), ylim=(rows - 0.4, -0.6), title=name)
        ax.set_axis_off()
        for y, (call, left) in enumerate(found):
            known = left in _LEFT
            look = {"facecolor": _LEFT[left] if known else VERMILLION, "hatch": None if known else "/////"}
            ax.add_patch(Rectangle((0.0, y - 0.4), 0.07, 0.8, edgecolor="white", linewidth=0.5, **look))
            ax.text(0.1, y, call, va="center", fontsize=8, family="DejaVu Sans Mono")
    handles = style.patches({f"{what} checkpoint": colour for what, colour in _LEFT.items()})
    handles.append(Patch(facecolor=VERMILLION, hatch="/////", edgecolor="white", label="nothing that loads"))
    return style.finished(figure, title, handles)


@style.styled
def cuts(layouts: Mapping[str, Sequence[tuple]], shape: tuple[int, int], *, title: str) -> Figure:
    """{layout: [(ranks that have it, start, shape of the rectangle), ..]} of a matrix of `shape`."""
    if not 1 <= len(layouts) <= 4 or len(shape) != 2:
        raise ValueError(f"{len(layouts)} layouts of a tensor {shape}; draw 1 to 4 of a matrix")
    figure = style.Picture(figsize=(style.WIDTH, 2.3))
    axes = list(figure.subplots(1, len(layouts), squeeze=False).flat)
    for ax, (name, pieces) in zip(axes, layouts.items()):
        ax.set(xlim=(-0.2, shape[1] + 0.2), ylim=(shape[0] + 0.2, -0.2), title=name)
        ax.title.set_fontsize(9)
        ax.set_axis_off()
        for ranks, (row, column), (height, width) in pieces:
            colour = CYCLE[ranks[0] % len(CYCLE)]
            look = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2}
            ax.add_patch(Rectangle((column, row), width, height, **look))
            if 12 * height < shape[0]:
                continue  # too thin for a number: its colour tells
            label = ", ".join(map(str, ranks))
            middle = column + width / 2, row + height / 2
            ax.text(*middle, label, **CENTRED, fontsize=8, color=style.ink_on(colour))
    return style.finished(figure, title)
