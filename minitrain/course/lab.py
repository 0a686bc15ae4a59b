"""Copies to work in: what a reader runs and writes stays out of the way of `git pull`.

    work/notebooks/03_data_parallel.ipynb     a copy of each chapter         work/minitrain -> ../minitrain
    work/exercises/03_data_parallel.ipynb     a copy of each exercise        work/README.md -> ../README.md
    work/.copied.json                         the hash of each original when it was copied

A copy that nobody has changed follows its original. A changed one is kept, and named as long as its original
is newer; `fresh` sets it aside and copies anew. Only cells count as changes, not the version of Python that
JupyterLab writes into whatever it saves. JupyterLab opens work/, so all links between chapters, exercises and
modules lead somewhere, and solutions and hidden checks (exercises/source, exercises/wrong) are not in sight.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from minitrain.course.home import PAGES
from minitrain.course.notebook import CHAPTERS, chapters, key_among, numbered

ROOT = CHAPTERS.parent
FOLDERS = ("notebooks", "exercises")
LINKS = ("minitrain", "benchmarks", "tests", "docs", *PAGES, "notebooks/pictures")
LINKS += tuple(f"{name}/AUTHORING.md" for name in FOLDERS) + ("exercises/README.md", "exercises/AGENTS.md")


def written(original: Path) -> Path:
    """Where a reader writes: the copy in work/ if there is one, else the notebook itself."""
    copy = ROOT / "work" / original.relative_to(ROOT)
    return copy if copy.exists() else original


def prepare(root: Path = ROOT, fresh: Iterable[str] = ()) -> list[str]:
    """Make root/work, or bring it up to date; returns a line for each thing that the reader should know.

    `fresh` names copies to make anew: "03", or "notebooks/03" or "exercises/03" alone.
    """
    originals = {folder: numbered(root / folder, ".ipynb").values() for folder in FOLDERS}
    names = {f"{folder}/{path.name}": path for folder, paths in originals.items() for path in paths}
    if not names:
        raise ValueError(f"{root} has no notebooks; `minitrain lab` needs a clone of the repository")
    anew = {name for wish in fresh for name in _meant(wish, names)}
    work = root / "work"
    try:
        for folder in FOLDERS:
            (work / folder).mkdir(parents=True, exist_ok=True)
        with _alone_in(work):
            told = _linked(root, work)
            return told + _copied(work, names, anew)
    except PermissionError as error:
        raise PermissionError(f"cannot write {error.filename}; put the clone where you may write") from None
    except OSError as error:
        raise OSError(f"cannot prepare {work}: {error.strerror or error}") from None


def command(work: Path, arguments: Sequence[str]) -> list[str]:
    """How JupyterLab is started over `work`, at chapter 00, without news; for root only if told to."""
    root = [f"--LabApp.default_url=/lab/tree/notebooks/{chapters()['00'].name}", "--LabApp.news_url=None"]
    root += ["--allow-root"] if os.geteuid() == 0 and "--allow-root" not in arguments else []
    return [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={work}", *root, *arguments]


def _meant(wish: str, names: dict[str, Path]) -> list[str]:
    """The names that "03", "notebooks/03" or "exercises/03" stands for. Raises ValueError if none is."""
    folder, _, number = wish.rpartition("/")
    among = {name: path for name, path in names.items() if name.startswith(folder)}
    numbers = {path.name.partition("_")[0]: path for path in among.values()}
    where = f" in {folder}" if folder else ""
    key = key_among(number, numbers, f"there is no chapter {{!r}}{where} to make fresh")
    return [name for name, path in among.items() if path.name.startswith(f"{key}_")]


@contextmanager
def _alone_in(work: Path) -> Iterator[None]:
    """One command at a time prepares; another one waits for a moment."""
    with open(work / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _linked(root: Path, work: Path) -> list[str]:
    """Links to what notebooks refer to; a line if this disk takes none."""
    for name in LINKS:
        link, target = work / name, os.path.relpath(root / name, (work / name).parent)
        if not (root / name).exists() or (link.exists() and not link.is_symlink()):
            continue  # there is nothing, or the reader has put something of their own there
        if link.is_symlink() and os.readlink(link) == target:
            continue
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        except OSError as error:
            why = f"no symbolic links in {work} ({error.strerror or error})"
            return [f"{why}: the notebooks run, but their links to modules lead nowhere"]
    return []


def _copied(work: Path, names: dict[str, Path], anew: set[str]) -> list[str]:
    """Copy what is missing, outdated and untouched, or wanted anew; say what was kept."""
    record_path, told = work / ".copied.json", []
    record = json.loads(record_path.read_text()) if record_path.exists() else {}
    for name in record.keys() - names.keys():  # a chapter that is no more, or has another name
        if _hash(work / name) == record.pop(name):
            (work / name).unlink()
    for name, original in names.items():
        copy, now, before = work / name, _hash(original), record.get(name)
        mine = _hash(copy)
        if name in anew and mine not in ("", now):
            told.append(f"work/{name} is fresh; yours is {_set_aside(copy).name}, beside it")
            mine = ""
        if mine == "" or (mine == before != now and not _has_answers(copy)):
            _replace(copy, original.read_bytes())
        elif mine != now:
            if before != now:
                wish = f"{name.partition('/')[0]}/{original.name.partition('_')[0]}"
                way = f"`minitrain lab --fresh {wish}` takes it and sets yours aside"
                told.append(f"work/{name} is as you left it; there is a newer one: {way}")
            continue
        record[name] = now
    _replace(record_path, (json.dumps(record, indent=1) + "\n").encode())
    return told


def _hash(path: Path) -> str:
    """Of a notebook's cells; of all its bytes if it cannot be read; "" if it is not there."""
    if not path.exists():
        return ""
    content = path.read_bytes()
    with suppress(ValueError, KeyError, TypeError):
        content = json.dumps(json.loads(content)["cells"], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def _has_answers(copy: Path) -> bool:
    """They may have been there when it was copied: who wrote into exercises/ before there was a work/."""
    from minitrain.course.grading.assignment import cells_in, has_answers

    return has_answers(cells_in(copy))


def _set_aside(copy: Path) -> Path:
    """Rename to 03_data_parallel.yours.ipynb, or .yours-2 if that is taken."""
    count, aside = 1, copy.with_suffix(".yours.ipynb")
    while aside.exists():
        count += 1
        aside = copy.with_suffix(f".yours-{count}.ipynb")
    return copy.rename(aside)


def _replace(path: Path, content: bytes) -> None:
    """Write all of it or nothing."""
    whole = path.with_name(f".{path.name}.part")
    whole.write_bytes(content)
    os.replace(whole, path)
