"""Everything in files: the bits of plain training, exact bytes, and memory that does not grow with the depth."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from minitrain import collectives, launch
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.ranks.events import Copy, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.files import FiledLayers, FileStore
from minitrain.systems.plan.offload import Server, Work, fuyou_phases
from tests.parallel import small
from tests.systems.memory.test_split import peaks
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


def infinity_on_ranks(folder):
    """(losses, parameters, elements in this rank's file, bytes it reads in the last step and writes in all)"""
    group = collectives.world()
    mine = slice(group.rank(), None, group.size())
    part = lambda logits: cross_entropy_sum(logits, TOKENS.roll(1)[mine]) / TOKENS.numel()
    with FileStore(folder, group.rank(), **BUFFERS) as store:
        filed, losses = FiledLayers(one_by_one(), store, make_optimizer, 100, group), []
        for _ in range(3):
            before = store.read_bytes
            losses.append(collectives.all_reduce(filed.step(TOKENS[mine], POSITIONS, part), group).item())
        read = store.read_bytes - before
        store.flush()
        sizes = [sum(pieces[-1].last for *_, pieces in cut) for cut in filed._cut]
        return losses, [param.clone() for param in filed.parameters()], sizes, read, store.written_bytes


def test_zero_infinity(tmp_path, ranks=4):
    """Parameters and both moments, 8 bytes each, lie in files. Layer by layer ranks train as one process; a rank reads
    and writes 1/n of each: parameters in forward and in backward (the last layer's once), moments once. A linear
    layer in 8 tiles has an eighth of its weights on the device."""
    assert 8 * peaks(8)[0] == peaks(1)[0]
    model = make_model()
    losses = train_plainly(model)
    for found, params, sizes, read, written in launch.run(infinity_on_ranks, tmp_path, ranks=ranks):
        assert found == pytest.approx(losses, abs=1e-12)
        assert all(
            torch.allclose(one, two, rtol=0, atol=1e-9) for one, two in zip(model.parameters(), params)
        )
        assert all(0 <= size * ranks - elements([of]) < 4 * 20 for size, of in zip(sizes, model.layers))
        assert read == 8 * (4 * sum(sizes) - sizes[-1]) and written == 8 * (1 + 3 * 3) * sum(sizes)


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


def saved_in(store, resident, layer, x, number):
    """layer(x), of which what autograd saves is in a file."""
    names = [f"{number} {place}" for place in range(9)]

    def put(saved):
        if saved.data_ptr() in resident:
            return saved
        store.write(name := names.pop(), saved.detach())
        return name

    def get(name):
        if isinstance(name, torch.Tensor):
            return name
        found = store.read(name).clone()
        store.release(name)
        return found

    with torch.autograd.graph.saved_tensors_hooks(put, get):
        return layer(x)


def test_phases_of_fuyou_are_bytes_of_files(tmp_path):
    """Weights in bfloat16 and 12 bytes of states there and back, the last layer's weights being there still; and what
    is saved of three layers of five, the others are computed again."""
    count, size = 5, 2550 * 5
    phases = fuyou_phases(Work(size, 3000, 0, 0, 0), Server(1, 1, 1, 1, 0), Fraction(3, 5))
    model = [torch.nn.Linear(50, 50) for _ in range(count)]  # each saves 600 bytes
    x = torch.randn(3, 50, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.nn.Sequential(*model)(x).sum(), x)
    resident = {param.data_ptr() for layer in model for param in layer.parameters()}
    with FileStore(tmp_path, buffer_bytes=4096, buffers=6) as store:
        make = partial(AdamW, master_dtype=torch.float32)
        filed = FiledLayers((layer.bfloat16() for layer in uniform(count)), store, make, 1000)
        filed.step(x.detach().bfloat16(), POSITIONS, torch.sum)  # makes the states
        with Ledger() as ledger:
            filed.step(x.detach().bfloat16(), POSITIONS, torch.sum)
            y = x
            for number, layer in enumerate(model):
                save = partial(saved_in, store, resident, layer, number=number)
                y = save(y) if number < 3 else checkpoint(layer, y, use_reentrant=False)
            store.flush()
            forward = ledger.copied_bytes("to_disk") - 14 * size
            (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, wanted) and forward == 3 / 5 * 3000
        moved = ledger.copied_bytes("to_disk") + ledger.copied_bytes("from_disk")
    assert moved == sum(phase["SSD"] for phase in phases.values()) - 2 * 2550


def test_a_shared_parameter_is_refused(tmp_path):
    with FileStore(tmp_path, **BUFFERS) as store, pytest.raises(ValueError, match="two layers share a param"):
        FiledLayers(GPT(small()).layers, store, make_optimizer, 512)
