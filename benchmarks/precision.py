"""Casts to narrow formats against ml_dtypes: float32 to codes, one thread, for all formats that both have.

Formats that torch has take its cast, the others are rounded by adding a power of two; see
minitrain/precision/rounding.py. Scales of MX and of 128 x 128 blocks cost what two rows say, against the bare
cast. The last row is a training step in bfloat16 with float32 masters against one in float32; its goal is
what the step would take if nothing but the products of its matrices were faster, measured in this run.
"""

import statistics
from functools import partial

import ml_dtypes
import torch

from benchmarks.measure import Row, in_turns, row
from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision.blocks import quantize
from minitrain.precision.rounding import encode

THEIRS = {
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3_fnuz": "float8_e4m3fnuz",
    "e5m2_fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
    "e4m3_ieee": "float8_e4m3",
    "e3m4": "float8_e3m4",
    "hfp8_1_4_3": "float8_e4m3b11fnuz",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}
SHAPE = (1024, 4096)


def turns(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    torch.set_num_threads(1)
    numbers, times = torch.randn(SHAPE), {}
    for name, theirs in THEIRS.items():
        x = numbers.abs() if name == "e8m0" else numbers  # which has no sign
        array = x.numpy()
        dtype = getattr(ml_dtypes, theirs)
        times[name] = in_turns(lambda: encode(x, name), lambda: array.astype(dtype), rounds=rounds)
    for name in ("mxfp8", "fp8_128x128"):
        cast = lambda: numbers.numpy().astype(ml_dtypes.float8_e4m3fn)
        times[name] = in_turns(lambda: quantize(numbers, name), cast, rounds=rounds)
    return times


def step_turns(rounds: int) -> list[tuple[list[float], list[float]]]:
    """A step, and its products alone: bfloat16 and float32 in turns."""
    torch.set_num_threads(1)
    config = GPTConfig(vocab_size=256, d_model=384, num_layers=3, num_heads=6, max_positions=256, tied=False)
    steps, products = {}, {}
    for precision in ("bfloat16", "float32"):
        run = parallelize(config, Strategy(precision=precision), partial(AdamW, lr=1e-4), seed=0)
        batch = run.batch(Rows(partial(random_tokens, batch_size=4, length=256, vocab=256), 4, 256), 0)
        steps[precision] = partial(run.step, batch)
        named = run.model.named_parameters()
        shapes = [param.shape for name, param in named if param.dim() == 2 and "layers.0." not in name]
        products[precision] = partial(multiply_all, shapes, 4 * 256, getattr(torch, precision))
    return [in_turns(each["bfloat16"], each["float32"], rounds=rounds) for each in (steps, products)]


def multiply_all(shapes: list[torch.Size], tokens: int, dtype: torch.dtype) -> None:
    """y, dx and dW of each matrix [N, K]."""
    for n, k in shapes:
        x, weight, dy = (torch.ones(size, dtype=dtype) for size in ((tokens, k), (n, k), (tokens, n)))
        x @ weight.T, dy @ weight, dy.T @ x


def rows() -> list[Row]:
    [times] = launch.run(turns, 15, ranks=1, timeout_s=300, checked=False)
    table = []
    for name, sides in times.items():
        ours, theirs = (statistics.median(side) * 1e3 for side in sides)
        what = f"{'cast to' if name in THEIRS else 'quantise as'} {name}, {SHAPE[0]} x {SHAPE[1]}"
        peer = f"ml_dtypes {THEIRS.get(name, 'float8_e4m3fn, no scales')}"
        table.append(row(what, peer, ours, theirs, "ms", 1.0 if name in THEIRS else 2.0))
    step, products = launch.run(step_turns, 9, ranks=1, timeout_s=300, checked=False)[0]
    ours, theirs = (statistics.median(side) * 1e3 for side in step)
    narrow, wide = (statistics.median(side) * 1e3 for side in products)
    goal = round(1 - (wide - narrow) / theirs, 2)
    table.append(row("step in bfloat16 with masters", "step in float32", ours, theirs, "ms", goal))
    return table
