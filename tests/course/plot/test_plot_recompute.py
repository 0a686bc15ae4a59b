"""The picture of a plan: one cell an action, in its place, and what is held in each of them."""

import matplotlib
import pytest

from minitrain.course.plot import recompute_charts as plot_recompute
from minitrain.course.plot.style import PALE, png
from minitrain.systems.memory.chain_plan import every, parse
from minitrain.systems.plan.rematerialize import revolve


def cells(ax) -> dict[str, list[tuple[int, int]]]:
    """{colour: the cells that have it, as (action, layer)}; what was drawn later hides what is below."""
    found = {}
    for patch in ax.patches:
        found[patch.get_xy()] = matplotlib.colors.to_hex(patch.get_facecolor()).upper()
    return {colour: sorted(at for at, c in found.items() if c == colour) for colour in set(found.values())}


def test_a_plan_by_hand():
    figure = plot_recompute.plan({"two": parse("F0 F1 D1 T2 B2 T0 T1 B1 B0")}, title="three layers")
    seen = cells(figure.axes[0])
    assert seen[plot_recompute.COLOURS["F"]] == [(0, 0), (1, 1)]
    assert seen[plot_recompute.COLOURS["T"]] == [(2, 2), (4, 0), (5, 1)]
    assert seen[plot_recompute.COLOURS["B"]] == [(3, 2), (6, 1), (7, 0)]
    assert seen[plot_recompute.GRAPH.upper()] == [(5, 0), (6, 0)], "held with a graph, not running"
    assert {(1, 0), (2, 0), (3, 0)} <= set(seen[PALE]), "the first input, while others run"
    assert figure.axes[0].get_title(loc="left") == "two: 5 forwards"


def test_panels_share_their_axis_and_pictures_repeat():
    plans = {"keep all": every(6, 6), "revolve": revolve(6, 2)}
    figure = plot_recompute.plan(plans, title="six layers")
    assert len(figure.axes) == 2 and len({ax.get_xlim() for ax in figure.axes}) == 1
    data = png(figure)
    assert data == plot_recompute.plan(plans, title="six layers")._repr_png_()[0] and len(data) < 120_000


def test_plans_without_actions_are_refused():
    for plans in ({}, {"nothing": ()}):
        with pytest.raises(ValueError, match="give plans of one action or more"):
            plot_recompute.plan(plans, title="")
