"""On a GPU, which ranks share unless each has its own: every technique and layout as one process on the CPU.

The reference is that of random layouts: torch's optimizer and clipping, uneven batches and masks, float64. A
sum on a GPU has an order of its own, so numbers are equal to 1e-10. All run on the CPU too, with --rehearse; two always do.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.training.step import Batch
from minitrain.pipeline.schedules_by_name import CHUNKED, PLAIN, SLICED
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from tests.layouts import ROUNDING, SEED, STEPS, Draw, Outcome, distance, one_process, step_of

CLOSE = 1e-10
SIZES = dict(vocab_size=29, d_model=24, num_layers=6, num_heads=6, num_kv_heads=2, max_positions=16)
DENSE = GPTConfig(**SIZES, dropout=0.1, tied=True)
EXPERTS = replace(DENSE, experts=ExpertsConfig(num_experts=4, top_k=2, router="deepseek", bias_speed=0.02))
CASES = {
    "dp": dict(dp=2),
    "dp, 4 ranks": dict(dp=4, microbatches=2),
    **{f"ZeRO-{stage}": dict(dp=2, zero=stage, microbatches=2) for stage in (1, 2, 3)},
    "ZeRO-3, small buckets": dict(dp=2, zero=3, bucket_bytes=1000),
    "hybrid sharding": dict(dp=4, zero="IIG", node=2),
    "hybrid sharding, all": dict(dp=4, zero="III", node=2),
    "tp": dict(tp=2),
    "tp, sequence": dict(tp=2, sequence_parallel=True),
    "tp, overlap": dict(tp=2, sequence_parallel=True, overlap=True),
    "dp tp": dict(dp=2, tp=2, zero=1),
    **{name: dict(pp=2, schedule=name, microbatches=4) for name in PLAIN},
    **{name: dict(pp=2, schedule=name, microbatches=4, chunks=2) for name in CHUNKED},
    **{name: dict(pp=2, schedule=name, microbatches=2, slices=2) for name in SLICED},
    "late clipping": dict(pp=2, microbatches=4, post_validation=True),
    "dp pp tp": dict(dp=2, pp=2, tp=2, microbatches=2, zero=1),
    **{f"ring, {layout}": dict(cp=2, layout=layout) for layout in ("contiguous", "zigzag", "striped")},
    **{core: dict(cp=2, core=core) for core in ("gathered", "ring_self_attention", "burst", "wallfacer")},
    "balanced": dict(cp=2, core="balanced", layout="contiguous"),
    "Ulysses": dict(cp=2, core="ulysses"),
    "double ring": dict(cp=4, core="double_ring", inner=2),
    "USP": dict(cp=4, core="usp", ulysses=2),
    "ep": dict(dp=2, ep=2),
    "ep, chunks": dict(dp=2, ep=2, ep_chunks=2),
    "ep, experts travel": dict(dp=2, ep=2, ep_travel="experts"),
    "ep in pairs": dict(dp=2, pp=2, ep=2, schedule="dualpipe_v", microbatches=4),
    **{
        f"recompute, {what}": dict(dp=2, recompute=what)
        for what in ("full", "selective", "every:2", "revolve:1")
    },
    "recompute, partition": dict(tp=2, recompute="full", recompute_partition=True),
    "recompute, stage": dict(pp=2, microbatches=4, recompute="stage"),
    **{
        f"offload, {what}": dict(dp=2, offload=what)
        for what in ("activations", "optimizer", "optimizer+activations")
    },
    "offload, parameters": dict(dp=2, zero=3, offload="optimizer+parameters"),
    "a scaled loss": dict(dp=2, loss_scale=2.0**20, loss_scale_window=1),
    **{name: dict(dp=2, precision=name) for name in ("bfloat16", "float16")},
    **{
        name: dict(tp=2, products=name, precision="bfloat16")
        for name in ("fp8_tensor", "fp8_rows", "fp8_delayed")
    },
}


@cache
def case_of(name: str) -> Draw:
    strategy = Strategy(**({"precision": "float64"} | CASES[name]))
    config = EXPERTS if strategy.ep > 1 else DENSE
    config = replace(config, num_layers=2) if strategy.pp == 1 and "revolve" not in name else config
    if "late" in name:
        config = replace(config, tied=False)
    least = strategy.dp * strategy.microbatches
    masked, packed = ("none", 3) if name in ("dp", "ring, zigzag") else ("ragged", 0)
    return Draw(config, strategy, (least + 1, least), 16, 0.3, (), "adamw", masked, packed=packed)


def trained(case: Draw):
    run = parallelize(case.config, case.strategy, case.make_optimizer, seed=SEED)
    losses = [step_of(case, run, step).item() for step in range(STEPS)]
    run.settle()
    return run.device.type, Outcome(losses, states.full_grads(run.sync), run.state_dict()["parameters"])


def check(name: str) -> None:
    case = case_of(name)
    results, reference = launch.run(trained, case, ranks=case.strategy.ranks), one_process(case)
    assert {device for device, _ in results} == {launch.device().type}
    outcomes = [outcome for _, outcome in results]
    assert {x.device.type for outcome in outcomes for x in outcome.params.values()} == {"cpu"}
    assert set().union(*(outcome.grads for outcome in outcomes)) == reference.grads.keys()
    if case.exact:
        assert max(distance(outcome, reference) for outcome in outcomes) < CLOSE
    else:
        assert all(one.losses == outcomes[0].losses for one in outcomes)
        assert outcomes[0].losses == pytest.approx(reference.losses, rel=ROUNDING)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    check(name)


@pytest.mark.parametrize("name", ["ZeRO-3", "ring, zigzag"])
def test_here(name):
    check(name)


def placed(where: str) -> tuple[str, str, str]:
    """Where a rank of that device builds a model, has logits, and what it says of a batch from elsewhere."""
    launch.device = lambda: torch.device(where)  # of this process, which ends with the launch
    run = parallelize(replace(DENSE, num_layers=2), Strategy(precision="float64"))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    try:
        said = run.step(Batch(tokens, tokens, torch.tensor(4)))
    except ValueError as error:
        said = str(error)
    return run.device.type, run(tokens).device.type, said


def test_a_model_is_built_on_the_device_of_its_rank():
    said = "the batch is on cpu, and this run on meta; move it, or take run.batch(rows, step)"
    assert launch.run(placed, "meta", ranks=1) == [("meta", "meta", said)]


def test_a_dry_run_stays_on_the_cpu_unless_it_is_told(monkeypatch):
    monkeypatch.setattr(launch, "device", lambda: torch.device("cuda", 3))
    for given, device in ((None, "cpu"), ("cuda", "cuda")):
        made = lambda: parallelize(DENSE, Strategy(dp=2), device=given).device.type
        assert dryrun.run(made, ranks=2) == device
