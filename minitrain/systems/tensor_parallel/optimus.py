"""Tensor parallelism in 2 and 2.5 dimensions: all of a Transformer, activations too, in blocks on grids.

    linear       Y(i, j) = Σ_s X(i, s) · A(s, j) + b(j)     X[B/q, T, D/q]     A = Wᵀ[D/q, F/q]     b[F/q]
    norm         mean and square are sums over the row of the grid, [B/q, T, 1]; weight and bias [D/q]
    attention    rank (i, j) has sequences i and heads j: core, RoPE and ALiBi are local, as is the rest
    depth        d copies of the q×q grid, each with its own part of the batch, X[B/(q·d), T, D/q] (Tesseract)

A linear is summa.py's three products. Modules are cut in place and run their own forward. Groups come as row,
column (and depth): mesh.group("column"), ("row"), ("depth") of Mesh(depth=d, row=q, column=q). Vectors
(biases, norms) are alike on the q ranks of a column, which sum their gradients; with depth those of all
parameters are summed over it. With m = B·T rows, p = q²·d ranks, a linear
sends (q-1)/q² · (m/d · in + in·out) elements forward, twice that backward, 2(d-1)/d · in·out/q² over depth,
and 2(q-1)/q · out/q for a bias' gradient; a norm 2(q-1)/q · m/(q·d) for each sum, two in a LayerNorm, one in
an RMSNorm, each way. Memory: activations 1/p, matrices and their gradients d/p, vectors 1/q; in a linear's
forward two blocks of x and A more and, at the source of A, a copy, as Wᵀ is not contiguous.
Xu et al. 2021, Optimus, arXiv:2104.05343, section 3; Wang et al. 2021, Tesseract, arXiv:2105.14500, section
3; Solomonik and Demmel 2011, Euro-Par, LNCS 6853, who copy both factors and share out the q steps. Differs:
vectors are not broadcast from the first row; embedding and loss stay with the caller; any depth, not d <= q.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks.autograd import custom_vjp, vjp_of_inputs
from minitrain.ranks.collectives import all_reduce, copy_to
from minitrain.ranks.sharding import shard
from minitrain.systems.tensor_parallel.summa import grid_side, summa_nt, summa_overlapped, summa_tn
from minitrain.tensor_parallel.linear import check_whole


def linear_forward(x: Tensor, weight: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """x `[.., m/q, in/q]`, weight `[out/q, in/q]` -> `[.., m/q, out/q]`."""
    return summa_overlapped(x, weight.t(), row_group, column_group)


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor, row_group, column_group) -> tuple[Tensor, Tensor]:
    """dy `[.., m/q, out/q]` -> dx `[.., m/q, in/q]`, dweight `[out/q, in/q]`, summed over all rows."""
    dx = summa_nt(dy, weight.t(), row_group, column_group)
    dweight = summa_tn(x, dy, row_group, column_group).t()
    return dx, dweight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, row_group, column_group) -> Tensor:
    """x `[.., m/q, in/q]`, weight `[out/q, in/q]`, bias `[out/q]` or None -> `[.., m/q, out/q]`."""
    if x.size(-1) != weight.size(1):
        raise ValueError(f"x is {x.size(-1)} wide, not {weight.size(1)} as here; cut it with summa.block")

    forward = lambda x, weight: linear_forward(x, weight, row_group, column_group)
    backward = lambda dys, saved, _: linear_backward(*dys, *saved, row_group, column_group)
    y = vjp_of_inputs(forward, backward, x, weight)
    return y if bias is None else y + copy_to(bias, column_group)


class Linear2D(nn.Module):
    """An nn.Linear, one block of which this rank holds: x `[.., m/q, in/q]` -> `[.., m/q, out/q]`."""

    def __init__(self, linear: nn.Linear, row_group, column_group, depth_group: ProcessGroup | None = None):
        super().__init__()
        check_cut("Linear2D", linear, row_group, column_group, depth_group)
        self.weight = shard(shard(linear.weight, 1, column_group), 0, row_group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, row_group)
        self.row_group, self.column_group, self.depth_group = row_group, column_group, depth_group

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, *over_depth(self, self.depth_group), self.row_group, self.column_group)


def over_depth(module: nn.Module, depth_group: ProcessGroup | None) -> list[Tensor | None]:
    """Weight and bias, used on different rows at each depth: backward sums their gradients over depth."""
    params = [module.weight, module.bias]
    if depth_group is None:
        return params
    return [param if param is None else copy_to(param, depth_group) for param in params]


def norm_forward(x: Tensor, weight: Tensor, eps: float, centred: bool, row_group: ProcessGroup):
    """x `[.., D/q]` -> y = (x - mean) · scale · weight, mean, scale `[.., 1]`. RMSNorm is not `centred`."""
    width = x.size(-1) * row_group.size()
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = exact.new_zeros(*x.shape[:-1], 1)
    if centred:
        mean = all_reduce(exact.sum(-1, keepdim=True), row_group) / width
        exact = exact - mean
    scale = (all_reduce(exact.square().sum(-1, keepdim=True), row_group) / width + eps).rsqrt()
    return (exact * scale * weight).to(x.dtype), mean, scale


def norm_backward(dy, x, weight, mean, scale, centred: bool, row_group: ProcessGroup):
    """With n = (x - mean) · scale and g = dy · weight:  dx = scale · (g - mean(g) - n · mean(g · n)), without
    mean(g) for RMSNorm, and dweight = Σ dy · n over this rank's rows."""
    normed = (x - mean) * scale
    g = dy * weight.to(normed.dtype)
    terms = (g * normed, g) if centred else (g * normed,)
    sums = all_reduce(torch.stack([term.sum(-1, keepdim=True) for term in terms]), row_group)
    mean_gn, *mean_g = sums / (x.size(-1) * row_group.size())
    dx = scale * (g - normed * mean_gn - sum(mean_g))
    return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)


def norm(x, weight, bias, eps: float, centred: bool, row_group, column_group) -> Tensor:
    """LayerNorm (`centred`) or RMSNorm: x `[.., m/q, D/q]`, weight and bias `[D/q]` -> as x."""

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, *statistics = norm_forward(x, weight, eps, centred, row_group)
        return y, (x, weight, *statistics)

    backward = lambda dys, saved, _: norm_backward(*dys, *saved, centred, row_group)
    y = custom_vjp(forward, backward, x, copy_to(weight, column_group))
    return y if bias is None else y + copy_to(bias, column_group)


class Norm2D(nn.Module):
    """An nn.LayerNorm or nn.RMSNorm over a width cut over the row of the grid: x `[.., m/q, D/q]` -> as x."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, row_group, column_group, depth_group=None):
        super().__init__()
        check_cut("Norm2D", norm, row_group, column_group, depth_group)
        bias = getattr(norm, "bias", None)
        self.weight = shard(norm.weight, 0, row_group)
        self.bias = None if bias is None else shard(bias, 0, row_group)
        self.centred = isinstance(norm, nn.LayerNorm)
        self.eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        self.row_group, self.column_group, self.depth_group = row_group, column_group, depth_group

    def forward(self, x: Tensor) -> Tensor:
        params = over_depth(self, self.depth_group)
        return norm(x, *params, self.eps, self.centred, self.row_group, self.column_group)


def check_cut(what: str, module: nn.Module, row_group, column_group, depth_group=None) -> None:
    q = grid_side(*filter(None, (row_group, column_group, depth_group)))
    check_whole(what, module)
    for name, param in module.named_parameters():
        if wrong := [size for size in param.shape if size % q]:
            raise ValueError(f"{what}: {wrong[0]} of {name} is not a multiple of q={q}; choose others")


# ---- the layers of a Transformer, in place; `groups`: row, column (and depth)


def cut_block(block: nn.Module, *groups: ProcessGroup) -> None:
    """norm1, attention, norm2, mlp: block(x, positions) takes and gives `[B/q, T, D/q]`; positions `[T]`."""
    p = max((part.p for part in block.modules() if isinstance(part, nn.Dropout)), default=0)
    if p:
        raise ValueError(f"dropout={p}: ranks would have to draw the blocks of one mask; set it to 0")
    cut_attention(block.attention, *groups)
    cut_mlp(block.mlp, *groups)
    block.norm1, block.norm2 = Norm2D(block.norm1, *groups), Norm2D(block.norm2, *groups)


def cut_attention(attention: nn.Module, *groups: ProcessGroup) -> None:
    """q, k, v and out; a rank has 1/q of the heads, and of ALiBi's slopes. `[B/q, T, D/q]` -> the same."""
    what, matrices = type(attention).__name__, ("q", "k", "v", "out")
    if missing := [name for name in matrices if not hasattr(attention, name)]:
        raise ValueError(f"{what} has no {', '.join(missing)}; a grid cuts plain attention (kv_latent=0)")
    check_whole(what, attention)
    q = groups[0].size()
    for name in ("q", "k"):
        heads = getattr(attention, name).out_features // attention.config.head_dim
        if heads % q:
            raise ValueError(f"attention.{name}: {heads} heads are not a multiple of q={q}; choose others")
    for name in matrices:
        setattr(attention, name, Linear2D(getattr(attention, name), *groups))
    if hasattr(attention, "slopes"):
        attention.slopes = shard(attention.slopes, 0, groups[0])


def cut_mlp(mlp: nn.Module, *groups: ProcessGroup) -> None:
    """up, gate (if there is one) and down. `[B/q, T, D/q]` -> the same; between them `[B/q, T, F/q]`."""
    check_whole(type(mlp).__name__, mlp)
    for name in ("up", "gate", "down"):
        if hasattr(mlp, name):
            setattr(mlp, name, Linear2D(getattr(mlp, name), *groups))
