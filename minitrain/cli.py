"""The `minitrain` command: check this machine, train, run chapters, grade exercises, replay a big machine.

Exit codes: 2 for bad input, 1 for a rank or a chapter that failed, both with one line on stderr; 130 for an
interrupt. Names are looked up before torch is imported, so a wrong one is refused at once.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import psutil
import typer
from typer import Argument, Option, echo

from minitrain import checkpoint_command, train_command
from minitrain.course import lab as copies
from minitrain.course import notebook
from minitrain.model.config import presets
from minitrain.simulate.machines import MACHINES
from minitrain.simulate.machines import machine as described

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Learn how large models are trained on many machines, by running it.",
)
ROOT = notebook.CHAPTERS.parent


def among(*known: dict) -> Callable[[str], list[str]]:
    """What the Tab key offers: the keys that begin with what is typed."""
    return lambda incomplete: [name for names in known for name in names if name.startswith(incomplete)]


def main() -> None:
    """An error of ours is one line on stderr, never a traceback; under torchrun the first rank says it."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("RANK", "0") == "0":
            echo(f"minitrain: {error}", err=True)
        sys.exit(1 if isinstance(error, RuntimeError) else 2)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("--version", help="versions, and end")] = False) -> None:
    if version:
        found = [f"{name} {installed(name)}" for name in ("minitrain", "torch")]
        echo(f"{', '.join(found)}, Python {platform.python_version()}")
        raise typer.Exit()


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "is not installed"


app.command()(train_command.train)
app.add_typer(checkpoint_command.app, name="checkpoint")


@app.command()
def doctor() -> None:
    """Check Python, torch, four ranks over loopback and the GPUs; exit 1 if something needed is missing."""
    import torch

    problems = 0

    def line(good: bool, what: str, found: str, cure: str = "") -> None:
        nonlocal problems
        problems += not good
        echo(f"{'ok  ' if good else 'FAIL'}  {what:14} {found}" + ("" if good else f"   -> {cure}"))

    line(sys.version_info >= (3, 11), "python", platform.python_version(), "install Python 3.11 or newer")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    line(version >= (2, 11), "torch", torch.__version__, "make install")
    line(True, "cores", str(os.cpu_count()))
    free_gb = psutil.virtual_memory().available / 1e9
    line(free_gb > 2, "free memory", f"{free_gb:.1f} GB", "the chapters need 2 GB; close something")
    line(torch.distributed.is_available(), "distributed", "gloo", "this torch build has no torch.distributed")
    try:
        first, later = _time_to_launch(), _time_to_launch()
        line(True, "4 ranks", f"first launch {first:.1f} s, next {later:.2f} s")
    except Exception as error:  # whatever stops four ranks from meeting is what the reader must see
        line(False, "4 ranks", str(error).splitlines()[0], "see 'When ranks cannot meet' in the README")
    gpus = torch.cuda.device_count()
    found = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none (every chapter runs without)"
    line(True, "GPUs", found)
    if problems:
        raise typer.Exit(1)


def _sum_of_ranks() -> float:
    import torch

    from minitrain.collectives import all_reduce, world

    return all_reduce(torch.ones(1), world()).item()


def _time_to_launch() -> float:
    from minitrain import launch

    started = time.perf_counter()
    sums = launch.run(_sum_of_ranks, ranks=4)
    if sums != [4.0] * 4:
        raise RuntimeError(f"four ranks added 1 and got {sums}")
    return time.perf_counter() - started


@app.command("list")
def list_chapters() -> None:
    """The chapters there are, with the time and the ranks each needs."""
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

    paths = [notebook.chapter(number) for number in numbers or notebook.chapters()]
    started = time.perf_counter()
    for path in paths:
        with tqdm(desc=path.stem, unit="cell", leave=False, disable=not sys.stderr.isatty()) as bar:

            def on_cell(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            elapsed_s = notebook.execute(path, path if save else out / path.name, on_cell)
        echo(f"ok  {path.stem:24} {elapsed_s:5.1f} s")
    folder = os.path.relpath(out) if out.is_relative_to(Path.cwd()) else out
    where, elapsed_s = "in place" if save else f"in {folder}/", time.perf_counter() - started
    echo(f"{len(paths)} of {len(paths)} chapters ran in {elapsed_s:.0f} s; executed notebooks are {where}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    fresh: Annotated[
        list[str] | None, Option(help="a chapter to copy anew, such as 03; yours is kept")
    ] = None,
) -> None:
    """Open JupyterLab over copies of chapters and exercises in work/; what else is given, it gets."""
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
        str | None,
        Argument(help="such as 02; else a table of all", autocompletion=among(notebook.exercises())),
    ] = None,
    file: Annotated[Path | None, Option(help="notebook; else that in work/exercises, or exercises")] = None,
    detail: Annotated[bool, Option(help="show the traceback of each failed task")] = False,
) -> None:
    """Grade your exercise notebooks: points per task, and what to look at next."""
    if chapter is not None:
        notebook.exercise(chapter)
    elif file:
        raise ValueError(f"{file} is of which chapter? minitrain grade 02 --file {file}")
    from minitrain.course import exercises

    echo(exercises.grade(chapter, file).table(detail))


@app.command()
def replay(
    model: Annotated[str, Argument(help="such as llama3-8b or gpt2", autocompletion=among(presets))],
    machine: Annotated[str, Option(help="such as h100 or a100", autocompletion=among(MACHINES))] = "h100",
    ranks: Annotated[int, Option(help="data-parallel ranks")] = 64,
    batch: Annotated[int, Option(help="sequences on each rank")] = 1,
    length: Annotated[int, Option(help="tokens in a sequence")] = 1024,
    bucket_mb: Annotated[float, Option(help="size of the gradient buckets")] = 25,
    trace: Annotated[Path | None, Option(help="write a trace for ui.perfetto.dev here")] = None,
    picture: Annotated[Path | None, Option(help="draw the timeline here (.png, .svg, .pdf)")] = None,
) -> None:
    """What a data-parallel step of a published model takes on a described machine: dry run, then replay."""
    if model not in presets:
        raise ValueError(f"no preset is called {model!r}; choose from {', '.join(presets)}")
    target = described(machine)
    from minitrain.launch import dryrun
    from minitrain.plan.accounting.compute import flops_per_token
    from minitrain.plot import charts
    from minitrain.simulate.replay import replay as play

    name, memory_bytes = target.device.name, target.device.memory_bytes
    ledger = dryrun.run(_one_step, model, batch, length, int(bucket_mb * 1e6), rank=0, ranks=ranks)
    timeline = play({0: ledger.events}, target, dtype="float16")
    echo(f"{model} on {ranks} ranks of {name}, {batch} x {length} tokens each, float16 products\n")
    echo(timeline.table())
    fits = "" if ledger.peak_bytes <= memory_bytes else ": DOES NOT FIT; shard it or make the batch smaller"
    echo(f"\npeak memory {ledger.peak_bytes / 1e9:.1f} GB of {memory_bytes / 1e9:.0f} GB{fits}")
    model_flops = batch * length * flops_per_token(presets[model], length)
    echo(f"MFU {timeline.mfu(model_flops, 'float16'):.1%}, a causal attention counted as a triangle")
    if trace:
        echo(f"trace in {timeline.to_chrome_trace(trace)}")
    if picture:
        charts.timeline(timeline, title=f"{model}, {ranks} x {name}").savefig(picture)
        echo(f"picture in {picture}")


def _one_step(name: str, batch: int, length: int, bucket_bytes: int):
    """One data-parallel step of a preset under the ledger, in bfloat16 with float32 master weights."""
    from functools import partial

    import torch

    from minitrain.collectives import world
    from minitrain.data.batches import Rows, random_tokens
    from minitrain.ledger import Ledger
    from minitrain.model.gpt import GPT, presets
    from minitrain.parallelize import parallelize
    from minitrain.strategy import Strategy
    from minitrain.training.hyperparameters import Hyperparameters

    class Model(GPT):
        def forward(self, tokens):
            with ledger.phase("forward"):
                return super().forward(tokens)

    config, shape = presets[name], dict(batch_size=batch * world().size(), length=length)
    strategy = Strategy(dp=world().size(), bucket_bytes=bucket_bytes)
    with Ledger() as ledger:
        run = parallelize(Model(config, dtype=torch.bfloat16), strategy, Hyperparameters().make_optimizer)
        rows = run.batch(Rows(partial(random_tokens, vocab=config.vocab_size, **shape), **shape), step=0)
        with ledger.phase("backward"):  # but for the forward inside
            run.forward_backward(rows)
            run.sync.finish()
        with ledger.phase("optimizer"):
            run.sync.step()
    return ledger


@app.command()
def atlas(words: Annotated[list[str] | None, Argument(help="only rows with all these words")] = None) -> None:
    """Search the systems the course covers, best match first; each names the test that proves it."""
    from minitrain.course.atlas import SHOWN, near, search

    wish = " ".join(words or [])
    found = search(wish)
    for row in found:
        echo(f"{row.chapter}  {row.kind:5} {row.name}")
        echo(textwrap.fill(row.idea, 80, initial_indent=" " * 10, subsequent_indent=" " * 10))
        echo(f"{' ' * 10}{row.module}  shown {SHOWN[row.shown]} by {row.test}")
        if row.differs != "-":
            echo(
                textwrap.fill(
                    row.differs, 80, initial_indent=" " * 10 + "differs: ", subsequent_indent=" " * 10
                )
            )
    echo(f"{len(found)} system{'s' * (len(found) != 1)}" + (f"; {near(wish)}" if not found else ""))


if __name__ == "__main__":
    main()
