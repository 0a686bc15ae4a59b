"""Flat buffers: parameters packed into buckets, which divide by the ranks and are sent in one order.

    pack        [p9, p8, p7, ...]    ->  [p9, p8] [p7] ...    same dtype and device, at most bucket_bytes each
    InOrder     p7 complete, p9, p8  ->  start([p9, p8]), start([p7])
    Flat        W1[F, D]  b1[F]  W2[D, F]  ->  whole[P] = W1 | b1 | W2 | padding    P = the next multiple of n
                                               shard[P/n] = whole[rank P/n : (rank+1) P/n]

The network matches calls by order, not by name, so a bucket waits for those before it in the list. A shard is
cut wherever n says, in the middle of a matrix if it must: an optimizer works on elements. Padding costs at
most n-1 elements per buffer. Sends nothing. Memory: `param.grad` are views of a GradBucket.
Li et al. 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.3; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.3. FSDP2 cuts every parameter along dim 0 and copies into and out of the buffer.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.ranks.sharding import Placement, Shard, placement


def kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Equal for tensors that can share one flat buffer."""
    return tensor.dtype, tensor.device


def pack(params: Iterable[nn.Parameter], bucket_bytes: int, key=kind) -> list[list[nn.Parameter]]:
    """Parameters of equal key in buckets of at most `bucket_bytes` (or one larger one), first full first."""
    require_positive_ints(10**18, bucket_bytes=bucket_bytes)
    buckets: list[list[nn.Parameter]] = []
    last: dict = {}  # of each key: a bucket, and the bytes left in it
    params = list(params)
    place = {param: number for number, param in enumerate(params)}
    for param in params:
        size = param.numel() * param.grad_dtype.itemsize
        bucket, room = last.get(key(param), ([], -1))
        if size > room:
            bucket, room = [], bucket_bytes
            buckets.append(bucket)
        bucket.append(param)
        last[key(param)] = bucket, room - size
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The places of tensors shaped like these in a flat buffer (which may be longer)."""
    numels = [tensor.numel() for tensor in like]
    parts = flat.narrow(0, 0, sum(numels)).split(numels)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like)]


class Flat:
    """The layout of parameters in one padded buffer, cut over groups, one inside the other."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        self.params, self.groups = params, groups
        *starts, numel = accumulate((param.numel() for param in params), initial=0)
        self.start_of = dict(zip(params, starts))
        self.padding = -numel % math.prod(group.size() for group in groups)
        self.numel = numel + self.padding
        self.shard, self.cuts = params[0], ()  # for an optimizer; of one parameter, nothing is cut yet

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """A new flat buffer [P] with copies of tensors shaped like the parameters."""
        return flatten([*tensors, tensors[0].new_zeros(self.padding)])

    def local_shard(self, flat: Tensor, cuts: slice = slice(None)) -> Tensor:
        """This rank's slice of a flat buffer: [P/n] if all groups cut it, or those in `cuts` only."""
        for group in self.groups[cuts]:
            size = flat.numel() // group.size()
            flat = flat.narrow(0, group.rank() * size, size)
        return flat

    def cut(self, local: Tensor, cuts: slice = slice(None)) -> None:
        """Make this rank's slice the shard: a parameter for the optimizer."""
        self.cuts, at = tuple(Shard(0, group) for group in self.groups[cuts]), placement(self.params[0])
        self.shard = nn.Parameter(local.detach(), requires_grad=self.params[0].requires_grad)
        self.shard.grad_dtype = self.params[0].grad_dtype
        self.shard.placement = Placement(self.cuts, at.summed_over, at.copies, at.cut_over)


class GradBucket:
    """Parameters whose gradients are views of one flat buffer."""

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
    """Counts complete gradients, and starts the sum of each full bucket, in the order of the list.

    `start(bucket)` gives a handle, and `on_sum(bucket, sum)` gets what came back."""

    def __init__(self, buckets: list, start: Callable, on_sum: Callable):
        self.buckets, self.start, self.on_sum = buckets, start, on_sum
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        self.under_way: deque[tuple] = deque()
        self.reset()

    def reset(self) -> None:
        self.completed = {bucket: set() for bucket in self.buckets}
        self.waiting = deque(self.buckets)

    def complete(self, param: nn.Parameter) -> None:
        """ValueError if its bucket is in flight: what is added now would be lost, or sent by some ranks."""
        bucket = self.bucket_of[param]
        if bucket not in self.waiting:
            cure = "give layers that share it one backward, or call on_step_grads(params) with enabled=False"
            raise ValueError(f"a gradient {list(param.shape)} grew after its bucket was sent; {cure}")
        self.completed[bucket].add(param)
        while self.waiting and self.is_full(self.waiting[0]):
            self.send(self.waiting.popleft())

    def incomplete(self) -> list[nn.Parameter]:
        """What no backward has told of: with a gradient of microbatches before, or with none."""
        return [p for bucket in self.waiting for p in bucket.params if p not in self.completed[bucket]]

    def is_full(self, bucket) -> bool:
        return len(self.completed[bucket]) == len(bucket.params)

    def send(self, bucket) -> None:
        self.under_way.append((bucket, self.start(bucket)))

    def settle(self) -> None:
        bucket, handle = self.under_way.popleft()
        self.on_sum(bucket, handle.wait())
