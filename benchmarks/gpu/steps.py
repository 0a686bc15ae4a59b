"""A training step in bf16 against the datasheet, as it is and through torch.compile; and with FP8 products
against bf16 and against torchao's float8, all compiled.

Two blocks of width 4096, forward, backward and AdamW, with so many tokens that reading and writing
the optimizer's state is a small part. torchao is no dependency: `make gpu` puts it into build/torchao.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu.beside import median_s, run_of, told
from benchmarks.measure import Row, row
from minitrain import launch
from minitrain.model.training.step import measure_peak_flops
from minitrain.moe.experts import LowBits
from minitrain.plan.accounting import flops_per_token
from minitrain.plan.simulate.machines import MACHINES
from minitrain.precision.products import LowLinear, fused

FP8 = ("fp8_tensor", "fp8_rows")
TORCHAO = str(Path("build/torchao").resolve())


def datasheet_flops() -> float:
    """bf16, dense, of this GPU's datasheet; of another device its best product."""
    words = re.split(r"\W+", torch.cuda.get_device_name().lower()) if torch.cuda.is_available() else []
    for machine in MACHINES.values():
        if machine.device.name.split()[0].lower() in words:  # "H100" of "NVIDIA H100 80GB HBM3"
            return machine.device.peak("bfloat16")
    return measure_peak_flops(torch.bfloat16, launch.device(), None if words else 256)


def step_of(kind: str, compiled: bool, tiny: bool) -> tuple[Callable[[], object], float]:
    """A function that makes one step, of minitrain's products or torchao's, and the FLOPs of a step."""
    theirs, rows = kind == "torchao", 2 if tiny else 8
    run, step = run_of(tiny, 2, rows, d_ff=14336, products="plain" if theirs else kind)
    blocks = [layer for layer in run.model.layers if hasattr(layer, "attention")]
    if theirs:
        with_torchao(blocks)
    if compiled:
        low = [module for module in run.model.modules() if isinstance(module, (LowLinear, LowBits))]
        products = fused(low[0].products) if low else None
        for module in low:
            module.products = products
        for block in blocks:
            block.compile()
    length = run.config.max_positions
    return step, flops_per_token(run.config, length) * rows * length


def with_torchao(blocks: list[nn.Module]) -> None:
    sys.path.append(TORCHAO)
    from torchao.float8 import convert_to_float8_training

    for block in blocks:
        for linear in [module for module in block.modules() if isinstance(module, nn.Linear)]:
            linear.__class__ = nn.Linear  # it takes that very class
        convert_to_float8_training(block)


def measured(cases: dict[str, tuple[str, bool]], tiny: bool) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step of each case, and of its FLOPs at the datasheet's rate."""
    found = {}
    for name, (kind, compiled) in cases.items():
        torch.manual_seed(0)
        torch.compiler.reset()
        step, flops = step_of(kind, compiled, tiny)
        found[name] = median_s(step, 2 if tiny else 8) * 1e3, flops / datasheet_flops() * 1e3
        print("{}: {:.2f} ms, {:.2f} at the datasheet's rate".format(name, *found[name]), flush=True)
        del step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def bf16(tiny: bool) -> list[Row]:
    """At 60 % of the datasheet's rate a step takes 1.67 times as long as its FLOPs."""
    cases, peer = {"as it is": ("plain", False), "compiled": ("plain", True)}, "the datasheet's rate"
    [found] = launch.run(measured, cases, tiny, ranks=1, timeout_s=580, checked=False)
    return [row(f"step in bf16, {how}", peer, *times, "ms", 1 / 0.6) for how, times in found.items()]


def fp8(tiny: bool) -> list[Row]:
    cases = {kind: (kind, True) for kind in ("plain", *FP8)}
    if not tiny and (Path(TORCHAO).exists() or importlib.util.find_spec("torchao")):
        cases["torchao"] = "torchao", True
    [found] = launch.run(measured, cases, tiny, ranks=1, timeout_s=580, checked=False)
    peers = {"plain": ("step in bf16", 1 / 1.3), "torchao": ("torchao's float8", 1.0)}
    return [
        row(f"step with {kind}", peer, found[kind][0], found[other][0], "ms", goal)
        for kind in FP8
        for other, (peer, goal) in peers.items()
        if other in found
    ]


if __name__ == "__main__":
    told(dict(bf16=bf16, fp8=fp8))
