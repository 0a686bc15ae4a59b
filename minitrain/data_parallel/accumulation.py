"""Gradient accumulation over ranks: m microbatches, one optimizer step, and two ways to add up.

    keep:      grad += grad_m locally, then one reduction            sends 1 x, holds the whole gradient   (DDP under no_sync)
    scatter:   shard += reduce_scatter(grad_m) every microbatch      sends m x, holds 1/n of the gradient  (ZeRO-2, FSDP)

A rank that owns only a slice of the gradient cannot accumulate the rest, so every microbatch pays for the
network. `keep` is `GradReducer.enabled = False` for all but the last microbatch; here is `scatter`.
Sends m (n-1)/n of the gradients' bytes, against (n-1)/n for one reduce-scatter at the end; memory 1/n of the
gradients.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2. Differs: one flat reduce-scatter a microbatch,
padded to n.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import reduce_scatter
from minitrain.data_parallel.flat import Flat
from minitrain.data_parallel.naive import with_gradients


class ScatteredGradients:
    """This rank's slice of the flat gradient, summed over ranks and microbatches; `add()` after each backward."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup):
        self.params, self.group = list(params), group
        self.shard: Tensor | None = None

    def add(self) -> None:
        """Reduce-scatter what backward left in `.grad`, free it, and add the slice of this rank."""
        params = with_gradients(self.params)
        flat = Flat(params, self.group).pack([param.grad for param in params])
        for param in self.params:
            param.grad = None
        mine = reduce_scatter(flat, self.group)
        self.shard = mine if self.shard is None else self.shard.add_(mine)
