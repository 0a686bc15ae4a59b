"""Data parallelism on a page: whole model everywhere, gradients summed in buckets while backward goes on.

    loss = sum over all tokens / number of tokens in the whole batch         g = sum over ranks of g_rank

Backward makes the last layer's gradients first. So parameters are put into buckets from the last to the
first; a bucket is one flat tensor, and each .grad is a view of it. When a bucket's last gradient has been
written its all-reduce starts, beside the backward of the layers below; only what `finish` waits for is not
hidden. A rank sends 2(n-1)/n of the gradients' bytes per step. Li et al. 2020, PyTorch Distributed,
arXiv:2006.15704, section 3.2. General: bucketed.py (accumulation, pipelines, errors that say what is wrong).
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn


class Buckets:
    """Each step: zero_grad(), one backward through all parameters, finish(), step. Ranks must start equal."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = 25_000_000):
        self.group, self.buckets, self.works = group, [], []
        params: list[nn.Parameter] = []
        for param in reversed(list(model.parameters())):
            params.append(param)
            if sum(one.nbytes for one in params) >= bucket_bytes:
                self.lay_out(params)
                params = []
        if params:
            self.lay_out(params)

    def lay_out(self, params: list[nn.Parameter]) -> None:
        flat = torch.cat([torch.zeros_like(param).flatten() for param in params])
        missing = set(params)  # whose gradients this backward has not made yet
        self.buckets.append((flat, missing, params))
        for param, part in zip(params, flat.split([param.numel() for param in params])):
            param.grad = part.view_as(param)
            param.register_post_accumulate_grad_hook(partial(self.on_gradient, flat, missing))

    def on_gradient(self, flat: torch.Tensor, missing: set[nn.Parameter], param: nn.Parameter) -> None:
        missing.remove(param)
        if not missing:
            self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def finish(self) -> None:
        """All gradients are sums when it returns: how long it takes is what was not hidden."""
        assert not any(missing for _, missing, _ in self.buckets), "a parameter had no gradient"
        for work in self.works:
            work.wait()
        self.works.clear()

    def zero_grad(self) -> None:
        """Instead of the optimizer's, which would let go of the views."""
        for flat, missing, params in self.buckets:
            flat.zero_()
            missing.update(params)
