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
    """A torch.device or its name."""
    for name, value in values.items():
        if not re.fullmatch(r"(cpu|cuda|meta|mps|xpu)(:\d+)?", str(value)):
            raise ValueError(f"{name}={_short(value)}: use cpu, cuda, or one of several, such as cuda:1")


def require_nonempty(**values) -> None:
    """Sequences that have an entry."""
    for name, value in values.items():
        if isinstance(value, str) or not isinstance(value, Collection) or not len(value):
            raise ValueError(f"{name}={_short(value)}: give a sequence with at least one entry")


def require_text(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}={_short(value)}: give a text")


def require_one_of(allowed: Iterable, **values) -> None:
    allowed = list(allowed)
    for name, value in values.items():
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ValueError(f"{name}={_short(value)}: use {', '.join(map(str, allowed))}")


def _is_finite(value) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _check(values: dict, fits: Callable, wanted: str) -> None:
    for name, value in values.items():
        if isinstance(value, (list, tuple, range)) and len(value):
            for number, one in enumerate(value):
                if isinstance(one, (list, tuple)):
                    _check({f"{name}[{number}]": one}, fits, wanted)
                elif not fits(one):
                    raise ValueError(f"{name}[{number}]={_short(one)}: use {wanted}")
        elif not fits(value):
            raise ValueError(f"{name}={_short(value)}: use {wanted}")


def _short(value) -> str:
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
