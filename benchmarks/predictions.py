"""Predicted against published step times: every row, other publications held out, and all pairs of rows.

    python -m benchmarks predictions            the report; about a minute of processor time

Two constants are fitted, the shares of peak and of network that are reached (`NAMES`); all others stay at
START, and these two near it where rows hardly know them (fit's `hold`). Three ways to choose the rows that
fix them:

    table          the two rows CALIBRATION, named here; all others are held out
    publications   all rows of the other publications; all that are Megatron-LM's of the other publications
    pairs          every pair of rows in turn, the other rows held out: the distribution, not the best pair

`with_factor` gives each row, besides, the factor of another row of its stack but of another publication
where there is one: what one calibration run of a stack is worth. A row within `CLOSE` counts as predicted.
Calculon (Isaev et al. 2023, SC'23) reports a mean error of 3.65 % over eight rows of the kind of "Kor22"
here; ours beside it. Predictions per second: distinct layouts of one model once the dry runs are there. What
was to be reached (`GOALS`, for the median pair; `LEAST_PER_S`) is printed with whether it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import exp
from statistics import mean, median
from time import process_time

from minitrain.compose.dry_runs import work_of
from minitrain.course.fit import fit, log_ratio
from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.rates import START, Rates
from minitrain.plan.predict.training_run import Published, TrainingRun, published
from minitrain.plan.strategy import Strategy
from minitrain.ranks.tables import aligned

NAMES = ("products", "network")
CALIBRATION = ("Nar21 145.6B", "MegaScale base 1024")
CLOSE = 0.10
GOALS = {  # rows within CLOSE of those of the group, with the median pair
    "Narayanan 2021": 16 / 16,
    "Korthikanti 2022": 8 / 9,
    "MegaScale 2024, base": 8 / 8,
    "all": 0.75,
}
LEAST_PER_S = 10_000
CALCULON = 0.0365


def named(rows: Iterable[Published], names: Sequence[str]) -> list[Published]:
    return [row for row in rows if row.name in names]


def error(row: Published, rates: Rates) -> float:
    """Predicted over published, less 1."""
    return exp(log_ratio(row, work_of, rates)) - 1


def group_of(row: Published) -> str:
    """Its publication; MegaScale's baseline is another software than its own."""
    return f"{row.publication}, base" if " base " in row.name else row.publication


def errors(rows: Iterable[Published], rates: Rates) -> dict[str, list[float]]:
    """By group."""
    found = defaultdict(list)
    for row in rows:
        found[group_of(row)].append(error(row, rates))
    return dict(found)


def close(found: Iterable[float]) -> int:
    return sum(abs(one) <= CLOSE for one in found)


def by_publication(rows: Sequence[Published], stacks="") -> dict[str, tuple[Rates, list[float]]]:
    """Each publication predicted with constants from all the others, or from their rows of some stacks."""
    found = {}
    for name in dict.fromkeys(row.publication for row in rows):
        known = [row for row in rows if row.publication != name and row.run.stack.name.startswith(stacks)]
        rates = fit(known, NAMES, work_of, START)
        found[name] = rates, [error(row, rates) for row in rows if row.publication == name]
    return found


def pairs(rows: Sequence[Published]) -> list[tuple[Rates, dict[str, list[float]]]]:
    """Constants from every two rows, and the errors of all others by group."""
    found = []
    for two in combinations(rows, 2):
        rates = fit(two, NAMES, work_of, START)
        found.append((rates, errors([row for row in rows if row not in two], rates)))
    return found


def shares_of_pairs(found: list[tuple[Rates, dict[str, list[float]]]]) -> dict[str, list[float]]:
    """By group, and of "all": for each pair the share of held-out rows within CLOSE, sorted."""
    shares = defaultdict(list)
    for _, errors in found:
        for group, own in (*errors.items(), ("all", sum(errors.values(), []))):
            if own:
                shares[group].append(close(own) / len(own))
    return {group: sorted(own) for group, own in shares.items()}


def with_factor(rows: Sequence[Published], rates: Rates) -> dict[str, list[float]]:
    """Errors by group where each row has the factor of another row of its stack: the median over all of
    another publication, else over all others of its own."""
    found = defaultdict(list)
    for row in rows:
        others = [other for other in rows if other is not row and other.run.stack == row.run.stack]
        others = [other for other in others if other.publication != row.publication] or others
        own = [exp(log_ratio(row, work_of, rates) - log_ratio(other, work_of, rates)) - 1 for other in others]
        if own:
            found[group_of(row)].append(sorted(own, key=abs)[len(own) // 2])
    return dict(found)


def per_second(rows: Sequence[Published], rates: Rates) -> tuple[int, float]:
    """(how many distinct layouts, predictions a second of this process's own time), time and memory both."""
    model = replace(rows[0].run, stack=named(rows, CALIBRATION)[0].run.stack)
    candidates = []
    for dp, pp, microbatches, zero in product((1, 2, 4, 8, 16), (1, 2, 4, 8), range(8, 256, 8), (0, 1)):
        strategy = Strategy(dp=dp, pp=pp, tp=8, microbatches=microbatches, zero=zero)
        run = TrainingRun(model.model, strategy, model.machine, dp * microbatches, 2048, model.stack)
        candidates.append(run)
    for run in candidates:  # the first of each structure is simulated
        predict(run, work_of, rates).memory
    fresh = [
        replace(run, batch=run.batch + 256 * run.strategy.dp, strategy=more(run.strategy))
        for run in candidates
    ]
    for run in fresh[:: len(fresh) // 16]:
        predict(run, work_of, rates).memory
    start = process_time()
    for run in fresh:
        predict(run, work_of, rates).memory
    return len(fresh), len(fresh) / (process_time() - start)


def more(strategy: Strategy) -> Strategy:
    """256 microbatches more: a layout that was not asked for before."""
    return replace(strategy, microbatches=strategy.microbatches + 256)


def report() -> str:
    rows = published()
    rates = fit(named(rows, CALIBRATION), NAMES, work_of, START)
    lines = [f"constants from {' and '.join(CALIBRATION)}: {rates}", ""]
    table = [("run", "published s", "predicted s", "error", "")]
    for row in rows:
        off, note = error(row, rates), "calibration" if row.name in CALIBRATION else ""
        cells = f"{row.step_s:.2f}", f"{row.step_s * (1 + off):.2f}", f"{off:+.1%}"
        table.append((row.name, *cells, note or "FAILS" * (abs(off) > CLOSE)))
    lines += [aligned(table, left=(0, 4)), ""]
    lines += [summary("held out", errors([r for r in rows if r.name not in CALIBRATION], rates)), ""]
    for title, stacks in (("other publications", ""), ("Megatron-LM of other publications", "megatron-20")):
        others = by_publication(rows, stacks)
        lines += [summary(title, {name: found for name, (_, found) in others.items()}), ""]
    lines += [summary("one row of the stack gives a factor", with_factor(rows, rates)), ""]
    tried = pairs(rows)
    shares = shares_of_pairs(tried)
    table = [
        (f"{len(tried)} pairs: share within {CLOSE:.0%}", "worst", "quarter", "median", "quarter", "best", "")
    ]
    for group, own in shares.items():
        at = [own[round(q * (len(own) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)]
        said = f"{reached(at[2], GOALS[group])}: {GOALS[group]:.0%}" if group in GOALS else ""
        table.append((group, *(f"{share:.0%}" for share in at), said))
    lines += [aligned(table, left=(0, 6)), ""]
    off = [abs(one) for one in errors(rows, rates)["Korthikanti 2022"][:8]]
    said = f"{reached(-mean(off), -CALCULON)}: {CALCULON:.2%}, Calculon's of its own eight"
    lines.append(f"mean error of Korthikanti's eight rows {mean(off):.2%}; {said}")
    count, speed = per_second(rows, rates)
    said = f"{reached(speed, LEAST_PER_S)}: {LEAST_PER_S:,}"
    lines.append(f"{count} layouts, {speed:,.0f} predictions per second of processor time; {said}")
    return "\n".join(lines)


def reached(found: float, goal: float) -> str:
    return "reached" if found >= goal else "NOT REACHED"


def summary(title: str, found: dict[str, list[float]]) -> str:
    table = [(title, "within", "of", "mean error", "median")]
    everything = sum(found.values(), [])
    for group, own in (*found.items(), ("all", everything)):
        off = [abs(one) for one in own]
        table.append((group, str(close(own)), str(len(own)), f"{mean(off):.1%}", f"{median(off):.1%}"))
    return aligned(table, left=(0,))


if __name__ == "__main__":
    print(report())
