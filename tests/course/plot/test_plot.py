"""The pictures: what is drawn is what was given, all fits, files are small and equal for equal data."""

import subprocess
import sys
from fractions import Fraction
from functools import partial

import matplotlib
import pytest

from minitrain.course.plot import charts as plot
from minitrain.course.plot import expert_charts as plot_experts
from minitrain.course.plot import pipeline_charts as plot_pipeline
from minitrain.course.plot import precision as plot_precision
from minitrain.course.plot import style
from minitrain.course.plot.style import COLOURS, CYCLE, ink_on
from minitrain.pipeline.schedule import in_flight
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.systems.plan.expert_overlap import DEEPSEEK_V3, REPORTED, pair_timeline
from minitrain.systems.simulate.replay import replay
from tests.course.plot.pictures import LONG, check


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


QUICK = Costs(F=Fraction(1, 2), B=1)
PIPELINES = (simulate(one_f_one_b(4, 8), Costs(B=2)), simulate(interleaved(4, 8, 2), QUICK))
OWNED = [[4 if rank == chunk else rank for chunk in range(4)] for rank in range(4)]
CHUNKS = [[[1] * 4 for _ in range(4)], OWNED]
LOADS = [[64, 64, 0, 0], [64, 32, 32, 0], [32, 32, 32, 32]]  # [steps][experts], two a token
PLACED = {"before": [{0: 90, 1: 30}, {2: 30, 7: 10}], "after": [{0: 45, 1: 30}, {0: 45, 2: 30, 7: 10}]}
PAIR = pair_timeline(DEEPSEEK_V3, 16, REPORTED, "turns")
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
    "expert_loads": lambda: plot_experts.expert_loads(
        {"layer 1": LOADS, "layer 2": LOADS[::-1]}, top_k=2, title=LONG
    ),
    "placements": lambda: plot_experts.placements(PLACED, title=LONG),
    "pairs": lambda: plot_experts.pairs({"in turns": PAIR}, dict(across="a", inside="b"), title=LONG),
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
    "sharing": lambda: plot_precision.sharing(
        (4, 8), {"tensor": (0, 0), "token": (1, 0), "1 x 4": (1, 4)}, [(1, 2), (2, 7)], title=LONG
    ),
    "code_shares": lambda: plot_precision.code_shares(
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
    "gaps": lambda: plot_precision.gaps(
        {"as published": [0.01, -0.02, 0.0], "off": [0.3]}, title=LONG, xlabel="nats"
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
        PIPELINES[0], [in_flight(PIPELINES[0].schedule, r) for r in range(4)], title=LONG
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_the_file_is_small(name):
    check(PICTURES[name], twice=name in list(PICTURES)[::4])


def test_timeline_draws_the_seconds_of_the_account():
    timeline = step(ranks=(0,))
    ax = plot.timeline(timeline).axes[0]
    drawn = {}
    for bars in ax.collections:
        length = sum(path.get_extents().width for path in bars.get_paths())
        colour = matplotlib.colors.to_hex(bars.get_facecolor()[0]).upper()
        drawn[colour] = drawn.get(colour, 0) + length / 1e3  # the axis is in ms
    account = timeline.accounts[0]
    assert ax.get_xlabel().startswith("time (ms) · ")
    assert drawn[COLOURS["exposed communication"]] == pytest.approx(account.exposed_communication_s)
    assert drawn[COLOURS["communication"]] == pytest.approx(account.overlap_s)
    computed = sum(drawn[COLOURS[phase]] for phase in ("forward", "backward", "optimizer"))
    assert computed == pytest.approx(account.compute_s)
    assert drawn[COLOURS["wait"]] == pytest.approx(account.waiting_s)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "dp"]


def test_bars_show_the_amounts():
    ax = PICTURES["bars_by_kind"]().axes[0]
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(15 + 90 + 1 + 2)
    assert {" 105", " 3", "90", "15"} <= {text.get_text() for text in ax.texts}
    assert ax.get_xlabel() == "memory of a device (GB)"


def test_a_wrong_number_stands_out():
    texts = {t.get_text(): t.get_color() for t in PICTURES["measured_and_formula"]().axes[0].texts}
    assert texts["1.000"] == texts["0 = 0"] == COLOURS["formula"] and texts["2.667"] == style.VERMILLION


def test_rank_grid_colours_groups():
    def coloured(ax):
        groups = {}
        for square, text in zip(ax.patches, ax.texts):
            colour = matplotlib.colors.to_hex(square.get_facecolor()).upper()
            groups.setdefault(colour, []).append(int(text.get_text()))
        return sorted(groups.values())

    dp, tp = plot.rank_grid({"dp": 2, "tp": 3}).axes
    assert coloured(dp) == [[0, 3], [1, 4], [2, 5]] and coloured(tp) == [[0, 1, 2], [3, 4, 5]]
    dp, pp, tp = plot.rank_grid({"dp": 4, "pp": 4, "tp": 8}).axes  # many groups: those of rank 0
    assert [0, 32, 64, 96] in coloured(dp) and [0, 8, 16, 24] in coloured(pp) and [*range(8)] in coloured(tp)


def test_loads_are_shares_of_tokens_and_placements_pile_up_to_the_rows_of_a_rank():
    figure = plot_experts.expert_loads({"run": LOADS}, top_k=2, title="")
    shares = figure.axes[0].images[0].get_array()  # [experts, steps]
    assert shares.T.tolist() == [[1, 1, 0, 0], [1, 0.5, 0.5, 0], [0.5] * 4]
    before, after = plot_experts.placements(PLACED, title="").axes
    for ax, rows in ((before, [120, 40]), (after, [75, 85])):
        bars = lambda x: (bar for bar in ax.patches if bar.get_x() == x)
        tops = [max(bar.get_y() + bar.get_height() for bar in bars(x)) for x in (-0.4, 0.6)]
        assert tops == rows and set(ax.lines[0].get_ydata()) == {80}
    assert len({bar.get_facecolor() for bar in before.patches}) == 4, "experts 0 and 7 differ"


def test_one_microbatch_says_what_each_rank_waits_for_with_an_arrow_per_message():
    figure = PICTURES["pipeline, one microbatch"]()
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"F0", "B3", "waits for F2", "waits for B1"} <= texts and "waits for F3" not in texts
    arrows = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 6, "a message per boundary and direction"


def test_number_lines_have_a_stroke_for_each_positive_number_and_grey_subnormals():
    ax = PICTURES["number_lines"]().axes[0]
    strokes = [[segment[0][0] for segment in row.get_segments()] for row in ax.collections]
    assert strokes == [[0.5, 1, 1.5, 2, 3, 4, 6], [2.0**-k for k in range(8, -1, -1)]]
    name = lambda colour: matplotlib.colors.to_hex(colour).upper()
    colours = [[name(colour) for colour in row.get_colors()] for row in ax.collections]
    assert colours[0] == [style.GREY.upper()] + [style.BLUE.upper()] * 6 and ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["e2m1", "an eighth"]
    with pytest.raises(ValueError, match="fp16 has 1000 positive numbers.*; draw 1 to 300"):
        plot_precision.number_lines({"fp16": range(1001)}, title="")


def test_a_picture_says_what_it_shows():
    lines = partial(plot.lines, [1, 2], {"a": [3, 1], "b": [0, 0.25]}, xlabel="step", ylabel="loss")
    said = "A race. loss over step. a from 3 to 1. b from 0 to 0.25"
    (race := lines(title="A race")).axes[0].plot([], [], label="of no points")
    assert race._repr_png_()[1]["alt"] == said
    number, title, text = (
        (style.Path(style.__file__).with_name("pictures.tsv")).read_text().splitlines()[1].split("\t")
    )
    assert number == "00" and lines(title=title)._repr_png_()[1]["alt"] == text


def test_errors_say_what_can_be_drawn():
    with pytest.raises(ValueError, match="512 ranks .* at most 128"):
        plot.rank_grid({"dp": 64, "tp": 8})
    with pytest.raises(ValueError, match=r"0 ranks .* choose 1 to 16"):
        plot.timeline(step(), ranks=[])


def test_charts_import_neither_torch_nor_pyplot():
    program = "import sys, minitrain.course.plot.charts; print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_one_palette():
    okabe_ito = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(CYCLE) <= okabe_ito and set(COLOURS.values()) - okabe_ito == {style.GREY, style.PALE}
    for kinds in (
        ["parameters", "gradients", "optimizer state", "activations", "buffers", "gathered parameters"],
        ["forward", "backward", "optimizer", "compute", "communication", "exposed communication", "wait"],
    ):
        # in one picture no colour means two things
        assert len({COLOURS[kind] for kind in kinds}) == len(kinds)
    assert ink_on("#F0E442") == "#000000" and ink_on("#0072B2") == "white"
