"""The file of one writer: what is read is what was written, in any part, in safetensors' own words."""

import math
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from minitrain.checkpoint import format
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import (
    ALIGNMENT,
    BLOCK_BYTES,
    DTYPES,
    Damaged,
    File,
    bytes_of,
    key_of,
    write_file,
)
from minitrain.ranks.pieces import Piece, whole_piece


class Counting(Disk):
    """Offset and length of every write."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, file, offset, data):
        self.writes.append((offset, memoryview(data).nbytes))
        super().write(file, offset, data)


def random_bytes(shape, dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, so also NaNs and infinities."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.from_numpy(np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy())
    return (data % 2 if dtype == torch.bool else data).view(dtype).reshape(shape)


def one_of_each() -> list[Piece]:
    made = [random_bytes((3, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)]
    pieces = [Piece(f"x/{x.dtype}", (6, 5), (3, 0), x) for x in made]
    pieces += [whole_piece("none", torch.ones(())), whole_piece("empty", torch.ones(0, 3))]
    rows = torch.arange(40.0).view(8, 5)
    return [*pieces, Piece("column", (8, 5), (0, 2), rows[:, 2:4]), whole_piece("turned", rows.T)]


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    path, pieces = tmp_path_factory.mktemp("each") / "rank-00000.safetensors", one_of_each()
    written = write_file(Disk(), path, pieces, {"step": 3, "names": ["ü", "x\ny"], "nan": float("inf")})
    yield File(path, written), pieces


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bytes_of(a) == bytes_of(b)).all())


def test_every_dtype_and_shape_comes_back(each):
    file, pieces = each
    assert file.plain == {"step": 3, "names": ["ü", "x\ny"], "nan": float("inf")}
    entries = {entry.name: entry for entry in file.entries}
    assert len(entries) == len(pieces)
    for piece in pieces:
        entry, got = entries[piece.name], torch.empty(piece.shape, dtype=piece.values.dtype)
        assert (entry.whole, entry.start, entry.shape) == (piece.whole, piece.start, piece.shape)
        assert entry.first_byte % entry.dtype.itemsize == 0  # so that others may map it
        file.read(entry, 0, entry.size, bytes_of(got))
        assert same_bits(got, piece.values), piece.name


def test_safetensors_reads_the_same_tensors(each):
    file, pieces = each
    with open(file.path, "rb") as raw:
        assert (8 + int.from_bytes(raw.read(8), "little")) % ALIGNMENT == 0
    with safe_open(file.path, "pt") as theirs:
        assert set(theirs.keys()) == {key_of(piece.name, piece.start) for piece in pieces}
        for piece in pieces:
            assert same_bits(theirs.get_tensor(key_of(piece.name, piece.start)), piece.values), piece.name
        assert theirs.metadata()["plain"].startswith('{"step": 3')
    assert same_bits(safetensors.torch.load_file(file.path)["column@0,2"], pieces[-2].values)


def test_only_what_safetensors_knows_is_written(tmp_path):
    said = "^x is in torch.complex128, which safetensors does not know: convert it$"
    with pytest.raises(ValueError, match=said):
        write_file(Disk(), tmp_path / "a", [whole_piece("x", torch.ones(1, dtype=torch.complex128))], {})
    with pytest.raises(ValueError, match="^x@0 is given twice; a rank writes a piece once$"):
        write_file(Disk(), tmp_path / "a", [whole_piece("x", torch.ones(1))] * 2, {})
    with pytest.raises(ValueError, match="^plain values of a checkpoint must be what JSON knows: .*set"):
        write_file(Disk(), tmp_path / "a", [], {"x": {1}})
    assert not (tmp_path / "a").exists()


def test_a_header_over_the_limit_is_refused_before_there_is_a_file(tmp_path, monkeypatch):
    pieces = [whole_piece(f"x{number}", torch.ones(2)) for number in range(20)]
    length = len(format.pack(pieces, {})) - 8
    monkeypatch.setattr(format, "MOST_HEADER_BYTES", length)
    write_file(Disk(), tmp_path / "a", pieces, {})
    monkeypatch.setattr(format, "MOST_HEADER_BYTES", length - 1)
    with pytest.raises(ValueError) as error:
        write_file(Disk(), tmp_path / "b", pieces, {})
    why = f"20 pieces need a header of {length:,} bytes, a file may have {length - 1:,}"
    assert str(error.value) == f"{why}: write with more ranks" and not (tmp_path / "b").exists()


# ---- large ones

LARGE = 3 * BLOCK_BYTES + 12_344  # bytes


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "rank-00000.safetensors"
    x = random_bytes((LARGE // 8,), torch.float64)
    small = [whole_piece(f"small{number:03}", torch.full((1000,), float(number))) for number in range(120)]
    disk = Counting()
    file = File(path, write_file(disk, path, [*small[:60], whole_piece("x", x), *small[60:]], {}))
    yield file, x, disk.writes


def test_the_disk_is_given_whole_blocks(large):
    """In the order given, each to its place, from where they are; the header last."""
    file, x, writes = large
    begin = file.entries[0].first_byte
    small, end = begin + LARGE, begin + LARGE + 480_000
    assert writes == [
        *((small + number * 4000, 4000) for number in range(60)),
        *((begin + number * BLOCK_BYTES, BLOCK_BYTES) for number in range(3)),
        (begin + 3 * BLOCK_BYTES, 12_344),
        *((small + number * 4000, 4000) for number in range(60, 120)),
        (0, begin),
    ]
    assert file.path.stat().st_size == end


def test_blocks_may_come_from_elsewhere_one_at_a_time(tmp_path):
    """As a snapshot gives them: in the order of the pieces, each valid until the next is asked for."""
    values = [random_bytes((BLOCK_BYTES // 4 * 3 + 7,), dtype, 3) for dtype in (torch.int32, torch.float64)]
    pieces, asked = [whole_piece(f"x{number}", x) for number, x in enumerate(values)], []

    def blocks_of(piece):
        asked.append(piece.name)
        data, held = bytes_of(piece.values), np.empty(BLOCK_BYTES, np.uint8)
        for at in range(0, len(data), BLOCK_BYTES):
            part = held[: len(data[at : at + BLOCK_BYTES])]
            part[:] = data[at : at + BLOCK_BYTES]
            yield part
            held[:] = 0

    file = File(tmp_path / "a", write_file(Disk(), tmp_path / "a", pieces, {}, blocks_of))
    assert asked == ["x0", "x1"] and [entry.name for entry in file.entries] == ["x1", "x0"]
    for entry in file.entries:
        got = torch.empty_like(values[int(entry.name[1])])
        file.read(entry, 0, entry.size, bytes_of(got))
        assert same_bits(got, values[int(entry.name[1])])
    written = write_file(Disk(), tmp_path / "b", pieces, {}, lambda x: [bytes_of(x.values)])
    whole = File(tmp_path / "b", written)
    assert [entry.hashes for entry in whole.entries] == [entry.hashes for entry in file.entries]
    with pytest.raises(AssertionError, match="x0"):
        write_file(Disk(), tmp_path / "c", pieces, {}, lambda piece: [bytes_of(piece.values)[:10]])
    halves = lambda piece: np.array_split(bytes_of(piece.values), 9)
    with pytest.raises(AssertionError, match="parts of blocks"):
        write_file(Disk(), tmp_path / "c", pieces, {}, halves)


def test_any_part_is_read_and_no_more_than_its_blocks(large):
    file, x, _ = large
    entry, data = file.entries[0], bytes_of(x)
    edges = [*range(0, LARGE, BLOCK_BYTES), LARGE]
    for number, first in enumerate(edges):
        for last in edges[number:]:
            out, before = np.full(last - first, 7, np.uint8), file.read_bytes
            file.read(entry, first, last, out)
            assert (out == data[first:last]).all() and file.read_bytes - before == last - first
    with pytest.raises(Damaged):
        file.read(entry, 0, BLOCK_BYTES + 1, np.empty(BLOCK_BYTES + 1, np.uint8))  # a part of a block


def test_reading_goes_straight_to_where_it_is_wanted(large, monkeypatch):
    """Whole blocks: no memory is taken beside the tensor's own."""
    file, x, _ = large
    got = torch.empty_like(x)
    monkeypatch.setattr(np, "empty", None)
    file.read(file.entries[0], 0, LARGE, bytes_of(got))
    assert torch.equal(bytes_tensor(got), bytes_tensor(x))


def bytes_tensor(x):
    return x.view(torch.uint8)


def test_verifying_takes_the_memory_of_a_block(large, monkeypatch):
    file, _, _ = large
    sizes, real = [], np.empty
    monkeypatch.setattr(np, "empty", lambda size, kind: sizes.append(size) or real(size, kind))
    before = file.read_bytes
    file.verify()
    assert sizes == [BLOCK_BYTES] and file.read_bytes - before == sum(entry.size for entry in file.entries)


def test_a_damaged_block_is_named_and_the_others_can_be_read(large, tmp_path):
    file, x, _ = large
    changed = tmp_path / "changed"
    data = bytearray(file.path.read_bytes())
    entry = file.entries[0]
    data[entry.first_byte + 2 * BLOCK_BYTES + 5] ^= 1
    changed.write_bytes(data)
    written = format.Written("changed", len(data), format.digest(bytes(data[8 : entry.first_byte])))
    other, got = File(changed, written), np.empty(LARGE, np.uint8)
    other.read(other.entries[0], 0, 2 * BLOCK_BYTES, got[: 2 * BLOCK_BYTES])
    for first, last in ((0, LARGE), (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)):
        with pytest.raises(Damaged, match="changed: x is damaged, in block 2$"):
            other.read(other.entries[0], first, last, got[first:last])
    with pytest.raises(Damaged, match="block 2"):
        other.verify()
