"""On a GPU (`make gpu`): bf16 against the datasheet, FP8 products against bf16 and against torchao's float8.

One training step of a few blocks of width 4096, forward, backward and AdamW, on one GPU. Everybody's blocks
go through torch.compile; ours also as they are. torchao is no dependency: `make gpu` puts it into
build/torchao. Without a GPU, or with --tiny, the same code runs at a small size and saves nothing: what it
prints is not a measurement.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import Row, row, save
from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.moe.experts import LowBits
from minitrain.plan.accounting import flops_per_token
from minitrain.plan.simulate.machines import MACHINES
from minitrain.plan.strategy import Strategy
from minitrain.precision.products import LowLinear, fused

FP8 = ("fp8_tensor", "fp8_rows")


@dataclass(frozen=True)
class Size:
    config: GPTConfig
    rows: int
    length: int
    rounds: int


def size(tiny: bool) -> Size:
    widths = dict(d_model=64, num_heads=4, d_ff=128) if tiny else dict(d_model=4096, num_heads=32, d_ff=14336)
    length = 32 if tiny else 4096
    shape = dict(num_layers=2, norm="rms", positions="rope", activation="swiglu", bias=False, tied=False)
    config = GPTConfig(vocab_size=256, max_positions=length, **shape, **widths)
    return Size(config, 2, length, 3 if tiny else 20)


def peak_flops() -> float:
    """bf16, dense, of this GPU's datasheet; of another device its best product."""
    name = torch.cuda.get_device_name(0).lower() if torch.cuda.is_available() else ""
    for machine in MACHINES.values():
        if machine.device.name.lower().split()[-1] in name:
            return machine.device.peak("bfloat16")
    from minitrain.model.training.step import measure_peak_flops

    return measure_peak_flops(torch.bfloat16, launch.device(), 4096 if name else 256)


def step_of(kind: str, how: str, at: Size):
    """A function that makes one step: of minitrain's products, or torchao's in bf16 linear layers."""
    theirs = kind == "torchao"
    strategy = Strategy(precision="bfloat16", products="plain" if theirs else kind)
    run = parallelize(at.config, strategy, partial(AdamW, lr=1e-4), seed=0, device=launch.device())
    blocks = [layer for layer in run.model.layers if hasattr(layer, "attention")]
    if theirs:
        with_torchao(blocks)
    if how == "compiled":
        low = [module for module in run.model.modules() if isinstance(module, (LowLinear, LowBits))]
        compiled = fused(low[0].products) if low else None
        for module in low:
            module.products = compiled
        for block in blocks:
            block.compile()
    sizes = dict(batch_size=at.rows, length=at.length, vocab=at.config.vocab_size)
    batch = run.batch(Rows(partial(random_tokens, **sizes, seed=0), at.rows, at.length), 0)
    return partial(run.step, batch)


def with_torchao(blocks: list[nn.Module]) -> None:
    sys.path.append(str(Path("build/torchao").resolve()))
    from torchao.float8 import convert_to_float8_training

    for block in blocks:
        for linear in [module for module in block.modules() if isinstance(module, nn.Linear)]:
            linear.__class__ = nn.Linear  # it takes that very class
        convert_to_float8_training(block)


def seconds(step, rounds: int) -> float:
    """The median of a few steps."""
    times = []
    for turn in range(-3, rounds):
        wait()
        started = time.perf_counter()
        step()
        wait()
        times += [time.perf_counter() - started] * (turn >= 0)
    return statistics.median(times)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(at: Size, cases: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    found = {}
    for kind, how in cases:
        torch.manual_seed(0)
        torch.compiler.reset()
        found[kind, how] = seconds(step_of(kind, how, at), at.rounds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def rows(tiny: bool = False) -> list[Row]:
    at = size(tiny)
    ways = ["as it is"] + ["compiled"] * (not tiny)
    cases = [(kind, how) for kind in ("plain", *FP8) for how in ways]
    if Path("build/torchao").exists() and not tiny:
        cases.append(("torchao", "compiled"))
    [times] = launch.run(measured, at, cases, ranks=1, timeout_s=580, checked=False)
    best = ways[-1]
    flops = flops_per_token(at.config, at.length) * at.rows * at.length
    ideal, plain = flops / peak_flops() * 1e3, times["plain", best] * 1e3
    table = [row("step in bf16, width 4096", "the GPU's datasheet", plain, ideal, "ms", 2.0)]
    for kind in FP8:
        ours = times[kind, best] * 1e3
        table.append(row(f"step with {kind}", "step in bf16", ours, plain, "ms", 1 / 1.3))
        if ("torchao", best) in times:
            peer = times["torchao", best] * 1e3
            table.append(row(f"step with {kind}", "torchao's float8", ours, peer, "ms", 1.0))
    for kind in ("plain", *FP8):
        print(f"{kind:12} as it is {times[kind, 'as it is'] * 1e3:9.2f} ms")
    return table


def main(arguments: list[str]) -> int:
    tiny = "--tiny" in arguments or not torch.cuda.is_available()
    if tiny:
        print("no GPU, or --tiny: the code runs at a small size, and what it prints is no measurement")
    table = rows(tiny)
    if not tiny:
        save(table)
    for r in table:
        sides = f"{r.ours:9.3f} {r.theirs:9.3f} {r.unit}"
        print(f"{r.name:32} vs {r.peer:22} {sides} ratio {r.ratio:5.2f} ({r.goal:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
