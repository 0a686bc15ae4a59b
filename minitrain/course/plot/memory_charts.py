"""Memory that is short: copies on shared links, what fills it with and without a technique, prices."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, CYCLE, DASHES, GREY, ORANGE, PALE, Runs, Series
from minitrain.systems.simulate.timeline import outside

_COPIES = {"copy": style.look_of("communication")}
_COPIES["copy that shares a link"] = {"facecolor": ORANGE, "hatch": "xxxxx", "edgecolor": BLACK}


@style.styled
def links(
    run, lanes: Sequence[str] = (), *, kinds: Mapping[str, str] | None = None, names={}, title: str
) -> Figure:
    """A `simulate.links.Run`: its lanes, or those named, downwards.

    `kinds`, {start of a task's name: "forward"}, colours work by meaning, which the legend calls so or as in
    `names`. Before its last task a lane of work waits wherever it does nothing."""
    lanes = list(lanes) or list(dict.fromkeys(task.lane for task in run.tasks.values()))
    if not 0 < len(lanes) <= 24 or any(not run.lane(lane) for lane in lanes):
        empty = [lane for lane in lanes if not run.lane(lane)]
        raise ValueError(f"{len(lanes)} lanes, empty: {empty}; draw 1 to 24 lanes that have tasks")
    unit, scale = style.unit_for(float(run.end_s), "s")
    figure, ax = style.canvas(height=1.2 + 0.26 * len(lanes))
    drawn: dict[str, Patch] = {}
    for y, lane in enumerate(lanes):
        bars: dict[str, list] = {}
        for name in run.lane(lane):
            task = run.tasks[name]
            full = min((run.bytes_per_s[link] for link in task.links), default=1)
            for piece in run.pieces[name]:
                what = _kind(name, kinds or {}) if not task.links else "copy"
                if piece.rate < full:
                    what = "copy that shares a link"
                bars.setdefault(what, []).append((float(piece.start_s), float(piece.end_s)))
        if not run.tasks[run.lane(lane)[0]].links:
            busy = sorted(span for spans in bars.values() for span in spans)
            bars["wait"] = outside([(0.0, busy[-1][1])], busy)
        for what, spans in bars.items():
            widths = [(start / scale, (end - start) / scale) for start, end in spans if end > start]
            look = _COPIES.get(what) or style.look_of(what)
            if widths:
                ax.broken_barh(widths, (y - 0.4, 0.8), **look, linewidth=0.4 * (what != "wait"))
                drawn.setdefault(what, Patch(**look, linewidth=0, label=names.get(what, what)))
    style.row_labels(ax, lanes)
    ax.set(xlim=(0, float(run.end_s) / scale or 1), xlabel=f"time ({unit})")
    return style.finished(figure, title, [drawn[what] for what in sorted(drawn)])


def _kind(name: str, kinds: Mapping[str, str]) -> str:
    fitting = [start for start in kinds if name.startswith(start)]
    return kinds[max(fitting, key=len)] if fitting else "compute"


@style.styled
def side_by_side(runs: Runs, *, title: str) -> Figure:
    """{name: `ledger.timeline()`}, side by side."""
    if not 0 < len(runs) <= 4 or any(not timeline for timeline in runs.values()):
        raise ValueError(f"{len(runs)} runs, some perhaps empty; draw 1 to 4 runs, each with a timeline")
    moments = [live for timeline in runs.values() for _, live in timeline]
    kinds = [kind for kind in dict.fromkeys(chain(*moments)) if any(live.get(kind) for live in moments)]
    most = max(sum(live.values()) for live in moments)
    unit, scale = style.unit_for(most, "bytes")
    figure, panels = style.panels(runs, height=2.9)
    for ax, timeline in zip(panels, runs.values()):
        stack, _ = style.stack_of_kinds(ax, timeline, kinds, unit, scale, shift=(5, 4), fontsize=8)
    panels[(len(panels) - 1) // 2].set_xlabel("operators and collectives, in order")  # of all panels
    panels[0].set(ylim=(0, 1.2 * most / scale or 1), ylabel=f"live memory ({unit})")
    return style.finished(figure, title, stack[::-1])


@style.styled
def pareto(
    points: Sequence[tuple], *, title: str, ylabel="extra time", unit="s", chosen="", crowded: bool = False
) -> Figure:
    """(name, bytes, extra time) of each choice; a line through those that no other beats in both, named, with
    a ring around the one that is `chosen`. Where it is `crowded`, time has a logarithmic axis and names stand
    in the legend."""
    if not points:
        raise ValueError("no points; give (name, bytes, extra time) of each choice")
    front = []
    for name, size, extra in sorted(points, key=lambda point: point[1:]):
        if not front or extra < front[-1][2]:
            front.append((name, size, extra))
    beaten = [point for point in points if point not in front]
    shown, scale = style.unit_for(max(size for _, size, _ in points), "bytes")
    seconds, per = style.unit_for(max(extra for _, _, extra in points), unit)
    figure, ax = style.canvas(height=4.4 if crowded else 3.2)
    x, y = ([point[i] / by for point in front] for i, by in ((1, scale), (2, per)))
    ax.step(x, y, where="post", color=style.BLUE, linewidth=1.2)
    best = ax.scatter(x, y, s=28, color=style.BLUE, zorder=3, label="no other is better in both")
    handles = [best]
    if beaten:
        spots = [point[1] / scale for point in beaten], [point[2] / per for point in beaten]
        handles.append(ax.scatter(*spots, s=18, color=GREY, marker="x", label="beaten"))
    ring = dict(facecolors="none", edgecolors=BLACK, linewidths=1.5, zorder=4)
    for (name, _, _), a, b in zip(front, x, y):
        marker = "o" if name == chosen else "s"
        if name and (crowded or name == chosen):
            spot = ax.scatter([a], [b], s=140, marker=marker, label=name, **ring)
            handles += [spot] * crowded
        if not crowded:
            below = dict(textcoords="offset points", fontsize=7, ha="right", va="top")  # where no choice is
            ax.annotate(name, (a, b), (-4, -3), **below)
    if crowded:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=f"memory ({shown})", ylabel=f"{ylabel} ({seconds})")
    ax.margins(x=0.16, y=0.12)
    return style.finished(figure, title, handles)


@style.styled
def roofs(
    shares: Sequence[float], phases: Mapping[str, Series], *, title: str, chosen: float | None = None
) -> Figure:
    """{phase: {what: seconds at each share that is swapped}}, a panel each; the thick line is the highest."""
    whats = list(dict.fromkeys(what for lines in phases.values() for what in lines))
    if not whats or len(whats) > len(CYCLE) - 1:
        raise ValueError(f"{len(whats)} resources {whats}; draw 1 to {len(CYCLE) - 1}")
    x = numpy.array(shares, dtype=float)
    figure, panels = style.panels(phases, height=2.9)
    handles: dict[str, Line2D] = {}
    for ax, lines in zip(panels, phases.values()):
        top = numpy.max([numpy.array(seconds, dtype=float) for seconds in lines.values()], axis=0)
        (handles["busiest"],) = ax.plot(x, top, color=PALE, linewidth=7, label="busiest: the phase's time")
        for what, seconds in lines.items():
            i = whats.index(what)
            look = {"color": CYCLE[i], "linestyle": DASHES[i % len(DASHES)], "label": what}
            (handles[what],) = ax.plot(x, numpy.array(seconds, dtype=float), **look)
        if chosen is not None:
            ax.axvline(chosen, color=BLACK, linestyle=":", linewidth=1)
            where = {"textcoords": "offset points", "va": "top", "fontsize": 8}
            place = {"xycoords": ax.get_xaxis_transform(), "ha": "right" if chosen > 0.6 else "left"}
            ax.annotate(f"{chosen:.2f}", (chosen, 1), (-3 if chosen > 0.6 else 3, -2), **where, **place)
        ax.set(xlabel="share of activations that is swapped", xlim=(x[0], x[-1]))
    panels[0].set_ylabel("busy (s)")
    panels[0].set_ylim(bottom=0)
    return style.finished(figure, title, [handles[what] for what in (*whats, "busiest")])
