"""What a forward keeps for its backward, as bytes that can leave and come back: each storage once, wherever autograd holds views of it.

    bag = Bag(lives)                                            lives: tensors that stay anyway, parameters and the batch
    with saved_tensors_hooks(bag.pack, bag.unpack): y = stage(x)
    flat, places = bag.empty()                                  all blocks in one piece; the graph now points to nothing
    bag.fill(flat, places)                                      and here again to views of it

The graph holds (number of a block, shape, strides) in place of tensors, so a bag can be emptied between forward and backward. One thing
would still hold the input of the stage, its own first node; `enter` makes a first node that does not, and leaves the gradient at a `Door`.
Storages are told apart by their identity, not by an address: tensors without data (a dry run) have none, and keep as many bytes.

Sends nothing. Memory: `empty` makes a copy of what it lets go. Raises nothing.
torch.autograd.graph.save_on_cpu is the same idea for one tensor at a time. Differs: by storage, so that views of one block travel once.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNED = 64                                    # bytes: any dtype may start there
Places = list[tuple[int, int]]                  # where each block stands in the flat piece, and its bytes


class Bag:
    def __init__(self, lives: Iterable[Tensor], device: torch.device):
        self.stays = {x.untyped_storage()._cdata for x in lives}
        self.device = device
        self.blocks: list[Tensor] = []
        self.index: dict[int, int] = {}

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        if storage._cdata in self.stays or not storage.nbytes():
            return x
        if storage._cdata not in self.index:
            self.index[storage._cdata] = len(self.blocks)
            first = x.detach().as_strided((1,), (1,), 0).view(torch.uint8)
            self.blocks.append(first.as_strided((storage.nbytes(),), (1,), 0))
        return self.index[storage._cdata], x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, dtype, offset, size, stride = packed
        block = self.blocks[number]
        return block[:0].view(dtype).as_strided(size, stride, block.storage_offset() // dtype.itemsize + offset)

    @property
    def bytes(self) -> int:
        return sum(block.numel() for block in self.blocks)

    def empty(self) -> tuple[Tensor, Places]:
        sizes = [-(-block.numel() // ALIGNED) * ALIGNED for block in self.blocks]
        flat, places, at = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device), [], 0
        for block, size in zip(self.blocks, sizes):
            flat[at:at + block.numel()] = block
            places.append((at, block.numel()))
            at += size
        self.blocks.clear()
        self.index.clear()
        return flat, places

    def fill(self, flat: Tensor, places: Places) -> None:
        self.blocks = [flat[at:at + size] for at, size in places]


class Door:
    """Stands for the input of a stage that is not kept: its gradient."""

    grad: Tensor | None = None


def enter(x: Tensor, door: Door) -> Tensor:
    """x as the beginning of a graph that does not hold it; its gradient goes to the door."""
    return _Enter.apply(torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True), x.detach(), door)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, door: Door) -> Tensor:
        ctx.door = door
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        ctx.door.grad = dy
        return torch.zeros((), dtype=dy.dtype, device=dy.device), None, None
