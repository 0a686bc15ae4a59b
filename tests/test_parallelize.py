"""Axes together: rows over dp, tokens over cp, matrices over tp, states by ZeRO; the same training step equals one process."""
from functools import partial
from math import prod

import pytest
import torch

from minitrain import launch
from minitrain.context.layout import contiguous, striped
from minitrain.context.ulysses import ulysses_attention
from minitrain.layers import causal_attention
from minitrain.mesh import Mesh
from minitrain.model import GPT
from minitrain.parallelize import parallelize
from minitrain.trainer import Recipe, Trainer
from tests.parallel import TOLERANCE, Problem, check_refusals, difference, one_process, small, train_parallel

CONFIGS = {
    "tied, RoPE, SwiGLU, 2 K/V heads": small(vocab_size=32),
    "GPT-2: biases, learned positions": small(vocab_size=32, tied=False, norm="layer", positions="learned", activation="gelu",
                                              bias=True, num_kv_heads=4),
}
ULYSSES = dict(core=partial(ulysses_attention, core=causal_attention), layout=contiguous)
CASES = [
    (dict(dp=1, cp=2), [{}, dict(layout=striped), ULYSSES, dict(zero=1), dict(zero=3)]),
    (dict(dp=1, cp=4), [{}, dict(layout=striped), ULYSSES]),
    (dict(dp=2, cp=2), [{}, dict(zero=2), dict(zero=3)]),
    (dict(dp=1, cp=2, tp=2), [{}, dict(sequence_parallel=True), dict(sequence_parallel=True, overlap=True), ULYSSES]),
    (dict(dp=2, cp=1, tp=2), [dict(sequence_parallel=True)]),
]


def problems():
    found = {name: Problem(config=config) for name, config in CONFIGS.items()}
    return found | {"3 microbatches": Problem(config=small(vocab_size=32), batch_sizes=(6, 6, 7), microbatches=3)}


@pytest.fixture(scope="module")
def references():
    return {name: one_process(problem) for name, problem in problems().items()}


@pytest.mark.parametrize("shape, ways", CASES, ids=[" ".join(f"{axis}{size}" for axis, size in shape.items()) for shape, _ in CASES])
def test_equals_one_process(shape, ways, references):
    """Loss, gradients and parameters after three steps; RoPE, learned positions and masks are right under every layout."""
    def rank():
        return [(name, train_parallel(problem, shape, **settings)) for settings in ways for name, problem in problems().items()]

    for outcomes in launch.run(rank, ranks=prod(shape.values())):
        for name, outcome in outcomes:
            assert difference(outcome, references[name]) < TOLERANCE, name


@pytest.mark.parametrize("broken", ["positions", "sum over cp"])
def test_without_it_it_does_not(broken, references):
    def rank():
        from minitrain.context import layout
        if broken == "positions":
            layout.positions = lambda layout, group, length, device=None: torch.arange(length // group.size())
        else:
            Mesh.group = lambda self, *axes, group=Mesh.group: group(self, *[axis for axis in axes if len(axes) == 1 or axis != "cp"])
        return train_parallel(problem, dict(dp=1, cp=2))

    name, problem = next(iter(problems().items()))
    assert max(difference(outcome, references[name]) for outcome in launch.run(rank, ranks=2)) > 1e-4


def test_refusals_are_one_line_on_every_rank():
    config = small(vocab_size=32)

    def model(**changes):
        return parallelize(GPT(small(vocab_size=32, **changes)), Mesh(dp=1, cp=2))

    refused = {
        "zigzag: T=6 is not a multiple of 4 pieces; pad the sequence to 8": lambda: model().lay_out(*torch.zeros(2, 1, 6, dtype=torch.long)),
        "no technique takes the axis 'ep' of size 2": lambda: parallelize(GPT(config), Mesh(dp=1, ep=2)),
        "the mesh has no axis dp: give it one, of size 1 if need be, Mesh(dp=1, cp=2)": lambda: parallelize(GPT(config), Mesh(cp=2)),
        "these are cut over cp: train with cp=1": lambda: Trainer(model(), None, Recipe()),
        "no technique takes the axis 'cp' of size 2": lambda: parallelize(
            GPT(config), Mesh(inter=1, intra=1, cp=2), zero="III", make_optimizer=torch.optim.AdamW),
    }

    check_refusals(refused, ranks=2)
