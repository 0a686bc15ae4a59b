"""Ranks as a grid: every kind of parallelism is an axis, and along each axis every rank has a process group.

    Mesh(dp=2, pp=2, tp=2)      rank = (dp * 2 + pp) * 2 + tp: the last axis is innermost, its groups are neighbours

Put the axis that talks most last: tp inside a node, dp outside. `mesh.group("dp", "cp")` is one group over several
axes at once (gradients are summed over both). A group is made once and by its members only, so that one rank of 131,072
makes a handful and not all of them. `mesh.device_mesh` is the same grid as a torch DeviceMesh around the same
groups, for DTensor, FSDP2 and the like.

Sends nothing. Raises ValueError for axes whose product is not the number of ranks, for a size that is not a whole
number, for an unknown or repeated axis, and without any axis.
Megatron-LM and DeepSpeed keep such grids in globals; torch's DeviceMesh is the model for this one. Differs: a mesh of
one axis gets a group of its own, not the default one, so that every group knows its axis.
"""

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

DRAWN = 8  # rows, columns, groups: more is not a picture


class Mesh:
    """A grid of all ranks; the first axis is outermost. All ranks must make it, with the same axes."""

    def __init__(self, **axes: int) -> None:
        self.ranks = dist.get_world_size()
        if not axes:
            raise ValueError(f"Mesh has no axes; name at least one, such as Mesh(dp={self.ranks})")
        for axis, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"Mesh: {axis}={size!r}; the size of an axis is a whole number, 1 or more")
        self.shape: dict[str, int] = axes
        if (product := math.prod(axes.values())) != self.ranks:
            text = " x ".join(f"{axis}={size}" for axis, size in axes.items())
            raise ValueError(
                f"Mesh: {text} is {product} ranks, but the job has {self.ranks}; {self._what_fits(product)}"
            )
        sizes = list(axes.values())
        self._strides = {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(axes)}
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None
        for axis in axes:
            self.group(axis)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place: {"dp": 1, "tp": 0}."""
        return self._place(dist.get_rank())

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axes` only, in mesh order whatever the order of the names.

        A group over several axes is made at the first call: all ranks must come here at that point, members or not, for torch names a
        group by its members and by how many groups a rank has.
        """
        axes = self._in_mesh_order("group", axes)
        if axes not in self._groups:
            self._groups[axes] = dist.new_group(
                self.members(*axes), use_local_synchronization=True, group_desc=f"mesh_{'_'.join(axes)}"
            )
        return self._groups[axes]

    def part(self, axis: str, numbers: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Some ranks of `group(axis)`, by their numbers in it. All ranks must ask; those that are not in it get None.

        The others make one too, of themselves alone (see `group`).
        """
        (axis,) = self._in_mesh_order("part", (axis,))
        member = self.rank(axis) in numbers
        if (axis, numbers) not in self._groups:
            members = [self.members(axis)[number] for number in numbers] if member else [dist.get_rank()]
            self._groups[axis, numbers] = dist.new_group(
                members, use_local_synchronization=True, group_desc=f"mesh_{axis}"
            )
        return self._groups[axis, numbers] if member else None

    def twin(self, *axes: str) -> dist.ProcessGroup:
        """A second group of the ranks of `group(*axes)`, with connections and streams of its own: a pipeline's messages in one
        direction must not queue behind those in the other."""
        axes = self._in_mesh_order("twin", axes)
        if ("twin", *axes) not in self._groups:
            self._groups["twin", *axes] = dist.new_group(
                self.members(*axes), use_local_synchronization=True, group_desc=f"mesh_{'_'.join(axes)}"
            )
        return self._groups["twin", *axes]

    def members(self, *axes: str) -> list[int]:
        """Global ranks of `group(*axes)`, in its order. Makes no group."""
        free, here = self._in_mesh_order("members", axes), self.coordinates
        steps = [range(size) if axis in free else [here[axis]] for axis, size in self.shape.items()]
        strides = self._strides.values()
        return [sum(i * stride for i, stride in zip(place, strides)) for place in itertools.product(*steps)]

    def rank(self, *axes: str) -> int:
        """This rank's number in `group(*axes)`."""
        number, here = 0, self.coordinates
        for axis in self._in_mesh_order("rank", axes):
            number = number * self.shape[axis] + here[axis]
        return number

    def size(self, *axes: str) -> int:
        """How many ranks `group(*axes)` has."""
        return math.prod(self.shape[axis] for axis in self._in_mesh_order("size", axes))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same grid and groups for torch's own parallel libraries."""
        if self._device_mesh is None:
            with _disable_current_modes():  # in a dry run too it holds real numbers
                grid = torch.arange(self.ranks, dtype=torch.int).view(tuple(self.shape.values()))
                self._device_mesh = DeviceMesh.from_group(
                    [self.group(axis) for axis in self.shape],
                    "cuda" if "nccl" in dist.get_backend() else "cpu",
                    mesh=grid,
                    mesh_dim_names=tuple(self.shape),
                )
        return self._device_mesh

    def draw(self) -> str:
        """The grid of ranks as text, this one with a star, and the groups of every axis."""
        *outer, inner = self.shape
        columns, width = self.shape[inner], len(str(self.ranks - 1)) + 2
        axes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        lines = [f"Mesh({axes}): {self.ranks} ranks, {inner} to the right"]
        for first in range(0, self.ranks, columns)[:DRAWN]:
            label = " ".join(f"{axis}={self._place(first)[axis]}" for axis in outer)
            cells = [
                f"{'*' * (rank == dist.get_rank())}{rank}".rjust(width)
                for rank in range(first, first + columns)[:DRAWN]
            ]
            lines.append(f"  {label}{''.join(cells)}{' ...' * (columns > DRAWN)}")
        lines += ["  ..."] * (self.ranks // columns > DRAWN)
        return "\n".join(lines + [f"{axis} groups: {self._draw_groups(axis)}" for axis in self.shape])

    def _draw_groups(self, axis: str) -> str:
        stride, size = self._strides[axis], self.shape[axis]
        starts = itertools.islice((rank for rank in range(self.ranks) if rank // stride % size == 0), DRAWN)
        groups = [
            " ".join(
                [*map(str, range(start, start + size * stride, stride)[:DRAWN]), *["..."] * (size > DRAWN)]
            )
            for start in starts
        ]
        return " ".join([*(f"[{group}]" for group in groups), *["..."] * (self.ranks // size > DRAWN)])

    def _place(self, rank: int) -> dict[str, int]:
        return {axis: rank // self._strides[axis] % size for axis, size in self.shape.items()}

    def _in_mesh_order(self, what: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        for axis in axes:
            if axis not in self.shape:
                raise ValueError(
                    f"{what}({axis!r}): the mesh has no such axis; its axes are {', '.join(self.shape)}"
                )
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(
                f"{what}({', '.join(map(repr, axes))}): name each axis once, at least one of "
                f"{', '.join(self.shape)}"
            )
        return tuple(axis for axis in self.shape if axis in axes)

    def _what_fits(self, product: int) -> str:
        """The sizes of one axis that would make the product right."""
        fits = [
            f"{axis}={self.ranks * size // product}"
            for axis, size in self.shape.items()
            if self.ranks * size % product == 0
        ]
        return f"{' or '.join(fits)} would fit" if fits else f"choose sizes whose product is {self.ranks}"
