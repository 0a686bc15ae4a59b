"""Rows that translate a job's values to a system's options and back, and how what is lost comes to light.

    Same("tp", "--tensor-model-parallel-size", 1)                     one number, the same in both
    Cases(("zero",), [((0,), {}), ((1,), {"--use-distributed-optimizer": True})])      a list of pairs
    Made(("recompute",), ("--recompute-granularity", ..), write, read)                 two functions

A system is a list of rows. `write` applies them, reads its own result back and compares: a value that does
not come back is one that the system cannot say. If it changes only how fast something is done, it is noted;
anything else is refused, all such values in one line. So no writer can claim what its reader does not
confirm, and read(write(job)) is the job wherever `write` notes nothing.

`options.tsv` has all option names of the version that is written for: an option that is not there is refused
with the nearest name. Options that are there and say nothing of a plan (a learning rate, paths) are handed
back. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from minitrain.model.fields import meant
from minitrain.plan.emit.training_job import DEFAULTS, Job, Values, from_values, settled
from minitrain.ranks.checks import require_one_of, require_positive_ints

Options = dict[str, object]
BESIDE = "beside."  # before the name of a value that is said in code, not in an option


class Same(NamedTuple):
    """`default`: what the system takes where the option is missing."""

    ours: str
    theirs: str
    default: object

    def write(self, values: Values) -> Options:
        return {self.theirs: values[self.ours]}

    def read(self, options: Options, values: Values) -> Values:
        return {self.ours: options.get(self.theirs, self.default)}

    @property
    def options(self) -> tuple[str, ...]:
        return (self.theirs,)


class Cases(NamedTuple):
    """Pairs of values of ours and options of theirs; an option that is missing is `absent`'s, else False.
    Values without a pair are written as the first, which does not read back as they are."""

    ours: tuple[str, ...]
    pairs: Sequence[tuple[tuple, Options]]
    absent: Options = {}

    def write(self, values: Values) -> Options:
        given = tuple(values[name] for name in self.ours)
        return next((theirs for ours, theirs in self.pairs if ours == given), self.pairs[0][1])

    def read(self, options: Options, values: Values) -> Values:
        def all_of(theirs: Options) -> list:
            return [theirs.get(name, self.absent.get(name, False)) for name in self.options]

        for ours, theirs in self.pairs:
            if all_of(theirs) == all_of(options):
                return dict(zip(self.ours, ours))
        said = ", ".join(f"{name}={options[name]}" for name in self.options if name in options)
        raise ValueError(f"{said or 'nothing of ' + self.options[0]}: no {' and '.join(self.ours)} is this")

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, theirs in self.pairs for name in theirs))


class Made(NamedTuple):
    """`write(values)` gives options, `read(options, values read so far)` values."""

    ours: tuple[str, ...]
    options: tuple[str, ...]
    write: Callable[[Values], Options]
    read: Callable[[Options, Values], Values]


Row = Same | Cases | Made


@dataclass(frozen=True)
class System:
    """`noted`: values that only change how fast something is done, and why the system cannot say them."""

    key: str
    rows: Sequence[Row]
    noted: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)  # for others, where it is worth a word
    beside: Mapping[str, str] = field(default_factory=dict)  # where code says what the options do not
    unlike: Collection[str] = ()  # options for which minitrain has nothing, and that change numbers

    @property
    def all_rows(self) -> list[Row]:
        return [*(Same(name, f"{BESIDE}{name}", DEFAULTS[name]) for name in self.beside), *self.rows]

    def write(self, job: Job) -> tuple[Options, list[str]]:
        """The options, and a line for each value that they do not say and that changes no number."""
        values, options = job.values(), {}
        for row in self.all_rows:
            options |= row.write(values)
        back = self.values(options)
        lost = [name for name in DEFAULTS if values[name] != back[name]]
        refused = [name for name in lost if name not in self.noted]
        if refused:
            reasons = {name: f" ({self.why[name]})" for name in refused if name in self.why}
            said = ", ".join(f"{name}={values[name]!r}{reasons.get(name, '')}" for name in refused)
            raise ValueError(f"{self.name} cannot say {said}; use another value or another system")
        return options, [f"{name}={values[name]!r}: {self.noted[name]}" for name in lost]

    def read(self, options: Options) -> tuple[Job, Options]:
        """The job, and the options that say nothing of one. Its strategy and model are checked as always."""
        for name, value in options.items():
            if not name.startswith(BESIDE):
                check_option(self.key, name, value)
            if name in self.unlike and value:
                raise ValueError(f"{self.name}: {name} = {value!r}, and minitrain has nothing like it")
        used = {name for row in self.all_rows for name in row.options}
        left = {name: value for name, value in options.items() if name not in used}
        return from_values(self.values(options)), left

    def values(self, options: Options) -> Values:
        found = dict(DEFAULTS)
        for row in self.all_rows:
            found |= row.read(options, found)
        return settled(found)

    @property
    def name(self) -> str:
        return known(self.key).name


class Known(NamedTuple):
    name: str
    version: str
    date: str
    kinds: dict[str, str]  # of each option


@cache
def known(system: str) -> Known:
    """The options of a system, from options.tsv."""
    lines = Path(__file__).with_name("options.tsv").read_text().splitlines()
    table = [line.split("\t") for line in lines]
    every = {row[0].removeprefix("# "): row[1:] for row in table if row[0].startswith("# ")}
    require_one_of(every, system=system)
    about = every[system]
    return Known(*about, {option: kind for key, option, kind in table[3:] if key == system})


KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "flag": bool, "list": list}


def check_option(system: str, name: str, value: object) -> None:
    about = known(system)
    if name not in about.kinds:
        raise ValueError(f"{about.name} has no option {name!r}; {meant(name, about.kinds)[:200]}")
    kind = about.kinds[name]
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind in ("int", "float")):
        raise ValueError(f"{about.name}: {name} = {value!r}; it is {kind}")


def rows_of_microbatch(values: Values) -> int:
    """Of a rank. No option of theirs says that microbatches differ."""
    rows, rest = divmod(values["rows"], values["dp"] * values["microbatches"])
    if rest:
        sizes = f"rows={values['rows']} of dp={values['dp']} x microbatches={values['microbatches']}"
        raise ValueError(f"{sizes}: only minitrain has uneven microbatches; use a multiple")
    return rows


def check_stages(values: Values, chunks: int, name: str) -> None:
    """Nor that stages do."""
    require_positive_ints(chunks=chunks)
    if values["num_layers"] % (values["pp"] * chunks):
        sizes = f"num_layers={values['num_layers']} on pp={values['pp']} x {chunks} stages"
        raise ValueError(f"{sizes}: stages of {name} have equally many blocks; use a divisor")


class Written(NamedTuple):
    """`notes`: what changes no number and is not said; `beside`: what code has to say, by name."""

    text: str
    notes: list[str]
    beside: Values


def split(options: Options) -> tuple[Options, Values]:
    """What the system's configuration says, and what stands beside it."""
    said = {name: value for name, value in options.items() if not name.startswith(BESIDE)}
    beside = {name.removeprefix(BESIDE): value for name, value in options.items() if name not in said}
    return said, {name: value for name, value in beside.items() if value != DEFAULTS[name]}


def joined(options: Options, beside: Values) -> Options:
    return options | {f"{BESIDE}{name}": value for name, value in beside.items()}


def ranks_in(order: str) -> Made:
    """Of a system whose ranks stand in one order."""
    return Made(("order",), (), lambda values: {}, lambda options, values: {"order": order})


def flag(ours: str, theirs: str) -> Cases:
    return Cases((ours,), [((False,), {}), ((True,), {theirs: True})])


def power_of_two(value: float) -> int | None:
    fraction, exponent = math.frexp(value)
    return exponent - 1 if fraction == 0.5 else None


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
