"""`minitrain plan`: the fastest layouts of a model on a machine, predicted, and why the others are slower.

Names are looked up and sizes checked before torch is loaded; then every layout is predicted, from dry runs of
one layer (dry_runs.py) and the machine's rates. `--emit` writes the best one for another system, and
`--compare` reads such a file and predicts it beside the best (systems/plan/emit).
"""

import atexit
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from minitrain.cli.replay_command import Described, known, writable
from minitrain.model.config import presets
from minitrain.model.training.flags import among
from minitrain.plan.planner import Task, needs, pareto, search, why
from minitrain.plan.predict.predicted_step import Prediction, predict
from minitrain.plan.predict.training_run import STACKS
from minitrain.plan.predict.work import WorkOf
from minitrain.plan.simulate.machines import machine as machine_of
from minitrain.ranks.checks import require_positive
from minitrain.ranks.tables import aligned
from minitrain.systems.plan.emit.plan_files import EMIT, read, written

HEAD = ("", "dp", "pp", "cp", "tp", "ep", "ZeRO", "schedule", "rows", "times", "recompute")
HEAD += ("step", "MFU", "memory", "most time goes to")
OTHERS = "megatron-2023", "overlapped", "megascale", "deepseek"  # stacks tried too; the last for experts
FRONT, SLOWEST = 10, 2  # rows of it, and times the best's step, that are shown


def plan(
    model: Annotated[str, Option(help="such as llama3-70b", autocompletion=among(presets))] = "llama3-70b",
    machine: Described = "h100",
    ranks: Annotated[int, Option(help="devices in all")] = 512,
    batch: Annotated[int, Option(help="sequences of a step, on all ranks together")] = 1024,
    length: Annotated[int, Option(help="tokens in a sequence")] = 8192,
    stack: Annotated[str, Option(help=f"what the software overlaps: {', '.join(STACKS)}")] = "overlapped",
    precision: Annotated[str, Option(help="which number has how many bits")] = "bfloat16_main_grads",
    room: Annotated[float, Option(help="share of a device's memory, less a reserve, to fill")] = 0.9,
    top: Annotated[int, Option(help="how many layouts to show")] = 5,
    tokens: Annotated[float, Option(help="of the whole training, for its days")] = 1e12,
    explain: Annotated[bool, Option("--explain", help="where each loses its time, and the front")] = False,
    emit: Annotated[str | None, Option(help=f"write the best for {', '.join(EMIT)}")] = None,
    out: Annotated[Path | None, Option(help="file for --emit; else it is printed")] = None,
    compare: Annotated[Path | None, Option(help="a plan.json, a configuration or command of these")] = None,
) -> None:
    """The fastest ways to train a model on so many devices: time, MFU and memory, predicted.

    \b
    minitrain plan --model llama3-70b --ranks 512 --batch 1024 --length 8192
    minitrain plan --model gpt3-175b --machine a100 --ranks 1024 --length 2048
    minitrain plan --model small --ranks 4 --batch 8 --length 256 --emit minitrain"""
    require_positive(top=top, tokens=tokens)
    writer = None if emit is None else known(EMIT, system=emit)
    writable(out=out)
    if out and not writer:
        raise ValueError(f"out={out} without --emit; say for which system: {', '.join(EMIT)}")
    of, on, software = known(presets, model=model), machine_of(machine), known(STACKS, stack=stack)
    task = Task(of, on, ranks, batch, length, software, precision, room)
    job, rest = read(compare, task) if compare else (None, {})
    theirs = job and task.run(job.strategy)
    gc.set_threshold(100_000)  # what is made stays: looking for garbage, at the end too, takes a fifth
    atexit.register(gc.freeze)
    from tqdm import tqdm

    from minitrain.compose.dry_runs import work_of

    best, *_ = fits = search(task, work_of, progress=lambda each: tqdm(each, leave=False, disable=None))
    said = f"{batch} x {length} tokens per step"
    echo(f"{model} on {ranks} x {task.machine.device.name}, {said}; stack {task.stack}\n")
    shown = [one for one in fits if one.step_s <= SLOWEST * best.step_s]
    echo(table(shown[:top]))
    days = tokens / (speed := batch * length / best.step_s) / 86400
    said = f"1: {speed:,.0f} tokens/s, {speed / ranks:,.0f} each, {days:,.1f} days for {tokens:g} tokens"
    echo(f"\n{len(fits):,} layouts fit; room for {task.room_bytes / 1e9:.0f} GB; {said}\n")
    echo("Assumed: no stragglers, no wait for input, an idle network, rates that published runs reach")
    for limit in best.limits:
        echo(f"Not modelled: {limit}")
    for line in of_other_stacks(fits, task, work_of):
        echo(line)
    kinds = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in best.memory.items() if size)
    echo(f"Memory of 1 in GB on the fullest rank: {kinds}\n")
    for number, other in enumerate(shown[1 : top if explain else 2], start=2):
        echo(f"{number} is {other.step_s / best.step_s - 1:.1%} slower than 1: {reasons(best, other)}")
    if theirs:
        echo(f"\n{compare} beside 1:\n{table([theirs := predict(theirs, work_of)])}")
        if rest:
            echo(f"not compared, for no plan says it (what overlaps is said by --stack): {', '.join(rest)}")
        echo(f"{theirs.step_s / best.step_s - 1:+.1%} of 1: {reasons(best, theirs)}")
        if (missing := needs(theirs) - task.room_bytes) > 0:
            echo(f"it does not fit: {missing / 1e9:.1f} GB more than there is room for")
    if explain:
        spent = sorted(best.parts.items(), key=lambda item: -item[1])
        rows = [(part, readable(s), f"{s / best.step_s:.1%}") for part, s in spent if s]
        echo(f"\nWhere the time of 1 goes:\n{aligned(rows)}")
        echo(f"\nFaster ones need more memory:\n{table(pareto(shown)[:FRONT])}")
    if writer:
        echo()
        write(fits, writer, out)


def of_other_stacks(fits: list[Prediction], task: Task, work_of: WorkOf) -> Iterator[str]:
    """Where another than the best is the fastest with another software."""
    near = [one.run.strategy for one in fits if one.step_s <= 1.25 * fits[0].step_s]
    for other in OTHERS[: 3 + bool(task.model.experts)]:
        again = replace(task, stack=STACKS[other])
        winner = fits[0] if again == task else search(again, work_of, among=near)[0]
        if winner.run.strategy != near[0]:
            said = f"MFU {winner.mfu:.1%}, {winner.run.strategy}"
            yield f"With {other} the fastest within 25% is another: {said}"


def write(best: list[Prediction], writer, out: Path | None) -> None:
    text, notes = written(best, writer)
    for note in notes:
        echo(note, err=True)
    if out:
        out.write_text(text)
        text = f"written to {out}\n"
    echo(text, nl=False)


def table(predictions: list[Prediction]) -> str:
    rows = [HEAD]
    for number, one in enumerate(predictions, start=1):
        s = one.run.strategy
        schedule = f"{s.schedule} x {s.chunks}" if s.chunks > 1 else s.schedule if s.pp > 1 else "-"
        part, seconds = max(one.parts.items(), key=lambda item: item[1])
        sizes = number, s.dp, s.pp, s.cp, s.tp, s.ep, s.zero, schedule, one.run.microbatch, s.microbatches
        took = readable(one.step_s), f"{one.mfu:.1%}", f"{needs(one) / 1e9:.1f} GB"
        rows.append((*map(str, sizes), s.recompute, *took, f"{part} {seconds / one.step_s:.0%}"))
    return aligned(rows, left=(7, 10, 14))


def reasons(best: Prediction, other: Prediction) -> str:
    said = (f"{part} {'+' if s > 0 else '-'}{readable(abs(s))}" for part, s in why(best, other))
    return ", ".join(said) or "they are equal"


def readable(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
