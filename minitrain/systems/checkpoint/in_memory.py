"""Checkpoints in memory: a folder of shared memory is a store like any other, and dies with its machine.

    MACHINE/rank-00003/step-00000010/rank-00003.safetensors     the share of rank 3 (format.py), and
                                     rank-00002.safetensors     what it keeps for others: copies (peers.py)
                                     parity.safetensors         or parity (parity.py)
                                     manifest.json              size and hash of every rank's share

Each rank commits alone, in a store of its own: the machine with the only manifest may be the one that is
lost. A rank may fall where others have committed already, so two steps are kept, and the older one goes when
all ranks have begun the next save. After a failure ranks tell each other what they find, verified; the newest
step of which every share is somewhere is whole, and shares travel by messages to who wants them.
Two levels: memory often, disk rarely; `newest_whole` of both stores is where to go on.
On one computer a machine is a folder that its ranks own. Memory: 2 steps of a share and of what is kept.
Sends at a save some 100 bytes per rank; in recovery each share that a rank wants and has not, once. Messages
are between hosts: `group` is on gloo. Wang et al. 2023, Gemini, SOSP, section 4. Differs: the bytes in memory
are files, of one format with those on disk.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.checkpoint.disk import new_file
from minitrain.checkpoint.format import Damaged, File, Written, write_file
from minitrain.checkpoint.store import CHUNK_BYTES, Store, file_name
from minitrain.ranks import collectives
from minitrain.ranks.pieces import Piece, share_out

SHARED_MEMORY = Path("/dev/shm")
FETCHED = "fetched"  # shares of others, until the next save


class Lost(ValueError):
    """No step is whole in memory any more: go on from disk."""


def memory_folder() -> Path:
    """A new folder of shared memory, for its owner only, who removes it."""
    return Path(tempfile.mkdtemp(prefix="minitrain-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))


def newest_whole(*stores: Store) -> tuple[Store | None, int | None, list[str]]:
    """The store and the step to go on from, the first store where two have it; and why newer ones are passed
    over. (None, None, ..): there is none."""
    best, said = (None, None), []
    for store in stores:
        step, passed = store.newest_good()
        said += passed
        if step is not None and (best[1] is None or step > best[1]):
            best = store, step
    return *best, said


def gather_plain(value: Any, group: ProcessGroup) -> list:
    """Every rank's value, as JSON has it."""
    data = json.dumps(value).encode()
    length = collectives.all_reduce(torch.tensor(len(data)), group, op="max").item()
    padded = torch.frombuffer(bytearray(data.ljust(length)), dtype=torch.uint8)
    return [json.loads(row.numpy().tobytes()) for row in collectives.all_gather(padded[None], group)]


class Shares:
    """This rank's store in the memory of its machine. Every rank calls the same methods in the same order."""

    def __init__(self, machine: Path | str, group: ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.store = Store(Path(machine) / f"rank-{self.rank:05d}")
        self.disk = self.store.disk

    def begin(self, step: int, pieces: Iterable[Piece], plain: dict[str, Any]) -> list[Written]:
        """This rank's share is in its memory; what every rank has written. A rank that has no room for it is
        one line on all of them, and what there was stays."""
        collectives.barrier(self.group)  # so all have committed the step before
        try:
            self.disk.remove(self.store.folder / FETCHED)
            before = [old for old in self.store.steps() if old < step]
            for old in self.store.steps():
                if old not in before[-1:]:  # older, or of a future that was given up
                    self.disk.remove(self.store.path(old))
            path = self.store.begin(step) / file_name(self.rank)
            mine = asdict(write_file(self.disk, path, share_out(pieces), plain))
        except (OSError, ValueError) as error:
            mine = str(error)
        shares = gather_plain(mine, self.group)
        for rank, share in enumerate(shares):
            if isinstance(share, str):
                raise ValueError(f"step {step} is not in memory: rank {rank} cannot keep its share: {share}")
        return [Written(**share) for share in shares]

    def commit(self, step: int, shares: list[Written], others: Iterable[Written], manifest: dict) -> None:
        """From here on this rank's part of the step counts: its own share, and what it keeps for others."""
        everyones = {"shares": [asdict(share) for share in shares]}
        self.store.commit(step, [shares[self.rank], *others], manifest | everyones)

    def open(self, name: str, step: int) -> np.ndarray:
        """The bytes of a file of a step, as they lie in memory."""
        return np.memmap(self.path(name, step), np.uint8, "r")

    def path(self, name: str, step: int) -> Path:
        """Of a file of a step; one that was fetched is better than what was here."""
        folders = (self.store.folder / FETCHED, self.store.path(step), self.store.writing(step))
        return next(folder / name for folder in folders if (folder / name).exists())

    # ---- after a failure

    def verified_files(self) -> dict[str, list[str]]:
        """{step: names of undamaged files} in this rank's memory, of saves by as many ranks as there are."""
        self.disk.remove(self.store.folder / FETCHED)
        found = {}
        for step in self.store.steps():
            with suppress(Damaged):
                manifest = self.store.manifest(step)
                if len(manifest["shares"]) != self.ranks:
                    continue
                found[str(step)] = names = []
                for entry in manifest["files"]:
                    with suppress(Damaged):
                        File(self.store.path(step) / entry["name"], Written(**entry)).verify()
                        names.append(entry["name"])
        return found

    def choose(self, have: list[dict], lost_of: Callable[[str], str]) -> tuple[int, dict[str, Any]]:
        """The newest step of which nothing is lost, `lost_of(step)` says what is; and its manifest, from the
        first rank that has one. Later steps are given up: they would be taken for the one to keep."""
        why = []
        for step in sorted({int(step) for found in have for step in found}, reverse=True):
            if lost := lost_of(str(step)):
                why.append(f"step {step}: {lost}")
                continue
            for later in self.store.steps():
                if later > step:
                    self.disk.remove(self.store.path(later))
            source = next(rank for rank in range(self.ranks) if str(step) in have[rank])
            manifest = self.store.manifest(step) if self.rank == source else None
            return step, gather_plain(manifest, self.group)[source]
        none = "; ".join(why) or "it has none at all"
        raise Lost(f"memory has no whole checkpoint ({none}): go on from disk")

    def fetch(self, step: int, manifest: dict, have: list[dict], wanted: Iterable[int] | None) -> list[File]:
        """The shares of the ranks `wanted` (None: of all), here; each rank may want others."""
        wants = gather_plain(sorted(range(self.ranks) if wanted is None else wanted), self.group)
        shares = [Written(**entry) for entry in manifest["shares"]]
        (self.store.folder / FETCHED).mkdir(parents=True, exist_ok=True)
        for owner, share in enumerate(shares):
            holders = [rank for rank in range(self.ranks) if share.name in have[rank].get(str(step), ())]
            for rank in range(self.ranks):
                if owner in wants[rank] and rank not in holders:
                    self.move(share, step, holders[0], rank)
        mine = [shares[owner] for owner in wants[self.rank]]
        return [File(self.path(share.name, step), share).verify() for share in mine]

    def move(self, share: Written, step: int, source: int, to: int) -> None:
        """A file from the memory of one rank to that of another."""
        if self.rank == source:
            data = self.open(share.name, step)
            for first in range(0, share.size, CHUNK_BYTES):
                collectives.send(tensor_of(data[first : first + CHUNK_BYTES]), to, self.group)
        elif self.rank == to:
            with new_file(self.disk, self.store.folder / FETCHED / share.name) as file:
                for first in range(0, share.size, CHUNK_BYTES):
                    shape = (min(CHUNK_BYTES, share.size - first),)
                    chunk = collectives.receive(None, source, self.group, shape=shape, dtype=torch.uint8)
                    self.disk.write(file, first, chunk.numpy())


def tensor_of(data: np.ndarray) -> Tensor:
    """A copy, to send: the file may go."""
    return torch.from_numpy(np.array(data))
