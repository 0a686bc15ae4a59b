"""What a launch is made of behind the caller, piece by piece: what the helper kills and reaps, what a rank sets up, how
ranks of a job agree, what the kernel counts."""

import datetime
import json
import linecache
import os
import pickle
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.course import loopback
from minitrain.ranks.launch import job, local, pickled, ranks
from minitrain.ranks.process import PROCESS
from tests.ranks.launch.test_launch_caller import LOST, MINE

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# ---- the helper ------------------------------------------------------------------------------------------


def in_a_rank(fn, *args):
    """fn's result in a process that has no threads, where one may fork."""
    return launch.run(fn, *args, ranks=1, echo=False, timeout_s=20)[0]


def a_group(order="", events=None):
    there, here = socket.socketpair()
    there.sendall(f"{order}\n".encode())
    read, write = os.pipe() if events is None else events
    return there, read, ranks.RankGroup(write, here.detach())


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
    ranks.ctypes.CDLL(None).prctl(ranks.PR_SET_CHILD_SUBREAPER, 1)
    os.mkdir(f"{folder}/directory")
    there, said, group = a_group(f"{folder}/directory")
    first, late = sleeping(child=True), sleeping(group=False)
    left = sleeping()  # a child of a rank that has died: ours by now
    (grandchild,) = ranks.children(first)
    known = ranks.descendants(first), ranks.descendants(late)
    deep = grandchild in ranks.descendants(os.getpid()) and grandchild not in ranks.children(os.getpid())
    group.pids = {first: 0, late: 1}
    group.end(alone=False)
    gone = (
        [ends(pid) for pid in (first, late, grandchild)],
        lives(left),
        os.path.exists(f"{folder}/directory"),
    )
    words = os.read(said, 100), group.ended
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
    assert words == (b"- reaped\n", True)
    assert not left and not zombie, "nobody else launches: what is left goes too, and is reaped"


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


def test_a_rank_is_what_its_caller_is_now(monkeypatch, tmp_path):
    """And writes where only its owner reads, and quotes lines that no file holds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    monkeypatch.setitem(linecache.cache, "<a cell>", (4, None, ["text\n"], "<a cell>"))
    local.Helper.find()

    def look():
        modes = [oct(os.fstat(file).st_mode & 0o777) for file in (1, 2)]
        text = [(one.encoding, one.errors, one.line_buffering) for one in (sys.stdout, sys.stderr)]
        environ = [os.environ.get(name) for name in ("HOME", "OMP_NUM_THREADS", "MINITRAIN_INSIDE")]
        default = signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        return environ, sys.argv, linecache.getline("<a cell>", 1), modes, text, default

    environ, argv, line, modes, text, default = in_a_rank(look)
    assert environ == [None, "1", "1"] and argv == ["program", "--flag"] and line == "text\n" and default
    assert modes == ["0o600"] * 2 and text == [("utf-8", "backslashreplace", True)] * 2


# ---- a rank of a job -------------------------------------------------------------------------------------

HERE = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.fixture
def environ(monkeypatch):
    for name in (*job.VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(PROCESS, "job", None)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("missing", [*HERE, None])
def test_a_job_is_where_all_four_variables_are(environ, missing):
    environ(**{name: value for name, value in HERE.items() if name != missing})
    assert job.here() == (missing is None)


def test_an_agent_that_does_not_answer_is_from_another_job(environ):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environ(**HERE | dict(MASTER_PORT=str(closed.getsockname()[1])))
        assert job.here(), "only an agent listens before any rank is there"
        environ(TORCHELASTIC_USE_AGENT_STORE="True")
        with pytest.raises(
            ValueError,
            match="at 127.0.0.1:.* nobody answers: they are left over from another job; outside a job unset",
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


# ---- the kernel's count ----------------------------------------------------------------------------------


@pytest.mark.parametrize("network, runs", [("private", 1), ("shared", 5)])
def test_of_a_shared_network_the_least_of_some_runs_is_told(network, runs, monkeypatch, capsys):
    counts, brought_up, asked = iter([9, 7, 8, 6, 9, 5, 5, 5, 5, 5]), [], []
    monkeypatch.setattr(loopback, "bring_up_loopback", lambda: brought_up.append(1))

    def run(fn, *args, **given):
        asked.append((fn, args, given))
        return [next(counts), 0, 0]

    monkeypatch.setattr(launch, "run", run)
    call = loopback.base64.b64encode(pickled.call(int, ())).decode()
    loopback.main(network, "3", call, call)
    assert capsys.readouterr().out.split() == (["9", "7"] if network == "private" else ["6", "5"])
    assert len(asked) == 2 * runs and len(brought_up) == (network == "private")
    assert asked[0] == (loopback.between_readings, (int,), dict(ranks=3, checked=False, echo=False))
