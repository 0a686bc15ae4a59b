"""A hot and a cold folder: who is where, restored from either, and nothing lost wherever a move stops."""

import os
import threading
import tracemalloc

import pytest
import torch

from minitrain import launch
from minitrain.checkpoint.disk import Disk
from minitrain.checkpoint.format import Damaged, write_file
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import NotSaved, Saver
from minitrain.checkpoint.store import Store, copy_step
from minitrain.ranks.pieces import Piece
from minitrain.systems.checkpoint.storage_tiers import Tiers
from minitrain.systems.simulate.crash_model import Watched
from tests.checkpoint.saver_runs import some_pieces
from tests.saving import spoil


class Stopped(Exception):
    """The process is gone."""


class StoppingDisk(Watched):
    """Fails, for good, after call number `last`; removing a folder takes two, so half of it may be left."""

    def __init__(self, last=10**9, error=Stopped):
        super().__init__()
        self.calls, self.last, self.error = 0, last, error

    def call(self):
        self.calls += 1
        if self.calls > self.last:
            raise self.error(5, "Input/output error")

    def on(self, what, path, call, *args):
        self.call()
        if what == "remove" and path.is_dir():
            for file in sorted(path.iterdir())[:1]:
                file.unlink()
            self.call()
        return call(*args)


def save(tiers, step):
    """As a Saver of one rank does."""
    folder = tiers.begin(step)
    written = write_file(tiers.disk, folder / "rank-00000.safetensors", some_pieces(4, 9, value=step), {})
    tiers.commit(step, [written], {"of": step})


def check(tiers, step):
    """It is there, every byte."""
    tiers.verify(step)
    manifest, files = tiers.open(step)
    saved = Saved(files)
    for piece in some_pieces(4, 9, value=step):
        got = Piece(piece.name, piece.whole, piece.start, torch.zeros_like(piece.values))
        saved.fill(got)
        assert torch.equal(got.values, piece.values)
    assert manifest["of"] == step and manifest["step"] == step


def test_a_move_takes_4_mib_whatever_moves(tmp_path):
    """Bytes that Python and numpy have allocated at most, of a checkpoint of 12 MiB."""
    hot, cold = Store(tmp_path / "hot"), Store(tmp_path / "cold")
    path = hot.begin(1) / "rank-00000.safetensors"
    hot.commit(1, [write_file(Disk(), path, some_pieces(12 << 17), {})], {})
    copy_step(1, hot, cold)  # what is imported, once
    hot.unlock(), cold.unlock()
    tracemalloc.start()
    copy_step(1, hot, Store(tmp_path / "colder"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 << 20 <= peak < 5 << 20


def tiers_on_ranks(folder):
    tiers, counts, trained = Tiers(f"{folder}/hot", f"{folder}/cold", keep=2), [], threading.Event()
    move, tiers.move = tiers.move, lambda: (trained.wait(), move())
    with Saver(tiers, policy="snapshot") as saver:
        for step in range(1, 6):
            saver.save(step, some_pieces(4, 9, value=step), {}, {"of": step})
            waited_for = saver.waits[-1].why
            saver.finish()  # a move has not begun; training goes on, and only then
            counts.append((waited_for, len(Store(f"{folder}/hot").steps())))
            trained.set()
            tiers.settle()
            trained.clear()
    return counts


def test_internevo_ckpt(tmp_path):
    """Hot holds two at most, cold all older ones, each is restored. Training waits for the copy alone."""
    (counts,) = launch.run(tiers_on_ranks, str(tmp_path), ranks=1)
    assert counts == [("copy", held) for held in (1, 2, 3, 3, 3)], "moved before training went on"
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    assert Store(hot).steps() == [4, 5] and Store(cold).steps() == [1, 2, 3]
    tiers = Tiers(hot, cold)
    assert tiers.steps() == [1, 2, 3, 4, 5]
    for step in tiers.steps():
        check(tiers, step)
        assert tiers.path(step).parent == (hot if step > 3 else cold) and tiers.manifest(step)["of"] == step
    with pytest.raises(ValueError, match="cold/step-00000002 is there already"):
        tiers.begin(2)
    tiers.unlock()


def test_what_is_damaged_in_hot_comes_from_cold(tmp_path):
    """Both have step 1: the move stopped before it was removed."""
    disk = StoppingDisk()
    tiers = Tiers(tmp_path / "hot", tmp_path / "cold", keep=1, disk=disk)
    tiers.move = lambda: None
    save(tiers, 1)
    save(tiers, 2)
    tiers.settle()
    copy_step(1, tiers, tiers.cold)
    name = tmp_path / "hot" / "step-00000001" / "rank-00000.safetensors"
    assert name.exists() and tiers.cold.steps() == [1]
    os.truncate(name, 20)
    manifest, files = tiers.open(1)
    assert files[0].path.parent.parent == tmp_path / "cold"
    os.truncate(tmp_path / "hot" / "step-00000002" / "rank-00000.safetensors", 20)
    with pytest.raises(Damaged, match="hot/step-00000002"):
        tiers.open(2)
    tiers.unlock()


def test_a_move_may_stop_anywhere_and_nothing_is_lost(tmp_path):
    """After every call to the disk but the last; another process goes on from there."""
    folder = tmp_path / "whole"
    disk = StoppingDisk()
    tiers = Tiers(folder / "hot", folder / "cold", keep=1, disk=disk)
    tiers.move = lambda: None
    for step in (1, 2, 3):
        save(tiers, step)
    before = disk.calls
    Tiers.move(tiers)
    calls = disk.calls - before
    tiers.unlock()
    assert calls > 20
    for last in range(calls):
        folder = tmp_path / str(last)
        disk = StoppingDisk()
        tiers = Tiers(folder / "hot", folder / "cold", keep=1, disk=disk)
        tiers.move = lambda: None
        for step in (1, 2, 3):
            save(tiers, step)
        disk.calls, disk.last = 0, last
        with pytest.raises(Stopped):
            Tiers.move(tiers)
        disk.last = 10**9
        tiers.unlock()
        again = Tiers(folder / "hot", folder / "cold", keep=1)
        assert again.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            check(again, step)
        save(again, 4)
        again.settle()
        assert again.hot_steps() == [4] and again.cold.steps() == [1, 2, 3]
        assert sorted(path.name for path in (folder / "hot").iterdir()) == ["lock", "step-00000004"]
        for step in (1, 2, 3, 4):
            check(again, step)
        again.unlock()


def two_in_hot(folder):
    tiers = Tiers(folder / "hot", folder / "cold", keep=1)
    move, tiers.move = tiers.move, lambda: None
    save(tiers, 1)
    save(tiers, 2)
    tiers.settle()
    return tiers, move


def test_a_damaged_copy_is_made_again(tmp_path):
    tiers, move = two_in_hot(tmp_path)
    before = Store(tmp_path / "cold")  # of a process that has ended
    copy_step(1, tiers, before)
    before.unlock()
    copy = tmp_path / "cold" / "step-00000001" / "rank-00000.safetensors"
    spoil(copy)
    move()
    assert tiers.hot_steps() == [2]
    check(tiers, 1)
    tiers.unlock()


def test_what_is_damaged_does_not_leave_hot(tmp_path):
    """The copy is verified before the original is removed."""
    tiers, move = two_in_hot(tmp_path)
    original = tmp_path / "hot" / "step-00000001" / "rank-00000.safetensors"
    spoil(original)
    with pytest.raises(Damaged, match="is damaged"):
        move()
    assert original.exists() and tiers.hot_steps() == [1, 2]
    tiers.unlock()


def full_cold(folder):
    """The cold disk is full during one move."""
    tiers = Tiers(f"{folder}/hot", f"{folder}/cold", keep=1)
    disk = tiers.cold.disk = StoppingDisk(error=OSError)
    said = []
    with Saver(tiers, policy="sync") as saver:
        for step in (1, 2, 3, 4, 5):
            disk.last = 0 if step == 2 else 10**9
            try:
                saver.save(step, some_pieces(4, 9, value=step), {}, {"of": step})
                said.append("")
            except NotSaved as error:
                said.append(str(error))
            if tiers._moving:
                tiers._moving.exception()
    return said, tiers.hot_steps(), tiers.cold.steps()


def test_a_full_cold_disk_is_told_once_and_costs_no_older_checkpoint(tmp_path):
    ((said, hot, cold),) = launch.run(full_cold, str(tmp_path), ranks=1)
    assert [bool(error) for error in said] == [False, False, True, False, False]
    assert "cannot save step 3: rank 0: " in said[2] and "Input/output error" in said[2]
    assert (hot, cold) == ([5], [1, 2, 4])


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is both the hot and the cold folder; use two$"):
        Tiers(tmp_path / "a", tmp_path / "b" / ".." / "a")
