"""A checkpoint that is nowhere: the pieces that ranks have in memory, for a run of any other layout.

    live = Live(old_run.pieces(), old_run.plain_state(), group)     what each rank of `group` can give
    new_run.load_pieces(live)                                       what each of them wants

It has the protocol of checkpoint/load.Saved: `check` notes what this rank wants; at the first `fill` ranks
tell each other, and one all-to-all moves it. What a rank has itself moves nothing; of copies givers take
turns. Sends each wanted byte that is not here once (`moved_bytes` of this rank), and some 60 bytes of text
per piece to all. Memory: what is sent and what arrives, until `finish`. From ZeRO-3 over n ranks to whole
float32 parameters each rank sends (n-1)/n * 4P bytes. Random states stay where they are.

Survivors go on with it (survive.py); a job changes its layout, an actor goes from training to generating.
Duan et al. 2024, Parcae, NSDI (live migration); Yao et al. 2023, DeepSpeed-Chat, arXiv:2308.01320, section 4
(the hybrid engine). Differs: any layout to any other, optimizer states too.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece, overlap, part_of
from minitrain.systems.checkpoint.in_memory import gather_plain


class Live:
    """All ranks of `group` make it and load from it together; a rank may have nothing to give. A piece that
    nobody has is a ValueError of `check`, before anything has changed."""

    def __init__(self, pieces: Iterable[Piece], plain: dict[str, Any], group: ProcessGroup):
        self.group, self.rank, self.moved_bytes = group, group.rank(), 0
        self.mine = [piece for piece in pieces if not piece.name.startswith("random/")]
        told = [(p.name, p.whole, p.start, p.shape, str(p.values.dtype)[6:]) for p in self.mine]
        self.whole: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.givers: dict[str, dict[tuple, list]] = {}  # name -> (start, shape) -> [(rank, its number there)]
        self.plain: dict[str, Any] = {}
        for rank, (theirs, numbers) in enumerate(gather_plain((told, plain), group)):
            for number, (name, whole, start, shape, dtype) in enumerate(theirs):
                self.whole[name] = getattr(torch, dtype), tuple(whole)
                places = self.givers.setdefault(name, {})
                places.setdefault((tuple(start), tuple(shape)), []).append((rank, number))
            for key, value in numbers.items():
                if isinstance(value, dict):
                    self.plain.setdefault(key, {}).update(value)
                else:
                    self.plain[key] = value
        self.wants: dict[tuple, list] = {}  # of a piece -> [(giver, number, start, shape)]
        self.arrived: dict[tuple, Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.whole

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """{"layers.0.tokens": shape of the whole} of all names that begin with kind, as "parameters"."""
        named = {name.partition("/"): whole for name, (_, whole) in self.whole.items()}
        return {name: whole for (begin, _, name), whole in named.items() if begin == kind}

    def states_of(self, parameter: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """{"exp_avg": (dtype, shape of the whole)}: what the optimizer had of a parameter."""
        begin = f"optimizer/{parameter}/"
        return {name.removeprefix(begin): at for name, at in self.whole.items() if name.startswith(begin)}

    def check(self, piece: Piece) -> None:
        """ValueError: no rank has it, not all of it, or as something else."""
        have, now = self.whole.get(piece.name), (piece.values.dtype, tuple(piece.whole))
        if have != now:
            there = f"{have[0]} {list(have[1])}" if have else "on no rank"
            raise ValueError(f"{piece.name} is {now[0]} {list(now[1])} in this run and {there} in the other")
        parts = []
        for (start, shape), holders in self.givers[piece.name].items():
            if common := overlap(start, shape, piece.start, piece.shape):
                turn = holders[(self.rank + len(self.wants)) % len(holders)]
                giver = next((one for one in holders if one[0] == self.rank), turn)
                parts.append((*giver, *common))
        found = sum(math.prod(shape) for *_, shape in parts)
        if found != piece.values.numel():
            raise ValueError(f"ranks have {found} of {piece.values.numel()} elements of {piece.name}")
        self.wants[key_of(piece)] = parts

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
        asked: list[list] = [[] for _ in range(self.group.size())]
        places: list[list] = [[] for _ in asked]
        for key, parts in self.wants.items():
            for number, (giver, own, start, shape) in enumerate(parts):
                if giver != self.rank:
                    asked[giver].append((own, start, shape))
                    places[giver].append(((*key, number), self.whole[key[0]][0], shape))
        wanted = [theirs[self.rank] for theirs in gather_plain(asked, self.group)]
        outgoing = [[flat_bytes(part_of(self.mine[own], *at)) for own, *at in theirs] for theirs in wanted]
        sends = [sum(map(len, parts)) for parts in outgoing]
        receives = [sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in one) for one in places]
        nothing = torch.empty(0, dtype=torch.uint8, device=self.mine[0].values.device if self.mine else "cpu")
        data = torch.cat([nothing, *(part for parts in outgoing for part in parts)])
        data = collectives.all_to_all(data, self.group, send_sizes=sends, receive_sizes=receives, name="live")
        self.moved_bytes, self.arrived = sum(sends), {}
        for key, dtype, shape in (place for one in places for place in one):
            size = math.prod(shape) * dtype.itemsize
            self.arrived[key], data = data[:size].clone().view(dtype).view(shape), data[size:]


def key_of(piece: Piece) -> tuple:
    return piece.name, piece.start, piece.shape


def flat_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
