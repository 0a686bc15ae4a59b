"""State that is on no disk: pieces that ranks have in memory, for a run of any other layout.

    live = Live([(old_run.pieces(), old_run.plain_state())], group)     what each rank of `group` can give
    new_run.load_pieces(live)                                           what each of them wants

It is a checkpoint/load.Saved, whose entries are pieces that ranks have: `check` also notes what this rank
wants; at the first `fill` ranks tell each other, and one all-to-all moves it. What a rank has itself moves
nothing; of copies givers take turns. Sends each wanted byte that is not here once (`moved_bytes` of this
rank), and some 60 bytes of text per piece to all. Memory: what is sent and what arrives, until `finish`. From
ZeRO-3 over n ranks to whole float32 parameters each rank sends (n-1)/n * 4P bytes. Random states stay where
they are.

Survivors go on with it (survive.py); a job changes its layout, an actor goes from training to generating.
Duan et al. 2024, Parcae, NSDI (live migration); Yao et al. 2023, DeepSpeed-Chat, arXiv:2308.01320, section 4
(the hybrid engine). Differs: any layout to any other, optimizer states too. `Copies` are for pieces that one
rank alone has.
"""

import io
import math
from collections import namedtuple
from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.checkpoint.load import Saved
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints
from minitrain.ranks.pieces import Piece, overlap, part_of, share_out
from minitrain.systems.checkpoint.in_memory import Lost, gather_plain

Share = tuple[Iterable[Piece], dict[str, Any]]  # pieces and plain state, as a run gives them
Given = namedtuple("Given", "name whole start shape dtype givers")  # {rank: which of its pieces it is}


class Live(Saved):
    """All ranks of `group` make it and load from it together; a rank may have nothing to give, or shares of
    others as well. A piece that nobody has is a ValueError of `check`, before anything has changed."""

    lacks = "the ranks have {}: those that had it are gone, or it is of another model"

    def __init__(self, shares: Iterable[Share], group: ProcessGroup):
        shares = list(shares)
        self.group, self.rank, self.moved_bytes = group, group.rank(), 0
        self.mine, given = [piece for pieces, _ in shares for piece in lasting(pieces)], {}
        told = [(p.name, p.whole, p.start, p.shape, str(p.values.dtype)[6:]) for p in self.mine]
        everyone = gather_plain((told, [plain for _, plain in shares]), group)
        for rank, (theirs, _) in enumerate(everyone):
            for number, (name, whole, start, shape, dtype) in enumerate(theirs):
                what = name, tuple(whole), tuple(start), tuple(shape), getattr(torch, dtype)
                given.setdefault(what, Given(*what, {})).givers[rank] = number
        files = [SimpleNamespace(entries=(), plain=plain) for _, those in everyone for plain in those]
        super().__init__([SimpleNamespace(entries=given.values(), plain={}), *files])
        self.wants: dict[tuple, list] = {}  # of a piece -> parts (giver, number of its piece, start, shape)
        self.dtypes: dict[tuple, torch.dtype] = {}  # of each part
        self.arrived: dict[tuple, Tensor] | None = None

    def check(self, piece: Piece) -> None:
        super().check(piece)
        parts = self.wants[key_of(piece)] = []
        for entry in self.entries[piece.name]:
            if common := overlap(entry.start, entry.shape, piece.start, piece.shape):
                turn = list(entry.givers)[(self.rank + len(self.wants)) % len(entry.givers)]
                giver = self.rank if self.rank in entry.givers else turn
                parts.append((giver, entry.givers[giver], *common))
                self.dtypes[parts[-1]] = entry.dtype

    def fill(self, piece: Piece) -> None:
        """Write what ranks have into a piece that was checked; the first one is a collective."""
        self._move()
        for part in self.wants[key_of(piece)]:
            giver, own, *at = part
            there = part_of(self.mine[own], *at) if giver == self.rank else self.arrived[part]
            part_of(piece, *at).copy_(there)

    def finish(self) -> None:
        """After the last `fill`: what has arrived may go."""
        self._move()
        self.arrived = {}

    @torch.no_grad()
    def _move(self) -> None:
        if self.arrived is not None:
            return
        givers = range(self.group.size())
        coming = [[part for part in self.dtypes if part[0] == one != self.rank] for one in givers]
        asked = [one[self.rank] for one in gather_plain(coming, self.group)]
        flat = lambda x: x.detach().contiguous().reshape(-1).view(torch.uint8)
        going = [[flat(part_of(self.mine[own], *at)) for _, own, *at in one] for one in asked]
        sizes = [[math.prod(part[-1]) * self.dtypes[part].itemsize for part in one] for one in coming]
        nothing = torch.empty(0, dtype=torch.uint8, device=self.mine[0].values.device if self.mine else "cpu")
        data, sends = torch.cat([nothing, *chain(*going)]), [sum(map(len, parts)) for parts in going]
        how = dict(send_sizes=sends, receive_sizes=[*map(sum, sizes)], name="live")
        data = collectives.all_to_all(data, self.group, **how).split([*chain(*sizes)])
        self.moved_bytes, self.arrived = sum(sends), {}
        for part, x in zip(chain(*coming), data):
            self.arrived[part] = x.clone().view(self.dtypes[part]).view(part[-1])


def lasting(pieces: Iterable[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not piece.name.startswith("random/")]


def key_of(piece: Piece) -> tuple:
    return piece.name, piece.start, piece.shape


class Copies:
    """Each rank's share of the state once more in its neighbour's memory, where nobody else holds the same.

        copies.keep(number, step, run)    rank r has its own share of this step, and that of rank r - 1
        copies.whole(group)               the newest step of which every share is somewhere; those it has

    Of n ranks any may die, more at once too, but for neighbours: then what the one had and its copy at the
    other are gone, and `whole` is Lost. Sends one share per rank and step that is copied (with ZeRO and Adam
    in float32 12P/n bytes, and what torch.save adds), and 8 bytes ahead of it. Memory: both shares, of the
    last two steps that were copied, for a rank may die while one is under way. Wang et al. 2023, Gemini,
    SOSP, sections 4 and 5. Differs: as tensors in the process that trains, since that survives."""

    def __init__(self, every: int = 1):
        """Of each `every`-th step, 0: of none."""
        require_ints(every=every)
        self.every, self.sent_bytes = every, 0
        self.shares: dict[tuple, dict] = {}  # (number, step, ranks) -> {rank: share}

    def keep(self, number: int, step: int, run, first: bool = False) -> None:
        """On all ranks: copy the shares of `step`, if it is one to copy, or the `first` of a layout. Numbers
        rise, also where steps are made again."""
        if not self.every or step % self.every and not first:
            return
        world, file = collectives.world(), io.BytesIO()
        rank, ranks = world.rank(), world.size()
        own = lasting(share_out(run.pieces()))
        pieces = [(p.name, p.whole, p.start, p.values.cpu().clone()) for p in own]
        torch.save((pieces, run.plain_state()), file)
        mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        shares = {rank: mine}
        if ranks > 1:
            ring = (rank + 1) % ranks, (rank - 1) % ranks, world
            size = collectives.exchange(torch.tensor([len(mine)]), *ring)
            shares[ring[1]] = collectives.exchange(mine, *ring, like=mine.new_empty(int(size)))
            self.sent_bytes += 8 + len(mine)
        self.shares[number, step, ranks] = shares
        for old in sorted(self.shares)[:-2]:
            del self.shares[old]

    def whole(self, group: ProcessGroup) -> tuple[int, list[Share]]:
        """The newest step of which every share is somewhere, and those that are here. Lost: there is none."""
        held = [(at, sorted(shares)) for at, shares in self.shares.items()]
        there: dict[tuple, set[int]] = {}
        for at, owners in chain(*gather_plain(held, group)):
            there.setdefault(tuple(at), set()).update(owners)
        gone = {at: min(set(range(at[2])) - owners, default=None) for at, owners in sorted(there.items())}
        if not (whole := [at for at, rank in gone.items() if rank is None]):
            said = [f"the share of rank {rank} of {n} at step {step}" for (_, step, n), rank in gone.items()]
            raise Lost(f"{said[-1]} has died with its neighbour's copy" if said else "nothing was copied")
        files = self.shares.get(whole[-1], {}).values()
        found = [torch.load(io.BytesIO(file.numpy())) for file in files]
        return whole[-1][1], [([Piece(*one) for one in pieces], plain) for pieces, plain in found]
