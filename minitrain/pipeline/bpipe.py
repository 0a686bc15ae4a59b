"""BPipe: the first ranks of 1F1B, which hold the most, lend what their forwards kept to the last ranks, which hold the least.

    p=4: limit 3        rank 0 holds 4 in 1F1B, rank 3 one: rank 0 evicts (E) to its partner and loads (L) back before B
    rank 0   F0 F1 F2 E2 F3 B0 F4 B1 E4 F5 L2 B2 F6 B3 E6 F7 L4 B4 B5 L6 B6 B7
    rank 3   F0 H2 B0 F1 B1 F2 B2 F3 B3 G2 F4 H4 ..                          H: has it as a guest, G: gives it back

In 1F1B rank x holds p-x microbatches and its partner p-1-x holds x+1, together p+1 whatever x; one more is in between while a new
forward runs and an old one has not come back. Shared evenly that is ceil((p+2)/2) on each: 5 instead of 8 for p=8. What is evicted
is the newest (its backward is the furthest away), as late as the limit allows, and only what must be: about every second microbatch.
The pair is chosen so that it can sit in one node (ranks of a pipeline are assigned to nodes in pairs), where links are fast.

`bpipe` makes 1F1B's lists with these four actions between; they take no time of a rank. E stands in front of the forward that would
be too much and travels behind it, G stands where it travels behind the forward in front of L: as long as a move takes no longer than
a forward, the makespan is that of 1F1B to the unit (`simulate` with Costs(move=...)).
`Balanced` is the interpreter that does it: hooks collect what autograd saves, each storage once and none of the parameters or the
batch; E sends these bytes in one flat message, with its length in front, and lets go; L puts them back where the graph looks. The
input of the stage goes too: the graph's first node keeps nothing.

Sends what a forward keeps, and 8 bytes for its length, at each eviction, and the same back. Memory: `schedule.peak`, tested beside the
bytes that are held. Moves are waited for here, so that never more is held than the lists say: on fast links one would let them run
behind the computation.
Raises ValueError in one line for sizes below 1.
Kim et al. 2023 (BPipe), ICML, PMLR 202, section 3. Differs: their bound is for even p; for odd p the last rank has room to spare.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minitrain import collectives
from minitrain.pipeline.one_direction import check_sizes, one_f_one_b
from minitrain.pipeline.runtime import Kept, Runner
from minitrain.pipeline.schedule import Action, Entry, Schedule, check
from minitrain.pipeline.simulate import Costs, simulate

ALIGNED = 64                                    # bytes: any dtype may start there


def bpipe(p: int, m: int) -> Schedule:
    """1F1B in which no rank holds more than ceil((p+2)/2) microbatches."""
    check_sizes("bpipe", p=p, m=m)
    plain, limit = one_f_one_b(p, m), (p + 3) // 2
    spans = simulate(plain, Costs(F=1, B=2)).spans
    ranks: list[list[Entry]] = [list(entries) for entries in plain.ranks]
    for rank in range(p // 2):
        partner = p - 1 - rank
        ranks[rank] = _with_moves(list(plain.ranks[rank]), limit)
        start = {span.entry: span.start for span in spans[rank]}
        guests: list[tuple[int, int, Action]] = []                      # (in front of which entry of the partner, order, what)
        for at, action in enumerate(ranks[rank]):
            user = next((other for other in ranks[rank][at:] if other.kind in "FB"), None)
            if action.kind == "E":                                      # it is there one forward later
                before = [i for i, span in enumerate(spans[partner]) if span.start >= start[user] + 1]
                guests.append((min(before, default=2 * m), at, Action("H", *action[1:])))
            if action.kind == "L":                                      # it leaves one forward earlier
                before = [i for i, span in enumerate(spans[partner]) if span.end > start[user] - 1]
                guests.append((min(before, default=2 * m), at, Action("G", *action[1:])))
        for before, _, action in sorted(guests, reverse=True):
            ranks[partner].insert(before, action)
    return check(Schedule(f"BPipe, p={p}, m={m}", tuple(map(tuple, ranks)), p, m))


def _with_moves(entries: list[Action], limit: int) -> list[Entry]:
    """The list of a rank with E where the limit demands it and L in front of the backward of what was evicted."""
    found, here, away = [], [], set()
    for at, action in enumerate(entries):
        _, stage, unit = action
        if action.kind == "F":
            then = entries[at + 1] if at + 1 < len(entries) else None
            back = then is not None and then.kind == "B" and then.microbatch in away
            while len(here) + 1 + back > limit:
                found.append(Action("E", stage, here.pop()))
                away.add(found[-1].microbatch)
            here.append(unit)
        else:
            if unit in away:
                away.remove(unit)
                found.append(Action("L", stage, unit))
                here.append(unit)
            here.remove(unit)
        found.append(action)
    return found


# ---- on real ranks ---------------------------------------------------------------------------------------------------

@dataclass
class Bag:
    """What autograd saved in one forward: each storage once, as bytes; `stays` are the storages that live anyway."""

    stays: set[int]
    blocks: list[Tensor] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        if storage.data_ptr() in self.stays or not storage.nbytes():
            return x
        if storage.data_ptr() not in self.index:
            self.index[storage.data_ptr()] = len(self.blocks)
            self.blocks.append(torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage))
        return self.index[storage.data_ptr()], x.dtype, x.storage_offset(), x.size(), x.stride()

    def unpack(self, packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, dtype, offset, size, stride = packed
        block = self.blocks[number]
        like = torch.empty(0, dtype=dtype, device=block.device)
        return like.set_(block.untyped_storage(), block.storage_offset() // like.element_size() + offset, size, stride)

    @property
    def bytes(self) -> int:
        return sum(block.numel() for block in self.blocks)

    def sizes(self) -> list[int]:
        return [-(-block.numel() // ALIGNED) * ALIGNED for block in self.blocks]

    def empty(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """All in one piece, and where each block stands in it; the bag is empty then."""
        sizes = self.sizes()
        flat, places, at = self.blocks[0].new_empty(sum(sizes)), [], 0
        for block, size in zip(self.blocks, sizes):
            flat[at:at + block.numel()] = block
            places.append((at, block.numel()))
            at += size
        self.blocks.clear()
        self.index.clear()
        return flat, places


class Door:
    """Stands for the input of a stage that is not kept: its gradient."""

    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """x as the beginning of a graph that does not hold it; its gradient goes to the door."""

    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, door: Door) -> Tensor:
        ctx.door = door
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        ctx.door.grad = dy
        return torch.zeros((), dtype=dy.dtype, device=dy.device), None, None


class Balanced(Runner):
    """Runner for lists with E, H, G and L."""

    def __call__(self, batch) -> Tensor:
        self.bags: dict[tuple[int, int], Bag] = {}
        self.places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.guests: dict[tuple[int, int], Tensor] = {}
        self.leaving: dict[tuple[int, int], tuple[Tensor, collectives.Handle]] = {}
        loss = super().__call__(batch)
        for _, handle in self.leaving.values():
            handle.wait()
        self.leaving.clear()
        return loss

    @property
    def held_bytes(self) -> int:
        """Of all that this rank has for backwards, its own and guests."""
        return sum(bag.bytes for bag in self.bags.values()) + sum(x.numel() for x in self.guests.values()) + sum(
            x.numel() for x, _ in self.leaving.values())

    def act(self, action: Action) -> None:
        if action.kind not in "EHGL":
            return super().act(action)
        with self.around(str(action)):
            {"E": self.evict, "H": self.host, "G": self.give_back, "L": self.load}[action.kind](action)

    def run_stage(self, stage: int, unit: int, kept: Kept) -> Tensor:
        lives = [*self.stages[stage].parameters(), *self.stages[stage].buffers(), *self.units[unit]]
        self.bags[stage, unit] = bag = Bag({x.untyped_storage().data_ptr() for x in lives})
        door = Door() if stage else None
        if door:
            kept.x = _Enter.apply(torch.zeros((), dtype=kept.x.dtype, device=self.device, requires_grad=True), kept.x.detach(), door)
        with torch.autograd.graph.saved_tensors_hooks(bag.pack, bag.unpack):
            y = super().run_stage(stage, unit, kept)
        kept.x = door or kept.x
        return y

    def backward(self, action: Action) -> None:
        super().backward(action)
        del self.bags[action[1:]]

    def evict(self, action: Action) -> None:
        partner = self.schedule.place[Action("H", *action[1:])]
        flat, self.places[action[1:]] = self.bags[action[1:]].empty()
        collectives.send(torch.tensor([flat.numel()], device=self.device), partner, self.link(partner), async_op=False)
        collectives.send(flat, partner, self.link(partner))

    def host(self, action: Action) -> None:
        owner = self.schedule.place[Action("E", *action[1:])]
        size = collectives.receive(None, owner, self.link(owner, incoming=True), shape=(1,), dtype=torch.int64, device=self.device)
        evicting = self.schedule.ranks[owner]                           # it has come so far: what it loaded before has left here
        for back in [what for what in self.leaving if evicting.index(Action("L", *what)) < evicting.index(Action("E", *action[1:]))]:
            self.leaving.pop(back)[1].wait()
        self.guests[action[1:]] = collectives.receive(None, owner, self.link(owner, incoming=True), shape=(int(size),), dtype=torch.uint8,
                                                      device=self.device)

    def give_back(self, action: Action) -> None:
        owner, flat = self.schedule.place[Action("L", *action[1:])], self.guests.pop(action[1:])
        self.leaving[action[1:]] = flat, collectives.send(flat, owner, self.link(owner), async_op=True)

    def load(self, action: Action) -> None:
        partner, places = self.schedule.place[Action("G", *action[1:])], self.places.pop(action[1:])
        size = -(-(places[-1][0] + places[-1][1]) // ALIGNED) * ALIGNED
        flat = collectives.receive(None, partner, self.link(partner, incoming=True), shape=(size,), dtype=torch.uint8, device=self.device)
        self.bags[action[1:]].blocks = [flat[at:at + size] for at, size in places]
