"""The same start on all ranks: one rank's parameters and buffers, W_0[F, D], b_0[F], .., go to everyone.

Data parallelism adds gradients, not weights: replicas that start apart stay apart. Our own GPT fills every
parameter from its global name; a module from elsewhere draws from a random stream, perhaps another one on
each rank. Call this once, before an optimizer makes its state and before anything is cut.
Sends S bytes of all parameters and buffers, each once however often it is tied, in one flat buffer per dtype:
(n-1)·S in all, and the source ceil(log2 n)·S. Memory: while it runs, two copies of all that has one dtype.
Li et al. 2020, arXiv:2006.15704, section 3.1. Differs: DDP sends buffers again in every forward.
"""

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, kind, views
from minitrain.data_parallel.naive import grouped
from minitrain.ranks import collectives
from minitrain.ranks.sharding import placement


@torch.no_grad()
def broadcast_parameters(module: nn.Module, group: ProcessGroup, source: int = 0) -> None:
    """Overwrite this rank's parameters and buffers with those of rank `source` of the group, in place."""
    named = [*module.named_parameters(), *module.named_buffers()]
    if not named:
        raise ValueError(f"{type(module).__name__} has no parameters and no buffers; nothing to send")
    for name, tensor in named:
        for cut in placement(tensor).shards:
            if cut.group.size() > 1 and group in (cut.group, collectives.world()):
                axis = collectives.axis_of(cut.group)
                raise ValueError(
                    f"{name} is cut over {axis}, whose ranks hold different slices; broadcast first"
                )
    for same in grouped((tensor for _, tensor in named), kind).values():
        flat = collectives.broadcast(flatten(same), source, group)
        for tensor, part in zip(same, views(flat, same)):
            tensor.copy_(part)
