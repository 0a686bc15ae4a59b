"""What stands around chapters, piece by piece: numbers and headings, tables, outputs that are joined, a folder that is
laid out, kernels that end, and the words of the command; no notebook runs here."""

import asyncio
import json
import signal
import sys
import traceback
import types
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import DeadKernelError
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.course import home, kernels, notebook


def test_chapters_are_in_the_order_of_their_numbers(tmp_path):
    for name in (
        "10_last.ipynb", "02_second.ipynb", "x2_none.ipynb", "02_second.py", "2_none.ipynb", "03.ipynb",
    ):  # fmt: skip
        (tmp_path / name).touch()
    found = notebook.numbered(tmp_path, ".ipynb")
    assert list(found.items()) == [("02", tmp_path / "02_second.ipynb"), ("10", tmp_path / "10_last.ipynb")]
    paths = [tmp_path / "10_last.ipynb", tmp_path / "02_second.ipynb"]
    listed = types.SimpleNamespace(glob=lambda pattern: paths)
    assert list(notebook.numbered(listed, ".ipynb")) == ["02", "10"], "however a disk lists them"
    for number in (2, "2", "02"):
        assert notebook.key_among(number, found, "{}") == "02"
    with pytest.raises(ValueError, match="^none is 'x2'; there are 02, 10$"):
        notebook.key_among("x2", found, "none is {!r}")
    with pytest.raises(ValueError, match="^no 3; there are none$"):
        notebook.key_among(3, {}, "no {}")


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    "source, answers",
    [("guess", True), ("show(guess, 3)", True), ("guess = 4", False), ("guess=4", False), ("a = 1  # guessed", False), ("x = guess", True), ("guess == 4", False)],
)  # fmt: skip
def test_a_cell_that_reads_a_guess_answers_a_prediction(source, answers):
    assert notebook.answers_a_prediction(source) == answers


# ---- where chapters are ----------------------------------------------------------------------------------


def test_home_is_the_folder_that_is_laid_out_here_or_above_else_the_clone(tmp_path):
    package, laid_out = tmp_path / "clone" / "minitrain", tmp_path / "out"
    (laid_out / "below" / "deep").mkdir(parents=True)
    package.mkdir(parents=True)
    assert home.find(laid_out / "below", package) is None
    (package.parent / "notebooks").mkdir()
    assert home.find(laid_out / "below", package) == package.parent
    (laid_out / home.MARK).touch()
    for folder in (laid_out, laid_out / "below" / "deep"):
        assert home.find(folder, package) == laid_out
    (laid_out / "below" / home.MARK).touch()
    assert home.find(laid_out / "below" / "deep", package) == laid_out / "below", "the nearest"


def test_without_a_home_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(home, "HOME", None)
    said = "^no chapters here: `minitrain init FOLDER` lays them out, then call this in FOLDER$"
    with pytest.raises(ValueError, match=said):
        home.at_home()
    monkeypatch.setattr(home, "HOME", tmp_path)
    assert home.at_home() == tmp_path

    def gone():
        raise FileNotFoundError

    monkeypatch.setattr(home.Path, "cwd", gone)
    assert home.here() == home.PACKAGE.parent


def a_clone(folder: Path) -> Path:
    names = [
        "notebooks/00_a.ipynb", "notebooks/pictures/a.svg", "exercises/source/00.py", "README.md", "LICENSE",
    ]  # fmt: skip
    hidden = ["notebooks/.ipynb_checkpoints/00_a.ipynb", "exercises/__pycache__/a.pyc"]
    hidden += ["notebooks/.hidden", "tests/a.py"]
    for name in (*names, *hidden):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_is_laid_out_from_a_wheel_or_a_clone(packed, tmp_path, monkeypatch):
    clone = a_clone(tmp_path / "clone")
    monkeypatch.setattr(home, "PACKAGE", clone / "minitrain")
    monkeypatch.setattr(home, "ARCHIVE", tmp_path / "made" / "course.zip")
    (clone / "minitrain").mkdir()
    if packed:
        home.pack(clone, home.ARCHIVE)
        assert zipfile.ZipFile(home.ARCHIVE).infolist()[0].compress_type == zipfile.ZIP_DEFLATED
        monkeypatch.setattr(home, "PACKAGE", tmp_path / "made")
    folder = tmp_path / "a" / "new"
    assert home.lay_out(folder) == []
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == [
        ".minitrain", "LICENSE", "README.md", "exercises/source/00.py", "notebooks/00_a.ipynb",
        "notebooks/pictures/a.svg",
    ]  # fmt: skip
    assert (folder / "notebooks/00_a.ipynb").read_text() == "notebooks/00_a.ipynb"
    assert (folder / "minitrain").resolve() == home.PACKAGE.resolve()
    for taken in (folder, folder / "LICENSE"):
        with pytest.raises(ValueError, match=f"^{taken} is there and not empty: give a new folder$"):
            home.lay_out(taken)
    (tmp_path / "empty").mkdir()
    assert home.lay_out(tmp_path / "empty") == []


def test_what_cannot_be_laid_out_is_said_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(home, "PACKAGE", tmp_path / "site" / "minitrain")
    monkeypatch.setattr(home, "ARCHIVE", tmp_path / "site" / "course.zip")
    with pytest.raises(ValueError, match="has no course.zip: install minitrain again, or use a clone$"):
        home.lay_out(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(home, "PACKAGE", a_clone(tmp_path / "clone") / "minitrain")

    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(home.Path, "symlink_to", refuse)
    told = "no link to the modules (Operation not permitted); the notebooks run without"
    assert home.lay_out(tmp_path / "new") == [told] and (tmp_path / "new" / home.MARK).exists()


@pytest.mark.parametrize(
    "heard, error, raised, code",
    [
        ((), asyncio.CancelledError, asyncio.CancelledError, None),
        ((), DeadKernelError, DeadKernelError, None),
        ((signal.SIGINT,), asyncio.CancelledError, KeyboardInterrupt, None),
        ((signal.SIGINT,), DeadKernelError, KeyboardInterrupt, None),
        ((signal.SIGTERM,), asyncio.CancelledError, SystemExit, 143),
        ((signal.SIGINT,), RuntimeError, RuntimeError, None),
    ],
)
def test_how_a_run_ends_that_was_interrupted(heard, error, raised, code, monkeypatch):
    made = {}

    class Client(kernels.Client):
        def __init__(self, given, **settings):
            made.update(settings, notebook=given)

        async def async_execute(self):
            self.heard = heard
            raise error()

    monkeypatch.setattr(kernels, "Client", Client)
    with pytest.raises(raised) as ended:
        kernels.run("a notebook", "a folder", timeout=7)
    assert code is None or ended.value.code == code
    assert made == dict(
        notebook="a notebook", resources={"metadata": {"path": "a folder"}}, kernel_name="python3", timeout=7,
        kernel_manager_class=kernels.AsyncManager, extra_arguments=["--log-level=ERROR"],
    )  # fmt: skip


def test_the_first_signal_stops_a_run_and_the_kernel_at_once():
    client, done = kernels.Client(nbformat.v4.new_notebook()), []
    client.work = types.SimpleNamespace(cancel=lambda: done.append("cancelled"))
    for number in (signal.SIGTERM, signal.SIGINT):
        client.stop(number)
    assert client.heard == (signal.SIGTERM,) and done == ["cancelled"]
    assert client.shutdown_kernel == "immediate"


# ---- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, rank, code, said",
    [
        (ValueError("two\nlines"), None, 2, "minitrain: two lines\n"),
        (OSError("no disk"), "0", 2, "minitrain: no disk\n"),
        (RuntimeError("rank 1 failed"), "0", 1, "minitrain: rank 1 failed\n"),
        (RuntimeError("rank 1 failed"), "1", 1, ""),
        (ValueError("a\udcff" + "x" * 2000 + "end"), None, 2, None),
    ],
)
def test_an_error_is_one_line_of_the_first_rank(error, rank, code, said, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(main, "app", lambda **_: (_ for _ in ()).throw(error))
    with pytest.raises(SystemExit) as ended:
        main.main()
    told = capsys.readouterr().err
    assert ended.value.code == code and (said is None or told == said)
    if said is None:
        assert told.startswith("minitrain: a\\udcffx") and told.endswith("xx\n")
        assert len(told) == len("minitrain: ") + main.MOST_LETTERS + 1


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(main, "app", lambda **_: {}["key"])
    with pytest.raises(KeyError):
        main.main()


def invoke(*words: str):
    return CliRunner().invoke(main.app, list(words))


@pytest.fixture
def two_chapters(tmp_path, monkeypatch):
    """Whose cells are not run; what would run, and where it would go, is looked at."""
    paths = {f"0{n}": tmp_path / f"0{n}_name.ipynb" for n in (3, 4)}
    monkeypatch.setattr(notebook, "chapters", lambda: paths)
    monkeypatch.setattr(home, "at_home", lambda: tmp_path)
    ran = []

    def execute(path, out, on_cell):
        on_cell(1, 2), on_cell(2, 2)
        ran.append((path.name, out))
        if len(ran) == interrupted_at:
            raise KeyboardInterrupt
        return 1.26

    interrupted_at = None
    monkeypatch.setattr(notebook, "execute", execute)

    def interrupt(number):
        nonlocal interrupted_at
        interrupted_at = number

    return ran, interrupt


def test_chapters_that_are_run_are_told_one_by_one(two_chapters, tmp_path):
    ran, interrupt = two_chapters
    out = tmp_path / "out"
    result = invoke("run", "--out", str(out))
    assert result.exit_code == 0 and [name for name, _ in ran] == ["03_name.ipynb", "04_name.ipynb"]
    assert ran[0][1] == out / "03_name.ipynb"
    lines = result.output.splitlines()
    assert lines[0] == f"ok  {'03_name':24}   1.3 s" and lines[2].startswith("2 of 2 chapters ran in 0 s;")
    assert lines[2].endswith(f"executed notebooks are in {out}/")
    result = invoke("run", "4", "--save", "--out", str(out))
    assert ran[-1] == ("04_name.ipynb", tmp_path / "04_name.ipynb")
    assert "executed notebooks are in place" in result.output
    interrupt(5)
    result = invoke("run", "3", "4", "--out", str(out))
    assert result.exit_code == 130 and "interrupted in 04_name; 1 of 2 chapters ran\n" in result.output


@pytest.mark.parametrize("what", ["sum", "error", "memory", "nothing"])
def test_doctor_ends_with_1_for_what_is_missing_and_says_what_to_do(what, monkeypatch):
    if what == "memory":
        monkeypatch.setattr(main.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1.9e9))
    from minitrain import launch

    def run(fn, ranks):
        if what == "error":
            raise RuntimeError("no loopback\nsecond line")
        return [4.0, 4.0, 4.0, 3.0 if what == "sum" else 4.0]

    monkeypatch.setattr(launch, "run", run)
    result = invoke("doctor")
    assert result.exit_code == (what != "nothing")
    failed = [line for line in result.output.splitlines() if line.startswith("FAIL")]
    words = {
        "sum": "4 ranks        four ranks added 1 and got [4.0, 4.0, 4.0, 3.0]   -> see 'When ranks cannot meet' in docs/commands.md",
        "error": "4 ranks        no loopback   -> see 'When ranks cannot meet' in docs/commands.md",
        "memory": "free memory    1.9 GB   -> the chapters need 2 GB; close something",
    }
    assert failed == ([f"FAIL  {words[what]}"] if what in words else [])
    assert result.output.count("ok  ") == 6 - len(failed)


def test_an_interrupt_of_a_command_is_exit_code_130(monkeypatch):
    monkeypatch.setattr(home, "at_home", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    result = invoke("list")
    assert (result.exit_code, result.output) == (130, "")


def test_an_error_in_a_notebook_shows_the_readers_lines(monkeypatch):
    shell = types.SimpleNamespace(
        showtraceback=lambda told, tb_offset: names.append(traceback.extract_tb(told[2]))
    )
    shell.set_custom_exc = lambda kinds, handler: setattr(shell, "handler", handler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    notebook.hide_frames()
    for cell, notes in ((lambda: notebook.compare({"a": ([], [])}), 1), (lambda: json.loads("{"), 0)):
        names = []
        with pytest.raises((TypeError, ValueError)) as caught:
            cell()
        shell.handler(shell, caught.type, caught.value, caught.tb)
        assert (
            len(getattr(caught.value, "__notes__", ())) == notes
            and sys.last_traceback is caught.value.__traceback__
        )
        assert [frame.name for frame in names[0]][1:] == ["<lambda>", "loads", "decode", "raw_decode"][
            : 1 if notes else 4
        ]
