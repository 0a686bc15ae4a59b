"""The ring by hand: reduce-scatter, all-gather and all-reduce as the plain loops that a schedule hides.

    reduce-scatter   a chunk starts right of its owner and goes round; everyone adds its part   n-1 steps
    all-gather       the finished chunks go round once more; everyone keeps a copy              n-1 steps
    all-reduce       the one, then the other                                      2(n-1)/n S by each rank

Each of n ranks sends to its right while it receives from its left: time 2(n-1) (alpha + S/(n B)). Memory: the
result, one chunk in and one out. When n does not divide the size, the first chunks are one element longer.
Patarasuk and Yuan 2009; Gibiansky 2017 (Baidu). `algorithms.ring_all_reduce` sends the same messages.
"""

import torch

from minitrain.ranks.checks import require_ints
from minitrain.ranks.collectives import exchange


def reduce_scatter(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """This rank's chunk of the sum over the group: x [any shape] -> [numel / n], flat."""
    n, rank = group.size(), group.rank()
    chunks = x.detach().reshape(-1).tensor_split(n)
    partial = chunks[rank - 1].clone()  # our left neighbour's chunk has the longest way: it leaves first
    for step in range(n - 1):
        own_part = chunks[(rank - 2 - step) % n]
        partial = exchange(partial, (rank + 1) % n, (rank - 1) % n, group, like=own_part) + own_part
    return partial


def all_gather(chunk: torch.Tensor, group: torch.distributed.ProcessGroup, numel: int) -> torch.Tensor:
    """Everyone's chunk, in rank order: [numel / n] -> [numel]."""
    require_ints(numel=numel)
    n, rank = group.size(), group.rank()
    result = chunk.new_empty(numel)
    places = result.tensor_split(n)
    if places[rank].shape != chunk.shape:
        found = f"a chunk of {list(chunk.shape)}, where rank {rank} of {n} has {list(places[rank].shape)}"
        raise ValueError(f"{found} of numel={numel}; give the number of elements of the whole")
    places[rank].copy_(chunk)
    for step in range(n - 1):
        leaving, arriving = places[(rank - step) % n], places[(rank - step - 1) % n]
        arriving.copy_(exchange(leaving, (rank + 1) % n, (rank - 1) % n, group, like=arriving))
    return result


def all_reduce(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """The sum over the group, the same bits on every rank: x [any shape] -> like x."""
    return all_gather(reduce_scatter(x, group), group, x.numel()).view(x.shape)
