"""What the chapter on checkpoints breaks saves with does what it says."""

import pytest

from minitrain import launch
from minitrain.checkpoint.disk import Disk, new_file
from minitrain.ranks.launch.report import RankError
from minitrain.systems.simulate import crashes
from minitrain.systems.simulate.crash_model import Model, Recorder, read_tree


def write(folder, disk, text=b"new" * 400):
    with new_file(disk, folder / "a") as file:
        disk.write(file, 0, text)


def kept(folder):
    content = (folder / "a").read_bytes()
    return {b"old" * 400: "old", b"new" * 400: "new"}.get(content)


def test_every_call_is_a_death_and_a_write_has_written_half(tmp_path):
    def prepare():
        write(tmp_path, Disk(), b"old" * 400)
        return tmp_path

    found = crashes.kills(prepare, write, kept)
    assert found == [("create a", None), ("write a", None), ("sync a", "new"), ("done", "new")]
    with pytest.raises(crashes.Died):
        write(prepare(), crashes.Mortal(2, by_signal=False))
    assert (tmp_path / "a").read_bytes() == (b"new" * 400)[:600]


def test_a_signal_kills_the_process(tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        launch.run(lambda: write(tmp_path, crashes.Mortal(2)), ranks=1)
    assert (tmp_path / "a").stat().st_size == 600


def test_power_cuts_tell_lost_from_garbage_and_rolled_back(tmp_path):
    write(tmp_path, Disk(), b"old" * 400)
    before, disk = read_tree(tmp_path), Recorder(tmp_path)
    write(tmp_path, disk)

    def look(tree):
        content = tree.get("a")
        return {b"old" * 400: "old", b"new" * 400: "new", b"": None}.get(content, "mixed")

    found = crashes.power_cuts(before, disk.log, look, "old", "new")
    assert found["nothing loads"] and found["wrong values"] and not found["rolled back"]
    unsynced = [one for one in disk.log if one[0] != "sync"]
    assert crashes.power_cuts(before, unsynced, look, "old", "new")["rolled back"] == 1


def test_flips_change_one_bit_and_put_it_back(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert crashes.flips(path, lambda: path.read_bytes()) == {b"`bc": 1, b"a`c": 1, b"abg": 1}
    assert path.read_bytes() == b"abc"
    assert len(crashes.flips(path, lambda: path.read_bytes(), every_bit=True, first=1, last=2)) == 8


def test_what_a_power_cut_may_leave_of_a_file_is_listed_by_hand():
    model = Model({"a": b"xy"})
    assert model.states() == [{"a": b"xy"}]
    model.do(("create", "a", 1))
    assert {tree["a"] for tree in model.states()} == {b"xy", b"", b"\0\0"}, "cut, or only its length is there"
    model.do(("write", 1, 0, b"ab"))
    assert {tree["a"] for tree in model.states()} == {b"xy", b"", b"\0\0", b"ab"}
    model.do(("sync", 1))
    assert model.states() == [{"a": b"ab"}]
    model.do(("write", 1, 2, b"z" * 600))
    now = b"ab" + b"z" * 600
    first, second = {now[:512], b"ab" + bytes(510), bytes(512)}, {now[512:], bytes(90)}
    wanted = {(one + two)[:length] for one in first for two in second for length in (0, 2, 512, 602)}
    assert {tree["a"] for tree in model.states()} == wanted, "sectors on their own, lengths at their borders"


def test_what_a_power_cut_may_leave_of_names_is_listed_by_hand():
    model = Model({"a": b"1", "c": b"2"})
    model.do(("rename", "c", "0"))
    model.do(("remove", "a"))
    states = model.states()
    # one change, or not the other
    assert sorted(map(tuple, states)) == [("0",), ("0", "a"), ("a", "c"), ("c",)]
    assert all(list(tree) == sorted(tree) for tree in states) and {"0": b"2"} in states
    model.do(("sync_folder", "."))
    assert model.states() == [{"0": b"2"}]
