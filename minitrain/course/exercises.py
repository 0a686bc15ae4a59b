"""Grade exercise notebooks: points per check, and what to look at next.

    minitrain grade 02        the reader's notebook: work/exercises/02_….ipynb, else exercises/02_….ipynb
    python -m minitrain.course.exercises
        build                 write the notebooks of all chapters from exercises/source/*.py
        prove [02]            stubs get nothing, solutions all, wrong ones are caught by name
        prove 02 --draws 9    the same, with nine different draws: is a mistake caught by luck alone?
        attack [02]           answers that know nothing, against every task, and walk-arounds: none earns

Of the student's notebook only the answer cells are read, by their grade_id; given cells and checks come from
exercises/source, so editing a check changes nothing. Each check is a new run of the answer in processes of
its own (course/grading/judge.py), with values drawn after the answer was handed in. A check gives all its
points or none; one that cannot read an answer gives none.
"""

import argparse
import ast
import functools
import itertools
import pkgutil
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType

import minitrain
from minitrain.course.grading import assignment, book
from minitrain.course.grading.answer_checks import Answer, Draw, judging
from minitrain.course.grading.judge import EXERCISES, PACKAGE, Code, Judge
from minitrain.course.grading.trial import NOT_ATTEMPTED, Broken, Failure, short
from minitrain.course.home import at_home
from minitrain.course.lab import ROOT, written

PROGRAM = "python -m minitrain.course.exercises"
TIME_LIMIT_S = 20.0  # of a processor, for one run of an answer; the slowest honest one takes a second


@dataclass(frozen=True)
class Result:
    """What one check found: `property` is the one that is broken, "" if none."""

    task: str
    check: str
    title: str
    points: int
    earned: int
    property: str = ""
    message: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """The results of one chapter."""

    name: str
    results: list[Result]
    missing: str  # why there are no walls; "" behind walls
    seed: str
    elapsed_s: float
    file: str = ""  # that was graded
    note: str = ""

    @property
    def earned(self) -> int:
        return sum(result.earned for result in self.results)

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)

    def table(self, detail: bool = False) -> str:
        lines, task = [f"{self.file or self.name}{self.note}"], None
        for result in self.results:
            if result.task != task:
                task = result.task
                lines += ["", f"  {task}"]
            mark = "--" if result.property else "ok"
            lines.append(f"  {result.earned:2}/{result.points}  {mark}  {result.title}")
            if result.message:
                lines.append(f"            {result.message}")
            if result.detail and detail:
                lines += [f"            | {line}" for line in result.detail.splitlines()]
        lines += ["", f"total {self.earned}/{self.points} in {self.elapsed_s:.1f} s  (seed {self.seed})"]
        return "\n".join([*lines, *what_it_is(self.missing)])


@dataclass(frozen=True)
class Grades:
    """All chapters."""

    reports: list[Report]

    def table(self, detail: bool = False) -> str:
        lines = [f"{one.earned:3}/{one.points}  {one.file or one.name}{one.note}" for one in self.reports]
        earned, points = sum(r.earned for r in self.reports), sum(r.points for r in self.reports)
        lines.append(f"{earned:3}/{points}  in all; `minitrain grade 00` shows a chapter check by check")
        return "\n".join([*lines, *what_it_is(self.reports[-1].missing if self.reports else "")])


def what_it_is(missing: str) -> list[str]:
    return [f"a self-check, not a grade: answers ran without walls, because {missing}"] if missing else []


def grade(
    chapter: str | int | None = None, path: str | Path | None = None, *, judge: Judge | None = None, seed=""
) -> Report | Grades:
    """Grade a chapter's notebook (at `path`, else the reader's in work/ or exercises/), or all chapters.

    `seed` repeats what an earlier report drew. Without a `judge` one is started and ended.
    """
    with Judge() if judge is None else nullcontext(judge) as judge:
        if chapter is None:
            return Grades([grade(one, judge=judge, seed=seed) for one in book.chapters()])
        of = book.chapter(chapter)
        path = Path(path or written(of.student))
        answers = {name: cell["source"] for name, cell in assignment.cells_in(path).items()}
        outdated = assignment.state(of, path) == "outdated"
        note = "  (its checks are not those of this version: graded with this version's)" if outdated else ""
        if path == written(of.student) != of.student and assignment.state(of) == "edited":
            note += f"  (answers in exercises/{of.student.name} are not graded; --file names it)"
        file = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        return replace(grade_answers(of, answers, judge, seed), file=file, note=note)


def grade_folder(chapter: str | int, folder: Path, seed: str = "") -> Iterator[tuple]:
    """A head, then a row per student: NAME.ipynb or NAME/../02_...ipynb. Draws follow from seed and NAME."""
    files = sorted([*folder.glob("*.ipynb"), *folder.glob(f"*/**/{book.chapter(chapter).student.name}")])
    if not files:
        raise ValueError(f"{folder} has no notebooks: NAME.ipynb, or NAME/ with the chapter's in it")
    yield "student", "points", "of", "failed"
    with Judge() as judge:
        for path in files:
            student = path.relative_to(folder).parts[0].removesuffix(".ipynb")
            try:
                report, failed = grade(chapter, path, judge=judge, seed=seed + student), []
            except ValueError as error:  # of a file that is no notebook
                report, failed = Report("", [], "", "", 0.0), [str(error)]
            failed += [f"{one.title}: {one.property}" for one in report.results if one.property]
            yield student, report.earned, report.points, "; ".join(failed)


def grade_answers(
    of: book.Chapter, answers: dict[str, str], judge: Judge, seed: str = "", time_limit_s=TIME_LIMIT_S
) -> Report:
    """Grade answer cells given as text, by grade_id."""
    started, seed, results = time.perf_counter(), seed or secrets.token_hex(4), []
    for task in of.tasks:
        results += results_of(of, task, answers.get(task.answer.name), judge, seed, time_limit_s)
    return Report(of.path.stem, results, judge.missing, seed, time.perf_counter() - started)


def results_of(
    of: book.Chapter, task: book.Task, answer: str | None, judge: Judge, seed: str, time_limit_s=TIME_LIMIT_S
) -> Iterator[Result]:
    """Run the checks of one task, one after the other."""
    code = Code(of.sources("given"), answer or "", of.sources("driver"), task.names)
    failure: Failure | None = None
    for check in task.checks:
        if answer is None:
            failure = Failure("no error", "the answer cell is gone; a fresh notebook has it")
        elif answer == assignment.stub_of(task.answer.source):
            failure = Failure(NOT_ATTEMPTED)
        elif failure is not None and failure.property in ("time limit", "memory limit"):
            failure = Failure(failure.property, "not run, because of the check above")
        else:
            failure = failure_in(of, check, judge, code, time_limit_s, seed)
        facts = task.title, check.name, check.title, (points := int(check.attributes["points"]))
        if failure is None:
            yield Result(*facts, points)
        else:
            yield Result(*facts, 0, failure.property, str(failure), failure.detail)


@functools.cache
def compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec")


def failure_in(
    of: book.Chapter, check: book.Cell, judge: Judge, code: Code, time_limit_s: float, seed: str
) -> Failure | None:
    """Run one check cell before the judge, behind read-only cells of its own; the answer is only names."""
    answers = {name: Answer(name) for name in code.names}
    namespace = {"__name__": "exercise", **answers}
    for source in of.sources(*book.LOCKED):
        exec(compiled(source, "<read-only cell>"), namespace)
    namespace |= {**answers, "draw": Draw(f"{seed}/{check.name}")}
    try:
        with judging(judge, code, time_limit_s):
            exec(compiled(check.source, f"<check {check.name}>"), namespace)
    except Failure as failure:
        return failure
    except Broken:
        raise
    except Exception as error:  # a check cannot read what an answer returned: that costs the points, no more
        what = f"{type(error).__name__}: {short(error)}"
        return Failure("data", f"the check cannot read what came back: {what}")
    return None


# ---- proofs ----------------------------------------------------------------------------------------------


def prove(of: book.Chapter, judge: Judge, seed: str = "0", once: bool = False) -> list[str]:
    """What is wrong with a chapter's grading: stubs, solutions and the committed wrong solutions; `once`: one
    of each task, from task to task and chapter to chapter at another place among the task's.

    All that the checks draw follows from `seed`, so a proof ends the same way each time it runs.
    """
    faults = []
    solutions = {task.answer.name: task.answer.source for task in of.tasks}
    stubs = {name: assignment.stub_of(source) + "\n" for name, source in solutions.items()}  # "\n": it is run
    empty, full = (grade_answers(of, answers, judge, seed) for answers in (stubs, solutions))
    if empty.earned or any(result.message != NOT_ATTEMPTED for result in empty.results):
        faults.append(f"a stub gets {empty.earned} points, or another message than {NOT_ATTEMPTED!r}")
    failed = [result for result in full.results if result.property]
    faults += [f"the solution fails {one.check}: {one.message} {one.detail}" for one in failed]
    counts, told = Counter(cell.name for cell in of.wrong), "{} has {} wrong solutions; write three to twelve"
    faults += [told.format(name, counts[name]) for name in solutions if not 3 <= counts[name] <= 12]
    each = enumerate([cell for cell in of.wrong if cell.name == name] for name in solutions)
    wrong = [its[(2 * int(of.number) + 5 * i) % len(its)] for i, its in each if its] if once else of.wrong
    return [f"{of.number}: {fault}" for fault in faults] + wrong_ones(of, wrong, judge, seed)


def wrong_ones(of: book.Chapter, wrong: list[book.Cell], judge: Judge, seed: str = "0") -> list[str]:
    """Which wrong solutions the property they name does not catch, and which walk-arounds earn anything."""
    faults, tasks = [], {task.answer.name: task for task in of.tasks}
    for cell in (cell for cell in wrong if cell.name in tasks):
        wanted, why = cell.attributes["fails"], f"{of.number}: {cell.name}, {cell.attributes['why']}"
        limit_s = TIME_LIMIT_S / (20 if wanted == "time limit" else 1)  # which it uses up
        results = results_of(of, tasks[cell.name], cell.source, judge, seed, limit_s)
        if "around" in cell.attributes:
            results, earned = (every := list(results)), sum(one.earned for one in every)
            faults += [f"{why}: earns {earned} points"] * bool(earned)
        found = next((result.property for result in results if result.property), "nothing")
        faults += [f"{why}: found {found!r}, not {wanted!r}"] * (found != wanted)
    return faults


def with_bodies(source: str, body: str) -> str:
    """An answer's functions, or the methods of its class, with this body; values as None."""
    made, arguments = [], "*args, **kwargs"
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            made.append(f"def {node.name}({arguments}):\n    {body}")
        elif isinstance(node, ast.ClassDef):
            names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)} - {"__init__"}
            made.append(f"class {node.name}:\n    def __init__(self, {arguments}): pass")
            made += [f"    def {name}(self, {arguments}):\n        {body}" for name in names]
        elif isinstance(node, ast.Assign):
            made.append(ast.unparse(node.targets[0]) + " = None")
    return "\n".join(made)


def attack(of: book.Chapter, judge: Judge, seed: str = "0", every: int = 1) -> tuple[int, list[str]]:
    """How many answers were tried that know nothing of their task, and which of them earned something. Of the
    attempts that there are each task has one in `every`, the next task the next ones."""
    tried, faults = 0, []
    known = book.defined_by(*of.sources(*book.LOCKED))
    modules = [module.name for module in pkgutil.walk_packages(minitrain.__path__, "minitrain.")]
    attempts = book.read_cells(EXERCISES / "wrong" / "any_task.txt")
    pairs = itertools.product(enumerate(of.tasks), enumerate(attempts))
    for task, attempt in ((task, one) for (i, task), (j, one) in pairs if (i + j) % every == 0):
        facts = dict(ASKED=task.names, OTHERS=known - {*task.names}, PACKAGE=str(PACKAGE), MODULES=modules)
        told = [f"{name} = {value!r}" for name, value in facts.items()]
        bodies = with_bodies(task.answer.source, attempt.attributes["body"])
        results = results_of(of, task, "\n".join([*told, bodies, attempt.source]), judge, seed)
        earned, tried = sum(result.earned for result in results), tried + 1
        if earned:
            why = attempt.attributes["why"]
            faults.append(f"{of.number}: {task.answer.name}, {why}: earns {earned} points")
    return tried, faults


def asked(number: str | None) -> list[book.Chapter]:
    """Those with wrong solutions. Raises ValueError if one of them, or a source, cannot be read."""
    return [of for of in map(book.chapter, [number] if number else book.chapters()) if of.wrong]


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number, 1 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 2 and one line for a wrong chapter; 1 for what is proved to be wrong."""
    parser = argparse.ArgumentParser(prog=PROGRAM)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write the notebooks of all chapters from exercises/source/*.py")
    proving = commands.add_parser("prove", help="stubs get nothing, solutions all, wrong ones are caught")
    proving.add_argument("chapter", nargs="?", help="such as 02; all when none is given")
    proving.add_argument("--draws", type=at_least_one, default=1, help="how often, with other draws (1)")
    attacking = commands.add_parser("attack", help="answers that know nothing of their task earn nothing")
    attacking.add_argument("chapter", nargs="?", help="such as 02; all when none is given")
    wish = parser.parse_args(arguments)
    try:
        at_home()
        found = [] if wish.command == "build" else asked(wish.chapter)
    except ValueError as error:
        parser.error(str(error))
    faults, tried, around = [], 0, 0
    with Judge() as judge:
        if wish.command == "build":
            wrote = "\n".join(f"wrote {path}" for path in assignment.build())
            print(wrote or "all notebooks are as they should be")
        elif wish.command == "prove":
            for of, seed in itertools.product(found, range(wish.draws)):
                faults += [f"draw {seed}: {fault}" for fault in prove(of, judge, str(seed))]
        else:
            for of in found:
                count, faults_here = attack(of, judge)
                walks = [cell for cell in of.wrong if "around" in cell.attributes]
                faults += faults_here + wrong_ones(of, walks, judge)
                tried, around = tried + count, around + len(walks)
            told = f"{tried} know nothing of their task, {around} walk around it"
            print(f"{tried + around} answers tried ({told}),\n{tried + around - len(faults)} held")
    print("\n".join(faults) or f"{wish.command}: good")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
