"""Pictures of cuts: the table is what a search of all cuts says, and every picture repeats to the byte."""

from itertools import combinations

import matplotlib
import pytest

from minitrain.course.plot import cuts
from minitrain.course.plot.style import SKY, png
from minitrain.pipeline.schedule import in_flight
from minitrain.pipeline.schedules.bpipe import bpipe
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import simulate
from minitrain.systems.plan import stage_memory

COSTS = [4, 2, 3, 6, 1, 5]


def smallest_largest(costs, stages):
    ends = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1))
    return min(max(sum(costs[a:b]) for a, b in zip(cut, cut[1:])) for cut in ends)


def plan():
    layer = stage_memory.Layer(
        forward=10, backward=20, fixed=2, units=(stage_memory.Unit(1, 5), stage_memory.Unit(3, 4))
    )
    return stage_memory.plan_adapipe(stage_memory.Model((layer,) * 4, boundary=1), 2, 4, 40)


def pair():
    def told(schedule):
        return simulate(schedule), [in_flight(schedule, rank) for rank in range(4)]

    return {"1F1B": told(one_f_one_b(4, 8)), "BPipe": told(bpipe(4, 8))}


PICTURES = {
    "table": lambda: cuts.table(COSTS, 3, title="a table"),
    "recomputed": lambda: cuts.recomputed(plan().stages, ["norms", "attention"], title="AdaPipe"),
    "pair": lambda: cuts.activations_by_pair(pair(), (0, 3), title="BPipe"),
    "room": lambda: cuts.room_to_hide(
        {"rank 0": [18, 22], "rank 1": [0]}, {"peer": 4, "host": 32}, title="MPress"
    ),
    "padding": lambda: cuts.padding(
        {"as they come": [[0, 1], [2]], "one each": [[0], [1], [2]]}, [9, 2, 5], title="."
    ),
}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_table_ends_in_the_best_cut(stages):
    (ax,) = cuts.table(COSTS, stages, title="a table").axes
    written = {tuple(map(round, text.get_position())): int(text.get_text()) for text in ax.texts}
    assert written[len(COSTS) - 1, stages - 1] == smallest_largest(COSTS, stages)
    for end in range(1, len(COSTS) - stages + 2):
        assert written[end - 1, 0] == sum(COSTS[:end]), "one stage holds all layers so far"
    sky = matplotlib.colors.to_rgba(SKY)
    assert sum(artist.get_facecolor() == sky for artist in ax.patches + ax.artists) == stages


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_repeat_to_the_byte(name):
    data = png(PICTURES[name]())
    assert data == png(PICTURES[name]()) and len(data) < 120_000


def test_padding_is_what_is_missing_to_the_longest():
    figure = PICTURES["padding"]()
    pads = [patch.get_height() for patch in figure.axes[0].patches if patch.get_y() > 0]
    assert sorted(pads) == [0, 0, 7]


def test_a_table_that_cannot_be_read_is_refused():
    for costs, stages in (([1] * 13, 3), ([1, 2], 3), ([1, 2], 1)):
        with pytest.raises(ValueError, match="use 2 to 12 layers"):
            cuts.table(costs, stages, title="")
