"""Tensor parallelism in two dimensions: every matrix of a Transformer, activations too, lies in blocks on a q×q grid.

    linear       Y(i, j) = Σ_s X(i, s) · A(s, j) + b(j)      X[B/q, T, D/q]      A = Wᵀ, block [D/q, F/q]      b[F/q]
    norm         mean and square are sums over the row of the grid, [B/q, T, 1]; weight and bias [D/q]
    attention    rank (i, j) has sequences i and heads j: the core, RoPE and ALiBi are local
    MLP          the activation and the gate work on elements: local, as is the residual

Grid row i holds 1/q of the batch, grid column j holds 1/q of the width. A linear is one product of summa.py forward, in which
the next step's blocks travel behind the present multiplication, and the two others backward. `row_group` is the q ranks of my
grid row, which differ in their column: mesh.group("column") of Mesh(row=q, column=q); `column_group` is mesh.group("row").
Modules are cut in place and run their own forward; a layer counts its heads in the width it finds. `block` and `whole` of
summa.py cut activations and put them together.

Weights keep torch's layout W[out, in], cut so that Wᵀ is the block: dim 1 over the grid's rows, dim 0 over its columns.
Vectors, biases and the weights of norms, are cut over the columns of the grid and alike on the q ranks of a column,
where their gradients are summed: so a bias is added exactly once to every element.

With m = B·T rows a linear sends (q-1)/q² · (m·in + in·out) elements forward, twice that backward, and 2(q-1)/q · out/q
for the gradient of a bias; a norm sends 2(q-1)/q · m/q for each sum, two in a LayerNorm and one in an RMSNorm, each way.
Memory with p = q² ranks: matrices, their gradients and all activations 1/p, vectors 1/q; for a moment, in the forward of a
linear, two blocks of x and two of A besides, this step's and the next's, and a copy of its own which the source of A makes,
since Wᵀ is no consecutive memory. In one dimension (linear.py) the weights are 1/p as well, but each rank holds the input of
every linear, B·T·D, as a whole.
Raises ValueError, before any rank waits, for a grid that summa.py refuses, widths that are not a multiple of q, heads
that cannot be dealt to the columns, dropout, an attention without q, k and v, a layer that is cut already, and an input
of another width.

Xu et al. 2021, Optimus, arXiv:2104.05343, section 3. Differs: the paper keeps a vector on the first row of the grid
and broadcasts it at each use; embedding and loss, which it cuts too, stay with the caller; nothing is recomputed and no
memory is reserved beforehand.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.collectives import all_reduce, copy_to
from minitrain.sharding import shard
from minitrain.tensor_parallel.grids.summa import check_whole, grid_side, summa_nt, summa_overlapped, summa_tn

# ---- linear ----------------------------------------------------------------------------------------------------------


def linear_forward(x: Tensor, weight: Tensor, row_group: ProcessGroup, column_group: ProcessGroup) -> Tensor:
    """x `[.., m/q, in/q]`, weight `[out/q, in/q]` -> `[.., m/q, out/q]`."""
    return summa_overlapped(x, weight.t(), row_group, column_group)


def linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, row_group: ProcessGroup, column_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """dy `[.., m/q, out/q]` -> dx `[.., m/q, in/q]`, dweight `[out/q, in/q]`, summed over all rows."""
    dx = summa_nt(dy, weight.t(), row_group, column_group)
    dweight = summa_tn(x, dy, row_group, column_group).t()
    return dx, dweight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, row_group: ProcessGroup, column_group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = row_group, column_group
        return linear_forward(x, weight, row_group, column_group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        return *linear_backward(dy, *ctx.saved_tensors, *ctx.groups), None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, row_group: ProcessGroup, column_group: ProcessGroup
) -> Tensor:
    """Differentiable: x `[.., m/q, in/q]`, weight `[out/q, in/q]`, bias `[out/q]` or None -> `[.., m/q, out/q]`."""
    if x.size(-1) != weight.size(1):
        raise ValueError(
            f"the input is {x.size(-1)} wide, but this rank's block of the weight takes {weight.size(1)}: "
            f"1/{row_group.size()} of the width; cut it with summa.block"
        )
    y = _Linear.apply(x, weight, row_group, column_group)
    return y if bias is None else y + copy_to(bias, column_group)


class Linear2D(nn.Module):
    """An nn.Linear, one block of which this rank holds: x `[.., m/q, in/q]` -> `[.., m/q, out/q]`."""

    def __init__(self, linear: nn.Linear, row_group: ProcessGroup, column_group: ProcessGroup):
        super().__init__()
        _check_cut("Linear2D", linear, row_group, column_group)
        self.weight = shard(shard(linear.weight, 1, column_group), 0, row_group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, row_group)
        self.row_group, self.column_group = row_group, column_group

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.row_group, self.column_group)


# ---- norms -----------------------------------------------------------------------------------------------------------


def norm_forward(
    x: Tensor, weight: Tensor, eps: float, centred: bool, row_group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """x `[.., D/q]` -> y = (x - mean) · scale · weight, mean and scale `[.., 1]` in at least float32; `centred` is False
    for RMSNorm, whose mean is taken as 0."""
    width = x.size(-1) * row_group.size()
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = exact.new_zeros(*x.shape[:-1], 1)
    if centred:
        mean = all_reduce(exact.sum(-1, keepdim=True), row_group) / width
        exact = exact - mean
    scale = (all_reduce(exact.square().sum(-1, keepdim=True), row_group) / width + eps).rsqrt()
    return (exact * scale * weight).to(x.dtype), mean, scale


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, centred: bool, row_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """With n = (x - mean) · scale and g = dy · weight:   dx = scale · (g - mean(g) - n · mean(g · n))   and   dweight =
    Σ dy · n over this rank's rows. RMSNorm has no mean(g)."""
    normed = (x - mean) * scale
    g = dy * weight.to(normed.dtype)
    terms = (g * normed, g) if centred else (g * normed,)
    sums = all_reduce(torch.stack([term.sum(-1, keepdim=True) for term in terms]), row_group)
    mean_gn, *mean_g = sums / (x.size(-1) * row_group.size())
    dx = scale * (g - normed * mean_gn - sum(mean_g))
    return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, centred: bool, row_group: ProcessGroup) -> Tensor:
        y, mean, scale = norm_forward(x, weight, eps, centred, row_group)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.rest = centred, row_group
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        return *norm_backward(dy, *ctx.saved_tensors, *ctx.rest), None, None, None


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    row_group: ProcessGroup,
    column_group: ProcessGroup,
) -> Tensor:
    """Differentiable LayerNorm (`centred`) or RMSNorm: x `[.., m/q, D/q]`, weight and bias `[D/q]` -> as x."""
    y = _Norm.apply(x, copy_to(weight, column_group), eps, centred, row_group)
    return y if bias is None else y + copy_to(bias, column_group)


class Norm2D(nn.Module):
    """An nn.LayerNorm or nn.RMSNorm over a width that is cut over the row of the grid: x `[.., m/q, D/q]` -> the same."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, row_group: ProcessGroup, column_group: ProcessGroup):
        super().__init__()
        _check_cut("Norm2D", norm, row_group, column_group)
        bias = getattr(norm, "bias", None)
        self.weight = shard(norm.weight, 0, row_group)
        self.bias = None if bias is None else shard(bias, 0, row_group)
        self.centred = isinstance(norm, nn.LayerNorm)
        self.eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        self.row_group, self.column_group = row_group, column_group

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.eps, self.centred, self.row_group, self.column_group)


def _check_cut(what: str, module: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup) -> None:
    q = grid_side(row_group, column_group)
    _check_whole(module)
    for name, param in module.named_parameters():
        if wrong := [size for size in param.shape if size % q]:
            raise ValueError(
                f"{what}: {wrong[0]} of {name} {list(param.shape)} is not a multiple of q={q}; choose widths "
                f"that are, or a grid whose side divides {wrong[0]}"
            )


def _check_whole(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        check_whole(f"{type(module).__name__}, {name}", param)


# ---- the layers of a Transformer, in place ---------------------------------------------------------------------------


def cut_block(block: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup) -> None:
    """norm1, attention, norm2 and mlp: block(x, positions) takes and gives `[B/q, T, D/q]`, positions are `[T]`."""
    replace_in_block(block, *_makers(row_group, column_group), row_group)


def cut_attention(attention: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup) -> None:
    """q, k, v and out; a rank has 1/q of the heads, and of ALiBi's slopes. `[B/q, T, D/q]` -> the same."""
    replace_in_attention(attention, _makers(row_group, column_group)[0], row_group)


def cut_mlp(mlp: nn.Module, row_group: ProcessGroup, column_group: ProcessGroup) -> None:
    """up, gate (if there is one) and down. `[B/q, T, D/q]` -> the same; between them `[B/q, T, F/q]`."""
    replace_in_mlp(mlp, _makers(row_group, column_group)[0])


def _makers(row_group: ProcessGroup, column_group: ProcessGroup) -> list[Callable]:
    return [partial(kind, row_group=row_group, column_group=column_group) for kind in (Linear2D, Norm2D)]


def replace_in_block(
    block: nn.Module, cut_linear: Callable, cut_norm: Callable, row_group: ProcessGroup
) -> None:
    """What a cut of a block replaces, whatever kind of linear and norm replaces it."""
    p = max((part.p for part in block.modules() if isinstance(part, nn.Dropout)), default=0)
    if p:
        raise ValueError(f"dropout={p}: ranks would have to draw the blocks of one mask; set it to 0")
    replace_in_attention(block.attention, cut_linear, row_group)
    replace_in_mlp(block.mlp, cut_linear)
    block.norm1, block.norm2 = cut_norm(block.norm1), cut_norm(block.norm2)


def replace_in_attention(attention: nn.Module, cut_linear: Callable, row_group: ProcessGroup) -> None:
    if missing := [name for name in ("q", "k", "v", "out") if not hasattr(attention, name)]:
        raise ValueError(
            f"{type(attention).__name__} has no {', '.join(missing)}; only heads of their own can be dealt "
            "to the columns of a grid: use plain attention (kv_latent=0)"
        )
    _check_whole(attention)
    q, head_dim = row_group.size(), attention.config.head_dim
    for name in ("q", "k"):
        heads, left = divmod(getattr(attention, name).out_features // head_dim, q)
        if left:
            raise ValueError(
                f"attention.{name}: {heads * q + left} heads are not a multiple of q={q}; choose a number of heads "
                "that is, or a grid whose side divides it"
            )
    for name in ("q", "k", "v", "out"):
        setattr(attention, name, cut_linear(getattr(attention, name)))
    if hasattr(attention, "slopes"):
        attention.slopes = shard(attention.slopes, 0, row_group)


def replace_in_mlp(mlp: nn.Module, cut_linear: Callable) -> None:
    _check_whole(mlp)
    for name in ("up", "gate", "down"):
        if hasattr(mlp, name):
            setattr(mlp, name, cut_linear(getattr(mlp, name)))
