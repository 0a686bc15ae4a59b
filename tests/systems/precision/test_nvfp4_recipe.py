"""NVIDIA's recipe for NVFP4: one W for both directions, a rotation that dW does not notice, gradients right on average."""

import pytest
import torch

from minitrain.precision.blocks import dequantize
from minitrain.precision.products import LowLinear, Scales
from minitrain.systems.precision.nvfp4 import RECIPE, WITHOUT
from tests.precision.training import normal

ALONE = Scales()


def error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def draws_of(products, dy, count=64):
    """A gradient a millionth larger has other chances."""
    return [dequantize(products.of_gradient(dy * (1 + 1e-6 * i), 1), torch.float64) for i in range(count)]


@pytest.mark.parametrize("sizes", [(64, 48, 32), (37, 20, 9), (3, 5, 7)])
def test_three_products(sizes):
    """Any sizes, blocks filled up with zeros; of each the error of four bits; a step made again is the same."""
    tokens, inputs, outputs = sizes
    x, weight = normal(1, tokens, inputs), normal(outputs, inputs, seed=1)
    layer = LowLinear(torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float64), RECIPE)
    layer.weight.data.copy_(weight)
    dy, leaf = normal(1, tokens, outputs, seed=2), x.clone().requires_grad_()
    found = [(layer(leaf), *torch.autograd.grad(layer(leaf), (leaf, layer.weight), dy)) for _ in range(2)]
    wanted = x @ weight.mT, dy @ weight, dy[0].mT @ x[0]
    assert all(0.01 < error(y, true) < 0.4 for y, true in zip(found[0], wanted, strict=True))
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_what_each_part_does():
    weight, x, dy = normal(32, 48), normal(64, 48, seed=1), normal(64, 32, seed=2)
    both = lambda products: (dequantize(products.of_weight(w)) for w in (weight, weight.mT))
    there, back = both(RECIPE)
    assert torch.equal(there, back.mT), "y and dx have one W"
    there, back = both(WITHOUT["squares"])
    assert not torch.equal(there, back.mT)
    turned = RECIPE.by_token(dy) @ RECIPE.by_token(x).mT
    assert torch.allclose(turned, dy.mT @ x, atol=1e-10) and not torch.equal(RECIPE.by_token(x), x.mT)
    assert torch.equal(WITHOUT["rotated"].by_token(x), x.mT)
    mean = [error(sum(draws_of(one, dy)) / 64, dy) for one in (RECIPE, WITHOUT["stochastic"])]
    once = error(draws_of(RECIPE, dy, 1)[0], dy)
    assert mean[0] < once / 4 and mean[0] < mean[1] / 2 and once > mean[1], (once, mean)
    kept = RECIPE.enter(x.float(), ALONE)
    assert sum(one.nbytes - 4 for one in kept) * 8 == 2 * 4.5 * x.numel()
