"""Constants from published or measured steps: one visible function, rows named beforehand, nothing silent.

    rates = fit(rows, ("products", "nvlink"), work_of, start=START)       those two change, all else stays
    factor = stack_factor(row, work_of, rates)                            one number more, of one row

Least squares of log(predicted / measured), by coordinate search: each constant in turn goes up or down by a
step as long as the error falls, then the step is halved. Few rows fix few constants: as many rows as names
at least, else ValueError. A factor for a stack says how much slower all of it is than this model; it is no
rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from math import log

from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.rates import RATES, START, Rates
from minitrain.plan.predict.training_run import Published
from minitrain.plan.predict.work import WorkOf
from minitrain.ranks.checks import require_nonnegative, require_one_of, require_positive

SHARES = tuple(field.name for field in fields(Rates) if field.type == "float")
LEAST = 0.05


def fit(
    rows: Sequence[Published],
    names: Iterable[str],
    work_of: WorkOf,
    start: Rates = START,
    tolerance=0.01,
    hold=0.01,
) -> Rates:
    """`start` with the named shares as the rows have them, to a `tolerance`. With `hold` a constant that the
    rows hardly know stays: to leave its start by a factor of e costs as much as one row that is 10 % off."""
    require_positive(tolerance=tolerance)
    require_nonnegative(hold=hold)
    names = tuple(names)
    for name in names:
        if name not in SHARES:
            raise ValueError(f"cannot fit {name!r}; use {', '.join(SHARES)}")
    if len(rows) < len(names) or not names:
        raise ValueError(
            f"{len(rows)} rows for {len(names)} constants; give at least as many rows, and one name"
        )
    moved = lambda rates: sum(log(getattr(rates, name) / getattr(start, name)) ** 2 for name in names)
    error = lambda rates: squared_error(rows, work_of, rates) + hold * moved(rates)
    return search(error, start, names, tolerance)


def squared_error(rows: Iterable[Published], work_of: WorkOf, rates: Rates) -> float:
    return sum(log_ratio(row, work_of, rates) ** 2 for row in rows)


@lru_cache(maxsize=1 << 16)
def log_ratio(row: Published, work_of: WorkOf, rates: Rates) -> float:
    """log(predicted / measured). Searches from one start meet on a grid: other rows, the same rates."""
    return log(predict(row.run, work_of, rates).step_s / row.step_s)


def search(error: Callable[[Rates], float], start: Rates, names: tuple[str, ...], tolerance: float) -> Rates:
    """The rates at which no step of `tolerance`, of one constant, makes the error smaller."""
    require_positive(tolerance=tolerance)
    for name in names:
        require_one_of(SHARES, name=name)
    best, least, step = start, error(start), 8 * tolerance
    while step >= tolerance:
        before = least
        for name in names:
            for way in (step, -step):
                while LEAST <= (value := round(getattr(best, name) + way, 6)) <= 1:
                    found = error(tried := replace(best, **{name: value}))
                    if found >= least:
                        break
                    best, least = tried, found
        if least == before:
            step /= 2
    return best


def stack_factor(row: Published, work_of: WorkOf, rates: Rates = RATES) -> float:
    """Measured over predicted of one calibration row: what to multiply predictions of its stack by."""
    return row.step_s / predict(row.run, work_of, rates).step_s
