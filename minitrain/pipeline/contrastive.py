"""A loss over all samples at once, in a pipeline: the gathered gradient, and DISTMM's doubled microbatches.

    p=2, m=2 (c d: the second batch)     naive                                   doubled
                                         Fa Fb .. .. Ba Bb Fc Fd .. .. Bc Bd     Fa Fb Fc .. Ba Fd Bb .. Bc Bd
                                         .. Fa Fb Ba Bb .. .. Fc Fd Bc Bd ..     .. Fa Fb Ba Fc Bb Fd Bc Bd ..

CLIP's scores images · textsᵀ / temperature `[N, N]` have all N samples in each loss, so every forward must be
over before the first backward. Embeddings are gathered from all microbatches and ranks, the gradient is
computed from the whole `[N, E]`, and each microbatch's backward starts from its own rows: exactly the
gradients of one batch. In `doubled` the forwards of a second batch of the same step fill the wait: a rank
waits (p-1) forwards and backwards, not 2(p-1). Sends 2·(n-1)/n · N·E elements beside GPipe's messages.
Memory: min(m + p-r-1, 2m) forwards in flight on rank r, m in `naive`.
Huang et al. 2024 (DISTMM), NSDI, section 5; Radford et al. 2021 (CLIP), arXiv:2103.00020, figure 3. Differs:
DISTMM also gives the towers different numbers of ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.pipeline.schedule import Action, Schedule, check
from minitrain.pipeline.schedules.one_direction import alternate, check_sizes

Towers = Callable[[object], tuple[Tensor, Tensor]]


def contrastive_loss(images: Tensor, texts: Tensor, temperature: float = 0.1) -> Tensor:
    """`[N, E]` twice -> the sum over samples of -log p(its text | image) and -log p(its image | text)."""
    if images.shape != texts.shape or images.dim() != 2:
        given = f"{list(images.shape)} and {list(texts.shape)}"
        raise ValueError(f"contrastive loss of {given}; give two [N, E], row by row a pair")
    scores = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T / temperature
    own = torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(scores.T, own, reduction="sum")


def contrastive_step(towers: Towers, microbatches: Sequence[object], group: ProcessGroup) -> Tensor:
    """One batch: all forwards, the loss of all ranks' samples, all backwards. Returns that loss.

    Ranks may have different numbers of samples. The gradients are this rank's share of a sum over ranks."""
    pairs = [torch.stack(towers(microbatch)) for microbatch in microbatches]  # [2, rows, E] each
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


def naive(p: int, m: int) -> Schedule:
    """Two batches of m microbatches, one after the other: in each, all forwards before any backward."""
    check_sizes("naive", p=p, m=m)
    order = [(kind, batch * m + i) for batch in range(2) for kind in "FB" for i in range(m)]
    ranks = [[Action(kind, rank, unit) for kind, unit in order] for rank in range(p)]
    return check(Schedule(f"two barriers, p={p}, m={m}", ranks, p, 2 * m))


def doubled(p: int, m: int) -> Schedule:
    """The second batch's forwards fill the wait for the first's loss, then alternate with its backwards."""
    check_sizes("doubled", p=p, m=m)
    ranks = []
    for rank in range(p):
        forwards, backwards = ([Action(kind, rank, i) for i in range(2 * m)] for kind in "FB")
        ranks.append(alternate(forwards, backwards, min(m + p - rank - 1, 2 * m) - 1))
    return check(Schedule(f"doubled microbatches, p={p}, m={m}", ranks, p, 2 * m))
