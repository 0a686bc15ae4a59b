"""Shares in memory with parity instead of copies: any one of n ranks may be lost, at 1/(n-1) more memory.

    n = 4    share 0   share 1   share 2   share 3      shares, padded, in n - 1 stripes a b c; each has
    home 0   P0        c         b         a            a home j on another rank r: (j - r - 1) mod n. No two
    home 1   a         P1        c         b            of a share meet, so P0 = c of 1 + b of 2 + a of 3 (by
    home 2   b         a         P2        c            XOR) tells each of them, given the others.
    home 3   c         b         a         P3

A lost share comes back by the same exchange among the others: at each home the XOR of what meets there and
of the parity is the stripe of the lost share, and goes to the rank that lost it.
Sends: the padded share per rank at a save (n - 1 stripes), and as much per other rank in recovery. Memory:
the share and one stripe, of 2 steps (in_memory.py); three stripes of buffers. Two lost at once are a line.
Wang et al. 2023, REFT, arXiv:2310.12670, section 4 (RAIM5). Differs: parity is made when the share is, not
beside training, and of files, so a share that was rebuilt is verified like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitrain.checkpoint.disk import new_file
from minitrain.checkpoint.format import File, write_file
from minitrain.checkpoint.store import file_name
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.pieces import Piece, whole_piece
from minitrain.systems.checkpoint.in_memory import FETCHED, Shares, gather_plain

PARITY = "parity.safetensors"
WORD = 8  # bytes added at a time


def stripe_bytes(sizes: Iterable[int], ranks: int) -> int:
    """Of shares of these sizes, padded to the longest and to whole words."""
    require_positive_ints(ranks=ranks)
    return -(-max(sizes) // (WORD * (ranks - 1))) * WORD


def stripe(share: np.ndarray, rank: int, home: int, ranks: int, length: int) -> Tensor:
    """The stripe of the share of `rank` that goes to `home`: int64 words, zeros behind the end."""
    number = (home - rank - 1) % ranks
    part = share[number * length : (number + 1) * length]
    padded = np.zeros(length, np.uint8)
    padded[: len(part)] = part
    return torch.from_numpy(padded).view(torch.int64)


class ParityCopies:
    """Every rank calls the same methods in the same order."""

    def __init__(self, shares: Shares):
        if shares.ranks < 2:
            raise ValueError("parity on 1 rank: there is no other to keep it; use at least 2")
        self.shares = shares

    def save(
        self, step: int, pieces: Iterable[Piece], plain: dict[str, Any], manifest: dict[str, Any]
    ) -> None:
        """Share and parity are in memory, and count."""
        shares = self.shares
        written = shares.begin(step, pieces, plain)
        length = stripe_bytes((share.size for share in written), shares.ranks)
        parity = whole_piece("parity", self._meet(shares.open(file_name(shares.rank), step), length, None))
        kept = write_file(shares.disk, shares.store.writing(step) / PARITY, [parity], {})
        shares.commit(step, written, [kept], manifest)

    def _meet(self, share: np.ndarray, length: int, lost: int | None) -> Tensor:
        """The XOR of the stripes that have their home here. In round s each rank sends to the s-th after it;
        the lost one sits out."""
        group, rank, ranks = self.shares.group, self.shares.rank, self.shares.ranks
        total = torch.zeros(length // WORD, dtype=torch.int64)
        for s in range(1, ranks):
            to, source, under_way = (rank + s) % ranks, (rank - s) % ranks, None
            if to != lost:
                own = stripe(share, rank, to, ranks, length)
                under_way = collectives.send(own, to, group, async_op=True)
            if source != lost:
                total ^= collectives.receive(total, source, group)
            if under_way is not None:
                under_way.wait()
        return total

    def recover(self, wanted: Iterable[int] | None = None) -> tuple[dict[str, Any], list[File]]:
        """The manifest of the newest step that is whole or can be made so, and the shares `wanted` (None:
        all), for Saved; a lost share is rebuilt first. Lost, on all ranks: more than one rank is gone."""
        shares = self.shares
        have = gather_plain(shares.verified_files(), shares.group)

        def gone(step: str) -> list[int]:
            return [n for n, mine in enumerate(have) if not {file_name(n), PARITY} <= {*mine.get(step, ())}]

        def lost(step: str) -> str:
            return f"ranks {gone(step)} are lost, parity brings back one" if len(gone(step)) > 1 else ""

        step, manifest = shares.choose(have, lost)
        for rank in gone(str(step)):
            self._rebuild(rank, step, manifest)
            have[rank].setdefault(str(step), []).append(file_name(rank))
        return manifest, shares.fetch(step, manifest, have, wanted)

    def _rebuild(self, lost: int, step: int, manifest: dict[str, Any]) -> None:
        """The lost rank has its share again, beside its store."""
        shares, sizes = self.shares, [entry["size"] for entry in manifest["shares"]]
        group, ranks, length = shares.group, shares.ranks, stripe_bytes(sizes, shares.ranks)
        if shares.rank != lost:
            share, parity = (shares.open(name, step) for name in (file_name(shares.rank), PARITY))
            words = torch.from_numpy(np.array(parity[-length:])).view(torch.int64)  # the end of its file
            collectives.send(self._meet(share, length, lost) ^ words, lost, group)
            return
        (folder := shares.store.folder / FETCHED).mkdir(parents=True, exist_ok=True)
        with new_file(shares.disk, folder / file_name(lost)) as file:
            for number in range(ranks - 1):
                home, first = (lost + number + 1) % ranks, number * length
                words = collectives.receive(None, home, group, shape=(length // WORD,), dtype=torch.int64)
                size = max(0, min(length, sizes[lost] - first))
                shares.disk.write(file, first, words.view(torch.uint8)[:size].numpy())
