"""Exercise notebooks as files, as nbgrader makes them, as reports, and in a kernel."""

import csv
import json
import os
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.course import exercises
from minitrain.course.grading import answer_checks, assignment, book
from minitrain.course.grading.answer_checks import Draw, Failure
from minitrain.course.grading.judge import EXERCISES, Code
from minitrain.course.grading.trial import Outcome
from tests import patience

CHAPTERS = {number: book.chapter(number) for number in book.chapters()}
FIRST = CHAPTERS["00"]


def with_answers(path, answers):
    """A copy of the first chapter's student notebook at `path` with these answers written into it."""
    notebook = json.loads(assignment.notebooks(FIRST)[FIRST.student])
    for cell in notebook["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id")
        cell["source"] = answers.get(name, cell["source"])
    path.write_text(json.dumps(notebook))
    return path


SOLUTIONS = {task.answer.name: task.answer.source for task in FIRST.tasks}

# ---- notebooks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CHAPTERS)
def test_the_notebooks_are_made_from_the_source_of_today(number):
    for path, text in assignment.notebooks(CHAPTERS[number]).items():
        if path.parent == EXERCISES and edited_by_the_reader(path):
            pytest.skip(f"{path.name} has answers of yours in it")
        assert path.read_text() == text, f"{path} is stale; run: python -m minitrain.course.exercises build"


def edited_by_the_reader(path):
    """git knows another version, and answers differ: the copy of somebody who works on the exercises."""
    asked = ["git", "status", "--porcelain", "--", path.name]
    status = subprocess.run(asked, cwd=path.parent, capture_output=True)
    return bool(status.stdout) and assignment.has_answers(assignment.cells_in(path))


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_chapter_is_worth_ten_points_and_gives_nothing_away(number):
    of = CHAPTERS[number]
    points = [int(check.attributes["points"]) for task in of.tasks for check in task.checks]
    assert {cell.name for cell in of.wrong} == {task.answer.name for task in of.tasks}
    assert sum(points) == 10 and len(of.tasks) >= 3 and all(task.title and task.checks for task in of.tasks)
    student = assignment.notebooks(of)[of.student]
    assert "BEGIN" not in student and "HIDDEN" not in student
    source, region = of.path.read_text(), r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END"
    secrets = re.findall(region, source, re.DOTALL)
    assert len(secrets) >= 2 * len(of.tasks)
    visible = {line.strip() for line in re.sub(region, "", source, flags=re.DOTALL).splitlines()}
    told = {line.strip() for cell in json.loads(student)["cells"] for line in cell["source"]}
    assert visible & told and not {line.strip() for line in "".join(secrets).splitlines()} - visible & told


def different_from_nbgraders(executable, folder):
    """The cells of students' notebooks that nbgrader, working in `folder`, makes otherwise."""
    course = folder / "exercises"
    shutil.copytree(EXERCISES / "source", course / "source", ignore=shutil.ignore_patterns("*.py"))
    shutil.copy(EXERCISES / "nbgrader_config.py", course)
    program = Path(executable).absolute()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"  # it calls alembic by name
    where = {"cwd": course, "env": {**os.environ, "PATH": path}}
    command = [program, "generate_assignment", "source", "--force"]
    subprocess.run(command, **where, check=True, capture_output=True, text=True)
    different = []
    for of in CHAPTERS.values():
        name, ours = of.path.stem, json.loads(assignment.notebooks(of)[of.student])["cells"]
        theirs = json.loads((course / "release" / "source" / of.student.name).read_text())["cells"]
        different += [f"{name}: cell {i}" for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
        different += [f"{name}: {len(ours)} cells and {len(theirs)}"] * (len(ours) != len(theirs))
    return different


def test_our_notebooks_equal_nbgraders(tmp_path, monkeypatch):
    program = os.environ.get("NBGRADER") or shutil.which("nbgrader")
    if program is None:
        pytest.skip("set NBGRADER: `make nbgrader` does")
    assert different_from_nbgraders(program, tmp_path / "as is") == []
    monkeypatch.setattr(assignment, "STUB", "# another stub\n")
    different = different_from_nbgraders(program, tmp_path / "control")
    assert len(different) == sum(len(of.tasks) for of in CHAPTERS.values())


def test_checksums_are_nbgraders():
    """The seals of nbgrader 0.9.6 for two cells, written down once; checking them needs no nbgrader."""
    answer = {"grade": False, "solution": True, "locked": False, "grade_id": "a"}
    check = {"grade": True, "solution": False, "locked": True, "grade_id": "a-1", "points": 2}
    cells = [
        {"cell_type": "code", "source": source, "metadata": {"nbgrader": facts}}
        for source, facts in (("x = 1", answer), ("assert x", check))
    ]
    found = [assignment.checksum(cell) for cell in cells]
    assert found == ["3952363144b9625d080fedd1f7d073ce", "d0e5e51c0550e8ff7f33573f2b91b5c1"]


def test_a_notebook_says_what_it_is(tmp_path):
    stub = with_answers(tmp_path / "stub.ipynb", {})
    edited = with_answers(tmp_path / "edited.ipynb", {"total": "def total(x, group): return x"})
    outdated = with_answers(tmp_path / "old.ipynb", {"total-sum": "# another check"})
    found = [assignment.state(FIRST, path) for path in (stub, edited, outdated)]
    assert found == ["stub", "edited", "outdated"]


def test_build_never_touches_answers(tmp_path, monkeypatch):
    shutil.copytree(EXERCISES, tmp_path / "exercises")
    monkeypatch.setattr(book, "EXERCISES", tmp_path / "exercises")
    mine = with_answers(book.chapter("00").student, {"total": "# mine"})
    text = mine.read_text()
    mine.with_name("00_start_here.ipynb")
    (tmp_path / "exercises/source/00_start_here.ipynb").unlink()
    assert assignment.build()[0].parent.name == "source" and mine.read_text() == text


@pytest.mark.parametrize(
    "header, problem",
    [
        ('# %% answer=""', "must be a name"),
        ('# %% check="a"', "needs points"),
        ("# %% cell", "not a cell header"),
        ('# %% check="two words" points=1', "must be a name"),
    ],
)
def test_a_bad_source_names_its_line(tmp_path, header, problem):
    path = tmp_path / "00_bad.py"
    path.write_text(f"# %% [markdown]\n# text\n\n{header}\nx = 1\n")
    with pytest.raises(ValueError, match=rf"00_bad.py:4: .*{problem}"):
        book.read_cells(path)


@pytest.mark.parametrize(
    "line, module",
    [
        ("import minitrain.ranks.launch as go", "minitrain.ranks.launch"),
        ("from minitrain import collectives, launch", "minitrain.launch"),
        ("from minitrain.collectives import all_reduce", "minitrain.collectives.all_reduce"),
        ("from minitrain import collectives\nimport minitrains", None),
    ],
)
def test_a_rank_imports_of_the_package_what_it_has(tmp_path, line, module):
    path = tmp_path / "00_imports.py"
    path.write_text(f'# %% given="setup"\nimport torch\n{line}\n')
    if module is None:
        assert book.read_cells(path)[0].source.endswith(line)
    else:
        with pytest.raises(ValueError, match=rf"00_imports.py:1: a rank cannot import {module};"):
            book.read_cells(path)


RIGHT, WHERE = "def f(x):\n    y = x\n\n    y = x\n    return y\n### END", "07_x.txt: f, twice: "


@pytest.mark.parametrize(
    "text, made",
    [
        ("def f(x):\n    return 0", "def f(x):\n    return 0"),
        ("-     return y\n+     return -y", "def f(x):\n    y = x\n\n    y = x\n    return -y\n### END"),
        ("- def f(x):\n-     y = x\n-\n+ def f(x):", "def f(x):\n    y = x\n    return y\n### END"),
        ("-     return y\n\n- def f(x):\n+ if x:", "if x:\n    y = x\n\n    y = x\n### END"),
        ("-     return y\n+     return z\n-     return z\n+     z", RIGHT.replace("return y", "z")),
        ("+ y = 1\n+\n+ z = 2", f"{RIGHT}\ny = 1\n\nz = 2"),
        ("-     return y\n+     return 1\n\n+ f = 2", RIGHT.replace("return y", "return 1") + "\nf = 2"),
        ("-     y = x\n+     y = 0", f"{WHERE}change 1 finds its old lines 2 times"),
        ("-     return y\n\n- y = x", f"{WHERE}change 2 finds its old lines 0 times"),
        ("- return", f"{WHERE}change 1 finds its old lines 0 times"),
        ("-     return y\n    return 0", f"{WHERE}neither `- old` nor `+ new`:     return 0"),
        ("+ y = 1\n+z = 1", f"{WHERE}neither `- old` nor `+ new`: +z = 1"),
    ],
)
def test_a_wrong_solution_is_a_whole_text_or_changes_the_right_one(text, made):
    """In order; one that does not fit is named in one line."""
    cell = book.Cell("wrong", "f", text, {"fails": "sum", "why": "twice"})
    try:
        said = book.changed(RIGHT, cell, "07_x.txt")
    except ValueError as error:
        said = str(error)
    assert said == made and book.changed(None, cell, "07_x.txt") == text, "without a task nothing is changed"


def test_what_a_cell_defines():
    cells = "class Layer:\n    width = 4", "def forward(x):\n    y = x", "p = 2\na, b = 1, 2\np.rest = a"
    assert book.defined_by(*cells) == {"Layer", "forward", "p"}


# ---- grading ---------------------------------------------------------------------------------------------


def test_the_report_of_a_notebook(judge, tmp_path):
    answers = {
        "pass_on": SOLUTIONS["pass_on"],
        "total": "def total(x, group):\n    return x + 1 // 0\n",
        "total-sum": "pass  # a check that was cut out",
        "relay_bytes": "def relay_bytes(ranks, numel): return [0] * ranks",
    }
    report = exercises.grade("00", with_answers(tmp_path / "mine.ipynb", answers), judge=judge, seed="1")
    table = report.table(detail=True)
    assert (report.earned, report.points) == (4, 10)
    assert "2/2  ok  Every rank holds its left neighbour's tensor" in table
    assert "own work" not in table and "not attempted yet" not in table
    assert "bytes of each rank: which ranks pass the tensor on" in table
    assert "its checks are not those of this version" in table and "(line 2: return x + 1 // 0)" in table
    assert "| Traceback (most recent call last):" in table
    assert 'File "<your answer>", line 2, in total' in table and "answer.py" not in table
    again = exercises.grade("00", tmp_path / "mine.ipynb", judge=judge, seed="1").table()
    found = [line for line in again.splitlines() if "total 4/10" not in line]
    assert found == [line for line in table.splitlines() if "total 4/10" not in line and "  | " not in line]


def test_to_a_check_an_answer_is_a_name_whatever_a_read_only_cell_defines():
    given, check = book.Cell("given", "setup", "f = 1"), "assert type(f).__name__ == 'Answer'"
    of = book.Chapter("99", Path("99.py"), [given, book.Cell("check", "f-is", check, {"points": "1"})])
    assert exercises.failure_in(of, of.cells[1], None, Code(names=["f"]), 1.0, "a seed") is None


def test_each_check_draws_for_itself_and_again_the_same_with_the_same_seed():
    def drawn(name, seed):
        check = book.Cell("check", name, "raise ValueError(draw.integer(0, 10**9))", {"points": "1"})
        of = book.Chapter("99", Path("99.py"), [check])
        return str(exercises.failure_in(of, check, None, Code(), 1.0, seed))

    found = [drawn(name, seed) for name in ("one", "two") for seed in ("a", "b")]
    assert len(set(found)) == 4 and found[0] == drawn("one", "a")


@pytest.mark.parametrize("property", ["time limit", "memory limit", "no error"])
def test_after_a_limit_the_other_checks_of_a_task_are_not_run(monkeypatch, property):
    """They would run into it too, each for as long."""
    ran, task = [], next(task for task in FIRST.tasks if len(task.checks) > 1)

    def fails(of, check, *_):
        ran.append(check)
        return Failure(property, "too much")

    monkeypatch.setattr(exercises, "failure_in", fails)
    results = list(exercises.results_of(FIRST, task, "x = 1", None, "a seed"))
    assert ran == (task.checks if property == "no error" else task.checks[:1])
    assert [result.property for result in results] == [property] * len(task.checks)


def test_what_is_missing_is_said_in_one_line(judge, tmp_path):
    lost = json.loads(with_answers(tmp_path / "lost.ipynb", {}).read_text())
    is_answer = lambda cell: cell["metadata"].get("nbgrader", {}).get("grade_id") == "total"
    lost["cells"] = [cell for cell in lost["cells"] if not is_answer(cell)]
    (tmp_path / "lost.ipynb").write_text(json.dumps(lost))
    report = exercises.grade("00", tmp_path / "lost.ipynb", judge=judge)
    assert report.earned == 0 and "the answer cell is gone" in report.table()
    assert "not attempted yet" in report.table()
    with pytest.raises(ValueError, match="chapter 77 has no exercises; there are 00"):
        exercises.grade("77", judge=judge)
    with pytest.raises(ValueError, match="is not there"):
        exercises.grade("00", tmp_path / "none.ipynb", judge=judge)
    (tmp_path / "torn.ipynb").write_text('{"cells": [{"metadata"')
    with pytest.raises(ValueError, match="is not a notebook"):
        exercises.grade("00", tmp_path / "torn.ipynb", judge=judge)


def test_a_class_is_a_table_and_draws_follow_from_names(judge, tmp_path, monkeypatch):
    (tmp_path / "bob" / "late").mkdir(parents=True)
    with_answers(tmp_path / "ada.ipynb", SOLUTIONS)
    with_answers(tmp_path / "bob/late" / FIRST.student.name, {"pass_on": SOLUTIONS["pass_on"]})
    (tmp_path / "eve.ipynb").write_text("[]")
    seeds, graded = [], exercises.grade_answers
    monkeypatch.setattr(exercises, "Judge", lambda: nullcontext(judge))
    monkeypatch.setattr(exercises, "grade_answers", lambda *given: seeds.append(given[3]) or graded(*given))
    words = ["grade", "00", "--folder", str(tmp_path), "--seed", "7/"]
    _, ada, bob, eve = csv.reader(CliRunner().invoke(main.app, words).output.splitlines())
    assert ada == ["ada", "10", "10", ""] and seeds == ["7/ada", "7/bob"]
    assert bob[:3] == ["bob", "4", "10"] and bob[3].count("not attempted yet") >= 2
    assert eve[:3] == ["eve", "0", "0"] and "eve.ipynb is not a notebook" in eve[3]


def test_all_chapters_in_one_table(judge):
    grades = exercises.grade(judge=judge)
    assert len(grades.table().splitlines()) >= len(CHAPTERS) + 1 and "00_start_here" in grades.table()


def test_a_check_runs_no_longer_than_the_judge_was_told():
    given = []

    class Fake:
        def run(self, code, calls, **rules):
            given.append(rules["time_limit_s"])
            return Outcome([[1]])

    with answer_checks.judging(Fake(), Code(names=["f"]), 5.0):
        for rules in ({}, {"time_limit_s": 2.0}, {"time_limit_s": 100.0}):
            assert answer_checks.ask(answer_checks.Answer("f"), **rules) == 1
    assert given == [5.0, 2.0, 5.0]


def test_exact_numbers_add_up_in_every_order_and_real_ones_do_not():
    import torch

    draw = Draw("a seed")
    for dtype in (torch.float32, torch.float64):
        for x in (draw.exact(16, 999, dtype=dtype), draw.few(1024, 8, dtype=dtype)):
            shuffled = x[torch.randperm(len(x))]
            assert torch.equal(sum(x), sum(shuffled)) and torch.equal(x.sum(0), sum(shuffled))
    x = draw.exact(1000)
    halves = [x.to(dtype).to(x.dtype) for dtype in (torch.float32, torch.int32)]
    assert all((x != half).all() for half in halves), "they do not survive in half the bytes"
    x = draw.real(1024)
    assert sum(x) != sum(x.flip(0)) and all(Draw(None).mask(5).any() for _ in range(50))
    assert Draw(3).integer(0, 10**9) == Draw(3).integer(0, 10**9)


def test_the_visible_checks_run_in_a_notebook_and_say_what_is_wrong(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    from minitrain.course import kernels

    wrong = next(cell.source for cell in FIRST.wrong if cell.attributes["fails"] == "own work")
    path = with_answers(tmp_path / "mine.ipynb", {**SOLUTIONS, "pass_on": wrong})
    notebook = nbformat.read(path, as_version=4)
    way = dict(kernel_manager_class=kernels.AsyncManager, resources={"metadata": {"path": str(tmp_path)}})
    NotebookClient(notebook, timeout=patience.LONG_S, allow_errors=True, **way).execute()
    said = {
        cell.metadata.nbgrader.grade_id: "".join(str(output) for output in cell.outputs)
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    for name in ("total-sum", "total-bits", "relay_bytes-four", "relay_bytes-any"):
        assert "the visible checks pass" in said[name], said[name]
    assert "own work: this task asks you to write it yourself: it calls rotate" in said["pass_on-result"]
    assert "return collectives.rotate(x, group)" in said["pass_on-result"]
    # the student sees the rule, not our stack
    assert "minitrain/course/grading" not in said["pass_on-result"]
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "".join(map(str, outputs))
    assert "no deadlock: nobody can go on: rank 0 waits to send float32[1] to rank 1; rank 1 waits" in shown
