"""Sharded checkpoints on a page: each rank writes what it has, whole or not at all, and any layout reads it.

    folder/step-00000012/rank-3.pt        pieces: name -> (where it begins, values), of this rank
                        /manifest.json    written last, by rank 0, with the checksum of every file

A piece is a rectangle of a named tensor: (start of each dim, values). A reader asks for rectangles of its own
and takes what overlaps from the files that have it: tp = 4 reads what dp = 2 wrote. A file gets its name when
it is whole (written beside, flushed, renamed), and a step counts once its manifest is there: whoever dies
before leaves the last step as it was. Each rank writes its bytes; only checksums are sent. Wan et al. 2024,
ByteCheckpoint, arXiv:2407.20143, section 3. General: saver, snapshot (while training goes on), load, store.
"""

import hashlib
import io
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def write(path: Path, data: bytes) -> None:
    """All of it under that name, or nothing, whenever the power fails."""
    with open(beside := path.with_suffix(".part"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    os.fsync(folder := os.open(path.parent, os.O_RDONLY))  # the name is in the folder, which has to reach
    os.close(folder)  # the disk, too


def save(folder: Path, step: int, pieces: dict[str, tuple[tuple, Tensor]], group: dist.ProcessGroup) -> None:
    """`pieces`: what this rank has. `group`: all ranks; `folder`: the same for all of them."""
    place, name = folder / f"step-{step:08d}", f"rank-{group.rank()}.pt"
    place.mkdir(parents=True, exist_ok=True)
    (place / "manifest.json").unlink(missing_ok=True) if group.rank() == 0 else None  # of a step saved again
    dist.barrier(group)
    mine = {tensor: (start, values.detach().cpu().clone()) for tensor, (start, values) in pieces.items()}
    torch.save(mine, buffer := io.BytesIO())
    write(place / name, buffer.getvalue())
    table = {tensor: (start, list(values.shape)) for tensor, (start, values) in mine.items()}
    told = name, {"sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), "pieces": table}
    dist.all_gather_object(everyone := [None] * group.size(), told, group=group)
    if group.rank() == 0:
        write(place / "manifest.json", json.dumps(dict(everyone)).encode())
    dist.barrier(group)


def newest(folder: Path) -> Path | None:
    """The last step that is whole."""
    return max((manifest.parent for manifest in folder.glob("step-*/manifest.json")), default=None)


def overlap(start: tuple, shape, other_start: tuple, other_shape) -> list | None:
    """What two rectangles have in common, as slices of the first and of the second."""
    low = [max(pair) for pair in zip(start, other_start)]
    high = [min(a + m, b + n) for a, m, b, n in zip(start, shape, other_start, other_shape)]
    both = [tuple(slice(i - at, j - at) for i, j, at in zip(low, high, of)) for of in (start, other_start)]
    return both if all(i < j for i, j in zip(low, high)) else None


@torch.no_grad()
def load(step: Path, into: dict[str, tuple[tuple, Tensor]]) -> None:
    """Fills this rank's rectangles. ValueError where a file is damaged or something is in none."""
    left = {one: torch.ones(values.shape, dtype=torch.bool) for one, (_, values) in into.items()}
    for name, told in json.loads((step / "manifest.json").read_text()).items():
        common = into.keys() & told["pieces"].keys()
        wanted = {one: overlap(into[one][0], into[one][1].shape, *told["pieces"][one]) for one in common}
        if any(wanted.values()):
            if hashlib.sha256(data := (step / name).read_bytes()).hexdigest() != told["sha256"]:
                raise ValueError(f"{step / name} is damaged")
            found = torch.load(io.BytesIO(data))
            for one, (here, there) in ((one, both) for one, both in wanted.items() if both):
                into[one][1][here] = found[one][1][there].to(into[one][1].device)
                left[one][here] = False
    if missing := [one for one, mask in left.items() if mask.any()]:
        raise ValueError(f"{step} has not all of {missing}")
