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
from minitrain.checkpoint.header import BLOCK_BYTES, MOST_HEADER_BYTES, Damaged, Entry, digest, pack, parse
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
def reading(path: Path) -> Iterator[None]:
    """What nobody can read any more is Damaged; what only this process may not read is a DiskError."""
    try:
        with refused("read", path):
            yield
    except DiskError as error:
        if error.errno in GONE:
            raise Damaged(f"{path} is missing" if error.errno == errno.ENOENT else str(error)) from None
        raise


class File:
    """A file that was written, its header verified. `entries` are its pieces, `plain` what else it holds.

    Damaged: it is not what was written, or not there. It is open only from the first `read` to `close`: a
    checkpoint may have more files than a process may open."""

    def __init__(self, path: Path, written: Written):
        self.path, self.read_bytes, self._file = path, 0, None
        try:
            text = self._header(written.size)
        finally:
            self.close()
        if digest(text) != written.header_hash:
            raise Damaged(f"{path}: its header is damaged")
        try:
            self.entries, self.plain = parse(text, written.size, self)
        except Damaged as error:
            raise Damaged(f"{path}: {error}") from None

    def _header(self, wanted: int) -> bytes:
        with reading(self.path):
            file = self._open()
            size = os.fstat(file).st_size
            if size != wanted:
                raise Damaged(f"{self.path} has {size:,} bytes, {wanted:,} were written")
            (length,) = struct.unpack("<Q", os.pread(file, 8, 0).ljust(8, b"\xff"))
            if length > min(MOST_HEADER_BYTES, size - 8):
                raise Damaged(f"{self.path}: its header is damaged")
            text = np.empty(length, np.uint8)
        self._fill(text, 8)
        return text.tobytes()

    def read(self, entry: Entry, first: int, last: int, out: np.ndarray) -> None:
        """Bytes first .. last of an entry, verified; `out` may be the memory of a tensor (bytes_of)."""
        held = None
        for begin, end in _blocks(first, last, entry.size):
            if first <= begin and end <= last:
                self._read_block(entry, begin, out[begin - first : end - first])
            else:
                held = np.empty(BLOCK_BYTES, np.uint8) if held is None else held
                self._read_block(entry, begin, held[: end - begin])
                a, b = max(first, begin), min(last, end)
                out[a - first : b - first] = held[a - begin : b - begin]

    def verify(self) -> None:
        """Read all of it, in the memory of one block."""
        held = np.empty(BLOCK_BYTES, np.uint8)
        for entry in self.entries:
            for begin, end in _blocks(0, entry.size, entry.size):
                self._read_block(entry, begin, held[: end - begin])

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read_block(self, entry: Entry, begin: int, out: np.ndarray) -> None:
        self._fill(out, entry.first_byte + begin)
        self.read_bytes += len(out)
        if not entry.check(begin // BLOCK_BYTES, out):
            raise Damaged(f"{self.path}: {entry.name} is damaged, in block {begin // BLOCK_BYTES}")

    def _fill(self, out: np.ndarray, offset: int) -> None:
        done = 0
        with reading(self.path):
            file = self._open()
            while done < len(out):
                got = os.preadv(file, [out[done:]], offset + done)
                if not got:
                    raise Damaged(f"{self.path} ends too early")
                done += got


def _blocks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the blocks that bytes first .. last of `size` lie in."""
    if first < last:
        for begin in range(first // BLOCK_BYTES * BLOCK_BYTES, last, BLOCK_BYTES):
            yield begin, min(begin + BLOCK_BYTES, size)
