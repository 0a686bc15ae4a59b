"""ZeRO stage 1: every rank updates 1/n of the parameters, and so keeps 1/n of the optimizer state.

    reduce_scatter(gradients)  ->  grad shard[P/n]              while backward still runs, bucket by bucket
    optimizer.step()           on  weight shard[P/n]            1/n of the state, 1/n of its FLOPs
    all_gather(weight shard)   ->  parameters[P] on every rank

An all-reduce is a reduce-scatter and an all-gather: here each rank updates what it owns between the two. It
sends what data parallelism sends. With Adam in mixed precision a rank keeps 2 + 2 + 12/n bytes per parameter
instead of 16.
Sends (n-1)/n of the gradients and of the parameters per step: gradients of microbatches add up locally.
Memory: parameters and gradients live in flat buffers, the shards are slices of them; sums come back in place.
In a pipeline a bucket is of one stage and travels when the stage's last microbatch is done.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (P_os); before it Xu et al. 2020, weight-update
sharding, arXiv:2004.13336, section 3, by a compiler. Differs: buckets and overlap, SUM instead of mean, the
master copy belongs to the optimizer (`AdamW(..., master_dtype=torch.float32)`).
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import GradBucket
from minitrain.data_parallel.flat import Flat, WholeParameters
from minitrain.ranks.collectives import Handle, reduce_scatter
from minitrain.ranks.sharding import placement


class Zero1(WholeParameters):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 1

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer, bucket_bytes=25_000_000):
        super().__init__(model, group, make_optimizer, bucket_bytes)
        self.grads = {flat: GradBucket(flat.params, flat.padding) for flat in self.flats}
        self._sent: list[tuple[Flat, Handle]] = []

    def _on_grad(self, param: nn.Parameter) -> None:
        """After a backward: the gradient goes to its place, where those of other microbatches add up."""
        if param.grad is not None:  # else a pipeline's W makes it
            self.grads[self.in_order.bucket_of[param]].put(param)
            if self.enabled and not self.driven:
                self.in_order.complete(param)

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if param in self.in_order.bucket_of and param.grad is not None:
                self.grads[self.in_order.bucket_of[param]].put(param)
                self.in_order.complete(param)

    def _send(self, flat: Flat) -> None:
        """A bucket is full: its sum comes back in place, in this rank's slice."""
        if self.host and self._sent and placement(self._sent[0][0].params[0]).copies is None:
            self._settle()
        grads = self.grads[flat].grads
        handle = reduce_scatter(grads, flat.groups[0], out=flat.own(grads), async_op=True)
        self._sent.append((flat, handle))

    def _settle(self) -> Flat:
        """Wait for the first bucket under way."""
        flat, handle = self._sent.pop(0)
        flat.shard.grad = handle.wait()
        self.final(flat)
        return flat

    def finish(self) -> None:
        if self.in_order.waiting:
            raise self.no_gradient(self.in_order.missing())
        while self._sent:
            self.add_copies(self._settle())
        self.in_order.reset()
        self.all_final()
