"""A task whose answers can be checked: sums of two digits, for models that learn from rewards.

a + b = tens ones        six tokens; the digits are themselves, the prompt is the first four
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.model.data.batches import MASKED
from minitrain.model.training.step import Batch, valid_tokens
from minitrain.ranks.checks import require_fractions, require_ints, require_positive_ints
from minitrain.systems.rlhf import policy

PLUS, EQUALS, FIRST = 10, 11, 4  # tokens beside the digits; where an answer begins


def prompts(count: int, seed: int) -> Tensor:
    """`[count, 4]`: a + b =, of two digits."""
    require_positive_ints(count=count)
    require_ints(0, seed=seed)
    digits = torch.randint(0, 10, (count, 2), generator=torch.Generator().manual_seed(seed))
    signs = torch.tensor([PLUS, EQUALS]).expand(count, 2)
    return torch.stack((digits, signs), -1).flatten(1)


def answered(prompts: Tensor, noise: float = 0.0, seed: int = 0) -> Tensor:
    """`[count, 6]`: with the two digits of the sum, or (a share `noise` of them) of any number to 18."""
    require_fractions(noise=noise)
    require_ints(0, seed=seed)
    draw, count = torch.Generator().manual_seed(seed), len(prompts)
    any_sum, wrong = torch.randint(0, 19, (count,), generator=draw), torch.rand(count, generator=draw) < noise
    any_sum, wrong = any_sum.to(prompts.device), wrong.to(prompts.device)
    sums = any_sum.where(wrong, prompts[:, 0] + prompts[:, 2])
    return torch.cat((prompts, torch.stack((sums // 10, sums % 10), 1)), 1)


def is_right(tokens: Tensor) -> Tensor:
    """The reward: 1 or 0 for each row."""
    return (tokens == answered(tokens[:, :FIRST])).all(1).float()


def share_right(tokens: Tensor, *groups: ProcessGroup) -> float:
    """Of the rows of all ranks."""
    right = is_right(tokens)
    return policy.mean_over(right, torch.ones_like(right), *groups).item()


def answer_batch(tokens: Tensor, step: int, *groups: ProcessGroup) -> Batch:
    """Rows whose answers count; `groups` have other rows."""
    require_ints(0, step=step)
    targets = tokens[:, 1:].clone()
    targets[:, : FIRST - 1] = MASKED
    return Batch(tokens[:, :-1], targets, valid_tokens(targets, *groups), None, step)


def preference_batch(count: int, seed: int, step: int, *groups: ProcessGroup) -> Batch:
    """2 · count rows: an answer that is right, and behind it one to the same prompt that is not."""
    require_ints(0, step=step)
    right = answered(prompts(count, seed))
    wrong = answered(right[:, :FIRST], 1.0, seed + 1)
    wrong[:, -1] = (wrong[:, -1] + (wrong == right).all(1).long()) % 10
    rows = torch.stack((right, wrong), 1).flatten(0, 1)
    targets = torch.full_like(rows, MASKED)
    targets[:, -1] = rows[:, -1]
    return Batch(rows, targets, valid_tokens(targets, *groups), None, step)
