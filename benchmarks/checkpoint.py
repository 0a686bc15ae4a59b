"""Checkpoints against torch's own (DCP, torch.distributed.checkpoint) on 4 ranks, and safetensors in one
process: same state, same disk, in turns, each save into a new folder, fsync on both sides.

The state is a Transformer's with AdamW's moments in float32, cut by rows over the ranks, as ZeRO-3 has it.
DCP gets it as DTensors and syncs its files; it syncs no folder and verifies nothing. Ours syncs files and
folders and verifies every byte that it loads. What was saved is removed between the turns. Loads come from
the page cache on both sides. A stall is what the training loop waits for in an asynchronous save: until the
call returns, and, after a pause for forward and backward, until the update may begin. "The disk alone" writes
as many bytes in one process, 8 MiB a call, and calls fdatasync.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measure import Row, in_turns, row, slowest_then_median, stock_group
from minitrain import launch
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import File, bytes_of, write_file
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.ranks.pieces import Piece, whole_piece

RANKS, LAYERS = 4, 8
WIDTHS = {"200 MB": 416, "1 GB": 928}  # 8 layers of 12 · width² parameters, 12 bytes each
PAUSE_S = 0.5


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    found = {}
    for layer in range(LAYERS):
        matrices = dict(
            qkv=(3 * width, width), out=(width, width), up=(4 * width, width), down=(width, 4 * width)
        )
        found |= {f"layers.{layer}.{name}": shape for name, shape in matrices.items()}
        found |= {f"layers.{layer}.norm{number}": (width,) for number in (1, 2)}
    kinds = ("parameters/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")
    return {kind.format(name): shape for kind in kinds for name, shape in found.items()}


def local_state(width: int) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """{name: (whole shape, this rank's rows)}."""
    rank, state = dist.get_rank(), {}
    for number, (name, (rows, *rest)) in enumerate(shapes(width).items()):
        draw = torch.Generator().manual_seed(number * RANKS + rank)
        state[name] = ((rows, *rest), torch.randn(rows // RANKS, *rest, generator=draw))
    return state


def pieces_of(state: dict[str, tuple[tuple[int, ...], Tensor]]) -> list[Piece]:
    rank = dist.get_rank()
    return [
        Piece(name, whole, (rank * len(x), *(0 for _ in whole[1:])), x) for name, (whole, x) in state.items()
    ]


def dtensors(
    state: dict[str, tuple[tuple[int, ...], Tensor]], group: dist.ProcessGroup
) -> dict[str, DTensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    return {name: DTensor.from_local(x, mesh, [Shard(0)]) for name, (_, x) in state.items()}


class Sides:
    """Ours and theirs on this rank: the same tensors, folders of their own, a new one per save."""

    def __init__(self, folder: str, width: int, way: str = "sync"):
        torch.set_num_threads(1)
        self.folder, self.group, self.step, self.turn = Path(folder), stock_group(), 0, 0
        self.state = local_state(width)
        self.pieces, self.theirs = pieces_of(self.state), dtensors(self.state, self.group)
        self.store = Store(self.folder / "ours", keep=1000)
        self.saver = Saver(self.store, policy=way)

    def our_save(self) -> None:
        self.step += 1
        self.saver.save(self.step, self.pieces, {}, {})

    def our_load(self) -> None:
        _, files = self.store.open(1)
        saved = Saved(files)
        for piece in self.pieces:
            saved.fill(piece)

    def their_writer(self) -> tuple[Path, dcp.FileSystemWriter]:
        self.turn += 1
        path = self.folder / f"theirs-{self.turn}"
        return path, dcp.FileSystemWriter(path, sync_files=True)

    def their_save(self) -> None:
        dcp.save(self.theirs, storage_writer=self.their_writer()[1], process_group=self.group)

    def their_load(self) -> None:
        dcp.load(
            self.theirs,
            storage_reader=dcp.FileSystemReader(self.folder / "theirs-1"),
            process_group=self.group,
        )

    def tidy(self, first: int = 2) -> None:
        """Remove what was saved, but for the first of each side; then all begin together."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in [*self.folder.glob("theirs-*"), *self.folder.glob("ours/step-*")]:
                if int(path.name.split("-")[1]) >= first:
                    shutil.rmtree(path)
            os.sync()
        dist.barrier()


def save_turns(folder: str, width: int, rounds: int) -> tuple[list[float], list[float]]:
    sides = Sides(folder, width)
    times = in_turns(sides.our_save, sides.their_save, rounds, 1, sides.tidy)
    sides.tidy()
    return times


def load_turns(folder: str, width: int, rounds: int) -> tuple[list[float], list[float]]:
    """What `save_turns` has left; both sides must have brought back what was there."""
    sides = Sides(folder, width)
    was = {name: x.clone() for name, (_, x) in sides.state.items()}
    for load in (sides.our_load, sides.their_load):
        for _, x in sides.state.values():
            x.zero_()
        load()
        assert all(torch.equal(x, was[name]) for name, (_, x) in sides.state.items())
    return in_turns(sides.our_load, sides.their_load, rounds, 1, dist.barrier)


def stall_turns(folder: str, width: int, rounds: int) -> tuple[list[float], list[float]]:
    """Only what the loop waited for: the pause is taken off."""
    sides = Sides(folder, width, way="asynchronous")
    staged, ends = ([], []), []

    def beside_training(save: Callable[[], Callable[[], object]], which: int) -> None:
        started = time.perf_counter()
        before_update = save()
        pause = time.perf_counter()
        while time.perf_counter() - pause < PAUSE_S:
            time.sleep(0.01)
        paused = time.perf_counter()
        before_update()
        staged[which].append(time.perf_counter() - started - (paused - pause))

    def our_save() -> Callable[[], object]:
        sides.our_save()
        ends.append(sides.saver.finish)
        return sides.saver.before_update

    def their_save() -> Callable[[], object]:
        writer = sides.their_writer()[1]
        ends.append(dcp.async_save(sides.theirs, storage_writer=writer, process_group=sides.group).result)
        return lambda: None  # async_save has copied all when it returns

    def meet() -> None:
        while ends:
            ends.pop()()
        sides.tidy()

    ours, theirs = (
        partial(beside_training, save, which) for which, save in enumerate((our_save, their_save))
    )
    in_turns(ours, theirs, rounds, 1, meet)
    meet()
    sides.saver.finish()
    return staged[0][1:], staged[1][1:]  # the first was to warm up


def disk_turns(folder: str, width: int, rounds: int) -> tuple[list[float], list[float]]:
    sides = Sides(folder, width)
    path, size = sides.folder / "raw", sum(x.nbytes for _, x in sides.state.values()) * RANKS
    block = memoryview(os.urandom(8 << 20))

    def the_disk_alone() -> None:
        if dist.get_rank() == 0:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for at in range(0, size, len(block)):
                os.pwrite(file, block[: size - at], at)
            os.fdatasync(file)
            os.close(file)
        dist.barrier()

    times = in_turns(sides.our_save, the_disk_alone, rounds, 1, partial(sides.tidy, 0))
    sides.tidy(0)
    return times


def bytes_of_folders(folder: Path) -> tuple[int, int]:
    sides = (folder / "ours" / "step-00000001", folder / "theirs-1")
    return tuple(sum(path.stat().st_size for path in side.iterdir()) for side in sides)


def alone(folder: Path, width: int, rounds: int) -> tuple[float, float]:
    """One process: save, sync, and load into the tensors of a model."""
    state = {name: torch.randn(*shape) for name, shape in shapes(width).items()}
    pieces = [whole_piece(name, x) for name, x in state.items()]

    def ours() -> None:
        path = folder / "ours.safetensors"
        file = File(path, write_file(Disk(), path, pieces, {}))
        for entry in file.entries:
            file.read(entry, 0, entry.size, bytes_of(state[entry.name]))

    def theirs() -> None:
        path = folder / "theirs.safetensors"
        safetensors.torch.save_file(state, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        for name, x in safetensors.torch.load_file(path).items():
            state[name].copy_(x)

    def tidy() -> None:
        for path in folder.glob("*.safetensors"):
            path.unlink()

    torch.set_num_threads(1)
    return tuple(map(statistics.median, in_turns(ours, theirs, rounds, 1, tidy)))


def rows(rounds: int = 7) -> list[Row]:
    table = []
    run = partial(launch.run, ranks=RANKS, timeout_s=900, checked=False)
    for size, width in WIDTHS.items():
        with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
            for what, turns, peer, goal in (
                ("save", save_turns, "torch DCP, sync_files", 0.8),
                ("load, all verified", load_turns, "torch DCP, nothing verified", 1.0),
            ):
                ours, theirs = slowest_then_median(run(turns, folder, width, rounds))
                table.append(row(f"checkpoint of {size}, {what}", peer, ours, theirs, "s", goal))
            ours, theirs = bytes_of_folders(Path(folder))
            table.append(
                row(f"checkpoint of {size}, on the disk", "torch DCP", ours / 1e6, theirs / 1e6, "MB", 1.0)
            )
        with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
            ours, theirs = slowest_then_median(run(stall_turns, folder, width, rounds))
            name = f"checkpoint of {size}, stall of an asynchronous save"
            table.append(row(name, "torch DCP async_save", ours, theirs, "s", 0.5))
        with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
            ours, theirs = slowest_then_median(run(disk_turns, folder, width, rounds))
            table.append(row(f"checkpoint of {size}, save", "the disk alone", ours, theirs, "s", 1 / 0.75))
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        ours, theirs = alone(Path(folder), WIDTHS["200 MB"], rounds)
        name = "200 MB saved and loaded, verified, one process"
        table.append(row(name, "safetensors and fsync", ours, theirs, "s", 1.1))
    return table
