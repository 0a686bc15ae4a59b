"""Where tokens go: lines from tokens or ranks to experts, the choices of routers, bytes between ranks."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CYCLE, PALE, ink_on

_PALE_BLUE = "#DCEBF5"
Table = Sequence[Sequence[float]]


@style.styled
def flow(
    table: Table, sources: Sequence[str], targets: Sequence[str], *, title: str, owners=(), height=3.0
) -> Figure:
    """Lines as wide as the counts, table[source][target]; a box is as tall as what meets in it. Targets with
    one number in `owners`, a rank each, have one colour, and so have the lines to them."""
    owners, gap = list(owners) or [0] * len(targets), 0.05
    total = sum(map(sum, table)) or 1
    arriving = [sum(row[target] for row in table) for target in range(len(targets))]
    figure, ax = style.canvas(height=height)
    left, right = _stacked([sum(row) for row in table], total, gap), _stacked(arriving, total, gap)
    for x, boxes, names in ((0.0, left, sources), (1.0, right, targets)):
        for i, ((low, tall), name) in enumerate(zip(boxes, names, strict=True)):
            colour = CYCLE[owners[i] % len(CYCLE)] if x else "#666666"
            ax.add_patch(Rectangle((x - 0.012, low), 0.024, max(tall, 0.004), facecolor=colour, linewidth=0))
            place = {"ha": "left" if x else "right", "va": "center", "fontsize": 8}
            ax.text(x + (0.02 if x else -0.02), low + tall / 2, name, **place)
    begins, ends = [low for low, _ in left], [low for low, _ in right]
    for source, row in enumerate(table):
        for target, amount in enumerate(row):
            wide = amount / total
            if amount:
                a, b, colour = begins[source], ends[target], CYCLE[owners[target] % len(CYCLE)]
                corners = [(0.012, a), (0.988, b), (0.988, b + wide), (0.012, a + wide)]
                look = {"facecolor": colour, "alpha": 0.55, "edgecolor": "white", "linewidth": 0.5}
                ax.add_patch(Polygon(corners, **look))
            begins[source], ends[target] = begins[source] + wide, ends[target] + wide
    ax.set(xlim=(-0.25, 1.3), ylim=(1 + gap * max(len(left), len(right)), -0.03))
    ax.set_axis_off()
    ranks = sorted(set(owners)) if len(set(owners)) > 1 else []
    colours = [(CYCLE[rank % len(CYCLE)], f"rank {rank}'s experts") for rank in ranks]
    return style.finished(figure, title, [Patch(facecolor=c, label=label) for c, label in colours])


def _stacked(amounts: Sequence[float], total: float, gap: float) -> list[tuple[float, float]]:
    """(top, height) of each box, one under the other."""
    boxes, at = [], 0.0
    for amount in amounts:
        boxes.append((at, amount / total))
        at += amount / total + gap
    return boxes


@style.styled
def choices(panels: Mapping[str, Table], *, title: str) -> Figure:
    """{router: weights[token][expert]}, 0 where a token does not go. Dropped choices may be negative."""
    tokens, experts = len(next(iter(panels.values()))), len(next(iter(panels.values()))[0])
    side = min(0.3, (style.WIDTH - 0.6) / len(panels) / (experts + 1.2))
    figure, axes = style.grid_of_panels(1, len(panels), height=1.05 + side * tokens)
    for ax, (name, weights) in zip(axes, panels.items()):
        style.cells(
            ax, weights, lambda x: (style.blend(_PALE_BLUE, BLUE, min(1.0, x)) if x > 0 else "white", "")
        )
        ax.set_xticks(range(experts), [sum(row[e] > 0 for row in weights) for e in range(experts)])
        ax.set_title(name, fontsize=8)
    axes[0].set_yticks(range(tokens), [f"token {token}" for token in range(tokens)])
    patches = [Patch(facecolor=_PALE_BLUE, label="weight near 0"), Patch(facecolor=BLUE, label="weight 1")]
    return style.finished(figure, title, patches)


@style.styled
def heat(table: Table, *, title: str, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Numbers in cells; the diagonal, what stays at home, is grey."""
    most = max((x for i, row in enumerate(table) for j, x in enumerate(row) if i != j), default=1) or 1
    figure, ax = style.canvas(height=0.9 + 0.42 * len(rows))
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    for i, row in enumerate(table):
        for j, amount in enumerate(row):
            colour = PALE if i == j else style.blend("#FFFFFF", BLUE, 0.9 * amount / most)
            ax.add_patch(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="#CCCCCC"))
            ax.text(j, i, f"{amount:,}", **style.CENTRED, fontsize=9, color=ink_on(colour))
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.xaxis.tick_top()
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return style.finished(figure, title)
