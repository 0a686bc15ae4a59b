"""Fill pieces of one layout from pieces of another.

    saved     [ rows 0-3 ][ rows 4-7 ]          of tp = 2
    wanted    [ 0-1 ][ 2-3 ][ 4-5 ][ 6-7 ]      of tp = 4: each rank reads its half of one of them, no more

What a rank reads are the blocks (format.py) that its rectangles touch, all verified: in the layout of the
save what it holds, to the byte. With `broadcast`, of k ranks that hold the same one reads and tells the
others, and all ask for the same pieces in one order. `check` looks at names, shapes and dtypes alone: call it
for all pieces before the first `fill`. Then only damage can stop a load, on every rank by `agree`.
Sends 8 bytes per agreement, with `broadcast` S bytes for a piece of S bytes to each of the k - 1 others.
Memory beside the pieces: what of one saved piece lies between the first and the last byte that is needed.
Jiang et al. 2024, MegaScale, arXiv:2402.15627, section 3.5 (one reader per group). Differs: any cut to any.
"""

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.checkpoint.format import BLOCK_BYTES, Damaged, Entry, File, bytes_of
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_device
from minitrain.ranks.pieces import Piece, overlap, part_of

CONVERTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # not codes, which have scales


class Saved:
    """All pieces of a checkpoint, by name, whoever wrote them. `weights`: no states of the optimizer and no
    random ones, and numbers in any of the dtypes of CONVERTED."""

    lacks = "the checkpoint has {}: it is of another model, or a file is left out"

    def __init__(self, files: Iterable[File], broadcast: bool = False, weights: bool = False):
        self.files, self.broadcast, self.weights, self._error = list(files), broadcast, weights, None
        self.entries: dict[str, list[Entry]] = {}
        self.plain: dict[str, Any] = {}
        for file in self.files:
            for entry in file.entries:
                if weights and entry.name.startswith(("optimizer/", "random/", "residual/")):
                    continue
                self.entries.setdefault(entry.name, []).append(entry)
            for key, value in () if weights else file.plain.items():
                if isinstance(value, dict):
                    self.plain.setdefault(key, {}).update(value)
                else:
                    self.plain[key] = value

    read_bytes = property(lambda self: sum(file.read_bytes for file in self.files))

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """{"layers.0.tokens": shape of the whole} of all names that begin with kind, as "parameters"."""
        named = [(*name.partition("/"), entries[0].whole) for name, entries in self.entries.items()]
        return {name: whole for begin, _, name, whole in named if begin == kind}

    def states_of(self, parameter: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """{"exp_avg": (dtype, shape of the whole)}: what the optimizer had of a parameter."""
        return self._states.get(f"optimizer/{parameter}", {})

    @cached_property
    def _states(self) -> dict[str, dict[str, tuple]]:
        found: dict[str, dict[str, tuple]] = {}
        for name, (first, *_) in self.entries.items():
            parameter, _, key = name.rpartition("/")
            found.setdefault(parameter, {})[key] = first.dtype, first.whole
        return found

    def check(self, piece: Piece) -> None:
        """ValueError: it was not saved, not all of it, or as something else."""
        found, wanted = 0, piece.values.numel()
        for entry in self.entries.get(piece.name, ()):
            was, now = (entry.whole, entry.dtype), (piece.whole, piece.values.dtype)
            alike = was[1] == now[1] or self.weights and {was[1], now[1]} <= CONVERTED
            if was[0] != now[0] or not alike:
                both = f"{list(was[0])} {was[1]} in the checkpoint, {list(now[0])} {now[1]} in this run"
                raise ValueError(f"{piece.name} is {both}: use the model and the precision it was saved in")
            common = overlap(entry.start, entry.shape, piece.start, piece.shape)
            found += math.prod(common[1]) if common else 0
        if found != wanted:
            there = f"{found} of {wanted} elements of {piece.name}" if found else f"no {piece.name}"
            raise ValueError(self.lacks.format(there))

    def fill(self, piece: Piece) -> None:
        """Write what was saved into a piece; all ranks that hold it must ask. `finish` tells what went wrong:
        until then others may wait for this rank, here or where the caller brings its model up to date."""
        if not self.broadcast or piece.replicas == 1:
            return self._read(piece)
        if piece.replica == 0:
            self._read(piece)
        data = piece.values.detach().contiguous().reshape(-1).view(torch.uint8)
        for group in piece.holders:
            data = collectives.broadcast(data, 0, group)
        piece.values.copy_(data.view(piece.values.dtype).view(piece.shape))

    def finish(self) -> None:
        """After the last `fill`: raise the first thing that went wrong."""
        error, self._error = self._error, None
        if error:
            raise error

    def _read(self, piece: Piece) -> None:
        try:
            if self._error is None:
                self.check(piece)
                for entry in self.entries[piece.name]:
                    if common := overlap(entry.start, entry.shape, piece.start, piece.shape):
                        read(entry, *common, out=part_of(piece, *common))
        except (ValueError, OSError) as error:
            self._error = error


def agree(act: Callable[[], Any], group: ProcessGroup, device: torch.device | str = "cpu") -> Any:
    """act() on every rank. If it raises a ValueError or OSError on some, all raise what the first of them
    did: a ValueError, which is Damaged if that was about what is on the disk."""
    require_device(device=device)
    result, error = None, None
    try:
        result = act()
    except (ValueError, OSError) as raised:
        error = raised
    rank, ranks = group.rank(), group.size()
    mine = torch.tensor([-(rank if error else ranks)], device=device)
    first = -int(collectives.all_reduce(mine, group, op="max"))
    if first == ranks:
        return result
    kind = Damaged if isinstance(error, Damaged | OSError) else ValueError
    text = f"{int(kind is Damaged)}{error}".encode() if rank == first else b""
    size = collectives.broadcast(torch.tensor([len(text)], device=device), first, group)
    data = torch.tensor(list(text or bytes(int(size))), dtype=torch.uint8, device=device)
    text = bytes(collectives.broadcast(data, first, group).tolist()).decode()
    raise (Damaged if text[0] == "1" else ValueError)(text[1:]) from (error if rank == first else None)


def read(entry: Entry, start: tuple[int, ...], shape: tuple[int, ...], out: Tensor) -> None:
    """A rectangle of the whole that lies in an entry; straight into `out` where both lie in one piece."""
    item, strides = entry.dtype.itemsize, [math.prod(entry.shape[dim + 1 :]) for dim in range(len(shape))]
    corner = sum((a - b) * stride for a, b, stride in zip(start, entry.start, strides)) * item
    last = corner + sum((n - 1) * stride for n, stride in zip(shape, strides)) * item + item
    blocks = runs(corner, shape, [stride * item for stride in strides], item, entry.size)
    begin, end = blocks[0][0], blocks[-1][1]
    alike = out.dtype == entry.dtype and out.is_contiguous() and out.is_cpu
    if (begin, end) == (corner, last) and last - corner == out.nbytes and alike:
        return entry.file.read(entry, begin, end, bytes_of(out))
    data = np.empty(end - begin, np.uint8)
    for first, until in blocks:
        entry.file.read(entry, first, until, data[first - begin : until - begin])
    found = torch.from_numpy(data[corner - begin : last - begin]).view(entry.dtype)
    out.copy_(found.as_strided(shape, strides))


def runs(corner: int, shape: tuple, strides: list[int], item: int, size: int) -> list[tuple[int, int]]:
    """The blocks that a rectangle touches, neighbours together: (first byte, last byte)."""
    inner = len(shape)  # from here on, elements lie one behind the other
    length = item
    while inner and strides[inner - 1] == length:
        inner -= 1
        length *= shape[inner]
    starts = np.array([corner])
    for n, stride in zip(shape[:inner], strides[:inner]):
        starts = (starts[:, None] + np.arange(n) * stride).reshape(-1)
    firsts, lasts = starts // BLOCK_BYTES, (starts + length - 1) // BLOCK_BYTES
    found: list[list[int]] = []
    for first, last in zip(firsts.tolist(), lasts.tolist()):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return [(first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, size)) for first, last in found]
