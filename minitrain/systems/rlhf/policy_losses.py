"""Learning from rewards: advantages, and the losses of actor, critic and reward model. No ranks here.

    ratio    r_t = π(a_t) / π_old(a_t)              by the weights now, and by those that wrote the answer
    actor    -min(r_t A_t, clip(r_t, 1-ε, 1+ε) A_t) + β (π_ref/π - log π_ref/π - 1)            PPO, GRPO
    critic   ½ (V_t - R_t)²                         PPO; V is logit 0 of a GPT, as the reward model's score
    reward   -log σ(score(better) - score(worse))   of pairs of rows, the better one first
    A_t      GRPO: (reward - mean) / std over the answers to one prompt, alike for all tokens of an answer
             PPO: Σ_k (γλ)^k δ_{t+k} with δ_t = reward_t + γ V_{t+1} - V_t; returns R_t = A_t + V_t

Each loss is a sum over the targets that count and `loss_fn` of parallelize; what a rollout knows of its rows
(log π_old, A) is given to the loss before the step, and microbatches take their rows of it in order.
Schulman et al. 2016 (GAE), arXiv:1506.02438, section 3; Schulman et al. 2017 (PPO), arXiv:1707.06347, section
3; Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, section 3.5; Shao et al. 2024 (GRPO), arXiv:2402.03300,
section 4.1. Differs: all tokens of a batch weigh the same, where GRPO takes a mean of each answer first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import cross_entropy_sum
from minitrain.ranks.checks import require_fractions, require_nonnegative, require_positive_ints


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """log π of each target: `[B, T, V]`, int64 `[B, T]` -> `[B, T]`, 0 where a target is masked."""
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen * (targets != MASKED)


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(π | π_ref), estimated from the tokens that π drew: never negative, 0 where both say the same."""
    more = reference - log_probs
    return more.exp() - more - 1


def group_advantages(rewards: Tensor, answers: int) -> Tensor:
    """GRPO: rewards `[B]`, `answers` to each prompt one behind the other -> `[B]`. A group whose rewards are
    all the same teaches nothing: 0."""
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

    def __init__(self):
        self.rows, self.first = (), 0

    def give(self, *rows: Tensor) -> None:
        self.rows, self.first = rows, 0

    def next_rows(self, count: int) -> list[Tensor]:
        first, whole = self.first, len(self.rows[0])
        if first + count > whole:
            rows = f"rows {first} to {first + count} of a rollout of {whole}"
            raise ValueError(f"{rows}: give() it before a step")
        self.first = (first + count) % whole
        return [x[first : first + count] for x in self.rows]


class PolicyLoss(RolloutLoss):
    """Before the first rollout it is the cross entropy of demonstrations: supervised fine-tuning."""

    def __init__(self, clip: float = 0.2, kl: float = 0.0):
        super().__init__()
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
    """Of a reward model: rows 2i are better than rows 2i + 1; a score is logit 0 of the last token."""

    sums_terms = True

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        better, worse = logits[:, -1, 0].unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(better - worse).sum()
