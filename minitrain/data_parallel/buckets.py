"""Buckets: parameters packed into flat buffers of about `bucket_bytes`, started in one order when full.

    pack        [p9, p8, p7, ...]    ->  [p9, p8] [p7] ...    same dtype and device, at most bucket_bytes each
    InOrder     p7 complete, p9, p8  ->  start([p9, p8]), start([p7])

The network matches calls by order, not by name, so buckets start in list order even if a later one is full
first.
Sends nothing. Memory: a GradBucket is the gradients (`param.grad` are views of it).
Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.3.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from minitrain.ranks.checks import require_ints


def kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Equal for tensors that can share one flat buffer."""
    return tensor.dtype, tensor.device


def grouped(items: Iterable, key: Callable = kind) -> dict:
    """{key: the items that have it, in order}."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pack(params: Iterable[nn.Parameter], bucket_bytes: int, key: Callable = kind) -> list[list[nn.Parameter]]:
    """Parameters of equal key in buckets of at most `bucket_bytes`; a larger one has a bucket of its own."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes={bucket_bytes}; a bucket needs at least one byte, say 25_000_000")
    buckets: list[list[nn.Parameter]] = []
    for same in grouped(params, key).values():
        held = None
        for param in same:
            if held is None or held and held + grad_bytes(param) > bucket_bytes:
                buckets.append([])
                held = 0
            buckets[-1].append(param)
            held += grad_bytes(param)
    return buckets


def grad_bytes(param: nn.Parameter) -> int:
    """Of its gradient, which may be of another dtype."""
    return param.numel() * param.grad_dtype.itemsize


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """A new flat buffer with copies of the tensors, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The places of tensors shaped like these in a flat buffer (which may be longer)."""
    numels = [tensor.numel() for tensor in like]
    parts = flat.narrow(0, 0, sum(numels)).split(numels)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like)]


class GradBucket:
    """Parameters whose gradients live in one flat buffer."""

    def __init__(self, params: list[nn.Parameter], padding: int = 0):
        require_ints(padding=padding)
        numel = sum(param.numel() for param in params) + padding
        self.grads = torch.zeros(numel, dtype=params[0].grad_dtype, device=params[0].device)
        self.params, self.place = params, dict(zip(params, views(self.grads, params)))

    def put(self, param: nn.Parameter) -> None:
        """Move `param.grad` to its place, where autograd adds those of later microbatches."""
        if param.grad is not self.place[param]:
            self.place[param].copy_(param.grad)
            param.grad = self.place[param]  # frees what backward allocated


class InOrder:
    """Counts complete gradients, and calls `start(bucket)` for each full bucket, in the order of the list."""

    def __init__(self, buckets: list, start: Callable):
        self.buckets, self.start = buckets, start
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        self.reset()

    def reset(self) -> None:
        self.arrived = {bucket: set() for bucket in self.buckets}
        self.waiting, self.started = deque(self.buckets), set()

    def complete(self, param: nn.Parameter) -> None:
        """ValueError if its bucket is on its way: what is added now would be lost, or sent by some only."""
        bucket = self.bucket_of[param]
        if bucket in self.started:
            raise _grown(param)
        self.arrived[bucket].add(param)
        while self.waiting and self.full(self.waiting[0]):
            self.started.add(bucket := self.waiting.popleft())
            self.start(bucket)

    def full(self, bucket) -> bool:
        return len(self.arrived[bucket]) == len(bucket.params)

    def missing(self) -> list[nn.Parameter]:
        """Parameters without a gradient, of buckets that are not full."""
        params = (param for bucket in self.buckets if not self.full(bucket) for param in bucket.params)
        return [param for param in params if param.grad is None]


def _grown(param: nn.Parameter) -> ValueError:
    case = f"the gradient of a parameter of shape {list(param.shape)} grew after its bucket was sent"
    cure = "give layers that share it one backward, or set enabled=False and call ready(params) at last"
    return ValueError(f"{case}; {cure}")
