"""Collectives by hand: as the plain loops over messages that a schedule hides.

    reduce_scatter  a chunk starts right of its owner and goes round; everyone adds its part     n-1 steps
    all_gather      the finished chunks go round once more; everyone keeps a copy                n-1 steps
    all_reduce      the one, then the other                                   2(n-1)/n S by each rank
    pairwise        all-to-all: in step s send to rank r+s, receive from r-s   n-1 steps, (n-1)/n S
    bruck           all-to-all in hops of 1, 2, 4, ..., many blocks in each    log2(n) steps, log2(n)/2 S

In the ring each of n ranks sends to its right while it receives from its left: time 2(n-1) (alpha + S/(n B)).
When n does not divide the size, the first chunks are one element longer. In an all-to-all everyone has a
block for everyone: x [n·d, ..] is d rows for each rank, the result what was received, in rank order. No byte
can be saved, but steps can: Bruck suits small blocks, of which each travels a hop for every set bit of its
distance, with all others that have this bit. Memory: the result and one message or chunk each way.

Patarasuk and Yuan 2009; Gibiansky 2017 (Baidu); Bruck et al. 1997 (radix 2); Thakur, Rabenseifner and Gropp
2005, section 4.3 (pairwise). Differs: equal blocks. `algorithms.ring_all_reduce` sends the ring's messages.
"""

import torch
from torch.distributed import ProcessGroup

from minitrain.ranks.checks import require_ints
from minitrain.ranks.collectives import exchange


def reduce_scatter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's chunk of the sum over the group: x [any shape] -> [numel / n], flat."""
    n, rank = group.size(), group.rank()
    chunks = x.detach().reshape(-1).tensor_split(n)
    partial = chunks[rank - 1].clone()  # our left neighbour's chunk has the longest way: it leaves first
    for step in range(n - 1):
        ours = chunks[(rank - 2 - step) % n]
        partial = exchange(partial, (rank + 1) % n, (rank - 1) % n, group, like=ours) + ours
    return partial


def all_gather(chunk: torch.Tensor, group: ProcessGroup, numel: int) -> torch.Tensor:
    """Everyone's chunk, in rank order: [numel / n] -> [numel]."""
    require_ints(numel=numel)
    n, rank = group.size(), group.rank()
    result = chunk.new_empty(numel)
    places = result.tensor_split(n)
    if places[rank].shape != chunk.shape:
        given = f"a chunk of {list(chunk.shape)}, where rank {rank} of {n} has {list(places[rank].shape)}"
        raise ValueError(f"{given} of numel={numel}; give the number of elements of the whole")
    places[rank].copy_(chunk)
    for step in range(n - 1):
        leaving, arriving = places[(rank - step) % n], places[(rank - step - 1) % n]
        arriving.copy_(exchange(leaving, (rank + 1) % n, (rank - 1) % n, group, like=arriving))
    return result


def all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the group, the same bits on every rank: x [any shape] -> like x."""
    return all_gather(reduce_scatter(x, group), group, x.numel()).view(x.shape)


def pairwise(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    blocks = _blocks(x, n)
    received = blocks.clone()
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        received[source] = exchange(blocks[to], to, source, group)
    return received.flatten(0, 1)


def bruck(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    blocks = _blocks(x, n).roll(-rank, 0)  # blocks[j] has j ranks to go
    for bit in (1 << s for s in range((n - 1).bit_length())):
        moving = [j for j in range(n) if j & bit]
        blocks[moving] = exchange(blocks[moving], (rank + bit) % n, (rank - bit) % n, group)
    return blocks.flip(0).roll(rank + 1, 0).flatten(0, 1)  # blocks[j] has come j ranks: it is from rank - j


def _blocks(x: torch.Tensor, n: int) -> torch.Tensor:
    """[n·d, ..] -> [n, d, ..]"""
    if x.ndim == 0 or x.shape[0] % n:
        rows = x.shape[0] if x.ndim else "no"
        raise ValueError(f"x has {rows} rows, not a block for each of n={n} ranks; pad to a multiple of {n}")
    return x.detach().unflatten(0, (n, -1))
