"""Of every chapter: stubs get nothing, the solution everything, each wrong solution is caught by name, and
what knows nothing of its task or walks around it earns nothing.

Here one wrong solution of each task, and one answer that knows nothing;
`python -m minitrain.course.exercises prove` and `attack` try all."""

from dataclasses import replace

import pytest

from minitrain.course import exercises
from minitrain.course.grading import book

CHAPTERS = {number: book.chapter(number) for number in book.chapters()}
FIRST = CHAPTERS["00"]


@pytest.mark.parametrize("number", CHAPTERS)
def test_stubs_get_nothing_solutions_everything_and_wrong_ones_are_caught_by_name(judge, number):
    assert exercises.prove(CHAPTERS[number], judge, once=True) == []


@pytest.mark.parametrize("number", CHAPTERS)
def test_answers_that_know_nothing_of_their_task_earn_nothing(judge, number):
    tried, faults = exercises.attack(CHAPTERS[number], judge, every=10)
    assert faults == [] and tried >= len(CHAPTERS[number].tasks)


def test_sixty_walk_arounds_are_among_the_wrong_solutions():
    kinds = [cell.attributes.get("around", "") for of in CHAPTERS.values() for cell in of.wrong]
    assert len(list(filter(None, kinds))) >= 60
    assert {*"import redefine subclass frames files channel constants empty half".split()} <= {*kinds}


def test_prove_sees_a_check_that_catches_nothing(judge):
    """With blind checks, every wrong solution is reported; and so is a broken solution."""
    last = [c for c in FIRST.cells if c.role in book.LOCKED or c.name.startswith("relay_bytes")]
    blind = [replace(cell, source="# Blind\n") if cell.role == "check" else cell for cell in last]
    only = book.Chapter("00", FIRST.path, blind)
    faults = exercises.prove(only, judge)
    assert len(faults) == 1 + sum(cell.name == "relay_bytes" for cell in FIRST.wrong)
    tried, faults = exercises.attack(only, judge)
    assert tried == 10 and len(faults) == 10, "blind checks give points to everything, and attack says so"
    begin = "### BEGIN SOLUTION\n"
    broken = [replace(cell, source=cell.source.replace(begin, f"{begin}    return 0\n")) for cell in last]
    faults = exercises.prove(book.Chapter("00", FIRST.path, broken), judge)
    told = "the solution fails relay_bytes-four: bytes of each rank: a list of 4 is wanted, not a value"
    assert told in faults[0]
