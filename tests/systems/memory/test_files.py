"""States in files: what is given is taken bit for bit, exact bytes, and every way a disk can fail in one line."""

import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
import zlib

import pytest
import torch

from minitrain.ranks.events import Copy, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory import files
from minitrain.systems.memory.files import BLOCK, FileStore

SMALL = dict(buffer_bytes=2 * BLOCK, buffers=3)


def numbers(size=1000, seed=0, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_line(error):
    return "\n" not in str(error.value)


@pytest.fixture(params=["direct", "through the page cache"])
def both_ways(request, monkeypatch):
    if request.param != "direct":
        monkeypatch.delattr(os, "O_DIRECT")


def test_what_is_given_is_taken(tmp_path, both_ways):
    tensors = {
        "a": numbers(1000),
        "b": numbers(24, 1).view(2, 3, 4),
        "c": numbers(7, 2, torch.bfloat16),
        "d": numbers(2 * BLOCK // 8, 3, torch.float64),  # as large as a buffer
        "e": torch.arange(5),
    }
    with FileStore(tmp_path, **SMALL) as store:
        for name, tensor in tensors.items():
            store.write(name, tensor)
        for name, tensor in tensors.items():
            taken = store.read(name)
            assert torch.equal(taken, tensor) and taken.shape == tensor.shape and taken.dtype == tensor.dtype
            taken.mul_(2)
            store.write(name, taken)
        store.flush()
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size == store.read_bytes and store.written_bytes == 2 * size
        assert os.fstat(store._file).st_size == BLOCK * (1 + 1 + 1 + 2 + 1)  # whole blocks
        assert not list(tmp_path.iterdir())  # without a name
        assert os.fstat(store._file).st_mode & 0o777 == 0o600
        for name, tensor in tensors.items():
            assert torch.equal(store.read(name), tensor * 2)
            store.release(name)
    assert not list(tmp_path.iterdir())


def test_the_buffers_are_all_the_memory_and_are_used_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        files.mmap, "mmap", lambda fd, size, new=files.mmap.mmap: made.append(size) or new(fd, size)
    )
    with FileStore(tmp_path, **SMALL) as store:
        for number in range(20):
            store.write(str(number), numbers(2000, number))
        for number in range(20):
            store.prefetch(*(str(later) for later in range(number, min(number + 2, 20))))
            x = store.read(str(number))
            assert torch.equal(x, numbers(2000, number))
            store.write(str(number), x.neg_())
        assert [size for size in made if size != BLOCK] == [2 * BLOCK] * 3  # one block is for the trial
        assert store.read_bytes == 20 * 8000


def test_a_tensor_that_was_taken_is_the_buffer_and_others_are_copied(tmp_path):
    with FileStore(tmp_path, **SMALL) as store:
        mine = numbers()
        store.write("x", mine)
        mine.zero_()  # given was a copy
        taken = store.read("x")
        assert torch.equal(taken, numbers()) and taken.data_ptr() % BLOCK == 0
        store.write("x", torch.ones(1000))  # something else in its place
        assert torch.equal(store.read("x"), torch.ones(1000))
        store.release("x")
        store.read("x").zero_()
        store.release("x")  # nothing is written
        assert torch.equal(store.read("x"), torch.ones(1000))


def test_reading_ahead_happens_beside_the_caller_and_is_not_repeated(tmp_path, monkeypatch):
    with FileStore(tmp_path, **SMALL) as store:
        store.write("x", numbers())
        store.flush()
        store.prefetch("x")
        store.prefetch("x")
        store._reads["x"][1]._finish()
        monkeypatch.setattr(os, "preadv", None)  # nothing is read again
        assert torch.equal(store.read("x"), numbers()) and store.read_bytes == 4000
        monkeypatch.undo()
        store.write("x", numbers(seed=1))
        store.prefetch("x")
        store.write("x", numbers(seed=2))  # what was read ahead is old
        assert torch.equal(store.read("x"), numbers(seed=2))


def test_write_behind_does_not_wait_until_buffers_run_out(tmp_path, monkeypatch):
    go, pwrite = threading.Event(), os.pwrite
    with FileStore(tmp_path, **SMALL) as store:
        monkeypatch.setattr(os, "pwrite", lambda *args: go.wait() and pwrite(*args))
        for name in "abc":
            store.write(name, numbers())  # returns
        assert store.written_bytes == 0
        threading.Timer(0.05, go.set).start()
        store.write("d", numbers(seed=1))  # waits for a buffer
        assert store.written_bytes >= 4000 and torch.equal(store.read("d"), numbers(seed=1))


def test_for_a_buffer_the_oldest_write_is_waited_for(tmp_path, monkeypatch):
    held, pwrite, go = [], os.pwrite, threading.Event()
    with FileStore(tmp_path, **SMALL) as store:

        def write(file, data, offset):
            if offset == store._records["c"].offset:
                held.append(go.wait(20))
            return pwrite(file, data, offset)

        monkeypatch.setattr(os, "pwrite", write)
        for name in "abcd":  # d gets the buffer of a, while c is being written
            store.write(name, numbers(2000))
        assert not held
        go.set()
    assert held == [True]


def test_flush_ends_when_all_is_on_the_disk_and_close_when_all_is_written(tmp_path, monkeypatch):
    asked, go, fsync, pwrite = [], threading.Event(), os.fsync, os.pwrite
    store = FileStore(tmp_path, **SMALL)
    monkeypatch.setattr(os, "fsync", lambda file: asked.append((file, store.written_bytes)) or fsync(file))
    store.write("a", numbers())
    store.write("b", numbers())
    store.flush()
    assert asked == [(store._file, 8000)]
    monkeypatch.setattr(os, "pwrite", lambda *args: go.wait() and pwrite(*args))
    store.write("a", numbers(seed=1))
    threading.Timer(0.05, go.set).start()
    store.close()
    assert store._records["a"].checksum == zlib.crc32(numbers(seed=1).numpy())


def test_the_ledger_sees_every_copy_and_the_buffers_on_the_host(tmp_path):
    with Ledger() as ledger, FileStore(tmp_path, **SMALL) as store:
        store.write("x", torch.ones(1000))
        store.flush()
        for _ in range(2):
            store.prefetch("x")
            store.write("x", store.read("x"))
        store.read("x")
        store.release("x")
        store.flush()
        assert ledger.copied_bytes("to_disk") == 3 * 4000 == store.written_bytes
        assert ledger.copied_bytes("from_disk") == 3 * 4000 == store.read_bytes
        assert ledger.host_bytes == 2 * BLOCK and ledger.live_bytes == 0 and ledger.peak_bytes == 4000
        copies = [event for event in ledger.events if type(event) is Copy]
        waited = {event.id for event in ledger.events if type(event) is Wait}
        assert [c.direction for c in copies] == ["to_disk"] + ["from_disk", "to_disk"] * 2 + ["from_disk"]
        assert {copy.id for copy in copies} == waited


# ---- wrong use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda store: store.prefetch("y"), "'y' is not in .*: write it first"),
        (lambda store: (store.read("x"), store.read("x")), "'x' is out of .* already"),
        (lambda store: store.release("x"), "'x' is not out"),
        (lambda store: store.write("x", numbers(999)), r"\[1000\] torch.float32, got \[999\]"),
        (lambda store: store.write("x", numbers(1000, 0, torch.bfloat16)), "got .* torch.bfloat16"),
        (lambda store: store.write("y", numbers(9999)), "39996 bytes, a buffer 8192: cut it"),
        (lambda store: store.write("y", numbers(0)), "0 bytes"),
        (
            lambda store: [(store.write(name, numbers(1)), store.read(name)) for name in "abcd"],
            "all 3 buffers of .* have a, b, c",
        ),
        (lambda store: FileStore("missing"), "No such file or directory; choose another folder"),
    ],
)
def test_wrong_use_is_refused(tmp_path, wrong, message):
    with FileStore(tmp_path, **SMALL) as store:
        store.write("x", numbers())
        with pytest.raises(ValueError, match=message) as error:
            wrong(store)
        assert one_line(error)
    assert not list(tmp_path.iterdir())


# ---- disks that fail -------------------------------------------------------------------------------------


def full_after(bytes_left, code=errno.ENOSPC):
    """An os.pwrite of a disk with so much room; a write that does not fit puts its first blocks."""
    room, pwrite = [bytes_left], os.pwrite

    def write(file, data, offset):
        fits = min(len(data), room[0]) // BLOCK * BLOCK
        if not fits:
            raise OSError(code, os.strerror(code))
        room[0] -= fits
        return pwrite(file, data[:fits], offset)

    return write


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    with FileStore(tmp_path, **SMALL) as store:
        for name in "ab":
            store.write(name, numbers(2000))
        store.flush()
        for name in "ab":
            x = store.read(name)
            monkeypatch.setattr(os, "pwrite", full_after(3 * BLOCK))
            store.write(name, x.add_(1))
            store.flush()
            monkeypatch.setattr(os, "pwrite", full_after(BLOCK))
            x = store.read(name)
            store.write(name, x.add_(1))  # half of it is written: a file of two steps
            for attempt in (store.flush, store.flush, lambda: store.read(name)):
                with pytest.raises(OSError, match=rf"8000 bytes of '{name}' to .*rank 0.: No space") as error:
                    attempt()
                assert error.value.errno == errno.ENOSPC and one_line(error)
                monkeypatch.setattr(os, "pwrite", full_after(0))
            monkeypatch.undo()  # somebody has made room
            store.flush()
        for name in "ab":
            assert torch.equal(store.read(name), numbers(2000).add_(1).add_(1))
    assert not list(tmp_path.iterdir())


def test_a_write_that_takes_a_part_goes_on_at_a_whole_block(tmp_path, monkeypatch):
    """A disk takes 6,000 bytes at a time: the rest begins where O_DIRECT can begin."""
    starts, pwrite = [], os.pwrite

    def some(file, data, offset):
        starts.append(offset)
        return pwrite(file, data[:6000], offset)

    monkeypatch.delattr(os, "O_DIRECT")
    with FileStore(tmp_path, **SMALL) as store:
        monkeypatch.setattr(os, "pwrite", some)
        store.write("x", numbers(2000))
        store.flush()
        assert starts == [0, BLOCK] and torch.equal(store.read("x"), numbers(2000))


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda path: flip(path, 17), "'a' in .*rank 0. is not what was written"),
        (lambda path: os.truncate(path, 100), "'a' ends at byte 4000 of .* cut to 100"),
    ],
)
def test_a_changed_file_is_noticed(tmp_path, harm, message, both_ways):
    with FileStore(tmp_path, **SMALL) as store:
        store.write("a", numbers())
        store.flush()
        harm(path_of(store))
        for _ in range(4):  # more often than there are buffers
            with pytest.raises(OSError, match=message) as error:
                store.read("a")
            assert one_line(error) and "checkpoint" in str(error.value)
        store.write("a", numbers(seed=1))  # as loading a checkpoint does
        assert torch.equal(store.read("a"), numbers(seed=1))


def test_a_direct_read_does_not_go_on_inside_a_block(tmp_path, monkeypatch):
    asked = []
    with FileStore(tmp_path, **SMALL) as store:
        store.write("a", numbers(2000))
        store.flush()
        monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: asked.append(offset) or BLOCK + 100)
        with pytest.raises(
            OSError, match=r"ends at byte 8000 of .*, which was cut to 4196: go back to a check"
        ):
            store.read("a")
    assert asked == [0]


def path_of(store):
    """The only way to a file without a name."""
    return f"/proc/self/fd/{store._file}"


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# ---- folders ---------------------------------------------------------------------------------------------


def test_no_buffer_is_lost_with_what_nobody_wants(tmp_path):
    """Read ahead and then given anew, or damaged: more often than there are buffers."""
    with FileStore(tmp_path, buffer_bytes=BLOCK, buffers=2) as store:
        for number in range(4):
            store.write("a", numbers(10, number))
            store.prefetch("a")
        for number in range(4):
            assert torch.equal(store.read("a"), numbers(10, 3 if number == 0 else 8 + number))
            store.write("a", numbers(10, 9 + number))  # not what was taken
        store.flush()
        flip(path_of(store), 3)
        store.prefetch("a")
        store.write("a", numbers(10, 9))  # nobody wants what could not be read
        assert torch.equal(store.read("a"), numbers(10, 9))
        store.release("a")
        flip(path_of(store), 3)
        for _ in range(4):
            with pytest.raises(OSError, match="is not what was written"):
                store.read("a")
        store.write("b", numbers(3))
        assert torch.equal(store.read("b"), numbers(3))


def test_what_a_killed_run_has_written_is_free_again(tmp_path):
    code = f"""
import os, torch
from minitrain.systems.memory.files import FileStore
store = FileStore({str(tmp_path)!r})
store.write("a", torch.ones(10_000)); store.flush()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not list(tmp_path.iterdir())


def test_a_store_goes_with_an_error_and_when_nobody_holds_it(tmp_path):
    def files_open():
        return len(os.listdir("/proc/self/fd"))

    before = files_open()
    with pytest.raises(ZeroDivisionError), FileStore(tmp_path) as store:
        store.write("a", numbers())
        1 / 0
    assert files_open() == before
    store = FileStore(tmp_path)
    store.write("a", numbers())
    store.flush()
    del store
    gc.collect()
    assert files_open() == before


@pytest.mark.parametrize("refuses", ["fcntl", "pwrite"])
def test_where_there_is_no_direct_way_it_says_so(tmp_path, monkeypatch, refuses):
    control, pwrite = fcntl.fcntl, os.pwrite

    def refused(file, command, *args):
        if command == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, *args)

    def refused_write(file, data, offset):
        if control(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, offset)

    if refuses == "fcntl":
        monkeypatch.setattr(fcntl, "fcntl", refused)
    else:
        monkeypatch.setattr(os, "pwrite", refused_write)
    with FileStore(tmp_path, **SMALL) as store:
        assert not store.direct
        store.write("a", numbers())
        assert torch.equal(store.read("a"), numbers())
    assert not list(tmp_path.iterdir())
