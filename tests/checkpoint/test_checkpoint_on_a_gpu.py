"""On a GPU: what a run on one kind of device has saved, a run on the other loads to the bit, and both go on alike."""

from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from tests.parallel import small
from tests.saving import bits, state_of


def round_trip(folder, policy: str, to_gpu: bool) -> tuple[list, list[float]]:
    """Names of what is not as it was saved, and the losses of the next step on both."""
    devices = ["cpu", launch.device()] if to_gpu else [launch.device(), "cpu"]
    rows = Rows(partial(random_tokens, batch_size=8, length=8, vocab=29, seed=1), 8, 8)
    make = partial(parallelize, small(), Strategy(dp=2, zero=1, precision="float64"), partial(AdamW, lr=1e-2))
    first, second = (make(seed=seed, device=device) for seed, device in enumerate(devices))
    first.step(first.batch(rows, 0))
    store = Store(folder)
    saver = Saver(store, first.device, policy)
    first.attach(saver)
    state = state_of(first)
    saver.save(1, first.pieces(), first.plain_state(), {"position": {"step": 1}})
    losses = [first.total(first.step(first.batch(rows, 1)).loss).item()]
    saver.close()
    second.load_pieces(Saved(store.open(1)[1]))
    found = state_of(second)
    wrong = [name for name in state if not torch.equal(bits(found[name].cpu()), bits(state[name].cpu()))]
    losses.append(second.total(second.step(second.batch(rows, 1)).loss).item())
    return wrong, losses


def check(folder, policy: str, to_gpu: bool) -> None:
    for wrong, (ours, theirs) in launch.run(round_trip, folder, policy, to_gpu, ranks=2):
        assert not wrong and abs(ours - theirs) < 1e-10


@pytest.mark.cuda
@pytest.mark.parametrize("to_gpu", [True, False], ids=["to the GPU", "from the GPU"])
@pytest.mark.parametrize("policy", ["sync", "asynchronous"])
def test_on_a_gpu(policy, to_gpu, tmp_path):
    check(tmp_path, policy, to_gpu)


def test_here(tmp_path):
    check(tmp_path, "asynchronous", True)
