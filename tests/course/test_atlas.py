"""A row enters the atlas only with a test that exists; conftest.py checks that it also ran."""

import ast
import re
from pathlib import Path

import pytest

from minitrain.course import atlas

ROOT = Path(__file__).parents[2]


def test_rows_are_complete_and_unique():
    rows = atlas.rows()
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert all(vars(row).values()), f"{row.id} has an empty column"
        assert row.shown in atlas.SHOWN, f"{row.id}: shown {row.shown} is not one of {list(atlas.SHOWN)}"
        assert row.kind in atlas.KINDS, f"{row.id}: kind {row.kind} is not one of {atlas.KINDS}"
        assert len(row.chapter) == 2 and row.chapter.isdigit(), f"{row.id}: chapter {row.chapter}"


@pytest.mark.parametrize("row", atlas.rows(), ids=lambda row: row.id)
def test_module_and_test_exist(row):
    assert (ROOT / row.module).exists(), f"{row.id} names {row.module}, which is not there"
    file, _, name = row.test.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name in functions, f"{row.id} names {row.test}, which is not there"


def test_no_two_systems_share_a_test():
    tests = [row.test for row in atlas.rows()]
    assert len(set(tests)) == len(tests), sorted(test for test in tests if tests.count(test) > 1)


def test_search_needs_every_word():
    assert len(atlas.search()) == len(atlas.rows())
    assert atlas.search("zzz-not-there") == []


def row(name="", idea="", module="", test="") -> atlas.Row:
    return atlas.Row("x", name, idea, "RUN", "ranks", module, "00", test, "-")


def test_words_come_before_beginnings_and_both_before_letters_inside(monkeypatch):
    order = [
        row(name="Ring attention"),
        row(name="RingMaster"),
        row(idea="goes round a ring"),
        row(idea="goes through rings"),
        row(module="context/ring.py"),
        row(name="String sharing"),
    ]
    monkeypatch.setattr(atlas, "rows", lambda: [*reversed(order), row(name="tree")])
    assert atlas.search("ring") == order and atlas.search("RING") == order
    assert atlas.search("ring round") == [order[2]]


def test_search_ranks_real_rows_by_name_first():
    names = [found.name.lower() for found in atlas.search("ring")]
    in_name = [re.search(r"\bring", name) is not None for name in names]
    assert in_name == sorted(in_name, reverse=True) and sum(in_name) >= 3
