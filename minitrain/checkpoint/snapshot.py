"""Snapshot: what this rank saves, copied into memory of the host that is allocated once.

    pieces    [ w1                 ][ w2     ][ w3       ]       where training has them
    blocks    [ 1 MiB ][ 1 MiB ][ .][ 1 MiB ][][ 1 MiB ][]       of one piece each: what is hashed and written
    chunks    [ 0              ][ 1          ][ 2        ]       what a writer is handed
    slots     chunk k lies in slot k % slots, free for chunk k + slots when it is written

A thread copies block after block, in the order given. Training waits for the blocks that it is about to
change (`wait`), the writer for whole chunks (`blocks_of`): so ranks stall for all of it or for what is not
copied yet, and write behind the whole copy or each chunk, from as much memory as the state or two buffers.
Memory: the share of this rank in the host's account, kind "checkpoint", or `slots` chunks; pinned for a GPU,
where copies run on a stream of their own. A later save of the same shapes allocates nothing. Sends nothing.
"""

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from minitrain.checkpoint.format import BLOCK_BYTES
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_device
from minitrain.ranks.pieces import Piece, rectangles
from minitrain.ranks.torch_private import outside_modes

AT_ONCE = 16  # blocks that a GPU is given to copy before somebody waits for them
RUN_BLOCKS = 8  # that a writer is given


class GivenUp(Exception):
    """Nobody wants this snapshot any more."""


class Block(NamedTuple):
    """Elements first .. last of a piece, and where they go."""

    first: int
    last: int
    bytes: int
    chunk: int
    offset: int  # in the chunk


class Snapshot:
    """Of one save at a time: `begin`, then `copy` on a thread and `blocks_of` on another."""

    def __init__(self, device: torch.device | str, chunk_bytes: int | None = None, slots: int | None = None):
        """None: all is one chunk; as many slots as there are chunks."""
        require_device(device=device)
        self.chunk_bytes, self.most_slots = chunk_bytes or math.inf, slots
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.memory: Tensor | None = None
        self.changed = threading.Condition()
        self.move = move
        self.blocks: list[Block] = []
        self.pieces: list[Piece] = []  # without their memory, for a writer
        self._values: list[Tensor | None] = []  # of the piece of each block, until it is copied
        self._blocks_of: dict[tuple, range] = {}  # by name and start of a piece
        self._last_of: dict[str, int] = {}  # blocks up to the last of a parameter
        self._ends: list[int] = []  # of each chunk, in blocks
        self.slots = self.slot_bytes = 0
        self.copied = self.written = 0  # blocks
        self.error: BaseException | None = None
        self.given_up = False

    # ---- the thread of training

    def begin(self, pieces: list[Piece]) -> None:
        """Lay out a save and get the memory for it. Until they are copied, `pieces` must not change."""
        self.blocks, self._values, self._blocks_of, self._last_of = [], [], {}, {}
        chunk = used = largest = 0
        for piece in pieces:
            numel, item = piece.values.numel(), piece.values.element_size()
            first_block, step = len(self.blocks), BLOCK_BYTES // item
            for first in range(0, numel, step):
                last = min(first + step, numel)
                size = (last - first) * item
                if used and used + size > self.chunk_bytes:
                    chunk, used = chunk + 1, 0
                self.blocks.append(Block(first, last, size, chunk, used))
                self._values.append(piece.values)
                used += -(-size // 8) * 8  # numbers begin at a multiple of their size
                largest = max(largest, used)
            self._blocks_of[piece.name, piece.start] = range(first_block, len(self.blocks))
            self._last_of[parameter_of(piece)] = len(self.blocks)
        chunks = chunk + bool(self.blocks)
        self._ends = [0] * chunks  # of each chunk, in blocks
        for number, block in enumerate(self.blocks, 1):
            self._ends[block.chunk] = number
        self.slots, self.slot_bytes = min(self.most_slots or chunks, chunks), largest
        self._allocate(self.slots * largest)
        with outside_modes():  # what a writer has to know of them, without their memory
            nothing = {dtype: torch.empty((), dtype=dtype) for dtype in {p.values.dtype for p in pieces}}
            self.pieces = [replace(p, values=nothing[p.values.dtype].expand(p.shape)) for p in pieces]
        self.copied = self.written = 0
        self.error, self.given_up, self._told = None, False, False
        if self.stream:
            self._computed = torch.cuda.current_stream(self.stream.device).record_event()
        collectives.announce("copy", self)

    def _allocate(self, size: int) -> None:
        if self.memory is not None and self.memory.nbytes >= size:
            return
        if size > (free := psutil.virtual_memory().available):
            sizes = f"{size / 1e9:.3g} GB of host memory, and {free / 1e9:.3g} GB are left"
            raise MemoryError(f"a snapshot needs {sizes}; save from fewer slots (policy 'datastates')")
        self.memory = None
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
        self.memory = collectives.announce_host(memory, "checkpoint")

    direction = "to_host"  # for an account of copies

    bytes = property(lambda self: sum(block.bytes for block in self.blocks))
    unwritten_bytes = property(lambda self: sum(block.bytes for block in self.blocks[self.written :]))
    over = property(lambda self: self.copied == len(self.blocks) or self.given_up or self.error is not None)

    def until(self, names: Iterable[str] | None) -> int:
        """How many blocks have to be copied before these parameters may change; None: all of them."""
        if names is None:
            return len(self.blocks)
        return max((self._last_of.get(name, 0) for name in names), default=0)

    def missing_bytes(self, names: Iterable[str] | None = None) -> int:
        """Not copied yet of what these parameters wait for."""
        return sum(block.bytes for block in self.blocks[self.copied : self.until(names)])

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Return when all that belongs to these parameters is copied, or will not be."""
        until = self.until(names)
        with self.changed:
            self.changed.wait_for(lambda: self.copied >= until or self.over)
        if self.over and not self._told:
            self._told = True
            collectives.announce("copied", self)

    def give_up(self) -> None:
        with self.changed:
            self.given_up = True
            self.changed.notify_all()

    # ---- the thread that copies

    @torch.no_grad()
    def copy(self) -> None:
        """All blocks. An error is kept for whoever takes them."""
        try:
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                if self.stream:
                    self.stream.wait_event(self._computed)
                for number, block in enumerate(self.blocks):
                    self._wait_for(lambda: block.chunk < self.slots + self._free_chunks())
                    self.move(self._values[number], block.first, block.last, self._place(number, number))
                    if self.stream and (number + 1) % AT_ONCE and number + 1 != self._ends[block.chunk]:
                        continue
                    if self.stream:
                        self.stream.synchronize()
                    with self.changed:
                        self._values[self.copied : number + 1] = [None] * (number + 1 - self.copied)
                        self.copied = number + 1
                        self.changed.notify_all()
        except GivenUp:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._values = []
            with self.changed:
                self.changed.notify_all()

    def _free_chunks(self) -> int:
        """Chunks that are written: so many of the first."""
        return self.blocks[self.written].chunk if self.written < len(self.blocks) else len(self._ends)

    def _place(self, number: int, last: int) -> Tensor:
        """Of these blocks of a piece, which lie one behind the other."""
        first, last = self.blocks[number], self.blocks[last]
        begin = first.chunk % self.slots * self.slot_bytes
        return self.memory[begin + first.offset : begin + last.offset + last.bytes]

    def _wait_for(self, condition) -> None:
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.given_up or self.error)
            if self.given_up:
                raise GivenUp
            if self.error:
                raise self.error

    # ---- the thread that writes

    def blocks_of(self, piece: Piece) -> Iterator[np.ndarray]:
        """Its bytes, up to RUN_BLOCKS of a chunk at a time, valid until the next are asked for. With few
        slots pieces must be taken in the order in which they were given."""
        blocks = self._blocks_of[piece.name, piece.start]
        number = blocks.start
        while number < blocks.stop:
            end = self._ends[self.blocks[number].chunk]
            self._wait_for(lambda: self.copied >= end)
            last = min(end, blocks.stop, number + RUN_BLOCKS) - 1
            yield self._place(number, last).numpy()
            number = last + 1
            with self.changed:
                self.written = max(self.written, number)
                self.changed.notify_all()


def parameter_of(piece: Piece) -> str:
    """Of both "optimizer/layers.0.tokens/exp_avg" and "parameters/layers.0.tokens" layers.0.tokens."""
    return piece.name.split("/")[1] if "/" in piece.name else piece.name


def move(values: Tensor, first: int, last: int, out: Tensor) -> None:
    """Elements first .. last, counted along rows, into bytes of the host; on a GPU only asked for."""
    out = out.view(values.dtype)
    for start, shape in rectangles(tuple(values.shape), first, last):
        part, size = values, math.prod(shape)
        for dim, (begin, length) in enumerate(zip(start, shape)):
            part = part.narrow(dim, begin, length)
        out[:size].view(shape).copy_(part, non_blocking=True)
        out = out[size:]
