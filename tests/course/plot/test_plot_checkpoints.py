"""Pictures of saving: what is drawn is what was given, all fits, files are small and reproducible."""

import pytest
from matplotlib.colors import to_rgba

from minitrain.course.plot import checkpoints
from minitrain.course.plot.style import CYCLE, PALE
from minitrain.systems.plan import checkpoint_interval as place
from minitrain.systems.simulate import checkpoint_pipeline as pipeline
from tests.course.plot.pictures import LONG, check

CURVES = {"10 s": [(100, 0.2), (400, 0.05), (2000, 0.1)], "300 s": [(100, 0.5), (2000, 0.3)]}
WORK, STATE = pipeline.Work(3, 6, 1), pipeline.State(14, 26)
WAYS = {
    "CheckFreq": pipeline.checkfreq(), "LightCheck": pipeline.lightcheck(7),
    "FastPersist": pipeline.fastpersist(7), "snapshot": pipeline.snapshot_stall(),
}  # fmt: skip
RUNS = {name: pipeline.train(WORK, STATE, way, 4, 3) for name, way in WAYS.items()}
SAVE = [("create a.safetensors", "old"), ("write a.safetensors", None), ("sync a/", "new")]
ROWS = [((0, 1), (0, 0), (4, 6)), ((2,), (4, 0), (4, 2)), ((3,), (4, 2), (4, 4))]

PICTURES = {
    "waste": lambda: checkpoints.waste(
        CURVES, {"10 s": [(150, 0.15), (900, 0.06)]}, best={"10 s": (400, 0.05)}, title=LONG
    ),
    "saves": lambda: checkpoints.saves(RUNS, title=LONG),
    "placement": lambda: checkpoints.placement(
        {"groups": place.groups(16, 2), "ring": place.ring(16, 2)}, 2, failed=[5, 6], title=LONG
    ),
    "calls": lambda: checkpoints.calls(
        {"in place": SAVE, "in a folder of its own": SAVE * 3}, title="What a crash leaves"
    ),
    "cuts": lambda: checkpoints.cuts({"rows": ROWS, "tp 2": ROWS[:1]}, (8, 6), title="Pieces"),
    "mixed": lambda: checkpoints.placement({"mixed": place.groups(11, 3)}, 3, title=LONG),
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_the_file_is_small(name):
    check(PICTURES[name])


def test_waste_has_its_points_in_per_cent_and_the_best_in_its_label():
    figure = PICTURES["waste"]()
    ax = figure.axes[0]
    star, first, second = ax.lines
    assert star.get_xydata().tolist() == [[400, 5]]
    assert first.get_xydata().tolist() == [[100, 20], [400, 5], [2000, 10]]
    assert second.get_xydata().tolist() == [[100, 50], [2000, 30]]
    (dots,) = ax.collections
    assert dots.get_offsets().tolist() == [[150, 15], [900, 6]]
    assert tuple(dots.get_facecolor()[0]) == to_rgba(CYCLE[0])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["10 s: least, 5.0 %, at 400 s", "300 s", "simulated jobs"]
    assert ax.get_xlabel() == "training between saves (s)" and ax.get_ylabel() == "time wasted (%)"
    with pytest.raises(ValueError, match="0 formulas"):
        checkpoints.waste({}, title="")
    with pytest.raises(ValueError, match=r"\['20 s'\] have no formula"):
        checkpoints.waste(CURVES, best={"20 s": (1, 1)}, title="")


def cells(ax):
    """{(machine, row): (state, colour)}."""
    found = {tuple(round(at) for at in text.get_position()): text.get_text() for text in ax.texts}
    squares = [patch for patch in ax.patches]
    faces = {(round(s.get_x() + 0.46), round(s.get_y() + 0.46)): s.get_facecolor() for s in squares}
    return {at: (int(state), faces[at]) for at, state in found.items()}


def test_each_machine_shows_what_it_holds():
    groups, ring = PICTURES["placement"]().axes
    for ax, rings in ((groups, place.groups(16, 2)), (ring, place.ring(16, 2))):
        held, drawn = place.holders(rings, 2), cells(ax)
        for (machine, row), (state, colour) in drawn.items():
            assert machine in held[state] and (row > 0 or state == machine)
            assert colour == to_rgba((PALE if machine in (5, 6) else CYCLE[state % len(CYCLE)]))
        assert len(drawn) == 32
    titles = [ax.get_title(loc="left") for ax in (groups, ring)]
    assert titles == ["groups: nothing is lost", "ring: lost: state 5"]
    assert len(groups.lines) == 2 * 2 + 7 and len(ring.lines) == 2 * 2
    assert PICTURES["mixed"]().axes[0].get_title(loc="left") == "mixed"
    with pytest.raises(ValueError, match="1 placements of 25 machines"):
        checkpoints.placement({"ring": place.ring(25, 2)}, 2, title="")


def test_calls_are_in_order_and_what_is_lost_is_hatched():
    ax = PICTURES["calls"]().axes[0]
    assert [text.get_text() for text in ax.texts] == [call for call, _ in SAVE]
    assert [patch.get_hatch() is not None for patch in ax.patches] == [False, True, False]
    with pytest.raises(ValueError, match="draw 1 to 3"):
        checkpoints.calls({}, title="")


def test_cuts_are_where_they_are_given_and_name_their_ranks():
    ax = PICTURES["cuts"]().axes[0]
    assert [text.get_text() for text in ax.texts] == ["0, 1", "2", "3"]
    found = [(p.get_y(), p.get_x(), p.get_height(), p.get_width()) for p in ax.patches]
    assert found == [(*start, *shape) for _, start, shape in ROWS]
    with pytest.raises(ValueError, match="of a matrix"):
        checkpoints.cuts({"rows": ROWS}, (8,), title="")
