"""The widget: whatever is dragged, picture and text follow, soon enough; what cannot be made says so."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from minitrain.course.plot import controls as plot_controls
from minitrain.course.plot import pipeline_charts as plot_pipeline
from minitrain.course.plot import pipeline_svg
from minitrain.course.plot.pipeline_widget import SCHEDULES, explore, picture
from minitrain.course.plot.style import COLOURS
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate

EQUAL = Costs(F=2, I=2, W=2)


def controls(box):
    return {control.description: control for row in box.children[:-2] for control in row.children}


def test_picture_and_text_follow_every_control():
    box = explore()
    text, image = box.children[-2:]
    assert "1F1B: bubble share 27.3%, overhead 37.5%, makespan 66, at most 4 micro" in text.value
    assert image.format == "svg+xml"
    for name, value in (
        ("ranks p", 2), ("microbatches m", 12), ("forward F", 5), ("input gradient I", 3),
        ("weight gradient W", 4), ("message", 1), ("below", "DualPipe"), ("fused F&B (0: the sum)", 9),
        ("above", "GPipe"),
    ):  # fmt: skip
        before = text.value, image.value
        controls(box)[name].value = value
        assert text.value != before[0] and image.value != before[1], name
    before = text.value
    controls(box)["stages per rank v"].value = 3
    assert text.value == before  # neither of the two has a v


def test_what_cannot_be_made_says_why_and_the_last_picture_stays():
    box = explore()
    controls(box)["ranks p"].value = 3
    controls(box)["below"].value = "Chimera"
    text, image = box.children[-2:]
    assert "Chimera: " in text.value and "even" in text.value
    before = image.value
    controls(box)["fused F&B (0: the sum)"].value = 3
    assert (
        "a fused F&amp;B of 3" in text.value and "use 4 or more, or 0" in text.value and image.value == before
    )
    controls(box)["fused F&B (0: the sum)"].value = 0
    for name in ("forward F", "input gradient I", "weight gradient W"):
        controls(box)[name].value = 0
    assert "all 0" in text.value


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_drawn(name):
    drawn, (line,) = picture([name], 4, 16, 2, EQUAL)
    assert drawn.startswith("<svg") and line.startswith(f"{name}: bubble share")


class Clock:
    """The timers of a kernel's event loop, which go off when the test says so."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay_s, call):
        assert delay_s == plot_controls.PAUSE_S
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: self.timers.remove(call))

    def goes_off(self):
        assert len(self.timers) == 1, "one change waits, the last one"
        self.timers.pop()()


def test_a_drag_is_drawn_once_it_pauses(monkeypatch):
    box, clock = explore(), Clock()
    drawn = box.drawn
    monkeypatch.setattr(plot_controls.asyncio, "get_running_loop", lambda: clock)
    for value in range(1, 20):
        controls(box)["microbatches m"].value = value
        assert box.drawn == drawn and len(clock.timers) == 1, "it moves still"
    clock.goes_off()
    assert box.drawn == drawn + 1 and "makespan" in box.children[-2].value
    assert box.children[-1].value == picture(["1F1B", "ZB-H1"], 4, 19, 2, EQUAL)[0].encode()


def test_without_a_kernel_the_first_picture_stands_there():
    data, about = explore()._repr_mimebundle_()
    assert data["image/svg+xml"] == picture(["1F1B", "ZB-H1"], 4, 8, 2, EQUAL)[0]
    assert data["image/svg+xml"].isascii() and "VBox" not in data["text/plain"]
    assert "1F1B above ZB-H1" in about["image/svg+xml"]["alt"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_the_svg_has_a_box_for_every_action_in_the_colours_of_the_picture():
    runs = simulate(interleaved(4, 8, 2), Costs(F=1, B=2)), simulate(one_f_one_b(4, 8), Costs(F=1, B=2))
    text = pipeline_svg.drawn(*runs, peaks=[[5, 4, 3, 2], [4, 3, 2, 1]], alt="two & two")
    assert text == pipeline_svg.drawn(*runs, peaks=[[5, 4, 3, 2], [4, 3, 2, 1]], alt="two & two")
    tree, at = ElementTree.fromstring(text), "{http://www.w3.org/2000/svg}"
    assert tree.find(f"{at}title").text == "two & two"
    boxes = {}
    for path in tree.iter(f"{at}path"):
        if fill := path.get("fill"):
            boxes[fill] = boxes.get(fill, 0) + path.get("d").count("M")
    shades = plot_pipeline.shades_of(runs)
    assert boxes == {
        colour: 64 if first else 32
        for colours in shades.values()
        for first, colour in zip((True, False), colours)
    }
    assert shades["forward"][0].upper() == COLOURS["forward"]
    words = {label.text for label in tree.iter(f"{at}text")}
    assert {"forward (stages of a rank)", "idle", "time", "rank 3", "peak"} <= words
    assert any("bubble share 3/11 = 27.3%" in word for word in words)
    numbers = re.findall(r">(\d+)</text>", text)
    assert all(numbers.count(str(i)) >= 8 for i in range(8))
    with pytest.raises(ValueError, match="no schedules"):
        pipeline_svg.drawn()
