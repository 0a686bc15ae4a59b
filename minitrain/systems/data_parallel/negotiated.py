"""Horovod's answer to ranks that are ready in different orders: agree first, then fuse, then reduce.

    ready_rank in {0,1}^P  --all_reduce-->  count;     tensor p may travel when count[p] = n

A network matches collectives by order. If backward finishes gradients in another order on another rank
(branches), sending each when ready would add up different tensors. So a ready gradient only raises a bit;
after every `cycle` gradients the ranks add up their bits, and what all have is fused and reduced, in one
order for all. Both travel while backward goes on: the sum of the bits is read a cycle later, and the sum of a
fused buffer when the next one is full, or in `finish`.
Sends 2(n-1)/n of the gradients' bytes, plus 2(n-1)/n · P · 4 bytes per cycle for the bits. Memory: one fusion
buffer of at most `fusion_bytes` (or one larger parameter).
Sergeev and Del Balso 2018, Horovod, arXiv:1802.05799, section 3, and its response cache. Differs: a cycle is
a number of gradients, not milliseconds, so runs repeat exactly; bits are all-reduced, with no coordinator and
no thread of its own, so nothing is sent between two cycles.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, pack, views
from minitrain.data_parallel.naive import trainable_once
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import Handle, all_reduce


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
