"""Ulysses on a page: between two all-to-alls a rank has all tokens of some heads, so any attention will do.

    [B, T/n, H, K]  -- all-to-all -->  [B, T, H/n, K]  attention  -- all-to-all -->  [B, T/n, H, K]

q, k, v and the output pass through one: a rank sends (n-1)/n of B T/n H K elements of each, and as many in
backward. That falls with 1/n for a given text; of a ring each rank sends its n-1 blocks. n divides the heads.
Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3. General: ulysses.py (fewer heads of keys).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Piece i along `cut` goes to rank i; what comes is joined along `join`, in the order of ranks."""
    pieces = torch.stack(x.chunk(group.size(), dim=cut)).contiguous()
    dist.all_to_all_single(received := torch.empty_like(pieces), pieces, group=group)
    return torch.cat(list(received), dim=join)


class AllToAll(torch.autograd.Function):
    """Its adjoint brings every piece home."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.way = group, join, cut
        return exchange(x, group, cut, join)

    @staticmethod
    def backward(ctx, dy):
        return exchange(dy, *ctx.way), None, None, None


TOKENS, HEADS = 1, 2


def ulysses(attention: Callable, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """q, k, v [B, T/n, H, K], tokens in the order of ranks; attention(q, k, v) is given [B, T, H/n, K]."""
    q, k, v = (AllToAll.apply(x, group, HEADS, TOKENS) for x in (q, k, v))
    return AllToAll.apply(attention(q, k, v), group, TOKENS, HEADS)
