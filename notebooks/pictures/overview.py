"""The picture of the README, made from runs: `python notebooks/pictures/overview.py` writes overview.png
beside this file.

1  memory       a small GPT on 4 processes, in its second step; a dry run must give the same account
2  bytes        what 4 processes hand to the network, beside the papers' formulas; all must be equal
3  time         GPT-2 XL, 1.5 billion parameters, as rank 0 of 64 in a dry run, replayed on 64 H100
"""

import io
from fractions import Fraction
from pathlib import Path

import torch
from matplotlib import rc_context
from PIL import Image

from minitrain import collectives, launch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.collectives import world
from minitrain.model.config import GPTConfig, presets
from minitrain.model.data.batches import random_tokens
from minitrain.systems.data_parallel.accumulation import ScatteredGradients
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.naive import all_reduce_gradients
from minitrain.systems.data_parallel.parameter_server import Worker, serve
from minitrain.course.plot.data_parallel import draw_replayed
from minitrain.course.plot.style import (
    BLACK,
    COLOURS,
    Picture,
    colour_of,
    ink_on,
    style,
    swatch,
    unit_for,
)
from minitrain.ranks.ledger import Ledger
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.simulate.machines import machine
from minitrain.systems.simulate.replay import replay

RANKS = 4
SMALL = GPTConfig(vocab_size=256, d_model=128, num_layers=4, num_heads=4, max_positions=64)
STACK = ("parameters", "optimizer state", "gradients", "activations", "buffers")
WAYS = ("naive", "fused", "bucketed")
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


def sent_by_each_way(numel=120_000, microbatches=4):
    """{what: bytes this rank sends} for collectives on `numel` float32 and for ways to sum a gradient of that
    size.
    """
    group, weight, sent = world(), torch.nn.Parameter(torch.zeros(numel)), {}

    def account(what, run):
        weight.grad = None
        with Ledger() as ledger:
            run()
        sent[what] = ledger.sent_bytes()

    def backward():
        (weight * 2).sum().backward()

    def kept(reducer):
        for number in range(1, microbatches + 1):
            reducer.enabled = number == microbatches
            backward()
        reducer.finish()
        reducer.close()

    def sharded():
        slices = ScatteredGradients([weight], group)
        for _ in range(microbatches):
            backward()
            slices.add()

    def served():
        if group.rank() == 0:
            return serve([weight], lambda params: torch.optim.SGD(params, lr=0.1), 1, group)
        backward()
        Worker([weight], group).push_pull()

    x = torch.ones(numel)
    account("reduce-scatter", lambda: collectives.reduce_scatter(x, group))
    account("all-gather", lambda: collectives.all_gather(x[: numel // group.size()], group))
    account("all-to-all", lambda: collectives.all_to_all(x, group))
    account("all-reduce", lambda: collectives.all_reduce(x, group))
    account("accumulate m", lambda: kept(GradReducer([weight], group)))
    account("accumulate m, sharded", sharded)
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
        1.04 * at[peak],
        base["gradients"] + 0.35 * (total[peak] / scale - base["gradients"]),
        "activations",
        va="center",
    )
    ax.plot(at[peak], total[peak] / scale, "o", color=BLACK, markersize=4)
    ax.annotate(
        f"peak {total[peak]:,} bytes",
        (at[peak], total[peak] / scale),
        (8, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    phases = [(index, event.phase) for index, event in enumerate(events) if hasattr(event, "phase")]
    for (index, phase), (_, before) in zip(phases, [(0, ""), *phases]):
        if phase != before:
            ax.axvline(index, color=BLACK, linewidth=0.6, linestyle=":")
            ax.text(
                index, 1.0, f" {phase}", transform=ax.get_xaxis_transform(), va="bottom", fontsize=8
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
            markeredgecolor=COLOURS["formula"],
            markeredgewidth=1.5,
        )
        ax.text(measured + 0.22, y, text, va="center")
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
        xlim=(0, 5.5),
        xticks=range(4),
        xlabel=f"bytes each rank sends, as multiples of S ({RANKS} ranks, m = 4)",
    )
    ax.xaxis.label.set(ha="right", x=1)
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
    ax.set_xlabel(
        "time (ms), replayed from the counted events: a model of the machines, not a clock"
    )
    swatches = [swatch(what) for what in COLOURS if what in drawn]
    ax.legend(handles=swatches, loc="lower right", fontsize=8, handlelength=1.6)


def draw(memory, events, rows, timelines):
    figure = Picture(figsize=(8.2, 7.0))
    above, below = figure.subfigures(2, 1, height_ratios=[1.1, 1], hspace=0.04)
    left, right = above.subplots(1, 2, width_ratios=[1, 1])
    draw_memory(left, memory, events)
    draw_bytes(right, rows)
    wide = below.subplots()
    draw_time(wide, timelines)
    for ax, x, pad, text in (
        (
            left,
            -0.13,
            20,
            f"1  Run it. A training step on {RANKS} processes:\n    what fills the memory, and when",
        ),
        (
            right,
            -0.5,
            20,
            "2  Count it. Bytes handed to the network,\n    beside the formulas of the papers",
        ),
        (
            wide,
            -0.185,
            8,
            "3  Replay it. The same code as one rank of 64, played on 64 H100:\n"
            "    GPT-2 XL, gradients summed after backward, one by one or in one call, or in buckets during it",
        ),
    ):
        ax.set_title(text, x=x, pad=pad, fontsize=10)
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
        "accumulate m": (WHOLE, "2(n\u22121)/n S"),
        "accumulate m, sharded": (4 * HALF, "m(n\u22121)/n S"),
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
    with rc_context(style()):
        write(draw(small.timeline(), small.events, rows, timelines))


def write(figure, dots_an_inch=195):
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dots_an_inch)
    path = Path(__file__).with_name("overview.png")
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
