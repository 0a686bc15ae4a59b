"""What planners are told about a layer is what happens: bytes kept, FLOPs once more, peaks of whole plans."""

import pytest
import torch
from torch import nn

from minitrain.attention.dropout import Places
from minitrain.compose.recompute_passes import recompute_in
from minitrain.memory.recompute import recompute
from minitrain.memory.recompute_policies import NAMES, parse
from minitrain.memory.saved_tensors import SavedTensors
from minitrain.memory.segment import Results
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.hooks import Hooks
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.account import UnitCost, account, layer_bytes
from minitrain.systems.memory.chain import chain
from minitrain.systems.memory.chain_plan import LayerBytes, every, peak_bytes, show, sqrt
from minitrain.systems.plan.recompute_front import Unit, front
from minitrain.systems.plan.rematerialize import revolve
from tests.parallel import small

B, T, D = 2, 16, 32
CONFIGS = {
    "llama": dict(),
    "gpt2": dict(norm="layer", activation="gelu", num_kv_heads=4, positions="learned", bias=True),
    "dropout": dict(dropout=0.1, activation="gelu"),
    "parallel": dict(residual="parallel"),
}


def block_of(**changes) -> nn.Module:
    return GPT(small(num_layers=1, d_model=D, max_positions=T, **changes), seed=1).layers[1]


X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(T)


def planned(units: list[UnitCost]) -> list:
    return front([Unit(unit.name, unit.flops, unit.bytes, (), unit.needed) for unit in units])


@pytest.mark.parametrize("config", CONFIGS)
def test_every_point_of_the_front_is_what_its_word_does(config):
    """Saved bytes and FLOPs of each word on the front, predicted from one forward, against the run of it."""
    block = block_of(**CONFIGS[config])
    choices = planned(account(Ledger, block, X, POSITIONS))
    results = Results()
    block.hooks.result = results

    def measured(word):
        (policy,) = parse(word)
        x = X.clone().requires_grad_()
        block.zero_grad()
        with Ledger() as ledger:
            with SavedTensors(block) as saved:
                if policy.again:
                    y = recompute(block, x, POSITIONS, results=results, keep=policy.keep)
                else:
                    y = block(x, POSITIONS)
            y.sum().backward()
        return saved.bytes, ledger.flops

    plain = measured("none")[1]
    assert len(choices) > 4 and choices[0].policy == "full"
    for choice in choices:
        if choice.again:
            size, flops = measured(choice.policy)
            assert (size - X.nbytes, flops - plain) == (choice.bytes, choice.time), choice.policy


def test_figures_of_a_block_by_hand():
    """A GPT-2 block: products 2·m·k·n; a norm keeps its result and 8 bytes per token, the core its output and
    4 bytes a head and token; the last product is needed by nobody."""
    block, tokens = block_of(**CONFIGS["gpt2"]), B * T
    units = {unit.name: unit for unit in account(Ledger, block, X, POSITIONS)}
    assert list(units) == [name for name in NAMES if name not in ("latents", "experts")]
    product = 2 * tokens * D * D
    assert [unit.flops for unit in units.values() if unit.name != "core"] == [
        0, 3 * product, product, 0, 4 * product, 0, 4 * product,
    ]  # fmt: skip
    stream = 4 * tokens * D
    assert units["norm1"].bytes == units["norm2"].bytes == stream + 8 * tokens
    assert [units[name].bytes for name in ("qkv", "out", "up", "act", "down")] == [
        3 * stream, stream, 4 * stream, 4 * stream, stream,
    ]  # fmt: skip
    assert units["core"].bytes == stream + 4 * 4 * tokens
    assert [unit.name for unit in units.values() if not unit.needed] == ["down"]
    assert units["down"].moved == 4 * (4 * tokens * D + 4 * D * D + D) + stream


class Named(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.hooks = run, Hooks()

    def forward(self, x):
        return self.run(self.hooks.result, x)


def views(result, x):
    """A result that is its input, of something without a name, and one that saves it."""
    return result("square", torch.square, result("view", lambda y: y.view(-1), x.exp()))


def test_what_has_no_name_is_made_again_by_those_before_it():
    """Of a view nothing more is kept; what a result saves of its inputs does not make it needed."""
    layer = Named(views)
    door = layer.hooks.result
    assert account(Ledger, layer, X) == [
        UnitCost("view", 0, 0, 0, True),
        UnitCost("square", 0, 2 * X.nbytes, X.nbytes, False),
    ]
    assert layer.hooks.result is door
    part = Named(lambda result, x: result("part", lambda y: (y * 2)[:1], x))
    assert account(Ledger, part, X)[0].bytes == X.nbytes, "the block of what is viewed"
    nested = Named(lambda result, x: result("outer", lambda y: result("inner", torch.exp, y).sin(), x))
    assert [(unit.name, unit.bytes) for unit in account(Ledger, nested, X)] == [("outer", 2 * X.nbytes)]
    block = block_of()
    door = block.hooks.result
    units = {unit.name: unit for unit in account(Ledger, block, X, POSITIONS)}
    assert block.hooks.result is door
    assert units["act"].moved == 5 * 4 * B * T * len(block.mlp.gate.weight)  # silu 1 + 1, product 2 + 1


def test_dropout_behind_the_last_product_makes_it_needed():
    """Its mask is drawn behind it, and the second pass has to come to it."""
    units = account(Ledger, block_of(**CONFIGS["dropout"]), X, POSITIONS)
    assert all(unit.needed for unit in units)


def test_a_dry_run_gives_the_same_account_and_the_block_is_as_before():
    block = block_of()
    before = block(X, POSITIONS)
    real = account(Ledger, block, X, POSITIONS), layer_bytes(Ledger, block, X, POSITIONS)
    assert torch.equal(block(X, POSITIONS), before)
    assert all(parameter.grad is None for parameter in block.parameters()) and not X.requires_grad
    for parameter in block.parameters():  # gradients from before are no part of it
        parameter.grad = torch.ones_like(parameter)
    assert layer_bytes(Ledger, block, X, POSITIONS) == real[1]

    def dry():
        block, x = block_of(), torch.randn(B, T, D)
        return account(Ledger, block, x, torch.arange(T)), layer_bytes(Ledger, block, x, torch.arange(T))

    assert dryrun.run(dry) == real
    with pytest.raises(ValueError, match="Linear computes nothing by name"):
        account(Ledger, nn.Linear(3, 3), torch.randn(2, 3))


LONG = 64


def test_bytes_of_a_table_by_hand():
    """Rows of a large table: what is read is not what is allocated; in backward the table's gradient."""
    table, rows = GPT(small(vocab_size=3000, d_model=D, max_positions=T), layers=[0]).layers[0], 4 * B * T * D
    found = layer_bytes(Ledger, table, torch.zeros(B, T, dtype=torch.int64), POSITIONS)
    grad = 4 * 3000 * D
    assert found == LayerBytes(rows, rows, 0, rows, gradient=0, backward=grad, left=grad)
    linear = nn.Linear(D, 3 * D, bias=False)
    for wanted in (True, False):
        found = layer_bytes(Ledger, linear, X, wanted=wanted)
        grads = 4 * 3 * D * D, X.nbytes * wanted
        assert found == LayerBytes(
            3 * X.nbytes, 3 * X.nbytes, 0, 3 * X.nbytes, grads[1], sum(grads), grads[0]
        )
    frozen = layer_bytes(Ledger, linear.requires_grad_(False), X, wanted=False)
    assert frozen == LayerBytes(3 * X.nbytes, 3 * X.nbytes, 0, 3 * X.nbytes, 0, 0)
    found = layer_bytes(Ledger, nn.Tanh(), X)  # its graph saves what it puts out
    assert found == LayerBytes(*[X.nbytes] * 6, left=0)
    wide = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))  # 4 wide, 4 wide, 1
    found = layer_bytes(Ledger, wide, X)
    assert [size / X.nbytes for size in found[:5]] == [1, 8, 8, 9, 1]


GPT_CONFIG = small(num_layers=6, d_model=D, max_positions=LONG, tied=False, vocab_size=50)
N, PLACES = GPT_CONFIG.num_layers + 2, torch.arange(LONG)


def model_of() -> GPT:
    return GPT(GPT_CONFIG, seed=1)


def spec_of(model: GPT) -> list:
    """The layers of the model, each measured alone on what it gets."""
    x, found = torch.zeros(B, LONG, dtype=torch.int64), []
    for layer in model.layers:
        found.append(layer_bytes(Ledger, layer, x, PLACES))
        x = layer(x, PLACES).detach()
    return found


def plans(spec: list) -> list:
    return [every(N, size) for size in (1, 2, 3, N)] + [sqrt(N), revolve(N, 1), revolve(N, 2), revolve(N, 3)]


def test_the_peak_of_a_gpt_under_any_plan_is_predicted_from_its_layers():
    model = model_of()
    spec = spec_of(model)
    peaks = set()
    for plan in plans(spec):
        model.zero_grad()
        tokens, dy = torch.zeros(B, LONG, dtype=torch.int64), torch.randn(B, LONG, GPT_CONFIG.vocab_size)
        with Ledger() as ledger:
            given = [x.clone().untyped_storage().nbytes() for x in (tokens, PLACES, dy, *model.parameters())]
            chain(model.layers, plan)(tokens, PLACES).backward(dy)
        assert ledger.peak_bytes - sum(given) == peak_bytes(plan, spec), show(plan)
        peaks.add(ledger.peak_bytes)
    assert len(peaks) == 4


def test_a_word_of_the_front_trains_as_the_strategy_says_it():
    """The choice of a planner is a value of Strategy.recompute; gradients stay bit-equal."""

    def gradients(word):
        model, tokens = model_of(), torch.zeros(B, LONG, dtype=torch.int64)
        recompute_in(model, Strategy(recompute=word), None, Places())
        cross_entropy_sum(model(tokens), tokens).backward()
        return [parameter.grad for parameter in model.parameters()]

    choices = planned(account(Ledger, block_of(), X, POSITIONS))
    plain = gradients("none")
    for choice in choices[:: len(choices) // 3]:
        assert all(map(torch.equal, gradients(choice.policy), plain)), choice.policy
