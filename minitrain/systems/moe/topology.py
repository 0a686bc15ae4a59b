"""A balance loss that knows the links: tokens go where they travel fast, in proportion to bandwidth.

    rows_j to rank j need rows_j / B_j; with R rows in all, max_j rows_j / B_j is least, R / sum_j B_j, if
    rows_j = R · B_j / sum_j B_j: were any link idle before another, rows could move to it

    loss = alpha · sum_e f_e · P_e / target_e      f_e share of this rank's choices, P_e its mean probability

With f = P it is alpha at f = target and more elsewhere; a target of 1/E for all is Switch's loss. A rank has
a target and so a router of its own, or one that reads where it is. Sends nothing. Chen et al. 2022 (TA-MoE),
arXiv:2302.09915, section 4. Differs: bandwidth alone; penalties 1 / target are not normalised; no capacities.
"""

import torch
from torch import Tensor

from minitrain.moe.router import Routing, tokens_of
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints


def bandwidths(rank: int, ranks: int, per_node: int, local: float, intra: float, inter: float) -> Tensor:
    """[ranks]: of the way from `rank` to each: itself, those of its node (`per_node` ranks), all others."""
    require_positive_ints(ranks=ranks, per_node=per_node)
    require_ints(0, ranks - 1, rank=rank)
    require_positive(local=local, intra=intra, inter=inter)
    if ranks % per_node:
        raise ValueError(f"{ranks} ranks are not a multiple of {per_node} a node; fill the nodes")
    near = [intra if other // per_node == rank // per_node else inter for other in range(ranks)]
    near[rank] = local
    return torch.tensor(near, dtype=torch.float64)


def transfer_time(rows: Tensor, bandwidths: Tensor) -> Tensor:
    """Rows [.., n] to n ranks, all links at once: the time of the slowest."""
    return (rows / bandwidths).amax(-1)


def target(bandwidths: Tensor, experts: int) -> Tensor:
    """[E] shares of a rank's choices, those of the E/n experts of a rank alike."""
    if experts % len(bandwidths):
        raise ValueError(f"{experts} experts on {len(bandwidths)} ranks; choose a multiple of the ranks")
    each = experts // len(bandwidths)
    return (bandwidths / bandwidths.sum() / each).repeat_interleave(each)


def topology_loss(routing: Routing, target: Tensor, alpha: float, counts=None, tokens=None) -> Tensor:
    """alpha at the target. With `counts` [E] of this rank's batch and `tokens` of all ranks, what
    microbatches and ranks compute adds up to the mean over the batch's tokens."""
    counts = routing.counts if counts is None else counts
    tokens = tokens_of(routing) if tokens is None else tokens
    share = counts.to(routing.probs.dtype) / counts.sum().clamp(min=1)
    penalty = share / target.to(routing.probs)
    return alpha * (penalty * routing.probs.sum(0)).sum() / max(1, int(tokens))
