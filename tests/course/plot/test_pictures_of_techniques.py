"""Pictures of techniques: equal for equal data, to the byte, nothing runs out, and what is drawn is what was given."""

from collections import Counter
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Polygon, Rectangle

from minitrain.context.layout import contiguous, tiles, zigzag
from minitrain.course.plot import (
    attention,
    charts,
    cuts,
    data_parallel,
    grids,
    kernel_charts,
    pipeline_charts,
    recompute_charts,
    schematics,
    sequence_charts,
    sharding_charts,
    tensor_parallel,
)
from minitrain.course.plot.searches import race
from minitrain.course.plot.style import BLUE, COLOURS, GREEN, ORANGE, PALE, SKY, VERMILLION
from minitrain.course.race import Row
from minitrain.pipeline.schedule import in_flight, peak
from minitrain.pipeline.schedules.less_memory import bpipe
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import block_of, v_half, v_min, zb_v
from minitrain.pipeline.simulate import simulate
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.systems.communication.algorithms import double_binary_tree, inner
from minitrain.systems.context.balanced import balanced, unbalanced
from minitrain.systems.kernels.roller import pipelined
from minitrain.systems.kernels.tiles import matmul_tiles
from minitrain.systems.memory.chain_plan import every
from minitrain.systems.plan import stage_memory
from minitrain.systems.plan.rematerialize import revolve
from minitrain.systems.simulate.replay import replay
from tests.course.plot.pictures import check, colour, words
from tests.systems.memory.plans import parse

# ---- what is drawn ---------------------------------------------------------------------------------------

TILES = [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 4)), (slice(4, 8), slice(0, 2))]
UNITS = [
    ("A_S0", "products", 0.0, 1.0),
    ("A_softmax0", "exponentials", 1.0, 1.5),
    ("B_S0", "products", 1.0, 2.0),
]
SIDE = 3
AT_HOME = {(i, j): ((i, j), (i, j)) for i in range(SIDE) for j in range(SIDE)}
SUMMA = {f"step {s}": {(i, j): ((i, s), (s, j)) for i, j in AT_HOME} for s in range(SIDE)}
HELD = {"N": [[0, 1, 2, 3]] * 4, "I": [[0, 1], [2, 3]] * 2, "G": [[0], [2], [1], [3]]}
SHAPES = {"v_min": v_min, "v_half": v_half, "zb_v": zb_v}
COSTS = [4, 2, 3, 6, 1, 5]
STAGES = {"data parallel": (), "stage 1": ("optimizer state",), "stage 3": ("optimizer state", "parameters")}
SWITCH = [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
ROWS = [Row("exact", "step", 2.0, 2.0, 30, 1000), Row("near", "step", 2.5, 2.0, 5, 1000)]
SLICES = [{"mlp.up": (0, 16 * r, 8, 16 * r + 16), "mlp.down": (16 * r, 0, 16 * r + 16, 8)} for r in (0, 1)]


def step(overlap):
    """Two layers of a backward, whose one all-reduce is hidden by the second of them or not."""
    phases = "forward", "backward", "backward"
    layers = [Compute("mm", 10**13, 10**8, phase, "bfloat16") for phase in phases]
    layers.insert(2 if overlap else 3, Issue(0, "all_reduce", "dp", tuple(range(64)), 10**9, 1, 0, "x.py:1"))
    return replay({0: [*layers, Wait(0)]}, machine("h100"))


def blocks(p):
    return {shape: [block_of(shape, p)(rank) for rank in range(p)] for shape in SHAPES}


def adapipe():
    units = stage_memory.Unit(1, 5), stage_memory.Unit(3, 4)
    layer = stage_memory.Layer(forward=10, backward=20, fixed=2, units=units)
    return stage_memory.plan_adapipe(stage_memory.Model((layer,) * 4, boundary=1), 2, 4, 40)


def with_peaks(schedule):
    return simulate(schedule), [in_flight(schedule, rank) for rank in range(4)]


def tiles_of(layout):
    parts = [layout(rank, 4, 16) for rank in range(4)]
    return lambda rank, owner: tiles(parts[rank], parts[owner], True)


def held(letter, rank, elements):
    return [elements[i] for i in HELD[letter][rank]]


def kept():
    return torch.arange(16).view(4, 4) % 3 > 0


PICTURES = {
    "attention, schematic": lambda: attention.schematic(5, 2, 3, title="x"),
    "attention, tiles": lambda: attention.tiles({"one": TILES, "two": TILES[::-1]}, 8, title="x"),
    "attention, units": lambda: attention.units({"one": UNITS, "two": UNITS}, title="x"),
    "attention, mask": lambda: attention.who_sees_whom(
        {"a": [[True, False], [True, True]]}, [0, 1], title="x"
    ),
    "roofline": lambda: attention.roofline({"a": 32.0, "b": 1000.0}, 990e12, 3.35e12, title="x"),
    "touched": lambda: kernel_charts.touched({"all of them": list(matmul_tiles(3, 3, 3))[:7]}, 3, title="x"),
    "loads": lambda: kernel_charts.loads_and_products({"1": pipelined([2, 9], 4, 2)}, title="x"),
    "tile times": lambda: kernel_charts.tile_times(
        [16, 32], [[1.0, 2.0], [1.5, float("inf")]], (16, 16), title="x"
    ),
    "who keeps": lambda: data_parallel.who_keeps(STAGES, title="Who keeps what"),
    "summing": lambda: data_parallel.summing(title="Three ways to sum"),
    "replayed": lambda: data_parallel.replayed({"after": step(False), "during": step(True)}, title="Two"),
    "grid": lambda: grids.blocks(SUMMA, title="SUMMA", arrows=lambda at: grids.outwards(SIDE, at)),
    "grid, home": lambda: grids.blocks({"x": AT_HOME}, title="x", arrows=lambda _: grids.to_neighbours(SIDE)),
    "cube": lambda: grids.cube(2, title="A cube"),
    "ring": lambda: grids.shards_on_a_ring([[0, 2, 1], [1, 0, 2], [2, 1, 0]], title="A ring"),
    "curves": lambda: grids.against_ranks(
        {"1-D": {4: 1.0, 8: 2.0}, "2-D": {4: 0.0, 16: 3.0}}, title="x", ylabel="y", bound={4: 1.0, 16: 0.5}
    ),
    "blocks": lambda: pipeline_charts.building_blocks(blocks(4), title="three blocks"),
    "memory bought": lambda: pipeline_charts.memory_bought(
        [2, 3, 4], {"list scheduler": [0.5, 0.2, 0.1]}, {"1F1B": (4, 0.25), "ZB-H1": (4, 0.08)}, title="x"
    ),
    "plans": lambda: recompute_charts.plan({"keep all": every(6, 6), "revolve": revolve(6, 2)}, title="six"),
    "three runs": schematics.three_runs,
    "one matrix": schematics.one_matrix,
    "four models": schematics.four_models,
    "node": lambda: schematics.node(machine("h100")),
    "ring and trees": lambda: schematics.ring_and_trees(*double_binary_tree(8)),
    "rings and heads": lambda: sequence_charts.rings_and_heads(4),
    "masks": lambda: sequence_charts.masks({"x": {at: at // 4 for at in range(16)}}, 16, 4),
    "ring strip": lambda: sequence_charts.ring_strip({"zigzag": tiles_of(zigzag)}, 4, 16),
    "rounds": lambda: sequence_charts.rounds({"ring": unbalanced(4), "balanced": balanced(4)}),
    "heads and tokens": lambda: sequence_charts.heads_and_tokens(*SWITCH, length=4),
    "teams": lambda: sequence_charts.teams([1, 2, 4], 16),
    "two levels": lambda: sharding_charts.two_levels(HELD, elements=4, per_node=2, title="two nodes of two"),
    "who holds": lambda: sharding_charts.who_holds_what(
        {"NIG": "", "III": "MiCS"}, held, ranks=4, elements=4, title="words"
    ),
    "all choices": lambda: sharding_charts.all_choices(["NNN", "IGG"], title="two"),
    "cheapest": lambda: sharding_charts.cheapest(
        {"NNN": (100e9, 0.1), "GGG": (2e9, 0.7)}, ["GGG"], [(100e9, 0.1), (2e9, 0.7)], title="two words"
    ),
    "slices": lambda: tensor_parallel.slices(SLICES, width=8, title="two ranks"),
    "flow": lambda: tensor_parallel.flow(("one", "two"), ("one", "two"), tokens=0.25, title="a layer"),
    "columns, rows": lambda: tensor_parallel.columns_then_rows(ranks=2, title="columns, then rows"),
    "dropped": lambda: tensor_parallel.masks({"rank 0": kept(), "rank 1": ~kept()}, title="masks"),
    "a race": lambda: race(ROWS, title="a race"),
    "table of cuts": lambda: cuts.table(COSTS, 3, title="a table"),
    "recomputed": lambda: cuts.recomputed(adapipe().stages, ["norms", "attention"], title="AdaPipe"),
    "pair": lambda: cuts.activations_by_pair(
        {"1F1B": with_peaks(one_f_one_b(4, 8)), "BPipe": with_peaks(bpipe(4, 8))}, (0, 3), title="BPipe"
    ),
    "room": lambda: cuts.room_to_hide(
        {"rank 0": [18, 22], "rank 1": [0]}, {"peer": 4, "host": 32}, title="x"
    ),
    "padding": lambda: cuts.padding(
        {"as they come": [[0, 1], [2]], "one": [[0], [1], [2]]}, [9, 2, 5], title="."
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_repeats_and_fits(name):
    check(PICTURES[name], twice=name in list(PICTURES)[::4])


def axes(name):
    return PICTURES[name]().axes


# ---- and it is what was given ----------------------------------------------------------------------------


def test_a_product_waits_for_its_load_and_blocks_that_were_touched_are_counted():
    bars = [(bar.get_y() > 0, bar.get_x(), bar.get_width()) for bar in axes("loads")[0].patches]
    assert bars == [(False, 0, 2), (True, 2, 4), (False, 2, 9), (True, 11, 4)]
    assert [ax.get_title(loc="left") for ax in axes("touched")] == [
        "A: 3 blocks",
        "B: 3 blocks",
        "C: 1 blocks",
    ]


def test_one_tile_of_scores_exists_at_a_time_and_tiles_are_numbered_and_masked_at_the_diagonal():
    colours = Counter(colour(patch) for patch in axes("attention, schematic")[0].patches)
    assert [colours[one.upper()] for one in (SKY, ORANGE, PALE)] == [2, 1, 22]
    one, two = axes("attention, tiles")
    assert words(one) == words(two) == ["0", "1", "2"]
    assert [colour(patch) for patch in one.patches[1:]] == [ORANGE.upper(), ORANGE.upper(), SKY.upper()]


def test_a_point_stands_under_the_roof():
    heights = [line.get_ydata()[0] for line in axes("roofline")[0].lines[1:3]]
    assert heights == pytest.approx([32 * 3.35, 990])


def test_bytes_per_parameter_and_steps_of_data_parallelism():
    labels = [ax.get_xlabel() for ax in axes("who keeps")]
    assert [label.split("\n")[1].split()[0] for label in labels] == ["16", "7", "5.5"]
    said = words(*data_parallel.summing(4, work=1, latency=1, transfer=0.5, bucket=2, title="").axes)
    assert [word for word in said if word.replace(".", "").isdigit()] == ["10", "7", "6"]
    steps = [f" {1e3 * step(overlap).step_s:.3g} ms" for overlap in (False, True)]
    assert words(*axes("replayed")) == ["compute", "network", steps[0], "compute", "network", steps[1]]


def test_a_block_in_a_frame_is_the_ranks_own_and_arrows_say_which_matrix_travels():
    panels = axes("grid")
    framed = [sum(patch.get_linewidth() == 2 for patch in panel.patches) for panel in panels]
    assert framed == [2 * SIDE] * SIDE
    arrows = [text.arrow_patch for text in panels[0].texts if getattr(text, "arrow_patch", None)]
    red = [arrow for arrow in arrows if arrow.get_edgecolor() == to_rgba(VERMILLION)]
    assert len(arrows) == 2 * len(red) == 2 * SIDE * (SIDE - 1)
    assert [list(line.get_xdata()) for line in axes("curves")[0].lines] == [[4, 8], [16], [4, 16]], "no zeros"


@pytest.mark.parametrize("p", [3, 4, 6])
def test_building_blocks_stand_where_they_say_and_every_rank_holds_alike(p):
    (ax,) = pipeline_charts.building_blocks({"V-Min": blocks(p)["v_min"]}, title="one").axes
    forward = to_rgba(pipeline_charts.FORWARD)
    drawn = {patch.get_xy() for patch in ax.patches if patch.get_facecolor() == forward}
    assert drawn == {(at, r - 0.3) for r in range(p) for at in blocks(p)["v_min"][r][:1]} | {
        (at, r - 0.3) for r in range(p) for at in blocks(p)["v_min"][r][1:2]
    }
    for shape, ranks in blocks(p).items():
        lives = {(early - down + late - up) / 6 for down, up, late, early in ranks}
        assert len(lives) == 1, "the sum of a long and a short life is the same on every rank"
        assert 0 < lives.pop() <= peak(SHAPES[shape](p, 3 * p), 0)


def test_a_plan_of_recomputation_by_hand():
    (ax,) = recompute_charts.plan({"two": parse("F0 F1 D1 T2 B2 T0 T1 B1 B0")}, title="three layers").axes
    last = {patch.get_xy(): colour(patch) for patch in ax.patches}  # what was drawn later hides what is below
    seen = {name: sorted(at for at, one in last.items() if one == name) for name in set(last.values())}
    assert seen[recompute_charts.COLOURS["F"]] == [(0, 0), (1, 1)]
    assert seen[recompute_charts.COLOURS["T"]] == [(2, 2), (4, 0), (5, 1)]
    assert seen[recompute_charts.COLOURS["B"]] == [(3, 2), (6, 1), (7, 0)]
    assert seen[recompute_charts.GRAPH.upper()] == [(5, 0), (6, 0)], "held with a graph, not running"
    assert {(1, 0), (2, 0), (3, 0)} <= set(seen[PALE]), "the first input, while others run"
    assert ax.get_title(loc="left") == "two: 5 forwards"


@pytest.mark.parametrize("n", (4, 7, 8))
def test_filled_ranks_of_a_tree_are_its_inner_ones(n):
    trees = double_binary_tree(n)
    for ax, parents in zip(schematics.ring_and_trees(*trees).axes[1:], trees):
        assert sum(dot.get_markerfacecolor() == GREEN for dot in ax.lines) == len(inner(parents))
        assert sum(not text for text in words(ax)) == n - 1, "an arrow per edge"


@pytest.mark.parametrize("last, wanted", ((2**5, ["8", "16", "32"]), (2**32, ["1 Ki", "64 Mi", "4 Gi"])))
def test_an_axis_of_powers_of_two_says_8_and_not_2_to_the_3(last, wanted):
    xs = [2**3, 2**4, 2**5] if last == 2**5 else [2**10, 2**26, 2**32]
    ax = charts.lines(xs, {"y": [1, 2, 3]}, xlabel="x", ylabel="y", title="t", log="x").axes[0]
    assert [ax.xaxis.get_major_formatter()(x, 0) for x in xs] == wanted


def test_a_race_has_every_search_where_its_share_is():
    (ax,) = axes("a race")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["near", "exact"]  # least looked at on top
    dots = [(line.get_xdata()[0], line.get_color()) for line in ax.lines if line.get_marker() in "oD"]
    assert dots == [(0.005, VERMILLION), (0.03, BLUE)]
    assert words(ax) == ["5 of 1,000: 25.0% above the best", "30 of 1,000"]


def test_half_of_every_frame_is_full_with_zigzag_and_empty_frames_are_contiguous():
    filled = {}
    for layout in (contiguous, zigzag):
        frames = sequence_charts.ring_strip({"": tiles_of(layout)}, 4, 16).axes
        filled[layout] = [sum(isinstance(patch, Polygon) for patch in ax.patches) for ax in frames]
    assert filled[contiguous] == [4, 3, 2, 1] and min(filled[zigzag]) >= 4
    squares = Counter(map(colour, sequence_charts.teams([2], 16).axes[0].patches))
    assert list(squares.values()) == [32, 32], "members of a team compute alike"


def test_coloured_cells_are_what_the_ranks_hold():
    assert sum(colour(patch) == BLUE for patch in axes("two levels")[0].patches) == 16 + 8 + 4
    boxes = [one for one in axes("who holds")[0].get_children() if isinstance(one, Rectangle)]
    counts = Counter(map(colour, boxes))
    assert [counts[COLOURS[state]] for state in sharding_charts.STATES] == [16, 8, 4]


def test_slices_lie_where_ranks_hold_them_and_a_flow_has_twelve_activations_and_four_exchanges():
    boxes = [(*p.get_xy(), p.get_width(), p.get_height()) for p in axes("slices")[0].patches]
    assert boxes[:2] == [(0, 0, 2, 1), (2, 0, 2, 1)], "up: columns, side by side"
    assert [box[1:] for box in boxes[2:]] == [(0, 1, 2), (2, 1, 2)], "down: rows, one under the other"
    (flow,) = axes("flow")
    assert len(flow.patches) == 12 and len(flow.texts) == 36
    heights = {patch.get_height() for patch in flow.patches if hasattr(patch, "get_height")}
    assert heights == {0.25, 1.0}, "outside a quarter of the tokens, inside all"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_table_of_cuts_ends_in_the_best_one(stages):
    (ax,) = cuts.table(COSTS, stages, title="a table").axes
    written = {tuple(map(round, text.get_position())): int(text.get_text()) for text in ax.texts}
    ends = ((0, *inner, len(COSTS)) for inner in combinations(range(1, len(COSTS)), stages - 1))
    found = written[len(COSTS) - 1, stages - 1]
    assert found == min(max(sum(COSTS[a:b]) for a, b in pairwise(cut)) for cut in ends)
    for end in range(1, len(COSTS) - stages + 2):
        assert written[end - 1, 0] == sum(COSTS[:end]), "one stage holds all layers so far"
    assert sum(artist.get_facecolor() == to_rgba(SKY) for artist in ax.patches + ax.artists) == stages
    pads = [patch.get_height() for patch in axes("padding")[0].patches if patch.get_y() > 0]
    assert sorted(pads) == [0, 0, 7], "what is missing to the longest"


@pytest.mark.parametrize(
    "draw, said",
    [
        (lambda: pipeline_charts.building_blocks({"V": [(0, 1, 2, 3)] * 9}, title=""), "2 to 8 ranks"),
        (lambda: recompute_charts.plan({"nothing": ()}, title=""), "give plans of one action or more"),
        (lambda: cuts.table([1] * 13, 3, title=""), "use 2 to 12 layers"),
    ],
)
def test_what_cannot_be_read_is_refused(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()
