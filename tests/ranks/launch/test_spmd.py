"""SPMD: one function, any number of ranks, and nothing but the rank tells them apart."""

import torch

from minitrain import collectives, launch
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.step import valid_tokens

CONFIG = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=2, max_positions=8)


def loss_of_the_batch(seed_by_rank=False):
    """The whole program: this rank's rows, its share of the loss, one sum. Returns (loss, its tokens)."""
    group = collectives.world()
    model = GPT(CONFIG, seed=group.rank() if seed_by_rank else 0, dtype=torch.float64)
    tokens, targets = random_tokens(
        0, group.rank(), group.size(), batch_size=11, length=8, vocab=29, masked=True
    )
    share = cross_entropy_sum(model(tokens), targets) / valid_tokens(targets, group)
    return collectives.all_reduce(share.detach(), group).item(), tokens.flatten().tolist()


def test_spmd():
    """One function on 1, 2, 4 and 8 ranks: the same loss, and the batch's rows dealt out once, unevenly."""
    ((loss, batch),) = launch.run(loss_of_the_batch, ranks=1)
    for ranks in (2, 4, 8):
        results = launch.run(loss_of_the_batch, ranks=ranks)
        assert len({other for other, _ in results}) == 1, "all ranks hold the same bits"
        assert abs(results[0][0] - loss) < 1e-12 and sum((part for _, part in results), []) == batch
        assert len({len(part) for _, part in results}) == 2


def test_ranks_that_are_told_apart_by_more_than_their_data_lose_it():
    (loss, _), *_ = launch.run(loss_of_the_batch, ranks=1)
    assert abs(launch.run(loss_of_the_batch, True, ranks=4)[0][0] - loss) > 1e-3
