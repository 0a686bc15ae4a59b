"""One judge for all tests of this folder: its server takes as long to start as importing torch, twice."""

import pytest

from minitrain.course.grading.judge import Judge


@pytest.fixture(scope="session")
def judge():
    with Judge() as judge:
        yield judge
