"""Of every chapter: stubs get nothing, the solution everything, and each wrong solution is caught by name."""

import pytest

from minitrain.course import exercises
from minitrain.course.grading import book
from minitrain.course.grading.judge import Judge

CHAPTERS = {number: book.chapter(number) for number in book.chapters()}
FIRST = CHAPTERS["00"]


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        yield judge


@pytest.mark.parametrize("number", CHAPTERS)
def test_stubs_get_nothing_solutions_everything_and_wrong_ones_are_caught_by_name(judge, number):
    assert exercises.prove(CHAPTERS[number], judge) == []


def test_prove_sees_a_check_that_catches_nothing(judge):
    """The control of the proof: with blind checks, every wrong solution is reported, and so is a broken
    solution.
    """
    last = [cell for cell in FIRST.cells if cell.role == "given" or cell.name.startswith("relay_bytes")]
    blind = [
        book.Cell("check", cell.name, "# Blind\n", cell.attributes) if cell.role == "check" else cell
        for cell in last
    ]
    faults = exercises.prove(book.Chapter("00", FIRST.path, blind), judge)
    assert len(faults) == 1 + sum(cell.name == "relay_bytes" for cell in FIRST.wrong)
    zero = "def relay_bytes(ranks, numel): return 0"
    broken = [book.Cell("answer", cell.name, zero) if cell.role == "answer" else cell for cell in last]
    faults = exercises.prove(book.Chapter("00", FIRST.path, broken), judge)
    assert (
        "the solution fails relay_bytes-four: bytes of each rank: a list of 4 is wanted, not a value"
        in faults[0]
    )
