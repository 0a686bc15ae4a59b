"""Data parallelism with overlap: gradients travel in buckets while backward goes on with earlier layers.

    bucket[i] full  ->  all_reduce(bucket[i]) starts      backward goes on; finish() waits for what is left

Backward finishes the last layer first, so buckets are filled from the last parameter to the first. `finish()`
is a visible line of the training step: its duration *is* the communication that was not hidden.
Sends 2(n-1)/n of the gradients' bytes per step, in as many all-reduces as there are buckets. Memory: the
buckets are the gradients; beside them live one incoming gradient and the receive buffers.
Accumulation: with `enabled = False` for all but the last microbatch gradients add up locally and travel once.

Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, sections 3.2.2 and 3.2.3. Differs: an explicit
finish(), no callback at the end of backward; SUM, no mean; no search for unused parameters.
"""

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import GradBucket, InOrder, pack
from minitrain.data_parallel.naive import trainable_once
from minitrain.ranks.collectives import Handle, all_reduce


class GradReducer:
    """Attaches to parameters; the model stays the model."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, bucket_bytes: int = 25_000_000):
        self.group, self.enabled = group, True
        self.on_sum: Callable[[GradBucket], None] = lambda bucket: None  # told of each sum that is there
        self.eager = lambda: False  # whether somebody waits for it
        self.buckets = [GradBucket(packed) for packed in pack(trainable_once(params)[::-1], bucket_bytes)]
        on_sum = lambda bucket, sum: self.on_sum(bucket)
        self._in_order = InOrder(self.buckets, self._start, on_sum)
        params = self._in_order.bucket_of
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_ready) for param in params]

    def _on_ready(self, param: nn.Parameter) -> None:
        """A backward has finished this gradient: put it into its bucket, start the buckets that are full."""
        if self.enabled:
            self._in_order.bucket_of[param].put(param)
            self._in_order.complete(param)

    def _start(self, bucket: GradBucket) -> Handle:
        if self._in_order.under_way and self.eager():
            self._in_order.settle()
        return self.all_reduce(bucket)

    def all_reduce(self, bucket: GradBucket) -> Handle:
        """Start to add up everyone's gradients, in place."""
        return all_reduce(bucket.grads, self.group, out=bucket.grads, async_op=True)

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        """These gradients are complete: for a pipeline, which sets `enabled = False` and knows when."""
        for param in params:
            if param in self._in_order.bucket_of and param.grad is not None:
                self._in_order.bucket_of[param].put(param)
                self._in_order.complete(param)

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None:
        """A microbatch is done: nothing travels yet."""

    def gathered_buffers(self) -> tuple:
        return ()

    def finish(self) -> None:
        """Wait until every bucket holds the sum, also where only an earlier microbatch has used all of it."""
        if self._in_order.waiting:
            self.on_step_grads(self._in_order.incomplete())
        if left := self._in_order.incomplete():
            empty = [getattr(param, "global_name", tuple(param.shape)) for param in left]
            raise ValueError(f"no gradient for {empty[:3]}; use all on every rank, or freeze them")
        while self._in_order.under_way:
            self._in_order.settle()
        self._in_order.reset()

    def close(self) -> None:
        """Take the hooks off again; the gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
