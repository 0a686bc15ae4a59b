"""Evictions on real ranks: activations leave for another rank between forward and backward (lists: `bpipe`).

    saved = SavedTensors(stays, device)              stays: what stays anyway, such as parameters
    with saved_tensors_hooks(saved.pack, saved.unpack): y = stage(x)
    flat, places = saved.evict()                     one piece of bytes; the graph now holds no tensor
    saved.load(flat, places)                         what autograd kept is views of it again

In place of tensors the graph holds the number of a storage (told apart by identity: in a dry run it has no
address) and how to view it. Its first node would still hold the stage's input; `without_input`'s does not. E
evicts and the rank computes on while the bytes travel, L loads them; their number depends on a microbatch's
shape alone. Sends what a forward keeps at each eviction, the same back, and 8 bytes per shape (the number).
Memory: at most the largest `schedule.peak` on any rank, moves included; while E copies, one microbatch twice.
Kim et al. 2023 (BPipe), ICML, section 3. Differs from torch.autograd.graph.save_on_cpu: views travel once.
"""

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor

from minitrain.pipeline.lower import Receive, Send, Step
from minitrain.pipeline.runtime import InFlight, Runner
from minitrain.pipeline.schedule import Action
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.torch_private import storage_id

Shape = tuple[int, int, int, int]  # (stage, slice, rows, tokens): what decides how much a forward keeps
ALIGNED = 64  # bytes: a multiple of the size of every dtype
Places = list[tuple[int, int]]  # where each block stands in the flat piece, and its bytes


class SavedTensors:
    def __init__(self, stays: Iterable[Tensor], device: torch.device):
        self.stays, self.device = {storage_id(x.untyped_storage()) for x in stays}, device
        self.blocks: list[Tensor] = []  # the bytes of each storage
        self.index: dict[int, int] = {}  # storage -> its place among the blocks

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        if storage_id(storage) in self.stays or not storage.nbytes():
            return x
        number = self.index.setdefault(storage_id(storage), len(self.blocks))
        if number == len(self.blocks):
            first = x.detach().as_strided((1,), (1,), 0).view(torch.uint8)
            self.blocks.append(first.as_strided((storage.nbytes(),), (1,), 0))
        return number, x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, dtype, offset, size, stride = packed
        block = self.blocks[number]
        offset += block.storage_offset() // dtype.itemsize
        return block[:0].view(dtype).as_strided(size, stride, offset)

    def evict(self) -> tuple[Tensor, Places]:
        ends = list(accumulate(-(-block.numel() // ALIGNED) * ALIGNED for block in self.blocks))
        flat = torch.empty(sum(ends[-1:]), dtype=torch.uint8, device=self.device)
        places = [(at, block.numel()) for at, block in zip([0, *ends], self.blocks)]
        for (at, size), block in zip(places, self.blocks):
            flat[at : at + size] = block
        self.blocks.clear()
        self.index.clear()
        return flat, places

    def load(self, flat: Tensor, places: Places) -> None:
        self.blocks = [flat[at : at + size] for at, size in places]


def without_input(x: Tensor, input_grad: SimpleNamespace) -> Tensor:
    """x as the start of a graph that does not keep it; its gradient goes to `input_grad.grad`."""

    def backward(dys, *_) -> tuple[Tensor]:
        (input_grad.grad,) = dys
        return (dys[0].new_zeros(()),)

    root = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
    return custom_vjp(lambda _: (x.detach(), ()), backward, root)


class Balanced(Runner):
    """Runner for lists with E, H, G and L. `lent`: how many bytes a forward keeps, by Shape; it grows as this
    rank evicts, or is told. A dry run of a rank that hosts must be given it."""

    methods = Runner.methods | {"E": "evict", "H": "host", "G": "give_back", "L": "load"}

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.lent: dict[Shape, int] = {}
        self.told: set[Shape] = set()

    def begin(self) -> None:
        super().begin()
        self.saved: dict[tuple[int, int], SavedTensors] = {}
        self.places: dict[tuple[int, int], Places] = {}

    @property
    def activation_bytes(self) -> int:
        """All that this rank holds for backwards: its own, guests, and moves under way."""
        moving = (self.lent[self.unit(what)] for what in (*self.boundary, *self.sending) if what.kind in "EG")
        return sum(block.numel() for saved in self.saved.values() for block in saved.blocks) + sum(moving)

    def unit(self, what: Action) -> Shape:
        rows, length = self.units[what.microbatch][0].shape
        return what.stage, what.microbatch % self.schedule.slices, rows, length

    def do(self, step: Step) -> None:
        evicted = isinstance(step, Send | Receive) and step.what.kind == "E"
        if evicted and self.unit(step.what) not in self.told:
            (what, other), shape = step, self.unit(step.what)
            self.told.add(shape)
            if isinstance(step, Send):
                size = torch.tensor([self.lent[shape]], device=self.device)
                self.sending[what._replace(kind="size")] = self.send(size, other)
            else:
                length = self.receive(other, (1,), torch.int64)
                if shape not in self.lent:  # a dry run is told before
                    self.lent[shape] = int(length)
        super().do(step)

    def message(self, what: Action) -> tuple[tuple[int, ...], torch.dtype]:
        return ((self.lent[self.unit(what)],), torch.uint8) if what.kind in "EG" else super().message(what)

    def run_stage(self, stage: int, unit: int, mine: InFlight) -> Tensor:
        module = self.stages[stage]
        stays = (*module.parameters(), *module.buffers(), *self.units[unit], *self.reducer.gathered_buffers())
        self.saved[stage, unit] = saved = SavedTensors(stays, self.device)
        input_grad = SimpleNamespace(grad=None) if stage else None  # in place of the input, which is not kept
        if input_grad:
            mine.x = without_input(mine.x, input_grad)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            y = super().run_stage(stage, unit, mine)
        mine.x = input_grad or mine.x
        return y

    def backward(self, action: Action) -> None:
        super().backward(action)
        del self.saved[action[1:]]

    def evict(self, action: Action) -> None:
        flat, self.places[action[1:]] = self.saved[action[1:]].evict()
        if flat.numel() != self.lent.setdefault(self.unit(action), flat.numel()):
            raise ValueError(f"{action} moves {flat.numel()} bytes; they must not depend on the data")
        self.boundary[action] = flat  # the next step of the program sends it

    def host(self, action: Action) -> None:
        """Nothing to do: the receive was posted before H, and G waits for it."""

    def give_back(self, action: Action) -> None:
        self.boundary[action] = self.get(Action("E", *action[1:]))

    def load(self, action: Action) -> None:
        self.saved[action[1:]].load(self.get(Action("G", *action[1:])), self.places.pop(action[1:]))
