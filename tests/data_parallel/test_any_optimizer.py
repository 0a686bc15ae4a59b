"""Every optimizer of torch under every stage: its updates are those of whole parameters, or it is refused."""

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from tests.parallel import TOLERANCE


class Lamb(torch.optim.Optimizer):
    """One's own: the step has the length of the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            param -= self.param_groups[0]["lr"] * param.norm() / (param.grad.norm() + 1e-9) * param.grad


class OneNorm(Lamb):
    """Elementwise but for one number, the norm of all gradients it was given."""

    @torch.no_grad()
    def step(self):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = sum(param.grad.square().sum() for param in params).sqrt()
        for param in params:
            param -= self.param_groups[0]["lr"] * param.grad / (norm + 1e-9)


ELEMENTWISE = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
WHOLE = [torch.optim.Adafactor, torch.optim.Muon, Lamb, OneNorm]
STAGES = (Replicated, Zero1, Zero2, Zero3)


def made():
    torch.manual_seed(0)
    layers = nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)
    return nn.Sequential(*layers).double()


def two_steps(model, make_optimizer, stage=None):
    group = collectives.world()
    sync = stage and stage(model, group, make_optimizer)
    optimizer = sync or make_optimizer(list(model.parameters()))
    x = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(group.size())[group.rank()] if sync else x
    for _ in range(2):
        optimizer.zero_grad()
        model(mine).square().sum().backward()
        if sync:
            sync.finish()
        optimizer.step()
    return states.full_tensors(sync) if sync else dict(model.named_parameters())


def outcome(kind, stage):
    make_optimizer = lambda params: kind(params, lr=1e-2)
    try:
        got = two_steps(made(), make_optimizer, stage)
    except ValueError as error:
        return str(error)
    wanted = two_steps(made(), make_optimizer)
    return max((got[name] - wanted[name]).abs().max().item() for name in wanted)


def test_elementwise_ones_everywhere_and_others_on_whole_parameters():
    kinds = [*(getattr(torch.optim, name) for name in ELEMENTWISE), *WHOLE]

    def rank():
        return {(kind.__name__, stage.stage): outcome(kind, stage) for kind in kinds for stage in STAGES}

    for found in launch.run(rank, ranks=2):
        for (name, stage), result in found.items():
            if stage == 0 or name in ELEMENTWISE:
                assert result < TOLERANCE, (name, stage, result)
            else:
                assert f"{name} updates a part of" in result and "zero=0" in result, (name, stage, result)
