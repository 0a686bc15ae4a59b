"""Nonsense is refused in one line that says what was given and what is allowed, where it would have been a result."""

import math
import re

import pytest

from minitrain.context.layout import contiguous, striped, zigzag
from minitrain.plan.accounting.compute import layer_forward_flops, megatron_flops, mfu, training_days
from minitrain.plan.accounting.memory_formulas import (
    activation_bytes,
    checkpoint_bytes,
    model_state_bytes,
    zero_bytes,
)
from minitrain.plan.accounting.traffic import (
    crossover_tokens,
    tensor_parallel_bytes_per_step,
    text_bytes,
    token_bytes,
    zero3_bytes_per_step,
)
from minitrain.ranks import checks

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "call, name",
    [
        *((lambda layout=layout: layout(9, 4, 8), "rank=9") for layout in (contiguous, zigzag, striped)),
        *((lambda layout=layout: layout(-1, 4, 8), "rank=-1") for layout in (contiguous, zigzag, striped)),
        *((lambda layout=layout: layout(0, 0, 8), "ranks=0") for layout in (contiguous, zigzag, striped)),
        *((lambda layout=layout: layout(0, 2, 0), "T=0") for layout in (contiguous, zigzag, striped)),
        (lambda: zigzag(0, 1.5, 8), "ranks=1.5"),
        (lambda: zigzag(0, 2, "8"), "length='8'"),
        (lambda: model_state_bytes(-5), "parameters=-5"),
        (lambda: checkpoint_bytes(NAN), "parameters=nan"),
        (lambda: zero_bytes(10, 0, 1), "ranks=0"),
        (lambda: zero_bytes(10, 2.5, 1), "ranks=2.5"),
        (lambda: zero_bytes(INF, 2, 1), "parameters=inf"),
        (lambda: activation_bytes(2048, 1, 1024, 16, tensor_parallel=3), "tensor_parallel=3"),
        (lambda: activation_bytes(2048, 1, 1000, 16), "width=1000, heads=16"),
        (lambda: activation_bytes(0, 1, 1024, 16), "length=0"),
        (lambda: mfu(1e6, 1e9, 0, 1e15), "devices=0"),
        (lambda: mfu(1e6, 1e9, 8, NAN), "peak_flops_per_s=nan"),
        (lambda: training_days(1e9, 1e12, 8, 0), "flops_per_s=0"),
        (lambda: layer_forward_flops(1, -2, 8), "length=-2"),
        (lambda: megatron_flops(1, 8, 0, 8, 8), "num_layers=0"),
        (lambda: token_bytes(0), "vocab=0"),
        (lambda: text_bytes(-1, 2), "tokens=-1"),
        (lambda: zero3_bytes_per_step(1e9, 0), "devices=0"),
        (lambda: tensor_parallel_bytes_per_step(10, 8, 2, 0), "tensor_parallel=0"),
        (lambda: crossover_tokens(1e9, 8, 2, 1, 4), "tensor_parallel=1"),
    ],
)
def test_nonsense_is_refused_by_name(call, name):
    with pytest.raises(ValueError, match=rf"(^|[ :]){re.escape(name)}") as caught:
        call()
    assert "\n" not in str(caught.value)


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
        (checks.require_finite, [-3, 0.0], [INF, NAN, "x"]),
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
    for values, said in (
        ((1, 2, 0), "v[2]=0"),
        ([[1], [3, -4]], "v[1][1]=-4"),
        ("x" * 58, f"v={'x' * 58!r}"),
    ):
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
