"""What ranks say to each other around a checkpoint, in bytes of the tensors that they hand over."""

from types import SimpleNamespace

import torch

from minitrain import collectives, launch
from minitrain.checkpoint.format import File, bytes_of, write_file
from minitrain.checkpoint.load import Saved, agree
from minitrain.ranks.events import Issue
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.pieces import Piece, whole_piece
from minitrain.systems.checkpoint.frequency import Frequency
from minitrain.systems.checkpoint.in_memory import ParityCopies, Shares
from minitrain.systems.checkpoint.just_in_time import JustInTime
from tests.checkpoint.saver_runs import run_of, train
from tests.saving import Quick


def said(work) -> list[tuple[str, int]]:
    with Ledger() as ledger:
        work()
    return [(event.op, event.payload_bytes) for event in ledger.events if isinstance(event, Issue)]


def on_a_rank(folder):
    group, found = collectives.world(), {}
    rank, ranks = group.rank(), group.size()
    piece = whole_piece("parameters/w", torch.arange(100.0), (group,))

    jit = JustInTime(folder, group)
    for step in range(2):
        found["just in time", step] = said(lambda: jit.boundary(step, [piece], {}, {}))

    found["agree"] = said(lambda: agree(lambda: None, group))
    if rank == 0:
        write_file(Quick(), folder / "file", [piece], {})
    collectives.barrier(group)
    header = write_file(Quick(), folder / f"copy{rank}", [piece], {})
    saved = Saved([File(folder / "file", header)], broadcast=True)
    room = Piece("parameters/w", (100,), (0,), torch.zeros(100), (group,))
    found["one reader"] = said(lambda: saved.fill(room))
    assert torch.equal(room.values, piece.values)

    shares = Shares(folder / f"machine{rank}", group)
    written = []
    found["a share"] = said(lambda: written.extend(shares.begin(1, [piece], {})))
    found["its commit"] = said(lambda: shares.commit(1, written, [], {"of": "a test"}))
    return found, ranks


def test_what_is_said_once_and_what_in_each_step(tmp_path):
    """A hash of the place, then nothing; 8 bytes to agree; each byte of a piece from its reader; some 100 for a share."""
    for ranks in (2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for found, n in launch.run(on_a_rank, folder, ranks=ranks):
            assert n == ranks
            (length, eight), (gather, places) = found["just in time", 0]
            assert (length, eight, gather) == ("all_reduce", 8, "all_gather") and places == ranks * (16 + 2)
            assert found["just in time", 1] == [] and found["agree"] == [("all_reduce", 8)]
            assert found["one reader"] == [("broadcast", 400)]
            (_, none), (_, eight), (gather, shares) = found["a share"]
            assert (none, eight, gather) == (0, 8, "all_gather") and 50 < shares / ranks < 150
            assert found["its commit"] == []


def parity_on_a_rank(folder):
    """Bytes at the peak of an exchange, the share of three stripes included."""
    group = collectives.world()
    copies = ParityCopies(Shares(folder / f"machine{group.rank()}", group))
    piece = whole_piece("parameters/w", torch.arange(90_000.0))
    with Ledger() as ledger:
        list(copies._meet(bytes_of(piece.values), 120_000, lost=None))
    return ledger.peak_bytes


def test_parity_takes_three_stripes(tmp_path):
    """Beside the share: the sum, the one that leaves and the one that has come."""
    assert launch.run(parity_on_a_rank, tmp_path, ranks=4) == [360_000 + 3 * 120_000] * 4


def measuring():
    run = run_of(dp=2)
    told = SimpleNamespace(waits=[], last=None, update_s=0.0, device="cpu", group=collectives.world())
    frequency, found = Frequency(told, lambda *times: 2, window=2), []
    for step in range(6):
        train(run, step)
        found.append(said(frequency.due))
        told.last = SimpleNamespace(copy_s=1.0, write_s=1.0)
    return found


def test_times_of_a_window_are_32_bytes_in_an_all_reduce(tmp_path):
    for found in launch.run(measuring, ranks=2):
        assert found == [[], [("all_reduce", 32)]] * 3
