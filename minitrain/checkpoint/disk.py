"""The calls to the file system that decide what a crash leaves behind, in one place.

    create, write, sync         bytes of a file are on the disk only after sync
    make_folder, sync_folder    and so is its name, of a file or a folder, after sync_folder of what it is in
    rename                      the old name or the new one, never both or neither
    remove

A test gives a Disk that replays what a power cut may leave, or one that fails at the k-th call. What the
system refuses (disk full, quota, read-only, ..) is a DiskError: one line with path and cause.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class DiskError(OSError):
    """The system refused a call; `errno` says why, the message is one line."""

    def __str__(self) -> str:
        return self.strerror


@contextlib.contextmanager
def refused(what: str, path: Path) -> Iterator[None]:
    """Whatever the system refuses inside becomes a DiskError: cannot WHAT PATH: why."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                cause += f" ({shutil.disk_usage(path.parent).free / 1e6:,.1f} MB are free)"
        raise DiskError(error.errno, f"cannot {what} {path}: {cause}") from None


class Disk:
    """The real one."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}  # of the files that are open, to name them

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing."""
        with refused("create", path):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._paths[file] = path
        return file

    def write(self, file: int, offset: int, data) -> None:
        """All of `data`, at a place of the file."""
        left = memoryview(data).cast("B")
        with refused("write", self._paths[file]):
            while left:
                if not (done := os.pwrite(file, left, offset)):
                    raise OSError(errno.EIO, "nothing was written")
                left, offset = left[done:], offset + done

    def sync(self, file: int) -> None:
        """After an error the file must be given up: a second sync may say that all is well, and it is not."""
        with refused("sync", self._paths[file]):
            os.fsync(file)

    def close(self, file: int) -> None:
        """The file is closed even if that is refused."""
        with refused("close", self._paths.pop(file)):
            os.close(file)

    def make_folder(self, path: Path) -> None:
        """One that is not there yet."""
        with refused("make the folder", path):
            os.mkdir(path)

    def sync_folder(self, path: Path) -> None:
        with refused("sync the folder", path):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def rename(self, path: Path, to: Path) -> None:
        with refused("rename", path):
            os.rename(path, to)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all in it; if it is there."""
        with refused("remove", path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(disk: Disk, path: Path) -> Iterator[int]:
    """A file to write; synced and closed in the end. After an error it is closed, and of no use."""
    file = disk.create(path)
    try:
        yield file
        disk.sync(file)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to hear of
            disk.close(file)
        raise
    disk.close(file)
