"""Policies of saving, as papers have them: when to copy, when to write, from how much memory, and who writes.

    sync             training stands still for copy and write (sync_sharded: all that hold the same share it)
    snapshot         for the copy; the write is behind
    asynchronous     for what is not copied when the update begins; the copy is beside forward and backward
    torchsnapshot    as snapshot, and the write begins with the first chunk copied
    lightcheck       as asynchronous, and each update waits for what it changes alone
    fastpersist      as asynchronous, from two buffers, filled and written by turns

    step      | forward backward | update | forward backward | update |
    copy      [##########]                                                 hidden
    write               [######################]                           the next save waits for its end

One snapshot and one writer (snapshot.py, saver.py) do all of them. Of what k ranks hold alike each writes
1/k, or `writers` of them share it out: then the others write numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from minitrain.ranks.checks import require_one_of, require_positive_ints

MB = 1_000_000


@dataclass(frozen=True)
class SavePolicy:
    """How a Saver saves."""

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
    # DeepSpeed; Varuna: Athlur et al. 2022, EuroSys. One of the ranks that hold the same writes.
    "sync": SavePolicy("DeepSpeed, Varuna", write="now", writers=1),
    # The same, shared out: in 1/k of the time where the disk is not what limits it.
    "sync_sharded": SavePolicy("DeepSpeed with sharded writing", write="now"),
    # Jiang et al. 2024 (MegaScale), arXiv:2402.15627; Cai et al. 2024 (InternLM2, InternEvo),
    # arXiv:2403.17297; Eisenman et al. 2022 (Check-N-Run), NSDI.
    "snapshot": SavePolicy("MegaScale, InternEvo, Check-N-Run", writers=1),
    # Nicolae et al. 2020, CCGRID: light work in the foreground, and replicas share out the heavy.
    "deepfreeze": SavePolicy("DeepFreeze"),
    # Chunks copied and written in a pipeline; what is replicated is divided among the ranks.
    "torchsnapshot": SavePolicy("TorchSnapshot", chunk_bytes=16 * MB),
    "asynchronous": SavePolicy("asynchronous", copy="overlapped"),
    # Mohan et al. 2021, FAST: with frequency.py, which keeps a budget.
    "checkfreq": SavePolicy("CheckFreq", copy="overlapped"),
    # Chen et al. 2023, ICCD: an update depends on the copy of its own layer only.
    "lightcheck": SavePolicy("LightCheck", copy="overlapped", by_layer=True, chunk_bytes=16 * MB),
    # Maurya et al. 2024, arXiv:2406.10707: lazy copies into one limited buffer, flushed meanwhile.
    "datastates": SavePolicy("DataStates-LLM", copy="overlapped", chunk_bytes=16 * MB, slots=16),
    # Wang et al. 2024, arXiv:2406.13768: two pinned buffers; as many writers as are fastest (`best_writers`).
    # Differs: no direct I/O past the cache of the file system; the update waits for copies, not for the disk.
    "fastpersist": SavePolicy("FastPersist", copy="overlapped", chunk_bytes=32 * MB, slots=2),
}


def best_writers(choices: Iterable[int], write_s: Callable[[int], float]) -> int:
    """The number of writers for which `write_s(writers)`, measured or modelled, is least; of equals the
    smallest."""
    require_positive_ints(choices=(choices := list(choices)))
    return min(sorted(choices), key=write_s)
