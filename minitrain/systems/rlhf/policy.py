"""RLHF on ranks: four models, their losses and advantages, and one iteration of GRPO or PPO.

    generate   actor               answers to prompts, with a cache of keys and values
    score      reward, or a check  one number per answer
    infer      reference, critic   log π_ref; V of each token, logit 0 of a GPT, as the reward model's score
    train      actor               -min(r_t A_t, clip(r_t, 1-ε, 1+ε) A_t) + β (π_ref/π - log π_ref/π - 1)
               critic, of PPO      ½ (V_t - R_t)²
    r_t        π(a_t) / π_old(a_t)                by the weights now, and by those that wrote the answer
    A_t        GRPO: (reward - mean) / std over the answers to one prompt, alike for all tokens of an answer
               PPO: Σ_k (γλ)^k δ_{t+k} with δ_t = reward_t + γ V_{t+1} - V_t; returns R_t = A_t + V_t

Each loss is a sum over the targets that count and `loss_fn` of parallelize; what a rollout knows of its rows
is given to it before the step. A model is a Run of any layout, or `Placed` on one rank. All ranks of a
generator write the same rows and train on their share of them: alike on any number of ranks. Sends, beside
what models do, 16 bytes per mean: one of each iteration, two more of PPO's advantages. Memory: 16 bytes per
parameter of actor and critic, 2 of reference and reward model. Schulman et al. 2016, arXiv:1506.02438 (GAE);
2017, arXiv:1707.06347 (PPO); Ouyang et al. 2022, arXiv:2203.02155; Shao et al. 2024, arXiv:2402.03300 (GRPO),
section 4.1; Yao et al. 2023 (DeepSpeed-Chat), arXiv:2308.01320; Hu et al. 2024 (OpenRLHF), arXiv:2405.11143.
Differs: GRPO has no mean of each answer first; answers end where rows do; calls do not overlap.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import GPT, cross_entropy_sum, generate
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, NoReducer, accumulate, train_step
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_fractions, require_nonnegative, require_positive_ints
from minitrain.systems.faults.live import Live


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """log π of each target: `[B, T, V]`, int64 `[B, T]` -> `[B, T]`, 0 where a target is masked."""
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen * (targets != MASKED)


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(π | π_ref), estimated from the tokens that π drew: never negative, 0 where both say the same."""
    more = reference - log_probs
    return more.exp() - more - 1


def group_advantages(rewards: Tensor, answers: int) -> Tensor:
    """GRPO: rewards `[B]`, `answers` to each prompt in a row -> `[B]`; 0 where a group has all the same."""
    require_positive_ints(answers=answers)
    if rewards.dim() != 1 or len(rewards) % answers:
        raise ValueError(f"rewards {list(rewards.shape)} are not answers={answers} to each prompt, in a row")
    groups = rewards.view(-1, answers)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-6)).flatten()


def gae(rewards: Tensor, values: Tensor, discount: float = 1.0, decay: float = 0.95) -> tuple[Tensor, Tensor]:
    """PPO: of the tokens of an answer, `[B, T]` -> advantages, returns; nothing comes after the last."""
    require_fractions(discount=discount, decay=decay)
    if rewards.shape != values.shape or rewards.dim() != 2:
        raise ValueError(f"rewards {list(rewards.shape)}, values {list(values.shape)}: use [B, T] for both")
    errors = rewards + discount * F.pad(values[:, 1:], (0, 1)) - values
    advantages, after = torch.zeros_like(errors), 0.0
    for t in reversed(range(errors.size(1))):
        after = advantages[:, t] = errors[:, t] + discount * decay * after
    return advantages, advantages + values


class RolloutLoss:
    """What `give` was told of each row is there when the loss of that row is taken, in microbatches too."""

    sums_terms = True  # so parallelize need not try it on rows that were never drawn
    rows, first = (), 0

    def give(self, *rows: Tensor) -> None:
        self.rows, self.first = rows, 0

    def next_rows(self, count: int) -> list[Tensor]:
        first, whole = self.first, len(self.rows[0])
        if first + count > whole:
            raise ValueError(f"rows {first} to {first + count} of a rollout of {whole}: give() before a step")
        self.first = (first + count) % whole
        return [x[first : first + count] for x in self.rows]


class PolicyLoss(RolloutLoss):
    """Before the first rollout it is the cross entropy of demonstrations: supervised fine-tuning."""

    def __init__(self, clip: float = 0.2, kl: float = 0.0):
        require_nonnegative(clip=clip, kl=kl)
        self.clip, self.kl = clip, kl

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not self.rows:
            return cross_entropy_sum(logits, targets)
        old, reference, advantages = self.next_rows(len(targets))
        now = log_probs(logits, targets)
        ratio = (now - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        return ((self.kl * divergence(now, reference) - gain) * (targets != MASKED)).sum()


class ValueLoss(RolloutLoss):
    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        (returns,) = self.next_rows(len(targets))
        return (0.5 * (logits[..., 0] - returns).square() * (targets != MASKED)).sum()


class PreferenceLoss:
    """Of a reward model, -log σ(better - worse): rows 2i are better than 2i + 1; scores: last token."""

    sums_terms = True

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        better, worse = logits[:, -1, 0].unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(better - worse).sum()


def mean_over(x: Tensor, counts: Tensor, *groups: ProcessGroup) -> Tensor:
    """Of the x that count, on all ranks of the groups."""
    both = torch.stack((x * counts, counts)).double().flatten(1).sum(1)
    for group in groups:
        both = collectives.all_reduce(both, group)
    return both[0] / both[1]


def grpo_step(actor, reference, loss, batch: Batch, rewards: Tensor, answers: int, *groups) -> float:
    """Of this rank's rows: targets of prompts are masked, `answers` to each follow each other, with rewards
    `[B]`. Returns the KL per token from the reference, before the step."""
    old, before = (read(model, log_probs, batch) for model in (actor, reference))
    loss.give(old, before, group_advantages(rewards, answers).unsqueeze(1).expand_as(old))
    actor.step(batch, 1.0)
    return mean_over(old - before, batch.targets != MASKED, *groups).item()


def ppo_step(actor, critic, reference, reward, losses, batch: Batch, *groups, kl=0.02, updates=2) -> float:
    """`losses` of actor and critic. The reward model's score in (0, 1) comes with the last token; each token
    costs kl · log(π / π_ref). Returns the KL as well."""
    require_nonnegative(kl=kl)
    require_positive_ints(updates=updates)
    if (batch.targets[:, -1] == MASKED).any():
        raise ValueError("an answer ends before its row: give rows in which every last target counts")
    counts, rows = batch.targets != MASKED, torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
    old, before = (read(model, log_probs, batch) for model in (actor, reference))
    values = read(critic, lambda logits, _: logits[..., 0].clone(), batch)
    scores = read(
        reward, lambda logits, _: logits[..., 0].sigmoid(), batch._replace(tokens=rows, targets=rows)
    )
    rewards = -kl * (old - before)
    rewards[:, -1] += scores[:, -1]
    advantages, returns = gae(rewards, values)
    centred = advantages - mean_over(advantages, counts, *groups)
    spread = mean_over(centred.square(), counts, *groups).sqrt()
    losses[0].give(old, before, centred / (spread + 1e-6))
    losses[1].give(returns)
    for _ in range(updates):
        actor.step(batch, 1.0)
        critic.step(batch, 1.0)
    return mean_over(old - before, counts, *groups).item()


def hand_over(source, target, group: ProcessGroup) -> int:
    """The hybrid engine: the parameters of one run to another of any layout, ZeRO to tp before it generates.
    Sends what is not there, (n-1)/n of all where each of n ranks gets all. Returns the bytes that it sent."""
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
        answer = what(self.model(batch.tokens), batch.targets) if self.model else 0.0 * batch.tokens
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
