"""What an axis of a mesh sends: formulas beside the ledger of dry runs, to the byte, on every stage."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod

import pytest

from minitrain.compose.parallelize import parallelize
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.accounting import parameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.systems.plan.mesh_traffic import layer_parameters, sent_by_axis
from tests.parallel import Traffic

ROWS, LENGTH = 16, 32
LLAMA = GPTConfig(
    vocab_size=64, d_model=32, num_layers=4, num_heads=8, num_kv_heads=4, d_ff=64, max_positions=64
)
OLD = dict(norm="layer", positions="learned", activation="gelu", bias=True, tied=True, embedding_norm=True)
GPT2 = GPTConfig(vocab_size=64, d_model=32, num_layers=4, num_heads=8, max_positions=64, **OLD)
MIXED = replace(LLAMA, experts=ExpertsConfig(8, 2, "balanced", expert_width=16, expert_every=2))
SHARED = replace(MIXED, experts=replace(MIXED.experts, shared_experts=2, dense_first=1, expert_every=1))
pipeline = partial(Strategy, pp=2, microbatches=4, precision="bfloat16")
CASES = [
    (LLAMA, pipeline(dp=2, tp=2, zero=1, sequence_parallel=True)),
    (LLAMA, pipeline(dp=4, zero=3, order="pp-tp-dp-cp")),
    (LLAMA, Strategy(dp=2, tp=2, pp=2, cp=2, precision="float64", microbatches=2)),
    (LLAMA, Strategy(dp=2, cp=4, tp=2, zero=1, precision="bfloat16")),
    (GPT2, pipeline(dp=2, tp=2, zero=0, chunks=2, schedule="interleaved")),
    (GPT2, pipeline(dp=2, tp=4, zero=1, sequence_parallel=True, precision="bfloat16_main_grads")),
    (GPT2, pipeline(dp=2, cp=2, zero=2, core="ulysses")),
    (MIXED, Strategy(dp=4, ep=4, precision="bfloat16")),
    (MIXED, Strategy(dp=4, ep=2, zero=3, precision="bfloat16")), (SHARED, pipeline(dp=4, ep=4)),
    (replace(GPT2, dropout=0.1), pipeline(dp=2, tp=2, recompute="full")),
]  # fmt: skip


def step(config, strategy):
    run = parallelize(config, strategy, partial(AdamW, lr=1e-2))
    draw = partial(random_tokens, batch_size=ROWS, length=LENGTH, vocab=config.vocab_size)
    batch = run.batch(Rows(draw, ROWS, LENGTH), 0)
    with Traffic() as ledger:
        run.step(batch)
    sent = Counter()
    for event in ledger.events:
        if axis := getattr(event, "axis", ""):
            sent["dp" if axis.startswith("dp") or axis == "edp" else axis] += event.sent_bytes
    return {axis: bytes for axis, bytes in sent.items() if bytes}


def formulas_are_the_ledgers_bytes(config, strategy):
    stride = prod(getattr(strategy, axis) for axis in strategy.order.partition("pp")[2].split("-")[1:])
    for stage in range(strategy.pp):
        sent = dryrun.run(step, config, strategy, rank=stage * stride, ranks=strategy.ranks)
        assert sent_by_axis(config, strategy, ROWS, LENGTH, stage) == sent


def test_traffic_per_parallelism():
    """The survey's section 7 for a model of 102 billion parameters on 8 x 4 x 4 ranks: each formula, and their order.
    In small models the formulas give the bytes of its ledger."""
    for case in CASES:
        formulas_are_the_ledgers_bytes(*case)
    h, layers, t, d, p, m, s = 10_240, 80, 8, 4, 4, 32, 4096
    heads = dict(num_heads=80, num_kv_heads=8, d_ff=33_280, max_positions=4096)
    config = GPTConfig(vocab_size=92_544, d_model=h, num_layers=layers, **heads)
    assert 101e9 < parameters(config) < 103e9
    strategy = Strategy(dp=d, pp=p, tp=t, microbatches=m, zero=1, precision="bfloat16", order="pp-dp-cp-tp")
    sent = sent_by_axis(config, strategy, rows=d * m, length=s, stage=1)
    assert sent["tp"] == Fraction(8 * (t - 1), t) * s * h * 2 * layers // p * m
    assert sent["pp"] == 4 * m * 1 * s * h
    cut, whole, _ = layer_parameters(config, 1)
    held = layers // p * (Fraction(cut, t) + whole)
    assert sent["dp"] == Fraction(2 * (d - 1), d) * held * 2
    assert abs(held / Fraction(parameters(config), t * p) - 1) < 0.02  # P / (t p), but for the ends
    assert sent["tp"] > sent["dp"] and 56 < m * sent["dp"] / sent["pp"] < 57
    # tp and pp grow with the number of microbatches and dp does not: the order of the last two is the batch's.
    twice = sent_by_axis(config, replace(strategy, microbatches=2 * m), rows=2 * d * m, length=s, stage=1)
    assert twice["tp"] > twice["pp"] > twice["dp"] == sent["dp"] and twice["pp"] == 2 * sent["pp"]


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(zero="III", dp=2, node=2), "hybrid=True has no formula here; use False, or a dry run"),
        (dict(tp=2, overlap=True), "overlap=True has no formula"),
        (dict(cp=2, core="gathered"), "core='gathered' has no formula here; use 'ring'"),
        (dict(recompute="full", zero=3), "recompute='full' has no formula here; use 'none'"),
        (dict(tp=8), "tp=8 ranks share 4 K/V heads: no formula"),
        (dict(pp=2, microbatches=4, schedule="dualpipe"), "schedule='dualpipe' has stages on two ranks"),
    ],
)
def test_what_has_no_formula_says_so(changes, said):
    with pytest.raises(ValueError, match=said.replace("(", ".")):
        sent_by_axis(LLAMA, Strategy(**changes), ROWS, LENGTH)
    with pytest.raises(ValueError, match="tp=2 has no formula here; use 1"):
        sent_by_axis(MIXED, Strategy(tp=2), ROWS, LENGTH)
