"""Detectors of ranks that are silent, slow or somewhere else; each names a rank, a link or a call.

    Heartbeat          a row per rank in a file: who has stopped, and how far everybody is
    LocalTime          seconds per step that a rank was neither waiting for others nor for a core
    probe -> blame     delays of all ordered pairs: a slow row is a sender, a column a receiver, a cell a link
    self_check         before a start: arithmetic, every pair, a sum, on known numbers
    first_difference   of the logs of all ranks: who calls something else, from which call on
    drift              of a series of step times: from when on they are longer

Seconds are compared with those of other ranks at the same time, as ratios of minima over several tries, and
time in the run queue is taken off: a busy machine makes all late. Sends 8 bytes per rank and step for times,
16 messages for each pair that is probed. What changes numbers alone is seen by corruption.py.
Jiang et al. 2024, MegaScale, arXiv:2402.15627, sections 4 and 5; Dong et al. 2024, C4, arXiv:2406.04594;
Gershon et al. 2024, Vela, arXiv:2407.05467; Wu et al. 2023, TRANSOM, arXiv:2310.10046; PyTorch's flight
recorder. Differs: probes, where C4 reads times of the job's own messages; one clock, as on one machine.
"""

import threading
import time
from collections import Counter, defaultdict, namedtuple
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.launch.team import queued_s
from minitrain.ranks.process import PROCESS

BEAT_S, BEATS = 0.05, 20


class Heartbeat(ExitStack):
    """`with Heartbeat(path, rank, ranks) as heart`: a thread counts beats, the rank its step and calls, in a
    file that all see. `heart.silent()`, asked again and again by anybody: (rank, step, calls) of those that
    had begun, and no beat while the median rank had twenty: stopped or gone, however slow the machine is.
    `heart.behind()`: who is furthest behind; where all wait and all beat, they wait for that one."""

    def __init__(self, path: Path | str, rank: int, ranks: int):
        super().__init__()
        require_positive_ints(ranks=ranks)
        Path(path).touch()
        self.rows = np.memmap(path, np.int64, "r+", shape=(ranks, 3))  # beats, step, calls
        self.rank, self.seen, self.ended = rank, self.rows.copy(), threading.Event()

    def __enter__(self) -> "Heartbeat":
        self.enter_context(collectives.observe(self._on_event))
        self.callback(self.ended.set)
        self.rows[self.rank, 0] = 1  # whoever is late has not begun, which is no silence
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_S):
            self.rows[self.rank, 0] += 1

    def _on_event(self, kind: str, subject) -> None:
        if kind == "forward":
            self.rows[self.rank, 1] = self.rows[self.rank, 1] + 1 if subject.step is None else subject.step
        self.rows[self.rank, 2] += kind == "issue"

    def silent(self) -> list[tuple[int, int, int]]:
        now = self.rows.copy()
        beats = (now - self.seen)[:, 0]
        if np.median(beats) < BEATS:
            return []
        self.seen = now
        still = np.flatnonzero((beats == 0) & (now[:, 0] > 0))
        return [(rank, *now[rank, 1:].tolist()) for rank in still.tolist()]

    def behind(self) -> tuple[int, int, int]:
        return min(((rank, *row[1:].tolist()) for rank, row in enumerate(self.rows)), key=lambda row: row[1:])


class LocalTime(ExitStack):
    """`with LocalTime() as clock`: `clock.lap()` is this rank's own time since the last one, in seconds."""

    def __enter__(self) -> "LocalTime":
        self.inner, self.waited, self.last = PROCESS.begin, 0.0, self.now()
        self.callback(setattr, PROCESS, "begin", self.inner)
        PROCESS.begin = self._begin
        return self

    def now(self) -> float:
        queued, now = queued_s("thread-self"), time.perf_counter()
        while (after := queued_s("thread-self")) != queued:  # it has waited between the two
            queued, now = after, time.perf_counter()
        return now - queued

    def lap(self) -> float:
        now = self.now()
        own, self.waited, self.last = now - self.last - self.waited, 0.0, now
        return own

    def _begin(self, ch, what, start):
        settle = self._timed(lambda: self.inner(ch, what, start))
        return lambda: self._timed(settle)

    def _timed(self, wait):
        began = self.now()
        try:
            return wait()
        finally:
            self.waited += self.now() - began


def heat_map(local_s: Sequence[float], group: ProcessGroup) -> np.ndarray:
    """[steps, ranks]: own times of all, the same on every rank (MegaScale, section 5.1)."""
    own = torch.tensor([*local_s], dtype=torch.float64)
    return collectives.all_gather(own[:, None], group, 1).numpy()


def stragglers(local_s: np.ndarray) -> list[int]:
    """Ranks whose fastest step of local_s[steps, ranks] is half and 10 ms longer than the median rank's."""
    fastest = np.asarray(local_s).min(0)
    typical = np.median(fastest)
    return np.flatnonzero(fastest > max(1.5 * typical, typical + 0.01)).tolist()


def rounds_of_pairs(nodes: Collection[int], busy: Collection[int] = ()) -> list[list[tuple[int, int]]]:
    """Each pair of nodes once; pairs of a round share no node, so they can be tested at once: their i + j is
    the same modulo an odd count, and of an even one the last node takes who is left. A heavy test leaves out
    those that are `busy` (Vela: light tests all the time, heavy ones on idle nodes)."""
    idle = [node for node in nodes if node not in busy]
    odd = (len(idle) - 1) | 1
    rounds: list = [[] for _ in range(odd)]
    for (i, a), (j, b) in combinations(enumerate(idle), 2):
        rounds[(i + (i if j == odd else j)) % odd].append((a, b))
    return rounds


def probe(group: ProcessGroup) -> np.ndarray:
    """delays[sender, receiver] in seconds, the same on all ranks: the best of 8 messages of 128 KiB. Each has
    the time at which it left: on one machine, whose ranks have one clock."""
    rank, n, message = group.rank(), group.size(), torch.empty(1 << 14, dtype=torch.float64)
    best = torch.full((n, n), torch.inf, dtype=torch.float64)
    for pair in (pair for pairs in rounds_of_pairs(range(n)) for pair in pairs if rank in pair):
        for sender, receiver in (pair, pair[::-1]) * 8:
            if rank == sender:
                message[0] = time.monotonic()
                collectives.send(message, receiver, group)
            else:
                left = collectives.receive(message, sender, group)[0].item()
                best[sender, rank] = min(best[sender, rank].item(), time.monotonic() - left)
    return -collectives.all_reduce(-best, group, op="max").fill_diagonal_(0).numpy()


def blame(delays: np.ndarray) -> tuple:
    """("rank", r), ("sender", r), ("receiver", r), ("link", i, j); () for nobody, ("links", ..) if unclear.
    Slow is twice the median and 15 ms above it, which a busy machine may add to all tries."""
    delays = np.asarray(delays)
    others = ~np.eye(n := len(delays), dtype=bool)
    typical = np.median(delays[others])
    slow = (delays > max(2 * typical, typical + 0.015)) & others
    links = [tuple(link) for link in np.argwhere(slow).tolist()]
    rows, columns = ({int(r) for r in np.flatnonzero(slow.sum(axis) == n - 1)} for axis in (1, 0))
    if len(links) > 1 and len(rows | columns) == 1:
        kind = "rank" if rows == columns else "sender" if rows else "receiver"
        return kind, *(rows | columns)
    return ("link", *links[0]) if len(links) == 1 else ("links", *links) if links else ()


def self_check(group: ProcessGroup, numel: int = 1024) -> list[tuple]:
    """MegaScale's tests before a start (section 4.3), on whole numbers, of which every digit is known: what
    is wrong as ("rank", r): a product of its own, ("link", i, j): a piece of an all-to-all, ("sum", r)."""
    require_positive_ints(numel=numel)
    rank, n = group.rank(), group.size()
    known = lambda source, to: torch.arange(numel, dtype=torch.float64) + numel * (source * n + to)
    ones = torch.ones(numel, numel, dtype=torch.float64)
    wrong = [bool((ones @ known(0, 0) != numel * (numel - 1) / 2).any())]
    pieces = collectives.all_to_all(torch.cat([known(rank, to) for to in range(n)]), group)
    wrong += [not torch.equal(piece, known(i, rank)) for i, piece in enumerate(pieces.chunk(n))]
    total = collectives.all_reduce(known(rank, 0), group)
    wrong += [not torch.equal(total, sum(known(source, 0) for source in range(n)))]
    table = collectives.all_gather(torch.tensor([wrong], dtype=torch.int8), group).tolist()
    found: list[tuple] = [("rank", r) for r in range(n) if table[r][0]]
    found += [("link", i, r) for r in range(n) for i in range(n) if table[r][1 + i]]
    return found + [("sum", r) for r in range(n) if table[r][-1]]


# `said`: operation, shape, site, name; None: it has made no such call. `seq`: of the call in its group
Difference = namedtuple("Difference", "rank seq said others")


def first_difference(logs: Mapping[int, Sequence]) -> Difference | None:
    """From the last calls of each rank (`read_log`, `last_calls`): the first collective of a group where a
    rank stands alone. Of calls in a row that differ in nothing it is the last that seems to be missing."""
    groups: dict = defaultdict(lambda: defaultdict(dict))
    for rank, calls in logs.items():
        for call in (call for call in calls if call.peer is None):
            said = call.op, str(call.shape).strip("()").rstrip(","), call.site, call.name
            groups[call.axis, call.group, str(call.members)][call.seq][rank] = said
    for by_number in groups.values():
        ranks = {rank for said in by_number.values() for rank in said}
        begins = max(min(seq for seq, said in by_number.items() if rank in said) for rank in ranks)
        for seq in sorted(seq for seq in by_number if seq >= begins):
            said = {rank: by_number[seq].get(rank) for rank in ranks}
            (common, count), *others = Counter(said.values()).most_common()
            if others and common is not None and 2 * count > len(ranks):
                odd = min(rank for rank in ranks if said[rank] != common)
                return Difference(odd, seq, said[odd], common)
    return None


def lost_messages(logs: Mapping[int, Sequence]) -> list[tuple[int, int, int]]:
    """(sender, receiver, number): it has left (`read_log` says done), and its receiver still waits for it."""
    ends = {(rank, call.peer, call.seq, call.op): call.done for rank, calls in logs.items() for call in calls}
    left = [(rank, peer, seq) for (rank, peer, seq, op), done in ends.items() if op == "send" and done]
    return sorted((i, j, seq) for i, j, seq in left if ends.get((j, i, seq, "receive")) is False)


def drift(times: Sequence[float], period: int = 1) -> int | None:
    """The step from which on `times` are longer than before, or None. For each phase of the period (as of a
    checkpoint every 10 steps) the median of the first 60 steps is taken off; what is left, in units of its
    own scale, adds up in a CUSUM (Page 1954, Continuous Inspection Schemes), less 1.25 per step, up to 14."""
    require_positive_ints(period=period)
    times, learn = np.asarray(times, dtype=float), 60
    if len(times) < learn or learn < 4 * period:
        raise ValueError(f"{len(times)} times, {period=}: give {learn} or more, of 4 periods or more")
    phase = np.arange(len(times)) % period
    away = times - np.array([np.median(times[:learn][phase[:learn] == p]) for p in range(period)])[phase]
    scale = max(1.4826 * np.median(np.abs(away[:learn])), 1e-12)
    total, since = 0.0, 0
    for step, excess in enumerate(np.minimum(away / scale, 5.0) - 1.25):  # one late step is no drift
        total, since = max(0.0, total + excess), since if total else step
        if total > 14.0:
            return since
    return None
