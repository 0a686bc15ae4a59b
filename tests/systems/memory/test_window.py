"""Layer by layer, and through a window: the bits of recomputation, bytes and memory as the formulas say."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

from minitrain.memory.pools import on_host
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.ranks.events import Compute
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory import window as window_module
from minitrain.systems.memory.window import LayerToLayer, LayerWindow, forward_backward
from minitrain.systems.plan.offload import smallest_window
from tests.parallel import small

TOKENS = torch.arange(40).view(5, 8) * 7 % 29
POSITIONS = torch.arange(8)


def make_model(num_layers=4, **changes):
    return GPT(small(tied=False, num_layers=num_layers, **changes), seed=3, dtype=torch.float64)


def loss_of(logits):
    return cross_entropy_sum(logits, TOKENS.roll(1)) / TOKENS.numel()


def train_plainly(model, steps=3, clip=None):
    optimizer, losses = AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(TOKENS))
        loss.backward()
        if clip:
            clip_grad_norm(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in(window, steps=3, clip=None):
    optimizer, losses = AdamW(window.parameters, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(window.forward_backward(TOKENS, POSITIONS, loss_of).item())
        if clip:
            clip_grad_norm(window.parameters, clip)
        optimizer.step()
    return losses


# ---- one layer after the other -----------------------------------------------------------------------------


def nothing(number): ...


def test_in_turn_keeps_an_input_a_layer_and_the_graph_of_one():
    """Widths 4 and 400: what is kept of n layers grows by their inputs of 4 numbers, not by 400."""

    def peak(count):
        layers = [nn.Sequential(nn.Linear(4, 400), nn.Tanh(), nn.Linear(400, 4)) for _ in range(count)]
        x = torch.randn(10, 4)

        def forget(number):
            for param in layers[number].parameters():
                param.grad = None

        with Ledger() as ledger:
            forward_backward(layers, [x], lambda y, u: y.sum(), nothing, forget)
        return ledger.peak_by_kind["activations"]

    assert peak(9) - peak(5) == 4 * 10 * 4 * 4


# ---- a window ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_training_through_a_window_is_training(window, clip):
    models = [make_model() for _ in range(2)]
    losses = train_plainly(models[0], clip=clip)
    through = LayerWindow(models[1].layers, window)
    assert all(on_host(param) for param in models[1].parameters())
    found = train_in(through, clip=clip)
    if clip:  # the norm adds up layer by layer
        assert torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=0, atol=1e-12)
    else:
        assert found == losses
    through._engine.clear()
    for one, other in zip(*(model.parameters() for model in models)):
        assert torch.allclose(one, other, rtol=0, atol=1e-12 if clip else 0)


def test_control_without_bringing_copies_up_to_date_it_is_not(monkeypatch):
    models = [make_model() for _ in range(2)]
    through = LayerWindow(models[1].layers, 2)
    monkeypatch.setattr("minitrain.systems.memory.window.to_device", stale(through))
    assert train_in(through) != train_plainly(models[0])


def stale(window):
    from minitrain.memory.pools import to_device

    return lambda x, device=None, out=None: to_device(x, device, out=None if out is None else out.clone())


def test_the_host_updates_a_layer_beside_the_backward_of_others():
    """The host has updated the last layer, by an optimizer of its own, before the first one's backward begins: that
    waits for it. Losses and weights are those of one optimizer of all."""
    plain, model, updated, beside = make_model(), make_model(), threading.Event(), []

    class Telling(AdamW):
        def step(self):
            super().step()
            updated.set()

    first, window = model.layers[1], LayerWindow(model.layers, window=2)
    window.update_on_host(lambda params: Telling(params, lr=1e-2))
    seen = lambda *_: beside.append(updated.wait(60)) if torch.is_grad_enabled() else None
    first.register_forward_pre_hook(seen)
    for wanted in train_plainly(plain):
        updated.clear()
        assert window.forward_backward(TOKENS, POSITIONS, loss_of).item() == pytest.approx(wanted, abs=1e-12)
    assert beside == [True] * 3 and all(param.grad is None for param in window.parameters)
    window._engine.clear()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_two_batches_add_up_their_gradients():
    models = [make_model() for _ in range(2)]
    through = LayerWindow(models[1].layers, 2)
    for _ in range(2):
        loss_of(models[0](TOKENS)).backward()
        through.forward_backward(TOKENS, POSITIONS, loss_of)
    grads = torch.cat([param.grad.flatten() for param in models[0].parameters()])
    assert torch.equal(torch.cat([param.grad for param in through.parameters]), grads)


def uniform(count, width=50):
    torch.manual_seed(0)
    return [Plus(nn.Linear(width, width)) for _ in range(count)]


class Plus(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, positions):
        return x + self.inner(x).tanh()


@pytest.mark.parametrize("count, window", [(4, 1), (8, 1), (8, 2), (16, 3), (8, 6)])
def test_bytes_over_the_link_and_on_the_device(count, window):
    """A layer of 50 x 50 + 50 float32: 10,200 bytes, of which m + 1 are on the device, however deep. Losses and
    weights are those of a plain run, with one optimizer and with those of the host beside backward."""
    test_training_through_a_window_is_training(min(window, 5), clip=None)
    test_the_next_layers_of_the_window_are_here_or_coming_and_no_other(min(window, 3))
    if window == 1:
        test_the_host_updates_a_layer_beside_the_backward_of_others()
    layers, x, size = uniform(count), torch.randn(3, 50), 4 * (50 * 50 + 50)
    with Ledger() as ledger:
        through = LayerWindow(layers, window)
    assert ledger.copied_bytes("to_host") == ledger.copied_bytes() == size * count
    optimizer = AdamW(through.parameters)
    for _ in range(3):
        optimizer.zero_grad()
        with Ledger() as ledger:
            through.forward_backward(x, POSITIONS, torch.sum)
        assert ledger.copied_bytes("to_device") == size * (2 * count - window - 1)
        assert ledger.copied_bytes("to_host") == size * count
        device = ledger.peak_by_kind
        assert through.room_bytes == size * (window + 1)
        assert max(live["parameters"] for _, live in ledger.timeline()) == size * (window + 1)
        assert max(live["gradients"] for _, live in ledger.timeline()) == 2 * size
        assert device["optimizer state"] == 0 and ledger.live_by_kind["gradients"] == 0
        host = ledger.host_by_kind
        assert (host["parameters"], host["gradients"], host["activations"]) == (size * count, size * count, 0)
        optimizer.step()
        assert through._engine.late == 1, "a layer was not there when it was used"
    assert smallest_window([1] * 8, [3] * 8) == 6  # the link brings a layer every 3


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_next_layers_of_the_window_are_here_or_coming_and_no_other(window):
    """Where the room is that of the last two layers, which are large, no more are looked ahead for."""
    layers = [*uniform(6), *(Plus(nn.Sequential(nn.Linear(50, 400), nn.Linear(400, 50))) for _ in range(2))]
    through, found = LayerWindow(layers, window), []
    use = through._engine.use

    def watched(number):
        value = use(number)
        found.append((number, set(through._engine._here)))
        return value

    through._engine.use = watched
    through.forward_backward(torch.randn(3, 50), POSITIONS, torch.sum)
    order = [number for number, _ in found]
    for place, (_, here) in enumerate(found):
        assert here >= set(order[place : place + window + 1])
        assert max(here) <= max(order[: place + window + 1])


@pytest.mark.parametrize(
    "make, window, message",
    [
        (lambda: make_model().layers, 0, "window=0 of 6 layers: use 1 to 5"),
        (lambda: make_model().layers, 6, "window=6 of 6 layers"),
        (lambda: GPT(small()).layers, 1, "two layers share a parameter .a tied table.: untie it"),
        (lambda: [uniform(1)[0], uniform(1)[0].double()], 1, "several dtypes"),
        (lambda: [uniform(1)[0], uniform(1)[0].requires_grad_(False)], 1, "frozen"),
    ],
)
def test_wrong_use_is_refused(make, window, message):
    with pytest.raises(ValueError, match=message):
        LayerWindow(make(), window)


def test_there_is_room_for_the_largest_run_of_layers_wherever_it_is():
    class Layer(nn.Linear):
        def forward(self, x, positions):
            return super().forward(x)

    sizes = [(2, 2), (2, 8), (8, 8), (8, 2)]
    layers = [Layer(*sizes[0], bias=False), Plus(nn.Identity())]  # one without parameters passes
    layers += [Layer(*size, bias=False) for size in sizes[1:]]
    window = LayerWindow(layers, window=1)
    assert window.room_bytes == 4 * (64 + 16)
    window.forward_backward(torch.ones(3, 2), torch.arange(3), torch.sum)
    assert all(param.grad is not None for param in window.parameters)


def test_of_inputs_nobody_asks_for_a_gradient_and_each_goes_when_it_has_been_used(monkeypatch):
    """FLOPs of two layers of 8 x 8, a product of 4 rows each: forward once and twice, dx of the last alone."""
    layers, inputs, left = [nn.Linear(8, 8, bias=False) for _ in range(2)], torch.ones(4, 8), []
    alive, to_host = weakref.WeakSet(), window_module.to_host

    def watched(x):
        alive.add(transfer := to_host(x))
        return transfer

    def loss_of(y, u):
        return y.sum()

    def run(layer, x):
        if torch.is_grad_enabled():
            left.append(len(alive))
        return layer(x)

    with Ledger() as ledger:
        forward_backward(layers, [inputs], loss_of, nothing, nothing)
    product = 2 * 4 * 8 * 8
    assert ledger.flops == product * (3 + 2 + 1)  # forwards, dW, dx
    assert "clone" not in [event.name for event in ledger.events if type(event) is Compute]
    parts = [lambda x, layer=layer: run(layer, x) for layer in layers]
    monkeypatch.setattr(window_module, "to_host", watched)
    forward_backward(parts, inputs.split(1), loss_of, nothing, nothing, on_host=True)
    assert left == [4, 4, 4, 4, 3, 2, 1, 0]  # the last layer's are outputs; then the first's, one by one


def test_of_several_microbatches_each_passes_a_layer_before_the_next_is_asked_for():
    said, linears = [], [nn.Linear(2, 2) for _ in range(3)]

    def of(number):
        def run(x, other):
            assert other == "both get it"
            said.append((number, len(x)))
            return linears[number](x)

        return run

    def loss_of(y, u):
        said.append(("loss", u))
        return y.sum()

    layers, parts = [of(number) for number in range(3)], [torch.ones(rows, 2) for rows in (1, 2)]
    before, after = lambda i: said.append(("before", i)), lambda i: said.append(("after", i))
    forward_backward(layers, parts, loss_of, before, after, ("both get it",))
    assert said == [
        ("before", 0), (0, 1), (0, 2), ("before", 1), (1, 1), (1, 2),
        ("before", 2), (2, 1), ("loss", 0), (2, 2), ("loss", 1), ("after", 2),
        ("before", 1), (1, 1), (1, 2), ("after", 1), ("before", 0), (0, 1), (0, 2), ("after", 0),
    ]  # fmt: skip


# ---- one layer at a time ---------------------------------------------------------------------------------

WIDTH, ROWS = 6, 5
LAYER_BYTES = 8 * (WIDTH * WIDTH + WIDTH)


def stack(depth: int) -> list[nn.Module]:
    torch.manual_seed(depth)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(depth)]


def batch(microbatches: int, rows: int = ROWS):
    torch.manual_seed(1)
    shape = microbatches, rows, WIDTH
    return torch.randn(shape, dtype=torch.float64).unbind(), torch.randn(shape, dtype=torch.float64).unbind()


def loss_fn(y, target):
    return (y - target).square().sum()


def of_plain(layers, inputs, targets):
    model = nn.Sequential(*copy.deepcopy(layers))
    losses = [loss_fn(model(x), target) for x, target in zip(inputs, targets)]
    for loss in losses:
        loss.backward()
    return sum(losses).detach(), [param.grad for param in model.parameters()]


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("depth, microbatches", [(1, 2), (2, 1), (5, 3)])
def test_gradients_are_those_of_the_plain_model_to_the_bit(depth, microbatches, stash):
    layers, (inputs, targets) = stack(depth), batch(microbatches)
    loss, grads = of_plain(layers, inputs, targets)
    run = LayerToLayer(layers, loss_fn, stash)
    for _ in range(2):  # gradients are written anew
        assert torch.equal(run(inputs, targets), loss)
        ours = [param.grad for layer in layers for param in layer.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))
    assert all(on_host(param) and on_host(param.grad) for layer in layers for param in layer.parameters())


def step(depth, microbatches=2, rows=ROWS, stash="device"):
    layers, (inputs, targets) = stack(depth), batch(microbatches, rows)
    run = LayerToLayer(layers, loss_fn, **({} if stash == "device" else dict(stash=stash)))
    with Ledger() as ledger:
        run(inputs, targets)
    return ledger


@pytest.mark.parametrize("stash", ["device", "host"])
def test_parameters_on_the_device_are_two_layers_however_deep(stash):
    """And the host's grows with depth."""
    for depth in (4, 16):
        for ledger in (step(depth, stash=stash), dryrun.run(step, depth, 2, ROWS, stash, ranks=1)):
            kinds = dict(parameters=2 * LAYER_BYTES, buffers=0, gradients=2 * LAYER_BYTES)
            lives = [live for _, live in ledger.timeline()]
            assert {kind: max(live[kind] for live in lives) for kind in kinds} == kinds
            on_the_host = ledger.host_by_kind
            assert on_the_host["parameters"] == on_the_host["gradients"] == depth * LAYER_BYTES
            assert ledger.host_by_kind["activations"] == 0  # all given back


def test_l2l():
    """The check of the atlas's row: 4 to 64 layers, one figure of the device's; gradients of the plain model."""
    for depth in (4, 16, 64):
        test_gradients_are_those_of_the_plain_model_to_the_bit(depth, 2, "host")
        assert max(live["parameters"] for _, live in step(depth).timeline()) == 2 * LAYER_BYTES
    test_bytes_over_the_link_do_not_depend_on_microbatches(microbatches=4, depth=7)
    layers, data = stack(4), batch(3)
    plain, run = copy.deepcopy(layers), LayerToLayer(layers, loss_fn)
    run.update_on_host(lambda params: torch.optim.SGD(params, lr=0.01))
    for _ in range(3):
        loss, grads = of_plain(plain, *data)
        assert torch.allclose(run(*data), loss, rtol=1e-12, atol=0)
        for param, grad in zip(nn.ModuleList(plain).parameters(), grads):
            param.data -= 0.01 * grad


@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_bytes_over_the_link_do_not_depend_on_microbatches(depth, microbatches):
    ledger = step(depth, microbatches)
    assert ledger.copied_bytes("to_device") == max(1, 2 * depth - 2) * LAYER_BYTES
    assert ledger.copied_bytes("to_host") == depth * LAYER_BYTES
    stashed = (depth - 1) * microbatches * ROWS * WIDTH * 8
    ledger = step(depth, microbatches, stash="host")
    assert ledger.copied_bytes("to_device") == max(1, 2 * depth - 2) * LAYER_BYTES + stashed
    assert ledger.copied_bytes("to_host") == depth * LAYER_BYTES + stashed


def test_activations_kept_are_the_inputs_of_layers():
    """With the stash on the host the device's do not grow with depth either."""
    grows = [step(depth).peak_by_kind["activations"] for depth in (8, 16, 24)]
    assert grows[1] - grows[0] == grows[2] - grows[1] == 8 * 2 * ROWS * WIDTH * 8
    fixed = [step(depth, stash="host").peak_bytes for depth in (8, 16, 24)]
    assert fixed[0] == fixed[1] == fixed[2]
