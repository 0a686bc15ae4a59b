"""ZeRO-Infinity's files: tensors in files, an optimizer whose states are there, and layers one by one.

    store = FileStore(folder, rank, buffer_bytes=4 << 20, buffers=6)
    store.write("3.exp_avg", x)         a new name gets a place in this rank's file; written behind
    store.prefetch("3.exp_avg")         starts to read; x = store.read("3.exp_avg") waits and verifies: a view
    store.release("3.exp_avg")          of a buffer, to be changed and written, or given up unchanged
    sync.optimizer = FileOptimizer(sync.optimizer, store)                  a Sync's own, or any AdamW
    layers = FiledLayers(made_one_by_one, store, make_optimizer)           forward, backward, update of
    loss = layers.step(tokens, positions, loss_of)                         layer after layer

A rank has one file in `folder` with its shards only: N ranks have the bandwidth of N disks. It has no name:
however its process ends, its space is free again. A write that fails keeps its data and is tried again before
OSError is raised. Host memory: `buffers` times `buffer_bytes`. An elementwise update does not see where a
tensor is cut, so every bit is that of states in memory. A step reads and writes every state once: 16 bytes
per parameter for two float32 moments, 24 with a master; FiledLayers also reads parameters twice (the last
layer's once) and writes them once, and has parameters and gradients of one layer and L inputs in memory.
Rajbhandari et al. 2021, arXiv:2104.07857, sections 5 and 6. Differs: threads that call preadv and pwrite, not
libaio; a checksum (CRC-32) per tensor; updates on the parameters' device; kept inputs stay in memory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitrain.data_parallel.sync import Sync
from minitrain.memory.host_optimizer import of_one, updated
from minitrain.memory.pools import Transfer
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import all_gather, announce_host, reduce_scatter, world
from minitrain.systems.memory.window import forward_backward

BLOCK = 4096
LOST = "go back to a checkpoint"


@dataclass
class _Record:
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
                sizes = f"{name!r} has {tensor.nbytes} bytes, a buffer {self.buffer_bytes}"
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
        self._settle(*self._writes)
        os.fsync(self._file)

    def close(self) -> None:
        self._workers.shutdown(wait=True)
        self._close()  # buffers of what was read stay valid

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
    return -(-size // BLOCK) * BLOCK


# ---- an optimizer with its states in files


class Piece(NamedTuple):
    name: str
    first: int  # of the elements of a parameter, up to `last`
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        whole = self.last - self.first == tensor.numel()
        return tensor if whole else tensor.detach().flatten()[self.first : self.last]


def piece_of(param: Tensor, piece: int) -> int:
    """Elements that are updated at a time: all, if there is more than they (codes' scale, what rounds)."""
    whole = hasattr(param, "largest") or hasattr(param, "chance")
    return param.numel() if whole else min(piece, param.numel())


class FileOptimizer:
    """Takes over `optimizer`: its states go into `store`, updated so many elements, a `piece`, at a time; the
    next piece's are on their way. Those that share a store have each a `name`. A step that a disk has stopped
    (OSError) is finished by calling `step()` again: each piece is updated once."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: FileStore, piece=1 << 18, name=""):
        require_positive_ints(piece=piece)
        self.inner, self.store, self.piece, self.name = optimizer, store, piece, name
        self.param_groups = optimizer.param_groups
        self._tensors: dict[str, list[str]] = {}  # states of a piece that are in files,
        self._numbers: dict[str, dict[str, Any]] = {}  # and what else there is: the step
        self._done = 0  # pieces of a step that has stopped,
        self._last: tuple[Piece, dict] | None = None  # and one updated and not yet given to the store
        states, optimizer.state = optimizer.state, None  # nobody looks for them there
        for param, state in states.items():
            self.set_state(param, state)

    def zero_grad(self) -> None:
        if self._done:
            raise ValueError(f"a step stopped after {self._done} pieces; call step() to finish it first")
        self.inner.zero_grad()

    def step(self) -> None:
        """Update every parameter that has a gradient, or what the last call has left."""
        todo = [(group, param) for group in self.param_groups for param in group["params"]]
        todo = [(*both, piece) for both in todo if both[1].grad is not None for piece in self.pieces(both[1])]
        self._write_last()
        for number in range(self._done, len(todo)):
            group, param, piece = todo[number]
            state = self._read(piece)
            for _, _, following in todo[number + 1 : number + 2]:
                with contextlib.suppress(OSError):  # the next read tells it, before the next update
                    self.store.prefetch(*self._names(following))
            part = piece.of(param)
            if part is not param:
                part.grad_dtype, part.grad = param.grad_dtype, piece.of(param.grad)
            on_device = {key: x.to(param.device) if isinstance(x, Tensor) else x for key, x in state.items()}
            state = updated(of_one(self.inner, group, part, on_device))
            self._done, self._last = number + 1, (piece, state)
            self._write_last()
        self._done = 0

    def _write_last(self) -> None:
        if self._last is not None:  # it may have waited for room
            self._write(*self._last)
            self._last = None

    def pieces(self, param: Tensor) -> list[Piece]:
        params = [param for group in self.param_groups for param in group["params"]]
        number = next(i for i, other in enumerate(params) if other is param)
        size, numel = piece_of(param, self.piece), param.numel()
        starts = range(0, numel, max(1, size))
        return [Piece(f"{self.name}{number}.{first}", first, min(first + size, numel)) for first in starts]

    def get_state(self, param: Tensor) -> dict[str, Any]:
        pieces = self.pieces(param)
        state = dict(self._numbers.get(pieces[0].name, {}))
        for name in self._tensors.get(pieces[0].name, []):
            parts = []
            for piece in pieces:
                parts.append(self.store.read(f"{piece.name}.{name}").flatten().clone())
                self.store.release(f"{piece.name}.{name}")
            state[name] = torch.cat(parts).view(param.shape)
        return state

    def set_state(self, param: Tensor, state: dict[str, Any]) -> None:
        """{} takes it away. A step that has stopped is forgotten."""
        self._done, self._last = 0, None
        like = {name for name, x in state.items() if isinstance(x, Tensor) and x.shape == param.shape}
        for piece in self.pieces(param):
            self._write(piece, {name: piece.of(x) if name in like else x for name, x in state.items()})

    def _names(self, piece: Piece) -> list[str]:
        return [f"{piece.name}.{name}" for name in self._tensors.get(piece.name, [])]

    def _read(self, piece: Piece) -> dict[str, Any]:
        """Its states, all or none, to be written again; empty before its first step."""
        read: dict[str, Tensor] = {}
        try:
            for name in self._tensors.get(piece.name, []):
                read[name] = self.store.read(f"{piece.name}.{name}")
        except OSError:
            for name in read:
                self.store.release(f"{piece.name}.{name}")
            raise
        return self._numbers.get(piece.name, {}) | read

    def _write(self, piece: Piece, state: dict[str, Any]) -> None:
        size = piece.last - piece.first
        tensors = [name for name, x in state.items() if isinstance(x, Tensor) and x.numel() == size]
        for name in tensors:
            self.store.write(f"{piece.name}.{name}", state[name].detach())
        self._tensors[piece.name] = tensors
        self._numbers[piece.name] = {name: value for name, value in state.items() if name not in tensors}


def update_in_files(sync: Sync, folder: str | Path, piece: int = 1 << 18) -> FileStore | None:
    """After `parallelize`: states of the optimizer go to files, each rank's own, of what it updates.
    A folder is of a machine and no part of a strategy; a checkpoint goes on with or without. Host memory:
    nine buffers of a piece. None where nothing is updated."""
    optimizer = sync.optimizer
    if optimizer is None:
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sizes = [4 * max(1, param.itemsize // 4) * piece_of(param, piece) for param in params]
    store = FileStore(folder, world().rank(), buffer_bytes=max(sizes), buffers=9)
    sync.optimizer = FileOptimizer(optimizer, store, piece)
    return store


class FiledLayers:
    """Takes `layers` one after the other, so that they need never be in memory together; `make_optimizer`
    gets the parameters of each. Gradients go into an update at once: they cannot be clipped by their norm.
    On the ranks of a `group` it gets 1/n of each parameter: a layer is gathered from all their files as often
    as it is read, and its gradients are summed where they are updated, (n-1)/n of their bytes each time."""

    def __init__(self, layers: Iterable, store: FileStore, make_optimizer, piece=1 << 18, group=None):
        self.store, self.group = store, group
        self.layers: list[nn.Module] = []
        self.optimizers: list[FileOptimizer] = []
        self._shards: list[list[nn.Parameter]] = []  # without a group the parameters themselves
        self._cut: list[list[tuple[torch.Size, torch.Size, list[Piece]]]] = []  # parameter, shard, its pieces
        self._here: int | None = None
        for number, layer in enumerate(layers):
            params = list(layer.parameters())
            if any(not param.numel() for param in params):  # gone with a layer before
                raise ValueError("two layers share a parameter (a tied table): untie it")
            self.layers.append(layer)
            parts = (self._part_of(param.detach()).clone() for param in params)
            shards = list(map(nn.Parameter, parts)) if group else params
            optimizer = FileOptimizer(make_optimizer(shards), store, piece, f"layer {number}, ")
            self.optimizers.append(optimizer)
            self._shards.append(shards)
            both = zip(params, shards)
            self._cut.append([(param.shape, shard.shape, optimizer.pieces(shard)) for param, shard in both])
            self._here = number
            self._write(number)
            self._leave()

    def step(self, x: Tensor, positions: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of layers(x, positions), and an update of all of them."""
        come_and_go = self._enter, self._update
        return forward_backward(self.layers, [x], lambda y, u: loss_of(y), *come_and_go, (positions,))

    def parameters(self) -> Iterator[Tensor]:
        for number, layer in enumerate(self.layers):
            self._enter(number)
            yield from (param.detach() for param in layer.parameters())
        self._leave()

    def _part_of(self, x: Tensor, of_all=False) -> Tensor:
        """This rank's 1/n of the elements, zeros behind them; of x, or of the sum of everyone's."""
        x = nn.functional.pad(x.flatten(), (0, -x.numel() % self.group.size()))
        return reduce_scatter(x, self.group) if of_all else x.chunk(self.group.size())[self.group.rank()]

    def _enter(self, number: int) -> None:
        self._leave()
        for param, (shape, part, pieces) in zip(self.layers[number].parameters(), self._cut[number]):
            mine = torch.empty(part, dtype=param.dtype)
            for at, piece in enumerate(pieces):
                self.store.prefetch(*(one.name for one in pieces[at:][:2]))
                piece.of(mine).copy_(self.store.read(piece.name))
                self.store.release(piece.name)
            mine = mine.to(param.device)
            param.data = all_gather(mine, self.group)[: shape.numel()].view(shape) if self.group else mine
        self._here = number

    def _leave(self) -> None:
        if self._here is not None:
            for param in (*self.layers[self._here].parameters(), *self._shards[self._here]):
                param.data = param.data.new_empty(0)
        self._here = None

    def _update(self, number: int) -> None:
        for param, shard in zip(self.layers[number].parameters(), self._shards[number]):
            if self.group:
                shard.data = self._part_of(param.data)
                shard.grad = None if param.grad is None else self._part_of(param.grad, of_all=True)
        self.optimizers[number].step()
        for param in (*self.layers[number].parameters(), *self._shards[number]):
            param.grad = None
        self._write(number)
        self._leave()

    def _write(self, number: int) -> None:
        for shard, (*_, pieces) in zip(self._shards[number], self._cut[number]):
            for piece in pieces:
                self.store.write(piece.name, piece.of(shard.detach()))
