"""A folder of checkpoints: one folder per step, complete when its manifest says so.

    FOLDER/step-00000800.writing/   being written, or left by a crash
    FOLDER/step-00000800/           rank-00003.safetensors ...   and manifest.json, the last thing to come

    1  rank 0   make_folder step-800.writing                     (what a crash left is removed first)
    2  all      rank-00003.safetensors: written, synced          told to rank 0: size and hash of the header
    3  rank 0   sync_folder, rename to step-800, sync_folder of FOLDER
    4  rank 0   manifest.json.new written, synced; renamed to manifest.json; sync_folder
    5  rank 0   older ones: renamed to step-700.removing, sync_folder of FOLDER; removed

So a crash leaves the older checkpoints as they were, and this one complete or without manifest: then it does
not count. The manifest holds a hash of itself and of every file's header, and those hash every block. Newer
means a greater step. Retention counts what is good: committed by this process, or read and verified by it.
One job writes to a folder: rank 0's lock ends with its process.
"""

import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minitrain.checkpoint.disk import Disk, DiskError, new_file, refused
from minitrain.checkpoint.format import HASH_DIGITS, Damaged, File, Written, digest, json_of, reading
from minitrain.ranks.checks import require_ints, require_positive_ints

MANIFEST, WRITING, REMOVING, DAMAGED = "manifest.json", ".writing", ".removing", ".damaged"
OURS = re.compile(rf"step-([0-9]{{8}}|[1-9][0-9]{{8,}})({WRITING}|{REMOVING})?")
CHUNK_BYTES = 4 << 20  # of a file that is copied
RESERVED = {"hash", "step", "files"}  # of a manifest
HEAD, REST = '{"hash": "', '", '


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


class Store:
    """The checkpoints of one run. `damaged` says what is wrong with those that were found so."""

    def __init__(self, folder: Path | str, keep: int = 2, disk: Disk | None = None):
        require_positive_ints(sys.maxsize, keep=keep)
        self.folder, self.keep, self.disk, self._lock = Path(folder), keep, disk or Disk(), None
        self._good: set[int] = set()
        self.damaged: dict[int, str] = {}

    # ---- writing: for the process that holds the lock

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def writing(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}{WRITING}"

    def lock(self) -> None:
        """For the process that calls `begin`; ends with it. The folder is made if there is none."""
        for folder in reversed([self.folder, *self.folder.parents]):
            if not folder.exists():
                try:
                    self.disk.make_folder(folder)
                except DiskError:
                    if not folder.exists():  # else another process was faster
                        raise
                self.disk.sync_folder(folder.parent)
        path = self.folder / "lock"
        with refused("lock", path):
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            except BlockingIOError:
                owner = os.pread(self._lock, 300, 0).decode(errors="replace") or "another process"
                self.unlock()
                raise ValueError(f"{owner} writes checkpoints to {self.folder}; use another folder") from None
            except OSError:
                self.unlock()
                raise

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, step: int) -> Path:
        """Rank 0: the folder that all ranks write to. What a crash has left in FOLDER is removed."""
        if self._lock is None:
            self.lock()
        require_ints(step=step)
        if later := [other for other in self.steps() if other >= step and self.is_good(other)]:
            raise ValueError(f"{self.path(later[0])} is there already; remove it, or write to another folder")
        for left, path in self.folders():
            if path != self.path(left) or not self.is_complete(left):  # it will never be a checkpoint
                self.disk.remove(path)
        if self.is_complete(step):
            self.set_aside(step)
        self.disk.make_folder(self.writing(step))
        return self.writing(step)

    def commit(self, step: int, files: Iterable[Written], plain: dict[str, Any]) -> list[str]:
        """Rank 0, when all files are synced: from here on the checkpoint counts. Returns, a line each, which
        older ones could not be removed: the next commit tries again."""
        path, disk, text = self.path(step), self.disk, manifest_text(step, files := list(files), plain)
        for file in files:
            there = self.writing(step) / file.name
            if not there.exists() or there.stat().st_size != file.size:
                raise ValueError(f"{there} is not there as it was written: use a folder all ranks see, alone")
        disk.sync_folder(self.writing(step))
        disk.rename(self.writing(step), path)
        disk.sync_folder(self.folder)
        new = path / (MANIFEST + ".new")
        with new_file(disk, new) as file:
            disk.write(file, 0, text)
        disk.rename(new, path / MANIFEST)
        disk.sync_folder(path)
        self.count_as_good(step)
        self.damaged.pop(step, None)
        try:
            self._discard(self._too_many())
        except DiskError as error:
            return [str(error)]
        return []

    def set_aside(self, step: int) -> None:
        """Rank 0: one that is damaged makes room for another of its step, and is there to be looked at."""
        aside = self.folder / f"{self.path(step).name}{DAMAGED}"
        self.disk.remove(aside)
        self.disk.rename(self.path(step), aside)
        self.disk.sync_folder(self.folder)
        self._good.discard(step)

    def _too_many(self) -> list[int]:
        steps, good = self.steps(), 0
        if len(steps) <= self.keep:
            return []
        while steps and good < self.keep:
            good += self.is_good(steps.pop())
        return steps

    def _discard(self, steps: list[int]) -> None:
        """A crash in the middle leaves no checkpoint that lacks a file: before that, it has another name."""
        gone = {self.path(step): self.folder / (self.path(step).name + REMOVING) for step in steps}
        for path, to in gone.items():
            self.disk.rename(path, to)
        if gone:
            self.disk.sync_folder(self.folder)
        for to in gone.values():
            self.disk.remove(to)
        self._good.difference_update(steps)

    # ---- reading: for every process

    def steps(self) -> list[int]:
        """Of all complete checkpoints, the newest last."""
        steps = (step for step, path in self.folders() if path == self.path(step))
        return sorted(step for step in steps if self.is_complete(step))

    def folders(self) -> list[tuple[int, Path]]:
        """Folders in FOLDER with a name that we gave: (step, path)."""
        if not self.folder.exists():
            return []
        with refused("list", self.folder):
            found = [OURS.fullmatch(name) for name in sorted(os.listdir(self.folder))]
        return [(int(name[1]), self.folder / name[0]) for name in found if name]

    def is_complete(self, step: int) -> bool:
        return (self.path(step) / MANIFEST).exists()

    def manifest(self, step: int) -> dict[str, Any]:
        return read_manifest(self.path(step) / MANIFEST, step)

    def open(self, step: int) -> tuple[dict[str, Any], list[File]]:
        """The manifest and all files, their headers verified."""
        manifest = self.manifest(step)
        return manifest, [File(self.path(step) / file["name"], Written(**file)) for file in manifest["files"]]

    def verify(self, step: int) -> None:
        """Every byte. Damaged: which file, and what."""
        for file in self.open(step)[1]:
            file.verify()

    def is_good(self, step: int) -> bool:
        """Committed by this process, or every byte of it was read and verified, now or before."""
        if step not in self._good and step not in self.damaged:
            try:
                self.verify(step)
                self._good.add(step)
            except Damaged as error:
                self.damaged[step] = str(error)
        return step in self._good

    def count_as_good(self, step: int) -> None:
        """All ranks together have read and verified it, as a load does."""
        self._good.add(step)

    def newest_good(self) -> tuple[int | None, list[str]]:
        """The newest whose every byte is right, and a line for each newer one: why not that."""
        passed = []
        for step in reversed(self.steps()):
            if self.is_good(step):
                return step, passed
            passed.append(f"step {step} is passed over: {self.damaged[step]}")
        return None, passed


def manifest_text(step: int, files: Iterable[Written], plain: dict[str, Any]) -> bytes:
    """JSON that begins with the hash of what follows it."""
    if reserved := plain.keys() & RESERVED:
        raise ValueError(f"a manifest has its own {min(reserved)}; give yours another name")
    body = json_of({"step": step, "files": [asdict(file) for file in files], **plain})[1:]
    return f"{HEAD}{digest(body.encode())}{REST}{body}".encode()


def read_manifest(path: Path, step: int) -> dict[str, Any]:
    """Raises Damaged for whatever `manifest_text` did not write for this step."""
    with reading(path):
        text = path.read_bytes()
    begin = len(HEAD) + HASH_DIGITS + len(REST)
    if text[:begin] == f"{HEAD}{digest(text[begin:])}{REST}".encode():
        manifest = json.loads(text)
        if manifest["step"] == step:
            return manifest
    raise Damaged(f"{path} is damaged")


def copy_step(step: int, store: Store, to: Store) -> None:
    """From one store to another, verified. All files are opened first: the store may remove it meanwhile."""
    manifest = store.manifest(step)
    files = [Written(**entry) for entry in manifest["files"]]
    plain = {key: value for key, value in manifest.items() if key not in RESERVED}
    with ExitStack() as opened:
        sources = [opened.enter_context(open(store.path(step) / file.name, "rb")) for file in files]
        folder = to.begin(step)
        for written, source in zip(files, sources):
            with new_file(to.disk, folder / written.name) as target:
                for first in range(0, written.size, CHUNK_BYTES):
                    to.disk.write(target, first, source.read(CHUNK_BYTES))
            File(folder / written.name, written).verify()
    to.commit(step, files, plain)
