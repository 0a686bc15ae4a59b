"""The atlas: every system the course covers, the idea in one line, and the test that proves it.

`atlas.tsv` has one row a system. A row enters only with a test of its own (`tests/test_x.py::test_y`); the
test suite fails if a named test is missing or did not run. Kinds: RUN runs here, SIM a simulation, MODEL a
formula checked, CASE a published run recomputed. `shown` says on what the test shows it (SHOWN); `differs`,
in a few words, where our figure or construction is not the paper's ("-": nowhere).
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

KINDS = ("RUN", "SIM", "MODEL", "CASE")
SHOWN = {"ranks": "on ranks", "tensors": "on tensors in one process"}
SHOWN |= {"simulated": "simulated", "computed": "computed"}
NOWHERE = (4, 0)
# The layers of a training system, from below, and what minitrain has of each (systems/x goes with x).
LAYERS = dict(
    infrastructure="ranks network cluster simulate communication data uneven",
    operators="model attention precision kernels",
    parallelism="data_parallel tensor_parallel pipeline context moe plan annotate compose",
    memory="memory checkpoint",
    operation="faults rlhf course cli",
)


@dataclass(frozen=True)
class Row:
    id: str
    name: str
    idea: str
    kind: str
    shown: str
    module: str
    chapter: str
    test: str
    differs: str


def rows() -> list[Row]:
    """All rows in file order. Raises ValueError on a line that has not exactly the nine columns."""
    path = Path(__file__).with_name("atlas.tsv")
    table = list(csv.reader(path.read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    header = [field.name for field in fields(Row)]
    if table[0] != header:
        raise ValueError(f"{path.name} starts with {table[0]}, expected {header}")
    for number, line in enumerate(table[1:], start=2):
        if len(line) != len(header):
            raise ValueError(f"{path.name} line {number} has {len(line)} columns, expected {len(header)}")
    return [Row(*line) for line in table[1:]]


def search(query: str = "") -> list[Row]:
    """Rows in which every word occurs, best first; all rows in file order when there is no word.

    A whole word counts more than the beginning of one, the name more than the idea, the idea more than the
    rest; letters inside a word come last ("ring" in "string").
    """
    wanted = query.lower().split()
    ranked = [([_rank(word, row) for word in wanted], row) for row in rows()]
    found = [(sorted(ranks, reverse=True), row) for ranks, row in ranked if NOWHERE not in ranks]
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def near(query: str) -> str:
    """Why a search found nothing: words close to one that no row has, or how often each occurs alone."""
    wanted = query.lower().split()
    counts = {word: len(search(word)) for word in wanted}
    if all(counts.values()):
        return "each word occurs, but not together: " + ", ".join(f"{w} {n}" for w, n in counts.items())
    known = [word for word in named() if len(word) > 2]
    told = []
    for word in (word for word in wanted if not counts[word]):
        alike = get_close_matches(word, known, cutoff=0.6)
        told.append(f"nothing has {word!r}" + (f"; near it are {', '.join(alike)}" if alike else ""))
    return "; ".join(told)


def named() -> list[str]:
    """Words of names and ideas, in small letters."""
    return sorted({*re.findall(r"[a-z0-9]+", " ".join(f"{row.name} {row.idea}" for row in rows()).lower())})


def _rank(word: str, row: Row) -> tuple[int, int]:
    """(where, how) the word occurs in the row; smaller is better."""
    rest = f"{row.module} {row.test} {row.kind} {row.chapter}"
    texts = [f"{row.name} {row.id}".lower(), row.idea.lower(), rest.lower()]
    start = rf"(?<![a-z0-9]){re.escape(word)}"
    for place, text in enumerate(texts):
        if re.search(start, text):
            return place, not re.search(rf"{start}(?![a-z0-9])", text)
    return (3, 0) if any(word in text for text in texts) else NOWHERE
