"""ZeRO stage 1: every rank updates 1/n of the parameters, and so keeps 1/n of the optimizer state.

    reduce_scatter(gradients)  ->  grad shard[P/n]              while backward still runs, bucket by bucket
    optimizer.step()           on  weight shard[P/n]            1/n of the state, 1/n of its FLOPs
    all_gather(weight shard)   ->  parameters[P] on every rank

An all-reduce is a reduce-scatter and an all-gather. Data parallelism updates all parameters between the two, n times the
same; here each rank updates what it owns and the new parameters are gathered instead of the gradients. So the bytes are
data parallelism's, and the saving is free. With Adam in mixed precision (bf16 parameters and gradients, float32 master,
momentum and variance) a rank keeps 2 + 2 + 12/n bytes a parameter instead of 16.

Sends (n-1)/n of the gradients and (n-1)/n of the parameters a step, however many microbatches: gradients add up locally.
Memory: parameters and gradients live in flat buffers, the shards are slices of them; sums come back in place.
In a pipeline a bucket is of one stage and travels when the schedule says that the stage's last microbatch is done.
Raises ValueError in `finish()` when a parameter got no gradient, and what flat.py refuses.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (P_os); the ancestor is Xu et al. 2020, weight-update
sharding, arXiv:2004.13336, section 3, for which a compiler rewrites the all-reduce. Differs: buckets and overlap, SUM
instead of mean, the master copy belongs to the optimizer (`AdamW(..., master_dtype=torch.float32)`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import Handle, all_gather, reduce_scatter
from minitrain.data_parallel.flat import Flat, Shards, buckets
from minitrain.data_parallel.sync import MakeOptimizer, built, check_trainable, parts_of, sums_alike, together


class Zero1(Shards):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 1

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        make_optimizer: MakeOptimizer,
        bucket_bytes: int = 25_000_000,
    ):
        parts = parts_of(model)
        names = check_trainable(together(parts), model)
        optimizer, early, group_of = built(make_optimizer, names)
        flats = buckets(sums_alike(parts, (group,), group_of), bucket_bytes)
        self.weights: dict[Flat, Tensor] = {}  # the whole parameters, whose storage they share with the model
        self.grads: dict[Flat, Tensor] = {}
        self.place: dict[nn.Parameter, tuple[Flat, Tensor]] = {}
        for flat in flats:
            weights = self.weights[flat] = flat.pack(flat.params)
            grads = self.grads[flat] = torch.zeros_like(weights)
            for param, view, grad in zip(flat.params, flat.views(weights), flat.views(grads)):
                param.data = view
                self.place[param] = flat, grad
                param.register_post_accumulate_grad_hook(self._on_grad)
            flat.cut(flat.own(weights))
        super().__init__(names, flats, optimizer, early, group_of)
        self._arrived = dict.fromkeys(flats, 0)
        self._started: list[Handle] = []

    def _on_grad(self, param: nn.Parameter) -> None:
        """After a backward: the gradient goes to its place, where those of other microbatches add up."""
        if param.grad is not None:  # else W makes it
            self._put(param)
            if self.enabled and not self.driven:
                self._count(param)

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if param in self.place and param.grad is not None:
                self._put(param)
                self._count(param)

    def _put(self, param: nn.Parameter) -> None:
        _, place = self.place[param]
        if param.grad is not place:
            place.copy_(param.grad)
            param.grad = place

    def _count(self, param: nn.Parameter) -> None:
        """This parameter's gradient is complete: start the buckets that are full, in order."""
        self._arrived[self.place[param][0]] += 1
        while len(self._started) < len(self.flats) and self._full(ready := self.flats[len(self._started)]):
            grads = self.grads[ready]
            self._started.append(reduce_scatter(grads, ready.groups[0], out=ready.own(grads), async_op=True))

    def _full(self, flat: Flat) -> bool:
        return self._arrived[flat] == len(flat.params)

    def finish(self) -> None:
        if len(self._started) < len(self.flats):
            raise self.missing(
                param
                for flat in self.flats
                for param in flat.params
                if param.grad is None and not self._full(flat)
            )
        for flat, handle in zip(self.flats, self._started):
            flat.shard.grad = handle.wait()
            self._arrived[flat] = 0
            self.add_copies(flat)
        self._started = []

    def publish(self) -> None:
        """Gather the updated parameters."""
        started = [
            all_gather(flat.shard.detach(), flat.groups[0], out=self.weights[flat], async_op=True)
            for flat in self.flats
        ]
        for handle in started:
            handle.wait()
