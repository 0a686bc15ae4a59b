"""ZeRO stage 2: stage 1, and a rank keeps only the gradients it will use.

    bucket full  ->  reduce_scatter(bucket)  ->  grad shard[P/n]        and the rest of the bucket is freed
    optimizer.step() on the weight shard, all_gather, as in stage 1

2 + 14/n bytes per parameter with Adam in mixed precision. m microbatches add up in one of two places:

    accumulate="scatter"   every microbatch is reduce-scattered    sends m (n-1)/n of the gradients, holds P/n
    accumulate="keep"      the whole gradient adds up first        sends   (n-1)/n of the gradients, holds P

A pipeline has many microbatches and little gradient memory per stage: there stage 1 is the better trade. A
stage's buckets are sent after each of its backwards (after W, if that is apart), m times (n-1)/n.
Sends that and (n-1)/n of the parameters per step. Memory beside the shards: one bucket being filled, one
being sent.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2 (P_os+g). Differs: buckets of equal bytes rather
than one parameter after another, SUM instead of mean; shards add up in the dtype of the gradients.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from minitrain.data_parallel.buckets import Flat
from minitrain.data_parallel.zero1 import WholeParameters
from minitrain.ranks.checks import require_one_of
from minitrain.ranks.collectives import Handle


class Zero2(WholeParameters):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 2

    def __init__(self, model, group, make_optimizer, bucket_bytes=25_000_000, accumulate="scatter"):
        require_one_of(("scatter", "keep"), accumulate=accumulate)
        self.keep = accumulate == "keep"
        super().__init__(model, group, make_optimizer, bucket_bytes)
        self._is_last = False  # what is under way: no later microbatch adds to it

    def _on_grad(self, param: nn.Parameter) -> None:
        """This parameter's gradient is complete; send the buckets that are full, in order."""
        if not self.driven and (self.enabled or not self.keep):
            self.in_order.complete(param)
            if not self.in_order.waiting:
                self.in_order.reset()  # for the next microbatch

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None:
        if not self.keep:
            self._send_buckets_of(params)

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None:
        if self.keep:
            self._send_buckets_of(params)

    def _send_buckets_of(self, params: Iterable[nn.Parameter]) -> None:
        bucket_of = self.in_order.bucket_of
        for flat in dict.fromkeys(bucket_of[param] for param in reversed(list(params)) if param in bucket_of):
            self.in_order.send(flat)

    def _start(self, flat: Flat) -> Handle:
        """Reduce-scatter a bucket in the background. Its memory is free when the next one is sent."""
        if self.in_order.under_way:
            self.in_order.settle()
        grads = flat.pack([grad_of(param) for param in flat.params])
        for param in flat.params:
            param.grad = None
        self._is_last = self.enabled and not self.driven  # a pipeline may have more of it
        return self.scatter(flat, grads)

    def _on_sum(self, flat: Flat, grad: Tensor) -> None:
        """Add the sum of a bucket to the shard's gradient."""
        shard = flat.shard
        shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        if self._is_last and self.finalizes_early(flat):
            self.finalize(flat, shard.grad)

    def finish(self) -> None:
        if self.in_order.under_way:
            self.in_order.settle()
        rest = [flat for flat in self.shards if flat not in self.finalized]
        if any(self.in_order.completed.values()) or any(flat.shard.grad is None for flat in rest):
            raise self.missing_gradients(param for flat in self.in_order.waiting for param in flat.params)
        for flat in rest:
            self.finalize(flat, flat.shard.grad)
        self.on_finish()


def grad_of(param: nn.Parameter) -> Tensor:
    """Its gradient, zeros if no loss of this stage depends on it."""
    return param.new_zeros(param.shape, dtype=param.grad_dtype) if param.grad is None else param.grad
