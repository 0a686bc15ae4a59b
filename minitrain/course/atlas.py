"""The atlas: every system the course covers, the idea in one line, and the test that proves it.

`atlas.tsv` has one row a system. A row enters only with a test of its own (`tests/test_x.py::test_y`); the
test suite fails if a named test is missing or did not run. Kinds: RUN runs on real ranks or tensors here, SIM
a simulation, MODEL a formula checked, CASE a published run recomputed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

KINDS = ("RUN", "SIM", "MODEL", "CASE")


@dataclass(frozen=True)
class Row:
    id: str
    name: str
    idea: str
    kind: str
    module: str
    chapter: str
    test: str


def rows() -> list[Row]:
    """All rows in file order. Raises ValueError on a line that has not exactly the seven columns."""
    path = Path(__file__).with_name("atlas.tsv")
    table = list(csv.reader(path.read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    header = [field.name for field in fields(Row)]
    if table[0] != header:
        raise ValueError(f"{path.name} starts with {table[0]}, expected {header}")
    for number, line in enumerate(table[1:], start=2):
        if len(line) != len(header):
            raise ValueError(f"{path.name} line {number} has {len(line)} columns, expected {len(header)}")
    return [Row(*line) for line in table[1:]]


def search(words: str = "") -> list[Row]:
    """Rows in which every word occurs (any column, any case); all rows when there is no word."""
    wanted = words.lower().split()
    return [row for row in rows() if all(word in " ".join(vars(row).values()).lower() for word in wanted)]
