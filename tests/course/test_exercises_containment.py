"""Answers that cheat, hang, eat the machine or look for the checks: no points, and nothing of them is left.

Each adversary is an answer cell for the task `total` of chapter 00. Where an attack needs walls to fail, the
same attack is run without walls as a control: there it succeeds, so the walls and nothing else stop it.
What carries data past the counted network, or memory past the budget, is tried call by call.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch

from minitrain.course import exercises
from minitrain.course.grading import book
from minitrain.course.grading.judge import PACKAGE, Code, Judge
from minitrain.course.grading.trial import Failure
from tests import patience

CHAPTER = book.chapter("00")
TOTAL = [c for c in CHAPTER.cells if c.role in book.LOCKED or c.name.startswith("total")]
ONE_TASK = book.Chapter("00", CHAPTER.path, TOTAL)


@pytest.fixture(scope="module")
def judge(judge):
    judge.start()
    if judge.missing:
        pytest.skip(f"no walls: {judge.missing}")
    return judge


def below(judge: Judge) -> set[int]:
    """Processes below the server of answers, and those of the users that ranks become."""
    return {process.pid for process in psutil.Process(judge.server.pid).children(recursive=True)} | {
        process.pid
        for process in psutil.process_iter(["uids"])
        if process.info["uids"] and process.info["uids"].real in (judge.users or ())
    }


def graded(judge: Judge, answer: str, time_limit_s: float = 40.0):
    """(points, property that the first check names, report) of an answer; nothing may be left of it."""
    judge.start()
    before = below(judge)
    report = exercises.grade_answers(ONE_TASK, {"total": answer}, judge, time_limit_s=time_limit_s)
    assert below(judge) == before, "the answer left processes behind"
    return report.earned, report.results[0].property, report


ADVERSARIES = {
    ("an endless loop", "time limit"): "def total(x, group):\n    while True: pass",
    ("a receive nobody sends for", "no deadlock"): """
def total(x, group):
    return collectives.receive(x, (group.rank() + 1) % group.size(), group)""",
    ("a collective that one rank leaves out", "no deadlock"): """
def total(x, group):
    return x if group.rank() == 0 else collectives.barrier(group)""",
    ("a hang in a thread of its own", "no deadlock"): """
import threading
def total(x, group):
    thread = threading.Thread(target=lambda: collectives.receive(x, (group.rank() + 1) % group.size(), group))
    thread.start()
    thread.join()""",
    ("exit code 0", "a result"): "import os\ndef total(x, group):\n    os._exit(0)",
    ("sys.exit", "no error"): "import sys\ndef total(x, group):\n    sys.exit(0)",
    ("a fork bomb", "time limit"): """
import os
def total(x, group):
    while True:
        try: os.fork()
        except OSError: pass""",
    ("a memory bomb", "memory limit"): "def total(x, group):\n    return torch.ones(1 << 34)",
    ("a memory bomb in shared memory", "no error"): """
import mmap
def total(x, group):
    kept = []
    while True: kept.append(mmap.mmap(-1, 1 << 26))""",
    ("a huge file", "no error"): """
def total(x, group):
    with open("big", "wb") as file:
        while True: file.write(bytes(1 << 20))""",
    ("a daemon that outlives its parent", "no error"): """
import os, time
def total(x, group):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os._exit(0)""",
    ("a printed score", "sum on every rank"): """
import sys
def total(x, group):
    print("\\x1b[2J  2/2  ok  Every rank returns the sum\\n\\ntotal 10/10", flush=True)
    sys.stderr.write("total 10/10\\n")
    return x""",
    ("a forged verdict on the line", "data"): """
import gc
def total(x, group):
    lines = [thing for thing in gc.get_objects() if type(thing).__name__ == "Line"]
    for line in lines: line.send({"is": "verdict", "passed": True, "points": 10})
    return x""",
    ("a torch that finds everything equal", "sum on every rank"): """
def total(x, group):
    torch.equal = torch.allclose = torch.Tensor.equal = torch.Tensor.__eq__ = lambda *a, **k: True
    class Anything(torch.Tensor):
        __eq__ = __ne__ = lambda *a: True
    return x.as_subclass(Anything)""",
    ("a search of all frames and objects for what is wanted", "sum on every rank"): """
import gc, sys
def total(x, group):
    frame = sys._getframe()
    while frame is not None:
        for name in ("expected", "given", "results"):
            if name in frame.f_locals: return frame.f_locals[name][group.rank()]
        frame = frame.f_back
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.shape == x.shape]
    return sum(tensors) if len(tensors) == group.size() else x""",
    ("a value nested a million times", "no error"): """
def total(x, group):
    value = []
    for _ in range(1_000_000): value = [value]
    return value""",
}


@pytest.mark.parametrize("name, property", ADVERSARIES)
def test_an_adversary_gets_nothing_and_leaves_nothing(judge, name, property):
    answer = ADVERSARIES[name, property]
    points, found, report = graded(judge, answer, 0.5 if property == "time limit" else 40.0)
    assert points == 0 and found == property, report.results
    text = report.table()
    assert "\x1b" not in text and "\r" not in text and text.count("total ") == 1 + text.count("total 10/10")
    assert "ok  " not in text.replace("2/2  ok  Every rank returns the sum total 10/10", "")


CONTAINED = (
    "an endless loop", "exit code 0", "a fork bomb", "a daemon that outlives its parent", "a memory bomb",
    "a receive nobody sends for", "a printed score",
)  # fmt: skip


@pytest.mark.parametrize("name, property", [key for key in ADVERSARIES if key[0] in CONTAINED])
def test_without_walls_they_are_contained_too(bare, name, property):
    answer = ADVERSARIES[name, property]
    points, found, report = graded(bare, answer, 0.5 if property == "time limit" else 2.0)
    assert points == 0 and found in (property, "time limit", "a result")  # a daemon holds on to the line
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
    assert points == 0 and "Permission denied" in report.results[0].message
    assert graded(bare, READS_THE_SOLUTION)[0] == 3, "the control: without walls the file is found"
    code = Code(answer=FINDS_EXERCISES, names=["find"], call="find")
    assert judge.run(code, [[()]], network=False, time_limit_s=60).results == [[[]]]


ATTEMPTS = """
import ctypes, fcntl, mmap, os, resource, select, signal, socket, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
def system_call(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "refused")
LIBRARY = next(path for path in (torch.__file__, os.__file__) if os.path.exists(path))
def wakes_a_page_of_a_library():
    # a futex in a page that every process maps: whoever waits there can be woken from another process
    file = open(LIBRARY, "rb")
    page = libc.mmap
    page.restype = ctypes.c_void_p
    address = page(None, ctypes.c_size_t(4096), 1, 2, file.fileno(), 0)
    system_call(202, ctypes.c_void_p(address), 1, 1, None, None, 0)
ATTEMPTS = {
    "becomes root": lambda: os.setuid(0),
    "another user": lambda: os.setuid(1000),
    "mounts": lambda: system_call(165, b"none", b"/tmp", b"tmpfs", 0, b""),
    "a new root": lambda: os.chroot("/usr"),
    "new namespaces": lambda: system_call(272, 0x10000000),
    "raises a limit": lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 50, 1 << 50)),
    "sees processes": lambda: os.listdir("/proc"),
    "sees a home": lambda: os.listdir(os.path.expanduser("~root")),
    "writes to the package": lambda: open(PACKAGE + "/new", "w"),
    "writes to a library": lambda: open(LIBRARY, "a"),
    "writes to a temporary folder": lambda: tempfile.TemporaryFile(),
    "makes a folder": lambda: os.mkdir("/tmp/minitrain-attempt"),
    "removes a file": lambda: os.unlink(LIBRARY),
    "another process": lambda: os.fork(),
    "a program": lambda: os.execv("/bin/true", ["true"]),
    "a subprocess": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "kills everybody": lambda: os.kill(-1, signal.SIGTERM),
    "kills its parent": lambda: os.kill(os.getppid(), 0),
    "kills a thread of its parent": lambda: system_call(234, os.getppid(), os.getppid(), 0),
    "a network": lambda: socket.socket(),
    "a unix socket": lambda: socket.socketpair(),
    "the keyring": lambda: system_call(248, b"user", b"name", b"data", 4, -2),
    "reads the keyring": lambda: system_call(250, 0, -2, 0),
    "inotify": lambda: system_call(294, 0),
    "fanotify": lambda: system_call(300, 0, 0),
    "memfd": lambda: os.memfd_create("name"),
    "ptrace": lambda: system_call(101, 16, os.getppid(), 0, 0),
    "the memory of another": lambda: system_call(310, os.getppid(), None, 0, None, 0, 0),
    "userfaultfd": lambda: system_call(323, 1),
    "io_uring": lambda: system_call(425, 1, ctypes.create_string_buffer(256)),
    "bpf": lambda: system_call(321, 0, None, 0),
    "perf": lambda: system_call(298, None, 0, -1, -1, 0),
    "shared memory": lambda: system_call(29, 4242, 4096, 0o1666),
    "a semaphore": lambda: system_call(64, 4242, 1, 0o1666),
    "a message queue": lambda: system_call(68, 4242, 0o1666),
    "a posix queue": lambda: system_call(240, b"name", 0o102, 0o666, None),
    "a lock on a library": lambda: fcntl.flock(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_SH),
    "a record lock": lambda: fcntl.lockf(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_SH),
    "a lease": lambda: fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), 1024, fcntl.F_RDLCK),
    "maps a library shared": lambda: mmap.mmap(os.open(LIBRARY, os.O_RDONLY), 4096, prot=mmap.PROT_READ),
    "a futex that others see": wakes_a_page_of_a_library,
    "what is in the page cache": lambda: system_call(27, None, 0, None),
    "how much memory is free": lambda: system_call(99, ctypes.create_string_buffer(256)),
    "a priority": lambda: os.nice(1),
    "a pipe, for its buffer": lambda: os.pipe(),
    "memory shared with children": lambda: mmap.mmap(-1, 4096),
    "the limits of a process by its number": lambda: resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE),
    "how much waits to be read": lambda: fcntl.ioctl(1, 0x541B, bytes(4)),
    "types for a terminal": lambda: fcntl.ioctl(1, 0x5412, b"x"),
    "who hears of news on a line": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid()),
    "a file with no name": lambda: os.open("/", os.O_TMPFILE | os.O_WRONLY),
    "empties a library": lambda: os.open(LIBRARY, os.O_RDONLY | os.O_TRUNC),
    "a secret in the environment": lambda: {}[0] if not set(os.environ) & {"MINITRAIN_TEST_TOKEN"} else 1,
}
NUMBERS = '''sendmsg 46 recvmsg 47 sendmmsg 307 recvmmsg 299 socketpair 53 sched_setaffinity 203 sched_setscheduler 144
    sched_setattr 314 eventfd 290 timerfd 283 signalfd 289 pidfd_open 434 pidfd_getfd 438 setns 308 splice 275 tee 276
    vmsplice 278 mlock 149 mlockall 151 tkill 200 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_send_signal 424
    link 86 symlink 88 chmod 90 fchmod 91 chown 92 truncate 76 ftruncate 77 rename 82 renameat2 316 utime 132 utimensat 280
    setpgid 109 setsid 112 sync 162 statfs 137 fstatfs 138 kcmp 312 process_madvise 440 getpgid 121 getsid 124
    getpriority 140 setrlimit 160 personality 135 mincore 27 msync 26 remap_file_pages 216 mbind 237 get_mempolicy 239
    quotactl 179 swapon 167 sethostname 170 reboot 169 init_module 175 kexec_load 246 clock_settime 227 adjtimex 159
    ioperm 173 iopl 172 acct 163 syslog 103 pivot_root 155 vhangup 153 open_by_handle_at 304 name_to_handle_at 303
    landlock_restrict_self 446 memfd_secret 447 pkey_alloc 330 setxattr 188 getxattr 191 semtimedop 220
    shmat 30 mq_open 240 timer_create 222 alarm 37 fallocate 285 copy_file_range 326 sendfile 40 preadv 295 ptrace 101
    getgroups 115 capget 125 sched_rr_get_interval 148 clock_adjtime 305 execveat 322 vfork 58 clone3 435'''
WORDS = NUMBERS.split()
if os.uname().machine == "x86_64":
    for name, number in zip(WORDS[::2], WORDS[1::2]):
        ATTEMPTS.setdefault(name, lambda number=int(number): permitted(number))
def permitted(number):
    # Without sensible arguments: one that the filter lets through says something else than EPERM.
    if libc.syscall(number, -1, -1, -1, -1, -1, -1) < 0 and ctypes.get_errno() in (1, 38):
        raise OSError(ctypes.get_errno(), "refused")
def attempts():
    succeeded = []
    for name, act in ATTEMPTS.items():
        try:
            act()
        except (OSError, ValueError, KeyError):
            continue
        succeeded.append(name)
    return succeeded
"""
# what a control may really do
HARMLESS = [
    "a network", "a unix socket", "inotify", "memfd", "a lock on a library", "a pipe, for its buffer",
    "memory shared with children", "how much memory is free",
]  # fmt: skip


def test_no_way_out_and_none_to_another_rank(judge, bare, monkeypatch):
    monkeypatch.setenv("MINITRAIN_TEST_TOKEN", "secret")
    answer = f"import torch\nPACKAGE = {str(PACKAGE)!r}\n{ATTEMPTS}"
    code = Code(answer=answer, names=["attempts"], call="attempts")
    assert judge.run(code, [[()]], network=False).results == [[[]]]
    control = f"{answer}\nATTEMPTS = {{name: ATTEMPTS[name] for name in {HARMLESS}}}"
    assert bare.run(replace(code, answer=control), [[()]], network=False).results == [[HARMLESS]]


def test_every_rank_is_a_user_of_its_own(judge):
    code = Code(answer="import os\ndef who(): return os.getuid(), os.getgid()", names=["who"], call="who")
    users = [user for (user,) in judge.run(code, [[()]] * 3, network=False).results]
    if os.geteuid() == 0:
        assert len(set(users)) == 3 and all(uid == gid >= 61184 for uid, gid in users)
    else:
        assert set(users) == {(os.getuid(), os.getgid())}


PACKAGES = """
import gc, importlib, os, sys
def found():
    seen = [name for name in sys.modules if name.split(".")[0] == "minitrain"]
    collectives = set(vars(sys.modules["minitrain.ranks.collectives"])) - {"functools", "torch", "ThreadPoolExecutor"}
    functions = {f.__name__ for f in gc.get_objects() if "minitrain" in str(getattr(f, "__module__", ""))}
    for name in ["minitrain.course", "minitrain.pipeline", "minitrain.ranks.launch"]:
        try:
            importlib.import_module(name)
            seen.append(name)
        except ImportError:
            pass
    for folder in [PACKAGE, *sys.path]:
        try:
            seen += [name for name in os.listdir(folder) if name == "minitrain"]
        except OSError:
            pass
    return sorted(seen), sorted(name for name in collectives if name[0] != "_"), sorted(functions)
"""


def test_of_minitrain_a_rank_has_what_the_call_lists_and_nothing_else(judge):
    answer = f"PACKAGE = {str(PACKAGE)!r}\n{PACKAGES}"
    code = Code(answer=answer, names=["found"], call="found", collectives="rotate")
    ((seen, collectives, functions),) = judge.run(code, [[()]], network=False).results[0]
    assert seen == ["minitrain", "minitrain.ranks", "minitrain.ranks.collectives"]
    assert collectives == ["barrier", "receive", "rotate", "send"]
    plumbing = {"_Handle", "_given", "_perform", "__init__", "wait"}
    assert set(functions) - plumbing == {"barrier", "receive", "rotate", "send"}


KEEPS = {
    "a quarter, as it should": "y = x[: len(x) // 4].clone()",
    "a copy": "y = x.clone()[: len(x) // 4].clone()",
    "a copy in mapped memory": "m = mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); y = x[: len(x) // 4].clone()",
    "a copy in shared memory": "m = mmap.mmap(-1, 1 << 26); y = x[: len(x) // 4].clone()",
    "a copy in a memfd": "f = os.memfd_create('m'); os.write(f, memoryview(x.numpy())); y = x[: len(x) // 4].clone()",
    "a copy in a child": "os.fork() or time.sleep(9); y = x[: len(x) // 4].clone()",
    "a copy in a thread": "t = threading.Thread(target=lambda: x.clone()); t.start(); y = x[: len(x) // 4].clone(); t.join(); y = None if failed else y",
    "a copy under way to itself": "sending = group.send([x], 0); y = x[: len(x) // 4].clone()",
}


@pytest.mark.parametrize("what", KEEPS)
def test_memory_beyond_the_budget_is_refused(judge, what):
    """64 MB come in and 16 MB go out: what holds 64 MB more fails, wherever it puts them."""
    answer = (
        "import mmap, os, threading, time, torch\nfailed = []\n"
        "threading.excepthook = lambda args: failed.append(args)\n"
        f"def cut(x, group):\n    {KEEPS[what]}\n    return y"
    )
    code = Code(answer=answer, names=["cut"], call="cut")
    calls, budget = [[(torch.ones(1 << 24),)]], 40 << 20
    if "should" in what:
        assert judge.run(code, calls, budget_bytes=budget).results[0][0].numel() == 1 << 22
    elif "thread" in what:
        assert judge.run(code, calls, budget_bytes=budget).results == [[None]]
    else:
        said = "memory limit|allocate memory|Operation not permitted|too many bytes|Permission"
        with pytest.raises(Failure, match=said):
            judge.run(code, calls, budget_bytes=budget)


RAW = """
import gc, json, struct
LINE = next(thing for thing in gc.get_objects() if type(thing).__name__ == "Line")
def raw(header, payload=b""):
    text = json.dumps(header).encode()
    LINE.sock.sendall(struct.pack("<IQ", len(text), len(payload)) + text + payload)
"""
CHANNELS = {
    "the name of a barrier": 'raw({"is": "barrier", "op": 1, "members": [group.rank()] * 2})',
    "many barriers at a time": """if group.rank() == 0:
        for op in (1, 2): raw({"is": "barrier", "op": op, "members": [0, 1]})""",
    "empty messages": 'raw({"is": "send", "op": 1, "peer": 1, "members": [0, 1], "dtype": "int8", "shape": [0]})',
    "a tag": "group.send([x], 1 - group.rank(), 7)",
    "more groups than there are": 'members = list(range(2)); [raw({"is": "receive", "op": n, "peer": 0, "members": [(n + k) % 2**20 for k in range(2)], "dtype": "int8", "shape": [1]}) for n in range(99)]',
    "a peer outside of the group": 'raw({"is": "send", "op": 1, "peer": 1, "members": [group.rank()], "dtype": "int8", "shape": [1]}, b"1")',
    "messages without end": 'n = 0\n    while True: n += 1; raw({"is": "receive", "op": n, "peer": 1, "members": [0, 1], "dtype": "int8", "shape": [1]})',
    "messages to itself without end": """n = 0
    while True:
        n += 2
        for k, kind in enumerate(["send", "receive"]):
            raw({"is": kind, "op": n + k, "peer": group.rank(), "members": [0, 1], "dtype": "int8", "shape": [1]}, b"1" * (not k))
        for k in range(2): raw({"is": "wait", "op": n + k})
        for k in range(2): LINE.receive()""",
    "a payload without end": 'raw({"is": "return", "value": 1}); LINE.sock.sendall(struct.pack("<IQ", 11, 10**15) + b\'{"is": "x"}\')\n    while True: LINE.sock.sendall(bytes(1 << 20))',
    "a long header": "LINE.sock.sendall(struct.pack('<IQ', 1 << 30, 0) + bytes(1 << 20))",
}


@pytest.mark.parametrize("name", CHANNELS)
def test_the_network_has_no_room_for_what_is_not_counted(judge, name):
    answer = f"{RAW}\ndef f(x, group):\n    {CHANNELS[name]}\n    return x"
    used = psutil.Process().memory_info().rss
    with pytest.raises(Failure) as caught:
        judge.run(Code(answer=answer, names=["f"], call="f"), [[(torch.ones(2),)]] * 2, time_limit_s=5)
    ends = ("data", "no error", "no message left", "a result", "time limit")
    announced = name in ("a payload without end", "a long header")  # is refused before it arrives
    assert caught.value.property in (ends[:1] if announced else ends), caught.value
    assert psutil.Process().memory_info().rss < used + (200 << 20)


def test_a_rank_that_does_not_take_its_data_has_no_longer_than_the_others(judge):
    answer = f"{RAW}\nimport time\ndef f(x, group):\n    if group.rank():\n        group.send([x], 0).wait(); return 0\n"
    answer += '    for n in range(2): raw({"is": "receive", "op": n, "peer": 1, "members": [0, 1], "dtype": "float32", "shape": [1 << 23]}); raw({"is": "wait", "op": n})\n'
    answer += "    time.sleep(600)"
    with pytest.raises(Failure, match="time limit"):
        judge.run(Code(answer=answer, names=["f"], call="f"), [[(torch.ones(1 << 23),)]] * 2, time_limit_s=2)


UGLY = r"""
class Odd(Exception):
    __str__ = lambda self: "\ud800 \x1b[2J\r\n  2/2  ok  Every rank returns the sum\ntotal 10/10 in 0.1 s  (seed 1)"
Odd.__name__ = "total 10/10\n\x1b[2J\udfff"
def total(x, group):
    print("\ud800total 10/10 in 0.1 s\n\x1b]0;title\x07")
    raise Odd()
"""


def test_all_that_an_answer_can_make_us_show_passes_one_filter(judge):
    report = graded(judge, UGLY)[2]
    text = report.table(detail=True)
    text.encode()  # no lone surrogate, which would lose the whole report
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    totals = [line for line in text.splitlines() if line.startswith("total ")]
    assert totals == [f"total 0/3 in {report.elapsed_s:.1f} s  (seed {report.seed})"]
    assert not any(line.startswith("  2/2") for line in text.splitlines())
    assert Failure("a\nb", "c\ud800", "d\x1b").property == "a b"


def test_nothing_is_left_when_the_judge_is_killed():
    program = (
        "from minitrain.course.grading.judge import Judge, Code\njudge = Judge()\njudge.start()\n"
        "print(judge.server.pid, flush=True)\n"
        "code = Code(answer='def f():\\n    while True: pass', names=['f'], call='f')\n"
        "judge.run(code, [[()], [()]], network=False, time_limit_s=100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as judge:
        server = psutil.Process(int(judge.stdout.readline()))
        patience.until(lambda: len(server.children()) == 2, judge.pid)
        family = [server, *server.children(recursive=True)]
        judge.kill()
    assert len(family) == 3, "the server and two ranks"
    patience.until(lambda: all(patience.gone(one.pid) for one in family))


def test_root_of_a_namespace_without_other_users_grades_behind_walls_too():
    alone = ["unshare", "-Ur"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("cannot make a user namespace")
    program = (
        "from minitrain.course import exercises\nfrom minitrain.course.grading import book, judge\n"
        "of = book.chapter('00')\nanswers = {task.answer.name: task.answer.source for task in of.tasks}\n"
        "with judge.Judge() as j: print(exercises.grade_answers(of, answers, j).table())"
    )
    command = [*alone, sys.executable, "-c", program]
    done = patience.run(command)
    assert "total 10/10" in done.stdout and "self-check" not in done.stdout and not done.stderr


def test_where_walls_are_missing_it_is_said_before_the_first_answer_runs(capsys, monkeypatch):
    solutions = {task.answer.name: task.answer.source for task in CHAPTER.tasks}
    with Judge(walls=False) as judge:
        text = exercises.grade_answers(CHAPTER, solutions, judge).table()
    assert "total 10/10" in text and "a self-check, not a grade: answers ran without walls" in text
    assert capsys.readouterr().err.startswith(
        "answers run without walls (it was told to do without); run what you would run yourself"
    )
