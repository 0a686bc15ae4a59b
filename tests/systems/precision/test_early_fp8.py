"""The first FP8 trainings: what is cast and how it is summed, updates by chance, which format loses what."""

import math

import pytest
import torch

from minitrain import launch
from minitrain.compose.passes import multiply_in
from minitrain.model.data.batches import Text
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.plan.strategy import Strategy
from minitrain.precision.formats import E4M3, E5M2, FP16_WANG, HFP8_FORWARD
from minitrain.precision.products import Scales, multiply
from minitrain.precision.rounding import round_to
from minitrain.systems.precision import narrow_sums
from minitrain.systems.precision.narrow_sums import matmul_in, sum_in
from tests.parallel import TOLERANCE, small
from tests.precision.training import distance, normal, trained


def gradients(name, x, weight, dy):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = multiply(x, [weight], [Scales()], narrow_sums.PRODUCTS[name])
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def a_layer_by_hand(name, ahead):
    """Operands as casts, sums by sum_in in chunks of 64; float64 where sums are wide."""
    x, weight, dy = normal(2, 35, 130), normal(20, 130, seed=1) / 8, normal(2, 35, 20, seed=2) / 1000
    y, dx, dweight = gradients(name, x, weight, dy)
    x8, weight8 = (round_to(one, ahead).flatten(0, -2) for one in (x, weight))
    dy8 = round_to(dy * 1024, E5M2).flatten(0, -2)

    def product(a, b):
        if name == "hfp8":
            return a @ b
        missing = -a.shape[1] % 64
        padded = torch.nn.functional.pad(a, (0, missing)), torch.nn.functional.pad(b, (0, 0, 0, missing))
        return matmul_in(*padded, FP16_WANG, 64)

    wanted = product(x8, weight8.mT), product(dy8, weight8) / 1024, product(dy8.mT, x8) / 1024
    for found, one in zip((y, dx, dweight), wanted):
        assert torch.equal(found.reshape(one.shape), one)
    exact = x8 @ weight8.mT
    assert (name == "hfp8") == torch.equal(wanted[0], exact), "nine bits are fewer than these sums need"


@pytest.mark.parametrize("name", ["fp8_wang", "hfp8"])
def test_what_is_too_large_too_small_or_no_number(name):
    x, weight, dy = normal(4, 8), normal(6, 8, seed=1), normal(4, 6, seed=2) * 1e-7
    y, dx, dweight = gradients(name, x, weight, dy)
    assert (dx != 0).any() and (dweight != 0).any(), "gradients of 1e-7 arrive"
    largest = narrow_sums.PRODUCTS[name].ahead.max
    few = gradients(name, x * 0 + 1e9, torch.ones(6, 8).double(), dy)[0]
    assert (few == 8 * largest).all(), "saturated"
    assert gradients(name, x, weight, dy * 0 + 1e9)[1].isfinite().logical_not().all(), "no step may use these"
    broken = x.clone()
    broken[1, 2] = math.nan
    assert gradients(name, broken, weight, dy)[0].isnan().all(1).tolist() == [False, True, False, False]
    assert narrow_sums.PRODUCTS[name].enter(x, Scales()).nbytes == x.numel()


def test_wang():
    """4,096 ones with 9 mantissa bits stall at 1,024, in chunks of 64 they do not; E[rounded by chance] = x, and so are
    updates; a layer casts x, W and dy to (1,5,2) and sums in chunks."""
    a_layer_by_hand("fp8_wang", E5M2)
    test_updates_by_chance_keep_what_rounding_loses()
    ones = torch.ones(1, 4096)
    assert sum_in(ones, FP16_WANG).item() == 1024 and sum_in(ones, FP16_WANG, 64).item() == 4096
    product = narrow_sums.PRODUCTS["fp8_wang"]
    assert product.forward(product.enter(ones, Scales()), ones, Scales()).item() == 4096
    draw = torch.Generator().manual_seed(0)
    x = normal(50)
    rounded = round_to(x.expand(4000, 50).contiguous(), FP16_WANG, "stochastic", generator=draw)
    sigma = rounded.std(0) / 4000**0.5
    assert ((rounded.mean(0) - x).abs() <= 4 * sigma).all() and (rounded.std(0) > 0).all()


def test_updates_by_chance_keep_what_rounding_loses():
    """A step of 1e-4 on a weight of 1, half a unit of which is 2^-10: lost to the nearest, kept on average."""
    steps, weights = 200, [torch.ones(2000), torch.ones(2000)]
    for weight in weights:
        draw, velocity = torch.Generator().manual_seed(1), torch.zeros(2000)
        for _ in range(steps):
            narrow_sums.sgd_by_chance_(weight, torch.ones(2000), velocity, draw, lr=1e-4, momentum=0.0)
    assert torch.equal(*weights), "ranks of one seed agree"
    assert torch.equal(weight, round_to(weight, FP16_WANG)) and weight.unique().numel() > 5
    assert abs(weight.mean() - (1 - steps * 1e-4)) < 4 * weight.std() / 2000**0.5
    assert round_to(torch.tensor(1 - 1e-4), FP16_WANG) == 1
    weight, velocity = torch.full((1,), 2.0), torch.full((1,), 0.5)
    narrow_sums.sgd_by_chance_(
        weight, torch.full((1,), 0.25), velocity, draw, lr=0.5, momentum=0.5, decay=0.125
    )  # all exact: decay 0.25 + 0.25, velocity 0.25 + 0.5, weight 2 - 0.375
    assert velocity == 0.75 and weight == 1.625


# ---- a real step -----------------------------------------------------------------------------------------


def learn(products: str, steps: int) -> tuple[list[float], GPT]:
    """Losses on real text, and the model with the last gradients."""
    text, model = Text.builtin(), GPT(small(vocab_size=256, d_model=32, num_kv_heads=4), seed=1)
    multiply_in(model, Strategy(products=products), None)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), []
    for step in range(steps):
        tokens, targets = text.batch(step, 0, 1, 8, 8, 1)
        optimizer.zero_grad()
        loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def lost(x, format) -> float:
    """Share of numbers that become 0."""
    x = x[x != 0]
    return (round_to(x, format) == 0).double().mean().item()


def far(x, format) -> float:
    """Of the cast, relative."""
    return ((round_to(x, format, overflow="saturate") - x).norm() / x.norm()).item()


def test_hfp8():
    """(1,5,2) loses fewer gradients, three mantissa bits err less in weights; a loss as in float32."""
    a_layer_by_hand("hfp8", HFP8_FORWARD)
    assert (E4M3.max, E4M3.smallest_subnormal) == (448, 2.0**-9)
    assert (E5M2.max, E5M2.smallest_subnormal) == (57_344, 2.0**-16)
    assert (HFP8_FORWARD.max, HFP8_FORWARD.smallest_subnormal) == (30, 2.0**-13)
    plain, model = learn("plain", 12)
    weights = torch.cat([param.detach().flatten() for param in model.parameters() if param.dim() > 1])
    grads = torch.cat([param.grad.flatten() for param in model.parameters() if param.dim() > 1])
    assert lost(grads, E5M2) < lost(grads, HFP8_FORWARD) < lost(grads, E4M3)
    assert lost(1024 * grads, E5M2) < 0.1 * lost(grads, E5M2), "what a scaled loss is for"
    assert far(weights, HFP8_FORWARD) < far(weights, E4M3) < far(weights, E5M2)
    mean = sum(plain[-5:]) / 5
    for name in narrow_sums.PRODUCTS:
        losses, _ = learn(name, 12)
        assert abs(sum(losses[-5:]) / 5 - mean) < 0.03 * mean < 0.03 * losses[0], name


def each(cases):
    return [trained(small(tied=False), products, **layout) for products, layout in cases]


def test_layouts():
    """hfp8 equals one process; narrow sums do not, within what 9 bits leave."""
    layouts = (dict(dp=2, zero=3), dict(tp=2, sequence_parallel=True), dict(pp=2, microbatches=2), dict(cp=2))
    names = list(narrow_sums.PRODUCTS)
    alone = dict(zip(names, launch.run(each, [(name, {}) for name in names], ranks=1)[0]))
    cases = [(name, layout) for name in names for layout in layouts[:: 1 if name == "hfp8" else 3]]
    for (name, layout), found in zip(cases, launch.run(each, cases, ranks=2, timeout_s=120)[0]):
        assert distance(alone[name], found) < (TOLERANCE if name == "hfp8" else 0.02), (name, layout)
