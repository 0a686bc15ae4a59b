"""`minitrain sample`: text from a checkpoint of `minitrain train`, in any layout.

The model and its precision are the checkpoint's; flags are the fields of Strategy. Weights alone are read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from minitrain.cli.checkpoint_command import Folder, Step, config_in, step_of, store_of
from minitrain.cli.train_command import WEEK_S
from minitrain.model.training.flags import chosen, flags, options
from minitrain.plan.strategy import CHOICES, Strategy
from minitrain.ranks.checks import require_ints, require_nonnegative
from minitrain.ranks.process import in_a_job


@options(flags(Strategy, unset=True, panel="Layout over ranks", choices=CHOICES))
def sample(
    folder: Folder,
    prompt: Annotated[str, Option(help="what the text begins with")] = "The ",
    step: Step = None,
    tokens: Annotated[int, Option(help="how many are written")] = 200,
    temperature: Annotated[float, Option(help="0: always the likeliest token")] = 0.7,
    top_k: Annotated[int, Option(help="draw from so many likeliest tokens; 0: from all")] = 0,
    seed: Annotated[int, Option(help="of what is drawn")] = 0,
    tokenizer: Annotated[
        Path | None, Option(help="tokenizer.json of the model; else a token is a byte")
    ] = None,
    **values,
) -> None:
    """Write text with the newest checkpoint of a folder, on as many ranks as the layout has.

    \b
    minitrain sample saved --prompt "It is"
    minitrain sample saved --prompt "It is" --step 800 --tp 2 --temperature 0"""
    require_ints(tokens=tokens, top_k=top_k, seed=seed)
    require_nonnegative(temperature=temperature)
    manifest = store_of(folder).manifest(step := step_of(store_of(folder), step))
    config, was = config_in(manifest), manifest["identity"]
    numbers = {name: was[name] for name in ("precision", "products") if name in was}
    strategy = Strategy(**numbers | chosen(Strategy, values))
    strategy.check(config, int(os.environ["WORLD_SIZE"]) if in_a_job() else strategy.ranks)
    from minitrain.model.data.tokenizer import Tokenizer
    from minitrain.ranks import launch

    text = Tokenizer(tokenizer)
    if text.vocab_size > config.vocab_size or not tokenizer and text.vocab_size < config.vocab_size:
        what = f"{folder} has {config.vocab_size} tokens, {tokenizer or 'bytes'} {text.vocab_size}"
        raise ValueError(f"{what}: give the --tokenizer that the model was trained with")
    (ids,), most = text.encode([prompt]), config.max_positions
    if not 0 < len(ids) <= most:
        raise ValueError(f"a prompt of {len(ids)} tokens; this model reads 1 to {most} (max_positions)")
    given = folder, step, config, strategy, ids, (tokens, temperature, seed, top_k)
    written, *_ = launch.run(sample_on_rank, *given, ranks=strategy.ranks, timeout_s=WEEK_S)
    if os.environ.get("RANK", "0") == "0":
        echo(text.decode(written))


def sample_on_rank(folder: Path, step: int, config, strategy: Strategy, ids: list[int], how: tuple) -> list:
    import torch

    from minitrain.checkpoint.load import Saved
    from minitrain.compose.parallelize import parallelize

    run = parallelize(config, strategy)
    run.load_pieces(Saved(store_of(folder).open(step)[1], weights=True))
    return run.sample(torch.tensor([ids], device=run.device), *how)[0].tolist()
