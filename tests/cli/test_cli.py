"""The `minitrain` command: what it prints, and that an error is one line."""

import json
import os
import signal
import sys
from importlib import metadata

import nbformat
import psutil
import pytest
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.course import atlas, exercises, notebook
from minitrain.course.grading import assignment, book
from tests import patience


def invoke(*words: str):
    return CliRunner().invoke(main.app, list(words))


def test_doctor_lets_four_ranks_meet():
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output and "first launch" in result.output


def test_list_fits_a_terminal_with_two_lines_a_chapter():
    lines = invoke("list").output.splitlines()
    assert len(lines) == 2 * len(notebook.chapters()) + 1 and max(map(len, lines)) <= 80
    for number, line, facts in zip(notebook.chapters(), lines[::2], lines[1::2]):
        assert line.startswith(f"{number} · ") and "Time" in facts and "Ranks" in facts


def test_version_names_torch_without_loading_it():
    printed = invoke("--version").output
    assert printed.startswith("minitrain ") and f"torch {metadata.version('torch')}, Python 3." in printed


def test_atlas_is_searched_by_all_words():
    printed, found = invoke("atlas", "ring", "all-reduce").output, atlas.search("ring all-reduce")
    assert 0 < len(found) < len(atlas.rows()) and printed.endswith(f"{len(found)} systems\n")
    assert all(row.test in printed for row in found)
    assert printed.startswith(f"{found[0].chapter}  {found[0].kind:5} Ring all-reduce")


def test_atlas_says_what_is_near():
    assert "0 systems; nothing has 'megatrn'; near it are megatron" in invoke("atlas", "megatrn").output
    assert "each word occurs, but not together: ring " in invoke("atlas", "ring", "zb").output


def test_replay_of_a_small_model(tmp_path):
    result = invoke("replay", "tiny", "--ranks", "16", "--length", "64", "--trace", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert "16 ranks of H100" in result.output and "MFU" in result.output
    assert json.loads((tmp_path / "t.json").read_text())


def test_a_complaint_is_one_line(capsys):
    """Blanks of any kind are one, what is no text is escaped."""
    for given, said in (("a\n b\t\tc ", "a b c"), ("caf\udce9", "caf\\udce9")):
        main.complain(given)
        assert capsys.readouterr().err == f"minitrain: {said}\n"


@pytest.mark.parametrize("error, code", [(ValueError, 2), (OSError, 2), (RuntimeError, 1)])
def test_what_went_wrong_is_in_the_exit_code(error, code, monkeypatch, capsys):
    def fails(**_):
        raise error("this")

    monkeypatch.setattr(main, "app", fails)
    for rank, said in ((None, "minitrain: this\n"), ("0", "minitrain: this\n"), ("1", "")):
        monkeypatch.delenv("RANK", raising=False)
        if rank:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert (ended.value.code, capsys.readouterr().err) == (code, said)


def test_the_same_of_the_command_itself():
    done = patience.run([sys.executable, "-m", "minitrain", "run", "77"])
    assert done.returncode == 2 and done.stderr.startswith("minitrain: ") and done.stderr.count("\n") == 1


def test_a_chapter_that_fails_names_the_cell_and_is_written_all_the_same(tmp_path):
    path, seen = written_notebook(tmp_path / "broken.ipynb", "1 + 1", "1 / 0", "3"), []
    said = "broken.ipynb stopped in cell 2: ZeroDivisionError: division by zero"
    with pytest.raises(RuntimeError, match=said):
        notebook.execute(path, tmp_path / "out" / "broken.ipynb", lambda *cells: seen.append(cells))
    written = nbformat.read(tmp_path / "out" / "broken.ipynb", as_version=4)
    assert written.cells[0].outputs[0].data["text/plain"] == "2" and seen[0] == (1, 3)
    assert [cell.id for cell in written.cells] == ["cell-000", "cell-001", "cell-002"]


# ---- what is refused, and how soon -----------------------------------------------------------------------

NAMES = {  # a wrong name, and what is said before torch is loaded
    "run 77": "there is no chapter '77'; there are 00, 01, 02, 03",
    "grade 77": "chapter 77 has no exercises",
    "lab --fresh 77": "there is no chapter '77' to make fresh",
    "replay gpt9": "no preset is called 'gpt9'; did you mean 'gpt2'",
    "replay tiny --machine abacus": "machine='abacus': use v100, ",
    "plan --model nope": "no model is called 'nope'",
    "train --preset nope": "no preset is called 'nope'",
    "train --nope 3": "No such option: --nope",
    "train --tp x": "Invalid value for '--tp'",
    "train --pp 2 --schedule nope": "schedule='nope'; use gpipe",
    "train --cp 2 --layout zigzog": "layout='zigzog'; use contiguous, zigzag, striped; did you mean zigzag?",
    "train --precision nope": "precision='nope'; use float32",
    "train --zero XYZ": "zero='XYZ'; use 0",
    "train --tp 3": "tp=3 does not divide num_heads=4",
    "checkpoint ls /nowhere": "/nowhere has no checkpoints",
}
TABS = {  # what is typed when the Tab key is pressed, and some of what it offers
    "minitrain run 0": {"00", "03"},
    "minitrain grade 1": {"10", "11"},
    "minitrain replay llama3-": {"llama3-8b", "llama3-70b"},
    "minitrain replay tiny --machine h": {"h100", "h200"},
    "minitrain train --preset gpt2": {"gpt2", "gpt2-xl"},
    "minitrain train --schedule zb_h": {"zb_h1", "zb_h2"},
    "minitrain replay tiny --core ul": {"ulysses"},
    "minitrain atlas zer": {"zero"},
    "minitrain do": {"doctor"},
}
ALL_IN_ONE = """import contextlib, io, json, os, sys
from minitrain.cli import main
told = []
for words, environ in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["minitrain", *words]
    os.environ.update(environ)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.app(prog_name="minitrain") if environ else main.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    for name in environ:
        del os.environ[name]
    loaded = sorted({"torch", "numpy", "matplotlib", "IPython"} & {*sys.modules})
    told.append((code, out.getvalue(), err.getvalue(), loaded))
print(json.dumps(told))
"""


def in_one_process(*lines: tuple[list[str], dict[str, str]]) -> list[tuple]:
    """Of every command: exit code, stdout, stderr, and which heavy packages are loaded by then."""
    command = [sys.executable, "-c", ALL_IN_ONE, json.dumps(lines)]
    done = patience.run(command, env=os.environ | {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_names_and_help_need_no_torch():
    lines = [*["--help", "--version", "list", "atlas ring", "train --help"], *NAMES]
    told = in_one_process(*((line.split(), {}) for line in lines))
    for line, (code, out, err, loaded) in zip(lines, told, strict=True):
        said = NAMES.get(line)
        assert not loaded and code == (2 if said else 0), (line, err, loaded)
        assert (said in err and err.count("\n") == 1) if said else (out and not err), (line, err)


def test_the_tab_key_offers_names():
    completions = [
        dict(_MINITRAIN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(line.split()) - 1))
        for line in TABS
    ]
    told = in_one_process(*(([], environ) for environ in completions))
    for (line, offered), (_, out, _, loaded) in zip(TABS.items(), told, strict=True):
        assert offered <= {*out.split()} and "torch" not in loaded, line
        assert all(one.startswith(line.split()[-1]) for one in out.split()), line


# ---- more bad input, and interrupts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        ("replay tiny --compute-efficiency nan", "compute_efficiency=nan: use a number from 0 to 1"),
        ("replay tiny --trace .", "trace=.: give a file in a folder that is there"),
        ("run 00 --out file", "File exists: 'file'"),
        ("run 00 --out file/below", "Not a directory: 'file/below'"),
        ("checkpoint ls", "Missing argument 'folder'; see minitrain checkpoint ls --help"),
        ("--nope", "No such option: --nope; see minitrain --help"),
        ("nope", "No such command 'nope'; see minitrain --help"),
        ("train --pp 2 --microbatches 9999999", "a schedule of 19,999,998 cells; use fewer"),
        ("train --width 99999999999999999999", "d_model = 99999999999999999999; use at most 1,073,741,824"),
        ("train --text three.txt", "three.txt has 3 tokens, and no tenth: give"),
        ("train --text picture.png", "picture.png is binary"),
        ("grade 02 --file .", ". cannot be read (Is a directory); give a notebook"),
        ("grade 02 --file deep.ipynb", "deep.ipynb is not a notebook"),
        ("grade 02 --file flat.ipynb", "flat.ipynb is not a notebook"),
        ("grade 00 --folder full", "full has no notebooks: NAME.ipynb, or NAME/ with the chapter's in it"),
        ("grade --folder full", "full is of which chapter? minitrain grade 02 --file or --folder full"),
        ("init full", "full is there and not empty: give a new folder"),
    ],
)
def test_more_bad_input_is_one_line(words, message, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "three.txt").write_text("abc")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" + b"x" * 9000 + b"\0" * 9000)
    (tmp_path / "deep.ipynb").write_text("[" * 100_000)
    (tmp_path / "flat.ipynb").write_text('{"cells": [3, {"metadata": 4}]}')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    monkeypatch.setattr(sys, "argv", ["minitrain", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, errors = capfd.readouterr()
    assert ended.value.code == 2 and message in errors and errors.count("\n") == 1 and not out


def test_a_cell_without_points_is_an_edited_one(tmp_path):
    of = book.chapter("00")
    cells = json.loads(of.student.read_text())["cells"]
    for cell in cells:
        cell["metadata"].get("nbgrader", {}).pop("points", 0)
        if cell["metadata"].get("nbgrader", {}).get("solution"):
            cell["metadata"]["nbgrader"]["grade"] = True
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert assignment.state(of, tmp_path / "a.ipynb") == "edited"


@pytest.mark.parametrize(
    "words, message",
    [
        ("prove 99", "chapter 99 has no exercises; there are 00"),
        ("attack 99", "chapter 99 has no exercises; there are 00"),
        ("prove 02 --draws 0", "argument --draws: '0': use a whole number, 1 or more"),
        ("nbgrader /nope", "invalid choice: 'nbgrader'"),
    ],
)
def test_the_command_of_exercises_says_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        exercises.main(words.split())
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in said[-1] and said[0].startswith("usage: ")


def written_notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


INTERRUPTED = """import asyncio, sys
from pathlib import Path
from jupyter_client.provisioning import LocalProvisioner
from minitrain.cli import main
from minitrain.course import notebook
path = Path(sys.argv[1])
notebook.chapters = lambda: {"00": path}
kill = LocalProvisioner.kill
async def late(self, restart=False):  # whatever was sent to the kernel before has time to be heard
    await asyncio.sleep(0.5)
    await kill(self, restart)
LocalProvisioner.kill = late
sys.argv[1:] = ["run", "00", "--save"]
main.main()
"""


BETWEEN_CELLS = "import time; get_ipython().kernel.finish_metadata = lambda *given: time.sleep(600); "


@pytest.mark.parametrize("where", ["", BETWEEN_CELLS], ids=["in a cell", "between cells"])
def test_an_interrupted_run_is_one_line_and_changes_nothing(tmp_path, where):
    """As in a terminal: the kernel ends with it, and a chapter that was to be saved stays as it was."""
    begun = tmp_path / "begun"
    path = written_notebook(
        tmp_path / "00_long.ipynb",
        where + f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))",
        "time.sleep(600)",
    )
    before = path.read_bytes()
    process = patience.start([sys.executable, "-c", INTERRUPTED, path])
    patience.until(lambda: begun.exists() and begun.read_text(), process.pid)
    process.send_signal(signal.SIGINT)
    out, err = patience.output_of(process)
    assert (process.returncode, out, err) == (130, "", "interrupted in 00_long; 0 of 1 chapters ran\n")
    assert path.read_bytes() == before and not psutil.pid_exists(int(begun.read_text()))
