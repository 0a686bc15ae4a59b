"""Drag it: choose a schedule, its sizes and what each action costs; picture, bubble and memory follow.

    explore()                       in a notebook: two menus of schedules, sliders for p, m, v and the costs
    picture(names, sizes, costs)    the same without a widget: the figure, and a line for each schedule

`v` is what a schedule has several of: stages of a rank (interleaved, breadth-first), waves (Hanayo), slices
of a sequence (TeraPipe, Seq1F1B). A rank has the same work and memory for all v: a stage costs 1/v of them.
What a schedule refuses (fewer microbatches than it needs, odd p) is shown as the line that it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import ipywidgets
from matplotlib.figure import Figure

from minitrain.pipeline.schedule import Schedule, check, peak
from minitrain.pipeline.schedules.chimera import chimera
from minitrain.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from minitrain.pipeline.schedules.hanayo import hanayo
from minitrain.pipeline.schedules.one_direction import breadth_first, gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedules.slices import seq1f1b, terapipe
from minitrain.pipeline.schedules.v_shape import v_half, v_min, zb_v
from minitrain.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_interleaved
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plot import pipeline as plot_pipeline
from minitrain.plot.controls import followed, menus, slider

SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "GPipe": lambda p, m, v: gpipe(p, m),
    "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "interleaved 1F1B": interleaved,
    "breadth-first": breadth_first,
    "ZB-H1": lambda p, m, v: zb_h1(p, m),
    "ZB-H2": lambda p, m, v: zb_h2(p, m),
    "interleaved zero bubble": zb_interleaved,
    "ZB-V": lambda p, m, v: zb_v(p, m),
    "V-Half": lambda p, m, v: v_half(p, m),
    "V-Min": lambda p, m, v: v_min(p, m),
    "Chimera": lambda p, m, v: chimera(p, m),
    "Hanayo": hanayo,
    "DualPipe": lambda p, m, v: dualpipe(p, m),
    "DualPipeV": lambda p, m, v: dualpipe_v(p, m),
    "TeraPipe": terapipe,
    "Seq1F1B": seq1f1b,
}


def picture(names: Sequence[str], p: int, m: int, v: int, costs: Costs) -> tuple[Figure | None, list[str]]:
    """The schedules below each other, and for each name its bubble and peak, or why it cannot be made."""
    simulations, peaks, lines = [], [], []
    for name in names:
        try:
            schedule = check(SCHEDULES[name](p, m, v))
        except ValueError as error:
            lines.append(f"{name}: {error}")
            continue
        share = Fraction(p, schedule.stages * schedule.slices)
        simulation = simulate(schedule, scaled(costs, share))
        simulations.append(simulation)
        peaks.append([peak(schedule, rank) * share for rank in range(p)])
        found = f"bubble {float(simulation.bubble):.1%}, makespan {float(simulation.makespan):.4g}"
        most = f"at most {float(max(peaks[-1])):.3g} microbatches' activations on a rank"
        lines.append(f"{name}: {found}, {most}")
    return (plot_pipeline.schedule(*simulations, peaks=peaks) if simulations else None), lines


def scaled(costs: Costs, share: Fraction) -> Costs:
    """Costs of a stage that is this share of a rank's usual one; a message takes what it takes."""
    return Costs(F=costs.F * share, I=costs.I * share, W=costs.W * share, send=costs.send)


def explore(first: str = "1F1B", second: str = "ZB-H1") -> ipywidgets.VBox:
    """Menus and sliders above a picture that follows them."""
    sizes = [slider("p", 1, 4, 8), slider("m", 1, 8, 24), slider("v", 1, 2, 4)]
    costs = [slider("cost F", 1, 2, 6), slider("cost I", 1, 2, 6), slider("cost W", 0, 2, 6)]
    costs.append(slider("cost send", 0, 0, 6))

    def draw(names: list, sizes: list, costs: list) -> tuple[Figure | None, list[str]]:
        F, I, W, send = costs
        return picture(names, *sizes, Costs(F=F, I=I, W=W, send=send))

    return followed([menus(SCHEDULES, first, second), sizes, costs], draw)
