"""Notes that members of a group on one machine leave for each other in memory they share, for checked mode.

    put(COLLECTIVE, to, number, header)      written, and who sleeps on it is woken: 3 microseconds
    read(COLLECTIVE, source, number)         that header, once it is there

Checked mode needs one small word from everybody before a call. Over gloo each word is a message that two
event loops and two ranks wake up for, and an all-reduce of a few numbers on 4 ranks costs twice its processor
time with them; in shared memory a rank writes, and sleeps only if another has not written yet. So ranks of
one launch meet on a board, a file of its private directory; those of a job on several nodes send messages.

Every ordered pair of members has two rings of `SLOTS` notes, one for collectives and one for messages. A slot
is a word that says which call it speaks of, a checksum and the header. Nobody waits to write: a note that was
overwritten before it was read is lost, `read` says None, and that call goes unchecked. (A collective needs
all members, so only calls in the background can be so far apart; a sender may run ahead by so many messages,
and then a wrong one, which the tag of its data still keeps out, is reported as a hang.)

Franke, Russell, Kirkwood 2002, "Fuss, Futexes and Furwocks": sleep in the kernel on a word of shared memory.
"""

import ctypes
import mmap
import os
import platform
import struct
import sys
import zlib

SLOTS = 32
MOST_MEMBERS = 16  # notes of n members take n * n pages: more of them send messages
COLLECTIVE, MESSAGE = 0, 1  # whose ring
KINDS = 2
WAIT, WAKE, EVERYBODY = 0, 1, 2**31 - 1  # linux/futex.h
WORDS = struct.Struct("=QQ")  # the call, of which the kernel sees the low half; a checksum of the header
# The number of the system call.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None


class Board:
    """One rank's view of the board of its group."""

    def __init__(self, path: str, rank: int, size: int, note_bytes: int):
        self.rank, self.size, self.note_bytes = rank, size, note_bytes
        self.slot_bytes = WORDS.size + note_bytes
        length = KINDS * size * size * SLOTS * self.slot_bytes
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(length)  # zeros; pages that nobody writes to take no memory
            self.memory = mmap.mmap(file.fileno(), length)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.syscall = ctypes.CDLL(None).syscall

    def put(self, kind: int, to: int, number: int, note: bytes) -> None:
        """Leave the note of call `number` for member `to`."""
        at = self._slot(kind, self.rank, to, number)
        start = at + WORDS.size
        self.memory[start : start + self.note_bytes] = note
        WORDS.pack_into(self.memory, at, _word(number), zlib.crc32(note))
        self.syscall(FUTEX, ctypes.c_void_p(self.address + at), WAKE, EVERYBODY, None)

    def read(self, kind: int, source: int, number: int) -> bytes | None:
        """What `source` has left for this rank, as soon as it is there; None if it is lost."""
        at, wanted = self._slot(kind, source, self.rank, number), _word(number)
        start = at + WORDS.size
        while True:
            word, checksum = WORDS.unpack_from(self.memory, at)
            if word == wanted:
                note = self.memory[start : start + self.note_bytes]
                if zlib.crc32(note) == checksum:
                    return note
                os.sched_yield()  # another core sees writes in another order, or it is being overwritten
            elif word > wanted:
                return None
            else:  # the kernel looks once more whether the word is still this one before it sleeps
                self.syscall(FUTEX, ctypes.c_void_p(self.address + at), WAIT, word & 0xFFFFFFFF, None)

    def _slot(self, kind: int, source: int, to: int, number: int) -> int:
        pair = (kind * self.size + source) * self.size + to
        return (pair * SLOTS + number % SLOTS) * self.slot_bytes


def _word(number: int) -> int:
    """What stands in the slot of a call: never 0, which stands there at first, and it grows."""
    return number + 1
