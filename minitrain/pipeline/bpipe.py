"""BPipe: the first ranks of 1F1B, which hold the most, lend what their forwards kept to the last ranks, which hold the least.

    p=4: limit 3        rank 0 holds 4 in 1F1B, rank 3 one: rank 0 evicts (E) to its partner and loads (L) back before B
    rank 0   F0 F1 E1 F2 F3 E3 B0 F4 L1 B1 F5 E5 B2 F6 L3 B3 E6 F7 B4 L5 B5 L6 B6 B7
    rank 3   H1 F0 B0 F1 B1 F2 B2 H3 G1 F3 B3 ..                     H: has it as a guest, G: gives it back

In 1F1B rank x holds p-x microbatches and its partner p-1-x holds x+1, together p+1 whatever x; one more is on its way. Shared evenly
that is ceil((p+2)/2) on each: 5 instead of 8 for p=8. The pair is chosen so that it can sit in one node (ranks of a pipeline are
assigned to nodes in pairs), where links are fast.

A move runs beside one entry that computes: E stands an entry ahead of the forward that needs the room, L comes in while the entry before
its backward is computed. On the way both ends have it. So what is evicted is the newest (its backward is the furthest away) that was
there when the entry before began, and only what must be: about every second microbatch. `bpipe` makes 1F1B's lists with these actions
between; they take no time of a rank, and as long as a move takes no longer than a forward, the makespan is that of 1F1B to the unit.

`Balanced` is the interpreter: hooks collect what autograd saves (bag.py), the input of the stage too; E copies it into one flat piece,
lets go, and goes on while it is sent; L puts it back where the graph looks. The program (lower.py) says when a move is waited for.
How much it is depends on the shape of a microbatch only. So it is told once for each shape, and nobody asks a tensor for a number again.

Sends what a forward keeps at each eviction, the same back, and 8 bytes a shape. Memory: no rank ever holds more than the largest
`schedule.peak`, with what is leaving and what is coming: not one more, as the lists keep that room (tested beside the bytes held).
Only while E copies, before anything is computed again, the evicted one is there twice.
Raises ValueError in one line for sizes below 1, for lists whose moves wait in a circle, for a stage that keeps more for some data than
for others, and in a dry run for a host that was not told how much it will have.
Kim et al. 2023 (BPipe), ICML, PMLR 202, section 3. Differs: their bound is for even p; for odd p the last rank has room to spare.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minitrain import collectives
from minitrain.pipeline.bag import Bag, Door, Places, enter
from minitrain.pipeline.lower import Receive, Send
from minitrain.pipeline.one_direction import check_sizes, one_f_one_b
from minitrain.pipeline.runtime import Kept, Runner
from minitrain.pipeline.schedule import Action, Entry, Schedule, check
from minitrain.pipeline.simulate import Costs, simulate

Unit = tuple[int, int, int, int]                # (stage, slice, rows, tokens): what decides how much a forward keeps


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
    """The list of a rank with E where the limit demands it and L in front of the backward of what was evicted.

    Counted is what is here while an entry is computed: a microbatch that leaves in front of it, one that comes for the next.
    """
    moves: list[list[Entry]] = [[] for _ in entries]
    here, away = [], set()
    could_leave: list[int] = []                                         # here when the entry before began, and still
    for at, action in enumerate(entries):
        then = entries[at + 1] if at + 1 < len(entries) else None
        coming = [then.microbatch] if then is not None and then.kind == "B" and then.microbatch in away else []
        while len(here) + len(coming) + (action.kind == "F") > limit:
            newest = max(unit for unit in could_leave if unit in here and (action.kind == "F" or unit != action.microbatch))
            here.remove(newest)
            away.add(newest)
            moves[at - 1].insert(0, Action("E", action.stage, newest))
        could_leave = [unit for unit in here if unit != action.microbatch]
        if action.kind == "F":
            here.append(action.microbatch)
        else:
            here.remove(action.microbatch)
        for unit in coming:
            away.remove(unit)
            here.append(unit)
            moves[at + 1].append(Action("L", action.stage, unit))
    return [entry for before, action in zip(moves, entries) for entry in (*before, action)]


# ---- on real ranks ---------------------------------------------------------------------------------------------------

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
        return sum(bag.bytes for bag in self.bags.values()) + sum(self.lent[self.unit(what)] for what in moving)

    def unit(self, what: Action) -> Unit:
        rows, length = self.units[what.microbatch][0].shape
        return what.stage, what.microbatch % self.schedule.slices, rows, length

    # ---- how much moves ----------------------------------------------------------------------------------------------

    def do(self, step) -> None:
        if isinstance(step, (Send, Receive)) and step.what.kind == "E" and self.unit(step.what) not in self.told:
            self.told.add(self.unit(step.what))
            self.tell(*step) if isinstance(step, Send) else self.learn(*step)
        super().do(step)

    def tell(self, what: Action, to: int) -> None:
        length = torch.tensor([self.lent[self.unit(what)]], device=self.device)
        self.lengths.append(collectives.send(length, to, self.link(to), async_op=True))

    def learn(self, what: Action, source: int) -> None:
        length = collectives.receive(None, source, self.link(source, incoming=True), shape=(1,), dtype=torch.int64, device=self.device)
        if self.unit(what) not in self.lent:
            if type(length) is not Tensor:
                raise ValueError(f"rank {self.rank} hosts what {what} lends, and a dry run cannot learn how much; give lent=, as `Balanced.lent` "
                                 f"is after a dry run of rank {source}")
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
        lives = [*self.stages[stage].parameters(), *self.stages[stage].buffers(), *self.units[unit], *self.reducer.lives()]
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
            raise ValueError(f"stage {action.stage} keeps {flat.numel()} bytes of {action}, and {self.lent[self.unit(action)]} of another microbatch "
                             "of its shape; what it keeps must not depend on the data")
        self.inbox[action] = flat                                       # the next step of the program sends it

    def host(self, action: Action) -> None:
        """Nothing: the receive is posted in front of H, and what comes is waited for at G."""

    def give_back(self, action: Action) -> None:
        self.inbox[action] = self.take(Action("E", *action[1:]))

    def load(self, action: Action) -> None:
        self.bags[action[1:]].fill(self.take(Action("G", *action[1:])), self.places.pop(action[1:]))
