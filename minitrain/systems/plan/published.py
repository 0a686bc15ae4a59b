"""Published training runs as plain values, each with its source: what predictions are held to.

    published()[0].run, .step_s        rows of published.tsv

A row partly from memory says which fields (`unsure`). No torch.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from minitrain.model.config import GPTConfig, presets
from minitrain.plan.predict.training_run import STACKS, Stack, TrainingRun
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy

TABLE = Path(__file__).with_name("published.tsv")


@dataclass(frozen=True)
class Published:  # a run whose step time was published
    run: TrainingRun
    step_s: float
    publication: str
    unsure: tuple[str, ...] = ()  # fields that are from memory

    name = property(lambda self: self.run.name)


_TITAN = Stack("torchtitan", flash=True, each_microbatch=True, p2p_overlapped=True, dp_overlapped=True)
_TITANS = _TITAN, replace(_TITAN, name="torchtitan-async", tp_overlapped=True)
BY_NAME = STACKS | {stack.name: stack for stack in _TITANS}  # those that the planner has, and torchtitan's
# By the first word of a row's name: publication, stacks without and with overlapped dp, what is from memory.
_DEEPSPEED = ("megatron-deepspeed", "megatron-deepspeed")
_LAYOUT = ("zero", "grad_bytes", "dp_overlap", "tp", "mbs")
PUBLICATIONS = {
    "Nar21": ("Narayanan 2021", ("megatron-2021", "megatron-2021-overlapped"), ()),
    "Kor22": ("Korthikanti 2022", ("megatron-2022", "megatron-2022"), ()),
    "MT-NLG": ("MT-NLG 2022", _DEEPSPEED, ()),
    # MegaScale's own rows attend through a window of unpublished width; here to all tokens before.
    "MegaScale": ("MegaScale 2024", ("megatron-2023", "megascale"), ()),
    "Llama3": ("Llama 3 2024", ("overlapped", "overlapped"), ("v", "zero", "dp_overlap")),
    "BLOOM": ("BLOOM 2022", _DEEPSPEED, ("grad_bytes", "dp_overlap")),
    "OPT-175B": ("OPT 2022", ("fairscale-2022", "fairscale-2022"), _LAYOUT),
    "GLM-130B": ("GLM-130B 2022", _DEEPSPEED, _LAYOUT),
    "GPT-NeoX-20B": ("GPT-NeoX 2022", _DEEPSPEED, (*_LAYOUT, "machine")),
    "Foundry": ("MosaicML 2023", ("fsdp", "fsdp"), ()),
    # Its rows are eager, compiled and, in 8 bits, with asynchronous tensor parallelism.
    "Titan-A100": ("torchtitan 2024", ("fsdp", "fsdp"), ()),
    "Titan-H100": ("torchtitan 2024", ("torchtitan", "torchtitan-async"), ("machine",)),
    "Bridge": ("Megatron-Bridge 2025, Blackwell", ("megascale", "megascale"), ("zero", "recompute")),
    "DeepSeek-V3": ("DeepSeek-V3 2024", ("deepseek", "deepseek"), ("recompute",)),
    "NeMo": ("NeMo 2024", ("megascale", "megascale"), ("zero", "h", "L", "ffn")),
}


@cache
def published() -> tuple[Published, ...]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return tuple(map(_row, csv.DictReader(lines, delimiter="\t")))


def _row(row: dict[str, str]) -> Published:
    n = {key: int(value) for key, value in row.items() if value and value.isdigit()}
    more = dict(each.split("=") for each in (row["more"] or "").split())
    publication, stacks, unsure = PUBLICATIONS[row["name"].split()[0]]
    microbatches = n["gbs"] // (n["dp"] * n["mbs"])
    strategy = dict(dp=n["dp"], pp=n["pp"], cp=n["cp"], tp=n["tp"], zero=n["zero"], microbatches=microbatches)
    strategy |= dict(recompute=row["recompute"], sequence_parallel=bool(n["sp"]) and n["tp"] > 1)
    strategy |= dict(schedule="interleaved", chunks=n["v"]) if n["v"] > 1 else {}
    strategy |= dict(core="gathered") if n["cp"] > 1 else {}
    strategy |= dict(precision="bfloat16_main_grads" if n["grad_bytes"] == 4 else "bfloat16")
    strategy |= dict(products=row["products"]) | {name: int(n) for name, n in more.items() if n.isdigit()}
    strategy |= {name: more[name] for name in ("schedule",) if name in more}
    stack = BY_NAME[stacks[n["dp_overlap"]]]
    model, on = presets[more["preset"]] if more else _model(row, n), machine(row["mach"])
    run = TrainingRun(model, Strategy(**strategy), on, n["gbs"], n["s"], stack, row["name"])
    return Published(run, float(row["step_s"]), publication, unsure)


def _model(row: dict[str, str], n: dict[str, int]) -> GPTConfig:
    """GPT-2's kind, with dropout before 2023; Llama's where the number of keys' heads is given."""
    kind = dict(norm="layer", activation="gelu_tanh", bias=True, positions="learned")
    if n["kv"]:
        kind = dict(norm="rms", activation="swiglu" if n["gated"] else "gelu_tanh", positions="rope")
    elif n["gated"]:
        kind |= dict(activation="geglu", positions="rope")
    kind |= dict(residual="parallel" if n["parallel_block"] else "pre", dropout=0.0 if n["flash"] else 0.1)
    sizes = dict(vocab_size=n["V"], d_model=n["h"], num_layers=n["L"], num_heads=n["a"])
    sizes |= dict(num_kv_heads=n["kv"] or None, d_ff=n["ffn"] or None, max_positions=n["s"])
    return GPTConfig(**sizes, **kind, tied=bool(n["tied"]))
