"""Parts of a launch one by one, most of them without any rank: what the caller takes in and decides, what the helper
kills and reaps, what a rank sets up, how a rank of a job agrees with the others, and the words of a report."""

import datetime
import errno
import io
import json
import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.launch import forks, helper, job, local, ranks, report, start, wire

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

    def read(self, rank, kind, start=0, size=-1):
        content = self.files.get((rank, kind), b"")[start:]
        return content if size < 0 else content[:size]

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


@pytest.mark.parametrize(
    "how", ["its end of the pipe is closed", "it is dead, and a copy of its end is open"]
)
def test_a_helper_that_is_gone_is_told_with_its_last_words(how):
    one = Heard()
    if "closed" in how:
        os.close(one.said)
    else:
        one.helper.process.poll = lambda: -9
    with pytest.raises(
        launch.RankError, match="^the helper process that forks ranks is gone .*; run again to start"
    ) as error:
        one.listen(0)
    assert error.value.ranks == () and error.value.traceback == "no memory left"


@pytest.mark.parametrize(
    "number, cure", [(errno.EAGAIN, r" \(see ulimit -u, or a limit of the container\)"), (errno.ENOMEM, "")]
)
def test_a_rank_that_cannot_be_forked_is_named(number, cure):
    one = Heard()
    os.write(one.said, f"2 unborn {number}\n".encode())
    said = f"^rank 2 of 3 cannot be started: {os.strerror(number)}{cure}; use fewer ranks, or end other programs$"
    with pytest.raises(launch.RankError, match=said) as error:
        one.listen(0)
    assert error.value.ranks == (2,)


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


def test_a_launch_waits_until_all_are_there_and_fails_with_the_first_that_fails():
    one = Heard(2)
    for state in (b"0 ready\n1 there\n", b"1 ready\n0 done\n"):
        os.write(one.said, state)
        assert one.wait_until({"ready", "done"}, 0.2) is (b"1 ready" in state)
    assert one.wait_until({"done"}, 0.0) is False
    one.files[1, "error"] = json.dumps(MINE).encode()
    os.write(one.said, b"1 error\n")
    with pytest.raises(launch.RankError, match="^rank 1 raised ValueError: bad batch$"):
        one.wait_until({"done"}, 100)


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


def test_of_many_prints_the_first_are_shown_and_the_limit_is_said(monkeypatch):
    monkeypatch.setattr(local, "ECHO_BYTES", 10)
    one, out = Heard(), io.StringIO()
    one.files[0, "stdout"], one.files[1, "stdout"] = b"x" * 10, b"y" * 11
    for rank in (0, 1):
        one.show(rank, "stdout", out, ended=True)
    assert (
        out.getvalue()
        == f"[rank 0] {'x' * 10}\n[rank 1] {'y' * 10}\n[rank 1] ... (only the first 10 bytes are shown)\n"
    )


def test_a_crash_is_told_with_the_stack_and_what_native_code_wrote():
    one = Heard()
    one.states[0], one.exits = "error", {2: -signal.SIGSEGV}
    one.files[0, "error"] = json.dumps(LOST).encode()
    frames = f'  File "train.py", line 5 in step\n  File "{report.PACKAGE}launch/ranks.py", line 9 in live\n'
    one.files[2, "stack"], one.files[2, "noise"] = f"Current thread 0x1:\n{frames}".encode(), b"it says\n"
    error = one.failure()
    assert str(error) == "rank 2 crashed in native code (SIGSEGV) at train.py:5" and error.ranks == (2,)
    assert error.traceback == (
        'Rank 2: innermost line first:\n  File "train.py", line 5, in step\nstderr of rank 2:\nit says'
    )


def test_a_result_that_cannot_be_rebuilt_names_its_rank(tmp_path):
    one = Heard(2)
    one.directory = tmp_path
    (tmp_path / "0.result").write_bytes(pickle.dumps("zero"))
    (tmp_path / "1.result").write_bytes(pickle.dumps("one")[:-3])
    with pytest.raises(
        launch.RankError, match="^the result of rank 1 cannot be rebuilt here: .*Error"
    ) as error:
        one.results()
    assert error.value.ranks == (1,)
    (tmp_path / "1.result").write_bytes(pickle.dumps("one"))
    assert one.results() == ["zero", "one"]


def test_what_a_rank_left_is_read_from_where_one_wants(tmp_path):
    one = Heard()
    one.directory = tmp_path
    (tmp_path / "1.stdout").write_bytes(b"0123456789\xff")
    read = local.Launch.read
    assert read(one, 1, "stdout", 3, 4) == b"3456" and read(one, 1, "stdout", 8) == b"89\xff"
    assert read(one, 0, "stdout") == b"" and read(one, 1, "stdout", 99, 5) == b""
    one.read = lambda *given: read(one, *given)
    assert one.text(1, "stdout") == "0123456789\ufffd" and local.Launch.calls(one, 1) == []


def test_in_a_hang_those_that_are_not_done_are_asked_where_they_are(monkeypatch):
    one, asked = Heard(), []
    one.states, one.pids = {0: "done", 1: "ready", 2: "ready"}, {0: 70, 1: 71, 2: 72}

    def kill(pid, number):
        asked.append((pid, number))
        if pid == 72:
            raise ProcessLookupError
        frames = (
            f'  File "train.py", line 5 in step\n  File "{report.PACKAGE}launch/ranks.py", line 9 in live\n'
        )
        one.files[1, "stack"] = one.files[2, "stack"] = f"Current thread 0x1:\n{frames}".encode()

    monkeypatch.setattr(local.os, "kill", kill)
    error = one.hang(3)
    assert asked == [(71, signal.SIGUSR1), (72, signal.SIGUSR1)]
    assert str(error) == (
        "not finished after 3 s: ranks 1, 2 stand at train.py:5, in no collective; rank 0 returned from fn; "
        "if this is only slow, raise timeout_s"
    )
    assert error.ranks == (1, 2)
    assert error.traceback == 'Ranks 1, 2, innermost line first:\n  File "train.py", line 5, in step'


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_is_stopped_however_it_ends_and_ranks_are_more_patient_than_it(fails, monkeypatch):
    done = []

    class Played(local.Launch):
        def __init__(self, *given):
            done.append(given)

        def start(self, call, settings):
            done.append((call, settings))

        def wait(self, *given):
            done.append(given)
            if fails:
                raise launch.RankError("rank 1")

        def results(self):
            return ["a result"]

        def stop(self):
            done.append("stopped")

    monkeypatch.setattr(local, "Launch", Played)
    given = (b"call", 2, 30, 7, True, False, 4.0)
    if fails:
        with pytest.raises(launch.RankError):
            local.run_local(*given)
    else:
        assert local.run_local(*given) == ["a result"]
    assert done == [(2, False, 4.0), (b"call", {"checked": True, "patience_s": 97}), (30, 7), "stopped"]


# ---- the helper ------------------------------------------------------------------------------------------


def in_a_rank(fn, *args):
    """fn's result in a process that has no threads, where one may fork."""
    return launch.run(fn, *args, ranks=1, echo=False, timeout_s=20)[0]


def a_group(order="", events=None):
    there, here = socket.socketpair()
    there.sendall(f"{order}\n".encode())
    read, write = os.pipe() if events is None else events
    return there, read, forks.RankGroup(write, here.detach())


def sleeping(*, group=True, child=False) -> int:
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        if group:
            os.setpgid(0, 0)
        if child and os.fork() == 0:
            os.setsid()
        os.write(told, b"x")
        while True:
            signal.pause()
    for _ in range(1 + child):
        os.read(ready, 1)
    os.close(ready), os.close(told)
    return pid


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Who is killed takes a moment."""
    patience = time.monotonic() + 10
    while lives(pid) and time.monotonic() < patience:
        time.sleep(0.01)
    return not lives(pid)


def what_an_end_ends(folder):
    forks.ctypes.CDLL(None).prctl(forks.PR_SET_CHILD_SUBREAPER, 1)
    os.mkdir(f"{folder}/directory")
    there, said, group = a_group(f"{folder}/directory")
    first, late = sleeping(child=True), sleeping(group=False)
    left = sleeping()  # a child of a rank that has died: ours by now
    (grandchild,) = forks.children(first)
    known = forks.descendants(first), forks.descendants(late)
    deep = grandchild in forks.descendants(os.getpid()) and grandchild not in forks.children(os.getpid())
    group.pids = {first: 0, late: 1}
    group.end(alone=False)
    gone = (
        [ends(pid) for pid in (first, late, grandchild)],
        lives(left),
        os.path.exists(f"{folder}/directory"),
    )
    words = os.read(said, 100), group.ended, group.files()
    _, _, second = a_group(f"{folder}/directory")
    second.end(alone=True)
    return gone, words, (deep and known == ([grandchild], [])), lives(left), os.path.exists(f"/proc/{left}")


@LINUX_ONLY
def test_the_end_of_a_launch_ends_its_ranks_all_that_they_started_and_its_directory(tmp_path):
    gone, words, known, left, zombie = in_a_rank(what_an_end_ends, str(tmp_path))
    assert known, "children of children are found"
    assert gone == ([True] * 3, True, False), (
        "another launch may be under way: what else there is may be its own"
    )
    assert words == (b"- reaped\n", True, [])
    assert not left and not zombie, "nobody else launches: what is left goes too, and is reaped"


def what_is_reaped(folder):
    order = os.pipe()
    quick = os.fork()
    if quick == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:
            os.write(order[1], str(os.getpid()).encode())
            while True:
                signal.pause()
        os._exit(7)
    child, slow = int(os.read(order[0], 20)), sleeping()
    there, said, group = a_group(f"{folder}/none")  # now: ranks close what is not for them
    group.pids = {quick: 4, slow: 2}
    before = len(group.files())
    while quick in group.pids:
        group.reap()
    heard = os.read(said, 100)
    closed = os.read(group.gone, 1)  # nobody can write there any more
    os.kill(slow, signal.SIGKILL)
    while group.pids:
        group.reap()
    return before, heard, closed, os.read(said, 100), len(group.files()), ends(child)


@LINUX_ONLY
def test_the_end_of_a_rank_is_told_to_the_caller_and_to_the_others(tmp_path):
    before, heard, closed, second, after, child = in_a_rank(what_is_reaped, str(tmp_path))
    assert (heard, second) == (b"4 exit 7\n", b"2 exit -9\n"), "the rank, and what it ended with"
    assert closed == b"" and (before, after) == (3, 2) and child, "what it started ends with it"


def what_is_buried():
    mine, other = os.fork() or os._exit(0), os.fork() or os._exit(0)
    while {mine, other} - {pid for pid in forks.children(os.getpid()) if not lives(pid)}:
        time.sleep(0.01)
    forks.bury({mine})
    return forks.children(os.getpid()) == [mine]


@LINUX_ONLY
def test_what_ranks_left_is_buried_and_ranks_are_not():
    assert in_a_rank(what_is_buried)


def test_a_line_is_a_line_and_nothing_of_what_follows():
    there, _, group = a_group("first")
    there.sendall(b"second\nth")
    assert (group.directory, group.line()) == ("first", "second")
    there.close()
    assert group.line() == "", "a line that is cut is no order"


def test_an_order_starts_ranks_and_its_absence_ends_the_launch(monkeypatch):
    done = []
    monkeypatch.setattr(forks.RankGroup, "start", lambda self, order, closed: done.append((order, closed)))
    monkeypatch.setattr(forks.RankGroup, "end", lambda self, alone: done.append(alone))
    there, _, group = a_group("directory")
    other = a_group("another")[2]
    there.sendall(b'{"ranks": 2}\n')
    group.listen([5, 6], [group, other])
    order, closed = done.pop()
    assert order == {"ranks": 2} and closed == [5, 6, *other.files(), group.gone_writer]
    group.pids = {77: 0}
    group.listen([], [group, other])
    assert done.pop() is False, "something is heard though all was said: the caller is gone"
    group.listen([], [group])
    assert done == [True], "alone"


def test_who_is_gone_or_not_ours_is_not_killed_and_that_is_no_error():
    def raises(error):
        return lambda pid, number: (_ for _ in ()).throw(error)

    forks.kill(raises(ProcessLookupError()), 1)
    forks.kill(raises(PermissionError()), 1)
    seen = []
    forks.kill(lambda *given: seen.append(given), 8)
    assert seen == [(8, signal.SIGKILL)]


def test_a_helper_is_used_while_it_lives_is_ours_and_has_read_what_files_say(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("x = 1")
    one = object.__new__(helper.Helper)
    one.owner, one.process = os.getpid(), types.SimpleNamespace(poll=lambda: None)
    one.files = {str(file): helper.changed_at(str(file)), str(tmp_path / "gone.py"): 0}
    assert one.usable() and helper.changed_at(str(file)) == os.stat(file).st_mtime_ns
    os.utime(file, ns=(1, 1))
    assert not one.usable()
    one.files = {}
    assert one.usable()
    one.owner += 1
    assert not one.usable()
    one.owner, one.process.poll = os.getpid(), lambda: 0
    assert not one.usable()
    one.log = io.BytesIO(b"first\n" + b"x" * 4000 + b"\xfflast\n")
    assert (
        one.last_words().endswith("x\ufffdlast")
        and "first" not in one.last_words()
        and len(one.last_words()) < 4000
    )


def test_the_helper_has_one_thread_whatever_its_caller_has_and_the_rest_as_the_caller(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "of the caller")
    started = []

    def popen(command, **how):
        started.append((command, how))
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(helper.subprocess, "Popen", popen)
    said = "^the helper process that forks ranks cannot be started: .*ulimit -u.*; use fewer ranks, or end other programs$"
    with pytest.raises(launch.RankError, match=said):
        helper.Helper()
    ((command, how),) = started
    assert how["env"]["OMP_NUM_THREADS"] == how["env"]["MKL_NUM_THREADS"] == "1"
    assert how["env"]["GLIBC_TUNABLES"] == "of the caller" and how["start_new_session"] is True
    assert command[1] == "-P" and command[5] == str(os.getpid()) and how["pass_fds"] == [int(command[4])]
    assert command[6:-1] == sys.path and os.path.join(command[-1], "minitrain", "") == report.PACKAGE


@pytest.mark.parametrize("ours, late", [(True, False), (True, True), (False, False)])
def test_a_helper_ends_when_its_line_does_and_is_killed_if_it_is_late(ours, late):
    one, done = object.__new__(helper.Helper), []
    one.owner = os.getpid() + (not ours)
    one.requests = types.SimpleNamespace(close=lambda: done.append("line"))
    one.log = types.SimpleNamespace(close=lambda: done.append("log"))

    def wait(seconds=None):
        done.append(seconds)
        if late and seconds:
            raise subprocess.TimeoutExpired("helper", seconds)

    one.process = types.SimpleNamespace(wait=wait, kill=lambda: done.append("killed"))
    one.close()
    assert done == ["line", "log", *([2] if ours else []), *(["killed", None] if late else [])]


def test_another_helper_takes_the_place_of_one_that_is_of_no_use(monkeypatch):
    class Old:
        def __init__(self, launches, usable):
            self.launches, self.usable, self.closed = launches, lambda: usable, False

        def close(self):
            self.closed = True

    class New(helper.Helper):
        def __init__(self):
            pass

    for launches, usable, closed in ((set(), False, True), ({1}, False, False), (set(), True, False)):
        old = New.current = Old(launches, usable)
        found = New.find()
        assert (found is old) == usable and old.closed == closed and New.current is found


# ---- a rank ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, backend", [(0, "gloo"), (3, "gloo"), (4, "nccl"), (8, "nccl")])
def test_nccl_where_every_rank_of_this_machine_has_a_gpu(gpus, backend, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    device, joined = [], []
    monkeypatch.setattr(torch.cuda, "set_device", device.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: joined.append((given, more)))
    ranks.init_group("store", 6, 8, "the time")
    (((named,), more),) = joined
    assert named == backend and device == [torch.device("cuda", 2)] * (backend == "nccl")
    wanted = dict(store="store", rank=6, world_size=8, timeout="the time")
    assert more == wanted | ({"device_id": device[0]} if device else {})


@pytest.mark.parametrize(
    "gpus, local_rank, device", [(0, "3", "cpu"), (2, "3", "cuda:1"), (2, None, "cuda:0"), (4, "3", "cuda:3")]
)
def test_a_rank_has_a_gpu_of_its_own_or_shares_one(gpus, local_rank, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(launch.device()) == device


def test_nobody_listens_any_more_and_that_is_no_error():
    read, write = os.pipe()
    ranks.say(write, 3, "ready", "sympy")
    assert os.read(read, 99) == b"3 ready sympy\n"
    os.close(read)
    ranks.say(write, 3, "done")


def test_a_rank_is_what_its_caller_is_now(monkeypatch, tmp_path):
    """And writes where only its owner reads, keeps its caller's words, and quotes lines that no file holds."""
    monkeypatch.setenv("ONLY_NOW", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(linecache.cache, "<a cell>", (4, None, ["text\n"], "<a cell>"))
    helper.Helper.find()

    def look():
        out, err = os.fstat(1), sys.stderr
        modes = [oct(os.fstat(file).st_mode & 0o777) for file in (1, 2)]
        names = (
            "ONLY_NOW",
            "HOME",
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "MINITRAIN_INSIDE",
        )
        text = [(one.encoding, one.errors, one.line_buffering) for one in (sys.stdout, err)]
        return (
            [os.environ.get(name) for name in names], sys.argv, sys.path[-1], linecache.getline("<a cell>", 1), modes,
            text, out.st_ino != os.fstat(2).st_ino, os.get_blocking(1), os.getppid(), os.getpgrp() == os.getpid(),
            signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, [torch.get_num_threads(), dist.get_backend()],
            sorted(os.listdir(os.path.dirname(err.name)))[:3] if err.name else None, os.path.basename(err.name),
        )  # fmt: skip

    environ, argv, last, line, modes, text, apart, *_, parent, own, chld, numbers, _, name = in_a_rank(look)
    assert (
        environ == ["1", None, "1", "1", "1", "1"] and argv == ["program", "--flag"] and last == str(tmp_path)
    )
    assert line == "text\n" and modes == ["0o600"] * 2 and text == [("utf-8", "backslashreplace", True)] * 2
    assert apart and parent == helper.Helper.find().process.pid and own and chld and numbers == [1, "gloo"]
    assert name == "0.stderr"


# ---- a rank of a job -------------------------------------------------------------------------------------

HERE = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.fixture
def environ(monkeypatch):
    for name in (*job.VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job.Job, "current", None)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("missing", [*HERE, None])
def test_a_job_is_where_all_four_variables_are(environ, missing):
    environ(**{name: value for name, value in HERE.items() if name != missing})
    assert job.here() == (missing is None)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(RANK="2"),
        dict(RANK="3"),
        dict(RANK="-1"),
        dict(RANK="²"),
        dict(MASTER_PORT="http"),
        dict(WORLD_SIZE=""),
    ],
)
def test_variables_that_make_no_rank_are_left_over(environ, wrong, monkeypatch):
    environ(**HERE | wrong)
    (name, value) = next(iter(wrong.items()))
    said = f"{name}='{value}'.* are not a rank below a world size, a host and a port; outside a job unset RANK WORLD_SIZE"
    with pytest.raises(ValueError, match=said):
        job.here()
    monkeypatch.setattr(job.Job, "current", "joined")
    assert job.here(), "who has joined is there"


def test_an_agent_that_does_not_answer_is_from_another_job(environ):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environ(**HERE | dict(MASTER_PORT=str(closed.getsockname()[1])))
        assert job.here(), "only an agent listens before any rank is there"
        environ(TORCHELASTIC_USE_AGENT_STORE="True")
        with pytest.raises(
            ValueError,
            match="at 127.0.0.1:.* nobody answers .*: they are left over from another job; outside a job unset",
        ):
            job.here()
        closed.listen()
        assert job.here()


def a_job(rank=0, size=2, store=None):
    one = object.__new__(job.Job)
    one.launches, one.rank, one.size, one.store = 1, rank, size, store or dist.HashStore()
    return one


@pytest.mark.parametrize(
    "errors, blamed",
    [([None, None], None), ([None, MINE], (1,)), ([MINE, MINE], (0, 1)), ([LOST, MINE], (1,))],
)
def test_all_ranks_of_a_job_come_to_the_same_error(errors, blamed):
    store = dist.HashStore()
    for rank in (1, 0):
        store.set(f"launch-1/{rank}", json.dumps(errors[rank]))
    for rank in (0, 1):
        if blamed is None:
            a_job(rank, store=store).agree(errors[rank], 5)
            continue
        with pytest.raises(launch.RankError, match="raised ValueError: bad batch") as error:
            a_job(rank, store=store).agree(errors[rank], 5)
        assert error.value.ranks == blamed


@pytest.mark.parametrize(
    "error, patience_s, said",
    [(MINE, job.GRACE_S, "rank 1 raised ValueError"), (None, 40 + job.GRACE_S, "other ranks are late")],
)
def test_a_job_in_which_others_do_not_come_to_an_end_is_ended(error, patience_s, said):
    class Late:
        def set(self, key, value):
            self.told = key, json.loads(value)

        def wait(self, keys, patience):
            self.keys, self.patience = keys, patience
            raise dist.DistStoreError("late")

    class Ended(Exception):
        pass

    one, ended = a_job(rank=1, size=3, store=Late()), []
    one.end = lambda why: ended.append(why) or (_ for _ in ()).throw(Ended)
    with pytest.raises(Ended):
        one.agree(error, 40)
    assert said in str(ended[0]) and one.store.told == ("launch-1/1", error)
    assert one.store.keys == [f"launch-1/{rank}" for rank in range(3)]
    assert one.store.patience == datetime.timedelta(seconds=patience_s)
    assert isinstance(ended[0], launch.LaunchTimeout) == (error is None)


def test_a_launch_in_a_job_gives_all_results_and_keeps_its_own(monkeypatch):
    monkeypatch.delenv("MINITRAIN_INSIDE", raising=False)
    one, done, seen = a_job(rank=1, size=3), [], {}
    one.launches, one.talk = 4, "the group"
    one.agree = lambda error, timeout_s: done.append((error and error["message"], timeout_s))
    monkeypatch.setattr(collectives, "set_checked", lambda checked: seen.update(checked=checked))
    monkeypatch.setattr(
        collectives, "settle", lambda: seen.update(settled=os.environ.get("MINITRAIN_INSIDE"))
    )
    monkeypatch.setattr(ranks, "seed_all", lambda: seen.update(seeded=True))

    def gather(everyone, mine, group):
        assert group == "the group"
        everyone[:] = [pickle.dumps("zero"), mine, pickle.dumps("two")]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    own = ["of rank", 1]
    results = one.run(lambda x: x, (own,), 30, True)
    assert results == ["zero", own, "two"] and results[1] is own, "what fn returned here, not a copy"
    assert seen == dict(checked=True, settled="1", seeded=True) and one.launches == 5 and done == [(None, 30)]
    assert "MINITRAIN_INSIDE" not in os.environ

    def agree(error, timeout_s):
        raise launch.RankError(error["message"])

    one.agree = agree
    with pytest.raises(launch.RankError, match="^7$"):
        one.run(sys.exit, (7,), 30, False)
    assert "MINITRAIN_INSIDE" not in os.environ and seen["checked"] is False


def test_a_rank_that_ends_its_job_says_why_after_all_that_it_has_printed(monkeypatch):
    said = []

    class Stream(io.StringIO):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def flush(self):
            said.append((self.name, self.getvalue()))

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(name))
    monkeypatch.setattr(job.os, "_exit", lambda code: said.append(code))
    sys.stdout.write("a print")
    a_job().end(launch.LaunchTimeout("others are late", (1,), "line 5"))
    assert said == [("stdout", "a print"), ("stderr", "LaunchTimeout: others are late\n\nline 5\n"), 1]


def test_rank_0_alone_says_that_a_job_has_another_number_of_ranks(monkeypatch, capsys):
    for rank, asked, told in ((0, 4, True), (0, 2, False), (1, 4, False)):
        monkeypatch.setattr(job.Job, "current", a_job(rank))
        assert job.Job.find(asked, 9) is job.Job.current
        said = "this job has 2 ranks: running on all of them instead of ranks=4\n"
        assert capsys.readouterr().out == (said if told else "")


def test_an_alarm_says_where_its_process_is_and_ends_it(monkeypatch, capsys):
    ended, rung = [], threading.Event()
    monkeypatch.setattr(job, "GRACE_S", 0.01)
    monkeypatch.setattr(job.os, "_exit", lambda code: ended.append(code) or rung.set())
    monkeypatch.setattr(collectives, "read_log", lambda log: [])
    monkeypatch.setattr(
        report, "stuck", lambda dump, calls, cells: report.Stuck("stand{s} at train.py:5", "in rung" in dump)
    )
    one = a_job(rank=3)
    one.log = "the log"
    with job.Alarm(one, 1000, "this rank has not finished"):
        pass
    assert not ended and threading.active_count() <= 4, "an alarm that is not needed is over"
    with job.Alarm(one, 0.02, "this rank has not finished"):
        assert rung.wait(30)
    assert ended == [1]
    assert (
        capsys.readouterr().err
        == "LaunchTimeout: this rank has not finished after 0.02 s: rank 3 stands at train.py:5\n"
    )


def test_plain_pickle_suffices_in_a_job_and_else_a_result_travels_by_value():
    assert pickle.loads(job.portable(Heard)) is Heard
    assert pickle.loads(job.portable(lambda: 8))() == 8
    with pytest.raises(
        TypeError, match="fn returned a generator, which cannot be sent back .*; return tensors"
    ):
        job.portable(i for i in ())


# ---- start -----------------------------------------------------------------------------------------------


def test_a_warning_points_at_the_callers_line(monkeypatch):
    monkeypatch.setattr(local, "run_local", lambda call, ranks, *rest: rest)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        launch.run(dist.get_rank, ranks=65)
        assert launch.run(dist.get_rank, ranks=64, timeout_s=float("inf"), start_timeout_s=7, echo=False, grace_s=3) == (
            start.LONGEST_S, 7, True, False, 3
        )  # fmt: skip
    (warning,) = heard
    assert warning.filename == __file__ and str(warning.message).startswith(
        "65 ranks on 1 cores will mostly wait"
    )


def test_a_function_without_a_signature_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(local, "run_local", lambda call, ranks, *rest: pickle.loads(call))
    assert launch.run(dict, [(1, 2)]) == (dict, ([(1, 2)],))
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
    found = start.single_files()
    assert single_file in found and found.count(single_file) == 1
    assert not {a_package, a_package.part, json, torch, sys.modules["__main__"]} & {*found}


# ---- the kernel's count ----------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_what_is_measured_is_said_in_a_command_and_read_from_its_output(private, monkeypatch):
    commands = []

    def run(command, **more):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, "12\n345\n", "Traceback\n\nlast line\n" * noisy)

    monkeypatch.setattr(wire, "has_private_network", lambda: private)
    monkeypatch.setattr(wire.subprocess, "run", run)
    code, noisy = 0, True
    assert wire.bytes_on_the_wire(int, float, ranks=3) == [12, 345]
    command = commands[0]
    assert command[: len(wire.PRIVATE)] == [*wire.PRIVATE] if private else command[0] == sys.executable
    assert command[-5:-2] == ["minitrain.launch.wire", "private" if private else "shared", "3"]
    code = 1
    with pytest.raises(RuntimeError, match="^the measurement failed: last line$"):
        wire.bytes_on_the_wire(int)
    noisy = False
    with pytest.raises(RuntimeError, match="^the measurement failed: without a word$"):
        wire.bytes_on_the_wire(int)


@pytest.mark.parametrize("network, runs", [("private", 1), ("shared", 5)])
def test_of_a_shared_network_the_least_of_some_runs_is_told(network, runs, monkeypatch, capsys):
    counts, brought_up, asked = iter([9, 7, 8, 6, 9, 5, 5, 5, 5, 5]), [], []
    monkeypatch.setattr(wire, "bring_up_loopback", lambda: brought_up.append(1))

    def run(fn, *args, **given):
        asked.append((fn, args, given))
        return [next(counts), 0, 0]

    monkeypatch.setattr(launch, "run", run)
    call = wire.base64.b64encode(start.pickled_call(int, ())).decode()
    wire.main(network, "3", call, call)
    assert capsys.readouterr().out.split() == (["9", "7"] if network == "private" else ["6", "5"])
    assert len(asked) == 2 * runs and len(brought_up) == (network == "private")
    assert asked[0] == (wire.between_readings, (int,), dict(ranks=3, checked=False, echo=False))


def test_between_two_readings_the_second_call_is_counted(monkeypatch):
    done = []
    monkeypatch.setattr(collectives, "world", lambda: "world")
    monkeypatch.setattr(collectives, "barrier", lambda group: done.append("barrier"))
    monkeypatch.setattr(wire, "loopback_bytes", lambda: done.append("reading") or 100 * len(done))
    assert wire.between_readings(lambda: done.append("fn")) == 400
    assert done == ["fn", "barrier", "reading", "barrier", "fn", "barrier", "reading"]


@pytest.mark.parametrize("name", ["lo", "lo0"])
def test_a_byte_of_the_loopback_is_counted_once(name, monkeypatch):
    count = types.SimpleNamespace(bytes_sent=7, bytes_recv=9)
    monkeypatch.setattr(wire.psutil, "net_io_counters", lambda pernic, nowrap: {"eth0": None, name: count})
    assert wire.loopback_bytes() == 7


# ---- words -----------------------------------------------------------------------------------------------

LIBRARY = (report.LIBRARIES[0] + "torch/nn/functional.py", 9, "linear")
OURS = (report.PACKAGE + "training/step.py", 8, "train_step")
PLUMBING = (report.PACKAGE + "launch/ranks.py", 7, "live")
COLLECTIVE = (report.PACKAGE + "collectives/ring.py", 6, "all_reduce")
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
    assert report.shortened("x" * 3000, 10, "|") == "xxxxx|... (2,990 letters left out) ...|xxxxx"
    assert report.shortened("abcdefghij", 10) == "abcdefghij"
    assert len(report.one_line("x" * 5000)) < 1050 and report.one_line(" a \n\n b") == "a  b"


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
        (
            MINE | {"message": "Unable to find address for: host"},
            "raised ValueError: Unable to find address for: host (a.py:1, b.py:2); the loopback has no address: "
            "bring it up (ip link set lo up)",
        ),
        (
            MINE | {"message": "can't start new thread"},
            "raised ValueError: can't start new thread (a.py:1, b.py:2); no more processes: see ulimit -u",
        ),
        (MINE | {"type": None, "message": "died"}, "died"),
    ],
)
def test_what_happened_in_words(record, said):
    assert report.sentence(record, ["a.py:1", "b.py:2"]) == said


@pytest.mark.parametrize(
    "code, said",
    [
        (3, "ended the process with status 3 (os._exit?) before fn returned; return from fn instead"),
        (
            -signal.SIGKILL,
            "died of SIGKILL (kill -9, or the system ran out of memory: try fewer ranks, smaller tensors)",
        ),
        (-signal.SIGABRT, "aborted in native code (SIGABRT) at train.py:5; its last words are below"),
        (-signal.SIGFPE, "crashed in native code (SIGFPE) at train.py:5"),
        (-signal.SIGXFSZ, "died of SIGXFSZ at train.py:5 (a limit of this shell: ulimit -f)"),
        (
            -signal.SIGTERM,
            "died of SIGTERM at train.py:5 (a signal that somebody sent, or a timer of its own)",
        ),
    ],
)
def test_how_a_rank_ended_in_words(code, said):
    frames = f'  File "train.py", line 5 in step\n  File "{report.PACKAGE}launch/ranks.py", line 9 in live\n'
    told = report.crash_record(code, f"Current thread 0x1:\n{frames}", [], {})
    assert told["message"] == said and told["type"] is None and told["frames"][0].line == 5


def test_equal_errors_are_one_sentence_with_all_their_places():
    at = lambda rank: {"frames": [[f"file{rank % 2}.py", 3, "f"]], "traceback": f"of rank {rank}"}
    error = report.failure({rank: MINE | at(rank) for rank in (5, 2, 3)}, {}, {2: " \n", 5: "not told"})
    assert str(error) == "ranks 2, 3, 5 raised ValueError: bad batch (file0.py:3, file1.py:3)"
    assert error.ranks == (2, 3, 5) and error.traceback == "Rank 2: of rank 2"
    assert error._render_traceback_() == [f"RankError: {error}", "\nRank 2: of rank 2"]
    assert str(report.failure({1: LOST, 2: MINE}, {})) == "rank 2 raised ValueError: bad batch", (
        "what was lost is no cause"
    )


def test_a_crash_is_told_first_and_ranks_are_in_order():
    error = report.failure({1: MINE, 3: report.crash_record(3, "", [], {})}, {})
    assert str(error).startswith("rank 3 ended the process with status 3") and error.ranks == (1, 3)
    assert str(error).endswith("; rank 1 raised ValueError: bad batch")


def test_cells_are_called_as_the_notebook_calls_them():
    said = report.failure(
        {0: MINE | {"traceback": f'  File "{CELL[0]}", line 5, in f', "frames": [CELL]}},
        {CELL[0]: "Cell In[6]"},
    )
    assert said.traceback == "Rank 0:   Cell In[6], line 5, in f" and str(said).endswith("(cell:5)")


@pytest.mark.parametrize("text, members", [("1-3", [1, 2, 3]), ("0,2,5", [0, 2, 5]), ("7", [7])])
def test_members_as_the_log_writes_them(text, members):
    assert sorted(report.ranks_of(text)) == members
    for all_of_them in ("", "0,2,...", "1-", "a"):
        assert 10**6 in report.ranks_of(all_of_them)


def test_who_calls_two_groups_in_another_order_than_most_is_to_blame():
    def waits(name, members="0-2"):
        return report.Stuck(f"wait{{s}} in all_reduce #0 of {name}", True, ("", members, name), 0)

    first, second = waits("first"), waits("second")
    assert report.smaller_side({0: first, 1: second, 2: first}) == [1]
    assert report.smaller_side({0: first, 1: second}) == [], "no majority"
    assert (
        report.smaller_side(
            {0: waits("a", "0-1"), 1: waits("a", "0-1"), 2: waits("b", "2-3"), 3: waits("c", "2-3")}
        )
        == []
    )
    assert report.hang(9, {0: first, 1: second, 2: first}, {}, {}).ranks == (1,)
    full = {
        0: waits("a", "0-1"),
        1: waits("a", "0-1"),
        2: waits("b", "2-4"),
        3: waits("c", "2-4"),
        4: waits("b", "2-4"),
    }
    assert report.smaller_side(full) == [3], "where all members are, nobody is missing"


def test_stacks_of_a_hang_that_are_equal_are_told_once():
    dump = lambda line: (
        f'Thread 0x1:\n  File "train.py", line {line} in step\n  File "{report.PACKAGE}launch/job.py", line 9 in run\n'
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
    fn = f'  File "{report.PACKAGE}launch/ranks.py", line 9 in live\n  File "forks.py", line 1 in start\n'
    dump = f"Thread 0x1 (most recent call first):\n{frames('other', '')}\nCurrent thread 0x2:\n{frames('mine', fn)}"
    assert report.stack_frames(dump) == [("mine.py", 5, "f")] and report.stack_frames("") == []
    assert report.stack_text("", {}) == ""
