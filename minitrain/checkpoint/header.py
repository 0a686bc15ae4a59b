"""The header of a file: which pieces it holds, where, and a hash of every block.

    8 bytes   length of the text, n
    n bytes   {"__metadata__": {"plain": "{..}", "parameters/tokens@0,64": "[8, 128] 06a1.."},
               "parameters/tokens@0,64": {"dtype": "F32", "shape": [8, 64], "data_offsets": [0, 2048]}, ..}
              and spaces, so that tensors begin at a multiple of 64
    tensors   one behind the other, those of wide elements first: each begins at a multiple of its element

It is a header of safetensors, whose limit (100 MB) is kept. A key says where the piece begins, the metadata
the shape of the whole and 16 hex digits for each block of BLOCK_BYTES: xxh3, a hash, not a signature. Its
length follows from shapes alone.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from minitrain.ranks.pieces import Piece

BLOCK_BYTES = 1 << 20
MOST_HEADER_BYTES = 100_000_000
ALIGNMENT = 64
HASH_DIGITS = 16
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


class Damaged(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Entry:
    """A piece in a file (format.File): its first byte there, and the hashes of its blocks in a row."""

    file: Any
    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    first_byte: int
    hashes: str

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
        entries[key] = dict(
            dtype=DTYPES[dtype], shape=list(piece.shape), data_offsets=[offset, offset + size]
        )
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
