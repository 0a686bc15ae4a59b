"""All-to-all by hand: everyone has a block for everyone. No byte can be saved, but steps can.

    pairwise   in step s send to rank r+s, receive from rank r-s   n-1 steps         (n-1)/n S sent
    bruck      hops of 1, 2, 4, ... ranks, many blocks in each     log2(n) steps     log2(n)/2 S sent

x [n·d, ..] is a block of d rows for each rank, S its size; the result [n·d, ..] holds the blocks received, in
rank order. Bruck suits small blocks: one travels a hop for every set bit of its distance, with all others
that have this bit. Memory: the result and one message.
Bruck et al. 1997 (radix 2); Thakur, Rabenseifner and Gropp 2005, section 4.3 (pairwise). Differs: equal
blocks.
"""

import torch

from minitrain.ranks.collectives import exchange


def pairwise(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    blocks = _blocks(x, n)
    received = blocks.clone()
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        received[source] = exchange(blocks[to], to, source, group)
    return received.flatten(0, 1)


def bruck(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    n, rank = group.size(), group.rank()
    held = _blocks(x, n).roll(-rank, 0)  # held[j] has j ranks to go
    for bit in (1 << s for s in range((n - 1).bit_length())):
        moving = [j for j in range(n) if j & bit]
        held[moving] = exchange(held[moving], (rank + bit) % n, (rank - bit) % n, group)
    return held.flip(0).roll(rank + 1, 0).flatten(0, 1)  # held[j] has come j ranks, so it is from rank - j


def _blocks(x: torch.Tensor, n: int) -> torch.Tensor:
    """[n·d, ..] -> [n, d, ..]"""
    if x.ndim == 0 or x.shape[0] % n:
        rows = x.shape[0] if x.ndim else "no"
        raise ValueError(f"x has {rows} rows, not a block for each of n={n} ranks; pad to a multiple of {n}")
    return x.detach().unflatten(0, (n, -1))
