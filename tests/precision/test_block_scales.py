"""Blocks: error bounds, bytes, scales of every kind, what is not finite, and the exact memory."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minitrain.precision import formats
from minitrain.precision.blocks import (
    RECIPES,
    Blocks,
    Quantized,
    dequantize,
    from_bytes,
    pack,
    packed_bytes,
    quantize,
    recipe,
    to_bytes,
    unpack,
)
from minitrain.precision.rounding import decode, encode, round_to
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger

D, BLOCK = 75, 16  # the last block of a row has 11


def integers(bits: int, block: int) -> Blocks:
    return Blocks(f"int{bits}", (block,))


def there_and_back(x: Tensor, blocks: Blocks | str, dtype=None) -> Tensor:
    return dequantize(quantize(x, blocks, fill=True), dtype or x.dtype)


def half_steps(x: Tensor, bits: int, block: int) -> Tensor:
    """The error allowed at every number of x [.., d], from the maxima of the blocks as they are in x."""
    parts = [part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(block, -1)]
    return torch.cat(parts, -1).double() / (2 ** (bits - 1) - 1) / 2


def with_outlier(rows=64, columns=256) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    x[5, 40] = 5e4
    return x


# ---- integers --------------------------------------------------------------------------------------------

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60)
@given(st.lists(FLOAT32, max_size=40), st.sampled_from([4, 8]), st.integers(1, 24))
def test_no_number_is_wrong_by_more_than_half_a_step(numbers, bits, block):
    x = torch.tensor(numbers)
    q = quantize(x, integers(bits, block), fill=True)
    back = dequantize(q)
    assert q.nbytes == math.ceil(len(numbers) * bits / 8) + 4 * math.ceil(len(numbers) / block)
    assert back.shape == x.shape and (back[x == 0] == 0).all()
    if numbers:
        bound = half_steps(x, bits, block) * (1 + 2**-14) + 2.0**-149
        assert ((back.double() - x.double()).abs() <= bound).all()
        assert all(
            part[part.abs().argmax()] == restored[part.abs().argmax()]
            for part, restored in zip(x.split(block), back.split(block))
        ), "the largest comes back to the bit"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_with_the_rounding_of_its_own_on_top(bits, dtype):
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    back = there_and_back(x, integers(bits, BLOCK))
    assert back.dtype == dtype and back.shape == x.shape and back.is_contiguous() and not back.requires_grad
    bound = half_steps(x.detach(), bits, BLOCK)
    rounding = x.abs().max().double() * max(torch.finfo(dtype).eps, 2**-20)
    error = (back.double() - x.detach().double()).abs()
    assert (error <= bound + rounding).all() and (error > bound / 2).any(), "the bound is nearly reached, too"
    q = quantize(x, integers(bits, BLOCK), fill=True)
    assert q.nbytes == 3 * (math.ceil(D * bits / 8) + 4 * math.ceil(D / BLOCK))
    steps = q.multipliers.repeat_interleave(BLOCK, -1)[:, :D] / 2
    assert torch.allclose(steps.double(), bound, rtol=1e-6), "the multiplier of an integer is its step"


@pytest.mark.parametrize("bits", [4, 8])
def test_constants_zeros_and_outliers(bits):
    by_8, by_16 = integers(bits, 8), integers(bits, 16)
    for value in (0.0, 0.1, -3.7e30, 2.0**-149):
        assert torch.equal(there_and_back(torch.full((21,), value), by_8), torch.full((21,), value))
    tiny = torch.full((16,), 1e-60, dtype=torch.float64)  # below the smallest float32: the scale is zero
    assert there_and_back(tiny, by_8).abs().max() == 0
    odd = torch.tensor([1.49 * 2.0**-149] * 3, dtype=torch.float64)  # above its float32 scale: no overflow
    assert (there_and_back(odd, by_8) == 2.0**-149).all()
    outlier = torch.full((16,), 0.01)
    outlier[3] = 100.0
    assert (there_and_back(outlier, by_8)[8:] == outlier[8:]).all()  # its neighbours' block is spared
    assert (there_and_back(outlier, by_16)[8:] == 0).all()  # with one scale for all: gone
    assert there_and_back(torch.tensor([1e300, 1.0], dtype=torch.float64), by_8).isnan().all()


# ---- every recipe ----------------------------------------------------------------------------------------


def tiles_of(x: Tensor, blocks: Blocks) -> Tensor:
    """Which tile each number of x [rows, columns] is in."""
    tile = (1, *blocks.tile)[-2:] if blocks.tile else (0, 0)
    high, wide = (size or length for size, length in zip(tile, x.shape))
    return torch.arange(len(x))[:, None] // high * x.shape[1] + torch.arange(x.shape[1]) // wide


@pytest.mark.parametrize("name", RECIPES)
def test_error_is_half_a_step_of_the_format_times_the_multiplier(name):
    """Tile by tile against `round_to`: the scale, then one rounding, saturated."""
    blocks = RECIPES[name]
    f, x = blocks.format, with_outlier()
    q = quantize(x, blocks, fill=True)
    back, where = dequantize(q), tiles_of(x, blocks)
    assert len(where.unique()) == q.scales.numel()
    scales = q.scales.float().flatten().tolist()
    for tile, multiplier, scale in zip(where.unique().tolist(), q.multipliers.flatten().tolist(), scales):
        part, restored = x[where == tile].double(), back[where == tile].double()
        exact = part / multiplier
        near = round_to(exact, f, overflow="saturate")
        if f.table:
            step = torch.full_like(exact, 0.31)  # the widest gap, of the two most negative
        else:
            power = torch.exp2(torch.frexp(exact.abs().clamp(max=f.max)).exponent - 1.0)
            step = power.clamp(2.0**f.min_exponent) * f.eps
        beyond, error = (exact.abs() - f.max).clamp(min=0), (restored / multiplier - exact).abs()
        assert (error <= (step / 2 + beyond) * (1 + 2**-12) + exact.abs() * 2**-22).all()
        assert ((restored / multiplier - near).abs() < 1e-5 * f.max).double().mean() > 0.98  # ties of float32
        rounded_down = 2.0 ** (f.max_exponent + 1) - f.max  # MX: 6 is the largest, but amax may be 7.9
        nvidia = 1.1 * f.max * max(2**-4, 2**-10 / scale)  # the error of the scale itself, in E4M3
        assert beyond.max() <= {"float32": 1e-4, "e4m3": nvidia, "e8m0": rounded_down}[blocks.scale]


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_and_what_is_not_finite(name):
    blocks, x = RECIPES[name], torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    clean, where = there_and_back(x, blocks), tiles_of(x, blocks)
    assert (there_and_back(torch.zeros(128, 256), blocks) == 0).all()
    for poison in (math.nan, math.inf, -math.inf):
        bad = x.clone()
        bad[100, 200] = poison
        hit, back = (where == where[100, 200]) | (blocks.scale == "e4m3"), there_and_back(bad, blocks)
        assert back[hit].isnan().all() and torch.equal(back[~hit], clean[~hit])
    if blocks.scale == "float32":
        empty = torch.zeros(where.max() + 1)
        largest = empty.index_reduce(0, where.flatten(), x.abs().flatten(), "amax")[where]
        top = (x.abs() == largest) & (x > 0 if name == "nf4" else x == x)
        assert torch.equal(clean[top], x[top]) and top.any()


def test_bits_per_number_are_the_formats_and_the_bytes():
    """8.25, 6.25, 4.25 of MX, 4.5 of NVFP4 and NF4, 8 and 32/1,024 of 32 x 32 tiles of integers."""
    expected = dict(
        mxfp8=8.25, mxfp6=6.25, mxfp4=4.25, nvfp4=4.5, nf4=4.5, int8_32x32=8.03125, fp8_1x128=8.25
    )
    assert {name: float(RECIPES[name].bits_per_number) for name in expected} == expected
    assert RECIPES["fp8_128x128"].bits_per_number == 8 + Fraction(32, 128**2)
    assert RECIPES["fp8_row"].bits_per_number == RECIPES["fp8_tensor"].bits_per_number == 8
    x = torch.randn(256, 512)
    for blocks in RECIPES.values():
        q = quantize(x, blocks)
        parts = 0 if blocks.tile and all(blocks.tile) else 32 * q.scales.numel()  # of whole dims
        parts += 32 if blocks.scale == "e4m3" else 0
        assert 8 * q.nbytes == blocks.bits_per_number * x.numel() + parts
    assert Blocks("e4m3") == RECIPES["fp8_tensor"] and recipe("test", "mxfp4") is RECIPES["mxfp4"]


def test_mx_scales_are_the_standards():
    """2^(floor(log2 amax) - emax), with emax 8, 15, 2, 4, 2 and 6 and, for the smallest and largest, the ends."""
    largest = dict(mxfp8=8, mxfp8_e5m2=15, mxfp6=2, mxfp6_e3m2=4, mxfp4=2, mxint8=6)
    for name, exponent in largest.items():
        for amax in (1.0, 1.99, 0.75, 3e38, 2.0**-120, 6.0, 448.0):
            x = torch.zeros(32)
            x[7] = -amax
            expected = max(math.floor(math.log2(amax)) - exponent, -127)
            assert quantize(x, name).scales.float().tolist() == [2.0**expected], (name, amax)
        assert quantize(torch.zeros(32), name).scales.view(torch.uint8).item() == 0
        assert quantize(torch.full((32,), 2.0**-149), name).scales.view(torch.uint8).item() == 0
        poisoned = quantize(torch.full((32,), math.inf), name)
        assert poisoned.scales.dtype == torch.float8_e8m0fnu
        assert poisoned.scales.view(torch.uint8).item() == 255
    # 4 bits by hand: amax 11 -> scale 2; 11/2 = 5.5 -> 6, 2.5/2 -> 1 (tie to even), -0.4/2 -> -0
    x = torch.zeros(32)
    x[:3] = torch.tensor([11.0, 2.5, -0.4])
    assert dequantize(quantize(x, "mxfp4"))[:3].tolist() == [12.0, 2.0, 0.0]


def test_nvfp4_has_two_levels_of_scales():
    x = with_outlier(16, 64)
    x[5, 40] = 5e6
    q = quantize(x, "nvfp4")
    assert q.tensor_scale == x.abs().max() / 6 / 448 and q.scales.dtype == torch.float8_e4m3fn
    assert q.scales.float().max() == 448 and q.codes.shape == (16, 32) and q.codes.dtype == torch.uint8
    amax = x.unflatten(1, (4, 16)).abs().amax(2)
    expected = (amax / 6 / q.tensor_scale).to(torch.float8_e4m3fn)
    assert torch.equal(q.scales.float(), expected.float())
    assert (
        dequantize(q).unflatten(1, (4, 16))[expected.float() == 0] == 0
    ).all()  # a scale lost beside the outlier
    assert (expected.float() == 0).any()


def test_finer_tiles_spare_more_of_what_is_beside_an_outlier():
    """Integers, one number in 16,384 2,000 times the others: whole tensor > 32 x 32 > row of 256 > 1 x 32."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    x[5, 40] = 2000
    errors = [(there_and_back(x, Blocks("int8", tile)) - x).norm() for tile in ((), (32, 32), (0,), (32,))]
    assert errors == sorted(errors, reverse=True) and errors[0] > 20 * errors[-1]
    fp8 = [
        (there_and_back(with_outlier(), n) - with_outlier())[6:].norm() for n in ("fp8_tensor", "fp8_1x128")
    ]
    assert fp8[0] > 1.2 * fp8[1], "an outlier of 5e4 pushes the others below the smallest normal"


def test_tiles_of_two_dims_columns_and_stacks():
    x = torch.randn(3, 70, 50)
    for tile, shape in (
        ((32, 32), (3, 3, 2)),
        ((0, 1), (3, 1, 50)),
        ((1, 0), (3, 70, 1)),
        ((64, 0), (3, 2, 1)),
        ((), ()),
    ):
        q = quantize(x, Blocks("e4m3", tile), fill=True)
        assert q.scales.shape == shape and q.codes.shape == x.shape
        assert torch.allclose(dequantize(q), x, rtol=2**-4, atol=x.abs().max().item() * 2**-16)
        parts = [x] if tile == () else [
            part for row in x.split(tile[0] or 70, 1) for part in row.split(tile[1] or 50, 2)
        ]  # fmt: skip
        amax = [part.abs().amax((1, 2)) if tile else part.abs().max() for part in parts]
        assert torch.equal(torch.stack(amax, -1).flatten(), q.scales.flatten())
    transposed = x.mT
    assert torch.equal(there_and_back(transposed, "int8_32x32"), there_and_back(x, "int8_32x32").mT)
    for name, blocks in RECIPES.items():  # as an expert's rows of which there are none
        for shape in ((0, 64), (4, 0), *[(0,)] * (len(blocks.tile) < 2)):
            assert there_and_back(torch.zeros(shape), name).shape == shape


# ---- scales from elsewhere, rounding by chance, messages ---------------------------------------------------


def test_a_delayed_scale_saturates_and_keeps_nan():
    x = torch.tensor([1.0, -3.0, 0.5, math.inf, math.nan, 0.0])
    q = quantize(x, "fp8_tensor", amax=torch.tensor(2.0))
    assert q.scales == 2 and q.multipliers == 2 / 448
    back = dequantize(q).tolist()
    assert back[:4] == [1.0, -2.0, 0.5, 2.0] and math.isnan(back[4]) and back[5] == 0
    assert torch.equal(
        quantize(x[:3], "fp8_tensor", amax=torch.tensor(3.0)).codes, quantize(x[:3], "fp8_tensor").codes
    )
    rows = torch.randn(4, 256)
    amax = rows.unflatten(1, (2, 128)).abs().amax(2) * 2
    q = quantize(rows, "fp8_1x128", amax=amax)
    assert torch.equal(q.scales, amax) and q.elements().abs().max() <= 224


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_amax_from_elsewhere_hides_nothing_in_integers(bad):
    """They have no code for NaN and infinity: the scale of such a tile is NaN, and only of such a tile."""
    x = torch.tensor([[1.0, -3.0, 0.5, 2.0], [1.0, 0.5, bad, 0.0]])
    q, step = quantize(x, Blocks("int8", (2,)), amax=torch.full((2, 2), 2.0)), 2 / 127
    assert (q.codes[0].tolist(), q.codes[1, :2].tolist()) == ([64, -127, 32, 127], [64, 32])
    back = dequantize(q)
    assert back[1, 2:].isnan().all() and back[1, :2].tolist() == pytest.approx([64 * step, 32 * step])
    assert dequantize(quantize(x, Blocks("int8"), amax=torch.tensor(2.0))).isnan().all()
    assert quantize(x[:0], Blocks("int8"), amax=torch.tensor(2.0)).codes.shape == (0, 4)


@pytest.mark.parametrize("name", ["int8_32x32", "mxfp4", "nvfp4", "fp8_1x128"])
def test_by_chance_the_mean_is_the_number(name):
    """4,000 draws of one row: the mean of all within 3 sigma of it, each number within 4.5."""
    x = torch.rand(1, 128, generator=torch.Generator().manual_seed(0)) + 0.3
    many, draws = x.expand(4096, -1), 4096
    q = quantize(many, name, mode="stochastic", generator=torch.Generator().manual_seed(1))
    y = dequantize(q, torch.float64)
    same = quantize(many, name, mode="stochastic", generator=torch.Generator().manual_seed(1))
    assert torch.equal(q.codes, same.codes)
    clipped = x.double().minimum(y.amax(0)) if name.endswith("4") else x.double()  # rounded scales clip
    sigma = (y.std(0) / draws**0.5).clamp(min=1e-7)
    off = (y.mean(0) - clipped[0]) / sigma
    assert off.abs().max() < 4.5 and (y.std(0) > 0).double().mean() > 0.5
    assert abs((y.mean(0) - clipped[0]).sum()) < 3 * sigma.square().sum().sqrt() + 1e-5
    nearest = there_and_back(x, name, torch.float64)
    assert (y - x).abs().mean() > (nearest - x).abs().mean(), "no single one is as near as the nearest"


@pytest.mark.parametrize(
    "blocks,d",
    [
        (integers(4, 2), 7), (integers(4, 16), 75), (integers(8, 1), 3), (integers(8, 5), 12), (integers(4, 6), 1),
        (integers(4, 3), 8), (RECIPES["mxfp4"], 65), (RECIPES["mxfp6"], 33), (RECIPES["nf4"], 64),
        (RECIPES["mxfp8_e5m2"], 40), (RECIPES["fp8_row"], 9),
    ],
)  # fmt: skip
def test_a_message_carries_codes_and_scales(blocks, d):
    q = quantize(torch.randn(2, 3, d, dtype=torch.float64), blocks, fill=True)
    message = to_bytes(q)
    scale = 4 if blocks.scale == "float32" else 1
    size = math.ceil(d * blocks.format.bits / 8) + scale * math.ceil(d / (blocks.tile[0] or d))
    assert message.shape == (2, 3, size) and message.dtype == torch.uint8 and q.nbytes == 6 * size
    again: Quantized = from_bytes(message, d, blocks)
    assert torch.equal(again.codes, q.codes) and again.shape == q.shape
    assert torch.equal(again.multipliers, q.multipliers) and again.scales.dtype == q.scales.dtype
    assert torch.equal(dequantize(again, torch.float64), dequantize(q, torch.float64))


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_codes_come_back(bits):
    for length in (0, 1, 2, 3, 4, 5, 16, 31):
        codes = torch.randint(0, 256, (2, length), dtype=torch.uint8)
        packed = pack(codes, bits)
        assert packed.shape == (2, packed_bytes(length, bits))
        assert packed_bytes(length, bits) == math.ceil(length * bits / 8)
        assert packed.is_contiguous()  # to be sent
        assert torch.equal(unpack(packed, bits, length), codes & 2**bits - 1)
    row = torch.arange(2**bits).to(torch.uint8)
    stream = sum(int(code) << bits * place for place, code in enumerate(row))
    assert bytes(pack(row, bits).tolist()) == stream.to_bytes(packed_bytes(len(row), bits), "little")


@pytest.mark.parametrize(
    "bits,dtype,codes", [(8, torch.float32, 1), (4, torch.float32, 0.5), (8, torch.bfloat16, 1)]
)
def test_memory_while_it_works(bits, dtype, codes):
    """Besides x and the result: one float32 copy (of a half-precision x two), and the codes in a byte each."""
    x = torch.randn(512, 512).to(dtype)
    n, scales, blocks = x.numel(), 4 * x.numel() // 64, integers(bits, 64)
    with Ledger() as ledger:
        q = quantize(x, blocks)
    work = 4 * n + (5 * n if dtype == torch.float32 else 9 * n - 2 * n)
    assert ledger.peak_bytes == work + scales
    del x
    with Ledger() as ledger:
        back = dequantize(q)
    assert ledger.peak_bytes == codes * n + scales + 4 * n + (n if bits == 4 else 0) and back.nbytes == 4 * n


def test_codes_are_the_formats():
    """What is stored is what `encode` gives, so a reader of the bytes needs nothing else."""
    x = torch.randn(4, 64)
    for name in ("mxfp6", "mxfp4", "mxint8", "mxfp8"):
        q = quantize(x, name)
        f, scaled = q.blocks.format, x / q.multipliers.repeat_interleave(32, -1)
        codes = encode(scaled, f, overflow="saturate")
        stored = q.codes if f.bits == 8 else unpack(q.codes, f.bits, 64)
        assert torch.equal(stored.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(decode(codes, f), q.elements())
    assert formats.FORMATS["e2m1"] is RECIPES["nvfp4"].format


def sizes() -> dict[str, tuple]:
    """What each recipe makes of ones [128, 256]: shapes, dtypes and bytes, with and without numbers to ask."""
    found, x = {}, torch.ones(128, 256)
    for name in RECIPES:
        q = quantize(x, name)
        stored = [(tensor.shape, tensor.dtype) for tensor in (q.codes, q.scales)]
        found[name] = *stored, q.nbytes, dequantize(q).shape
    found["delayed"] = quantize(x, "fp8_1x128", amax=torch.ones(128, 2)).nbytes
    found["round_to"] = [round_to(x, name).shape for name in ("e2m1", "e4m3", "fp16_1_6_9", "int8")]
    return found


def test_a_dry_run_has_the_same_shapes_and_bytes():
    assert dryrun.run(sizes, rank=3, ranks=64) == sizes()
