"""Horovod: the same start on all ranks; ranks ready in different orders agree first, then fuse, then reduce.

    W_0[F, D], b_0[F], ..  --broadcast--> everyone       one rank's parameters and buffers, once
    ready_rank in {0,1}^P  --all_reduce-->  count        tensor p may travel when count[p] = n

Data parallelism adds gradients, not weights: replicas that start apart stay apart. Parameters are broadcast
once, before an optimizer makes its state: S bytes, each once however often it is tied, in one flat buffer per
dtype, (n-1)·S in all, ceil(log2 n)·S from the source. Memory: while it runs, two copies of all that has one
dtype. A network matches collectives by order. If backward finishes gradients in another order on another rank
(branches), sending each when ready would add up different tensors. So a ready gradient only raises a bit;
after every `cycle` gradients the ranks add up their bits, and what all have is fused and reduced, in one
order for all. Both travel while backward goes on: the sum of the bits is read a cycle later, and that of a
fused buffer when the next one is full, or in `finish`. Sends 2(n-1)/n of the gradients' bytes, plus 2(n-1)/n
· P · 4 bytes per cycle for the bits. Memory: one fusion buffer of `fusion_bytes` (or one larger parameter).
Sergeev and Del Balso 2018, Horovod, arXiv:1802.05799, section 3, and its response cache; Li et al. 2020,
arXiv:2006.15704, section 3.1. Differs: a cycle is a number of gradients, so runs repeat exactly; bits are
all-reduced, with no coordinator and no thread of its own; DDP sends buffers again in every forward.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, kind, pack, views
from minitrain.data_parallel.naive import grouped, trainable_once
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import Handle, all_reduce
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
                raise ValueError(f"{name} is cut over {collectives.axis_of(cut.group)}; broadcast first")
    for same in grouped((tensor for _, tensor in named), kind).values():
        flat = collectives.broadcast(flatten(same), source, group)
        for tensor, part in zip(same, views(flat, same)):
            tensor.copy_(part)


class NegotiatedReducer:
    """Used like GradReducer; `sequence` lists the parameters in the order in which they travelled."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, fusion_bytes=64_000_000, cycle=4):
        require_positive_ints(cycle=cycle)
        self.params, self.group, self.fusion_bytes = trainable_once(params), group, fusion_bytes
        self.cycle, self.enabled = cycle, True
        self._index = {param: index for index, param in enumerate(self.params)}
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_ready) for param in self.params]
        self._ready: set[int] = set()
        self._done: set[int] = set()
        self._asked: Handle | None = None  # for the sum of everybody's bits
        self._fused: tuple[list[nn.Parameter], Tensor, Handle] | None = None  # on its way
        self.sequence: list[int] = []

    def _on_ready(self, param: nn.Parameter) -> None:
        if self.enabled:
            self._ready.add(self._index[param])
            if len(self._ready) % self.cycle == 0:  # all ranks have as many, though not the same ones
                self._reduce_agreed()
                self._ask()

    def _ask(self) -> None:
        """Start to add up the ready bits."""
        bits = torch.zeros(len(self.params), dtype=torch.int32)
        bits[sorted(self._ready)] = 1
        self._asked = all_reduce(bits, self.group, async_op=True)

    def _reduce_agreed(self) -> None:
        """Start to reduce what all ranks had when they were last asked and nobody has reduced yet."""
        if self._asked is None:
            return
        counts, self._asked = self._asked.wait(), None
        agreed = (counts == self.group.size()).nonzero().flatten().tolist()
        new = [self.params[index] for index in agreed if index not in self._done]
        self._done.update(agreed)
        for params in pack(new, self.fusion_bytes):
            self._settle()
            flat = flatten(param.grad for param in params)
            self._fused = params, flat, all_reduce(flat, self.group, out=flat, async_op=True)
            self.sequence += [self._index[param] for param in params]
            del flat  # or it would live while the next one is made

    def _settle(self) -> None:
        """Wait for the buffer on its way and give its parts to the gradients."""
        if self._fused is not None:
            (params, flat, handle), self._fused = self._fused, None
            handle.wait()
            for param, part in zip(params, views(flat, params)):
                param.grad.copy_(part)

    def finish(self) -> None:
        """Negotiate what is left. Every rank must have every gradient by now."""
        missing = [index for index in range(len(self.params)) if index not in self._ready]
        if missing:
            raise ValueError(f"parameters {missing[:5]} got no gradient on this rank; use or freeze them")
        self._reduce_agreed()
        self._ask()
        self._reduce_agreed()
        self._settle()
        self._ready.clear()
        self._done.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
