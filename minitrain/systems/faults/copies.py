"""Each rank's share of the state once more in its neighbour's memory, where nobody else holds the same.

    copies.keep(step, run)        rank r has its own share of this step, and that of rank r - 1
    copies.whole(group)           the newest step of which every share is somewhere; what this rank has of it

Of n ranks any may die, more at once too, but for neighbours: then what the one had and its copy at the other
are gone, and `whole` is Lost. Sends one share per rank and step that is copied (with ZeRO and Adam in float32
12P/n bytes, and its names as text), and 8 bytes ahead of it. Memory: both shares, of the last two steps that
were copied, for a rank may die while one is under way. Wang et al. 2023, Gemini, SOSP, sections 4 and 5.
Differs: as tensors in the process that trains, since that survives.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.pieces import Piece, share_out
from minitrain.systems.checkpoint.in_memory import Lost, gather_plain
from minitrain.systems.faults.live import flat_bytes


class Copies:
    def __init__(self, every: int = 1):
        require_positive_ints(every=every)
        self.every, self.sent_bytes = every, 0
        self.shares: dict[
            int, tuple[int, int, dict[int, Tensor]]
        ] = {}  # number -> (step, ranks, {rank: share})

    def keep(self, number: int, step: int, run, first: bool = False) -> None:
        """On all ranks: copy the shares of `step`, if it is one to copy, or the `first` of a layout. Numbers
        rise, also where steps are made again."""
        if step % self.every and not first:
            return
        world = collectives.world()
        rank, ranks = world.rank(), world.size()
        mine = packed(share_out(run.pieces()), run.plain_state())
        shares = {rank: mine}
        if ranks > 1:
            to, before = (rank + 1) % ranks, (rank - 1) % ranks
            size = collectives.exchange(torch.tensor([len(mine)]), to, before, world)
            like = mine.new_empty(int(size))
            shares[before] = collectives.exchange(mine, to, before, world, like=like)
            self.sent_bytes += 8 + len(mine)
        self.shares[number] = step, ranks, shares
        for old in sorted(self.shares)[:-2]:
            del self.shares[old]

    def whole(self, group: ProcessGroup) -> tuple[int, list[Piece], dict[str, Any]]:
        """Step, pieces, and plain state. Lost: of no step every share is somewhere."""
        told = [
            (number, step, ranks, sorted(shares)) for number, (step, ranks, shares) in self.shares.items()
        ]
        owners: dict[tuple, set[int]] = {}
        for number, step, ranks, there in (one for told in gather_plain(told, group) for one in told):
            owners.setdefault((number, step, ranks), set()).update(there)
        why = "nothing was copied"
        for (number, step, ranks), there in sorted(owners.items(), reverse=True):
            if len(there) == ranks:
                shares = self.shares[number][2] if number in self.shares else {}
                return step, *unpacked(shares.values())
            gone = min(set(range(ranks)) - there)
            why = f"the share of rank {gone} of {ranks} at step {step} has died with its neighbour's copy"
        raise Lost(why)


def packed(pieces: list[Piece], plain: dict[str, Any]) -> Tensor:
    """Names and numbers as text, then the bytes of all; a copy, on the host."""
    pieces = [piece for piece in pieces if not piece.name.startswith("random/")]
    told = [(p.name, p.whole, p.start, p.shape, str(p.values.dtype)[6:]) for p in pieces]
    text = json.dumps([told, plain]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(flat_bytes(piece.values).cpu() for piece in pieces)])


def unpacked(shares) -> tuple[list[Piece], dict[str, Any]]:
    pieces: list[Piece] = []
    plain: dict[str, Any] = {}
    for share in shares:
        size = int.from_bytes(share[:8].numpy().tobytes(), "little")
        told, more = json.loads(share[8 : 8 + size].numpy().tobytes())
        pieces += _pieces(told, share[8 + size :])
        for key, value in more.items():
            plain[key] = plain.get(key, {}) | value if isinstance(value, dict) else value
    return pieces, plain


def _pieces(told: list, data: Tensor) -> Iterator[Piece]:
    for name, whole, start, shape, word in told:
        dtype = getattr(torch, word)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield Piece(name, tuple(whole), tuple(start), data[:size].clone().view(dtype).view(shape))
        data = data[size:]
