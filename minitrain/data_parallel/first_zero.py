"""ZeRO on a page: n ranks share a layer's parameters, gradients and optimizer states, each has 1/n of them.

    stage   whole on each rank     all-gather of the weights             reduce-scatter of the gradients
      1     weights, gradients     before a forward                      after backward
      2     weights                before a forward                      as soon as the layer has them
      3     nothing                before a forward and a backward       as soon as the layer has them

A layer's parameters are views of one flat buffer, of which each rank owns a piece, the only thing that the
optimizer sees. Stage 3 frees the buffer's memory after use; in backward what autograd has saved of it lies
there again. A rank sends 2(n-1)/n of the parameters' bytes, in stage 3 3(n-1)/n. Rajbhandari et al. 2020,
ZeRO, arXiv:1910.02054, sections 5 and 7. General: zero1, zero2, zero3.py (overlap, tied weights, clipping).
"""

import torch
import torch.distributed as dist
from torch import nn


class Shared:
    """A layer of one output, whose parameters are all used. The optimizer gets the `shard`s, no others."""

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, stage: int):
        self.group, self.stage, self.params = group, stage, list(layer.parameters())
        flat = torch.cat([param.detach().flatten() for param in self.params])
        self.padding = -len(flat) % group.size()
        self.flat = nn.functional.pad(flat, (0, self.padding))
        self.pieces, self.bytes = list(self.flat.chunk(group.size())), self.flat.nbytes
        self.shard = nn.Parameter(self.pieces[group.rank()].clone())
        parts = self.flat.split([*(param.numel() for param in self.params), self.padding])
        for param, part in zip(self.params, parts):
            param.data = part.view_as(param)
            param.register_post_accumulate_grad_hook(self.on_gradient)
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(self.after_forward)

    def gather(self) -> None:
        self.flat.untyped_storage().resize_(self.bytes)
        dist.all_gather(self.pieces, self.shard.detach(), group=self.group)

    def after_forward(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if self.stage == 3:
            self.flat.untyped_storage().resize_(0)
            if output.requires_grad:  # its gradient comes when the layer's backward begins
                output.register_hook(lambda _: self.gather())

    def on_gradient(self, _: nn.Parameter) -> None:
        if self.stage > 1 and all(param.grad is not None for param in self.params):
            self.finish()

    def finish(self) -> None:
        """After loss.backward(): the shard's gradient is the sum over ranks, and no other is left."""
        if self.params[0].grad is not None:
            flat = torch.cat([param.grad.flatten() for param in self.params])
            pieces = nn.functional.pad(flat, (0, self.padding)).chunk(self.group.size())
            dist.reduce_scatter(mine := torch.empty_like(self.shard), list(pieces), group=self.group)
            self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
            for param in self.params:
                param.grad = None
            self.flat.untyped_storage().resize_(0 if self.stage == 3 else self.bytes)
