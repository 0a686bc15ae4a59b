"""The picture of `plot.pipeline.schedule` as SVG, written as text: for a widget that draws it at every drag.

    drawn(*simulations, peaks=[[4, 3, 2, 1]], alt="what it shows") -> "<svg ..>"

Same colours, shades, dots and legend. Boxes of one colour are one path, so two schedules of 8 ranks and 24
microbatches take a few hundredths of a second of processor time, where matplotlib takes nearly one.
"""

from collections.abc import Sequence
from html import escape

from minitrain.plot import pipeline, style
from minitrain.plot.style import COLOURS, GREY

WIDTH, LEFT, RIGHT, ROW = 860.0, 52.0, 44.0, 21.0  # pixels
_DOTS = (
    f'<pattern id="idle" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" height="4" '
    f'fill="{COLOURS["idle"]}"/><circle cx="2" cy="2" r="0.7" fill="{GREY}"/></pattern>'
)
_LETTER = 5.6  # pixels of a letter at 10 pixels


def drawn(*simulations, peaks: Sequence | None = None, alt: str = "") -> str:
    """Ranks down, time to the right, one schedule below the other. `peaks[i][rank]` stands beside a row."""
    if not simulations:
        raise ValueError("pipeline_svg.drawn: no schedules; give at least one simulation")
    end = float(max(simulation.makespan for simulation in simulations))
    scale, top, parts = (WIDTH - LEFT - RIGHT) / end, 0.0, []
    for simulation, beside in zip(simulations, peaks or [None] * len(simulations)):
        parts += _panel(simulation, beside, scale, top)
        top += 26 + ROW * len(simulation.spans)
    parts += _axis(end, scale, top)
    entries, height = _legend(pipeline.shades_of(simulations, end), top + 34)
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    look = 'font-family="DejaVu Sans, Arial, sans-serif" font-size="10"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join([f"<title>{escape(alt)}</title><defs>{_DOTS}</defs>{back}", *parts, *entries])
    return f'{head} role="img" {look}>\n{body}\n</svg>\n'


def _panel(simulation, beside: Sequence | None, scale: float, top: float) -> list[str]:
    parts = [_text(LEFT, top + 15, pipeline.headline(simulation), 11)]
    boxes: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {"#000000": [], "white": []}
    width = float(simulation.makespan) * scale
    for rank, spans in enumerate(simulation.spans):
        middle = top + 24 + ROW * (rank + 0.5)
        parts.append(_text(LEFT - 6, middle + 3.5, f"rank {rank}", anchor="end"))
        place = f'x="{LEFT:.0f}" y="{middle - 0.42 * ROW:.1f}" width="{width:.1f}" height="{0.84 * ROW:.1f}"'
        parts.append(f'<rect {place} fill="url(#idle)"/>')
        if beside is not None:
            parts.append(_text(LEFT + width + 5, middle + 3.5, f"{float(beside[rank]):.3g}"))
        stages = simulation.schedule.stages_of(rank)
        colours: dict = {}  # by kind and stage
        for entry, start, stop in spans:
            x, across = LEFT + float(start) * scale, float(stop - start) * scale
            for action, above, high in pipeline.halves(entry):
                if (colour := colours.get(action[:2])) is None:
                    colour = colours[action[:2]] = pipeline.fill(action, stages)
                path = f"M{x:.1f} {middle + above * ROW:.1f}h{across:.1f}v{high * ROW:.1f}h{-across:.1f}z"
                boxes.setdefault(colour, []).append(path)
                size = 8 if high > 0.5 else 7
                if across > 0.66 * size * len(number := str(action.microbatch)):
                    y = middle + (above + high / 2) * ROW + 0.36 * size
                    label = f'<text x="{x + across / 2:.1f}" y="{y:.1f}" font-size="{size}">{number}</text>'
                    numbers[style.ink_on(colour)].append(label)
    if beside is not None:
        parts.append(_text(LEFT + width + 5, top + 15, "peak", 9, colour=GREY))
    for colour, paths in boxes.items():
        parts.append(f'<path fill="{colour}" stroke="white" stroke-width="0.7" d="{"".join(paths)}"/>')
    for ink, labels in numbers.items():
        parts.append(f'<g fill="{ink}" text-anchor="middle">{"".join(labels)}</g>')
    return parts


def _axis(end: float, scale: float, top: float) -> list[str]:
    """Some eight ticks at 1, 2 or 5 times a power of ten."""
    steps = (digit * 10.0**power for power in range(-6, 12) for digit in (1, 2, 5))
    step = next(step for step in steps if end / step <= 10)
    parts = [f'<path stroke="{GREY}" d="M{LEFT:.0f} {top + 3:.1f}h{end * scale:.1f}"/>']
    for tick in range(int(end / step) + 1):
        x = LEFT + tick * step * scale
        parts.append(f'<path stroke="{GREY}" d="M{x:.1f} {top + 3:.1f}v4"/>')
        parts.append(_text(x, top + 17, f"{tick * step:g}", anchor="middle"))
    return [*parts, _text((WIDTH + LEFT - RIGHT) / 2, top + 29, "time", anchor="middle")]


def _legend(shades: pipeline.Shades, top: float) -> tuple[list[str], float]:
    """The entries, in as many lines as they need, and where they end."""
    parts, x = [], LEFT
    for what, colours in [*shades.items(), ("idle", ["url(#idle)"])]:
        label, each = pipeline.words(what, colours), 22 / len(colours)
        width = 30 + _LETTER * len(label) + 16
        if x > LEFT and x + width > WIDTH:
            x, top = LEFT, top + 16
        for number, colour in enumerate(colours):
            place = f'x="{x + number * each:.1f}" y="{top:.1f}" width="{each:.1f}" height="10"'
            parts.append(f'<rect {place} fill="{colour}"/>')
        parts.append(_text(x + 28, top + 9, label))
        x += width
    return parts, top + 18


def _text(x: float, y: float, text: str, size: int = 10, anchor: str = "start", colour: str = "black") -> str:
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
