"""Pictures of meshes show what they are given: boxes of one colour are a group, a cell carries bytes, bars add up."""

from collections import defaultdict

import numpy
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minitrain.course.plot import mesh_charts
from minitrain.course.plot.style import png


def test_boxes_of_one_colour_are_a_group_in_its_node():
    by_axis = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    figure = mesh_charts.groups(by_axis, 2, title="four ranks")
    for ax, (axis, found) in zip(figure.axes, by_axis.items()):
        assert ax.get_title(loc="left") == f"{axis}: 2 groups of 2"
        boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_width() < 1]
        by_colour = defaultdict(list)
        for box in boxes:
            x, y = round(box.get_x() + 0.36), round(box.get_y() + 0.32)
            by_colour[to_hex(box.get_facecolor())].append(2 * y + x)
        assert sorted(by_colour.values()) == sorted(found)
    assert png(figure) == png(mesh_charts.groups(by_axis, 2, title="four ranks"))


def test_a_cell_has_the_colour_of_the_axis_that_sends():
    panels = {"a": {"tp": {(0, 1): 5}, "pp": {(3, 0): 1}}, "b": {"dp": {(2, 0): 1}}}
    figure = mesh_charts.matrix(panels, 4, 2, title="who sends")
    for ax, by_axis in zip(figure.axes, panels.values()):
        image = ax.images[0].get_array()
        coloured = {tuple(map(int, at)) for at in numpy.argwhere(image.min(axis=2) < 1)}
        assert coloured == {pair for pairs in by_axis.values() for pair in pairs}
        for axis, pairs in by_axis.items():
            assert all(to_hex(image[pair]) == mesh_charts.AXES[axis].lower() for pair in pairs)
        assert len(ax.lines) == 2  # between the two nodes, both ways
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tp", "dp", "pp"]


def test_bars_add_up_to_the_step():
    times = {"x": {"compute": 0.2, "waits for tp": 0.1}, "y": {"compute": 0.5}}
    figure = mesh_charts.times(times, title="steps")
    assert [round(patch.get_width()) for patch in figure.axes[0].patches] == [200, 100, 500, 0]
    assert to_hex(figure.axes[0].patches[1].get_facecolor()) == mesh_charts.AXES["tp"].lower()
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["300 ms", "500 ms"]
