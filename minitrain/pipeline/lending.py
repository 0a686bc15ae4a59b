"""BPipe on real ranks (lists: bpipe.py): what a forward keeps leaves for another rank, and comes back before its backward.

    bag = Bag(lives)                                            lives: tensors that stay anyway, parameters and the batch
    with saved_tensors_hooks(bag.pack, bag.unpack): y = stage(x)
    flat, places = bag.empty()                                  all blocks in one piece, in bytes; the graph now points to nothing
    bag.fill(flat, places)                                      and here again to views of it

A bag has each storage once, wherever autograd holds views of it. The graph holds (number of a block, shape, strides) in place of tensors,
so a bag can be emptied between forward and backward. One thing would still hold the input of the stage, its own first node; `enter` makes a
first node that does not, and leaves the gradient at a `Door`. Storages are told apart by their identity, not by an address: tensors
without data (a dry run) have none, and keep as many bytes.

`Balanced` is the interpreter: E empties the bag, and goes on while the piece is sent; L fills it. The program (lower.py) says when a
move is waited for. How much it is depends on the shape of a microbatch only. So it is told once for each shape, and nobody asks a
tensor for a number again.

Sends what a forward keeps at each eviction, the same back, and 8 bytes a shape. Memory: with what is leaving and what is coming no rank
holds more than the largest `schedule.peak` (tested); only while E copies, before anything is computed again, the evicted one is there twice.
Raises ValueError in one line for a stage that keeps more for some data than for others, in a dry run for a host that was not told how much.
torch.autograd.graph.save_on_cpu is a bag for one tensor at a time. Differs: by storage, so that views of one block travel once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from minitrain import collectives
from minitrain.pipeline.lower import Receive, Send
from minitrain.pipeline.runtime import Kept, Runner
from minitrain.pipeline.schedule import Action
from minitrain.torch_private import storage_id

Unit = tuple[int, int, int, int]  # (stage, slice, rows, tokens): what decides how much a forward keeps
ALIGNED = 64  # bytes: any dtype may start there
Places = list[tuple[int, int]]  # where each block stands in the flat piece, and its bytes


class Bag:
    def __init__(self, lives: Iterable[Tensor], device: torch.device):
        self.stays = {storage_id(x.untyped_storage()) for x in lives}
        self.device = device
        self.blocks: list[Tensor] = []
        self.index: dict[int, int] = {}

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        if storage_id(storage) in self.stays or not storage.nbytes():
            return x
        if storage_id(storage) not in self.index:
            self.index[storage_id(storage)] = len(self.blocks)
            first = x.detach().as_strided((1,), (1,), 0).view(torch.uint8)
            self.blocks.append(first.as_strided((storage.nbytes(),), (1,), 0))
        return self.index[storage_id(storage)], x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, dtype, offset, size, stride = packed
        block = self.blocks[number]
        return (
            block[:0].view(dtype).as_strided(size, stride, block.storage_offset() // dtype.itemsize + offset)
        )

    @property
    def bytes(self) -> int:
        return sum(block.numel() for block in self.blocks)

    def empty(self) -> tuple[Tensor, Places]:
        sizes = [-(-block.numel() // ALIGNED) * ALIGNED for block in self.blocks]
        flat, places, at = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device), [], 0
        for block, size in zip(self.blocks, sizes):
            flat[at : at + block.numel()] = block
            places.append((at, block.numel()))
            at += size
        self.blocks.clear()
        self.index.clear()
        return flat, places

    def fill(self, flat: Tensor, places: Places) -> None:
        self.blocks = [flat[at : at + size] for at, size in places]


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


# ---- the interpreter --------------------------------------------------------------------------------------------------


class Balanced(Runner):
    """Runner for lists with E, H, G and L. `lent`: the bytes of what a forward keeps, by (stage, slice, rows, tokens); it grows by what
    this rank evicts and learns. A dry run, in which nothing can be learned, is given that of a dry run of the ranks that evict."""

    def __init__(self, *args, lent: Mapping[Unit, int] | None = None, **settings):
        super().__init__(*args, **settings)
        self.lent: dict[Unit, int] = dict(lent or {})
        self.told: set[Unit] = set()

    def begin(self) -> None:
        super().begin()
        self.bags: dict[tuple[int, int], Bag] = {}
        self.places: dict[tuple[int, int], Places] = {}

    def __call__(self, batch) -> Tensor:
        self.lengths: list[collectives.Handle] = []
        loss = super().__call__(batch)
        for handle in self.lengths:
            handle.wait()
        return loss

    @property
    def held_bytes(self) -> int:
        """Of all that this rank has for backwards: its own, guests, what is leaving and what is coming."""
        moving = [what for box in (self.inbox, self.outbox) for what in box if what.kind in "EG"]
        return sum(bag.bytes for bag in self.bags.values()) + sum(
            self.lent[self.unit(what)] for what in moving
        )

    def unit(self, what: Action) -> Unit:
        rows, length = self.units[what.microbatch][0].shape
        return what.stage, what.microbatch % self.schedule.slices, rows, length

    # ---- how much moves ----------------------------------------------------------------------------------------------

    def do(self, step) -> None:
        if (
            isinstance(step, (Send, Receive))
            and step.what.kind == "E"
            and self.unit(step.what) not in self.told
        ):
            self.told.add(self.unit(step.what))
            self.tell(*step) if isinstance(step, Send) else self.learn(*step)
        super().do(step)

    def tell(self, what: Action, to: int) -> None:
        length = torch.tensor([self.lent[self.unit(what)]], device=self.device)
        self.lengths.append(collectives.send(length, to, self.link(to), async_op=True))

    def learn(self, what: Action, source: int) -> None:
        length = collectives.receive(
            None, source, self.link(source, incoming=True), shape=(1,), dtype=torch.int64, device=self.device
        )
        if self.unit(what) not in self.lent:
            if type(length) is not Tensor:
                raise ValueError(
                    f"rank {self.rank} hosts what {what} lends, and a dry run cannot learn how much; give lent=, as `Balanced.lent` "
                    f"is after a dry run of rank {source}"
                )
            self.lent[self.unit(what)] = int(length)

    def message(self, what: Action) -> tuple[tuple[int, ...], torch.dtype]:
        return ((self.lent[self.unit(what)],), torch.uint8) if what.kind in "EG" else super().message(what)

    # ---- the actions -------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        if action.kind not in "EHGL":
            return super().act(action)
        with self.around(str(action)):
            {"E": self.evict, "H": self.host, "G": self.give_back, "L": self.load}[action.kind](action)

    def run_stage(self, stage: int, unit: int, kept: Kept) -> Tensor:
        lives = [
            *self.stages[stage].parameters(),
            *self.stages[stage].buffers(),
            *self.units[unit],
            *self.reducer.lives(),
        ]
        self.bags[stage, unit] = bag = Bag(lives, self.device)
        door = Door() if stage else None
        if door:
            kept.x = enter(kept.x, door)
        with torch.autograd.graph.saved_tensors_hooks(bag.pack, bag.unpack):
            y = super().run_stage(stage, unit, kept)
        kept.x = door or kept.x
        return y

    def backward(self, action: Action) -> None:
        super().backward(action)
        del self.bags[action[1:]]

    def evict(self, action: Action) -> None:
        flat, self.places[action[1:]] = self.bags[action[1:]].empty()
        if self.lent.setdefault(self.unit(action), flat.numel()) != flat.numel():
            raise ValueError(
                f"stage {action.stage} keeps {flat.numel()} bytes of {action}, and {self.lent[self.unit(action)]} of another microbatch "
                "of its shape; what it keeps must not depend on the data"
            )
        self.inbox[action] = flat  # the next step of the program sends it

    def host(self, action: Action) -> None:
        """Nothing: the receive is posted in front of H, and what comes is waited for at G."""

    def give_back(self, action: Action) -> None:
        self.inbox[action] = self.take(Action("E", *action[1:]))

    def load(self, action: Action) -> None:
        self.bags[action[1:]].fill(self.take(Action("G", *action[1:])), self.places.pop(action[1:]))
