"""The pictures: what is drawn is what was given, everything fits, files are small and equal for equal
data.
"""

import subprocess
import sys
from fractions import Fraction

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from minitrain.course.plot import balance_charts as plot_balance
from minitrain.course.plot import charts as plot
from minitrain.course.plot import expert_charts as plot_experts
from minitrain.course.plot import low_bits as plot_low_bits
from minitrain.course.plot import pipeline_charts as plot_pipeline
from minitrain.course.plot import precision as plot_precision
from minitrain.course.plot import style
from minitrain.course.plot.style import COLOURS, CYCLE, ink_on, png, unit_for
from minitrain.pipeline.schedule import in_flight
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.simulate.machines import machine
from minitrain.plan.simulate.replay import replay
from minitrain.ranks.events import Compute, Issue, Wait

LONG = "A title that is so long that it would run out of the picture on the right if nobody broke it into two lines"


def step(num_layers=12, ranks=(0, 1)):
    """A data parallel step of 64 ranks with three buckets; odd ranks are 10 % slower."""
    timelines = {}
    for rank in ranks:
        slow = 11 if rank % 2 else 10
        events = [Compute("mm", slow * 10**11, 10**8, "forward", "bfloat16") for _ in range(num_layers)]
        for layer in range(num_layers):
            events.append(Compute("mm", slow * 2 * 10**11, 10**8, "backward", "bfloat16"))
            if layer % 4 == 3:
                bucket = layer // 4
                events.append(
                    Issue(bucket, "all_reduce", "dp", tuple(range(64)), 8 * 10**8, 1, bucket, "x.py:1")
                )
        events += [Wait(i) for i in range(num_layers // 4)]
        timelines[rank] = events + [Compute("add", 0, 10**10, "optimizer", "float32")]
    return replay(timelines, machine("h100"))


def run_memory():
    live, timeline, events = {"parameters": 4e8, "gradients": 0, "activations": 0, "buffers": 0}, [], []
    for phase, kind, change in (("forward", "activations", 5e7), ("backward", "activations", -5e7)):
        for _ in range(50):
            live[kind] += change
            timeline.append((len(events), dict(live)))
            events.append(Compute("mm", 1, 1, phase))
    return timeline, events


PIPELINES = (
    simulate(one_f_one_b(4, 8), Costs(B=2)),
    simulate(interleaved(4, 8, 2), Costs(F=Fraction(1, 2), B=1)),
)
CHUNKS = [
    [[1] * 4 for _ in range(4)],
    [[4 if rank == chunk else rank for chunk in range(4)] for rank in range(4)],
]
LOADS = [[64, 64, 0, 0], [64, 32, 32, 0], [32, 32, 32, 32]]  # [steps][experts], two a token
PLACED = {"before": [{0: 90, 1: 30}, {2: 30, 7: 10}], "after": [{0: 45, 1: 30}, {0: 45, 2: 30, 7: 10}]}
CHOSEN = [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]]  # weights by token and expert
PICTURES = {
    "timeline": lambda: plot.timeline(step(), title=LONG),
    "memory": lambda: plot.memory(*run_memory()),
    "bars_by_kind": lambda: plot.bars_by_kind(
        {
            "data parallel": {"parameters": 15e9, "optimizer state": 90e9},
            "ZeRO-3": {"parameters": 1e9, "buffers": 2e9},
        },
        title=LONG,
        limit=(80e9, "an H100 holds 80 GB"),
        xlabel="memory of a device",
    ),
    "measured_and_formula": lambda: plot.measured_and_formula(
        [("all-reduce, 2(n-1)/n S", 15e5, 15e5), ("broken", 2e6, 7.5e5), ("tiny", 10, 10), ("barrier", 0, 0)],
        title=LONG,
    ),
    "lines": lambda: plot.lines(
        [1, 2, 4, 8],
        {"measured": [1, 2, 3.5, 6]},
        formulas={"perfect": [1, 2, 4, 8]},
        marks={"a node": 8},
        xlabel="ranks",
        ylabel="speed-up",
        title=LONG,
        log="xy",
    ),
    "loss_curves": lambda: plot.loss_curves(
        {f"{n} ranks and a rather long name": [3, 2, 1.5] for n in (1, 2, 4, 8)}
    ),
    "rank_grid": lambda: plot.rank_grid({"dp": 2, "pp": 2, "tp": 4}, devices_per_node=4),
    "rank_grid, large": lambda: plot.rank_grid({"dp": 4, "pp": 4, "tp": 8}, devices_per_node=8, title=LONG),
    "rank_grid, one axis": lambda: plot.rank_grid({"dp": 4}),
    "rank_grid, wide": lambda: plot.rank_grid({"dp": 3, "tp": 8}, devices_per_node=8),
    "chunk_matrix": lambda: plot.chunk_matrix(CHUNKS * 4),
    "chunk_matrix, 8 ranks": lambda: plot.chunk_matrix([[[r] * 8 for r in range(1, 9)]] * 15, title=LONG),
    "message_lanes": lambda: plot.message_lanes(
        [(0, 1, 0, 1, "3"), (1, 0, 0, 1), (1, 2, 2, 4, "activations")], ranks=3, title=LONG
    ),
    "expert_loads": lambda: plot_balance.expert_loads(
        {"layer 1": LOADS, "layer 2": LOADS[::-1]}, top_k=2, title=LONG
    ),
    "balance_curves": lambda: plot_balance.balance_curves(
        {"none": [4, 4, 3.9], "a loss": [4, 2, 1.1]},
        {"none": {1: 3.0, 3: 2.5}, "a loss": {1: 3.1, 3: 2.6}},
        limit=4,
        title=LONG,
    ),
    "placements": lambda: plot_balance.placements(PLACED, title=LONG),
    "flow": lambda: plot_experts.flow(
        [[3, 0, 1], [4, 0, 0]], ["rank 0", "rank 1"], ["a", "b", "c"], owners=[0, 0, 1], title=LONG
    ),
    "choices": lambda: plot_experts.choices({name: CHOSEN for name in ("a router", "another")}, title=LONG),
    "heat": lambda: plot_experts.heat(
        [[9000, 3], [0, 7]], rows=["from 0", "from 1"], columns="01", title=LONG
    ),
    "memory_bars": lambda: plot_precision.memory_bars(
        {"float32": dict(weights=400, gradients=400, moments=800), "8 bits": dict(weights=200, scales=8)},
        100,
        title=LONG,
    ),
    "sharing": lambda: plot_low_bits.sharing(
        (4, 8), {"tensor": (0, 0), "token": (1, 0), "1 x 4": (1, 4)}, [(1, 2), (2, 7)], title=LONG
    ),
    "code_shares": lambda: plot_low_bits.code_shares(
        {"as it is": {-1: 0.25, 0: 0.75}, "turned": {-1: 0.5, 0: 0.5 - 1e-3, 1: 1e-3}}, title=LONG
    ),
    "number_lines": lambda: plot_precision.number_lines(
        {"e2m1": [-6.0, 0.0, 0.5, 1, 1.5, 2, 3, 4, 6], "an eighth": [2.0**-k for k in range(9)]},
        subnormal_below={"e2m1": 1.0},
        title=LONG,
    ),
    "error_by_length": lambda: plot_precision.error_by_length(
        [64, 1024, 4096],
        {"fp16": [0, 1e-3, 0.5], "chunks": [1e-4, 1e-4, 2e-4]},
        bounds={"bound": [1e-3, 1e-2, 1]},
        title=LONG,
    ),
    "magnitudes": lambda: plot_precision.magnitudes(
        {"weights": {-5: 0.75, -4: 0.25}, "gradients of weights": {-28: 1.0}},
        {"fp16": (2.0**-24, 2.0**-14, 65504.0)},
        title=LONG,
    ),
    "contractions": lambda: plot_precision.contractions(
        [("y = x · Wᵀ", ("x", ("M", 4), ("K", 6), 1, 4), ("Wᵀ", ("K", 6), ("N", 3), 4, 2))], title=LONG
    ),
    "pipeline": lambda: plot_pipeline.schedule(
        *PIPELINES, title=LONG, peaks=[[4, 3, 2, 1], [5.5, 4.5, 3.5, 2.5]]
    ),
    "pipeline, one microbatch": lambda: plot_pipeline.one_microbatch(
        simulate(one_f_one_b(4, 1), Costs(B=2)), title=LONG
    ),
    "pipeline, in flight": lambda: plot_pipeline.in_flight(
        PIPELINES[0], [in_flight(PIPELINES[0].schedule, r) for r in range(4)], title=LONG, limit=4
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_the_file_is_small(name):
    figure = PICTURES[name]()
    data = png(figure)
    assert data.startswith(b"\x89PNG") and len(data) < 120_000, len(data)
    assert data == PICTURES[name]()._repr_png_()[0]  # equal data, equal picture
    width, height = figure.get_size_inches() * figure.dpi
    assert width == pytest.approx(720) and height < 900
    renderer = FigureCanvasAgg(figure).get_renderer()
    box = figure.get_tightbbox(renderer)  # of everything drawn, in inches
    assert (
        box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width / 100 + 0.02 and box.y1 < height / 100 + 0.02
    ), box
    for legend in figure.legends:
        assert not any(text.get_text().startswith("_") for text in legend.get_texts())
        for ax in figure.axes:
            assert not legend.get_window_extent(renderer).overlaps(ax.get_window_extent(renderer)), (
                "it hides data"
            )


def test_timeline_draws_the_seconds_of_the_account():
    timeline = step(ranks=(0,))
    ax = plot.timeline(timeline).axes[0]
    drawn = {}
    for bars in ax.collections:
        length = sum(path.get_extents().width for path in bars.get_paths())
        colour = matplotlib.colors.to_hex(bars.get_facecolor()[0]).upper()
        drawn[colour] = drawn.get(colour, 0) + length / 1e3  # the axis is in ms
    account = timeline.account(0)
    assert ax.get_xlabel() == "time (ms)"
    assert drawn[COLOURS["exposed communication"]] == pytest.approx(account.exposed_communication_s)
    assert drawn[COLOURS["communication"]] == pytest.approx(account.overlap_s)
    computed = sum(drawn[COLOURS[phase]] for phase in ("forward", "backward", "optimizer"))
    assert computed == pytest.approx(account.compute_s)
    assert drawn[COLOURS["wait"]] == pytest.approx(account.waiting_s)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "dp"]


def test_a_long_timeline_has_few_rectangles():
    ax = plot.timeline(step(num_layers=4000, ranks=(0,))).axes[0]
    assert sum(len(bars.get_paths()) for bars in ax.collections) < 4000


def test_bars_show_the_amounts():
    figure = PICTURES["bars_by_kind"]()
    ax = figure.axes[0]
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(15 + 90 + 1 + 2)
    assert {" 105", " 3", "90", "15"} <= {text.get_text() for text in ax.texts}
    assert ax.get_xlabel() == "memory of a device (GB)"


def test_a_wrong_number_stands_out():
    texts = {t.get_text(): t.get_color() for t in PICTURES["measured_and_formula"]().axes[0].texts}
    assert texts["1.000"] == texts["0 = 0"] == COLOURS["formula"]
    assert texts["2.667"] == style.VERMILLION


def test_memory_names_the_peak_and_the_phases():
    texts = {text.get_text() for text in PICTURES["memory"]().axes[0].texts}
    assert {"peak 2.9 GB", " forward", " backward"} <= texts


def test_rank_grid_colours_groups():
    def coloured(ax):
        groups = {}
        for square, text in zip(ax.patches, ax.texts):
            groups.setdefault(matplotlib.colors.to_hex(square.get_facecolor()).upper(), []).append(
                int(text.get_text())
            )
        return sorted(groups.values())

    dp, tp = plot.rank_grid({"dp": 2, "tp": 3}).axes
    assert coloured(dp) == [[0, 3], [1, 4], [2, 5]]
    assert coloured(tp) == [[0, 1, 2], [3, 4, 5]]
    dp, pp, tp = plot.rank_grid({"dp": 4, "pp": 4, "tp": 8}).axes  # many groups: those of rank 0
    assert [0, 32, 64, 96] in coloured(dp) and [0, 8, 16, 24] in coloured(pp) and [*range(8)] in coloured(tp)


def test_loads_are_shares_of_tokens_and_placements_pile_up_to_the_rows_of_a_rank():
    figure = plot_balance.expert_loads({"run": LOADS}, top_k=2, title="")
    shares = figure.axes[0].images[0].get_array()  # [experts, steps]
    assert shares.T.tolist() == [[1, 1, 0, 0], [1, 0.5, 0.5, 0], [0.5] * 4]
    before, after = plot_balance.placements(PLACED, title="").axes
    for ax, rows in ((before, [120, 40]), (after, [75, 85])):
        tops = [
            max(bar.get_y() + bar.get_height() for bar in ax.patches if bar.get_x() == x) for x in (-0.4, 0.6)
        ]
        assert tops == rows and set(ax.lines[0].get_ydata()) == {80}
    colours = {bar.get_facecolor() for bar in before.patches}
    assert len(colours) == 4, "experts 0 and 7 differ"


def test_balance_curves_draw_ratios_under_their_limit_and_losses_at_their_steps():
    figure = plot_balance.balance_curves({"run": [4, 2, 1]}, {"run": {1: 3.0, 3: 2.5}}, limit=4, title="")
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[1, 4], [2, 2], [3, 1]]
    assert [line.get_ydata()[0] for line in left.lines[1:]] == [4, 1], "the limit, and balance"
    assert right.lines[0].get_xydata().tolist() == [[1, 3.0], [3, 2.5]]


def test_lines_to_experts_are_as_wide_as_what_flows():
    ax = PICTURES["flow"]().axes[0]
    bands = [patch.get_xy() for patch in ax.patches if isinstance(patch, matplotlib.patches.Polygon)]
    widths = [(band[:, 1].max() - band[:, 1].min(), abs(band[3][1] - band[0][1])) for band in bands]
    assert [width for _, width in widths] == pytest.approx([3 / 8, 1 / 8, 1 / 2])  # none where nothing flows
    boxes = [p for p in ax.patches if isinstance(p, matplotlib.patches.Rectangle)]
    heights = [box.get_height() for box in boxes]
    assert heights == pytest.approx(
        [1 / 2, 1 / 2, 7 / 8, 0.004, 1 / 8]
    )  # sources, targets; an empty one is a hair
    assert bands[2][1][1] == pytest.approx(bands[0][2][1])  # where one ends in a box, the next begins
    assert bands[1][0][1] == pytest.approx(bands[0][3][1])
    inks = [p.get_facecolor()[:3] for p in ax.patches if isinstance(p, matplotlib.patches.Polygon)]
    assert inks == [matplotlib.colors.to_rgb(colour) for colour in (CYCLE[0], CYCLE[1], CYCLE[0])]
    colours = [matplotlib.colors.to_hex(box.get_facecolor()).upper() for box in boxes]
    assert colours[2:] == [CYCLE[0], CYCLE[0], CYCLE[1]], "of their owners"


def test_choices_show_loads_and_darker_weights():
    ax = PICTURES["choices"]().axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "0", "1"]
    shade = [sum(matplotlib.colors.to_rgb(cell.get_facecolor())) for cell in ax.patches]
    assert shade[3] < shade[2] < shade[0] < shade[1] == 3.0  # 1, 3/4, 1/4, nothing


def test_one_microbatch_says_what_each_rank_waits_for_with_an_arrow_per_message():
    figure = PICTURES["pipeline, one microbatch"]()
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"F0", "B3", "waits for F2", "waits for B1"} <= texts and "waits for F3" not in texts
    arrows = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 6, "a message per boundary and direction"


def test_the_legend_shows_the_shades_of_a_ranks_stages_side_by_side():
    labels = [text.get_text() for text in PICTURES["pipeline"]().legends[0].get_texts()]
    assert labels == ["forward (stages of a rank)", "backward (stages of a rank)", "idle"]
    plain = plot_pipeline.schedule(PIPELINES[0]).legends[0].get_texts()
    assert [text.get_text() for text in plain] == ["forward", "backward", "idle"]


def test_heat_leaves_the_diagonal_out():
    ax = PICTURES["heat"]().axes[0]
    assert [text.get_text() for text in ax.texts] == ["9,000", "3", "0", "7"]
    colours = [matplotlib.colors.to_hex(cell.get_facecolor()).upper() for cell in ax.patches]
    assert colours[0] == colours[3] == style.PALE.upper() and colours[2] == "#FFFFFF" != colours[1]


def test_sharing_marks_the_tiles_of_outliers():
    figure = PICTURES["sharing"]()
    assert [ax.get_title(loc="left").split("\n")[1][:4] for ax in figure.axes] == ["100%", "50% ", "25% "]
    colours = [matplotlib.colors.to_hex(box.get_facecolor()) for box in figure.axes[2].patches]
    hit, pale, black = colours[2], colours[0], colours[-1]
    assert colours[:8] == [pale, pale, hit, pale, pale, hit, pale, pale] and colours[8:] == [black] * 2
    for outliers, tiles in ([(4, 0)], {"all": (0, 0)}), ([], {}):
        with pytest.raises(ValueError, match="a matrix of 4 x 8; give places inside it and a tile"):
            plot_low_bits.sharing((4, 8), tiles, outliers, title="")


def test_code_shares_are_percent_and_name_what_can_be_seen():
    one, other = PICTURES["code_shares"]().axes
    assert [bar.get_height() for bar in one.patches] == [25, 75] and one.get_ylim() == other.get_ylim()
    assert [text.get_text() for text in other.texts] == ["50", "50"], "nothing above 0.1 %"
    with pytest.raises(ValueError, match="1 panels, of which some are empty"):
        plot_low_bits.code_shares({"x": {}}, title="")


def test_number_lines_have_a_stroke_for_each_positive_number_and_grey_subnormals():
    ax = PICTURES["number_lines"]().axes[0]
    strokes = [[segment[0][0] for segment in row.get_segments()] for row in ax.collections]
    assert strokes == [[0.5, 1, 1.5, 2, 3, 4, 6], [2.0**-k for k in range(8, -1, -1)]]
    colours = [
        [matplotlib.colors.to_hex(colour).upper() for colour in row.get_colors()] for row in ax.collections
    ]
    assert colours[0] == [style.GREY.upper()] + [style.BLUE.upper()] * 6 and ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["e2m1", "an eighth"]
    with pytest.raises(ValueError, match="fp16 has 1000 positive numbers.*; draw 1 to 300"):
        plot_precision.number_lines({"fp16": range(1001)}, title="")


def test_errors_stand_at_their_lengths_and_none_at_zero():
    ax = PICTURES["error_by_length"]().axes[0]
    fp16, chunks, bound = ax.lines
    assert list(fp16.get_xdata()) == [64, 1024, 4096] and list(fp16.get_ydata())[1:] == [1e-3, 0.5]
    assert fp16.get_ydata()[0] != fp16.get_ydata()[0] and list(bound.get_ydata()) == [1e-3, 1e-2, 1]
    assert (bound.get_linestyle(), chunks.get_linestyle()) == ("--", "-")
    with pytest.raises(ValueError, match="x has 1 errors for 2 lengths"):
        plot_precision.error_by_length([1, 2], {"x": [1.0]}, title="")


def test_magnitudes_stand_above_what_a_format_holds():
    weights, gradients, fp16 = PICTURES["magnitudes"]().axes
    assert [(bar.get_center()[0], bar.get_height()) for bar in weights.patches] == [(-5, 75), (-4, 25)]
    assert [bar.get_center()[0] for bar in gradients.patches] == [-28] and gradients.get_ylabel()[
        -7:
    ] == "weights"
    (left, wide), (normal, wider) = [(bar.get_x(), bar.get_width()) for bar in fp16.patches]
    assert (left, wide, normal) == (-24, 10, -14) and wider == pytest.approx(30, abs=1e-3)
    with pytest.raises(ValueError, match="0 kinds and 0 formats"):
        plot_precision.magnitudes({}, {}, title="")


def test_operands_are_cut_into_their_tiles_up_to_the_edge():
    (ax,) = PICTURES["contractions"]().axes
    sizes = [(tile.get_width(), tile.get_height()) for tile in ax.patches]
    assert sizes == [(4, 1), (2, 1)] * 4 + [(2, 4), (1, 4), (2, 2), (1, 2)]
    with pytest.raises(ValueError, match=r"y: \('K', 2\) across and \('K', 3\) down"):
        one, other = ("x", ("M", 1), ("K", 2), 1, 1), ("W", ("K", 3), ("N", 1), 1, 1)
        plot_precision.contractions([("y", one, other)], title="")


def test_a_described_picture_carries_its_text():
    plain = PICTURES["heat"]()
    data, metadata = style.described(plain, "two ranks")._repr_png_()
    assert data == png(plain) and metadata["alt"] == "two ranks"


def test_errors_say_what_can_be_drawn():
    with pytest.raises(ValueError, match="512 ranks .* at most 128"):
        plot.rank_grid({"dp": 64, "tp": 8})
    with pytest.raises(ValueError, match=r"0 ranks .* choose 1 to 16"):
        plot.timeline(step(), ranks=[])


def test_the_reader_keeps_their_own_style():
    before = dict(matplotlib.rcParams)
    for draw in PICTURES.values():
        draw()
    assert dict(matplotlib.rcParams) == before
    program = "import sys, minitrain.course.plot.charts; print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_one_palette():
    okabe_ito = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(CYCLE) <= okabe_ito and set(COLOURS.values()) - okabe_ito == {style.GREY, style.PALE}
    for kinds in (
        ["parameters", "gradients", "optimizer state", "activations", "buffers", "gathered parameters"],
        ["forward", "backward", "optimizer", "compute", "communication", "exposed communication", "wait"],
    ):
        assert len({COLOURS[kind] for kind in kinds}) == len(
            kinds
        )  # in one picture no colour means two things
    assert ink_on("#F0E442") == "#000000" and ink_on("#0072B2") == "white"


def test_units():
    assert unit_for(1.5e9, "bytes") == ("GB", 1e9) and unit_for(999, "bytes") == ("bytes", 1.0)
    assert unit_for(0.02, "s") == ("ms", 1e-3) and unit_for(0, "s") == ("ns", 1e-9)
    assert unit_for(7, "TFLOP") == ("TFLOP", 1.0)
