"""Tensor parallelism in three dimensions: a product is a cube of l·l·l blocks, nothing is held twice.

    C[m, n] = A[m, k] · B[k, n]      rank (i, j, p) computes A_ip · B_pj, its share of  C_ij = Σ_p A_ip · B_pj
    input_group     ranks that differ in j only: they need the same A_ip, and each keeps 1/l of its rows
    weight_group    ranks that differ in i only: they need the same B_pj, and each keeps 1/l of it
    output_group    ranks that differ in p only: they hold shares of one C_ij, and each keeps 1/l of its rows

A and B are gathered, C is reduce-scattered; backward as well, with the groups in turn. A rank holds 1/l³ of
A, B, C, gradients and saved activations, and for a product 1/l² of three. torch keeps W[n, k] = Bᵀ:

    W[n/l², k/l]     dim 0 over input_group, then weight_group; dim 1 over output_group; b[n/l²] like dim 0
    x[m/l², k/l]     dim 0 over weight_group, then input_group; last dim over output_group
    y[m/l², n/l]     as x with input_group and output_group swapped: a second linear takes them swapped

A rank sends (l-1)/l³ · (mk + kn + mn) elements, backward (l-1)/l³ · (2mk + 2kn + mn); a bias (l-1)/l² · n.
Bian et al. 2021, arXiv:2105.14450, section 3.1; Agarwal et al. 1995, IBM J. Res. Dev. 39(5). Differs: dC is
gathered once for both gradients; no diagonal plane for vectors.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.context.ring import check_crossing
from minitrain.ranks.checks import require_one_of
from minitrain.ranks.collectives import all_gather, reduce_scatter, world
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import Shard, full_tensor, shard
from minitrain.systems.tensor_parallel import summa
from minitrain.systems.tensor_parallel.optimus import Linear2D
from minitrain.tensor_parallel.linear import ColumnLinear, check_whole, linear_vjp

# Of tensor parallelism in so many dimensions (Colossal-AI's names): copies, and the axes of equal sides.
AXES = {"1d": (1, ["tensor"]), "2d": (1, ["row", "column"]), "2.5d": (2, ["row", "column"]), "3d": (1, "zyx")}


def cube_forward(x: Tensor, weight: Tensor, bias, input_group, weight_group, output_group) -> Tensor:
    """x `[m/l², k/l]`, weight `[n/l², k/l]`, bias `[n/l²]` or None -> y `[m/l², n/l]`."""
    x = all_gather(x, input_group)  # [m/l, k/l]
    weight = all_gather(weight, weight_group)  # [n/l, k/l]
    y = reduce_scatter(x @ weight.T, output_group)  # [m/l, n/l] -> [m/l², n/l]
    return y if bias is None else y.add_(all_gather(bias, weight_group))


def cube_backward(dy, x: Tensor, weight: Tensor, bias, input_group, weight_group, output_group):
    """dy `[m/l², n/l]`, the others as above -> dx, dweight and dbias, cut as x, weight and bias."""
    dy = all_gather(dy, output_group)  # [m/l, n/l]
    dx = reduce_scatter(dy @ all_gather(weight, weight_group), input_group)
    dweight = reduce_scatter(dy.T @ all_gather(x, input_group), weight_group)
    return dx, dweight, None if bias is None else reduce_scatter(dy.sum(0), weight_group)


class Linear3D(nn.Module):
    """An nn.Linear cut l³ ways: x `[.., k/l]`, this rank's rows -> y `[.., n/l]`, cut over output_group."""

    def __init__(self, linear: nn.Linear, input_group, weight_group, output_group):
        super().__init__()
        self.groups = dict(input_group=input_group, weight_group=weight_group, output_group=output_group)
        self.side = check_cube(**self.groups)
        check_whole("Linear3D", linear)
        self.weight = shard(shard(shard(linear.weight, 0, input_group), 0, weight_group), 1, output_group)
        bias = linear.bias
        self.bias = None if bias is None else shard(shard(bias, 0, input_group), 0, weight_group)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.size(-1) != self.weight.size(1):
            raise ValueError(f"Linear3D: x {list(x.shape)} is not 1/{self.side} as wide; use cut_activations")
        passes = (partial(way, **self.groups) for way in (cube_forward, cube_backward))
        return linear_vjp(x, self.weight, self.bias, *passes)


def cut_linear(linear: nn.Linear, how: str) -> tuple:
    """Cut over all ranks in so many dimensions; how its x `[m, .., k]` is cut; how its y becomes whole."""
    require_one_of(AXES, how=how)
    copies, axes = AXES[how]
    mesh = Mesh(depth=copies, **dict.fromkeys(axes, round((world().size() / copies) ** (1 / len(axes)))))
    groups = [mesh.group(axis) for axis in axes[::-1]]
    if how == "1d":
        return ColumnLinear(linear, *groups), lambda x: x, lambda y: full_tensor(y, [Shard(-1, *groups)])
    if how == "3d":
        cut, back = lambda x: cut_activations(x, *groups), activation_shards(*groups[::-1])
        return Linear3D(linear, *groups), cut, lambda y: full_tensor(y, back)
    groups.append(mesh.group("depth"))
    return Linear2D(linear, *groups), lambda x: summa.block(x, *groups), lambda y: summa.whole(y, *groups)


def cut_mlp(mlp: nn.Module, input_group, weight_group, output_group) -> nn.Module:
    """up, gate (if any) and down (groups swapped), in place: x `[B/l², T, D/l]` -> y cut exactly as x is."""
    for name in ("up", "gate"):
        if hasattr(mlp, name):
            setattr(mlp, name, Linear3D(getattr(mlp, name), input_group, weight_group, output_group))
    mlp.down = Linear3D(mlp.down, output_group, weight_group, input_group)
    return mlp


def activation_shards(input_group, weight_group, output_group) -> tuple[Shard, ...]:
    """How the x of a layer with these groups is cut; its y: with the first and the last group swapped."""
    return Shard(0, weight_group), Shard(0, input_group), Shard(-1, output_group)


def cut_activations(x: Tensor, input_group, weight_group, output_group) -> Tensor:
    """This rank's piece of x `[m, .., k]`, the same on all ranks: `[m/l², .., k/l]`. Outside autograd."""
    check_cube(input_group, weight_group, output_group)
    for cut in activation_shards(input_group, weight_group, output_group):
        x = shard(x, cut.dim, cut.group)
    return x


def check_cube(input_group: ProcessGroup, weight_group: ProcessGroup, output_group: ProcessGroup) -> int:
    """The side l of the cube."""
    sizes = [group.size() for group in (input_group, weight_group, output_group)]
    if len(set(sizes)) > 1:
        raise ValueError(f"input, weight and output group have {sizes} ranks; give the axes of a mesh l·l·l")
    check_crossing(input=input_group, weight=weight_group, output=output_group)
    return sizes[0]
