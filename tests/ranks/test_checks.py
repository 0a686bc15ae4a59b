"""Nonsense is refused in one line that says what was given and what is allowed, where it would have been a result."""

import math

import pytest

from minitrain.ranks import checks

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (
            checks.require_positive_ints,
            [1, 7, (1, 2), [[3]]],
            [0, -1, 1.0, True, None, "1", 10**9, (1, 0), [[0]]],
        ),
        (checks.require_ints, [0, 5, (0,)], [-1, 0.5, NAN, False, (0, -1), ()]),
        (checks.require_nonnegative, [0, 0.5, 10**300], [-1, NAN, INF, 10**400, None, "", True]),
        (checks.require_positive, [0.5, 3], [0, -1, INF, NAN]),
        (checks.require_fractions, [0, 1, 0.5], [-0.1, 1.1, NAN]),
        (checks.require_text, ["", "word"], [None, 5, ()]),
        (checks.require_device, ["cpu", "cuda:1", "meta"], ["", "nope", "cuda:", None, 5]),
        (checks.require_nonempty, [[1], (0,), {2: 3}], [[], (), "text", 3, None]),
    ],
)
def test_checks_accept_what_they_say_and_name_what_they_refuse(check, good, bad):
    for value in good:
        check(value=value)
    for value in bad:
        with pytest.raises(ValueError, match=r"^value(\[\d\])*=.{1,60}: (use|give) ") as caught:
            check(value=value)
        assert len(str(caught.value)) < 200


def test_the_wrong_entry_is_counted_from_0_and_60_letters_are_shown():
    cases = (((1, 2, 0), "v[2]=0"), ([[1], [3, -4]], "v[1][1]=-4"), ("x" * 58, f"v={'x' * 58!r}"))
    for values, said in cases:
        with pytest.raises(ValueError) as caught:
            checks.require_positive_ints(v=values)
        assert str(caught.value).split(":")[0] == said
    with pytest.raises(ValueError, match=r"^v='x{56}\.\.\.: "):
        checks.require_positive_ints(v="x" * 59)


def test_one_of_names_all_that_are_allowed():
    checks.require_one_of(("a", 1), value="a")
    for wrong in ("b", True, None):
        with pytest.raises(ValueError, match=r": use a, 1$"):
            checks.require_one_of(("a", 1), value=wrong)
