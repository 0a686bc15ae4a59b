"""Data parallelism with overlap: gradients travel in buckets while backward goes on with earlier layers.

    bucket[i] full  ->  all_reduce(bucket[i]) starts      backward goes on; finish() waits for what is left

Backward finishes the last layer first, so buckets are filled from the last parameter to the first. `finish()`
is a visible line of the training step: its duration *is* the communication that was not hidden.
Sends 2(n-1)/n of the gradients' bytes per step, in as many all-reduces as there are buckets. Memory: the
buckets are the gradients; beside them live one incoming gradient and the receive buffers.
Accumulation: with `enabled = False` for all but the last microbatch gradients add up locally and travel once.

As a Sync (`Replicated`) parameters of one sum, and of one stage of a pipeline, have a GradReducer each:
    cut over tp, or the same there      summed over dp × cp          other columns, or equal, on each tp rank
    norms under sequence parallelism    summed over dp × cp × tp     each tp rank saw other tokens
    on two stages (a tied table)        summed over dp × cp, then over the h stages that have it, once per
                                        step, which sends another 2(h-1)/h

Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, sections 3.2.2 and 3.2.3; Narayanan et al. 2021,
arXiv:2104.04473 (embedding group). Differs: finish(), no callback; SUM; no search for unused parameters.
"""

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, GradBucket, InOrder, pack
from minitrain.data_parallel.naive import grouped, trainable_once
from minitrain.data_parallel.sync import Sync
from minitrain.ranks.collectives import Handle, all_reduce
from minitrain.ranks.sharding import placement


class GradReducer:
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


class Replicated(Sync):
    stage = 0

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer=None, bucket_bytes=25_000_000):
        super().__init__(model, (group,), make_optimizer)
        self.set_shards(Flat([param]) for param in self.trainable)
        self.shard_of = {one.shard: one for one in self.shards}
        alike = grouped(self.trainable, lambda param: self.key_of[param][:3])  # part, groups, copies
        self.reducers = [GradReducer(params, key[1][0], bucket_bytes) for key, params in alike.items()]
        for reducer in self.reducers:
            reducer.on_sum = self._on_sum
            reducer.eager = partial(self.finalizes_early, self.shard_of[reducer.buckets[0].params[0]])

    @property
    def enabled(self) -> bool:
        return all(reducer.enabled for reducer in self.reducers)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for reducer in self.reducers:
            reducer.enabled = value

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        for reducer in self.reducers:
            reducer.on_step_grads(params)

    def _on_sum(self, bucket: GradBucket) -> None:
        copies = placement(bucket.params[0]).copies
        if copies is not None:
            all_reduce(bucket.grads, copies, out=bucket.grads)
        for param in bucket.params:
            self.on_grad_final(self.shard_of[param], param.grad)

    def finish(self) -> None:
        for reducer in self.reducers:
            reducer.finish()
        self.on_finish()
