"""Controls above a picture that follows them: what every widget of the course is made of.

A picture is a figure, or SVG as text. Where a notebook has no kernel (a saved one, a page made of it), the
picture at the first setting stands in place of the controls.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from html import escape

import ipywidgets
from matplotlib.figure import Figure

from minitrain.course.plot.style import png

PAUSE_S = 0.12  # a drag is over when nothing has changed for so long
Drawn = tuple[Figure | str | None, Sequence[str]]  # a picture, or none, and the lines above it


_LOOK = {"style": {"description_width": "150px"}, "layout": {"width": "420px"}}


def slider(name: str, low: int, value: int, high: int) -> ipywidgets.IntSlider:
    """A whole number from low to high, which follows the mouse."""
    return ipywidgets.IntSlider(min=low, value=value, max=high, description=name, **_LOOK)


def steps(name: str, values: Sequence, value) -> ipywidgets.SelectionSlider:
    """One of some values in order, which follows the mouse."""
    return ipywidgets.SelectionSlider(options=list(values), value=value, description=name, **_LOOK)


def menu(name: str, options: Iterable[str], value: str) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=list(options), value=value, description=name)


def menus(options: Iterable[str], first: str, second: str) -> list[ipywidgets.Dropdown]:
    """Two menus of the same names, for the picture above and the one below."""
    chosen = {"above": first, "below": second}
    return [menu(place, options, value) for place, value in chosen.items()]


class Followed(ipywidgets.VBox):
    """Controls, lines and a picture; `drawn` tells how often it was drawn."""

    still: Figure | str | None = None  # the picture at the first setting
    alt = ""
    drawn = 0

    def _repr_mimebundle_(self, **settings) -> tuple[dict, dict]:
        data = dict(super()._repr_mimebundle_(**settings) or {})
        data["text/plain"] = f"<controls: {self.alt}>"
        if isinstance(self.still, str):
            return data | {"image/svg+xml": self.still}, {"image/svg+xml": {"alt": self.alt}}
        if self.still is not None:
            drawn, about = self.still._repr_png_()
            return data | {"image/png": drawn}, {"image/png": about | {"alt": self.alt}}
        return data, {}


def followed(rows: Sequence[Sequence], picture: Callable[..., Drawn], alt: str = "") -> Followed:
    """Rows of controls above the lines and the picture of picture(values of a row, ..), which follow every
    change once it has paused; without a picture the last one stays. `alt` says what it shows."""
    image, text = ipywidgets.Image(layout={"max_width": "720px"}), ipywidgets.HTML()
    box = Followed([*map(ipywidgets.HBox, rows), text, image])
    waiting: list[asyncio.TimerHandle] = []

    def follow() -> Figure | str | None:
        drawn, lines = picture(*([control.value for control in row] for row in rows))
        box.drawn += 1
        text.value = "<br>".join(escape(line, quote=False) for line in lines)
        if isinstance(drawn, str):
            image.format, image.value = "svg+xml", drawn.encode()
        elif drawn is not None:
            image.format, image.value = "png", png(drawn)
        return drawn

    def changed(_) -> None:
        while waiting:
            waiting.pop().cancel()
        try:
            loop = asyncio.get_running_loop()  # a kernel's
        except RuntimeError:
            follow()
        else:
            waiting.append(loop.call_later(PAUSE_S, follow))

    for row in rows:
        for control in row:
            control.observe(changed, names="value")
    box.alt = alt
    box.still = follow()
    return box
