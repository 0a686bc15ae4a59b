"""Copies of what a rank saves: every number, in memory allocated once, in an order that both sides can wait for."""

import threading
import weakref

import psutil
import pytest
import torch

from minitrain.checkpoint import snapshot as snapshots
from minitrain.checkpoint.snapshot import GivenUp, Snapshot, parameter_of
from minitrain.ranks.events import Copy, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.pieces import Piece, whole_piece
from tests.checkpoint.saver_runs import DEADLOCK_S, Hold, some_pieces


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of 64 bytes, handed on by twos."""
    monkeypatch.setattr(snapshots, "RUN_BLOCKS", 2)
    monkeypatch.setattr(snapshots, "BLOCK_BYTES", 64)


class Threads:
    """Runs functions beside the test; leaving it, all have ended."""

    def __enter__(self):
        self.started = []
        return self

    def start(self, fn):
        thread = threading.Thread(target=fn, daemon=True)
        self.started.append(thread)
        thread.start()
        return thread

    def __exit__(self, *_):
        for thread in self.started:
            thread.join(DEADLOCK_S)
            assert not thread.is_alive()


def taken(snapshot, pieces):
    return {p.name: b"".join(block.tobytes() for block in snapshot.blocks_of(p)) for p in pieces}


def bytes_of(values):
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@pytest.mark.parametrize("chunk_bytes, slots", [(None, None), (64, None), (200, None), (200, 2), (130, 1)])
def test_every_number_is_copied_whatever_its_kind_and_place(chunk_bytes, slots):
    torch.manual_seed(0)
    made = []
    for n, dtype in enumerate(DTYPES):
        cube = (10 * torch.randn(5, 6, 7)).to(dtype)
        made += [cube, cube[1:4, :, 2:5], cube.permute(2, 0, 1), cube[0, 0, 0], cube.view(-1)[3:12]]
    pieces = [Piece(f"parameters/p{n}", tuple(x.shape), (0,) * x.dim(), x, ()) for n, x in enumerate(made)]
    snapshot = Snapshot("cpu", chunk_bytes, slots)
    for _ in range(2):  # the second finds the memory there
        snapshot.begin(pieces)
        with Threads() as threads:
            threads.start(snapshot.copy)
            found = taken(snapshot, pieces)
            snapshot.wait()
        assert found == {p.name: bytes_of(p.values) for p in pieces}
        assert snapshot.bytes == sum(p.values.numel() * p.values.element_size() for p in pieces)
    if slots:
        assert snapshot.memory.nbytes <= slots * (chunk_bytes + 8)  # numbers begin at multiples of 8 bytes
    if chunk_bytes is None:
        assert snapshot.slots == 1 and snapshot.memory.nbytes < snapshot.bytes + 8 * len(snapshot.blocks)


def test_blocks_are_of_one_piece_each_and_chunks_of_whole_blocks():
    """A piece of 20 numbers: 64, 64 and 32 bytes; what does not fit into a chunk of 200 begins the next."""
    snapshot = Snapshot("cpu", chunk_bytes=200)
    snapshot.begin(some_pieces(20, 3, 8))
    rows = [(b.first, b.last, b.bytes, b.chunk, b.offset) for b in snapshot.blocks]
    assert rows == [
        (0, 8, 64, 0, 0), (8, 16, 64, 0, 64), (16, 20, 32, 0, 128), (0, 3, 24, 0, 160), (0, 8, 64, 1, 0),
    ]  # fmt: skip
    assert [p.shape for p in snapshot.pieces] == [(20,), (3,), (8,)]
    assert all(p.values.untyped_storage().nbytes() == 8 for p in snapshot.pieces)  # no copy of theirs


def test_memory_is_allocated_once():
    """By address, and in the host's account: the share of this rank, of its own kind."""
    pieces, snapshot = some_pieces(20, 3), Snapshot("cpu")
    addresses, births = set(), set()
    with Ledger() as ledger:
        for step in range(4):
            snapshot.begin(pieces if step != 2 else pieces[:1])  # less needs no other memory
            snapshot.copy()
            snapshot.wait()
            addresses.add(snapshot.memory.data_ptr())
            assert ledger.host_bytes == 184 and ledger.host_by_kind["checkpoint"] == 184
            births.add(ledger._memory.births)
        assert ledger.peak_bytes == ledger.host_peak_bytes == 184  # the device has the pieces alone
        snapshot.begin(some_pieces(20, 30))
        assert ledger.host_peak_bytes == 400  # the old memory has gone before the new one comes
    assert len(addresses) == len(births) == 1
    copies = [event for event in ledger.events if isinstance(event, (Copy, Wait))]
    assert copies[:4] == [Copy(0, "to_host", 184), Wait(0), Copy(1, "to_host", 184), Wait(1)]


def test_what_is_copied_is_not_kept_alive():
    pieces, snapshot = some_pieces(20), Snapshot("cpu")
    alive = weakref.ref(pieces[0].values)
    snapshot.begin(pieces)
    del pieces
    assert alive() is not None
    snapshot.copy()
    assert snapshot._values == [] and alive() is None


def test_what_is_copied_goes_while_others_are_copied():
    pieces, snapshot = some_pieces(8, 8), Snapshot("cpu")
    hold, alive = Hold(snapshot, allowed=1), [weakref.ref(piece.values) for piece in pieces]
    snapshot.begin(pieces)
    del pieces
    with Threads() as threads:
        threads.start(snapshot.copy)
        snapshot.wait(["p0"])
        found = [values() is not None for values in alive]
        hold.allow()
    assert found == [False, True]


def test_training_waits_for_what_it_asks_for_alone():
    pieces, snapshot = some_pieces(8, 8, 8), Snapshot("cpu")
    hold, passed = Hold(snapshot), threading.Event()
    snapshot.begin(pieces)
    assert [snapshot.until(names) for names in ([], ["p0"], ["p2", "p1"], ["else"], None)] == [0, 1, 3, 0, 3]
    assert snapshot.missing_bytes() == 192 and snapshot.missing_bytes(["p1"]) == 128
    with Threads() as threads:
        threads.start(snapshot.copy)
        snapshot.wait(["else"])
        hold.allow(2)
        snapshot.wait(["p1"])
        assert snapshot.missing_bytes(["p1"]) == 0 and snapshot.missing_bytes() == 64 and not snapshot.over
        waiting = threads.start(lambda: (snapshot.wait(), passed.set()))
        assert not passed.is_set()
        hold.allow(3)
        waiting.join(DEADLOCK_S)
        assert passed.is_set() and snapshot.over


def test_a_chunk_is_handed_on_while_the_next_is_copied():
    pieces, snapshot = some_pieces(8, 8, 8), Snapshot("cpu", chunk_bytes=64)
    hold = Hold(snapshot, allowed=1)
    snapshot.begin(pieces)
    with Threads() as threads:
        threads.start(snapshot.copy)
        first = next(snapshot.blocks_of(pieces[0])).tobytes()  # the second is held
        assert snapshot.copied == 1
        hold.allow()
    assert first == bytes_of(pieces[0].values)


def test_a_slot_is_filled_again_only_when_it_is_written():
    """Three chunks, two slots: the third waits until the first is taken, and overwrites it."""
    pieces, snapshot = some_pieces(8, 8, 8), Snapshot("cpu", chunk_bytes=64, slots=2)
    full, real = threading.Event(), snapshot._wait_for

    def until(condition):
        if not condition() and snapshot.copied == 2:
            full.set()
        real(condition)

    snapshot.begin(pieces)
    with Threads() as threads:
        snapshot._wait_for = until
        threads.start(snapshot.copy)
        assert full.wait(DEADLOCK_S)  # the copy wants a third slot
        blocks = snapshot.blocks_of(pieces[0])
        first = next(blocks)
        assert first.tobytes() == bytes_of(pieces[0].values) and snapshot.copied == 2
        assert next(blocks, None) is None  # written
        snapshot.wait()
        assert first.tobytes() == bytes_of(pieces[2].values)  # the third lies where the first did
        assert list(taken(snapshot, pieces[1:])) == ["parameters/p1", "parameters/p2"]
    assert snapshot.memory.nbytes == 128


def test_an_error_of_the_copy_reaches_both_sides():
    pieces, snapshot = some_pieces(8, 8), Snapshot("cpu", chunk_bytes=64)

    def fails(*args):
        raise RuntimeError("the device is gone")

    snapshot.begin(pieces)
    snapshot.move = fails
    with Threads() as threads:
        threads.start(snapshot.copy)
        snapshot.wait()
        with pytest.raises(RuntimeError, match="the device is gone"):
            next(snapshot.blocks_of(pieces[0]))
    snapshot.move = snapshots.move
    snapshot.begin(pieces)  # and is forgotten
    snapshot.copy()
    assert snapshot.error is None and len(taken(snapshot, pieces)) == 2


def test_giving_up_ends_everybodys_wait():
    pieces, snapshot, errors = some_pieces(8, 8, 8), Snapshot("cpu", chunk_bytes=64, slots=1), []

    def writer():
        try:
            list(snapshot.blocks_of(pieces[1]))
        except GivenUp as error:
            errors.append(error)

    snapshot.begin(pieces)
    with Threads() as threads:
        for fn in (snapshot.copy, writer, snapshot.wait):  # the copy waits for its one slot
            threads.start(fn)
        with snapshot.changed:
            assert snapshot.changed.wait_for(lambda: snapshot.copied == 1, DEADLOCK_S)
        snapshot.give_up()
    assert snapshot.over and len(errors) == 1


def test_too_little_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 100}))
    said = "^a snapshot needs 1.6e-07 GB of host memory, and 1e-07 GB are left;"
    with pytest.raises(MemoryError, match=said):
        Snapshot("cpu").begin(some_pieces(20))
    Snapshot("cpu", 64, 1).begin(some_pieces(20))


def test_names_say_whose_state_it_is():
    names = ("parameters/layers.0.w", "optimizer/layers.0.w/exp_avg", "amax/layers.1.x", "alone")
    pieces = [whole_piece(name, torch.zeros(1)) for name in names]
    assert [parameter_of(p) for p in pieces] == ["layers.0.w", "layers.0.w", "layers.1.x", "alone"]


@pytest.mark.cuda(alone=True)
def test_on_a_gpu_copies_run_on_a_stream_of_their_own():
    values = torch.randn(3000, 1000, device="cuda")
    pieces = [whole_piece("parameters/a", values)]
    snapshot = Snapshot("cuda", chunk_bytes=1 << 20, slots=4)
    snapshot.begin(pieces)
    with Threads() as threads:
        threads.start(snapshot.copy)
        found = taken(snapshot, pieces)
    assert found["parameters/a"] == bytes_of(values.cpu()) and snapshot.memory.is_pinned()


def test_what_is_handed_to_a_writer_is_not_written_yet():
    """Its slot is free when the next is asked for. And an update waits for all pieces of its parameter."""
    w, moment, other = (torch.ones(24).double() * n for n in (1, 2, 3))  # 3 blocks each
    names = ("parameters/w", "optimizer/w/exp_avg", "parameters/x")
    pieces = [whole_piece(name, x) for name, x in zip(names, (w, moment, other))]
    snapshot = Snapshot("cpu")
    snapshot.begin(pieces)
    assert [snapshot.until(names) for names in (["w"], ["x"], ["w", "x"], ["y"], None)] == [6, 9, 9, 0, 9]
    snapshot.copy()
    blocks, seen = snapshot.blocks_of(pieces[0]), []
    for _ in blocks:
        seen.append(snapshot.written)
    assert seen == [0, 2] and snapshot.written == 3
