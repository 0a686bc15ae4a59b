"""Schedules in PyTorch's file format: what its pipeline runtime loads and dumps. No torch.

    to_csv(one_f_one_b(2, 2)) = 0F0,0F1,0B0,0B1    a line per rank; "1F0": stage 1, microbatch 0
                                1F0,1B0,1F1,1B1
    theirs = _PipelineScheduleRuntime(stages, m, loss_fn, scale_grads=False); theirs._load_csv(file)
    theirs._dump_csv(file, format="compute_only"); from_csv(text)

A pair is `(2F0;3B1)OVERLAP_F_B`; an empty cell is a step in which a rank waits. Of their format with messages
(`0SEND_F0`, `1RECV_F0`) `from_csv` keeps the computation. A stage on two ranks, slices, R, moves and other
pairs have no letters there. Without `scale_grads=False` gradients are divided by the number of microbatches;
ours are in the loss. PyTorch 2.11 and 2.13, torch.distributed.pipelining, schedules.py (2.11 runs no V over
gloo). Differs: a bad file is refused when it is read, not when it runs.
"""

import csv
import io
import re
from collections import Counter

from minitrain.pipeline.schedule import Action, Entry, Pair, Schedule, check, parts
from minitrain.ranks.checks import require_text

CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|I|B|W)(\d*)")
PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    check(schedule)
    homes = Counter(stage for rank in range(len(schedule.ranks)) for stage in schedule.stages_of(rank))
    refused = {
        f"no slices of a sequence, this has {schedule.slices}": schedule.slices > 1,
        "no R; leave recomputation to the stages (torch.utils.checkpoint)": schedule.recomputes,
        "no E, H, G and L; use a schedule whose activations stay, 1F1B say": schedule.evicts,
        "each stage on one rank; use one without copies, such as a V": max(homes.values()) > 1,
    }
    for words in (words for words, found in refused.items() if found):
        raise ValueError(f"{schedule.name}: PyTorch's format has {words}")
    return "".join(",".join(map(cell, entries)) + "\n" for entries in schedule.ranks)


def cell(entry: Entry) -> str:
    if isinstance(entry, Pair):
        return f"({cell(entry.forward)};{cell(entry.backward)})OVERLAP_F_B"
    return f"{entry.stage}{entry.kind}{entry.microbatch}"


def from_csv(text: str, name: str = "from PyTorch") -> Schedule:
    """The computation in a file of either format; as many stages and microbatches as it names."""
    ranks = []
    for row, cells in enumerate(csv.reader(io.StringIO(text))):
        entries = (entry_of(cell, f"row {row}, column {column}") for column, cell in enumerate(cells))
        ranks.append([entry for entry in entries if entry])
    actions = [action for entries in ranks for action in parts(entries)]
    if not actions:
        raise ValueError("from_csv: no action in this text; a line per rank, cells like 0F0 between commas")
    stages, microbatches = (1 + max(action[i] for action in actions) for i in (1, 2))
    return check(Schedule(name, ranks, stages, microbatches))


def entry_of(written: str, where: str) -> Entry | None:
    """What a cell says; None for a message, for weights that come and go, and for a step of waiting."""
    require_text(written=written)
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
    rule = "cells are stage, kind, microbatch like 0F0, 2SEND_F1 or (2F0;3B1)OVERLAP_F_B"
    raise ValueError(f"from_csv: {where} is {written!r}; {rule}")
