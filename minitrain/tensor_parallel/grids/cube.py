"""Tensor parallelism in three dimensions: a product is a cube of l·l·l blocks, one a rank, and nothing is held twice.

    C[m, n] = A[m, k] · B[k, n]        rank (i, j, p) computes  A_ip · B_pj, its share of  C_ij = Σ_p A_ip · B_pj

    input_group     ranks that differ in j only: they need the same A_ip, and each keeps 1/l of its rows
    weight_group    ranks that differ in i only: they need the same B_pj, and each keeps 1/l of it
    output_group    ranks that differ in p only: they hold shares of the same C_ij, and each keeps 1/l of its rows

    forward     A = all_gather(A, input_group)    B = all_gather(B, weight_group)    C = reduce_scatter(A·B, output_group)
    backward    the same with the groups in turn: dC is gathered where C was scattered, what was gathered is scattered

                dA = reduce_scatter(dC·Bᵀ, input_group)            dB = reduce_scatter(Aᵀ·dC, weight_group)

So a rank holds exactly 1/l³ of A, B and C, parameters, gradients, optimizer state and saved activations alike. For a short
while it holds 1/l² of the three: what is gathered for a product is freed after it and gathered anew in backward. torch keeps
W[n, k] = Bᵀ. The cuts, as `param.placement.shards` and `activation_shards` tell them:

    W[n/l², k/l]     dim 0 over input_group, then weight_group; dim 1 over output_group
    x[m/l², k/l]     dim 0 over weight_group, then input_group; last dim over output_group
    y[m/l², n/l]     dim 0 over weight_group, then output_group; last dim over input_group

y is cut as x is, with input_group and output_group in each other's place. A second linear that is given the two groups
swapped takes y as it is and returns what is cut like x: the two linears of an MLP need nothing in between, and what acts on
each element alone (an activation, a gate, a residual) works on the pieces.

The bias is cut like dim 0 of W, b[n/l²]; the l ranks of output_group hold the same piece. It is added after the
reduce-scatter, to the rows a rank keeps: once to every element. Its gradient is a sum over the gathered dC, which the
ranks of output_group have alike, so it needs no sum over them.

A rank sends (l-1)/l³ · (mk + kn + mn) elements forward and (l-1)/l³ · (2mk + 2kn + mn) backward, dC being gathered once
for both gradients; (l-1)/l² · n for a bias, each way. In an MLP with a gate, up and gate each gather x.
Raises ValueError in one line, before any rank waits, for groups of different sizes or which share another rank than this
one, sizes that are not multiples of l and l², a layer that is cut already, and an input of another width.
Bian et al. 2021, arXiv:2105.14450, section 3.1 (products; its algorithms 1 and 2); Agarwal et al. 1995, A three-dimensional
approach to parallel matrix multiplication, IBM J. Res. Dev. 39(5). Differs: one gather of dC where the paper's two
gradients gather it twice; a bias with its weight's rows, where the paper keeps vectors on a diagonal plane and broadcasts.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.collectives import all_gather, reduce_scatter
from minitrain.sharding import Shard, placement, shard

# ---- the product -----------------------------------------------------------------------------------------------------


def cube_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_group: ProcessGroup,
    weight_group: ProcessGroup,
    output_group: ProcessGroup,
) -> Tensor:
    """x `[m/l², k/l]`, weight `[n/l², k/l]`, bias `[n/l²]` or None -> y `[m/l², n/l]`."""
    x = all_gather(x, input_group)  # [m/l, k/l]
    weight = all_gather(weight, weight_group)  # [n/l, k/l]
    y = reduce_scatter(x @ weight.T, output_group)  # [m/l, n/l] -> [m/l², n/l]
    return y if bias is None else y.add_(all_gather(bias, weight_group))


def cube_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_group: ProcessGroup,
    weight_group: ProcessGroup,
    output_group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dy `[m/l², n/l]`, the others as above -> dx, dweight and dbias, each cut like what it is the gradient of."""
    dy = all_gather(dy, output_group)  # [m/l, n/l]
    dx = reduce_scatter(dy @ all_gather(weight, weight_group), input_group)
    dweight = reduce_scatter(dy.T @ all_gather(x, input_group), weight_group)
    return dx, dweight, None if bias is None else reduce_scatter(dy.sum(0), weight_group)


class _Cube(torch.autograd.Function):
    """The pair above for x of any number of dims; what is saved is cut l³ ways."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, *groups: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.groups = groups
        return cube_forward(x.flatten(0, -2), weight, bias, *groups).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = cube_backward(dy.flatten(0, -2), x.flatten(0, -2), weight, bias, *ctx.groups)
        return dx.view_as(x), dweight, dbias, None, None, None


# ---- layers ----------------------------------------------------------------------------------------------------------


class Linear3D(nn.Module):
    """An nn.Linear cut l³ ways: x `[.., k/l]`, this rank's rows -> y `[.., n/l]`, rows now cut over output_group."""

    def __init__(
        self,
        linear: nn.Linear,
        input_group: ProcessGroup,
        weight_group: ProcessGroup,
        output_group: ProcessGroup,
    ):
        super().__init__()
        side = check_cube(input_group, weight_group, output_group)
        check_linear("Linear3D", linear, side)
        self.groups = input_group, weight_group, output_group
        self.weight = shard(shard(shard(linear.weight, 0, input_group), 0, weight_group), 1, output_group)
        self.bias = (
            None if linear.bias is None else shard(shard(linear.bias, 0, input_group), 0, weight_group)
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.size(-1) != self.weight.size(1):
            side = self.groups[0].size()
            raise ValueError(
                f"Linear3D: x {list(x.shape)}, but this rank's piece is [.., {self.weight.size(1)}], 1/{side} of "
                f"the width; cut it with cut_activations"
            )
        return _Cube.apply(x, self.weight, self.bias, *self.groups)


def cut_mlp(
    mlp: nn.Module, input_group: ProcessGroup, weight_group: ProcessGroup, output_group: ProcessGroup
) -> nn.Module:
    """The same MLP with up, gate (if it has one) and down cut in place: x `[B/l², T, D/l]` -> y cut exactly as x is.

    Its forward and its activation stay as they are. `down` has input_group and output_group swapped.
    """
    side = check_cube(input_group, weight_group, output_group)
    for name, linear in mlp.named_children():
        check_linear(name, linear, side)  # all of them, before the first is cut
    mlp.up = Linear3D(mlp.up, input_group, weight_group, output_group)
    if hasattr(mlp, "gate"):
        mlp.gate = Linear3D(mlp.gate, input_group, weight_group, output_group)
    mlp.down = Linear3D(mlp.down, output_group, weight_group, input_group)
    return mlp


# ---- activations -----------------------------------------------------------------------------------------------------


def activation_shards(
    input_group: ProcessGroup, weight_group: ProcessGroup, output_group: ProcessGroup
) -> tuple[Shard, ...]:
    """How the x of a layer with these groups is cut; of its y, with the first and the last group swapped.

    full_tensor(y, activation_shards(output_group, weight_group, input_group)) is the whole y on every rank.
    """
    return Shard(0, weight_group), Shard(0, input_group), Shard(-1, output_group)


def cut_activations(
    x: Tensor, input_group: ProcessGroup, weight_group: ProcessGroup, output_group: ProcessGroup
) -> Tensor:
    """This rank's piece of x `[m, .., k]`, the same on all ranks: `[m/l², .., k/l]`. Outside autograd."""
    side = check_cube(input_group, weight_group, output_group)
    _check_multiple("the length of x", x.size(0), "l²", side**2)
    _check_multiple("the width of x", x.size(-1), "l", side)
    for cut in activation_shards(input_group, weight_group, output_group):
        x = shard(x, cut.dim, cut.group)
    return x


# ---- what is refused -------------------------------------------------------------------------------------------------


def check_cube(input_group: ProcessGroup, weight_group: ProcessGroup, output_group: ProcessGroup) -> int:
    """The side l of the cube."""
    groups = {"input": input_group, "weight": weight_group, "output": output_group}
    sizes = [group.size() for group in groups.values()]
    if len(set(sizes)) > 1:
        ranks = math.prod(sizes)
        side = int(ranks ** (1 / 3) + 1e-9)  # the cube below
        fits = f"{side**3} or {(side + 1) ** 3} ranks" if side**3 != ranks else f"l={side}"
        raise ValueError(
            f"input, weight and output group have {sizes[0]}, {sizes[1]} and {sizes[2]} ranks, no cube; make a "
            f"mesh l·l·l, with {fits}"
        )
    members = {name: set(collectives.channel_of(group).members) for name, group in groups.items()}
    for one, other in (("input", "weight"), ("weight", "output"), ("output", "input")):
        both = sorted(members[one] & members[other])
        if len(both) != 1:
            raise ValueError(
                f"the {one} group {sorted(members[one])} and the {other} group {sorted(members[other])} share ranks "
                f"{both}, not this one alone; pass the groups of three axes of one mesh"
            )
    return sizes[0]


def check_linear(what: str, linear: nn.Linear, side: int) -> None:
    """Whole, and of sizes that a cube of this side divides."""
    for cut in placement(linear.weight).shards:
        raise ValueError(
            f"{what}: the layer is cut already, along dim {cut.dim} over {collectives.axis_of(cut.group)}; pass the "
            f"whole nn.Linear"
        )
    n, k = linear.weight.shape
    _check_multiple(f"{what}: out_features", n, "l²", side**2)
    _check_multiple(f"{what}: in_features", k, "l", side)


def _check_multiple(what: str, size: int, name: str, divisor: int) -> None:
    if size % divisor:
        raise ValueError(
            f"{what} = {size} is not a multiple of {name} = {divisor}; pad to {-(-size // divisor) * divisor}, or "
            f"take a smaller cube"
        )
