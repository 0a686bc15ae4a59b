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
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.pieces import Piece, share_out
from minitrain.systems.checkpoint.in_memory import Lost, gather_plain
from minitrain.systems.faults.live import flat_bytes, lasting, tensors, told


class Copies:
    def __init__(self, every: int = 1):
        require_positive_ints(every=every)
        self.every, self.sent_bytes = every, 0
        self.shares: dict[int, tuple] = {}  # number -> (step, ranks, {rank: share})

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
        held = [(number, *layout, sorted(shares)) for number, (*layout, shares) in self.shares.items()]
        owners: dict[tuple, set[int]] = {}
        for *at, there in chain(*gather_plain(held, group)):
            owners.setdefault(tuple(at), set()).update(there)
        gone = {at: set(range(at[2])) - there for at, there in owners.items()}
        for number, step, _ in sorted((at for at, ranks in gone.items() if not ranks), reverse=True)[:1]:
            return step, *unpacked(self.shares[number][2].values() if number in self.shares else ())
        if not gone:
            raise Lost("nothing was copied")
        (_, step, ranks), lost = max(gone.items())
        what = f"the share of rank {min(lost)} of {ranks} at step {step}"
        raise Lost(f"{what} has died with its neighbour's copy")


def packed(pieces: list[Piece], plain: dict[str, Any]) -> Tensor:
    """Names and numbers as text, then the bytes of all; a copy, on the host."""
    pieces = lasting(pieces)
    text = json.dumps([told(pieces), plain]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(flat_bytes(piece.values).cpu() for piece in pieces)])


def unpacked(shares: Iterable[Tensor]) -> tuple[list[Piece], dict[str, Any]]:
    pieces, plain = [], {}
    for share in shares:
        size = int.from_bytes(share[:8].numpy().tobytes(), "little")
        said, numbers = json.loads(share[8 : 8 + size].numpy().tobytes())
        values = tensors(share[8 + size :], ((getattr(torch, dtype), shape) for *_, shape, dtype in said))
        pieces += [Piece(one[0], tuple(one[1]), tuple(one[2]), x) for one, x in zip(said, values)]
        for key, value in numbers.items():
            plain[key] = plain.get(key, {}) | value if isinstance(value, dict) else value
    return pieces, plain
