"""The files of a plan: the best that a system can express, and a file of another one beside a plan."""

from pathlib import Path
from types import ModuleType

from minitrain.plan.planner import Task
from minitrain.plan.predict.predicted_step import Prediction
from minitrain.systems.plan.emit import deepspeed, megatron, torchtitan, training_job
from minitrain.systems.plan.emit.training_job import EXPERTS, MODEL, Job

EMIT = dict(megatron=megatron, deepspeed=deepspeed, torchtitan=torchtitan, minitrain=training_job)


def written(best: list[Prediction], writer: ModuleType) -> tuple[str, list[str]]:
    """The best that the system can express; what it has no word for, and what it leaves to code."""
    refused = ""
    for number, one in enumerate(best, start=1):
        job = Job(one.run.strategy, one.run.model, one.run.batch, one.run.length)
        node = (one.run.machine.devices_per_node, one.run.stack) if writer is megatron else ()
        try:
            file = writer.write(job, *node)
            break
        except ValueError as error:
            refused = refused or f"1: {error}"
    else:
        raise ValueError(f"none of the {len(best)} fastest can be written. {refused}")
    text, notes, in_code = (file, [], {}) if writer is training_job else file
    slower = f"{refused}\nwritten is {number}, {one.step_s / best[0].step_s - 1:.1%} slower than 1"
    places = dict.fromkeys(writer.IN_CODE[name] for name in in_code)
    return text, [*([slower] if refused else []), *notes, *(f"the rest is said in {one}" for one in places)]


def read(path: Path, task: Task) -> tuple[Job, dict]:
    """What another system's file says, of the task's model, and its options that no plan says. Its kind is
    known by its text."""
    if not path.is_file():
        raise ValueError(f"compare={path}: no such file; give a plan.json, a configuration or a command")
    text, model, rest = path.read_text(errors="replace"), task.model, {}
    sizes = {name: getattr(model, name) for name in MODEL}
    sizes |= {name: getattr(model.experts, name) for name in EXPERTS} if model.experts else {}
    if path.suffix == ".toml":
        job, rest = torchtitan.read(text, sizes)
    elif not text.lstrip().startswith("{"):
        job, rest = megatron.read(text)
    elif '"format"' in text:
        job = training_job.read(text)
    else:
        job, rest = deepspeed.read(text, sizes | {"length": task.length})
    said = "{1} ranks, {2} rows of {3} tokens, {0.num_layers} x {0.d_model}, {0.num_heads} heads"
    found = said.format(job.model, job.strategy.ranks, job.rows, job.length)
    if found != (wanted := said.format(model, task.ranks, task.batch, task.length)):
        raise ValueError(f"{path} is for {found}, this plan for {wanted}; ask for the same")
    return job, rest
