"""A training step on one device against the best matrix product of the same machine: the share of the hardware that training gets.

ratio = time of the step / time its FLOPs would take at the best rate, so 1.43 is 70 % of the machine.
"""
import statistics
import time

import torch

from minitrain.data import random_tokens
from minitrain.ledger import Ledger
from minitrain.model import GPT, GPTConfig, cross_entropy_sum
from minitrain.optim import AdamW

from benchmarks.measure import Row, in_turns, row

CONFIG = GPTConfig(vocab_size=256, d_model=1024, num_layers=2, num_heads=16)
BATCH, LENGTH = 8, 256


def best_product(dtype: torch.dtype) -> tuple[float, int]:
    """(FLOP/s, width) of the fastest square matrix product."""
    rates = {}
    for width in (512, 1024, 2048, 4096):
        a, b = (torch.randn(width, width, dtype=dtype) for _ in range(2))
        torch.mm(a, b)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - started)
        rates[width] = 2 * width**3 / min(seconds)
    width = max(rates, key=rates.get)
    return rates[width], width


def rows() -> list[Row]:
    dtype = max((torch.float32, torch.bfloat16), key=lambda dtype: best_product(dtype)[0])
    _, width = best_product(dtype)
    a, b = (torch.randn(width, width, dtype=dtype) for _ in range(2))
    model = GPT(CONFIG, dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    tokens, targets = random_tokens(0, 0, 1, BATCH, LENGTH, CONFIG.vocab_size, seed=1)

    def step():
        optimizer.zero_grad()
        (cross_entropy_sum(model(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    with Ledger() as ledger:
        step()
    products = max(1, round(ledger.flops / (2 * width**3) / 4))      # about a quarter of the step's work
    ours, theirs = in_turns(step, lambda: [torch.mm(a, b) for _ in range(products)], rounds=7, warmup=1)
    at_best_rate = statistics.median(theirs) * ledger.flops / (2 * width**3 * products)
    name = f"training step, width {CONFIG.d_model}, {str(dtype).removeprefix('torch.')}"
    return [row(name, f"its FLOPs as a {width}-wide product", statistics.median(ours), at_best_rate, "s", 1.43)]
