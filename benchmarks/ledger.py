"""What the ledger costs: a training step of a tiny model inside a `Ledger` against the same step without it;
and what a dry run costs at full size: one rank of each of the 16 stages of Llama 3 405B on 16,384.
"""

import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.measure import Row, in_turns, row
from minitrain import launch
from minitrain.compose.dry_runs import dry_steps
from minitrain.model.config import presets
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger

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


def llama_405b() -> tuple[float, float]:
    """Seconds of processor time, and the peak of this process in GB, torch's own half GB included."""
    strategy = Strategy(dp=128, pp=16, tp=8, zero=1, microbatches=16, precision="bfloat16")
    before = time.process_time()
    dry_steps(presets["llama3.1-405b"], strategy, Hyperparameters(batch_size=2048, length=8192))
    return time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def rows() -> list[Row]:
    [times] = launch.run(turn, 31, ranks=1, checked=False)
    ours, theirs = (statistics.median(side) for side in times)
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        seconds, gigabytes = alone.submit(llama_405b).result()
    dry = "dry step of Llama 3 405B, 16 stages"
    return [
        row(
            f"ledger, step of width {CONFIG.d_model}, {CONFIG.num_layers} layers",
            "no ledger",
            ours * 1e3,
            theirs * 1e3,
            "ms",
            2.0,
        ),
        row(dry, "half a minute", seconds, 30.0, "s", 1.0),
        row(f"{dry}, peak memory", "a GB", gigabytes, 1.0, "GB", 1.0),
    ]
