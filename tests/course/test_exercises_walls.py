"""Each wall around an answer alone, in a process of its own that puts it up (of the walls' module nothing else is
loaded: 0.1 s each); what a rank is when its first line runs; and what the judge says where walls are missing."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from minitrain.course.grading.inside import confine
from minitrain.course.grading.judge import HERE, PACKAGE, Code, Judge

ROOT = os.geteuid() == 0
UID = 61184 if ROOT else None


@pytest.fixture(scope="module")
def walled(judge):
    judge.start()
    if judge.missing:
        pytest.skip(f"no walls: {judge.missing}")
    return judge


def alone(program: str, *args):
    """What a fresh process prints, as JSON, that has nothing but `confine`."""
    head = f"import ctypes, json, os, resource, signal, socket, sys\nsys.path.insert(0, {str(HERE)!r})\n"
    text = head + "from inside import confine\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text, *map(str, args)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_system_that_has_walls_uses_them(judge):
    """Else what follows would be skipped, and nobody would hear of it."""
    if not confine.LINUX or confine.libc.syscall(444, None, 0, 1) < 1 or PACKAGE.is_relative_to("/usr"):
        pytest.skip("no Landlock, or minitrain lies where answers must be able to read")
    pytest.importorskip("pyseccomp")
    judge.start()
    assert judge.missing == ""


FILES = """
folder, wanted = sys.argv[1:]
os.chdir(folder)
def unix_socket():
    socket.socket(socket.AF_UNIX).bind("new-socket")
ATTEMPTS = {
    "reads": lambda: open("file").read(),
    "lists": lambda: os.listdir("."),
    "writes": lambda: os.open("file", os.O_WRONLY),
    "appends": lambda: os.open("file", os.O_WRONLY | os.O_APPEND),
    "truncates": lambda: os.truncate("emptied", 0),
    "makes a file": lambda: os.open("new", os.O_CREAT | os.O_WRONLY),
    "makes a folder": lambda: os.mkdir("new-folder"),
    "makes a link": lambda: os.symlink("file", "new-link"),
    "makes a pipe": lambda: os.mkfifo("new-pipe"),
    "makes a socket": unix_socket,
    "gives a file a second name": lambda: os.link("file", "inner/second"),
    "moves a file": lambda: os.rename("moved", "inner/moved"),
    "removes a file": lambda: os.unlink("removed"),
    "removes a folder": lambda: os.rmdir("empty"),
    "runs a program": lambda: os.spawnv(os.P_WAIT, os.path.join(folder, "program"), ["program"]) == 127 and {}[0],
}
walls = confine.Walls(True, [] if sys.path.append(folder) or folder.endswith("site-packages") else [folder])
walls.calls = None
assert not walls.missing, walls.missing
if wanted == "walls":
    confine.confine_rank({"FSIZE": 1 << 30}, None, walls, None)
done = []
for name, act in ATTEMPTS.items():
    try:
        act()
    except (OSError, KeyError):
        continue
    done.append(name)
readable = [os.path.isfile(os.__file__) and open(os.__file__).read(9), os.listdir(os.path.dirname(os.__file__))[:0]]
print(json.dumps([done, bool(readable)]))
"""


def test_behind_the_wall_of_files_nothing_but_libraries_is_read_and_nothing_is_written(walled, tmp_path):
    """The control has the same rights but for the wall, and may do all of it."""
    said = {}
    for wanted in ("walls", "site-packages", "none"):
        folder = tmp_path / wanted
        for name in ("inner", "empty"):
            (folder / name).mkdir(parents=True)
        for name in ("file", "emptied", "moved", "removed"):
            (folder / name).write_text("text")
        (folder / "program").write_text("#!/bin/sh\nexit 0\n")
        (folder / "program").chmod(0o700)
        said[wanted], readable = alone(FILES, folder, "none" if wanted == "none" else "walls")
        assert readable
    assert said["walls"] == [] and len(said["none"]) == 15, said
    assert said["site-packages"] == ["reads", "lists"], "a folder of packages"
    for wanted in ("walls", "site-packages"):
        names = sorted(path.name for path in (tmp_path / wanted).iterdir())
        assert names == ["emptied", "empty", "file", "inner", "moved", "program", "removed"]
        assert (tmp_path / wanted / "emptied").read_text() == "text"


@pytest.mark.skipif(not ROOT, reason="only root may change how disks are mounted")
def test_reading_a_library_leaves_no_trace_and_what_the_server_mounts_stays_with_it(walled):
    with open(f"/proc/{walled.server.pid}/mountinfo") as file:
        mounts = [line.split() for line in file]
    assert mounts and all("noatime" in mount[5].split(",") for mount in mounts)
    assert not any(field.startswith("shared:") for mount in mounts for field in mount[6:])
    assert os.readlink(f"/proc/{walled.server.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")


RIGHTS = """
uid = json.loads(sys.argv[1])
if uid is not None:
    os.setgroups([4, 5])
confine.confine_rank({"CPU": 30, "NPROC": 300}, uid, confine.Walls(False, []), None)
names = ("CORE", "FSIZE", "NOFILE", "CPU", "NPROC")
limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names}
dies_with = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_with))
with open("/proc/self/status") as file:
    status = {line.split(":")[0]: line.split(":")[1].split() for line in file}
print(json.dumps([limits, dies_with.value, status]))
"""


@pytest.mark.skipif(not confine.LINUX, reason="no /proc")
def test_what_a_rank_has_given_up_before_the_first_line_of_an_answer_runs():
    limits, dies_with, status = alone(RIGHTS, json.dumps(UID))
    wanted = {"CORE": 0, "FSIZE": 0, "NOFILE": 128, "CPU": 30, "NPROC": 300}
    assert limits == {name: [most, most] for name, most in wanted.items()}, "for good: soft and hard"
    assert dies_with == signal.SIGKILL, "a change of user clears it, so it is asked for afterwards"
    assert status["NoNewPrivs"] == ["1"]
    if ROOT:
        assert status["Uid"] == status["Gid"] == [str(UID)] * 4 and status["Groups"] == []
        only_to_read = f"{1 << 2:016x}"
        found = [status[kind] for kind in ("CapEff", "CapPrm", "CapInh")]
        assert found == [[only_to_read], [only_to_read], ["0" * 16]]


def test_judges_that_run_side_by_side_have_ids_of_their_own(walled):
    if not ROOT:
        assert walled.users == [None] * 16
        return
    first = 61184 + 16 * (os.getpid() % 256)
    assert walled.users == [*range(first, first + 16)] and walled.users[-1] < 65534, "the last is nobody's"


LOOKS = """
import gc, os, signal, stat, sys, torch
def look():
    kinds = {}
    for fd in range(5000):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        kinds[str(fd)] = "socket" if stat.S_ISSOCK(mode) else "device" if stat.S_ISCHR(mode) else "file"
    out = sys.stdout
    return {
        "open": kinds, "folder": os.getcwd(), "one stream": sys.stderr is out, "frozen": gc.get_freeze_count() > 9999,
        "text": [out.encoding, out.errors, out.line_buffering, out.fileno()], "threads": torch.get_num_threads(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "pid": os.getpid(), "modules": sorted(sys.modules),
        "environ": sorted(os.environ), "alarm": signal.getitimer(signal.ITIMER_PROF)[0] if FREE else 4.5,
        "session": os.getsid(0) if FREE else os.getpid(),
    }
"""


@pytest.mark.parametrize("free", [False, True])
def test_what_a_rank_is_when_an_answer_looks_around(walled, bare, free):
    """Without walls it is the same, and may be asked for more."""
    code = Code(["import torch"], f"FREE = {free}\n{LOOKS}", names=["look"], call="look")
    ((seen,),) = (bare if free else walled).run(code, [[()]], network=False, time_limit_s=5).results
    kinds = list(seen["open"].values())
    # nothing to read, one place to print
    assert [seen["open"][fd] for fd in "012"] == ["device", "socket", "socket"]
    # its line, and how much it has
    assert sorted(kinds[3:]) == (["file", "socket"] if confine.LINUX else ["socket"])
    assert seen["folder"] == "/" and seen["one stream"] and seen["frozen"] and seen["threads"] == 1
    assert seen["text"] == ["utf-8", "backslashreplace", True, 1] and seen["interrupt"]
    assert seen["session"] == seen["pid"], "the group of processes that is killed at the end"
    assert 4 < seen["alarm"] < 4.71, "it tells where it is before its time is up"
    assert not {"HOME"} - {*seen["environ"]} and "PYTHONPATH" not in seen["environ"]


SEVEN = Code(answer="def f(): return 7", names=["f"], call="f")


@pytest.mark.parametrize("calls, many", [([], 0), ([[()]] * 17, 17), ([[()], [(), ()]], 2)])
def test_too_many_ranks_or_ranks_with_different_numbers_of_calls_are_refused(calls, many):
    with pytest.raises(ValueError, match=f"^{many} ranks; 1 to 16 get as many calls each$"):
        Judge().run(SEVEN, calls)
