"""An installed wheel in an empty folder: it says what to do, lays out the course, and works there.

One wheel is built from a copy of the clone, without network, and unpacked into a folder of its own; every
command runs in a process that has this folder first and knows nothing of the clone.
"""

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from minitrain.course import home, notebook
from tests import patience

ROOT = Path(__file__).parent.parent
BUILT = ("minitrain", *home.PARTS, "pyproject.toml", "setup.py", "MANIFEST.in")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source, pip = folder / "source", [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    for name in BUILT:
        one, skip = ROOT / name, shutil.ignore_patterns("__pycache__", "work", "*.egg-info")
        source.mkdir(exist_ok=True)
        shutil.copytree(one, source / name, ignore=skip) if one.is_dir() else shutil.copy(one, source)
    build = [*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    assert patience.run(build).returncode == 0
    (wheel,) = folder.glob("minitrain-*.whl")
    target = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", folder / "there", wheel]
    assert patience.run(target).returncode == 0
    shutil.rmtree(source)
    return folder / "there"


@pytest.fixture
def call(installed, tmp_path):
    """Runs the installed command in an empty folder: (exit code, stdout, stderr)."""

    def run(*words, cwd=tmp_path):
        environ = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "80"}
        done = patience.run([sys.executable, "-m", "minitrain", *words], cwd=cwd, env=environ)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("words", ["list", "run", "run 00", "lab", "grade", "grade 00"])
def test_without_a_course_a_line_says_what_to_do(call, words):
    said = "no chapters here: `minitrain init FOLDER` lays them out, then call this in FOLDER"
    assert call(*words.split()) == (2, "", f"minitrain: {said}\n")


def test_what_needs_no_course_works_anywhere(call):
    code, out, err = call("atlas", "ring", "all-reduce")
    assert (code, err) == (0, "") and out.endswith(" systems\n")
    code, out, err = call("doctor")
    wrong = [line for line in out.splitlines() if "FAIL" in line and "free memory" not in line]
    assert not wrong and "4 ranks" in out and code == ("FAIL" in out), out + err


def test_a_course_laid_out_is_that_of_the_clone(call, tmp_path):
    code, out, err = call("init", "course")
    assert (code, err) == (0, "") and "minitrain list" in out
    course = tmp_path / "course"
    for path in home.files(ROOT):
        assert (course / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert call("init", "course")[::2] == (2, "minitrain: course is there and not empty: give a new folder\n")
    code, out, _ = call("list", cwd=course / "notebooks")
    assert code == 0 and out.count(" · Ranks") == len(notebook.chapters()), out

    code, out, err = call("grade", "00", cwd=course)
    assert code == 0 and out.startswith("exercises/00_start_here.ipynb\n") and "total  0/" not in out, err
    assert "total 0/" in out and "total 0/0" not in out

    source = "import minitrain\nfrom minitrain.course import notebook\nnotebook.show(notebook.compare)\nminitrain.__file__"
    path = course / "notebooks" / "99_short.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    code, out, err = call("run", "99", cwd=course)
    assert code == 0 and "1 of 1 chapters ran" in out and "notebooks are in runs/" in out, err
    shown = nbformat.read(course / "runs" / path.name, as_version=4).cells[0].outputs
    assert "minitrain/course/notebook.py:" in shown[0]["data"]["text/plain"]
    path.unlink()

    code, out, err = call("lab", "--version", cwd=course)
    assert code == 0 and "Your copies are in work/" in out, err
    assert (course / "work/notebooks/00_start_here.ipynb").exists()
    assert (course / "work/minitrain/course/home.py").exists(), "links to modules lead somewhere"
    assert not list((course / "work").rglob("source"))


def test_a_clone_lays_out_the_same(tmp_path):
    assert home.lay_out(tmp_path / "new") == []
    copied = {path.relative_to(tmp_path / "new") for path in home.files(tmp_path / "new")}
    assert copied == {path.relative_to(ROOT) for path in home.files(ROOT)} and len(copied) > 50
    assert home.find(tmp_path / "new" / "notebooks") == tmp_path / "new"
    assert home.find(tmp_path, package=tmp_path / "minitrain") is None and home.find(tmp_path) == ROOT
