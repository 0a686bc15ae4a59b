"""Launching: any function travels, results and prints come back in rank order, nothing stays behind."""

import glob
import importlib
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
import time
import types
from contextlib import nullcontext
from functools import partial

import nbformat
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from minitrain import collectives, launch
from minitrain.cli.train_command import train as command
from minitrain.course import kernels
from minitrain.course.plot import style  # noqa: F401
from minitrain.plan import strategy
from minitrain.ranks.launch import local
from minitrain.ranks.process import JOB
from tests import patience

LINUX = sys.platform == "linux"


def script(text: str, folder) -> subprocess.CompletedProcess:
    """Run a plain script, with no `if __name__ == "__main__"`, that can import minitrain."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    root = os.path.dirname(os.path.dirname(os.path.dirname(launch.__file__)))
    return patience.run([sys.executable, path], env=dict(os.environ, PYTHONPATH=root))


# ---- what a rank finds -----------------------------------------------------------------------------------


def describe():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "env": [int(os.environ[name]) for name in names], "rank": dist.get_rank(),
        "size": dist.get_world_size(), "threads": torch.get_num_threads(), "device": str(launch.device()),
        "folder": os.getcwd(), "path": sys.path,
        "seeds": (torch.rand(1).item(), random.random(), numpy.random.rand()), "pid": os.getpid(),
        "pgid": os.getpgrp(),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_finds_what_torchrun_would_give_it(ranks, monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "of the caller")
    found = launch.run(describe, ranks=ranks)
    assert [f["env"] for f in found] == [[rank, rank, ranks, ranks] for rank in range(ranks)]
    assert [(f["rank"], f["size"]) for f in found] == [(rank, ranks) for rank in range(ranks)]
    assert {f["threads"] for f in found} == {1}
    seeded = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    got = {f["seeds"] for f in found}
    assert got == {(seeded, random.Random(0).random(), numpy.random.RandomState(0).rand())}
    assert all(f["folder"] == os.getcwd() and f["path"] == sys.path for f in found)
    assert all(f["pid"] == f["pgid"] != os.getpgrp() for f in found), "a rank has its own process group"
    if not torch.cuda.is_available():
        assert {f["device"] for f in found} == {"cpu"}


def test_every_launch_has_fresh_processes_and_the_caller_s_present_environment(monkeypatch):
    def look():
        sys.a_mark = getattr(sys, "a_mark", 0) + 1
        return os.getpid(), sys.a_mark, os.environ.get("CHANGED")

    first = launch.run(look)
    monkeypatch.setenv("CHANGED", "yes")
    second = launch.run(look)
    assert not {pid for pid, _, _ in first} & {pid for pid, _, _ in second}
    assert [mark for _, mark, _ in second] == [1, 1]
    assert [changed for _, _, changed in second] == ["yes", "yes"]


def test_groups_work_and_collectives_are_checked_by_default(monkeypatch):
    def total():
        group = dist.new_group([0, 2])
        x = torch.tensor([float(dist.get_rank())])
        return collectives.all_reduce(x, group).item() if dist.get_rank() in (0, 2) else None

    assert launch.run(total, ranks=3) == [2.0, None, 2.0]

    def mismatch():
        x = torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32)
        return collectives.all_reduce(x, dist.group.WORLD)

    with pytest.raises(launch.RankError, match="CollectiveMismatch.*rank 0 .*float32.*rank 1 .*int32"):
        launch.run(mismatch)
    monkeypatch.setenv("MINITRAIN_CHECKED", "0")
    launch.run(mismatch)  # gloo reinterprets the bytes and says nothing


# ---- functions travel ------------------------------------------------------------------------------------


def test_lambdas_closures_and_classes_made_on_the_spot():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))

    def helper(x):
        return x * scale

    scale = 10
    assert launch.run(lambda x: helper(x) + dist.get_rank(), 4, ranks=3) == [40, 41, 42]
    zero, one = launch.run(lambda: Model())
    assert type(one) is Model and one.weight.tolist() == [1.0, 1.0] and zero.weight.tolist() == [0.0, 0.0]


def test_an_autograd_function_made_on_the_spot():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            return 2 * dy

    def slope():
        x = torch.ones((), requires_grad=True)
        Double.apply(x).backward()
        return x.grad.item()

    assert launch.run(slope, ranks=1) == [2.0]


def test_a_function_may_set_torch_backends():
    """torch.backends and its parts are objects of classes of their own, which pickle refuses."""

    def deterministic():
        torch.backends.cudnn.deterministic = True
        return torch.backends.cudnn.deterministic

    assert launch.run(deterministic) == [True, True]
    assert not torch.backends.cudnn.deterministic


def test_a_helper_module_travels_as_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("import os\nmine = os.getpid()\ndef work():\n    return mine")
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    (tmp_path / "beside.py").write_text("def work():\n    return 'edited since'")
    assert launch.run(beside.work) == launch.run(lambda: beside.work()) == [os.getpid()] * 2


def test_a_plain_script_is_not_run_again_and_a_process_forked_from_it_has_a_helper_of_its_own(tmp_path):
    done = script(
        """
        print("once")
        import torch, torch.distributed as dist
        from dataclasses import dataclass
        from minitrain import launch

        @dataclass
        class Answer:
            rank: int

        def helper():
            return Answer(dist.get_rank())

        def train():
            print("training")
            return helper()

        answers = launch.run(train, ranks=2)
        assert answers == [Answer(0), Answer(1)] and type(answers[0]) is Answer
        launch.run(lambda: print("again"), ranks=2)
        import os, sys
        sys.stdout.flush()
        if os.fork() == 0:
            launch.run(lambda: print("child"), ranks=1)
        else:
            os.wait()
            launch.run(lambda: print("parent"), ranks=1)
    """,
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    by_ranks = [f"[rank {rank}] {word}" for word in ("training", "again") for rank in (0, 1)]
    assert done.stdout.splitlines() == ["once", *by_ranks, "[rank 0] child", "[rank 0] parent"]


def test_a_notebook(tmp_path):
    cells = [
        """
        import torch, torch.distributed as dist
        from minitrain import collectives, launch
        class Model(torch.nn.Module):
            pass
        def broken(rank):
            if dist.get_rank() == rank:
                raise ValueError("boom")
            collectives.all_reduce(torch.ones(1), dist.group.WORLD)
        """,
        """
        def train():
            print("training on", dist.get_world_size())
            return Model(), collectives.last_calls(), broken.__name__
        models = launch.run(train, ranks=3)
        print(type(models[2][0]) is Model)
        """,
        """
        launch.run(broken, 1)
        """,
    ]
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    notebook, folder = nbformat.v4.new_notebook(cells=cells), {"metadata": {"path": tmp_path}}
    with pytest.raises(CellExecutionError):
        way = dict(kernel_manager_class=kernels.AsyncManager, kernel_name="python3")
        NotebookClient(notebook, timeout=patience.LONG_S, resources=folder, **way).execute()
    prints, failure = "".join(output.text for output in cells[1].outputs), cells[2].outputs[-1]
    assert prints == "".join(f"[rank {rank}] training on 3\n" for rank in range(3)) + "True\n"
    assert (failure.ename, failure.evalue) == ("RankError", "rank 1 raised ValueError: boom (cell:7)")
    assert "Cell In[1], line 7" in "\n".join(failure.traceback)
    assert 'raise ValueError("boom")' in "\n".join(failure.traceback), "the rank quotes the line of the cell"


def test_large_arguments_and_results():
    x = torch.arange(10_000_000, dtype=torch.float32)
    results = launch.run(lambda x: x + dist.get_rank(), x, ranks=2)
    assert all(torch.equal(result, x + rank) for rank, result in enumerate(results))


def test_from_threads_at_the_same_time():
    answers = {}

    def work(number):
        answers[number] = launch.run(lambda: (number, dist.get_rank()), ranks=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [(number, 0), (number, 1)] for number in range(3)}
    assert launch.run(dist.get_rank) == [0, 1], "the helper outlives the thread that started it"


# ---- prints ----------------------------------------------------------------------------------------------


def test_prints_come_in_rank_order_and_warnings_to_stderr(capsys):
    def talk():
        time.sleep(0.1 * (2 - dist.get_rank()))  # the last rank is first
        print("one\ntwo", end="")
        print("careful", file=sys.stderr)
        os.system("echo from a child")
        os.write(2, b"native noise\n")

    launch.run(talk, ranks=3)
    shown, texts = capsys.readouterr(), ("one", "twofrom a child")
    assert shown.out.splitlines() == [f"[rank {rank}] {text}" for rank in range(3) for text in texts]
    assert shown.err.splitlines() == [f"[rank {rank}] careful" for rank in range(3)]
    launch.run(talk, ranks=3, echo=False)
    assert capsys.readouterr() == ("", "")


def test_rank_0_is_heard_while_it_runs(capsys, tmp_path):
    def talk():
        print("here")
        while not (tmp_path / "heard").exists():
            time.sleep(0.01)

    def listen():
        while "[rank 0] here" not in capsys.readouterr().out:
            time.sleep(0.01)
        (tmp_path / "heard").touch()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    launch.run(talk, ranks=1)
    thread.join(10)
    assert (tmp_path / "heard").exists() and not thread.is_alive()


def test_of_a_progress_bar_the_last_state_is_shown(capsys):
    launch.run(lambda: print("\r 50%", end="\r100%\n"), ranks=1)
    assert capsys.readouterr().out == "[rank 0] 100%\n"


@pytest.mark.parametrize(
    "fn, args, given, message",
    [
        (dist.get_rank, (), {"ranks": 0}, "ranks=0: use a whole number from 1 to"),
        (dist.get_rank, (), {"ranks": -1}, "ranks=-1: use"),
        (dist.get_rank, (), {"ranks": "4"}, "ranks='4': use"),
        (dist.get_rank, (), {"ranks": 2.5}, "ranks=2.5: use"),
        (dist.get_rank, (), {"ranks": True}, "ranks=True: use"),
        (dist.get_rank, (), {"grace_s": True}, "grace_s=True: use"),
        (dist.get_rank, (), {"timeout_s": 0}, "timeout_s=0: use a finite number above 0"),
        (dist.get_rank, (), {"timeout_s": float("nan")}, "timeout_s=nan: use"),
        (dist.get_rank, (), {"timeout_s": "60"}, "timeout_s='60': use"),
        (dist.get_rank, (), {"start_timeout_s": -2}, "start_timeout_s=-2: use"),
        (None, (), {}, "fn=None is not a function; write run(fn)"),
        (lambda x: 0, (threading.Lock(),), {}, "cannot be sent to the ranks: cannot pickle '_thread.lock'"),
        (lambda x: 0, ((i for i in ()),), {}, "cannot be sent to the ranks: cannot pickle 'generator'"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(fn, args, given, message, tmp_path, monkeypatch):
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        launch.run(fn, *args, **given)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not glob.glob(str(tmp_path / "minitrain-*"))


def test_a_rank_cannot_launch():
    with pytest.raises(launch.RankError, match="ranks 0, 1 raised ValueError: run was called inside a rank"):
        launch.run(lambda: launch.run(dist.get_rank), ranks=2)


# ---- nothing is open, nothing stays ----------------------------------------------------------------------


def open_things() -> dict:
    """Once it no longer changes: the helper closes its ends just after it has said that all is over."""
    last, now = None, look_around()
    while last != now:
        time.sleep(0.2)
        last, now = now, look_around()
    return now


def starved_s() -> float:
    """How long so far some process of this machine has waited for a core: a stall is time beyond that."""
    try:
        with open("/proc/pressure/cpu") as file:
            return int(file.readline().rpartition("=")[2]) / 1e6
    except OSError:
        return 0.0


def look_around() -> dict:
    helper = local.Helper.find().process
    return {
        "processes": {child.pid for child in psutil.Process().children(recursive=True)},
        "helper's files": len(os.listdir(f"/proc/{helper.pid}/fd")) if LINUX else 0,
        "files": len(os.listdir("/proc/self/fd")) if LINUX else psutil.Process().num_fds(),
        "threads": threading.active_count(),
        "shared memory": set(filter(left_behind, glob.glob("/dev/shm/torch_*"))),
    }


def left_behind(file: str) -> bool:
    """torch names it by its process; other tests have shared memory too."""
    return patience.gone(int(file.split("_")[1]))


def nothing_more_than(before: dict) -> bool:
    return all(now <= before[what] for what, now in look_around().items())


def test_sockets_listen_on_the_loopback_only_and_the_directory_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))

    def look(folder):
        dist.barrier()
        both = psutil.Process(), psutil.Process().parent()
        sockets = [socket for process in both for socket in process.net_connections()]
        listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
        (directory,) = glob.glob(folder + "/minitrain-*")
        return listening, stat.S_IMODE(os.stat(directory).st_mode)

    for listening, mode in launch.run(look, str(tmp_path), ranks=4):
        assert set(listening) == {"127.0.0.1"}, "gloo listens, and only there"
        assert mode == 0o700
    with pytest.raises(launch.RankError):
        launch.run(lambda: 1 / 0)
    assert not os.listdir(tmp_path), "the directory goes with the launch, also after an error"


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_the_helper_is_fit_to_be_forked():
    launch.run(dist.get_rank)
    pid = local.Helper.find().process.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert not any("nvidia" in os.readlink(fd) for fd in glob.glob(f"/proc/{pid}/fd/*") if os.path.exists(fd))


def test_what_a_rank_imports_slowly_the_helper_has_next_time():
    def build():
        known = "torch._dynamo" in sys.modules
        importlib.import_module("torch.opt" + "im").SGD([torch.zeros(1, requires_grad=True)])
        return known

    launch.run(build)
    assert launch.run(build) == [True, True]
    for make in (lambda: torch.optim.SGD, partial(torch.optim.SGD, lr=1)):  # a call that speaks of it
        local.Helper.find().close()
        launch.run(lambda: make and None)
        assert "torch._dynamo" in local.Helper.find().heavy


def test_the_helper_has_what_the_caller_uses_of_minitrain_as_the_files_are_by_now(tmp_path, monkeypatch):
    assert {"minitrain.plan.strategy", "minitrain.course.plot.style"} <= sys.modules.keys()

    def known():  # by name: a function that used them would have them imported
        names = "minitrain.plan.strategy", "minitrain.course.plot.style", "matplotlib"
        return [name in sys.modules for name in names]

    gone = types.ModuleType("minitrain.gone")  # the helper cannot import it, and no rank asks
    gone.__file__ = str(tmp_path / "gone.py")
    monkeypatch.setitem(sys.modules, "minitrain.gone", gone)
    assert launch.run(known) == [[True, False, False]] * 2
    helper = local.Helper.find()
    assert helper.files[strategy.__file__] == os.stat(strategy.__file__).st_mtime_ns
    monkeypatch.setitem(helper.files, strategy.__file__, 0)  # as if the file had been edited since
    assert launch.run(os.getppid) == [local.Helper.find().process.pid] * 2 != [helper.process.pid] * 2
    assert helper.process.poll() is not None


@pytest.mark.parametrize("crash", [False, True])
def test_what_a_rank_started_ends_with_it(crash, tmp_path):
    def start():
        (tmp_path / str(subprocess.Popen(["sleep", "1000"]).pid)).touch()
        dist.barrier()
        if crash and dist.get_rank() == 0:
            os._exit(1)

    with pytest.raises(launch.RankError) if crash else nullcontext():
        launch.run(start)
    patience.until(lambda: all(patience.gone(int(path.name)) for path in tmp_path.iterdir()))


def test_failures_leave_nothing_open():
    with pytest.raises(launch.RankError):
        launch.run(lambda: 1 / 0)
    before = open_things()
    for _ in range(3):
        with pytest.raises(launch.RankError):
            launch.run(lambda: os._exit(1))
        with pytest.raises(ValueError):
            launch.run(lambda x: x, threading.Lock())
        with pytest.raises(launch.LaunchTimeout):
            launch.run(lambda: time.sleep(100), timeout_s=0.1)
    patience.until(partial(nothing_more_than, before))


@pytest.mark.cuda(alone=True)
def test_gpus():
    """A GPU per rank: NCCL for what is on it; more ranks: gloo, GPUs shared. Had the helper touched CUDA, ranks
    could not."""

    def look():
        x = torch.full((2,), float(dist.get_rank()), device=launch.device())
        dist.all_reduce(x)
        return dist.get_backend_config().split(":")[-1], str(launch.device()), x.tolist()

    gpus = torch.cuda.device_count()
    total = [gpus * (gpus - 1) / 2] * 2
    assert launch.run(look, ranks=gpus) == [("nccl", f"cuda:{rank}", total) for rank in range(gpus)]
    total = [gpus * (gpus + 1) / 2] * 2
    found = launch.run(look, ranks=gpus + 1)
    assert found == [("gloo", f"cuda:{rank % gpus}", total) for rank in range(gpus + 1)]


def test_twenty_launches():
    """No failure, no stall, no file, process or shared memory left. (A TCP store stalls 5 s in one start of
    five: twenty without a stall happen once in 87 times.)"""

    def step():
        x = torch.ones(1000)
        dist.all_reduce(x)
        return x[0].item()

    launch.run(step)
    before, seconds = open_things(), []
    for _ in range(20):
        start, starved = time.monotonic(), starved_s()
        assert launch.run(step) == [2.0] * 2
        seconds.append(time.monotonic() - start - (starved_s() - starved))
    patience.until(partial(nothing_more_than, before))
    assert max(seconds) < 3, sorted(seconds)[-20:]


def test_tensors_of_all_dtypes_travel_both_ways():
    names = "float8_e4m3fn float8_e5m2 float8_e8m0fnu uint16 uint8 bfloat16 bool complex64"
    sent = {name: torch.arange(6).to(getattr(torch, name)).view(2, 3) for name in names.split()}
    sent["cut"], sent["empty"] = sent["float8_e4m3fn"][:, 1:], sent["uint16"][:0]
    back = launch.run(lambda x: (x, {name: str(one.dtype) for name, one in x.items()}), sent, ranks=1)[0]
    for name, one in back[0].items():
        assert back[1][name] == str(one.dtype) == str(sent[name].dtype)
        assert torch.equal(one.to(torch.complex64), sent[name].to(torch.complex64))


@pytest.mark.parametrize(
    "value, checked", [(None, True), ("1", True), ("yes", True), ("", True), ("0", False)]
)
def test_checks_are_on_unless_they_are_switched_off_by_0(monkeypatch, value, checked):
    monkeypatch.setattr("minitrain.ranks.launch.local.run_local", lambda *given: given[4])
    monkeypatch.delenv("MINITRAIN_CHECKED", raising=False)
    if value is not None:
        monkeypatch.setenv("MINITRAIN_CHECKED", value)
    assert launch.run(int, ranks=1) is checked
    assert launch.run(int, ranks=1, checked=not checked) is not checked


def test_a_launch_that_fails_too_often_says_the_last_error(capfd, monkeypatch):
    """One that goes on is in tests/cli/test_train_command.py."""
    with pytest.raises(launch.RankError, match="KeyError: '2'"):
        launch.run(lambda: {}[os.environ["TORCHELASTIC_RESTART_COUNT"]], restarts=2, ranks=1)
    assert "restart 2 of 2" in capfd.readouterr().err
    with pytest.raises(ValueError, match="--checkpoint"):
        command(restarts=1)
    for name in JOB:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="restarts=2 in a job of torchrun: give it --max-restarts"):
        launch.run(int, restarts=2, ranks=1)
