"""A dry run equals the real run to the byte, is cheap at any size, and names the line at fault."""

import functools
import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from minitrain import collectives, launch
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.naive import all_reduce_gradients
from minitrain.model.config import GPTConfig, presets
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh

CONFIG = GPTConfig(
    vocab_size=29, d_model=16, num_layers=1, num_heads=4, num_kv_heads=2, max_positions=16, tied=True
)
ROWS = 7  # uneven on 2 and on 4 ranks


def training(technique, config=CONFIG, rows=ROWS, steps=2):
    """Data-parallel training on this rank; model and optimizer are made inside the account."""
    group = Mesh(dp=collectives.world().size()).group("dp")
    with Ledger() as ledger:
        model = GPT(config)
        optimizer = AdamW(model.parameters())
        bucketed = technique == "bucketed"
        reducer = GradReducer(model.parameters(), group, bucket_bytes=4000) if bucketed else None
        for step in range(steps):
            tokens, targets = random_tokens(step, group.rank(), group.size(), rows, 16, config.vocab_size)
            with ledger.phase("forward"):
                loss = cross_entropy_sum(model(tokens), targets)
            with ledger.phase("backward"):
                loss.backward()
            with ledger.phase("communication"):
                if reducer:
                    reducer.finish()
                elif technique != "none":
                    all_reduce_gradients(model.parameters(), group, fused=technique == "fused")
            with ledger.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return ledger


def everything(ledger: Ledger) -> dict:
    names = "events flops flops_by_operator flops_by_phase live_bytes peak_bytes live_by_kind peak_by_kind"
    told = {name: getattr(ledger, name) for name in names.split()}
    return told | dict(sent=ledger.sent_bytes(), payload=ledger.payload_bytes(), timeline=ledger.timeline())


@functools.cache
def without_communication(ranks: int) -> list[dict]:
    return list(map(everything, launch.run(training, "none", ranks=ranks)))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("technique", ["naive", "fused", "bucketed"])
def test_equals_the_real_run_to_the_byte(technique, ranks):
    dry = [dryrun.run(training, technique, rank=rank, ranks=ranks) for rank in range(ranks)]
    for checked in (False, True):
        real = launch.run(training, technique, ranks=ranks, checked=checked)
        assert list(map(everything, dry)) == list(map(everything, real))
        assert all(ledger.planned for ledger in dry) and not any(ledger.planned for ledger in real)
    for account, control in zip(map(everything, dry), without_communication(ranks)):
        assert account["flops"] == control["flops"] and account["sent"] > control["sent"] == 0
        assert account["events"] != control["events"] and account["timeline"] != control["timeline"]
    assert dry[0].flops != dry[-1].flops  # the ranks hold 4 and 3 rows, or 1 and 2


def grouped_convolution():
    nn.Conv2d(4, 8, 3, groups=2)(torch.randn(2, 4, 9, 9)).sum().backward()


def torchs_own_optimizer():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recomputation_in_bfloat16():
    layer, x = nn.Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.utils.checkpoint.checkpoint(lambda x: F.gelu(layer(x)), x, use_reentrant=False).sum().backward()


def indexing():
    table, rows = torch.randn(40, 6, requires_grad=True), torch.tensor([1, 2, 3])
    table[rows].sum().backward()
    torch.zeros(40, 6).index_add_(0, rows, torch.ones(3, 6)).topk(3)
    torch.empty(10).resize_(20).zero_()


@pytest.mark.parametrize(
    "function", [grouped_convolution, torchs_own_optimizer, recomputation_in_bfloat16, indexing]
)
def test_other_operators_equal_the_real_ones(function):
    def account():
        with Ledger() as ledger:
            function()
        return everything(ledger)

    assert dryrun.run(account, ranks=1) == account()


def test_a_step_of_gpt3_as_one_rank_of_1024():
    """2.8 TB of training state and 2.2e15 FLOPs, with no memory and in seconds."""
    config = presets["gpt3-175b"]

    def step():
        with Ledger() as ledger:
            model = GPT(config, dtype=torch.bfloat16)
            optimizer = AdamW(model.parameters(), master_dtype=torch.float32)
            tokens = torch.zeros(1, config.max_positions, dtype=torch.long)
            cross_entropy_sum(model(tokens), tokens).backward()
            all_reduce_gradients(model.parameters(), collectives.world())
            optimizer.step()
        return ledger, sum(parameter.numel() for parameter in model.parameters())

    ledger, numel = dryrun.run(step, rank=17, ranks=1024)
    T, D, L, V = config.max_positions, config.d_model, config.num_layers, config.vocab_size
    kinds = [ledger.live_by_kind[kind] for kind in ("parameters", "gradients", "optimizer state")]
    assert 174e9 < numel < 176e9 and kinds == [2 * numel, 2 * numel, 12 * numel]
    assert ledger.flops == L * (3 * 24 * T * D**2 + 3.5 * 4 * (T * (T + 1) // 2) * D) + 3 * 2 * T * D * V
    uneven = 2 * 2 * ledger.num_calls()  # chunks, as above
    assert abs(ledger.sent_bytes() - 2 * 1023 / 1024 * 2 * numel) <= uneven


# ---- what a dry run cannot know, and how it ends ---------------------------------------------------------

OUTSIDE = torch.ones(3)


def asks_for_item():
    loss = torch.ones(3).sum()
    return loss.item()


def branches():
    loss = torch.ones(3).sum()
    while loss > 3:
        pass


def selects():
    x = torch.ones(3)
    return x[x > 0]


def prints():
    loss = torch.ones(3).sum()
    return f"{loss:.3f}"


def leaves_torch():
    return torch.ones(3).numpy()


def watched():
    with Ledger():
        return torch.ones(3).tolist()


def reaches_outside():
    return torch.ones(3) * OUTSIDE


class Asks(nn.Module):
    def forward(self, x, positions):
        return x * x.sum().item()


def asks_in_a_pipeline():
    ids, loss_of = torch.zeros(2, 4, dtype=torch.long), lambda y, targets: y.sum()
    how = dict(width=1, dtype=torch.float32)
    run = Runner({0: Asks()}, one_f_one_b(1, 2), collectives.world(), loss_of, NoReducer(), **how)
    run(Batch(ids, ids, torch.ones(())))


NUMBERS = "asks for the numbers in a tensor, and a dry run has shapes only"


@pytest.mark.parametrize(
    "function, line, complaint",
    [
        (asks_for_item, "return loss.item()", NUMBERS),
        (branches, "while loss > 3:", NUMBERS),
        (selects, "return x[x > 0]", NUMBERS),
        (prints, 'return f"{loss:.3f}"', NUMBERS),
        (leaves_torch, "return torch.ones(3).numpy()", NUMBERS),
        (watched, "return torch.ones(3).tolist()", NUMBERS),
        (asks_in_a_pipeline, "return x * x.sum().item()", NUMBERS),
        (reaches_outside, "return torch.ones(3) * OUTSIDE", "uses a tensor from outside the dry run"),
    ],
)
def test_the_line_that_needs_a_number_is_named(function, line, complaint):
    with pytest.raises(ValueError) as caught:
        dryrun.run(function, ranks=1)
    code = (Asks.forward if function is asks_in_a_pipeline else function).__code__
    place, text, rest = str(caught.value).split("`")
    file, number = place.strip().split(":")
    assert file == "test_dryrun.py" and text == line and rest.strip().startswith(complaint)
    assert code.co_firstlineno < int(number) <= max(number for *_, number in code.co_lines() if number)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__


def fails():
    with Ledger():
        raise KeyError("the reader's own")


@pytest.mark.parametrize(
    "function", [asks_for_item, fails, lambda: dryrun.run(asks_for_item), lambda: torch.ones(2)]
)
def test_it_always_cleans_up(function):
    on_crash = sys.excepthook
    try:
        dryrun.run(function, ranks=8)
    except (ValueError, KeyError):
        pass
    assert not dist.is_initialized() and not _get_current_dispatch_mode_stack() and sys.excepthook is on_crash
    assert torch.ones(2).sum().item() == 2.0


def test_not_inside_a_process_group():
    def inside():
        with pytest.raises(ValueError, match="rank [01] of 2 calls dryrun.run; .* outside of launch.run"):
            dryrun.run(lambda: None)
        return dist.is_initialized()

    assert launch.run(inside, ranks=2) == [True, True]
    with pytest.raises(ValueError, match="rank 3 of 5 calls dryrun.run"):
        dryrun.run(lambda: dryrun.run(lambda: None), rank=3, ranks=5)


# ---- what goes in and what comes out ---------------------------------------------------------------------


def test_arguments_are_passed_without_their_data():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    x = torch.ones(2, 4)

    def step(model, batch, word):
        model(batch["x"]).sum().backward()
        assert isinstance(model[0].weight, nn.Parameter) and model[0].weight is model[1].weight
        return model[0].weight.grad.shape, batch["x"].add_(1), word

    shape, batch, word = dryrun.run(step, model, {"x": x}, "word", ranks=2)
    assert (shape, batch.shape, word) == ((4, 4), (2, 4), "word")
    assert model[0].weight.grad is None and x.tolist() == [[1.0] * 4] * 2


def test_arguments_share_what_they_shared():
    """A model and a list of its parameters, a tensor and a view of it: one memory, as in a real run."""
    model, x = nn.Linear(4, 4), torch.ones(6)

    def shared(model, params, x, others):
        return model.weight is params[0], storage_id(x) == storage_id(others["view"]), others["x"] is x

    def storage_id(x):
        return x.untyped_storage()._cdata

    others = {"view": x[2:4], "x": x}
    assert dryrun.run(shared, model, [*model.parameters()], x, others, ranks=2) == (True, True, True)


def test_a_ledger_that_comes_back_keeps_nothing_of_the_run():
    kept = []

    def account():
        x = torch.ones(1000, 1000)
        kept.append(weakref.ref(x))
        kept.append(weakref.ref(_get_current_dispatch_mode_stack()[0]))
        with Ledger() as ledger:
            x @ x
        return ledger

    ledger = dryrun.run(account)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert ledger.flops == 2 * 1000**3 and len(ledger.events) == 1 and ledger.peak_bytes == 8_000_000


def test_who_runs_the_readers_code_may_repeat_its_error_and_the_readers_line_is_named():
    outside = torch.ones(2)

    def reads():
        return outside * torch.ones(2)

    def runs():
        try:
            return reads()
        except Exception as error:
            raise RuntimeError(f"step 3 failed: {error}") from error

    with pytest.raises(ValueError, match=r"`return outside \* torch.ones\(2\)` uses a tensor from outside"):
        dryrun.run(runs, ranks=2)
