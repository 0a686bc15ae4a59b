"""What the atlas says of ZeRO-Infinity, PatrickStar and STRONGHOLD, each shown in one place."""

import torch

from minitrain import collectives, launch
from minitrain.data_parallel.zero1 import Zero1
from minitrain.model.training.optim import AdamW
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.chunks import best_chunk, pack
from minitrain.systems.memory.file_optimizer import FileOptimizer
from minitrain.systems.memory.files import FileStore
from minitrain.systems.memory.window import LayerWindow
from minitrain.systems.plan.offload import FIGURE_2A, TIB, smallest_window, stalls
from tests.parallel import TOLERANCE, Problem, difference, one_process, train_sharded
from tests.systems.memory import test_chunks, test_window


def test_zero_infinity(tmp_path):
    """20 bytes per parameter; 2·b·s·D·L of activations (Fig. 2a: 3.08 TiB at 100T, a survey says about 4); toy
    runs of 2 and 4 ranks with states in files equal one process, each rank reading its 1/N."""
    tib = {name: round(shape.model_state_bytes() / TIB, 2) for name, shape in FIGURE_2A.items()}
    assert tib["1T"] == 18.31 and tib["10T"] == 182.81
    kept = {name: round(shape.checkpoint_bytes() / TIB, 2) for name, shape in FIGURE_2A.items()}
    assert kept["10T"] == 0.76 and kept["100T"] == 3.08
    problem = Problem(batch_sizes=(12, 11))
    reference = one_process(problem)
    trained = sum(param.numel() for param in problem.model().parameters() if param.requires_grad)

    def rank(folder):
        stores = []

        def in_files(model, group, make_optimizer):
            zero = Zero1(model, group, make_optimizer)
            stores.append(FileStore(folder, group.rank(), buffer_bytes=4096, buffers=6))
            zero.optimizer = FileOptimizer(zero.optimizer, stores[0], 500)
            return zero

        with Ledger() as ledger:
            outcome = train_sharded(problem, in_files)
        return outcome, ledger.copied_bytes("from_disk"), collectives.world().size()

    for ranks in (2, 4):
        for outcome, read, size in launch.run(rank, tmp_path, ranks=ranks):
            assert size == ranks and difference(outcome, reference) < TOLERANCE
            assert 0 <= read - 16 * trained / ranks < 16 * 2  # two moments in float64; the second step reads


def test_patrickstar():
    """14 bytes per parameter and not 16; the bits of plain training; as few loads as any choice of evictions."""
    models = [test_chunks.make_model() for _ in range(2)]
    sizes = [param.numel() for param in models[1].parameters()]
    chunk = best_chunk(sizes, 4096)
    losses = test_chunks.train_plainly(models[0], 2)
    with Ledger() as ledger:
        chunks = test_chunks.chunked(models[1], 5, chunk)
        assert test_chunks.train_in(chunks, 2) == losses
        assert test_chunks.held(ledger) == 14 * chunk * len(pack(sizes, chunk))
    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models)))
    assert chunks.loads == 2 * test_chunks.fewest_loads(tuple(chunks._trace), 5)


def test_stronghold():
    """The smallest window whose compute covers the next transfer has no stall, the next smaller one has; the
    loss through a window is the loss."""
    compute, transfer = [3, 2, 4, 1, 5, 2, 3, 3], [4, 6, 5, 7, 3, 6, 4, 5]
    window = smallest_window(compute, transfer, one_link=False)
    covered = [sum(compute[i : i + window]) >= transfer[i + window] for i in range(len(compute) - window)]
    assert all(covered) and window == 3
    assert not any(stalls(compute, transfer, window, one_link=False))
    assert any(stalls(compute, transfer, window - 1, one_link=False))
    models = [test_window.make_model(6) for _ in range(2)]
    through = LayerWindow(models[1].layers, window)
    assert test_window.train_in(through) == test_window.train_plainly(models[0])
    layers, size = test_window.uniform(8), 4 * (50 * 50 + 50)
    through = LayerWindow(layers, window)
    with Ledger() as ledger:
        through.forward_backward(torch.randn(3, 50), test_window.POSITIONS, torch.sum)
    assert max(live["parameters"] for _, live in ledger.timeline()) == (window + 1) * size
    assert all(param.grad is not None for param in through.parameters)
    AdamW(through.parameters).step()
