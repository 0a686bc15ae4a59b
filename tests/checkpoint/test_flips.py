"""Whatever is changed in a file of a checkpoint is found, as Damaged; and nothing else is ever raised."""

import random
import shutil
import tracemalloc

import pytest
import torch

from minitrain.checkpoint import format as file_format
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import Damaged, write_file
from minitrain.checkpoint.store import MANIFEST, Store, file_name
from minitrain.ranks.pieces import Piece


def small(folder, step: int = 1) -> Store:
    """Two ranks, three pieces: of two dtypes, of a part of a row, and of no dimension."""
    store = Store(folder)
    into = store.begin(step)
    steps = Piece("s", (), (), torch.tensor(step, dtype=torch.int16))
    first = [Piece("w", (3, 4), (0, 0), torch.full((1, 4), 2.5)), steps]
    numbered = enumerate((first, [Piece("w", (3, 4), (1, 0), torch.arange(8.0).view(2, 4) + step)]))
    files = [write_file(Disk(), into / file_name(n), mine, {"n": n}) for n, mine in numbered]
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
