"""Rotated tensor parallelism: every rank keeps its own batch, and the pieces of the weights travel round the ring.

    Y_r[m, n] = X_r[m, k] · Wᵀ        rank r has rows X_r of its own and one shard W_r[n/p, k] of the matrix (dim 0)

    step t = 0 .. p-1     rank r holds W_s, s = r - t mod p     Y_r[:, s] = X_r · W_sᵀ         W_s goes on to rank r+1

    backward              the weights pass once more,           dX_r += dY_r[:, s] · W_s
                          and every shard's gradient,           dW_s += dY_r[:, s]ᵀ · X_r      dW_s goes on to rank r+1

After p steps each rank has multiplied with the whole matrix and never held it. This is data parallelism: what comes home
to the owner of W_s is the gradient summed over the batches of all ranks, and there is no all-reduce. A gradient needs
no weight, only dY and X, so dW_s runs one step ahead of its W_s: begun on rank s+1, it is finished at home after p-1 hops.

Whole in their width, activations need no partner: heads, norms and activations are computed as on one process.

                         forward sends     backward sends                        weights held, of size kn/p each
    with prefetch        (p-1)/p · kn      2(p-1)/p · kn                         own, in use, arriving: 3 (2 if p = 2)
    in place             kn                kn + (p-1)/p · kn                     own, and one piece of `PIECE_BYTES`

With prefetch, the next shard is on its way while the product with this one runs, and the gradient as well: in flight, one
is sent, one arrives, one is computed, 3 shards. In place, a shard is replaced by its neighbour's piece by piece, in the
memory of the parameter, and comes home with one hop more; so does a gradient, one shard. Nothing can overlap then. That one
hop lets the parameter be itself again whenever a forward or a backward is over: for a second microbatch, an evaluation, a
recomputation, a checkpoint. A bias b[n/p] does not travel: it is all-gathered, (p-1)/p · n, and its gradient reduce-scattered.

A gradient in bfloat16 is rounded at every hop. Ranks may have batches of different sizes. All must run
the same layers in the same order, forward and backward.
Raises ValueError in one line, before any rank waits, for out_features that are not a multiple of p, a weight that is cut
already or used by two layers, a module without an nn.Linear, and an input of another width.
Luo et al. 2023, RTP, arXiv:2311.01635, section 3 (rotation; in-place and out-of-place). Differs: the authors' weights
stay where forward left them and backward turns the ring the other way, weight and gradient together, which saves the last hop
of each pass in place; they receive a whole shard even so (github.com/wdlctc/rtp, ParallelRegion_inplace), and have two with
prefetch. Their biases travel.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.collectives import all_gather, reduce_scatter, rotate
from minitrain.sharding import placement, shard

PIECE_BYTES = 2**20  # of a shard on its way in place


# ---- the product -----------------------------------------------------------------------------------------------------


def rotated_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, in_place: bool = False
) -> Tensor:
    """x `[m, k]`, this rank's rows; weight `[n/p, k]`, bias `[n/p]` or None, this rank's shards -> y `[m, n]`."""
    width = weight.size(0)
    y = x.new_empty(x.size(0), width * group.size())
    for owner, held in passing(weight, group, in_place):
        y.narrow(1, owner * width, width).copy_(x @ held.T)
        del held  # or it would live while the next but one arrives
    return y if bias is None else y.add_(all_gather(bias, group))


def rotated_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dy `[m, n]`, the others as above -> dx `[m, k]` of this rank, dweight `[n/p, k]` and dbias `[n/p]` of all ranks."""
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
    """Every rank's shard in turn, the own one first, and whose it is. In place it is always `weight` that is yielded."""
    ranks, held = group.size(), weight.detach()
    for step in range(ranks):
        next_one = rotate(held, group, async_op=True) if step < ranks - 1 and not in_place else None
        yield (group.rank() - step) % ranks, held
        if in_place:
            move(weight, group)
        elif next_one is not None:
            held = next_one.wait()


def move(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace a contiguous tensor by that of the rank before, a piece at a time: no second one is ever held.

    Autograd is not told (`.data`): whenever it will look, the tensor is as it was.
    """
    for piece in tensor.data.view(-1).split(max(1, PIECE_BYTES // tensor.element_size())):
        piece.copy_(rotate(piece, group))


class _Rotated(torch.autograd.Function):
    """The pair above for x of any number of dims."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, in_place: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = group, in_place
        return rotated_forward(x.flatten(0, -2), weight, bias, *ctx.how).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = rotated_backward(dy.flatten(0, -2), x.flatten(0, -2), weight, bias, *ctx.how)
        return dx.view_as(x), dweight, dbias, None, None


# ---- layers ----------------------------------------------------------------------------------------------------------


class RotatedLinear(nn.Module):
    """An nn.Linear cut along its output: x `[.., k]`, whole and of this rank's batch -> y `[.., n]`, as from the whole layer."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup, in_place: bool = False):
        super().__init__()
        check_linear("RotatedLinear", linear, group)
        self.group, self.in_place = group, in_place
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.size(-1) != self.weight.size(1):
            raise ValueError(
                f"RotatedLinear: x {list(x.shape)}, but the layer takes [.., {self.weight.size(1)}], the whole width; "
                f"only weights are cut"
            )
        return _Rotated.apply(x, self.weight, self.bias, self.group, self.in_place)


def rotate_linears(module: nn.Module, group: ProcessGroup, in_place: bool = False) -> nn.Module:
    """The same module with every nn.Linear in it replaced: up, gate and down of an MLP; q, k, v and out of attention.

    What is not a linear (a norm, a table) stays whole on every rank, and its gradient is the caller's to sum over the group.
    """
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    if not found:
        raise ValueError(f"{type(module).__name__} has no nn.Linear inside; is it rotated already?")
    for _, name, linear in found:
        check_linear(name, linear, group)
    if len({linear.weight for _, _, linear in found}) < len(found):
        raise ValueError(
            f"{type(module).__name__}: two layers use one weight, and would get two; keep one of them out"
        )
    for parent, name, linear in found:
        setattr(parent, name, RotatedLinear(linear, group, in_place))
    return module


def check_linear(what: str, linear: nn.Linear, group: ProcessGroup) -> None:
    for cut in placement(linear.weight).shards:
        raise ValueError(
            f"{what}: the weight is cut already, along dim {cut.dim} over {collectives.axis_of(cut.group)}; pass the "
            f"whole nn.Linear"
        )
    if linear.out_features % group.size():
        raise ValueError(
            f"{what}: out_features = {linear.out_features} is not a multiple of the {group.size()} ranks of "
            f"{collectives.axis_of(group)}; pad it to {-(-linear.out_features // group.size()) * group.size()}, or "
            f"take fewer ranks"
        )
