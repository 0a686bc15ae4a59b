"""A linear layer's gradient from the vectors that it is a sum of, sent in its place.

    dW[M, N] = Σ over ranks of dY_rᵀ[M, K] · X_r[K, N]        every rank gathers all dY_r, X_r and multiplies

Each rank sends (P-1)·K·(M+N) elements of P ranks with K rows each, where a ring all-reduce of dW sends
2·(P-1)/P·M·N: less for few rows and wide layers; and it multiplies P times as many rows. Memory: P·K·(M+N).
Xie et al. 2016 (sufficient factors), UAI; Zhang et al. 2017 (Poseidon), ATC, section 3.2, whose choice is
systems/plan/communication_order.py:sends_factors. Differs: gathered on a ring, not sent peer to peer.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives


@torch.no_grad()
def gradient_by_factors(dy: Tensor, x: Tensor, group: ProcessGroup) -> Tensor:
    """dy `[K, M]`, x `[K, N]`, this rank's rows -> dW `[M, N]`, summed over the group."""
    pairs = collectives.all_gather(torch.cat([dy, x], 1), group)
    return pairs[:, : dy.size(1)].T @ pairs[:, dy.size(1) :]
