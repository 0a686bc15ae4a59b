"""Schedules as PyTorch writes them: a file that its pipeline runtime loads, and a schedule from a file that it dumped. No torch.

    to_csv(one_f_one_b(2, 2))            0F0,0F1,0B0,0B1                          a line a rank, in the order of the ranks
                                         1F0,1B0,1F1,1B1                          "1F0": stage 1, microbatch 0

    schedule = _PipelineScheduleRuntime(stages, m, loss_fn, scale_grads=False);  schedule._load_csv(file)          theirs runs ours
    schedule._dump_csv(file, format="compute_only");  from_csv(open(file).read())                                  ours reads theirs

The letters F, B, I, W are the same. A pair is `(2F0;3B1)OVERLAP_F_B`; an empty cell is a step in which a rank waits, and is dropped,
for our lists have no clock. `to_csv(schedule, comms=True)` writes the format "compute_comms", with messages: `0SEND_F0`, `1RECV_F0`,
`1SEND_B0`, `0RECV_B0` (the stage is that of the rank which does it), and `0REDUCE_GRAD` behind the last gradient of a stage. The order
is not that of lower.py: their runtime has one channel between two ranks, which NCCL works off in order whatever the direction, so both
ends must name all their messages in one order. Here that is the order of the simulated ends. `from_csv` reads both formats and keeps
the computation: messages follow from it, and so do `UNSHARD` and `RESHARD`, which gather and drop sharded weights.

In PyTorch the rank is a function of the stage. What has a stage twice (Chimera, DualPipe) is refused, and so are slices, recomputation
and pairs with other kinds, for which there is no letter.
Mind the divisor: their gradients are divided by the number of microbatches unless `scale_grads=False`; ours is in the loss.
Raises ValueError in one line for those, for a cell that is no action (with its row and column), and what `check` raises.
PyTorch 2.11 and 2.13, torch.distributed.pipelining, schedules.py: the same grammar in both (2.11 runs no V over gloo).
Differs: a file that leaves something out or gets stuck is refused when it is read, not when it runs.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter

from minitrain.pipeline.lower import user_of
from minitrain.pipeline.schedule import Action, Entry, Pair, Schedule, check, parts
from minitrain.pipeline.simulate import simulate

CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|I|B|W)(\d*)")
PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule, comms: bool = False) -> str:
    """The text for `_load_csv(file, format="compute_comms" if comms else "compute_only")`."""
    check(schedule)
    check_writable(schedule)
    ranks = (
        with_messages(schedule)
        if comms
        else [[cell(entry) for entry in entries] for entries in schedule.ranks]
    )
    return "".join(",".join(cells) + "\n" for cells in ranks)


def cell(entry: Entry) -> str:
    if isinstance(entry, Pair):
        return f"({cell(entry.forward)};{cell(entry.backward)})OVERLAP_F_B"
    return f"{entry.stage}{entry.kind}{entry.microbatch}"


def with_messages(schedule: Schedule) -> list[list[str]]:
    """Every message is put at the end of both lists as soon as it can be sent: two ranks name their messages in one order."""
    cells: list[list[str]] = [[] for _ in schedule.ranks]
    left = Counter(action.stage for action in schedule.place if action.kind in "BW")
    spans = sorted(
        (span.end, rank, span.entry) for rank, spans in enumerate(simulate(schedule).spans) for span in spans
    )
    for _, rank, entry in spans:
        cells[rank].append(cell(entry))
        for what in parts([entry]):
            user = user_of(what, schedule)
            if user is not None and (there := schedule.place[user]) != rank:
                direction = "F" if what.kind == "F" else "B"
                cells[rank].append(f"{what.stage}SEND_{direction}{what.microbatch}")
                cells[there].append(f"{user.stage}RECV_{direction}{what.microbatch}")
            left[what.stage] -= what.kind in "BW"
            if what.kind in "BW" and not left[what.stage]:
                cells[rank].append(f"{what.stage}REDUCE_GRAD")
    return cells


def from_csv(text: str, name: str = "from PyTorch") -> Schedule:
    """The computation in a file of either format; as many stages and microbatches as it names."""
    ranks = tuple(
        tuple(
            entry
            for column, written in enumerate(row)
            if (entry := entry_of(written, f"row {number}, column {column}"))
        )
        for number, row in enumerate(csv.reader(io.StringIO(text)))
    )
    actions = [action for entries in ranks for action in parts(entries)]
    if not actions:
        raise ValueError("from_csv: no action in this text; a line a rank, cells like 0F0 between commas")
    return check(
        Schedule(
            name,
            ranks,
            1 + max(action.stage for action in actions),
            1 + max(action.microbatch for action in actions),
        )
    )


def entry_of(written: str, where: str) -> Entry | None:
    """What a cell says; None for a message, for weights that come and go, and for a step of waiting."""
    written = written.strip()
    if not written:
        return None
    if both := PAIR.fullmatch(written):
        forward, backward = (entry_of(part, where) for part in both.groups())
        if isinstance(forward, Action) and isinstance(backward, Action):
            return Pair(forward, backward)
    elif found := CELL.fullmatch(written):
        stage, kind, microbatch = found.groups()
        if kind not in tuple("FIBW"):
            return None
        if microbatch:
            return Action(kind, int(stage), int(microbatch))
    raise ValueError(
        f"from_csv: {where} is {written!r}; cells are stage, kind, microbatch like 0F0, 2SEND_F1 or (2F0;3B1)OVERLAP_F_B"
    )


def check_writable(schedule: Schedule) -> None:
    if schedule.slices > 1:
        raise ValueError(
            f"{schedule.name}: PyTorch's format has no slices of a sequence, this has {schedule.slices}; use a schedule of "
            "whole microbatches"
        )
    if schedule.recomputes:
        raise ValueError(
            f"{schedule.name}: PyTorch's format has no R; leave recomputation to the stages (torch.utils.checkpoint)"
        )
    if schedule.evicts:
        raise ValueError(
            f"{schedule.name}: PyTorch's format has no E, H, G and L; use a schedule whose activations stay, 1F1B say"
        )
    homes: dict[int, int] = {}
    for action, rank in schedule.place.items():
        if homes.setdefault(action.stage, rank) != rank:
            raise ValueError(
                f"{schedule.name}: stage {action.stage} is on rank {homes[action.stage]} and on rank {rank}; PyTorch has each "
                "stage on one rank, so use a schedule without copies, such as a V"
            )
