"""Tables of which few rows change: only those are saved, in few bits if wanted.

    table       [ r0 ][ r1 ][ r2 ][ r3 ][ r4 ][ r5 ] ..       an embedding, and the optimizer's states of it
    touched              x           x                        since the last full checkpoint
    increment   index [1, 3]  values [2, D]  or  codes [2, D·bits/8]  scale [2]  offset [2]

A row in b bits: x ≈ offset + code · scale, scale = (high - low) / (2^b - 1) of what `searched` finds; above 4
bits no element is off by more than scale / 2 and its rounding. Bytes of a row: 4 + D·item, or 4 + D·b/8 +
2·item. Restored is the full checkpoint, and over it the rows of the newest increment, in any layout: keep
both kinds in folders of their own, or the retention of one removes what the other needs.

Only for updates that leave a row without a gradient alone: SGD, Adagrad; Adam's moments decay in every row.
`agree` sends 4 bytes per row, in an all-reduce. Eisenman et al. 2022 (Check-N-Run), NSDI.
Differs: the caller says when to save in full; bits stay as they are.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.checkpoint.format import DTYPE_OF, DTYPES, Entry, key_of
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.snapshot import parameter_of
from minitrain.precision.blocks import pack, unpack
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_ints
from minitrain.ranks.pieces import Piece, overlap, part_of, whole_piece


class Increments:
    """Remembers in which step each row of some tables was last touched: 4 bytes per row."""

    def __init__(self, rows: Mapping[str, int], bits: int | None = None, device: Any = "cpu"):
        """`rows`: {name of a parameter: its rows}; `bits`: 1 to 8, or None: rows as they are."""
        if bits is not None:
            require_ints(1, 8, bits=bits)
        self.bits = bits
        self.touched = {
            key: torch.full((n,), -1, dtype=torch.int32, device=device) for key, n in rows.items()
        }

    def touch(self, name: str, rows: Tensor, step: int) -> None:
        """The update of this step changes these rows."""
        self.touched[name][rows.flatten()] = step

    def agree(self, *groups: ProcessGroup) -> None:
        """Rows that any rank has touched count for all: their gradients are a sum."""
        for last in self.touched.values():
            for group in groups:
                collectives.all_reduce(last, group, op="max", out=last)

    def pieces(self, pieces: Iterable[Piece], since: int | None) -> tuple[list[Piece], dict[str, Any]]:
        """What to save, and plain values. `since`: the step of the last full checkpoint (None: this)."""
        kept, tables = [], {}
        for piece in pieces:
            last = self.touched.get(parameter_of(piece))
            of_rows = last is not None and piece.whole[:1] == last.shape
            if not of_rows or since is None and not self.bits:
                kept.append(piece)
                continue
            rows = torch.arange(piece.shape[0], device=piece.values.device)
            if since is not None:
                rows = rows[last[piece.start[0] :][: len(rows)].to(rows.device) > since]
            key = f"rows/{key_of(piece.name, piece.start)}"
            told = dict(name=piece.name, whole=piece.whole, start=piece.start, shape=piece.shape)
            tables[key] = told | dict(dtype=DTYPES[piece.values.dtype], bits=self.bits)
            parts = {"index": (rows + piece.start[0]).int()}
            parts |= encoded(piece.values[rows].reshape(len(rows), math.prod(piece.shape[1:])), self.bits)
            kept += [whole_piece(f"{key}/{part}", x, piece.holders) for part, x in parts.items() if len(rows)]
        return kept, {"tables": tables}


def encoded(rows: Tensor, bits: int | None) -> dict[str, Tensor]:
    """[k, D] -> as they are, or codes and the scale and offset of each row."""
    if bits is None:
        return {"values": rows}
    low, high = searched(rows, bits)
    codes, scale, _ = coded(rows, low, high, bits)
    return {"codes": pack(codes.to(torch.uint8), bits), "scale": scale, "offset": low}


def coded(rows: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [k, D], scale [k], sum of squared errors [k]) of the range from low to high, of each row."""
    scale = (high - low) / (2**bits - 1)
    steps = (rows - low[:, None]) / torch.where(scale > 0, scale, 1)[:, None]
    codes = steps.round().clamp(0, 2**bits - 1)
    return codes, scale, (low[:, None] + codes * scale[:, None] - rows).square().sum(1)


def searched(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(low, high) of each row: all of it; up to 4 bits the one of least squared error among those met while a
    25th is taken off the end where that costs less, until half is left."""
    low, high = best = rows.amin(1), rows.amax(1)
    step, least = (high - low) / 25, coded(rows, low, high, bits)[-1]
    for _ in range(12 if bits <= 4 else 0):
        ends = torch.stack((low + step, low)), torch.stack((high, high - step))
        now, which = torch.stack([coded(rows, *both, bits)[-1] for both in zip(*ends)]).min(0)
        low, high = (x.gather(0, which[None])[0] for x in ends)
        best = tuple(torch.where(now < least, new, old) for new, old in zip((low, high), best))
        least = torch.minimum(now, least)
    return best


def decoded(parts: Mapping[str, Tensor], bits: int | None, width: int) -> Tensor:
    if bits is None:
        return parts["values"]
    codes = unpack(parts["codes"], bits, width).to(parts["scale"].dtype)
    return parts["offset"][:, None] + codes * parts["scale"][:, None]


class Restored(Saved):
    """A full checkpoint and, over it, an increment: what `load_pieces` takes."""

    def __init__(self, full: Saved, increment: Saved | None = None):
        super().__init__([])
        self.layers = [full, increment] if increment else [full]
        self.plain = self.layers[-1].plain
        for saved in self.layers:
            tables: dict[str, list[Entry]] = {}
            for of in saved.plain.get("tables", {}).values():  # rectangles of which some rows are saved
                place = (*(tuple(of[what]) for what in ("whole", "start", "shape")), DTYPE_OF[of["dtype"]])
                tables.setdefault(of["name"], []).append(Entry(None, of["name"], *place, 0, ""))
            self.entries |= saved.entries | tables

    read_bytes = property(lambda self: sum(saved.read_bytes for saved in self.layers))

    def fill(self, piece: Piece) -> None:
        """Of what is saved in rows the newest counts."""
        newest, full = self.layers[-1], self.layers[0]
        if not of_table(newest, piece.name):
            return newest.fill(piece)
        if piece.name in full:
            full.fill(piece)
        try:
            for saved in dict.fromkeys((full, newest)):
                put_rows(saved, piece)
        except (ValueError, OSError) as error:
            self._error = self._error or error

    def finish(self) -> None:
        for saved in self.layers:
            saved.finish()
        super().finish()


def of_table(saved: Saved, name: str) -> dict[str, dict]:
    """{where its rows are: what they are of}"""
    return {key: told for key, told in saved.plain.get("tables", {}).items() if told["name"] == name}


def put_rows(saved: Saved, piece: Piece) -> None:
    for key, told in of_table(saved, piece.name).items():
        common = overlap(told["start"], told["shape"], piece.start, piece.shape)
        if f"{key}/index" not in saved or not common:
            continue
        parts = {}
        for part in ("index", "values", "codes", "scale", "offset"):
            if entries := saved.entries.get(name := f"{key}/{part}"):
                parts[part] = torch.empty(entries[0].whole, dtype=entries[0].dtype)
                saved.fill(whole_piece(name, parts[part]))
        saved.finish()  # before rows are counted by an index that is damaged
        index = parts["index"].long() - piece.start[0]
        rows = decoded(parts, told["bits"], math.prod(told["shape"][1:])).reshape(-1, *told["shape"][1:])
        inside = (index >= 0) & (index < piece.shape[0])
        (_, *start), (_, *shape) = common
        target = part_of(piece, (piece.start[0], *start), (piece.shape[0], *shape))
        saved_part = Piece(key, told["whole"], (0, *told["start"][1:]), rows)
        source = part_of(saved_part, (0, *start), (len(rows), *shape))
        target.index_copy_(0, index[inside].to(target.device), source[inside].to(target))


def full_is_cheaper(sizes: list[float]) -> bool:
    """Save in full now? `sizes`: of the increments since the last full one, in full ones. If increments grow
    again as they did, is that less to write than going on with ones as large as the last."""
    return bool(sizes) and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]
