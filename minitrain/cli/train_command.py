"""`minitrain train`: train a GPT on text or files of tokens in any layout, here or under torchrun.

Flags are the fields of Strategy, Hyperparameters and GPTConfig. As many ranks are started as the strategy
has; bad input, a checkpoint of another run included, is refused before that. torch is imported when training
begins, since other commands share this command line.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from typer import Option

from minitrain.cli.checkpoint_command import config_in, step_of, store_of
from minitrain.cli.replay_command import known
from minitrain.model.config import ExpertsConfig, GPTConfig, plain_values, presets
from minitrain.model.training.flags import among, chosen, flags, options
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.accounting import parameters
from minitrain.plan.strategy import CHOICES, Strategy
from minitrain.ranks.checks import require_ints, require_positive_ints
from minitrain.ranks.process import in_a_job
from minitrain.systems.plan.emit.training_job import read

WEEK_S = 7 * 86_400
OF_TRAINING = ("dropout", "capacity_factor", "balance_alpha", "z_alpha", "bias_speed")  # not of its weights
BAR = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
PRESET = "by default the preset's"
MODEL = dict(num_layers="--layers", d_model="--width", num_heads="--heads", num_kv_heads="--kv-heads")


@options(
    flags(Hyperparameters, panel="Steps and learning rate", short=dict(batch_size="--batch")),
    flags(Strategy, panel="Layout over ranks, and precision", choices=CHOICES),
    flags(GPTConfig, panel=f"Model, {PRESET}", unset=True, leave_out=("experts",), short=MODEL),
    flags(ExpertsConfig, panel=f"Experts of a model, {PRESET}", unset=True),
)
def train(
    preset: Annotated[
        str, Option(help=f"{', '.join(presets)}; every field is a flag too", autocompletion=among(presets))
    ] = "tiny",
    text: Annotated[Path | None, Option(help="file or folder; else Python's own documentation")] = None,
    data: Annotated[Path | None, Option(help="folder of tokens, such as minitrain tokenize makes")] = None,
    packed: Annotated[bool, Option(help="attention and loss of --data end where documents do")] = True,
    end: Annotated[str, Option(help="token or id that ends documents of a .npy in --data")] = "",
    out: Annotated[Path | None, Option(help="folder for the log")] = None,
    report_every: Annotated[int, Option(help="steps from one report to the next")] = 25,
    checkpoint: Annotated[Path | None, Option(help="folder for checkpoints")] = None,
    every: Annotated[int, Option(help="steps from one checkpoint to the next")] = 100,
    keep: Annotated[int, Option(help="how many checkpoints are kept")] = 2,
    async_save: Annotated[bool, Option("--async", help="save beside the next steps")] = False,
    resume: Annotated[bool, Option("--resume", help="go on from the newest checkpoint")] = False,
    start: Annotated[Path | None, Option(help="folder of checkpoints: its newest weights, and model")] = None,
    plan: Annotated[Path | None, Option(help="model, layout and batch from a file of minitrain plan")] = None,
    chaos: Annotated[str, Option(help="faults on purpose, as 'kill 2 @5 backward'")] = "",
    sample: Annotated[int, Option(help="tokens to write at the end")] = 200,
    restarts: Annotated[int, Option(help="how often to go on from --checkpoint when a rank fails")] = 0,
    survive: Annotated[bool, Option("--survive", help="ranks that are left go on when one dies")] = False,
    replace_s: Annotated[float | None, Option("--replace", help="seconds until another comes")] = None,
    **values,
) -> None:
    """Train a GPT on text, or on files of tokens, in any layout of ranks, and show what it learned.

    \b
    minitrain train --dp 2 --tp 2 --zero 1 --steps 50
    minitrain train --pp 2 --microbatches 4 --schedule zb_h1 --checkpoint saved
    minitrain train --dp 2 --zero 3 --checkpoint saved --resume  # another layout
    minitrain train --dp 2 --data FOLDER        # made by minitrain tokenize
    minitrain train --start imported --lr 1e-4  # from weights alone
    minitrain train --dp 4 --survive --replace 1 --chaos "kill 2 @5 backward"
    torchrun --nproc-per-node 4 -m minitrain train --dp 4 --zero 3
    """
    require_positive_ints(report_every=report_every, every=every, keep=keep)
    require_ints(sample=sample, restarts=restarts)
    if restarts and (in_a_job() or not checkpoint):
        raise ValueError(f"restarts={restarts} need --checkpoint FOLDER; under torchrun give --max-restarts")
    if start and (plan or preset != "tiny"):
        other = "plan" if plan else "preset"
        raise ValueError(f"--start beside --{other}: each says which model; leave one out")
    if plan:
        config, strategy, hyper = planned(plan, preset, values)
    else:
        strategy = Strategy(**chosen(Strategy, values))
        hyper = Hyperparameters(**chosen(Hyperparameters, values))
        config = started(start, values) if start else configure(preset, values)
    how = "asynchronous" if async_save else "sync_sharded"
    trainer = dict(report_every=report_every, save_every=every, save_how=how, out=out)
    given = dict(text=text, data=data, packed=packed, end=end, vocab_size=values["vocab_size"])
    settings = Settings(config, strategy, hyper, given, out, sample, checkpoint, keep, resume, start, trainer)
    settings = replace(check(settings), chaos=chaos)
    from minitrain.ranks import launch
    from minitrain.systems.faults.chaos import Plan

    Plan.parse(chaos, strategy.ranks)
    settings = replace(settings, resume=resume or restarts > 0)
    try:
        fn, more = train_on_rank, dict(ranks=strategy.ranks, timeout_s=WEEK_S)
        if survive or replace_s:
            fn, more = train_surviving, more | dict(survive=survive, replace_s=replace_s)
        launch.run(fn, settings, restarts=restarts, **more)
    except KeyboardInterrupt:
        cure = "the same command with --resume goes on from the last checkpoint"
        typer.echo(f"interrupted; {cure if checkpoint else 'nothing was saved'}")
        raise typer.Exit(130) from None


@dataclass(frozen=True)
class Settings:  # what every rank is told
    config: GPTConfig
    strategy: Strategy
    hyper: Hyperparameters
    data: dict[str, Any]  # of open_data
    out: Path | None
    sample: int
    folder: Path | None  # of checkpoints
    keep: int
    resume: bool
    start: Path | None  # whose weights are the first
    trainer: dict[str, Any]
    chaos: str = ""  # faults on purpose

    def store(self, disk=None):
        from minitrain.checkpoint.store import Store

        return Store(self.folder, self.keep, disk) if self.folder else None


# ---- before a rank starts --------------------------------------------------------------------------------


def configure(preset: str, values: dict[str, Any]) -> GPTConfig:
    """The preset, with what was given; as many positions as the length needs."""
    base = known(presets, preset=preset)
    if values["max_positions"] is None:
        values = values | {"max_positions": max(values["length"], base.max_positions)}
    return with_flags(base, f"preset {preset!r}", values)


def with_flags(base: GPTConfig, name: str, values: dict[str, Any]) -> GPTConfig:
    changes, experts = chosen(GPTConfig, values), chosen(ExpertsConfig, values)
    if experts and base.experts is None and "num_experts" not in experts:
        said = ", ".join(f"{name}={value}" for name, value in experts.items())
        raise ValueError(f"{said}, but {name} has no experts; add num_experts, or use another")
    if experts:
        changes["experts"] = replace(base.experts, **experts) if base.experts else ExpertsConfig(**experts)
    return replace(base, **changes)


def started(folder: Path, values: dict[str, Any]) -> GPTConfig:
    """The model of a folder's newest checkpoint; flags may say the same, or what training alone asks."""
    store = store_of(folder)
    base = config_in(store.manifest(step_of(store, None)))
    config = with_flags(base, str(folder), values)
    was = plain_values(base)
    for name, now in plain_values(config).items():
        if now != was.get(name) and name not in OF_TRAINING:
            there = f"{folder} has {name}={was.get(name)}"
            raise ValueError(f"{name}={now} beside --start: {there}; leave it out")
    return config


def planned(path: Path, preset: str, values: dict[str, Any]) -> tuple[GPTConfig, Strategy, Hyperparameters]:
    """What a plan says; flags may say the rest, and nothing that the plan says."""
    if not path.is_file():
        raise ValueError(f"plan={path}: no such file; minitrain plan --emit minitrain --out {path} makes one")
    job, hyper = read(path.read_text(errors="replace")), Hyperparameters(**chosen(Hyperparameters, values))
    changed = lambda one: [f.name for f in fields(one) if getattr(one, f.name) != f.default]
    said = [name for name in changed(hyper) if name in ("batch_size", "length")]
    said += changed(Strategy(**chosen(Strategy, values))) + ["preset"] * (preset != "tiny")
    if said := [*said, *chosen(GPTConfig, values), *chosen(ExpertsConfig, values)]:
        raise ValueError(f"{said[0]} beside --plan: {path} says it; leave it out, or change it there")
    hyper = replace(hyper, batch_size=job.rows, length=job.length)
    return job.model, job.strategy, hyper


def check(settings: Settings) -> Settings:
    """Settings with the vocabulary of the data."""
    config, strategy, hyper = settings.config, settings.strategy, settings.hyper
    strategy.check(config, int(os.environ["WORLD_SIZE"]) if in_a_job() else strategy.ranks)
    strategy.check_batch(config, hyper.batch_size, hyper.length)
    if hyper.frozen:
        from minitrain.compose.parallelize import parameter_names

        if all(map(hyper.freezes, parameter_names(config, hyper.frozen))):
            raise ValueError(f"frozen={', '.join(hyper.frozen)} leaves nothing to train; freeze fewer")
    data, _ = open_data(hyper.length, **settings.data)
    if not settings.start:
        config = replace(config, vocab_size=data.vocab_size)
    elif (size := config.vocab_size) < data.vocab_size:
        what = f"{settings.start} has {size} tokens, {data.name} {data.vocab_size}"
        raise ValueError(f"{what}: give data of the tokenizer that it was trained with")
    settings = replace(settings, config=config)
    check_memory(config, strategy)
    if settings.out:
        settings.out.mkdir(parents=True, exist_ok=True)
    if settings.folder:
        check_checkpoints(settings, data)
    elif settings.resume:
        raise ValueError("--resume without a folder: add --checkpoint FOLDER")
    return settings


def check_checkpoints(settings: Settings, data) -> None:
    """The folder is new, or the run that made its checkpoints goes on."""
    from minitrain.checkpoint.format import Damaged
    from minitrain.compose.trainer import check_identity, identity

    strategy = settings.strategy
    settings.folder.mkdir(parents=True, exist_ok=True)
    store = settings.store()
    steps = store.steps()
    if steps and not settings.resume:
        there = f"{settings.folder} has checkpoints up to step {steps[-1]}"
        raise ValueError(f"{there}: add --resume to go on, or use another folder")
    wanted = identity(settings.config, settings.hyper, strategy.precision, strategy)
    for step in reversed(steps):
        with suppress(Damaged):  # the ranks say so, and go on to the one before
            manifest = store.manifest(step)
            return check_identity(store.path(step), manifest, wanted, data)


def open_data(length: int, text: Path | None = None, data: Path | None = None, **more) -> tuple:
    """The part to train on and, if it is long enough for one window, the part held out."""
    from minitrain.model.data.batches import Text
    from minitrain.systems.data.corpus import open_folder

    if text and data:
        raise ValueError(f"text={text} and data={data}: train on one of them")
    for name, value in more.items() if not data else ():
        if value not in (None, True, ""):
            raise ValueError(f"{name}={value} is of files of tokens: add --data FOLDER")
    text = None if data else Text.open(text) if text else Text.builtin()
    train, held_out = text.split() if text else open_folder(data, **more)
    train.num_windows(length)
    try:
        held_out.num_windows(length)
    except ValueError:
        held_out = None
    return train, held_out


def check_memory(config: GPTConfig, strategy: Strategy) -> None:
    """Weights, gradients and optimizer states fit into this machine even if no two ranks hold the same."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.ranks))
    needed = parameters(config) * sum(strategy.policy.state_bytes) * ranks / strategy.ranks
    free = psutil.virtual_memory().available
    if needed > free and not torch.cuda.is_available():
        sizes = f"need {needed / 1e9:.0f} GB on {ranks} rank{'s' * (ranks > 1)}, {free / 1e9:.0f} GB are free"
        raise ValueError(f"{parameters(config):,} parameters {sizes}: use a smaller model, or a dry run")


def train_on_rank(settings: Settings) -> None:
    from tqdm import tqdm

    from minitrain.checkpoint.load import Saved
    from minitrain.compose.parallelize import parallelize
    from minitrain.compose.passes import emulation
    from minitrain.compose.trainer import Trainer
    from minitrain.model.training.step import measure_peak_flops
    from minitrain.ranks import collectives
    from minitrain.systems.faults.chaos import Chaos, Plan

    strategy, hyper = settings.strategy, settings.hyper
    data, held_out = open_data(hyper.length, **settings.data)
    more = dict(seed=hyper.seed, frozen=hyper.frozen)
    run = parallelize(settings.config, strategy, hyper.make_optimizer, **more)
    peak_flops = measure_peak_flops(run.dtype, run.device)
    faults = settings.chaos if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else ""
    chaos = Chaos(Plan.parse(faults), run, collectives.world().rank())
    more = settings.trainer | dict(held_out=held_out, peak_flops=peak_flops, store=settings.store(chaos))
    trainer = Trainer(run, data, hyper, **more)
    say = print if trainer.rank == 0 else lambda *_: None
    there = f"{trainer.ranks} ranks on {run.device.type}, best matrix product of one {peak_flops / 1e9:.0f}"
    tokens = f"{len(data):,} tokens of {data.name}"
    say(f"{parameters(settings.config):,} parameters, {strategy}, {there} GFLOP/s; {tokens}")
    if line := emulation(run.model.layers, strategy):
        say(line)
    if settings.resume:
        say(trainer.resume() or f"no checkpoint in {settings.folder}: begins at step 0")
    if settings.start and not trainer.step:
        store = store_of(settings.start)
        run.load_pieces(Saved(store.open(step := step_of(store, None))[1], weights=True))
        say(f"weights of {store.path(step)}")
    first, started, told = trainer.step, time.perf_counter(), 0
    with chaos:
        for record in trainer.run():
            elapsed_s, more = time.perf_counter() - started, dict(initial=first, bar_format=BAR)
            say(tqdm.format_meter(record["step"], hyper.steps, elapsed_s, postfix=describe(record), **more))
            for told, line in enumerate(trainer.not_saved[told:], told + 1):
                say(line)
    for line in trainer.saver.notes if trainer.saver else ():
        say(line)
    named = dict(log=settings.out, checkpoints=settings.folder)
    where = "".join(f"; {what} in {folder}" for what, folder in named.items() if folder)
    say(f"{trainer.step} steps of {hyper.batch_size * hyper.length:,} tokens{where}")
    if data.tokenizer:
        say(f"It writes:\n{trainer.sample(n=settings.sample)}")
    if trainer.not_saved and trainer.step not in trainer.store.steps():
        raise RuntimeError(trainer.not_saved[-1])


def train_surviving(settings: Settings) -> None:
    """By those who are there; checkpoints are for a state that no rank has any more."""
    from minitrain.compose.parallelize import parallelize
    from minitrain.compose.trainer import Trainer
    from minitrain.ranks import launch
    from minitrain.systems.faults.chaos import Chaos, Plan
    from minitrain.systems.faults.survive import Survivor

    strategy, hyper, team, store = settings.strategy, settings.hyper, launch.team(), settings.store()
    data, held_out = open_data(hyper.length, **settings.data)
    dense = strategy.ranks // strategy.dp  # ranks that have the same rows
    trainer, faults = None, ExitStack()

    def build(ranks: int):
        nonlocal trainer
        layout = replace(strategy, dp=ranks // dense)
        if ranks % dense:
            layout = Strategy(dp=ranks, zero=strategy.zero, precision=strategy.precision)
        run = parallelize(settings.config, layout, hyper.make_optimizer, seed=hyper.seed, frozen=hyper.frozen)
        trainer = Trainer(run, data, hyper, store=store, held_out=held_out, **settings.trainer)
        faults.close()  # those of the run before
        faults.enter_context(Chaos(Plan.parse(settings.chaos), run, team.member))
        return run

    def batch_of(run, step: int):
        for group, share in zip(run.sync.param_groups, trainer.shares):
            group["lr"] = hyper.lr_at(step) * share
        return run.batch(trainer.rows, step)

    def before(step: int) -> None:
        trainer.step, say = step, print if trainer.rank == 0 else lambda *_: None
        if step and trainer.due(trainer.report_every):
            say(f"step {step}/{hyper.steps}, {trainer.ranks} ranks, loss {survivor.losses[step - 1]:.3f}")
        if store and step and trainer.due(trainer.save_every) and step not in trainer.agree(store.steps()):
            trainer.save()
        if step == hyper.steps and data.tokenizer:
            say(f"It writes:\n{trainer.sample(n=settings.sample)}")

    restore = lambda run: trainer.step if trainer.resume() else None
    survivor = Survivor(team, build, batch_of, hyper.clip, int(strategy.zero > 0), restore)
    survivor.train(hyper.steps, before)


def describe(record: dict[str, Any]) -> str:
    held_out = "" if record["held_out"] is None else f" (held out {record['held_out']:.3f})"
    speed = f"{record['tokens_per_s'] / 1000:.1f}k tokens/s, MFU {record['mfu']:.0%}"
    return f"loss {record['loss']:.3f}{held_out}, {speed}"
