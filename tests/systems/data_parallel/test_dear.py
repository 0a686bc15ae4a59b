"""DeAR: weights of data parallelism in its bytes, its two halves behind backward and the next forward."""

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel.replicated import Replicated
from minitrain.model.training.step import Batch, accumulate, train_step
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.data_parallel.dear import Dear

LAYERS, WIDTH, STEPS = 4, 32, 3


def trained(kind) -> tuple:
    """Weights of each step as its forward finds them, bytes sent, events, the last weights."""
    group, seen = collectives.world(), []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False, dtype=torch.float64) for _ in range(LAYERS)))
    sgd = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)
    sync = kind(model, group, sgd, WIDTH * WIDTH * 8)
    for layer in model:
        layer.register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach().clone()))
    step = accumulate(model, lambda y, targets: y.square().sum(), 1, sync)
    with Ledger() as ledger:
        for number in range(STEPS):
            draw = torch.Generator().manual_seed(9 * number + group.rank())
            rows = torch.randn(8, WIDTH, dtype=torch.float64, generator=draw)
            train_step(step, Batch(rows, rows, torch.tensor(8)), sync, sync)
        if kind is Dear:
            sync.whole()
    return torch.stack(seen), ledger.sent_bytes(), ledger.events, torch.stack([*model.parameters()]).detach()


def test_dear():
    """A bucket's gradients leave before the products of the layers before it; its weights are waited for after
    those of the layers before it, in the next step."""
    for (ours, sent, events, last), (theirs, plain, _, weights) in launch.run(
        lambda: (trained(Dear), trained(Replicated)), ranks=4
    ):
        assert (ours - theirs).abs().max() < 1e-15 and (last - weights).abs().max() < 1e-15
        assert sent == plain == STEPS * 2 * 3 * LAYERS * WIDTH * WIDTH * 8 // 4
        line, names, waits = [], {}, []
        for event in events:
            match event:
                case Compute(name="mm"):
                    line.append("mm")
                case Issue(op="reduce_scatter" | "all_gather"):
                    names[event.id] = {"reduce_scatter": "RS", "all_gather": "AG"}[event.op]
                    line.append(names[event.id])
                case Wait() if names.get(event.id) == "AG":
                    line.append("wait")
                    waits.append(event.id)
        forward, backward = "wait mm wait mm wait mm wait mm", "mm mm RS mm mm RS mm mm RS mm RS AG AG AG AG"
        steps = f"{forward.replace('wait ', '')} {backward} " + f"{forward} {backward} " * (STEPS - 1)
        assert " ".join(line) == steps + "wait wait wait wait"
        assert waits[:-LAYERS] == sorted(waits[:-LAYERS]), "the first layers' are gathered first"
