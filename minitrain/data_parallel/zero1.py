"""ZeRO stage 1: every rank updates 1/n of the parameters, and so keeps 1/n of the optimizer state.

    reduce_scatter(gradients)  ->  grad shard[P/n]              while backward still runs, bucket by bucket
    optimizer.step()           on  weight shard[P/n]            1/n of the state, 1/n of its FLOPs
    all_gather(weight shard)   ->  parameters[P] on every rank

An all-reduce is a reduce-scatter and an all-gather: here each rank updates its shard between the two. With
Adam in mixed precision a rank keeps 2 + 2 + 12/n bytes per parameter instead of 16.
Sends (n-1)/n of the gradients and of the parameters per step, as data parallelism: microbatches add up here.
Memory: parameters and gradients are in flat buffers, shards are slices of them; sums come back in place. In a
pipeline a bucket is of one stage and travels when its last microbatch is done.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (P_os); before it Xu et al. 2020, weight-update
sharding, arXiv:2004.13336, section 3, by a compiler. Differs: buckets and overlap, SUM instead of mean, the
master copy belongs to the optimizer (`AdamW(..., master_dtype=torch.float32)`).
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, GradBucket, InOrder, pack, views
from minitrain.data_parallel.sync import Sync
from minitrain.ranks.collectives import Handle, all_gather, reduce_scatter


class WholeParameters(Sync):
    """Stages 1 and 2: flat buffers have the whole parameters; a rank updates a slice of each, its shard."""

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer, bucket_bytes=25_000_000):
        super().__init__(model, (group,), make_optimizer)
        buckets = pack(reversed(self.trainable), bucket_bytes, self.key_of.get)  # as backward fills them
        flats = [Flat(params, *self.key_of[params[0]].groups) for params in buckets]
        self.weights: dict[Flat, Tensor] = {}  # the whole parameters
        for flat in flats:
            self.weights[flat] = flat.pack(flat.params)
            for param, view in zip(flat.params, views(self.weights[flat], flat.params)):
                param.data = view
                param.register_post_accumulate_grad_hook(self._on_grad)
            flat.cut(flat.local_shard(self.weights[flat]))
        self.set_shards(flats)
        self.in_order = InOrder(flats, self._start, self._on_sum)

    def scatter(self, flat: Flat, grads: Tensor, out: Tensor | None = None) -> Handle:
        """Start to add up everyone's whole gradient; the result is this rank's slice."""
        return reduce_scatter(grads, flat.groups[0], out=out, async_op=True)

    def publish(self, frozen: bool = False) -> None:
        """All-gather the updated parameters."""
        handles = []
        for flat, whole in self.weights.items():
            handles.append(all_gather(flat.shard.detach(), flat.groups[0], out=whole, async_op=True))
        for handle in handles:
            handle.wait()


class Zero1(WholeParameters):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 1

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer, bucket_bytes=25_000_000):
        super().__init__(model, group, make_optimizer, bucket_bytes)
        self.grads = {flat: GradBucket(flat.params, flat.padding) for flat in self.shards}

    def _on_grad(self, param: nn.Parameter) -> None:
        """After a backward: the gradient goes to its place, where those of other microbatches add up."""
        if param.grad is not None:  # else a pipeline's W makes it
            self.grads[self.in_order.bucket_of[param]].put(param)
            if self.enabled and not self.driven:
                self.in_order.complete(param)

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if param in self.in_order.bucket_of and param.grad is not None:
                self.grads[self.in_order.bucket_of[param]].put(param)
                self.in_order.complete(param)

    def _start(self, flat: Flat) -> Handle:
        """A bucket is full: its sum comes back in place, in this rank's slice."""
        if self.in_order.under_way and self.finalizes_early(self.in_order.under_way[0][0]):
            self.in_order.settle()
        grads = self.grads[flat].grads
        return self.scatter(flat, grads, flat.local_shard(grads))

    _on_sum = Sync.finalize

    def finish(self) -> None:
        if self.in_order.waiting:
            self.on_step_grads(self.in_order.incomplete())
        if left := self.in_order.incomplete():
            raise self.missing_gradients(left)
        while self.in_order.under_way:
            self.in_order.settle()
        self.in_order.reset()
        self.on_finish()
