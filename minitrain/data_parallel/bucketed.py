"""Data parallelism with overlap: gradients travel in buckets while backward still computes the earlier layers.

    bucket[i] full  ->  all_reduce(bucket[i]) starts          backward goes on; finish() waits for what is left

Backward produces the last layer's gradients first, so buckets are filled from the last parameter to the first. A bucket that is
full starts its all-reduce at once, in bucket order on every rank (the network matches calls by order, not by name).
`finish()` stands in the open in the training step: its duration *is* the communication that was not hidden.
Sends 2(n-1)/n of the gradients' bytes a step, as the naive way; number of all-reduces = number of buckets.
Memory: the buckets are the gradients (`param.grad` is a view), so beside them only one incoming gradient and the receive buffers live.
Accumulation: set `enabled = False` for all but the last microbatch; gradients then add up locally and travel once.
Raises ValueError for a bucket of no bytes, or in `finish()` when a parameter got no gradient.
Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, sections 3.2.2 and 3.2.3 (25 MB buckets). Differs: an explicit finish()
instead of a callback at the end of backward, SUM instead of mean, no search for unused parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.collectives import Handle, all_reduce
from minitrain.data_parallel.naive import by_kind, trainable_once


class Bucket:
    """A flat buffer and the parameters whose gradients live in it, in the order in which backward finishes them."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        self.flat = torch.zeros(
            sum(param.numel() for param in params), dtype=params[0].dtype, device=params[0].device
        )
        self.views = [
            part.view_as(param) for param, part in zip(params, self.flat.split([p.numel() for p in params]))
        ]
        self.arrived = 0
        self.handle: Handle | None = None


class GradReducer:
    """Attaches to parameters; the model stays the model."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, bucket_bytes: int = 25_000_000):
        if bucket_bytes <= 0:
            raise ValueError(
                f"bucket_bytes={bucket_bytes}; a bucket needs at least one byte, 25_000_000 is usual"
            )
        self.group, self.enabled = group, True
        self.buckets = [
            Bucket(params)
            for same in by_kind(trainable_once(params)[::-1])
            for params in cut(same, bucket_bytes)
        ]
        self._slot = {
            id(param): (bucket, view)
            for bucket in self.buckets
            for param, view in zip(bucket.params, bucket.views)
        }
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._on_ready)
            for bucket in self.buckets
            for param in bucket.params
        ]
        self._started = 0

    def _on_ready(self, param: nn.Parameter) -> None:
        """After a backward."""
        if self.enabled:
            self._take(param)

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete: for who runs backwards with `enabled = False` and knows when the last was (a pipeline)."""
        for param in params:
            if id(param) in self._slot and param.grad is not None:
                self._take(param)

    def arrived(self, params: Iterable[nn.Parameter]) -> None:
        """A microbatch is done: nothing travels yet."""

    def lives(self) -> tuple:
        return ()

    def _take(self, param: nn.Parameter) -> None:
        """Put `param.grad` into its place in the bucket, start what can start."""
        bucket, view = self._slot[id(param)]
        if param.grad is not view:
            view.copy_(param.grad)
            param.grad = view  # frees what backward allocated
        bucket.arrived += 1
        while self._started < len(self.buckets) and self._full(self.buckets[self._started]):
            ready = self.buckets[self._started]
            ready.handle = all_reduce(ready.flat, self.group, out=ready.flat, async_op=True)
            self._started += 1

    @staticmethod
    def _full(bucket: Bucket) -> bool:
        return bucket.arrived == len(bucket.params)

    def finish(self) -> None:
        """Wait until every bucket holds the sum over the group."""
        waiting = [bucket for bucket in self.buckets if not self._full(bucket)]
        if waiting:
            empty = [
                tuple(param.shape)
                for bucket in waiting
                for param, view in zip(bucket.params, bucket.views)
                if param.grad is not view
            ]
            raise ValueError(
                f"{len(empty)} parameters got no gradient (shapes {empty[:3]}); use every parameter in the loss on "
                f"every rank, freeze it with requires_grad_(False), or set enabled=True before the last backward"
            )
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.handle, bucket.arrived = None, 0
        self._started = 0

    def close(self) -> None:
        """Take the hooks off again; the gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()


def cut(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Consecutive parameters into buckets of at most `bucket_bytes`; a larger parameter has a bucket of its own."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for param in params:
        size = param.numel() * param.element_size()
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(param)
        room -= size
    return buckets
