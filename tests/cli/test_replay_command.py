"""What `minitrain replay` takes when nothing is said, and what it says of numbers that are known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from minitrain.cli.replay_command import memory, rate_for, step_for, strategy_for, utilisation
from minitrain.model.config import GPTConfig, presets
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.accounting import flops_per_token
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy


def test_what_is_not_given_is_what_large_runs_use():
    """64 ranks, or the fewest more that the axes divide; ZeRO-3, with a pipeline ZeRO-1 and 4 pp microbatches."""
    bf16 = dict(precision="bfloat16")
    assert strategy_for({}, None) == Strategy(dp=64, zero=3, **bf16)
    assert strategy_for({"tp": 8}, None) == Strategy(dp=8, tp=8, zero=3, **bf16)
    assert strategy_for({"tp": 8, "pp": 3}, None) == Strategy(
        dp=2, tp=8, pp=3, zero=1, microbatches=12, **bf16
    )
    assert strategy_for({"tp": 8, "pp": 16}, None).dp == 1, "128 ranks are more than 64"
    assert strategy_for({"cp": 2}, 6) == Strategy(dp=3, cp=2, zero=3, **bf16)
    given = dict(dp=2, pp=2, zero=0, microbatches=6, precision="float32")
    assert strategy_for(given, None) == strategy_for(given, 4) == Strategy(**given)
    with pytest.raises(ValueError, match="^ranks=7 is no multiple of pp x cp x tp = 2; use 2, 4, ..$"):
        strategy_for({"tp": 2}, 7)
    with pytest.raises(ValueError, match="^ranks=8, and dp x pp x cp x tp is 4; leave one of them out$"):
        strategy_for({"tp": 2, "dp": 2}, 8)
    with pytest.raises(ValueError, match="ranks=0"):
        strategy_for({}, 0)


def test_a_row_per_data_rank_and_microbatch_and_8192_tokens_at_most():
    long = GPTConfig(max_positions=10_000)
    sizes = lambda *given: (step_for(*given).batch_size, step_for(*given).length)
    assert sizes(long, Strategy(dp=3, microbatches=4, pp=2), None, None) == (12, 8192)
    assert sizes(replace(long, max_positions=100), Strategy(), None, None) == (1, 100)
    assert sizes(long, Strategy(dp=3), 9, 7) == (9, 7)
    with pytest.raises(ValueError, match="batch=0"):
        step_for(long, Strategy(), 0, None)


def test_the_rate_of_16_bits_is_that_of_the_others_where_a_machine_has_none():
    bf16, fp32 = Strategy(precision="bfloat16"), Strategy(precision="float32")
    assert rate_for(machine("v100"), bf16) == "float16"
    assert rate_for(machine("a100"), bf16) is rate_for(machine("v100"), fp32) is None


def test_the_fullest_rank_by_kind_beside_what_a_device_has():
    ledgers = {
        3: SimpleNamespace(peak_bytes=5e9, peak_by_kind={"parameters": 5e9}),
        1: SimpleNamespace(
            peak_bytes=30e9, peak_by_kind={"activations": 28.96e9, "buffers": 0, "gradients": 1.04e9}
        ),
    }
    said = "peak memory 30.0 GB of 34 GB on rank 1 (activations 29.0, gradients 1.0)"
    assert memory(ledgers, machine("v100")) == said
    ledgers[1].peak_bytes = 31.73 * 2**30
    assert "FIT" not in memory(ledgers, machine("v100")), "just as much as there is"
    ledgers[1].peak_bytes += 1
    (_, line) = memory(ledgers, machine("v100")).splitlines()
    assert line.startswith("DOES NOT FIT: cut more (--zero --tp") and "--microbatches" in line


def test_the_utilisation_is_of_a_device_and_of_the_dtype_that_is_computed_in():
    """4 rows of 100 tokens on 8 ranks in 2 s: 25 tokens per second and device."""
    asked, config = [], presets["tiny"]
    timeline = SimpleNamespace(step_s=2.0, mfu=lambda flops, dtype: asked.append((flops, dtype)) or 0.456)
    given = config, Strategy(dp=8, precision="bfloat16"), Hyperparameters(batch_size=4, length=100)
    said = utilisation(timeline, *given, replace(machine("v100"), compute_efficiency=0.7))
    assert said == (
        "MFU 45.6% (v100, FLOPs 70 % of its datasheet; a causal attention counted as a triangle), "
        "25 tokens/s per device"
    )
    utilisation(timeline, *given, machine("h100"))
    flops = 400 * flops_per_token(config, 100) / 8
    assert asked == [(flops, "float16"), (flops, "bfloat16")]
