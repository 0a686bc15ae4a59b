"""Activations and ZeRO-3's shards on the host: bit-equal training, bytes over the link, memory on the device."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Compute, Copy, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory import activations
from minitrain.systems.memory.activations import AwayActivations

LENGTH, ROWS, WIDTH = 12, 6, 24
SIZES = dict(vocab_size=29, d_model=WIDTH, num_heads=6, num_kv_heads=2, max_positions=16)
CONFIG = GPTConfig(num_layers=4, **SIZES)


def rows(size=ROWS):
    return Rows(
        lambda step, rank, ranks: random_tokens(step, rank, ranks, size, LENGTH, 29, seed=5), size, LENGTH
    )


def adamw(params):
    return AdamW(params, lr=1e-2, eps=1e-3)


def exact(**values):
    return Strategy(**(dict(precision="float64", bucket_bytes=3000) | values))


def train(strategy, config=CONFIG, count=2):
    run = parallelize(config, strategy, adamw, seed=3)
    losses = [run.total(run.step(run.batch(rows(), number), 0.3).loss).item() for number in range(count)]
    return losses, run.state_dict()


def accounts(strategy, config=CONFIG, count=2):
    run, found = parallelize(config, strategy, adamw, seed=3), []
    for number in range(count):
        batch = run.batch(rows(), number)
        with Ledger() as ledger:
            run.step(batch)
        found.append(ledger)
    return found


LAYOUTS = {
    "one": dict(), "microbatches": dict(microbatches=3, dp=2, zero=2),
    "pp, I and W": dict(pp=2, microbatches=3, schedule="zb_h1"),
    "tp": dict(tp=2, sequence_parallel=True, overlap=True), "cp": dict(cp=2),
    "bfloat16": dict(precision="bfloat16"), "selective": dict(recompute="selective", pp=2, microbatches=2),
    "keep": dict(recompute="keep:core", dp=2, zero=3, microbatches=2), "every": dict(recompute="every:2"),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("every", "keep")])
def test_activations_on_the_host_change_no_bit(name):
    config = GPTConfig(num_layers=4, dropout=0.2, tied=True, **SIZES)
    here, there = exact(**LAYOUTS[name]), exact(**LAYOUTS[name], offload="activations")
    for ours, theirs in launch.run(lambda: (train(there, config), train(here, config)), ranks=here.ranks):
        assert ours[0] == theirs[0]
        assert all(torch.equal(ours[1]["parameters"][n], x) for n, x in theirs[1]["parameters"].items())


def kept_bytes(config):
    """What autograd keeps of all layers, blocks of memory once: by another instrument."""
    model = GPT(config, seed=3, dtype=torch.float64)
    with SavedTensors(model) as saved:
        model(rows().draw(0, 0, 1)[0])
    return saved.bytes


@pytest.mark.parametrize("layers", [2, 5])
def test_what_autograd_keeps_crosses_once_down_and_once_up(layers):
    config = GPTConfig(num_layers=layers, **SIZES)
    kept = kept_bytes(config)
    for ledgers in (launch.run(accounts, exact(offload="activations"), config, ranks=1)[0],
                    dryrun.run(accounts, exact(offload="activations"), config, ranks=1)):  # fmt: skip
        for ledger in ledgers:
            assert ledger.copied_bytes("to_host") == ledger.copied_bytes("to_device") == kept
            assert ledger.host_bytes == 0 and ledger.host_peak_bytes == kept


def test_stages_of_a_pipeline_move_their_own():
    strategy = exact(pp=2, microbatches=3, offload="activations")
    whole = kept_bytes(CONFIG)
    moved = [ledgers[0].copied_bytes("to_host") for ledgers in launch.run(accounts, strategy, ranks=2)]
    assert moved[0] > whole // 4 and moved[1] > whole // 4
    again = [dryrun.run(accounts, strategy, rank=rank, ranks=2)[0].copied_bytes("to_host") for rank in (0, 1)]
    assert moved == again


def most(strategy, layers, kind="activations"):
    ledger = dryrun.run(accounts, strategy, GPTConfig(num_layers=layers, **SIZES), 1, ranks=1)[0]
    return max(live[kind] for _, live in ledger.timeline()), ledger.host_peak_bytes


def test_the_devices_activations_do_not_grow_with_depth():
    """All layers here: a layer's share for each. Away: what two layers keep, however deep; the host's grow."""
    one = kept_bytes(GPTConfig(num_layers=9, **SIZES)) - kept_bytes(GPTConfig(num_layers=8, **SIZES))
    here = [most(exact(), layers)[0] for layers in (4, 6, 8)]
    assert here[1] - here[0] == here[2] - here[1] == 2 * one
    away, host = zip(*(most(exact(offload="activations"), layers) for layers in (4, 6, 8)))
    assert away[0] == away[1] == away[2] < here[1] // 2
    assert host[1] - host[0] == host[2] - host[1] == 2 * one


def test_with_full_recomputation_inputs_of_blocks_move():
    """One input a block, rows·T·D numbers of 8 bytes, is all that differs from depth to depth."""
    strategy = exact(recompute="full", offload="activations")
    configs = [GPTConfig(num_layers=n, **SIZES) for n in (4, 7)]
    ledgers = [dryrun.run(accounts, strategy, config, 1, ranks=1)[0] for config in configs]
    moved = [ledger.copied_bytes("to_host") for ledger in ledgers]
    assert moved[1] - moved[0] == 3 * 8 * ROWS * LENGTH * WIDTH


def test_a_layers_tensors_come_while_the_layer_behind_it_works():
    config = GPTConfig(num_layers=6, **SIZES)
    ((ledger,),) = launch.run(accounts, exact(offload="activations"), config, 1, ranks=1)
    events = ledger.events
    up = [(i, event) for i, event in enumerate(events) if type(event) is Copy]
    issued = {event.id: i for i, event in up if event.direction == "to_device"}
    waited = {event.id: i for i, event in enumerate(events) if type(event) is Wait and event.id in issued}
    hidden = [any(type(e) is Compute and e.flops for e in events[issued[id] : waited[id]]) for id in issued]
    assert hidden.count(False) == 1  # the first that backward opens; one a layer if none were fetched ahead


def test_the_comparison_would_notice():
    def rank():
        found, opened = [train(exact())[0], train(exact(offload="activations"))[0]], activations._Away.open
        activations._Away.open = lambda away: torch.zeros_like(opened(away))
        return *found, train(exact(offload="activations"))[0]

    plain, away, broken = launch.run(rank, ranks=1)[0]
    assert away == plain != broken


def test_views_of_one_block_travel_once_and_parameters_stay():
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(10, 4, requires_grad=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            y = x.exp()
            return (y[:5] * y[5:]).sum() + self.layer(y).square().sum()

    model = Model()
    model(x).backward()
    wanted, x.grad = x.grad, None
    AwayActivations(model.parameters).watch(model, [layer])
    with Ledger() as ledger:
        loss = model(x)
        loss.backward(retain_graph=True)
        once = ledger.copied_bytes()
        assert torch.equal(x.grad, wanted)
        loss.backward()  # fetched again: the host has it as long as the graph lives
    assert once == 2 * (160 + 160)  # y and what was squared; weight and x stay
    assert torch.equal(x.grad, 2 * wanted)
    assert "clone" not in [event.name for event in ledger.events if type(event) is Compute]
    layer.weight.data = layer.weight.data.clone()  # what stays is asked for in every forward
    with Ledger() as ledger:
        loss = model(x)
        assert ledger.copied_bytes() == once // 2
        del loss
        assert ledger.host_bytes == 0, "nothing of a forward is held behind it"


def test_a_forward_that_fails_is_not_watched_any_longer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    AwayActivations(model.parameters).watch(model, model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))
    x = torch.ones(3, requires_grad=True)
    with Ledger() as ledger:
        x.exp().sum().backward()
    assert ledger.copied_bytes() == 0


def test_what_was_opened_leaves_the_device_though_its_graph_stays():
    """Each backward of a graph that is kept fetches from the host, and leaves nothing."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sigmoid()) for _ in range(3)))
    AwayActivations(model.parameters).watch(model, model)
    x, fetched = torch.randn(10, 4), []
    with Ledger() as ledger:
        loss = model(x).sum()
        before = ledger.live_bytes
        for _ in range(3):
            loss.backward(retain_graph=True)
            model.zero_grad()
            assert ledger.live_bytes == before
            fetched.append(ledger.copied_bytes("to_device"))
    assert fetched[0] == 640 == ledger.copied_bytes("to_host")  # x and what three layers gave, 160 bytes each
    assert fetched[2] - fetched[1] == fetched[1] - fetched[0] >= 640


def test_a_model_that_runs_again_in_backward_and_one_without_rows():
    """A second pass is not watched, and nothing behind it; a tensor without elements does not move."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()).double()
    AwayActivations(model.parameters).watch(model, model)
    x = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    with Ledger() as ledger:
        checkpoint(model, x, use_reentrant=True).sum().backward()
        x.exp().sum().backward()
        assert ledger.copied_bytes() == 0
    assert torch.allclose(x.grad - x.detach().exp(), torch.autograd.grad(model(x).sum(), x)[0])
    model(x[:0]).sum().backward()
    assert not model[0].weight.grad.isnan().any()


def test_nothing_moves_without_gradients():
    def evaluate():
        run = parallelize(CONFIG, exact(offload="activations"), adamw, seed=3)
        with Ledger() as ledger:
            run.evaluate(run.batch(rows(), 0))
        return ledger.copied_bytes()

    assert launch.run(evaluate, ranks=1) == [0]


# ---- parameters -------------------------------------------------------------------------------------------
AWAY = "parameters+optimizer"


@pytest.mark.parametrize("layout", [dict(dp=2, microbatches=2), dict(pp=2, microbatches=2), dict(tp=2, dp=2)])
def test_shards_on_the_host_train_alike(layout):
    strategies = [exact(**layout, zero=3, offload=where) for where in ("none", AWAY, AWAY + "+activations")]
    for plain, *away in launch.run(lambda: list(map(train, strategies)), ranks=strategies[0].ranks):
        for losses, state in away:
            assert max(abs(a - b) for a, b in zip(losses, plain[0])) < 1e-12
            theirs = plain[1]["parameters"]
            assert max((state["parameters"][name] - theirs[name]).abs().max() for name in theirs) < 1e-12


@pytest.mark.parametrize("dp, microbatches", [(1, 1), (2, 3)])
def test_a_rank_reads_its_share_for_every_gather(dp, microbatches):
    """Up: 8Ψ/n bytes for each gather of a unit; down: its gradients, once."""
    strategy = exact(dp=dp, microbatches=microbatches, zero=3, offload=AWAY)
    plain = launch.run(accounts, exact(dp=dp, microbatches=microbatches, zero=3), ranks=dp)[0][1]
    for _, ledger in launch.run(accounts, strategy, ranks=dp):
        kept = ledger.host_by_kind["parameters"]
        gathered = plain.payload_bytes("all_gather") // dp
        assert ledger.copied_bytes("to_host") == kept
        assert ledger.copied_bytes("to_device") == gathered > 1.5 * microbatches * kept
        parameters = 8 * sum(param.numel() for param in GPT(CONFIG, device="meta").parameters())
        assert parameters <= dp * kept < parameters + 8 * dp * 20


def test_parameters_on_the_device_do_not_grow_with_depth():
    """L2L on a layout: two units whole at once."""
    strategy = exact(zero=3, offload=AWAY)
    found = [most(strategy, layers, "buffers")[0] for layers in (3, 8)]
    assert found[0] == found[1] > 0
    tensors = len(list(GPT(CONFIG, device="meta").parameters()))
    assert most(strategy, 4, "parameters")[0] == 8 * tensors  # one NaN stands for each that is not gathered
    grows = [most(exact(zero=3), layers, "parameters")[0] for layers in (3, 8)]
    assert grows[1] > 2 * grows[0]
