"""One interpreter for every schedule: real tensors do on real ranks what a list of transfers says.

In each step a rank posts its sends and receives without waiting, in the order of the list, then waits for all
of them, and only then adds or copies what has arrived. Hence there is no deadlock: the first transfer of the
list that is not done is the next one for both of its ends, even where a send blocks until its receiver is
there. There is no race: nothing that arrives is written while a send may still read. And all ranks get equal
bits from the all-reduces of this folder: a chunk has one complete sum, which is copied, or two ranks add the
same two numbers (two schedules may differ in the last bit).
Sends `schedule.sent_elements(schedule, rank, numel)` elements. Memory: the result and what arrives in one
step.
"""

import torch

from minitrain.ranks.collectives import receive, send
from minitrain.systems.communication.chunk_schedule import Schedule, span


def run_schedule(schedule: Schedule, x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """A new tensor like x [any shape] with what the schedule leaves on this rank; chunks are of flat x.

    After a reduce-scatter only this rank's chunk is the sum; before an all-gather only what it owns matters.
    """
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
