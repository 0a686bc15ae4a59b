"""Dynamic rematerialization: gradients of a plain run, bytes that a ledger saw, and what is refused."""

import weakref
from contextlib import nullcontext
from math import ceil, inf, sqrt

import pytest
import torch
import torch.nn.functional as F

from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.ledger.operators import operator_cost
from minitrain.ranks.random_state import random_state
from minitrain.systems.memory import dtr
from minitrain.systems.memory.dtr import Dynamic, Evictable
from minitrain.systems.simulate.eviction import RULES, Evictor, chain, simulate

CONFIG = GPTConfig(vocab_size=32, d_model=16, num_layers=3, num_heads=2)


def gpt(config=CONFIG):
    model = GPT(config, dtype=torch.float64)
    tokens = torch.randint(0, config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    return model, tokens


def step(model, tokens):
    loss = cross_entropy_sum(model(tokens), tokens.roll(-1, 1))
    loss.backward()
    return loss


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def equal(ours, theirs):
    return all(type(ours[name]) is torch.Tensor and torch.equal(ours[name], theirs[name]) for name in theirs)


def constants(model, *inputs):
    return [*model.parameters(), *inputs]


@pytest.fixture(scope="module")
def plain():
    model, tokens = gpt()
    with Ledger() as ledger:
        loss = step(model, tokens)
    return loss.item(), gradients(model), ledger.peak_bytes


def limited(limit_bytes, rule="dtr"):
    """One step of a GPT under a limit."""
    model, tokens = gpt()
    evictor = Evictor(limit_bytes, rule)
    with Ledger() as ledger, Dynamic(evictor, operator_cost, constants(model, tokens)):
        loss = step(model, tokens)
        assert ledger.live_bytes == evictor.resident_bytes
    return loss.item(), gradients(model), evictor, ledger


def tanhs(x, layers):
    for _ in range(layers):
        x = x.tanh()
    return x.sum()


def test_dtr():
    """N layers in 2·ceil(sqrt(N)) results run in O(N) operators, simulated and real; results are equal."""
    ratios = {}
    for rule in ("dtr", "neighbourhood", "lru"):
        for layers in (16, 64, 512):
            evictor = simulate(chain(layers), Evictor(2 * ceil(sqrt(layers)), rule))
            assert evictor.peak_bytes <= 2 * ceil(sqrt(layers))
            ratios[rule, layers] = evictor.operators / layers
    assert all(ratios["dtr", n] < 3 and ratios["neighbourhood", n] < 3.5 for n in (16, 64, 512))
    assert ratios["lru", 512] > 2.4 * ratios["lru", 16], "a rule that is blind to cost should not pass this"
    evictor = Evictor(12)  # two results of one operator, of 3 and 6 bytes: the larger goes
    small, large = evictor.run("made", [evictor.constant(1)], [3, 6], cost=10)
    evictor.run("more", [], [4], cost=1)
    assert small.resident and not large.resident
    evictor = Evictor(12)  # of two results of one size the dear one is staler, and stays
    inputs = [evictor.constant(1)]
    (dear,), (cheap,) = (evictor.run("made", inputs, [4], cost=cost) for cost in (10, 1))
    evictor.run("more", [], [4], cost=1)
    assert dear.resident and not cheap.resident

    for layers in (16, 256):
        x = torch.linspace(-2, 2, 32, dtype=torch.float64, requires_grad=True)
        tanhs(x, layers).backward()
        again, small = x.detach().clone().requires_grad_(), 3 * 8  # the loss, its gradient, what sum expands
        evictor = Evictor((2 * ceil(sqrt(layers)) + 2) * x.nbytes + small)  # and x with its gradient
        with Ledger() as ledger, Dynamic(evictor, operator_cost, [again]):
            tanhs(again, layers).backward()
        assert torch.equal(again.grad, x.grad)
        assert ledger.peak_bytes == evictor.peak_bytes <= evictor.limit_bytes
        assert evictor.recomputed > 0 and evictor.operators < 3.2 * layers


def test_a_gpt_under_a_limit(plain):
    loss, grads, peak_bytes = plain
    for part in (1, 0.55):
        ours, theirs, evictor, ledger = limited(int(peak_bytes * part))
        assert ours == loss and equal(theirs, grads)
        assert ledger.peak_bytes == evictor.peak_bytes <= peak_bytes * part
        assert (evictor.recomputed > 0) == (evictor.evictions > 0) == (part < 1)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_same_numbers(plain, rule):
    ours, theirs, evictor, ledger = limited(int(plain[2] * 0.7), rule)
    assert ours == plain[0] and equal(theirs, plain[1])
    assert ledger.peak_bytes <= plain[2] * 0.7 and evictor.recomputed > 0


def test_the_trace_of_a_free_run_foretells_a_limited_one(plain):
    """The simulator and the tensors share the object that decides, so all counts agree."""
    trace = limited(inf)[2].trace
    for rule in ("dtr", "local"):
        real = limited(int(plain[2] * 0.7), rule)[2]
        told = simulate(trace, Evictor(int(plain[2] * 0.7), rule))
        for count in "operators recomputed recomputed_cost evictions evicted_bytes peak_bytes".split():
            assert getattr(real, count) == getattr(told, count), (rule, count)


def dropping(x, weights):
    torch.manual_seed(3)
    for weight in weights:
        x = F.dropout(torch.tanh(x @ weight), 0.4)
    x.pow(2).sum().backward()
    return torch.rand(3)


def weights_of(layers, width=16):
    generator = torch.Generator().manual_seed(0)
    how = dict(dtype=torch.float64, generator=generator, requires_grad=True)
    return [torch.randn(width, width, **how) for _ in range(layers)]


@pytest.mark.parametrize("replayed", [True, False])
def test_random_operators_start_from_the_same_state(monkeypatch, replayed):
    if not replayed:
        monkeypatch.setattr(dtr, "drawing_from", lambda state, source: nullcontext())
    x, ours, theirs = torch.ones(64, 16, dtype=torch.float64), weights_of(8), weights_of(8)
    later = dropping(x, theirs)
    evictor = Evictor(8 * 2 * 16 * 16 * 8 + 12 * x.nbytes)
    with Dynamic(evictor, operator_cost, [x, *ours]):
        ours_later = dropping(x, ours)
        assert evictor.recomputed > 4
        same = all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))
        assert same == replayed and torch.equal(ours_later, later) == replayed


def tree(leaf, depth_of, left, right, node):
    """A value for a tree whose shape is in the data: a node has no children if its first number says so."""
    if depth_of == 0 or float(node.detach()[0, 0]) < -0.5:
        return torch.tanh(node @ leaf)
    a = tree(leaf, depth_of - 1, left, right, torch.tanh(node @ left))
    b = tree(leaf, depth_of - 1, left, right, torch.tanh(node @ right))
    return torch.sigmoid(a) * b


def test_a_graph_that_depends_on_the_data():
    seen = set()
    for number in (1, 2, 4, 5, 6):
        node = torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        theirs, ours = weights_of(3), weights_of(3)
        tree(theirs[0], 6, theirs[1], theirs[2], node).sum().backward()
        evictor = Evictor(6 * 16 * 16 * 8 + 28 * node.nbytes)
        with Ledger() as ledger, Dynamic(evictor, operator_cost, [node, *ours]):
            tree(ours[0], 6, ours[1], ours[2], node).sum().backward()
        for a, b in zip(ours, theirs):
            assert b.grad is None if a.grad is None else torch.equal(a.grad, b.grad)
        unread = sum(weight.nbytes for weight in ours if weight.grad is None)  # the ledger never saw them
        assert ledger.peak_bytes + unread == evictor.peak_bytes <= evictor.limit_bytes
        seen.add(evictor.operators - evictor.recomputed)
        recomputed = evictor.recomputed
    assert len(seen) == 5 and recomputed > 0


def test_in_place_is_a_copy():
    """The old contents can still be made, for what was computed from them."""
    x = torch.arange(4.0)
    evictor = Evictor()
    with Dynamic(evictor, operator_cost):
        a = x + 1
        b = a * 2
        a.mul_(10)
        for block in (b.handle.value.block, a.handle.value.block):
            evictor.evict(block)
        assert torch.equal(b, 2 * (x + 1)) and torch.equal(a, 10 * (x + 1))
        assert evictor.recomputed == 3, "x + 1, times 2, times 10"
        view = a[1:]
        for shared in (a, view):
            with pytest.raises(ValueError, match="add_ writes into memory that a view .* shares; write to"):
                shared.add_(1)
        with pytest.raises(ValueError, match="add writes into 1 tensors or out=; write to a clone"):
            torch.add(x, 1, out=b)
        with pytest.raises(ValueError, match="copy has another layout"):
            torch.empty_strided((3,), (2,)).zero_()


def test_views_share_the_memory_of_what_they_view():
    evictor = Evictor()
    with Dynamic(evictor, operator_cost):
        a = torch.arange(12.0) * 2
        before, operators = evictor.resident_bytes, evictor.operators
        b = a.view(3, 4).t()[1:]
        assert (evictor.resident_bytes, evictor.operators) == (before, operators)
        block = a.handle.value.block
        assert b.handle.value.block is block and b.shape == (3, 3) and b.stride() == (1, 4)
        del a
        assert block.resident, "a view holds its memory"
        evictor.evict(block)
        assert torch.equal(b, (torch.arange(12.0) * 2).view(3, 4).t()[1:]) and evictor.recomputed == 2
        del b
        assert not block.resident


def test_what_comes_from_outside_counts_as_long_as_it_lives():
    """Named ones from the start, others from their first use, views of them too; once each."""
    weight, evictor = torch.ones(10), Evictor()
    with Dynamic(evictor, operator_cost, [weight, weight[2:]]):
        assert evictor.resident_bytes == 40
        weight.view(5, 2)
        assert evictor.resident_bytes == 40
    other = torch.ones(6)
    with Dynamic(evictor := Evictor(), operator_cost):
        assert evictor.resident_bytes == 0
        part = other[:2]
        assert evictor.resident_bytes == 24, "the block of what is viewed"
        y = part * 2
        assert evictor.resident_bytes == 24 + 8
        del y, part, other
        assert evictor.resident_bytes == 0 and evictor.trace[-1] == ("release", 0), "as those who replay it"


def test_what_stays_is_released_with_its_tensor():
    """Numbers for Python, and constants that are written to in place: no copy of them is made."""
    x = torch.ones(4)
    with Ledger() as ledger, Dynamic(evictor := Evictor(), operator_cost, [x]):
        y = x * 3
        assert y.sum().item() == 12
        live = evictor.resident_bytes
        for _ in range(3):
            assert float(y[0]) == 3
        assert evictor.resident_bytes == live == ledger.live_bytes
        operators = evictor.operators
        x.add_(1)
        assert evictor.resident_bytes == live == ledger.live_bytes and evictor.operators == operators + 1
    assert x.tolist() == [2] * 4 and type(x) is torch.Tensor


def test_a_gradient_is_plain_and_counts_on_and_so_is_a_sum_of_gradients():
    """Behind the hook that makes it so operators are seen again; behind the block it holds no leaf."""
    x = torch.ones(3, requires_grad=True)
    with Dynamic(evictor := Evictor(), operator_cost, [x]) as mode:
        for number in (1, 2):
            (x * 2).sum().backward()
            assert type(x.grad) is torch.Tensor and x.grad.tolist() == [2 * number] * 3
            assert evictor.resident_bytes == 24, "x and its gradient"
        before = evictor.operators
        y = x.detach() * 5
        assert isinstance(y, Evictable) and evictor.operators > before
        del y
    leaf = weakref.ref(x)
    del x
    assert leaf() is None and mode is not None


def test_the_random_state_is_kept_for_what_draws_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(dtr, "random_state", lambda source: asked.append(source) or random_state(source))
    with Dynamic(Evictor(), operator_cost):
        a = (torch.ones(4) + 1) * torch.rand(4)
        b = a.sum() * a
    assert len(asked) == 1 and b.shape == (4,)


def test_long_chains_of_operators_and_of_views():
    """Nothing here recurses, neither to make results again nor to take views."""
    x = torch.ones(4)
    with Dynamic(evictor := Evictor(limit_bytes=400), operator_cost, [x]):
        y = x
        for _ in range(1200):
            y = y + 1
        for _ in range(400):
            y = y.view(2, 2).view(4)
        evictor.evict(y.handle.value.block)
        assert y.sum().item() == 4 * 1201 and evictor.recomputed == 1200
        del y
        assert evictor.resident_bytes == x.nbytes


def test_what_came_from_outside_must_not_change():
    x = torch.ones(4)
    with Dynamic(evictor := Evictor(), operator_cost):
        y = x * 2
        x.add_(1)
        evictor.evict(y.handle.value.block)
        with pytest.raises(ValueError, match="mul cannot run again: a constant was written to"):
            y.sum()


def test_after_the_block_results_may_be_read():
    x = torch.ones(4, requires_grad=True)
    with Dynamic(evictor := Evictor(), operator_cost, [x]):
        loss = (x * 3).sum()
        assert x._backward_hooks
    assert not x._backward_hooks, "nothing of ours stays on a leaf"
    evictor.evict(loss.handle.value.block)
    assert isinstance(loss, Evictable) and loss.item() == 12 and evictor.recomputed == 2


def test_a_generator_of_ones_own_draws_again_what_it_drew():
    """And what it draws next is what it would have drawn without an eviction."""

    def program():
        generator, x = torch.Generator().manual_seed(3), torch.ones(64)
        noise = [torch.rand(64, generator=generator) * x for _ in range(4)]
        last = torch.rand(1, generator=generator)
        return sum((part * (i + 1)).sum() for i, part in enumerate(noise)).item(), last.item()

    expected = program()
    evictor = Evictor(1300, "lru")
    with Dynamic(evictor, operator_cost):
        assert program() == expected
    assert evictor.recomputed > 0
