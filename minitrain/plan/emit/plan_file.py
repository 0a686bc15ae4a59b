"""minitrain's own plan: a JSON with the fields of Strategy and GPTConfig, rows and length.

    plan.json    {"format": 1, "strategy": {"dp": 4, "zero": 1}, "model": {..}, "rows": 64, "length": 4096}

Fields at their defaults are left out, so that a plan stays readable; whatever a Job is can be written. No
torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from minitrain.model.config import Derived, GPTConfig
from minitrain.model.experts_config import ExpertsConfig
from minitrain.model.fields import meant
from minitrain.plan.emit.training_job import Job
from minitrain.plan.strategy import Strategy

FORMAT = 1
KEYS = ("format", "strategy", "model", "rows", "length")


def _changed(config) -> dict:
    """What differs from the defaults; a width that was derived is derived again."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    kept = {name: value for name, value in values.items() if not isinstance(value, Derived)}
    return {
        name: kept[name] for name in kept if kept[name] != type(config).__dataclass_fields__[name].default
    }


def write(job: Job) -> str:
    model = _changed(job.model)
    if job.model.experts:
        model["experts"] = asdict(job.model.experts)
    tree = {"format": FORMAT, "strategy": _changed(job.strategy), "model": model}
    return json.dumps(tree | {"rows": job.rows, "length": job.length}, indent=2) + "\n"


def read(text: str) -> Job:
    """ValueError, in one line, for what is no plan."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"plan: the JSON is {type(tree).__name__}; use an object with {', '.join(KEYS)}")
    for key in tree:
        if key not in KEYS:
            raise ValueError(f"plan: unknown {key!r}; {meant(key, KEYS)}")
    if missing := [key for key in KEYS if key not in tree]:
        raise ValueError(f"plan: {missing[0]!r} is missing; it has {', '.join(KEYS)}")
    if tree["format"] != FORMAT:
        raise ValueError(f"plan: format {tree['format']!r}; this version reads {FORMAT}")
    kinds = {"strategy": Strategy, "model": GPTConfig}
    for key, kind in kinds.items():
        names = [field.name for field in fields(kind)]
        check(key, tree[key], names)
    if tree["model"].get("experts"):
        check("model.experts", tree["model"]["experts"], [field.name for field in fields(ExpertsConfig)])
    return Job(Strategy(**tree["strategy"]), GPTConfig(**tree["model"]), tree["rows"], tree["length"])


def check(where: str, values: object, names: list[str]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"plan: {where} is {values!r}; use an object of its fields")
    for name in values:
        if name not in names:
            raise ValueError(f"plan: {where} has no {name!r}; {meant(name, names)}")
