"""The pictures of data parallelism: equal for equal data, and what they say is what was given."""

from minitrain.course.plot import data_parallel as plot
from minitrain.course.plot.style import png
from minitrain.plan.simulate.machines import machine
from minitrain.plan.simulate.replay import replay
from minitrain.ranks.events import Compute, Issue, Wait

CUT = {"data parallel": (), "stage 1": ("optimizer state",), "stage 3": ("optimizer state", "parameters")}


def step(overlap):
    """Two layers of a backward, whose one all-reduce is hidden by the second of them or not."""
    layers = [
        Compute("mm", 10**13, 10**8, phase, "bfloat16") for phase in ("forward", "backward", "backward")
    ]
    call = Issue(0, "all_reduce", "dp", tuple(range(64)), 10**9, 1, 0, "x.py:1")
    layers.insert(2 if overlap else 3, call)
    return replay({0: [*layers, Wait(0)]}, machine("h100"))


PICTURES = {
    "who_keeps": lambda: plot.who_keeps(CUT, title="Who keeps what"),
    "summing": lambda: plot.summing(title="Three ways to sum"),
    "replayed": lambda: plot.replayed({"after": step(False), "during": step(True)}, title="Two steps"),
}


def test_equal_data_gives_equal_pictures():
    for name, draw in PICTURES.items():
        assert png(draw()) == png(draw()), name


def words(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_what_the_pictures_say():
    labels = [ax.get_xlabel() for ax in PICTURES["who_keeps"]().axes]
    assert [label.split("\n")[1].split()[0] for label in labels] == ["16", "7", "5.5"]
    said = words(plot.summing(4, work=1, latency=1, transfer=0.5, bucket=2, title=""))
    assert [word for word in said if word.replace(".", "").isdigit()] == ["10", "7", "6"]
    assert "g4+g3" in said and "g2+g1" in said
    assert words(PICTURES["replayed"]()) == [
        *("compute", "network", f" {1e3 * step(False).step_s:.3g} ms"),
        *("compute", "network", f" {1e3 * step(True).step_s:.3g} ms"),
    ]
