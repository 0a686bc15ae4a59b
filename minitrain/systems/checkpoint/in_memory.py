"""Checkpoints in memory: a folder of shared memory is a store like any other, and dies with its machine.

    MACHINE/rank-00003/step-00000010/rank-00003.safetensors     the share of rank 3 (format.py), and
                                     rank-00002.safetensors     what it keeps for others: copies (PeerCopies)
                                     parity.safetensors         or parity (ParityCopies)
                                     manifest.json              size and hash of every rank's share

Each rank commits alone, in a store of its own: the machine with the only manifest may be the one that is
lost. A rank may fall where others have committed already, so two steps are kept, and the older one goes when
all ranks have begun the next save. After a failure ranks tell each other what they find, verified; the newest
step of which every share is somewhere is whole, and shares travel to who wants them. Two levels: memory
often, disk rarely; `newest_whole` of both stores is where to go on. Memory: 2 steps of a share and of what is
kept. Sends at a save some 100 bytes per rank; in recovery each share that a rank wants and has not, once;
between hosts (gloo). Wang et al. 2023, Gemini, SOSP, sections 4 and 5; Wang et al. 2023, REFT,
arXiv:2310.12670, section 4 (RAIM5). Differs: what is sent is the file of the share, hashed, of one format
with those on disk, so a share that was rebuilt is verified, too.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.pieces import Piece, share_out, whole_piece

SHARED_MEMORY = Path("/dev/shm")
FETCHED = "fetched"  # shares of others, until the next save
PARITY = "parity.safetensors"
WORD = 8  # bytes added at a time


class Lost(ValueError):
    """No step is whole in memory any more: go on from disk."""


def memory_folder() -> Path:
    """A new folder of shared memory, for its owner only, who removes it."""
    return Path(tempfile.mkdtemp(prefix="minitrain-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))


def newest_whole(*stores: Store) -> tuple[Store | None, int | None, list[str]]:
    """The store (the first that has it) and the step to go on from, if any; why newer ones do not count."""
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
        """This rank's share is in its memory; what every rank has written. No room: an error on all."""
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
        manifest = manifest | {"shares": [asdict(share) for share in shares]}
        self.store.commit(step, [shares[self.rank], *others], manifest)

    def path(self, name: str, step: int) -> Path:
        """Of a file of a step; one that was fetched is better than what was here."""
        folders = (self.store.folder / FETCHED, self.store.path(step), self.store.writing(step))
        return next(folder / name for folder in folders if (folder / name).exists())

    def open(self, name: str, step: int) -> np.ndarray:
        return np.memmap(self.path(name, step), np.uint8, "r")

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

    def choose(self, lost_of: Callable[[list[set[str]]], str]) -> tuple[int, dict[str, Any], list[set[str]]]:
        """The newest step of which nothing is lost, its manifest, and the files that each rank has of it.
        `lost_of(these)` says what is lost. Later steps go, or they would be taken for the one to keep."""
        have, why = gather_plain(self.verified_files(), self.group), []
        for step in sorted({int(step) for found in have for step in found}, reverse=True):
            there = [set(found.get(str(step), ())) for found in have]
            if lost := lost_of(there):
                why.append(f"step {step}: {lost}")
                continue
            for later in self.store.steps():
                if later > step:
                    self.disk.remove(self.store.path(later))
            source = next(rank for rank in range(self.ranks) if str(step) in have[rank])
            manifest = self.store.manifest(step) if self.rank == source else None
            return step, gather_plain(manifest, self.group)[source], there
        none = "; ".join(why) or "it has none at all"
        raise Lost(f"memory has no whole checkpoint ({none}): go on from disk")

    def fetch(self, step: int, manifest: dict, there: list[set[str]], wanted) -> list[File]:
        """The shares of the ranks `wanted` (None: of all), here; each rank may want others."""
        wants = gather_plain(sorted(range(self.ranks) if wanted is None else wanted), self.group)
        shares = [Written(**entry) for entry in manifest["shares"]]
        (self.store.folder / FETCHED).mkdir(parents=True, exist_ok=True)
        for owner, share in enumerate(shares):
            holders = [rank for rank in range(self.ranks) if share.name in there[rank]]
            for rank in range(self.ranks):
                if owner in wants[rank] and rank not in holders:
                    self.move(share, step, holders[0], rank)
        mine = [shares[owner] for owner in wants[self.rank]]
        return [File(self.path(share.name, step), share).verify() for share in mine]

    def move(self, share: Written, step: int, source: int, to: int) -> None:
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
    return torch.from_numpy(np.array(data))  # a copy, to send: the file may go


class PeerCopies:
    """Each rank's share in the memory of others too, sent in chunks while the network has nothing else to do.
    All ranks call the same methods in one order, with the same budgets.

        copies = PeerCopies(Shares(machine, group), peers)    peers[3] = {2}: rank 2 keeps a copy of 3's share
        copies.save(step, run.pieces(), run.plain_state(), manifest)    copied to own memory; nothing sent yet
        ... forward of a layer ...   copies.send_some(budget_bytes)     the next chunks are on their way,
        ... before a collective ...  copies.settle()                    and have arrived
        copies.finish()                                                 all that is left

    When the last chunk of the longest share has arrived, each rank commits; until then the step before
    counts. Sends (m - 1) shares per rank and save, m copies in all. Memory: m shares, and the chunks on their
    way. Any m - 1 machines may be lost at once; after more, Lost says whose share is nowhere."""

    def __init__(self, shares: Shares, peers: Mapping[int, Collection[int]], chunk_bytes: int = CHUNK_BYTES):
        require_positive_ints(1 << 62, chunk_bytes=chunk_bytes)
        for rank in range(shares.ranks):
            others = set(peers.get(rank, ())) - {rank}
            if not others or not others <= set(range(shares.ranks)):
                raise ValueError(f"keepers of rank {rank}: {sorted(others)}; name others of {shares.ranks}")
        self.shares, self.chunk_bytes = shares, chunk_bytes
        self.keepers = {rank: sorted(set(peers[rank]) - {rank}) for rank in range(shares.ranks)}
        self.hosted = [rank for rank, keepers in self.keepers.items() if shares.rank in keepers]
        self.copies = max(map(len, self.keepers.values()))
        self.step = None  # of the save under way
        self.in_flight: list[tuple[Any, Any]] = []

    def save(self, step: int, pieces: Iterable[Piece], plain: dict, manifest: dict) -> None:
        """Into own memory; a save under way is finished first."""
        self.finish()
        self.written = self.shares.begin(step, pieces, plain)
        self.step, self.manifest, self.sent = step, manifest, 0
        folder = self.shares.store.writing(step)
        self.share = self.shares.open(file_name(self.shares.rank), step)
        self.files = {rank: self.shares.disk.create(folder / file_name(rank)) for rank in self.hosted}

    @property
    def left(self) -> int:
        """Bytes of the longest share that no chunk has taken yet."""
        return 0 if self.step is None else max(0, max(share.size for share in self.written) - self.sent)

    def send_some(self, budget_bytes: int) -> int:
        """What was on its way has arrived; as many chunks set out as this rank may send bytes -> how many."""
        self.settle()
        rounds, sent = budget_bytes // (self.chunk_bytes * self.copies), 0
        while rounds > 0 and self.left:
            sent += self._next_chunk()
            rounds -= 1
        return sent

    def _next_chunk(self) -> int:
        shares, first, bytes_sent = self.shares, self.sent, 0
        self.sent += self.chunk_bytes
        for rank in self.hosted:
            size = min(self.chunk_bytes, self.written[rank].size - first)
            if size > 0:
                like = dict(shape=(size,), dtype=torch.uint8)
                arrival = collectives.receive(None, rank, shares.group, **like, async_op=True)
                self.in_flight.append((arrival, (self.files[rank], first)))
        mine = self.share[first : self.sent]
        for keeper in self.keepers[shares.rank] if len(mine) else ():
            departure = collectives.send(tensor_of(mine), keeper, shares.group, async_op=True)
            self.in_flight.append((departure, None))
            bytes_sent += len(mine)
        return bytes_sent

    def settle(self) -> None:
        """What is on its way has arrived. After the last chunk the step counts."""
        for handle, place in self.in_flight:
            data = handle.wait()
            if place is not None:
                self.shares.disk.write(*place, data.numpy())
        self.in_flight = []
        if self.step is not None and not self.left:
            for file in self.files.values():
                self.shares.disk.sync(file)
                self.shares.disk.close(file)
            others = [self.written[rank] for rank in self.hosted]
            self.shares.commit(self.step, self.written, others, self.manifest)
            self.step = None

    def finish(self) -> None:
        while self.step is not None:
            self.send_some(self.chunk_bytes * self.copies)
        self.settle()

    def recover(self, wanted: Iterable[int] | None = None) -> tuple[dict[str, Any], list[File]]:
        """The manifest of the newest whole step, its shares `wanted` (None: all). Lost: whose is nowhere."""

        def lost(there: list[set[str]]) -> str:
            gone = [rank for rank in self.keepers if file_name(rank) not in set().union(*there)]
            whose = [f"rank {rank} (kept by ranks {sorted([rank, *self.keepers[rank]])})" for rank in gone]
            return whose and f"nowhere is the share of {', '.join(whose)}"

        step, manifest, there = self.shares.choose(lost)
        return manifest, self.shares.fetch(step, manifest, there, wanted)


def stripe_bytes(sizes: Iterable[int], ranks: int) -> int:
    """Of shares of these sizes, padded to the longest and to whole words."""
    require_positive_ints(ranks=ranks)
    return -(-max(sizes) // (WORD * (ranks - 1))) * WORD


def stripe(share: np.ndarray, rank: int, home: int, ranks: int, length: int) -> Tensor:
    """The stripe of the share of `rank` that goes to `home`: int64 words, zeros behind the end."""
    number = (home - rank - 1) % ranks
    part, padded = share[number * length : (number + 1) * length], np.zeros(length, np.uint8)
    padded[: len(part)] = part
    return torch.from_numpy(padded).view(torch.int64)


class ParityCopies:
    """Parity instead of copies: any one of n ranks may be lost. Every rank calls the same methods in order.

        n = 4    share 0   share 1   share 2   share 3      shares, padded, in n - 1 stripes a b c; each has
        home 0   P0        c         b         a            a home j on another rank r: (j - r - 1) mod n. No
        home 1   a         P1        c         b            two of a share meet, so P0 = c of 1 + b of 2 + a
        home 2   b         a         P2        c            of 3 (by XOR) tells each of them, given the
        home 3   c         b         a         P3           others.

    A lost share comes back by the same exchange among the others: at each home the XOR of what meets there
    and of the parity is its stripe, and goes to the rank that lost it. Sends: the padded share per rank at a
    save, as much per other rank in recovery. Memory: share, stripe of 2 steps; three stripes of buffers."""

    def __init__(self, shares: Shares):
        if shares.ranks < 2:
            raise ValueError("parity on 1 rank: there is no other to keep it; use at least 2")
        self.shares, self.rounds = shares, iter(())

    def save(self, step: int, pieces: Iterable[Piece], plain: dict, manifest: dict) -> None:
        self.begin(step, pieces, plain, manifest)
        self.finish()

    def begin(self, step: int, pieces: Iterable[Piece], plain: dict, manifest: dict) -> None:
        """The share is in own memory. Its stripes travel beside training, a round at each `send_some`."""
        self.finish()
        self.rounds = self._save(step, self.shares.begin(step, pieces, plain), manifest)

    def send_some(self) -> None:
        """A round's stripes have arrived, the next one's set out; behind the last round the step counts."""
        next(self.rounds, None)

    def finish(self) -> None:
        for _ in self.rounds:
            pass

    def _save(self, step: int, written: list[Written], manifest: dict) -> Iterator:
        shares, length = self.shares, stripe_bytes((share.size for share in written), self.shares.ranks)
        for total in self._meet(shares.open(file_name(shares.rank), step), length, None):
            yield
        parity = whole_piece("parity", total)
        kept = write_file(shares.disk, shares.store.writing(step) / PARITY, [parity], {})
        shares.commit(step, written, [kept], manifest)

    def _meet(self, share: np.ndarray, length: int, lost: int | None) -> Iterator[Tensor]:
        """The XOR of the stripes whose home is here, whole at the end. In round s the lost sends nothing."""
        group, rank, ranks = self.shares.group, self.shares.rank, self.shares.ranks
        total = torch.zeros(length // WORD, dtype=torch.int64)
        for s in range(1, ranks):
            to, source, going, coming = (rank + s) % ranks, (rank - s) % ranks, None, None
            if to != lost:
                own = stripe(share, rank, to, ranks, length)
                going = collectives.send(own, to, group, async_op=True)
            if source != lost:
                coming = collectives.receive(total, source, group, async_op=True)
            yield total
            if coming is not None:
                total ^= coming.wait()
            if going is not None:
                going.wait()

    def recover(self, wanted: Iterable[int] | None = None) -> tuple[dict[str, Any], list[File]]:
        """As PeerCopies': a lost share is rebuilt first. Lost, on all ranks: more than one rank is gone."""
        gone = lambda there: [i for i, mine in enumerate(there) if not {file_name(i), PARITY} <= mine]
        said = lambda ranks: f"ranks {ranks} are lost, parity brings back one" if len(ranks) > 1 else ""
        step, manifest, there = self.shares.choose(lambda there: said(gone(there)))
        for rank in gone(there):
            self._rebuild(rank, step, manifest)
            there[rank].add(file_name(rank))
        return manifest, self.shares.fetch(step, manifest, there, wanted)

    def _rebuild(self, lost: int, step: int, manifest: dict[str, Any]) -> None:
        shares, sizes = self.shares, [entry["size"] for entry in manifest["shares"]]
        group, ranks, length = shares.group, shares.ranks, stripe_bytes(sizes, shares.ranks)
        if shares.rank != lost:
            share, parity = (shares.open(name, step) for name in (file_name(shares.rank), PARITY))
            words = torch.from_numpy(np.array(parity[-length:])).view(torch.int64)  # the end of its file
            *_, total = self._meet(share, length, lost)
            collectives.send(total ^ words, lost, group)
            return
        (folder := shares.store.folder / FETCHED).mkdir(parents=True, exist_ok=True)
        with new_file(shares.disk, folder / file_name(lost)) as file:
            for number in range(ranks - 1):
                home, first = (lost + number + 1) % ranks, number * length
                words = collectives.receive(None, home, group, shape=(length // WORD,), dtype=torch.int64)
                size = max(0, min(length, sizes[lost] - first))
                shares.disk.write(file, first, words.view(torch.uint8)[:size].numpy())
