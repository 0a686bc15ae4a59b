"""Gradient accumulation over ranks: m microbatches, one optimizer step, and two ways to add up.

    keep      grad += grad_m locally, one reduction            sends 1 x, holds it whole   (no_sync)
    scatter   shard += reduce_scatter(grad_m) each microbatch  sends m x, holds 1/n of it  (ZeRO-2, FSDP)

A rank that owns a slice of the gradient has no room for the rest, so it sends every microbatch: m (n-1)/n
of the gradients' bytes. `keep` is `GradReducer.enabled = False` for all but the last microbatch; here is
`scatter`.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2. Differs: one flat reduce-scatter per microbatch.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat
from minitrain.data_parallel.naive import with_gradients
from minitrain.ranks.collectives import reduce_scatter


class ScatteredGradients:
    """This rank's slice of the flat gradient, summed over ranks and microbatches."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup):
        self.params, self.group = list(params), group
        self.shard: Tensor | None = None

    def add(self) -> None:
        """After each backward: reduce-scatter what it left in `.grad`, free that, add this rank's slice."""
        params = with_gradients(self.params)
        flat = Flat(params, self.group).pack([param.grad for param in params])
        for param in self.params:
            param.grad = None
        mine = reduce_scatter(flat, self.group)
        self.shard = mine if self.shard is None else self.shard.add_(mine)
