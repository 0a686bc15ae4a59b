"""The picture of the README, made from runs: `python notebooks/pictures/overview.py` writes overview.png
and, for dark pages, overview-dark.png beside this file.

1  memory       a small GPT on 4 processes, in its second step; a dry run must give the same account
2  bytes        what 4 processes hand to the network, beside the papers' formulas; all must be equal
3  time         GPT-2 XL, 1.5 billion parameters, as rank 0 of 64 in a dry run, replayed on 64 H100
"""

import io
from fractions import Fraction
from pathlib import Path

import torch
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from PIL import Image

from minitrain import collectives, launch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.collectives import world
from minitrain.model.config import GPTConfig, presets
from minitrain.model.data.batches import random_tokens
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.naive import all_reduce_gradients
from minitrain.systems.data_parallel.parameter_server import Worker, serve
from minitrain.course.plot.data_parallel import draw_replayed
from minitrain.course.plot.style import COLOURS, Picture, colour_of, ink_on, style, swatch, unit_for
from minitrain.ranks.ledger import Ledger
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.simulate.machines import machine
from minitrain.systems.simulate.replay import replay

RANKS = 4
SMALL = GPTConfig(vocab_size=256, d_model=128, num_layers=4, num_heads=4, max_positions=64)
STACK = ("parameters", "optimizer state", "gradients", "activations", "buffers")
WAYS = ("naive", "fused", "bucketed")
INK, PAPER = "#E6EDF3", "#0D1117"  # of dark pages
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
DARK = dict.fromkeys(INKED, INK) | {"figure.facecolor": PAPER, "axes.facecolor": PAPER}
DARK["grid.color"] = "#30363D"
LEGEND = {"loc": "lower left", "bbox_to_anchor": (-0.5, 0.97), "ncols": 4, "fontsize": 7.5}
LEGEND |= {"handlelength": 1, "columnspacing": 0.9, "handletextpad": 0.4}
HALF, WHOLE = Fraction(RANKS - 1, RANKS), Fraction(2 * (RANKS - 1), RANKS)


# ---- what is run -----------------------------------------------------------------------------------------


def training_step():
    """The account of the second step: the optimizer made its state in the first."""
    group, model = world(), GPT(SMALL)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        tokens, targets = random_tokens(
            step, group.rank(), group.size(), 8 * group.size(), 64, SMALL.vocab_size
        )
        with Ledger() as ledger:
            with ledger.phase("forward"):
                loss = cross_entropy_sum(model(tokens), targets) / (group.size() * targets.numel())
            with ledger.phase("backward"):
                loss.backward()
            with ledger.phase("sum"):
                all_reduce_gradients(model.parameters(), group)
            with ledger.phase("optimizer"):
                optimizer.step()
    return ledger


def sent_by_each_way(numel=120_000):
    """{what: bytes this rank sends} for collectives on `numel` float32, and for a server of that many
    weights.
    """
    group, weight, sent = world(), torch.nn.Parameter(torch.zeros(numel)), {}

    def account(what, run):
        weight.grad = None
        with Ledger() as ledger:
            run()
        sent[what] = ledger.sent_bytes()

    def served():
        if group.rank() == 0:
            return serve([weight], lambda params: torch.optim.SGD(params, lr=0.1), 1, group)
        (weight * 2).sum().backward()
        Worker([weight], group).push_pull()

    x = torch.ones(numel)
    account("reduce-scatter", lambda: collectives.reduce_scatter(x, group))
    account("all-gather", lambda: collectives.all_gather(x[: numel // group.size()], group))
    account("all-to-all", lambda: collectives.all_to_all(x, group))
    account("all-reduce", lambda: collectives.all_reduce(x, group))
    account("parameter server", served)
    return sent


def large_step(way):
    group, config = world(), presets["gpt2-xl"]
    model = GPT(config, dtype=torch.bfloat16)
    reducer = GradReducer(model.parameters(), group) if way == "bucketed" else None
    tokens, targets = random_tokens(0, 0, 1, 4, 1024, config.vocab_size)
    with Ledger() as ledger:
        with ledger.phase("forward"):
            loss = cross_entropy_sum(model(tokens), targets) / (group.size() * targets.numel())
        with ledger.phase("backward"):
            loss.backward()
            if reducer:
                reducer.finish()
            else:
                all_reduce_gradients(model.parameters(), group, fused=way == "fused")
    return ledger


# ---- how it is drawn -------------------------------------------------------------------------------------


def draw_memory(ax, timeline, events):
    at = [index for index, _ in timeline]
    total = [sum(live.values()) for _, live in timeline]
    unit, scale = unit_for(max(total), "bytes")
    ax.stackplot(
        at,
        [[live[kind] / scale for _, live in timeline] for kind in STACK],
        step="post",
        linewidth=0,
        colors=[colour_of(kind) for kind in STACK],
    )
    base = dict(
        zip(
            STACK,
            (
                0,
                *(
                    sum(timeline[-1][1][kind] for kind in STACK[:i]) / scale
                    for i in range(1, len(STACK))
                ),
            ),
        )
    )
    for kind in STACK[:3]:
        height = timeline[-1][1][kind] / scale
        ax.text(
            0.97 * at[-1],
            base[kind] + height / 2,
            kind,
            ha="right",
            va="center",
            color=ink_on(colour_of(kind)),
        )
    peak = total.index(max(total))
    ax.text(
        at[peak],
        base["gradients"] + 0.35 * (total[peak] / scale - base["gradients"]),
        "activations",
        ha="center",
        va="center",
        fontsize=8,
        color=ink_on(colour_of("activations")),
    )
    ax.plot(at[peak], total[peak] / scale, "o", color=rcParams["text.color"], markersize=4)
    ax.annotate(
        f"{total[peak]:,} bytes",
        (at[peak], total[peak] / scale),
        (8, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
        fontsize=8,
        bbox={"facecolor": rcParams["axes.facecolor"], "edgecolor": "none", "pad": 1},
    )
    phases = [(index, event.phase) for index, event in enumerate(events) if hasattr(event, "phase")]
    for (index, phase), (_, before) in zip(phases, [(0, ""), *phases]):
        if phase != before:
            ax.axvline(index, color=rcParams["text.color"], linewidth=0.6, linestyle=":")
            ax.text(
                index,
                1.0,
                f"  {phase}" if phase != "sum" else phase,
                transform=ax.get_xaxis_transform(),
                va="bottom",
                fontsize=7,
            )
    ax.set(
        xlim=(0, at[-1]),
        ylim=(0, 1.06 * max(total) / scale),
        ylabel=f"live memory ({unit})",
        xticks=[],
        xlabel="operators and collectives, in order",
    )


def draw_bytes(ax, rows):
    """{what: (measured, formula in units of S, its text)}: a bar as measured, a ring where the formula
    says.
    """
    for y, (what, (measured, formula, text)) in enumerate(rows.items()):
        bar = ax.barh(y, measured, height=0.62, color=COLOURS["measured"])
        (ring,) = ax.plot(
            formula,
            y,
            "o",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=rcParams["text.color"],
            markeredgewidth=1.5,
        )
        ax.text(measured + 0.3, y, text, va="center", fontsize=8)
        ax.text(
            1.0,
            y,
            f"{float(measured / formula):.3f}",
            va="center",
            ha="right",
            fontweight="bold",
            transform=ax.get_yaxis_transform(),
        )
    ax.text(1.0, 1.0, "ratio", ha="right", va="bottom", fontsize=8, transform=ax.transAxes)
    ax.set(
        yticks=range(len(rows)),
        yticklabels=list(rows),
        ylim=(len(rows) - 0.5, -0.6),
        xlim=(0, 6.2),
        xticks=range(4),
        xlabel=f"bytes sent, in S ({RANKS} ranks)",
    )
    ax.legend(
        [bar, ring],
        ["counted", "formula"],
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.985),
        ncols=2,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
    ax.grid(axis="y", visible=False)


def draw_time(ax, timelines):
    drawn = draw_replayed(ax, timelines)
    ax.set_xlabel("time (ms), replayed, not a clock")
    swatches = [swatch(what) for what in COLOURS if what in drawn]
    ax.legend(handles=swatches, **LEGEND)


def draw(memory, events, rows, timelines):
    figure = Picture(figsize=(10.4, 3.5))
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1.05, 1.35])
    draw_memory(left, memory, events)
    draw_bytes(middle, rows)
    draw_time(right, timelines)
    for ax, x, text in (
        (left, -0.17, f"1  Run it: what fills memory\n    in a step of {RANKS} processes"),
        (middle, -0.5, "2  Count it: bytes, beside\n    the formulas of the papers"),
        (right, -0.3, "3  Replay it: GPT-2 XL as one rank\n    of 64 H100, three ways to sum"),
    ):
        ax.set_title(text, x=x, pad=18, fontsize=10)
    return figure


def main():
    small = launch.run(training_step, ranks=RANKS)[0]
    dry = dryrun.run(training_step, rank=0, ranks=RANKS)
    assert (dry.timeline(), dry.flops, dry.sent_bytes()) == (
        small.timeline(),
        small.flops,
        small.sent_bytes(),
    )

    formulas = {
        "reduce-scatter": (HALF, "(n\u22121)/n S"),
        "all-gather": (HALF, "(n\u22121)/n S"),
        "all-to-all": (HALF, "(n\u22121)/n S"),
        "all-reduce": (WHOLE, "2(n\u22121)/n S"),
        "parameter server": (Fraction(RANKS - 1), "(n\u22121) S"),
    }
    sent = launch.run(sent_by_each_way, ranks=RANKS)[0]
    rows = {
        what: (Fraction(sent[what], 4 * 120_000), *formula) for what, formula in formulas.items()
    }
    assert all(measured == formula for measured, formula, _ in rows.values())

    timelines = {}
    for way in WAYS:
        ledger = dryrun.run(large_step, way, rank=0, ranks=64)
        calls = f"{ledger.num_calls('all_reduce')} call" + "s" * (way != "fused")
        timeline = replay({0: ledger.events}, machine("h100"), dtype="bfloat16")
        timelines[f"{way},\n{calls}"] = timeline
    for name, look in (("overview.png", {}), ("overview-dark.png", DARK)):
        with rc_context(style() | look):
            write(draw(small.timeline(), small.events, rows, timelines), name)


def write(figure, name, dots_an_inch=180):
    drawn, path = io.BytesIO(), Path(__file__).with_name(name)
    Figure.savefig(figure, drawn, format="png", dpi=dots_an_inch)  # not in the style of a notebook
    few_colours = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few_colours.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
