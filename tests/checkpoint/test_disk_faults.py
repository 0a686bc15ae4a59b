"""Any call to the file system may be refused, for any reason: the older checkpoint is whole, the error is one
line that names file and cause, and the next save goes well."""

import errno
import os
import resource

import pytest
import torch

from minitrain.checkpoint.disk import Disk, DiskError, new_file, refused
from minitrain.checkpoint.format import Damaged, File, write_file
from minitrain.checkpoint.store import Store, file_name
from minitrain.ranks.pieces import whole_piece

CAUSES = ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ENOENT", "EFBIG"]
CALLS = ("create", "write", "sync", "close", "make_folder", "sync_folder", "rename", "remove")


class Refusing(Disk):
    """Refuses its k-th call, and what a full disk refuses, it goes on refusing."""

    def __init__(self, k: int | None = None, cause: int = 0):
        super().__init__()
        self.left, self.cause, self.calls, self.path = k, cause, [], None


def refusing(name):
    def call(self, *args):
        self.calls.append(name)
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.left = 1 if self.cause in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) else None
                self.path = self._paths.get(args[0], args[0])
                if name == "close":
                    super(Refusing, self).close(*args)
                with refused(name, self.path):
                    raise OSError(self.cause, "no")
        return getattr(super(Refusing, self), name)(*args)

    return call


for name in CALLS:
    setattr(Refusing, name, refusing(name))


def values(step: int, rank: int) -> torch.Tensor:
    return torch.full((6,), 10.0 * step + rank)


def save(store: Store, step: int) -> list[str]:
    folder = store.begin(step)
    files = [
        write_file(store.disk, folder / file_name(rank), [whole_piece(f"w{rank}", values(step, rank))], {})
        for rank in range(2)
    ]
    return store.commit(step, files, {})


def good(folder) -> int | None:
    """The newest step that another process finds; no other is passed over."""
    step, passed = Store(folder).newest_good()
    assert not passed
    return step


def calls_of_a_save(folder) -> list[str]:
    store = Store(folder, keep=1)
    save(store, 1)
    store.disk = Refusing()
    save(store, 2)
    store.unlock()
    return store.disk.calls


def test_a_save_makes_these_calls(tmp_path):
    rank = ["create", "write", "write", "sync", "close"]
    manifest = ["create", "write", "sync", "close"]
    published = ["sync_folder", "rename", "sync_folder", *manifest, "rename", "sync_folder"]
    removed = ["rename", "sync_folder", "remove"]
    assert calls_of_a_save(tmp_path) == ["make_folder", *rank, *rank, *published, *removed]


def test_what_is_synced_is_told_to_the_system(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file))
    )
    save(Store(tmp_path / "runs"), 1)
    runs, into = tmp_path / "runs", tmp_path / "runs" / "step-00000001"
    files = [f"{into}.writing/{file_name(rank)}" for rank in range(2)]
    assert synced == [
        str(tmp_path), *files, f"{into}.writing", str(runs), f"{into}/manifest.json.new", str(into),
    ]  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_kth_call_is_refused(tmp_path, cause):
    number, count = getattr(errno, cause), len(calls_of_a_save(tmp_path / "count"))
    counts = count - 3  # the last three remove the older one
    for k in range(1, count + 1):
        store = Store(tmp_path / str(k), keep=1)
        save(store, 1)
        store.disk = Refusing(k, number)
        if k > counts:
            (line,) = save(store, 2)
        else:
            with pytest.raises(DiskError) as error:
                save(store, 2)
            assert error.value.errno == number
            line = str(error.value)
        assert "\n" not in line and str(store.disk.path) in line and os.strerror(number) in line
        assert good(store.folder) == (2 if k >= counts else 1)  # its name is there, if perhaps not for good
        store.disk = Disk()
        assert save(store, 3) == []
        store.unlock()
        left = sorted(os.listdir(store.folder))
        assert left == ["lock", "step-00000003"] and good(store.folder) == 3


def test_a_first_save_that_fails_leaves_a_folder_to_go_on_with(tmp_path):
    for k in range(1, 22):
        store = Store(tmp_path / str(k) / "deep", disk=Refusing(k, errno.EIO))
        with pytest.raises(DiskError):
            save(store, 1)
        if good(store.folder) is None:
            store.disk = Disk()
            save(store, 1)
        assert good(store.folder) == 1
        store.unlock()
    assert k == 21


def test_a_disk_that_is_full_says_how_full(tmp_path):
    said = r"^cannot write /.*/a: No space left on device \([\d.,]+ MB are free\)$"
    with pytest.raises(DiskError, match=said):
        with refused("write", tmp_path / "a"):
            raise OSError(errno.ENOSPC, "x")
    with pytest.raises(DiskError, match="^cannot write /nowhere/a: No space left on device$"):
        with refused("write", type(tmp_path)("/nowhere/a")):
            raise OSError(errno.ENOSPC, "x")


def test_a_limit_of_the_system_is_met_by_the_real_disk(tmp_path):
    """RLIMIT_FSIZE, in a process of its own; the checkpoint before it stays."""
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        try:
            store = Store(tmp_path)
            save(store, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            save(store, 2)
        except BaseException as error:
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    path = tmp_path / "step-00000002.writing" / file_name(0)
    assert os.read(told, 1000).decode() == f"DiskError: cannot write {path}: File too large"
    os.close(told)
    os.close(tell)
    assert good(tmp_path) == 1


def test_after_an_error_a_file_is_closed_and_the_first_error_is_told(tmp_path):
    disk = Refusing(2, errno.ENOSPC)  # the write, and then the close too
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError) as error, new_file(disk, tmp_path / "a") as file:
        disk.write(file, 0, b"x")
    assert str(error.value).startswith("cannot write") and disk.calls == ["create", "write", "close"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_that_does_not_get_on_ends(tmp_path, monkeypatch):
    disk = Disk()
    file = disk.create(tmp_path / "a")
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: 0)
    with pytest.raises(DiskError, match="cannot write .*: Input/output error"):
        disk.write(file, 0, b"abc")
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset, real=os.pwrite: real(file, data[:2], offset))
    disk.write(file, 1, b"abcde")  # a call may write less than it was given
    disk.close(file)
    assert (tmp_path / "a").read_bytes() == b"\0abcde"


@pytest.mark.parametrize("cause", CAUSES)
def test_what_nobody_can_read_is_damaged_and_what_may_not_be_read_is_an_error(tmp_path, monkeypatch, cause):
    """A newer checkpoint is passed over if it is lost, not if the disk is not there for the moment."""
    store, number = Store(tmp_path), getattr(errno, cause)
    save(store, 1)
    save(store, 2)
    store.unlock()
    store, real = Store(tmp_path), open

    def refuse(path, *args, **more):
        if str(path).endswith(f"step-00000002/{file_name(1)}"):
            raise OSError(number, "no")
        return real(path, *args, **more)

    monkeypatch.setattr("builtins.open", refuse)
    if cause in ("EIO", "ENOENT"):
        step, (line,) = store.newest_good()
        assert step == 1 and line.startswith("step 2 is passed over: ") and file_name(1) in line
    else:
        with pytest.raises(DiskError, match=rf"cannot read .*/step-00000002/{file_name(1)}: "):
            store.newest_good()
        assert not store.damaged


def test_a_file_that_ends_while_it_is_read_is_damaged(tmp_path):
    written = write_file(Disk(), tmp_path / file_name(0), [whole_piece("w", values(1, 0))], {})
    file = File(tmp_path / file_name(0), written)
    os.truncate(file.path, written.size - 3)
    with pytest.raises(Damaged, match="ends too early"):
        file.verify()
