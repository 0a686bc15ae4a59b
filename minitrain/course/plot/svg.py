"""Pictures as SVG, written as text: for widgets, which draw at every drag. Words, an axis, a page.

page(height, parts, alt="what it shows") -> "<svg ..>"        860 pixels wide, white
"""

from collections.abc import Iterable
from html import escape

from minitrain.course.plot.style import COLOURS, GREY

WIDTH = 860.0  # pixels
IDLE = "url(#idle)"  # a fill: dots, for what does nothing
LETTER = 5.6  # pixels of a letter at 10 pixels
_DOTS = (
    f'<pattern id="idle" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" height="4" '
    f'fill="{COLOURS["idle"]}"/><circle cx="2" cy="2" r="0.7" fill="{GREY}"/></pattern>'
)


def page(height: float, parts: Iterable[str], alt: str = "") -> str:
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    look = 'font-family="DejaVu Sans, Arial, sans-serif" font-size="10"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join([f"<title>{escape(alt)}</title><defs>{_DOTS}</defs>{back}", *parts])
    return f'{head} role="img" {look}>\n{body}\n</svg>\n'


def text(x: float, y: float, label: str, size: int = 10, anchor: str = "start", colour: str = "black") -> str:
    look = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(label)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{round(height, 1):g}"'
    return f'<rect {place} fill="{fill}"/>'


def axis(end: float, scale: float, left: float, right: float, top: float, label: str) -> list[str]:
    """Some eight ticks at 1, 2 or 5 times a power of ten, from 0 to `end` of `scale` pixels each."""
    steps = (digit * 10.0**power for power in range(-6, 12) for digit in (1, 2, 5))
    step = next(step for step in steps if end / step <= 10)
    parts = [f'<path stroke="{GREY}" d="M{left:.0f} {top + 3:.1f}h{end * scale:.1f}"/>']
    for tick in range(int(end / step) + 1):
        x = left + tick * step * scale
        parts.append(f'<path stroke="{GREY}" d="M{x:.1f} {top + 3:.1f}v4"/>')
        parts.append(text(x, top + 17, f"{tick * step:g}", anchor="middle"))
    return [*parts, text((WIDTH + left - right) / 2, top + 29, label, anchor="middle")]


def legend(entries: Iterable[tuple[str, list[str]]], left: float, top: float) -> tuple[list[str], float]:
    """The entries, words and colours each, in as many lines as they need, and where they end."""
    parts, x = [], left
    for words, colours in entries:
        each, width = 22 / len(colours), 30 + LETTER * len(words) + 16
        if x > left and x + width > WIDTH:
            x, top = left, top + 16
        for number, colour in enumerate(colours):
            parts.append(box(x + number * each, top, each, 10, colour))
        parts.append(text(x + 28, top + 9, words))
        x += width
    return parts, top + 18
