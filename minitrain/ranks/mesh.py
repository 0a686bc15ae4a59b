"""Ranks as a grid: every kind of parallelism is an axis, and along each axis every rank has a process group.

    Mesh(dp=2, pp=2, tp=2)      rank = (dp * 2 + pp) * 2 + tp: the last axis is innermost, ranks neighbours

Put the axis that talks most last: tp inside a node, dp outside. `mesh.group("dp", "cp")` is one group over
several axes at once (gradients are summed over both). A group is made once and by its members only, so that
one rank of 131,072 makes a handful and not all of them. Sends nothing.

torch's DeviceMesh is the model. Differs: a mesh of one axis has its own group, so that all know their axis.
"""

import itertools
import math

import torch.distributed as dist

from minitrain.ranks.checks import require_positive_ints


class Mesh:
    """All ranks must make it, with the same axes."""

    def __init__(self, **axes: int) -> None:
        self.ranks, self.shape = dist.get_world_size(), axes
        if not axes:
            raise ValueError(f"Mesh has no axes; name at least one, such as Mesh(dp={self.ranks})")
        require_positive_ints(**axes)
        sizes = list(axes.values())
        if (product := math.prod(sizes)) != self.ranks:
            text = " x ".join(f"{axis}={size}" for axis, size in axes.items())
            cure = f"choose sizes whose product is {self.ranks}"
            raise ValueError(f"Mesh: {text} is {product} ranks, but the job has {self.ranks}; {cure}")
        self._strides = {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(axes)}
        self._groups: dict[tuple, dist.ProcessGroup] = {}
        for axis in axes:
            self.group(axis)

    coordinates = property(lambda self: self._place(dist.get_rank()))  # {"dp": 1, "tp": 0}

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axes` only, in mesh order. A group over several axes is
        made at the first call: all ranks must come here at that point, members or not, for torch names a
        group by its members and by how many groups a rank has."""
        axes = self._in_mesh_order("group", axes)
        if axes not in self._groups:
            self._groups[axes] = _new_group(self.members(*axes), axes)
        return self._groups[axes]

    def part(self, axis: str, numbers: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Some ranks of `group(axis)`, by their numbers in it. All ranks must ask; those that are not in it
        get None and make a group of themselves alone (see `group`)."""
        axes = self._in_mesh_order("part", (axis,))
        member = self.rank(axis) in numbers
        if (axis, numbers) not in self._groups:
            members = [self.members(axis)[number] for number in numbers] if member else [dist.get_rank()]
            self._groups[axis, numbers] = _new_group(members, axes)
        return self._groups[axis, numbers] if member else None

    def blocks(
        self, *axes: str, size: int, names: tuple[str, str], of: int | None = None
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Two groups for an axis inside others: `group(*axes)`, or of it each row of `of` ranks, in blocks of
        `size` ranks: this one's block, and the ranks at its place in all, by `names`. All must ask."""
        axes = self._in_mesh_order("blocks", axes)
        ranks = of or self.size(*axes)
        if self.size(*axes) % ranks or ranks % size:
            raise ValueError(f"blocks of {size} ranks do not divide the {ranks} of {' x '.join(axes)}")
        key = ("blocks", *axes, size, ranks)
        if key not in self._groups:
            number = self.rank(*axes)
            first, here = number - number % ranks, number % ranks
            members, start = self.members(*axes)[first : first + ranks], here - here % size
            both = members[start : start + size], members[here % size :: size]
            self._groups[key] = tuple(_new_group(some, (name,)) for some, name in zip(both, names))
        return self._groups[key]

    def twin(self, *axes: str) -> dist.ProcessGroup:
        """A second group of the same ranks: a pipeline's messages in one direction must not queue behind
        those in the other."""
        axes = self._in_mesh_order("twin", axes)
        if ("twin", *axes) not in self._groups:
            self._groups["twin", *axes] = _new_group(self.members(*axes), axes)
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
        return math.prod(self.shape[axis] for axis in self._in_mesh_order("size", axes))

    def draw(self) -> str:
        """The grid of ranks as text, this one with a star, and the groups of every axis."""
        *outer, inner = self.shape
        columns, width, here = self.shape[inner], len(str(self.ranks - 1)) + 2, dist.get_rank()
        axes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        lines = [f"Mesh({axes}): {self.ranks} ranks, {inner} to the right"]
        for first in range(0, self.ranks, columns):
            label = " ".join(f"{axis}={self._place(first)[axis]}" for axis in outer)
            row = (f"{'*' * (rank == here)}{rank}" for rank in range(first, first + columns))
            lines.append(f"  {label}" + "".join(cell.rjust(width) for cell in row))
        for axis, size in self.shape.items():
            stride = self._strides[axis]
            starts = (rank for rank in range(self.ranks) if rank // stride % size == 0)
            groups = (" ".join(map(str, range(first, first + size * stride, stride))) for first in starts)
            lines.append(f"{axis} groups: {' '.join(f'[{group}]' for group in groups)}")
        return "\n".join(lines)

    def _place(self, rank: int) -> dict[str, int]:
        return {axis: rank // self._strides[axis] % size for axis, size in self.shape.items()}

    def _in_mesh_order(self, what: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        known = ", ".join(self.shape)
        for axis in axes:
            if axis not in self.shape:
                raise ValueError(f"{what}({axis!r}): the mesh has no such axis; its axes are {known}")
        if not axes or len(set(axes)) < len(axes):
            said = ", ".join(map(repr, axes))
            raise ValueError(f"{what}({said}): name each axis once, at least one of {known}")
        return tuple(axis for axis in self.shape if axis in axes)


def _new_group(members: list[int], axes: tuple[str, ...]) -> dist.ProcessGroup:
    return dist.new_group(members, use_local_synchronization=True, group_desc=f"mesh_{'_'.join(axes)}")
