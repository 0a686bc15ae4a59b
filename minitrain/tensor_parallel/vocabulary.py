"""The vocabulary cut over ranks: a table that looks up its own rows, and a loss that never sees all logits.

    lookup          rows[B, T, D] = Σ_i table_i[V/t, D] at the ids that rank i owns, 0 elsewhere
    cross-entropy   loss = Σ log Σ_v exp(l_v - m) - (l_target - m)         l_i[B, T, V/t]

Rank i has the logits of its V/t words. The loss needs three numbers per token of the others: largest logit
m, the sum of exponentials and the target's logit; backward sends nothing: dl = softmax(l) - onehot(target). A
tied table is cut once. Where t does not divide V, each rank has ceil(V/t) rows, the last ones padding, which
no token looks up and whose logits are -inf in the loss. Sends, per rank, 2(t-1)/t · B·T·D elements in
`lookup` and 2(t-1)/t · 3·B·T in the loss, both in forward only. Memory: logits and softmax (kept in at least
float32) are [B, T, V/t]. Ids outside the vocabulary raise ValueError on every rank alike (on a CPU).
Shoeybi et al. 2019, arXiv:1909.08053, section 3 (end). Differs: theirs has padded words in the softmax.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.checks import require_positive_ints

MASKED = -100  # a target that does not count


def lookup(table, ids, what, limit, *, group, vocab_size: int, leave=collectives.reduce_from) -> Tensor:
    """ids `[B, T]`, the same on all ranks -> rows `[B, T, D]`; `leave` sums what the ranks found."""
    local, place = owned(ids, len(table), vocab_size, group, f"{what} %s; {limit} is %s")
    rows = F.embedding(place, table)
    return leave(rows.masked_fill(~local.unsqueeze(-1), 0.0), group)


def owned(ids: Tensor, rows: int, vocab_size: int, group: ProcessGroup, complaint: str):
    """Which ids are this rank's, and their places in its rows (0 for the others). Every rank checks ids."""
    require_positive_ints(vocab_size=vocab_size)
    first = group.rank() * rows
    mine = ids.new_zeros(vocab_size, 1, dtype=torch.bool)
    mine[first : first + rows].fill_(True)
    try:
        local = F.embedding(ids, mine).squeeze(-1)
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= len(mine))][0].item()
        raise ValueError(complaint % (wrong, len(mine)) + f" (0..{len(mine) - 1})") from None
    return local, (ids - first).masked_fill(~local, 0)


def cross_entropy_sum(logits: Tensor, targets: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
    """logits `[B, T, V/t]` of this rank, targets `[B, T]` of all words -> Σ -log p(target), on all ranks."""
    dtype = logits.dtype

    def forward(logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss, *kept = cross_entropy_forward(logits, targets, group, vocab_size)
        return loss, kept

    def backward(dys: Sequence[Tensor], kept: Sequence[Tensor], _) -> tuple[Tensor]:
        return ((cross_entropy_backward(*kept) * dys[0]).to(dtype),)

    return custom_vjp(forward, backward, logits)


def whole_logits(logits: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
    """`[B, T, V/t]` -> `[B, T, V]` on every rank, for another loss. Sends (t-1)/t of the logits."""
    return collectives.gather_from(logits, group, logits.dim() - 1)[..., :vocab_size]


def cross_entropy_forward(logits: Tensor, targets: Tensor, group: ProcessGroup, vocab_size: int):
    """Loss; for backward softmax `[B, T, V/t]`, which targets are here, where, and which count `[B, T]`."""
    words, counts = logits.size(-1), targets != MASKED
    complaint = "target %s; the vocabulary is %s"
    local, place = owned(targets.masked_fill(~counts, 0), words, vocab_size, group, complaint)
    if words * group.size() > vocab_size:
        padding = torch.arange(words, device=logits.device) >= vocab_size - group.rank() * words
        logits = logits.masked_fill(padding, -math.inf)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits.to(torch.promote_types(logits.dtype, torch.float32)) - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~local, 0.0)
    exponentials = shifted.exp_()
    total, at_target = collectives.all_reduce(torch.stack((exponentials.sum(-1), at_target)), group)
    loss = ((total.log() - at_target) * counts).sum()
    return loss, exponentials.div_(total.unsqueeze(-1)), local, place, counts


def cross_entropy_backward(softmax: Tensor, local: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    """dlogits `[B, T, V/t]` of the summed loss."""
    dlogits = softmax * counts.unsqueeze(-1)
    return dlogits.scatter_add_(-1, place.unsqueeze(-1), -(local & counts).unsqueeze(-1).to(dlogits.dtype))
