"""A step of any strategy, dry: what is in the account, that one rank stands for many, what a command says of it."""

import dataclasses
import re
from functools import partial

import pytest
from typer.testing import CliRunner

from minitrain.cli import main
from minitrain.compose.dry_runs import _step, dry_steps, stage_ranks
from minitrain.model.config import GPTConfig, presets
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Compute, Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh
from minitrain.systems.simulate.replay import replay

CONFIG = GPTConfig(vocab_size=64, d_model=32, num_layers=4, num_heads=4)
HYPER = Hyperparameters(batch_size=16, length=32)
PIPELINE = Strategy(dp=2, pp=4, tp=2, zero=1, microbatches=4)


def played(ledgers, on="h100"):
    return replay({rank: ledger.events for rank, ledger in ledgers.items()}, machine(on))


def test_the_ranks_taken_are_one_of_each_stage():
    strategy = Strategy(dp=2, pp=2, cp=2, tp=2)

    def place():
        return Mesh(**strategy.axes).coordinates

    places = [dryrun.run(place, rank=rank, ranks=strategy.ranks) for rank in stage_ranks(strategy)]
    assert places == [dict(dp=1, pp=stage, cp=1, tp=0) for stage in range(2)]


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        pytest.param(Strategy(dp=2, cp=2, tp=2, zero=3), marks=pytest.mark.slow),
        Strategy(dp=2, pp=2, cp=2, zero=2, microbatches=4, core="ulysses"),
    ],
    ids=str,
)
def test_ranks_of_one_stage_are_in_step(strategy):
    """As many FLOPs and bytes in memory, the same collectives of the same sizes: the rank that is taken stands
    for the others."""

    def told(ledger):
        issued = [(e.op, e.axis, e.payload_bytes, e.seq) for e in ledger.events if isinstance(e, Issue)]
        return ledger.flops, ledger.peak_by_kind, issued

    taken, step = stage_ranks(strategy), partial(_step, CONFIG, strategy, HYPER, True)
    expected = [told(dryrun.run(step, rank=rank, ranks=strategy.ranks)) for rank in taken]
    assert strategy.pp == 1 or expected[0] != expected[1]
    for rank in range(0, strategy.ranks, 3):
        stage = rank // (strategy.cp * strategy.tp) % strategy.pp
        assert told(dryrun.run(step, rank=rank, ranks=strategy.ranks)) == expected[stage]


def test_a_pipeline_played_whole_waits_for_its_stages_and_half_of_it_is_refused():
    ledgers = dry_steps(CONFIG, PIPELINE, HYPER)
    assert list(ledgers) == [16 - 8 + 2 * stage for stage in range(4)]
    whole = played(ledgers)
    assert all(account.waiting_s > 0 for account in whole.accounts.values())
    for half in ((8,), (10,), (8, 10, 14)):
        with pytest.raises(ValueError, match="give the events of all stages"):
            played({rank: ledgers[rank] for rank in half})


def test_the_bubble_is_that_of_1f1b():
    """Stages of equal layers on a machine whose links are free: (p - 1)/m of a stage's work is idle time,
    where no embedding and no head make the ends longer."""
    h100 = machine("h100")
    free = dataclasses.replace(h100.intra, latency_s=0.0, bandwidth_bytes_per_s=1e18)
    config = GPTConfig(vocab_size=8, d_model=512, num_layers=8, num_heads=4, max_positions=256)
    strategy, hyper = Strategy(pp=4, microbatches=8), Hyperparameters(batch_size=8, length=256)
    events = {rank: ledger.events for rank, ledger in dry_steps(config, strategy, hyper).items()}
    timeline = replay(events, dataclasses.replace(h100, intra=free, inter=free), launch_s=0.0)
    middle = timeline.accounts[1].compute_s
    update = sum(s.duration_s for s in timeline.spans[1] if getattr(s.event, "phase", "") == "optimizer")
    assert timeline.step_s - middle == pytest.approx(((middle - update) * 3 / 8), rel=0.15)


def test_the_account_is_that_of_a_step_like_all_others():
    """No state is made in it, and it is there; the update is one kernel per tensor, or many."""
    one, many = (dry_steps(CONFIG, Strategy(), HYPER, fused=fused)[0] for fused in (True, False))
    updates = [e.name for e in one.events if isinstance(e, Compute) and e.phase == "optimizer"]
    tensors = updates.count("_fused_adamw_")
    assert tensors > 4 and len(updates) <= 2 * tensors
    assert not any(e.name == "_fused_adamw_" for e in many.events if isinstance(e, Compute))
    assert len([e for e in many.events if isinstance(e, Compute) and e.phase == "optimizer"]) > 5 * tensors
    parameters = one.peak_by_kind["parameters"]
    assert one.live_by_kind["optimizer state"] == many.live_by_kind["optimizer state"] == 2 * parameters
    assert "zeros_like" not in updates
    forward = one.flops_by_phase["forward"]
    assert one.flops_by_phase["backward"] > 2 * forward > 0 and one.flops == many.flops


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        Strategy(dp=2, cp=2, zero=3, microbatches=2, precision="bfloat16"),
        Strategy(dp=2, tp=2, zero=2, precision="float16"),
        Strategy(dp=2, tp=2, products="fp8_delayed", precision="bfloat16"),
        Strategy(dp=2, zero=1, offload="optimizer"),
    ],
    ids=str,
)
def test_states_made_without_a_step_are_those_of_one(strategy, monkeypatch):
    """The account equals that of a second step, but for the numbers of its collectives, which count on."""

    def told(ledger):
        events = [dataclasses.replace(e, seq=0) if isinstance(e, Issue) else e for e in ledger.events]
        return ledger.peak_by_kind, ledger.live_by_kind, events

    def a_step(run):
        shape = dict(batch_size=HYPER.batch_size, length=HYPER.length)
        rows = Rows(partial(random_tokens, vocab=CONFIG.vocab_size, **shape), **shape)
        run.step(run.batch(rows, 0), HYPER.clip)

    step, rank = partial(_step, CONFIG, strategy, HYPER, True), stage_ranks(strategy)[0]
    without = told(dryrun.run(step, rank=rank, ranks=strategy.ranks))
    monkeypatch.setattr("minitrain.compose.dry_runs.make_states", a_step)
    assert told(dryrun.run(step, rank=rank, ranks=strategy.ranks)) == without
    monkeypatch.setattr("minitrain.compose.dry_runs.make_states", lambda run: None)
    made = told(dryrun.run(step, rank=rank, ranks=strategy.ranks)) != without
    assert made == (strategy.offload == "none")  # the host has its states from the start


@pytest.mark.parametrize(
    "words, said",
    [
        ("--ranks 16 --length 64", r"16 ranks of H100.*Strategy\(dp=16, zero=3, precision='bfloat16'\)"),
        ("--pp 2 --ranks 8 --length 64", r"dp=4, pp=2, zero=1, microbatches=8.*    6 .*    7 "),
        ("--tp 2 --zero 0 --batch 64 --length 64", r"64 x 64 tokens.*dp=32, tp=2, precision='bfloat16'"),
        (
            "--precision float32 --machine v100 --length 64",
            r"64 ranks of V100.*precision|Strategy\(dp=64, zero=3\)",
        ),
        ("--machine v100 --length 64", r"64 ranks of V100"),
    ],
)
def test_the_command_takes_any_strategy(words, said):
    result = CliRunner().invoke(main.app, ["replay", "tiny", *words.split()])
    assert result.exit_code == 0, result.output
    assert re.search(said, result.output, re.S), result.output
    assert "MFU" in result.output and "DOES NOT FIT" not in result.output


def test_what_does_not_fit_is_said():
    from minitrain.cli.replay_command import memory

    ledgers = dry_steps(presets["tiny"], Strategy(), Hyperparameters(batch_size=1, length=16))
    small = machine("h100")
    device = small.device.__class__("small", {}, ledgers[0].peak_bytes - 1, 1.0, "")
    assert "DOES NOT FIT" not in memory(ledgers, small)
    assert "DOES NOT FIT" in memory(ledgers, small.__class__("", device, 1, small.intra, small.inter, 1))
