"""The numbers that a report prints: do they fit, which one does not, and what must another have been?

    devices = tp · cp · pp · dp       tokens = steps · batch · length       rate = mfu · peak       and so on

    suspects(dict(devices="96", tp="2", pp="4", dp="13"))        [{"devices": (104, 104)}, {"dp": (12, 12)}]

Every relation is an equation of two products, so in logarithms a linear one. A printed number is an interval,
half a unit of its last digit to each side; what is not printed may be anything. A report fits if some values
in its intervals fulfil all RELATIONS: a linear program. If none do, `suspects` are the smallest sets of
numbers without which some do, each with the values that would fit in their place. Where two relations are
broken, the one number that stands in both is the suspect; of one relation arithmetic cannot tell the factors
apart.

reports.tsv has what papers, model cards and the survey printed. Reiter 1987, A theory of diagnosis from first
principles, Artificial Intelligence 32(1): minimal diagnoses. By scipy's HiGHS; no torch.
"""

import csv
import math
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

from minitrain.ranks.checks import require_one_of

TABLE = Path(__file__).with_name("reports.tsv")
RELATIONS = """devices = tp cp pp dp
devices = nodes per_node
devices = cubes cube_devices
per_node = packages dies
layers = pp stage_layers
heads = tp rank_heads
batch = dp rows
rows = microbatch microbatches
batch_tokens = batch length
tokens = steps batch_tokens
run_s = steps step_s
run_s = 86400 days
batch_tokens = tokens_per_s step_s
tokens = tokens_per_s run_s
devices run_s = 3600 gpu_hours
gpu_hours = hours_per_token tokens
cost = price gpu_hours
flops_per_token = flops_per_parameter parameters
devices rate = tokens_per_s flops_per_token
devices rate run_s = tokens flops_per_token
rate = mfu peak
hardware_rate = again rate
hardware_rate = hfu peak
total_rate = devices rate
node_rate = per_node peak
node_rate = packages package_rate
node_bytes = per_node device_bytes
state_bytes devices = bytes_per_parameter parameters
tokens = tokens_per_parameter parameters
text_bytes = bytes_per_token tokens
sram_bytes = cores core_bytes"""
WHOLE = """devices tp cp pp dp nodes per_node cubes cube_devices packages dies layers stage_layers
    heads rank_heads batch rows microbatch microbatches length steps flops_per_parameter
    bytes_per_parameter bytes_per_token""".split()
ONES = dict.fromkeys(("tp", "cp", "pp"), "1")  # of who says nothing of an axis
QUANTITIES = sorted({word for word in RELATIONS.split() if word[0].isalpha()})
CONVENTIONS = "again", "flops_per_parameter"  # how something is counted: never wrong
MOST = 3  # numbers that are wrong together
Interval = tuple[float, float]


@cache
def reports() -> dict[str, dict[str, str]]:
    """{report: {quantity: as printed}} of reports.tsv."""
    found: dict[str, dict[str, str]] = {}
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines, delimiter="\t"):
        found.setdefault(row["report"], {})[row["quantity"]] = row["printed"]
    return found


def interval(printed: str, whole: bool = False) -> Interval:
    """ "57" is 56.5 to 57.5, "3.15e6" 3.145e6 to 3.155e6, "57 + 1" their sum, "38..41" says it itself; of a
    `whole` number all digits count. ValueError: no positive number."""
    try:
        if ".." in printed:
            low, high = map(float, printed.split(".."))
        else:
            parts = [part.strip().replace(",", "") for part in printed.split("+")]
            value = sum(map(float, parts))
            half = 0.0 if whole else sum(map(_half_a_unit, parts))
            low, high = value - half, value + half
        if 0 < low <= high < math.inf:
            return low, high
    except (TypeError, ValueError, AttributeError):
        pass
    raise ValueError(
        f"printed = {printed!r}; use a positive number as text: '57', '3.15e6', '2 + 1', '38..41'"
    )


def _half_a_unit(digits: str) -> float:
    mantissa, _, exponent = digits.partition("e")
    return 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def implied(printed: Mapping[str, str], quantity: str) -> Interval | None:
    """From what the others say, what `quantity` is at least and at most; None: they do not fit together."""
    require_one_of(QUANTITIES, quantity=quantity)
    return _range(_intervals(printed), frozenset([quantity]), quantity)


def suspects(printed: Mapping[str, str]) -> list[dict[str, Interval]]:
    """The smallest sets of printed numbers without which the others fit, with what would fit in their place;
    [{}] if all do. A whole number is suspected only if a whole number would fit."""
    known = _intervals(printed)
    if _range(known, frozenset(), QUANTITIES[0]):
        return [{}]
    doubtful = [name for name in printed if name not in CONVENTIONS]
    for size in range(1, MOST + 1):
        tried = map(frozenset, combinations(doubtful, size))
        found = [{name: _range(known, some, name) for name in sorted(some)} for some in tried]
        if found := [fits for fits in found if all(fits.values())]:
            return found
    raise ValueError(
        f"more than {MOST} of {', '.join(printed)} would have to be wrong; look at fewer at once"
    )


def _intervals(printed: Mapping[str, str]) -> dict[str, Interval]:
    require_one_of(QUANTITIES, **{f"quantity {number}": name for number, name in enumerate(printed)})
    return {name: interval(text, name in WHOLE) for name, text in (ONES | dict(printed)).items()}


def _range(known: Mapping[str, Interval], free: frozenset, name: str) -> Interval | None:
    """Least and most of `name` where all relations hold and all but `free` are within what is known."""
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise ModuleNotFoundError("reports need scipy: pip install 'minitrain[course]'") from None
    bounds = [known[one] if one in known and one not in free else (1e-30, 1e30) for one in QUANTITIES]
    bounds = [(math.log(low), math.log(high)) for low, high in bounds]
    rows, sums = _equations()
    ends = []
    for sign in (1, -1):
        goal = [sign * (one == name) for one in QUANTITIES]
        found = linprog(goal, A_eq=rows, b_eq=sums, bounds=bounds)
        if found.status == 2:  # infeasible
            return None
        assert found.success, found.message
        ends.append(math.exp(sign * found.fun))
    low, high = ends
    if name in WHOLE and name in free:
        low, high = math.ceil(low * (1 - 1e-6)), math.floor(high * (1 + 1e-6))
    return (low, high) if low <= high else None


@cache
def _equations() -> tuple[list[list[float]], list[float]]:
    rows, sums = [], []
    for relation in RELATIONS.splitlines():
        row, total = dict.fromkeys(QUANTITIES, 0.0), 0.0
        for sign, side in zip((1, -1), relation.split("=")):
            for word in side.split():
                if word in row:
                    row[word] += sign
                else:
                    total -= sign * math.log(float(word))
        rows.append([*row.values()])
        sums.append(total)
    return rows, sums
