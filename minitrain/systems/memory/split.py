"""Micro-tensors: an operator, or a few of them, run on parts of the batch, so that only one part is large.

    y = split(mlp, x, 4)                                 y = cat(mlp(x_1), .., mlp(x_4)); all it saves stays
    y = split(mlp, x, 4, each=recompute)                 a part keeps x_i; its backward makes the rest again
    y = split(mlp, x, 4, each=Swap(to_host, to_device))  what a part saves is on the host until then

For an x of n rows cut into k parts, with w bytes per row of what is only there while a part is worked on: the
peak falls from n·w to ceil(n/k)·w; nothing else changes but the order of sums in gradients of weights. Each
row must be a matter of its own: products, attention, MLPs and norms over the last dimension, not a norm or
noise over the batch. The parts of a result are there twice while they are joined.
Sends nothing. FLOPs: as `each` says; a kernel runs k times on less, which recompute_front.py charges for.

Nie et al. 2022 (TSPLIT), ICDE'22: splits of operators, with swap or recomputation a micro-tensor. Differs:
along the batch only, chosen by the caller; parts are joined after `run`, so let that be as much as can be.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from minitrain.ranks.torch_private import storage_id


def split(run: Callable[[Tensor], Tensor], x: Tensor, parts: int, each: Callable | None = None) -> Tensor:
    """run(x) by `parts` parts of the rows of x, as even as can be; each part as `each(run, part)`."""
    if not 1 <= parts <= len(x):
        raise ValueError(f"parts = {parts} of {len(x)} rows; use 1 to {len(x)}")
    few, more = divmod(len(x), parts)
    pieces = x.split([few + 1] * more + [few] * (parts - more))
    return torch.cat([each(run, piece) if each else run(piece) for piece in pieces])


class Swap:
    """`Swap(to_host, to_device, stays)(run, x)`: run(x), and what it saves for backward waits on the host.

    `to_host(x)` and `to_device(y, device)` begin copies; `.wait()` gives what they copy. The tensors that
    `stays` names, parameters for instance, are not moved."""

    def __init__(self, to_host: Callable, to_device: Callable, stays: Iterable[Tensor] = ()):
        self.to_host, self.to_device = to_host, to_device
        self.stays = {storage_id(tensor.untyped_storage()) for tensor in stays}

    def __call__(self, run: Callable, *inputs: Tensor):
        with saved_tensors_hooks(self._leave, self._return):
            return run(*inputs)

    def _leave(self, tensor: Tensor):
        if storage_id(tensor.untyped_storage()) in self.stays:
            return tensor
        return tensor.device, self.to_host(tensor).wait()

    def _return(self, kept) -> Tensor:
        return kept if isinstance(kept, Tensor) else self.to_device(kept[1], kept[0]).wait()
