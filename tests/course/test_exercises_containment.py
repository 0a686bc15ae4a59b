"""Answers that cheat, hang, eat the machine or look for the checks: no points, and nothing of them is left.

Each adversary is an answer cell for the task `total` of chapter 00. Where an attack needs walls to fail, the
same attack is run without walls as a control: there it succeeds, so the walls and nothing else stop it.
"""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
import torch

from minitrain.course import exercises
from minitrain.course.grading import book
from minitrain.course.grading.judge import Code, Judge
from minitrain.course.grading.trial import Failure

CHAPTER = book.chapter("00")
ONE_TASK = book.Chapter(
    "00",
    CHAPTER.path,
    [cell for cell in CHAPTER.cells if cell.role == "given" or cell.name.startswith("total")],
)


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        judge.start()
        if judge.missing:
            pytest.skip(f"no walls: {judge.missing}")
        yield judge


@pytest.fixture(scope="module")
def bare():
    with Judge(walls=False) as judge:
        judge.start()
        yield judge


def below(judge: Judge) -> set[int]:
    """Processes below the server of answers, and those of the user that answers become."""
    strangers = {61184 + os.getpid() % 4000} if os.geteuid() == 0 else set()
    return {process.pid for process in psutil.Process(judge.server.pid).children(recursive=True)} | {
        process.pid
        for process in psutil.process_iter(["uids"])
        if process.info["uids"] and process.info["uids"].real in strangers
    }


def graded(judge: Judge, answer: str, time_limit_s: float = 40.0):
    """(points, property that the first check names, report) of an answer; nothing may be left of it."""
    before, started = below(judge), time.monotonic()
    report = exercises.grade_answers(ONE_TASK, {"total": answer}, judge, time_limit_s=time_limit_s)
    assert below(judge) == before, "the answer left processes behind"
    assert time.monotonic() - started < time_limit_s + 60, "the answer was not stopped in time"
    return report.earned, report.results[0].property, report


REFERENCE = next(task.answer.source for task in CHAPTER.tasks if task.answer.name == "total")

ADVERSARIES = {
    "an endless loop": ("time limit", "def total(x, group):\n    while True: pass"),
    "an endless loop outside the function": ("time limit", "while True: pass"),
    "a receive nobody sends for": (
        "no deadlock",
        """
def total(x, group):
    return collectives.receive(x, (group.rank() + 1) % group.size(), group)""",
    ),
    "a collective that one rank leaves out": (
        "no deadlock",
        """
def total(x, group):
    return x if group.rank() == 0 else collectives.barrier(group)""",
    ),
    "a hang in a thread of its own": (
        "no deadlock",
        """
import threading
def total(x, group):
    thread = threading.Thread(target=lambda: collectives.receive(x, (group.rank() + 1) % group.size(), group))
    thread.start()
    thread.join()""",
    ),
    "exit code 0": ("a result", "import os\ndef total(x, group):\n    os._exit(0)"),
    "sys.exit": ("no error", "import sys\ndef total(x, group):\n    sys.exit(0)"),
    "a fork bomb": (
        "time limit",
        """
import os
def total(x, group):
    while True:
        try: os.fork()
        except OSError: pass""",
    ),
    "a memory bomb": ("memory limit", "def total(x, group):\n    return torch.ones(1 << 34)"),
    "a memory bomb in small pieces": (
        "memory limit",
        """
def total(x, group):
    kept = []
    while True: kept.append(torch.ones(1 << 20))""",
    ),
    "a memory bomb in shared memory": (
        "no error",
        """
import mmap
def total(x, group):
    kept = []
    while True: kept.append(mmap.mmap(-1, 1 << 26))""",
    ),
    "a huge file": (
        "no error",
        """
def total(x, group):
    with open("big", "wb") as file:
        while True: file.write(bytes(1 << 20))""",
    ),
    "a daemon that outlives its parent": (
        "a result",
        """
import os, time
def total(x, group):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os._exit(0)""",
    ),
    "a printed score": (
        "sum on every rank",
        """
import sys
def total(x, group):
    print("\\x1b[2J  2/2  ok  Every rank returns the sum\\n\\ntotal 10/10", flush=True)
    sys.stderr.write("total 10/10\\n")
    return x""",
    ),
    "an error that looks like a table": (
        "no error",
        """
def total(x, group):
    raise RuntimeError("\\x1b[2J\\r\\n  2/2  ok  Every rank returns the sum\\ntotal 10/10")""",
    ),
    "a forged verdict on the line": (
        "data",
        """
import gc
def total(x, group):
    from minitrain.course.grading.frames import Line
    lines = [thing for thing in gc.get_objects() if isinstance(thing, Line)]
    for line in lines: line.send({"is": "verdict", "passed": True, "points": 10})
    return x""",
    ),
    "a torch that finds everything equal": (
        "sum on every rank",
        """
def total(x, group):
    torch.equal = torch.allclose = torch.Tensor.equal = torch.Tensor.__eq__ = lambda *a, **k: True
    class Anything(torch.Tensor):
        __eq__ = __ne__ = lambda *a: True
    return x.as_subclass(Anything)""",
    ),
    "an object that is equal to everything": (
        "data",
        """
class Anything:
    __eq__ = lambda *a: True
    __class__ = property(lambda self: torch.Tensor)
def total(x, group):
    return Anything()""",
    ),
    "a search of all frames and objects for what is wanted": (
        "sum on every rank",
        """
import gc, sys
def total(x, group):
    frame = sys._getframe()
    while frame is not None:
        for name in ("expected", "given", "results"):
            if name in frame.f_locals: return frame.f_locals[name][group.rank()]
        frame = frame.f_back
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.shape == x.shape]
    return sum(tensors) if len(tensors) == group.size() else x""",
    ),
    "a header that never ends": (
        "data",
        """
import gc
def total(x, group):
    from minitrain.course.grading.frames import Line
    for line in [thing for thing in gc.get_objects() if isinstance(thing, Line)]:
        line.sock.sendall(b"\\xff\\xff\\xff\\xff" + b"[" * 100)
    return x""",
    ),
    "a value nested a million times": (
        "no error",
        """
def total(x, group):
    value = []
    for _ in range(1_000_000): value = [value]
    return value""",
    ),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_an_adversary_gets_nothing_and_leaves_nothing(judge, name):
    property, answer = ADVERSARIES[name]
    points, found, report = graded(judge, answer, 2.0 if property == "time limit" else 40.0)
    assert points == 0 and found == property, report.results
    text = report.table()
    assert "\x1b" not in text and "\r" not in text and text.count("total ") == 1 + text.count("total 10/10")
    assert "ok  " not in text.replace("2/2  ok  Every rank returns the sum total 10/10", "")


@pytest.mark.parametrize(
    "name",
    [
        "an endless loop",
        "exit code 0",
        "a fork bomb",
        "a daemon that outlives its parent",
        "a memory bomb",
        "a receive nobody sends for",
        "a printed score",
    ],
)
def test_without_walls_they_are_contained_too(bare, name):
    property, answer = ADVERSARIES[name]
    points, found, report = graded(bare, answer, 2.0 if property in ("time limit", "a result") else 40.0)
    assert points == 0 and found in (
        property,
        "time limit",
    )  # a daemon holds on to the line, which does not end then
    assert "a self-check, not a grade" in report.table()


READS_THE_SOLUTION = f"""
import os
def total(x, group):
    for root in ("", "/proc/1/root", "/proc/{os.getpid()}/root", "/proc/self/root"):
        path = root + {str(CHAPTER.path)!r}
        if os.path.exists(path):
            text = open(path).read()
            start = text.index("def total(")
            exec(text[start:text.index("### END SOLUTION", start)], globals())
            return globals()["total"](x, group)
    raise LookupError("nothing to read")
"""
FINDS_EXERCISES = """
import os
def find():
    found = []
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if name not in ("site-packages", "share", "lib", "proc", "sys")]
        ours = (".git", "tests", "exercises") if "minitrain" in folders else ()
        found += [os.path.join(folder, name) for name in folders + files
                  if name.startswith("00_start_here") or name in ours]
    return found
"""


def test_the_solution_and_the_hidden_checks_cannot_be_read(judge, bare):
    points, _, report = graded(judge, READS_THE_SOLUTION)
    assert points == 0 and "LookupError: nothing to read" in report.results[0].message
    assert graded(bare, READS_THE_SOLUTION)[0] == 3, "the control: without walls the file is found"
    assert judge.run(Code([FINDS_EXERCISES], "find"), 1, [()], network=False, time_limit_s=60).results == [[]]


MEETS_ELSEWHERE = """
import os, time
def total(x, group):
    for folder in ("/tmp", "/var/tmp", "/dev/shm", os.getcwd()):
        try:
            mine = f"{folder}/minitrain-sum-%s-{group.rank()}" % x.numel()
            open(mine + "~", "wb").write(x.numpy().tobytes())
            os.rename(mine + "~", mine)
            os.chmod(mine, 0o666)
        except OSError:
            continue
        deadline, parts = time.monotonic() + 1, {}
        while len(parts) < group.size() and time.monotonic() < deadline:
            for rank in range(group.size()):
                path = f"{folder}/minitrain-sum-%s-{rank}" % x.numel()
                if rank not in parts and os.path.exists(path):
                    parts[rank] = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=x.dtype).reshape(x.shape)
        time.sleep(0.3)
        os.unlink(mine)
        if len(parts) == group.size():
            return sum(parts[rank] for rank in range(group.size()))
    raise LookupError("no place to meet")
"""


def test_ranks_meet_nowhere_but_on_the_counted_network(judge, bare):
    inputs = [(exercises.Draw(r).exact(7),) for r in range(3)]
    code = Code(cells=[*CHAPTER.given, MEETS_ELSEWHERE], call="total")
    with pytest.raises(Failure, match="no place to meet"):
        judge.run(code, 3, inputs)
    outcome = bare.run(code, 3, inputs)
    assert outcome.sent_bytes == [0, 0, 0] and outcome.results[0].equal(sum(x for (x,) in inputs)), (
        "the control"
    )


ESCAPES = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, act):
    try:
        return [name] if act() else []
    except (OSError, ValueError):
        return []
def tcp():
    ours = socket.socket()
    ours.settimeout(0.5)
    return ours.connect_ex(("127.0.0.1", 22)) in (0, 111) or ours.connect_ex(("1.1.1.1", 53)) == 0
def escapes():
    return sum([
        attempt("becomes root", lambda: os.setuid(0) is None),
        attempt("another user", lambda: os.setuid(1000) is None),
        attempt("mounts", lambda: libc.mount(b"none", b"/private", b"tmpfs", 0, b"") == 0),
        attempt("unmounts", lambda: libc.umount2(b"/usr", 2) == 0),
        attempt("a new root", lambda: os.chroot("/private") is None),
        attempt("sees processes", lambda: os.path.exists("/proc") or os.getppid() != 0),
        attempt("writes to minitrain", lambda: open(collectives.__file__, "a")),
        attempt("writes to the root", lambda: open("/new", "w")),
        attempt("reaches a network", tcp),
        attempt("sees a home", lambda: os.listdir(os.path.expanduser("~root")) != [".pyenv"] and os.listdir("/home")),
        attempt("raises a limit", lambda: __import__("resource").setrlimit(7, (4096, 4096)) is None),
        attempt("new privileges", lambda: libc.prctl(39, 0, 0, 0, 0) != 1),
        attempt("a secret in the environment", lambda: set(os.environ) - {
            "PATH", "HOME", "TMPDIR", "LANG", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE",
            "LC_CTYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
            "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}),
    ], [])
"""


def test_no_way_out(judge):
    os.environ["MINITRAIN_TEST_TOKEN"] = "secret"
    found = judge.run(Code(cells=[*CHAPTER.given, ESCAPES], call="escapes"), 1, [()], network=False).results[
        0
    ]
    assert found == []


def test_a_flood_of_prints_harms_nobody(judge):
    flood = REFERENCE.replace(
        "    rank, others", "    for _ in range(3000): print('x' * 1000)\n    rank, others", 1
    )
    points, _, report = graded(judge, flood)
    assert points == 3 and all(len(result.detail) < 200_000 for result in report.results)


def test_memory_beyond_the_budget_is_refused_by_the_kernel(judge):
    keeps_a_quarter = "import torch\ndef cut(x):\n    return x[: len(x) // 4].clone()"
    keeps_a_copy = "import torch\ndef cut(x):\n    y = x.clone()\n    return y[: len(x) // 4].clone()"
    inputs, budget = [(torch.ones(1 << 24),)], 40 << 20  # 64 MB come in, 16 MB go out
    outcome = judge.run(Code([keeps_a_quarter], "cut"), 1, inputs, network=False, budget_bytes=budget)
    assert outcome.results[0].numel() == 1 << 22
    with pytest.raises(Failure, match="memory limit"):
        judge.run(Code([keeps_a_copy], "cut"), 1, inputs, network=False, budget_bytes=budget)


def test_nothing_is_left_when_the_judge_is_killed():
    program = (
        "from minitrain.course.grading.judge import Judge, Code\njudge = Judge()\njudge.start()\n"
        "print(judge.server.pid, flush=True)\n"
        "code = Code(['def f():\\n    while True: pass'], 'f')\n"
        "judge.run(code, 2, [(), ()], network=False, time_limit_s=100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as judge:
        server = psutil.Process(int(judge.stdout.readline()))
        deadline = time.monotonic() + 30
        while len(server.children(recursive=True)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        family = [server, *server.children(recursive=True)]
        judge.kill()
    gone, alive = psutil.wait_procs(family, timeout=20)
    assert len(family) == 4 and not alive, "the server, the one inside its namespace, two ranks"


def test_where_namespaces_are_refused_it_is_a_self_check():
    refuse = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*refuse, "true"], capture_output=True).returncode:
        pytest.skip("cannot make a system that refuses namespaces")
    program = (
        "from minitrain.course import exercises\nfrom minitrain.course.grading import book, judge\n"
        "of = book.chapter('00')\nanswers = {task.answer.name: task.answer.source for task in of.tasks}\n"
        "with judge.Judge() as j: print(exercises.grade_answers(of, answers, j).table())"
    )
    done = subprocess.run(
        [*refuse, sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert "total 10/10" in done.stdout
    assert (
        "a self-check, not a grade: answers ran without walls, because this system refuses them"
        in done.stdout
    )
