"""A dry run whose mode describes tensors in short gives the account of one with torch's own, event by event."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from minitrain.compose.parallelize import parallelize
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import FakeTensorMode

SMALL = dict(vocab_size=64, d_model=32, num_layers=2, num_heads=4)
DENSE, TIED = GPTConfig(**SMALL), GPTConfig(**SMALL, tied=True, dropout=0.1)
EXPERTS = GPTConfig(**SMALL, experts=ExpertsConfig(num_experts=4, top_k=2))
STRATEGIES = {
    "one": (TIED, Strategy()),
    "dp": (DENSE, Strategy(dp=4, microbatches=2)),
    "zero 1": (DENSE, Strategy(dp=4, zero=1, precision="bfloat16")),
    "zero 3": (TIED, Strategy(dp=4, zero=3, recompute="full")),
    "hybrid": (DENSE, Strategy(dp=4, zero="III", node=2)),
    "tp": (DENSE, Strategy(tp=4, sequence_parallel=True, overlap=True)),
    "cp": (DENSE, Strategy(cp=4, tp=2, core="usp", ulysses=2)),
    "pp": (TIED, Strategy(pp=2, dp=2, schedule="zb_h1", microbatches=2)),
    "interleaved": (
        DENSE,
        Strategy(pp=2, chunks=2, schedule="interleaved", microbatches=2, precision="float16"),
    ),
    "products": (DENSE, Strategy(dp=2, products="fp8_tiles", recompute="selective")),
    "offload": (DENSE, Strategy(dp=2, zero=1, offload="optimizer+activations")),
    "experts": (EXPERTS, Strategy(dp=4, zero=2)),
}


def steps(config, strategy, ledger):
    """Two steps, the second of which finds the states of the first. What is made before counts as older."""
    run = parallelize(config, strategy, partial(AdamW, lr=1e-3))
    shape = dict(batch_size=8, length=32)
    rows = Rows(partial(random_tokens, vocab=config.vocab_size, **shape), **shape)
    with ledger:
        for step in range(2):
            with ledger.phase(f"step {step}"):
                run.step(run.batch(rows, step))
    return ledger


def account(ledger):
    return (
        ledger.events, ledger.memory_trace(), ledger.block_kinds, ledger.timeline(gathered=True),
        (ledger.peak_by_kind, ledger.live_by_kind, ledger.host_by_kind, ledger.host_peak_bytes),
        ledger.table(),
    )  # fmt: skip


def torchs_own(monkeypatch):
    monkeypatch.setattr(dryrun, "ShapesMode", FakeTensorMode)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_remembered_operator_is_accounted_for_like_the_first(name, monkeypatch):
    config, strategy = STRATEGIES[name]
    for rank in {0, strategy.ranks - 1} if strategy.pp > 1 else {0}:
        how = dict(rank=rank, ranks=strategy.ranks)
        short = account(dryrun.run(steps, config, strategy, Ledger(), **how))
        with monkeypatch.context() as patch:
            torchs_own(patch)
            assert account(dryrun.run(steps, config, strategy, Ledger(), **how)) == short


def many_kinds(times=3):
    """Views, writes in place, lists, several results, rows read and added to, allocations, repeated."""
    table, older = torch.ones(6, 4, requires_grad=True), torch.ones(6, 4)
    kept = []
    for _ in range(times):
        x = F.embedding(torch.tensor([1, 5]), table)
        y = torch.cat([x, older[:2], x.detach()])
        values, places = y.max(0)
        kept += [values, torch.empty(6, 4), older.t()[1], y.view(-1)[4:], torch.empty(2).zero_()]
        older.index_add_(0, torch.tensor([0, 2]), y[:2].detach())
        torch.add(older, 1, out=kept[-4])
        kept[-1].copy_(kept[-1] + 1).mul_(2)
        torch._foreach_add_([older, kept[-1]], [older, kept[-1]])
        (y.softmax(1) @ y.t()).sum().backward()
        with torch.inference_mode():
            kept.append(F.linear(y.detach(), older))
        kept.append(older.untyped_storage().resize_(4 * 24 + 4) and older + 1)
    return kept


def within(ledger):
    with ledger:
        return many_kinds()


def test_operators_of_every_kind_are_remembered_right(monkeypatch):
    for causal in ("triangle", "square"):
        first, second = Ledger(causal=causal), Ledger(causal=causal)
        dryrun.run(within, first)
        with monkeypatch.context() as patch:
            torchs_own(patch)
            dryrun.run(within, second)
        assert account(first) == account(second)


def test_a_limit_holds_where_an_operator_is_remembered():
    """One thousandth tensor is one too many."""

    def grow(ledger):
        with ledger:
            kept = []
            for _ in range(1001):
                kept.append(torch.ones(10) if not kept else kept[-1] + 1)

    dryrun.run(grow, Ledger(limit_bytes=1001 * 40))
    with pytest.raises(MemoryError, match="40,040 bytes on the device, which has 40,000"):
        dryrun.run(grow, Ledger(limit_bytes=1000 * 40))


def test_a_ledger_inside_a_ledger_and_around_a_dry_run():
    def inner():
        with Ledger() as one, Ledger() as two:
            many_kinds()
        return one, two

    one, two = dryrun.run(inner)
    single = Ledger()
    dryrun.run(within, single)
    assert one.events == two.events == single.events
    with Ledger() as around:
        dryrun.run(many_kinds)
    assert [event for event in around.events if event.flops] == [e for e in single.events if e.flops]
