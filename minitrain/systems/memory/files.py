"""Tensors in files: read ahead and written behind, past the page cache, each with a checksum.

    store = FileStore(folder, rank, buffer_bytes=4 << 20, buffers=6)
    store.write("3.exp_avg", x)         a new name gets a place in this rank's file; written behind
    store.prefetch("3.exp_avg")         starts to read
    x = store.read("3.exp_avg")         waits, verifies; a view of a buffer, to be changed and written, or
    store.release("3.exp_avg")          given up unchanged
    store.flush(); store.close()        all is on the disk; the space is free again

A rank has one file in `folder` with its shards only: N ranks have the bandwidth of N disks. It has no name:
however its process ends, its space is free again. Host memory: `buffers` times `buffer_bytes`. `direct` is
False where O_DIRECT is refused. A write that fails keeps its data in its buffer and is tried again before
OSError is raised: make room, go on. Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, sections 5.2
and 6.3. Differs: threads that call preadv and pwrite, not libaio; a checksum (CRC-32) per tensor.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from minitrain.memory.pools import Transfer
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import announce_host

BLOCK = 4096
LOST = "go back to a checkpoint"


@dataclass
class _Record:
    """Where a tensor is in the file, and what it is."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    bytes: int
    checksum: int | None = None  # None: not yet written to its end


class _Buffer:
    """Memory of the host that begins at a page, as O_DIRECT asks for."""

    def __init__(self, size: int):
        self.memory = memoryview(mmap.mmap(-1, size))
        self.bytes = announce_host(torch.frombuffer(self.memory, dtype=torch.uint8), "optimizer state")

    def view(self, record: _Record) -> Tensor:
        return self.bytes[: record.bytes].view(record.dtype).view(record.shape)


class FileStore(contextlib.AbstractContextManager):
    """Tensors by name in one file of `folder`; for one thread at a time."""

    def __init__(self, folder: str | Path, rank=0, *, buffer_bytes=4 << 20, buffers=6, threads=4):
        require_positive_ints(buffer_bytes=buffer_bytes, buffers=buffers, threads=threads)
        self.place = f"{folder} (rank {rank})"
        self.buffer_bytes, self.buffers = _padded(buffer_bytes), buffers
        self.read_bytes = self.written_bytes = 0
        file, self.direct = open_unnamed(Path(folder))
        self._file, self._close = file.fileno(), weakref.finalize(self, file.close)
        self._records: dict[str, _Record] = {}
        self._end = 0  # of the file
        self._free: list[_Buffer] = []
        self._made = 0  # buffers so far
        self._out: dict[str, _Buffer] = {}  # read, and not yet written or released
        self._reads: dict[str, tuple[_Buffer, Transfer]] = {}
        self._writes: dict[str, tuple[_Buffer, Transfer]] = {}  # the oldest first
        self._workers = ThreadPoolExecutor(threads, f"files of rank {rank}")

    def __exit__(self, *error) -> None:
        self.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write `tensor` behind. One that was read goes from its buffer and must not be used any more; any
        other is copied. A name keeps its shape and dtype."""
        if name not in self._records:
            if not 0 < tensor.nbytes <= self.buffer_bytes:
                sizes = (
                    f"{name!r} has {tensor.nbytes} bytes, a buffer of {self.place} has {self.buffer_bytes}"
                )
                raise ValueError(f"{sizes}: cut it, or use larger buffers")
            self._records[name] = _Record(self._end, tensor.shape, tensor.dtype, tensor.nbytes)
            self._end += _padded(tensor.nbytes)
        record = self._records[name]
        if (record.shape, record.dtype) != (tensor.shape, tensor.dtype):
            was, now = (f"{list(x.shape)} {x.dtype}" for x in (record, tensor))
            raise ValueError(f"{name!r} in {self.place} is {was}, got {now}: use another name")
        buffer = self._out.get(name)
        if buffer is None or tensor.data_ptr() != buffer.view(record).data_ptr():
            if name in self._reads:
                unread, transfer = self._reads.pop(name)
                with contextlib.suppress(OSError):
                    transfer.wait()
                self._free.append(unread)
            if name in self._writes:
                self._settle(name)
            buffer = self._out.get(name) or self._buffer()
            if buffer is None:
                raise self._all_out(f"write {name!r}")
            buffer.view(record).copy_(tensor)
        self._out.pop(name, None)
        written = self._workers.submit(self._written, record, buffer)
        finish, place = partial(self._finish, name, buffer, written), buffer.view(record)
        self._writes[name] = buffer, Transfer("to_disk", record.bytes, place, finish)

    def read(self, name: str) -> Tensor:
        """The tensor, in a buffer, until it is written or released."""
        self.prefetch(name)
        if name not in self._reads:
            raise self._all_out(f"read {name!r}")
        buffer, transfer = self._reads.pop(name)
        try:
            tensor = transfer.wait()
        except BaseException:
            self._free.append(buffer)
            raise
        self._out[name] = buffer
        self.read_bytes += tensor.nbytes
        return tensor

    def release(self, name: str) -> None:
        """Give up a tensor that was read: nothing is written."""
        if name not in self._out:
            raise ValueError(f"{name!r} is not out of {self.place}: read it first")
        self._free.append(self._out.pop(name))

    def prefetch(self, *names: str) -> None:
        """Start to read what comes next, as far as there are buffers; waits for older writes."""
        for name in names:
            if name not in self._records:
                raise ValueError(f"{name!r} is not in {self.place}: write it first")
            if name in self._out:
                raise ValueError(f"{name!r} is out of {self.place} already: write or release it first")
            if name in self._reads:
                continue
            if name in self._writes:
                self._settle(name)
            if (buffer := self._buffer()) is None:
                return
            record, read = self._records[name], self._workers.submit(self._read, name, buffer)
            self._reads[name] = buffer, Transfer("from_disk", record.bytes, buffer.view(record), read.result)

    def flush(self) -> None:
        """Returns when everything written is on the disk."""
        self._settle(*self._writes)
        os.fsync(self._file)

    def close(self) -> None:
        """Wait for the workers and free the file; the buffers of what was read stay valid."""
        self._workers.shutdown(wait=True)
        self._close()

    def _buffer(self) -> _Buffer | None:
        """A free buffer, if need be of the oldest write; None if all are out."""
        if not self._free and self._made < self.buffers:
            self._made += 1
            self._free.append(_Buffer(self.buffer_bytes))
        if not self._free and self._writes:
            self._settle(next(iter(self._writes)))
        return self._free.pop() if self._free else None

    def _all_out(self, wanted: str) -> ValueError:
        names = ", ".join([*self._out, *self._reads][:3])
        out = f"all {self.buffers} buffers of {self.place} have {names}, ..."
        return ValueError(f"{wanted}: {out}: release or use more")

    def _written(self, record: _Record, buffer: _Buffer) -> None:
        checksum, start, blocks = zlib.crc32(buffer.memory[: record.bytes]), 0, _padded(record.bytes)
        while start < blocks:  # a disk that is nearly full takes a part: go on at a whole block
            put = os.pwrite(self._file, buffer.memory[start:blocks], record.offset + start)
            start += put // BLOCK * BLOCK
        record.checksum = checksum

    def _read(self, name: str, buffer: _Buffer) -> None:
        record, start = self._records[name], 0
        while start < (blocks := _padded(record.bytes)):
            got = os.preadv(self._file, [buffer.memory[start:blocks]], record.offset + start)
            if not got or got % BLOCK:  # a file's end; a direct read must not go on there
                ends = f"{name!r} ends at byte {record.offset + record.bytes} of {self.place}"
                raise OSError(errno.EIO, f"{ends}, which was cut to {record.offset + start + got}: {LOST}")
            start += got
        if zlib.crc32(buffer.memory[: record.bytes]) != record.checksum:
            raise OSError(errno.EIO, f"{name!r} in {self.place} is not what was written (checksum): {LOST}")

    def _settle(self, *names: str) -> None:
        """Wait for these writes; their buffers are free."""
        for name in names:
            self.written_bytes += self._writes[name][1].wait().nbytes
            self._free.append(self._writes.pop(name)[0])

    def _finish(self, name: str, buffer: _Buffer, written: Future) -> None:
        """A write that failed is tried again, here."""
        if written.exception() is None:
            return
        record = self._records[name]
        try:
            self._written(record, buffer)
        except OSError as error:
            what = f"writing {record.bytes} bytes of {name!r} to {self.place}: {os.strerror(error.errno)}"
            raise OSError(error.errno, f"{what}; make room and go on: nothing is lost") from None


def open_unnamed(folder: Path) -> tuple[FileIO, bool]:
    """A new file without a name, and whether it bypasses the page cache: O_DIRECT moves whole blocks between
    aligned memory and the disk. ValueError: what is wrong with the folder."""
    try:
        file = TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise ValueError(f"{folder}: {os.strerror(error.errno)}; choose another folder") from None
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(file.fileno(), mmap.mmap(-1, BLOCK), 0)  # some refuse it only now
    except (OSError, AttributeError):  # or the system has no such flag
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return file, False
    return file, True


def _padded(size: int) -> int:
    return math.ceil(size / BLOCK) * BLOCK
