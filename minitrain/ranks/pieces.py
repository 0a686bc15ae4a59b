"""Pieces: rectangles of whole tensors, the words in which any layout can say what a rank has.

    W[4, 6] cut by rows over tp, then, laid flat, over dp:   . . . . . .     rank (dp 1, tp 0) has elements
        whole (4, 6)                                         . . . . # #     10 .. 12 of its two rows:
        piece  start (1, 4)  values [1, 2]                   . . . . . .     one rectangle; others need up
                                                             . . . . . .     to 2 · dims - 1

A piece is a view: who saves reads it, who loads writes into it. So no layout has to know another one: pieces
of either meet where their rectangles overlap. Zeros that pad a cut are in no piece. `holders` are the groups
whose ranks all have the same values there: of these copies `share_out` lets each rank write its part.

Sends nothing; makes no copy. torch's DTensor checkpoints cut along dims only. Differs from Lian et al. 2025,
Universal Checkpointing, arXiv:2406.18820, section 3: no file per parameter has to be put together.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.ranks.sharding import region_of, whole_shape


@dataclass(frozen=True, eq=False)
class Piece:
    """`values` are the elements start .. start + values.shape of the tensor `name` of shape `whole`."""

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    values: Tensor
    holders: tuple[ProcessGroup, ...] = ()

    replicas = property(lambda self: math.prod(group.size() for group in self.holders))
    shape = property(lambda self: tuple(self.values.shape))

    @property
    def replica(self) -> int:
        """This rank's number among those that hold the same."""
        number = 0
        for group in self.holders:
            number = number * group.size() + group.rank()
        return number


def whole_piece(name: str, values: Tensor, holders: tuple[ProcessGroup, ...] = ()) -> Piece:
    return Piece(name, tuple(values.shape), (0,) * values.dim(), values.detach(), holders)


def pieces_of(
    name: str, values: Tensor, like: Tensor, first: int, last: int, holders: tuple[ProcessGroup, ...] = ()
) -> Iterator[Piece]:
    """`values`: elements first .. last, flat, or all in their shape, of this rank's part, cut as `like`."""
    (corner, limit), used = region_of(like), 0
    for start, shape in rectangles(tuple(like.shape), first, last):
        size = math.prod(shape)
        part = values if tuple(values.shape) == shape else values[used : used + size].view(shape)
        used += size
        place = tuple(a + b for a, b in zip(corner, start))
        for dim, (begin, length, end) in enumerate(zip(place, shape, limit)):
            if begin + length > end:  # the rest is padding
                part = part.narrow(dim, 0, max(0, end - begin))
        if part.numel():
            yield Piece(name, tuple(whole_shape(like)), place, part, holders)


def rectangles(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple, tuple]]:
    """Elements first .. last of an array, counted along its rows: (start, shape) of rectangles, in order."""
    if first >= last:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:  # inside of one row
        return _in_row(shape, end, first, last)
    whole_rows = [((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))] if begin < end else []
    return _in_row(shape, begin - 1, first, begin * row) + whole_rows + _in_row(shape, end, end * row, last)


def _in_row(shape: tuple[int, ...], number: int, first: int, last: int) -> list[tuple[tuple, tuple]]:
    begin = number * math.prod(shape[1:])
    inside = rectangles(shape[1:], first - begin, last - begin)
    return [((number, *start), (1, *lengths)) for start, lengths in inside]


def overlap(start: tuple, shape: tuple, other_start: tuple, other_shape: tuple) -> tuple | None:
    """(start, shape) of what two rectangles have in common; None: nothing."""
    begin = tuple(map(max, start, other_start))
    end = (min(a + m, b + n) for a, m, b, n in zip(start, shape, other_start, other_shape))
    lengths = tuple(last - first for first, last in zip(begin, end))
    return None if any(length <= 0 for length in lengths) else (begin, lengths)


def part_of(piece: Piece, start: tuple, shape: tuple) -> Tensor:
    values = piece.values
    for dim, (begin, length) in enumerate(zip(start, shape)):
        values = values.narrow(dim, begin - piece.start[dim], length)
    return values


def share_out(pieces: Iterable[Piece], writers: int | None = None) -> list[Piece]:
    """What this rank writes: of what k ranks hold alike, laid end to end, the k-th part, to an element. Over
    all ranks every element once. `writers`: no more than so many of the k write, the first of them."""
    alike: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.holders, piece.values.dtype), []).append(piece)
    mine = []
    for same in alike.values():
        same.sort(key=lambda piece: (piece.name, piece.start))  # in one order on all that hold them
        total, part = sum(p.values.numel() for p in same), same[0].replica
        parts = min(writers or same[0].replicas, same[0].replicas)
        first, last, seen = total * part // parts, total * (part + 1) // parts, 0
        for piece in same:
            size = piece.values.numel()
            begin, end = max(first - seen, 0), min(last - seen, size)
            for start, shape in rectangles(piece.shape, begin, end):
                at = tuple(a + b for a, b in zip(piece.start, start))
                mine.append(replace(piece, start=at, values=part_of(piece, at, shape), holders=()))
            seen += size
    return mine
