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
Raises ValueError in `finish()` when a parameter got no gradient, and what flat.py refuses.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (P_os); the ancestor is Xu et al. 2020, weight-update
sharding, arXiv:2004.13336, section 3, for which a compiler rewrites the all-reduce. Differs: buckets and overlap, SUM
instead of mean, the master copy belongs to the optimizer (`AdamW(..., master_dtype=torch.float32)`).
"""
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import Handle, all_gather, reduce_scatter
from minitrain.data_parallel.flat import Flat, MakeOptimizer, Shards, buckets, named_once


class Zero1(Shards):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 1

    def __init__(self, model: nn.Module, group: ProcessGroup, make_optimizer: MakeOptimizer, bucket_bytes: int = 25_000_000):
        names = named_once(model)
        flats = buckets(names, group, bucket_bytes)
        self.weights: dict[Flat, Tensor] = {}  # the whole parameters, whose storage they share with the model
        self.grads: dict[Flat, Tensor] = {}
        self.place: dict[nn.Parameter, tuple[Flat, Tensor]] = {}
        for flat in flats:
            weights = self.weights[flat] = flat.pack(flat.params)
            grads = self.grads[flat] = torch.zeros_like(weights)
            for param, view, grad in zip(flat.params, flat.views(weights), flat.views(grads)):
                param.data = view
                self.place[param] = flat, grad
                param.register_post_accumulate_grad_hook(self._on_ready)
            flat.cut(flat.own(weights))
        super().__init__(flats, names, make_optimizer)
        self.group = group
        self._arrived = dict.fromkeys(flats, 0)
        self._started: list[Handle] = []

    def _on_ready(self, param: nn.Parameter) -> None:
        """This parameter's gradient is complete: put it into its place, start the buckets that are full, in order."""
        flat, place = self.place[param]
        if param.grad is not place:
            place.copy_(param.grad)
            param.grad = place
        if not self.enabled:
            return
        self._arrived[flat] += 1
        while len(self._started) < len(self.flats) and self._full(ready := self.flats[len(self._started)]):
            grads = self.grads[ready]
            self._started.append(reduce_scatter(grads, self.group, out=ready.own(grads), async_op=True))

    def _full(self, flat: Flat) -> bool:
        return self._arrived[flat] == len(flat.params)

    def finish(self) -> None:
        """Every shard has its gradient, summed over the group."""
        if len(self._started) < len(self.flats):
            missing = [self.names[param] for flat in self.flats for param in flat.params
                       if param.grad is None and not self._full(flat)]
            raise ValueError(f"no gradient for {', '.join(missing[:3])}; use every parameter in the loss on every rank, freeze it "
                             f"with requires_grad_(False), or set enabled=True before the last backward")
        for flat, handle in zip(self.flats, self._started):
            flat.shard.grad = handle.wait()
            self._arrived[flat] = 0
        self._started = []

    def step(self) -> None:
        """Update the shards, then gather the parameters."""
        self.optimizer.step()
        self.publish()

    def publish(self) -> None:
        started = [all_gather(flat.shard.detach(), self.group, out=self.weights[flat], async_op=True) for flat in self.flats]
        for handle in started:
            handle.wait()
