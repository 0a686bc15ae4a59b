"""A clone stays clean: JupyterLab saves what is stored, readers work in copies, and no copy is lost."""

import copy
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.course import exercises, lab, notebook
from minitrain.course.grading import book
from tests import patience

TOKEN = "a-token-of-this-test"


def small_root(tmp_path: Path) -> Path:
    """Two chapters with an exercise each, and what copies link to."""
    root = tmp_path / "clone"
    for number, name in ("00", "start"), ("03", "data"):
        for folder in lab.FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
            write(root / folder / f"{number}_{name}.ipynb", f"{folder} {number}")
    (root / "minitrain").mkdir()
    (root / "README.md").write_text("read me")
    (root / "notebooks" / "pictures").mkdir()
    return root


def write(path: Path, source: str, version: str = "3.11.7") -> None:
    cell = {"cell_type": "code", "source": [source], "metadata": {}, "outputs": [], "execution_count": None}
    metadata = {"language_info": {"name": "python", "version": version}}
    path.write_text(json.dumps({"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))


def source(path: Path) -> str:
    return "".join(json.loads(path.read_text())["cells"][0]["source"])


# ---- copies ----------------------------------------------------------------------------------------------


def test_copies_are_made_on_demand_with_links_to_the_rest(tmp_path):
    root = small_root(tmp_path)
    assert lab.prepare(root) == []
    for name in "notebooks/00_start.ipynb", "exercises/03_data.ipynb":
        assert (root / "work" / name).read_bytes() == (root / name).read_bytes()
    assert (root / "work/minitrain").resolve() == root / "minitrain"
    assert (root / "work/README.md").read_text() == "read me"
    assert (root / "work/notebooks/pictures").resolve() == root / "notebooks/pictures"
    assert not list((root / "work").rglob("*.part"))


def test_a_copy_that_nobody_changed_follows_its_chapter(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    mine = root / "work/notebooks/03_data.ipynb"
    write(mine, "notebooks 03", version="3.13.0")  # JupyterLab saved it, with another Python
    write(root / "notebooks/03_data.ipynb", "a better 03")
    assert lab.prepare(root) == [] and source(mine) == "a better 03"
    mine.unlink()
    assert lab.prepare(root) == [] and source(mine) == "a better 03"


def test_a_copy_that_the_reader_changed_is_kept_and_named_until_it_is_settled(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    mine = root / "work/notebooks/03_data.ipynb"
    write(mine, "my own lines")
    assert lab.prepare(root) == [], "nothing newer, nothing to say"
    write(root / "notebooks/03_data.ipynb", "a better 03")
    for _ in range(2):
        (told,) = lab.prepare(root)
        assert "work/notebooks/03_data.ipynb is as you left it" in told
        assert "minitrain lab --fresh notebooks/03" in told and source(mine) == "my own lines"
    (told,) = lab.prepare(root, fresh=["notebooks/03"])
    assert "yours is 03_data.yours.ipynb" in told and source(mine) == "a better 03"
    assert source(mine.with_name("03_data.yours.ipynb")) == "my own lines" and lab.prepare(root) == []


def test_fresh_never_overwrites_what_was_set_aside(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    for attempt in "first", "second":
        write(root / "work/exercises/03_data.ipynb", attempt)
        lab.prepare(root, fresh=["3"])
    kept = {path.name: source(path) for path in (root / "work/exercises").glob("*.yours*")}
    assert kept == {"03_data.yours.ipynb": "first", "03_data.yours-2.ipynb": "second"}
    assert source(root / "work/notebooks/03_data.ipynb") == "notebooks 03"


def test_a_torn_copy_or_a_lost_record_loses_nothing(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    mine = root / "work/exercises/00_start.ipynb"
    mine.write_text('{"cells": [{"sou')
    (root / "work/.copied.json").unlink()
    (told,) = lab.prepare(root)
    assert "exercises/00" in told and mine.read_text() == '{"cells": [{"sou'


def test_answers_that_were_there_when_it_was_copied_are_never_replaced(tmp_path):
    """Somebody has written into exercises/, then runs `minitrain lab`, then takes their changes back."""
    root, stub = small_root(tmp_path), book.chapter("00").student.read_text()
    original, mine = (folder / "exercises/00_start.ipynb" for folder in (root, root / "work"))
    assert stub.count("# YOUR CODE HERE") > 1
    original.write_text(stub.replace("# YOUR CODE HERE", "# my code", 1))
    lab.prepare(root)
    original.write_text(stub)
    (told,) = lab.prepare(root)
    assert "exercises/00" in told and "# my code" in mine.read_text()
    mine.unlink()
    lab.prepare(root)
    original.write_text(stub.replace("# YOUR CODE HERE", "# YOUR CODE HERE, in words"))
    (told,) = lab.prepare(root) or [""]
    assert told == "" and mine.read_text() == original.read_text(), "a stub follows"


def test_a_chapter_that_is_renamed_leaves_no_copy_but_a_changed_one(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    write(root / "work/exercises/03_data.ipynb", "mine")
    for folder in lab.FOLDERS:
        (root / folder / "03_data.ipynb").rename(root / folder / "03_rows.ipynb")
    assert lab.prepare(root) == []
    names = {str(path.relative_to(root / "work")) for path in (root / "work").rglob("03_*")}
    assert names == {"notebooks/03_rows.ipynb", "exercises/03_rows.ipynb", "exercises/03_data.ipynb"}


def test_a_name_that_is_none_is_refused_before_anything_is_made(tmp_path):
    root = small_root(tmp_path)
    said = "there is no chapter '77' in exercises to make fresh; there are 00, 03"
    with pytest.raises(ValueError, match=said):
        lab.prepare(root, fresh=["exercises/77"])
    assert not (root / "work").exists()
    with pytest.raises(ValueError, match="needs a clone"):
        lab.prepare(tmp_path / "nowhere")


def test_two_at_once_wait_for_each_other(tmp_path):
    root = small_root(tmp_path)
    lab.prepare(root)
    write(root / "notebooks/03_data.ipynb", "a better 03")
    with ThreadPoolExecutor() as pool, open(root / "work/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [pool.submit(lab.prepare, root) for _ in range(2)]
        time.sleep(0.2)
        assert not any(one.done() for one in both), "the lock is held elsewhere"
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert [one.result(patience.LONG_S) for one in both] == [[], []]
    assert source(root / "work/notebooks/03_data.ipynb") == "a better 03"


# ---- what opens in work/ ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone under git as it stands here, with its copies, in which packages are linked, not copied."""
    root = tmp_path_factory.mktemp("lab") / "clone"
    root.mkdir()
    for name in (*lab.FOLDERS, "docs", *lab.PAGES, ".gitignore"):
        one = notebook.CHAPTERS.parent / name
        shutil.copytree(one, root / name) if one.is_dir() else shutil.copy(one, root / name)
    for name in "minitrain", "benchmarks", "tests":
        (root / name).symlink_to(notebook.CHAPTERS.parent / name)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "as it is")
    lab.prepare(root)
    return root


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def test_git_does_not_see_the_copies(clone):
    assert (clone / "work/notebooks").is_dir() and git(clone, "status", "--porcelain") == ""


def test_every_link_of_notebooks_and_readmes_leads_somewhere_inside(clone):
    work, broken = clone / "work", []
    for path in [*work.glob("*/*.ipynb"), work / "README.md", work / "exercises/README.md"]:
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not Path(os.path.normpath(path.parent / target)).exists():
                broken.append(f"{path.name}: {target}")
            assert "://" in target or os.path.normpath(path.parent / target).startswith(str(work)), target
    assert broken == []


def test_solutions_and_hidden_checks_are_not_in_sight(clone):
    below = {str(path.relative_to(clone / "work")) for path in (clone / "work/exercises").iterdir()}
    assert not {name for name in below if "source" in name or "wrong" in name}
    hidden = "### BEGIN HIDDEN TESTS"
    for path in (clone / "work/exercises").glob("*.ipynb"):
        assert hidden not in path.read_text() and "### BEGIN SOLUTION" not in path.read_text()


def test_the_copy_is_graded_and_the_report_says_which(judge, clone, monkeypatch, tmp_path):
    of = book.chapter("00")
    monkeypatch.setattr(lab, "ROOT", clone)
    monkeypatch.setattr(exercises, "ROOT", clone)
    monkeypatch.setattr(book, "EXERCISES", clone / "exercises")
    assert exercises.grade("00", judge=judge).table().startswith("work/exercises/00_start_here.ipynb\n")
    elsewhere = shutil.copy(of.student, tmp_path / "mine.ipynb")
    assert exercises.grade("00", elsewhere, judge=judge).table().startswith(str(elsewhere))
    solved = json.loads(of.student.read_text())
    answers = {task.answer.name: task.answer.source for task in of.tasks}
    for cell in solved["cells"]:
        cell["source"] = answers.get(cell["metadata"].get("nbgrader", {}).get("grade_id"), cell["source"])
    original, mine = clone / "exercises" / of.student.name, clone / "work/exercises" / of.student.name
    before = original.read_bytes()
    try:
        original.write_text(json.dumps(solved))
        report = exercises.grade("00", judge=judge)
        assert report.earned == 0 and "answers in exercises/00_start_here.ipynb are not graded" in report.note
        mine.rename(tmp_path / "away.ipynb")
        report = exercises.grade("00", judge=judge)
        assert report.earned == 10 and report.file == "exercises/00_start_here.ipynb"
        shutil.move(tmp_path / "away.ipynb", mine)
    finally:
        original.write_bytes(before)


# ---- JupyterLab ------------------------------------------------------------------------------------------


def dial(server: str) -> socket.socket:
    """The server listens at a file: a port that is free now may be another's when it starts."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(patience.LONG_S)
    line.connect(server)
    return line


def ask(server: str, path: str, body: dict | None = None, method: str = "GET"):
    connection = http.client.HTTPConnection("localhost")
    with closing(connection):
        connection.sock = dial(server)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        connection.request(method, f"/{path}", data, headers)
        reply = connection.getresponse()
        text = reply.read()
    assert reply.status < 300, f"{method} {path}: {reply.status} {text[-500:]!r}"
    return json.loads(text) if text else None


@pytest.fixture(scope="module")
def server(clone, tmp_path_factory):
    """A JupyterLab over the clone, with settings and files of its own; it and its kernels end with the test."""
    own = tmp_path_factory.mktemp("jupyter")
    where = tempfile.mkdtemp(prefix="lab-")  # the name of a socket has 100 letters at most
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environ = os.environ | {f"JUPYTER_{name}": str(own / name) for name in names} | {"HOME": str(own)}
    flags = ["--no-browser", f"--ServerApp.sock={where}/socket"]
    command = [*lab.command(clone, flags), f"--IdentityProvider.token={TOKEN}"]
    with open(own / "log", "w") as log:
        running = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def answers() -> bool:
        assert running.poll() is None, (own / "log").read_text()[-2000:]
        with suppress(OSError):
            ask(f"{where}/socket", "api/status")
            return True

    try:
        patience.until(answers, running.pid)
        yield f"{where}/socket"
    finally:
        family = [*psutil.Process(running.pid).children(recursive=True)]
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()
        shutil.rmtree(where)


def as_jupyterlab_saves(content: dict, spec: dict, language: dict) -> dict:
    """What its front end makes of a notebook that it opens and saves.

    It writes the kernel's name and language, says that outputs are folded in two places, joins prints that
    follow each other, and lets a carriage return or a backspace act. Seen with JupyterLab 4.6 in a browser,
    which saved each of our notebooks as it was."""
    content = copy.deepcopy(content)
    content["metadata"]["kernelspec"] = spec
    content["metadata"]["language_info"] = language
    for cell in content["cells"]:
        metadata = cell["metadata"]
        if metadata.get("collapsed") is not None:
            metadata.setdefault("jupyter", {})["outputs_hidden"] = metadata["collapsed"]
        elif metadata.get("jupyter", {}).get("outputs_hidden") is not None:
            metadata["collapsed"] = metadata["jupyter"]["outputs_hidden"]
        if "outputs" in cell:
            cell["outputs"] = notebook.joined(cell["outputs"])
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                output["text"] = re.sub(r"[^\n]*\r(?!\n)|[^\n]\x08", "", output["text"])
    return content


def language_of(server: str, kernel: str) -> dict:
    """language_info of the kernel's reply, over the channel that the front end has."""
    import websocket

    header = {
        "msg_id": "1", "msg_type": "kernel_info_request", "session": "s", "username": "", "version": "5.3",
    }  # fmt: skip
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": {}, "channel": "shell"}
    url = f"ws://localhost/api/kernels/{kernel}/channels?token={TOKEN}"
    line = websocket.create_connection(url, timeout=patience.LONG_S, socket=dial(server))
    try:
        line.send(json.dumps(message))
        while True:
            reply = json.loads(line.recv())
            if reply["header"]["msg_type"] == "kernel_info_reply":
                return reply["content"]["language_info"]
    finally:
        line.close()


@pytest.mark.slow
def test_opening_and_saving_every_notebook_in_jupyterlab_changes_nothing(server, clone):
    """Chapters, exercises and their copies: git sees none of it but, in originals, another version of Python."""
    first = {"path": "notebooks/00_start_here.ipynb", "name": "", "type": "notebook"}
    session = ask(server, "api/sessions", first | {"kernel": {"name": "python3"}}, "POST")
    try:
        language = language_of(server, session["kernel"]["id"])
        spec = ask(server, "api/kernelspecs")["kernelspecs"]["python3"]["spec"]
        spec = {"name": "python3", "display_name": spec["display_name"], "language": spec["language"]}
        names = [*clone.glob("notebooks/*.ipynb"), *clone.glob("exercises/[0-9]*.ipynb")]
        names += clone.glob("work/*/[0-9]*.ipynb")
        assert len(names) == 2 * (len(notebook.chapters()) + len(book.chapters()))
        for path in names:
            at, was = f"api/contents/{path.relative_to(clone)}", path.stat().st_mtime_ns
            content = as_jupyterlab_saves(ask(server, at)["content"], spec, language)
            ask(server, at, {"type": "notebook", "format": "json", "content": content}, "PUT")
            assert path.stat().st_mtime_ns != was, f"{path} was not saved"
    finally:
        ask(server, f"api/sessions/{session['id']}", method="DELETE")
    ours = notebook.METADATA["language_info"]["version"]
    if language["version"] == ours:
        assert git(clone, "status", "--porcelain") == ""
    changes = re.findall(r"^[-+] .*$", git(clone, "diff", "-U0"), re.M)
    versions = {f'"version": "{ours}"', f'"version": "{language["version"]}"'}
    assert {change[1:].strip() for change in changes} <= versions
    assert lab.prepare(clone) == [] and "work" not in git(clone, "status", "--porcelain")


def test_solutions_are_not_served_from_the_copies(server, clone):
    listed = [entry["name"] for entry in ask(server, "api/contents/work/exercises")["content"]]
    assert "00_start_here.ipynb" in listed and not {"source", "wrong"} & {*listed}
    linked = ask(server, "api/contents/work/minitrain/attention/kernel.py")
    assert "def " in linked["content"], "modules open through the link"


@pytest.fixture
def started(monkeypatch):
    """What `minitrain lab` turns into, instead of becoming it."""
    seen = []
    monkeypatch.setattr(os, "execv", lambda path, words: seen.append(words))
    monkeypatch.setattr(lab, "prepare", lambda fresh: [f"fresh: {list(fresh)}"])
    return seen


@pytest.mark.parametrize("uid, told", [(0, True), (1000, False)])
def test_lab_passes_arguments_on_and_tells_jupyterlab_that_root_is_meant(started, monkeypatch, uid, told):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    words = ["lab", "--port", "9999", "--no-browser", "--fresh", "03", "--ServerApp.ip=0.0.0.0"]
    result = CliRunner().invoke(main.app, words)
    assert result.exit_code == 0 and "fresh: ['03']" in result.output
    ((python, _, module, where, first, news, *rest),) = started
    assert (python, module, news) == (sys.executable, "jupyterlab", "--LabApp.news_url=None")
    assert where.endswith("root_dir=" + str(lab.ROOT / "work")) and first.endswith("00_start_here.ipynb")
    assert rest == ["--allow-root"] * told + ["--port", "9999", "--no-browser", "--ServerApp.ip=0.0.0.0"]
    assert ("You are root" in result.output) == told
