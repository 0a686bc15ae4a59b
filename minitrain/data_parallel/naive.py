"""Data parallelism, the plain way: after backward, add up every gradient over the ranks.

    loss = sum over all tokens of the batch / number of valid tokens in the batch          one divisor, known before backward
    grad = sum over ranks of grad_rank                                                      so the reduction is a SUM, never a mean

Every rank holds the whole model and its own part of the batch. Nothing overlaps: the network is idle during backward and the
processor during communication; `bucketed.py` cures both.
Sends 2(n-1)/n of the gradients' bytes a step (one all-reduce a parameter, or one in all if `fused`).
Memory: `fused` holds one more copy of all gradients while it runs (6 GB in fp32 for 1.5 billion parameters: ZeRO, section 3.2).
Raises ValueError if a parameter got no gradient on this rank: elsewhere it may have got one, and the ranks would no longer agree.
Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.1. Differs: SUM instead of a mean of means.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.collectives import all_reduce


def all_reduce_gradients(params: Iterable[nn.Parameter], group: ProcessGroup, *, fused: bool = False) -> None:
    """Replace every gradient by its sum over `group`; with `fused`, through one flat buffer per dtype and device."""
    params = with_gradients(params)
    if not fused:
        for param in params:
            all_reduce(param.grad, group, out=param.grad)
        return
    for same in by_kind(params):
        flat = torch.cat([param.grad.reshape(-1) for param in same])
        all_reduce(flat, group, out=flat)
        for param, part in zip(same, flat.split([param.numel() for param in same])):
            param.grad.copy_(part.view_as(param))


def with_gradients(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable parameters, each once (tied weights are one parameter); all must have a gradient."""
    trainable = trainable_once(params)
    missing = [position for position, param in enumerate(trainable) if param.grad is None]
    if missing:
        shapes = ", ".join(str(tuple(trainable[position].shape)) for position in missing[:3])
        raise ValueError(
            f"{len(missing)} of {len(trainable)} parameters got no gradient (the first: number {missing[0]}, shape {shapes}); "
            f"use every parameter in the loss on every rank, or freeze it with requires_grad_(False)"
        )
    return trainable


def trainable_once(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that ask for a gradient, in order, without repetition. Raises ValueError when there is none."""
    trainable = list({id(param): param for param in params if param.requires_grad}.values())
    if not trainable:
        raise ValueError(
            "no parameter asks for a gradient; give model.parameters() with requires_grad=True somewhere"
        )
    return trainable


def by_kind(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that can share one flat buffer: same dtype, same device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())
