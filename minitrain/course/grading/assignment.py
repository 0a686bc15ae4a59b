"""The two notebooks of a chapter, in nbgrader's format: the source with everything, the student's with stubs.

`build` writes both from the chapter's percent file, and `state` says what a student's notebook on disk is.
The student's equals, checksums and metadata included, what `nbgrader generate_assignment` makes of the source
(nbgrader 0.9.6, schema version 3; `make nbgrader` compares). So nbgrader is no dependency.
"""

import copy
import hashlib
import json
import re
import textwrap
from pathlib import Path

import nbformat
from nbformat import v4

from minitrain.course.grading.book import LOCKED, Cell, Chapter, chapter, chapters
from minitrain.course.notebook import METADATA

FOR_CHECKS = "# for the checks: an answer does not have this\n"
STUB = "# YOUR CODE HERE\nraise NotImplementedError()\n"


def source_notebook(cells: list[Cell]) -> dict:
    """nbgrader's source notebook."""
    made = [source_cell(number, cell) for number, cell in enumerate(cells)]
    return v4.new_notebook(cells=made, metadata=copy.deepcopy(METADATA), nbformat_minor=5)


def source_cell(number: int, cell: Cell) -> dict:
    metadata = {}
    if cell.role in (*LOCKED, "answer", "check"):
        check, answer = cell.role == "check", cell.role == "answer"
        role = {"grade": check, "solution": answer, "locked": not answer, "task": False}
        points = {"points": int(cell.attributes["points"])} if check else {}
        metadata["nbgrader"] = {"grade_id": cell.name, "schema_version": 3, **role, **points}
    text = FOR_CHECKS * (cell.role in ("driver", "judge")) + cell.source
    new = v4.new_markdown_cell if cell.role == "text" else v4.new_code_cell
    return new(text, id=cell.name or f"cell-{number:03d}", metadata=metadata)


def student_notebook(source: dict) -> dict:
    """What a student gets: solutions and hidden checks cut out, the rest locked and sealed with checksums."""
    notebook = copy.deepcopy(source)
    for cell in notebook["cells"]:
        if facts := cell["metadata"].get("nbgrader"):
            cell["metadata"]["deletable"] = False
            if facts["solution"]:
                cell["source"] = stub_of(cell["source"])
            else:
                cell["metadata"]["editable"] = False
                cell["source"] = without(cell["source"], "HIDDEN TESTS")
            facts["checksum"], facts["cell_type"] = checksum(cell), cell["cell_type"]
    return notebook


def stub_of(solution: str) -> str:
    return without(solution, "SOLUTION", STUB) if "BEGIN SOLUTION" in solution else STUB.rstrip()


def without(source: str, what: str, instead: str = "") -> str:
    """The source with each region BEGIN `what` ... END `what` replaced by text at its indentation."""
    region = re.compile(rf"^( *)### BEGIN {what}\n.*?### END {what}\n", re.MULTILINE | re.DOTALL)
    return region.sub(lambda found: textwrap.indent(instead, found[1]), source + "\n")[:-1]


def checksum(cell: dict) -> str:
    """nbgrader's seal of a cell: its source, type and role, and the points it is worth."""
    facts = cell["metadata"]["nbgrader"]
    grade, solution = facts.get("grade", False), facts.get("solution", False)
    locked = not solution and (grade or facts.get("locked", False))
    parts = [cell["source"], cell.get("cell_type"), grade, solution, locked, facts["grade_id"]]
    points = facts.get("points")  # without, it fits no seal
    parts += [float(points) if isinstance(points, (int, float)) else points] if grade else []
    return hashlib.md5("".join(map(str, parts)).encode()).hexdigest()


def notebooks(of: Chapter) -> dict[Path, str]:
    """The files made from a chapter, and their text."""
    source = source_notebook(of.cells)
    made = {of.path.with_suffix(".ipynb"): source, of.student: student_notebook(source)}
    return {path: nbformat.writes(notebook) + "\n" for path, notebook in made.items()}


def build() -> list[Path]:
    """Write the notebooks that are not as they should be; a student's with answers in it is never touched."""
    written = []
    for number in chapters():
        of = chapter(number)
        for path, text in notebooks(of).items():
            mine = path == of.student and path.exists() and has_answers(cells_in(path))
            if not mine and (not path.exists() or path.read_text() != text):
                path.write_text(text)
                written.append(path)
    return written


def cells_in(path: Path) -> dict[str, dict]:
    """The cells of a notebook that have a grade_id. Raises ValueError if it cannot be read."""
    cure = "`python -m minitrain.course.exercises build` writes a fresh one"
    try:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if "nbgrader" in cell["metadata"]]
        names = [cell["metadata"]["nbgrader"]["grade_id"] for cell in cells]
        return {name: {**cell, "source": "".join(cell["source"])} for name, cell in zip(names, cells)}
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; {cure}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a notebook") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a notebook; move it away, then {cure}") from None


def has_answers(cells: dict[str, dict]) -> bool:
    """Somebody has written in an answer cell since it was generated."""
    facts = [(cell, cell["metadata"]["nbgrader"]) for cell in cells.values()]
    return any(checksum(cell) != of.get("checksum") for cell, of in facts if of.get("solution"))


def state(of: Chapter, path: Path | None = None) -> str:
    """A student's notebook is a "stub", "edited" (answers in it) or "outdated" (made from another source)."""
    found = cells_in(path or of.student)
    for wanted in student_notebook(source_notebook(of.cells))["cells"]:
        if facts := wanted["metadata"].get("nbgrader"):
            cell = found.get(facts["grade_id"])
            if cell is None or cell["metadata"]["nbgrader"].get("checksum") != facts["checksum"]:
                return "outdated"
            if not facts["solution"] and cell["source"] != wanted["source"]:
                return "outdated"
    return "edited" if has_answers(found) else "stub"
