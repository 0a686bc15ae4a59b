"""Drag it: choose two schedules, their sizes and what each action costs; picture, bubbles and memory follow.

`v` is what a schedule has several of: stages of a rank (interleaved, breadth-first), waves (Hanayo), slices
of a sequence (TeraPipe, Seq1F1B). A rank has the same work and memory for all v: a stage costs 1/v of them.
A forward and a backward that run as one (DualPipe) cost `FB`, 0 for the sum of both. What a schedule refuses
(fewer microbatches than it needs, odd p) is shown as the line that it raises, and so is what no machine could
do: nothing that takes time, or a pair that is over before its longer half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import ipywidgets

from minitrain.course.plot import pipeline_svg
from minitrain.course.plot.controls import Drawn, followed, menus, slider
from minitrain.pipeline.schedule import Schedule, check, peak
from minitrain.pipeline.schedules import bidirectional, one_direction, zero_bubble
from minitrain.pipeline.simulate import Costs, simulate

SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "GPipe": lambda p, m, v: one_direction.gpipe(p, m),
    "1F1B": lambda p, m, v: one_direction.one_f_one_b(p, m),
    "interleaved 1F1B": one_direction.interleaved,
    "breadth-first": one_direction.breadth_first,
    "ZB-H1": lambda p, m, v: zero_bubble.zb_h1(p, m),
    "ZB-H2": lambda p, m, v: zero_bubble.zb_h2(p, m),
    "interleaved zero bubble": zero_bubble.zb_interleaved,
    "ZB-V": lambda p, m, v: zero_bubble.zb_v(p, m),
    "V-Half": lambda p, m, v: zero_bubble.v_half(p, m),
    "V-Min": lambda p, m, v: zero_bubble.v_min(p, m),
    "Chimera": lambda p, m, v: bidirectional.chimera(p, m),
    "Hanayo": bidirectional.hanayo,
    "DualPipe": lambda p, m, v: bidirectional.dualpipe(p, m),
    "DualPipeV": lambda p, m, v: bidirectional.dualpipe_v(p, m),
    "TeraPipe": one_direction.terapipe,
    "Seq1F1B": one_direction.seq1f1b,
}
SIZES = {"ranks p": (1, 4, 8), "microbatches m": (1, 8, 24), "stages per rank v": (1, 2, 4)}
COSTS = {
    "forward F": (0, 2, 6),
    "input gradient I": (0, 2, 6),
    "weight gradient W": (0, 2, 6),
    "fused F&B (0: the sum)": (0, 0, 18),
    "message": (0, 0, 6),
}


def picture(names: Sequence[str], p: int, m: int, v: int, costs: Costs) -> Drawn:
    """The schedules below each other, and for each name its bubbles and peak, or why it cannot be made."""
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
        bubbles = f"bubble share {float(simulation.bubble):.1%}, overhead {float(simulation.overhead):.1%}"
        most = f"at most {float(max(peaks[-1])):.3g} microbatches' activations on a rank"
        lines.append(f"{name}: {bubbles}, makespan {float(simulation.makespan):.4g}, {most}")
    if not simulations:
        return None, lines
    return pipeline_svg.drawn(*simulations, peaks=peaks, alt="; ".join(lines)), lines


def scaled(costs: Costs, share: Fraction) -> Costs:
    """Costs of a stage that is this share of a rank's usual one; a message takes what it takes."""
    pair = None if costs.FB is None else costs.FB * share
    return Costs(F=costs.F * share, I=costs.I * share, W=costs.W * share, FB=pair, send=costs.send)


def possible(F: int, I: int, W: int, FB: int, send: int) -> Costs:
    """The costs that the sliders say. ValueError for what no machine could do."""
    if not F + I + W:
        raise ValueError("costs: F, I and W are all 0, so there is no time to draw; make one of them longer")
    if FB and FB < max(F, I + W):
        rule = f"as one they cannot be faster than the longer of them; use {max(F, I + W)} or more, or 0"
        raise ValueError(f"costs: a fused F&B of {FB} beside F = {F} and B = I + W = {I + W}; {rule}")
    return Costs(F=F, I=I, W=W, FB=FB or None, send=send)


def explore(first: str = "1F1B", second: str = "ZB-H1") -> ipywidgets.VBox:
    """Menus and sliders above a picture that follows them."""
    sizes = [slider(name, *range_) for name, range_ in SIZES.items()]
    costs = [slider(name, *range_) for name, range_ in COSTS.items()]

    def draw(names: list, sizes: list, *costs: list) -> Drawn:
        try:
            made = possible(*(cost for row in costs for cost in row))
        except ValueError as error:
            return None, [str(error)]
        return picture(names, *sizes, made)

    alt = f"{first} above {second}: what each rank does when, with four ranks and eight microbatches"
    return followed([menus(SCHEDULES, first, second), sizes, costs[:3], costs[3:]], draw, alt)
