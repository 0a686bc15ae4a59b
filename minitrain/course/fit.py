"""Constants from published or measured steps: one visible function, rows named beforehand, nothing silent.

    rates = fit(rows, ("products", "nvlink"), work_of, start=START)       those two change, all else stays

Least squares of log(predicted / measured), by coordinate search: each constant in turn goes up or down by a
step as long as the error falls, then the step is halved. Few rows fix few constants: as many rows as names
at least, else ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from math import log

from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.rates import START, Rates
from minitrain.plan.predict.work import WorkOf
from minitrain.ranks.checks import require_nonnegative, require_positive
from minitrain.systems.plan.published import Published

SHARES = tuple(field.name for field in fields(Rates) if field.type is float)
LEAST = 0.05


def fit(
    rows: Sequence[Published], names: Iterable[str], work_of: WorkOf, start=START, tolerance=0.01, hold=0.01
) -> Rates:
    """`start` with the named shares as the rows have them: no step of `tolerance`, of one constant, makes the
    error smaller. With `hold` a constant that the rows hardly know stays: to leave its start by a factor of e
    costs as much as one row that is 10 % off."""
    require_positive(tolerance=tolerance)
    require_nonnegative(hold=hold)
    names = tuple(names)
    for name in names:
        if name not in SHARES:
            raise ValueError(f"cannot fit {name!r}; use {', '.join(SHARES)}")
    if len(rows) < len(names) or not names:
        said = f"{len(rows)} rows for {len(names)} constants"
        raise ValueError(f"{said}; give at least as many rows, and one name")

    def error(rates: Rates) -> float:
        moved = sum(log(getattr(rates, name) / getattr(start, name)) ** 2 for name in names)
        return sum(log_ratio(row, work_of, rates) ** 2 for row in rows) + hold * moved

    best, least, step = start, error(start), 8 * tolerance
    while step >= tolerance:
        before = least
        for name in names:
            for change in (step, -step):
                while LEAST <= (value := round(getattr(best, name) + change, 6)) <= 1:
                    found = error(tried := replace(best, **{name: value}))
                    if found >= least:
                        break
                    best, least = tried, found
        if least == before:
            step /= 2
    return best


@lru_cache(maxsize=1 << 16)
def log_ratio(row: Published, work_of: WorkOf, rates: Rates) -> float:
    """log(predicted / measured). Searches from one start meet on a grid: other rows, the same rates."""
    return log(predict(row.run, work_of, rates).step_s / row.step_s)
