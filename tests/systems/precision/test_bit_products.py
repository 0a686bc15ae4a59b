"""BitNet and b1.58: their values, the norm and the straight-through gradients, storage, layouts, real text."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.passes import multiply_in
from minitrain.model.data.batches import Text
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.plan.strategy import Strategy
from minitrain.precision.blocks import dequantize
from minitrain.precision.products import LowLinear, Scales, project
from minitrain.systems.precision import bitnet
from tests.parallel import TOLERANCE, small
from tests.precision.training import distance, normal, trained

NAMES = ("bitnet", "bitnet_b158")


def by_hand(name: str, x, weight, dy):
    """y, dx and dW of one layer by the papers' formulas, a token and a weight at a time where that says it."""
    size = weight.abs().mean()
    if name == "bitnet":
        few = torch.tensor([[1.0 if w > weight.mean() else -1.0 for w in row] for row in weight]).double()
        centre = x.mean(-1, keepdim=True)
    else:
        few = torch.tensor(
            [[min(1, max(-1, round((w / size).item()))) for w in row] for row in weight]
        ).double()
        centre = 0 * x.mean(-1, keepdim=True)
    inverse = 1 / ((x - centre).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed = (x - centre) * inverse
    step = (normed.abs().amax(-1, keepdim=True).float() / 127).double()
    kept = (normed / normed.abs().amax(-1, keepdim=True) * 127).round() * step
    through = dy @ (size * few)
    width = x.shape[-1]
    dx = torch.empty_like(x)
    for token in range(len(x)):  # of x_k / deviation, by the quotient rule
        jacobian = torch.eye(width).double() - torch.outer(kept[token], kept[token]) / width
        if name == "bitnet":
            jacobian = jacobian - 1 / width
        dx[token] = inverse[token] * jacobian @ through[token]
    return kept @ (size * few).mT, dx, dy.mT @ kept, few


def a_layer_by_hand(name):
    x, weight, dy = normal(6, 20) * 3 + 0.7, normal(9, 20, seed=1) + 0.2, normal(6, 9, seed=2)
    linear = torch.nn.Linear(20, 9, dtype=torch.float64)
    linear.weight.data.copy_(weight)
    layer = LowLinear(linear, bitnet.PRODUCTS[name], Scales())
    y, dx, dweight, few = by_hand(name, x, weight, dy)
    inputs = x.view(2, 3, 20).clone().requires_grad_()
    out = layer(inputs)
    out.backward(dy.view(2, 3, 9))
    for found, wanted in (
        (out - linear.bias, y), (inputs.grad, dx), (layer.weight.grad, dweight), (layer.bias.grad, dy.sum(0))
    ):  # fmt: skip
        assert (found.reshape(wanted.shape) - wanted).abs().max() < 1e-6, "the scale of a token is a float32"
    found, size = bitnet.PRODUCTS[name].weights(weight, Scales())
    assert torch.equal(found, few) and math.isclose(size, weight.abs().mean(), rel_tol=1e-12)
    values = {-1.0, 1.0} if name == "bitnet" else {-1.0, 0.0, 1.0}
    assert set(few.flatten().tolist()) == values
    alone = project(inputs, (layer,))[0]
    assert torch.equal(alone, out)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_norm_and_with_one_scale(name):
    """x^ = x then, and dx is dy times the few values; as published, BitNet's training has a scale per tensor."""
    x, weight, dy = normal(6, 20) * 3, normal(9, 20, seed=1), normal(6, 9, seed=2)
    bare = replace(bitnet.PUBLISHED[name], normed=False)
    few, size = bare.weights(weight, Scales())
    kept = bare.enter(x, Scales())
    scales = 1 if name == "bitnet" else 6
    assert kept[0].scales.numel() == scales == bitnet.PUBLISHED[name].enter(x, Scales())[0].scales.numel()
    read = dequantize(kept[0], torch.float64)
    assert (read - x).abs().max() <= x.abs().max() / 253
    assert torch.allclose(bare.forward(kept, weight, Scales()), read @ (few * size).mT, atol=1e-5)
    dx, dweight = bare.backward(dy, kept, weight, (True, True), Scales())
    assert torch.equal(dx, dy @ (few * size)) and torch.allclose(dweight, dy.mT @ read)


def test_zeros_and_what_is_no_number():
    zeros, whole = torch.zeros(2, 3), torch.zeros(4, 3)
    for products in bitnet.PRODUCTS.values():
        y = products.forward(products.enter(zeros, Scales()), whole, Scales())
        assert torch.equal(y, torch.zeros(2, 4)), "a token, a matrix of zeros"
        whole_again = torch.full((4, 3), math.nan)
        assert products.forward(products.enter(zeros + 1, Scales()), whole_again, Scales()).isnan().all()
        assert products.forward(products.enter(zeros + math.nan, Scales()), whole + 1, Scales()).isnan().all()


def test_what_is_kept_is_a_byte_a_number():
    x = normal(128, 256, dtype=torch.float32)
    codes, inverse = bitnet.PRODUCTS["bitnet"].enter(x, Scales())
    assert codes.nbytes + inverse.nbytes == 128 * (256 + 8)
    codes, inverse = bitnet.PRODUCTS["bitnet"].enter(x.double(), Scales())
    assert codes.nbytes + inverse.nbytes == 128 * (256 + 12)
    assert codes.codes.unique().numel() > 200 and codes.codes.abs().max() == 127


def test_bits_of_a_weight_and_the_way_back():
    """1 bit is 1/16 of FP16; 5 trits in 8 bits are 1.6, above log2 3 = 1.585."""
    weight = normal(64, 320)
    one, _ = bitnet.PRODUCTS["bitnet"].weights(weight, Scales())
    three, _ = bitnet.PRODUCTS["bitnet_b158"].weights(weight, Scales())
    signs, trits = bitnet.pack_signs(one), bitnet.pack_trits(three)
    assert signs.nbytes * 16 == weight.half().nbytes and 8 * trits.nbytes / weight.numel() == 1.6
    assert round(math.log2(3), 3) == 1.585 < 1.6 and 3**5 <= 2**8 < 3**6
    assert torch.equal(bitnet.unpack_signs(signs, 320), one.to(torch.int8))
    assert torch.equal(bitnet.unpack_trits(trits, 320), three.to(torch.int8))
    every = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * 5)
    packed = bitnet.pack_trits(every)
    assert torch.equal(bitnet.unpack_trits(packed, 5), every)
    assert len(packed.unique()) == 243 == packed.max() + 1
    for length in range(8):  # short last bytes
        some, other = three[..., :length], one[..., :length]
        assert torch.equal(bitnet.unpack_trits(bitnet.pack_trits(some), length), some)
        assert torch.equal(bitnet.unpack_signs(bitnet.pack_signs(other), length), other)


# ---- layouts ---------------------------------------------------------------------------------------------


DENSE = small(tied=False)
MIXED = small(tied=False, experts=dict(num_experts=4, top_k=2))
LAYOUTS = [(DENSE, layout) for layout in (dict(dp=2), dict(dp=2, zero=3), dict(pp=2, microbatches=2))]
LAYOUTS += [(DENSE, layout) for layout in (dict(tp=2), dict(tp=2, sequence_parallel=True), dict(cp=2))]
LAYOUTS += [(MIXED, layout) for layout in (dict(tp=2), dict(dp=2, ep=2))]


def each(cases):
    return [trained(config, products, **layout) for products, config, layout in cases]


@cache
def distances():
    """Of every layout from one process, by product; and of the product from the plain one."""
    alone = [(name, config, {}) for name in NAMES for config in (DENSE, MIXED)]
    ((plain, *found),) = launch.run(each, [("plain", DENSE, {}), *alone], ranks=1)
    alone = {case[:2]: result for case, result in zip(alone, found)}
    cases = [(name, *layout) for name in NAMES for layout in LAYOUTS]
    results = zip(cases, launch.run(each, cases, ranks=2, timeout_s=120)[0])
    far = [(name, layout, distance(alone[name, config], found)) for (name, config, layout), found in results]
    return far, [distance(plain, alone[name, DENSE]) for name in NAMES]


def test_every_layout_is_one_process():
    far, from_plain = distances()
    assert max(gap for *_, gap in far) < TOLERANCE, far
    assert min(from_plain) > 1e-3, "products are in few bits"


def sent(tokens: int) -> dict:
    """Numbers of each all-reduce of a layer, in forward and in backward."""
    group, found = collectives.world(), {}
    for name, products in bitnet.PRODUCTS.items():
        for cut in ("N", "K", "M"):
            calls, scales = [], Scales(0, group, cut)
            x, weight, dy = normal(tokens, 16), normal(8, 16, seed=1), normal(tokens, 8)
            note = lambda kind, call: calls.extend([math.prod(call.shape)] if kind == "issue" else [])
            with collectives.observe(note):
                kept = products.enter(x, scales)
                products.forward(kept, weight, scales)
                calls.append("|")
                products.backward(dy, kept, weight, (True, True), scales)
            found[name, cut] = calls
    return found


def test_what_ranks_agree_on():
    found = launch.run(sent, 6, ranks=2)[0]
    assert found["bitnet", "N"] == found["bitnet_b158", "N"] == [2, "|", 2]
    assert found["bitnet", "K"] == [6, 6, 6, 2, "|", 2, 6, 6]
    assert found["bitnet_b158", "K"] == [6, 6, 2, "|", 2, 6]
    assert found["bitnet", "M"] == found["bitnet_b158", "M"] == ["|"]


def same_on_ranks(name):
    """Cut over ranks of tp the steps are those of one process."""
    assert max(gap for one, layout, gap in distances()[0] if one == name and "tp" in layout) < TOLERANCE


# ---- real text -------------------------------------------------------------------------------------------


def learn(cases: list) -> list[list[float]]:
    """Losses of each (products, seed), on every second case of this rank; ranks say nothing to each other."""
    found, text = [], Text.builtin()
    for products, seed in cases[collectives.world().rank() :: 2]:
        config = small(vocab_size=256, d_model=32, num_kv_heads=4, max_positions=32)
        model = GPT(config, seed=seed)
        multiply_in(model, Strategy(products=products), None)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01), []
        for step in range(100):
            tokens, targets = text.batch(step, 0, 1, 8, 32, seed)
            loss = cross_entropy_sum(model(tokens), targets) / targets.numel()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found


@pytest.fixture(scope="module")
def learned() -> dict[str, list]:
    """{products: losses}, first and mean of the last 20 steps."""
    cases = [(name, 0) for name in NAMES]
    by_rank = launch.run(learn, cases, ranks=2, timeout_s=200)
    ends = [[(losses[0], sum(losses[-20:]) / 20) for losses in found] for found in by_rank]
    return dict(zip(NAMES, ends))


def test_bitnet(learned):
    """Weights of two values, b and -b, an eighth of a byte each; on real text the loss falls. Cut over ranks of tp
    the steps are those of one process."""
    same_on_ranks("bitnet")
    a_layer_by_hand("bitnet")  # through codes and signs, and back to the weights
    for weight in (normal(24, 40) * 0.02, normal(24, 40) + 0.5):
        few, size = bitnet.PRODUCTS["bitnet"].weights(weight, Scales())
        assert (few * size).unique().tolist() == [-weight.abs().mean(), weight.abs().mean()]
        assert 0.4 < (few > 0).double().mean() < 0.6, "centred"
        assert bitnet.pack_signs(few).nbytes * 16 == weight.half().nbytes
    assert all(last < 0.6 * first for first, last in learned["bitnet"]), learned


def test_bitnet_b158(learned):
    """Three values, 1.585 bits; add, subtract or skip is the product; the loss is below that of one bit. Cut over
    ranks of tp the steps are those of one process."""
    same_on_ranks("bitnet_b158")
    a_layer_by_hand("bitnet_b158")
    weight = normal(33, 95, dtype=torch.float32)
    few, size = bitnet.PRODUCTS["bitnet_b158"].weights(weight, Scales())
    size = weight.abs().mean()
    wanted = torch.where(weight.abs() > size / 2, weight.sign(), 0.0)
    assert torch.equal(few, wanted) and round(math.log2(len(few.unique())), 3) == 1.585
    codes = bitnet.PRODUCTS["bitnet_b158"].enter(normal(7, 95, seed=2), Scales())[0].codes
    whole = bitnet.add_subtract_skip(codes, few)
    assert torch.equal(whole, codes.int() @ few.int().mT) and whole.dtype == torch.int32
    x = normal(2, 7, 95, seed=2, dtype=torch.float32)
    kept = bitnet.PRODUCTS["bitnet_b158"].enter(x, Scales())
    y = bitnet.PRODUCTS["bitnet_b158"].forward(kept, weight, Scales())
    whole = bitnet.add_subtract_skip(kept[0].codes, few)
    assert torch.equal(y, whole.float() * (kept[0].multipliers * size)), "float32 holds these sums exactly"
    pairs = zip(learned["bitnet"], learned["bitnet_b158"])
    assert all(three < one for (_, one), (_, three) in pairs), learned
    assert all(last < 0.6 * first for first, last in learned["bitnet_b158"]), learned


def test_a_weight_at_the_mean_counts_as_minus_one():
    weight = torch.tensor([2.0, 0.5, -1.0, 0.5])
    assert bitnet.signs(weight, weight.mean(), weight.abs().mean()).tolist() == [1, -1, -1, -1]
