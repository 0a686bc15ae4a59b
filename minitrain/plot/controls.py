"""Controls above a picture that follows them: what every widget of the course is made of."""

from collections.abc import Callable, Iterable, Sequence

import ipywidgets
from matplotlib.figure import Figure

from minitrain.plot.style import png


def slider(name: str, low: int, value: int, high: int) -> ipywidgets.IntSlider:
    """A whole number from low to high."""
    return ipywidgets.IntSlider(min=low, value=value, max=high, description=name, continuous_update=False)


def menus(options: Iterable[str], first: str, second: str) -> list[ipywidgets.Dropdown]:
    """Two menus of the same names, for the picture above and the one below."""
    chosen = {"above": first, "below": second}
    return [ipywidgets.Dropdown(options=list(options), value=v, description=w) for w, v in chosen.items()]


def followed(rows: Sequence[Sequence], picture: Callable[..., tuple[Figure | None, Sequence[str]]]):
    """Rows of controls above the lines and the figure of picture(values of a row, ..), which follow every
    change; without a figure the last one stays."""
    image, text = ipywidgets.Image(format="png"), ipywidgets.HTML()

    def follow(_=None) -> None:
        figure, lines = picture(*([control.value for control in row] for row in rows))
        text.value = "<br>".join(lines)
        if figure is not None:
            image.value = png(figure)

    for row in rows:
        for control in row:
            control.observe(follow, names="value")
    follow()
    return ipywidgets.VBox([*map(ipywidgets.HBox, rows), text, image])
