"""One judge for all tests of this folder, and one without walls: a server takes as long to start as importing torch, twice."""

import pytest

from minitrain.course.grading.judge import Judge


@pytest.fixture(scope="session")
def judge():
    with Judge() as judge:
        yield judge


@pytest.fixture(scope="session")
def bare():
    """The same without walls, for what walls alone can stop."""
    with Judge(walls=False) as judge:
        judge.start()
        yield judge
