"""Everything in files: the bits of plain training, exact bytes, and memory that does not grow with the depth."""

import pytest
import torch

from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.ranks.events import Copy, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.files import FiledLayers, FileStore
from tests.parallel import small
from tests.systems.memory.test_window import POSITIONS, TOKENS, loss_of, make_model, train_plainly, uniform

BUFFERS = dict(buffer_bytes=4096, buffers=6)


def one_by_one(num_layers=4):
    config = small(tied=False, num_layers=num_layers)
    for number in range(num_layers + 2):
        yield GPT(config, seed=3, dtype=torch.float64, layers=[number]).layers[0]


def make_optimizer(params):
    return AdamW(params, lr=1e-2)


@pytest.mark.parametrize("piece", [100, 512])
def test_training_in_files_is_training(tmp_path, piece):
    model = make_model()
    losses = train_plainly(model)
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FiledLayers(one_by_one(), store, make_optimizer, piece)
        assert [filed.step(TOKENS, POSITIONS, loss_of).item() for _ in range(3)] == losses
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), filed.parameters()))


def test_control_without_the_new_parameters_it_is_not(tmp_path, monkeypatch):
    with FileStore(tmp_path, **BUFFERS) as store:
        filed = FiledLayers(one_by_one(), store, make_optimizer, 512)
        monkeypatch.setattr(filed, "_write", lambda number: None)
        found = [filed.step(TOKENS, POSITIONS, loss_of).item() for _ in range(3)]
    assert found != train_plainly(make_model())


def elements(layers):
    return sum(param.numel() for layer in layers for param in layer.parameters())


def taken(layers):
    """One by one: when the next is made, those before it are forgotten."""
    before = []
    for layer in layers:
        assert elements(before) == 0
        before.append(layer)
        yield layer


def reads(ledger):
    """A piece begins to be read, +, and is waited for, -."""
    read = {event.id for event in ledger.events if type(event) is Copy and event.direction == "from_disk"}
    found = (event for event in ledger.events if type(event) in (Copy, Wait) and event.id in read)
    return "".join("+" if type(event) is Copy else "-" for event in found)


@pytest.mark.parametrize("count", [3, 8])
def test_bytes_and_memory(tmp_path, count):
    """Layers of 50 x 50 + 50 float32: 10,200 bytes of parameters, twice as many of states."""
    size, x = 10_200, torch.randn(3, 50)
    with FileStore(tmp_path, buffer_bytes=4096, buffers=6) as store:
        filed = FiledLayers(taken(uniform(count)), store, AdamW, 1000)
        assert elements(filed.layers) == 0
        for step in range(2):
            with Ledger() as ledger:
                filed.step(x, POSITIONS, torch.sum)
                store.flush()
            states_read = 2 * size * count if step else 0  # the first step makes them
            assert ledger.copied_bytes("from_disk") == size * (2 * count - 1) + states_read
            assert ledger.copied_bytes("to_disk") == 3 * size * count
            assert ledger.live_by_kind["parameters"] == ledger.live_by_kind["gradients"] == 0
            most = {kind: max(live[kind] for _, live in ledger.timeline()) for kind in ledger.live_by_kind}
            assert most["parameters"] == size and most["gradients"] == size
            assert ledger.host_peak_bytes == 6 * 4096
            assert reads(ledger).startswith("+ + - + - -  + -".replace(" ", ""))  # three pieces, and a bias
        assert len(list(filed.parameters())) == 2 * count and elements(filed.layers) == 0


def test_a_shared_parameter_is_refused(tmp_path):
    with FileStore(tmp_path, **BUFFERS) as store, pytest.raises(ValueError, match="two layers share a param"):
        FiledLayers(GPT(small()).layers, store, make_optimizer, 512)
