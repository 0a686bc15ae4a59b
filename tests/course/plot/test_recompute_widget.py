"""The widget: whatever is dragged, picture and text follow; what cannot be made says so."""

import pytest

from minitrain.course.plot.recompute_widget import PLANS, explore, pick, picture
from minitrain.systems.plan.rematerialize import Unit, front


def controls(box):
    return {control.description: control for row in box.children[:-2] for control in row.children}


def test_picture_and_text_follow_every_control():
    box = explore()
    text, image = box.children[-2:]
    assert "every k: 28 forwards" in text.value and "revolve: 43 forwards" in text.value
    for name, value in (
        ("layers n", 20), ("layers per segment k", 5), ("inputs held c", 2), ("graph, in inputs", 9),
        ("below", "sqrt"), ("above", "keep all"),
    ):  # fmt: skip
        before = text.value, image.value
        controls(box)[name].value = value
        assert text.value != before[0] and image.value != before[1], name


def test_what_cannot_be_made_says_why():
    box = explore()
    controls(box)["layers n"].value = 3
    assert "every k: every: segments of 4 of 3 layers" in box.children[-2].value
    assert picture(["every k"], 3, 4, 1, 1)[0] is None


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_can_be_drawn(name):
    figure, (line,) = picture([name], 8, 3, 2, 5)
    assert figure is not None and line.startswith(f"{name}: ")
    held = int(line.split("at most ")[1].split()[0])
    everything = int(picture(["keep all"], 8, 3, 2, 5)[1][0].split("at most ")[1].split()[0])
    assert 8 * 5 + 8 <= everything and (held < everything or name == "keep all")


def test_a_click_on_the_front_rings_its_point_and_says_its_word():
    choices = front([Unit("up", 8, 80), Unit("act", 1, 80, ("up",))])
    row, text, image = pick(choices).children
    (buttons,) = row.children
    assert list(buttons.options) == [choice.policy for choice in choices] and len(choices) > 2
    seen = set()
    for choice in choices:
        buttons.value = choice.policy
        assert repr(choice.policy) in text.value and f"{choice.bytes:,} bytes" in text.value
        seen.add(image.value)
    assert len(seen) == len(choices)
    with pytest.raises(ValueError, match="no choices"):
        pick([])
