"""What a planner returns and a trainer needs: a strategy, a model, rows of the global batch, their length.

    job = Job(Strategy(dp=4, zero=1), presets["llama3-8b"], rows=64, length=4096)
    job.values()          {"dp": 4, .., "d_model": 4096, .., "rows": 64, "length": 4096}
    from_values(..)       the job again
    write(job)            {"format": 1, "strategy": {"dp": 4, "zero": 1}, "model": {..}, "rows": 64, ..}
    read(text)            the job again

Names are those of Strategy, GPTConfig and ExpertsConfig, which share none; a model without experts has
num_experts 0. In `values` what has no effect, the layout of a sequence on one rank say, is the default: jobs
which do the same have the same values. minitrain's own plan, a JSON, leaves defaults out. No torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from minitrain.model.config import Derived, ExpertsConfig, GPTConfig, meant
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import FIRST_SCALE
from minitrain.ranks.checks import require_positive_ints, require_text

Values = dict[str, object]

STRATEGY = {field.name: field.default for field in fields(Strategy)}
MODEL = {field.name: field.default for field in fields(GPTConfig) if field.name != "experts"}
EXPERTS = {field.name: field.default for field in fields(ExpertsConfig)}
FORMAT = 1
KEYS = ("format", "strategy", "model", "rows", "length")
DEFAULTS: Values = {**STRATEGY, **MODEL, **EXPERTS, "num_experts": 0, "rows": 1, "length": 1}


@dataclass(frozen=True)
class Job:
    strategy: Strategy
    model: GPTConfig
    rows: int  # of the global batch
    length: int  # tokens of a row

    def __post_init__(self):
        require_positive_ints(1 << 40, rows=self.rows, length=self.length)
        self.strategy.check(self.model, self.strategy.ranks)
        self.strategy.check_batch(self.model, self.rows, self.length)

    def values(self) -> Values:
        model = {name: getattr(self.model, name) for name in MODEL}
        experts = asdict(self.model.experts) if self.model.experts else EXPERTS | {"num_experts": 0}
        if self.model.experts:
            experts["expert_width"] = self.model.expert_width
        found = {**asdict(self.strategy), **model, **experts, "rows": self.rows, "length": self.length}
        found["offload"] = "+".join(sorted(self.strategy.offloads)) or "none"
        if found["loss_scale"] == FIRST_SCALE and self.strategy.policy.scales:
            found["loss_scale"] = 0.0
        without_effect = {
            "core layout inner ulysses": self.strategy.cp == 1,
            "schedule": not self.strategy.pipelined,
            "ep_travel": self.strategy.ep == 1,
            "loss_scale_window": not self.strategy.first_loss_scale,
            "bucket_bytes": self.strategy.dp * self.strategy.cp == 1,
            "rope_theta rope_fraction": self.model.positions != "rope",
        }
        for names, ignored in without_effect.items():
            found |= {name: DEFAULTS[name] for name in names.split() if ignored}
        return settled(found)


def settled(values: Values) -> Values:
    """An order of ranks that only moves axes of one rank is the default."""
    real = lambda order: [axis for axis in order.split("-") if values[axis] > 1]
    same = real(values["order"]) == real(DEFAULTS["order"])
    return values | {"order": DEFAULTS["order"]} if same else values


def from_values(values: Mapping[str, object]) -> Job:
    """Names that are missing have their defaults; ValueError for one that nobody knows."""
    for name in values:
        if name not in DEFAULTS:
            raise ValueError(f"a plan has no {name!r}; {meant(name, DEFAULTS)}")
    values = DEFAULTS | values
    experts = ExpertsConfig(**{name: values[name] for name in EXPERTS}) if values["num_experts"] else None
    model = GPTConfig(**{name: values[name] for name in MODEL}, experts=experts)
    return Job(Strategy(**{name: values[name] for name in STRATEGY}), model, values["rows"], values["length"])


def write(job: Job) -> str:
    def changed(config) -> dict:
        """What differs from the defaults; a width that was derived is derived again."""
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        usual = {field.name: field.default for field in fields(config)}
        return {n: v for n, v in values.items() if v != usual[n] and not isinstance(v, Derived)}

    experts = {"experts": asdict(job.model.experts)} if job.model.experts else {}
    tree = {"format": FORMAT, "strategy": changed(job.strategy), "model": changed(job.model) | experts}
    return json.dumps(tree | {"rows": job.rows, "length": job.length}, indent=2) + "\n"


def parsed(text: str, loads: Callable[[str], object], what: str) -> dict:
    require_text(text=text)
    try:
        tree = loads(text)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{what}: {text[:40]!r}; use an object of names and values")
    return tree


def read(text: str) -> Job:
    tree = parsed(text, json.loads, "plan: no JSON")
    if tree.keys() != set(KEYS):
        raise ValueError(f"plan: {text[:40]!r}; use an object of {', '.join(KEYS)}")
    if tree["format"] != FORMAT:
        raise ValueError(f"plan: format {tree['format']!r}; this version reads {FORMAT}")
    strategy, model = tree["strategy"], tree["model"]
    experts = isinstance(model, dict) and model.pop("experts", None) or {}
    for part, names in ((strategy, STRATEGY), (model, MODEL), (experts, EXPERTS)):
        if not isinstance(part, dict) or part.keys() & DEFAULTS.keys() - names.keys():
            raise ValueError(f"plan: {part!r}; use an object of names and values, each in its part")
    experts = EXPERTS | experts if experts else {}
    return from_values({**strategy, **model, **experts, "rows": tree["rows"], "length": tree["length"]})
