"""One table per system, read in both directions; what a system cannot say comes to light by reading back.

    option                     kind   ours        choices              default     a row of deepspeed.tsv
    tensor_parallel.autotp_size int   tp          =                    1           the same number
    zero_optimization.stage    int    zero        1=1 2=2 3=3          0           ours=theirs, for each
    data_types.grad_accum_dtype str   precision   bfloat16=bf16? ..                ?: they need not say it

Several options may say one value of ours; it is read as the first value with which all of them agree. `ours`
is a field of a job, or a number that the system's `derive` makes of fields and its `solve` turns back into
them; `default` is what the system does without the option. Every other option of the version is in the table,
too: one that says `nothing` changes numbers and has no counterpart here, so it is refused; the rest (learning
rates, paths) is handed back.

`write` reads its own result back. A value that does not come back the system cannot say: it is noted where it
changes only how fast something is done, else refused. So read(write(job)) is the job if nothing is noted.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from minitrain.model.config import meant
from minitrain.systems.plan.emit.training_job import DEFAULTS, Job, Values, from_values, settled

Options = dict[str, object]
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "flag": bool, "list": list}


class Option(NamedTuple):
    name: str
    kind: str
    ours: str
    choices: dict[object, object] | None  # ours -> theirs; None: the same number
    optional: set  # of ours, those that they need not say
    default: object
    required: bool

    def theirs(self, value: object) -> object:
        """None where it says nothing."""
        if self.choices is not None:
            return self.choices.get(value)
        return float(value) if self.kind == "float" and value is not None else value

    def says(self, value: object, given: object) -> bool:
        if self.choices is None:
            return given == value
        optional = given == self.default and value in self.optional
        return optional or given == self.choices.get(value, self.default)


def _option(name: str, kind: str, ours: str = "", choices: str = "", default: str = "") -> Option:
    missing = False if kind in ("flag", "bool") else _value(default) if default else None
    if choices in ("", "="):
        return Option(name, kind, ours, None, set(), missing, default == "required")
    pairs = [pair.rstrip("?").split("=", 1) for pair in choices.split()]
    optional = {_value(pair.split("=")[0]) for pair in choices.split() if pair.endswith("?")}
    ours_to_theirs = {_value(value): _value(theirs) for value, theirs in pairs}
    return Option(name, kind, ours, ours_to_theirs, optional, missing, False)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Written(NamedTuple):
    """`notes`: what changes no number and is not said; `in_code`: what code has to say, by name."""

    text: str
    notes: list[str]
    in_code: Values


class System:
    """`derive(values)`: numbers of theirs, and values of ours as far as it can say them; None is not said.
    `solve(values)`: values of ours, of all that the table read. `in_code`: ours that code says, and where."""

    def __init__(self, key: str, derive: Callable, solve: Callable, in_code: Mapping[str, str] = {}) -> None:
        self.derive, self.solve, self.in_code = derive, solve, in_code
        text = Path(__file__).with_name(f"{key}.tsv").read_text()
        rows = [line.split("\t") for line in text.splitlines()]
        (name, self.version, self.date), *comments = (row for row in rows if row[0].startswith("# "))
        self.name = name.removeprefix("# ")
        # our fields that only change how fast something is done, and others, and why: what it has instead
        self.noted = {row[1]: row[2] for row in comments if row[0] == "# noted"}
        self.refused = {row[1]: row[2] for row in comments if row[0] == "# refused"}
        self.options = {row[0]: _option(*row) for row in rows[2 + len(comments) :]}
        self.by_value: dict[str, list[Option]] = {}
        for one in self.options.values():
            if one.ours not in ("", "nothing"):
                self.by_value.setdefault(one.ours, []).append(one)

    def write(self, job: Job) -> tuple[Options, Values, list[str]]:
        values = job.values()
        in_code = {name: values[name] for name in self.in_code if values[name] != DEFAULTS[name]}
        numbers, options = values | self.derive(values), {}
        for one in self.options.values():
            theirs = one.theirs(self._writable(one.ours, numbers)) if one.ours in self.by_value else None
            if theirs is not None and theirs is not False:
                options[one.name] = theirs
        back = self.values(options, in_code)
        lost = [name for name in DEFAULTS if values[name] != back[name]]
        if refused := [name for name in lost if name not in self.noted]:
            why = {name: f" ({reason})" for name, reason in self.refused.items()}
            said = ", ".join(f"{name}={values[name]!r}{why.get(name, '')}" for name in refused)
            raise ValueError(f"{self.name} cannot say {said}; use another value or another system")
        return options, in_code, [f"{name}={values[name]!r}: {self.noted[name]}" for name in lost]

    def read(self, options: Options, in_code: Values) -> tuple[Job, Options]:
        if wrong := [name for name in in_code if name not in self.in_code]:
            raise ValueError(f"in_code: {wrong[0]!r} is not said in code; use {', '.join(self.in_code)}")
        for name, value in options.items():
            self.check(name, value)
            if self.options[name].ours == "nothing" and value:
                raise ValueError(f"{self.name}: {name} = {value!r}, and minitrain has nothing like it")
        rest = {name: value for name, value in options.items() if not self.options[name].ours}
        return from_values(self.values(options, in_code)), rest

    def check(self, name: str, value: object) -> None:
        if name not in self.options:
            raise ValueError(f"{self.name} has no option {name!r}; {meant(name, self.options)[:200]}")
        kind = self.options[name].kind
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind in ("int", "float")):
            raise ValueError(f"{self.name}: {name} = {value!r}; it is {kind}")

    def values(self, options: Options, in_code: Values) -> Values:
        found = DEFAULTS | in_code
        found |= {ours: self._read(ours, rows, options) for ours, rows in self.by_value.items()}
        found |= self.solve(found)
        return settled({name: found[name] for name in DEFAULTS})

    def _candidates(self, ours: str) -> list:
        listed = [value for one in self.by_value[ours] for value in one.choices or ()]
        return list(dict.fromkeys([DEFAULTS[ours], *listed]))

    def _writable(self, ours: str, numbers: Values) -> object:
        value = numbers.get(ours)
        if value is None or self.by_value[ours][0].choices is None or value in self._candidates(ours):
            return value
        return DEFAULTS[ours]

    def _read(self, ours: str, rows: list[Option], options: Options) -> object:
        for one in rows:
            if one.required and one.name not in options:
                raise ValueError(f"{one.name} is missing, and {self.name} has no default for it")
        given = {one.name: options.get(one.name, one.default) for one in rows}
        for value in self._candidates(ours) if rows[0].choices is not None else [given[rows[0].name]]:
            if all(one.says(value, given[one.name]) for one in rows):
                return value
        said = [f"{name}={theirs}" for name, theirs in given.items() if theirs or name in options]
        raise ValueError(f"{', '.join(said) or rows[0].name}: no {ours} is this")


def equal_parts(values: Values, name: str, ranks: int, each: int) -> int:
    """Of rows or layers, over ranks and parts of each: no option of theirs says that these differ."""
    size, rest = divmod(values[name], ranks * each)
    if rest:
        said = f"{name}={values[name]} in {ranks} x {each} parts"
        raise ValueError(f"{said}: only ours may differ; use a multiple")
    return size


def nested(options: Options) -> dict:
    """`a.b` as {"a": {"b": ..}}, as JSON and TOML have it."""
    tree: dict = {}
    for name, value in options.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def flat(tree: Mapping, before: str = "") -> Options:
    found: Options = {}
    for name, value in tree.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found
