"""Which ranks of a cluster hold which part of each model state, which words obey the rule, what they cost."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from minitrain.course.plot import style

STATES = ("parameters", "gradients", "optimizer state")
LETTERS = {"N": "N: not cut", "I": "I: inside the node", "G": "G: globally"}


@style.styled
def two_levels(shards: Mapping[str, Sequence[Sequence[int]]], *, elements: int, per_node: int, title: str):
    """{letter: what each rank holds}: nodes as boxes, a bar of elements per letter and rank, the links."""
    ranks = len(next(iter(shards.values())))
    figure, ax = style.canvas(height=2.5)
    for node in range(ranks // per_node):
        left = node * (per_node * 1.25 + 0.75)
        box = {"boxstyle": "round,pad=0.04", "facecolor": "none", "edgecolor": style.GREY}
        ax.add_patch(FancyBboxPatch((left, -0.2), per_node * 1.25 - 0.05, len(shards) * 0.6 + 0.75, **box))
        ax.text(left + 0.02, -0.32, f"node {node}", fontsize=8, color=style.GREY, va="bottom")
        for place in range(per_node):
            x, rank = left + 0.1 + 1.25 * place, node * per_node + place
            ax.text(x + 0.5, 0.05, f"rank {rank}", fontsize=8, ha="center", va="center")
            for (row, pieces), element in product(enumerate(shards.values()), range(elements)):
                face = style.BLUE if element in pieces[rank] else "white"
                place = (x + element / elements, 0.3 + 0.6 * row), 1 / elements, 0.3
                ax.add_patch(Rectangle(*place, facecolor=face, edgecolor="#CCCCCC", linewidth=0.6))
        link_y = len(shards) * 0.6 + 0.38
        ax.plot([left + 0.6, left + 1.85], [link_y] * 2, color=style.GREEN, linewidth=4)
    ends, arrow = [(per_node * 1.25 + right, 0.9) for right in (0.72, 0)], {"arrowstyle": "<->"}
    ax.annotate("", *ends, arrowprops=arrow).arrow_patch.set_color(style.VERMILLION)
    for row, letter in enumerate(shards):
        ax.text(-0.15, 0.45 + 0.6 * row, LETTERS[letter], ha="right", va="center", fontsize=8)
    ax.set(xlim=(-1.6, 2 * per_node * 1.25 + 0.75), ylim=(len(shards) * 0.6 + 0.7, -0.5))
    ax.set_axis_off()
    meaning = {"held": style.BLUE, "fast links": style.GREEN}
    meaning["slow links, shared by the ranks of a node"] = style.VERMILLION
    return style.finished(figure, title, meaning)


@style.styled
def who_holds_what(names: Mapping, has: Callable, *, ranks: int, elements: int, title: str) -> Figure:
    """{word: name}: a panel each, a row per state and rank; `has(letter, rank, elements)` is coloured."""
    across = 3
    down = -(-len(names) // across)
    figure, panels = style.grid_of_panels(down, across, height=0.5 + 2.3 * down)
    for ax, (word, name) in zip(panels, names.items()):
        style.square_cells(ax, elements, 3 * (ranks + 1) - 1)
        for (row, letter), rank in product(enumerate(word), range(ranks)):
            mine = has(letter, rank, list(range(elements)))
            for element in range(elements):
                colour = style.COLOURS[STATES[row]] if element in mine else "white"
                style.cell(ax, element, (ranks + 1) * row + rank, colour, "")
        rows = [(ranks + 1) * row + rank for row in range(3) for rank in range(ranks)]
        ax.set_yticks(rows, [f"rank {row % (ranks + 1)}" for row in rows])
        ax.set_title(f"{word}  {name}", fontsize=8)
    return style.finished(figure, title, [style.swatch(state) for state in STATES])


@style.styled
def all_choices(valid: Sequence[str], *, title: str) -> Figure:
    """All 27 words, a panel for each letter of the parameters; those of `valid` are green."""
    figure, panels = style.grid_of_panels(1, 3, height=2.3)
    for ax, p in zip(panels, "NIG"):
        style.square_cells(ax, 3, 3)
        for (row, g), (column, o) in product(enumerate("NIG"), repeat=2):
            colour = style.GREEN if p + g + o in valid else style.PALE
            style.cell(ax, column, row, colour, p + g + o)
        ax.set_title(f"parameters {p}", fontsize=8)
        ax.set_yticks(range(3), [f"gradients {g}" for g in "NIG"] if p == "N" else [])
        ax.set_xticks(range(3), [f"opt. {o}" for o in "NIG"])
    meaning = {"no state is cut finer than the next": style.GREEN, "breaks the rule": style.PALE}
    return style.finished(figure, title, meaning)


@style.styled
def cheapest(
    plans: Mapping[str, tuple[float, float]], chosen: Sequence[str], limits: Sequence[tuple], *, title: str
) -> Figure:
    """{word: (bytes held, seconds)} as dots if `chosen`, else crosses; `limits` (bytes, seconds) as steps."""
    figure, ax = style.canvas(height=3.3)
    for word, (held, seconds) in plans.items():
        look = ("o", style.BLUE) if word in chosen else ("x", style.GREY)
        at = held / 1e9, 1e3 * seconds
        ax.plot(*at, look[0], color=look[1])
        ax.annotate(word, at, (4, 4), textcoords="offset points", fontsize=8)
    steps = [(limit / 1e9, 1e3 * seconds) for limit, seconds in limits]
    ax.step(*zip(*steps), where="pre", color=style.BLUE, linewidth=1)
    ticks = [100, 50, 20, 10, 5, 2]
    ax.set(xscale="log", xticks=ticks, xticklabels=ticks, ylim=(60, 850))
    ax.set(xlabel="model states of a GPU, or the limit on them (GB)", ylabel="communication of a step (ms)")
    ax.invert_xaxis()
    return style.finished(figure, title)
