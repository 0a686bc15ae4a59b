"""`minitrain replay`: a training step of a published model in any layout, dry, on a described machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from minitrain.model.config import GPTConfig, meant, presets
from minitrain.model.training.flags import among, chosen, flags, options
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.predict.training_run import STACKS
from minitrain.plan.simulate.machines import MACHINES, Machine
from minitrain.plan.simulate.machines import machine as machine_of
from minitrain.plan.strategy import CHOICES, Strategy
from minitrain.ranks.checks import require_ints
from minitrain.systems.simulate.replay import calibrated

Described = Annotated[str, Option(help="such as h100, or a file: mine.toml", autocompletion=among(MACHINES))]


def known(names: dict, **given: str):
    """What the name stands for; ValueError with the nearest."""
    ((what, name),) = given.items()
    if name not in names:
        raise ValueError(f"no {what} is called {name!r}; {meant(name, names)}")
    return names[name]


def writable(**given: Path | None) -> None:
    ((name, path),) = given.items()
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{name}={path}: give a file in a folder that is there")


@options(flags(Strategy, unset=True, panel="Layout over ranks, by default as said above", choices=CHOICES))
def replay(
    model: Annotated[str, Argument(help="such as llama3-8b or gpt2", autocompletion=among(presets))],
    machine: Described = "h100",
    ranks: Annotated[int | None, Option(help="of all axes; dp is what is left; else 64")] = None,
    batch: Annotated[int | None, Option(help="rows of the global batch; else as few as can be")] = None,
    length: Annotated[int | None, Option(help="tokens of a row; else 8192, or all there are")] = None,
    fused_optimizer: Annotated[bool, Option(help="an update is one kernel per tensor")] = True,
    compute_efficiency: Annotated[
        float | None, Option(help="share of a datasheet's FLOP/s; else as calibrated")
    ] = None,
    memory_efficiency: Annotated[float | None, Option(help="likewise of the memory's bandwidth")] = None,
    network_efficiency: Annotated[float | None, Option(help="likewise of the links'")] = None,
    trace: Annotated[Path | None, Option(help="write a trace for ui.perfetto.dev here")] = None,
    **values,
) -> None:
    """What a training step of a published model takes on a described machine: dry run, then replay.

    The flags of a strategy are those of `minitrain train`. Where nothing else is said: bfloat16, ZeRO-3, or
    with a pipeline ZeRO-1 and four microbatches per stage. Rates are shares of the datasheet's: those that
    published runs on such a device reach (plan/predict/rates.py).

    \b
    minitrain replay llama3-8b
    minitrain replay llama3-70b --ranks 64 --tp 8 --pp 4 --sequence-parallel
    minitrain replay mixtral-8x7b --ranks 64 --ep 8 --machine h200"""
    config = known(presets, preset=model)
    shares = dict(compute_efficiency=compute_efficiency, memory_efficiency=memory_efficiency)
    given = shares | dict(network_efficiency=network_efficiency)
    target = calibrated(machine_of(machine), STACKS["overlapped"])
    target = replace(target, **{name: share for name, share in given.items() if share is not None})
    strategy = strategy_for(chosen(Strategy, values), ranks)
    hyper = step_for(config, strategy, batch, length)
    writable(trace=trace)
    strategy.check(config, strategy.ranks)
    strategy.check_batch(config, hyper.batch_size, hyper.length)
    from minitrain.compose.dry_runs import dry_steps
    from minitrain.systems.simulate.replay import replay as play

    ledgers = dry_steps(config, strategy, hyper, fused=fused_optimizer)
    dtype = rate_for(target, strategy)
    timeline = play({rank: ledger.events for rank, ledger in ledgers.items()}, target, dtype=dtype)
    step = f"{hyper.batch_size} x {hyper.length} tokens per step"
    echo(f"{model} on {strategy.ranks} ranks of {target.device.name}, {step}\n{strategy}\n")
    echo(timeline.table())
    echo(f"\n{memory(ledgers, target)}")
    echo(utilisation(timeline, config, strategy, hyper, target))
    if strategy.products != "plain":
        echo("casts run operator by operator, as in eager PyTorch; `minitrain plan` fuses them")
    if trace:
        echo(f"trace in {timeline.to_chrome_trace(trace)}")


def strategy_for(given: dict[str, Any], ranks: int | None) -> Strategy:
    """The strategy of the flags; what is not given is what large runs use."""
    require_ints(1, 1 << 30, ranks=64 if ranks is None else ranks)
    wanted = Strategy(**{"dp": 1} | given)
    if "dp" not in given:
        beside = wanted.ranks
        all_of_them = max(64 // beside, 1) * beside if ranks is None else ranks
        if all_of_them % beside:
            axes = f"pp x cp x tp = {beside}"
            raise ValueError(f"ranks={all_of_them} is no multiple of {axes}; use {beside}, {2 * beside}, ..")
        given = given | dict(dp=all_of_them // beside)
    elif ranks not in (None, wanted.ranks):
        raise ValueError(f"ranks={ranks}, and dp x pp x cp x tp is {wanted.ranks}; leave one of them out")
    pipeline = dict(zero=1, microbatches=4 * wanted.pp)
    return Strategy(**(dict(precision="bfloat16") | (pipeline if wanted.pp > 1 else dict(zero=3)) | given))


def step_for(config: GPTConfig, strategy: Strategy, batch: int | None, length: int | None) -> Hyperparameters:
    """One row per data rank and microbatch, if nothing is said."""
    rows = strategy.dp * strategy.microbatches if batch is None else batch
    tokens = min(8192, config.max_positions) if length is None else length
    require_ints(1, 1 << 30, batch=rows, length=tokens)
    return Hyperparameters(batch_size=rows, length=tokens)


def rate_for(target: Machine, strategy: Strategy) -> str | None:
    """The machine's rate for products in 16 bits, where it has none for these 16."""
    rates, dtype = target.device.peak_flops, strategy.policy.activations
    return "float16" if dtype == "bfloat16" and dtype not in rates else None


def memory(ledgers: dict, target: Machine) -> str:
    rank = max(ledgers, key=lambda rank: ledgers[rank].peak_bytes)
    peak, capacity = ledgers[rank].peak_bytes, target.device.capacity_bytes
    kinds = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in ledgers[rank].peak_by_kind.items() if size)
    cure = "cut more (--zero --tp --pp --cp --ep) or keep less (--microbatches --recompute --batch --offload)"
    cure = f"\nDOES NOT FIT: {cure}" * (peak > capacity)
    return f"peak memory {peak / 1e9:.1f} GB of {capacity / 1e9:.0f} GB on rank {rank} ({kinds}){cure}"


def utilisation(timeline, config, strategy: Strategy, hyper: Hyperparameters, target: Machine) -> str:
    from minitrain.plan.accounting import flops_per_token

    tokens, dtype = hyper.batch_size * hyper.length, rate_for(target, strategy) or strategy.policy.activations
    share = timeline.mfu(tokens * flops_per_token(config, hyper.length) / strategy.ranks, dtype)
    rate = f"{tokens / timeline.step_s / strategy.ranks:,.0f} tokens/s per device"
    return f"MFU {share:.1%} ({target.said}; a causal attention counted as a triangle), {rate}"
