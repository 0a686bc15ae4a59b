"""A loss over all samples at once, in a pipeline: DISTMM's doubled microbatches across the barrier, and the gathered gradient.

    CLIP: image i and text i belong together, all others are negatives     scores = images · textsᵀ / temperature     [N, N]

The loss of one sample has the embeddings of all N in it. So microbatches are not added up: every forward must be over before the first
backward, on all ranks. Here they are cut another way. Forward gives embeddings, microbatch by microbatch; they are gathered from all
microbatches and ranks; the loss and its gradient for every embedding are computed from the whole `[N, E]`; each microbatch's backward
starts from its own rows of that gradient. Nothing is approximated: the parameters' gradients, summed over ranks, are those of one batch
of N (the loss of a part of the negatives, which is what each microbatch by itself would give, is another function).

    p=2, m=2 (c d: the second batch)     naive                                   doubled
                                         Fa Fb .. .. Ba Bb Fc Fd .. .. Bc Bd     Fa Fb Fc .. Ba Fd Bb .. Bc Bd
                                         .. Fa Fb Ba Bb .. .. Fc Fd Bc Bd ..     .. Fa Fb Ba Fc Bb Fd Bc Bd ..

A pipeline runs empty at such a barrier. `doubled` launches the microbatches of two batches: the forwards of the second fill the wait for
the loss of the first, then alternate with its backwards. Both batches belong to one step (their gradients are added), so no weight is
old. In a step of 2m microbatches a rank waits (p-1) forwards and backwards, where `naive` waits 2(p-1) (exactly, for any F and B).

Sends 2·(n-1)/n · N·E elements (the embeddings of both towers, gathered); a pipeline sends what GPipe does. Memory: rank r has
min(m + p-r-1, 2m) forwards in flight, m in `naive`; every rank computes all scores `[N, N]`.
Raises ValueError in one line for embeddings that are not pairs, and for sizes below 1.
Huang et al. 2024 (DISTMM), NSDI, section 5; Radford et al. 2021 (CLIP), arXiv:2103.00020, figure 3.
Differs: DISTMM also gives the towers different numbers of ranks; here both are on every rank, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.schedules.one_direction import check_sizes

Towers = Callable[[object], tuple[Tensor, Tensor]]


def contrastive_loss(images: Tensor, texts: Tensor, temperature: float = 0.1) -> Tensor:
    """`[N, E]` twice -> the sum over samples of -log p(its text | image) and -log p(its image | text)."""
    if images.shape != texts.shape or images.dim() != 2:
        raise ValueError(
            f"contrastive loss of {list(images.shape)} and {list(texts.shape)}; give two [N, E], row by row a pair"
        )
    scores = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T / temperature
    own = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")


def contrastive_step(towers: Towers, microbatches: Sequence[object], group: ProcessGroup) -> Tensor:
    """One batch: all forwards, the loss of all ranks' samples, all backwards. The gradients are this rank's share of a sum over ranks.

    The ranks may have different numbers of samples. Returns the loss of the whole batch, the same on every rank.
    """
    pairs = [
        torch.stack(towers(microbatch)) for microbatch in microbatches
    ]  # [2, rows, E] each, with their graphs
    own = torch.cat(pairs, dim=1).detach()
    everyone, start = _gathered(own, group)
    everyone.requires_grad_()
    loss = contrastive_loss(*everyone)
    (gradient,) = torch.autograd.grad(loss, everyone)
    gradient = gradient[:, start : start + own.size(1)]
    for pair, part in zip(pairs, gradient.split([pair.size(1) for pair in pairs], dim=1)):
        pair.backward(part)
    return loss.detach()


def _gathered(own: Tensor, group: ProcessGroup) -> tuple[Tensor, int]:
    """All ranks' `[2, rows, E]` along dim 1, and where this rank's rows begin."""
    rows = collectives.all_gather(torch.tensor([own.size(1)], device=own.device), group).tolist()
    padded = own.new_zeros(own.size(0), max(rows), own.size(2))
    padded[:, : own.size(1)] = own
    parts = collectives.all_gather(padded, group, dim=1).split(max(rows), dim=1)
    return torch.cat([part[:, :count] for part, count in zip(parts, rows)], dim=1), sum(rows[: group.rank()])


# ---- schedules -------------------------------------------------------------------------------------------------------


def naive(p: int, m: int) -> Schedule:
    """Two batches of m microbatches, one after the other, each with its barrier: on no rank a backward before all forwards."""
    check_sizes("naive", p=p, m=m)
    return check(
        Schedule(
            f"two barriers, p={p}, m={m}",
            tuple(
                tuple(
                    Action(kind, rank, batch * m + i) for batch in range(2) for kind in "FB" for i in range(m)
                )
                for rank in range(p)
            ),
            p,
            2 * m,
        )
    )


def doubled(p: int, m: int) -> Schedule:
    """The same two batches: the second's forwards fill the wait for the first's loss, then alternate with its backwards."""
    check_sizes("doubled", p=p, m=m)
    ranks = []
    for rank in range(p):
        ahead = min(m + p - rank - 1, 2 * m)
        forwards, backwards = ([Action(kind, rank, i) for i in range(2 * m)] for kind in "FB")
        turns = [action for pair in zip(backwards, forwards[ahead:]) for action in pair]
        ranks.append(tuple(forwards[:ahead] + turns + backwards[2 * m - ahead :]))
    return check(Schedule(f"doubled microbatches, p={p}, m={m}", tuple(ranks), p, 2 * m))
