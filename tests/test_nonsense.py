"""Nonsense is answered in one line by every public function (tests/nonsense.py), and the sweep sees what it should."""

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests import nonsense


def test_no_public_function_answers_nonsense_with_nonsense():
    """In a process of its own, whose memory is limited; some 20 seconds of the processor."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.nonsense"]
    swept = subprocess.run(command, cwd=nonsense.CALLS.parents[1], capture_output=True, text=True)
    assert swept.returncode == 0, swept.stdout + swept.stderr[-2000:]
    functions, calls = map(int, swept.stdout.split(" calls")[0].replace(" functions,", "").split())
    assert functions > 450 and calls > 9000


def test_what_is_left_out_is_there():
    every = [name for name, _ in nonsense.functions(inside=())]
    for left_out in " ".join(nonsense.INSIDE.values()).split():
        assert any(name.startswith(left_out) for name in every), left_out


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


@pytest.mark.parametrize(
    "function, value, wrong",
    [
        (divides, 0, "ZeroDivisionError"),
        (counts_down, -1, "no answer within a second"),
        (hides, math.nan, "a result that is NaN"),
        (hides, -1, "a result that is negative"),
        (says, (), "ValueError of several lines or none"),
        (divides, 2, None),
        (divides, "nope", None),
    ],
)
def test_a_fault_is_seen(function, value, wrong):
    (name,) = nonsense.plain_parameters(function)
    found = nonsense.fault("f", function, {name: value}, set())
    assert found is wrong if wrong is None else found.startswith(wrong)
