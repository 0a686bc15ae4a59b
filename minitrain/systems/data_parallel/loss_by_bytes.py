"""What compression costs: a student learns a teacher's classes on ranks, its gradients in few bytes.

    sent_bytes, loss = learn(compressor_of("topk:0.05"), group)      a rank, a step; over all rows, at the end

Rows, and of them those of each step, are drawn per rank; both networks have two layers. With `early` the
first layer alone travels so, as where a network drops what matters least (MLT). A matrix is one message.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from minitrain.data_parallel.naive import all_reduce
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints
from minitrain.ranks.ledger import Ledger
from minitrain.systems.data_parallel.compressed import Compressor, Feedback, dense


def learn(compressor: Compressor, group, *, feedback=True, early=False, seed=0, steps=60, lr=1.0) -> tuple:
    """SGD on sums over ranks, divided by all rows of the step."""
    require_ints(seed=seed)
    require_positive_ints(1 << 16, steps=steps)
    require_positive(lr=lr)
    draw, rank, ranks = torch.Generator(), group.rank(), group.size()

    def network(width: int, number: int) -> nn.Sequential:
        draw.manual_seed(2 * seed + number)
        model = nn.Sequential(nn.Linear(16, width, False), nn.Tanh(), nn.Linear(width, 8, False))
        for param in model.parameters():
            param.data = torch.randn(param.shape, generator=draw) * 1.5 * param.shape[-1] ** -0.5
        return model

    teacher, student = network(32, 0), network(48, 1)
    draw.manual_seed(seed * ranks + rank)
    rows = torch.randn(256, 16, generator=draw)
    classes, params = teacher(rows).argmax(-1), list(student.parameters())
    sums = [Feedback(dense if early and at else compressor, feedback) for at in range(len(params))]

    def step() -> None:
        some = torch.randint(len(rows), (64,), generator=draw)
        loss = cross_entropy(student(rows[some]), classes[some], reduction="sum") / (64 * ranks)
        for param, grad, total in zip(params, torch.autograd.grad(loss, params), sums):
            param.data -= lr * total(grad, group)
            total.settle()

    with Ledger() as ledger:
        step()  # all steps send as much
    for _ in range(steps - 1):
        step()
    with torch.no_grad():
        loss = cross_entropy(student(rows), classes) / ranks
    return ledger.sent_bytes(), all_reduce(loss, group).item()
