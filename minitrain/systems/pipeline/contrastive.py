"""A loss over all samples at once, in a pipeline: the gathered gradient, and DISTMM's doubled microbatches.

    p=2, m=2 (c d: the second batch)     naive                                   doubled
                                         Fa Fb .. .. Ba Bb Fc Fd .. .. Bc Bd     Fa Fb Fc .. Ba Fd Bb .. Bc Bd
                                         .. Fa Fb Ba Bb .. .. Fc Fd Bc Bd ..     .. Fa Fb Ba Fc Bb Fd Bc Bd ..

CLIP's scores images · textsᵀ / temperature `[N, N]` have all N samples in each loss, so every forward must be
over before the first backward. Embeddings are gathered from all microbatches and ranks, and each microbatch's
backward starts from its rows of the whole gradient `[N, E]`: exactly the gradients of one batch. In `doubled`
a second batch's forwards fill the wait: a rank waits for p-1 forwards and backwards, not 2(p-1). Sends
2·(n-1)/n · N·E elements beside GPipe's messages; with towers on ranks of their own (`tower_step`) n-1 times
the rows of the rank that has most. Memory: min(m + p-r-1, 2m) forwards in flight on rank r, m in `naive`.
Huang et al. 2024 (DISTMM), NSDI, section 5; Radford et al. 2021 (CLIP), arXiv:2103.00020, figure 3. Differs:
how many ranks a tower gets is the caller's choice.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.schedules.one_direction import alternate
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints


def contrastive_loss(images: Tensor, texts: Tensor, temperature: float = 0.1) -> Tensor:
    """`[N, E]` twice -> the sum over samples of -log p(its text | image) and -log p(its image | text)."""
    scores = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T / temperature
    own = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")


def contrastive_step(towers: Callable, microbatches: Sequence[object], group: ProcessGroup) -> Tensor:
    """One batch: all forwards, the loss of all ranks' samples, all backwards. Returns that loss.
    Ranks may have different numbers of samples. The gradients are this rank's share of a sum over ranks."""
    pairs = [torch.stack(towers(microbatch)) for microbatch in microbatches]  # [2, rows, E] each
    parts = _gathered(torch.cat(pairs, dim=1).detach(), group)
    return _backward(contrastive_loss(*torch.cat(parts, dim=1)), parts[group.rank()], pairs)


def tower_step(tower: Callable, texts: bool, microbatches: Sequence[object], group: ProcessGroup) -> Tensor:
    """The same with one tower on this rank, that of images or of `texts`; each has as many ranks as it needs.
    The ranks of a tower have all samples between them, in the order of the ranks."""
    embeddings = [tower(microbatch)[None] for microbatch in microbatches]  # [1, rows, E] each
    parts = _gathered(torch.cat(embeddings, dim=1).detach(), group)
    kinds = collectives.all_gather(torch.tensor([int(texts)], device=parts[0].device), group).tolist()
    sides = ([part[0] for part, kind in zip(parts, kinds) if kind == side] for side in (False, True))
    return _backward(contrastive_loss(*map(torch.cat, sides)), parts[group.rank()], embeddings)


def _backward(loss: Tensor, own: Tensor, microbatches: Sequence[Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, own)
    for rows, part in zip(microbatches, gradient.split([rows.size(1) for rows in microbatches], dim=1)):
        rows.backward(part)
    return loss.detach()


def _gathered(own: Tensor, group: ProcessGroup) -> list[Tensor]:
    rows = collectives.all_gather(torch.tensor([own.size(1)], device=own.device), group).tolist()
    padded = own.new_zeros(own.size(0), max(rows), own.size(2))
    padded[:, : own.size(1)] = own
    parts = collectives.all_gather(padded, group, dim=1).split(max(rows), dim=1)
    return [part[:, :count].requires_grad_() for part, count in zip(parts, rows)]


def naive(p: int, m: int) -> Schedule:
    """Two batches of m microbatches, one after the other: in each, all forwards before any backward."""
    require_positive_ints(p=p, m=m)
    order = [(kind, batch * m + i) for batch in range(2) for kind in "FB" for i in range(m)]
    ranks = [[Action(kind, rank, unit) for kind, unit in order] for rank in range(p)]
    return check(Schedule(f"two barriers, p={p}, m={m}", ranks, p, 2 * m))


def doubled(p: int, m: int) -> Schedule:
    """The second batch's forwards fill the wait for the first's loss, then alternate with its backwards."""
    require_positive_ints(p=p, m=m)
    every = lambda kind, rank: [Action(kind, rank, i) for i in range(2 * m)]
    ahead = lambda rank: min(m + p - rank - 1, 2 * m) - 1
    ranks = [alternate(every("F", rank), every("B", rank), ahead(rank)) for rank in range(p)]
    return check(Schedule(f"doubled microbatches, p={p}, m={m}", ranks, p, 2 * m))
