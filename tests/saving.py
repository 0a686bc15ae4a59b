"""Saving and loading without the machinery of a Saver: each rank writes its file, any rank reads them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minitrain import collectives
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import File, Written, write_file
from minitrain.checkpoint.load import Saved
from minitrain.compose.run import Run
from minitrain.ranks.pieces import Piece, part_of, share_out, whole_piece


class Quick(Disk):
    """No power is cut during a test."""

    def sync(self, file: int) -> None: ...


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    files: tuple[Written, ...]


def save(run: Run, folder: Path) -> Written:
    """On a rank: its file."""
    if collectives.world().rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    collectives.barrier(collectives.world())
    path = folder / f"rank-{collectives.world().rank()}"
    return write_file(Quick(), path, share_out(run.pieces()), run.plain_state())


def all_files(folder: Path, written) -> Checkpoint:
    """On a rank: those of all."""
    mine = torch.tensor([[written.size, int(written.header_hash, 16) - (1 << 63)]])
    found = collectives.all_gather(mine, collectives.world()).tolist()
    files = (
        type(written)(f"rank-{rank}", size, f"{number + (1 << 63):016x}")
        for rank, (size, number) in enumerate(found)
    )
    return Checkpoint(folder, tuple(files))


def saved_in(checkpoint: Checkpoint, broadcast: bool = False) -> Saved:
    return Saved([File(checkpoint.folder / file.name, file) for file in checkpoint.files], broadcast)


def load(run: Run, checkpoint: Checkpoint, broadcast: bool = False) -> list[str]:
    return run.load_pieces(saved_in(checkpoint, broadcast))


def state_of(run: Run) -> dict[str, Tensor]:
    """Whole tensors by the names that pieces have, gathered as `state_dict` does; and numbers."""
    full = run.state_dict()
    named = {f"parameters/{name}": x for name, x in full["parameters"].items()}
    named |= {f"amax/{name}": x for name, x in full.get("amax", {}).items()}
    for name, state in full["optimizer"].items():
        named |= {f"optimizer/{name}/{key}": torch.as_tensor(x) for key, x in state.items()}
    return named


def differing(run: Run, whole: dict[str, Tensor]) -> list[str]:
    """Names of this rank's pieces, and of numbers, that are not bit for bit what the whole tensors say."""
    pieces = [piece for piece in run.pieces() if not piece.name.startswith("random/")]
    found = [piece.name for piece in pieces if not same(piece, whole[piece.name])]
    for name, numbers in run.plain_state()["numbers"].items():
        found += [name for key, x in numbers.items() if x != whole[f"optimizer/{name}/{key}"]]
    return found


def same(piece: Piece, whole: Tensor) -> bool:
    values = part_of(whole_piece(piece.name, whole), piece.start, piece.shape)
    return tuple(whole.shape) == piece.whole and torch.equal(piece.values.cpu(), values)


# ---- who holds what --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A piece as a rank tells of it: `alike` are the global ranks that it says have the same."""

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    alike: tuple[int, ...]
    replica: int
    values: Tensor


def told(pieces: Sequence[Piece]) -> list[Told]:
    """On a rank."""
    return [
        Told(
            p.name,
            p.whole,
            p.start,
            p.shape,
            p.values.dtype,
            ranks_of(p),
            p.replica,
            p.values.detach().clone(),
        )  # fmt: skip
        for p in pieces
    ]


def ranks_of(piece: Piece) -> tuple[int, ...]:
    """Product of the groups: from this rank's place, any number along each."""
    found = [collectives.world().rank()]
    members = [collectives.members(group) for group in piece.holders]
    here = collectives.world().rank()
    for group in members:
        found = [rank + other - here for rank in found for other in group]
    return tuple(found)


def wrong_holders(told_by: Sequence[Sequence[Told]]) -> list[str]:
    """What ranks say of each other that is not so: who holds a piece, in which order, and with which bits."""
    claims: dict[tuple, dict[int, Told]] = {}
    for rank, pieces in enumerate(told_by):
        for piece in pieces:
            claims.setdefault((piece.name, piece.start, piece.shape), {})[rank] = piece
    found = []
    for (name, start, _), by in claims.items():
        for rank, piece in by.items():
            if sorted(piece.alike) != sorted(by) or piece.alike[piece.replica] != rank:
                found.append(f"{name} {start}: rank {rank} says {piece.alike}, it is {sorted(by)}")
        first = next(iter(by.values()))
        if any(not torch.equal(bits(first.values), bits(piece.values)) for piece in by.values()):
            found.append(f"{name} {start}: other values on {sorted(by)}")
        if len({(piece.whole, piece.dtype) for piece in by.values()}) > 1:
            found.append(f"{name} {start}: another whole")
    return found


def wrong_cover(told_by: Sequence[Sequence[Told]]) -> list[str]:
    """Names of which not every element is in exactly one of all pieces."""
    count: dict[str, Tensor] = {}
    for piece in (piece for pieces in told_by for piece in pieces):
        times = count.setdefault(piece.name, torch.zeros(piece.whole, dtype=torch.int))
        part_of(whole_piece(piece.name, times), piece.start, piece.shape).add_(1)
    return [name for name, times in count.items() if not torch.all(times == 1)]


def wrong_shares(held_by: Sequence[Sequence[Told]], written_by: Sequence[Sequence[Told]]) -> list[str]:
    """Where k ranks hold the same, each writes a k-th of it, to an element, of every dtype."""
    found = []
    for held, written in zip(held_by, written_by):
        sizes, mine = {}, {}
        for piece in held:
            key = frozenset(piece.alike), piece.dtype
            sizes[key] = sizes.get(key, 0) + piece.values.numel()
        names = {(p.name, p.dtype): frozenset(p.alike) for p in held}
        for piece in written:
            key = names[piece.name, piece.dtype], piece.dtype
            mine[key] = mine.get(key, 0) + piece.values.numel()
        for key, size in sizes.items():
            if abs(mine.get(key, 0) - size / len(key[0])) >= 1:
                found.append(f"{mine.get(key, 0)} of {size} elements that {sorted(key[0])} hold")
    return found


def check_layout(run: Run) -> Callable:
    """On a rank: what is to be told of a run to the three checks above."""
    pieces = run.pieces()
    return told(pieces), told(share_out(pieces))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)
