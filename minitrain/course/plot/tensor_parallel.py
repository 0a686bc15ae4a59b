"""Which slices of a layer's matrices each rank holds, and what flows through the layer on one rank."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minitrain.course.plot import style

WHOLE, COLUMNS, TOKENS = "#BBBBBB", style.SKY, style.GREEN
FIRST_HALF = ["x", "norm", "f", "q, k, v", "core", "g", "Σ out", "dropout,\n+ x"]
SECOND_HALF = ["x", "norm", "f", "up", "GELU", "g", "Σ down", "dropout,\n+ x"]
MEANING = {WHOLE: "all tokens and features, the same on all ranks", TOKENS: "this rank's tokens"}


@style.styled
def columns_then_rows(*, ranks: int, title: str) -> Figure:
    """The idea: X · A by columns, an activation, · B by rows, and one sum. Colours are ranks."""
    figure, ax = style.canvas(height=2.0)
    x = 0.0
    for name, wide, tall, cut, then in (
        ("X", 1.0, 0.8, None, "·"),
        ("A", 2.0, 1.0, "columns", "="),
        ("Y", 2.0, 0.8, "columns", "→"),
        ("GELU(Y)", 2.0, 0.8, "columns", "·"),
        ("B", 1.0, 2.0, "rows", "="),
        ("terms of Z", 1.2, 0.8, "terms", "sum\n→"),
        ("Z", 1.0, 0.8, None, ""),
    ):
        for rank in range(ranks):
            w = wide / ranks if cut == "columns" else 1.0
            t = tall / ranks if cut == "rows" else tall
            left = x + (rank * w if cut == "columns" else 0.14 * rank if cut == "terms" else 0)
            top = rank * t if cut == "rows" else 0.14 * rank if cut == "terms" else 0
            colour = style.CYCLE[rank] if cut else WHOLE
            ax.add_patch(Rectangle((left, top), w, t, facecolor=colour, edgecolor="white"))
        ax.text(x + wide / 2, -0.12, name, ha="center", va="bottom", fontsize=8)
        ax.text(x + wide + 0.32, 0.4, then, ha="center", va="center", fontsize=9)
        x += wide + 0.65
    ax.set(xlim=(-0.1, x - 0.4), ylim=(2.1, -0.5), aspect="equal")
    ax.set_axis_off()
    return style.finished(figure, title, _ranks(ranks) | {"the same on all ranks": WHOLE})


def _ranks(ranks: int) -> dict[str, str]:
    return {f"rank {rank}": style.CYCLE[rank] for rank in range(ranks)}


@style.styled
def slices(ranks: Sequence[Mapping[str, Sequence[int]]], *, width: int, title: str) -> Figure:
    """`ranks[r][matrix]` is (top, left, bottom, right) of what rank r holds; `width` numbers are one D."""
    figure, ax = style.canvas(height=2.9)
    left_edge, scale = 0.0, 1 / width
    for name in ranks[0]:
        tall, wide = (max(held[name][i] for held in ranks) * scale for i in (2, 3))
        for rank, held in enumerate(ranks):
            top, left, bottom, right = (edge * scale for edge in held[name])
            place = (left_edge + left, top), right - left, bottom - top
            ax.add_patch(Rectangle(*place, facecolor=style.CYCLE[rank], edgecolor="white"))
        shape = f"{'D' if tall == 1 else 'F'} × {'D' if wide == 1 else 'F'}"
        text = f"{name.split('.')[1]}\n{shape}"
        ax.text(left_edge + wide / 2, -0.12, text, ha="center", va="bottom", fontsize=8)
        left_edge += wide + (0.55 if name == "attention.out" else 0.25)
    ax.set(xlim=(-0.1, left_edge), ylim=(4.05, -0.8), aspect="equal")
    ax.set_axis_off()
    ax.text(2.45, 1.5, "attention: whole heads", ha="center", fontsize=8)
    ax.text(7.3, 1.5, "MLP: hidden units", ha="center", fontsize=8)
    return style.finished(figure, title, _ranks(len(ranks)))


@style.styled
def flow(f: tuple[str, str], g: tuple[str, str], *, tokens: float, title: str) -> Figure:
    """A layer on one of 4 ranks: f and g are (forward, backward), `tokens` the part held outside of them."""
    figure, ax = style.canvas(height=3.6)
    outside, short = (WHOLE, "T") if tokens == 1 else (TOKENS, "T/4")
    for line, names in enumerate((FIRST_HALF, SECOND_HALF)):
        x, y = 0.0, 2.35 * line
        for place, name in enumerate(names):
            if name in "fg":
                _exchange(ax, x, y, name, *(f if name == "f" else g))
                x += 1.5
                continue
            inside = 2 < place < 5
            wide = 0.25 * (4 if line else 1) if inside else 1.0
            tall, colour = (1.0, COLUMNS) if inside else (tokens, outside)
            ax.add_patch(Rectangle((x, y), wide, tall, facecolor=colour, edgecolor="white"))
            shape = f"[T, {'F' if line else 'D'}/4]" if inside else f"[{short}, D]"
            ax.text(x + wide / 2, y - 0.08, name, ha="center", va="bottom", fontsize=8)
            ax.text(x + wide / 2, y + 1.08, shape, ha="center", va="top", fontsize=7)
            x += max(wide, 0.75) + 0.3
    ax.set(xlim=(-0.2, 10.75), ylim=(3.85, -0.6))
    ax.set_axis_off()
    return style.finished(figure, title, {MEANING[outside]: outside, "this rank's features": COLUMNS})


def _exchange(ax: Axes, x: float, y: float, name: str, forward: str, backward: str) -> None:
    arrow = {"arrowstyle": "-|>", "linewidth": 1.2}
    ax.annotate("", (x + 1.35, y + 0.5), (x - 0.1, y + 0.5), arrowprops=arrow)
    look = {"fontsize": 11, "fontweight": "bold", "color": style.VERMILLION}
    ax.text(x + 0.6, y + 0.42, name, ha="center", va="bottom", **look)
    text = f"forward:\n{forward}\nbackward:\n{backward}"
    ax.text(x + 0.6, y + 0.62, text, ha="center", va="top", fontsize=7)


@style.styled
def masks(shown: Mapping[str, Tensor], *, title: str) -> Figure:
    """{name: booleans [rows, columns]}: a panel each, kept in grey, dropped in white."""
    figure, panels = style.grid_of_panels(1, len(shown), height=2.2)
    for ax, (name, mask) in zip(panels, shown.items()):
        ax.set_axis_on()
        ax.imshow(mask.numpy(), cmap="gray_r", vmin=0, vmax=1.6)
        ax.set(xticks=[], yticks=[])
        ax.grid(visible=False)
        ax.spines[:].set_visible(True)
        ax.set_title(name, fontsize=8)
    return style.finished(figure, title)
