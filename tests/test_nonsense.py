"""Nonsense is answered in one line by every public function (tests/nonsense.py), and the sweep sees what it should."""

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests import nonsense


def test_no_public_function_answers_nonsense_with_nonsense():
    """In a process of its own, whose memory is limited; some 40 seconds of the processor. Each is called or left out
    for a reason: a new one that hints do not tell how to call ends the sweep with 1 until nonsense.tsv does."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.nonsense"]
    swept = subprocess.run(command, cwd=nonsense.CALLS.parents[1], capture_output=True, text=True)
    assert swept.returncode == 0, swept.stdout + swept.stderr[-2000:]
    first, *left_out = swept.stdout.splitlines()
    public, called, calls, faults = map(int, re.findall(r"\d+", first)[:4])
    assert called > 300 and calls > 4_000 and faults == 0
    assert public == called + sum(int(line.split()[0]) for line in left_out)
    assert not any(nonsense.NOTHING_SAID in line for line in left_out)


def test_what_is_left_out_is_there():
    every = nonsense.functions()
    for name in " ".join(nonsense.INSIDE.values()).split():
        assert name in every and nonsense.left_out(name, every[name]).startswith("inside: "), name
    for room in " ".join(nonsense.ELSEWHERE).split():
        assert any(name.startswith(f"{room}.") for name in every), room
    assert nonsense.written().keys() <= every.keys()


def divides(parts: int) -> float:
    return 1 / parts


def counts_down(rest: int) -> int:
    while rest:
        rest -= 1
    return rest


def hides(share: float) -> float:
    return share


def says(sizes: Sequence[int]) -> int:
    if not sizes:
        raise ValueError("no\nsizes")
    return len(sizes)


def gives(parts: int) -> Iterator[float]:
    yield 1 / parts


@contextlib.contextmanager
def within(parts: int) -> Iterator[None]:
    yield 1 / parts


@pytest.mark.parametrize(
    "function, value, wrong",
    [
        (divides, 0, "ZeroDivisionError"),
        (counts_down, -1, "no answer within a second"),
        (hides, math.nan, "a result that is NaN"),
        (hides, -1, "a result that is negative"),
        (says, (), "ValueError of several lines or none"),
        (gives, 0, "ZeroDivisionError"),
        (within, 0, "ZeroDivisionError"),
        (divides, 2, None),
        (divides, "nope", None),
    ],
)
def test_a_fault_is_seen(function, value, wrong):
    (name,) = nonsense.plain_parameters(function)
    found = nonsense.fault("f", function, {name: value}, set())
    assert found is wrong if wrong is None else found.startswith(wrong)


def unsaid(what, parts=2):
    return what / parts


def test_doors_are_what_readers_take_and_what_takes_a_group():
    source = (
        "from minitrain.plan import fleet as f\nfrom minitrain.moe.router import route\nf.best(3)\nroute(x)"
    )
    assert nonsense.names_from(source) == {"plan.fleet", "plan.fleet.best", "moe.router.route"}
    assert nonsense.is_door("nobody.calls", lambda x, group: x)
    assert nonsense.left_out("nobody.calls", unsaid).startswith("inside: no chapter")
