"""Collectives on real ranks: one interpreter for every schedule, and the all-to-alls, which are no schedules.

    run_schedule    real tensors do on real ranks what a list of transfers says
    pairwise        all-to-all: in step s send to rank r+s, receive from r-s     n-1 steps, (n-1)/n S
    bruck           all-to-all in hops of 1, 2, 4, ..., many blocks in each      log2(n) steps, log2(n)/2 S

In each step of a schedule a rank posts its sends and receives in the order of the list, then waits for all,
and only then adds or copies what has arrived. So there is no deadlock (the first transfer of the list that is
not done is the next one for both of its ends, even where a send blocks until its receiver is there) and no
race (nothing is written while a send may still read). All ranks get equal bits from the all-reduces of this
folder: a chunk has one complete sum, which is copied, or two ranks add the same two numbers (two schedules
may differ in the last bit). Sends `sent_elements(schedule, rank, numel)` elements.

In an all-to-all x [n·d, ..] is d rows for each rank, the result what was received, in rank order. Bruck saves
steps: a block goes a hop for every set bit of its distance. Memory: the result and what arrives in a step.
Bruck et al. 1997 (radix 2); Thakur, Rabenseifner, Gropp 2005, section 4.3 (pairwise). Differs: equal blocks.
"""

import torch

from minitrain.ranks.collectives import exchange, receive, send
from minitrain.systems.communication.chunk_schedule import Schedule, span


def run_schedule(schedule: Schedule, x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """A new tensor like x [any shape] with what the schedule leaves on this rank; chunks are of flat x. After
    a reduce-scatter only this rank's chunk is the sum; before an all-gather only what it owns matters."""
    n, rank = group.size(), group.rank()
    if n != schedule.ranks:
        raise ValueError(f"schedule of {schedule.ranks} ranks, group of {n}; build it for {n}")
    result = x.detach().clone(memory_format=torch.contiguous_format)
    flat = result.view(-1)
    for step in schedule.steps:
        departures, arrivals = [], []
        for source, to, chunks, reduce in step:
            start, stop = span(chunks, schedule, flat.numel())
            if rank not in (source, to) or start == stop:
                continue
            part = flat[start:stop]
            if rank == source:
                departures.append(send(part, to, group, async_op=True))
            else:
                arrivals.append((part, reduce, receive(part, source, group, async_op=True)))
        for departure in departures:
            departure.wait()
        received = [(part, reduce, arrival.wait()) for part, reduce, arrival in arrivals]
        for part, reduce, values in received:
            if reduce:
                part += values
            else:
                part.copy_(values)
    return result


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
    blocks = _blocks(x, n).roll(-rank, 0)  # blocks[j] has j ranks to go
    for bit in (1 << s for s in range((n - 1).bit_length())):
        moving = [j for j in range(n) if j & bit]
        blocks[moving] = exchange(blocks[moving], (rank + bit) % n, (rank - bit) % n, group)
    return blocks.flip(0).roll(rank + 1, 0).flatten(0, 1)  # blocks[j] has come j ranks: it is from rank - j


def _blocks(x: torch.Tensor, n: int) -> torch.Tensor:
    """[n·d, ..] -> [n, d, ..]"""
    if x.ndim == 0 or x.shape[0] % n:
        raise ValueError(f"x {list(x.shape)}: its rows are no multiple of n={n} ranks; pad it")
    return x.detach().unflatten(0, (n, -1))
