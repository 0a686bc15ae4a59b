"""The file of one writer: safetensors with a hash of every block (header.py), written once, read in parts.

    write   tensors first, hashed on the way, and the header last; then synced
    read    any bytes of a piece: whole blocks go straight to where they are wanted, and are verified there

The header's own hash stands in the manifest (store.py): without that, a file is no part of a checkpoint. So
no byte can change unseen. Any reader of safetensors can open it. No pickle anywhere. Calls to the system
move a block: small pieces are gathered, larger ones written from where they are (more at once is no faster).
Memory: half a block to write, one to read, and a copy of a piece that does not lie in one piece.
Differs from safetensors.torch.save_file: verified, partial tensors, synced, no copy of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitrain.checkpoint.disk import Disk, DiskError, new_file, refused
from minitrain.checkpoint.header import (
    BLOCK_BYTES,
    HASH_DIGITS,
    MOST_HEADER_BYTES,
    Damaged,
    Entry,
    digest,
    pack,
    parse,
)
from minitrain.ranks.pieces import Piece

RUN_BYTES = 1 << 19  # as much small is gathered; half of it is large
START_BYTES = 8 << 20  # the disk begins while the next are hashed
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}  # nobody can read it any more


@dataclass(frozen=True)
class Written:
    """What the manifest says of a file."""

    name: str
    size: int
    header_hash: str


# ---- writing


def blocks_of(piece: Piece) -> Iterator[np.ndarray]:
    """Its bytes, in rows, BLOCK_BYTES at a time."""
    data = bytes_of(piece.values)
    for first in range(0, len(data), BLOCK_BYTES):
        yield data[first : first + BLOCK_BYTES]


def write_file(
    disk: Disk,
    path: Path,
    pieces: Iterable[Piece],
    plain: dict[str, Any],
    blocks_of: Callable[[Piece], Iterator[np.ndarray]] = blocks_of,
) -> Written:
    """Pieces on the host (share_out has made them this rank's own) and plain values, in a new file, synced.

    `blocks_of` gives a piece's bytes, a block or several at a time, and is asked in the order of `pieces`: it
    may have to wait for them (snapshot.py). ValueError, before there is a file: a piece twice, a dtype or
    value that the format does not know, a header over 100 MB. DiskError: what the system refuses."""
    pieces, places, hashes = list(pieces), {}, {}
    in_file = sorted(pieces, key=lambda piece: -piece.values.element_size())
    begin = end = len(pack(in_file, plain))
    for piece in in_file:
        places[piece] = end
        end += piece.values.numel() * piece.values.element_size()
    with new_file(disk, path) as file:
        out = _Gathered(disk, file)
        for piece in pieces:
            at, found = places[piece], []
            for data in blocks_of(piece):
                found += [digest(data[n : n + BLOCK_BYTES]) for n in range(0, len(data), BLOCK_BYTES)]
                out.write(at, data)
                at += len(data)
            assert at - places[piece] == piece.values.numel() * piece.values.element_size(), piece.name
            hashes[piece] = "".join(found)
        out.flush()
        header = pack(in_file, plain, [hashes[piece] for piece in in_file])
        assert len(header) == begin, "blocks_of gave parts of blocks"
        disk.write(file, 0, header)
    return Written(path.name, end, digest(header[8:]))


def bytes_of(values: Tensor) -> np.ndarray:
    """The memory of a tensor of the host, in rows; a copy only if it has to be."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class _Gathered:
    """Writes what is large from where it is, the rest gathered: both may change afterwards."""

    def __init__(self, disk: Disk, file: int):
        self.disk, self.file, self.offset = disk, file, 0
        self._held, self._used = np.empty(RUN_BYTES, np.uint8), 0
        self._waiting = 0  # bytes that the disk was not told to begin with

    def write(self, offset: int, data: np.ndarray) -> None:
        if offset != self.offset + self._used or self._used + len(data) > RUN_BYTES:
            self.flush()
            self.offset = offset
        if len(data) >= RUN_BYTES // 2:
            self.flush()
            self._write(offset, data)
        else:
            self._held[self._used : self._used + len(data)] = data
            self._used += len(data)

    def flush(self) -> None:
        if self._used:
            self._write(self.offset, self._held[: self._used])
            self._used = 0

    def _write(self, offset: int, data: np.ndarray) -> None:
        self.disk.write(self.file, offset, data)
        self._waiting += len(data)
        if self._waiting >= START_BYTES:
            self.disk.start(self.file, offset + len(data) - self._waiting, self._waiting)
            self._waiting = 0


# ---- reading


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """An open file. What nobody can read any more is Damaged; what only this process may not, a DiskError."""
    try:
        with refused("read", path), open(path, "rb", buffering=0) as file:
            yield file.fileno()
    except DiskError as error:
        if error.errno in GONE:
            raise Damaged(f"{path} is missing" if error.errno == errno.ENOENT else str(error)) from None
        raise


class File:
    """A file that was written, its header verified. `entries` are its pieces, `plain` what else it holds.

    Damaged: it is not what was written, or not there. It is open only in a call: a checkpoint may have more
    files than a process may open."""

    def __init__(self, path: Path, written: Written):
        self.path, self.read_bytes = path, 0
        with reading(path) as file:
            if (size := os.fstat(file).st_size) != written.size:
                raise Damaged(f"{path} has {size:,} bytes, {written.size:,} were written")
            (length,) = struct.unpack("<Q", os.pread(file, 8, 0).ljust(8, b"\xff"))
            text = os.pread(file, length, 8) if length <= min(MOST_HEADER_BYTES, size - 8) else b""
        if digest(text) != written.header_hash:
            raise Damaged(f"{path}: its header is damaged")
        self.entries, self.plain = parse(text, written.size, self)

    def read(self, entry: Entry, first: int, last: int, out: np.ndarray) -> None:
        """Bytes first .. last of an entry, verified; `out` may be the memory of a tensor (bytes_of)."""
        held = None
        with reading(self.path) as file:
            for begin in range(first // BLOCK_BYTES * BLOCK_BYTES, last, BLOCK_BYTES) if first < last else ():
                end = min(begin + BLOCK_BYTES, entry.size)
                if first <= begin and end <= last:
                    self._read_block(file, entry, begin, out[begin - first : end - first])
                else:
                    held = np.empty(BLOCK_BYTES, np.uint8) if held is None else held
                    self._read_block(file, entry, begin, held[: end - begin])
                    a, b = max(first, begin), min(last, end)
                    out[a - first : b - first] = held[a - begin : b - begin]

    def verify(self) -> File:
        """Read all of it, in the memory of one block. Returns itself."""
        held = np.empty(BLOCK_BYTES, np.uint8)
        with reading(self.path) as file:
            for entry in self.entries:
                for begin in range(0, entry.size, BLOCK_BYTES):
                    self._read_block(file, entry, begin, held[: entry.size - begin])
        return self

    def _read_block(self, file: int, entry: Entry, begin: int, out: np.ndarray) -> None:
        done, number = 0, begin // BLOCK_BYTES
        while done < len(out):
            got = os.preadv(file, [out[done:]], entry.first_byte + begin + done)
            if not got:
                raise Damaged(f"{self.path} ends too early")
            done += got
        self.read_bytes += len(out)
        if digest(out) != entry.hashes[HASH_DIGITS * number : HASH_DIGITS * (number + 1)]:
            raise Damaged(f"{self.path}: {entry.name} is damaged, in block {number}")
