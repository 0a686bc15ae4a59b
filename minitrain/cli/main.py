"""The `minitrain` command: check this machine, train, run chapters, grade exercises, replay a big machine.

Exit codes: 2 for bad input, 1 for a rank or a chapter that failed, with a line on stderr; 130 interrupted.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated

import psutil
import typer
from typer import Argument, Option, echo

from minitrain.cli import checkpoint_command, plan_command, replay_command, tokenize_command, train_command
from minitrain.cli.lift_command import lift_command
from minitrain.cli.sample_command import sample
from minitrain.course import home, notebook
from minitrain.course import lab as copies
from minitrain.course.atlas import SHOWN, named, near, search
from minitrain.model.training.flags import Command, Group, among

UsageError = typer.BadParameter.__mro__[1]  # typer gives this exception of click's no name
ROOT = notebook.CHAPTERS.parent
MOST_LETTERS = 800  # of a complaint
HELP = "Learn how large models are trained on many machines, by running it."
app = typer.Typer(cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False, help=HELP)


def main() -> None:
    """An error of ours is one line on stderr, never a traceback; under torchrun the first rank says it."""
    try:
        sys.exit(app(prog_name="minitrain", standalone_mode=False))
    except UsageError as error:
        complain(f"{error.format_message().rstrip('.')}; see {error.ctx.command_path} --help")
        sys.exit(2)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("RANK", "0") == "0":
            complain(str(error))
        sys.exit(1 if isinstance(error, RuntimeError) else 2)


def complain(text: str) -> None:
    """On one line that ends, whatever was given: names of files may have line breaks, or be no text."""
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    echo(f"minitrain: {text[:MOST_LETTERS]}", err=True)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context, version: Annotated[bool, Option("--version", help="versions, and end")] = False
) -> None:
    if version:
        found = [f"{name} {metadata.version(name)}" for name in ("minitrain", "torch")]
        echo(f"{', '.join(found)}, Python {platform.python_version()}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        echo(context.get_help())


app.command(cls=Command)(train_command.train)
app.command(cls=Command)(sample)
app.command()(tokenize_command.tokenize)
app.command(cls=Command)(plan_command.plan)
app.command(cls=Command)(replay_command.replay)
app.command("lift")(lift_command)
app.add_typer(checkpoint_command.app, name="checkpoint")


@app.command()
def doctor() -> None:
    """Check Python, torch, four ranks over loopback and the GPUs; exit 1 if something needed is missing."""
    import torch

    from minitrain.ranks import launch
    from minitrain.ranks.collectives import all_reduce, world

    def meet() -> float:
        started = time.perf_counter()
        sums = launch.run(lambda: all_reduce(torch.ones(1), world()).item(), ranks=4)
        assert sums == [4.0] * 4, f"four ranks added 1 and got {sums}"
        return time.perf_counter() - started

    free_gb, gpus = psutil.virtual_memory().available / 1e9, torch.cuda.device_count()
    new_enough = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    checks = [
        (sys.version_info >= (3, 11), "python", platform.python_version(), "install Python 3.11 or newer"),
        (new_enough, "torch", torch.__version__, "make install"),
        (True, "cores", str(os.cpu_count()), ""),
        (free_gb > 2, "free memory", f"{free_gb:.1f} GB", "the chapters need 2 GB; close something"),
        (True, "GPUs", f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none (none is needed)", ""),
    ]
    try:
        checks.append((True, "4 ranks", f"first launch {meet():.1f} s, next {meet():.2f} s", ""))
    except Exception as error:  # whatever stops four ranks from meeting is what the reader must see
        cure = "see 'When ranks cannot meet' in docs/commands.md"
        checks.append((False, "4 ranks", str(error).splitlines()[0], cure))
    for good, what, found, cure in checks:
        echo(f"{'ok  ' if good else 'FAIL'}  {what:14} {found}" + ("" if good else f"   -> {cure}"))
    if not all(good for good, *_ in checks):
        raise typer.Exit(1)


@app.command()
def init(folder: Annotated[Path, Argument(help="new or empty")]) -> None:
    """Lay out chapters and exercises in a folder; a clone of the repository has them already."""
    for line in home.lay_out(folder):
        echo(line)
    echo(f"{folder} has the chapters and exercises. Next: cd {folder} && minitrain list")


@app.command("list")
def list_chapters() -> None:
    """The chapters there are, with the time and the ranks each needs."""
    home.at_home()
    for path in notebook.chapters().values():
        title, facts = notebook.heading(path)
        needs = [fact for fact in facts.split(" · ") if fact.startswith(("Time", "Ranks"))]
        for line in title, f"     {' · '.join(needs)}":
            echo(line if len(line) <= 80 else line[:78].rpartition(" ")[0].rstrip(",") + " ..")
    echo("Open them with `minitrain lab`; `minitrain run 03` runs one without a browser.")


@app.command("run")
def run_chapters(
    numbers: Annotated[
        list[str] | None, Argument(help="such as 00 03; else all", autocompletion=among(notebook.chapters()))
    ] = None,
    save: Annotated[bool, Option(help="write the outputs into the notebook itself (for authors)")] = False,
    out: Annotated[Path, Option(help="folder for the executed copies")] = ROOT / "runs",
) -> None:
    """Run chapters from the first cell to the last without a browser, with a progress bar."""
    from tqdm import tqdm

    home.at_home()
    paths = [notebook.chapter(number) for number in numbers or notebook.chapters()]
    out.mkdir(parents=True, exist_ok=True)  # what is wrong with it is said now, not after a chapter
    started = time.perf_counter()
    for ran, path in enumerate(paths):
        with tqdm(desc=path.stem, unit="cell", leave=False, disable=not sys.stderr.isatty()) as bar:

            def on_cell(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            try:
                elapsed_s = notebook.execute(path, path if save else out / path.name, on_cell)
            except KeyboardInterrupt:
                echo(f"interrupted in {path.stem}; {ran} of {len(paths)} chapters ran", err=True)
                raise typer.Exit(130) from None
        echo(f"ok  {path.stem:24} {elapsed_s:5.1f} s")
    folder = os.path.relpath(out) if out.is_relative_to(Path.cwd()) else out
    where, elapsed_s = "in place" if save else f"in {folder}/", time.perf_counter() - started
    echo(f"{len(paths)} of {len(paths)} chapters ran in {elapsed_s:.0f} s; executed notebooks are {where}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    fresh: Annotated[list[str] | None, Option(help="a chapter to copy anew; yours is kept")] = None,
) -> None:
    """Open JupyterLab over copies of chapters and exercises in work/; what else is given, it gets."""
    home.at_home()
    for line in copies.prepare(fresh=fresh or ()):
        echo(line)
    command = copies.command(ROOT / "work", context.args)
    echo("Your copies are in work/: git leaves them alone, and `minitrain grade` reads them.")
    if "--allow-root" in command:
        echo("You are root: JupyterLab is told that this is meant (--allow-root).")
    sys.stdout.flush()
    os.execv(command[0], command)  # from here on this is JupyterLab: its prompts, its exit code


@app.command()
def grade(
    chapter: Annotated[
        str | None, Argument(help="such as 02; else all", autocompletion=among(notebook.exercises()))
    ] = None,
    file: Annotated[Path | None, Option(help="notebook; else that in work/exercises, or exercises")] = None,
    detail: Annotated[bool, Option(help="show the traceback of each failed task")] = False,
    folder: Annotated[Path | None, Option(help="of a class, a notebook per student: a CSV of points")] = None,
    seed: Annotated[str, Option(help="of a folder's draws, beside each student's name")] = "",
) -> None:
    """Grade your exercise notebooks: points per task, and what to look at next."""
    home.at_home()
    if chapter is not None:
        notebook.exercise(chapter)
    elif given := file or folder:
        raise ValueError(f"{given} is of which chapter? minitrain grade 02 --file or --folder {given}")
    from minitrain.course import exercises

    if folder:
        return csv.writer(sys.stdout).writerows(exercises.grade_folder(chapter, folder, seed))
    echo(exercises.grade(chapter, file).table(detail))


@app.command()
def atlas(
    words: Annotated[
        list[str] | None,
        Argument(help="which all occur", autocompletion=lambda incomplete: among(named())(incomplete)),
    ] = None,
) -> None:
    """Search the systems the course covers, best match first; each names the test that proves it."""
    wish = " ".join(words or [])
    found = search(wish)
    for row in found:
        echo(f"{row.chapter:3} {row.kind:5} {row.name}")
        echo(textwrap.indent(textwrap.fill(row.idea, 70), " " * 10))
        echo(f"{' ' * 10}{row.module}  shown {SHOWN[row.shown]} by {row.test}")
        if row.differs != "-":
            echo(textwrap.indent(textwrap.fill(f"differs: {row.differs}", 70), " " * 10))
    echo(f"{len(found)} system{'s' * (len(found) != 1)}" + (f"; {near(wish)}" if not found else ""))
