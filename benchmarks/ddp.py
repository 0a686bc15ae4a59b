"""A data-parallel training step: our bucketed reducer against DistributedDataParallel, same GPT, same
optimizer, 2 and 4 ranks.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Row, in_turns, one_after_the_other, row, slowest_then_median, stock_group
from minitrain import launch
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum

CONFIG = GPTConfig(vocab_size=2048, d_model=320, num_layers=4, num_heads=8)
BUCKET_BYTES = 4_000_000  # the model has 7 million parameters: 8 buckets, for both sides
LENGTH = 64
LAUNCHES, TURNS = 3, 21


def turn(rounds: int, as_views: bool) -> tuple[list[float], list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, targets = random_tokens(0, rank, size, 4 * size, LENGTH, CONFIG.vocab_size, seed=1)
    mine, theirs = GPT(CONFIG), GPT(CONFIG)
    reducer = GradReducer(mine.parameters(), dist.group.WORLD, BUCKET_BYTES)
    wrapped = DistributedDataParallel(
        theirs,
        bucket_cap_mb=BUCKET_BYTES / 2**20,
        gradient_as_bucket_view=as_views,
        process_group=stock_group(),
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (mine, theirs)]

    def our_step():
        optimizers[0].zero_grad()
        (cross_entropy_sum(mine(tokens), targets) / (targets.numel() * size)).backward()
        reducer.finish()
        optimizers[0].step()

    def their_step():
        optimizers[1].zero_grad()
        (cross_entropy_sum(wrapped(tokens), targets) / targets.numel()).backward()
        optimizers[1].step()

    times = in_turns(our_step, their_step, rounds=rounds, meet=dist.barrier)
    drift = max((a - b).abs().max().item() for a, b in zip(mine.parameters(), theirs.parameters()))
    assert drift < 1e-5, f"the two models trained apart by {drift}"
    return times


def rows() -> list[Row]:
    table = []
    for ranks in (2, 4):
        for peer, as_views in (
            ("DistributedDataParallel", False),
            ("the same, gradient_as_bucket_view", True),
        ):
            launches = [
                launch.run(turn, TURNS, as_views, ranks=ranks, timeout_s=300, checked=False)
                for _ in range(LAUNCHES)
            ]
            ours, theirs = slowest_then_median(one_after_the_other(launches))
            table.append(
                row(f"data-parallel step, GPT 7M, {ranks} ranks", peer, ours * 1e3, theirs * 1e3, "ms", 1.0)
            )
    return table
