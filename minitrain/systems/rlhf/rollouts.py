"""RLHF on ranks: four models, answers with a reward that can be checked, and one iteration of GRPO or PPO.

    generate   actor                     answers to prompts, with a cache of keys and values
    score      reward, or a check        one number per answer
    infer      reference, critic         log π_ref, V of each token
    train      actor, critic             forward, backward, update

A model is a Run of any layout, or `Placed` on one rank. The hybrid engine is `hand_over`: before it
generates, the actor goes from its ZeRO layout into one that suits generation, tp say; Live moves what is not
there, (n-1)/n of 2 bytes per parameter in bfloat16 where each of n ranks gets all. All ranks of a generator
write the same rows and train on their share of them, so that an iteration is the same on any number of ranks.
Beside what the models send, means are sums of 16 bytes over the ranks: two of each iteration, two more of
PPO's advantages. Memory: 16 bytes per parameter of actor and critic, 2 of reference and reward model.
Ouyang et al. 2022, arXiv:2203.02155, section 3; Yao et al. 2023 (DeepSpeed-Chat), arXiv:2308.01320, section
4; Hu et al. 2024 (OpenRLHF), arXiv:2405.11143, section 3. Differs: toy answers of two tokens; a placed
model is called by all ranks, not by a controller, and calls do not overlap (placements: model_placements.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import GPT, generate
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, NoReducer, accumulate, train_step, valid_tokens
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_fractions, require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.faults.live import Live
from minitrain.systems.rlhf.policy_losses import gae, group_advantages, log_probs

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
    """The reward that can be checked: 1 or 0 for each row."""
    return (tokens == answered(tokens[:, :FIRST])).all(1).float()


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


class Learned(NamedTuple):
    reward: float  # mean over the answers of all ranks
    kl: float  # from the reference, per token


def mean_over(x: Tensor, *groups: ProcessGroup) -> Tensor:
    both = torch.stack((x, torch.ones_like(x))).double().flatten(1).sum(1)
    for group in groups:
        both = collectives.all_reduce(both, group)
    return both[0] / both[1]


def grpo_step(actor, reference, loss, tokens: Tensor, answers: int, step: int, *groups) -> Learned:
    """Of `tokens`, this rank's rows: `answers` to each prompt, one behind the other."""
    batch, rewards = answer_batch(tokens, step, *groups), is_right(tokens)
    old, before = (read(model, log_probs, batch) for model in (actor, reference))
    loss.give(old, before, group_advantages(rewards, answers).unsqueeze(1).expand_as(old))
    actor.step(batch, 1.0)
    return learned(rewards, old - before, *groups)


def ppo_step(actor, critic, reference, reward, losses, tokens, step, *groups, kl=0.02, updates=2) -> Learned:
    """`losses` of actor and critic. The reward model's score in (0, 1) comes with the last token; each token
    costs kl · log(π / π_ref)."""
    require_nonnegative(kl=kl)
    require_positive_ints(updates=updates)
    batch = answer_batch(tokens, step, *groups)
    old, before = (read(model, log_probs, batch) for model in (actor, reference))
    values = read(critic, lambda logits, _: logits[..., 0].clone(), batch)
    whole = batch._replace(tokens=tokens, targets=tokens)
    scores = read(reward, lambda logits, _: logits[..., 0].sigmoid(), whole)[:, -1]
    rewards = -kl * (old - before)
    rewards[:, -1] += scores
    advantages, returns = gae(rewards[:, FIRST - 1 :], values[:, FIRST - 1 :])
    centred = advantages - mean_over(advantages, *groups)
    spread = mean_over(centred.square(), *groups).sqrt()
    in_row = lambda x: F.pad(x, (FIRST - 1, 0))
    losses[0].give(old, before, in_row(centred / (spread + 1e-6)))
    losses[1].give(in_row(returns))
    for _ in range(updates):
        actor.step(batch, 1.0)
        critic.step(batch, 1.0)
    return learned(is_right(tokens), old - before, *groups)


def learned(rewards: Tensor, apart: Tensor, *groups) -> Learned:
    return Learned(*(mean_over(x, *groups).item() for x in (rewards, apart[:, FIRST - 1 :])))


def hand_over(source, target, group: ProcessGroup) -> int:
    """The parameters of one run to another of any layout, over all ranks; bytes that this rank sent."""
    live = Live([([p for p in source.pieces() if p.name.startswith("parameters/")], {"numbers": {}})], group)
    target.load_pieces(live)
    return live.moved_bytes


class Placed:
    """A model on rank `home` of the group, and nowhere else. All ranks call it with the same tokens; to each
    other one it sends what was asked of its logits, 4 bytes per token, or the tokens it wrote."""

    def __init__(self, config: GPTConfig, loss: Callable, home: int, group: ProcessGroup, lr=1e-3, seed=0):
        self.home, self.group, self.model = home, group, None
        if group.rank() == home:
            self.model = GPT(config, seed=seed)
            self.optimizer = AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
            self.forward_backward = accumulate(self.model, loss, 1, NoReducer())

    @torch.no_grad()
    def read(self, what: Callable, batch: Batch) -> Tensor:
        answer = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
        if self.model:
            answer = what(self.model(batch.tokens), batch.targets)
        return collectives.broadcast(answer, self.home, self.group)

    def step(self, batch: Batch, clip: float | None = None) -> None:
        if self.model:
            train_step(self.forward_backward, batch, self.optimizer, NoReducer(), clip)

    def sample(self, prompt: Tensor, n: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
        tokens = generate(self.model, prompt, n, temperature, seed) if self.model else F.pad(prompt, (0, n))
        return collectives.broadcast(tokens, self.home, self.group)


def read(model, what: Callable, batch: Batch) -> Tensor:
    """what(logits, targets) `[B, T]` of a model, wherever it is."""
    return model.read(what, batch) if isinstance(model, Placed) else what(model(batch.tokens), batch.targets)
