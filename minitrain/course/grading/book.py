"""Exercises as files: one reviewable source per chapter, read into cells and tasks.

    exercises/source/02_collectives.py       what an author writes: solutions, visible and hidden checks
    exercises/source/02_collectives.ipynb    the same as nbgrader's source notebook       (made by assignment)
    exercises/02_collectives.ipynb           what a student opens: stubs, visible checks  (made by assignment)
    exercises/wrong/02_collectives.txt       wrong solutions, and the property that must catch each

A header, `# %% check="total-sum" points=2`, says what a cell is; its name becomes nbgrader's grade_id:

    given     read-only, for answers, drivers and checks     answer    the student's, ### SOLUTION is cut out
    driver    read-only, calls an answer on ranks            check     read-only, ### HIDDEN TESTS is cut out
    judge     read-only, for checks alone                    wrong     in exercises/wrong

A task is an answer and the checks after it, up to the next answer; its title is the last heading before.
A wrong solution is a text of its own, or changes to the right one (`changed`).
"""

import ast
import functools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from minitrain.course.notebook import EXERCISES, key_among, numbered

HEADER = re.compile(r"^# %%(?P<markdown> \[markdown\])?(?P<attributes>( \w+=(\"[^\"]*\"|\d+))*)$")
HUNK = re.compile(r"(?=[-+])((?:-.*\n)*)((?:\+.*\n)*)")
ROLES = ("given", "driver", "judge", "answer", "check", "wrong")
LOCKED = ("given", "driver", "judge")


@dataclass(frozen=True)
class Cell:
    role: str  # "text", "code", or one of ROLES
    name: str
    source: str
    attributes: dict = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The first line of a comment or heading."""
        return self.source.splitlines()[0].lstrip("# ").rstrip(".")


@dataclass(frozen=True)
class Task:
    """An answer and the checks that follow it."""

    title: str
    answer: Cell
    checks: list[Cell]

    @property
    def names(self) -> list[str]:
        """What the reference answer defines at its top level."""
        return sorted(defined_by(self.answer.source))


@dataclass(frozen=True)
class Chapter:
    number: str
    path: Path
    cells: list[Cell]

    def sources(self, *roles: str) -> list[str]:
        return [cell.source for cell in self.cells if cell.role in roles]

    @property
    def tasks(self) -> list[Task]:
        tasks, title = [], ""
        for cell in self.cells:
            if cell.role == "text" and cell.source.startswith("## "):
                title = cell.title
            elif cell.role == "answer":
                tasks.append(Task(title, cell, []))
            elif cell.role == "check":
                tasks[-1].checks.append(cell)
        return tasks

    @property
    def student(self) -> Path:
        return EXERCISES / f"{self.path.stem}.ipynb"

    @property
    def wrong(self) -> list[Cell]:
        """The committed wrong solutions: name of the task, property that must catch it, code."""
        path = EXERCISES / "wrong" / f"{self.path.stem}.txt"
        right = {task.answer.name: task.answer.source for task in self.tasks}
        return [replace(a, source=changed(right.get(a.name), a, path.name)) for a in read_cells(path)]


def changed(right: str | None, wrong: Cell, file: str) -> str:
    """The text of a wrong solution that says what it changes: lines `- old`, then the lines `+ new` instead.

    Without `- old`, what is new comes at the end. A text that begins otherwise is a whole one.
    """
    if right is None or not wrong.source.startswith(("-", "+")):
        return wrong.source
    lines, where = right.splitlines(), f"{file}: {wrong.name}, {wrong.attributes['why']}"
    if stray := re.search("^(?![-+](?: |$)).+", wrong.source, re.MULTILINE):
        raise ValueError(f"{where}: neither `- old` nor `+ new`: {stray[0]}")
    for number, hunk in enumerate(HUNK.finditer(wrong.source + "\n"), 1):
        old, new = ([line[2:] for line in part.splitlines()] for part in hunk.groups())
        places = [at for at in range(len(lines)) if lines[at : at + len(old)] == old] if old else [len(lines)]
        if len(places) != 1:
            raise ValueError(f"{where}: change {number} finds its old lines {len(places)} times")
        lines[places[0] : places[0] + len(old)] = new
    return "\n".join(lines)


@functools.cache  # asked anew in every run of an answer
def defined_by(*sources: str) -> frozenset[str]:
    """The names of functions, classes and values at the top level of cells."""
    names = set()
    for node in ast.parse("\n".join(sources)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def not_there(source: str) -> str:
    """The first module of minitrain that this code imports and ranks do not have."""
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.split(".")[0] == "minitrain" and module != "minitrain.collectives":
                return module
    return ""


def chapters() -> dict[str, Path]:
    """The chapters that have exercises: {"00": source, ...}."""
    return numbered(EXERCISES / "source", ".py")


def chapter(number: str | int) -> Chapter:
    key = key_among(number, chapters(), "chapter {} has no exercises")
    return Chapter(key, chapters()[key], read_cells(chapters()[key]))


def read_cells(path: Path) -> list[Cell]:
    """The cells of a percent file. Raises ValueError naming file and line."""
    text, cells, names = path.read_text(), [], set()
    heads = [*re.finditer("^# %%.*", text, re.MULTILINE)]
    for head, after in zip(heads, [*heads[1:], None]):
        line = text.count("\n", 0, head.start()) + 1
        source = text[head.end() : after and after.start()]
        if not (match := HEADER.match(head[0])):
            raise ValueError(f"{path.name}:{line}: not a cell header: {head[0]}")
        pairs = re.findall(r'(\w+)=("[^"]*"|\d+)', match["attributes"])
        attributes = {key: value.strip('"') for key, value in pairs}
        role = next((role for role in ROLES if role in attributes), "code")
        if match["markdown"]:
            role, source = "text", re.sub("^# ?", "", source, flags=re.MULTILINE)
        name = attributes.pop(role, "")
        bad = ""
        if role in (*LOCKED, "answer", "check") and (name in names or not re.fullmatch(r"[\w-]+", name)):
            bad = f"{name!r} must be a name of its own of letters, digits, _ and -"
        elif role == "check" and int(attributes.get("points", "").isdigit() and attributes["points"]) < 1:
            bad = "a check needs points=1 or more"
        elif role == "check" and not any(cell.role == "answer" for cell in cells):
            bad = "a check needs an answer before it"
        elif role in ("given", "driver", "answer") and (module := not_there(source)):
            bad = f"a rank cannot import {module}; of minitrain it has `from minitrain import collectives`"
        if bad:
            raise ValueError(f"{path.name}:{line}: {bad}")
        names.add(name)
        cells.append(Cell(role, name, source.strip("\n"), attributes))
    return cells
