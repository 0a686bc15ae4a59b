"""What both configs of a model check when they are made: names, types and choices, in words that help."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import fields

from minitrain.ranks.checks import require_positive_ints

LARGEST = 1 << 30  # size of anything


class Settings:
    """A frozen dataclass of plain values: the base of GPTConfig and ExpertsConfig."""

    def __new__(cls, *args, **settings):
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                raise ValueError(f"unknown setting {name!r}; {meant(name, names)}")
        return super().__new__(cls)

    def check_types(self, leave_out: Iterable[str] = ()) -> None:
        """Every field has the type of its default; None stands for a whole number that is derived."""
        for field in fields(self):
            value, kind = getattr(self, field.name), int if field.default is None else type(field.default)
            if field.name in leave_out or value is field.default:
                continue
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                given = type(value).__name__
                raise ValueError(f"{field.name} = {value!r} is {given}; expected {kind.__name__}")
            if kind is int and value > LARGEST:
                raise ValueError(f"{field.name} = {value}; use at most {LARGEST:,}")

    def check_choice(self, name: str, choices: Iterable[str]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise ValueError(f"{name} = {value!r}; {meant(value, choices)}")

    def check_least(self, least: float, *names: str) -> None:
        """`least` or more, and finite."""
        for name in names:
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}; use at least {least}")


def meant(given: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"


def divisors(n: int) -> list[int]:
    require_positive_ints(1 << 40, n=n)
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})
