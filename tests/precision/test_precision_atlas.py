"""The checks of the atlas that lie across formats, scales, policies and products."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.compose.passes import PRODUCTS
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Text
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision import formats
from minitrain.precision.blocks import RECIPES, Blocks, dequantize, quantize
from minitrain.precision.policies import POLICIES
from minitrain.precision.products import Scales, multiply
from minitrain.systems.precision.narrow_sums import sum_in, tensor_core_matmul

short = partial(dict, precision="bfloat16")
WAYS = {
    "float32": dict(), "bfloat16": short(), "float16": dict(precision="float16"),
    **{n: short(products=n) for n in ("fp8_delayed", "fp8_tiles", "fp8_tiles_14", "mxfp8", "mxfp6", "mxfp4")},
}  # fmt: skip


def trained(ways=WAYS):
    """Losses of a tiny GPT on real text, 24 steps, the same start and batches under every way."""
    torch.set_num_threads(1)
    shape = dict(num_layers=2, num_heads=2, max_positions=32, norm="rms", positions="rope", activation="gelu")
    config, (text, _) = GPTConfig(vocab_size=256, d_model=32, tied=False, **shape), Text.builtin().split()
    found = {}
    for name, way in ways.items():
        run = parallelize(config, Strategy(**way), partial(AdamW, lr=3e-3), seed=1)
        rows = text.rows(16, 32)
        found[name] = [run.step(run.batch(rows, step), 1.0).loss.item() for step in range(24)]
        found[name, "kept"] = {str(x.dtype) for param in run.model.parameters() for x in (param, param.grad)}
    return found


@pytest.fixture(scope="module")
def losses():
    return launch.run(trained, ranks=1)[0]


def gap(losses, name, other):
    """Of the means of the last ten steps."""
    last = [sum(losses[way][-10:]) / 10 for way in (name, other)]
    return abs(last[0] / last[1] - 1)


def errors_of(name, channel=1):
    """Relative, of y, dx and dW; a channel of x is so many times as large. Both operands in E4M3: 3.7 %."""
    draw = torch.Generator().manual_seed(1)
    x, weight, dy = (torch.randn(size, generator=draw) for size in ((256, 512), (128, 512), (256, 128)))
    x[:, 7] *= channel
    leaves = x.requires_grad_(), weight.requires_grad_()
    (y,) = multiply(x, [weight], [Scales()], replace(PRODUCTS[name], history=0))
    found = (y, *torch.autograd.grad(y, leaves, dy))
    x, weight, dy = (one.detach().double() for one in (x, weight, dy))
    exact = x @ weight.mT, dy @ weight, dy.mT @ x
    return [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact)]


def test_transformer_engine(losses):
    """scale = 448 / max(amax history), of 3 steps; half an ulp; gradients in E5M2; the loss within 1 % of bfloat16's."""
    scales, kind = Scales(history=3), PRODUCTS["fp8_delayed"]
    for amax in (9.0, 5.0, 2.0, 1.0):
        kind.enter(torch.tensor([[amax]]), scales)
        scales.roll(scales.largest.clone())
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))[None] * 4 + 0.1
    q = kind.enter(x, scales)
    assert 1 / q.multipliers.item() == pytest.approx(448 / 5)
    assert ((dequantize(q) - x).abs() <= x * 2.0**-4 * (1 + 1e-6)).all()
    assert (q.blocks.format, kind.enter_grad(x, scales).blocks.format) == (formats.E4M3, formats.E5M2)
    assert errors_of("fp8_delayed") == pytest.approx([0.037, 0.059, 0.059], rel=0.05)  # E5M2 alone: 0.053
    assert 0 < gap(losses, "fp8_delayed", "bfloat16") < 0.01
    assert losses["float32"][-1] < 0.75 * losses["float32"][0]  # it learns


def test_deepseek_fp8(losses):
    """Tiles err less than a tensor with an outlier channel; promotion every 128 of K = 4096, in a layer as well, whose
    sums have 14 bits; the loss stays."""
    for name in ("fp8_tiles", "fp8_tiles_14"):
        assert all(0.034 < error < 0.05 for error in errors_of(name))  # one operand in E4M3: 0.026
        assert gap(losses, name, "bfloat16") < 0.01  # published: below 0.25 % of a model of 671 billion
    x, weight = (torch.randn(n, 4096, generator=torch.Generator().manual_seed(n)) for n in (8, 16))
    wide, narrow = (multiply(x, [weight], [Scales()], PRODUCTS[f"fp8_tiles{how}"])[0] for how in ("", "_14"))
    assert 1e-5 < (narrow - wide).norm() / wide.norm() < 2e-3  # without promotion: 0.07
    assert errors_of("fp8_tiles", channel=100)[0] < 0.9 * errors_of("fp8_e4m3", channel=100)[0]
    kind, x, weight = PRODUCTS["fp8_tiles"], torch.ones(256, 512), torch.ones(128, 512)
    operands = kind.enter(x, Scales()), quantize(weight, kind.weight), kind.enter_grad(x, Scales())
    assert [q.scales.numel() for q in operands] == [256 * 4, 4, 256 * 4]  # 1 x 128, 128 x 128
    assert {q.blocks.format for q in operands} == {formats.E4M3}
    draw = torch.Generator().manual_seed(0)
    drawn = lambda *size: torch.randn(size, generator=draw).to(torch.float8_e4m3fn).float()
    a, b = drawn(8, 4096), drawn(4096, 8)
    exact = a.double() @ b.double()
    off = lambda promote: (tensor_core_matmul(a, b, promote=promote) - exact).abs().max()
    errors = {p: (off(p) / exact.square().mean().sqrt()).item() for p in (None, 128)}
    assert 0.004 < errors[None] < 0.03 and errors[128] < errors[None] / 9  # published: about 2 %


def test_mixed_precision_fp16(losses):
    """1e-4 on a weight of 1 is lost in FP16 and kept in a master; the loss tracks float32's."""
    one, ones = torch.ones(1, dtype=torch.float16), torch.ones(1, 4096, dtype=torch.float16)
    assert one + 1e-4 == 1 and (ones @ ones.mT).item() == 4096 > sum_in(ones, "fp16").item()
    param = torch.nn.Parameter(one)
    optimizer = AdamW([param], lr=1e-4, eps=0.0, weight_decay=0.0, master_dtype=torch.float32)
    seen = []
    for _ in range(10):
        param.grad = torch.ones_like(param)
        optimizer.step()
        seen.append(param.item())
    assert optimizer.state[param]["master"].item() == pytest.approx(1 - 10e-4, abs=1e-6)
    assert seen[0] == 1 and seen[-1] < 1  # what is too small alone has added up
    assert losses["float16", "kept"] == {"torch.float16"} != losses["float32", "kept"]
    assert gap(losses, "float16", "float32") < 0.01


def test_bf16(losses):
    """As wide as float32, eps 2^-7; sums stall; no factor is needed."""
    assert formats.BF16.max == pytest.approx(3.39e38, rel=1e-3) and formats.BF16.eps == 2.0**-7
    ones = torch.ones(1, 4096)
    assert [sum_in(ones, name).item() for name in ("bf16", "fp16")] == [256, 2048]
    assert gap(losses, "bfloat16", "float32") < 0.01 and Strategy(precision="bfloat16").first_loss_scale == 0
    assert losses["bfloat16", "kept"] == {"torch.bfloat16"}
    tiny = torch.tensor(2.0**-100)
    assert tiny.bfloat16() == tiny and tiny.half() == 0
    kept = {}  # of ten updates, each less than half of what bfloat16 can tell from 1
    for master in (POLICIES["bfloat16"].master, "bfloat16"):
        weight = torch.nn.Parameter(torch.ones(1).bfloat16())
        optimizer = AdamW([weight], lr=1e-3, master_dtype=getattr(torch, master))
        weight.grad = torch.ones_like(weight)
        for _ in range(10):
            optimizer.step()
        kept[master] = weight.item()
    assert kept == {"float32": 0.98828125, "bfloat16": 1.0}


def test_mx_formats(losses):
    """Bits per number, the scale's rule, and what an outlier takes from the others."""
    bits = {name: RECIPES[name].bits_per_number for name in ("mxfp8", "mxfp6", "mxfp4")}
    assert bits == {"mxfp8": 8.25, "mxfp6": 6.25, "mxfp4": 4.25}
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=draw)
    for name in bits:
        q, f = quantize(x, name), RECIPES[name].format
        assert 8 * q.nbytes == bits[name] * x.numel()
        assert torch.equal(dequantize(q), q.elements() * q.scales.float().repeat_interleave(32, -1))
        amax = x.unflatten(-1, (2, 32)).abs().amax(-1)
        assert torch.equal(q.scales.float(), 2.0 ** (amax.log2().floor() - math.floor(math.log2(f.max))))
    x[:, 3] *= 1000
    for name in ("mxfp6", "mxfp4"):
        f = RECIPES[name].format
        of_blocks = dequantize(quantize(x, name))[:, 32:] - x[:, 32:]
        of_tensor = dequantize(quantize(x, Blocks(f)))[:, 32:] - x[:, 32:]
        assert of_blocks.norm() < 0.2 * of_tensor.norm()
    assert all(0.034 < error < 0.05 for error in errors_of("mxfp8"))  # one operand in E4M3: 0.026
    assert all(0 < gap(losses, name, "bfloat16") < 0.01 for name in bits)
