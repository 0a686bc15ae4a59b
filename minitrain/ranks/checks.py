"""What numbers may be, said in one line: checks at the top of public functions.

    require_positive_ints(ranks=ranks, layers=layers)    1 or more; few enough to go through one by one
    require_ints(0, root=root, sizes=sizes)              0 or more; of a sequence each entry, one at least
    require_nonnegative(seconds=seconds)                 finite, 0 or more
    require_positive(bytes_per_s=rate)                   finite, more than 0
    require_fractions(dropout=p)                         from 0 to 1
    require_text(layout=layout), require_nonempty(sizes=sizes), require_one_of(names, name=name), ...

Each raises ValueError with the name, what was given and what is allowed.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from numbers import Integral, Real

MOST = 1 << 24  # more are not gone through one by one


def require_positive_ints(most: int = MOST, /, **values) -> None:
    require_ints(1, most, **values)


def require_ints(least: int = 0, most: int = 10**18, /, **values) -> None:
    def fits(value) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most

    _check(values, fits, f"a whole number from {least} to {most:,}")


def require_nonnegative(**values) -> None:
    _check(values, lambda value: _is_finite(value) and value >= 0, "a finite number, 0 or more")


def require_positive(**values) -> None:
    _check(values, lambda value: _is_finite(value) and value > 0, "a finite number above 0")


def require_fractions(**values) -> None:
    _check(values, lambda value: _is_finite(value) and 0 <= value <= 1, "a number from 0 to 1")


def require_device(**values) -> None:
    """A torch.device, which torch has checked, or its name."""
    names = r"(cpu|cuda|meta|mps|xpu)(:\d+)?"
    known = lambda value: isinstance(getattr(value, "type", None), str) or re.fullmatch(names, str(value))
    _check_each(values, known, "use cpu, cuda, or one of several, such as cuda:1")


def require_nonempty(**values) -> None:
    """Sequences that have an entry."""
    filled = lambda value: isinstance(value, Collection) and not isinstance(value, str) and len(value)
    _check_each(values, filled, "give a sequence with at least one entry")


def require_text(**values) -> None:
    _check_each(values, lambda value: isinstance(value, str), "give a text")


def require_one_of(allowed: Iterable, **values) -> None:
    allowed = list(allowed)
    is_one = lambda value, one: value is one or (type(value) is type(one) and value == one)
    fits = lambda value: any(is_one(value, one) for one in allowed)
    for name, value in values.items():
        if not fits(value):
            wanted = f"use {', '.join(map(str, allowed))}{near(value, map(str, allowed))}"
            _check_each({name: value}, fits, wanted)


def near(given, allowed: Iterable[str]) -> str:
    """'; did you mean ring?' for rng, or nothing."""
    found = get_close_matches(given, allowed, n=1) if isinstance(given, str) else ()
    return f"; did you mean {found[0]}?" if found else ""


def _is_finite(value) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _check(values: dict, fits: Callable, wanted: str) -> None:
    """Numbers; of a sequence, or sequences, each."""
    for name, value in values.items():
        if isinstance(value, (list, tuple, range)) and len(value):
            _check({f"{name}[{number}]": one for number, one in enumerate(value)}, fits, wanted)
        else:
            _check_each({name: value}, fits, f"use {wanted}")


def _check_each(values: dict, fits: Callable, wanted: str) -> None:
    for name, value in values.items():
        if not fits(value):
            text = str(value) if isinstance(value, Real) else repr(value)
            raise ValueError(f"{name}={text if len(text) <= 60 else f'{text[:57]}...'}: {wanted}")
