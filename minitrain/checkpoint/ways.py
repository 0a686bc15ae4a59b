"""Ways to save, as papers have them: when to copy, when to write, from how much memory, and who writes.

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

from minitrain.ranks.checks import require_positive_ints

MB = 1_000_000


@dataclass(frozen=True)
class Way:
    """How a Saver saves."""

    paper: str = "one's own"
    copy: Literal["now", "beside"] = "now"  # beside the next forward and backward: the update waits
    write: Literal["now", "behind"] = "behind"
    by_layer: bool = False  # the update of a parameter waits for what belongs to it alone
    chunk_bytes: int | None = None  # a chunk is written when it is copied; None: when all is
    slots: int | None = None  # chunks that fit into memory; None: all
    snapshots: int = 1  # at a time; of two, the second is written behind the first
    writers: int | None = None  # of ranks that hold the same; None: all

    def __post_init__(self):
        for name, most in (("copy", ("now", "beside")), ("write", ("now", "behind"))):
            if (value := getattr(self, name)) not in most:
                raise ValueError(f"{name}={value!r}; use {' or '.join(map(repr, most))}")
        for name in ("chunk_bytes", "slots", "snapshots", "writers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}; use 1 or more")
        if self.slots and (self.snapshots > 1 or not self.chunk_bytes):
            given = f"slots={self.slots}, chunk_bytes={self.chunk_bytes}, snapshots={self.snapshots}"
            raise ValueError(f"{given}: slots hold chunks of one snapshot; give chunk_bytes, and snapshots=1")
        if self.by_layer and self.copy == "now":
            raise ValueError("by_layer=True with copy='now': nothing is left to wait for; use copy='beside'")
        if self.write == "now" and self.copy != "now":
            raise ValueError("write='now' with copy='beside': it is copied before it is written; use one")


WAYS = {
    # DeepSpeed; Varuna: Athlur et al. 2022, EuroSys. One of the ranks that hold the same writes.
    "sync": Way("DeepSpeed, Varuna", write="now", writers=1),
    # The same, shared out: in 1/k of the time where the disk is not what limits it.
    "sync_sharded": Way("DeepSpeed with sharded writing", write="now"),
    # Jiang et al. 2024 (MegaScale), arXiv:2402.15627; Cai et al. 2024 (InternLM2, InternEvo),
    # arXiv:2403.17297; Eisenman et al. 2022 (Check-N-Run), NSDI.
    "snapshot": Way("MegaScale, InternEvo, Check-N-Run", writers=1),
    # Nicolae et al. 2020, CCGRID: light work in the foreground, and replicas share out the heavy.
    "deepfreeze": Way("DeepFreeze"),
    # Chunks copied and written in a pipeline; what is replicated is divided among the ranks.
    "torchsnapshot": Way("TorchSnapshot", chunk_bytes=16 * MB),
    "asynchronous": Way("asynchronous", copy="beside"),
    # Mohan et al. 2021, FAST: with frequency.py, which keeps a budget.
    "checkfreq": Way("CheckFreq", copy="beside"),
    # Chen et al. 2023, ICCD: an update depends on the copy of its own layer only.
    "lightcheck": Way("LightCheck", copy="beside", by_layer=True, chunk_bytes=16 * MB),
    # Maurya et al. 2024, arXiv:2406.10707: lazy copies into one limited buffer, flushed meanwhile.
    "datastates": Way("DataStates-LLM", copy="beside", chunk_bytes=16 * MB, slots=16),
    # Wang et al. 2024, arXiv:2406.13768: two pinned buffers; as many writers as are fastest (`best_writers`).
    # Differs: no direct I/O past the cache of the file system; the update waits for copies, not for the disk.
    "fastpersist": Way("FastPersist", copy="beside", chunk_bytes=32 * MB, slots=2),
}


def named(way: Way | str) -> Way:
    """A way by its name."""
    if isinstance(way, Way):
        return way
    if way not in WAYS:
        raise ValueError(f"way={way!r}; use one of {', '.join(WAYS)}")
    return WAYS[way]


def best_writers(choices: Iterable[int], write_s: Callable[[int], float]) -> int:
    """The number of writers for which `write_s(writers)`, measured or modelled, is least; of equals the
    smallest."""
    require_positive_ints(choices=(choices := list(choices)))
    return min(sorted(choices), key=write_s)


def stream_s(copies_s: list[float], writes_s: list[float], slots: int | None = None) -> float:
    """How long chunks take that are copied one after the other and written behind, from so many slots.

    Of equal ones with two slots or more, all but one of the shorter kind are hidden behind the longer."""
    copied, written = [], []
    for number, (copy_s, write_s) in enumerate(zip(copies_s, writes_s, strict=True)):
        free = written[number - slots] if slots and number >= slots else 0.0
        copied.append(max(copied[-1] if copied else 0.0, free) + copy_s)
        written.append(max(written[-1] if written else 0.0, copied[-1]) + write_s)
    return written[-1] if written else 0.0
