"""A folder of checkpoints: what counts, what is kept, who may write."""

import os
import resource
import time
from dataclasses import replace

import pytest
import torch

from minitrain.checkpoint.disk import Disk, DiskError
from minitrain.checkpoint.format import write_file
from minitrain.checkpoint.store import Store, file_name
from minitrain.ranks.pieces import Piece


def save(store: Store, step: int, ranks: int = 2) -> list[str]:
    folder, files = store.begin(step), []
    for rank in range(ranks):
        piece = Piece("w", (4 * ranks, 2), (4 * rank, 0), torch.full((4, 2), 1.0 * step))
        files.append(write_file(store.disk, folder / file_name(rank), [piece], {"step": step}))
    return store.commit(step, files, {"strategy": {"dp": ranks}})


def spoil(store: Store, step: int, rank: int = 1) -> None:
    path = store.path(step) / file_name(rank)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "runs")
    yield store
    store.unlock()


def test_the_newest_are_kept(store):
    for step in (1, 2, 3, 10):
        assert save(store, step) == []
    assert store.steps() == [3, 10] and store.newest_good() == (10, [])
    assert sorted(os.listdir(store.folder)) == ["lock", "step-00000003", "step-00000010"]
    assert store.manifest(10)["strategy"] == {"dp": 2} and store.manifest(10)["step"] == 10


def test_a_damaged_one_pushes_out_no_good_one(store):
    for step in (1, 2):
        save(store, step)
    store.unlock()
    spoil(store, 2)
    after = Store(store.folder)  # another process, which has not read them yet
    save(after, 3)
    assert after.steps() == [1, 2, 3] and list(after.damaged) == [2] and file_name(1) in after.damaged[2]
    save(after, 4)
    assert after.steps() == [3, 4]
    after.unlock()


def test_the_newest_good_one_is_found_and_what_was_passed_over_is_said(store):
    store.keep = 3
    for step in (1, 2, 3):
        save(store, step)
    store.unlock()
    spoil(store, 3)
    (store.path(2) / file_name(0)).unlink()
    step, passed = Store(store.folder).newest_good()
    assert step == 1 and len(passed) == 2
    assert passed[0].startswith("step 3 is passed over: ") and "w is damaged, in block 0" in passed[0]
    assert passed[1] == f"step 2 is passed over: {store.path(2) / file_name(0)} is missing"
    assert Store(store.folder / "nothing").newest_good() == (None, [])


def test_what_this_process_committed_or_has_verified_is_not_read_again(store, monkeypatch):
    verified, real = [], Store.verify
    monkeypatch.setattr(Store, "verify", lambda self, step: (verified.append(step), real(self, step)))
    save(store, 1)
    store.unlock()
    store._good.clear()
    save(store, 2)  # nothing is to be removed: nobody has to read 1
    assert verified == []
    save(store, 3)
    store.unlock()
    resumed = Store(store.folder)
    assert resumed.newest_good() == (3, []) and verified == [3]
    save(resumed, 4)  # 3 and 4 are good: 2 can go, and nobody has to read it
    assert verified == [3] and resumed.steps() == [3, 4]
    resumed.unlock()
    other = Store(store.folder)
    save(other, 5)  # nobody has read 4 here
    save(other, 6)
    assert verified == [3, 4] and other.steps() == [5, 6]
    other.unlock()


def test_a_damaged_step_is_saved_again(store):
    for step in (1, 2):
        save(store, step)
    store.unlock()
    spoil(store, 2)
    resumed = Store(store.folder)
    assert resumed.newest_good()[0] == 1
    save(resumed, 2)
    assert resumed.newest_good() == (2, []) and resumed.steps() == [1, 2] and resumed.damaged == {}
    assert Store(store.folder).newest_good() == (2, [])
    resumed.unlock()


def test_what_was_loaded_counts_as_good_and_what_was_set_aside_stays(store, monkeypatch):
    for step in (1, 2):
        save(store, step)
    store.unlock()
    resumed = Store(store.folder)
    resumed.set_aside(2)
    resumed.count_as_good(1)
    monkeypatch.setattr(Store, "verify", None)
    assert resumed.newest_good() == (1, [])
    for step in (2, 3):
        save(resumed, step)
    resumed.set_aside(2)  # again: the first one gives way
    assert sorted(os.listdir(store.folder)) == ["lock", "step-00000002.damaged", "step-00000003"]
    monkeypatch.undo()
    for gone in (1, 2):  # removed, set aside: what was good is not there any more
        assert gone not in resumed._good
    resumed.unlock()


def test_a_good_step_or_a_later_one_is_not_written_over(store):
    save(store, 5)
    for step in (5, 4):
        with pytest.raises(ValueError, match=r"^/.*/step-00000005 is there already; remove it, or write to"):
            store.begin(step)
    assert store.newest_good() == (5, [])
    spoil(store, 5)
    store._good.clear()
    assert save(store, 4) == [] and store.newest_good()[0] == 4  # a damaged one does not stand in the way


def test_what_a_crash_left_is_removed_and_nothing_else(store):
    save(store, 1)
    for name in ("step-00000002.writing", "step-00000003", "step-00000001.removing"):
        (store.folder / name).mkdir()
        (store.folder / name / file_name(0)).write_bytes(b"half")
    mine = ["step-00000002-kept", "step-3", "step-000000004", "notes", "step-00000002.backup"]
    for name in mine:
        (store.folder / name).mkdir()
    assert store.steps() == [1]
    save(store, 2)
    assert sorted(os.listdir(store.folder)) == sorted(["lock", "step-00000001", "step-00000002", *mine])


def test_no_clock_is_asked(store, monkeypatch):
    """The clock goes backwards from call to call, and the files' times are the wrong way round."""
    now = iter(range(10**9, 0, -1000))
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: float(next(now)))
    for step in (1, 2, 3):
        save(store, step)
        for path in (store.path(step), *store.path(step).iterdir()):
            os.utime(path, (10**9 - step, 10**9 - step))
    monkeypatch.undo()
    assert store.steps() == [2, 3] and Store(store.folder).newest_good() == (3, [])


# ---- who may write


def test_two_writers_of_a_folder(store):
    store.begin(1)
    other = Store(store.folder)
    for other in (other, other, Store(store.folder)):  # who was refused has no lock: the second time neither
        with pytest.raises(ValueError) as error:
            other.begin(1)
        me = f"process {os.getpid()} on {os.uname().nodename}"
        assert str(error.value) == f"{me} writes checkpoints to {store.folder}; use another folder"
    assert store.writing(1).exists()  # what the first writes was left alone
    store.unlock()
    other.begin(1)
    other.unlock()


def test_two_processes_may_make_the_folder_at_once(tmp_path, monkeypatch):
    """As ranks do that have folders of their own in one that is not there yet."""
    store, real = Store(tmp_path / "all" / "one"), Disk.make_folder

    def faster(disk, path):
        path.mkdir()
        real(disk, path)

    monkeypatch.setattr(Disk, "make_folder", faster)
    store.lock()
    store.unlock()
    monkeypatch.setattr(Disk, "make_folder", lambda disk, path: real(disk, path / "not" / "there"))
    with pytest.raises(DiskError, match="cannot make the folder"):
        Store(tmp_path / "two").lock()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    child = os.fork()
    if child == 0:
        Store(tmp_path).begin(1)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    store = Store(tmp_path)
    save(store, 1)
    store.unlock()
    assert not os.path.exists(store.writing(1))


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    for call in (lambda: Store(tmp_path / "runs").begin(1), lambda: Store(tmp_path / "runs").steps()):
        with pytest.raises(DiskError, match=r"cannot \w+ .*/runs(/lock)?: Not a directory"):
            call()


def test_a_rank_that_wrote_elsewhere_is_named(store):
    """As where the folder is not shared by all machines."""
    here = write_file(store.disk, store.begin(1) / file_name(0), [], {})
    there = write_file(store.disk, store.folder / file_name(1), [], {})
    with pytest.raises(ValueError, match=rf"{file_name(1)} is not there as it was written: .* all ranks see"):
        store.commit(1, [here, there], {})
    longer = replace(here, size=here.size + 1)
    with pytest.raises(ValueError, match=rf"{file_name(0)} is not there as it was written"):
        store.commit(1, [longer], {})
    assert store.steps() == []


@pytest.mark.parametrize("plain", [{"files": 1}, {"step": 1}, {"hash": 1}, {"x": torch.ones(1)}, {"x": {1}}])
def test_a_manifest_that_cannot_be_written_is_refused_before_anything_is(store, plain):
    file = write_file(store.disk, store.begin(1) / file_name(0), [], {})
    said = "a manifest has its own|plain values .* must be what JSON knows"
    with pytest.raises(ValueError, match=said) as error:
        store.commit(1, [file], plain)
    assert "\n" not in str(error.value) and store.writing(1).exists()


def test_a_checkpoint_of_more_files_than_a_process_may_open(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    save(store, 1, ranks=80)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        manifest, files = store.open(1)
        store.verify(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(files) == len(manifest["files"]) == 80
