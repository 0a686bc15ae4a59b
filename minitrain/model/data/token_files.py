r"""Files of tokens, read where they are: Megatron-LM's pair NAME.bin and NAME.idx, or an array NAME.npy.

    NAME.bin    the ids of all sequences, end to end
    NAME.idx    MMIDIDX\0\0 | version 1 <8 bytes> | type of the ids <1> | S sequences <8> | D + 1 marks <8>
                S lengths int32 | S offsets into NAME.bin int64 | D + 1 marks int64, little-endian;
                document d is the sequences from mark d to mark d + 1
    NAME.npy    one dimension, any integers; a document ends with the token `end`, or the file is one document

Mapped into memory: opening costs the index, or one pass for `end`. Holds 8 bytes a document. Files that are
wrong, and ids outside of a vocabulary, are a ValueError with the file's name. Megatron-LM,
core/datasets/indexed_dataset.py. Differs: no multimodal modes; offsets must be those that its writer gives.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from minitrain.ranks.checks import require_positive_ints

HEADER, MAGIC = struct.Struct("<9sQBQQ"), b"MMIDIDX\0\0"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
CHUNK = 1 << 24  # tokens looked at in one go


def read_tokens(path: Path, end: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, mapped, and the lengths of the documents: int64, none 0, as many tokens in all."""
    tokens, lengths = read_array(path, end) if path.suffix == ".npy" else read_pair(path)
    require(len(tokens), path, "is empty: it has no token")
    return tokens, lengths[lengths > 0]


def read_array(path: Path, end: int | None) -> tuple[np.ndarray, np.ndarray]:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no whole array of numpy: {error}") from None
    what = f"is {tokens.dtype} {list(tokens.shape)}; tokens are integers, [N]"
    require(tokens.ndim == 1 and tokens.dtype.kind in "iu", path, what)
    chunks = range(0, 0 if end is None else len(tokens), CHUNK)
    ends = [first + 1 + np.flatnonzero(tokens[first : first + CHUNK] == end) for first in chunks]
    return tokens, np.diff(np.concatenate([[0], *ends, [len(tokens)]]).astype(np.int64))


def read_pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    index = path.with_suffix(".idx")
    with open(index, "rb") as file:
        head = file.read(HEADER.size).ljust(HEADER.size)
    magic, version, code, sequences, marked = HEADER.unpack(head)
    what = f"begins with {magic!r}, version {version}: it is no index of Megatron-LM's, {MAGIC!r}, version 1"
    require((magic, version) == (MAGIC, 1), index, what)
    require(code in TYPES, index, f"has ids of type {code}, which is no integer; known are {TYPES}")
    dtype, middle = np.dtype(TYPES[code]), HEADER.size + 4 * sequences
    require_size(index, middle + 8 * sequences + 8 * marked)
    raw = np.memmap(index, mode="r")
    lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    offsets = np.frombuffer(raw, "<i8", sequences, middle)
    marks = np.frombuffer(raw, "<i8", marked, middle + 8 * sequences)
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    in_order = (offsets == edges[:-1] * dtype.itemsize).all()
    require(in_order, index, "has sequences that do not lie end to end: write them anew")
    whole = marked and marks[0] == 0 and marks[-1] == sequences and (np.diff(marks) >= 0).all()
    require(whole, index, f"has documents that do not go from sequence 0 to {sequences}")
    require_size(path, int(edges[-1]) * dtype.itemsize)
    return np.memmap(path, dtype, "r") if edges[-1] else np.zeros(0, dtype), np.diff(edges[marks])


def write_pair(path: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> tuple[int, int]:
    """Writes documents as they come to NAME.bin, at the end NAME.idx; returns how many, and their tokens."""
    require_positive_ints(1 << 31, vocab_size=vocab_size)
    code = 8 if vocab_size < 65_500 else 4  # as Megatron-LM chooses
    dtype, lengths = np.dtype(TYPES[code]), array("i")
    with open(path, "wb") as file:
        for ids in documents:
            require_ids(np.asarray(ids), vocab_size, f"document {len(lengths)}")
            file.write(np.asarray(ids, dtype).tobytes())
            lengths.append(len(ids))
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tables = np.asarray(lengths, "<i4"), edges[:-1] * dtype.itemsize, np.arange(len(edges))
    head = HEADER.pack(MAGIC, 1, code, len(lengths), len(edges))
    parts = [table.astype(kind).tobytes() for table, kind in zip(tables, ("<i4", "<i8", "<i8"))]
    path.with_suffix(".idx").write_bytes(b"".join([head, *parts]))
    return len(lengths), int(edges[-1])


def require_ids(ids: np.ndarray, vocab_size: int, where: str | Path) -> None:
    for wrong in (ids.min(), ids.max()) if len(ids) else ():
        cure = "another tokenizer made it, or vocab_size must be larger"
        right = ids.dtype.kind in "iu" and 0 <= wrong < vocab_size
        require(right, where, f"has id {wrong}, the vocabulary is {vocab_size}: {cure}")


def require_size(path: Path, wanted: int) -> None:
    size = path.stat().st_size
    what = "it is truncated" if size < wanted else "it is of other or multimodal data"
    require(size == wanted, path, f"has {size:,} bytes, and its index says {wanted:,}: {what}")


def require(right: bool, where: str | Path, what: str) -> None:
    if not right:
        raise ValueError(f"{where} {what}")
