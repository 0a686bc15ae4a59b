"""A training run as plain values: model, layout, machine, batch, software; and the published ones.

    TrainingRun(presets["llama3-8b"], Strategy(dp=8, tp=8), machine("h100"), batch=64, length=8192)
    published()[0].run, .step_s        rows of published.tsv: 51 runs of nine publications, each with a source

Strategy says how work is dealt out, `Stack` how well a software overlaps and fuses it. `STACKS` names those
of the published rows; "minitrain" is this code. A row partly from memory says which fields (`unsure`).
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from minitrain.model.config import GPTConfig
from minitrain.plan.simulate.machines import Machine, machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.checks import require_positive_ints

TABLE = Path(__file__).with_name("published.tsv")


@dataclass(frozen=True)
class Stack:  # what a software makes of a layout; the defaults are Megatron-LM's of 2021
    name: str = "megatron-2021"
    fused: bool = True  # chains of elementwise operators are one pass through memory
    adds_in_products: bool = False  # products of weights' gradients add to those of microbatches before
    flash: bool = False  # attention is one kernel; else scores are written out
    p2p_overlapped: bool = False  # a message between stages takes no time of its ranks
    scattered: bool = True  # where tp ranks have the same activations, each sends a part, gathered after it
    tp_overlapped: bool = False  # collectives of tp run beside products, in as many parts as tp has ranks
    dp_overlapped: bool = False  # gradients travel beside backward, weights beside forward
    whole_again: bool = True  # recomputation in full runs the whole block; else it stops where it can
    each_microbatch: bool = False  # ZeRO-2 scatters the gradients of each microbatch (ours), not their sum
    buckets_apart: bool = False  # gradients add up beside the buckets in which they travel (ours)
    dp_inside_pp: bool = True  # ranks: tp, cp, dp, pp, innermost first; else tp, cp, pp, dp (ours)


_MEGATRON = Stack()
_2023 = Stack("megatron-2023", flash=True, adds_in_products=True)
_HIDDEN = dict(p2p_overlapped=True, dp_overlapped=True)
_OURS = Stack("minitrain", fused=False, flash=True, scattered=False, **_HIDDEN)
STACKS = {
    stack.name: stack
    for stack in (
        _MEGATRON,
        Stack("megatron-2021-overlapped", dp_overlapped=True),  # one stage: gradients beside backward
        Stack("megatron-2022", adds_in_products=True),
        Stack("megatron-deepspeed"),
        Stack("fairscale-2022"),
        _2023,
        replace(_2023, name="megascale", tp_overlapped=True, **_HIDDEN),
        replace(_2023, name="llama3", dp_inside_pp=False, **_HIDDEN),
        replace(_OURS, whole_again=False, each_microbatch=True, buckets_apart=True, dp_inside_pp=False),
    )
}


@dataclass(frozen=True)
class TrainingRun:
    """`batch` rows of `length` tokens per step, in the strategy's microbatches."""

    model: GPTConfig
    strategy: Strategy
    machine: Machine
    batch: int
    length: int
    stack: Stack = _MEGATRON
    name: str = ""

    def __post_init__(self) -> None:
        require_positive_ints(1 << 40, batch=self.batch, length=self.length)
        parts = self.strategy.dp * self.strategy.microbatches
        if self.batch % parts:
            sizes = f"dp x microbatches = {self.strategy.dp} x {self.strategy.microbatches}"
            raise ValueError(f"batch={self.batch} is not a multiple of {sizes}; use a multiple of {parts}")
        self.strategy.check(self.model, self.strategy.ranks)
        self.strategy.check_batch(self.model, self.batch, self.length)

    # rows that a rank runs at once
    microbatch = property(lambda self: self.batch // (self.strategy.dp * self.strategy.microbatches))


@dataclass(frozen=True)
class Published:  # a run whose step time was published
    run: TrainingRun
    step_s: float
    publication: str
    unsure: tuple[str, ...] = ()  # fields that are from memory

    name = property(lambda self: self.run.name)


# By the first word of a row's name: publication, stacks without and with overlapped dp, what is from memory.
_DEEPSPEED = ("megatron-deepspeed", "megatron-deepspeed")
_LAYOUT = ("zero", "grad_bytes", "dp_overlap", "tp", "mbs")
PUBLICATIONS = {
    "Nar21": ("Narayanan 2021", ("megatron-2021", "megatron-2021-overlapped"), ()),
    "Kor22": ("Korthikanti 2022", ("megatron-2022", "megatron-2022"), ()),
    "MT-NLG": ("MT-NLG 2022", _DEEPSPEED, ()),
    # MegaScale's own rows attend through a window of unpublished width; here to all tokens before.
    "MegaScale": ("MegaScale 2024", ("megatron-2023", "megascale"), ()),
    "Llama3": ("Llama 3 2024", ("llama3", "llama3"), ("v", "zero", "dp_overlap")),
    "BLOOM": ("BLOOM 2022", _DEEPSPEED, ("grad_bytes", "dp_overlap")),
    "OPT-175B": ("OPT 2022", ("fairscale-2022", "fairscale-2022"), _LAYOUT),
    "GLM-130B": ("GLM-130B 2022", _DEEPSPEED, _LAYOUT),
    "GPT-NeoX-20B": ("GPT-NeoX 2022", _DEEPSPEED, (*_LAYOUT, "machine")),
}


@cache
def published() -> tuple[Published, ...]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return tuple(map(_row, csv.DictReader(lines, delimiter="\t")))


def _row(row: dict[str, str]) -> Published:
    n = {key: int(value) for key, value in row.items() if value.isdigit()}
    publication, stacks, unsure = PUBLICATIONS[row["name"].split()[0]]
    microbatches = n["gbs"] // (n["dp"] * n["mbs"])
    strategy = dict(dp=n["dp"], pp=n["pp"], cp=n["cp"], tp=n["tp"], zero=n["zero"], microbatches=microbatches)
    strategy |= dict(recompute=row["recompute"], sequence_parallel=bool(n["sp"]) and n["tp"] > 1)
    strategy |= dict(schedule="interleaved", chunks=n["v"]) if n["v"] > 1 else {}
    strategy |= dict(core="gathered") if n["cp"] > 1 else {}
    strategy |= dict(precision="bfloat16_main_grads" if n["grad_bytes"] == 4 else "bfloat16")
    stack = STACKS[stacks[n["dp_overlap"]]]
    model, on = _model(row, n), machine(row["mach"])
    run = TrainingRun(model, Strategy(**strategy), on, n["gbs"], n["s"], stack, row["name"])
    return Published(run, float(row["step_s"]), publication, unsure)


def _model(row: dict[str, str], n: dict[str, int]) -> GPTConfig:
    """GPT-2's kind, with dropout before 2023; Llama's where the MLP is gated and heads share keys."""
    kind = dict(norm="layer", activation="gelu_tanh", bias=True, positions="learned")
    if n["kv"]:
        kind = dict(norm="rms", activation="swiglu", positions="rope")
    elif n["gated"]:
        kind |= dict(activation="geglu", positions="rope")
    kind |= dict(residual="parallel" if n["parallel_block"] else "pre", dropout=0.0 if n["flash"] else 0.1)
    sizes = dict(vocab_size=n["V"], d_model=n["h"], num_layers=n["L"], num_heads=n["a"])
    sizes |= dict(num_kv_heads=n["kv"] or None, d_ff=n["ffn"] or None, max_positions=n["s"])
    return GPTConfig(**sizes, **kind, tied=bool(n["tied"]))
