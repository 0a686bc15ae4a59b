"""`minitrain replay`: a data-parallel step of a published model, dry, and replayed on a described machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from minitrain.checks import whole
from minitrain.model.config import presets
from minitrain.simulate.machines import MACHINES
from minitrain.simulate.machines import machine as described

PICTURES = (".png", ".svg", ".pdf")


def among(*known: dict) -> Callable[[str], list[str]]:
    """What the Tab key offers: the keys that begin with what is typed."""
    return lambda incomplete: [name for names in known for name in names if name.startswith(incomplete)]


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
    whole(1, 1 << 30, ranks=ranks, batch=batch, length=length)
    if not 0 < bucket_mb <= 1e9:
        raise ValueError(f"bucket_mb={bucket_mb:g}: use more than 0, at most 1e9; 25 is usual")
    for name, path in dict(trace=trace, picture=picture).items():
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{name}={path}: give a file in a folder that is there")
    if picture and picture.suffix not in PICTURES:
        raise ValueError(f"picture={picture}: use a name that ends in {', '.join(PICTURES)}")
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
