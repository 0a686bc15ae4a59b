"""What chapters need around the code they show: print a source, numbers beside formulas, run a notebook.

A notebook owns the question, the module the code: `show(function)` prints what the module holds today, so
text and code cannot drift apart. `compare` prints the table that ends every chapter. `execute` runs a chapter
headless.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Callable, Mapping

from minitrain.course.home import HOME, PACKAGE, at_home

CHAPTERS = (HOME or PACKAGE.parent) / "notebooks"
EXERCISES = CHAPTERS.parent / "exercises"
CELL_TIMEOUT_S = 3600
FOLDED = "beside your guess:\n"  # of what is folded JupyterLab shows the first line: no answer
_PYTHON = {"name": "python", "version": "3.11.7", "mimetype": "text/x-python", "file_extension": ".py"}
_PYTHON |= {"codemirror_mode": {"name": "ipython", "version": 3}, "pygments_lexer": "ipython3"}
METADATA = {  # what JupyterLab writes; with another Python the line of its version differs, no other
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": _PYTHON | {"nbconvert_exporter": "python"},
}


def hide_frames() -> None:
    """An error in a notebook shows the reader's lines; `%tb` shows those of minitrain and below it, too."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()

    def shown(shell, kind, error, trace, tb_offset=None) -> None:
        links = [trace]
        while links[-1].tb_next:
            links.append(links[-1].tb_next)
        files = [link.tb_frame.f_code.co_filename for link in links]
        if any(file.startswith(f"{PACKAGE}/") for file in files) and not hasattr(error, "_render_traceback_"):
            error.add_note("(%tb shows the lines inside minitrain, too)")
            trace = None
            for link, file in reversed([*zip(links, files)]):
                if link is links[0] or not (file.startswith(f"{PACKAGE}/") or "lib/python3" in file):
                    trace = TracebackType(trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        sys.last_traceback = error.__traceback__

    if shell:
        shell.set_custom_exc((Exception,), shown)


def show(*things: Callable) -> None:
    """The current source of functions and classes, coloured, each under a link to its place and the first
    lines of its docstring. Outside a notebook it is printed."""
    from IPython import get_ipython
    from IPython.display import display

    parts = [_sourced(thing) for thing in things]
    plain = "\n\n\n".join(f"# {place}\n{source}" for place, _, source in parts)
    if get_ipython() is None:
        return print(plain)
    fences = [
        f"[`{place}`](../{place.replace(':', '#L')}) {said}\n\n```python\n{source}\n```"
        for place, said, source in parts
    ]
    display({"text/plain": plain, "text/markdown": "\n\n".join(fences)}, raw=True)


def _sourced(thing: Callable) -> tuple[str, str, str]:
    """("minitrain/file.py:line", the first paragraph of the docstring, the source)."""
    lines, number = inspect.getsourcelines(thing)
    source, text = textwrap.dedent("".join(lines)), inspect.cleandoc(thing.__doc__ or "")
    if text and '"""' in source:
        before, _, rest = source.partition('"""')
        source = before.rstrip(" ") + rest.partition('"""')[2].lstrip("\n")
    place = Path(inspect.getsourcefile(inspect.unwrap(thing))).relative_to(PACKAGE.parent)
    return f"{place}:{number}", " ".join((text or "").partition("\n\n")[0].split()), source.rstrip()


def compare(rows: Mapping[str, tuple], unit: str = "bytes") -> None:
    """Print {"what": (measured, formula)} as a table; the ratio is exact when both are integers."""
    width = max(map(len, rows), default=4)
    print(f"{'':{width}}  {'measured':>20}  {'formula':>20}  ratio   [{unit}]")
    for name, (measured, formula) in rows.items():
        ratio = f"{float(Fraction(measured) / Fraction(formula)):.3f}" if formula else "-"
        print(f"{name:{width}}  {_number(measured):>20}  {_number(formula):>20}  {ratio}")


def _number(value) -> str:
    exact = Fraction(value)
    return f"{exact.numerator:,}" if exact.denominator == 1 else f"{float(value):,.4f}"


def numbered(folder: Path, suffix: str) -> dict[str, Path]:
    """{"00": path, ..., "14": path, "14b": its appendix, ...} in reading order."""
    return dict(sorted((path.name.partition("_")[0], path) for path in folder.glob(f"[0-9][0-9]*_*{suffix}")))


def key_among(number: str | int, known: dict[str, Path], otherwise: str) -> str:
    """The key of a chapter number: "3", 3 and "03" are the same. Raises ValueError naming those there are."""
    key = f"{int(number):02d}" if str(number).isdigit() else str(number)
    if key not in known:
        raise ValueError(f"{otherwise.format(number)}; there are {', '.join(known) or 'none'}")
    return key


def chapters() -> dict[str, Path]:
    return numbered(CHAPTERS, ".ipynb")


def chapter(number: str | int) -> Path:
    at_home()
    return chapters()[key_among(number, chapters(), "there is no chapter {!r}")]


def exercises() -> dict[str, Path]:
    """The sources of exercises, by the number of their chapter."""
    return numbered(EXERCISES / "source", ".py")


def exercise(number: str | int) -> Path:
    at_home()
    return exercises()[key_among(number, exercises(), "chapter {} has no exercises")]


def heading(path: Path) -> tuple[str, str]:
    """(title, the line of facts below it: time, ranks, hardware) from the first cell of a chapter."""
    lines = "".join(json.loads(path.read_text())["cells"][0]["source"]).splitlines()
    facts = next((line for line in lines if line.startswith("**Time**")), "")
    return lines[0].lstrip("# "), re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", facts).replace("**", "")


def execute(path: Path, out: Path, on_cell: Callable = lambda done, total: None) -> float:
    """Run every cell of `path` in a fresh kernel and write the executed copy to `out`; returns the seconds.

    RuntimeError names the cell and the error of the first cell that fails; the copy is written all the same.
    An interrupt stops the kernel at once and writes nothing.
    """
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    from minitrain.course.kernels import run

    notebook = nbformat.read(path, as_version=4)
    total, at, started = len(notebook.cells), 0, time.perf_counter()

    def begins(cell_index, **_):
        nonlocal at
        at = cell_index + 1

    def finished(cell_index, **_):
        on_cell(cell_index + 1, total)

    hooks = {"on_cell_start": begins, "on_cell_executed": finished}
    try:
        run(notebook, str(path.parent), timeout=CELL_TIMEOUT_S, record_timing=False, **hooks)
        on_cell(total, total)  # what follows the last code cell is text
        failure = ""
    except CellExecutionError as error:
        failure = f"stopped in cell {at}: {error.ename}: {error.evalue}"
    except CellTimeoutError:
        failure = f"stopped in cell {at}: it ran longer than {CELL_TIMEOUT_S} s"
    except DeadKernelError:
        failure = f"stopped in cell {at}: its kernel ended (exit() in a cell, or no memory left)"
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(normalised(notebook), out)
    if failure:
        raise RuntimeError(f"{path.name} {failure}")
    return time.perf_counter() - started


def normalised(notebook):
    """What JupyterLab would save, without what differs from run to run: ids, folders, where prints paused.

    A cell that answers a prediction (it reads `guess`) is folded: running it opens it.
    """
    notebook.metadata = copy.deepcopy(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:03d}"
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        if cell.cell_type == "code" and answers_a_prediction(cell.source):
            cell.metadata |= {"collapsed": True, "jupyter": {"outputs_hidden": True}}  # one fact, said twice
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
            for first in cell.outputs[: "collapsed" in cell.metadata]:
                if first.get("name") == "stdout":
                    first["text"] = FOLDED + first["text"].removeprefix(FOLDED)
        for output in cell.get("outputs", []):
            # A widget lives in its kernel only; where the files of a traceback lie is nobody's business.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            if output.output_type == "error":
                output.traceback = [_from_the_project(line) for line in output.traceback]
    return notebook


def _from_the_project(line: str) -> str:
    """Without the folder of the project, and of whatever environment holds the packages."""
    # After a blank, or after a colour's "[32m".
    environment = r"(?:(?<=m)|(?<![\w.]))/[^\s:]*?/(?=lib/python\d)"
    return re.sub(environment, "", line.replace(f"{CHAPTERS.parent}/", ""))


def answers_a_prediction(source: str) -> bool:
    return re.search(r"\bguess\b(?! *=)", source) is not None


def joined(outputs: list) -> list:
    """Prints that follow each other as one."""
    together = []
    for output in outputs:
        last = together[-1] if together else {}
        if output["output_type"] == last.get("output_type") == "stream" and output["name"] == last["name"]:
            last["text"] += output["text"]
        else:
            together.append(output)
    return together


hide_frames()
