"""Each rank's share in the memory of others too, sent in chunks while the network has nothing else to do.

    copies = PeerCopies(Shares(machine, group), peers)      peers[3] = {2}: rank 2 keeps a copy of 3's share
    copies.save(step, run.pieces(), run.plain_state(), manifest)      copied to own memory; nothing sent yet
    ... forward of a layer ...   copies.send_some(budget_bytes)       the next chunks are on their way,
    ... before a collective ...  copies.settle()                      and have arrived
    copies.finish()                                                   all that is left

    network   | chunk 0 | chunk 1 |  all-reduce of gradients  | chunk 2 |  ..        every rank in one rhythm
    compute   | forward | forward |  backward                 | forward |  ..

The step knows where its network is idle and how long.
When the last chunk of the longest share has arrived, each rank commits; until then the step before counts.
Sends (m - 1) shares per rank and save, m copies in all. Memory: m shares (in_memory.py: of 2 steps), and the
chunks on their way. Any m - 1 machines may be lost at once; after more, Lost says whose share is nowhere.
Wang et al. 2023, Gemini, SOSP, sections 4 (placement) and 5 (interleaving). Differs: what is sent is the file
of the share, hashed, and goes from host to host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from minitrain.checkpoint.format import File
from minitrain.checkpoint.store import file_name
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.pieces import Piece
from minitrain.systems.checkpoint.in_memory import CHUNK_BYTES, Shares, gather_plain, tensor_of


class PeerCopies:
    """Every rank calls the same methods in the same order, with the same budgets."""

    def __init__(self, shares: Shares, peers: Mapping[int, Collection[int]], chunk_bytes: int = CHUNK_BYTES):
        require_positive_ints(1 << 62, chunk_bytes=chunk_bytes)
        for rank in range(shares.ranks):
            others = set(peers.get(rank, ())) - {rank}
            if not others or not others <= set(range(shares.ranks)):
                raise ValueError(
                    f"the share of rank {rank} is to be kept by ranks {sorted(others)}; "
                    f"name at least one other of ranks 0 to {shares.ranks - 1}"
                )
        self.shares, self.chunk_bytes = shares, chunk_bytes
        self.keepers = {rank: sorted(set(peers[rank]) - {rank}) for rank in range(shares.ranks)}
        self.hosted = [rank for rank, keepers in self.keepers.items() if shares.rank in keepers]
        self.copies = max(map(len, self.keepers.values()))
        self.step = None  # of the save under way
        self.in_flight: list[tuple[Any, Any]] = []

    def save(
        self, step: int, pieces: Iterable[Piece], plain: dict[str, Any], manifest: dict[str, Any]
    ) -> None:
        """Own memory has this rank's share; a save under way is finished first."""
        self.finish()
        self.written = self.shares.begin(step, pieces, plain)
        self.step, self.manifest, self.sent = step, manifest, 0
        folder = self.shares.store.writing(step)
        self.share = self.shares.open(file_name(self.shares.rank), step)
        self.files = {rank: self.shares.disk.create(folder / file_name(rank)) for rank in self.hosted}

    @property
    def left(self) -> int:
        """Bytes of the longest share that no chunk has taken yet; 0: all are on their way, or there."""
        return 0 if self.step is None else max(0, max(share.size for share in self.written) - self.sent)

    def send_some(self, budget_bytes: int) -> int:
        """Put as many chunks on their way as this rank may send bytes; how many bytes that are. What was on
        its way before is waited for."""
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
                arrival = collectives.receive(
                    None, rank, shares.group, shape=(size,), dtype=torch.uint8, async_op=True
                )
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
        if self.step is None or self.left:
            return
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
        """The manifest of the newest step that is whole, and the shares `wanted` (None: all), for Saved. What
        a rank has not comes from the memory of one that has. Lost: whose share is nowhere, on all ranks."""
        shares = self.shares
        have = gather_plain(shares.verified_files(), shares.group)

        def lost(step: str) -> str:
            there = {name for found in have for name in found.get(step, ())}
            gone = [rank for rank in self.keepers if file_name(rank) not in there]
            whose = [f"rank {rank} (kept by ranks {sorted([rank, *self.keepers[rank]])})" for rank in gone]
            return whose and f"nowhere is the share of {', '.join(whose)}"

        step, manifest = shares.choose(have, lost)
        return manifest, shares.fetch(step, manifest, have, wanted)
