"""Whatever is changed in a file of a checkpoint is found, as Damaged; and nothing else is ever raised."""

import json
import random
import shutil
import tracemalloc

import pytest
import torch

from minitrain.checkpoint import format as file_format
from minitrain.checkpoint import header
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import Damaged, write_file
from minitrain.checkpoint.header import pack, parse
from minitrain.checkpoint.store import MANIFEST, Store, file_name, read_manifest
from minitrain.ranks.pieces import Piece


def small(folder, step: int = 1) -> Store:
    """Two ranks, three pieces: of two dtypes, of a part of a row, and of no dimension."""
    store = Store(folder)
    into = store.begin(step)
    first = [
        Piece("w", (3, 4), (0, 0), torch.full((1, 4), 2.5)),
        Piece("s", (), (), torch.tensor(step, dtype=torch.int16)),
    ]
    second = [Piece("w", (3, 4), (1, 0), torch.arange(8.0).view(2, 4) + step)]
    files = [
        write_file(Disk(), into / file_name(n), mine, {"n": n}) for n, mine in enumerate((first, second))
    ]
    store.commit(step, files, {"of": "test"})
    return store


@pytest.fixture
def store(tmp_path):
    store = small(tmp_path)
    yield store
    store.unlock()


def files_of(store: Store):
    return sorted(store.path(1).iterdir())


def found(store: Store) -> bool:
    try:
        store.verify(1)
    except Damaged as error:
        assert str(store.path(1)) in str(error) and "\n" not in str(error)
        return True
    return False


def test_a_checkpoint_is_these_files(store):
    assert [path.name for path in files_of(store)] == [MANIFEST, file_name(0), file_name(1)]
    assert not found(store)


def test_every_flipped_bit_is_found(store):
    """Of all files, the spaces behind a header and the manifest's hash included: no byte is harmless."""
    flips = 0
    for path in files_of(store):
        with open(path, "r+b", buffering=0) as file:
            for at, byte in enumerate(path.read_bytes()):
                for changed in [byte ^ 1 << bit for bit in range(8)]:
                    file.seek(at)
                    file.write(bytes([changed]))
                    assert found(store), f"{path.name}: byte {at}, {byte} -> {changed}"
                    flips += 1
                file.seek(at)
                file.write(bytes([byte]))
    assert flips > 5000 and not found(store)


def test_every_other_value_of_a_byte_of_the_manifest_is_found(store):
    """JSON may be written in many ways; this one has only one."""
    path = store.path(1) / MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        for changed in b" \tAf0":
            if whole[at] != changed:
                path.write_bytes(whole[:at] + bytes([changed]) + whole[at + 1 :])
                assert found(store), f"byte {at} -> {changed}"


@pytest.mark.parametrize("what", ["cut", "zero tail", "inserted", "left out", "junk", "doubled"])
def test_every_other_change_is_found(store, what):
    draw = random.Random(0)
    for path in files_of(store):
        whole = path.read_bytes()
        for at in range(len(whole)):
            noise = draw.randbytes(1 + at % 3)
            changed = {
                "cut": whole[:at],
                "zero tail": whole[:at] + bytes(len(whole) - at),
                "inserted": whole[:at] + noise + whole[at:],
                "left out": whole[:at] + whole[at + 1 :],
                "junk": whole + noise * (at + 1),
                "doubled": whole[:at] + whole[at : at + 4] * 2 + whole[at + 4 :],
            }[what]
            if changed == whole:  # a tail that was zero
                continue
            path.write_bytes(changed)
            assert found(store), f"{path.name}: {what} at {at}"
        path.write_bytes(whole)
    assert not found(store)


def test_files_at_the_wrong_place_are_found(store, tmp_path):
    first, second = (store.path(1) / file_name(rank) for rank in range(2))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert found(store)
    first.write_bytes(one)
    assert found(store)
    second.write_bytes(other)
    assert not found(store)
    first.unlink()
    assert found(store)
    first.mkdir()
    assert found(store)
    first.rmdir()
    first.write_bytes(one)
    shutil.copytree(store.path(1), store.path(2))  # a step that it is not
    with pytest.raises(Damaged):
        store.verify(2)
    newer = small(tmp_path / "other", step=2)  # another checkpoint's file, whole in itself
    shutil.copy(newer.path(2) / file_name(1), second)
    newer.unlock()
    assert found(store)
    second.write_bytes(other)
    (store.path(1) / "notes.txt").write_text("harmless")
    (store.folder / "lock").write_bytes(b"\xff\x00")  # only says who
    assert not found(store)


# ---- the parsers


def a_header() -> bytes:
    pieces = [
        Piece("w/x", (3, 4), (0, 0), torch.zeros(2, 4)),
        Piece("s", (), (), torch.tensor(1, dtype=torch.int32)),
    ]
    return pack(pieces, {"step": 3}, ["0" * 16, "1" * 16])[8:]


def only_damaged(call, *args) -> bool:
    try:
        call(*args)
    except Damaged as error:
        assert "\n" not in str(error)
        return True
    return False


def test_fuzzed_headers_are_damaged_and_nothing_else():
    """100,000 changed headers, as if the manifest's hash were right for each; memory stays that of the text."""
    draw, whole = random.Random(1), a_header()
    entries, plain = parse(whole, 8 + len(whole) + 36)
    assert [entry.name for entry in entries] == ["w/x", "s"] and plain == {"step": 3}
    tokens = [
        b"[]",
        b"{}",
        b"null",
        b"-1",
        b"1e999",
        b"[[",
        b'"F32"',
        b"true",
        b"\x00",
        b"\xff",
        b"0.5",
        b'"',
    ]
    refused = peak = 0
    tracemalloc.start()
    for number in range(100_000):
        if number == 2000:  # looking costs more than parsing
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        text = bytearray(whole)
        for _ in range(1 + number % 3):
            at, kind = draw.randrange(len(text)), draw.random()
            if kind < 0.4:
                text[at] ^= 1 << draw.randrange(8)
            elif kind < 0.6:
                token = draw.choice(tokens)
                text[at : at + len(token)] = token
            elif kind < 0.8:
                del text[at : at + draw.randrange(1, 9)]
            else:
                text[at:at] = text[draw.randrange(len(text)) :][:6]
        refused += only_damaged(parse, bytes(text), 8 + len(whole) + 36)
    assert refused > 80_000 and peak < 1_000_000  # what is left has another name, place, hash or plain value


def changed(**changes) -> bytes:
    """A header in which something is another value."""
    values = json.loads(a_header())
    for word, value in changes.items():
        place = values["__metadata__"] if word in ("plain", "more") else values["w/x@0,0"]
        place["w/x@0,0" if word == "more" else word] = value
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"' * 9,
        b"[" * 200_000,
        b'{"a":' * 200_000,
        a_header()[:-100],
        changed(dtype="F99"),
        changed(dtype=["F32"]),
        changed(shape=[2, 5]),
        changed(shape=[-2, -4]),
        changed(shape=[2.0, 4]),
        changed(shape=[True, 8]),
        changed(shape="24"),
        changed(shape=[8]),
        changed(shape=[10**400, 4]),
        changed(data_offsets=[4, 36]),
        changed(data_offsets=[0, 10**30]),
        changed(data_offsets=[0]),
        changed(data_offsets=None),
        changed(more="[3, 4] " + "0" * 15),
        changed(more="[1, 4] " + "0" * 16),
        changed(more="3 " + "0" * 16),
        changed(more=7),
        changed(plain="[1]"),
        changed(plain="{"),
        changed(plain=None),
        a_header().replace(b"w/x@0,0", b"w/x@0,00"),
        a_header().replace(b"w/x@0,0", b"w/x@-1,0"),
        a_header().replace(b"w/x@0,0", b"w/x@2,0"),
        a_header().replace(b"w/x@0,0", b"w/x"),
        a_header().replace(b'"s@"', b'"w/x@0,0"'),
        a_header().replace(b'"plain"', b'"plane"'),
        a_header().replace(b'"plain"', b'"zz@": "[] 0", "plain"'),
    ],
)
def test_a_header_that_pack_cannot_have_written_is_damaged(text):
    padded = text.ljust(len(a_header()))
    assert only_damaged(parse, padded, 8 + len(padded) + 36)


def test_a_file_of_another_length_than_its_header_says_is_damaged():
    text = a_header()
    assert not only_damaged(parse, text, 8 + len(text) + 36)
    assert only_damaged(parse, text, 8 + len(text) + 37)
    assert only_damaged(parse, text, 8 + len(text) + 35)


def test_a_manifest_with_the_right_hash_and_wrong_values_is_damaged(tmp_path):
    path, sound = tmp_path / MANIFEST, {"name": "rank-00000.safetensors", "size": 3, "header_hash": "0"}

    def refused(body: str, step: int = 3) -> bool:
        path.write_text('{"hash": "' + header.digest(body.encode()) + '", ' + body)
        return only_damaged(read_manifest, path, step)

    def with_file(**changes) -> str:
        return json.dumps({"step": 3, "files": [sound | changes]})[1:]

    assert not refused(with_file())
    assert refused(with_file(), step=4)
    for changes in (
        {"name": "../rank-00000.safetensors"},
        {"name": "/etc/passwd"},
        {"name": ""},
        {"name": ".."},
        {"name": 3},
        {"size": "3"},
        {"size": True},
        {"header_hash": None},
        {"more": 1},
    ):
        assert refused(with_file(**changes)), changes
    for body in (
        "}",
        '"step": 3}',
        '"step": 3, "files": 3}',
        '"step": 3, "files": [3]}',
        '"a": ' + "[" * 200_000,
    ):
        assert refused(body), body[:40]


def test_a_length_that_is_not_the_headers_is_damaged_before_memory_is_taken(store):
    path = store.path(1) / file_name(0)
    whole = path.read_bytes()
    for length in (0, 1, len(whole), 10**8 + 1, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + whole[8:])
        tracemalloc.start()
        assert found(store)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000


def test_a_header_over_the_limit_is_not_read(store, monkeypatch):
    monkeypatch.setattr(file_format, "MOST_HEADER_BYTES", 10)
    assert found(store)
