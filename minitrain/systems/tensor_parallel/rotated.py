"""Rotated tensor parallelism: each rank keeps its own batch, pieces of weights travel round the ring.

    Y_r[m, n] = X_r[m, k] · Wᵀ       rank r has rows X_r of its own and one shard W_r[n/p, k] of the matrix
    step t = 0 .. p-1   rank r holds W_s, s = r - t mod p    Y_r[:, s] = X_r · W_sᵀ       W_s goes to rank r+1
    backward            the weights pass once more,          dX_r += dY_r[:, s] · W_s
                        and every shard's gradient,          dW_s += dY_r[:, s]ᵀ · X_r    dW_s goes on, too

This is data parallelism: a shard's gradient comes home summed over all batches. dW_s needs no weight, so it
runs one step ahead of W_s and is at home after p-1 hops. Activations are whole in their width.

                     forward sends     backward sends          shards of the weight held, kn/p each
    with prefetch    (p-1)/p · kn      2(p-1)/p · kn           own, in use, arriving: 3 (2 if p = 2)
    in place         kn                kn + (p-1)/p · kn       own, and one piece of `PIECE_BYTES`

In place, nothing overlaps and a shard takes one hop more to be itself after each pass. A bias b[n/p] is
all-gathered, (p-1)/p · n, its gradient reduce-scattered. Batches may differ in size; layers run in one order.
Luo et al. 2023, RTP, arXiv:2311.01635, section 3. Differs: their weights stay where forward left them and
backward turns the other way; they receive whole shards; biases travel.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks.collectives import all_gather, reduce_scatter, rotate
from minitrain.ranks.sharding import shard
from minitrain.tensor_parallel.linear import check_whole, linear_vjp

PIECE_BYTES = 2**20  # of a shard on its way in place


def rotated_forward(x: Tensor, weight: Tensor, bias, group: ProcessGroup, in_place=False) -> Tensor:
    """x `[m, k]`, this rank's rows; its shards weight `[n/p, k]`, bias `[n/p]` or None -> y `[m, n]`."""
    width = weight.size(0)
    y = x.new_empty(x.size(0), width * group.size())
    for owner, held in passing(weight, group, in_place):
        y.narrow(1, owner * width, width).copy_(x @ held.T)
        del held  # or it would live while the next but one arrives
    return y if bias is None else y.add_(all_gather(bias, group))


def rotated_backward(dy, x: Tensor, weight: Tensor, bias, group: ProcessGroup, in_place: bool = False):
    """dy `[m, n]` -> dx `[m, k]` of this rank, dweight `[n/p, k]` and dbias `[n/p]` of all ranks."""
    rank, blocks = group.rank(), dy.chunk(group.size(), dim=1)
    dx, dweight, arriving = torch.zeros_like(x), torch.zeros_like(weight) if in_place else None, None
    for owner, held in passing(weight, group, in_place):
        dx.addmm_(blocks[owner], held)
        del held
        ahead = (owner - 1) % group.size()  # the owner of the gradient that is here now
        if in_place:
            dweight.addmm_(blocks[ahead].T, x)
            if ahead != rank:
                move(dweight, group)
        else:
            part = blocks[ahead].T @ x  # while the sum of the others is on its way
            dweight = part if arriving is None else part.add_(arriving.wait())
            arriving = rotate(dweight, group, async_op=True) if ahead != rank else None
    return dx, dweight, None if bias is None else reduce_scatter(dy.sum(0), group)


def passing(weight: Tensor, group: ProcessGroup, in_place: bool) -> Iterator[tuple[int, Tensor]]:
    """Every rank's shard in turn, its own first, and the owner. In place `weight` itself is yielded."""
    ranks, held = group.size(), weight.detach()
    for step in range(ranks):
        next_one = rotate(held, group, async_op=True) if step < ranks - 1 and not in_place else None
        yield (group.rank() - step) % ranks, held
        if in_place:
            move(weight, group)
        elif next_one is not None:
            held = next_one.wait()


def move(tensor: Tensor, group: ProcessGroup) -> None:
    """Replaces a contiguous tensor by that of the rank before, in pieces. Autograd is not told (`.data`)."""
    for piece in tensor.data.view(-1).split(max(1, PIECE_BYTES // tensor.element_size())):
        piece.copy_(rotate(piece, group))


class RotatedLinear(nn.Module):
    """An nn.Linear cut along its output: x `[.., k]`, of this rank's batch -> y `[.., n]`, both whole."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, in_place: bool = False):
        super().__init__()
        check_whole("RotatedLinear", linear)
        self.group, self.in_place = group, in_place
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.size(1)
        if x.dim() < 2 or x.size(-1) != width:
            raise ValueError(f"RotatedLinear: x {list(x.shape)}, but the layer takes [.., {width}], uncut")
        way = dict(group=self.group, in_place=self.in_place)
        passes = partial(rotated_forward, **way), partial(rotated_backward, **way)
        return linear_vjp(x, self.weight, self.bias, *passes)


def rotate_linears(module: nn.Module, group: ProcessGroup, in_place: bool = False) -> nn.Module:
    """Replaces every nn.Linear in the module. All else stays whole, and the caller sums its gradients."""
    what, children = type(module).__name__, module.named_modules(remove_duplicate=False)
    found = [(name, child) for name, child in children if name and isinstance(child, nn.Linear)]
    if not found:
        raise ValueError(f"{what} has no nn.Linear inside; is it rotated already?")
    if len({linear.weight for _, linear in found}) < len(found):
        raise ValueError(f"{what}: two layers use one weight, and would get two; keep one of them out")
    for name, linear in found:
        module.set_submodule(name, RotatedLinear(linear, group, in_place))
    return module
