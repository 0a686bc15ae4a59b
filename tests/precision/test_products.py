"""Products in few bits: errors within bounds that are derived, scales along what is summed over, the same numbers under
every layout where a scale is agreed, delayed scaling that overflows and recovers, bytes that travel and stay.
"""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.compose import passes
from minitrain.compose.parallelize import check_module, parallelize
from minitrain.compose.passes import emulation, multiply_in, roll_scales, scales_of, swap
from minitrain.model.config import ExpertsConfig
from minitrain.model.gpt import GPT
from minitrain.model.layers import MLP, Linear
from minitrain.moe import experts
from minitrain.plan.strategy import Strategy
from minitrain.precision import formats, policies, products
from minitrain.precision.blocks import Blocks, dequantize, quantize
from minitrain.precision.products import PRODUCTS, LowLinear, Scales, multiply
from minitrain.ranks.events import Issue
from minitrain.ranks.ledger import Ledger
from tests.parallel import TOLERANCE, small
from tests.precision.training import distance, rows, same, trained

FP8 = [n for n, one in PRODUCTS.items() if getattr(getattr(one, "x", None), "format", None) is formats.E4M3]


def operands(seed=0, tokens=160, width=192, out=136):
    """x, W and dy, each with an outlier, in float64; no tile divides them."""
    draw = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(size, generator=draw, dtype=torch.float64)
        for size in ((tokens, width), (out, width), (tokens, out))
    ]
    for one in made:
        one[3, 5] = 20.0
    return made


def gradients(x, weight, dy, kind):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = multiply(x, [weight], [Scales(kind.history)], kind)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def error(x, blocks):
    """How far an operand may be from itself: half a step relative, or of the smallest numbers of its tile."""
    f, q = blocks.format, quantize(x, blocks, fill=True)
    one = 0x38 if f is formats.E4M3 else 0x3C
    multiplier = dequantize(replace(q, codes=torch.full_like(q.codes, one)), torch.float64)
    return torch.maximum(x.abs() * f.eps / 2, multiplier * f.smallest_subnormal / 2) * (1 + 1e-5)


def bound(a, b, error_a, error_b):
    return error_a @ b.abs().mT + a.abs() @ error_b.mT + error_a @ error_b.mT + 1e-12


# ---- one layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP8)
def test_each_product_errs_within_the_bound_of_its_operands_tiles_along_the_sum(name):
    kind, (x, weight, dy) = replace(PRODUCTS[name], history=0), operands()
    exact = x @ weight.mT, dy @ weight, dy.mT @ x
    # what was kept along K is quantised once more along the tokens
    of_x = twice(x, kind.x) if kind.x.tile else error(x.mT, kind.x)
    bounds = (
        bound(x, weight, error(x, kind.x), error(weight, kind.weight)),
        bound(dy, weight.mT, error(dy, kind.dy), error(weight.mT, kind.weight)),
        bound(dy.mT, x.mT, error(dy.mT, kind.dy), of_x),
    )
    for found, wanted, most in zip(gradients(x, weight, dy, kind), exact, bounds):
        far = (found - wanted).abs()
        assert (far <= most).all(), (far / most).max()
        assert far.max() > 0.01 * most.flatten()[far.argmax()], "a bound of this size"


def twice(x, blocks):
    first = dequantize(quantize(x, blocks, fill=True), torch.float64)
    return error(first.mT, blocks) + error(x, blocks).mT


@pytest.mark.parametrize("product", ["y", "dx", "dw"])
def test_tiles_lie_along_what_is_summed_over(product):
    """A row of an operand times 1,000 leaves all other rows of the result as they were, bit for bit."""
    kind, (x, weight, dy) = PRODUCTS["fp8_rows"], operands(2, 64, 64, 64)

    def results(x, weight, dy):
        return dict(zip(("y", "dx", "dw"), gradients(x, weight, dy, kind)))

    plain = results(x, weight, dy)[product]
    bigger = [one.clone() for one in (x, weight, dy)]
    if product == "y":
        bigger[0][9], bigger[1][4] = bigger[0][9] * 1000, bigger[1][4] * 1000
    elif product == "dx":
        bigger[2][9], bigger[1][:, 4] = bigger[2][9] * 1000, bigger[1][:, 4] * 1000
    else:
        bigger[2][:, 9], bigger[0][:, 4] = bigger[2][:, 9] * 1000, bigger[0][:, 4] * 1000
    found = results(*bigger)[product]
    others = torch.ones_like(plain, dtype=torch.bool)
    others[9], others[:, 4] = False, False
    if product == "dw":  # x was quantised along K first, where the large column is
        assert (found - plain)[others].abs().max() < 0.5 * plain.abs().max()
    else:
        assert torch.equal(found[others], plain[others])
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("name", ["fp8_rows", "fp8_tiles"])
def test_of_x_the_codes_along_its_width_are_quantised_again_of_dy_the_numbers(name):
    kind, (x, weight, dy) = PRODUCTS[name], operands(4)

    def there_and_back(x, blocks):
        return dequantize(quantize(x, blocks, fill=True), torch.float64)

    y, dx, dweight = gradients(x, weight, dy, kind)
    assert torch.equal(y, there_and_back(x, kind.x) @ there_and_back(weight, kind.weight).mT)
    assert torch.equal(dx, there_and_back(dy, kind.dy) @ there_and_back(weight.mT, kind.weight).mT)
    kept = there_and_back(x, kind.x).mT
    assert torch.equal(dweight, there_and_back(dy.mT, kind.dy) @ there_and_back(kept, kind.x).mT)


def test_what_is_kept_is_a_byte_a_number_and_the_scales():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x, weight = torch.randn(64, 256, requires_grad=True), torch.randn(32, 256, requires_grad=True)
        multiply(x, [weight], [Scales()], PRODUCTS["fp8_tiles"])
    sizes = sorted(one.nbytes for one in kept if one.data_ptr() != weight.data_ptr())
    assert sizes == [64 * 2 * 4, 64 * 256]


def agreed(name: str) -> dict:
    """Bytes of the all-reduces of a layer's three products, x [6, 32], W [16, 32], by what ranks share out."""
    group, found = collectives.world(), {}
    draw = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=draw) for shape in ((6, 32), (16, 32), (6, 16)))
    for cut in ("N", "K", "M", ""):
        kind, scales = PRODUCTS[name], Scales(0, group, cut)
        with Ledger() as ledger:
            kept = kind.enter(x, scales)
            kind.forward(kept, weight, scales)
            kind.backward(dy, kept, weight, (True, True), scales)
        found[cut] = [event.payload_bytes for event in ledger.events if isinstance(event, Issue)]
    return found


def test_ranks_agree_on_4_bytes_a_tile_that_they_share():
    """A tensor is one tile, agreed for x or dy and W, forward and backward; rows along a cut width are a tile each;
    smaller tiles, and those along a rank's own tokens, lie on one rank."""
    for found in launch.run(agreed, "fp8_tensor", ranks=2):
        assert found == {"N": [4, 4, 4], "K": [4, 4, 4], "M": [4, 4], "": []}
    for found in launch.run(agreed, "fp8_rows", ranks=2):
        assert found == {"N": [4 * 6, 4 * 32], "K": [4 * 6, 4 * 16], "M": [], "": []}
    assert launch.run(agreed, "fp8_tiles", ranks=2) == [dict.fromkeys(("N", "K", "M", ""), [])] * 2


def test_one_input_is_quantised_once_for_all_matrices_that_read_it():
    calls = []

    def counted(x, *rest, **more):
        calls.append(x.shape)
        return quantize(x, *rest, **more)

    mlp = MLP(small(d_model=16, d_ff=24))
    for param in mlp.parameters():
        torch.nn.init.normal_(param)
    swap(mlp, replace(PRODUCTS["fp8_tensor"], cast=counted))
    mlp(torch.randn(3, 16))
    assert calls.count((3, 16)) == 1 and calls.count((24, 16)) == 2


def test_gradients_of_one_input_add_up_over_the_matrices():
    x, weight, dy = operands()
    other = weight.flip(1)
    kind, parts = PRODUCTS["fp8_tiles"], [gradients(x, weight, dy, PRODUCTS["fp8_tiles"])[1]]
    parts.append(gradients(x, other, 2 * dy, kind)[1])
    x.requires_grad_()
    first, second = multiply(x, [weight, other], [Scales(), Scales()], kind)
    torch.autograd.backward([first, second], [dy, 2 * dy])
    assert torch.equal(x.grad, parts[0] + parts[1])


def test_before_the_first_step_x_is_taken_as_it_is_and_dy_as_if_one_were_its_largest():
    scales, kind = Scales(16), PRODUCTS["fp8_delayed"]
    assert kind.enter(torch.tensor([[3.0]]), scales).multipliers.item() == 1
    assert kind.enter_grad(torch.tensor([[3.0]]), scales).scales.item() == 1
    weight = scales.quantized("weight", torch.tensor([[3.0]]), kind.weight, "NK")
    assert weight.scales.item() == 3  # which is at hand


def test_gradients_of_frozen_matrices_are_not_computed():
    x, weight, dy = operands(0, 32, 32, 32)
    x.requires_grad_()
    with Ledger() as ledger:
        (y,) = multiply(x, [weight], [Scales()], PRODUCTS["fp8_tensor"])
        y.backward(dy)
    assert ledger.flops == 2 * 2 * 32**3


def test_biases_names_and_flops_are_those_of_the_plain_layer():
    linear = Linear(24, 8, dtype=torch.float64)
    torch.nn.init.normal_(linear.weight), torch.nn.init.normal_(linear.bias)
    with pytest.raises(ValueError, match="scale by 16 steps, and Scales that keep 0"):
        LowLinear(linear, PRODUCTS["fp8_delayed"], Scales())(torch.ones(2, linear.in_features))
    low = LowLinear(linear, PRODUCTS["fp8_delayed"], Scales(16))
    assert dict(low.named_parameters()).keys() == dict(linear.named_parameters()).keys()
    accounts = []
    for layer in (linear, low):
        x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
        with Ledger() as ledger:
            layer(x).sum().backward()
        accounts.append(ledger.flops)
        assert linear.bias.grad.eq(6).all()
        linear.zero_grad()
    assert accounts[0] == accounts[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_delayed"])
def test_what_is_not_finite_is_not_lost(name, bad):
    x, weight, dy = operands(0, 32, 32, 32)
    dy[1, 2] = bad
    y, dx, dweight = gradients(x, weight, dy, PRODUCTS[name])
    assert y.isfinite().all() and dx.isnan().all() and dweight.isnan().all()
    x[1, 2] = bad
    assert gradients(x, weight, dy, PRODUCTS[name])[0].isnan().all()


# ---- delayed scaling -------------------------------------------------------------------------------------


def test_delayed_scaling_saturates_when_an_outlier_comes_and_recovers_after_it_left():
    owner = SimpleNamespace(name="layers.1", attention=torch.nn.Linear(4, 4), named_modules=None)
    scales = Scales(history=3)
    owner.named_modules = lambda: [("linear", scales)]
    seen = []
    for amax in (2.0, 2.0, 100.0, 2.0, 2.0, 2.0, 2.0):
        q = scales.quantized("x", torch.tensor([[amax, 1.0]]), Blocks(formats.E4M3), "MK")
        seen.append([q.scales.item(), dequantize(q)[0, 0].item()])
        roll_scales([owner], None)
    coarse = dequantize(quantize(torch.tensor([2.0]), Blocks(formats.E4M3), amax=torch.tensor(100.0))).item()
    assert seen == [[448.0, 2.0], [2.0, 2.0], [2.0, 2.0], *3 * [[100.0, coarse]], [2.0, 2.0]]
    scales.eval()
    scales.quantized("x", torch.tensor([[7.0]]), Blocks(formats.E4M3), "MK")
    assert scales.largest.eq(0).all()
    scales.roll(torch.tensor([torch.inf, torch.nan]))
    assert scales.history.isfinite().all()


# ---- on ranks --------------------------------------------------------------------------------------------

CONFIG = small(num_layers=2, tied=False, d_ff=24)
MIXTURE = replace(CONFIG, experts=ExpertsConfig(4, 2, shared_experts=1, expert_width=8))


@cache
def single(name, steps=2, config=CONFIG):
    return launch.run(trained, config, name, steps, ranks=1)[0]


LAYOUTS = [dict(dp=2, zero=3), dict(dp=2, microbatches=2), dict(pp=2, microbatches=2), dict(cp=2)]
LAYOUTS += [dict(pp=2, microbatches=4, schedule="dualpipe"), dict(tp=2), dict(tp=2, sequence_parallel=True)]


def test_agreed_scales_make_every_layout_equal_one_process():
    cases = [("fp8_delayed", CONFIG, layout) for layout in LAYOUTS]
    cases += [(name, CONFIG, layout) for name, layout in zip(("fp8_tensor", "fp8_e4m3"), LAYOUTS[-2:])]
    cases += [("fp8_rows", MIXTURE, dict(tp=2))]
    cases += [("fp8_delayed", MIXTURE, layout) for layout in (dict(dp=2, ep=2), LAYOUTS[-1])]

    def rank():
        return [trained(config, name, 2, **layout) for name, config, layout in cases]

    assert all(one[1, 0] > 0 for one in single("fp8_delayed", config=MIXTURE)[1]["amax"].values())
    for (name, config, layout), found, other in zip(cases, *launch.run(rank, ranks=2), strict=True):
        alone = single(name, config=config)
        assert distance(found, alone) < TOLERANCE, (name, layout)
        assert same(found[1]["amax"], other[1]["amax"])
        for path, value in found[1]["amax"].items():
            torch.testing.assert_close(value, alone[1]["amax"][path], rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", ["amax over tp", "amax over dp", "whole gradients"])
def test_without_agreement_they_differ(what):
    name, layout = ("fp8_delayed", dict(dp=2)) if what == "amax over dp" else ("fp8_tensor", dict(tp=2))

    def rank():
        from minitrain.compose import run as runs
        from minitrain.tensor_parallel import low_precision

        if what == "amax over dp":
            runs.roll_scales = lambda layers, tp: [
                one.roll(one.largest.clone()) for one in scales_of(layers).values()
            ]
        elif what == "amax over tp":
            Scales.shared = lambda *_: False
        else:
            low_precision.Route = lambda **steps: multiply.__defaults__[0]
        return trained(CONFIG, name, 2, **layout)

    assert distance(launch.run(rank, ranks=2)[0], single(name)) > 1e-6


def test_of_a_shared_head_each_rank_casts_its_own_term():
    """One K/V head on two ranks: dy of K and V is a sum that no rank has; the same loss, other last bits of dW."""
    config = replace(CONFIG, num_kv_heads=1)
    alone = single("fp8_delayed", 2, config=config)
    found = launch.run(lambda: trained(config, "fp8_delayed", tp=2), ranks=2)[0]
    assert abs(found[0][0] - alone[0][0]) < TOLERANCE  # forward is the same
    assert TOLERANCE < distance(found, alone) < 0.02


def test_delayed_scaling_resumes_bit_for_bit_under_another_layout():
    whole, state = single("fp8_delayed", 4), single("fp8_delayed", 2)[1]
    assert len(state["amax"]) == 2 * 7 and all(one.shape == (2, 16) for one in state["amax"].values())
    states = [dict(state=one, first=2) for one in (state, state | dict(amax={}))]
    ((resumed, fresh),) = launch.run(
        lambda: [trained(CONFIG, "fp8_delayed", **one)[1]["parameters"] for one in states], ranks=1
    )
    assert same(resumed, whole[1]["parameters"]) and not same(fresh, whole[1]["parameters"])
    other = launch.run(
        lambda: trained(CONFIG, "fp8_delayed", state=state, first=2, pp=2, microbatches=2), ranks=2
    )
    assert distance((whole[0][2:], other[1][1]), (other[0][0], whole[1])) < TOLERANCE


def test_under_sequence_parallelism_codes_are_gathered():
    """In bytes: a column gathers x twice, a row dy once; Q, K, V and up, gate are one column each."""

    def rank(name, precision="bfloat16"):
        config = small(num_layers=1, tied=False, d_ff=24)
        strategy = Strategy(tp=2, sequence_parallel=True, products=name, precision=precision)
        run = parallelize(config, strategy, seed=3)
        batch = run.batch(rows(), 0)
        with Ledger() as ledger:
            run.step(batch)
        return ledger.payload_bytes("all_gather", "tp"), ledger.payload_bytes("reduce_scatter", "tp")

    def both():
        return {name: rank(name) for name in ("plain", "fp8_tensor", "fp8_rows", "fp8_tiles")}

    found = launch.run(both, ranks=2)[0]
    tokens, width = 4 * 8, 16
    in_block = 6 * tokens * width  # x of two columns twice, two dy
    rest = found["plain"][0] - 2 * in_block
    assert rest > 0 and found["fp8_tensor"][0] == in_block + rest
    assert found["fp8_rows"][0] == found["fp8_tiles"][0] == in_block + 6 * tokens * 4 + rest
    assert len({sums for _, sums in found.values()}) == 1


def test_experts_in_low_precision_are_one_low_layer_each():
    draw = torch.Generator().manual_seed(0)
    up, gate, x = (torch.randn(*size, generator=draw).double() for size in ((3, 8, 12), (3, 8, 12), (9, 8)))
    down, counts = torch.randn(3, 12, 8, generator=draw).double(), torch.tensor([4, 0, 5])
    for one in (up, gate, down):
        one.requires_grad_()
    kind, scales = PRODUCTS["fp8_rows"], Scales()
    y = experts.LowBits(kind, scales, scales)(x, counts, up, down, F.silu, gate)
    y.square().sum().backward()
    grads = [one.grad.clone() for one in (up, gate, down)]

    def low(x, matrix):
        return multiply(x, [matrix.mT], [scales], kind)[0]

    for one in (up, gate, down):
        one.grad = None
    parts = [low(F.silu(low(p, gate[e])) * low(p, up[e]), down[e]) for e, p in enumerate(x.split([4, 0, 5]))]
    torch.cat(parts).square().sum().backward()
    assert torch.equal(y, torch.cat(parts))
    assert all(torch.allclose(one.grad, grad, rtol=1e-12) for one, grad in zip((up, gate, down), grads))
    exact = experts.loop(x, counts, up, down, F.silu, gate)
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.1


# ---- kernels, names, bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_e4m3", "fp8_rows"])
def test_torchs_kernel_and_the_emulation_agree(name):
    """On a CPU too torch has the function. Sums of K numbers in float32 in two orders, then bfloat16."""
    kind, (x, weight, dy) = PRODUCTS[name], operands(3, 32, 64, 48)
    for a, b in ((x, weight), (dy, weight.mT), (dy.mT, x.mT)):
        a, b = quantize(a.bfloat16().contiguous(), kind.x), quantize(b.bfloat16().contiguous(), kind.weight)
        assert products.fits_kernel(a.blocks, b.blocks, torch.bfloat16)
        by_kernel, emulated = products.by_kernel(a, b, torch.bfloat16), products.product(a, b, torch.bfloat16)
        left, right = dequantize(a).abs(), dequantize(b).abs()
        most = (left @ right.mT) * a.shape[1] * 2**-23 + emulated.float().abs() * 2**-7
        assert by_kernel.shape == emulated.shape
        assert ((by_kernel.float() - emulated.float()).abs() <= most).all()


@pytest.mark.cuda(alone=True)
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_rows"])
def test_on_a_gpu_the_kernel_is_used_and_errs_as_the_emulation_does(name, monkeypatch):
    x, weight, dy = (one.bfloat16().cuda() for one in operands(5, 64, 512, 128))
    scales, used = Scales(device="cuda"), []
    by_kernel = products.by_kernel
    monkeypatch.setattr(products, "by_kernel", lambda *args: used.append(1) or by_kernel(*args))
    (y,) = multiply(x, [weight], [scales], PRODUCTS[name])
    a, b = quantize(x, PRODUCTS[name].x), quantize(weight, PRODUCTS[name].weight)
    exact = dequantize(a, torch.float64) @ dequantize(b, torch.float64).mT
    most = dequantize(a, torch.float64).abs() @ dequantize(b, torch.float64).abs().mT
    assert len(used) == 1 and ((y - exact).abs() <= most * 33 * 2.0**-13 + exact.abs() * 2.0**-8).all()


def test_a_cast_is_one_graph_for_torchs_compiler():
    x, weight, dy = operands(0, 32, 32, 32)
    for name in ("fp8_tensor", "fp8_rows", "fp8_tiles"):
        torch._dynamo.reset()
        compiled = products.fused(PRODUCTS[name], backend="eager", fullgraph=True)
        assert compiled.cast is not quantize
        ours, plain = (gradients(x, weight, dy, kind) for kind in (compiled, PRODUCTS[name]))
        assert all(map(torch.equal, ours, plain))


def test_which_products_have_a_kernel():
    fits = partial(products.fits_kernel, dtype=torch.bfloat16)
    e4m3, e5m2, row = Blocks(formats.E4M3), Blocks(formats.E5M2), Blocks(formats.E4M3, (0,))
    assert fits(e4m3, e5m2) and fits(e5m2, e4m3) and fits(row, row) and not fits(e5m2, e5m2)
    assert not fits(row, e4m3) and not fits(row, row, dtype=torch.float32)
    assert not fits(e4m3, e4m3, dtype=torch.float64)
    assert not fits(*[PRODUCTS["mxfp8"].x] * 2) and not fits(*[PRODUCTS["fp8_tiles"].x] * 2)
    assert not products.has_kernel(torch.device("cpu"))
    weight = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert products.emulated(PRODUCTS["fp8_tensor"], weight)


def test_a_kernel_is_used_where_there_is_one_and_widths_are_whole(monkeypatch):
    used = []
    monkeypatch.setattr(products, "has_kernel", lambda device: True)
    monkeypatch.setattr(
        products, "scaled_mm", lambda *args, **more: used.append(1) or torch._scaled_mm(*args, **more)
    )
    for width, count in ((64, 3), (24, 3)):  # 24 is not whole, the products of 64 are counted
        x, weight, dy = (one.bfloat16() for one in operands(0, 32, width, 32))
        y, dx, dweight = gradients(x, weight, dy, PRODUCTS["fp8_tensor"])
        assert len(used) == count and y.dtype == dx.dtype == dweight.dtype == torch.bfloat16
        exact = x.float() @ weight.float().mT
        assert ((y.float() - exact).norm() / exact.norm()) < 0.06
    assert not products.emulated(PRODUCTS["fp8_tensor"], torch.zeros(16, 16, dtype=torch.bfloat16))
    assert products.emulated(PRODUCTS["fp8_tensor"], torch.zeros(16, 24, dtype=torch.bfloat16))


def test_names_are_known_everywhere_and_emulation_is_said():
    assert set(policies.PRODUCTS) == {"plain", *passes.PRODUCTS}
    model = GPT(CONFIG, seed=0)
    multiply_in(model, strategy := Strategy(products="fp8_rows"), None)
    said = "products='fp8_rows' are emulated, at no gain in time: no kernel for float32 on cpu"
    assert emulation(model.layers, strategy) == said and emulation(model.layers, Strategy()) is None


def test_of_experts_neither_their_number_nor_the_router_needs_a_kernel(monkeypatch):
    monkeypatch.setattr(products, "has_kernel", lambda device: True)
    config = replace(MIXTURE, num_kv_heads=4, experts=replace(MIXTURE.experts, expert_width=16))
    layers, strategy = GPT(config, seed=0, dtype=torch.bfloat16).layers, Strategy(products="fp8_tensor")
    assert emulation(layers, strategy) is None
    assert "emulated" in emulation(layers, Strategy(products="fp8_tiles"))


def test_what_cannot_be_is_refused_in_one_line():
    experts = dict(dp=2, ep=2, products="fp8_rows")
    for message, values in {
        "overlap=True with products='mxfp8': .* overlap=False": dict(tp=2, overlap=True, products="mxfp8"),
        "ep_chunks=2 with products=.* use ep_chunks=1": experts | dict(ep_chunks=2),
        "ep_travel='experts' with products": experts | dict(ep_travel="experts"),
        "ep_shadow=1 with products": experts | dict(ep_shadow=1),
        "fp8_delayed' with precision=": dict(products="fp8_delayed", precision="float16"),
    }.items():
        with pytest.raises(ValueError, match=message):
            Strategy(**values)
    with pytest.raises(ValueError, match="Linear with .*a module of your own gets dp and ZeRO"):
        check_module(torch.nn.Linear(2, 2), Strategy(products="fp8_rows"), 1)


def test_after_a_product_that_fails_the_account_counts_on():
    blocks = PRODUCTS["fp8_tiles"].x
    few, other = (quantize(torch.ones(4, width), blocks) for width in (128, 256))
    with Ledger() as ledger:
        with pytest.raises(RuntimeError):
            products.product(few, other, torch.float32)
        torch.ones(4, 8) @ torch.ones(8, 4)
    assert "mm" in ledger.flops_by_operator
