"""Saver: what ranks do together so that a folder of checkpoints gets one more, beside training or not.

    with Saver(store, device, policy="asynchronous") as saver:        on every rank
        run.attach(saver)                                           so that updates wait: before_update
        saver.save(step, run.pieces(), run.plain_state(), manifest)
        ...                                                         steps; after each of them
        saver.after_step()                                          ranks agree, rank 0 commits

    save          share_out, then a thread copies (snapshot.py) and another writes (format.py)
    before_update what is about to change is copied first
    after_step    all have written -> rank 0 commits, on its thread -> all know: so two steps later at least

No thread calls a collective. If a rank cannot write, all raise the same NotSaved at the next call: the save
is dropped, and training may go on. Sends 32 bytes to each other rank to begin a save, and per step while one
is under way; 400 more, of text, if it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from minitrain.checkpoint.format import Written, write_file
from minitrain.checkpoint.snapshot import GivenUp, Snapshot, parameter_of
from minitrain.checkpoint.store import Store, file_name
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_device, require_one_of, require_positive_ints
from minitrain.ranks.pieces import Piece, share_out

UNDER_WAY, WRITTEN, COMMITTED, FAILED = range(4)
TEXT_BYTES = 400  # of an error that ranks tell each other
MB = 1_000_000


@dataclass(frozen=True)
class SavePolicy:
    """How a Saver saves: when it copies and writes, from how much memory, and who writes.

        step      | forward backward | update | forward backward | update |
        copy      [##########]                                                 hidden
        write               [######################]                           the next save waits for its end

    Of what k ranks hold alike each writes 1/k, or `writers` of them share it out."""

    paper: str = "one's own"
    copy: Literal["now", "overlapped"] = "now"  # with the next forward and backward: the update waits
    write: Literal["now", "background"] = "background"
    by_layer: bool = False  # the update of a parameter waits for what belongs to it alone
    chunk_bytes: int | None = None  # a chunk is written when it is copied; None: when all is
    slots: int | None = None  # chunks that fit into memory; None: all
    writers: int | None = None  # of ranks that hold the same; None: all

    def __post_init__(self):
        require_one_of(("now", "overlapped"), copy=self.copy)
        require_one_of(("now", "background"), write=self.write)
        sizes = dict(chunk_bytes=self.chunk_bytes, slots=self.slots, writers=self.writers)
        require_positive_ints(10**18, **{name: size for name, size in sizes.items() if size is not None})
        if self.slots and not self.chunk_bytes:
            raise ValueError(f"slots={self.slots}: slots hold chunks; give chunk_bytes")
        if self.copy == "now" and self.by_layer:
            raise ValueError("by_layer=True with copy='now': nothing waits; use copy='overlapped'")
        if self.copy == "overlapped" and self.write == "now":
            raise ValueError("write='now' with copy='overlapped': a write follows its copy; use one of them")


SAVE_POLICIES = {
    # Training stands still; one of the ranks that hold the same writes. Varuna: Athlur et al. 2022, EuroSys.
    "sync": SavePolicy("DeepSpeed, Varuna", write="now", writers=1),
    # The same, shared out: in 1/k of the time where the disk is not what limits it.
    "sync_sharded": SavePolicy("DeepSpeed with sharded writing", write="now"),
    # It stands still for the copy. Jiang et al. 2024 (MegaScale), arXiv:2402.15627; Cai et al. 2024
    # (InternLM2, InternEvo), arXiv:2403.17297; Eisenman et al. 2022 (Check-N-Run), NSDI.
    "snapshot": SavePolicy("MegaScale, InternEvo, Check-N-Run", writers=1),
    # Nicolae et al. 2020, CCGRID: light work in the foreground, and replicas share out the heavy.
    "deepfreeze": SavePolicy("DeepFreeze"),
    # Chunks copied and written in a pipeline; what is replicated is divided among the ranks.
    "torchsnapshot": SavePolicy("TorchSnapshot", chunk_bytes=16 * MB),
    # For what is not yet copied, beside forward and backward, when the update begins.
    "asynchronous": SavePolicy("asynchronous", copy="overlapped"),
    # Mohan et al. 2021, FAST: with frequency.py, which keeps a budget.
    "checkfreq": SavePolicy("CheckFreq", copy="overlapped"),
    # Chen et al. 2023, ICCD: an update depends on the copy of its own layer only.
    "lightcheck": SavePolicy("LightCheck", copy="overlapped", by_layer=True, chunk_bytes=16 * MB),
    # Maurya et al. 2024, arXiv:2406.10707: lazy copies into one limited buffer, flushed meanwhile.
    "datastates": SavePolicy("DataStates-LLM", copy="overlapped", chunk_bytes=16 * MB, slots=16),
    # Wang et al. 2024, arXiv:2406.13768: two pinned buffers; `writers`: as many as are fastest.
    # Differs: no direct I/O past the cache of the file system; the update waits for copies, not for the disk.
    "fastpersist": SavePolicy("FastPersist", copy="overlapped", chunk_bytes=32 * MB, slots=2),
}


class NotSaved(RuntimeError):
    """A checkpoint could not be saved; the older ones are as they were."""


class Wait(NamedTuple):
    """What training stood still for: `bytes` had still to be copied, or taken by the writer, at its begin."""

    step: int
    why: str  # "copy", "write", "previous save"
    bytes: int
    s: float


class Save:
    def __init__(self, step: int, plain: dict, manifest: dict, snapshot: Snapshot):
        self.step, self.plain, self.manifest, self.snapshot = step, plain, manifest, snapshot
        self.state, self.error, self.written = UNDER_WAY, "", Written("", 0, "0" * 16)
        self.copying = self.task = None  # futures; the second of the write, then on rank 0 of the commit
        self.committing = False
        self.copy_s = self.write_s = 0.0

    def fails(self, error: BaseException) -> None:
        self.error, self.state = told(error), FAILED
        self.snapshot.give_up()


class Saver:
    """Of one run; every rank calls the same methods in the same order."""

    def __init__(self, store: Store, device="cpu", policy: SavePolicy | str = "sync", clock=perf_counter):
        require_device(device=device)
        if not isinstance(policy, SavePolicy):
            require_one_of(SAVE_POLICIES, policy=policy)
            policy = SAVE_POLICIES[policy]
        self.store, self.device, self.policy, self.clock = store, device, policy, clock
        self.group = collectives.world()
        self.rank = self.group.rank()
        self.waits: list[Wait] = []
        self.notes: list[str] = []  # on rank 0: which older ones could not be removed
        self.under_way: Save | None = None
        self.last: Save | None = None  # the newest that is committed
        self.update_s = 0.0  # of the last step, from the first `before_update` on, without waits
        self._update_began: tuple[float, int] | None = None  # when, and after how many waits
        self.snapshot = Snapshot(device, self.policy.chunk_bytes, self.policy.slots)
        self._order: dict[str, int] = {}  # parameters as updates want them
        self._copier = futures.ThreadPoolExecutor(1, thread_name_prefix="copy a checkpoint")
        self._writer = futures.ThreadPoolExecutor(1, thread_name_prefix="write a checkpoint")
        self.closed = False

    # ---- what training calls ------------------------------------------------------------------------------

    def save(self, step: int, pieces: list[Piece], plain: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Begin a checkpoint of a step, and do at once of it what the policy says."""
        if self.closed:
            raise ValueError(f"step {step} cannot be saved: the saver is closed; make a new one")
        if self.under_way:
            self._wait("previous save", self.snapshot.unwritten_bytes, self._end)
        save = Save(step, plain, manifest, self.snapshot)
        try:
            share, last = share_out(pieces, self.policy.writers), len(self._order)
            self.snapshot.begin(sorted(share, key=lambda piece: self._order.get(parameter_of(piece), last)))
            if self.rank == 0:
                self.store.begin(step)
        except Exception as error:
            save.fails(error)
        if failure := self._failure(save, self._tell(save)):
            raise NotSaved(failure)
        self.under_way = save
        save.copying = self._copier.submit(self._copy, save)
        save.task = self._writer.submit(self._write, save)
        if self.policy.copy == "now":
            self._wait("copy", self.snapshot.bytes, self.snapshot.wait)
        if self.policy.write == "now":
            self._wait("write", self.snapshot.bytes, self._end)

    def before_update(self, names: Iterable[str] | None = None) -> None:
        """Return when parameters of these names and their states may change; None: all that is saved."""
        self._update_began = self._update_began or (self.clock(), len(self.waits))
        names = list(names) if self.policy.by_layer and names is not None else None
        for name in names or ():
            self._order.setdefault(name, len(self._order))
        snapshot = self.snapshot
        if self.under_way and not snapshot.over and (missing := snapshot.missing_bytes(names)):
            self._wait("copy", missing, lambda: snapshot.wait(names))

    def after_step(self) -> None:
        """Ranks agree on what is under way; on its error, if there is one."""
        if self._update_began:
            (began_s, waits), self._update_began = self._update_began, None
            self.update_s = self.clock() - began_s - sum(wait.s for wait in self.waits[waits:])
        if self.under_way:
            self._advance()

    def finish(self) -> None:
        if self.under_way:
            self._wait("write", self.snapshot.unwritten_bytes, self._end)

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self.stop()

    def stop(self) -> None:
        """Give up what is under way, without a word to other ranks: they may be gone. No thread is left."""
        self.closed, self.under_way = True, None
        self.snapshot.give_up()
        for threads in (self._copier, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        if self.rank == 0:
            self.store.unlock()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close() if error is None else self.stop()

    # ---- ranks agree --------------------------------------------------------------------------------------

    def _wait(self, why: str, size: int, wait: Callable[[], None]) -> None:
        step, started = self.under_way.step, self.clock()
        try:
            wait()
        finally:
            self.waits.append(Wait(step, why, size, self.clock() - started))

    def _end(self) -> None:
        """Wait until it is committed or has failed on all ranks."""
        while self.under_way:
            futures.wait([self.under_way.task])
            self._advance()

    def _advance(self) -> None:
        """Tell each other how far the save is, and do what follows. NotSaved, on all ranks: why it failed."""
        save = self.under_way
        ranks = self._tell(save)
        if failure := self._failure(save, ranks):
            self.snapshot.give_up()
            futures.wait([save.copying, save.task])
            self.under_way = None
            raise NotSaved(failure)
        if ranks[0][0] == COMMITTED:
            self.under_way, self.last = None, save
        elif not save.committing and all(state == WRITTEN for state, *_ in ranks):
            save.committing = True
            if self.rank == 0:
                save.task = self._writer.submit(self._commit, save, ranks)

    def _tell(self, save: Save) -> list[list[int]]:
        """(state, bytes, hash of the header, length of the error) of each rank's part."""
        state, written = save.state, save.written  # another thread may be about to change them
        number = int(written.header_hash, 16) - (1 << 63)
        error = len(save.error) if state == FAILED else 0
        mine = torch.tensor([[state, written.size, number, error]], device=self.device)
        return collectives.all_gather(mine, self.group, name="checkpoint").tolist()

    def _failure(self, save: Save, ranks: list[list[int]]) -> str:
        """The same on all ranks: whose error it is; "" if there is none."""
        failed = [rank for rank, (state, *_) in enumerate(ranks) if state == FAILED]
        if not failed:
            return ""
        text = save.error.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
        text = torch.tensor([list(text)], dtype=torch.uint8, device=self.device)
        text = collectives.all_gather(text, self.group, name="checkpoint error")[failed[0]]
        error = bytes(text.tolist()).decode(errors="replace").strip()
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        what = f"cannot save step {save.step}: rank {failed[0]}{others}: {error}"
        return f"{what}; older checkpoints are as they were, training can go on"

    # ---- threads: no collective, and errors are kept ------------------------------------------------------

    def _copy(self, save: Save) -> None:
        started = self.clock()
        self.snapshot.copy()
        save.copy_s = self.clock() - started

    def _write(self, save: Save) -> None:
        path, started = self.store.writing(save.step) / file_name(self.rank), self.clock()
        try:
            disk, snapshot = self.store.disk, self.snapshot
            save.written = write_file(disk, path, snapshot.pieces, save.plain, snapshot.blocks_of)
            save.write_s, save.state = self.clock() - started, WRITTEN
        except GivenUp:
            save.state = FAILED
        except BaseException as error:
            save.fails(error if str(path) in str(error) else OSError(f"{path}: {told(error)}"))

    def _commit(self, save: Save, ranks: list[list[int]]) -> None:
        try:
            told_by = [(size, f"{number + (1 << 63):016x}") for _, size, number, _ in ranks]
            files = [Written(file_name(rank), *of_file) for rank, of_file in enumerate(told_by)]
            self.notes += self.store.commit(save.step, files, save.manifest) or []
            save.state = COMMITTED
        except BaseException as error:
            save.fails(OSError(f"{self.store.path(save.step)}: {told(error)}"))


def told(error: BaseException) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    path = getattr(error, "filename", None)
    return " ".join(f"{path}: {said}".split() if path else said.split())
