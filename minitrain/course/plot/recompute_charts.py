"""What is kept and what runs again: layers upwards, actions to the right, what is held meanwhile."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, ORANGE, PALE, SKY
from minitrain.systems.memory.chain_plan import Action, walk

COLOURS = {"F": SKY, "T": ORANGE, "B": BLUE}
GRAPH = style.blend(ORANGE, "white", 0.7)
WORDS = {"F": "forward, no graph", "T": "forward with a graph", "B": "backward"}


@style.styled
def plan(plans: Mapping[str, Sequence[Action]], *, title: str) -> Figure:
    """{name: plan}: a panel each. A row is x_i and layer i; a column is an action, drops (D) have none."""
    if not plans or not all(plans.values()):
        raise ValueError(f"{len(plans)} plans, some without actions; give plans of one action or more")
    layers = max(action.layer for actions in plans.values() for action in actions) + 1
    figure, panels = style.stacked(len(plans), 0.7 + len(plans) * (0.5 + 0.11 * layers))
    longest = 0
    for ax, (name, actions) in zip(panels, plans.items()):
        column, forwards, taped = 0, 0, set()
        for (kind, layer), held in walk(actions):
            if kind == "D":
                continue
            for i in held | taped:
                ax.add_patch(Rectangle((column, i), 1, 1, facecolor=GRAPH if i in taped else PALE))
            ax.add_patch(Rectangle((column, layer), 1, 1, facecolor=COLOURS[kind]))
            taped = taped | {layer} if kind == "T" else taped - {layer}
            column, forwards = column + 1, forwards + (kind in "FT")
        longest = max(longest, column)
        ax.set(ylim=(0, layers), ylabel="layer", yticks=[0.5, layers - 0.5], yticklabels=["0", layers - 1])
        ax.grid(visible=False)
        ax.set_title(f"{name}: {forwards} forwards", fontsize=8)
    panels[-1].set(xlim=(0, longest), xlabel="actions, one after the other")
    colours = {word: COLOURS[kind] for kind, word in WORDS.items()}
    return style.finished(figure, title, colours | {"input held": PALE, "input and graph held": GRAPH})
