"""Where chapters and exercises are: in a clone, or in a folder that `minitrain init FOLDER` has laid out.

A wheel has them as one archive beside this file (setup.py packs it), a clone as they are. `HOME` is the
folder laid out here or above; else the clone; else None, and `at_home` says in a line what to do. A
laid-out folder is a clone without tests and benchmarks: `.minitrain` marks it, the link `minitrain` leads to
the package.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ARCHIVE = Path(__file__).with_name("course.zip")
MARK = ".minitrain"
PAGES = ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")
PARTS = ("notebooks", "exercises", "docs", *PAGES)


def find(start: Path, package: Path = PACKAGE) -> Path | None:
    """The folder with notebooks/ that belongs to `start`."""
    for folder in (start, *start.parents):
        if (folder / MARK).is_file():
            return folder
    return package.parent if (package.parent / "notebooks").is_dir() else None


def here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was deleted under us
        return PACKAGE.parent


HOME = find(here())


def at_home() -> Path:
    """HOME. Raises ValueError if there is none."""
    if HOME is None:
        raise ValueError("no chapters here: `minitrain init FOLDER` lays them out, then call this in FOLDER")
    return HOME


def files(root: Path) -> Iterator[Path]:
    """What a reader needs of a clone: chapters, exercises, README, licence."""
    for part in PARTS:
        whole = root / part
        for path in [whole] if whole.is_file() else sorted(whole.rglob("*")):
            names = path.relative_to(root).parts
            if path.is_file() and not any(name.startswith((".", "__pycache__")) for name in names):
                yield path


def pack(root: Path, archive: Path) -> None:
    """Write chapters and exercises of the clone `root` into one file."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in files(root):
            packed.write(path, path.relative_to(root))


def lay_out(folder: Path) -> list[str]:
    """Put chapters and exercises into a new or empty `folder`; returns lines the reader should know."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give a new folder")
    clone = PACKAGE.parent
    if not ARCHIVE.exists() and not (clone / "notebooks").is_dir():
        raise ValueError(f"{PACKAGE} has no {ARCHIVE.name}: install minitrain again, or use a clone")
    folder.mkdir(parents=True, exist_ok=True)
    if ARCHIVE.exists():
        with zipfile.ZipFile(ARCHIVE) as packed:
            packed.extractall(folder)
    else:
        for path in files(clone):
            copy = folder / path.relative_to(clone)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (folder / MARK).write_text("laid out by `minitrain init`; `minitrain` looks for this file\n")
    try:
        (folder / "minitrain").symlink_to(PACKAGE)
    except OSError as error:
        return [f"no link to the modules ({error.strerror or error}); the notebooks run without"]
    return []
