"""What a launch is made of, piece by piece: what the helper kills and reaps, what a rank sets up, how ranks of a job agree,
what the kernel counts; what the caller takes in and decides, and the words of its reports."""

import datetime
import json
import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from minitrain import launch
from minitrain.ranks.launch import local, pickled, ranks, report, start

LOST = {"type": "RuntimeError", "message": "Connection closed by peer", "frames": [], "traceback": ""}
MINE = {"type": "ValueError", "message": "bad batch", "frames": [], "traceback": ""}
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# ---- the helper ------------------------------------------------------------------------------------------


def in_a_rank(fn, *args):
    """fn's result in a process that has no threads, where one may fork."""
    return launch.run(fn, *args, ranks=1, echo=False, timeout_s=20)[0]


def a_group(directory):
    there, here = socket.socketpair()
    there.sendall(f"{directory}\n".encode())
    read, write = os.pipe()
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


def what_an_end_ends(folder):
    ranks.ctypes.CDLL(None).prctl(ranks.PR_SET_CHILD_SUBREAPER, 1)
    os.mkdir(f"{folder}/directory")
    there, said, group = a_group(f"{folder}/directory")
    first, late = sleeping(child=True), sleeping(group=False)
    left = sleeping()  # a child of a rank that has died: ours by now
    (grandchild,) = [child.pid for child in psutil.Process(first).children()]
    group.pids = {first: 0, late: 1}
    group.end()
    there = [os.path.exists(f"/proc/{pid}") for pid in (first, late, grandchild, left)]
    return there, os.path.exists(f"{folder}/directory"), os.read(said, 100)


@LINUX_ONLY
def test_the_end_of_a_launch_ends_its_ranks_all_that_they_started_and_its_directory(tmp_path):
    assert in_a_rank(what_an_end_ends, str(tmp_path)) == ([False] * 4, False, b"- reaped\n")


# ---- a rank ----------------------------------------------------------------------------------------------


BOTH = "cpu:gloo,cuda:nccl"
CARDS = [f"GPU-{number}" for number in range(8)]
JOBS = {  # GPUs that a rank sees, and what the ranks before it have said: two nodes of four
    "no GPU anywhere": (0, [""] * 7, "gloo", "cpu"),
    "no GPU here": (0, CARDS[:7], "gloo", "cpu"),
    "a GPU each": (4, CARDS[:7], BOTH, "cuda:3"),
    "more GPUs than ranks": (8, CARDS[:7], BOTH, "cuda:3"),
    "two ranks share one": (2, [*CARDS[:6], "GPU-7"], "gloo", "cuda:1"),
    "each task sees its own alone, as Slurm binds them": (1, CARDS[:7], BOTH, "cuda:0"),
    "a node without": (4, [*CARDS[:3], "", *CARDS[4:7]], "gloo", "cuda:3"),
}


@pytest.mark.parametrize("gpus, others, backend, device", JOBS.values(), ids=JOBS)
def test_two_doors_where_every_rank_of_the_job_has_a_gpu_of_its_own(
    gpus, others, backend, device, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=CARDS[7]))
    store, chosen, joined = dist.HashStore(), [], []
    for rank, uuid in enumerate(others):
        store.set(f"gpu/{rank}", uuid)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: joined.append((given, more)))
    ranks.init_group(store, 7, 8, "the time")
    assert chosen == [device] * (device != "cpu") and str(launch.device()) == device
    assert joined == [((backend,), dict(store=store, rank=7, world_size=8, timeout="the time"))]


def test_a_task_of_slurm_without_torchrun_finds_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert str(launch.device()) == "cuda:2"


@pytest.mark.parametrize(
    "gpus, said", [(0, "no GPU: tensors are on the CPU"), (8, "8 x H100: models are there")]
)
def test_a_person_is_told_where_tensors_are(gpus, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    assert launch.where().startswith(said)


class Away(torch.Tensor):
    """A tensor of a GPU, as far as a laptop can have one."""

    device = torch.device("cuda", 1)
    detach = lambda self: self
    cpu = lambda self: self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("same_program", [True, False])
def test_results_come_back_in_memory_of_the_host(same_program):
    weight = torch.nn.Parameter(torch.ones(3).as_subclass(Away))
    weight.placed = "here"
    result = [
        torch.arange(3.0).as_subclass(Away),
        torch.ones(2).to(torch.float8_e4m3fn).as_subclass(Away),
        weight,
    ]
    plain, eight, parameter = pickle.loads(pickled.result(result, same_program))
    assert type(plain) is torch.Tensor and plain.tolist() == [0, 1, 2] and plain.device.type == "cpu"
    assert eight.dtype == torch.float8_e4m3fn and type(eight) is torch.Tensor
    assert type(parameter) is torch.nn.Parameter and parameter.placed == "here" and parameter.requires_grad


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


HERE = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize("missing", [*HERE, None])
def test_a_job_is_where_all_four_variables_are(missing, monkeypatch):
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    if missing:
        monkeypatch.delenv(missing)
    assert start.in_a_job() == (missing is None)


@pytest.mark.parametrize(
    "error, patience_s, said",
    [(MINE, start.GRACE_S, "rank 1 raised ValueError"), (None, 40 + start.GRACE_S, "other ranks are late")],
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

    one, ended = object.__new__(start.Job), []
    one.launches, one.rank, one.size, one.store = 1, 1, 3, Late()
    one.end = lambda why: ended.append(why) or (_ for _ in ()).throw(Ended)
    with pytest.raises(Ended):
        one.agree(error, 40)
    assert said in str(ended[0]) and one.store.told == ("launch-1/1", error)
    assert one.store.keys == [f"launch-1/{rank}" for rank in range(3)]
    assert one.store.patience == datetime.timedelta(seconds=patience_s)
    assert isinstance(ended[0], launch.LaunchTimeout) == (error is None)


# ---- the caller ------------------------------------------------------------------------------------------


class Heard(local.Launch):
    """A launch of which a test plays the ranks and the helper."""

    def __init__(self, grace_s=None):
        self.states, self.pids, self.exits, self.files = dict.fromkeys(range(3), "start"), {}, {}, {}
        self.grace_s, self.survive, self.replace_s = grace_s, False, None

    def read(self, rank, kind, start=0):
        return self.files[rank, kind]


@pytest.mark.parametrize(
    "errors, exits, grace_s, patience_s",
    [
        ([MINE], {}, None, local.GRACE_S), ([LOST], {}, None, local.LOST_GRACE_S),
        ([LOST, LOST], {}, None, local.LOST_GRACE_S), ([LOST, MINE], {}, None, local.GRACE_S),
        ([LOST], {2: -9}, None, local.GRACE_S), ([], {2: -9}, None, local.GRACE_S), ([LOST], {}, 7.0, 7.0),
        ([MINE], {}, 0.01, 0.01),
    ],
)  # fmt: skip
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
    assert killed == ([(70, signal.SIGKILL)] if grace_s else [])
    assert next(news, "all were heard") == "all were heard"


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
    assert not __file__.startswith(report.LIBRARIES)
    assert all(folder.endswith(os.sep) for folder in report.LIBRARIES)
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


def test_a_long_text_keeps_its_first_and_its_last_part():
    assert report.shortened("abcdefghijklmno", 10) == "abcde ... (5 letters left out) ... klmno"
    assert report.shortened("abcdefghij", 10) == "abcdefghij"
    assert len(report.message_of(ValueError("x" * 5000))) < 1050
    assert report.message_of(ValueError(" a \n\n b")) == "a  b"


@pytest.mark.parametrize(
    "text", ["Connection refused", "Connection reset by peer", "Connection closed by peer"]
)
def test_a_crash_is_named_before_all_connections_that_it_cost(text):
    lost = {"type": "RuntimeError", "message": text, "frames": [], "traceback": ""}
    crashed = {"type": None, "message": "was killed (SIGKILL)", "frames": [], "traceback": ""}
    other = {"type": "ValueError", "frames": [], "traceback": ""}
    records = {rank: lost for rank in range(3)} | {3: crashed}
    assert report.failure(records, {}).ranks == (3,)
    assert "rank 3 was killed" in str(report.failure(records, {}))
    records = {rank: {**other, "message": f"text {rank}"} for rank in range(5)} | {5: crashed}
    error = report.failure(records, {})  # six different errors, of which three are told
    assert str(error).startswith("rank 5 was killed") and str(error).endswith("; and 3 more")


@pytest.mark.parametrize("text, members", [("1-3", [1, 2, 3]), ("0,2,5", [0, 2, 5]), ("7", [7])])
def test_members_as_the_log_writes_them(text, members):
    assert sorted(report.ranks_of(text)) == members
    for all_of_them in ("", "0,2,...", "1-", "a"):
        assert 10**6 in report.ranks_of(all_of_them)


def test_stacks_of_a_hang_that_are_equal_are_told_once():
    dump = lambda line: (
        f'Thread 0x1:\n  File "train.py", line {line} in step\n  File "{report.PACKAGE}ranks/launch/start.py", line 9 in run\n'
    )
    stands = {rank: report.Stuck(f"stand{{s}} at train.py:{5 if rank else 6}", False) for rank in range(3)}
    error = report.hang(0.5, stands, {0: dump(6), 1: dump(5), 2: dump(5)}, {})
    assert str(error) == (
        "not finished after 0.5 s: rank 0 stands at train.py:6; ranks 1, 2 stand at train.py:5; "
        "if this is only slow, raise timeout_s"
    )
    stack = 'innermost line first:\n  File "train.py", line {}, in step'
    assert error.traceback == f"Rank 0, {stack.format(6)}\nRanks 1, 2, {stack.format(5)}"
    assert error.ranks == (0, 1, 2)


@pytest.mark.parametrize(
    "used, ready, at",  # seconds of processor time after each second; when 5 s are up
    [
        ([0, 0, 0, 0, 0, 0, 0], False, 5),  # still
        ([0, 0, 0, 0, 0, 0, 0], True, None),  # others have all processors
        ([1, 2, 3, 4, 5, 6, 7], True, 6),  # at work for more than 5 s
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], False, None),  # slow
        ([0.5, 0.51, 0.52, 0.53, 0.54, 0.55, 0.56], False, 7),  # still since then, but for its threads
    ],
)
def test_time_is_up_for_what_stands_still_or_computes_for_long(used, ready, at, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(local, "ready", lambda pid: ready and pid == 2)
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(local, "processor_s", lambda pid: spent[pid])
    spent = {1: 3.0, 2: 0.0}
    clock, found = local.Clock(5), None
    assert not clock.ended(spent)
    for second, more in enumerate(used, 1):
        now[0], spent[1] = 100.0 + second + 0.01, 3 + more
        found = found or (second if clock.ended(spent) else None)
    assert found == at


def test_who_computes_is_ready_to_run_and_who_is_stopped_is_not():
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        at_work = local.ready(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert (at_work, local.ready(process.pid), local.ready(0)) == (True, False, False)
        process.kill()
