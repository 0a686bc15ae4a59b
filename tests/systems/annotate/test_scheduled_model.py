"""Slapo: a scheduled GPT is the unscheduled one, on ranks; classes stay as they are; each word does what it says."""

import inspect

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.memory.recompute import recompute
from minitrain.model.gpt import GPT, Block, cross_entropy_sum
from minitrain.model.layers import MLP, Attention
from minitrain.ranks.events import Compute, Issue
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, placement
from minitrain.systems.annotate.scheduled import Schedule, project_once, stages
from tests.parallel import Problem, small

CONFIG = small(vocab_size=32, tied=False, num_kv_heads=4)
CLASSES = (GPT, Block, Attention, MLP)


def whole_batch():
    tokens, targets = Problem(config=CONFIG).batch(0)
    return tokens, targets, (targets != -100).sum()


def fresh():
    return GPT(CONFIG, seed=3, dtype=torch.float64)


def unscheduled():
    model, (tokens, targets, count) = fresh(), whole_batch()
    loss = cross_entropy_sum(model(tokens), targets) / count
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def schedule_of(model, group, words=("shard", "sync", "fuse", "checkpoint", "cut")):
    """Each block over the group: heads and hidden units cut, one product for matrices of one input, computed again."""
    schedule = Schedule(model)
    for number in range(1, CONFIG.num_layers + 1):
        block = schedule[f"layers.{number}"]
        for part, columns, row in (("attention", "qkv", "out"), ("mlp", ("gate", "up"), "down")):
            if "shard" in words:
                for name in columns:
                    block[part][name].shard("weight", 0, group)
                block[part][row].shard("weight", 1, group)
            if "sync" in words:
                block[part].sync("backward", group)
                block[part][row].sync("forward", group)
            if "fuse" in words:
                block[part].fuse()
        if "checkpoint" in words:
            block.checkpoint(recompute)
    if "cut" in words:
        schedule["layers.1"].cut()
    return schedule


def scheduled(words=("shard", "sync", "fuse", "checkpoint", "cut"), broken=None):
    if broken:
        setattr(collectives, broken, lambda x, group: x)
    mesh, model = Mesh(tp=collectives.world().size()), fresh()
    schedule = schedule_of(model, mesh.group("tp"), words)
    tokens, targets, count = whole_batch()
    with Ledger() as ledger:
        y, positions = tokens, torch.arange(tokens.size(1))
        for layer in sum(stages(model.layers, schedule), []):
            y = layer(y, positions)
        loss = cross_entropy_sum(y, targets) / count
        loss.backward()
    grads = {
        name: full_tensor(param.grad, placement(param).shards)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    classes = [type(module) for module in model.modules()]
    return loss.item(), grads, ledger, classes


def without_ledger(outcome):
    loss, grads, ledger, classes = outcome
    calls = [(event.op, event.axis) for event in ledger.events if isinstance(event, Issue)]
    products = sum(isinstance(event, Compute) and event.name == "mm" for event in ledger.events)
    sent = ledger.sent_bytes("all_reduce", "tp")
    return loss, grads, calls, products, sent, ledger.peak_by_kind["activations"], classes


def farthest(outcomes):
    loss, expected = unscheduled()
    seen, error = set(), 0.0
    for found in outcomes:
        error = max(
            error,
            abs(found[0] - loss),
            *((found[1][name] - expected[name]).abs().max().item() for name in found[1]),
        )
        seen |= found[1].keys()
    assert seen == expected.keys()
    return error


def test_slapo():
    """All words on 2 ranks: the loss and every gradient to 1e-12 (the paper's check has 1e-5); source, methods and
    types are those of before, and a model made afterwards is not scheduled."""
    before = [(inspect.getsource(kind), dict(vars(kind))) for kind in CLASSES]
    reference = unscheduled()[0]

    def rank():
        outcome = without_ledger(scheduled())
        after = [(inspect.getsource(kind), dict(vars(kind)).keys()) for kind in CLASSES]
        apart = without_ledger(scheduled(("shard", "sync", "checkpoint", "cut")))
        assert outcome[3] < apart[3] and outcome[0] == pytest.approx(apart[0]), "products are fused"
        return *outcome, after, unscheduled()[0]

    outcomes, model = launch.run(rank, ranks=2), fresh()
    assert farthest(outcomes) < 1e-12
    parts = stages(model.layers, schedule_of(model, None, ["cut"]))
    assert [*map(len, parts)] == [2, CONFIG.num_layers]
    kinds = [type(module) for module in fresh().modules()]
    for _, _, calls, *_ in outcomes:
        assert calls.count(("all_reduce", "tp")) == (2 + 2 + 1) * CONFIG.num_layers, "attention's sum again"
    for *_, classes, after, again in outcomes:
        assert classes == kinds and again == reference
        assert after == [(source, own.keys()) for source, own in before]
    for kind, (_, own) in zip(CLASSES, before):
        assert vars(kind).items() == own.items(), "this process' classes as well"


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_and_synced_it_is_the_model_and_sends_two_sums_a_block_each_way(ranks):
    outcomes = launch.run(lambda: without_ledger(scheduled(("shard", "sync"))), ranks=ranks)
    assert farthest(outcomes) < 1e-12
    rows, size = Problem().batch_sizes[0], CONFIG.d_model * Problem().length * 8
    for _, _, calls, _, sent, *_ in outcomes:
        times = calls.count(("all_reduce", "tp"))
        assert times == 4 * CONFIG.num_layers and sent == times * 2 * (ranks - 1) * rows * size // ranks


@pytest.mark.parametrize("broken", ["copy_to", "reduce_from"])
def test_without_a_sync_it_is_another_model(broken):
    outcomes = launch.run(lambda: without_ledger(scheduled(("shard", "sync"), broken)), ranks=2)
    assert farthest(outcomes) > 1e-5


def products_and_memory():
    plain, fused, again = (without_ledger(scheduled(words)) for words in ((), ("fuse",), ("checkpoint",)))
    return [found[3] for found in (plain, fused, again)], [found[5] for found in (plain, fused, again)]


def test_fused_there_are_fewer_products_and_computed_again_less_is_kept():
    """Of a block, forward: q, k, v are one product instead of three, gate and up one instead of two; backward has two for
    each of forward. Checkpointed, forward is done twice but for what nothing needs."""
    (products, kept), _ = launch.run(products_and_memory, ranks=2)
    plain, fused, again = products
    assert plain - fused == CONFIG.num_layers * (2 + 1) * 3
    assert plain < again <= plain + CONFIG.num_layers * 7 and kept[2] < kept[0]


def refused():
    group, biased = Mesh(tp=2).group("tp"), GPT(small(bias=True), dtype=torch.float64)
    schedule = Schedule(GPT(CONFIG, dtype=torch.float64))
    fused = schedule["layers.1.mlp"]
    fused["up"].sync("backward", group)
    fused.fuse()
    refused = {
        "ranks would add its bias": lambda: Schedule(biased)["layers.1.mlp.down"].sync("forward", group),
        "a fused matrix is not called by itself": lambda: fused.module(torch.ones(1, 1, CONFIG.d_model)),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_what_cannot_be_scheduled_is_refused():
    launch.run(refused, ranks=2)


def test_biases_are_fused_with_their_matrices():
    linears = [nn.Linear(4, width, dtype=torch.float64) for width in (2, 3)]
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    for ours, linear in zip(project_once(x, linears), linears):
        torch.testing.assert_close(ours, linear(x), rtol=1e-14, atol=1e-14)
