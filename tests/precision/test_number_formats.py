"""Formats and rounding, to the bit: beside torch's dtypes, beside ml_dtypes, beside a search through all values."""

import math
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from statistics import NormalDist

import ml_dtypes
import numpy
import pytest
import torch
from torch import Tensor

from minitrain.precision.formats import FORMATS, Format
from minitrain.precision.rounding import add_stochastic_, decode, encode, every_value, round_to

THEIRS = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e4m3_ieee": ml_dtypes.float8_e4m3,
    "e3m4": ml_dtypes.float8_e3m4, "e4m3_fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2_fnuz": ml_dtypes.float8_e5m2fnuz, "hfp8_1_4_3": ml_dtypes.float8_e4m3b11fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu, "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn, "bf16": ml_dtypes.bfloat16, "fp16": numpy.float16,
}  # fmt: skip
EMULATED = {
    f"{f.name} by hand": replace(f, dtype=None)
    for f in FORMATS.values()
    if f.dtype and f.signed and not f.integer
}
EVERY = {**FORMATS, **EMULATED}
FLOATING = [name for name, f in EVERY.items() if not f.table and not f.integer]


def theirs(x: Tensor, f: Format) -> tuple[Tensor, Tensor]:
    """(codes, values) of ml_dtypes or numpy."""
    with numpy.errstate(all="ignore"):
        cast = x.numpy().astype(THEIRS[f.name])
        codes = cast.view(numpy.uint8 if f.bits <= 8 else numpy.uint16)
        return torch.from_numpy(codes.astype(numpy.int32)), torch.from_numpy(cast.astype(numpy.float32))


def numbers(f: Format) -> Tensor:
    """float32: every value, every tie, both a bit to each side; the edges; random bits of all sizes."""
    values = every_value(f).double() if f.bits <= 16 else torch.randn(5000).double()
    values = values[values.isfinite()].unique()
    past = torch.tensor([1.0, 1.25, 1.5, 1.75, 2.0], dtype=torch.float64) * 2.0**f.max_exponent
    values = torch.cat((values, past, -past, f.smallest_subnormal * torch.tensor([0.25, 0.5, 0.75]).double()))
    ties = (values.sort().values[1:] + values.sort().values[:-1]) / 2
    exact = torch.cat((values, ties)).float()
    around = [exact, *(exact.nextafter(torch.tensor(end)) for end in (math.inf, -math.inf))]
    chance = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (60_000,), generator=chance).int().view(torch.float32)
    usual = torch.randn(60_000, generator=chance) * f.max**0.5
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38])
    return torch.cat((*around, bits, usual, special))


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, with any NaN equal to any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32)
    )


# ---- formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "fp16"])
def test_limits_are_those_of_ml_dtypes_and_torch(name):
    f, info = FORMATS[name], ml_dtypes.finfo(THEIRS[name])
    assert (f.max, f.smallest_normal, f.bits) == (float(info.max), float(info.smallest_normal), info.bits)
    assert f.smallest_subnormal == float(info.smallest_subnormal) or name == "e8m0"
    assert f.eps == float(info.eps)
    if f.dtype:
        known = torch.finfo(f.dtype)
        assert (f.max, f.smallest_normal) == (known.max, known.smallest_normal)


def test_limits_as_published():
    limits = {name: (f.max, f.smallest_normal, f.smallest_subnormal, f.eps) for name, f in FORMATS.items()}
    assert limits["fp16_1_6_9"] == ((2 - 2**-9) * 2.0**31, 2**-30, 2**-39, 2**-9)
    assert limits["int8"][0] == 127 and limits["int4"][0] == 7 and limits["tf32"][3] == 2**-10
    info = torch.finfo(torch.float32)
    assert limits["fp32"] == (info.max, info.smallest_normal, 2**-149, 2**-23)
    bits = dict(tf32=19, fp16_1_6_9=16, e3m2=6, e2m1=4, nf4=4, int4=4)
    assert {name: FORMATS[name].bits for name in bits} == bits


def test_normal_float_has_equal_shares():
    """15 quantiles that lie evenly, 8 to the right of zero and 7 to the left, and zero: to 1e-7 of the table."""
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    derived = sorted(x / above[0] for x in (*below, 0.0, *above))
    assert max(abs(a - b) for a, b in zip(derived, FORMATS["nf4"].table, strict=True)) < 1.5e-7


@pytest.mark.parametrize("name", [name for name, f in EVERY.items() if f.bits <= 16])
def test_every_code(name):
    """value(), decode, ml_dtypes and encode say the same of each; of BF16 and FP16, too."""
    f = EVERY[name]
    codes = torch.arange(-f.max_code, f.max_code + 1) if f.integer else torch.arange(1 << f.bits)
    values = every_value(f)
    assert same(values, torch.tensor([f.value(code & (1 << f.bits) - 1) for code in codes.tolist()]))
    if f.name in THEIRS:
        raw = codes.numpy().astype(numpy.uint8 if f.bits <= 8 else numpy.uint16).view(THEIRS[f.name])
        assert same(values, torch.from_numpy(raw.astype(numpy.float32)))
    numeric = ~values.isnan()
    back = encode(values[numeric], f)
    assert back.dtype == (torch.int8 if f.integer else torch.uint8 if f.bits <= 8 else back.dtype)
    assert torch.equal(back.int(), codes[numeric].int())
    assert values[values.isfinite()].max() == f.max and (values.abs() == f.max).any()
    if f.has_nan:
        made = encode(torch.tensor([math.nan, 1.0]), f)
        assert decode(made, f).isnan().tolist() == [True, False]
    assert {"ieee": 2, "nan": 1, "fnuz": 0, "none": 0}[f.specials] == (
        values.isinf().sum() if f.has_infinity else f.specials == "nan"
    )


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_codes_of_wide_formats_are_the_top_of_float32(name):
    f, special = FORMATS[name], torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-41])
    x = torch.cat((torch.randn(1000), special))
    y = round_to(x, f)
    assert same(decode(encode(x, f), f), y)
    assert torch.equal(encode(x, f), y.view(torch.int32) >> 32 - f.bits & (1 << f.bits) - 1)
    assert [f.value(int(code) & (1 << f.bits) - 1) for code in encode(x, f)[:9]] == y[:9].tolist()


# ---- rounding to nearest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, f in EVERY.items() if f.name in THEIRS])
def test_nearest_is_theirs_to_the_bit(name):
    """Values and codes, of float32 and of the same numbers as float64."""
    f = EVERY[name]
    x = numbers(f)
    x = x if f.has_nan else x[~x.isnan()]
    codes, values = theirs(x, f)
    assert same(round_to(x, f), values)
    numeric = ~values.isnan()
    assert torch.equal(encode(x, f).int()[numeric], codes[numeric])
    assert decode(encode(x, f), f)[~numeric].isnan().all()
    # Torch and ml_dtypes round what is subnormal in float32 up in E8M0, 1.25 · 2^-127 say; once, from float64, is to nearest.
    alike = x.abs() >= 2.0**-126 if f.name == "e8m0" else torch.ones_like(x, dtype=torch.bool)
    alike, once = alike | x.isnan() | (x <= 0), round_to(x.double(), f)
    assert once.dtype == torch.float64 and same(once.float()[alike], values[alike])
    assert torch.equal(encode(x.double(), f).int()[numeric & alike], codes[numeric & alike])
    assert decode(encode(x.double(), f), f)[~numeric].isnan().all()
    assert (round_to(torch.tensor([2.0**-126 * 1.25 / 2]).double(), "e8m0") == 2.0**-127).all()


@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if f.bits <= 8 and f.signed])
def test_nearest_is_the_nearest_of_all_values(name):
    """By search, in exact fractions; a tie goes to the even code, in a table to the smaller number."""
    f = FORMATS[name]
    if f.integer or f.table:
        known = {Fraction(float(v)): i for i, v in enumerate(every_value(f))}
    else:
        known = {Fraction(f.value(code)): code for code in range(f.max_code + 1)}
        known |= {-value: code for value, code in known.items()}
    ordered, x = sorted(known), numbers(f)[::37]
    x = x[x.abs() <= f.max]
    for given, got in zip(x.tolist(), round_to(x, f).tolist()):
        above = min(bisect_left(ordered, Fraction(given)), len(ordered) - 1)
        pair = ordered[max(above - 1, 0) : above + 1]
        even = lambda v: v > 0 if f.table else (int(v) if f.integer else known[v]) % 2
        expected = min(pair, key=lambda v: (abs(v - Fraction(given)), even(v)))
        near_tie = f.table and abs(2 * Fraction(given) - sum(pair)) < 1e-7  # boundaries are float32, too
        assert got == expected or near_tie, given


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16_1_6_9", "int4", "int8"])
def test_error_is_at_most_half_a_step(name):
    """Formats that nobody else has: the rounded number is one, and none is nearer."""
    f = FORMATS[name]
    x = numbers(f).double()
    x = x[x.abs() <= f.max]
    y = round_to(x, f)
    step = torch.exp2(torch.frexp(x.abs()).exponent - 1.0).clamp(2.0**f.min_exponent) * f.eps
    error = (y - x).abs()
    assert (error <= step / 2).all() and same(round_to(y, f).float(), y.float())
    assert (y.remainder(step) == 0).all()
    assert name == "fp32" or (error > 0.49 * step).any()
    assert same(round_to(x.float(), f), y.float())


@pytest.mark.parametrize("name", FLOATING)
def test_a_float64_is_rounded_once(name):
    """A tie and 2^-40 more: in two steps it is a tie again, and half of those go down."""
    f = EVERY[name]
    whole = every_value(f).double() if f.bits <= 8 else 1 + torch.arange(64).double() * f.eps
    whole = whole[whole.isfinite() & (whole >= f.smallest_normal) & (whole < f.max / 2)].unique()
    step = torch.exp2(torch.frexp(whole).exponent - 1.0) * f.eps
    just_above = (whole + step / 2) * (1 + 2.0**-40)
    assert torch.equal(round_to(just_above, f), whole + step)
    assert torch.equal(decode(encode(just_above, f), f).double(), whole + step)
    twice = round_to(just_above.float(), f).double()
    assert f.name in ("fp32", "e8m0") or ((twice == whole).sum() in (len(whole) // 2, (len(whole) + 1) // 2))


def test_half_precision_is_taken_as_float32():
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(500).to(dtype).requires_grad_()
        y = round_to(x, "e3m2")
        assert y.dtype == torch.float32 and not y.requires_grad
        assert torch.equal(y, round_to(x.float(), "e3m2"))
        assert torch.equal(encode(x, "e3m2"), encode(x.float(), "e3m2"))


def test_shapes_are_kept_and_nothing_is_written_into():
    for f in FORMATS.values():
        x = torch.rand(3, 5, 7).add(0.1).transpose(0, 2)
        before = x.clone()
        assert round_to(x, f).shape == encode(x, f).shape == decode(encode(x, f), f).shape == x.shape
        assert torch.equal(x, before) and torch.equal(decode(encode(x, f), f), round_to(x, f))
        assert decode(encode(x[:0], f), f).shape == (0, 5, 3)


# ---- overflow, by chance -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow(name, dtype):
    f = EVERY[name]
    wide = dtype == torch.float64 or f.exponent_bits < 8
    large = [f.max, math.inf] + ([f.max * 4] if wide else [])
    x = torch.tensor([*large, *(-v for v in large), math.nan], dtype=dtype)
    if not f.has_nan:
        x = x[:-1]
    got = {mode: round_to(x, f, overflow=mode).tolist() for mode in (None, "saturate")}
    assert got == {mode: decode(encode(x, f, overflow=mode), f).tolist() for mode in got} or f.has_nan
    n, beyond = len(large), math.inf if f.has_infinity else math.nan if f.has_nan else f.max
    sign = 1 if f.signed else math.nan
    as_told = [f.max] + [beyond] * (n - 1)
    expected = [*as_told, *(-v * sign for v in as_told)] + [math.nan] * f.has_nan
    assert numpy.array_equal(got[None], expected, equal_nan=True)
    expected = [f.max] * n + [-f.max * sign] * n + [math.nan] * f.has_nan
    assert numpy.array_equal(got["saturate"], expected, equal_nan=True)
    assert numpy.array_equal(decode(encode(x, f, overflow="saturate"), f), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e2m1", "hfp8_1_4_3", "int4", "fp16_1_6_9", "e8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_chance_is_right_on_average(name, dtype):
    """Each of 200 numbers 4,000 times: one of its two neighbours, the mean within 3 sigma of the number."""
    f, draws = FORMATS[name], 4000
    x = torch.linspace(0.3, 3.7, 200, dtype=dtype) * max(1.0, f.smallest_subnormal)
    gap = torch.exp2(torch.frexp(x).exponent - 1.0).clamp(2.0**f.min_exponent) * f.eps
    low, many = (x / gap).trunc() * gap, x.expand(draws, -1)
    y = round_to(many, f, "stochastic", generator=torch.Generator().manual_seed(7))
    assert ((y == low) | (y == low + gap)).all()
    share = (x - low) / gap
    sigma = gap * (share * (1 - share) / draws).sqrt()
    off = (y.double().mean(0) - x).abs() / sigma.clamp(min=1e-9)
    assert (off < 3).double().mean() > 0.98 and off.max() < 4.5
    total = (y.double().sum() - many.double().sum()).abs()
    assert total < 3 * draws * sigma.square().sum().sqrt(), "and all together within 3 sigma"
    again = round_to(many, f, "stochastic", generator=torch.Generator().manual_seed(7))
    other = round_to(many, f, "stochastic", generator=torch.Generator().manual_seed(8))
    assert torch.equal(y, again) and not torch.equal(y, other)
    codes = encode(many, f, "stochastic", generator=torch.Generator().manual_seed(7))
    assert torch.equal(decode(codes, f), y.float())
    exact = every_value(f) if f.bits <= 8 else x.bfloat16().float()
    exact = exact[exact.isfinite()]
    assert torch.equal(round_to(exact, f, "stochastic", generator=torch.Generator().manual_seed(1)), exact)
    assert torch.equal(round_to(exact, f, "stochastic", generator=torch.zeros_like(exact)), exact), (
        "a draw of 0"
    )


def test_half_a_step_above_the_largest_of_e4m3_is_the_largest():
    """464 is between 448, whose code is even, and what would be 480: a tie, as torch and ml_dtypes have it."""
    edge = torch.tensor([464.0, -464.0, 464.1, -464.1])
    for x in (edge, edge.double()):
        assert round_to(x, "e4m3")[:2].tolist() == [448, -448] and round_to(x, "e4m3")[2:].isnan().all()
        assert round_to(x, "e4m3", overflow="saturate").tolist() == [448, -448, 448, -448]


def test_weights_in_bf16_grow_by_chance_only():
    """1,000 updates of 1e-4 to weights of 1: all lost to nearest (half a step above 1 is 2^-8), kept by chance."""
    weight, update = torch.ones(2000, dtype=torch.bfloat16), torch.full((2000,), 1e-4)
    chance, nearest = torch.Generator().manual_seed(0), weight.clone()
    for _ in range(1000):
        assert add_stochastic_(weight, update, chance) is weight
        nearest.add_(update.bfloat16())
    assert (nearest == 1).all() and weight.dtype == torch.bfloat16
    step = 2.0**-7  # from 1 to 2; each update goes up with probability p = 1e-4 / step
    p = 1e-4 / step
    sigma = step * math.sqrt(1000 * p * (1 - p) / 2000)
    assert abs(weight.double().mean() - 1.1) < 3 * sigma
