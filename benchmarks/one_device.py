"""A training step on one device against the best matrix product of the same machine: the share of the
hardware that training gets.

ratio = time of the step / time its FLOPs would take at the best rate, so 1.43 is 70 % of the machine. GPT-2's
block (LayerNorm, GELU) with attention as plain products, which at this length is faster on a CPU than torch's
fused one; enough tokens that reading and writing the optimizer's state is a small part; on one rank with all
cores, since a rank keeps freed memory.
"""

import os
import statistics
import time

import torch

from benchmarks.measure import Row, row
from minitrain import launch
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.layers import naive_attention
from minitrain.model.training.optim import AdamW
from minitrain.ranks.ledger import Ledger

CONFIG = GPTConfig(
    vocab_size=256,
    d_model=1024,
    num_layers=2,
    num_heads=8,
    norm="layer",
    activation="gelu",
    positions="learned",
)
BATCH, LENGTH = 120, 64
WIDTHS = (512, 1024, 2048, 4096)  # of the square products: the best of them is the machine's rate
ROUNDS = {torch.bfloat16: 11, torch.float32: 5}


def seconds(width: int, dtype: torch.dtype, times: int) -> float:
    a, b, product = (torch.randn(width, width, dtype=dtype) for _ in range(3))
    started = time.perf_counter()
    for _ in range(times):
        torch.mm(a, b, out=product)
    return time.perf_counter() - started


def turn(dtype: torch.dtype) -> tuple[float, float]:
    """(seconds of a step, seconds of its FLOPs at the rate of the best product)."""
    torch.set_num_threads(os.cpu_count())
    model = GPT(CONFIG, dtype=dtype, attention=naive_attention)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    tokens, targets = random_tokens(0, 0, 1, BATCH, LENGTH, CONFIG.vocab_size, seed=1)

    def step():
        optimizer.zero_grad()
        (cross_entropy_sum(model(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    with Ledger() as ledger:
        step()
    times = {
        width: max(1, round(ledger.flops / (2 * width**3) / 8)) for width in WIDTHS
    }  # an eighth of the step's work
    steps, products = [], {width: [] for width in WIDTHS}
    for _ in range(ROUNDS[dtype]):
        for width in WIDTHS:
            products[width].append(seconds(width, dtype, times[width]))
        started = time.perf_counter()
        step()
        steps.append(time.perf_counter() - started)
    at_rate = {
        width: statistics.median(products[width]) * ledger.flops / (2 * width**3 * times[width])
        for width in WIDTHS
    }
    return statistics.median(steps), min(at_rate.values())


def rows() -> list[Row]:
    table = []
    for dtype in ROUNDS:
        [(ours, at_best_rate)] = launch.run(turn, dtype, ranks=1, timeout_s=300, checked=False)
        name = f"training step, width {CONFIG.d_model}, {str(dtype).removeprefix('torch.')}"
        table.append(row(name, "its FLOPs as the best product", ours, at_best_rate, "s", 1.43))
    return table
