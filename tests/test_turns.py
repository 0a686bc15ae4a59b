"""Long files are shared out test by test, all others as a whole."""

from pathlib import Path

import pytest

from tests.turns import ALONE, scope_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", ALONE)
def test_tests_of_a_long_file_go_alone_and_share_nothing_made_for_the_file(file):
    source = (ROOT / file).read_text()
    assert 'scope="module"' not in source and "functools.cache" not in source
    assert scope_of(f"{file}::test_a[1]") != scope_of(f"{file}::test_a[2]") != scope_of(f"{file}::test_b")


@pytest.mark.parametrize("file", ["tests/cli/test_cli.py", "notebooks/00_start_here.ipynb"])
def test_all_others_stay_together(file):
    assert scope_of(f"{file}::test_a") == scope_of(f"{file}::Cell 1") == file


def test_the_scheduler_asks_for_these_scopes():
    from tests.turns import Turns

    for file in ("tests/cli/test_cli.py", *ALONE):
        assert Turns._split_scope(None, f"{file}::test_a") == scope_of(f"{file}::test_a")
