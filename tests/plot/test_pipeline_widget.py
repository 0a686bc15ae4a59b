"""The widget: whatever is dragged, picture and text follow; what cannot be made says so."""

import pytest

from minitrain.pipeline.simulate import Costs
from minitrain.plot.pipeline_widget import SCHEDULES, explore, picture


def controls(box):
    return {control.description: control for row in box.children[:3] for control in row.children}


def test_picture_and_text_follow_every_control():
    box = explore()
    text, image = box.children[3:]
    assert "1F1B: bubble 27.3%, makespan 66" in text.value and "at most 4 micro" in text.value
    for name, value in (
        ("p", 2),
        ("m", 12),
        ("cost F", 5),
        ("cost I", 3),
        ("cost W", 4),
        ("cost send", 1),
        ("below", "Chimera"),
        ("above", "GPipe"),
    ):
        before = text.value, image.value
        controls(box)[name].value = value
        assert text.value != before[0] and image.value != before[1], name
    before = text.value
    controls(box)["v"].value = 3
    assert text.value == before  # neither of the two has a v


def test_what_cannot_be_made_says_why():
    box = explore()
    controls(box)["p"].value = 3
    controls(box)["below"].value = "Chimera"
    assert "Chimera: " in box.children[3].value and "even" in box.children[3].value


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_drawn(name):
    figure, (line,) = picture([name], 4, 16, 2, Costs(F=2, I=2, W=2))
    assert figure is not None and line.startswith(f"{name}: bubble")
