"""What is in a folder of checkpoints, and in one of them, as plain values to print.

    listed(store)         every folder: step, files, bytes, what it is
    shown(store, step)    every tensor of one: name, dtype, shape, and which file has which part of it

Both read manifests and headers only; Store.verify reads the rest. Needs no lock: a job may be writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minitrain.checkpoint.disk import DiskError
from minitrain.checkpoint.format import Damaged
from minitrain.checkpoint.header import DTYPES
from minitrain.checkpoint.store import REMOVING, WRITING, Store


@dataclass(frozen=True)
class Listed:
    """A folder of one step. `state`: complete, damaged (its manifest is), being written, being removed, or
    unfinished (a crash came between: it does not count and the next save removes it)."""

    step: int
    path: Path
    files: int
    bytes: int
    state: str


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor: `start` and `shape` in the whole, and the file that has it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Shown:
    """A tensor of a checkpoint; dtype as safetensors calls it."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def cut(self) -> bool:
        return len(self.parts) > 1


def listed(store: Store) -> list[Listed]:
    """The oldest first."""
    return [_listed(store, step, path) for step, path in sorted(store.folders())]


def _listed(store: Store, step: int, path: Path) -> Listed:
    states = {WRITING: "being written", REMOVING: "being removed"}
    state = states.get(path.suffix, "complete" if store.is_complete(step) else "unfinished")
    if state == "complete":
        try:
            sizes = [file["size"] for file in store.manifest(step)["files"]]
            return Listed(step, path, len(sizes), sum(sizes), state)
        except (Damaged, DiskError):
            state = "damaged"
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    return Listed(step, path, len(sizes), sum(sizes), state)


def shown(store: Store, step: int) -> list[Shown]:
    """By name. Raises Damaged."""
    entries = [entry for file in store.open(step)[1] for entry in file.entries]
    found: dict[str, list] = {}
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.start)):
        found.setdefault(entry.name, []).append(entry)
    return [
        Shown(
            name,
            DTYPES[parts[0].dtype],
            parts[0].whole,
            tuple(Part(part.start, part.shape, part.file.path.name) for part in parts),
        )
        for name, parts in found.items()
    ]
