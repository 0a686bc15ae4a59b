"""Matrices on grids of ranks: SUMMA, Cannon, two dimensions and two and a half; equal to one process, bytes as promised."""
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minitrain import collectives, dryrun, launch
from minitrain.ledger import Ledger
from minitrain.memory.saved_tensors import SavedTensors
from minitrain.mesh import Mesh
from minitrain.model import Block, GPTConfig
from minitrain.optim import AdamW
from minitrain.sharding import full_tensor, shard
from minitrain.tensor_parallel import optimus, summa as summa_module, tesseract
from minitrain.tensor_parallel.cannon import cannon
from minitrain.tensor_parallel.optimus import Linear2D, Norm2D
from minitrain.tensor_parallel.summa import block, summa, summa_nt, summa_overlapped, summa_tn, whole
from minitrain.tensor_parallel.tesseract import Linear25D, Norm25D, batch_block, whole_batch
from tests.parallel import TOLERANCE

DOUBLE = 8                                              # bytes


def grid(side: int):
    """Row group and column group: who differs in the column is in my row."""
    mesh = Mesh(row=side, column=side)
    return mesh.group("column"), mesh.group("row")


def cuboid(side: int, depth: int):
    mesh = Mesh(depth=depth, row=side, column=side)
    return mesh.group("column"), mesh.group("row"), mesh.group("depth")


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def sent(fn: Callable) -> tuple[object, int]:
    with Ledger() as ledger:
        result = fn()
    return result, ledger.sent_bytes()


# ---- products --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("side", [1, 2, 3])
def test_products_and_their_bytes(side):
    """Every product, of matrices and of batches, on every rank; what each rank sends."""
    B, T, K, N = 6, 2, 12, 18

    def rank():
        groups = grid(side)
        i, j, wrong = groups[1].rank(), groups[0].rank(), []
        for front in ((B,), (B, T)):
            A, W, C = random(*front, K), random(K, N, seed=1), random(*front, N, seed=2)
            a, w, c = (block(matrix, *groups) for matrix in (A, W, C))
            kept = [x.clone() for x in (a, w, c)]
            steps, skew = (side - 1) * (a.nbytes + w.nbytes), a.nbytes * (i > 0) + w.nbytes * (j > 0)
            for product, left, right, expected, nbytes in [
                    (summa, a, w, A @ W, steps), (summa_overlapped, a, w, A @ W, steps), (summa_nt, c, w, C @ W.T, steps),
                    (summa_tn, a, c, A.flatten(0, -2).T @ C.flatten(0, -2), steps), (cannon, a, w, A @ W, steps + skew)]:
                result, sent_bytes = sent(lambda: product(left, right, *groups))
                if apart(whole(result, *groups), expected) > TOLERANCE or sent_bytes != nbytes:
                    wrong.append((product.__name__, front, sent_bytes, nbytes))
            if not torch.equal(summa(a, w, *groups), summa_overlapped(a, w, *groups)):
                wrong.append("overlapped has other bits")
            if not all(torch.equal(x, y) for x, y in zip((a, w, c), kept)):
                wrong.append("an input was written to")
        return wrong

    assert launch.run(rank, ranks=side * side) == [[]] * side * side


def test_after_the_skew_cannon_speaks_to_neighbours_only():
    side = 4

    def messages():
        groups = grid(side)
        calls = []
        with collectives.observe(lambda kind, call: calls.append(call) if kind == "issue" else None):
            cannon(torch.zeros(3, 5), torch.zeros(5, 2), *groups)
        assert {call.op for call in calls} == {"send", "receive"}
        return [call.peer for call in calls if call.op == "send"]

    for me in range(side * side):
        i, j = divmod(me, side)
        place = lambda i, j: i % side * side + j % side                                          # noqa: E731
        skew = [place(i, j - i)] * (i > 0) + [place(i - j, j)] * (j > 0)
        assert dryrun.run(messages, rank=me, ranks=side * side) == skew + [place(i, j - 1), place(i - 1, j)] * (side - 1)


def test_each_rank_sends_its_share_on_any_grid():
    """Over q steps a rank takes every place in the tree of a broadcast once: the formula holds per rank, not on average."""
    def rank(side, product):
        groups = grid(side)
        a, b, c = (torch.zeros(shape, dtype=torch.float64) for shape in ((5, 3), (3, 7), (5, 7)))
        left, right = {summa: (a, b), summa_nt: (c, b), summa_tn: (a, c)}[product]
        return sent(lambda: product(left, right, *groups))[1]

    for side in (5, 8):
        for me in (0, side + 1, side * side - 1):
            for product in (summa, summa_nt, summa_tn):
                assert dryrun.run(rank, side, product, rank=me, ranks=side**2) == (side - 1) * (15 + 21) * DOUBLE


def test_overlapped_issues_the_next_step_before_it_multiplies():
    def order(product):
        groups = grid(3)
        with Ledger() as ledger:
            product(torch.zeros(4, 4), torch.zeros(4, 4), *groups)
        kinds = [type(event).__name__ if type(event).__name__ != "Compute" else event.name for event in ledger.events]
        return "".join({"Issue": "i", "Wait": "w"}.get(kind, "x" if "addmm" in kind else "") for kind in kinds)

    assert dryrun.run(order, summa, ranks=9) == "iwiwx" * 3
    assert dryrun.run(order, summa_overlapped, ranks=9) == "iiww" + "iixww" * 2 + "x"
