"""Data parallelism as a Sync: every rank has and updates all parameters; gradients travel in buckets.

    parameters of one sum, and of one stage of a pipeline, have a GradReducer (bucketed.py) of their own:
    cut over tp, or the same there      summed over dp × cp          other columns, or equal, on each tp rank
    norms under sequence parallelism    summed over dp × cp × tp     each tp rank saw other tokens
    on two stages (a tied table)        summed over dp × cp, then over the stages that have it, once per step

Sends 2(n-1)/n of the gradients' bytes per step; what h stages have another 2(h-1)/h. Memory: all is whole.
Li et al. 2020, arXiv:2006.15704, section 3.2.3; Narayanan et al. 2021, arXiv:2104.04473 (embedding group).
"""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.buckets import Flat, GradBucket
from minitrain.data_parallel.naive import grouped
from minitrain.data_parallel.sync import Sync
from minitrain.ranks.collectives import all_reduce
from minitrain.ranks.sharding import placement


class Replicated(Sync):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, sync, sync)."""

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
