"""What the configs of a model check alike: names, types and choices of their fields, in words that help."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields

from minitrain.ranks.checks import require_positive_ints

LARGEST = 1 << 30  # size of anything


def check_names(cls: type, settings: Iterable[str]) -> None:
    names = [field.name for field in fields(cls)]
    for name in settings:
        if name not in names:
            raise ValueError(f"unknown setting {name!r}; {meant(name, names)}")


def check_types(config, leave_out: Iterable[str] = ()) -> None:
    """Every field has the type of its default; None stands for a whole number that is derived."""
    for field in fields(config):
        value, kind = getattr(config, field.name), int if field.default is None else type(field.default)
        fits = isinstance(value, (int, float) if kind is float else kind) or value is field.default
        if field.name not in leave_out and (not fits or (isinstance(value, bool) and kind is not bool)):
            found = type(value).__name__
            raise ValueError(f"{field.name} = {value!r} is {found}; expected {kind.__name__}")
        if kind is int and value is not None and field.name not in leave_out and value > LARGEST:
            raise ValueError(f"{field.name} = {value}; use at most {LARGEST:,}")


def check_choice(config, name: str, choices: Iterable[str]) -> None:
    if (value := getattr(config, name)) not in choices:
        raise ValueError(f"{name} = {value!r}; {meant(value, choices)}")


def check_least(config, least: int, names: Iterable[str]) -> None:
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name} = {getattr(config, name)}; use at least {least}")


def meant(given: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"


def divisors(n: int) -> list[int]:
    require_positive_ints(1 << 40, n=n)
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})
