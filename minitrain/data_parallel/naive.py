"""Data parallelism, the plain way: after backward, add up every gradient over the ranks.

    loss = sum over all tokens of the batch / number of valid tokens in it  one divisor, known before backward
    grad = sum over ranks of grad_rank                                      so the reduction is a SUM, no mean

Every rank holds the whole model and its own rows of the batch. Nothing overlaps; `bucketed.py` does.
Sends 2(n-1)/n of the gradients' bytes per step (one all-reduce per parameter, or one in all if `fused`).
Memory: `fused` holds one more copy of all gradients (6 GB in fp32 for 1.5 billion parameters: ZeRO, 3.2).
Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.1. Differs: SUM instead of a mean of means.
"""

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, kind, views
from minitrain.ranks.collectives import all_reduce


def all_reduce_gradients(params: Iterable[nn.Parameter], group: ProcessGroup, *, fused: bool = False) -> None:
    """Replace every gradient by its sum over `group`; with `fused`, through one buffer per dtype."""
    params = with_gradients(params)
    if not fused:
        for param in params:
            all_reduce(param.grad, group, out=param.grad)
        return
    for same in grouped(params, kind).values():
        flat = flatten(param.grad for param in same)
        all_reduce(flat, group, out=flat)
        for param, part in zip(same, views(flat, same)):
            param.grad.copy_(part)


def grouped(items: Iterable, key: Callable) -> dict:
    """{key: the items that have it, in order}."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def with_gradients(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The trainable parameters, each once (tied weights are one parameter); all must have a gradient."""
    trainable = trainable_once(params)
    if missing := [tuple(param.shape) for param in trainable if param.grad is None]:
        some = f"{len(missing)} of {len(trainable)} parameters got no gradient (shapes {missing[:3]})"
        raise ValueError(f"{some}; use all in the loss on every rank, or freeze them")
    return trainable


def trainable_once(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that ask for a gradient, in order, without repetition; there must be one."""
    trainable = list(dict.fromkeys(param for param in params if param.requires_grad))
    if not trainable:
        raise ValueError("no parameter asks for a gradient; set requires_grad=True on some of them")
    return trainable
