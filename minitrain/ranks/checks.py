"""What numbers may be, said in one line: checks at the top of public functions.

    counts(ranks=ranks, layers=layers)      whole, 1 or more; few enough to go through one by one
    whole(0, root=root, sizes=sizes)        whole, 0 or more; of a sequence each entry, one at least
    amounts(seconds=seconds)                finite, 0 or more
    positive(bytes_per_s=rate)              finite, more than 0
    shares(dropout=p)                       from 0 to 1
    texts(layout=layout), filled(sizes=sizes), one_of(ways, way=way), device_name(device=device)

Each raises ValueError with the name, what was given and what is allowed.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real

MOST = 1 << 24  # more are not gone through one by one


def counts(most: int = MOST, /, **values) -> None:
    whole(1, most, **values)


def whole(least: int = 0, most: int = 10**18, /, **values) -> None:
    def fits(value) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most

    _check(values, fits, f"a whole number from {least} to {most:,}")


def amounts(**values) -> None:
    _check(values, lambda value: _is_finite(value) and value >= 0, "a finite number, 0 or more")


def positive(**values) -> None:
    _check(values, lambda value: _is_finite(value) and value > 0, "a finite number above 0")


def shares(**values) -> None:
    _check(values, lambda value: _is_finite(value) and 0 <= value <= 1, "a number from 0 to 1")


def finite(**values) -> None:
    _check(values, _is_finite, "a finite number")


def device_name(**values) -> None:
    """A torch.device or its name."""
    for name, value in values.items():
        if not re.fullmatch(r"(cpu|cuda|meta|mps|xpu)(:\d+)?", str(value)):
            raise ValueError(f"{name}={_short(value)}: use cpu, cuda, or one of several, such as cuda:1")


def filled(**values) -> None:
    """Sequences that have an entry."""
    for name, value in values.items():
        if isinstance(value, str) or not isinstance(value, Collection) or not len(value):
            raise ValueError(f"{name}={_short(value)}: give a sequence with at least one entry")


def texts(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}={_short(value)}: give a text")


def one_of(allowed: Iterable, **values) -> None:
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
