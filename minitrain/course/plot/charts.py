"""Every picture of the course: functions that take data and return a matplotlib Figure, shown by a notebook.

A picture is 720 pixels wide and at most 60 kB; what could not be read as a picture raises ValueError.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import frexp, prod

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CENTRED, COLOURS, CYCLE, DASHES, PALE_BLUE, Series
from minitrain.systems.simulate.timeline import join, outside

_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0}
_NODE_EDGE = {"color": BLACK, "linewidth": 1.8}


# ---- one step --------------------------------------------------------------------------------------------
@style.styled
def timeline(timeline, ranks: Iterable[int] | None = None, title: str = "") -> Figure:
    """A replayed step (`simulate.timeline.Timeline`): per rank its computation, then a lane per axis."""
    ranks = sorted(timeline.spans) if ranks is None else list(ranks)
    if not 0 < len(ranks) <= 16:
        raise ValueError(f"{len(ranks)} ranks cannot be read as a picture; choose 1 to 16, as in ranks=[0]")
    step_s = timeline.step_s
    unit, scale = style.unit_for(step_s, "s")
    lanes = []
    for rank in ranks:
        spans = timeline.spans[rank]
        moved = (span for span in spans if span.kind == "transfer" and span.end_s > span.start_s)
        axes = dict.fromkeys(span.event.axis for span in moved)
        lanes += [(f"rank {rank}", _computation(spans))]
        lanes += [(axis, transfers(timeline, rank, axis)) for axis in axes]
    figure, ax = style.canvas(height=1.35 + 0.24 * len(lanes))
    for y, (label, pieces) in enumerate(lanes):
        for what, intervals in pieces.items():
            # A long operator keeps its own bar; thousands of short ones become one.
            bars = join(intervals, gap=step_s / 1500, keep=step_s / 120)
            widths = [(start / scale, (end - start) / scale) for start, end in bars]
            ax.broken_barh(widths, (y - 0.4, 0.8), **style.look_of(what), linewidth=0.4 * (what != "wait"))
        if label.startswith("rank") and y:
            ax.axhline(y - 0.5, color=style.GREY, linewidth=0.6)
    style.row_labels(ax, [label for label, _ in lanes])
    ax.set(xlim=(0, step_s / scale or 1), xlabel=f"time ({unit}) · {timeline.machine.said}")
    parts = {"compute": timeline.compute_s, "exposed communication": timeline.exposed_communication_s}
    parts["idle"] = timeline.idle_s
    shares = ", ".join(f"{name} {seconds / (step_s or 1):.0%}" for name, seconds in parts.items())
    of = f" (mean of {len(timeline.spans)} ranks)" if len(timeline.spans) > 1 else ""
    ax.set_title(f"{step_s / scale:.4g} {unit}: {shares}{of}", fontsize=8, fontweight="normal")
    drawn = {what for _, pieces in lanes for what, intervals in pieces.items() if intervals} or {"compute"}
    swatches = [style.swatch(what) for what in COLOURS if what in drawn]
    return style.finished(figure, title or f"One step on {timeline.machine.name}", swatches)


def _computation(spans: Iterable) -> dict[str, list]:
    """{phase, "compute" or "wait": intervals} of a rank's own stream."""
    pieces: dict[str, list] = {}
    for span in spans:
        phases = (phase for phase in ("forward", "backward", "optimizer") if phase in span.event.phase)
        what = "wait" if span.kind == "wait" else next(phases, "compute")
        if span.kind != "transfer":
            pieces.setdefault(what, []).append((span.start_s, span.end_s))
    return pieces


def transfers(timeline, rank: int, axis: str | None = None) -> dict[str, list]:
    """The transfers of a rank (on one axis): the parts that computation hides, and those that it does not."""
    moved, exposed = timeline.transfers(rank, axis), timeline.exposed(rank, axis)
    hidden = outside(((span.start_s, span.end_s) for span in moved), join(exposed))
    return {"communication": hidden, "exposed communication": exposed}


@style.styled
def memory(timeline: Sequence[tuple[int, Mapping]], events: Sequence = (), title: str = "") -> Figure:
    """Live bytes by kind over a run (`ledger.timeline()`); with `ledger.events` the phases are named."""
    kinds = [kind for kind in timeline[0][1] if any(live[kind] for _, live in timeline)]
    unit, scale = style.unit_for(max(sum(live.values()) for _, live in timeline), "bytes")
    figure, ax = style.canvas(height=3.0)
    stack, peak = style.stack_of_kinds(ax, timeline, kinds, unit, scale)
    ax.set(xlabel="operators and collectives, in order", ylabel=f"live memory ({unit})", ylim=(0, 1.3 * peak))
    for start, name in _phases(events):
        ax.axvline(start, color=BLACK, linewidth=0.6, linestyle=":")
        ax.text(start, 0.99, f" {name}", transform=ax.get_xaxis_transform(), va="top", fontsize=8)
    return style.finished(figure, title or "What fills the memory, and when", stack[::-1])


def _phases(events: Sequence) -> list[tuple[int, str]]:
    """(index of the event, phase) wherever a new phase begins; a Wait belongs to the phase around it."""
    phases = accumulate(events, lambda phase, event: getattr(event, "phase", phase), initial="")
    return [(i, phase) for i, (last, phase) in enumerate(pairwise(phases)) if phase and phase != last]


# ---- numbers ---------------------------------------------------------------------------------------------
@style.styled
def bars_by_kind(
    rows: Mapping[str, Mapping], *, title: str, xlabel="", unit="bytes", limit: tuple | None = None
) -> Figure:
    """A stacked bar per row, {row: {kind: amount}}; `limit=(80e9, "an H100 holds 80 GB")` is a line."""
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    totals = [sum(parts.values()) for parts in rows.values()]
    widest = max(*totals, limit[0] if limit else 0)
    shown, scale = style.unit_for(max(totals), unit)
    figure, ax = style.canvas(height=1.1 + 0.36 * len(rows))
    ends = numpy.zeros(len(rows))
    for kind in kinds:
        widths = numpy.array([parts.get(kind, 0) for parts in rows.values()])
        colour = style.colour_of(kind, kinds)
        ax.barh(range(len(rows)), widths / scale, left=ends / scale, height=0.7, label=kind, color=colour)
        look = CENTRED | {"size": 8, "color": style.ink_on(colour), "bbox": _BOX | {"facecolor": colour}}
        for y in numpy.flatnonzero(widths > 0.075 * widest):
            ax.text((ends[y] + widths[y] / 2) / scale, y, f"{widths[y] / scale:.3g}", **look)
        ends += widths
    for y, total in enumerate(totals):
        ax.text(total / scale, y, f" {total / scale:.4g}", va="center", weight="bold", size=8, bbox=_BOX)
    if limit:
        ax.axvline(limit[0] / scale, color=BLACK, linestyle="--", linewidth=1)
        ax.text(limit[0] / scale, -0.5, f"{limit[1]} ", ha="right", va="bottom", fontsize=8)
    style.row_labels(ax, list(rows), top=-1.0 if limit else -0.6, bottom=0.4)
    ax.set(xlim=(0, 1.12 * widest / scale or 1), xlabel=f"{xlabel} ({shown})" if xlabel else shown)
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


@style.styled
def measured_and_formula(rows: Sequence, *, title="Measured beside the formula") -> Figure:
    """(what, measured, formula): a dot in its ring is agreement; the ratio stands at the right."""
    labels, measured, formula = zip(*rows)
    y, m, f = range(len(rows)), numpy.array(measured, dtype=float), numpy.array(formula, dtype=float)
    shown, scale = style.unit_for(max(m.max(), f.max()), "bytes")
    figure, ax = style.canvas(height=1.1 + 0.3 * len(rows))
    ax.hlines(y, m / scale, f / scale, color=style.VERMILLION)
    ring = {"s": 90, "facecolor": "none", "edgecolor": COLOURS["formula"]}
    rings = ax.scatter(f / scale, y, **ring, label="formula", zorder=2)
    dots = ax.scatter(m / scale, y, s=22, color=COLOURS["measured"], label="measured", zorder=3)
    positive = [value for value in (*measured, *formula) if value > 0]
    if positive and max(positive) > 50 * min(positive):
        ax.set_xscale("symlog", linthresh=min(positive) / scale)
    beside = {"x": 1.02, "transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8}
    ax.text(y=-1.0, s="ratio", **beside)
    for i, (a, b) in enumerate(zip(measured, formula)):
        ratio = f"{a / b:.3f}" if b else "0 = 0" if a == b else "not 0"
        colour, weight = (BLACK, "normal") if a == b else (style.VERMILLION, "bold")
        ax.text(y=i, s=ratio, **beside, color=colour, fontweight=weight)
    style.row_labels(ax, labels, top=-0.6)
    ax.grid(axis="y", visible=True)
    ax.set(xlabel=shown)
    return style.finished(figure, title, [rings, dots])


@style.styled
def lines(
    x: Sequence[float], ys: Series, *, xlabel: str, ylabel: str, title: str, formulas=None, marks=None, log=""
) -> Figure:
    """Measurements as lines, marked if they are few, `formulas` as dashes, `marks` {name: x} as verticals.
    `log`: x, y, or "y0", which has room for 0."""
    figure, ax = style.canvas(height=3.2)
    for i, (name, y) in enumerate(ys.items()):
        marker, colour = style.MARKERS[i % len(style.MARKERS)] * (len(x) < 200), CYCLE[i % len(CYCLE)]
        ax.plot(x, y, color=colour, marker=marker, markersize=4, label=name)
    for i, (name, y) in enumerate((formulas or {}).items()):
        ax.plot(x, y, color=COLOURS["formula"], linestyle=DASHES[1 + i % 3], linewidth=1.2, label=name)
    place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
    for name, at in (marks or {}).items():
        ax.axvline(at, color=BLACK, linestyle=":", linewidth=1)
        ax.annotate(name, (at, 1), (3, -2), **place, fontsize=8, bbox={**_BOX, "pad": 0.5})
    if "x" in log:
        binary = all(frexp(value)[0] == 0.5 for value in x)
        ax.set_xscale("log", base=2 if binary else 10)
        power = lambda value, _: _power_of_two(value, max(x))
        ax.xaxis.set_major_formatter(power if binary else "{x:,.12g}")
    if "y" in log:
        ax.set_yscale("symlog" if "0" in log else "log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


def _power_of_two(value: float, largest: float) -> str:
    """ "8" and "1,024"; where the axis goes beyond a million, "1 Ki" and "4 Mi"."""
    if largest < 2**20 or value < 2**10:
        return f"{value:,.12g}"
    prefixes = {40: "Ti", 30: "Gi", 20: "Mi", 10: "Ki"}
    exponent = next(exponent for exponent in prefixes if value >= 2**exponent)
    return f"{value / 2**exponent:g} {prefixes[exponent]}"


@style.styled
def loss_curves(losses: Series, *, title: str = "Loss", xlabel: str = "step") -> Figure:
    """Losses by step. Later curves are thinner and dashed, so that curves which coincide can all be seen."""
    figure, ax = style.canvas(height=3.0)
    for i, (name, ys) in enumerate(losses.items()):
        width = 1.2 + 3.3 * (1 - i / (len(losses) - 1)) if len(losses) > 1 else 1.8
        look = {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i % len(DASHES)], "linewidth": width}
        ax.plot(range(1, len(ys) + 1), ys, **look, label=f"{name}: {ys[-1]:.3f} at the end")
    ax.set(xlabel=xlabel, ylabel="loss (nats per token)")
    return style.finished(figure, title, ax.get_legend_handles_labels()[0])


# ---- ranks and what they exchange ------------------------------------------------------------------------
@style.styled
def rank_grid(shape: Mapping, *, devices_per_node=0, title="") -> Figure:
    """The ranks of a mesh {axis: size, outermost first}, a panel per axis in which one colour is one group.

    Where an axis has more groups than there are colours, only the groups of rank 0 are coloured."""
    axes, world = list(shape), prod(shape.values())
    if world > 128:
        raise ValueError(f"a grid of {world} ranks cannot be read as a picture; draw a mesh of at most 128")
    columns = shape[axes[-1]]
    rows = world // columns
    few_groups = max(world // shape[axis] for axis in axes) < len(CYCLE)
    side = min(0.42, (style.WIDTH - 0.8) / len(axes) / (columns + 1))
    figure, panels = style.grid_of_panels(1, len(axes), height=1.25 + side * rows)
    for ax, axis in zip(panels, axes):
        inner = prod(shape[name] for name in axes[axes.index(axis) + 1 :])
        num_groups = world // shape[axis]
        style.square_cells(ax, columns, rows)
        for rank in range(world):
            group = rank // (inner * shape[axis]) * inner + rank % inner
            colour = CYCLE[group] if few_groups else CYCLE[0] if group == 0 else style.PALE
            style.cell(ax, rank % columns, rank // columns, colour, str(rank), fontsize=min(8, 26 * side))
        if devices_per_node:
            _node_edges(ax, world, columns, devices_per_node)
        ax.set_xlabel(f"{axes[-1]} 0 to {columns - 1}", fontsize=8)
        ax.set_title(f"{axis}: {num_groups} group{'s' * (num_groups > 1)} of {shape[axis]}", fontsize=9)
    outer = [[f"{name} {coordinate}" for coordinate in range(shape[name])] for name in axes[:-1]]
    panels[0].set_yticks(range(rows), [" ".join(words) for words in product(*outer)])
    handles = [] if few_groups else [Patch(facecolor=CYCLE[0], label="the group of rank 0")]
    if devices_per_node:
        handles.append(Line2D([], [], **_NODE_EDGE, label=f"edge of a node of {devices_per_node} devices"))
    sizes = " x ".join(f"{name} {size}" for name, size in shape.items())
    return style.finished(figure, title or f"Who talks to whom in {sizes}", handles)


def _node_edges(ax: Axes, world: int, columns: int, devices_per_node: int) -> None:
    for rank in range(world):
        row, column = divmod(rank, columns)
        if column and rank // devices_per_node != (rank - 1) // devices_per_node:
            ax.plot([column - 0.5, column - 0.5], [row - 0.5, row + 0.5], **_NODE_EDGE)
        if row and rank // devices_per_node != (rank - columns) // devices_per_node:
            ax.plot([column - 0.5, column + 0.5], [row - 0.5, row - 0.5], **_NODE_EDGE)


@style.styled
def chunk_matrix(states: Sequence[Sequence], *, title: str = "") -> Figure:
    """A collective step by step: `states[step][rank][chunk]` counts the ranks whose data is in that chunk."""
    num_ranks, num_chunks = len(states[0]), len(states[0][0])
    side, fontsize = (0.25, 7) if num_chunks <= 4 else (0.165, 6)
    across = min(len(states), max(1, int((style.WIDTH - 0.6) / (side * num_chunks + 0.25))))
    down = -(-len(states) // across)
    figure, panels = style.grid_of_panels(down, across, height=0.7 + down * (0.3 + side * num_ranks))

    def look(count: int) -> tuple[str, str]:
        partial = style.blend(PALE_BLUE, style.BLUE, 0.85 * max(0, count - 1) / max(1, num_ranks - 1))
        colour = "white" if not count else style.GREEN if count == num_ranks else partial
        return colour, str(count or "")

    for step, (ax, state) in enumerate(zip(panels, states)):
        style.cells(ax, state, look, fontsize)
        if step % across == 0:
            ax.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        ax.set_title(f"step {step}" if step else "start", fontsize=8)
    colours = {"one rank's own data": PALE_BLUE, "partial sum": style.blend(PALE_BLUE, style.BLUE, 0.6)}
    which = "Who holds which sums: columns are chunks, numbers count the ranks added up"
    return style.finished(figure, title or which, colours | {"complete": style.GREEN})


@style.styled
def message_lanes(messages: Iterable[tuple], *, ranks: int, title: str) -> Figure:
    """Ranks as lanes, messages as arrows: (source, to, leaves, arrives) and perhaps a label."""
    messages = list(messages)
    first, last = min(m[2] for m in messages), max(m[3] for m in messages)
    figure, ax = style.canvas(height=0.9 + 0.42 * ranks)
    ax.hlines(range(ranks), first, last, color=style.GREY, linewidth=1)
    arrow = {"arrowstyle": "-|>", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 1}
    for source, to, leaves, arrives, *label in messages:
        props = arrow | {"color": CYCLE[source % len(CYCLE)]}
        ax.annotate("", (arrives, to), (leaves, source), zorder=3, arrowprops=props)
        if label:
            share = 0.16 if len(label[0]) < 4 else 0.45  # near the tail, where arrows have not crossed yet
            x, y = leaves + share * (arrives - leaves), source + share * (to - source)
            ax.text(x, y, label[0], **CENTRED, fontsize=7, zorder=4, bbox={**_BOX, "pad": 0.6})
    style.row_labels(ax, [f"rank {rank}" for rank in range(ranks)], top=-0.4, bottom=0.6)
    ax.set(xlabel="step")
    return style.finished(figure, title)
