"""What the ledger costs: a training step of a tiny model inside a `Ledger` against the same step without
it.
"""

import statistics

from benchmarks.measure import Row, in_turns, row
from minitrain import launch
from minitrain.data.batches import random_tokens
from minitrain.ledger import Ledger
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.training.optim import AdamW

CONFIG = GPTConfig(vocab_size=256, d_model=128, num_layers=4, num_heads=4)
BATCH, LENGTH = 8, 128


def turn(rounds: int) -> tuple[list[float], list[float]]:
    model = GPT(CONFIG)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    tokens, targets = random_tokens(0, 0, 1, BATCH, LENGTH, CONFIG.vocab_size, seed=1)

    def step() -> None:
        optimizer.zero_grad()
        (cross_entropy_sum(model(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    def counted_step() -> None:
        with Ledger():
            step()

    return in_turns(counted_step, step, rounds=rounds)


def rows() -> list[Row]:
    [times] = launch.run(turn, 31, ranks=1, checked=False)
    ours, theirs = (statistics.median(side) for side in times)
    return [
        row(
            f"ledger, step of width {CONFIG.d_model}, {CONFIG.num_layers} layers",
            "no ledger",
            ours * 1e3,
            theirs * 1e3,
            "ms",
            2.0,
        )
    ]
