"""Chunks: the bits of training in 16 bytes, in 14; no choice of evictions loads fewer; never more than the room."""

from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitrain.memory.pools import on_host
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.chunks import ChunkedTraining, best_chunk, pack, utilization
from tests.parallel import small
from tests.systems.memory import test_prefetch

TOKENS = torch.arange(40).view(5, 8) * 7 % 29
POSITIONS = torch.arange(8)
CHUNK = 1024  # elements: a layer of this model needs three to five


def make_model(**changes):
    return GPT(small(tied=False, num_layers=4, **changes), seed=3, dtype=torch.bfloat16)


def loss_of(logits):
    return cross_entropy_sum(logits, TOKENS.roll(1)) / TOKENS.numel()


def make_optimizer(params):
    return AdamW(params, lr=1e-2)


def chunked(model, room, chunk=CHUNK):
    return ChunkedTraining(model.layers, chunk, room * chunk * 2, make_optimizer)


def train_plainly(model, steps=4):
    optimizer, losses = AdamW(model.parameters(), lr=1e-2, master_dtype=torch.float32), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(TOKENS))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in(chunks, steps=4):
    losses = []
    for _ in range(steps):
        losses.append(chunks.forward_backward(TOKENS, POSITIONS, loss_of).item())
        chunks.step()
    return losses


# ---- where tensors lie -------------------------------------------------------------------------------------


def test_packing_by_hand():
    assert pack([3, 3, 3, 4, 1], 6) == [[0, 1], [2], [3, 4]]
    assert pack([6, 6], 6) == [[0], [1]] and pack([], 6) == []
    assert utilization([3, 3, 3, 4, 1], 6) == 14 / 18
    with pytest.raises(ValueError, match="tensor 1 has 7 elements, a chunk 6: use larger chunks"):
        pack([1, 7], 6)
    with pytest.raises(ValueError, match="most=6: the largest tensor has 7"):
        best_chunk([1, 7], 6)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 40))
def test_the_best_chunk_wastes_no_more_than_any_other(sizes, more):
    most = max(sizes) + more
    held = {chunk: chunk * len(pack(sizes, chunk)) for chunk in range(max(sizes), most + 1)}
    found = best_chunk(sizes, most)
    assert held[found] == min(held.values())
    assert found == min(chunk for chunk in held if held[chunk] == held[found])


# ---- which chunk goes --------------------------------------------------------------------------------------


def fewest_loads(uses, room):
    """Every choice there is, at every use."""

    @cache
    def best(now, resident):
        if now == len(uses):
            return 0
        needed = uses[now]
        missing, idle = needed - resident, sorted(resident - needed)
        out = max(0, len(resident | needed) - room)
        choices = (resident.difference(gone) | needed for gone in combinations(idle, out))
        return len(missing) + min(best(now + 1, after) for after in choices)

    return best(0, frozenset())


def uses_of(chunks):
    return tuple(frozenset(chunks._needs[layer]) for layer in [*range(6), *reversed(range(5))])


@pytest.mark.parametrize("room", [5, 6, 8, 11])
def test_training_loads_as_few_chunks_as_there_can_be(room):
    chunks = chunked(make_model(), room)
    loads, enter = [], chunks._enter

    def entered(layer):
        enter(layer)
        assert not any(on_host(param) for param in chunks.layers[layer].parameters()), "all of it is there"

    chunks._enter = entered
    for _ in range(3):
        before = chunks.loads
        train_in(chunks, 1)
        loads.append(chunks.loads - before)
    assert loads == [fewest_loads(uses_of(chunks), room)] * 3


# ---- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room, chunk", [(5, CHUNK), (8, CHUNK), (100, CHUNK), (2, 8192), (3, 1 << 16)])
def test_training_in_chunks_is_training(room, chunk):
    models = [make_model() for _ in range(2)]
    chunks = chunked(models[1], room, chunk)
    assert train_in(chunks) == train_plainly(models[0])
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models)))


def held(ledger):
    """Bytes of model data, of device and host together."""
    kinds = ("parameters", "gradients", "optimizer state")
    return sum(ledger.live_by_kind[kind] + ledger.host_by_kind[kind] for kind in kinds)


def test_model_data_are_14_bytes_a_parameter_and_plainly_16():
    """And training in them is training, with as few loads as there can be: the farthest next use goes."""
    test_prefetch.test_lru_and_belady_differ()
    assert best_chunk([1, 2, 2, 1], 6) == 3
    plain, model = make_model(), make_model()
    total = sum(param.numel() for param in model.parameters())
    optimizer = AdamW(plain.parameters(), lr=1e-2, master_dtype=torch.float32)
    with Ledger() as ledger:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(plain(TOKENS)).backward()
            optimizer.step()
        assert held(ledger) == 16 * total

    sizes = [param.numel() for param in model.parameters()]
    chunk = best_chunk(sizes, 4096)
    elements = chunk * len(pack(sizes, chunk))
    with Ledger() as ledger:
        chunks = chunked(model, 5, chunk)
        for _ in range(2):
            chunks.forward_backward(TOKENS, POSITIONS, loss_of)
            with_gradients = held(ledger)
            chunks.step()
            assert held(ledger) == 14 * elements
        assert with_gradients == 14 * elements and chunks.loads == 2 * fewest_loads(uses_of(chunks), 5)
        kind = "optimizer state"
        assert (ledger.host_by_kind[kind], ledger.live_by_kind[kind]) == (8 * elements, 0)  # the moments
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters()))
    assert elements * utilization(sizes, chunk) == pytest.approx(total)


@pytest.mark.parametrize("room", [5, 8])
def test_never_more_on_the_device_than_its_room_and_each_load_is_one_copy_each_way(room):
    chunks = chunked(make_model(), room)
    for _ in range(3):
        before = chunks.loads
        with Ledger() as ledger:
            train_in(chunks, 1)
        size = (chunks.loads - before) * CHUNK * 2
        assert ledger.copied_bytes("to_device") == ledger.copied_bytes("to_host") == size
        assert max(live["parameters"] for _, live in ledger.timeline()) == room * CHUNK * 2
        kinds = ("parameters", "gradients", "optimizer state")
        assert not any(ledger.live_by_kind[kind] for kind in kinds)


def test_wrong_use_is_refused():
    model = make_model()
    for make, message in (
        (lambda: chunked(model, 2), "a layer needs . chunks, device_bytes=4096 are 2"),
        (lambda: chunked(model, 9, 500), "has .* elements, a chunk 500: use larger chunks"),
        (
            lambda: chunked(GPT(small(tied=False)), 9),
            "parameters are .torch.float32.: chunks are for one 16-bit",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    chunks = chunked(model, 9)
    chunks.forward_backward(TOKENS, POSITIONS, loss_of)
    with pytest.raises(ValueError, match="the chunks have gradients: call step"):
        chunks.forward_backward(TOKENS, POSITIONS, loss_of)
