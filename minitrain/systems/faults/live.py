"""A checkpoint that is nowhere: the pieces that ranks have in memory, for a run of any other layout.

    live = Live(old_run.pieces(), old_run.plain_state(), group)     what each rank of `group` can give
    new_run.load_pieces(live)                                       what each of them wants

It is a checkpoint/load.Saved, whose entries are pieces that ranks have: `check` also notes what this rank
wants; at the first `fill` ranks tell each other, and one all-to-all moves it. What a rank has itself moves
nothing; of copies givers take turns. Sends each wanted byte that is not here once (`moved_bytes` of this
rank), and some 60 bytes of text per piece to all. Memory: what is sent and what arrives, until `finish`. From
ZeRO-3 over n ranks to whole float32 parameters each rank sends (n-1)/n * 4P bytes. Random states stay where
they are.

Survivors go on with it (survive.py); a job changes its layout, an actor goes from training to generating.
Duan et al. 2024, Parcae, NSDI (live migration); Yao et al. 2023, DeepSpeed-Chat, arXiv:2308.01320, section 4
(the hybrid engine). Differs: any layout to any other, optimizer states too.
"""

import math
from collections import namedtuple
from collections.abc import Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.checkpoint.load import Saved
from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece, overlap, part_of
from minitrain.systems.checkpoint.in_memory import gather_plain

Given = namedtuple("Given", "name whole start shape dtype givers")  # {rank: which of its pieces it is}


class Live(Saved):
    """All ranks of `group` make it and load from it together; a rank may have nothing to give. A piece that
    nobody has is a ValueError of `check`, before anything has changed."""

    lacks = "the ranks have {}: those that had it are gone, or it is of another model"

    def __init__(self, pieces: Iterable[Piece], plain: dict[str, Any], group: ProcessGroup):
        self.group, self.rank, self.moved_bytes = group, group.rank(), 0
        self.mine, given = lasting(pieces), {}
        everyone = gather_plain((told(self.mine), plain), group)
        for rank, (theirs, _) in enumerate(everyone):
            for number, (name, whole, start, shape, dtype) in enumerate(theirs):
                what = name, tuple(whole), tuple(start), tuple(shape), getattr(torch, dtype)
                given.setdefault(what, Given(*what, {})).givers[rank] = number
        entries = [given.values()] + [()] * (len(everyone) - 1)
        super().__init__(SimpleNamespace(entries=e, plain=own) for e, (_, own) in zip(entries, everyone))
        self.wants: dict[tuple, list] = {}  # of a piece -> [(giver, number, start, shape)]
        self.arrived: dict[tuple, Tensor] | None = None

    def check(self, piece: Piece) -> None:
        super().check(piece)
        parts = self.wants[key_of(piece)] = []
        for entry in self.entries[piece.name]:
            if common := overlap(entry.start, entry.shape, piece.start, piece.shape):
                turn = list(entry.givers)[(self.rank + len(self.wants)) % len(entry.givers)]
                giver = self.rank if self.rank in entry.givers else turn
                parts.append((giver, entry.givers[giver], *common))

    def fill(self, piece: Piece) -> None:
        """Write what ranks have into a piece that was checked; the first one is a collective."""
        self._move()
        for number, (giver, own, start, shape) in enumerate(self.wants[key_of(piece)]):
            here = giver == self.rank
            there = part_of(self.mine[own], start, shape) if here else self.arrived[*key_of(piece), number]
            part_of(piece, start, shape).copy_(there)

    def finish(self) -> None:
        """After the last `fill`: what has arrived may go."""
        self._move()
        self.arrived = {}

    @torch.no_grad()
    def _move(self) -> None:
        if self.arrived is not None:
            return
        coming: list[list] = [[] for _ in range(self.group.size())]  # from each giver
        for key, parts in self.wants.items():
            for number, (giver, *what) in enumerate(parts):
                if giver != self.rank:
                    coming[giver].append(((*key, number), *what))
        asked = gather_plain([[what for _, *what in one] for one in coming], self.group)
        going = [[flat_bytes(part_of(self.mine[own], *at)) for own, *at in one[self.rank]] for one in asked]
        places = [[(self.entries[key[0]][0].dtype, shape) for key, _, _, shape in one] for one in coming]
        sends = [sum(map(len, parts)) for parts in going]
        receives = [sum(math.prod(shape) * dtype.itemsize for dtype, shape in one) for one in places]
        nothing = torch.empty(0, dtype=torch.uint8, device=self.mine[0].values.device if self.mine else "cpu")
        data = torch.cat([nothing, *chain(*going)])
        data = collectives.all_to_all(data, self.group, send_sizes=sends, receive_sizes=receives, name="live")
        self.moved_bytes = sum(sends)
        self.arrived = dict(zip((key for one in coming for key, *_ in one), tensors(data, chain(*places))))


def lasting(pieces: Iterable[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not piece.name.startswith("random/")]


def told(pieces: list[Piece]) -> list[tuple]:
    """What they are, for others to hear."""
    return [(p.name, p.whole, p.start, p.shape, str(p.values.dtype)[6:]) for p in pieces]


def tensors(data: Tensor, places: Iterable[tuple]) -> Iterator[Tensor]:
    """Copies out of a row of bytes, of each (dtype, shape) one after the other."""
    for dtype, shape in places:
        size = math.prod(shape) * dtype.itemsize
        yield data[:size].clone().view(dtype).view(shape)
        data = data[size:]


def key_of(piece: Piece) -> tuple:
    return piece.name, piece.start, piece.shape


def flat_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
