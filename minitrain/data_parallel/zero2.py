"""ZeRO stage 2: stage 1, and a rank keeps only the gradients it will use.

    bucket full  ->  reduce_scatter(bucket)  ->  grad shard[P/n]        and the rest of the bucket is freed
    optimizer.step() on the weight shard, all_gather, as in stage 1

Stage 1 reads one slice of every sum and throws the others away at the end of the step. Freed as soon as they are sent,
gradients take P/n and a bucket or two in flight. With Adam in mixed precision 2 + 14/n bytes a parameter.

The price comes with accumulation, and it is the question everyone asks. m microbatches can be added up in two ways:

    accumulate="scatter"   every microbatch is reduce-scattered, shards add up     sends m (n-1)/n of the gradients, holds P/n
    accumulate="keep"      the whole gradient adds up, the last microbatch sends   sends   (n-1)/n of the gradients, holds P

A pipeline has many microbatches and little gradient memory a stage: there stage 1 is the better trade. It runs all the same: a
stage's buckets are sent after each of its backwards (after W, if that is apart), m times (n-1)/n.

Sends that and (n-1)/n of the parameters a step. Memory beside the shards: one bucket being filled, one being sent.
Raises ValueError for another value of `accumulate`, in `finish()` for missing gradients, and what flat.py refuses.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2 (P_os+g). Differs: buckets of equal bytes rather than one
parameter after another, SUM instead of mean; shards of several microbatches add up in the dtype of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import Handle, all_gather, reduce_scatter
from minitrain.data_parallel.flat import Flat, Shards, buckets
from minitrain.data_parallel.sync import MakeOptimizer, built, check_trainable, parts_of, sums_alike, together


class Zero2(Shards):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, zero, zero)."""

    stage = 2

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        make_optimizer: MakeOptimizer,
        bucket_bytes: int = 25_000_000,
        accumulate: str = "scatter",
    ):
        check_accumulate(accumulate)
        self.keep = accumulate == "keep"
        parts = parts_of(model)
        names = check_trainable(together(parts), model)
        optimizer, early, group_of = built(make_optimizer, names)
        flats = buckets(sums_alike(parts, (group,), group_of), bucket_bytes)
        self.weights: dict[Flat, Tensor] = {}
        self.flat_of: dict[nn.Parameter, Flat] = {}
        for flat in flats:
            weights = self.weights[flat] = flat.pack(flat.params)
            for param, view in zip(flat.params, flat.views(weights)):
                param.data = view
                self.flat_of[param] = flat
                param.register_post_accumulate_grad_hook(self._on_grad)
            flat.cut(flat.own(weights))
        super().__init__(names, flats, optimizer, early, group_of)
        self._ready: dict[Flat, int] = dict.fromkeys(flats, 0)
        self._next = 0  # the first bucket that has not been sent in this backward
        self._in_flight: tuple[Flat, Handle] | None = None

    def _on_grad(self, param: nn.Parameter) -> None:
        """This parameter's gradient is complete; send the buckets that are full, in order."""
        if self.driven or self.keep and not self.enabled:
            return
        self._ready[self.flat_of[param]] += 1
        while self._next < len(self.flats) and self._ready[self.flats[self._next]] == len(
            self.flats[self._next].params
        ):
            self._send(self.flats[self._next])
            self._next += 1
        if self._next == len(self.flats):
            self._next, self._ready = 0, dict.fromkeys(self.flats, 0)

    def arrived(self, params: Iterable[nn.Parameter]) -> None:
        if not self.keep:
            self._send_those_of(params)

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        if self.keep:
            self._send_those_of(params)

    def _send_those_of(self, params: Iterable[nn.Parameter]) -> None:
        for flat in dict.fromkeys(
            self.flat_of[param] for param in reversed(list(params)) if param in self.flat_of
        ):
            self._send(flat)

    def _send(self, flat: Flat) -> None:
        """Reduce-scatter a bucket in the background. Its memory is free when the next one is sent."""
        self._settle()
        grads = flat.pack(
            [param.new_zeros(param.shape) if param.grad is None else param.grad for param in flat.params]
        )
        for param in flat.params:
            param.grad = None
        self._in_flight = flat, reduce_scatter(grads, flat.groups[0], async_op=True)

    def _settle(self) -> None:
        """Wait for the bucket in flight and add what came to its shard's gradient."""
        if self._in_flight is not None:
            (flat, handle), self._in_flight = self._in_flight, None
            mine = handle.wait()
            flat.shard.grad = mine if flat.shard.grad is None else flat.shard.grad.add_(mine)

    def finish(self) -> None:
        self._settle()
        if any(self._ready.values()) or any(flat.shard.grad is None for flat in self.flats):
            raise self.missing(
                param
                for flat in self.flats
                for param in flat.params
                if param.grad is None and self._ready[flat] < len(flat.params)
            )
        for flat in self.flats:
            self.add_copies(flat)

    def publish(self) -> None:
        """Gather the updated parameters."""
        started = [
            all_gather(flat.shard.detach(), flat.groups[0], out=self.weights[flat], async_op=True)
            for flat in self.flats
        ]
        for handle in started:
            handle.wait()


def check_accumulate(how: str) -> None:
    if how not in ("scatter", "keep"):
        raise ValueError(
            f"accumulate={how!r}; use 'scatter' (send every microbatch) or 'keep' (hold the whole gradient, send once)"
        )
