"""The file of one writer: safetensors with a hash of every block, written once, read in parts.

    8 bytes   length of the header, n
    n bytes   {"__metadata__": {"plain": "{..}", "parameters/tokens@0,64": "[8, 128] 06a1.."},
               "parameters/tokens@0,64": {"dtype": "F32", "shape": [8, 64], "data_offsets": [0, 2048]}, ..}
              and spaces, so that tensors begin at a multiple of 64
    tensors   one behind the other, those of wide elements first: each begins at a multiple of its element

A key says where the piece begins, the metadata the shape of the whole and 16 hex digits for each block of
BLOCK_BYTES: xxh3, a hash, not a signature. So a header's length follows from shapes alone: tensors are
written first, hashed on the way, the header last. Its own hash stands in the manifest (store.py), without
which a file is no part of a checkpoint: no byte can change unseen. Whole blocks are read straight to where
they are wanted, and verified there. Any reader of safetensors can open it, within whose limit of a header
(100 MB) it stays. No pickle anywhere. Calls to the system move a block at most (more is no faster).
Memory: a copy of a piece that does not lie in one piece. Differs from safetensors.torch.save_file: verified,
partial tensors, synced, no copy of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from minitrain.checkpoint.disk import Disk, DiskError, new_file, refused
from minitrain.ranks.pieces import Piece

BLOCK_BYTES = 1 << 20
MOST_HEADER_BYTES = 100_000_000
ALIGNMENT = 64
HASH_DIGITS = 16
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}  # nobody can read it any more
NAMES = dict(float64="F64", float32="F32", bfloat16="BF16", float16="F16", complex64="C64", bool="BOOL")
NAMES |= dict(float8_e4m3fn="F8_E4M3", float8_e5m2="F8_E5M2", float8_e8m0fnu="F8_E8M0")
NAMES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
NAMES |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}
DTYPES = {getattr(torch, name): theirs for name, theirs in NAMES.items()}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


class Damaged(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Entry:
    """A piece in a file: its first byte there, and the hashes of its blocks in a row."""

    file: Any
    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    first_byte: int
    hashes: str

    size = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True)
class Written:
    """What the manifest says of a file."""

    name: str
    size: int
    header_hash: str


def digest(data) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def key_of(name: str, start: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, start))}"


def pack(pieces: Sequence[Piece], plain: dict[str, Any], hashes: Sequence[str] | None = None) -> bytes:
    """The header, its length in front; without `hashes` it is as long as it will be with them."""
    metadata, entries, offset = {"plain": json_of(plain)}, {}, 0
    for number, piece in enumerate(pieces):
        key, dtype = key_of(piece.name, piece.start), piece.values.dtype
        if key in entries:
            raise ValueError(f"{key} is given twice; a rank writes a piece once")
        if dtype not in DTYPES:
            raise ValueError(f"{piece.name} is in {dtype}, which safetensors does not know: convert it")
        size = piece.values.numel() * dtype.itemsize
        offsets = [offset, offset + size]
        entries[key] = dict(dtype=DTYPES[dtype], shape=list(piece.shape), data_offsets=offsets)
        found = hashes[number] if hashes else "0" * HASH_DIGITS * -(-size // BLOCK_BYTES)
        metadata[key] = f"{list(piece.whole)} {found}"
        offset += size
    return framed(metadata, entries)


def framed(metadata: dict[str, str], entries: dict[str, dict]) -> bytes:
    text = json.dumps({"__metadata__": metadata} | entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        what = f"{len(entries):,} pieces need a header of {len(text):,} bytes"
        raise ValueError(f"{what}, a file may have {MOST_HEADER_BYTES:,}: write with more ranks")
    return struct.pack("<Q", len(text)) + text


def json_of(plain: dict[str, Any]) -> str:
    try:
        return json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"plain values of a checkpoint must be what JSON knows: {error}") from None


def parse(text: bytes, size: int, file: Any = None) -> tuple[list[Entry], dict[str, Any]]:
    """Entries and plain values of a file of `size` bytes from the text of its header. Raises Damaged."""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        plain, entries, end = json.loads(metadata["plain"]), [], 8 + len(text)
        for key, value in header.items():
            name, _, place = key.rpartition("@")
            whole, _, hashes = metadata[key].rpartition(" ")
            start = tuple(map(int, filter(None, place.split(","))))
            whole, shape, dtype = tuple(json.loads(whole)), tuple(value["shape"]), DTYPE_OF[value["dtype"]]
            entries.append(entry := Entry(file, name, whole, start, shape, dtype, end, hashes))
            end += entry.size
        if end != size:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged("its header is damaged") from None
    return entries, plain


# ---- writing


def blocks_of(piece: Piece) -> Iterator[np.ndarray]:
    """Its bytes, in rows, BLOCK_BYTES at a time."""
    data = bytes_of(piece.values)
    for first in range(0, len(data), BLOCK_BYTES):
        yield data[first : first + BLOCK_BYTES]


def write_file(disk: Disk, path: Path, pieces: Iterable[Piece], plain: dict, blocks_of=blocks_of) -> Written:
    """Pieces on the host (share_out has made them this rank's own) and plain values, in a new file, synced.

    `blocks_of` gives a piece's bytes, a block or several at a time, and is asked in the order of `pieces`: it
    may have to wait for them (snapshot.py). ValueError comes before there is a file."""
    pieces, places, hashes = list(pieces), {}, {}
    in_file = sorted(pieces, key=lambda piece: -piece.values.element_size())
    begin = end = len(pack(in_file, plain))
    for piece in in_file:
        places[piece] = end
        end += piece.values.numel() * piece.values.element_size()
    with new_file(disk, path) as file:
        for piece in pieces:
            at, found = places[piece], []
            for data in blocks_of(piece):
                found += [digest(data[n : n + BLOCK_BYTES]) for n in range(0, len(data), BLOCK_BYTES)]
                disk.write(file, at, data)
                at += len(data)
            assert at - places[piece] == piece.values.numel() * piece.values.element_size(), piece.name
            hashes[piece] = "".join(found)
        header = pack(in_file, plain, [hashes[piece] for piece in in_file])
        assert len(header) == begin, "blocks_of gave parts of blocks"
        disk.write(file, 0, header)
    return Written(path.name, end, digest(header[8:]))


def bytes_of(values: Tensor) -> np.ndarray:
    """The memory of a tensor of the host, in rows; a copy only if it has to be."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


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

    It is open only in a call: a checkpoint may have more files than a process may open."""

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
        """Bytes first .. last of an entry, whole blocks, verified; `out` may be a tensor's memory."""
        with reading(self.path) as file:
            for begin in range(first, last, BLOCK_BYTES):
                end = min(begin + BLOCK_BYTES, last)
                self._read_block(file, entry, begin, out[begin - first : end - first])

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
