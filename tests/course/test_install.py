"""Which build of torch is installed where: indexes that answer, are slow, lack the wheel or are not there; a
GPU or none; a torch that is there already. pip is not run but for the proof that it would take such words."""

import http.server
import json
import os
import platform
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minitrain.course import install

PYTHON = "cp%d%d" % sys.version_info[:2]
WHEEL = f"torch-{install.TORCH}%2Bcpu-{PYTHON}-{PYTHON}-manylinux_2_28_{platform.machine()}.whl"
CPU = ["--no-deps", "--index-url", "the index", f"torch=={install.TORCH}"]
DEFAULT = [*install.CONSTRAINTS, f"torch=={install.TORCH}"]
REST = [*install.CONSTRAINTS, "-e", f"{install.ROOT}[course,test]"]


@pytest.fixture
def index(monkeypatch):
    """A local index: `page` is what it says, once it `may_answer`; asked for another project it knows nothing."""
    facts = {"page": f'<a href="{WHEEL}">torch</a>', "may_answer": threading.Event()}
    facts["may_answer"].set()
    ask = install.trouble_with_index
    monkeypatch.setattr(ask, "__defaults__", (60.0,))  # so that a busy machine is not taken for a slow index

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            facts["may_answer"].wait()
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()
            self.wfile.write(facts["page"].encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(install, "CPU_INDEX", f"http://127.0.0.1:{server.server_port}/cpu")
        yield facts
        facts["may_answer"].set()
        server.shutdown()


def test_an_index_that_answers_with_our_wheel_is_of_use(index):
    assert install.trouble_with_index() == ""
    index["page"] = index["page"].replace("%2B", "+")
    assert install.trouble_with_index() == ""


def test_a_slow_index_is_not_waited_for(index):
    """It never answers: what comes back comes of our own limit."""
    index["may_answer"].clear()
    assert install.trouble_with_index(wait_s=0.2) == "did not answer within 0.2 s"


def test_an_index_that_is_not_there_is_no_error(monkeypatch):
    for url in "http://127.0.0.1:9/cpu", "no url at all":
        monkeypatch.setattr(install, "CPU_INDEX", url)
        assert install.trouble_with_index() == "cannot be reached"


# ---- what pip is told ------------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """An environment whose python writes down what it is told; .torch is the version it has, .code pip's end."""
    log, has, code = (tmp_path / name for name in ("log", "has", "code"))
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!{sys.executable}
import json, sys
if sys.argv[1] == "-c":
    print(open({str(has)!r}).read())
elif sys.argv[3] != "--version":
    print(json.dumps(sys.argv[1:]), file=open({str(log)!r}, "a"))
    print("Collecting what is needed")
    sys.exit(int(open({str(code)!r}).read()))
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    has.write_text("")
    code.write_text("0")
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install, "GPU_SIGNS", ())

    class Pip:
        folder, torch, ends_with = python.parents[1], has, code

        def told(self) -> list[list[str]]:
            """The arguments of each pip install after those that are always given."""
            calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            always = ["-m", "pip", "--disable-pip-version-check", "install", "--root-user-action", "ignore"]
            assert all(call[:6] == always for call in calls), calls
            return [[word.replace(install.CPU_INDEX, "the index") for word in call[6:]] for call in calls]

    return Pip()


def test_without_a_gpu_and_with_an_index_it_is_the_cpu_build(pip, index, capsys):
    install.main(str(pip.folder))
    assert pip.told() == [CPU, REST]
    said = capsys.readouterr().out
    assert "the CPU build of" in said and "about 200 MB" in said and "no NVIDIA GPU" in said


@pytest.mark.parametrize("trouble", ["slow", "absent", "empty"])
def test_without_a_gpu_and_without_an_index_it_is_the_default_build(pip, index, capsys, monkeypatch, trouble):
    if trouble == "slow":
        index["may_answer"].clear()
        ask = install.trouble_with_index
        monkeypatch.setattr(install, "trouble_with_index", lambda: ask(0.2))
    elif trouble == "absent":
        monkeypatch.setattr(install, "CPU_INDEX", "http://127.0.0.1:9/cpu")
    else:
        index["page"] = ""
    install.main(str(pip.folder))
    assert pip.told() == [DEFAULT, REST]
    said = capsys.readouterr().out
    assert "the default build of" in said and "about 3 GB" in said and "the index of CPU builds" in said


def test_with_a_gpu_it_is_the_default_build_and_no_index_is_asked(pip, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(install, "GPU_SIGNS", (str(tmp_path),))
    monkeypatch.setattr(install, "trouble_with_index", lambda: pytest.fail("asked"))
    install.main(str(pip.folder))
    assert pip.told() == [DEFAULT, REST] and "there is an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.parametrize("wish, told", [("cuda", DEFAULT), ("cpu", CPU)])
def test_the_reader_decides(pip, index, monkeypatch, tmp_path, wish, told):
    """A GPU when it is not wanted, an index that works when CUDA is wanted."""
    monkeypatch.setenv("TORCH", wish)
    monkeypatch.setattr(install, "GPU_SIGNS", (str(tmp_path),) if wish == "cpu" else ())
    install.main(str(pip.folder))
    assert pip.told() == [told, REST]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.12.0a0+git123"])
def test_a_supported_torch_that_is_there_stays(pip, capsys, monkeypatch, version):
    monkeypatch.setattr(install, "trouble_with_index", lambda: pytest.fail("asked"))
    pip.torch.write_text(version)
    install.main(str(pip.folder))
    assert pip.told() == [REST] and f"{version} is installed already" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["2.10.2", "2.14.0", "2.11.0a0+git123", "3.0.0", "1.13.1"])
def test_another_torch_is_replaced(pip, index, version):
    pip.torch.write_text(version)
    install.main(str(pip.folder))
    assert pip.told() == [CPU, REST]


@pytest.mark.parametrize(
    "version, wish, told",
    [
        ("2.13.0+cpu", "cuda", [["--force-reinstall", *DEFAULT], REST]),
        ("2.13.0+cu130", "cpu", [["--force-reinstall", *CPU], REST]),
        ("2.13.0+cpu", "cpu", [REST]),
        ("2.12.0", "cuda", [REST]),
    ],
)
def test_the_other_build_takes_the_place_of_the_one_that_is_there(pip, monkeypatch, version, wish, told):
    monkeypatch.setenv("TORCH", wish)
    pip.torch.write_text(version)
    install.main(str(pip.folder))
    assert pip.told() == told


def test_a_wish_that_is_none_is_refused(pip, monkeypatch):
    monkeypatch.setenv("TORCH", "rocm")
    with pytest.raises(SystemExit, match="TORCH=rocm: use cpu or cuda, or leave it out"):
        install.main(str(pip.folder))
    assert pip.told() == []


def test_when_pip_fails_so_does_the_installation(pip, index):
    pip.ends_with.write_text("3")
    with pytest.raises(SystemExit, match="PyTorch was not installed; TORCH=cpu or TORCH=cuda"):
        install.main(str(pip.folder))
    pip.torch.write_text(install.TORCH)
    with pytest.raises(SystemExit) as ended:
        install.main(str(pip.folder))
    assert ended.value.code == 3


# ---- environments, for real but without pip --------------------------------------------------------------


def make_environment(folder: Path, fake_torch: str = "", python: str = sys.executable) -> Path:
    """A real one without pip, in which torch is said to be installed."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    if fake_torch:
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / f"torch-{fake_torch}.dist-info").mkdir()
        (site / f"torch-{fake_torch}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {fake_torch}\n")
    return folder / "bin/python"


@pytest.mark.parametrize("version, seen", [("2.11.0", "2.11.0"), ("2.9.0", "")])
def test_an_environment_made_from_one_with_a_supported_torch_sees_it(tmp_path, version, seen):
    """`make PYTHON=...` of an environment, or with one active: the new one stands on its packages."""
    python = make_environment(tmp_path / "theirs", version, os.path.realpath(sys.executable))
    program = f"""import sys; sys.path.insert(0, {str(Path(install.__file__).parent)!r})
import install, subprocess
from pathlib import Path
real = subprocess.call
subprocess.call = lambda words, **more: real([w for word in words for w in ([word, "--without-pip"] if word == "venv" else [word])], **more)
made = install.environment(Path({str(tmp_path / "new")!r}))
print(install.torch_of(made) + ".")
"""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{seen}."


@pytest.mark.parametrize(
    "version, supported",
    [("2.11", True), ("2.11.0+cpu", True), ("2.10.9", False), ("2.13.9", True), ("2.14", False), ("2.14.0", False),
     ("2.11.0rc1", False), ("2.12.0rc1", True), ("2.11.0.dev20260101", False), ("", False), ("3.0", False)],
)  # fmt: skip
def test_a_version_is_supported_from_the_floor_to_below_the_ceiling(version, supported):
    assert '"torch>=2.11,<2.14"' in (install.ROOT / "pyproject.toml").read_text()
    assert install.is_supported(version) == supported


def test_an_environment_that_is_there_is_kept_and_gets_pip_if_it_has_none(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "check_call", lambda words: calls.append(words[1:]))
    python = make_environment(tmp_path / "env", "2.11.0")
    assert install.environment(tmp_path / "env") == str(python) and calls == [["-m", "ensurepip"]]
    assert install.torch_of(str(python)) == "2.11.0"


def test_it_runs_before_anything_is_installed():
    """Standard library alone, and a Python that is too old is told so, not shown a traceback."""
    program = "import runpy; runpy.run_path(%r)" % install.__file__
    done = subprocess.run([sys.executable, "-S", "-E", "-c", program])
    assert done.returncode == 0
    text = "import sys; sys.version_info = (3, 10, 1); import install; install.main()"
    folder = Path(install.__file__).parent
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "Python 3.10 found; minitrain needs 3.11 or newer: make PYTHON=python3.12\n"


def test_make_without_a_target_says_what_there_is_and_does_nothing():
    done = subprocess.run(["make", "-C", install.ROOT], capture_output=True, text=True, check=True)
    for target in "course", "lab", "test", "clean", "TORCH=cuda":
        assert f"make {target} " in done.stdout
    assert len(done.stdout.splitlines()) <= 10


def test_clean_leaves_the_readers_work():
    command = ["make", "-n", "-C", install.ROOT, "clean"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "work" not in [word for line in done.stdout.splitlines() for word in line.split()[1:]]
