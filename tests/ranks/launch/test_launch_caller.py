"""The caller's side of a launch, piece by piece: what it takes in and decides, and the words of its reports."""

import io
import json
import os
import pickle
import signal
import sys
import types

import pytest
import torch
import torch.distributed as dist

from minitrain import launch
from minitrain.ranks.launch import local, pickled, report, start

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# ---- the caller ------------------------------------------------------------------------------------------


class Heard(local.Launch):
    """A launch of which a test plays the ranks and the helper."""

    def __init__(self, count=3, grace_s=None, echo=True):
        self.ranks, self.echo, self.cells, self.grace_s = count, echo, {}, grace_s
        self.states, self.pids, self.exits = dict.fromkeys(range(count), "start"), {}, {}
        self.shown, self.reaped, self.unread, self.files = {}, False, b"", {}
        self.helper = types.SimpleNamespace(heavy=set(), process=types.SimpleNamespace(poll=lambda: None))
        self.helper.last_words = lambda: "no memory left"
        self.events, self.said = os.pipe()

    def read(self, rank, kind, start=0):
        return self.files.get((rank, kind), b"")[start:]

    def calls(self, rank):
        return []


def test_events_are_taken_in_line_by_line_wherever_they_are_cut():
    one = Heard()
    for part in (
        b"0 pid 77\n1 pid 7",
        b"8\n2 there\n0 re",
        b"ady torch._dynamo sympy\n1 exit -9\n",
        b"- reaped\n",
    ):
        os.write(one.said, part)
        one.listen(0)
    assert one.pids == {0: 77, 1: 78} and one.exits == {1: -9} and one.reaped and one.unread == b""
    assert one.states == {0: "ready", 1: "start", 2: "there"} and one.helper.heavy == {
        "torch._dynamo",
        "sympy",
    }
    one.listen(0)  # nothing is said, and the helper lives
    assert one.failed() == [1] and one.busy() == [0, 2]
    one.states |= {0: "error", 2: "done"}
    assert one.failed() == [0, 1] and one.busy() == []


LOST = {"type": "RuntimeError", "message": "Connection closed by peer", "frames": [], "traceback": ""}
MINE = {"type": "ValueError", "message": "bad batch", "frames": [], "traceback": ""}


@pytest.mark.parametrize(
    "errors, exits, grace_s, patience_s",
    [
        ([MINE], {}, None, local.GRACE_S),
        ([LOST], {}, None, local.LOST_GRACE_S),
        ([LOST, LOST], {}, None, local.LOST_GRACE_S),
        ([LOST, MINE], {}, None, local.GRACE_S),
        ([LOST], {2: -9}, None, local.GRACE_S),
        ([], {2: -9}, None, local.GRACE_S),
        ([LOST], {}, 7.0, 7.0),
        ([MINE], {}, 0.01, 0.01),
    ],
)
def test_who_heard_of_lost_connections_alone_is_waited_for_longer(errors, exits, grace_s, patience_s):
    one = Heard(grace_s=grace_s)
    one.exits = exits
    for rank, error in enumerate(errors):
        one.states[rank], one.files[rank, "error"] = "error", json.dumps(error).encode()
    assert one.patience_s() == patience_s


@pytest.mark.parametrize("grace_s", [None, 9.0])
def test_who_has_raised_is_killed_once_where_others_shall_hear_of_it(grace_s, monkeypatch):
    one, killed = Heard(grace_s=grace_s), []
    one.states, one.pids, one.exits = {0: "error", 1: "ready", 2: "ready"}, {0: 70, 1: 71, 2: 72}, {2: -9}
    one.files[0, "error"] = json.dumps(MINE).encode()
    monkeypatch.setattr(local.os, "kill", lambda pid, number: killed.append((pid, number)))
    news = iter([None, None, "done"])

    def listen(seconds):
        if now := next(news):
            one.states[1] = now

    one.listen = listen
    one.let_others_end()
    assert (
        killed == ([(70, signal.SIGKILL)] if grace_s else [])
        and next(news, "all were heard") == "all were heard"
    )


def test_lines_are_shown_when_they_are_complete_and_the_rest_at_the_end():
    one, out = Heard(), io.StringIO()
    one.files[1, "stdout"] = b"one\ntw"
    one.show(1, "stdout", out)
    assert out.getvalue() == "[rank 1] one\n"
    one.files[1, "stdout"] = b"one\ntwo\n\nfour"
    one.show(1, "stdout", out)
    assert out.getvalue() == "[rank 1] one\n[rank 1] two\n[rank 1] \n"
    for _ in range(2):
        one.show(1, "stdout", out, ended=True)
    assert out.getvalue().endswith("[rank 1] \n[rank 1] four\n") and out.getvalue().count("four") == 1
    silent = io.StringIO()
    one.show(0, "stdout", silent, ended=True)
    one.echo = False
    one.show(1, "stderr", silent, ended=True)
    assert silent.getvalue() == ""


# ---- words -----------------------------------------------------------------------------------------------

LIBRARY = (report.LIBRARIES[0] + "torch/nn/functional.py", 9, "linear")
OURS = (report.PACKAGE + "model/training/step.py", 8, "train_step")
PLUMBING = (report.PACKAGE + "ranks/launch/ranks.py", 7, "live")
COLLECTIVE = (report.PACKAGE + "ranks/collectives/ring.py", 6, "all_reduce")
CELL = ("/tmp/ipykernel_1/2.py", 5, "train")
FROZEN = ("<frozen importlib._bootstrap>", 4, "_find")


def test_torch_is_a_library_wherever_it_is_installed():
    """An environment with the system's packages has it in a folder that is not its own."""
    assert all(file.startswith(report.LIBRARIES) for file in (torch.__file__, dist.__file__, json.__file__))
    assert not __file__.startswith(report.LIBRARIES) and all(
        folder.endswith(os.sep) for folder in report.LIBRARIES
    )
    in_torch = dist.distributed_c10d.__file__, 1427, "get_rank"
    assert report.place([in_torch, ("train.py", 3, "f"), PLUMBING], {}) == "train.py:3"


@pytest.mark.parametrize(
    "frames, place",
    [
        ([LIBRARY, OURS, ("/home/me/train.py", 3, "f"), ("/home/me/main.py", 2, "g")], "train.py:3"),
        ([COLLECTIVE, LIBRARY, CELL, PLUMBING], "cell:5"),
        ([FROZEN, COLLECTIVE, LIBRARY, OURS, PLUMBING], "step.py:8"),
        ([COLLECTIVE, LIBRARY, FROZEN, PLUMBING], "functional.py:9"),
        ([COLLECTIVE, PLUMBING], ""),
        ([], ""),
    ],
)
def test_the_line_to_look_at_is_the_readers_else_ours_else_a_librarys(frames, place):
    assert report.place(frames, {CELL[0]: "Cell In[6]"}) == place


def test_a_record_has_the_innermost_frame_first_and_not_our_own():
    def inner():
        raise ValueError("two\n  lines ")

    def live():
        inner()

    try:
        live()
    except ValueError as error:
        told = report.record(error)
        line = inner.__code__.co_firstlineno
    assert [frame.function for frame in told["frames"]] == ["inner", "live"], "what called fn is left out"
    assert told["frames"][0] == (__file__, line + 1, "inner")
    assert (told["type"], told["message"]) == ("ValueError", "two lines")
    assert told["traceback"].endswith("ValueError: two\n  lines \n") and "in live" in told["traceback"]
    assert json.loads(json.dumps(told))["message"] == "two lines"


def test_a_long_text_keeps_its_first_and_its_last_part():
    assert report.shortened("abcdefghijklmno", 10) == "abcde ... (5 letters left out) ... klmno"
    assert report.shortened("abcdefghij", 10) == "abcdefghij"
    assert len(report.message_of(ValueError("x" * 5000))) < 1050
    assert report.message_of(ValueError(" a \n\n b")) == "a  b"


@pytest.mark.parametrize(
    "record, said",
    [
        (MINE, "raised ValueError: bad batch (a.py:1, b.py:2)"),
        (MINE | {"message": ""}, "raised ValueError (a.py:1, b.py:2)"),
        (
            MINE | {"type": "SystemExit", "message": "3"},
            "called sys.exit(3) (a.py:1, b.py:2); return from fn instead",
        ),
        (
            LOST,
            "raised RuntimeError: Connection closed by peer (a.py:1, b.py:2); another process of the group is gone",
        ),
        (MINE | {"type": None, "message": "died"}, "died"),
    ],
)
def test_what_happened_in_words(record, said):
    assert report.sentence(record, ["a.py:1", "b.py:2"]) == said


@pytest.mark.parametrize(
    "number, said",
    [
        (11, "crashed in native code (SIGSEGV)"),
        (15, "died of SIGTERM (a signal"),
        (40, "died of signal 40 ("),
    ],
)
def test_a_crash_and_a_signal_that_somebody_sent_are_told_apart(number, said):
    assert report.crash_record(-number, "", [], {})["message"].startswith(said)


@pytest.mark.parametrize(
    "text", ["Connection refused", "Connection reset by peer", "Connection closed by peer"]
)
def test_a_crash_is_named_before_all_connections_that_it_cost(text):
    lost = {"type": "RuntimeError", "message": text, "frames": [], "traceback": ""}
    crashed = {"type": None, "message": "was killed (SIGKILL)", "frames": [], "traceback": ""}
    other = {"type": "ValueError", "frames": [], "traceback": ""}
    records = {rank: lost for rank in range(3)} | {3: crashed}
    assert report.failure(records, {}).ranks == (3,) and "rank 3 was killed" in str(
        report.failure(records, {})
    )
    records = {rank: {**other, "message": f"text {rank}"} for rank in range(5)} | {5: crashed}
    error = report.failure(records, {})  # six different errors, of which three are told
    assert str(error).startswith("rank 5 was killed") and str(error).endswith("; and 3 more")


def test_equal_errors_are_one_sentence_with_all_their_places():
    at = lambda rank: {"frames": [[f"file{rank % 2}.py", 3, "f"]], "traceback": f"of rank {rank}"}
    error = report.failure({rank: MINE | at(rank) for rank in (5, 2, 3)}, {}, {2: " \n", 5: "not told"})
    assert str(error) == "ranks 2, 3, 5 raised ValueError: bad batch (file0.py:3, file1.py:3)"
    assert error.ranks == (2, 3, 5) and error.traceback == "Rank 2: of rank 2"
    assert error._render_traceback_() == [f"RankError: {error}", "\nRank 2: of rank 2"]
    assert str(report.failure({1: LOST, 2: MINE}, {})) == "rank 2 raised ValueError: bad batch", (
        "what was lost is no cause"
    )


@pytest.mark.parametrize("text, members", [("1-3", [1, 2, 3]), ("0,2,5", [0, 2, 5]), ("7", [7])])
def test_members_as_the_log_writes_them(text, members):
    assert sorted(report.ranks_of(text)) == members
    for all_of_them in ("", "0,2,...", "1-", "a"):
        assert 10**6 in report.ranks_of(all_of_them)


def test_stacks_of_a_hang_that_are_equal_are_told_once():
    dump = lambda line: (
        f'Thread 0x1:\n  File "train.py", line {line} in step\n  File "{report.PACKAGE}ranks/launch/job.py", line 9 in run\n'
    )
    stands = {rank: report.Stuck(f"stand{{s}} at train.py:{5 if rank else 6}", False) for rank in range(3)}
    error = report.hang(0.5, stands, {0: dump(6), 1: dump(5), 2: dump(5)}, {})
    assert str(error) == (
        "not finished after 0.5 s: rank 0 stands at train.py:6; ranks 1, 2 stand at train.py:5; "
        "if this is only slow, raise timeout_s"
    )
    stack = 'innermost line first:\n  File "train.py", line {}, in step'
    assert error.traceback == f"Rank 0, {stack.format(6)}\nRanks 1, 2, {stack.format(5)}" and error.ranks == (
        0,
        1,
        2,
    )


def test_of_all_threads_the_one_that_runs_fn_is_told():
    frames = lambda name, own: f'  File "{name}.py", line 5 in f\n' + own
    fn = f'  File "{report.PACKAGE}ranks/launch/ranks.py", line 9 in live\n  File "forks.py", line 1 in start\n'
    dump = f"Thread 0x1 (most recent call first):\n{frames('other', '')}\nCurrent thread 0x2:\n{frames('mine', fn)}"
    assert report.stack_frames(dump) == [("mine.py", 5, "f")] and report.stack_frames("") == []
    assert report.stack_text("", {}) == ""


# ---- start -----------------------------------------------------------------------------------------------


def test_times_are_limited_and_what_is_callable_is_a_function(monkeypatch):
    monkeypatch.setattr(local, "run_local", lambda call, ranks, *rest: (pickle.loads(call), rest))
    call, rest = launch.run(dict, [(1, 2)], timeout_s=float("inf"), start_timeout_s=7, echo=False, grace_s=3)
    assert call == (dict, ([(1, 2)],)) and rest == (start.LONGEST_S, 7, True, False, 3)
    monkeypatch.setenv("MINITRAIN_INSIDE", "1")
    with pytest.raises(ValueError, match="^run was called inside a rank"):
        launch.run(dict)


def test_modules_of_one_file_travel_by_value_and_parts_of_packages_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "single_file.py").write_text("def f(): return 1")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("")
    (tmp_path / "a_package" / "part.py").write_text("def f(): return 1")
    import a_package.part
    import single_file

    monkeypatch.setitem(sys.modules, "another_name", single_file)
    found = pickled.single_files()
    assert single_file in found and found.count(single_file) == 1
    assert not {a_package, a_package.part, json, torch, sys.modules["__main__"]} & {*found}
