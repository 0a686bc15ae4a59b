"""L2L on stacks of layers: gradients of the plain model, parameters on the device that do not grow with depth."""

import copy

import pytest
import torch
from torch import nn

from minitrain.memory.pools import on_host
from minitrain.ranks.events import Compute, Copy, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.l2l import LayerToLayer

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


def test_layers_without_parameters_pass():
    layers, (inputs, targets) = [nn.Tanh(), *stack(2), nn.Tanh()], batch(2)
    loss, grads = of_plain(layers, inputs, targets)
    assert torch.equal(LayerToLayer(layers, loss_fn)(inputs, targets), loss)
    ours = [param.grad for layer in layers for param in layer.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(ours, grads, strict=True))


def test_training_is_the_plain_models():
    """The caller updates on the host; the next step fetches what it has written."""
    layers, (inputs, targets) = stack(3), batch(2)
    plain = nn.Sequential(*copy.deepcopy(layers))
    run = LayerToLayer(layers, loss_fn)
    ours = torch.optim.SGD([param for layer in layers for param in layer.parameters()], lr=0.01)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        run(inputs, targets)
        ours.step()
        theirs.zero_grad()
        for x, target in zip(inputs, targets):
            loss_fn(plain(x), target).backward()
        theirs.step()
    for a, b in zip(nn.Sequential(*layers).parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


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
            most = {
                kind: max(live[kind] for _, live in ledger.timeline())
                for kind in ("parameters", "buffers", "gradients")
            }
            assert most == dict(parameters=2 * LAYER_BYTES, buffers=0, gradients=2 * LAYER_BYTES)
            on_the_host = ledger.host_by_kind
            assert on_the_host["parameters"] == on_the_host["gradients"] == depth * LAYER_BYTES
            assert ledger.host_by_kind["activations"] == 0  # all given back


def test_l2l():
    """The check of the atlas's row: 4 to 64 layers, one figure of the device's; gradients of the plain model."""
    for depth in (4, 16, 64):
        test_gradients_are_those_of_the_plain_model_to_the_bit(depth, 2, "host")
        assert max(live["parameters"] for _, live in step(depth).timeline()) == 2 * LAYER_BYTES


def test_a_plain_model_grows_with_depth():
    """Control: what L2L is compared with."""

    def plain(depth):
        model = nn.Sequential(*stack(depth))
        with Ledger() as ledger:
            loss_fn(model(batch(1)[0][0]), batch(1)[1][0]).backward()
        return ledger.peak_by_kind["parameters"]

    assert [plain(depth) for depth in (4, 64)] == [4 * LAYER_BYTES, 64 * LAYER_BYTES]


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


def test_the_next_layer_comes_while_this_one_works():
    events = step(4).events
    arrives = {
        event.id: number
        for number, event in enumerate(events)
        if type(event) is Copy and event.direction == "to_device"
    }
    waited = {event.id: number for number, event in enumerate(events) if type(event) is Wait}
    between = [sum(type(event) is Compute for event in events[arrives[id] : waited[id]]) for id in arrives]
    assert between[0] == 0 and all(between[1:])


def test_room_for_one_layer_only_is_late_every_time():
    """Control: without a place for the next layer nothing hides a fetch."""
    run = LayerToLayer(stack(4), loss_fn)
    run._engine.room_bytes = LAYER_BYTES
    run(*batch(1))
    assert run._engine.late == 7
    run = LayerToLayer(stack(4), loss_fn)
    run(*batch(1))
    assert run._engine.late == 1


def test_bad_input():
    with pytest.raises(ValueError, match="stash='disk'; use device or host"):
        LayerToLayer(stack(1), loss_fn, "disk")
    for layers in ([], [nn.Tanh()]):
        with pytest.raises(ValueError, match="have no parameters"):
            LayerToLayer(layers, loss_fn)
    with pytest.raises(ValueError, match="2 microbatches of inputs and 1 of targets"):
        LayerToLayer(stack(1), loss_fn)(batch(2)[0], batch(1)[1])
    with pytest.raises(ValueError, match="0 microbatches of inputs and 0 of targets; give .* at least one"):
        LayerToLayer(stack(1), loss_fn)([], [])
