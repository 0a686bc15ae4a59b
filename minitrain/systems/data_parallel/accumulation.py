"""To send less often: gradients of m microbatches for one step, or weights after k steps.

    keep      grad += grad_m locally, one reduction            sends 1 x, holds it whole   (no_sync)
    scatter   shard += reduce_scatter(grad_m) each microbatch  sends m x, holds 1/n of it  (ZeRO-2, FSDP)

A rank that owns a slice of the gradient has no room for the rest, so it sends every microbatch: m (n-1)/n
of the gradients' bytes (here). `keep` is `GradReducer.enabled = False` for all but the last microbatch.

    w_rank <- w_rank - lr · g_rank      k times;        w <- (1/n) · sum over ranks of w_rank

With k = 1 and plain SGD this is data parallelism exactly; with k > 1 ranks drift apart between means.
Sends 2(n-1)/(n·k) of the parameters' bytes per step. Memory: the sum of one parameter and its receive buffer.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2. Differs: one flat reduce-scatter per microbatch.
Stich 2019, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767, section 2.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat
from minitrain.data_parallel.naive import trainable_once, with_gradients
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import all_reduce, reduce_scatter


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


class LocalUpdates:
    """`after_step()` follows every optimizer step; each k-th call averages the weights and returns True."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, every: int):
        require_positive_ints(every=every)
        self.params, self.group, self.every, self.steps = trainable_once(params), group, every, 0

    @torch.no_grad()
    def after_step(self) -> bool:
        self.steps += 1
        if self.steps % self.every:
            return False
        for param in self.params:
            param.copy_(all_reduce(param, self.group).div_(self.group.size()))
        return True
