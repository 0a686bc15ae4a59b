"""`python -m minitrain.train`: train a GPT on bytes of text, on any number of ranks, and show what it learned.

    python -m minitrain.train --ranks 2 --out run            the same command again goes on where it stopped
    torchrun --nproc-per-node 2 -m minitrain.train --ranks 2 --out run

Whatever is wrong with the input is said in one line before a rank starts. Rank 0 prints a bar per report: a line that
looks the same in a terminal, a notebook and a file.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import psutil
import torch
import typer
from tqdm import tqdm

from minitrain import collectives, launch
from minitrain.accounting.parameters import parameters
from minitrain.config import GPTConfig, presets
from minitrain.data import VOCAB, Text, rows_of
from minitrain.mesh import Mesh
from minitrain.model import GPT
from minitrain.parallelize import parallelize
from minitrain.train import measure_peak_flops
from minitrain.trainer import Recipe, Trainer

WEEK_S = 7 * 86_400
BAR = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """An error is one line on stderr and exit code 1, never a traceback."""
    try:
        app()
    except (ValueError, OSError, launch.RankError) as error:
        raise SystemExit(f"minitrain.train: {error}") from None


def option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text)


@app.command()
def command(
    preset: Annotated[str, option(f"Model: {', '.join(presets)}.")] = "tiny",
    layers: Annotated[Optional[int], option("Layers, instead of the preset's.")] = None,
    width: Annotated[Optional[int], option("Model width D, instead of the preset's.")] = None,
    heads: Annotated[Optional[int], option("Attention heads, instead of the preset's.")] = None,
    text: Annotated[Optional[Path], option("File or folder to train on; else Python's own documentation.")] = None,
    steps: Annotated[int, option("Optimizer steps.")] = Recipe.steps,
    ranks: Annotated[int, option("Data-parallel ranks: processes of this machine, or those of torchrun.")] = 1,
    batch: Annotated[int, option("Rows of the global batch.")] = Recipe.batch_size,
    microbatches: Annotated[int, option("Parts in which each rank runs its rows.")] = Recipe.num_microbatches,
    length: Annotated[int, option("Tokens (bytes) of a row.")] = Recipe.length,
    lr: Annotated[float, option("Peak learning rate; the last one is a tenth.")] = Recipe.lr,
    seed: Annotated[int, option("Seed of weights, order of the text and dropout.")] = Recipe.seed,
    bfloat16: Annotated[bool, option("Weights and activations in bfloat16, float32 masters.", "--bfloat16")] = False,
    out: Annotated[Optional[Path], option("Folder for log and checkpoint; the same command resumes.")] = None,
) -> None:
    """Train a GPT on bytes of text, on any number of ranks, and show what it learned."""
    config = configure(preset, length, num_layers=layers, d_model=width, num_heads=heads)
    recipe = Recipe(steps, batch, length, microbatches, lr, min(20, steps), lr / 10, seed=seed)
    open_text(text, length)
    rows_of(0, ranks, batch)
    if microbatches > batch // ranks:
        raise ValueError(f"microbatches={microbatches}, but a rank has {batch // ranks} of {batch} rows: use fewer")
    needed, free = 16 * parameters(config) * ranks, psutil.virtual_memory().available
    if needed > free and not torch.cuda.is_available():
        raise ValueError(f"{parameters(config):,} parameters need {needed / 1e9:.0f} GB on {ranks} ranks (16 bytes "
                         f"each), {free / 1e9:.0f} GB are free: use a smaller model, or count it in a minitrain.dryrun")
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    try:
        launch.run(train_on_rank, config, recipe, text, dtype, out, ranks=ranks, timeout_s=WEEK_S)
    except KeyboardInterrupt:
        how = "the same command goes on from the last report" if out else "nothing was saved, for there is no --out"
        typer.echo(f"interrupted; {how}")
        raise typer.Exit(130) from None


def configure(preset: str, length: int, **changes: int | None) -> GPTConfig:
    """The preset for bytes of text, with the sizes that were given."""
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(presets)}")
    changes = {name: value for name, value in changes.items() if value is not None}
    max_positions = max(length, presets[preset].max_positions)
    return replace(presets[preset], vocab_size=VOCAB, max_positions=max_positions, **changes)


def open_text(path: Path | None, length: int) -> tuple[Text, Text | None]:
    """The part to train on and, if it is long enough for one window, the part held out."""
    train, held_out = (Text.open(path) if path else Text.found()).split()
    train.num_windows(length)
    return train, held_out if len(held_out) > length else None


def train_on_rank(config: GPTConfig, recipe: Recipe, path: Path | None, dtype: torch.dtype, out: Path | None) -> None:
    text, held_out = open_text(path, recipe.length)
    device = launch.device()
    model = GPT(config, seed=recipe.seed, dtype=dtype, device=device)
    parallel = parallelize(model, Mesh(dp=collectives.world().size()))
    trainer = Trainer(parallel, text, recipe, held_out=held_out, out=out, peak_flops=measure_peak_flops(dtype, device))
    say = print if trainer.rank == 0 else lambda *_: None
    say(f"{parameters(config):,} parameters, {trainer.ranks} ranks on {device.type}, best matrix product of one "
        f"{trainer.peak_flops / 1e9:.0f} GFLOP/s; {len(text):,} tokens of {text.name}")
    if trainer.resume():
        say(f"resumed at step {trainer.step}")
    first, started = trainer.step, time.perf_counter()
    for record in trainer.run():
        say(tqdm.format_meter(record["step"], recipe.steps, time.perf_counter() - started, initial=first,
                              bar_format=BAR, postfix=describe(record)))
    where = f"; log and checkpoint in {out}" if out else ""
    say(f"{trainer.step} steps of {recipe.batch_size * recipe.length:,} tokens{where}")
    if trainer.rank == 0:
        say(f"It writes:\n{trainer.sample()}")


def describe(record: dict[str, Any]) -> str:
    held_out = "" if record["held_out"] is None else f" (held out {record['held_out']:.3f})"
    speed = f"{record['tokens_per_s'] / 1000:.1f}k tokens/s, MFU {record['mfu']:.0%}"
    return f"loss {record['loss']:.3f}{held_out}, {speed}"
