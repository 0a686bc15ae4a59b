"""Ideas before code, for the first chapters: boxes and arrows that say what will be measured."""

from collections.abc import Sequence
from math import cos, pi, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minitrain.course.plot import style
from minitrain.course.plot.style import (
    BLACK,
    BLUE,
    CENTRED,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PALE_BLUE,
    SKY,
    ink_on,
)

Point = tuple[float, float]


@style.styled
def three_runs() -> Figure:
    """The reader's function, the three ways it runs, the one ledger behind them, and what is made of it."""
    figure, ax = _blank(height=2.5, right=10.2, top=4.2)
    _box(ax, (1.0, 2.0), "your function\nfn(...)", wide=1.7, colour=PALE_BLUE)
    ways = (
        (3.4, "launch.run(fn, ranks=4)\nprocesses of this machine"),
        (2.0, "torchrun script.py\nranks of a cluster job"),
        (0.6, "dryrun.run(fn, ranks=4096)\none rank, shapes without numbers"),
    )
    for y, text in ways:
        _box(ax, (4.35, y), text, wide=3.1, colour="white")
        _arrow(ax, (1.87, 2.0 + 0.12 * (y - 2.0)), (2.78, y))
        _arrow(ax, (5.92, y), (6.83, 2.0 + 0.12 * (y - 2.0)))
    _box(ax, (7.6, 2.0), "ledger\nbytes sent\nFLOPs\nlive memory", wide=1.5, tall=1.6, colour=PALE_BLUE)
    _arrow(ax, (8.37, 2.0), (8.87, 2.0))
    _box(ax, (9.5, 2.0), "tables,\npictures,\nreplay", wide=1.2, tall=1.2, colour="white")
    return style.finished(figure, "One function, three ways to run it, one account")


@style.styled
def one_matrix() -> Figure:
    """Forward multiplies X and W and keeps X; backward multiplies dY with each of them."""
    figure, ax = _blank(height=2.3, right=10.2, top=3.7)
    _box(ax, (0.8, 2.9), "X", wide=0.9, colour=SKY)
    _box(ax, (4.2, 2.9), "Y = X W\n2 FLOPs per weight and token", wide=3.2, colour=PALE_BLUE)
    _box(ax, (9.2, 2.9), "loss", wide=1.1, colour="white")
    _box(ax, (6.2, 0.7), "dX = dY Wᵀ\n2 FLOPs per weight and token", wide=3.2, colour=PALE_BLUE)
    _box(ax, (2.4, 0.7), "dW = Xᵀ dY\n2 FLOPs per weight and token", wide=3.2, colour=PALE_BLUE)
    _arrow(ax, (1.27, 2.9), (2.57, 2.9))
    _arrow(ax, (5.83, 2.9), (8.62, 2.9))
    _arrow(ax, (9.2, 2.46), (7.85, 0.9), ORANGE)
    _arrow(ax, (9.0, 2.46), (4.05, 1.0), ORANGE)
    _arrow(ax, (0.8, 2.46), (1.2, 1.17), SKY)
    ax.text(1.15, 1.7, "X is kept: an activation", fontsize=8, color=BLUE)
    ax.text(8.55, 1.45, "dY", fontsize=9, color=BLACK)
    title = "One matrix, one step: three products of equal size; X is kept for backward"
    return style.finished(figure, title)


@style.styled
def four_models() -> Figure:
    """An iteration of RLHF: who writes, who is asked, who is trained."""
    figure, ax = _blank(height=2.7, right=10.2, top=4.3)
    _box(ax, (0.7, 2.0), "prompts", wide=1.1, colour="white")
    _box(ax, (2.5, 2.0), "actor\nwrites answers", wide=1.7, colour=SKY)
    asked = (
        (3.4, "reward model: a score", PALE),
        (2.0, "reference: log π_ref of each token", PALE),
        (0.6, "critic: V of each token (PPO)", SKY),
    )
    for y, text, colour in asked:
        _box(ax, (5.5, y), text, wide=3.0, colour=colour)
        _arrow(ax, (3.37, 2.0 + 0.12 * (y - 2.0)), (3.98, y))
        _arrow(ax, (7.02, y), (7.53, 2.0 + 0.12 * (y - 2.0)))
    _box(ax, (8.7, 2.0), "advantages,\ntwo losses", wide=2.2, tall=1.1, colour="white")
    _arrow(ax, (1.27, 2.0), (1.63, 2.0))
    for start, corner, end in (((8.7, 2.57), 4.15, (2.5, 2.45)), ((8.7, 1.43), 0.6, (7.05, 0.6))):
        ax.plot([start[0]] * 2, [start[1], corner], color=ORANGE, linewidth=1.3)
        ax.plot([start[0], end[0]], [corner] * 2, color=ORANGE, linewidth=1.3)
        _arrow(ax, (end[0] + 0.01, corner), end, ORANGE)
    meaning = {"trained": SKY, "only asked": PALE, "update": ORANGE}
    return style.finished(
        figure, "Four models learn from rewards: two are trained, two are only asked", meaning
    )


@style.styled
def node(machine) -> Figure:
    """The devices of one node (`simulate.machines`), all joined by a switch, each with its network card."""
    count = machine.devices_per_node
    figure, ax = _blank(height=2.5, right=10.2, top=4.3)
    places = [0.75 + 8.7 * i / (count - 1) for i in range(count)]
    _box(ax, (5.1, 3.7), f"{machine.intra.name}: any pair of GPUs", wide=9.6, tall=0.7, colour=SKY)
    _box(ax, (5.1, 0.4), f"{machine.inter.name}: the other nodes", wide=9.6, tall=0.7, colour=ORANGE)
    for i, x in enumerate(places):
        ax.plot([x, x], [2.75, 3.34], color=BLUE, linewidth=9, solid_capstyle="butt", zorder=0)
        ax.plot([x, x], [0.76, 1.95], color=ORANGE, linewidth=1, zorder=0)
        _box(ax, (x, 2.35), f"GPU {i}", wide=0.95, tall=0.8, colour=PALE_BLUE)
        _box(ax, (x, 1.35), "card", wide=0.7, tall=0.45, colour="white")
    inside, outside = machine.intra_bytes_per_s / 1e9, machine.inter_bytes_per_s / 1e9
    title = f"A node: {inside:.0f} GB/s per GPU inside, {outside:.0f} GB/s to other nodes; widths to scale"
    return style.finished(figure, title)


@style.styled
def ring_and_trees(first: Sequence[int | None], second: Sequence[int | None]) -> Figure:
    """Ranks as a ring, then as two trees given by parents; a rank that has children is filled."""
    n = len(first)
    names = f"ring: {2 * (n - 1)} steps", "tree 1: half of the tensor", "tree 2: the other half"
    figure, axes = style.panels(names, height=2.9)
    turn = [(0.9 * sin(2 * pi * r / n), 0.9 * cos(2 * pi * r / n)) for r in range(n)]
    arrows = [(r, (r + 1) % n) for r in range(n)]
    _ranks(axes[0], turn, arrows, filled=set(range(n)))
    for ax, parents in zip(axes[1:], (first, second)):
        arrows = [(rank, parent) for rank, parent in enumerate(parents) if parent is not None]
        _ranks(ax, _tree_places(parents), arrows, filled={parent for _, parent in arrows})
    return style.finished(figure, "Filled: ranks that add and pass on. The trees are shown on the way up")


def _tree_places(parents: Sequence[int | None]) -> list[Point]:
    """Ranks from left to right by number, each one level below its parent."""

    def depth(rank: int) -> int:
        return 0 if parents[rank] is None else 1 + depth(parents[rank])

    n, deepest = len(parents), max(map(depth, range(len(parents))))
    return [(-1 + 2 * rank / (n - 1), 0.9 - 1.8 * depth(rank) / deepest) for rank in range(n)]


def _ranks(ax: Axes, places: Sequence[Point], arrows: Sequence[tuple[int, int]], filled: set[int]) -> None:
    look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.2, "shrinkA": 9, "shrinkB": 9}
    for source, to in arrows:
        ax.annotate("", places[to], places[source], arrowprops=look)
    for rank, (x, y) in enumerate(places):
        colour = GREEN if rank in filled else PALE
        ax.plot(x, y, "o", markersize=17, markerfacecolor=colour, markeredgecolor=BLACK, markeredgewidth=0.6)
        ax.text(x, y, str(rank), **CENTRED, fontsize=8, color=ink_on(colour))
    ax.set(xlim=(-1.25, 1.25), ylim=(-1.2, 1.2))
    ax.set_axis_off()


def _blank(height: float, right: float, top: float) -> tuple[Figure, Axes]:
    figure, ax = style.canvas(height=height)
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.set_axis_off()
    return figure, ax


def _box(ax: Axes, centre: Point, text: str, *, wide: float, colour: str, tall: float = 0.85) -> None:
    corner = centre[0] - wide / 2, centre[1] - tall / 2
    look = {"boxstyle": "round,pad=0,rounding_size=0.12", "edgecolor": BLACK, "linewidth": 0.8}
    ax.add_patch(FancyBboxPatch(corner, wide, tall, facecolor=colour, **look))
    ax.text(*centre, text, **CENTRED, fontsize=8, color=ink_on(colour))


def _arrow(ax: Axes, start: Point, end: Point, colour: str = BLACK) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.3})
