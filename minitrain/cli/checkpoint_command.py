"""`minitrain checkpoint`: what is in a folder of checkpoints, is it whole, and to and from Hugging Face."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option, echo

from minitrain.model.training.flags import Group

app = typer.Typer(cls=Group, help="What is in a folder of checkpoints, and is it whole?")
Folder = Annotated[Path, Argument(help="of checkpoints")]
Step = Annotated[int | None, Option(help="of the checkpoint; else the newest")]


@app.command()
def ls(folder: Folder) -> None:
    """A line per checkpoint: step, size, who saved it; and what is left of saves that never ended."""
    store = store_of(folder)
    for path in sorted(folder.glob("step-*")):
        name = path.name.removeprefix("step-")
        size = f"{sum(file.stat().st_size for file in path.iterdir()) / 1e6:,.1f} MB"
        if not (name.isdigit() and store.is_complete(int(name))):
            echo(f"{path.name:24} {size:>14}   not complete")
            continue
        manifest = store.manifest(int(name))
        by = ", ".join(f"{key}={value}" for key, value in _changed(manifest.get("strategy", {})).items())
        echo(f"{path.name:24} {size:>14}   {len(manifest['files'])} files, by {by or 'one rank'}")


@app.command()
def verify(folder: Folder, step: Step = None) -> None:
    """Read every byte of a checkpoint, or of all, and compare it with its hash."""
    from minitrain.checkpoint.format import Damaged

    store, bad = store_of(folder), 0
    for number in [step_of(store, step)] if step is not None else store.steps():
        try:
            store.verify(number)
            said = "whole"
        except Damaged as error:
            bad, said = 1, f"DAMAGED  {error}"
        echo(f"{store.path(number).name}  {said}")
    raise typer.Exit(bad)


@app.command()
def show(folder: Folder, step: Step = None) -> None:
    """Tensors of a checkpoint, with shape, dtype and in how many pieces they lie; position and versions."""
    store = store_of(folder)
    from minitrain.checkpoint.load import Saved

    manifest, files = store.open(step_of(store, step))
    for name, pieces in sorted(Saved(files).entries.items()):
        dtype, whole = str(pieces[0].dtype).removeprefix("torch."), str(list(pieces[0].whole))
        lies = f"in {len(pieces)} pieces" if len(pieces) > 1 else ""
        echo(f"{name:56} {dtype:9} {whole:16} {lies}".rstrip())
    for key in ("strategy", "position", "versions"):
        if key in manifest:
            echo(f"{key}: {json.dumps(_changed(manifest[key]) if key == 'strategy' else manifest[key])}")


@app.command()
def convert(
    source: Annotated[Path, Argument(help="a folder of checkpoints, or one of Hugging Face")],
    target: Annotated[Path, Argument(help="a new folder of the other kind")],
    step: Step = None,
) -> None:
    """Write a checkpoint's weights as Hugging Face does (Llama, GPT-2, Mixtral), or take them from there:
    one tensor of a layer at a time, in the dtype in which it was saved, from whatever layout."""
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty: give a new folder")
    from minitrain.systems.checkpoint.hugging_face import export_weights, import_weights

    if (source / "config.json").exists():
        size = import_weights(source, target)
        echo(f"{size:,} bytes in {target}, as checkpoint of step 0")
    else:
        manifest, files = (store := store_of(source)).open(step_of(store, step))
        size = export_weights(files, config_in(manifest), target)
        echo(f"{size:,} bytes in {target / 'model.safetensors'}")


def config_in(manifest: dict):
    from minitrain.model.config import ExpertsConfig, GPTConfig

    was = manifest["identity"]
    if "d_model" not in was:
        raise ValueError(f"the checkpoint is of {was.get('model')}, a module of somebody's own, not of a GPT")
    of = lambda cls: {field.name: was[field.name] for field in fields(cls) if field.name in was}
    experts = of(ExpertsConfig)
    return GPTConfig(**of(GPTConfig), experts=ExpertsConfig(**experts) if experts else None)


def store_of(folder: Path):
    if not any(folder.glob("step-*")):
        raise ValueError(f"{folder} has no checkpoints: give the folder of --checkpoint")
    from minitrain.checkpoint.store import Store

    return Store(folder)


def step_of(store, step: int | None) -> int:
    steps = store.steps()
    if not steps or step not in (None, *steps):
        there = f"there are {', '.join(map(str, steps))}" if steps else "none is complete"
        raise ValueError(f"no checkpoint of step {step or 0} in {store.folder}; {there}")
    return steps[-1] if step is None else step


def _changed(strategy: dict) -> dict:
    """The fields that are not as they are by themselves."""
    from minitrain.plan.strategy import Strategy

    usual = asdict(Strategy())
    return {name: value for name, value in strategy.items() if usual.get(name) != value}
