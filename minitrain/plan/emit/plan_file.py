"""minitrain's own plan: a JSON with the fields of Strategy and GPTConfig, rows and length.

    plan.json    {"format": 1, "strategy": {"dp": 4, "zero": 1}, "model": {..}, "rows": 64, "length": 4096}

Fields at their defaults are left out, so that a plan stays readable; whatever a Job is can be written. No
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields

from minitrain.model.config import Derived, GPTConfig
from minitrain.model.fields import meant
from minitrain.plan.emit.training_job import EXPERTS, MODEL, STRATEGY, Job
from minitrain.plan.strategy import Strategy

FORMAT = 1
KEYS = ("format", "strategy", "model", "rows", "length")


def write(job: Job) -> str:
    model = _changed(job.model)
    if job.model.experts:
        model["experts"] = asdict(job.model.experts)
    tree = {"format": FORMAT, "strategy": _changed(job.strategy), "model": model}
    return json.dumps(tree | {"rows": job.rows, "length": job.length}, indent=2) + "\n"


def _changed(config) -> dict:
    """What differs from the defaults; a width that was derived is derived again."""
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {
        name: value
        for name, (value, default) in values.items()
        if value != default and not isinstance(value, Derived)
    }


def read(text: str) -> Job:
    """ValueError, in one line, for what is no plan."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: no JSON: {error}") from None
    _check_names("plan", tree, KEYS)
    if missing := [key for key in KEYS if key not in tree]:
        raise ValueError(f"plan: {missing[0]!r} is missing; it has {', '.join(KEYS)}")
    if tree["format"] != FORMAT:
        raise ValueError(f"plan: format {tree['format']!r}; this version reads {FORMAT}")
    _check_names("plan.strategy", tree["strategy"], STRATEGY)
    _check_names("plan.model", tree["model"], [*MODEL, "experts"])
    if experts := tree["model"].get("experts"):
        _check_names("plan.model.experts", experts, EXPERTS)
    return Job(Strategy(**tree["strategy"]), GPTConfig(**tree["model"]), tree["rows"], tree["length"])


def _check_names(where: str, values: object, names: Iterable[str]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {values!r}; use an object of {', '.join(names)}")
    for name in values:
        if name not in names:
            raise ValueError(f"{where} has no {name!r}; {meant(name, names)}")
