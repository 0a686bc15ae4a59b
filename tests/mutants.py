"""Mistakes made on purpose: each line of mutants.tsv changes one place, and the tests it names must notice.

    python -m tests.mutants                      all of them; ends with 1 unless every one is killed
    python -m tests.mutants p-moe l-3 --jobs 2   those whose id begins so, two at a time

A line has, between tabs: id, file, old, new, tests, breaks. `old` stands once in the file and becomes `new`
(\\n is a new line, \\t a tab, \\\\ a backslash); `tests` are paths or node ids for pytest, and `breaks` says what
is wrong then. The tree itself is never touched: each job works on a copy of its files.

    killed     a test failed, having passed without the mutant (in the same copy: asked once per set of tests)
    time       nothing failed and nothing ended within --limit seconds: a hang, which counts as noticed
    survived   all tests passed
    unclear    the tests do not pass without the mutant, or pytest could not run them with it
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".tsv")
COLUMNS = ["id", "file", "old", "new", "tests", "breaks"]
LETTERS = {"n": "\n", "t": "\t", "\\": "\\"}
VERDICTS = {0: "survived", 1: "killed", None: "time"}  # by what pytest ended with


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str

    def problem(self, root: Path) -> str:
        """Why it cannot be made in the tree; "" if it can."""
        if not (root / self.file).is_file():
            return f"{self.file} is not there"
        times = (root / self.file).read_text().count(self.old)
        if times != 1 or self.old == self.new or not self.old:
            return f"{self.file} has {self.old!r} {times} times; it must stand there once, and change"
        missing = [test for test in self.tests if not (root / test.split("::")[0]).is_file()]
        return f"{missing[0]} is not there" if missing else "" if self.tests else "it names no tests"

    @contextmanager
    def made(self, root: Path):
        path = root / self.file
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def plain(text: str) -> str:
    return re.sub(r"\\([nt\\])", lambda found: LETTERS[found[1]], text)


def read(path: Path = LIST) -> list[Mutant]:
    """All lines. Raises ValueError on one that has not exactly the six columns."""
    lines = list(csv.reader(path.read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, line in enumerate(lines, 1):
        if len(line) != len(COLUMNS) or (number == 1 and line != COLUMNS):
            raise ValueError(f"{path.name} line {number} has {len(line)} columns, expected {COLUMNS}")
    return [
        Mutant(name, file, plain(old), plain(new), tuple(tests.split()), breaks)
        for name, file, old, new, tests, breaks in lines[1:]
    ]


def copied(tree: Path, to: Path) -> Path:
    """The files of the tree that git has or does not ignore."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (tree / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, to / name)
    return to


class Copy:
    """A copy of the tree, and what its tests said without a mutant."""

    def __init__(self, tree: Path, folder: Path, limit_s: float):
        self.root, self.limit_s = copied(tree, folder), limit_s
        self.sound: dict[tuple[str, ...], bool] = {}

    def pytest(self, tests: Iterable[str], limit_s: float) -> int | None:
        """What it ended with; None if its time was up, and then nothing of it is left."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environ = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(command, cwd=self.root, env=environ, start_new_session=True, **quiet)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def verdict(self, mutant: Mutant) -> str:
        if problem := mutant.problem(self.root):
            return f"unclear: {problem}"
        if mutant.tests not in self.sound:
            self.sound[mutant.tests] = self.pytest(mutant.tests, max(self.limit_s, 600)) == 0
        if not self.sound[mutant.tests]:
            return "unclear: its tests do not pass without it"
        with mutant.made(self.root):
            ended = self.pytest(mutant.tests, self.limit_s)
        return VERDICTS.get(ended, f"unclear: pytest ended with {ended}")


def judge(mutants: list[Mutant], tree: Path, jobs: int, limit_s: float, say=print) -> Counter:
    """How many had which verdict; a line for each."""
    waiting, counts, talking = queue.SimpleQueue(), Counter(), threading.Lock()
    for mutant in mutants:
        waiting.put(mutant)

    def work(folder: Path) -> None:
        copy = Copy(tree, folder, limit_s)
        while not waiting.empty():
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            verdict = copy.verdict(mutant)
            with talking:
                counts[verdict.split(":")[0]] += 1
                say(f"{verdict:9} {mutant.id}: {mutant.breaks} ({mutant.file})")

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        threads = [threading.Thread(target=work, args=(Path(folder) / str(job),)) for job in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="beginnings of ids")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one mutant")
    parser.add_argument("--list", type=Path, default=LIST, help="another file of mutants")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout")
    given = parser.parse_args()
    mutants = [one for one in read(given.list) if one.id.startswith(tuple(given.ids) or "")]
    counts = judge(mutants, given.tree, given.jobs, given.limit, lambda line: print(line, flush=True))
    print(f"{len(mutants)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return counts["killed"] + counts["time"] != len(mutants)


if __name__ == "__main__":
    sys.exit(main())
