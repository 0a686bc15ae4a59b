"""The picture of `plot.pipeline.schedule` as SVG, written as text: for a widget that draws it at every drag.

    drawn(*simulations, peaks=[[4, 3, 2, 1]], alt="what it shows") -> "<svg ..>"

Same colours, shades, dots and legend. Boxes of one colour are one path, so two schedules of 8 ranks and 24
microbatches take a few hundredths of a second of processor time, where matplotlib takes nearly one.
"""

from collections.abc import Sequence

from minitrain.course.plot import pipeline_charts, style, svg
from minitrain.course.plot.style import GREY
from minitrain.course.plot.svg import WIDTH, text

LEFT, RIGHT, ROW = 52.0, 44.0, 21.0  # pixels


def drawn(*simulations, peaks: Sequence | None = None, alt: str = "") -> str:
    """Ranks down, time to the right, one schedule below the other. `peaks[i][rank]` stands beside a row."""
    if not simulations:
        raise ValueError("pipeline_svg.drawn: no schedules; give at least one simulation")
    end = float(max(simulation.makespan for simulation in simulations))
    scale, top, parts = (WIDTH - LEFT - RIGHT) / end, 0.0, []
    for simulation, beside in zip(simulations, peaks or [None] * len(simulations)):
        parts += _panel(simulation, beside, scale, top)
        top += 26 + ROW * len(simulation.spans)
    parts += svg.axis(end, scale, LEFT, RIGHT, top, "time")
    shades = {**pipeline_charts.shades_of(simulations), "idle": [svg.IDLE]}
    labels = [pipeline_charts.label_of(what, colours) for what, colours in shades.items()]
    entries, height = svg.legend(zip(labels, shades.values()), LEFT, top + 34)
    return svg.page(height, [*parts, *entries], alt)


def _panel(simulation, beside: Sequence | None, scale: float, top: float) -> list[str]:
    parts = [text(LEFT, top + 15, pipeline_charts.headline(simulation), 11)]
    boxes: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {"#000000": [], "white": []}
    width = float(simulation.makespan) * scale
    for rank, spans in enumerate(simulation.spans):
        middle = top + 24 + ROW * (rank + 0.5)
        parts.append(text(LEFT - 6, middle + 3.5, f"rank {rank}", anchor="end"))
        place = f'x="{LEFT:.0f}" y="{middle - 0.42 * ROW:.1f}" width="{width:.1f}" height="{0.84 * ROW:.1f}"'
        parts.append(f'<rect {place} fill="{svg.IDLE}"/>')
        if beside is not None:
            parts.append(text(LEFT + width + 5, middle + 3.5, f"{float(beside[rank]):.3g}"))
        stages = simulation.schedule.stages_of(rank)
        colours: dict = {}  # by kind and stage
        for entry, start, stop in spans:
            x, across = LEFT + float(start) * scale, float(stop - start) * scale
            for action, above, high in pipeline_charts.halves(entry):
                if (colour := colours.get(action[:2])) is None:
                    colour = colours[action[:2]] = pipeline_charts.fill(action, stages)
                path = f"M{x:.1f} {middle + above * ROW:.1f}h{across:.1f}v{high * ROW:.1f}h{-across:.1f}z"
                boxes.setdefault(colour, []).append(path)
                size = 8 if high > 0.5 else 7
                if across > 0.66 * size * len(number := str(action.microbatch)):
                    y = middle + (above + high / 2) * ROW + 0.36 * size
                    label = f'<text x="{x + across / 2:.1f}" y="{y:.1f}" font-size="{size}">{number}</text>'
                    numbers[style.ink_on(colour)].append(label)
    if beside is not None:
        parts.append(text(LEFT + width + 5, top + 15, "peak", 9, colour=GREY))
    for colour, paths in boxes.items():
        parts.append(f'<path fill="{colour}" stroke="white" stroke-width="0.7" d="{"".join(paths)}"/>')
    for ink, labels in numbers.items():
        parts.append(f'<g fill="{ink}" text-anchor="middle">{"".join(labels)}</g>')
    return parts
