"""Pictures of memory: what is drawn is what was given, all fits, files are small and reproducible."""

from fractions import Fraction

import matplotlib
import pytest

from minitrain.course.plot import memory_charts
from minitrain.course.plot.style import COLOURS
from minitrain.systems.plan import offload
from minitrain.systems.simulate import swaps
from minitrain.systems.simulate.links import play
from tests.course.plot.pictures import LONG, check

SETS = [{0, 2, 4, 6}, {0, 2, 4, 7}]
TMOF = play(swaps.swapping_forward(SETS, [15] * 8, 4), {"to host": 5})
WORK = offload.Work(13, 220, 5, 10, 5)
SERVER = offload.Server(bus=20, read=32, write=24, update=Fraction(5, 2), host_bytes=60)
POINTS = [
    ("keep all", 8e9, 0.0), ("selective", 3e9, 0.02), ("full", 1e9, 0.33), ("worse", 4e9, 0.2),
    ("as large", 3e9, 0.05), ("as fast", 9e9, 0.0),
]  # fmt: skip


def filling(peak, steps=40):
    live = {"parameters": 4e8, "gradients": 0, "activations": 0, "buffers": 0}
    timeline = []
    for i in range(2 * steps):
        live["activations"] += peak / steps * (1 if i < steps else -1)
        live["gradients"] += 1e7 * (i >= steps)
        timeline.append((i, dict(live)))
    return timeline


def roofs(shares=21):
    xs = [Fraction(i, shares - 1) for i in range(shares)]
    found = [offload.fuyou_phases(WORK, SERVER, x) for x in xs]
    lines = {p: {what: [each[p][what] for each in found] for what in found[0][p]} for p in found[0]}
    return memory_charts.roofs(xs, lines, chosen=float(offload.fuyou_share(WORK, SERVER)), title=LONG)


PICTURES = {
    "links": lambda: memory_charts.links(TMOF, kinds={"F": "forward"}, title=LONG),
    "beside": lambda: memory_charts.side_by_side(
        {"plain": filling(3e9), "recomputed": filling(6e8)}, title=LONG
    ),
    "pareto": lambda: memory_charts.pareto(POINTS, title=LONG),
    "crowded": lambda: memory_charts.pareto(POINTS, title=LONG, chosen="selective", crowded=True),
    "roofs": roofs,
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_the_file_is_small(name):
    check(PICTURES[name])


def drawn(ax):
    """{(colour, is hatched): seconds}."""
    found = {}
    for bars in ax.collections:
        key = matplotlib.colors.to_hex(bars.get_facecolor()[0]).upper(), bool(bars.get_hatch())
        found[key] = found.get(key, 0) + sum(path.get_extents().width for path in bars.get_paths())
    return found


def test_lanes_have_the_seconds_of_the_run():
    ax = PICTURES["links"]().axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "device 0", "copies 0", "device 1", "copies 1",
    ]  # fmt: skip
    seconds, copies = drawn(ax), [name for name in TMOF.tasks if name.startswith("out")]
    assert seconds[COLOURS["forward"], False] == pytest.approx(2 * 8 * 4)
    stalls = sum(TMOF.stall(f"device {d}") for d in (0, 1))
    assert stalls > 0 and seconds[COLOURS["wait"].upper(), True] == pytest.approx(float(stalls))
    slow = sum(p.end_s - p.start_s for name in copies for p in TMOF.pieces[name] if p.rate < 5)
    fast = sum(p.end_s - p.start_s for name in copies for p in TMOF.pieces[name] if p.rate == 5)
    assert seconds[COLOURS["communication"], True] == pytest.approx(float(slow)) and slow > 0
    assert seconds[COLOURS["communication"], False] == pytest.approx(float(fast)) and fast > 0


def test_runs_are_beside_each_other_to_one_scale_with_their_peaks():
    plain, recomputed = PICTURES["beside"]().axes
    assert plain.get_ylim() == recomputed.get_ylim()
    assert [text.get_text() for text in (*plain.texts, *recomputed.texts)] == ["peak 3.4 GB", "peak 1 GB"]
    assert [patch.get_label() for patch in plain.collections] == ["parameters", "gradients", "activations"]
    with pytest.raises(ValueError, match="0 runs"):
        memory_charts.side_by_side({}, title="")


def test_the_front_has_what_no_other_beats():
    ax = PICTURES["pareto"]().axes[0]
    best, beaten = (spots.get_offsets().tolist() for spots in ax.collections)
    assert best == [[1, 330], [3, 20], [8, 0]] and beaten == [[4, 200], [3, 50], [9, 0]]
    assert [text.get_text() for text in ax.texts] == ["full", "selective", "keep all"]
    with pytest.raises(ValueError, match="no points"):
        memory_charts.pareto([], title="")
    figure = memory_charts.pareto(POINTS, title="crowded", chosen="selective", crowded=True)
    (ax,), (legend,) = figure.axes, figure.legends
    assert ax.get_yscale() == "log" and not ax.texts
    assert [text.get_text() for text in legend.texts][2:] == ["full", "selective", "keep all"]
    rings = {spots.get_label(): spots.get_offsets().tolist() for spots in ax.collections[2:]}
    assert rings == {"full": [[1, 330]], "selective": [[3, 20]], "keep all": [[8, 0]]}


def test_the_thick_line_is_the_highest():
    forward, backward = PICTURES["roofs"]().axes
    for ax, phase in ((forward, "forward"), (backward, "backward")):
        top, *others = (line.get_ydata() for line in ax.lines[:-1])
        assert top.tolist() == [max(values) for values in zip(*others)]
        at_half = offload.fuyou_phases(WORK, SERVER, Fraction(1, 2))[phase]
        assert [float(values) for values in at_half.values()] == pytest.approx([line[10] for line in others])
        assert ax.lines[-1].get_xdata()[0] == pytest.approx(float(offload.fuyou_share(WORK, SERVER)))
    with pytest.raises(ValueError, match="0 resources"):
        memory_charts.roofs([0, 1], {"forward": {}}, title="")
