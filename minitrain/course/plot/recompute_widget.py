"""Drag it: two plans of a chain, how long it is and what may be held; picture, forwards and memory follow.

An input counts 1; the graph of a layer, between its T and its B, counts `graph`. k is the length of a
segment, c how many inputs revolve may hold. What a plan refuses is shown as the line that it raises.
"""

from collections.abc import Callable, Mapping, Sequence

import ipywidgets
from matplotlib.figure import Figure

from minitrain.course.plot import memory_charts as plot_memory
from minitrain.course.plot import recompute_charts as plot_recompute
from minitrain.course.plot.controls import followed, menus, slider
from minitrain.systems.memory.chain_plan import Action, LayerBytes, every, forwards, peak_bytes, sqrt
from minitrain.systems.plan.rematerialize import Choice, revolve

PLANS: Mapping[str, Callable[[int, int, int], tuple[Action, ...]]] = {
    "keep all": lambda n, k, c: every(n, n),
    "all inputs": lambda n, k, c: every(n, 1),
    "every k": lambda n, k, c: every(n, k),
    "sqrt": lambda n, k, c: sqrt(n),
    "revolve": lambda n, k, c: revolve(n, c),
}


def picture(names: Sequence[str], n: int, k: int, c: int, graph: int) -> tuple[Figure | None, list[str]]:
    """The plans below each other, and for each its forwards and what is held at most, or why it is none."""
    plans, lines = {}, []
    layer = LayerBytes(output=1, forward=1, tape=graph, taping=graph + 1, gradient=1, backward=1)
    for place, name in zip(("above", "below"), names):
        try:
            plan = PLANS[name](n, k, c)
        except ValueError as error:
            lines.append(f"{name}: {error}")
            continue
        plans[f"{place}, {name}"] = plan
        most = peak_bytes(plan, [layer] * n)
        lines.append(f"{name}: {forwards(plan).total()} forwards of a layer, at most {most} inputs' worth")
    title = f"{n} layers, a graph {graph} times as large as an input"
    return (plot_recompute.plan(plans, title=title) if plans else None), lines


def explore(first: str = "every k", second: str = "revolve") -> ipywidgets.VBox:
    """Menus and sliders above a picture that follows them."""
    sizes = [slider("layers n", 1, 16, 48), slider("layers per segment k", 1, 4, 16)]
    room = [slider("inputs held c", 1, 4, 12), slider("graph, in inputs", 0, 4, 16)]
    alt = f"{first} above {second}: which layer runs when, and what is held, for 16 layers"
    rows = [menus(PLANS, first, second), sizes, room]
    return followed(rows, lambda names, sizes, room: picture(names, *sizes, *room), alt)


def pick(choices: Sequence[Choice]) -> ipywidgets.VBox:
    """A button for every choice of rematerialize.py, whose times are in FLOPs; the picture rings the one that
    is pressed, the text says what it means."""
    if not choices:
        raise ValueError("pick: no choices; give those of plan.rematerialize.front")
    by_word = {choice.policy: choice for choice in choices}
    points = [(word, choice.bytes, choice.time) for word, choice in by_word.items()]
    look = dict(title="What a block keeps, and what it costs", ylabel="computed again", unit="FLOPs")

    def draw(pressed: list[str]) -> tuple[Figure, list[str]]:
        (word,) = pressed
        price = f"{by_word[word].bytes:,} bytes kept, {by_word[word].time:,} FLOPs more"
        return plot_memory.pareto(points, chosen=word, **look), [f"Strategy(recompute={word!r}): {price}"]

    alt = "what each choice keeps in bytes, against what it computes again; one point is ringed"
    return followed([[ipywidgets.ToggleButtons(options=list(by_word))]], draw, alt)
